"""Contrastive denoising: noised objects as further queries in training (Zhang et al. 2022, arXiv 2203.03605, sec. 3.3).

Every group holds each object twice: as a positive, with a box near the object's, which is to predict the object, and as
a negative, with a box farther away, which is to predict no object.

Shape legend: B images, T objects of the image with most of them, G groups, S = G x 2 x T slots (queries) of an image. A
group has T slots of positives, then T of negatives; images with fewer objects leave slots empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.ops import box_convert

from detr_bf.common.devices import send, tensor_on
from detr_bf.common.settings import setting
from detr_bf.common.structures import PaddedTargets, Target

EMPTY = -1  # label of an empty slot
DUMMY_BOX = (0.5, 0.5, 0.1, 0.1)  # object of an image in a batch without objects


@dataclass(frozen=True)
class ContrastiveDenoising:
    """Settings of the denoising queries; the defaults are those of the recipes of DINO and RT-DETR."""

    # approximate number of positives in the image with most objects, or 0: no denoising
    queries: int = setting("denoising.queries", 100)
    groups: int | None = None  # fixed number instead of one that follows from ``queries``
    label_noise: float = setting("denoising.label_noise", 0.5)  # see :func:`add_contrastive_noise`
    box_noise: float = setting("denoising.box_noise", 1.0)


@dataclass(frozen=True)
class NoiseDraws:
    """Random numbers of all slots; those of empty slots are not used."""

    change: Tensor  # (B, S) float in [0, 1); the label is replaced below ``label_noise`` / 2
    label: Tensor  # (B, S) int64, the replacement
    sign: Tensor  # (B, S, 4) int64, 0 or 1: x0, y0, x1, y1 decreases or increases
    distance: Tensor  # (B, S, 4) float in [0, 1), in units of ``box_noise`` x half the width or height

    @classmethod
    def draw(cls, shape: tuple[int, int], num_classes: int, device: torch.device) -> NoiseDraws:
        """Draw for B images and S slots with the global generator of the device."""
        corners = (*shape, 4)
        return cls(
            torch.rand(shape, device=device),
            torch.randint(num_classes, shape, device=device),
            torch.randint(2, corners, device=device),
            torch.rand(corners, device=device),
        )


@dataclass(frozen=True)
class DenoisingSlots:
    """Objects in the slots of all groups, before or after the noise."""

    labels: Tensor  # (B, S) int64, ``EMPTY`` without an object
    boxes: Tensor  # (B, S, 4) cx, cy, w, h in fractions of the image, 0 in empty slots
    objects: Tensor  # (B, S) int64 on the CPU: index of the object that the slot is to predict, -1: no object
    groups: int


def group_count(queries: int, targets: Sequence[Target]) -> int:
    """Return the number of groups for about ``queries`` positives per image; at least 1, and 1 without objects."""
    most = max((len(target.labels) for target in targets), default=0)
    return max(1, queries // most) if most else 1


def contrastive_slots(targets: Sequence[Target], groups: int, *, dummy: bool = False) -> DenoisingSlots:
    """Repeat the objects of B images in all groups: S = 0 for a batch without objects.

    Args:
        dummy: in a batch without objects give each image a box without label (RT-DETRv2), so that S = 2 x ``groups``.
    """
    padded = PaddedTargets.of(targets)
    exists, labels, boxes = padded.exists, padded.labels, padded.boxes
    if dummy and not labels.shape[1]:
        exists, labels = exists.new_zeros(len(targets), 1), labels.new_zeros(len(targets), 1)
        boxes = tensor_on(boxes.device, DUMMY_BOX, boxes.dtype).expand(len(targets), 1, 4)
    labels = labels.masked_fill(send(~exists, labels.device), EMPTY)
    positives = torch.where(exists, torch.arange(exists.shape[1], device=exists.device), -1)
    objects = torch.cat([positives, torch.full_like(positives, -1)], dim=1)
    return DenoisingSlots(
        labels.repeat(1, 2 * groups), boxes.repeat(1, 2 * groups, 1), objects.repeat(1, groups), groups
    )


def add_contrastive_noise(
    slots: DenoisingSlots, draws: NoiseDraws, *, label_noise: float, box_noise: float
) -> DenoisingSlots:
    """Replace labels and move the corners of the boxes; a strongly noised box may have a negative width or height.

    Args:
        label_noise: twice the probability that a label is replaced, by any label.
        box_noise: largest distance of a positive's corners in units of half the width and height; a negative's corners
            are between one and two times as far away. Corners stay in the image.
    """
    replaced = (draws.change < label_noise / 2) & (slots.labels != EMPTY)
    labels = torch.where(replaced, draws.label, slots.labels)
    size = slots.labels.shape[1] // (2 * slots.groups)  # T
    negative = torch.arange(slots.labels.shape[1], device=labels.device) // max(1, size) % 2
    step = (draws.sign * 2 - 1) * (draws.distance + negative[:, None]) * box_noise
    half = slots.boxes[..., 2:].repeat(1, 1, 2) / 2
    corners = (box_convert(slots.boxes, "cxcywh", "xyxy") + step * half).clamp(0, 1)
    return DenoisingSlots(labels, box_convert(corners, "xyxy", "cxcywh"), slots.objects, slots.groups)
