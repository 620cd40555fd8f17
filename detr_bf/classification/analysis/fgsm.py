"""Accuracy under attack by one step along the gradient's sign (Goodfellow et al. 2015, arXiv 1412.6572).

As in table 8 of Context Broadcasting. Shape legend: B images, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from detr_bf.classification.analysis.accuracy import AccuracyCurve, accuracy_curve, draw_accuracy
from detr_bf.classification.analysis.subject import EPSILONS, Pixels
from detr_bf.errors import InputError
from detr_bf.labelled import LabelledImages
from detr_bf.losses.classification import check_labels


def attack(images: Tensor, gradient: Tensor, epsilon: float, pixels: Pixels) -> Tensor:
    """Normalised images (B, 3, H, W), every pixel ``epsilon`` up the gradient, but not beyond black or white."""
    low, high = (pixels.normalised(value, images) for value in (0.0, 1.0))
    return (images + pixels.step(epsilon, images) * gradient.sign()).clamp(low, high)


def fgsm(
    model: nn.Module,
    batches: Iterable[LabelledImages],
    *,
    pixels: Pixels,
    epsilons: Sequence[float] = EPSILONS,
) -> AccuracyCurve:
    """Accuracy under attacks that raise the cross-entropy of the true class.

    Args:
        pixels: how images were normalised.
        epsilons: sizes of the step; from black to white is 1.

    Raises:
        InputError: an epsilon below 0 or above 1, no images, or labels outside the classes.
    """
    if not epsilons or not all(0 <= epsilon <= 1 for epsilon in epsilons):
        raise InputError(f"epsilons must be one or more numbers from 0 to 1, such as 1/255; got {list(epsilons)}")

    def spoil(batch: LabelledImages) -> Iterator[Tensor]:
        gradient = loss_gradient(model, batch)
        return (attack(batch.images, gradient, epsilon, pixels) for epsilon in epsilons)

    return accuracy_curve(model, batches, spoil, strength="epsilon", strengths=epsilons)


@torch.enable_grad()
def loss_gradient(model: nn.Module, batch: LabelledImages) -> Tensor:
    """The gradient (B, 3, H, W) of the cross-entropies' sum in the images."""
    images = batch.images.detach().requires_grad_()
    logits = model(images)
    check_labels(batch.targets.labels, logits.shape[1])
    loss = F.cross_entropy(logits, batch.targets.labels, reduction="sum")
    return torch.autograd.grad(loss, images)[0]


def draw_fgsm(runs: Mapping[str, AccuracyCurve]) -> Figure:
    """One line a run."""
    return draw_accuracy(runs, title="Accuracy under FGSM", xlabel="epsilon, steps of 1/255", scale=255)
