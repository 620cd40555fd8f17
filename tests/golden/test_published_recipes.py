"""Recipes and settings of published weights against the names and shapes of the authors' models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from detr_bf.assembly import build_model
from detr_bf.assembly.model import build_classification
from detr_bf.assembly.training import build_groups
from detr_bf.inference.loading import published_config, recipe_config, without_counters
from detr_bf.interop.classes import coco_classes, renumbered_to
from detr_bf.interop.formats import to_foreign
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
    "rfdetr_base": "rf_detr_base",
    "rfdetr_nano": "rf_detr_nano",
    "rfdetr_small": "rf_detr_small",
    "rtdetr_r101": "rtdetr_r101vd_6x_coco",
    "rtdetr_r18": "rtdetr_r18vd_6x_coco",
    "rtdetr_r34": "rtdetr_r34vd_6x_coco",
    "rtdetr_r50_m": "rtdetr_r50vd_m_6x_coco",
    "rtdetrv2_r18_discrete": "rtdetrv2_r18vd_dsp_3x_coco",
    "rtdetrv2_r50": "rtdetrv2_r50vd_6x_coco",
}


WITH_TRAINING = [name for name in KEYS if name.startswith(("dfine", "deim"))]  # their lists have training settings


def key_list(name: str, golden: Sequence[Path]) -> dict[str, Any]:
    """Return the content of the list of an authors' model."""
    lists = [path for folder in golden for path in (folder / KEY_LISTS).glob(f"{KEYS[name]}.json")]
    if not lists:
        pytest.skip(f"no key list {KEYS[name]}")
    content: dict[str, Any] = json.loads(lists[0].read_text())
    return content


@pytest.mark.default_tier("detr_r50_bfv2", "rtdetrv2_r50", "deformable_detr_r50_two_stage", "dino_r50_4scale")
@pytest.mark.parametrize("name", KEYS)
def test_the_recipe_of_a_row_is_the_authors_model(name: str, golden: Sequence[Path]) -> None:
    shapes = key_list(name, golden)["state_dict"]
    row = published(name)
    assert row is not None
    config = published_config(row)
    classes = coco_classes(stuff=config.model.masks)
    with torch.device("meta"):
        theirs = {key: torch.empty(x["shape"] if isinstance(x, dict) else x) for key, x in shapes.items()}
        rows = build_classification(config).num_logits(classes.num_classes)
        found = renumbered_to(without_counters(under_our_names(theirs, name)), rows)
        expected = build_model(config, classes.num_classes, pretrained=False).state_dict()
    assert found is not None
    assert {key: x.shape for key, x in found.items()} == {key: x.shape for key, x in expected.items()}


@pytest.mark.parametrize("name", WITH_TRAINING)
def test_training_is_that_of_the_authors(name: str, golden: Sequence[Path]) -> None:
    theirs, config = key_list(name, golden), recipe_config(name)
    training, loader, collate = theirs["training"], theirs["train_dataloader"], theirs["train_dataloader"]["collate_fn"]
    defaults, groups = theirs["optimizer"]["defaults"], [group for group in theirs["optimizer"]["groups"] if group["n"]]
    epochs = training.get("epochs") or training["epoches"]
    found = {
        "lr": config.optimizer.lr,
        "backbone_lr": config.optimizer.backbone_lr,
        "weight_decay": config.optimizer.weight_decay,
        "warmup": config.optimizer.warmup_steps,
        "clip": config.optimizer.clip_norm,
        "epochs": config.train.epochs,
        "plain epochs at the end": config.data.plain_last_epochs,
        "batch": config.train.batch_size,
        "average": (config.train.ema.decay, config.train.ema.warmup_steps),
        "sides": sorted(config.data.batch_sides),
        "detections": config.eval.max_detections,
    }
    assert found == {
        "lr": defaults["lr"],
        "backbone_lr": groups[0].get("lr", defaults["lr"]),
        "weight_decay": defaults["weight_decay"],
        "warmup": training["lr_warmup_scheduler"]["warmup_duration"],
        "clip": training["clip_max_norm"],
        "epochs": epochs,
        "plain epochs at the end": epochs - collate["stop_epoch"],
        "batch": loader["total_batch_size"],
        "average": (training["ema"]["decay"], training["ema"]["warmups"]),
        "sides": sides(collate["base_size_repeat"]),
        "detections": theirs["postprocessor"]["num_top_queries"],
    }


