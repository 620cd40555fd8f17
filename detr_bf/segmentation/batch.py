"""Frozen containers passed between data, network, loss and evaluation of semantic segmentation.

Shape legend: B images, H x W pixels of the padded batch, h x w pixels of one image or map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from detr_bf.common.structures import Batch, Target, is_dense

IGNORE = 255  # value of pixels without a class


class LabelledPixels(NamedTuple):
    """One image of a data set with the class of every pixel."""

    image: Tensor  # (3, h, w) uint8
    labels: Tensor  # (h, w) uint8, IGNORE: no class; in evaluation at the size of the file
    target: Target  # without objects: index, file name, and the message if it replaces an unreadable image


@dataclass(frozen=True)
class SegmentationBatch:
    """Images padded to one size, with a map of classes for each."""

    inputs: Batch
    targets: tuple[Tensor, ...]  # B maps (h, w) uint8, IGNORE: no class

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def names(self) -> tuple[str, ...]:
        """File names of the images, for messages."""
        return self.inputs.names

    @property
    def replaced(self) -> tuple[str, ...]:
        """One message for each unreadable image that another image replaces."""
        return self.inputs.replaced

    def not_finite(self) -> list[str]:
        """Return an empty list: all data are integers."""
        return []

    @classmethod
    def collate(cls, samples: Sequence[LabelledPixels]) -> SegmentationBatch:
        """Pad the images to the largest height and width among them; the maps keep their sizes."""
        images = Batch.collate([(sample.image, sample.target) for sample in samples])
        return cls(images, tuple(sample.labels for sample in samples))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SegmentationBatch:
        labels = tuple(each.to(device, non_blocking=non_blocking) for each in self.targets)
        return SegmentationBatch(self.inputs.to(device, non_blocking), labels)

    def pin_memory(self) -> SegmentationBatch:
        """Called by the DataLoader."""
        return SegmentationBatch(self.inputs.pin_memory(), tuple(each.pin_memory() for each in self.targets))

    def to_dict(self) -> dict[str, Any]:
        """Return tensors and plain values, for a capture of the step."""
        return {"inputs": self.inputs.to_dict(), "targets": self.targets}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> SegmentationBatch:
        """Inverse of :meth:`to_dict`. Check the result with :meth:`fits`."""
        return cls(Batch.from_dict(content["inputs"]), tuple(content["targets"]))

    def fits(self, num_classes: int) -> bool:
        """Return True if the tensors have their documented shapes and types, and labels are below ``num_classes``."""
        return (
            self.inputs.fits(num_classes)
            and len(self.targets) == len(self.inputs)
            and all(
                is_dense(labels, tuple(labels.shape), torch.uint8)
                and labels.ndim == 2
                and not bool(((labels >= num_classes) & (labels != IGNORE)).any())
                for labels in self.targets
            )
        )
