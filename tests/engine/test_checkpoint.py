from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from detr_bf.batchformer import BatchFormerV2
from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.engine import Checkpoint, build_and_load, load_checkpoint, load_fitting, load_strict
from detr_bf.evaluation import ScoreThresholds
from tests.checkpoints import training

CLASSES = ClassMap((3, 7, 90), ("cat", "dog", "bird"))
PROGRESS = {"epoch": 0, "images": 0}  # of a training state


def checkpoint(model: nn.Module, **changes: object) -> Checkpoint:
    return Checkpoint(model=model.state_dict(), class_map=CLASSES.to_dict(), config={"seed": 1}, **changes)


def test_round_trip(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    checkpoint(model, training=training()).save(tmp_path / "a.pt")
    loaded = load_checkpoint(tmp_path / "a.pt")
    assert loaded.classes == CLASSES
    assert torch.equal(loaded.weights["weight"], model.weight)
    assert loaded.training["progress"]["step"] == 4
    assert loaded.score_thresholds is None


def test_thresholds_are_stored(tmp_path: Path) -> None:
    found = {"overall": 0.4, "by_class": [0.1, 0.2, 0.3]}
    checkpoint(nn.Linear(2, 3), thresholds=found).save(tmp_path / "a.pt")
    assert load_checkpoint(tmp_path / "a.pt").score_thresholds == ScoreThresholds(0.4, (0.1, 0.2, 0.3))


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


def written(path: Path, part: str, value: object) -> Path:
    """Write a checkpoint whose field ``part`` (a dotted name) is ``value``; ... removes the field."""
    model = nn.Linear(2, 3)
    whole = checkpoint(model, training=training())
    content = copy.deepcopy({field.name: getattr(whole, field.name) for field in fields(whole)})
    *groups, name = part.split(".")
    holder: Any = content
    for group in groups:
        holder = holder[group]
    if value is ...:
        del holder[name]
    else:
        holder[name] = value
    torch.save(content, path)
    return path


def nested(depth: int) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for _ in range(depth):
        tree = {"a": tree}
    return tree


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("format", 2, "is a detr_bf checkpoint of format 2, and this version reads format 1"),
        ("format", "x\x1b", r"of format x\\x1b, and"),
        ("format", None, "of format None, and"),
        ("model", [], "'model' must hold a dictionary, not a list"),
        ("model", {3: torch.ones(1)}, r"cannot be weights: 3 \(a name of type int\)"),
        ("model", {"a": torch.ones(1).to_sparse()}, r"cannot be weights: a \(sparse\)"),
        ("model", {"a": torch.ones(1, device="meta")}, r"cannot be weights: a \(without numbers\)"),
        ("model", {"a": 3.0}, r"cannot be weights: a \(a value of type float\)"),
        ("ema", 3, "'ema' must hold a dictionary"),
        ("ema", {"a": torch.ones(1, dtype=torch.complex64)}, r"cannot be weights: a \(complex\)"),
        ("config", "detection", "'config' must hold a dictionary"),
        ("config", {"task": torch.ones(1)}, "'config.task' must hold plain values, not a Tensor"),
        ("config", {3: 4}, "'config' must hold names of settings that are strings"),
        ("config", nested(200), "must hold at most 30 levels"),
        ("class_map", None, "'class_map' must hold a dictionary"),
        ("class_map", {}, "'class_map' must hold lists of equal length"),
        ("class_map", {"category_ids": [1]}, "'class_map'"),
        ("class_map", {"category_ids": [1, 2], "names": ["a"]}, "'class_map'"),
        ("class_map", {"category_ids": [1, 1], "names": ["a", "b"]}, "'class_map'"),
        ("class_map", {"category_ids": ["1"], "names": ["a"]}, "'class_map'"),
        ("class_map", {"category_ids": [1], "names": [2]}, "'class_map'"),
        ("class_map", {"category_ids": [1], "names": ["a"]}, "'class_map'"),
        ("class_map", {"category_ids": [1], "names": ["a"], "is_thing": [1]}, "'class_map'"),
        ("class_map", {"category_ids": [1], "names": ["a"], "is_thing": [True, True]}, "'class_map'"),
        ("thresholds", 0.5, "'thresholds' must hold a dictionary"),
        ("thresholds", {}, "'thresholds' must hold 'overall'"),
        ("thresholds", {"overall": 0.5, "by_class": []}, "and 'by_class' with one for each class"),
        ("thresholds", {"overall": 0.5, "by_class": [0.5] * 20}, "and 'by_class' with one for each class"),
        ("thresholds", {"overall": float("nan"), "by_class": [0.5, 0.5]}, "a number from 0 to 1"),
        ("thresholds", {"overall": 0.5, "by_class": [0.5, "0.5"]}, "a number from 0 to 1"),
        ("thresholds", ..., "is not a detr_bf checkpoint of format .* expected .*thresholds"),
        ("training", 3, "'training' must hold a dictionary"),
        ("training.optimizer", ..., "'training.optimizer' must hold a dictionary"),
        ("training.optimizer.param_groups", [], "'training.optimizer.param_groups'"),
        ("training.optimizer.param_groups", [{}], "'training.optimizer.param_groups'"),
        ("training.optimizer.state", [], "'training.optimizer.state'"),
        ("training.optimizer.state", {0: {"exp_avg": torch.ones(2).to_sparse()}}, r"optimizer.0.exp_avg \(sparse\)"),
        ("training.scaler", None, "'training.scaler'"),
        ("training.progress", ..., "'training.progress'"),
        ("training.progress", {"step": 1}, "'training.progress'"),
        ("training.progress", PROGRESS | {"step": -1, "evaluated_step": 0}, "'training.progress'"),
        ("training.progress", PROGRESS | {"step": 2**70, "evaluated_step": 0}, "'training.progress'"),
        ("training.progress", PROGRESS | {"step": 1, "evaluated_step": 2}, "'training.progress'"),
        ("training.progress", PROGRESS | {"step": 1.5, "evaluated_step": 0}, "'training.progress'"),
        ("training.progress.best_score", "high", "'training.progress'"),
        ("training.data", ..., "'training.data'"),
        ("training.averaged", None, "'training.averaged'"),
        ("training.rng", ..., "'training.rng'"),
        ("training.rng", torch.get_rng_state(), "'training.rng'"),
        ("training.rng", [3], "'training.rng'"),
        ("training.rng", [{"cpu": torch.ones(3), "cuda": None}], "'training.rng'"),
        ("training.rng", [{"cpu": torch.ones(3, dtype=torch.uint8), "cuda": None}], "'training.rng'"),
    ],
)
def test_a_part_of_another_structure_is_refused(tmp_path: Path, part: str, value: object, message: str) -> None:
    path = written(tmp_path / "a.pt", part, value)
    with pytest.raises(InputError, match=message) as caught:
        load_checkpoint(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_changed_first_byte_is_called_damage(tmp_path: Path) -> None:
    checkpoint(nn.Linear(2, 3)).save(tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(InputError, match=r"a\.pt is (truncated or )?damaged"):
        load_checkpoint(tmp_path / "a.pt")


def test_a_stripped_checkpoint_cannot_be_resumed() -> None:
    stripped = checkpoint(nn.Linear(2, 3))
    with pytest.raises(InputError, match=r"last\.pt holds only weights .*init_from=last\.pt"):
        stripped.state_to_resume("last.pt")


def not_finite(model: nn.Module, value: float) -> dict[str, torch.Tensor]:
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights["bias"][1] = value
    return weights


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_loaded_only_to_reproduce_a_fault(value: float) -> None:
    model = nn.Linear(2, 3)
    weights, before = not_finite(model, value), model.bias.detach().clone()
    for load in (load_strict, load_fitting):
        with pytest.raises(InputError, match=r"a\.pt holds NaN or infinite weights, .* in bias"):
            load(model, weights, "a.pt")
        assert torch.equal(model.bias, before)
    load_strict(model, weights, "a.pt", finite=False)
    assert not model.bias.isfinite().all()


@pytest.mark.parametrize("load", [load_strict, load_fitting])
@pytest.mark.parametrize("kind", [torch.int64, torch.bool])
def test_weights_that_are_not_floating_point_are_refused(
    load: Callable[[nn.Module, dict[str, torch.Tensor], str], object], kind: torch.dtype
) -> None:
    model = nn.BatchNorm1d(2)  # its counter of batches is an integer
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    load(model, weights, "a.pt")
    name = str(kind).removeprefix("torch.")
    with pytest.raises(InputError, match=rf"^a\.pt: expected floating-point weights, got weight \({name}\)"):
        load(model, weights | {"weight": weights["weight"].to(kind)}, "a.pt")
    load(model, weights | {"weight": weights["weight"].half()}, "a.pt")


def test_what_is_left_out_need_not_be_finite() -> None:
    model = nn.Linear(2, 3)
    load_fitting(model, {**model.state_dict(), "head": torch.full((2,), torch.nan)}, "a.pt")


def batch_former(shared: bool, layers: tuple[int, ...] = (0, 2)) -> nn.Module:
    former = BatchFormerV2(8, layers=layers, num_encoder_layers=4, shared=shared, heads=2)
    return nn.ModuleDict({"batch_former": former, "linear": nn.Linear(2, 2)})


def mixer(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    return model["batch_former"].mixers[name].state_dict()


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_shared_mixer_becomes_each_of_several() -> None:
    file, model = batch_former(shared=True), batch_former(shared=False)
    said = load_fitting(model, file.state_dict(), "a.pt")
    for name in ("0", "2"):
        assert_same(mixer(model, name), mixer(file, "shared"))
    assert (
        "of BatchFormerV2, loaded under another name (2): mixers.shared as mixers.0, mixers.shared as mixers.2" in said
    )
    assert "freshly" not in said
    assert "left out" not in said


def test_the_first_of_several_mixers_becomes_the_shared_one() -> None:
    file, model = batch_former(shared=False, layers=(2, 3)), batch_former(shared=True)
    said = load_fitting(model, file.state_dict(), "a.pt")
    assert_same(mixer(model, "shared"), mixer(file, "2"))
    assert "(1): mixers.2 as mixers.shared" in said
    assert "left out" in said
    assert "mixers.3." in said


def test_mixers_of_other_layers_are_not_exchanged() -> None:
    file, model = batch_former(shared=False, layers=(0,)), batch_former(shared=False, layers=(2,))
    said = load_fitting(model, file.state_dict(), "a.pt")
    assert "another name" not in said
    assert "freshly initialised" in said


def test_a_model_is_built_with_memory_only_if_the_weights_are_its_own() -> None:
    """A stored config may describe a model of any size, whatever the size of the stored weights."""
    devices: list[str] = []

    def build() -> nn.Module:
        model = nn.Linear(3, 2)
        devices.append(model.weight.device.type)
        return model

    weights = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    model = build_and_load(build, weights, "a.pt")
    assert devices == ["meta", "cpu"]
    assert torch.equal(model.get_parameter("weight"), weights["weight"])
    devices.clear()
    with pytest.raises(InputError, match=r"a\.pt belongs to another architecture"):
        build_and_load(build, {**weights, "bias": torch.zeros(3)}, "a.pt")
    assert devices == ["meta"]
