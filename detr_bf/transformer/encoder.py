"""The one encoder loop.

Shape legend: R rows (streams x images), S tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from detr_bf.batchformer import BatchFormerV2
from detr_bf.layers import FeedForward
from detr_bf.structures import TokenBatch
from detr_bf.transformer.residual import Residual


class Encoder(nn.Module):
    """Encoder layers in turn, batch attention before or after the chosen ones, a last norm for pre-norm layers."""

    def __init__(
        self, layers: Sequence[nn.Module], *, norm: nn.Module | None = None, batch_former: BatchFormerV2 | None = None
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm or nn.Identity()
        self.batch_former = batch_former

    def forward(self, batch: TokenBatch) -> TokenBatch:
        for index, layer in enumerate(self.layers):
            batch = self._batch_attention(batch, index, "before")
            batch = batch.with_tokens(layer(batch))
            batch = self._batch_attention(batch, index, "after")
        return batch.with_tokens(self.norm(batch.tokens))

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
