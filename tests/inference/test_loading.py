"""Models by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import detr_bf
from detr_bf.assembly.model import build_detector
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch
from detr_bf.config import load_config

CONFIGS = Path(__file__).parents[2] / "configs"
OTHERS = ("base", "compare", "experiments", "segmentation")
RECIPES = [path for path in CONFIGS.glob("*/*.yaml") if path.parent.name not in OTHERS]


def test_every_recipe_is_a_model_under_a_name_of_its_own() -> None:
    assert len(RECIPES) > 20
    assert detr_bf.list_models() == sorted(path.stem for path in RECIPES)
    assert not [path for path in RECIPES if "\ntask: " in path.read_text(encoding="utf-8")], "one folder deeper"


def test_names_are_filtered() -> None:
    assert detr_bf.list_models("detr_r50*") == ["detr_r50", "detr_r50_bfv2"]
    assert detr_bf.list_models("nothing*") == []


@pytest.mark.default_tier("detr_r50", "rtdetr_r18", "dino_r50_4scale", "panoptic_detr_r50_bfv2", "smca_r50")
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_builds(path: Path) -> None:
    """Make a recipe narrow and without weights, but keep its layers, levels and insertions."""
    config = load_config(path)
    narrow = ["model.hidden_dim=32", "model.heads=8", "model.feedforward_dim=16", "model.num_queries=6"]
    if config.model.groups.one_to_many.queries:
        narrow.append("model.groups.one_to_many.queries=12")
    if config.model.backbone.vit.maps:
        patch, *_ = config.model.backbone.strides
        options = f"patch_size: {patch}, embed_dim: 16, num_heads: 2, img_size: {2 * patch}"
        narrow += [f"model.backbone.vit.options={{{options}}}", "model.rfdetr.cross_heads=16"]
    else:
        narrow.append("model.backbone.name=resnet18")
    model = detr_bf.create_model(path.stem, num_classes=3, overrides=narrow)
    batch = Batch(torch.randint(256, (2, 3, 64, 96), dtype=torch.uint8), torch.zeros(2, 64, 96, dtype=torch.bool))
    outputs = model.train()(batch)
    forked = config.batch_former.enabled and config.batch_former.mode != "single_stream"
    assert outputs.num_streams == (2 if forked else 1)
    assert outputs.boxes.shape == (config.model.decoder_layers, 2 * outputs.num_streams, 6, 4)
    assert outputs.logits.shape[-1] == (4 if config.loss.classification == "cross_entropy" else 3)


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(InputError, match="no model 'detr_50'; nearest: detr_r50"):
        detr_bf.create_model("detr_50", num_classes=3)


def test_a_long_name_is_not_repeated_whole() -> None:
    with pytest.raises(InputError, match=r"no model '\\x1bmmm") as caught:
        detr_bf.create_model("\x1b" + "m" * 100_000, num_classes=3)
    assert len(str(caught.value)) < 400


def test_an_override_that_is_no_text() -> None:
    overrides: Any = [5]
    with pytest.raises(InputError, match="override '5' is not of the form key=value"):
        detr_bf.create_model("detr_r50", num_classes=3, overrides=overrides)


@pytest.mark.parametrize("num_classes", [0, -1, 2**62, 2.5, float("nan"), "two", None])
def test_what_is_no_number_of_classes(num_classes: Any) -> None:
    message = f"num_classes must be a whole number from 1 to 1000000, got {num_classes!r}"
    with pytest.raises(InputError, match=message):
        detr_bf.create_model("detr_r50", num_classes=num_classes)
    with pytest.raises(InputError, match=message):
        build_detector(load_config(None), num_classes, body=None)  # type: ignore[arg-type]
