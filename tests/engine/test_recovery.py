"""Captured steps: restored bit by bit and checked when read; steps that are not finite are skipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from detr_bf.classification.batch import ClassTargets, LabelledImages
from detr_bf.common import distributed
from detr_bf.common.errors import InputError, TrainingError
from detr_bf.common.structures import Batch, ClassMap
from detr_bf.engine.checkpoint import rng_state, set_rng_state
from detr_bf.engine.recovery import (
    MAX_CAPTURES,
    Capture,
    Fault,
    Recovery,
    StepStart,
    capture_step,
    find_fault,
    load_capture,
    report_fault,
    tensors_in,
)
from detr_bf.engine.run_folder import RunFolder
from detr_bf.engine.state import TrainingState
from detr_bf.engine.step import ReducedFlags, TrainingStep
from tests.detectors import tiny
from tests.engine import steps
from tests.engine.steps import Examples, batches, examples, regression, spoilt, squared_error, step_of
from tests.processes import run_together

CLASSES = ClassMap((3, 7, 90), ("cat", "dog", "bird"), (True, True, False))
CONFIG = {"seed": 1, "data": {"workers": 0, "train": {"images": "somewhere"}}, "strides": [8, 16], "init_from": None}


def batch_type(config: dict[str, Any]) -> type[Batch]:
    return Batch


def step(precision: torch.dtype = torch.float32) -> TrainingStep:
    """Two streams with dropout, and a head whose overflow breaks the loss."""
    broken = step_of(tiny.model(dropout=0.3, batch_former=tiny.batch_former()), precision)
    broken.model.decoder.heads.classes[0].bias.data[0] = math.inf
    return broken


def capture(of: TrainingStep, images: list[Batch], **changes: object) -> Capture:
    settings = {"number": 17, "class_map": CLASSES, "config": CONFIG, "scale": 2.0**16}
    return capture_step(of, images, rng_state(), **(settings | changes))


def assert_same(actual: object, expected: object) -> None:
    """Assert bitwise equality, NaN included, and equal types."""
    assert type(actual) is type(expected)
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert_same(list(actual.values()), list(expected.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif is_dataclass(expected):
        assert_same(
            {field.name: getattr(actual, field.name) for field in fields(actual)},
            {field.name: getattr(expected, field.name) for field in fields(expected)},
        )
    else:
        assert actual == expected or (actual != actual and expected != expected)


@pytest.mark.parametrize("masks", [False, True])
def test_a_capture_comes_back_from_its_file_as_it_was(tmp_path: Path, masks: bool) -> None:
    images = batches(2, masks=masks)
    before = capture(step(torch.bfloat16), images)
    before.save(tmp_path / "captures" / "a.pt")
    after = load_capture(tmp_path / "captures" / "a.pt", batch_type)
    assert_same(after, before)
    assert_same(list(after.batches), images)
    assert after.classes == CLASSES
    assert (after.step, after.rank, after.world_size, after.device) == (17, 0, 1, "cpu")
    assert (after.precision, after.scale, after.config) == (torch.bfloat16, 2.0**16, CONFIG)
    assert (after.threads, after.torch_version) == (torch.get_num_threads(), torch.__version__)
    assert str(Fault.from_dict(after.fault)) == str(Fault.from_dict(before.fault))


def test_the_loaded_step_runs_as_the_captured_one_did(tmp_path: Path) -> None:
    captured, images = step(), batches(2)
    rng = rng_state()
    losses = [captured(batch).losses for batch in images]
    set_rng_state(rng)
    capture(captured, images, scale=1.0).save(tmp_path / "a.pt")
    loaded = load_capture(tmp_path / "a.pt", batch_type)
    again = step()
    for parameter in again.parameters():
        torch.nn.init.zeros_(parameter)
    again.model.load_state_dict(loaded.model)
    torch.rand(5)
    fault = find_fault(again, loaded.batches, loaded.rng)
    terms = [{name: value for name, value in found.items() if name != "total"} for found in fault.losses]
    assert_same(terms, [{name: value.item() for name, value in one.items()} for one in losses])
    assert_same(asdict(fault), loaded.fault)
    assert fault.module is not None
    assert fault.module.name == "decoder.heads.classes.0"


def test_a_capture_copies_the_weights() -> None:
    captured = step()
    before = {name: value.clone() for name, value in captured.model.state_dict().items()}
    kept = capture(captured, batches())
    for parameter in captured.parameters():
        parameter.data.fill_(7)
    assert_same(kept.model, before)


def test_without_a_backward_pass_gradients_are_not_reported() -> None:
    fault = Fault.from_dict(capture(step(), batches(), with_backward=False).fault)
    assert (fault.gradients, fault.gradient_norm, fault.bad_gradient_at) == (None, None, None)
    assert fault.found
    assert fault.backward_lines() == []


def test_a_file_holds_tensors_and_plain_values_only(tmp_path: Path) -> None:
    capture(step(), batches()).save(tmp_path / "a.pt")
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    assert {tensor.device.type for tensor in tensors_in(content)} == {"cpu"}
    assert content["batches"][0]["images"].dtype == torch.uint8
    assert [target["file_name"] for target in content["batches"][0]["targets"]] == ["00.png", "01.png"]


def test_a_failed_save_leaves_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, kept = tmp_path / "a.pt", capture(step(), batches())
    path.write_bytes(b"before")

    def full_disk(content: object, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space"):
        kept.save(path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [[1, 2], {"model": {}, "format": 1}])
def test_files_of_other_programs_are_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(InputError, match=r"other\.pt is not a captured step of detr_bf, format 1: give a file"):
        load_capture(tmp_path / "other.pt", batch_type)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    capture(step(), batches()).save(tmp_path / "a.pt")
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    torch.save(content | {"format": 2}, tmp_path / "a.pt")
    with pytest.raises(InputError, match="format 1"):
        load_capture(tmp_path / "a.pt", batch_type)


def first(content: dict[str, Any]) -> dict[str, Any]:
    """Return the first batch."""
    batch: dict[str, Any] = content["batches"][0]
    return batch


DAMAGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "no batches": lambda content: content.update(batches=[]),
    "an unknown entry": lambda content: first(content).update(kind="os.system"),
    "no images": lambda content: first(content).update(images=None),
    "images on meta": lambda content: first(content).update(images=first(content)["images"].to("meta")),
    "images of doubles": lambda content: first(content).update(images=first(content)["images"].double()),
    "too small a mask": lambda content: first(content).update(padding_mask=first(content)["padding_mask"][:, :3]),
    "a target too few": lambda content: first(content).update(targets=first(content)["targets"][:1]),
    "a label of no class": lambda content: first(content)["targets"][0]["labels"].add_(10_000),
    "a negative label": lambda content: first(content)["targets"][0]["labels"].sub_(10),
    "a box too few": lambda content: first(content)["targets"][0].update(boxes=torch.rand(2, 4)),
    "masks of another size": lambda content: first(content)["targets"][1].update(masks=torch.ones(1, 3, 3).bool()),
    "an image larger than the batch": lambda content: first(content)["targets"][0].update(size=(33, 48)),
    "losses of text": lambda content: content["fault"]["losses"][0].update(loss_ce="x"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_batches_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.pt"
    capture(step(), batches()).save(path)
    content = torch.load(path, weights_only=True)
    DAMAGED[name](content)
    torch.save(content, path)
    with pytest.raises(InputError, match=r"a\.pt is a damaged capture of detr_bf"):
        load_capture(path, batch_type)


@pytest.mark.parametrize(
    "changes",
    [
        {"images": torch.rand(2, 1, 4, 4)},
        {"images": torch.rand(2, 3, 16)},
        {"indices": torch.arange(3)},
        {"targets": ClassTargets(torch.tensor([0, 3]))},
        {"targets": ClassTargets(torch.tensor([0, 2]), soft_labels=torch.rand(2, 4))},
        {"targets": ClassTargets(torch.tensor([0, 2]), patch_labels=torch.tensor([[0], [3]]))},
    ],
)
def test_batches_of_classifiers_are_checked_too(tmp_path: Path, changes: dict[str, Any]) -> None:
    targets = ClassTargets(torch.tensor([0, 2]), torch.rand(2, 3), torch.tensor([[0, 1], [1, 2]]))
    sound = LabelledImages(torch.rand(2, 3, 4, 4), targets, torch.arange(2))
    kept = capture(step(), batches())
    replace(kept, batches=(sound,)).save(tmp_path / "a.pt")
    assert_same(load_capture(tmp_path / "a.pt", lambda config: LabelledImages).batches, (sound,))
    replace(kept, batches=(replace(sound, **changes),)).save(tmp_path / "a.pt")
    with pytest.raises(InputError, match=r"a\.pt is a damaged capture"):
        load_capture(tmp_path / "a.pt", lambda config: LabelledImages)


def test_text_of_a_capture_is_made_printable(tmp_path: Path) -> None:
    kept, text = capture(step(), batches()), "\x1b[2J\nFORGED"
    fault = kept.fault | {"targets": [text]}
    (batch,) = kept.batches
    batch = replace(batch, targets=tuple(replace(target, file_name=text) for target in batch.targets))
    replace(kept, torch_version=text, device=text, fault=fault, batches=(batch,)).save(tmp_path / "a.pt")
    loaded = load_capture(tmp_path / "a.pt", batch_type)
    shown = r"\x1b[2J\nFORGED"
    assert (loaded.torch_version, loaded.device, loaded.fault["targets"]) == (shown, shown, [shown])
    assert loaded.batches[0].names == (shown, shown)


def test_truncated_and_changed_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with pytest.raises(InputError, match="file not found"):
        load_capture(path, batch_type)
    capture(step(), batches()).save(path)
    whole = path.read_bytes()
    for offset in (len(whole) // 3, 2 * len(whole) // 3):
        path.write_bytes(whole[:offset])
        with pytest.raises(InputError, match=r"a\.pt is truncated or damaged"):
            load_capture(path, batch_type)
    weight = step().model.encoder.layers[0].feed_forward.expand.weight.detach().numpy().tobytes()
    offset = whole.index(weight)
    path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
    with pytest.raises(InputError, match=r"a\.pt is damaged"):
        load_capture(path, batch_type)


def test_a_step_that_is_finite_again_is_not_saved(tmp_path: Path) -> None:
    healthy = step_of(tiny.model())
    report = report_fault(capture(healthy, batches()), tmp_path / "a.pt")
    assert report.startswith("the loss or the gradient of step 17 is not finite\nrun again, everything is finite")
    assert not (tmp_path / "a.pt").exists()


def reported(folder: Path) -> str:
    """Capture and report a fault that only rank 1 has."""
    of = step_of(tiny.model())
    of.model.decoder.heads.classes[0].bias.data[0] = (0.0, math.inf)[distributed.rank()]
    return report_fault(capture(of, batches()), folder / f"{distributed.rank()}.pt")


def test_the_ranks_with_a_fault_save_captures_and_all_ranks_report_it(tmp_path: Path) -> None:
    first, second = run_together(2, reported, tmp_path)
    assert first == second
    assert first.splitlines()[:2] == [
        "the loss or the gradient of step 17 is not finite",
        "rank 1, images 00.png, 01.png",
    ]
    assert first.endswith(f"captured in {tmp_path / '1.pt'}; run it again with detr-bf replay")
    assert "decoder.heads.classes.0 (Linear)" in first
    assert list(tmp_path.iterdir()) == [tmp_path / "1.pt"]
    saved = load_capture(tmp_path / "1.pt", batch_type)
    assert (saved.rank, saved.world_size) == (1, 2)
    assert report_fault(saved, None).count("captured in") == 0


def recovery(folder: Path, max_skipped: int = 2, max_replaced: float = 1.0) -> Recovery:
    """Recovery of a regression with batch norm, trained by SGD."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(steps.FEATURES), regression())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    state = TrainingState(
        model,
        None,
        optimizer,
        scaler,
        folder=RunFolder(folder),
        class_map=steps.CLASSES,
        config={"of": "a test"},
        data={},
    )
    toy = TrainingStep(model, squared_error, torch.device("cpu"), torch.float32)
    return Recovery(toy, state, max_skipped=max_skipped, max_replaced=max_replaced)


