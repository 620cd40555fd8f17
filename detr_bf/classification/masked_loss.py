"""What a masked autoencoder gives, and its loss (He et al. 2022, CVPR, arXiv 2111.06377).

Shape legend: R rows (streams x images, clean stream first), P patches, D numbers of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from detr_bf.losses import STREAM_NAMES, LossReport
from detr_bf.losses.classification import at_least_float32


@dataclass(frozen=True)
class Reconstructed:
    """Patches as they were guessed, and as they should have been."""

    predicted: Tensor  # (R, P, D)
    wanted: Tensor  # (R, P, D) float32 or better, without gradient
    masked: Tensor  # (R, P) bool, True = the encoder did not see it
    num_streams: int = 1

    @property
    def loss_per_image(self) -> Tensor:
        """(R,) in float32 or better: the squared error, the mean over the masked patches of each image."""
        error = (at_least_float32(self.predicted) - self.wanted).square().mean(-1)
        return (error * self.masked).sum(1) / self.masked.sum(1)


class MaskedCriterion:
    """The mean over images, and so the mean of the streams' losses."""

    def __call__(self, outputs: Reconstructed, targets: object = None) -> LossReport:
        """``targets`` are left aside: an image is its own."""
        streams = outputs.loss_per_image.unflatten(0, (outputs.num_streams, -1)).mean(1)
        logged = {}
        if outputs.num_streams > 1:
            named = zip(STREAM_NAMES, streams.detach(), strict=True)
            logged = {f"stream/{name}": loss for name, loss in named}
        return LossReport({"loss_reconstruction": streams.mean()}, {"loss_reconstruction": 1.0}, logged)
