"""mIoU of segmentation networks under noise and blur, as in table 9 of Context Broadcasting (arXiv 2210.08457).

Shape legend: B images, H x W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from matplotlib.figure import Figure
from scipy import stats
from torch import Tensor, nn
from torchvision.transforms.v2 import functional

from detr_bf.analysis.subject import evaluating
from detr_bf.common.errors import InputError
from detr_bf.data.batches import derive_seed
from detr_bf.engine import EvaluationLoop
from detr_bf.report.figures import add_legend, one_plot, run_colours
from detr_bf.report.fonts import plain
from detr_bf.segmentation.criterion import SegmentationEvaluator

REPEATS = 5  # of random noise
PHOTONS = 60.0  # of a white pixel in shot noise: severity 1 of ImageNet-C (Hendrycks & Dietterich 2019, 1903.12261)
_CONFIDENCE = 0.95
_REACH = 4  # half the side of the blur's kernel in units of sigma


def shot_noise(images: Tensor, generator: torch.Generator, photons: float = PHOTONS) -> Tensor:
    """Replace each value of images (B, 3, H, W) uint8 by a Poisson number whose mean is ``photons`` at 255."""
    counts = torch.poisson(images.float() * (photons / 255), generator)
    return _as_bytes(counts * (255 / photons))


def gaussian_noise(images: Tensor, generator: torch.Generator, sigma: float) -> Tensor:
    """Add normal noise of a standard deviation of ``sigma``, of 255, to images (B, 3, H, W) uint8."""
    return _as_bytes(images + sigma * torch.randn(images.shape, generator=generator))


def gaussian_blur(images: Tensor, generator: torch.Generator, sigma: float) -> Tensor:
    """Blur images (B, 3, H, W) uint8 with a Gaussian of ``sigma`` pixels; the generator is not used."""
    side = 2 * math.ceil(_REACH * sigma) + 1
    if min(images.shape[-2:]) <= side // 2:
        raise InputError(
            f"images of {images.shape[-1]} x {images.shape[-2]} pixels are too small for a blur of {sigma}"
        )
    return functional.gaussian_blur_image(images, [side, side], [sigma, sigma])


def _as_bytes(values: Tensor) -> Tensor:
    return values.round().clamp(0, 255).to(torch.uint8)


Corrupt = Callable[[Tensor, torch.Generator], Tensor]
CORRUPTIONS: dict[str, tuple[Corrupt, int]] = {  # name -> function and repetitions
    "none": (lambda images, generator: images, 1),
    "shot noise": (shot_noise, REPEATS),
    "Gaussian noise, sigma 5": (partial(gaussian_noise, sigma=5.0), REPEATS),
    "Gaussian noise, sigma 10": (partial(gaussian_noise, sigma=10.0), REPEATS),
    "Gaussian blur, sigma 1": (partial(gaussian_blur, sigma=1.0), 1),
    "Gaussian blur, sigma 2": (partial(gaussian_blur, sigma=2.0), 1),
}


@dataclass(frozen=True)
class CorruptedScore:
    """mIoU under one corruption, for each repetition of its noise."""

    corruption: str
    values: tuple[float, ...]
    images: int

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def interval(self) -> float | None:
        """Half the 95 % confidence interval of the mean by Student's t distribution; None without repetitions."""
        count = len(self.values)
        if count < 2:
            return None
        return float(stats.t.ppf((1 + _CONFIDENCE) / 2, count - 1) * stats.sem(self.values))


@dataclass(frozen=True)
class CorruptedScores:
    """mIoU of one run under every corruption."""

    scores: tuple[CorruptedScore, ...]

    def rows(self) -> list[dict[str, object]]:
        """Return a table, one row for each corruption."""
        return [
            {
                "corruption": each.corruption,
                "mIoU": each.mean,
                "interval_95": each.interval,
                "repetitions": len(each.values),
                "images": each.images,
            }
            for each in self.scores
        ]


def corrupted_scores(
    model: nn.Module, loop: EvaluationLoop, make_evaluator: Callable[[], SegmentationEvaluator], *, seed: int = 0
) -> CorruptedScores:
    """Evaluate in one pass over the images, each corrupted in all ways after it was resized.

    The noise depends on ``seed``, the corruption, the repetition, and the order of the images alone.

    Raises:
        InputError: an image is too small for a blur, or no pixel has a class.
    """
    plan = [
        (name, corrupt, make_evaluator(), torch.Generator().manual_seed(derive_seed(seed, number, repetition)))
        for number, (name, (corrupt, repetitions)) in enumerate(CORRUPTIONS.items())
        for repetition in range(repetitions)
    ]
    with evaluating(model), torch.no_grad():
        for batch in loop.make_batches(0):
            for _, corrupt, evaluator, generator in plan:
                images = corrupt(batch.inputs.images, generator)
                moved = replace(batch, inputs=replace(batch.inputs, images=images)).to(loop.device)
                evaluator.update(moved, model(moved.inputs))
    found: dict[str, list[float]] = {name: [] for name in CORRUPTIONS}
    count = 0
    for name, _, evaluator, _ in plan:
        result = evaluator.summarize()
        if result.mIoU is None:
            raise InputError("no pixel of the images has a class, and mIoU needs some: give other images")
        found[name].append(result.mIoU)
        count = result.num_images
    return CorruptedScores(tuple(CorruptedScore(name, tuple(values), count) for name, values in found.items()))


def draw_corruptions(runs: Mapping[str, CorruptedScores]) -> Figure:
    """Draw mIoU in percent under each corruption, one line of points per run, with the confidence intervals."""
    figure, axes = one_plot("mIoU of corrupted images", "", "mIoU, %")
    colours, names = run_colours(runs), list(CORRUPTIONS)
    for name, own in runs.items():
        values: Sequence[float] = [100 * each.mean for each in own.scores]
        errors = [100 * (each.interval or 0.0) for each in own.scores]
        axes.errorbar(range(len(names)), values, errors, fmt="o", color=colours[name], capsize=3, label=plain(name))
    axes.set_xticks(range(len(names)), [each.replace(", ", ",\n").replace("Gaussian ", "Gaussian\n") for each in names])
    axes.tick_params(axis="x", labelsize=8)
    axes.margins(x=0.08)
    axes.set_ylim(bottom=0)
    add_legend(axes)
    return figure