def begun(toy: Recovery) -> StepStart:
    """Begin a step and count it, as the trainer does before it checks the step."""
    toy.state.progress.step += 1
    return toy.begin_step()


def test_a_skipped_step_is_counted_and_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    toy = recovery(tmp_path)
    before = {name: value.clone() for name, value in toy.step.model.state_dict().items()}
    start = begun(toy)
    toy.step(spoilt(0, 1)).total.backward()
    toy.skip_step(start, [spoilt(0, 1)], with_backward=True)
    assert (toy.state.progress.step, toy.state.progress.skipped) == (1, 1)
    assert_same(dict(toy.step.model.state_dict()), before)
    assert all(parameter.grad is None for parameter in toy.step.parameters())
    assert "images 0-1-0, 0-1-1, 0-1-2, 0-1-3" in caplog.text
    assert "The step is skipped, 1 of 2." in caplog.text
    captured = load_capture(tmp_path / "captures" / "step_0000001_rank_0.pt", lambda config: Examples)
    assert_same(captured.batches, (spoilt(0, 1),))
    assert_same(captured.model, before)


def test_a_capture_of_a_skipped_step_has_its_random_states(tmp_path: Path) -> None:
    toy = recovery(tmp_path)
    rng = rng_state()
    start = begun(toy)
    toy.step(spoilt(0, 1))  # dropout
    toy.skip_step(start, [spoilt(0, 1)], with_backward=False)
    captured = load_capture(tmp_path / "captures" / "step_0000001_rank_0.pt", lambda config: Examples)
    assert_same(captured.rng, rng)
    assert captured.fault["gradients"] is None


