"""Runs of one seed that differ in batch attention or mixup start from the same weights and see the same images."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from detr_bf.common.structures import Batch
from detr_bf.config import load_config
from detr_bf.detectors import DETECTORS
from detr_bf.engine import RunFolder, Trainer
from detr_bf.tasks import task_of

ARMS = {
    "two_stream": ["batch_former.enabled=true"],
    "duplicate": ["batch_former.enabled=true", "batch_former.mode=duplicate"],
    "self_only": ["batch_former.enabled=true", "batch_former.mode=self_only"],
    "single_stream": ["batch_former.enabled=true", "batch_former.mode=single_stream"],
    "mixup": ["data.mixup.prob=1"],
    "until_epoch": ["batch_former.enabled=true", "batch_former.until_epoch=2"],
    "after": ["batch_former.enabled=true", "batch_former.position=after"],
    "last_layer": ["batch_former.enabled=true", "batch_former.layers=[1]"],
    "both_layers": ["batch_former.enabled=true", "batch_former.layers=[0,1]", "batch_former.shared=false"],
    "dropout": ["batch_former.enabled=true", "batch_former.dropout=0", "batch_former.lr_factor=0.1"],
    "groups": ["batch_former.enabled=true", "batch_former.group_size=2"],
    "neighbours": ["batch_former.enabled=true", "batch_former.neighbours=1"],
    "kept_streams": ["batch_former.enabled=true", "batch_former.until_epoch=2", "batch_former.keep_streams=true"],
    "queries": ["batch_former.enabled=true", "batch_former.at=queries", "batch_former.layers=[1]"],
    "longer": ["train.epochs=9"],
    "batch_size": ["train.batch_size=2", "optimizer.lr=1e-5"],
}
SMALL = [
    "batch_former.enabled=false",
    "model.hidden_dim=32",
    "model.heads=2",
    "model.encoder_layers=2",
    "model.decoder_layers=2",
    "model.feedforward_dim=32",
    "model.num_queries=6",
    "model.backbone={name: resnet18, weights: none, strides: [8]}",
    "data.transforms={short_sides: [32,40], max_size: 64, eval_short_side: 32, crop_short_sides: [40], crop_min: 24}",
    "data.workers=0",
    "train.batch_size=4",
]


@pytest.fixture
def trainer_of(tmp_path: Path, coco_folder: Callable[..., SimpleNamespace]) -> Callable[..., Trainer]:
    train = coco_folder(num_images=12, name="train")
    val = coco_folder(num_images=2, name="val", first_image_id=101)
    data = [
        f"data.{name}.{key}={getattr(split, key)}"
        for name, split in (("train", train), ("val", val))
        for key in ("images", "annotations")
    ]

    def build(*overrides: str) -> Trainer:
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        config = load_config(None, [*SMALL, *data, *overrides, f"output_dir={folder}"])
        return task_of(config).build_trainer(RunFolder(folder))

    return build


def samples(trainer: Trainer, count: int) -> list[tuple[Any, ...]]:
    """Return image id, pixels, boxes and labels of the first ``count`` samples of epoch 1."""
    found = []
    for batch in trainer.make_batches(1, 0):
        assert isinstance(batch, Batch)
        for pixels, target in zip(batch.images, batch.targets, strict=True):
            height, width = target.size
            found.append((target.image_id, pixels[:, :height, :width], target.boxes, target.labels))
    return list(islice(found, count))


@pytest.mark.parametrize("arm", ARMS)
def test_same_weights_and_data_as_without(arm: str, trainer_of: Callable[..., Trainer]) -> None:
    plain, other = trainer_of(), trainer_of(*ARMS[arm])
    weights, others = plain.model.state_dict(), other.model.state_dict()
    assert weights.keys() <= others.keys()
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    assert all("batch_former" in name for name in others.keys() - weights.keys())
    for before, after in zip(samples(plain, 8), samples(other, 8), strict=True):
        assert before[0] == after[0]
        if arm == "mixup":  # the objects of the image itself come first
            count = len(before[3])
            assert torch.equal(before[3], after[3][:count])
            assert len(after[3]) > count
            corners = [boxes * torch.tensor(pixels.shape[:0:-1] * 2) for pixels, boxes in (before[1:3], after[1:3])]
            torch.testing.assert_close(corners[0], corners[1][:count])  # the canvas may have grown, the boxes not
            height, width = before[1].shape[1:]
            assert not torch.equal(before[1], after[1][:, :height, :width])
        else:
            assert all(torch.equal(x, y) for x, y in zip(before[1:], after[1:], strict=True))


def test_another_seed_gives_other_weights_and_data(trainer_of: Callable[..., Trainer]) -> None:
    one, two = trainer_of("seed=1"), trainer_of("seed=2")
    pairs = zip(one.model.parameters(), two.model.parameters(), strict=True)
    assert any(not torch.equal(x, y) for x, y in pairs)
    assert [sample[0] for sample in samples(one, 8)] != [sample[0] for sample in samples(two, 8)]


def test_batch_attention_starts_from_other_weights_with_another_seed(trainer_of: Callable[..., Trainer]) -> None:
    first, again, other = (trainer_of("batch_former.enabled=true", f"seed={seed}") for seed in (1, 1, 2))
    states = [trainer.model.encoder.batch_former.state_dict() for trainer in (first, again, other)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    name = "mixers.shared.layers.0.linear1.weight"
    assert not torch.equal(states[0][name], states[2][name])


@pytest.mark.parametrize("name", DETECTORS)
def test_every_detector_starts_alike_with_and_without(name: str) -> None:
    from detr_bf.assembly import build_model

    settings = [setting for setting in SMALL if not setting.startswith("batch_former")]
    settings.append("loss.classification=focal")  # every detector has it
    if name == "smca_multi_scale":
        settings.append("model.backbone.strides=[8,16,32]")
    if name == "rfdetr":
        settings.append("model.encoder_layers=0")
    states = []
    queries = ["batch_former.at=queries", "batch_former.layers=[1]"]
    for changes in (["batch_former.enabled=false"], ["batch_former.enabled=true"], queries):
        config = load_config(None, [*settings, f"model.name={name}", "batch_former.enabled=true", *changes])
        torch.manual_seed(config.seed)
        states.append(build_model(config, num_classes=3).state_dict())
    for state, part in zip(states[1:], ("encoder.", "decoder."), strict=True):
        assert all(torch.equal(value, state[key]) for key, value in states[0].items())
        added = state.keys() - states[0].keys()
        assert added
        assert all(key.startswith(part) and ".batch_former.mixers.shared." in f".{key}" for key in added)


def test_plain_epochs_have_neither_mixup_nor_sides_of_batches(trainer_of: Callable[..., Trainer]) -> None:
    shared = ["data.transforms.max_size=200", "data.transforms.random_crop=0", "train.epochs=5"]
    settings = [*shared, "data.mixup.prob=1", "data.batch_sides=[64]"]
    stages = ["data.plain_first_epochs=1", "data.plain_last_epochs=1", "data.augment.until_epoch=3"]
    trainer = trainer_of(*settings, *stages)
    epochs = [list(trainer.make_batches(epoch, 0)) for epoch in range(5)]
    mixed = [all(len(target.labels) > 2 for batch in batches for target in batch.targets) for batches in epochs]
    assert mixed == [False, True, True, False, False]
    sided = [all(min(target.size) == 64 for batch in batches for target in batch.targets) for batches in epochs]
    assert sided == [True, True, True, True, False]
    by_time = list(trainer.make_batches(9, 0, 1))  # the augmentation of epoch 1, with other random numbers
    assert all(len(target.labels) > 2 and min(target.size) == 64 for batch in by_time for target in batch.targets)
    assert not torch.equal(by_time[0].images, epochs[1][0].images)
    plain = list(trainer_of(*shared).make_batches(4, 0))
    assert all(torch.equal(x.images, y.images) for x, y in zip(epochs[4], plain, strict=True))


def test_the_steps_of_a_run_by_time_choose_its_numbers(trainer_of: Callable[..., Trainer]) -> None:
    auto = ("optimizer.warmup_steps=auto", "train.ema.enabled=true", "train.ema.decay=auto")
    trainer = trainer_of("train.minutes=5", *auto)
    assert (trainer.settings.minutes, trainer.total_steps) == (5, None)
    assert trainer.reschedule is not None
    found = trainer.reschedule(300)
    rate = found.learning_rate
    assert (rate.total_steps, rate.warmup_steps, found.ema_decay) == (300, 30, 0.98)
    assert list(found.rates) == [group["base_lr"] for group in trainer.optimizer.param_groups]


def test_a_run_by_time_warns_once_its_steps_are_known(
    trainer_of: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of("train.minutes=5", "train.epochs=2", "optimizer.warmup_steps=3000")
    assert "optimizer." not in caplog.text, "nothing about a number of steps that is not known"
    assert trainer.reschedule is not None
    trainer.reschedule(300)
    assert "the warm-up of 3000 steps would not be over when train.minutes=5 are, after 300 steps" in caplog.text
    assert caplog.text.count("never falls in train.epochs=2") == 1


def test_mixup_is_a_function_of_seed_epoch_and_batch(trainer_of: Callable[..., Trainer]) -> None:
    trainer = trainer_of("data.mixup.prob=0.5")
    whole, rest = list(trainer.make_batches(0, 0)), list(trainer.make_batches(0, 1))
    assert len(rest) == len(whole) - 1
    assert all(torch.equal(x.images, y.images) for x, y in zip(whole[1:], rest, strict=True))
    plain = list(trainer_of().make_batches(0, 0))
    epochs = [list(trainer.make_batches(epoch, 0)) for epoch in range(6)]
    mixed = [len(x.targets[0].labels) > 2 for batches in epochs for x in batches]  # every image has two objects
    assert any(mixed)
    assert not all(mixed)
    assert [t.image_id for b in plain for t in b.targets] == [t.image_id for b in whole for t in b.targets]
