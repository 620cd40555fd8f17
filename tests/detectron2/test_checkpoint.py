"""Checkpoint formats read by the adapter, and its checkpoints read by the core."""

from __future__ import annotations

import argparse
import logging
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("detectron2.config")
from detectron2.data.datasets.builtin_meta import COCO_CATEGORIES
from detectron2.modeling import build_backbone as build_foreign_backbone
from detectron2.modeling import build_model as build_meta_arch

from detr_bf.assembly import read_initial_weights
from detr_bf.backbones import build_backbone
from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.detectron2.checkpoint import DetrBfCheckpointer
from detr_bf.engine import Checkpoint
from detr_bf.interop.classes import COCO_IDS, renumbered
from detr_bf.interop.formats import from_foreign, to_foreign
from detr_bf.interop.weights import write_weights
from tests.interop.states import assert_same

from .conftest import DETECTORS

MakeCfg = Callable[..., Any]
both_backbones = pytest.mark.parametrize("d2_backbone", [False, True], ids=["ours", "theirs"])
OFFICIAL: dict[str, tuple[Any, ...]] = {  # settings of models that the authors' names fit
    "dab_detr": ("MODEL.DETR_BF.DAB.PATTERNS", 0),
    "dab_deformable_detr": (),
    "dn_detr": (),
    "dino": (),
}
REFUSED = {  # weights that a detector refuses; those of one line have decoder layers of the same names
    "detr": ("conditional_detr", "smca", "deformable_detr"),
    "dab_detr": ("conditional_detr", "dn_detr"),
    "deformable_detr": ("dab_deformable_detr", "dino", "rtdetr"),
    "rtdetr": ("dino", "rtdetrv2"),
}
BODY, HEAD = "backbone.body.", "decoder.heads.classes."


def shaken(module: nn.Module, seed: int) -> Any:
    """Fill every tensor with random numbers; scales of norms are near 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point() and tensor.dim() == 1 and name.endswith(("weight", "running_var")):
                tensor.uniform_(0.5, 1.5, generator=generator)
            elif tensor.is_floating_point():
                tensor.normal_(std=max(tensor[0].numel(), 4) ** -0.5, generator=generator)
    return module


@pytest.fixture
def make(tiny_cfg: MakeCfg) -> Callable[..., nn.Module]:
    """Factory of adapters with random weights that depend on the seed."""

    def built(*, seed: int = 0, classes: int = 80, changes: tuple[Any, ...] = (), **settings: Any) -> nn.Module:
        cfg = tiny_cfg(**settings)
        cfg.merge_from_list(["MODEL.DETR_BF.NUM_CLASSES", classes, *changes])
        return shaken(build_meta_arch(cfg), seed)

    return built


def ours(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in from_foreign(model.state_dict(), "the model").items()}


def checkpointer(model: nn.Module, folder: Path | str = "", **more: Any) -> DetrBfCheckpointer:
    """Checkpointer whose log pytest can capture, because detectron2 changes its own loggers."""
    made = DetrBfCheckpointer(model, str(folder), **more)
    made.logger = logging.getLogger("tests.checkpoint")
    return made


def run_folder(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a run of the core whose averaged weights must be the ones to load."""
    worse = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    classes = ClassMap(COCO_IDS[0], tuple(map(str, COCO_IDS[0])))
    Checkpoint(model=worse, class_map=classes.to_dict(), config={}, ema=dict(weights)).save(path / "last.pt")


def official(path: Path, weights: Mapping[str, Tensor], form: str) -> None:
    """Write a file of the authors with all entries of their trainer."""
    beside = {"optimizer": {"state": {}}, "epoch": 3, "args": argparse.Namespace(lr=1e-4)}
    torch.save({"model": to_foreign(weights, form), **beside}, path)


