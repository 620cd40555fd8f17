"""Analyses with one value per block of a vision transformer: attention, similarity of patches, learned scales.

Shape legend: R images, H heads, S tokens with the class token, P patches, D channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from matplotlib.figure import Figure
from timm.layers.attention import Attention
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from detr_bf.classification.analysis.subject import evaluating, hooked, moved
from detr_bf.classification.batch import LabelledImages
from detr_bf.errors import InputError
from detr_bf.plugins import ContextBroadcasting
from detr_bf.plugins.diverse_patch import cosine_loss
from detr_bf.plugins.plugin import patches_of, require_vit
from detr_bf.report.figures import INK, add_legend, count_layers, one_plot, run_colours
from detr_bf.report.fonts import plain

LOW, HIGH = 15, 85  # percentiles, as in figures 4 and 7 of Context Broadcasting

Measure = Callable[[Tensor, tuple[int, int]], Tensor]  # attention (R, H, S, S) and the grid of patches -> any shape


@dataclass(frozen=True)
class LayerValue:
    """Statistics of the values of one block."""

    layer: int  # from 0
    mean: float
    low: float  # percentile LOW
    high: float  # percentile HIGH


@dataclass(frozen=True)
class LayerCurve:
    """Statistics of the values of all blocks."""

    layers: tuple[LayerValue, ...]
    bound: float | None = None  # upper bound of the values

    @classmethod
    def of(cls, values: Sequence[Sequence[Tensor]], bound: float | None = None) -> LayerCurve:
        """Create the curve from [block][batch] tensors of any shape; all elements of a block have equal weight."""
        layers = []
        for layer, parts in enumerate(values):
            flat = np.concatenate([part.flatten().double().numpy() for part in parts])
            low, high = (float(p) for p in np.percentile(flat, [LOW, HIGH]))
            layers.append(LayerValue(layer, float(flat.mean()), low, high))
        return cls(tuple(layers), bound)

    def rows(self) -> list[dict[str, object]]:
        """Return a table, one row per block."""
        return [
            {"layer": at.layer, "mean": at.mean, f"p{LOW}": at.low, f"p{HIGH}": at.high, "bound": self.bound}
            for at in self.layers
        ]


def draw_layers(runs: Mapping[str, LayerCurve], *, title: str, ylabel: str) -> Figure:
    """Plot the mean over the blocks, one line per run, in a band from the lower to the upper percentile."""
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


@torch.no_grad()
def measure_attention(model: nn.Module, batches: Iterable[LabelledImages], measure: Measure) -> list[list[Tensor]]:
    """Apply ``measure`` to the attention weights of every block: [block][batch], on the CPU.

    The weights are computed from the queries and keys after their norms, because fused kernels do not return them; they
    are those before dropout.

    Raises:
        InputError: the model is not a timm ViT with ordinary attention, or there are no images.
    """
    layers = attention_layers(model)
    patch_embed: Any = require_vit(model).patch_embed
    found: list[list[Tensor]] = [[] for _ in layers]
    for batch in moved(batches, model):
        grid = patch_embed.dynamic_feat_size(batch.images.shape[-2:])

        def look(layer: int, attention: Tensor, grid: tuple[int, int] = grid) -> None:
            found[layer].append(measure(attention, grid).cpu())

        with evaluating(model), hooked(_hooks(layers, look)):
            model(batch.images)
    return found


def attention_layers(model: nn.Module) -> list[Attention]:
    """Return the attention module of every block.

    Raises:
        InputError: the model is not a timm ViT, or has another kind of attention.
    """
    layers = [getattr(block, "attn", None) for block in require_vit(model).blocks]
    others = sorted({type(layer).__name__ for layer in layers if not isinstance(layer, Attention)})
    if others or not layers:
        raise InputError(
            f"{type(model).__name__} has {len(layers)} blocks, with attention of the kind {others}; expected one or "
            "more with timm.layers.Attention, whose queries and keys are known: build the model with timm's ordinary "
            "Block"
        )
    return cast("list[Attention]", layers)


def _hooks(layers: list[Attention], look: Callable[[int, Tensor], None]) -> Iterator[RemovableHandle]:
    queries: dict[int, Tensor] = {}

    def keep(layer: int, norm: nn.Module, args: Any, output: Tensor) -> None:
        queries[layer] = output  # (R, H, S, D)

    def finish(layer: int, norm: nn.Module, args: Any, keys: Tensor) -> None:
        logits = queries.pop(layer) * layers[layer].scale @ keys.transpose(-2, -1)
        look(layer, logits.softmax(-1))

    for number, layer in enumerate(layers):
        yield layer.q_norm.register_forward_hook(partial(keep, number))
        yield layer.k_norm.register_forward_hook(partial(finish, number))


def attention_entropy(model: nn.Module, batches: Iterable[LabelledImages]) -> LayerCurve:
    """Measure the entropy of a timm ViT's attention (Hyeon-Woo et al., ICCV 2023, arXiv 2210.08457, figures 4 and 7).

    Mean and percentiles are over images, heads and query tokens. The class token is included as query and as key, so
    the bound is ln S.

    Raises:
        InputError: the model is not a timm ViT with ordinary attention, or there are no images.
    """
    tokens = 0

    def measure(attention: Tensor, grid: tuple[int, int]) -> Tensor:
        nonlocal tokens
        tokens = attention.shape[-1]
        return torch.special.entr(attention).sum(-1)  # (R, H, S), from 0 to ln S

    values = measure_attention(model, batches, measure)
    return LayerCurve.of(values, bound=math.log(tokens))


def draw_attention_entropy(runs: Mapping[str, LayerCurve]) -> Figure:
    """Plot one line per run, and the bound."""
    return draw_layers(runs, title="Entropy of attention", ylabel="entropy, nats")


def patch_distances(grid: tuple[int, int]) -> Tensor:
    """(P, P) float64: ``|row_i - row_j| / height + |column_i - column_j| / width`` of the patches of a grid."""
    axes = [torch.arange(side, dtype=torch.float64) / side for side in grid]
    positions = torch.cartesian_prod(*axes)
    return torch.cdist(positions, positions, p=1)


def attention_distance(model: nn.Module, batches: Iterable[LabelledImages]) -> LayerCurve:
    """Measure the relative distance of a timm ViT's attention (arXiv 2210.08457, figures 4 and 7).

    The distance of patch i is the sum over the patches j of a_ij |p_i - p_j|, with coordinates from 0 to 1. Mean and
    percentiles are over images, heads and patches i; the mean over all pairs is P - 1 times smaller. Class,
    distillation and register tokens have no position and are left out as queries and keys; attention to them counts as
    distance 0, because the weights a_ij are not normalised again.

    Raises:
        InputError: the model is not a timm ViT with ordinary attention, or there are no images.
    """
    prefix = require_vit(model).num_prefix_tokens

    def measure(attention: Tensor, grid: tuple[int, int]) -> Tensor:
        between_patches = attention[..., prefix:, prefix:]
        return (between_patches * patch_distances(grid).to(attention)).sum(-1)

    return LayerCurve.of(measure_attention(model, batches, measure))


def draw_attention_distance(runs: Mapping[str, LayerCurve]) -> Figure:
    """Plot one line per run."""
    return draw_layers(runs, title="Relative distance of attention", ylabel="distance, sides of the image")


@torch.no_grad()
def patch_similarity(model: nn.Module, batches: Iterable[LabelledImages]) -> LayerCurve:
    """Measure the similarity of an image's patches after each block (Gong et al. 2021, arXiv 2104.12753, figures 1, 3).

    It is the mean of |cos| over all pairs of different patches of an image. Mean and percentiles are over images.
    Class, distillation and register tokens are left out.

    Raises:
        InputError: the model is not a timm ViT, or there are no images.
    """
    vit = require_vit(model)
    found: list[list[Tensor]] = [[] for _ in vit.blocks]

    def look(layer: int, block: nn.Module, args: Any, output: Tensor) -> None:
        patches = patches_of(output, vit.num_prefix_tokens)
        found[layer].append(torch.stack([cosine_loss(image[None]) for image in patches]).cpu())

    hooks = (block.register_forward_hook(partial(look, number)) for number, block in enumerate(vit.blocks))
    with evaluating(model), hooked(hooks):
        for batch in moved(batches, model):
            model(batch.images)
    return LayerCurve.of(found, bound=1.0)


def draw_patch_similarity(runs: Mapping[str, LayerCurve]) -> Figure:
    """Plot one line per run."""
    return draw_layers(runs, title="Similarity of patches", ylabel="mean |cosine| of pairs")


@dataclass(frozen=True)
class ScaleRatio:
    """Quantiles of the learned scales of one block."""

    layer: int  # from 0
    low: float  # 0.1 quantile over the channels
    high: float  # 0.9 quantile

    @property
    def ratio(self) -> float | None:
        """|low| / |high|: below 1 mostly positive scales, above 1 mostly negative; None before training (0 / 0)."""
        return abs(self.low) / abs(self.high) if self.high else None


@dataclass(frozen=True)
class ScaleRatios:
    """Quantiles of the learned scales of all blocks that have some."""

    layers: tuple[ScaleRatio, ...]

    def rows(self) -> list[dict[str, object]]:
        """Return a table, one row per block."""
        return [{"layer": at.layer, "q10": at.low, "q90": at.high, "ratio": at.ratio} for at in self.layers]


def scale_ratios(model: nn.Module) -> ScaleRatios:
    """Measure the learned scales of Context Broadcasting (arXiv 2210.08457, figure 8): quantiles over the channels.

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
    """Plot one line per run, and the ratio 1 of balanced positive and negative scales."""
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
