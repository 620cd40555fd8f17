"""Contrastive denoising of DINO and RT-DETR with their recorded random numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from detr_bf.common.boxes import inverse_sigmoid
from detr_bf.common.structures import Queries, QueryGroup, Target, TokenBatch
from detr_bf.detectors.denoising import (
    EMPTY,
    DenoisingSlots,
    NoiseDraws,
    add_contrastive_noise,
    contrastive_slots,
    group_count,
)
from detr_bf.detectors.two_stage import anchor_boxes, inverse_of_anchors
from detr_bf.transformer import append_queries, unpadded
from tests.golden.cases import Case, assert_close, draws, family, targets_of

OFFICIAL = {"dn_number": 100.0, "dn_label_noise_ratio": 0.5, "dn_box_noise_scale": 0.4}


def dino_groups(number: int, targets: list[Target]) -> int:
    """Return DINO's number of groups: below 50 the setting is doubled instead of divided by the objects."""
    objects = any(len(target.labels) for target in targets)
    return 2 * number if objects and number < 50 else group_count(number, targets)


def known_order(slots: DenoisingSlots) -> tuple[Tensor, Tensor]:
    """Return image and slot of every object in DINO's order: by half of a group, then by image."""
    halves = 2 * slots.groups
    filled = (slots.labels != EMPTY).unflatten(1, (halves, -1)).transpose(0, 1)  # halves, images, objects
    half, image, index = filled.nonzero(as_tuple=True)
    return image, half * filled.shape[2] + index


def dino_draws(slots: DenoisingSlots, given: dict[str, Tensor], cfg: Mapping[str, float]) -> NoiseDraws:
    """Arrange DINO's draws, which are in the order of the objects, in slots."""
    image, slot = known_order(slots)
    empty = NoiseDraws(
        torch.ones(slots.labels.shape),
        torch.zeros_like(slots.labels),
        torch.zeros(slots.boxes.shape, dtype=torch.int64),
        torch.zeros_like(slots.boxes),
    )
    of_labels, of_boxes = draws(given, cfg["dn_label_noise_ratio"], cfg["dn_box_noise_scale"])
    if of_labels:
        empty.change[image, slot] = of_labels[0]
        changed = of_labels[0] < cfg["dn_label_noise_ratio"] / 2
        empty.label[image[changed], slot[changed]] = of_labels[1]
    if of_boxes:
        empty.sign[image, slot], empty.distance[image, slot] = of_boxes
    return empty


def dino_noise(targets: list[Target], noise: dict[str, Tensor], cfg: Mapping[str, float]) -> DenoisingSlots:
    slots = contrastive_slots(targets, dino_groups(int(cfg["dn_number"]), targets))
    ratio, scale = cfg["dn_label_noise_ratio"], cfg["dn_box_noise_scale"]
    return add_contrastive_noise(slots, dino_draws(slots, noise, cfg), label_noise=ratio, box_noise=scale)


def noise_settings(case: Case) -> dict[str, float]:
    """Return the settings that the notes of the case state, or the official ones."""
    patterns = {"dn_number": r"dn_number\W+", "dn_label_noise_ratio": r"label\W+", "dn_box_noise_scale": r"box\W+"}
    notes = " ".join(note for note in case.manifest["notes"] if "dn_number" in note)
    stated = {name: re.search(pattern + r"(\d[\d.]*)", notes) for name, pattern in patterns.items()}
    return OFFICIAL | {name: float(match[1].rstrip(".")) for name, match in stated.items() if match}


def test_dino_functions(noise_case: Case) -> None:
    settings = noise_settings(noise_case)
    subs = sorted({name.split(".")[0] for name in noise_case.tensors if name.startswith("cdn_")})
    assert subs
    for sub in subs:
        targets, expected = targets_of(noise_case, f"{sub}.in.targets."), noise_case.below(f"{sub}.out.")
        found = dino_noise(targets, noise_case.below(f"{sub}.in.noise."), settings)
        assert [found.labels.shape[1], found.groups] == expected["pad_size_and_groups"].tolist()
        assert torch.equal(found.labels != EMPTY, expected["filled_slots"])
        image, slot = known_order(found)
        assert torch.equal(found.labels[image, slot], expected["noised_labels"])
        assert_close(found.boxes[image, slot], expected["noised_boxes"])
        logits = inverse_sigmoid(found.boxes, eps=1e-3).masked_fill((found.labels == EMPTY)[..., None], 0.0)
        assert_close(logits, expected["unsigmoid_boxes"])
        assert torch.equal(blocked_with_two_queries(found), expected["attn_mask_dn_part"])