@both_backbones
@pytest.mark.parametrize(
    "kind", ["adapter", "entry", "other_backbone", "run", "run_file", "bare", "hf", "detr", "d2_detr"]
)
def test_every_kind_of_checkpoint_is_read(
    make: Callable[..., nn.Module], tmp_path: Path, kind: str, d2_backbone: bool
) -> None:
    weights = ours(make(seed=1))
    path = tmp_path / ("model.safetensors" if kind in ("bare", "hf") else "last.pt" if "run" in kind else "model.pth")
    if kind == "entry":
        own = to_foreign(weights, "detectron2_resnet" if d2_backbone else "detectron2")
        torch.save({"state_dict": own}, path)
    elif kind in ("adapter", "other_backbone"):
        theirs = d2_backbone if kind == "adapter" else not d2_backbone
        write_weights(path, weights, "detectron2_resnet" if theirs else "detectron2")
    elif kind in ("run", "run_file"):
        run_folder(tmp_path, weights)
    elif kind in ("bare", "hf"):
        write_weights(path, weights, "hf_detr" if kind == "hf" else None)
    else:
        official(path, renumbered(weights, "ids"), {"detr": "detr", "d2_detr": "detr_detectron2"}[kind])
    model = make(d2_backbone=d2_backbone)
    rest = checkpointer(model).load(str(tmp_path if kind == "run" else path))
    assert_same(ours(model), weights)
    assert "optimizer" not in rest


def test_checkpoints_of_the_adapter_load_into_the_core(make: Callable[..., nn.Module], tmp_path: Path) -> None:
    for number, d2_backbone in enumerate((False, True)):
        model = make(seed=number, d2_backbone=d2_backbone)
        optimizer = torch.optim.AdamW(model.parameters())
        checkpointer(model, tmp_path, optimizer=optimizer).save("model_final", iteration=7)
        assert_same(read_initial_weights(tmp_path / "model_final.pth"), ours(model))


@pytest.mark.parametrize("architecture", DETECTORS)
def test_every_detector_goes_to_the_core_and_back(
    make: Callable[..., nn.Module], tmp_path: Path, architecture: str
) -> None:
    model = make(seed=1, architecture=architecture, batch_former=True)
    checkpointer(model, tmp_path).save("model_final")
    assert_same(read_initial_weights(tmp_path / "model_final.pth"), ours(model))
    run_folder(tmp_path, ours(model))
    for path in (tmp_path, tmp_path / "model_final.pth"):
        other = make(seed=2, architecture=architecture, batch_former=True)
        checkpointer(other).load(str(path))
        assert_same(ours(other), ours(model))


@pytest.mark.parametrize(("architecture", "changes"), OFFICIAL.items())
def test_files_of_the_authors_are_read(
    make: Callable[..., nn.Module], tmp_path: Path, architecture: str, changes: tuple[Any, ...]
) -> None:
    weights = ours(make(seed=1, architecture=architecture, changes=changes))
    official(tmp_path / "model.pth", weights, "dab_detr" if architecture == "dn_detr" else architecture)
    model = make(architecture=architecture, changes=changes)
    checkpointer(model).load(str(tmp_path / "model.pth"))
    assert_same(ours(model), weights)


@both_backbones
def test_resuming_takes_up_all_that_was_saved(
    make: Callable[..., nn.Module], tmp_path: Path, d2_backbone: bool
) -> None:
    model, other = make(seed=1, d2_backbone=d2_backbone), make(seed=2, d2_backbone=d2_backbone)
    optimizer, fresh = (torch.optim.SGD(each.parameters(), lr=rate) for each, rate in ((model, 0.25), (other, 0.5)))
    checkpointer(model, tmp_path, optimizer=optimizer).save("model_0000004", iteration=4)
    rest = checkpointer(other, tmp_path, optimizer=fresh).resume_or_load("nowhere.pth", resume=True)
    assert rest["iteration"] == 4
    assert fresh.param_groups[0]["lr"] == 0.25
    assert_same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize(("classes", "rows"), [(80, 92), (133, 251)])
