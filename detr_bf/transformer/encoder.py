"""Encoder loop, encoder layer and token self-attention.

Shape legend: R rows (streams x images), S tokens, C channels. ``x`` is the input of the residual branch: already
normalised in a pre-norm layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from detr_bf.batchformer import BatchFormerV2
from detr_bf.common.structures import TokenBatch
from detr_bf.transformer.attention import MultiHeadAttention
from detr_bf.transformer.blocks import FeedForward, Residual


class Encoder(nn.Module):
    """Encoder layers in sequence, with batch attention before or after chosen layers and an optional final norm.

    Args:
        layers: tokens -> (R, S, C).
        norm: applied after the last layer (for pre-norm layers).
        batch_former: batch attention, or None.
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
