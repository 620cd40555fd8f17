from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from detr_bf.engine import Checkpoint, load_checkpoint, load_fitting, load_strict
from detr_bf.errors import InputError
from detr_bf.structures import ClassMap

CLASSES = ClassMap((3, 7, 90), ("cat", "dog", "bird"))


def checkpoint(model: nn.Module, **changes: object) -> Checkpoint:
    return Checkpoint(model=model.state_dict(), class_map=CLASSES.to_dict(), config={"seed": 1}, **changes)


def test_round_trip(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    checkpoint(model, training={"progress": {"step": 4}, "rng": torch.get_rng_state()}).save(tmp_path / "a.pt")
    loaded = load_checkpoint(tmp_path / "a.pt")
    assert loaded.classes == CLASSES
    assert torch.equal(loaded.weights["weight"], model.weight)
    assert loaded.training["progress"] == {"step": 4}


def test_averaged_weights_are_the_ones_to_evaluate_with() -> None:
    averaged = {"weight": torch.zeros(3, 2)}
    assert checkpoint(nn.Linear(2, 3), ema=averaged).weights is averaged


def test_a_failed_save_leaves_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pt"
    checkpoint(nn.Linear(2, 3)).save(path)
    before = path.read_bytes()

    def full_disk(content: object, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space"):
        checkpoint(nn.Linear(2, 3)).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_strict_loading_lists_every_difference_and_changes_nothing() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 3)})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = {"a.weight": torch.zeros(4, 2), "a.bias": torch.zeros(3), "c.weight": torch.zeros(1)}
    with pytest.raises(InputError) as caught:
        load_strict(model, weights, "file.pt")
    for part in ("file.pt", "b.weight, b.bias", "c.weight", "a.weight (file (4, 2), model (3, 2))"):
        assert part in str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_keys_cannot_steer_the_terminal() -> None:
    with pytest.raises(InputError) as caught:
        load_strict(nn.Linear(1, 1), {"\x1b]0;owned\x07": torch.zeros(1), "a\n0 errors": torch.zeros(1)}, "a.pt")
    assert "unknown to the model (2): \\x1b]0;owned\\x07, a\\n0 errors\n" in str(caught.value)


def test_fitting_loads_what_fits_and_lists_the_rest() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 3)})
    weights = {"a.weight": torch.zeros(4, 2), "a.bias": torch.ones(3), "c.weight": torch.zeros(1)}
    said = load_fitting(model, weights, "file.pt")
    assert torch.equal(model["a"].bias, torch.ones(3))
    assert "1 of the model's 4 tensors" in said
    for part in ("b.weight, b.bias", "c.weight", "a.weight (file (4, 2), model (3, 2))"):
        assert part in said


def test_fitting_refuses_weights_of_which_nothing_fits() -> None:
    with pytest.raises(InputError, match=r"nothing in file\.pt fits"):
        load_fitting(nn.Linear(2, 3), {"x": torch.zeros(1)}, "file.pt")


@pytest.mark.parametrize("content", [[1, 2], {"model": {}}])
def test_files_of_other_programs(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(InputError, match="not a detr_bf checkpoint"):
        load_checkpoint(tmp_path / "other.pt")