def test_heads_of_category_ids_are_renumbered(
    make: Callable[..., nn.Module], tmp_path: Path, classes: int, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    weights = ours(make(seed=1, classes=classes))
    by_id = renumbered(weights, "ids")
    assert len(by_id[f"{HEAD}0.bias"]) == rows
    write_weights(tmp_path / "model.pth", by_id, "detr")
    model = make(classes=classes)
    with caplog.at_level("INFO"):
        checkpointer(model).load(str(tmp_path / "model.pth"))
    assert_same(ours(model), weights)
    assert f"{rows} rows become {classes + 1}" in caplog.text


@pytest.mark.parametrize("form", ["detectron2", "detr"])
def test_heads_of_other_sizes_are_left_out_with_a_warning(
    make: Callable[..., nn.Module], tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    weights, model = ours(make(seed=1, classes=5)), make(classes=3)
    before = ours(model)
    write_weights(tmp_path / "model.pth", weights, form)
    checkpointer(model).load(str(tmp_path / "model.pth"))
    heads = {name: tensor for name, tensor in before.items() if name.startswith(HEAD)}
    assert_same(ours(model), weights | heads)
    assert "'detector.decoder.heads.classes.0.bias' to the model due to incompatible shapes: (6,)" in caplog.text


@pytest.mark.parametrize("suffix", [".pkl", ".pth?matching_heuristics=True"])
def test_backbones_are_left_to_detectron2(make: Callable[..., nn.Module], tmp_path: Path, suffix: str) -> None:
    whole, model = make(seed=1, d2_backbone=True), make(d2_backbone=True)
    before, prefix = model.state_dict(), "detector.backbone.body."
    before = {name: tensor.clone() for name, tensor in before.items()}
    body = {name.removeprefix(prefix): x for name, x in whole.state_dict().items() if name.startswith(prefix)}
    if suffix == ".pkl":
        arrays = {name: tensor.numpy() for name, tensor in body.items()}
        content = {"model": arrays, "__author__": "torchvision", "matching_heuristics": True}
        (tmp_path / "R-18.pkl").write_bytes(pickle.dumps(content))
    else:
        torch.save(body, tmp_path / "R-18.pth")
    checkpointer(model).load(f"{tmp_path / 'R-18'}{suffix}")
    assert_same(model.state_dict(), before | {f"{prefix}{name}": tensor for name, tensor in body.items()})


def test_counters_of_norms_that_are_frozen_here_are_not_reported(
    make: Callable[..., nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = ours(make(seed=1, changes=("MODEL.DETR_BF.BACKBONE.FROZEN_NORM", False)))
    write_weights(tmp_path / "model.pth", weights, "detr")
    model = make(d2_backbone=True)
    checkpointer(model).load(str(tmp_path / "model.pth"))
    assert_same(ours(model), {name: x for name, x in weights.items() if not name.endswith("num_batches_tracked")})
    assert not [record for record in caplog.records if record.levelname == "WARNING"], caplog.text


def test_strides_in_other_convolutions_are_refused(make: Callable[..., nn.Module], tmp_path: Path) -> None:
    deep = ("MODEL.RESNETS.DEPTH", 50, "MODEL.RESNETS.RES2_OUT_CHANNELS", 256, "MODEL.RESNETS.STRIDE_IN_1X1", True)
    model = make(d2_backbone=True, changes=deep)
    write_weights(tmp_path / "model.pth", ours(make(seed=1)), "detr")
    with pytest.raises(InputError, match=r"set MODEL\.RESNETS\.STRIDE_IN_1X1 False"):
        checkpointer(model).load(str(tmp_path / "model.pth"))


def test_pixels_of_another_scale_are_told(
    make: Callable[..., nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(
        d2_backbone=True, changes=("MODEL.PIXEL_MEAN", [103.53, 116.28, 123.675], "MODEL.PIXEL_STD", [1.0] * 3)
    )
    write_weights(tmp_path / "model.pth", ours(make(seed=1)), "detr")
    checkpointer(model).load(str(tmp_path / "model.pth"))
    assert "MODEL.PIXEL_STD [58.395, 57.12, 57.375]; this model has [103.5" in caplog.text


class Anything:
    """Object that is not a tensor."""


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("garbage.pth", None, "garbage.pth"),
        ("code.pth", {"model": Anything()}, "was refused: .*nothing was executed"),
        (
            "backbone.pth",
            {"conv1.weight": torch.zeros(1)},
            "no known format.*Weights of a backbone need a .pkl file",
        ),
        ("numbers.pth", {"model": [1, 2]}, "holds no weights"),
    ],
)
def test_bad_files_are_one_message_and_the_next_is_read(
    make: Callable[..., nn.Module], tmp_path: Path, name: str, content: Any, said: str
) -> None:
    path, good, model = tmp_path / name, tmp_path / "good.pth", make()
    path.write_bytes(b"anything") if content is None else torch.save(content, path)
    reader = checkpointer(model)
    with pytest.raises(InputError, match=said):
        reader.load(str(path))
    write_weights(good, ours(make(seed=1)), "detr")
    reader.load(str(good))
    assert_same(ours(model), ours(make(seed=1)))


def test_folders_without_a_run_are_told(make: Callable[..., nn.Module], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no last\.pt, so it is not a run folder of detr_bf"):
        checkpointer(make()).load(str(tmp_path))


def test_nothing_is_read_where_no_weights_are_named(make: Callable[..., nn.Module]) -> None:
    model = make()
    before = ours(model)
    assert checkpointer(model).load("") == {}
    assert_same(ours(model), before)


@pytest.mark.parametrize("form", [None, "detectron2"])
def test_weights_of_another_architecture_are_refused(
    make: Callable[..., nn.Module], tmp_path: Path, form: str | None
) -> None:
    for own, others in REFUSED.items():
        model = make(architecture=own)
        for other in others:
            write_weights(tmp_path / "model.pth", ours(make(architecture=other)), form)
            with pytest.raises(InputError, match=r"holds another architecture: .* set MODEL\.DETR_BF\.ARCHITECTURE"):
                checkpointer(model).load(str(tmp_path / "model.pth"))


def test_other_models_are_refused() -> None:
    with pytest.raises(InputError, match="Linear is not an architecture of detr_bf"):
        DetrBfCheckpointer(nn.Linear(1, 1))


def test_the_ids_are_in_the_order_of_detectron2() -> None:
    things = tuple(each["id"] for each in COCO_CATEGORIES if each["isthing"])
    assert (things, tuple(each["id"] for each in COCO_CATEGORIES)) == COCO_IDS


@torch.no_grad()
@pytest.mark.parametrize("depth", [18, 50])
def test_their_resnet_with_our_weights_gives_torchvisions_maps(tiny_cfg: MakeCfg, depth: int) -> None:
    cfg = tiny_cfg(d2_backbone=True)
    cfg.merge_from_list(["MODEL.RESNETS.DEPTH", depth, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64 if depth == 18 else 256])
    theirs = build_foreign_backbone(cfg).eval()
    body = build_backbone(
        f"resnet{depth}", weights="none", strides=[4, 8, 16, 32], dilation=False, frozen_stages=0, frozen_norm=True
    )
    state = shaken(body.eval(), seed=depth).state_dict()
    whole = {f"backbone.{name}": tensor for name, tensor in state.items()}
    signs = {"decoder.queries.position.weight": torch.zeros(1), f"{HEAD}0.weight": torch.zeros(1)}
    named = to_foreign(whole | signs, "detectron2_resnet")
    prefix = f"detector.{BODY}"
    theirs.load_state_dict({name.removeprefix(prefix): x for name, x in named.items() if name.startswith(prefix)})
    pixels = torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    expected, found = body.maps(pixels), theirs(pixels)
    for stage, level in enumerate(expected):
        torch.testing.assert_close(found[f"res{stage + 2}"], level, rtol=1e-4, atol=1e-4 * level.abs().max().item())
