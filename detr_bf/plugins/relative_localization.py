"""Dense relative localization: predict the distance of two tokens (Liu et al. 2021, NeurIPS, arXiv 2106.03746).

Sections, equations and tables named below are those of its supplementary material; the authors' code is
yhlleo/VTs-Drloc at 6ac2c44.

Shape legend: R rows (images, or streams x images), S = H x W tokens of a grid, C channels, M pairs of an image. Axis 0
of a pair's target is the row, axis 1 the column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.models.resnet import ResNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from detr_bf.common.devices import tensor_on
from detr_bf.common.errors import InputError
from detr_bf.common.structures import TokenBatch
from detr_bf.losses.classification import at_least_float32
from detr_bf.plugins.plugin import Plugin, patches_of, refused, require_vit
from detr_bf.transformer import Encoder
from detr_bf.transformer.blocks import MLP, full_precision

VARIANTS = ("abs", "signed", "ce", "reg", "all")
VARIANCE_WEIGHT = 0.001  # alpha of the variant ``reg`` (Eq. 6)
Grid = tuple[int, int]  # height and width in tokens


def sample_pairs(extent: Tensor, pairs: int) -> Tensor:
    """Draw ``pairs`` positions from ``extent`` (R, 2), height and width in tokens: (R, M, 2, 2) int64 rows and columns.

    All are independent and uniform, so both positions of a pair may be equal.
    """
    share = torch.rand(len(extent), pairs, 2, 2, device=extent.device)
    return (share * extent[:, None, None]).long()


def tokens_at(tokens: Tensor, positions: Tensor, width: int) -> Tensor:
    """Tokens (R, S, C) of a grid ``width`` wide and positions (R, M, 2, 2) -> pairs (R, M, 2C), first token first."""
    index = (positions[..., 0] * width + positions[..., 1]).flatten(1)
    found = tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[2]))
    return found.view(*positions.shape[:2], 2 * tokens.shape[2])


def offsets(positions: Tensor) -> Tensor:
    """Positions (R, M, 2, 2) -> first minus second (R, M, 2) int64, in tokens."""
    return positions[:, :, 0] - positions[:, :, 1]


def distance_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """(R, M, 2) and (R, M, 2) -> (): L1, the mean over images, pairs and axes (Fig. 2)."""
    return F.l1_loss(predicted, target)


def entropy_loss(logits: Sequence[Tensor], offset: Tensor) -> Tensor:
    """Sum the cross-entropies of both axes (Eq. 5): logits (R, M, 2k - 1) of offsets from 1 - k, offsets (R, M, 2)."""
    axes = zip(logits, offset.unbind(-1), strict=True)
    return torch.stack([F.cross_entropy(axis.flatten(0, 1), _classes(axis, at).flatten()) for axis, at in axes]).sum()


def regression_loss(logits: Sequence[Tensor], offset: Tensor) -> Tensor:
    """Sum the losses of both axes from mean and variance of the class distribution (Eq. 6); see entropy_loss."""
    losses = []
    for axis, at in zip(logits, offset.unbind(-1), strict=True):
        mean, variance = index_moments(axis)
        variance = variance + 1e-8
        error = (_classes(axis, at) - mean) ** 2 / variance
        losses.append((error + VARIANCE_WEIGHT * variance.log() / 2).mean())
    return torch.stack(losses).sum()


def index_moments(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (..., n) -> mean and variance (...) of the class index under their softmax."""
    probability, index = logits.softmax(-1), torch.arange(logits.shape[-1], device=logits.device)
    mean = (probability * index).sum(-1)
    return mean, (probability * (index - mean[..., None]) ** 2).sum(-1)


def _classes(logits: Tensor, offset: Tensor) -> Tensor:
    return offset + logits.shape[-1] // 2