def sides(repeat: int | None) -> list[int]:
    """Return the sides of their batches: 480 to 800 in steps of 32, 640 several times."""
    return [] if repeat is None else sorted([*range(480, 801, 32)] + [640] * (repeat - 1))


@pytest.mark.parametrize("name", WITH_TRAINING)
def test_losses_are_those_of_the_authors(name: str, golden: Sequence[Path]) -> None:
    theirs, loss = key_list(name, golden), recipe_config(name).loss
    weights, names = theirs["criterion_weight_dict"], theirs["criterion"]["losses"]
    kind = next(each for each in ("vfl", "mal") if each in names)
    assert loss.classification == {"vfl": "varifocal", "mal": "mal"}[kind]
    assert (loss.class_weight, loss.bbox_weight, loss.giou_weight) == tuple(
        weights[f"loss_{each}"] for each in (kind, "bbox", "giou")
    )
    if "local" in names:
        assert (loss.fgl_weight, loss.ddf_weight, loss.union) == (weights["loss_fgl"], weights["loss_ddf"], True)
    costs = theirs["matcher"]["weight_dict"]
    found = (loss.matcher.class_cost, loss.matcher.bbox_cost, loss.matcher.giou_cost)
    assert found == (costs["cost_class"], costs["cost_bbox"], costs["cost_giou"])


def test_rates_of_rfdetr(golden: Sequence[Path]) -> None:
    """Compare rate and weight decay of every parameter, except for the differences that docs/fidelity.md lists."""
    theirs, config = key_list("rfdetr_nano", golden), recipe_config("rfdetr_nano")
    names = [name for name in theirs["state_dict"] if name != "_kp_active_mask"]
    default = theirs["optimizer"]["defaults"]["weight_decay"]
    expected: dict[str, tuple[float, float]] = {}
    for group in theirs["optimizer"]["groups"]:
        for first, last in group["parameters"]:
            expected |= dict.fromkeys(names[first : last + 1], (group["lr"], group.get("weight_decay", default)))
    model = build_model(config, 91, pretrained=False)
    groups = build_groups(config, model)
    with torch.no_grad():  # mark each parameter with the number of its group, to find it under their name
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                parameter.fill_(number)
    compared = 0
    for name, marked in to_foreign(dict(model.named_parameters()), "rfdetr").items():
        group = groups[int(marked.flatten()[0])]
        rate, decay = expected[name]
        in_vit, vector = name.startswith("backbone.0.encoder."), marked.ndim == 1
        if name.startswith("transformer.decoder."):
            rate /= 0.7
        elif name.startswith("backbone.0.encoder.encoder.layernorm."):
            rate *= 0.8**2
        if (vector and not in_vit) or "layer_scale" in name:
            assert (decay, group["weight_decay"]) == (default, 0.0), name
        elif "patch_embeddings.projection.weight" in name:
            assert (decay, group["weight_decay"]) == (0.0, default)
        else:
            assert group["weight_decay"] == decay, name
        assert group["lr"] == pytest.approx(rate), name
        compared += 1
    assert compared == len(names) - 1, "all but the token of masked patches"
    training = theirs["training"]
    assert (config.train.epochs, config.train.ema.decay, config.train.ema.warmup_steps, config.optimizer.clip_norm) == (
        training["epochs"],
        training["ema_decay"],
        training["ema_tau"],
        training["clip_max_norm"],
    )
    loss = theirs["criterion"]
    assert (config.model.groups.group_detr, config.loss.mean_of_groups, config.loss.focal_alpha) == (
        loss["group_detr"],
        not loss["sum_group_losses"],
        loss["focal_alpha"],
    )
    assert config.eval.max_detections == theirs["postprocessor"]["num_select"]
