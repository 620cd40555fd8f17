from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from detr_bf.data.batches import EpochBatches, SameSizeBatches
from detr_bf.data.coco import CocoDetection
X
from detr_bf.data.sample_key import SampleKey
from detr_bf.data.transforms import train_transform
from detr_bf.errors import InputError, TrainingError
from detr_bf.structures import Batch, Target

Factory = Callable[..., SimpleNamespace]
TRAINING = train_transform(
    short_sides=[40, 50, 60],
    max_size=100,
    horizontal_flip=0.5,
    random_crop=0.5,
    crop_short_sides=[40, 60],
    crop_min=20,
    crop_max=40,
)


def load(data: SimpleNamespace, batch_size: int = 2, workers: int = 0, epoch: int = 1, start: int = 0) -> list[Batch]:
    dataset = CocoDetection(data.images, data.annotations, TRAINING, seed=5)
    chosen = EpochBatches(len(dataset), batch_size, seed=5, epoch=epoch, start_batch=start)
    return list(make_loader(dataset, chosen, collate=Batch.collate, workers=workers))


def assert_same(first: list[Batch], second: list[Batch]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.padding_mask, other.padding_mask)
        assert [target.image_id for target in one.targets] == [target.image_id for target in other.targets]
        for target, same in zip(one.targets, other.targets, strict=True):
            assert torch.equal(target.boxes, same.boxes)
            assert torch.equal(target.labels, same.labels)


def test_pixels_do_not_depend_on_workers_or_on_where_one_starts(coco_folder: Factory) -> None:
    data = coco_folder(num_images=9)
    alone = load(data)
    assert len(alone) == 4
    torch.manual_seed(1234)
    assert_same(load(data, workers=2), alone)
    assert_same(load(data, workers=2, start=1), alone[1:])


def test_another_epoch_sees_other_pixels(coco_folder: Factory) -> None:
    data = coco_folder(num_images=4)
    first, second = (
        {batch.targets[0].image_id: batch.images.shape for batch in load(data, batch_size=1, epoch=epoch)}
        for epoch in (1, 2)
    )
    assert first.keys() == second.keys()
    assert first != second


def test_fewer_images_than_a_batch(coco_folder: Factory) -> None:
    assert [len(batch) for batch in load(coco_folder(num_images=2), batch_size=8)] == [2]


@pytest.mark.parametrize("workers", [0, 1])
def test_iterating_leaves_the_global_generator_alone(coco_folder: Factory, workers: int) -> None:
    data = coco_folder(num_images=2)
    state = torch.get_rng_state()
    load(data, workers=workers)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named_without_a_traceback(coco_folder: Factory, workers: int) -> None:
    data = coco_folder(num_images=2)
    (data.images / "0002.png").write_bytes(b"broken")
    with pytest.raises(InputError) as caught:
        load(data, workers=workers)
    assert str(caught.value).startswith(f"image file {data.images / '0002.png'} cannot be used")
    assert "Traceback" not in str(caught.value)


class Interrupting(CocoDetection):
    """Every sample comes with a Ctrl-C for the process that loads it."""

    def __getitem__(self, key: SampleKey) -> tuple[torch.Tensor, Target]:
        os.kill(os.getpid(), signal.SIGINT)
        return super().__getitem__(key)


def test_workers_outlive_ctrl_c(coco_folder: Factory) -> None:
    data = coco_folder(num_images=2)
    dataset = Interrupting(data.images, data.annotations, TRAINING)
    loader = make_loader(dataset, SameSizeBatches(dataset.sizes, 1), collate=Batch.collate, workers=1)
    assert len(list(loader)) == 2


def replacing(data: SimpleNamespace, **changes: object) -> CocoDetection:
    return CocoDetection(data.images, data.annotations, TRAINING, seed=5, replace_unreadable=True, **changes)


def load_all(dataset: CocoDetection, workers: int = 0, epoch: int = 1) -> list[Batch]:
    chosen = EpochBatches(len(dataset), 2, seed=5, epoch=epoch)
    return list(make_loader(dataset, chosen, collate=Batch.collate, workers=workers))


def test_another_image_stands_in_for_one_that_cannot_be_read(coco_folder: Factory) -> None:
    data = coco_folder(num_images=8)
    whole = load_all(replacing(data))
    assert [batch.replaced for batch in whole] == [()] * 4
    assert_same(
        whole,
        load(data),
    )
    broken = data.images / "0003.png"
    broken.write_bytes(b"broken")
    mended = load_all(replacing(data))
    for before, after in zip(whole, mended, strict=True):
        for target, other in zip(before.targets, after.targets, strict=True):
            if target.image_id == 3:
                assert other.image_id != 3
                assert other.file_name == f"{other.image_id:04d}.png"
                assert other.replaced.startswith(f"image file {broken} cannot be used")
            else:
                assert (other.image_id, other.replaced) == (target.image_id, "")
                assert torch.equal(other.boxes, target.boxes)
    [message] = [message for batch in mended for message in batch.to("cpu").replaced]
    assert str(broken) in message


