"""Recipes and settings of published weights against the names and shapes of the authors' models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from detr_bf.assembly import build_model
from detr_bf.assembly.model import build_classification
from detr_bf.inference.loading import published_config, without_counters
from detr_bf.interop.classes import coco_classes, renumbered_to
from detr_bf.interop.published import published
from detr_bf.interop.weights import under_our_names
from tests.golden.cases import KEY_LISTS

KEYS = {  # lists of the names and shapes in the authors' models
    "conditional_detr_r50": "conditional_detr_resnet50",
    "dab_deformable_detr_r50": "dab_deformable_detr_resnet50",
    "dab_detr_r50_3pat": "dab_detr_resnet50_3pat",
    "deformable_detr_r50": "deformable_detr_resnet50",
    "deformable_detr_r50_bfv2": "bf_deformable_resnet50_i0_shared",
    "deformable_detr_r50_refine": "deformable_detr_resnet50_refine",
    "deformable_detr_r50_single_scale": "deformable_detr_resnet50_single_scale",
    "deformable_detr_r50_two_stage": "deformable_detr_resnet50_refine_two_stage",
    "deim_rtdetrv2_r18": "deim_r18vd_120e_coco",
    "detr_r101_dc5": "detr_resnet101_dc5",
    "detr_r50": "detr_resnet50",
    "detr_r50_bfv2": "bf_detr_resnet50_i0_shared",
    "detr_r50_panoptic": "detr_resnet50_panoptic",
    "dfine_n": "dfine_hgnetv2_n_coco",
    "dfine_s": "dfine_hgnetv2_s_coco",
    "dfine_m": "dfine_hgnetv2_m_coco",
    "dfine_l": "dfine_hgnetv2_l_coco",
    "dfine_x": "dfine_hgnetv2_x_coco",
    "dino_r50_4scale": "dino_resnet50_4scale",
    "dino_r50_5scale": "dino_resnet50_5scale",
    "dn_detr_r50": "dn_dab_detr_resnet50",
    "h_deformable_detr_r50_12ep": "h_deformable_detr_resnet50_12eps",
    "rtdetr_r101": "rtdetr_r101vd_6x_coco",
    "rtdetr_r18": "rtdetr_r18vd_6x_coco",
    "rtdetr_r34": "rtdetr_r34vd_6x_coco",
    "rtdetr_r50_m": "rtdetr_r50vd_m_6x_coco",
    "rtdetrv2_r18_discrete": "rtdetrv2_r18vd_dsp_3x_coco",
    "rtdetrv2_r50": "rtdetrv2_r50vd_6x_coco",
}


@pytest.mark.default_tier("detr_r50_bfv2", "rtdetrv2_r50", "deformable_detr_r50_two_stage", "dino_r50_4scale")
@pytest.mark.parametrize("name", KEYS)
def test_the_recipe_of_a_row_is_the_authors_model(name: str, golden: Sequence[Path]) -> None:
    lists = [path for folder in golden for path in (folder / KEY_LISTS).glob(f"{KEYS[name]}.json")]
    if not lists:
        pytest.skip(f"no key list {KEYS[name]}")
    row = published(name)
    assert row is not None
    config = published_config(row)
    classes = coco_classes(stuff=config.model.masks)
    with torch.device("meta"):
        shapes = json.loads(lists[0].read_text())["state_dict"]
        theirs = {key: torch.empty(x["shape"] if isinstance(x, dict) else x) for key, x in shapes.items()}
        rows = build_classification(config).num_logits(classes.num_classes)
        found = renumbered_to(without_counters(under_our_names(theirs, name)), rows)
        expected = build_model(config, classes.num_classes, pretrained=False).state_dict()
    assert found is not None
    assert {key: x.shape for key, x in found.items()} == {key: x.shape for key, x in expected.items()}
