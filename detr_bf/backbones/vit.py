"""Plain vision transformers as backbones: any image size, attention in windows, a simple feature pyramid.

Exploring Plain Vision Transformer Backbones for Object Detection (Li et al. 2022, ECCV, arXiv 2203.16527), for the
networks of timm's ``VisionTransformer``: ViT, DeiT, the encoder of a masked autoencoder, DINOv2.

Shape legend: B images, R rows (streams x images), H x W pixels of the padded batch, C channels, h x w patches of an
image, T class, distillation and register tokens before the patches, S = T + h w tokens, G the side of the grid of
learned positions, V windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.norm import LayerNorm2d
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_sam import window_partition, window_unpartition
from torch import Tensor, nn

from detr_bf.backbones.backbone import Network, VitOptions, check_consecutive, select_levels
from detr_bf.batchformer import BatchFormerV2
from detr_bf.common.errors import InputError
from detr_bf.common.structures import TokenBatch

PREFIX_TOKENS = ("cls_token", "dist_token", "reg_token")  # in timm's order
PYRAMID_SCALES = (0.25, 0.5, 1, 2)  # strides of the pyramid in patches
CUBIC = -0.75  # coefficient of the cubic convolution (Keys 1981), torch's
SMOOTH_CUBIC = -0.5  # torch's with antialiasing


def build_vit(vit: VisionTransformer, name: str, options: VitOptions, strides: Sequence[int], finer: bool) -> Network:
    """Build a backbone from a network of timm, whose unused parts are removed (in-place).

    Args:
        vit: the classifier with its weights.
        name: of the network, for messages.
        options: see :class:`VitOptions`.
        strides: of the feature maps: a quarter, half, once and twice the patch size. The map whose stride is the patch
            size is the network's own; the others are made of it (:class:`FeaturePyramid`).
        finer: also return the maps of every finer stride, from 4 on.

    Raises:
        InputError: an unknown stride or block, or a patch embedding of another kind than one convolution.
    """
    patch = side_of_patches(vit, name)
    available = {int(patch * scale): index for index, scale in enumerate(PYRAMID_SCALES) if patch * scale % 1 == 0}
    select_levels(available, strides, name)
    used = list(strides)
    if finer:
        used = [stride for stride in available if 4 <= stride <= strides[-1]]
        check_consecutive(used, strides, name)
    depth = len(vit.blocks)
    for name_of_option, value, usual in (("windows", options.windows, 1), ("class_token", options.class_token, True)):
        if value != usual:
            raise InputError(f"{name_of_option}={value} needs maps, the blocks whose outputs are the feature maps")
    if options.global_blocks and not options.window:
        raise InputError("global_blocks: without windows every block sees the whole image; set window, such as 14")
    if unknown := [block for block in options.global_blocks if block >= depth]:
        given = list(options.global_blocks)
        raise InputError(f"global_blocks={given}: there is no block {unknown[0]}; {name} has 0 to {depth - 1}")
    whole = set(options.global_blocks) or {max(depth * quarter // 4 - 1, 0) for quarter in range(1, 5)}
    body = PlainViT(
        vit,
        [stride / patch for stride in used],
        window=options.window,
        whole=whole if options.window else range(depth),
        antialias=options.antialias,
    )
    cfg: Any = vit.pretrained_cfg
    return Network(
        body=body,
        channels=body.pyramid.channels,
        strides=tuple(used),
        stages=("vit.patch_embed", *(f"vit.blocks.{index}" for index in range(depth))),
        mean=tuple(cfg["mean"]),
        std=tuple(cfg["std"]),
        reads_padding=True,
        blocks=depth,
        block_dim=vit.embed_dim,
    )


def side_of_patches(vit: VisionTransformer, name: str) -> int:
    """Return the side of the patches in pixels.

    Raises:
        InputError: they are not square or not embedded by one convolution, or the network has no blocks.
    """
    embed = vit.patch_embed
    if not isinstance(embed, PatchEmbed):
        raise InputError(f"name={name}: expected patches that one convolution embeds, got {type(embed).__name__}")
    if embed.patch_size[0] != embed.patch_size[1]:
        raise InputError(f"options: expected square patches, got {embed.patch_size[0]} x {embed.patch_size[1]} pixels")
    if not len(vit.blocks):
        raise InputError("options: expected one block or more, got depth=0")
    return embed.patch_size[0]


class PlainViT(nn.Module):
    """The tokens of a vision transformer after its last block and norm, as feature maps.

    - Padding takes no part: it is masked in every attention, and the learned positions are interpolated over each image
      without its padding. The features of an image do not depend on the other images of its batch.
    - In windows there are no class and register tokens, as in the authors' code; the windows begin at the upper left
      corner, and those at the right and lower border hold fewer patches.
    - The last norm of the network is kept, which the authors leave out: detectors without a norm in their input
      projections would see the unscaled sum of all blocks.

    Args:
        vit: network of timm; its classifier is removed, and with ``window`` its class and register tokens.
        scales: strides of the feature maps, in patches.
        window: side of the windows in patches, 0 for none.
        whole: blocks that attend to the whole image.
        antialias: interpolate the positions with antialiasing.
    """

    def __init__(
        self,
        vit: VisionTransformer,
        scales: Sequence[float],
        *,
        window: int,
        whole: Sequence[int] | set[int],
        antialias: bool = False,
    ) -> None:
        super().__init__()
        unused: Any = without_head(vit)
        if window:
            if vit.pos_embed is not None and not vit.no_embed_class:
                vit.pos_embed = nn.Parameter(vit.pos_embed.detach()[:, vit.num_prefix_tokens :])
            unused.cls_token = unused.dist_token = unused.reg_token = None
            vit.num_prefix_tokens = 0
        self.vit = vit
        self.pyramid = FeaturePyramid(vit.embed_dim, scales)
        self.window, self.whole, self.antialias = window, frozenset(whole), antialias

    def forward(
        self, images: Tensor, padding_mask: Tensor | None = None, batch_former: BatchFormerV2 | None = None
    ) -> list[Tensor]:
        """Return maps (R, C, h, w), fine to coarse.

        Args:
            images: (B, 3, H, W), normalised.
            padding_mask: (B, H, W) bool, True = padding.
            batch_former: batch attention between the blocks, which may fork the batch.
        """
        patches, padding = embedded_patches(self.vit, images, padding_mask)
        batch = self._blocks(self._with_positions(patches, padding), padding, batch_former)
        padding = batch.per_sample["grid"]
        tokens = self.vit.norm(batch.tokens)[:, self.vit.num_prefix_tokens :]
        grid = tokens.masked_fill(padding.flatten(1)[..., None], 0).unflatten(1, padding.shape[1:])
        return self.pyramid(grid.permute(0, 3, 1, 2).contiguous(), padding)

    def _with_positions(self, patches: Tensor, padding: Tensor) -> Tensor:
        """(B, h, w, C) -> (B, S, C): add the positions, and the tokens before the patches."""
        prefix, places = positions_of(self.vit, padding, antialias=self.antialias)
        tokens = (patches + places).flatten(1, 2)
        if prefix.shape[1]:  # some runtimes cannot join a part without tokens
            tokens = torch.cat([prefix.expand(patches.shape[0], -1, -1), tokens], dim=1)
        return self.vit.norm_pre(self.vit.pos_drop(tokens))

    def _blocks(self, tokens: Tensor, padding: Tensor, batch_former: BatchFormerV2 | None) -> TokenBatch:
        """(B, S, C) -> (R, S, C): all blocks; consecutive ones in windows share a division of the image.

        ``per_sample`` holds ``padding_mask`` (R, S), its attention ``bias`` (R, 1, 1, S) and that of the ``grid`` of
        patches (R, h, w).
        """
        prefix = padding.new_zeros(padding.shape[0], self.vit.num_prefix_tokens)
        hidden = torch.cat([prefix, padding.flatten(1)], dim=1)
        batch = TokenBatch(
            tokens,
            {"padding_mask": hidden, "bias": attention_bias(hidden, tokens), "grid": padding},
            {"spatial_shapes": ((1, prefix.shape[1]), (padding.shape[1], padding.shape[2]))},
        )
        cuts = () if batch_former is None else batch_former.cuts
        runs = groupby(range(len(self.vit.blocks)), lambda each: (each in self.whole, sum(cut <= each for cut in cuts)))
        for (whole, _), numbers in runs:
            first, *others = numbers
            blocks = [self.vit.blocks[number] for number in (first, *others)]
            batch = with_batch_attention(batch_former, batch, first, "before")
            tokens, per_sample = batch.tokens, batch.per_sample
            if whole:
                for block in blocks:
                    tokens = block(tokens, attn_mask=per_sample["bias"])
            else:
                tokens = self._in_windows(blocks, tokens, per_sample["grid"])
            batch = with_batch_attention(batch_former, batch.with_tokens(tokens), first + len(others), "after")
        return batch

    def _in_windows(self, blocks: Sequence[nn.Module], tokens: Tensor, padding: Tensor) -> Tensor:
        """(R, h w, C) -> (R, h w, C)."""
        size = (padding.shape[1], padding.shape[2])
        seen, _ = window_partition(~padding[..., None], self.window)  # cells beyond the image are False, as padding
        bias = attention_bias(~seen.flatten(1), tokens)
        windows, padded = window_partition(tokens.unflatten(1, size), self.window)
        rows = windows.flatten(1, 2)  # (R V, window^2, C)
        for block in blocks:
            rows = block(rows, attn_mask=bias)
        return window_unpartition(rows.view_as(windows), self.window, size, padded).flatten(1, 2)


def with_batch_attention(former: BatchFormerV2 | None, batch: TokenBatch, block: int, position: str) -> TokenBatch:
    """Apply batch attention before or after a block, if there is any."""
    return batch if former is None else _batch_attention(former, batch, block, position)


@torch.compiler.disable  # a backbone is compiled as a whole, and batch attention may contain collectives
def _batch_attention(former: BatchFormerV2, batch: TokenBatch, block: int, position: str) -> TokenBatch:
    return former(batch, layer=block, position=position)


def without_head(vit: VisionTransformer) -> VisionTransformer:
    """Remove the classifier of a network of timm, and its pooling (in-place)."""
    unused: Any = vit
    if isinstance(vit.norm, nn.Identity):  # networks that pool the patches have their last norm behind the pooling
        vit.norm = vit.fc_norm
    unused.head = unused.head_drop = unused.fc_norm = nn.Identity()
    unused.head_dist = unused.attn_pool = None
    return vit


def embedded_patches(
    vit: VisionTransformer, images: Tensor, padding_mask: Tensor | None, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """Embed the patches of normalised images, padded to multiples of ``multiple`` patches.

    Args:
        images: (B, 3, H, W).
        padding_mask: (B, H, W) bool, True = padding; None: no padding.

    Returns:
        The patches (B, h, w, C) and the mask (B, h, w) of those that begin in the padding.
    """
    side = vit.patch_embed.patch_size[0]
    bottom, right = (-length % (side * multiple) for length in images.shape[-2:])
    if padding_mask is None:
        padding_mask = images.new_zeros(images.shape[0], *images.shape[-2:], dtype=torch.bool)
    patches = vit.patch_embed.proj(F.pad(images, (0, right, 0, bottom))).permute(0, 2, 3, 1)
    padding = F.pad(padding_mask, (0, right, 0, bottom), value=True)[:, ::side, ::side]
    return vit.patch_embed.norm(patches), padding


def positions_of(vit: VisionTransformer, padding: Tensor, *, antialias: bool = False) -> tuple[Tensor, Tensor]:
    """Return the tokens before the patches (1, T, C), and the positions (B, h, w, C) of the patches.

    Positions of these tokens come first in the learned table, as far as it has them.
    """
    known = [getattr(vit, name, None) for name in PREFIX_TOKENS]
    none = vit.patch_embed.proj.weight.new_zeros(1, 0, vit.embed_dim)
    prefix = torch.cat([none, *(token for token in known if token is not None)], dim=1)
    if vit.pos_embed is None:
        return prefix, prefix.new_zeros(1, 1, 1, 1)
    count = vit.pos_embed.shape[1] - vit.patch_embed.num_patches
    table = vit.pos_embed[0, count:].unflatten(0, vit.patch_embed.grid_size)
    if count and prefix.shape[1]:
        prefix = prefix + F.pad(vit.pos_embed[:, :count], (0, 0, 0, prefix.shape[1] - count))
    return prefix, interpolated_positions(table, padding, antialias=antialias).to(table.dtype)


def interpolated_positions(table: Tensor, padding: Tensor, *, antialias: bool = False) -> Tensor:
    """Interpolate positions (G, G, C) over the patches of each image that are not padding, bicubic: (B, h, w, C).

    For an image without padding the same as torch's ``interpolate(mode="bicubic", antialias=antialias)``; written as
    two products with matrices, which every runtime has, and which are deterministic in training on a GPU.

    Args:
        padding: (B, h, w) bool; the patches of an image lie in its upper left corner.
    """
    rows, columns = (~padding).any(2).sum(1), (~padding).any(1).sum(1)  # (B,)
    height, width = table.shape[:2]
    weights = smooth_cubic_weights if antialias else cubic_weights
    down, across = weights(rows, padding.shape[1], height), weights(columns, padding.shape[2], width)
    return torch.einsum("bhy,bwx,yxc->bhwc", down, across, table.to(down.dtype))


def cubic_weights(lengths: Tensor, count: int, side: int) -> Tensor:
    """Weights (B, count, side) that interpolate ``side`` values to the first ``lengths`` (B,) of ``count`` places."""
    step = side / lengths.clamp(min=1)[:, None]
    places = (torch.arange(count, device=lengths.device) + 0.5) * step - 0.5  # in cells of the table
    left = places.floor()
    cells = torch.arange(side, device=lengths.device)
    weights = torch.zeros(*places.shape, side, device=lengths.device)
    for neighbour in (-1, 0, 1, 2):
        near = (left + neighbour).clamp(0, side - 1)[..., None] == cells
        weights = weights + near * cubic_kernel((places - left - neighbour).abs())[..., None]
    return weights


def smooth_cubic_weights(lengths: Tensor, count: int, side: int) -> Tensor:
    """Weights (B, count, side) with antialiasing, see :func:`cubic_weights`.

    The kernel is as many times wider as two places are cells apart, if these are more than one.
    """
    step = side / lengths.clamp(min=1)[:, None]
    places = (torch.arange(count, device=lengths.device) + 0.5) * step
    cells = torch.arange(side, device=lengths.device) + 0.5
    distance = (cells - places[..., None]).abs() / step.clamp(min=1)[..., None]
    weights = torch.where(distance < 2, cubic_kernel(distance, SMOOTH_CUBIC), 0.0)
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0, 1.0, total)  # places in the padding may be beyond all cells


def cubic_kernel(distance: Tensor, coefficient: float = CUBIC) -> Tensor:
    """Kernel of the cubic convolution at distances from 0 to 2."""
    a = coefficient
    inner = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    outer = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return torch.where(distance <= 1, inner, outer)


def attention_bias(padding: Tensor, like: Tensor) -> Tensor:
    """Mask (R, S) bool, True = padding -> bias (R, 1, 1, S): -inf for padding, but 0 where a row holds nothing else."""
    hidden = padding & ~padding.all(1, keepdim=True)  # a softmax over nothing is NaN
    return like.new_zeros(hidden.shape).masked_fill(hidden, -torch.inf)[:, None, None]


class FeaturePyramid(nn.Module):
    """Simple feature pyramid: maps of several strides, each from the last map alone (section 3, Figure 2c).

    A quarter of the patch size: two transposed convolutions with a norm and GELU between them; half: one; once: the map
    itself; twice: 2 x 2 max pooling. The two convolutions with which the authors bring every map to 256 channels are
    left to the detector, which projects each map to its own width.

    ``channels`` are those of the maps: a quarter, half, all and all of ``dim``.
    """

    def __init__(self, dim: int, scales: Sequence[float]) -> None:
        super().__init__()
        up = nn.ConvTranspose2d
        built = {
            0.25: lambda: nn.Sequential(
                up(dim, dim // 2, 2, stride=2), LayerNorm2d(dim // 2), nn.GELU(), up(dim // 2, dim // 4, 2, stride=2)
            ),
            0.5: lambda: up(dim, dim // 2, 2, stride=2),
            1: nn.Identity,
            2: lambda: nn.MaxPool2d(2, ceil_mode=True),
        }
        self.levels = nn.ModuleList(built[scale]() for scale in scales)
        self.scales = tuple(scales)
        self.channels = tuple(int(dim * min(scale, 1)) for scale in scales)

    def forward(self, grid: Tensor, padding: Tensor) -> list[Tensor]:
        """Map (B, C, h, w) and its mask (B, h, w), True = padding -> one map for each scale."""
        maps = []
        for scale, level in zip(self.scales, self.levels, strict=True):
            if scale > 1:  # padding is never the largest value, and a cell of nothing else is 0
                pooled = level(grid.masked_fill(padding[:, None], torch.finfo(grid.dtype).min))
                maps.append(pooled * level((~padding[:, None]).to(grid.dtype)))
            else:
                maps.append(level(grid))
        return maps