def blocked_with_two_queries(slots: DenoisingSlots) -> Tensor:
    """Return the mask of the denoising queries and, last, two matching queries."""
    images, size = slots.labels.shape
    main = Queries(torch.zeros(images, 2, 4), torch.zeros(images, 2, 4))
    group = QueryGroup("dn", size, slots.objects, parts=slots.groups)
    blocked = append_queries(main, torch.zeros(images, size, 4), group, sees_main=True).blocked
    assert blocked is not None
    return blocked.roll((size, size), (0, 1))


def test_dino_proposals(noise_case: Case) -> None:
    given, expected = noise_case.below("proposals.in."), noise_case.below("proposals.out.")
    shapes = tuple((height, width) for height, width in given["spatial_shapes"].tolist())
    sizes = [height * width for height, width in shapes]
    masks = [
        mask.unflatten(1, shape) for mask, shape in zip(given["mask_flatten"].split(sizes, 1), shapes, strict=True)
    ]
    ratios = [unpadded(mask) / torch.tensor([mask.shape[2], mask.shape[1]]) for mask in masks]
    companions = {"padding_mask": given["mask_flatten"], "valid_ratios": torch.stack(ratios, 1)}
    anchors, usable = anchor_boxes(TokenBatch(given["memory"], companions, {"spatial_shapes": shapes}))
    logits = inverse_of_anchors(anchors, usable)
    assert torch.equal(logits.isinf(), expected["unsigmoid"].isinf())
    assert_close(logits[logits.isfinite()], expected["unsigmoid"][logits.isfinite()])
    assert_close(given["memory"].masked_fill(~usable, 0.0), expected["memory"])


@pytest.mark.parametrize("run", ["step", "step_empty", "step_none"])
def test_dino_noise(contrastive_case: Case, run: str) -> None:
    case = contrastive_case
    found = dino_noise(targets_of(case, f"input.targets.{run}."), case.below(f"input.noise.{run}."), case.cfg)
    assert found.labels.shape[1] == case.manifest["dn"][run]["pad_size"]
    assert found.groups == case.manifest["dn"][run]["num_dn_group"]
    image, slot = known_order(found)
    if len(image):
        assert torch.equal(found.labels[image, slot], case.tensors[f"{run}.dn.noised_labels"])
        assert_close(found.boxes[image, slot], case.tensors[f"{run}.dn.noised_boxes"])


def rtdetr_draws(case: Case, run: str) -> NoiseDraws:
    """Return RT-DETR's draws, which are those of all slots."""
    given = case.below(f"input.noise.{run}.")
    of_labels, of_boxes = draws(given, case.cfg["label_noise_ratio"], case.cfg["box_noise_scale"])
    shape = (of_labels or of_boxes)[0].shape[:2]
    change, label = of_labels or (torch.ones(shape), torch.zeros(shape, dtype=torch.int64))
    sign, distance = of_boxes or (torch.zeros(*shape, 4, dtype=torch.int64), torch.zeros(*shape, 4))
    return NoiseDraws(change, label, sign, distance)


@pytest.mark.parametrize("run", ["step", "step_empty", "step_none"])
def test_rtdetr_noise(rtdetr_noise_case: Case, run: str) -> None:
    case = rtdetr_noise_case
    targets, sizes = targets_of(case, f"input.targets.{run}."), case.manifest["dn"][run]
    slots = contrastive_slots(
        targets, group_count(case.cfg["num_denoising"], targets), dummy=family(case) == "rtdetrv2"
    )
    if sizes is None:  # v1 has no denoising part in a batch without objects
        assert slots.labels.shape[1] == 0
        return
    assert [slots.labels.shape[1], slots.groups] == [sizes["num_denoising"], sizes["dn_num_group"]]
    cfg = case.cfg
    found = add_contrastive_noise(
        slots, rtdetr_draws(case, run), label_noise=cfg["label_noise_ratio"], box_noise=cfg["box_noise_scale"]
    )
    recorded = case.below(f"{run}.dn.")
    labels = found.labels.masked_fill(found.labels == EMPTY, cfg["num_classes"])
    assert torch.equal(labels, recorded["noised_labels"].long())
    assert_close(found.boxes, recorded["noised_boxes"])
    assert_close(inverse_sigmoid(found.boxes), recorded["input_query_bbox"])
    for image, positive in enumerate(found.objects >= 0):
        assert positive.nonzero().flatten().tolist() == recorded[f"positive_idx.{image}"].tolist()
