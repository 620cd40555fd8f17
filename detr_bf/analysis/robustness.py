"""Accuracy on corrupted images: FGSM and a black centre, as in table 8 of Context Broadcasting (arXiv 2210.08457), and
missing patches (arXiv 2105.10497).

All analyses raise InputError if there are no images, or labels are outside the classes.

Shape legend: B images, H x W pixels, P patches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from detr_bf.analysis.subject import EPSILONS, Pixels, evaluating, moved
from detr_bf.classification.batch import LabelledImages
from detr_bf.common.errors import InputError
from detr_bf.losses.classification import check_labels
from detr_bf.report.figures import add_legend, one_plot, run_colours
from detr_bf.report.fonts import plain

SIDES = (0.0, 0.25, 0.5, 0.75)  # of the square in the centre, as a share of the image's side; 0.5 in the paper
SHARES = tuple(n / 10 for n in range(10))
_PATCHES_ACROSS = 14  # per side of an image for networks without patches: 16 pixels of 224


@dataclass(frozen=True)
class AccuracyCurve:
    """Accuracy at every strength of a corruption."""

    strength: str  # name of the strength in a table
    strengths: tuple[float, ...]
    accuracies: tuple[float, ...]  # from 0 to 1
    images: int

    @property
    def mean(self) -> float:
        """Mean over the strengths."""
        return sum(self.accuracies) / len(self.accuracies)

    def rows(self) -> list[dict[str, object]]:
        """Return a table, one row per strength."""
        return [
            {self.strength: strength, "accuracy": accuracy, "images": self.images}
            for strength, accuracy in zip(self.strengths, self.accuracies, strict=True)
        ]


def accuracy_curve(
    model: nn.Module,
    batches: Iterable[LabelledImages],
    corrupt: Callable[[LabelledImages], Iterable[Tensor]],
    *,
    strength: str,
    strengths: Sequence[float],
) -> AccuracyCurve:
    """Measure accuracy in evaluation mode; ``corrupt`` returns the images of a batch once per strength.

    Raises:
        InputError: there are no images, or labels are outside the classes.
    """
    right, images = [0] * len(strengths), 0
    with evaluating(model):
        for batch in moved(batches, model):
            images += len(batch)
            for number, corrupted in zip(range(len(strengths)), corrupt(batch), strict=True):
                with torch.no_grad():
                    logits = model(corrupted)
                check_labels(batch.targets.labels, logits.shape[1])
                right[number] += int((logits.argmax(1) == batch.targets.labels).sum())
    return AccuracyCurve(strength, tuple(strengths), tuple(count / images for count in right), images)


def draw_accuracy(runs: Mapping[str, AccuracyCurve], *, title: str, xlabel: str, scale: float = 1.0) -> Figure:
    """Plot accuracy in percent over ``scale`` times the strength, one line per run, its mean in the legend."""
    figure, axes = one_plot(title, xlabel, "accuracy, %")
    colours = run_colours(runs)
    for name, curve in runs.items():
        at, label = [scale * strength for strength in curve.strengths], f"{plain(name)}, mean {100 * curve.mean:.1f}"
        values = [100 * accuracy for accuracy in curve.accuracies]
        axes.plot(at, values, "o-", color=colours[name], markersize=4, label=label)
    axes.set_ylim(bottom=0)
    add_legend(axes)
    return figure


draw_fgsm = partial(draw_accuracy, title="Accuracy under FGSM", xlabel="epsilon, steps of 1/255", scale=255)
draw_occlusion = partial(
    draw_accuracy, title="Accuracy with a black centre", xlabel="side of the square, % of the image's side", scale=100
)
draw_missing_patches = partial(
    draw_accuracy, title="Accuracy with patches missing", xlabel="patches dropped, %", scale=100
)


def attack(images: Tensor, gradient: Tensor, epsilon: float, pixels: Pixels) -> Tensor:
    """Move normalised images (B, 3, H, W) by ``epsilon`` along the gradient's sign, clipped to black and white."""
    low, high = (pixels.normalised(value, images) for value in (0.0, 1.0))
    return (images + pixels.step(epsilon, images) * gradient.sign()).clamp(low, high)


def fgsm(
    model: nn.Module,
    batches: Iterable[LabelledImages],
    *,
    pixels: Pixels,
    epsilons: Sequence[float] = EPSILONS,
) -> AccuracyCurve:
    """Measure accuracy under FGSM, which raises the cross-entropy (Goodfellow et al. 2015, arXiv 1412.6572).

    Args:
        pixels: how images were normalised.
        epsilons: sizes of the step; from black to white is 1.

    Raises:
        InputError: an epsilon is below 0 or above 1.
    """
    if not epsilons or not all(0 <= epsilon <= 1 for epsilon in epsilons):
        raise InputError(f"epsilons must be one or more numbers from 0 to 1, such as 1/255; got {list(epsilons)}")

    def corrupt(batch: LabelledImages) -> Iterator[Tensor]:
        gradient = loss_gradient(model, batch)
        return (attack(batch.images, gradient, epsilon, pixels) for epsilon in epsilons)

    return accuracy_curve(model, batches, corrupt, strength="epsilon", strengths=epsilons)


