"""Frozen containers passed between data, model, losses and evaluation of image models.

Shape legend: B images, K classes, P patches, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.structures import are_labels, is_dense
from detr_bf.losses.classification import check_labels

B = TypeVar("B", bound="LabelledImages")


@dataclass(frozen=True)
class LabelledImage:
    """One image of a data set."""

    pixels: Tensor  # (3, H, W) float32, normalised
    label: int
    index: int  # in the data set
    epoch: int = 0
    replaced: str = ""  # error of the unreadable image that this one replaces
    seed: int = 0  # of its augmentation


@dataclass(frozen=True)
class ClassTargets:
    """Targets of the losses."""

    labels: Tensor  # (B,) int64
    soft_labels: Tensor | None = None  # (B, K) float32 after mixing or smoothing; None: use ``labels``
    patch_labels: Tensor | None = None  # (B, P) int64, the class of each patch after DiversePatch's CutMix
    epoch: int = 0  # of the training, for scheduled loss weights
    label_range: tuple[int, int] | None = None  # smallest and largest label, if the host knows them without a copy

    def mapped(self, function: Callable[[Tensor], Tensor]) -> ClassTargets:
        """Apply a function to all tensors."""
        mapped: Any = {name: function(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **mapped)

    def check(self, num_classes: int) -> None:
        """Raise InputError for a label outside 0 to ``num_classes`` - 1."""
        known = self.label_range
        check_labels(self.labels if known is None else torch.tensor(known), num_classes)


@dataclass(frozen=True)
class LabelledImages:
    """A batch of images of one size."""

    views: ClassVar[tuple[int, ...]] = ()  # dimensions of ``images`` between those of images and colours

    images: Tensor  # (B, 3, H, W) float32, normalised
    targets: ClassTargets
    indices: Tensor  # (B,) int64, in the data set, on the CPU
    replaced: tuple[str, ...] = ()  # errors of unreadable images that were replaced

    def __len__(self) -> int:
        return len(self.images)

    @property
    def inputs(self) -> Tensor:
        """Input of the model."""
        return self.images

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the images in messages."""
        return tuple(f"image {index}" for index in self.indices.tolist())

    def not_finite(self) -> list[str]:
        """Return the names of the images that contain infinity or NaN."""
        whole = self.images.flatten(1).isfinite().all(1).tolist()
        return [name for name, finite in zip(self.names, whole, strict=True) if not finite]

    @classmethod
    def collate(cls: type[B], samples: Sequence[LabelledImage]) -> B:
        """Stack images of one size; InputError if there are none, or their sizes differ."""
        sizes = {tuple(sample.pixels.shape) for sample in samples}
        if len(sizes) != 1:
            raise InputError(f"a batch needs one or more images of one size, got the sizes {sorted(sizes)}")
        return cls(
            torch.stack([sample.pixels for sample in samples]),
            ClassTargets(torch.tensor([sample.label for sample in samples]), epoch=samples[0].epoch),
            torch.tensor([sample.index for sample in samples]),
            tuple(sample.replaced for sample in samples if sample.replaced),
        )

    def to(self: B, device: torch.device | str, non_blocking: bool = False) -> B:
        targets, labels = self.targets, self.targets.labels
        if labels.device.type == "cpu" and len(labels):
            targets = replace(targets, label_range=(int(labels.min()), int(labels.max())))
        targets = targets.mapped(lambda value: value.to(device, non_blocking=non_blocking))
        return replace(self, images=self.images.to(device, non_blocking=non_blocking), targets=targets)

    def pin_memory(self: B) -> B:
        """Called by the DataLoader."""
        return replace(self, images=self.images.pin_memory(), targets=self.targets.mapped(Tensor.pin_memory))

    def to_dict(self) -> dict[str, Any]:
        """Return tensors and plain values, for a capture of the step."""
        return asdict(self)

    @classmethod
    def from_dict(cls: type[B], content: Mapping[str, Any]) -> B:
        """Inverse of :meth:`to_dict`. Check the result with :meth:`fits`."""
        return cls(**{**content, "targets": ClassTargets(**content["targets"])})

    def fits(self, num_classes: int) -> bool:
        """Return True if the tensors have their documented shapes and types, and labels are below ``num_classes``."""
        images, targets = self.images, self.targets
        rows, soft_labels, patches = len(images), targets.soft_labels, targets.patch_labels
        return (
            is_dense(images, (rows, *self.views, 3, *images.shape[-2:]), torch.float32)
            and are_labels(targets.labels, (rows,), num_classes)
            and (soft_labels is None or is_dense(soft_labels, (rows, num_classes), torch.float32))
            and (patches is None or are_labels(patches, (rows, patches.shape[-1]), num_classes))
            and is_dense(self.indices, (rows,), torch.int64)
        )


@dataclass(frozen=True)
class ViewPairs(LabelledImages):
    """A batch of two views of each image: ``images`` is (B, 2, 3, H, W)."""

    views = (2,)
