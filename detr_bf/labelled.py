"""What passes between data, model, losses and evaluation of a classifier: all frozen.

Shape legend: B images, K classes, P patches, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from detr_bf.errors import InputError


class LabelledImage(NamedTuple):
    """One image of a data set."""

    pixels: Tensor  # (3, H, W) float32, normalised
    label: int
    place: int  # in the data set
    epoch: int = 0
    replaced: str = ""  # why the image asked for could not be read, if this one stands in for it


@dataclass(frozen=True)
class ClassTargets:
    """What the losses compare with."""

    labels: Tensor  # (B,) int64
    soft_labels: Tensor | None = None  # (B, K) float32 of each class after mixing or smoothing; None: the labels alone
    patch_labels: Tensor | None = None  # (B, P) int64, the class of every patch after DiversePatch's CutMix
    epoch: int = 0  # of the training, for weights that change

    def mapped(self, function: Callable[[Tensor], Tensor]) -> ClassTargets:
        """All tensors through a function."""
        return ClassTargets(
            function(self.labels),
            None if self.soft_labels is None else function(self.soft_labels),
            None if self.patch_labels is None else function(self.patch_labels),
            self.epoch,
        )


@dataclass(frozen=True)
class LabelledImages:
    """A batch of images of one size."""

    images: Tensor  # (B, 3, H, W) float32, normalised
    targets: ClassTargets
    places: Tensor  # (B,) int64, in the data set, on the CPU
    replaced: tuple[str, ...] = ()  # why images could not be read for which others stand in

    def __len__(self) -> int:
        return len(self.images)

    @property
    def inputs(self) -> Tensor:
        """What the model is called with."""
        return self.images

    @property
    def names(self) -> tuple[str, ...]:
        """What a message calls the images."""
        return tuple(f"image {place}" for place in self.places.tolist())

    def not_finite(self) -> list[str]:
        """The names of the images that hold infinity or NaN."""
        whole = self.images.flatten(1).isfinite().all(1).tolist()
        return [name for name, finite in zip(self.names, whole, strict=True) if not finite]

    @classmethod
    def collate(cls, samples: Sequence[LabelledImage]) -> LabelledImages:
        """Stack images of one size.

        Raises:
            InputError: there are none, or their sizes differ.
        """
        sizes = {tuple(sample.pixels.shape) for sample in samples}
        if len(sizes) != 1:
            raise InputError(f"a batch needs one or more images of one size, got the sizes {sorted(sizes)}")
        return cls(
            torch.stack([sample.pixels for sample in samples]),
            ClassTargets(torch.tensor([sample.label for sample in samples]), epoch=samples[0].epoch),
            torch.tensor([sample.place for sample in samples]),
            tuple(sample.replaced for sample in samples if sample.replaced),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> LabelledImages:
        return LabelledImages(
            self.images.to(device, non_blocking=non_blocking),
            self.targets.mapped(lambda value: value.to(device, non_blocking=non_blocking)),
            self.places,
            self.replaced,
        )

    def pin_memory(self) -> LabelledImages:
        """Called by the DataLoader."""
        return LabelledImages(
            self.images.pin_memory(), self.targets.mapped(Tensor.pin_memory), self.places, self.replaced
        )
