"""Conversion of feature maps to tokens, encoder loop, encoder layer and token self-attention.

Shape legend: B images, R rows (streams x images), S tokens (the cells of all maps one after another), C channels, N
levels. ``x`` is the input of the residual branch: already normalised in a pre-norm layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from detr_bf.batchformer import BatchFormerV2
from detr_bf.common.devices import tensor_on
from detr_bf.common.structures import FeatureMap, TokenBatch, resize_mask
from detr_bf.transformer.attention import MultiHeadAttention
from detr_bf.transformer.blocks import FeedForward, Residual


class FeatureTokens(nn.Module):
    """Project each map to the width of the transformer, flatten it and attach mask and position encoding.

    Args:
        projections: one per level, (B, C_l, h, w) -> (B, C, h', w'). If there are more projections than maps, the
            first additional one reads the last map, and each further one the output of the one before.
        position: padding mask (B, h, w) -> (B, h * w, C); None: the tokens have no positions.
        level_embedding: add a learned vector (N, C) to the positions of each level, or None.
        strides: pixels per cell of each level, to divide pixels of the images by those of the level; None: count whole
            cells, as the authors' codes do, so that a cell that an image fills in part counts fully.
    """

    def __init__(
        self,
        projections: Sequence[nn.Module],
        position: nn.Module | None,
        *,
        level_embedding: nn.Parameter | None = None,
        strides: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.projections = nn.ModuleList(projections)
        self.position = position
        self.level_embedding = level_embedding
        self.strides = strides

    def forward(self, features: Sequence[FeatureMap], padding_mask: Tensor) -> TokenBatch:
        """Feature maps of images with ``padding_mask`` (B, H, W) -> tokens (B, S, C).

        ``per_sample`` holds ``padding_mask`` (B, S), ``position`` (B, S, C), ``valid_ratios`` (B, N, 2), the
        unpadded fraction of each level's width and height, and ``image_size`` (B, 2), the unpadded width and height in
        pixels.
        """
        levels = list(self._levels(features, padding_mask))
        masks = [level.padding_mask for level in levels]
        size = unpadded(padding_mask)
        filled = [unpadded(mask) for mask in masks] if self.strides is None else [size / each for each in self.strides]
        extents = [tensor_on(mask.device, [mask.shape[2], mask.shape[1]]) for mask in masks]
        positions = {} if self.position is None else {"position": self._positions(self.position, masks)}
        return TokenBatch(
            torch.cat([level.tensor.flatten(2).transpose(1, 2) for level in levels], dim=1),
            positions
            | {
                "padding_mask": torch.cat([mask.flatten(1) for mask in masks], dim=1),
                "valid_ratios": torch.stack(
                    [cells / extent for cells, extent in zip(filled, extents, strict=True)], dim=1
                ),
                "image_size": size,
            },
            {"spatial_shapes": tuple((mask.shape[1], mask.shape[2]) for mask in masks)},
        )

    def _positions(self, position: nn.Module, masks: Sequence[Tensor]) -> Tensor:
        """Return the positions (B, S, C) of the cells of all padding masks (B, h, w)."""
        positions = [position(mask) for mask in masks]
        if self.level_embedding is not None:
            positions = [x + vector for x, vector in zip(positions, self.level_embedding, strict=True)]
        return torch.cat(positions, dim=1)

    def _levels(self, features: Sequence[FeatureMap], padding_mask: Tensor) -> Iterator[FeatureMap]:
        """Yield the projected maps, then those computed from the last map."""
        for project, feature in zip(self.projections, features, strict=False):
            yield FeatureMap(project(feature.tensor), feature.padding_mask)
        source = features[-1].tensor
        for project in self.projections[len(features) :]:
            source = project(source)
            yield FeatureMap(source, resize_mask(padding_mask, source.shape[-2:]))


def unpadded(padding_mask: Tensor) -> Tensor:
    """Return width and height (B, 2), float, of the unpadded part of a mask (B, H, W)."""
    valid = ~padding_mask
    return torch.stack([valid[:, 0].sum(1), valid[:, :, 0].sum(1)], dim=-1).float()


class Encoder(nn.Module):
    """Encoder layers in sequence, with batch attention before or after chosen layers and an optional final norm.

    Args:
        layers: tokens -> (R, S, C).
        norm: applied after the last layer (for pre-norm layers).
        activation_checkpointing: store only the input of each layer and recompute its activations in the backward pass,
            with the same random numbers. Batch attention is not recomputed, because it may contain collectives.
        position_scale: (R, S, C) -> (R, S, C), factor of the positions in a layer as a function of its input, one
            module for all layers (DAB-DETR, Liu et al. 2022, arXiv 2201.12329); None: positions are not scaled.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        norm: nn.Module | None = None,
        batch_former: BatchFormerV2 | None = None,
        activation_checkpointing: bool = False,
        position_scale: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm or nn.Identity()
        self.position_scale = position_scale
        self.batch_former = batch_former
        self.activation_checkpointing = activation_checkpointing

    def forward(self, batch: TokenBatch) -> TokenBatch:
        for index, layer in enumerate(self.layers):
            batch = self._batch_attention(batch, index, "before")
            batch = batch.with_tokens(self._run(layer, self._with_scaled_position(batch)))
            batch = self._batch_attention(batch, index, "after")
        return batch.with_tokens(self.norm(batch.tokens))

    def _run(self, layer: nn.Module, batch: TokenBatch) -> Tensor:
        def run(tokens: Tensor) -> Tensor:  # checkpoint() reads from this argument which device's RNG to restore
            return layer(batch.with_tokens(tokens))

        if not self.activation_checkpointing or not torch.is_grad_enabled():
            return run(batch.tokens)
        result: Tensor = checkpoint(run, batch.tokens, use_reentrant=False)
        return result

    def _with_scaled_position(self, batch: TokenBatch) -> TokenBatch:
        if self.position_scale is None:
            return batch
        position = batch.per_sample["position"] * self.position_scale(batch.tokens)
        return replace(batch, per_sample={**batch.per_sample, "position": position})

    def _batch_attention(self, batch: TokenBatch, layer: int, position: str) -> TokenBatch:
        return batch if self.batch_former is None else self.batch_former(batch, layer=layer, position=position)


class EncoderLayer(nn.Module):
    """Attention between the tokens of an image, then a feed-forward network.

    Args:
        attention: (x (R, S, C), batch) -> (R, S, C).
    """

    def __init__(
        self,
        attention: nn.Module,
        *,
        dim: int,
        feedforward_dim: int,
        dropout: float = 0.0,
        pre_norm: bool = False,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_residual = Residual(dim, dropout=dropout, pre_norm=pre_norm)
        self.feed_forward = FeedForward(dim, feedforward_dim, dropout, activation=activation)
        self.feed_forward_residual = Residual(dim, dropout=dropout, pre_norm=pre_norm)

    def forward(self, batch: TokenBatch) -> Tensor:
        """(R, S, C) -> (R, S, C)."""
        tokens = self.attention_residual(batch.tokens, lambda x: self.attention(x, batch))
        return self.feed_forward_residual(tokens, self.feed_forward)


class TokenAttention(nn.Module):
    """Multi-head self-attention between the tokens of each image."""

    def __init__(self, dim: int, *, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(dim, heads, dropout)

    def forward(self, x: Tensor, batch: TokenBatch) -> Tensor:
        """(R, S, C) -> (R, S, C)."""
        with_position = x + batch.per_sample["position"]
        return self.attention(with_position, with_position, x, batch.per_sample["padding_mask"])
