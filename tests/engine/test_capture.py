"""Captured steps: everything comes back as it was, and nothing else is taken for one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from detr_bf import distributed
from detr_bf.engine.capture import Capture, capture_step, load_capture, told_together
from detr_bf.engine.checkpoint import rng_state, set_rng_state
from detr_bf.engine.fault import Fault, find_fault, tensors_in
from detr_bf.engine.step import TrainingStep
from detr_bf.errors import InputError
from detr_bf.labelled import ClassTargets, LabelledImages
from detr_bf.structures import Batch, ClassMap
from tests.detectors import tiny
from tests.engine.steps import batches, step_of
from tests.processes import run_together

CLASSES = ClassMap((3, 7, 90), ("cat", "dog", "bird"), (True, True, False))
CONFIG = {"seed": 1, "data": {"workers": 0, "train": {"images": "somewhere"}}, "strides": [8, 16], "init_from": None}


def step(precision: torch.dtype = torch.float32) -> TrainingStep:
    """Two streams with dropout, and a head whose overflow breaks the loss."""
    broken = step_of(tiny.model(dropout=0.3, batch_former=tiny.batch_former()), precision)
    broken.model.decoder.heads.classes[0].bias.data[0] = math.inf
    return broken


def capture(of: TrainingStep, images: list[Batch], **changes: object) -> Capture:
    settings = {"number": 17, "class_map": CLASSES, "config": CONFIG, "scale": 2.0**16}
    return capture_step(of, images, rng_state(), **(settings | changes))


def assert_same(actual: object, expected: object) -> None:
    """Equal to the bit, NaN included, and of the same types."""
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
    after = load_capture(tmp_path / "captures" / "a.pt")
    assert_same(after, before)
    assert_same(list(after.batches), images)
    assert after.classes == CLASSES
    assert (after.step, after.process, after.processes, after.device) == (17, 0, 1, "cpu")
    assert (after.precision, after.scale, after.config) == (torch.bfloat16, 2.0**16, CONFIG)
    assert (after.threads, after.torch_version) == (torch.get_num_threads(), torch.__version__)
    assert str(Fault.from_dict(after.fault)) == str(Fault.from_dict(before.fault))


def test_the_loaded_step_runs_as_the_captured_one_did(tmp_path: Path) -> None:
    captured, images = step(), batches(2)
    rng = rng_state()
    losses = [captured(batch).losses for batch in images]
    set_rng_state(rng)
    capture(captured, images, scale=1.0).save(tmp_path / "a.pt")
    loaded = load_capture(tmp_path / "a.pt")
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


def test_a_capture_keeps_the_weights_of_the_moment() -> None:
    captured = step()
    before = {name: value.clone() for name, value in captured.model.state_dict().items()}
    kept = capture(captured, batches())
    for parameter in captured.parameters():
        parameter.data.fill_(7)
    assert_same(kept.model, before)


def test_without_a_backward_pass_nothing_is_said_of_gradients() -> None:
    fault = Fault.from_dict(capture(step(), batches(), with_backward=False).fault)
    assert (fault.gradients, fault.gradient_norm, fault.broken_behind) == (None, None, None)
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
        load_capture(tmp_path / "other.pt")


def test_other_formats_are_refused(tmp_path: Path) -> None:
    capture(step(), batches()).save(tmp_path / "a.pt")
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    torch.save(content | {"format": 2}, tmp_path / "a.pt")
    with pytest.raises(InputError, match="format 1"):
        load_capture(tmp_path / "a.pt")


def first(content: dict[str, Any]) -> dict[str, Any]:
    """The first batch."""
    batch: dict[str, Any] = content["batches"][0]
    return batch


UNSOUND: dict[str, Callable[[dict[str, Any]], object]] = {
    "no batches": lambda content: content.update(batches=[]),
    "an unknown kind": lambda content: first(content).update(kind="os.system"),
    "no images": lambda content: first(content).update(images=None),
    "images on meta": lambda content: first(content).update(images=first(content)["images"].to("meta")),
    "images of floats": lambda content: first(content).update(images=first(content)["images"].float()),
    "too small a mask": lambda content: first(content).update(padding_mask=first(content)["padding_mask"][:, :3]),
    "a target too few": lambda content: first(content).update(targets=first(content)["targets"][:1]),
    "a label of no class": lambda content: first(content)["targets"][0]["labels"].add_(10_000),
    "a negative label": lambda content: first(content)["targets"][0]["labels"].sub_(10),
    "a box too few": lambda content: first(content)["targets"][0].update(boxes=torch.rand(2, 4)),
    "masks of another size": lambda content: first(content)["targets"][1].update(masks=torch.ones(1, 3, 3).bool()),
    "an image larger than the batch": lambda content: first(content)["targets"][0].update(size=(33, 48)),
    "losses of text": lambda content: content["fault"]["losses"][0].update(loss_ce="x"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_what_no_step_can_run_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.pt"
    capture(step(), batches()).save(path)
    content = torch.load(path, weights_only=True)
    UNSOUND[name](content)
    torch.save(content, path)
    with pytest.raises(InputError, match=r"a\.pt is a damaged capture of detr_bf"):
        load_capture(path)


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
    assert_same(load_capture(tmp_path / "a.pt").batches, (sound,))
    replace(kept, batches=(replace(sound, **changes),)).save(tmp_path / "a.pt")
    with pytest.raises(InputError, match=r"a\.pt is a damaged capture"):
        load_capture(tmp_path / "a.pt")


def test_text_of_a_capture_is_made_printable(tmp_path: Path) -> None:
    kept, text = capture(step(), batches()), "\x1b[2J\nFORGED"
    fault = kept.fault | {"targets": [text]}
    (batch,) = kept.batches
    batch = replace(batch, targets=tuple(replace(target, file_name=text) for target in batch.targets))
    replace(kept, torch_version=text, device=text, fault=fault, batches=(batch,)).save(tmp_path / "a.pt")
    loaded = load_capture(tmp_path / "a.pt")
    shown = r"\x1b[2J\nFORGED"
    assert (loaded.torch_version, loaded.device, loaded.fault["targets"]) == (shown, shown, [shown])
    assert loaded.batches[0].names == (shown, shown)


def test_damage_is_found_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with pytest.raises(InputError, match="file not found"):
        load_capture(path)
    capture(step(), batches()).save(path)
    whole = path.read_bytes()
    for place in (len(whole) // 3, 2 * len(whole) // 3):
        path.write_bytes(whole[:place])
        with pytest.raises(InputError, match=r"a\.pt is truncated or damaged"):
            load_capture(path)
    weight = step().model.encoder.layers[0].feed_forward.expand.weight.detach().numpy().tobytes()
    place = whole.index(weight)
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(InputError, match=r"a\.pt is damaged"):
        load_capture(path)


def test_a_step_that_is_finite_again_is_not_saved(tmp_path: Path) -> None:
    healthy = step_of(tiny.model())
    said = told_together(capture(healthy, batches()), tmp_path / "a.pt")
    assert said.startswith("the loss or the gradient of step 17 is not finite\nrun again, everything is finite")
    assert not (tmp_path / "a.pt").exists()


def told(folder: Path) -> str:
    """Only process 1 has a broken head."""
    of = step_of(tiny.model())
    of.model.decoder.heads.classes[0].bias.data[0] = (0.0, math.inf)[distributed.rank()]
    return told_together(capture(of, batches()), folder / f"{distributed.rank()}.pt")


def test_the_processes_concerned_save_theirs_and_all_learn_of_it(tmp_path: Path) -> None:
    first, second = run_together(2, told, tmp_path)
    assert first == second
    assert first.splitlines()[:2] == [
        "the loss or the gradient of step 17 is not finite",
        "process 1, images 00.png, 01.png",
    ]
    assert first.endswith(f"captured in {tmp_path / '1.pt'}; run it again with tools/replay_capture.py")
    assert "decoder.heads.classes.0 (Linear)" in first
    assert list(tmp_path.iterdir()) == [tmp_path / "1.pt"]
    saved = load_capture(tmp_path / "1.pt")
    assert (saved.process, saved.processes) == (1, 2)
    assert told_together(saved, None).count("captured in") == 0