def test_more_skipped_steps_than_allowed_end_the_training(tmp_path: Path) -> None:
    toy = recovery(tmp_path, max_skipped=4)
    for _ in range(4):
        start = begun(toy)
        toy.skip_step(start, [spoilt(0, 1)], with_backward=False)
    assert len(list((tmp_path / "captures").iterdir())) == MAX_CAPTURES
    start = begun(toy)
    with pytest.raises(TrainingError, match=r"step 5 is not finite(.|\n)*train\.max_skipped=N") as ended:
        toy.skip_step(start, [spoilt(0, 1)], with_backward=False)
    assert ended.value.on_all_ranks


def test_unreadable_images_are_logged_and_limited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    toy = recovery(tmp_path, max_replaced=3)
    batch = replace(examples(0, 0), replaced=("lost.jpg does not exist",))
    toy.count_unreadable(batch, ReducedFlags(1.0, 0.0, 0.0, 0.0, replaced=3.0))
    assert toy.state.progress.replaced == 3
    assert "another image replaces one that cannot be read: lost.jpg does not exist" in caplog.text
    toy.count_unreadable(examples(0, 1), ReducedFlags(1.0, 0.0, 0.0, 0.0, replaced=0.0))
    with pytest.raises(TrainingError, match=r"4 images of this epoch .*data\.max_unreadable allows 3.*last\.pt"):
        toy.count_unreadable(batch, ReducedFlags(1.0, 0.0, 0.0, 0.0, replaced=1.0))