def test_who_stands_in_depends_on_seed_epoch_and_place_alone(coco_folder: Factory) -> None:
    data = coco_folder(num_images=8)
    for image_id in (2, 3, 5, 8):
        (data.images / f"{image_id:04d}.png").unlink()
    alone = load_all(replacing(data))
    assert sum(len(batch.replaced) for batch in alone) == 4
    assert_same(load_all(replacing(data), workers=2), alone)
    samples = replacing(data)
    stand_ins = [samples[SampleKey(epoch, 1)][1].image_id for epoch in range(30)]
    assert set(stand_ins) == {1, 4, 6, 7}


def test_a_stand_in_is_augmented_as_the_image_asked_for(coco_folder: Factory) -> None:
    """Asked for itself in the same epoch, it looks otherwise."""
    data = coco_folder(num_images=2)
    sizes = [[replacing(data)[SampleKey(epoch, place)][1].size for place in range(2)] for epoch in range(10)]
    (data.images / "0001.png").unlink()
    samples = replacing(data)
    for epoch, (asked_for, _) in enumerate(sizes):
        _, target = samples[SampleKey(epoch, 0)]
        assert target.image_id == 2
        assert target.size == asked_for
    assert sum(first != second for first, second in sizes) > 3


def test_unreadable_masks_are_replaced_too(panoptic_folder: Factory) -> None:
    data = panoptic_folder(num_images=3)
    samples = replacing(data, masks=True, panoptic=data.panoptic)
    (data.panoptic / "0001_segments.png").write_bytes(b"broken")
    _, target = samples[SampleKey(0, 0)]
    assert target.image_id in (2, 3)
    assert "image 1, 0001.png has no usable masks" in target.replaced
    with pytest.raises(InputError, match="has no usable masks"):
        CocoDetection(data.images, data.annotations, TRAINING, masks=True, panoptic=data.panoptic)[SampleKey(0, 0)]