@torch.enable_grad()
def loss_gradient(model: nn.Module, batch: LabelledImages) -> Tensor:
    """Return the gradient (B, 3, H, W) of the summed cross-entropy with respect to the images."""
    images = batch.images.detach().requires_grad_()
    logits = model(images)
    check_labels(batch.targets.labels, logits.shape[1])
    loss = F.cross_entropy(logits, batch.targets.labels, reduction="sum")
    return torch.autograd.grad(loss, images)[0]


def cover_centre(images: Tensor, side: float, fill: Tensor) -> Tensor:
    """Fill the centre of images (B, 3, H, W), ``side`` of their height and of their width, with ``fill`` (3, 1, 1).

    The edges are rounded to the nearest pixel. 0.5 covers the rows and columns 56 to 167 of 224.
    """
    height, width = (round(side * size) for size in images.shape[2:])
    top, left = (images.shape[2] - height) // 2, (images.shape[3] - width) // 2
    covered = images.clone()
    covered[:, :, top : top + height, left : left + width] = fill
    return covered


def occlusion(
    model: nn.Module, batches: Iterable[LabelledImages], *, pixels: Pixels, sides: Sequence[float] = SIDES
) -> AccuracyCurve:
    """Measure accuracy with a black square in the centre (arXiv 2210.08457, table 8: 112 x 112 pixels of 224 x 224).

    Args:
        pixels: how images were normalised.
        sides: of the square, from 0 to 1 times the image's sides.

    Raises:
        InputError: there are no images, or labels are outside the classes.
    """

    def corrupt(batch: LabelledImages) -> Iterator[Tensor]:
        black = pixels.normalised(0.0, batch.images)
        return (cover_centre(batch.images, side, black) for side in sides)

    return accuracy_curve(model, batches, corrupt, strength="side", strengths=sides)


def drop_patches(images: Tensor, order: Tensor, share: float, patch: tuple[int, int], fill: Tensor) -> Tensor:
    """Fill the first ``share`` of the patches in ``order`` (B, P) of images (B, 3, H, W) with ``fill`` (3, 1, 1).

    The number of patches is rounded to the nearest; patches are counted row by row.
    """
    rows, columns = images.shape[2] // patch[0], images.shape[3] // patch[1]
    dropped = torch.zeros_like(order, dtype=torch.bool)
    dropped.scatter_(1, order[:, : round(share * order.shape[1])], True)
    mask = dropped.view(-1, 1, rows, columns).repeat_interleave(patch[0], 2).repeat_interleave(patch[1], 3)
    return torch.where(mask, fill, images)


def missing_patches(
    model: nn.Module,
    batches: Iterable[LabelledImages],
    *,
    pixels: Pixels,
    patch: int | None = None,
    shares: Sequence[float] = SHARES,
    seed: int = 0,
) -> AccuracyCurve:
    """Measure accuracy with a share of the patches black (Naseer et al. 2021, arXiv 2105.10497).

    The patches of a smaller share are a subset of those of a larger one.

    Args:
        pixels: how images were normalised.
        patch: side of a patch in pixels; None: a timm ViT's own patches, else a 14th of the image.
        shares: of the patches, from 0 to 1.
        seed: of the choice of patches, the same for all models with the same patches and batches.

    Raises:
        InputError: patches do not fill the images.
    """
    generator = torch.Generator().manual_seed(seed)

    def corrupt(batch: LabelledImages) -> Iterator[Tensor]:
        images = batch.images
        size = _patch_size(model, images, patch)
        count = (images.shape[2] // size[0]) * (images.shape[3] // size[1])
        order = torch.rand(len(images), count, generator=generator).argsort(1).to(images.device)
        black = pixels.normalised(0.0, images)
        return (drop_patches(images, order, share, size, black) for share in shares)

    return accuracy_curve(model, batches, corrupt, strength="dropped", strengths=shares)


def _patch_size(model: nn.Module, images: Tensor, patch: int | None) -> tuple[int, int]:
    height, width = images.shape[2:]
    if patch is not None:
        size = (patch, patch)
    elif isinstance(model, VisionTransformer):
        size = model.patch_embed.patch_size
    else:
        size = (max(1, height // _PATCHES_ACROSS), max(1, width // _PATCHES_ACROSS))
    if min(size) < 1 or height % size[0] or width % size[1]:
        raise InputError(
            f"patches of {size[0]} x {size[1]} pixels do not fill images of {height} x {width}: give a patch size that "
            "divides both"
        )
    return size
