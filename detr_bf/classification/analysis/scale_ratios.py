"""The learned scales of Context Broadcasting (Hyeon-Woo et al., ICCV 2023, arXiv 2210.08457, figure 8)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import nn

from detr_bf.classification.analysis.figures import add_legend, count_layers, one_plot, run_colours
from detr_bf.errors import InputError
from detr_bf.plugins import ContextBroadcasting
from detr_bf.report.figures import INK
from detr_bf.report.fonts import plain


@dataclass(frozen=True)
class ScaleRatio:
    """The scales of one block."""

    layer: int  # from 0
    low: float  # their 0.1 quantile
    high: float  # their 0.9 quantile

    @property
    def ratio(self) -> float | None:
        """|low| / |high|: below 1 they lean to the positive, above 1 to the negative; None before training (0 / 0)."""
        return abs(self.low) / abs(self.high) if self.high else None


@dataclass(frozen=True)
class ScaleRatios:
    """The scales of all blocks that have some."""

    layers: tuple[ScaleRatio, ...]

    def rows(self) -> list[dict[str, object]]:
        """One a block, for a table."""
        return [{"layer": at.layer, "q10": at.low, "q90": at.high, "ratio": at.ratio} for at in self.layers]


def scale_ratios(model: nn.Module) -> ScaleRatios:
    """Quantiles of the scales over the channels, and the ratio of their sizes.

    Raises:
        InputError: the model has no scaled Context Broadcasting.
    """
    plugins = [module for module in model.modules() if isinstance(module, ContextBroadcasting) and len(module.scales)]
    if not plugins:
        raise InputError(
            f"{type(model).__name__} has no learned scales: this analysis needs a model trained with "
            "plugins.context_broadcasting.enabled=true and plugins.context_broadcasting.scaled=true"
        )
    quantiles = torch.tensor([0.1, 0.9], dtype=torch.float64)
    found = []
    for layer, scale in plugins[0].scales.items():
        low, high = torch.quantile(scale.detach().double().cpu(), quantiles).tolist()
        found.append(ScaleRatio(int(layer), low, high))
    return ScaleRatios(tuple(found))


def draw_scale_ratios(runs: Mapping[str, ScaleRatios]) -> Figure:
    """One line a run, and where positive and negative scales balance."""
    figure, axes = one_plot("Learned scales of Context Broadcasting", "block, counted from 0", "|λ₀.₁| / |λ₀.₉|")
    colours = run_colours(runs)
    for name, ratios in runs.items():
        values = [math.nan if at.ratio is None else at.ratio for at in ratios.layers]
        axes.plot(
            [at.layer for at in ratios.layers], values, "o-", color=colours[name], markersize=4, label=plain(name)
        )
    axes.axhline(1, color=INK, linewidth=1, linestyle="--", label="as negative as positive")
    axes.set_ylim(bottom=0)
    count_layers(axes)
    add_legend(axes)
    return figure
