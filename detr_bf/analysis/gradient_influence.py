"""Gradient influence of a batch's other images on a class (Hou et al. 2022, CVPR, arXiv 2203.01522, figure 6).

Shape legend: B images, R = 2B rows, clean stream first, K classes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from detr_bf.analysis.subject import Loss, hooked, moved, two_streams
from detr_bf.classification.batch import LabelledImages
from detr_bf.common.errors import InputError
from detr_bf.losses.classification import check_labels
from detr_bf.report.figures import add_legend, one_plot, run_colours
from detr_bf.report.fonts import plain


@dataclass(frozen=True)
class ClassInfluence:
    """Mean influence on the images of one class."""

    label: int
    name: str
    training_images: int
    images: int  # number of images in the mean
    clean: float  # of the clean stream: 0
    batchformer: float  # of the batch-attended stream


@dataclass(frozen=True)
class GradientInfluence:
    """Influence on all classes with images, ordered from the most to the fewest training images."""

    classes: tuple[ClassInfluence, ...]

    def cumulative(self) -> list[float]:
        """Return for each class the mean influence over it and all classes before it."""
        sums = accumulate(at.batchformer for at in self.classes)
        return [total / count for count, total in enumerate(sums, 1)]

    def rows(self) -> list[dict[str, object]]:
        """Return a table, one row per class."""
        return [{**vars(at), "cumulative": mean} for at, mean in zip(self.classes, self.cumulative(), strict=True)]


def gradient_influence(
    model: nn.Module,
    batches: Iterable[LabelledImages],
    *,
    class_names: Sequence[str],
    class_counts: Sequence[int],
    loss: Loss = F.cross_entropy,
) -> GradientInfluence:
    """Measure g_i, the mean over other images j and over channels of |dL_i / df_j|, averaged by class.

    f is the input of the first batch attention: the pooled features for BatchFormer, the tokens of the first insertion
    for BatchFormerV2, with a mean over tokens too. L_i is the loss of image i in one stream. Dropout is off, and batch
    norm uses its running statistics. Influence depends on the batch size, so a smaller last batch is skipped.

    Args:
        class_names, class_counts: names and training images of the K classes.
        loss: training loss of the model; of RIDE's experts that of the mean of their logits, the same in every epoch.

    Raises:
        InputError: the model has no two streams, batches have one image, there are no images, or labels are outside
            the classes.
    """
    found: dict[int, list[Tensor]] = defaultdict(list)
    size = 0
    with two_streams(model) as batch_former:
        for batch in moved(batches, model):
            size = size or len(batch)
            if size < 2:
                raise InputError("influence is between the images of a batch: give batches of two or more, got one")
            check_labels(batch.targets.labels, len(class_counts))
            if len(batch) == size:
                influence = _influence(model, batch_former, batch, loss).cpu()
                for label, values in zip(batch.targets.labels.tolist(), influence.unbind(1), strict=True):
                    found[label].append(values)
    order = sorted(found, key=lambda label: (-class_counts[label], label))
    return GradientInfluence(
        tuple(
            ClassInfluence(
                label,
                class_names[label],
                class_counts[label],
                len(found[label]),
                *torch.stack(found[label]).double().mean(0).tolist(),
            )
            for label in order
        )
    )


@torch.enable_grad()
def _influence(model: nn.Module, batch_former: nn.Module, batch: LabelledImages, loss: Loss) -> Tensor:
    """Return g_i of the clean and of the batch-attended stream, (2, B)."""
    leaves: list[Tensor] = []

    def cut(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Make the input of batch attention a leaf; inputs of later insertions have two streams and stay."""
        given = args[0]
        features = given if isinstance(given, Tensor) else given.tokens
        if len(features) != len(batch):
            return None
        leaves.append(features.detach().requires_grad_())
        return (leaves[-1] if isinstance(given, Tensor) else replace(given, tokens=leaves[-1]), *args[1:])

    with hooked([batch_former.register_forward_pre_hook(cut)]):
        logits = model(batch.images)
    labels = batch.targets.labels
    values = [
        _of_others(loss(logits[row, None], labels[row % len(batch), None]), leaves, row % len(batch))
        for row in range(len(logits))
    ]
    return torch.stack(values).view(2, len(batch))


def _of_others(loss: Tensor, leaves: Sequence[Tensor], own: int) -> Tensor:
    """Return the mean absolute gradient with respect to the features of all images except ``own``."""
    gradients = torch.autograd.grad(loss, leaves, retain_graph=True)
    sizes = torch.cat([gradient.abs().flatten(1) for gradient in gradients], 1).mean(1)
    return (sizes[:own].sum() + sizes[own + 1 :].sum()) / (len(sizes) - 1)


def draw_gradient_influence(runs: Mapping[str, GradientInfluence]) -> Figure:
    """Plot the cumulative mean over the classes, one line per run, frequent classes first."""
    figure, axes = one_plot(
        "Influence of the other images", "classes, from many to few training images", "cumulative mean of |∂Lᵢ/∂fⱼ|"
    )
    colours = run_colours(runs)
    for name, influence in runs.items():
        at = range(1, len(influence.classes) + 1)
        marker = "o" if len(influence.classes) <= 20 else ""
        axes.plot(at, influence.cumulative(), color=colours[name], marker=marker, markersize=4, label=plain(name))
    axes.set_ylim(bottom=0)
    _name_classes(axes, list(runs.values()))
    add_legend(axes)
    return figure


def _name_classes(axes: Axes, results: Sequence[GradientInfluence]) -> None:
    """Label the axis with class names if all runs have the same 20 or fewer classes."""
    names = {tuple(at.name for at in result.classes) for result in results}
    if len(names) == 1 and len(only := names.pop()) <= 20:
        axes.set_xticks(range(1, len(only) + 1), list(map(plain, only)), rotation=45, ha="right", fontsize=8)
