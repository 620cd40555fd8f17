"""Accuracy while images are made worse, step by step.

Shape legend: B images, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from detr_bf.classification.analysis.figures import add_legend, one_plot, run_colours
from detr_bf.classification.analysis.subject import evaluating, moved
from detr_bf.labelled import LabelledImages
from detr_bf.losses.classification import check_labels
from detr_bf.report.fonts import plain


@dataclass(frozen=True)
class AccuracyCurve:
    """Share of right answers at every strength."""

    strength: str  # what it is called in a table
    strengths: tuple[float, ...]
    accuracies: tuple[float, ...]  # from 0 to 1
    images: int

    @property
    def mean(self) -> float:
        """Over the strengths."""
        return sum(self.accuracies) / len(self.accuracies)

    def rows(self) -> list[dict[str, object]]:
        """One a strength, for a table."""
        return [
            {self.strength: strength, "accuracy": accuracy, "images": self.images}
            for strength, accuracy in zip(self.strengths, self.accuracies, strict=True)
        ]


def accuracy_curve(
    model: nn.Module,
    batches: Iterable[LabelledImages],
    spoil: Callable[[LabelledImages], Iterable[Tensor]],
    *,
    strength: str,
    strengths: Sequence[float],
) -> AccuracyCurve:
    """The accuracy of a model in evaluation mode on what ``spoil`` makes of each batch, once a strength.

    Raises:
        InputError: no images, or labels outside the classes.
    """
    right, images = [0] * len(strengths), 0
    with evaluating(model):
        for batch in moved(batches, model):
            images += len(batch)
            for place, spoilt in zip(range(len(strengths)), spoil(batch), strict=True):
                with torch.no_grad():
                    logits = model(spoilt)
                check_labels(batch.targets.labels, logits.shape[1])
                right[place] += int((logits.argmax(1) == batch.targets.labels).sum())
    return AccuracyCurve(strength, tuple(strengths), tuple(count / images for count in right), images)


def draw_accuracy(runs: Mapping[str, AccuracyCurve], *, title: str, xlabel: str, scale: float = 1.0) -> Figure:
    """Accuracy in percent over ``scale`` times the strength, one line a run, its mean in the legend."""
    figure, axes = one_plot(title, xlabel, "accuracy, %")
    colours = run_colours(runs)
    for name, curve in runs.items():
        at, label = [scale * strength for strength in curve.strengths], f"{plain(name)}, mean {100 * curve.mean:.1f}"
        values = [100 * accuracy for accuracy in curve.accuracies]
        axes.plot(at, values, "o-", color=colours[name], markersize=4, label=label)
    axes.set_ylim(bottom=0)
    add_legend(axes)
    return figure
