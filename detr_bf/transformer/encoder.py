"""The one encoder loop.

Shape legend: R rows (streams x images), S tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from detr_bf.batchformer import BatchFormerV2
from detr_bf.layers import FeedForward
from detr_bf.structures import TokenBatch
from detr_bf.transformer.residual import Residual


class Encoder(nn.Module):
    """Encoder layers in turn, batch attention before or after the chosen ones, a last norm for pre-norm layers.

    Args:
        layers: tokens -> (R, S, C).
        norm: of the last layer's tokens.
        batch_former: batch attention, or None.
        recompute: keep of a layer only what enters it, and work out the rest again in the backward pass, with the same
            random numbers. Batch attention is not worked out again: its processes may exchange tokens for it.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        norm: nn.Module | None = None,
        batch_former: BatchFormerV2 | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm or nn.Identity()
        self.batch_former = batch_former
        self.recompute = recompute

    def forward(self, batch: TokenBatch) -> TokenBatch:
        for index, layer in enumerate(self.layers):
            batch = self._batch_attention(batch, index, "before")
            batch = batch.with_tokens(self._run(layer, batch))
            batch = self._batch_attention(batch, index, "after")
        return batch.with_tokens(self.norm(batch.tokens))

    def _run(self, layer: nn.Module, batch: TokenBatch) -> Tensor:
        def run(tokens: Tensor) -> Tensor:  # its argument tells the device whose random numbers are to be repeated
            return layer(batch.with_tokens(tokens))

        if not self.recompute or not torch.is_grad_enabled():
            return run(batch.tokens)
        result: Tensor = checkpoint(run, batch.tokens, use_reentrant=False)
        return result

    def _batch_attention(self, batch: TokenBatch, layer: int, position: str) -> TokenBatch:
        return batch if self.batch_former is None else self.batch_former(batch, layer=layer, position=position)


class EncoderLayer(nn.Module):
    """Attention among the tokens of an image, then a feed-forward network.

    Args:
        attention: (x (R, S, C), batch) -> (R, S, C).
    """

    def __init__(
        self, attention: nn.Module, *, dim: int, feedforward_dim: int, dropout: float = 0.0, pre_norm: bool = False
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_residual = Residual(dim, dropout=dropout, pre_norm=pre_norm)
        self.feed_forward = FeedForward(dim, feedforward_dim, dropout)
        self.feed_forward_residual = Residual(dim, dropout=dropout, pre_norm=pre_norm)

    def forward(self, batch: TokenBatch) -> Tensor:
        """(R, S, C) -> (R, S, C)."""
        tokens = self.attention_residual(batch.tokens, lambda x: self.attention(x, batch))
        return self.feed_forward_residual(tokens, self.feed_forward)