def pooled(tokens: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
    """(R, S, C) -> a grid of half the size, 14 x 14 to 7 x 7: average pooling 3 x 3, stride 2, uncounted padding."""
    maps = tokens.transpose(1, 2).unflatten(2, grid)
    small = F.avg_pool2d(maps, 3, stride=2, padding=1, count_include_pad=False)
    return small.flatten(2).transpose(1, 2), (small.shape[2], small.shape[3])


def ramped(weight: float, epoch: float, epochs: int, ramp: int = 20) -> float:
    """Return the weight as in the authors' code: from 0 over ``ramp`` epochs, then to 0 at the last, both linear."""
    if epoch <= ramp:
        return weight * epoch / ramp
    return weight * (1 - (epoch - ramp) / (epochs - ramp))


class PairPredictor(nn.Module):
    """Loss of the predicted distance of two tokens of a grid.

    Args:
        dim: channels C.
        variant: ``abs``, ``signed``, ``ce`` or ``reg``.
        grid: of the tokens, needed for ``ce`` and ``reg``, whose classes depend on it.
        pairs: M.
        normalize: divide distances by the grid's height and width instead of counting tokens.
        hidden: width of both hidden layers (Tables 15 and 16).
    """

    def __init__(
        self,
        dim: int,
        *,
        variant: str = "abs",
        grid: Grid | None = None,
        pairs: int = 64,
        normalize: bool = True,
        hidden: int = 512,
    ) -> None:
        super().__init__()
        for name, value in (("pairs", pairs), ("hidden", hidden)):
            if value < 1:
                raise InputError(f"{name} must be 1 or more, got {value}")
        self.variant = variant
        self.pairs = pairs
        self.normalize = normalize
        self.grid = grid if variant in ("ce", "reg") else None
        self.widths = [1, 1] if self.grid is None else [2 * side - 1 for side in self.grid]
        self.mlp = MLP((2 * dim, hidden, hidden, sum(self.widths)))

    def forward(self, tokens: Tensor, grid: Grid, extent: Tensor | None = None) -> Tensor:
        """Tokens (R, S, C) -> (), in float32 or better.

        ``extent`` (R, 2): height and width, in tokens, of the part of each image to sample from; None: the grid.

        Raises:
            InputError: the grid has one token, or is not the grid of the classes.
        """
        if max(grid) < 2 or (self.grid is not None and grid != self.grid):
            expected = "two tokens or more" if self.grid is None else f"{self.grid}"
            raise InputError(f"relative localization: got a grid of {grid} tokens, expected {expected}")
        with torch.autocast(tokens.device.type, enabled=False):
            if extent is None:
                extent = tensor_on(tokens.device, [grid]).expand(len(tokens), -1)
            positions = sample_pairs(extent, self.pairs)
            predicted = at_least_float32(full_precision(self.mlp, tokens_at(tokens, positions, grid[1])))
            return self._loss(predicted, offsets(positions), extent)

    def _loss(self, predicted: Tensor, offset: Tensor, extent: Tensor) -> Tensor:
        if self.variant == "ce":
            return entropy_loss(predicted.split(self.widths, -1), offset)
        if self.variant == "reg":
            return regression_loss(predicted.split(self.widths, -1), offset)
        target = (offset if self.variant == "signed" else offset.abs()).to(predicted.dtype)
        return distance_loss(predicted, target / extent[:, None] if self.normalize else target)


class RelativeLocalizationLoss(Plugin):
    """Relative localization on the tokens of the last forward pass in training; evaluation does not change.

    The tokens are the output of the last block, before the final norm; in a ResNet the cells of the last feature map,
    in our encoders the memory. ``weight`` is lambda; set it before each epoch for a schedule such as :func:`ramped`.
    """

    name = "relative_localization"

    def __init__(self, predictors: Sequence[PairPredictor], *, weight: float, pool: bool, prefix_tokens: int) -> None:
        super().__init__()
        self.predictors = nn.ModuleList(predictors)
        self.weight = weight
        self.pool = pool
        self.prefix_tokens = prefix_tokens

    def hooks_on(self, model: Any, sources: Sequence[nn.Module]) -> Iterator[RemovableHandle]:
        """Register hooks on the ``sources`` of tokens within ``model``; without sources on its last tokens."""
        first: nn.Module
        last: nn.Module | None
        if isinstance(model, Encoder):
            first, last = model, None
        elif isinstance(model, ResNet):
            first, last = model.conv1, model.global_pool
        else:
            first, last = model.patch_embed, model.norm
        yield first.register_forward_pre_hook(self._begin)
        for index, source in enumerate(sources):
            yield source.register_forward_hook(partial(self._keep_output, index))
        if last is None:
            yield model.register_forward_hook(partial(self._end_encoder, not sources))
        else:
            yield last.register_forward_pre_hook(partial(self._end, not sources))

    # "open" ends with the forward pass: activation checkpointing runs blocks again, and must not keep their tokens.

    def _begin(self, module: Any, args: Any) -> None:
        if self.training:
            self._kept = {"tokens": {}, "open": True}
            if hasattr(module, "dynamic_feat_size"):  # a patch embedding
                self._kept["grid"] = module.dynamic_feat_size(args[0].shape[-2:])

    def _keep_output(self, index: int, module: nn.Module, args: Any, output: Tensor) -> None:
        if self._kept.get("open"):
            self._kept["tokens"][index] = output

    def _end(self, last: bool, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self._kept.pop("open", False) and last:
            self._kept["tokens"][0] = args[0].movedim(1, -1) if isinstance(self._host[0], ResNet) else args[0]

    def _end_encoder(self, last: bool, encoder: nn.Module, args: Any, memory: TokenBatch) -> None:
        if self._kept.pop("open", False):
            self._kept["memory"] = memory
            if last:
                self._kept["tokens"][0] = memory.tokens

    def forward(self, *, weighted: bool = True) -> Tensor:
        """Return ``weight`` times the loss, or the loss alone, () in float32, summed over all sources of tokens.

        Raises:
            InputError: the model was not called in training mode before, or its grid is unsuitable.
        """
        tokens = self._take("tokens")
        losses = [predict(*self._grid(tokens[index])) for index, predict in enumerate(self.predictors)]
        self._kept = {}
        loss = torch.stack(losses).sum()
        return self.weight * loss if weighted else loss

    def _grid(self, tokens: Tensor) -> tuple[Tensor, Grid, Tensor | None]:
        """Return tokens (R, S, C), their grid, and the part of it that each image fills."""
        if "memory" in self._kept:
            return _last_level(tokens, self._kept["memory"])
        if tokens.dim() == 4:  # (R, H, W, C): Swin, ResNet
            patches, grid = tokens.flatten(1, 2), (tokens.shape[1], tokens.shape[2])
        else:
            patches, grid = patches_of(tokens, self.prefix_tokens), self._kept["grid"]
        patches, grid = pooled(patches, grid) if self.pool else (patches, grid)
        return patches, grid, None


def _last_level(tokens: Tensor, memory: TokenBatch) -> tuple[Tensor, Grid, Tensor]:
    """Return the coarsest level of an encoder's tokens; images fill its upper left, the rest is padding.

    Tokens from before the first batch attention have only the clean stream, which is the first.
    """
    height, width = memory.static["spatial_shapes"][-1]
    cells = height * width
    valid = ~memory.per_sample["padding_mask"][: len(tokens), -cells:].unflatten(1, (height, width))
    extent = torch.stack([valid.any(2).sum(1), valid.any(1).sum(1)], dim=-1)
    return tokens[:, -cells:], (height, width), extent


def add_relative_localization(
    model: nn.Module,
    variant: str = "abs",
    *,
    weight: float | None = None,
    pairs: int = 64,
    normalize: bool = True,
    pool: bool | None = None,
    hidden: int = 512,
) -> RelativeLocalizationLoss:
    """Add dense relative localization to a timm ViT, DeiT, Swin or ResNet, or to one of our detectors' encoders.

    Call the returned module after the model, and add its loss to the loss.

    Args:
        model: the bare model.
        variant: ``abs``: the distance; ``signed``: the offset; ``ce``: the offset as a class; ``reg``: a regression
            from these classes; ``all``: the distance after every transformer block, each with its own predictor.
        weight: lambda; None: 0.01 for a ViT (arXiv 2106.03746, section 3 of the supplement), 0.5 for Swin (the authors'
            train.sh). Required for a ResNet or an encoder.
        pairs: M, per image.
        normalize: divide distances by the size of the grid; False: count tokens, as the authors' code does.
        pool: halve the grid first (:func:`pooled`); None: only for a ViT (section 3 of the supplement).
        hidden: width of both hidden layers of the predictor.

    Raises:
        InputError: the model is unsupported or already has the plug-in, the variant is unknown, a ResNet or an encoder
            has no weight, ``pairs`` or ``hidden`` is less than 1, or the variant does not fit the model.
    """
    if variant not in VARIANTS:
        raise InputError(f"variant must be one of {', '.join(VARIANTS)}; got '{variant}'")
    every = variant == "all"
    pool = isinstance(model, VisionTransformer) if pool is None else pool
    sources, dims, grid = _layout(model)
    if pool and grid is not None:
        grid = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
    if weight is None:
        if isinstance(model, Encoder | ResNet):
            raise InputError(f"weight: none was published for a {type(model).__name__}: give one, such as 0.01 or 0.5")
        weight = 0.5 if isinstance(model, SwinTransformer) else 0.01
    if grid is None and (pool or variant in ("ce", "reg")):
        raise InputError(
            f"variant={variant}, pool={pool}: classes and pooling need a grid of one known size, and that of a "
            f"{type(model).__name__} depends on its images: take abs or signed, without pool"
        )
    if every and not sources:
        raise InputError("variant=all needs transformer blocks, and a ResNet has none: take abs or signed")
    predictors = [
        PairPredictor(
            dim, variant="abs" if every else variant, grid=grid, pairs=pairs, normalize=normalize, hidden=hidden
        )
        for dim in (dims if every else dims[-1:])
    ]
    prefix = model.num_prefix_tokens if isinstance(model, VisionTransformer) else 0
    plugin = RelativeLocalizationLoss(predictors, weight=weight, pool=pool, prefix_tokens=prefix)
    plugin.join(model, plugin.hooks_on(model, sources if every else ()))
    return plugin


def _layout(model: nn.Module) -> tuple[list[nn.Module], list[int], Grid | None]:
    """Return the transformer blocks, the channels of their tokens, and the last grid if it has a fixed size."""
    if isinstance(model, Encoder):
        width = next(module.normalized_shape[0] for module in model.modules() if isinstance(module, nn.LayerNorm))
        return list(model.layers), [width] * len(model.layers), None
    if isinstance(model, SwinTransformer):
        height, width = cast("Grid", model.layers[-1].output_resolution)
        blocks = [block for stage in cast("Any", model.layers) for block in stage.blocks]
        return blocks, [block.dim for block in blocks], (height, width)
    if isinstance(model, ResNet):
        return [], [model.num_features], None
    if not isinstance(model, VisionTransformer):
        raise refused(model, "VisionTransformer (ViT, DeiT), SwinTransformer or ResNet", "Encoder")
    vit = require_vit(model)
    return list(vit.blocks), [vit.embed_dim] * len(vit.blocks), vit.patch_embed.grid_size
