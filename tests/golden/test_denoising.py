"""Contrastive denoising of DINO and RT-DETR with their recorded random numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from detr_bf.boxes import inverse_sigmoid
from detr_bf.detectors.denoising import (
    EMPTY,
    DenoisingSlots,
    NoiseDraws,
    add_contrastive_noise,
    contrastive_slots,
    group_count,
)
from detr_bf.structures import Target
from tests.golden.cases import Case, assert_close, targets_of

FOLDER = Path(__file__).parents[3] / "shared" / "golden_successors"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no recorded reference outputs at {FOLDER}")
OFFICIAL = {"dn_number": 100, "dn_label_noise_ratio": 0.5, "dn_box_noise_scale": 0.4}  # of 26b, from its notes


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


def dino_draws(slots: DenoisingSlots, given: dict[str, Tensor], ratio: float) -> NoiseDraws:
    """Arrange DINO's draws, which are in the order of the objects, in slots."""
    image, slot = known_order(slots)
    empty = NoiseDraws(
        torch.ones(slots.labels.shape),
        torch.zeros_like(slots.labels),
        torch.zeros(slots.boxes.shape, dtype=torch.int64),
        torch.zeros_like(slots.boxes),
    )
    empty.change[image, slot] = given["0"]
    changed = given["0"] < ratio / 2
    empty.label[image[changed], slot[changed]] = given["1"]
    empty.sign[image, slot] = given["2"]
    empty.distance[image, slot] = given["3"]
    return empty


def dino_noise(targets: list[Target], noise: dict[str, Tensor], cfg: dict[str, float]) -> DenoisingSlots:
    slots = contrastive_slots(targets, dino_groups(int(cfg["dn_number"]), targets))
    ratio, scale = cfg["dn_label_noise_ratio"], cfg["dn_box_noise_scale"]
    return add_contrastive_noise(slots, dino_draws(slots, noise, ratio), label_noise=ratio, box_noise=scale)


@pytest.mark.parametrize("index", range(3))
def test_dino_functions(index: int) -> None:
    case = Case.load(FOLDER, "26b_dino_functions")
    sub = f"cdn_{index}"
    found = dino_noise(targets_of(case, f"{sub}.in.targets."), case.below(f"{sub}.in.noise."), OFFICIAL)
    expected = case.below(f"{sub}.out.")
    assert [found.labels.shape[1], found.groups] == expected["pad_size_and_groups"].tolist()
    assert torch.equal(found.labels != EMPTY, expected["filled_slots"])
    image, slot = known_order(found)
    assert torch.equal(found.labels[image, slot], expected["noised_labels"])
    assert_close(found.boxes[image, slot], expected["noised_boxes"])
    logits = inverse_sigmoid(found.boxes, eps=1e-3).masked_fill((found.labels == EMPTY)[..., None], 0.0)
    assert_close(logits, expected["unsigmoid_boxes"])


@pytest.mark.parametrize("name", ["22_dino", "22b_dino_big_dn", "22c_dino_shared_heads"])
@pytest.mark.parametrize("run", ["step", "step_empty", "step_none"])
def test_dino_noise(name: str, run: str) -> None:
    case = Case.load(FOLDER, name)
    found = dino_noise(targets_of(case, f"input.targets.{run}."), case.below(f"input.noise.{run}."), case.cfg)
    assert found.labels.shape[1] == case.manifest["dn"][run]["pad_size"]
    assert found.groups == case.manifest["dn"][run]["num_dn_group"]
    if run != "step_none":
        image, slot = known_order(found)
        assert torch.equal(found.labels[image, slot], case.tensors[f"{run}.dn.noised_labels"])
        assert_close(found.boxes[image, slot], case.tensors[f"{run}.dn.noised_boxes"])


@pytest.mark.parametrize("name", ["25_rtdetr", "25b_rtdetr_rectangle", "25c_rtdetrv2", "25d_rtdetrv2_discrete"])
@pytest.mark.parametrize("run", ["step", "step_empty", "step_none"])
def test_rtdetr_noise(name: str, run: str) -> None:
    case = Case.load(FOLDER, name)
    targets, sizes = targets_of(case, f"input.targets.{run}."), case.manifest["dn"][run]
    slots = contrastive_slots(targets, group_count(case.cfg["num_denoising"], targets), dummy="v2" in name)
    if sizes is None:  # v1 has no denoising part in a batch without objects
        assert slots.labels.shape[1] == 0
        return
    assert [slots.labels.shape[1], slots.groups] == [sizes["num_denoising"], sizes["dn_num_group"]]
    draws = NoiseDraws(*(case.tensors[f"input.noise.{run}.{index}"] for index in range(4)))
    cfg = case.cfg
    found = add_contrastive_noise(slots, draws, label_noise=cfg["label_noise_ratio"], box_noise=cfg["box_noise_scale"])
    recorded = case.below(f"{run}.dn.")
    labels = found.labels.masked_fill(found.labels == EMPTY, cfg["num_classes"])
    assert torch.equal(labels, recorded["noised_labels"].long())
    assert_close(found.boxes, recorded["noised_boxes"])
    assert_close(inverse_sigmoid(found.boxes), recorded["input_query_bbox"])
    for image, positive in enumerate(found.objects >= 0):
        assert positive.nonzero().flatten().tolist() == recorded[f"positive_idx.{image}"].tolist()
