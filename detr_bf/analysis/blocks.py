"""Analyses with one value per block of a vision transformer: attention, similarity of patches, learned scales.

Analyses of attention raise InputError for a model that is not a timm ViT with ordinary attention. All analyses of
images raise it if there are no images.

Shape legend: R images, H heads, S tokens with the class token, P patches, D channels of a head, C channels of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from matplotlib.figure import Figure
from timm.layers.attention import Attention
from timm.models.resnet import ResNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from detr_bf.analysis.subject import evaluating, hooked, moved
from detr_bf.classification.batch import LabelledImages
from detr_bf.common.errors import InputError
from detr_bf.plugins import ContextBroadcasting
from detr_bf.plugins.diverse_patch import patch_cosine
from detr_bf.plugins.plugin import patches_of, refused, require_vit
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


def draw_layers(
    runs: Mapping[str, LayerCurve], *, title: str, ylabel: str, xlabel: str = "block, counted from 0"
) -> Figure:
    """Plot the mean over the blocks, one line per run, in a band from the lower to the upper percentile."""
    figure, axes = one_plot(title, xlabel, ylabel)
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


draw_attention_entropy = partial(draw_layers, title="Entropy of attention", ylabel="entropy, nats")
draw_class_token_entropy = partial(draw_layers, title="Entropy of the class token's attention", ylabel="entropy, nats")
draw_attention_distance = partial(
    draw_layers, title="Relative distance of attention", ylabel="distance, sides of the image"
)
draw_patch_similarity = partial(
    draw_layers,
    title="Similarity of patches",
    ylabel="mean |cosine| of pairs",
    xlabel="block of a ViT, stage of Swin and ResNet, counted from 0",
)


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
    queries: dict[int, Tensor] = {}
    for batch in moved(batches, model):
        grid = patch_embed.dynamic_feat_size(batch.images.shape[-2:])

        def keep(layer: int, norm: nn.Module, args: Any, output: Tensor) -> None:
            queries[layer] = output  # (R, H, S, D)

        def finish(layer: int, norm: nn.Module, args: Any, keys: Tensor, grid: tuple[int, int] = grid) -> None:
            logits = queries.pop(layer) * layers[layer].scale @ keys.transpose(-2, -1)
            found[layer].append(measure(logits.softmax(-1), grid).cpu())

        hooks = [layer.q_norm.register_forward_hook(partial(keep, number)) for number, layer in enumerate(layers)]
        hooks += [layer.k_norm.register_forward_hook(partial(finish, number)) for number, layer in enumerate(layers)]
        with evaluating(model), hooked(hooks):
            model(batch.images)
    return found


def attention_layers(model: nn.Module) -> list[Attention]:
    """Return the attention module of every block; InputError for another model or another kind of attention."""
    layers = [block.attn for block in require_vit(model).blocks if hasattr(block, "attn")]  # extra_mlp has none
    others = sorted({type(layer).__name__ for layer in layers if not isinstance(layer, Attention)})
    if others or not layers:
        raise InputError(
            f"{type(model).__name__} has {len(layers)} blocks, with attention of the kind {others}; expected one or "
            "more with timm.layers.Attention, whose queries and keys are known: build the model with timm's ordinary "
            "Block"
        )
    return cast("list[Attention]", layers)


def attention_entropy(model: nn.Module, batches: Iterable[LabelledImages]) -> LayerCurve:
    """Measure the entropy of a timm ViT's attention (Hyeon-Woo et al., ICCV 2023, arXiv 2210.08457, figure 4).

    Mean and percentiles are over images, heads and query tokens. The class token is included as query and as key, so
    the bound is ln S.

    Raises:
        InputError: the model is not a timm ViT with ordinary attention, or there are no images.
    """
    return _entropy(model, batches, slice(None))


def class_token_entropy(model: nn.Module, batches: Iterable[LabelledImages]) -> LayerCurve:
    """Measure the entropy of the class token's attention to all tokens (arXiv 2210.08457, figure 7a).

    Mean and percentiles are over images and heads; the class token is also a key, so the bound is ln S. InputError if
    the model has no class token.
    """
    if not require_vit(model).has_class_token:
        raise InputError(
            f"{type(model).__name__} has no class token: build it with class_token=True, or use attention-entropy, the "
            "entropy of all tokens"
        )
    return _entropy(model, batches, slice(1))


def _entropy(model: nn.Module, batches: Iterable[LabelledImages], queries: slice) -> LayerCurve:
    tokens = 0

    def measure(attention: Tensor, grid: tuple[int, int]) -> Tensor:
        nonlocal tokens
        tokens = attention.shape[-1]
        return torch.special.entr(attention[:, :, queries]).sum(-1)  # (R, H, queries), from 0 to ln S

    values = measure_attention(model, batches, measure)
    return LayerCurve.of(values, bound=math.log(tokens))


def patch_distances(grid: tuple[int, int]) -> Tensor:
    """(P, P) float64: ``|row_i - row_j| / height + |column_i - column_j| / width`` of the patches of a grid."""
    axes = [torch.arange(side, dtype=torch.float64) / side for side in grid]
    positions = torch.cartesian_prod(*axes)
    return torch.cdist(positions, positions, p=1)


def attention_distance(model: nn.Module, batches: Iterable[LabelledImages]) -> LayerCurve:
    """Measure the relative distance of a timm ViT's attention (arXiv 2210.08457, figure 7b).

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


