"""One number a block of a vision transformer: its mean and spread, and the curve over the blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from detr_bf.classification.analysis.figures import add_legend, count_layers, one_plot, run_colours
from detr_bf.report.figures import INK
from detr_bf.report.fonts import plain

LOW, HIGH = 15, 85  # percentiles, as in figures 4 and 7 of Context Broadcasting


@dataclass(frozen=True)
class LayerValue:
    """What was measured in one block."""

    layer: int  # from 0
    mean: float
    low: float  # percentile LOW
    high: float  # percentile HIGH


@dataclass(frozen=True)
class LayerCurve:
    """What was measured in all blocks."""

    layers: tuple[LayerValue, ...]
    bound: float | None = None  # the largest value that can be

    @classmethod
    def of(cls, values: Sequence[Sequence[Tensor]], bound: float | None = None) -> LayerCurve:
        """From tensors of any shape, several of each block, all of whose elements count the same."""
        flat = [np.concatenate([part.flatten().double().numpy() for part in parts]) for parts in values]
        return cls(
            tuple(
                LayerValue(layer, float(of.mean()), *(float(p) for p in np.percentile(of, [LOW, HIGH])))
                for layer, of in enumerate(flat)
            ),
            bound,
        )

    def rows(self) -> list[dict[str, object]]:
        """One a block, for a table."""
        return [
            {"layer": at.layer, "mean": at.mean, f"p{LOW}": at.low, f"p{HIGH}": at.high, "bound": self.bound}
            for at in self.layers
        ]


def draw_layers(runs: Mapping[str, LayerCurve], *, title: str, ylabel: str) -> Figure:
    """The mean over the blocks, one line a run, in a band from the lower to the upper percentile."""
    figure, axes = one_plot(title, "block, counted from 0", ylabel)
    colours = run_colours(runs)
    for name, curve in runs.items():
        at = [value.layer for value in curve.layers]
        low, high = [value.low for value in curve.layers], [value.high for value in curve.layers]
        axes.fill_between(at, low, high, color=colours[name], alpha=0.12, linewidth=0)
        axes.plot(
            at, [value.mean for value in curve.layers], "o-", color=colours[name], markersize=4, label=plain(name)
        )
    for bound in sorted({curve.bound for curve in runs.values() if curve.bound is not None}):
        axes.axhline(bound, color=INK, linewidth=1, linestyle="--", label=f"upper bound {bound:.3f}")
    count_layers(axes)
    add_legend(axes)
    return figure
