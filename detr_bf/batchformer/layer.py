"""A transformer encoder layer whose sequence is the batch, on the operators made for that.

Shape legend: B images, S tokens of an image, C channels, H heads. B is the sequence and S the number of sequences.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.batchformer.gather import Exchange
from detr_bf.ops import batch_attention_packed, relu_dropout, residual_dropout


class BatchEncoderLayer(nn.TransformerEncoderLayer):
    """``nn.TransformerEncoderLayer(dim, heads, feedforward_dim, dropout)``, post-norm with ReLU, computed differently.

    Parameters, their names and the result are those of the original. Tokens stay (B, S, C) throughout, query, key and
    value stay in one tensor, and no dropout mask is drawn or kept in memory.
    """

    def __init__(self, dim: int, heads: int, *, feedforward_dim: int, dropout: float) -> None:
        super().__init__(dim, heads, dim_feedforward=feedforward_dim, dropout=dropout)

    def forward(  # type: ignore[override]
        self, tokens: Tensor, ignored: Tensor | None = None, exchange: Exchange | None = None
    ) -> Tensor:
        """Mix (B, S, C) over B, with ``exchange`` over the A images of all processes.

        ``ignored`` (B, S) bool, with ``exchange`` (A, P): True = nobody attends to it.
        """
        attended = self._attend(tokens, ignored, exchange)
        tokens = self.norm1(residual_dropout(tokens, attended, self._now(self.dropout1.p)))
        hidden = relu_dropout(self.linear1(tokens), self._now(self.dropout.p))
        return self.norm2(residual_dropout(tokens, self.linear2(hidden), self._now(self.dropout2.p)))

    def _attend(self, tokens: Tensor, ignored: Tensor | None, exchange: Exchange | None) -> Tensor:
        attention = self.self_attn
        packed = F.linear(tokens, attention.in_proj_weight, attention.in_proj_bias)
        packed = packed.unflatten(-1, (3, attention.num_heads, attention.head_dim))
        packed = packed if exchange is None else exchange.spread(packed)
        attended = batch_attention_packed(packed, ignored, self._now(attention.dropout))
        attended = attended if exchange is None else exchange.collect(attended)
        return attention.out_proj(attended.flatten(2))

    def _now(self, dropout_p: float) -> float:
        return dropout_p if self.training else 0.0