@torch.no_grad()
def patch_similarity(model: nn.Module, batches: Iterable[LabelledImages]) -> LayerCurve:
    """Measure the similarity of an image's patches (Gong et al. 2021, arXiv 2104.12753, section 3, figures 1b and 3).

    It is the mean of |cos| over all pairs of different patches of an image. Mean and percentiles are over images. A ViT
    is measured after each block, without class, distillation and register tokens; Swin and ResNet at the input of each
    down-sampling layer behind their first and after the last stage, where each position is a patch.

    Raises:
        InputError: the model is not timm's ViT, Swin or ResNet, an image has a single patch, or there are no images.
    """
    sources, patches = _patch_sources(model)
    found: list[list[Tensor]] = [[] for _ in sources]

    def look(layer: int, source: nn.Module, args: Any, output: Tensor) -> None:
        images = patches(output)
        if images.shape[1] < 2:
            raise InputError(f"layer {layer} has a single patch, but the analysis compares patches: use larger images")
        found[layer].append(torch.cat([patch_cosine(image[None]) for image in images]).cpu())  # one saves memory

    hooks = (source.register_forward_hook(partial(look, number)) for number, source in enumerate(sources))
    with evaluating(model), hooked(hooks):
        for batch in moved(batches, model):
            model(batch.images)
    return LayerCurve.of(found, bound=1.0)


def _patch_sources(model: nn.Module) -> tuple[list[nn.Module], Callable[[Tensor], Tensor]]:
    """Return the modules whose outputs have patches, and the function from such an output to the patches (R, P, C)."""
    if isinstance(model, VisionTransformer):
        vit = require_vit(model)
        return list(vit.blocks), lambda tokens: patches_of(tokens, vit.num_prefix_tokens)
    if isinstance(model, SwinTransformer):  # timm's stages begin with their down-sampling layer
        return list(model.layers), lambda tokens: tokens.flatten(1, 2)
    if isinstance(model, ResNet):  # act1 is the input of max-pooling
        stages: Any = [model.act1, model.layer1, model.layer2, model.layer3, model.layer4]
        return list(stages), lambda maps: maps.flatten(2).transpose(1, 2)
    raise refused(model, "VisionTransformer (ViT, DeiT), SwinTransformer or ResNet")


@dataclass(frozen=True)
class ScaleRatio:
    """Absolute values of the learned scales of one block, over the channels."""

    layer: int  # from 0
    low: float  # 0.1 quantile
    high: float  # 0.9 quantile
    mean: float

    @property
    def ratio(self) -> float | None:
        """low / high, from 0 to 1: how alike small and large scales are; None before training (0 / 0)."""
        return self.low / self.high if self.high else None


@dataclass(frozen=True)
class ScaleRatios:
    """Absolute values of the learned scales of all blocks that have some."""

    layers: tuple[ScaleRatio, ...]

    def rows(self) -> list[dict[str, object]]:
        """Return a table, one row per block."""
        return [
            {"layer": at.layer, "q10": at.low, "q90": at.high, "ratio": at.ratio, "mean": at.mean} for at in self.layers
        ]


def scale_ratios(model: nn.Module) -> ScaleRatios:
    """Measure |scale| of Context Broadcasting (arXiv 2210.08457, figure 8): quantiles, their ratio, and the mean.

    InputError if the model has no scaled Context Broadcasting.
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
        size = scale.detach().double().cpu().abs()
        low, high = torch.quantile(size, quantiles).tolist()
        found.append(ScaleRatio(int(layer), low, high, size.mean().item()))
    return ScaleRatios(tuple(found))


def draw_scale_ratios(runs: Mapping[str, ScaleRatios]) -> Figure:
    """Plot two lines per run: the ratio of the quantiles, and the mean (dashed)."""
    heading = "Learned scales of Context Broadcasting"
    figure, axes = one_plot(heading, "block, counted from 0", "|λ|: ratio of quantiles, and mean")
    colours = run_colours(runs)
    for name, ratios in runs.items():
        at = [value.layer for value in ratios.layers]
        values = [math.nan if value.ratio is None else value.ratio for value in ratios.layers]
        means = [value.mean for value in ratios.layers]
        axes.plot(at, values, "o-", color=colours[name], markersize=4, label=f"{plain(name)}, |λ|₀.₁ / |λ|₀.₉")
        axes.plot(at, means, "s--", color=colours[name], markersize=4, label=f"{plain(name)}, mean |λ|")
    axes.set_ylim(bottom=0)
    count_layers(axes)
    add_legend(axes)
    return figure