def test_only_reading_is_tried_with_another_image(coco_folder: Factory) -> None:
    def transform(sample: object) -> None:
        raise InputError("a fault of the transform")

    samples = replacing(coco_folder())
    samples.transform = transform
    with pytest.raises(InputError, match="a fault of the transform"):
        samples[SampleKey(0, 0)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_without_readable_images_is_no_data_set(coco_folder: Factory, workers: int) -> None:
    data = coco_folder(num_images=2)
    for file in data.images.iterdir():
        file.unlink()
    with pytest.raises(InputError, match=r"image file .*000[12].png does not exist"):
        load_all(replacing(data), workers)


def kill_a_worker(number: int = 0) -> None:
    """One of them; returns when it is dead."""
    worker = sorted(multiprocessing.active_children(), key=lambda child: child.pid)[number]
    os.kill(worker.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)


def maker(dataset: CocoDetection, starts: list[int], workers: int = 2) -> Callable[[int], Iterator[Batch]]:
    """What ``steady`` calls; ``starts`` collects with what."""

    def make(start: int) -> Iterator[Batch]:
        assert not multiprocessing.active_children(), "the workers of the last iterator have ended"
        starts.append(start)
        chosen = EpochBatches(len(dataset), 2, seed=5, epoch=1, start_batch=start)
        return iter(make_loader(dataset, chosen, collate=Batch.collate, workers=workers))

    return make


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_worker_changes_no_batch(coco_folder: Factory, victim: int, caplog: pytest.LogCaptureFixture) -> None:
    data = coco_folder(num_images=12)
    dataset = CocoDetection(data.images, data.annotations, TRAINING, seed=5)
    starts: list[int] = []
    found = []
    for batch in steady(maker(dataset, starts), 1):
        found.append(batch)
        if len(found) == victim + 1 and len(starts) == 1:
            kill_a_worker()
            sum(range(1_000_000))  # time in which a signal's handler would be called
    assert_same(found, load(data)[1:])
    assert starts == [1, victim + 2]
    assert "was killed by signal 9 (Killed): out of memory" in caplog.text
    assert "data.workers" in caplog.text


class Deadly(CocoDetection):
    """Loading one image kills the worker, the first ``lives`` times; ``grave`` counts."""

    grave: Path
    lives = 1
    place = 4

    def __getitem__(self, key: SampleKey) -> tuple[torch.Tensor, Target]:
        deaths = len(list(self.grave.iterdir()))
        if key.place == self.place and deaths < self.lives:
            (self.grave / str(deaths)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(key)


def deadly(data: SimpleNamespace, tmp_path: Path, lives: int) -> Deadly:
    dataset = Deadly(data.images, data.annotations, TRAINING, seed=5)
    dataset.grave, dataset.lives = tmp_path / "grave", lives
    dataset.grave.mkdir()
    return dataset


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_dies_while_its_batch_is_waited_for(coco_folder: Factory, tmp_path: Path, workers: int) -> None:
    data = coco_folder(num_images=12)
    starts: list[int] = []
    began = time.monotonic()
    found = list(steady(maker(deadly(data, tmp_path, MAX_DEATHS - 1), starts, workers), 0))
    assert time.monotonic() - began < 9, "DataLoader itself looks every five seconds"
    assert_same(found, load(data))
    assert len(starts) == MAX_DEATHS


def test_workers_that_keep_dying_end_the_training(coco_folder: Factory, tmp_path: Path) -> None:
    dataset = deadly(coco_folder(num_images=12), tmp_path, 1000)
    dataset.place = next(iter(EpochBatches(len(dataset), 2, seed=5, epoch=1)))[0].place  # no batch comes in between
    starts: list[int] = []
    with pytest.raises(TrainingError, match=rf"died {MAX_DEATHS} times .* was killed by signal 9 .*data.workers"):
        list(steady(maker(dataset, starts), 0))
    assert len(starts) == MAX_DEATHS
    assert not multiprocessing.active_children()


def test_deaths_with_batches_in_between_do_not_add_up(coco_folder: Factory) -> None:
    data = coco_folder(num_images=12)
    dataset = CocoDetection(data.images, data.annotations, TRAINING, seed=5)
    starts: list[int] = []
    found = []
    for batch in steady(maker(dataset, starts), 0):
        found.append(batch)
        if len(found) < 6:
            kill_a_worker()
    assert_same(found, load(data))
    assert starts == [0, 1, 2, 3, 4, 5]


def test_a_worker_that_dies_after_the_last_batch_is_no_loss(coco_folder: Factory) -> None:
    data = coco_folder(num_images=4)
    dataset = CocoDetection(data.images, data.annotations, TRAINING, seed=5)
    batches = iter(make_loader(dataset, EpochBatches(4, 2, seed=5, epoch=1), collate=Batch.collate, workers=1))
    found = [next(batches), next(batches)]
    kill_a_worker()
    assert next(batches, None) is None
    assert_same(found, load(data))


class Wordy(CocoDetection):
    """Samples whose messages do not fit into the pipe at once."""

    def __getitem__(self, key: SampleKey) -> tuple[torch.Tensor, Target]:
        image, target = super().__getitem__(key)
        return image, replace(target, file_name="x" * 1_000_000)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_killed_in_the_middle_of_a_message(coco_folder: Factory, victim: int) -> None:
    """Its reader would wait for the rest for ever, and the other worker for its turn to write."""
    data = coco_folder(num_images=12)
    dataset = Wordy(data.images, data.annotations, TRAINING, seed=5)
    starts: list[int] = []
    batches = steady(maker(dataset, starts), 0)
    found = [next(batches)]
    time.sleep(1)  # until one writes and the other waits
    kill_a_worker(victim)
    assert_same([*found, *batches], load(data))
    assert starts == [0, 1]


def test_a_death_is_found_outside_the_main_thread_too(coco_folder: Factory, tmp_path: Path) -> None:
    data = coco_folder(num_images=12)
    dataset, found = deadly(data, tmp_path, 1), []
    starts: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(steady(maker(dataset, starts), 0)))
    thread.start()
    thread.join(60)
    assert_same(found, load(data))
    assert len(starts) == 2


def test_a_death_is_told_to_whoever_wants_no_second_try(coco_folder: Factory, tmp_path: Path) -> None:
    dataset = deadly(coco_folder(num_images=12), tmp_path, 1)
    with pytest.raises(WorkerDiedError, match=r"loader process \d+ was killed by signal 9 \(Killed\)"):
        load_all(dataset, workers=2)
    assert not multiprocessing.active_children()


class Leaving(CocoDetection):
    """Its worker ends by itself."""

    def __getitem__(self, key: SampleKey) -> tuple[torch.Tensor, Target]:
        os._exit(7)


def test_the_exit_code_of_a_death_is_told(coco_folder: Factory) -> None:
    data = coco_folder()
    with pytest.raises(WorkerDiedError, match="ended with exit code 7"):
        load_all(Leaving(data.images, data.annotations, TRAINING), workers=1)


@pytest.mark.parametrize("workers", [0, 1])
def test_other_faults_are_not_tried_again(coco_folder: Factory, workers: int) -> None:
    data = coco_folder(num_images=12)
    dataset = CocoDetection(data.images, data.annotations, TRAINING, seed=5)
    dataset.file_names.pop()
    starts: list[int] = []
    with pytest.raises(IndexError):
        list(steady(maker(dataset, starts, workers), 0))
    assert starts == [0]


def test_the_handler_of_sigchld_stays_who_it_was(coco_folder: Factory, tmp_path: Path) -> None:
    calls = []
    before = signal.signal(signal.SIGCHLD, mine := lambda number, frame: calls.append(number))
    try:
        data = coco_folder(num_images=12)
        list(steady(maker(deadly(data, tmp_path, 1), []), 0))
        assert signal.getsignal(signal.SIGCHLD) is mine
        assert calls
    finally:
        signal.signal(signal.SIGCHLD, before)
