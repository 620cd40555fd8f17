"""How well a masked autoencoder fills in what it does not see."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from detr_bf.classification.image_rows import ImageRows
from detr_bf.errors import InputError
from detr_bf.labelled import LabelledImages


class Reconstruction(Protocol):
    """What a masked autoencoder returns."""

    @property
    def loss_per_image(self) -> Tensor:
        """(B,) mean squared error over the masked patches of an image."""


@dataclass(frozen=True)
class ReconstructionResult:
    """Mean over the images of a split."""

    loss: float | None  # on masked patches; None where that of some image is not finite
    num_images: int
    num_not_finite: int = 0  # images

    @property
    def metrics(self) -> dict[str, float | None]:
        """All numbers by name."""
        return {"loss": self.loss}

    @property
    def score(self) -> float:
        """What the best checkpoint is chosen by: the less is lost, the higher."""
        return -math.inf if self.loss is None else -self.loss

    def __str__(self) -> str:
        if self.loss is None:
            return f"loss n/a  ({self.num_not_finite:,} of {self.num_images:,} images without a finite one)"
        return f"loss {self.loss:.4f}"

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> ReconstructionResult:
        """Inverse of :meth:`to_dict`."""
        return cls(**state)


class ReconstructionEvaluator:
    """Collects the losses of a split, every image once."""

    def __init__(self) -> None:
        self._rows = ImageRows()

    def update(self, batch: LabelledImages, outputs: Reconstruction) -> None:
        """Add the images of a batch; one that was given before stays as it is.

        Raises:
            InputError: there is not one loss for each image.
        """
        losses = outputs.loss_per_image
        if losses.shape != (len(batch),):
            raise InputError(
                f"a batch of {len(batch)} images needs as many losses, got them of shape {tuple(losses.shape)}: "
                "evaluate one stream, in evaluation mode"
            )
        self._rows.add(batch.places, loss=losses.float())

    def merge(self, other: ReconstructionEvaluator) -> None:
        """Add the images that ``other`` has seen; of an image that both have seen, what is here stays."""
        self._rows.extend(other._rows)

    def summarize(self) -> ReconstructionResult:
        """The numbers for all images seen.

        Raises:
            InputError: there are none.
        """
        losses = self._rows.joined()["loss"].double()
        missing = int((~losses.isfinite()).sum())
        return ReconstructionResult(None if missing else losses.mean().item(), len(losses), missing)
