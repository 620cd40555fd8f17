"""Modules that mix the tokens of a batch along the batch dimension.

A mixer is built as ``mixer(dim, heads=, dropout=, num_layers=)`` and called with tokens (B, S, C), a padding mask
(B, S) or None, and an :class:`Exchange` or None; it returns (B, S, C). :data:`BATCH_MIXERS` holds them by name;
a file of the user's own adds to it with ``@BATCH_MIXERS.register("NAME")``. For the queries of a decoder B counts the
queries of all images, and S is 1 (:mod:`detr_bf.batchformer.queries`).

Shape legend: B images, S tokens of an image, C channels. Attention runs along B; each of the S positions is one
sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.batchformer.gather import Exchange
from detr_bf.common.errors import InputError
from detr_bf.common.extensions import Registry
from detr_bf.ops import batch_attention_packed, relu_dropout, residual_dropout


class BatchEncoderLayer(nn.TransformerEncoderLayer):
    """``nn.TransformerEncoderLayer(dim, heads, feedforward_dim, dropout)``, post-norm with ReLU, along the batch.

    Parameters, their names and the results equal those of the original. Tokens stay (B, S, C), query, key and value
    stay in one tensor, and dropout masks are neither drawn nor stored.
    """

    def __init__(self, dim: int, heads: int, *, feedforward_dim: int, dropout: float) -> None:
        super().__init__(dim, heads, dim_feedforward=feedforward_dim, dropout=dropout)

    def forward(  # type: ignore[override]
        self, tokens: Tensor, ignored: Tensor | None = None, exchange: Exchange | None = None
    ) -> Tensor:
        """Mix (B, S, C) along B, with ``exchange`` along the A images of all ranks.

        ``ignored`` (B, S) bool, with ``exchange`` (A, P): True = not attended to.
        """
        attended = self._attend(tokens, ignored, exchange)
        tokens = self.norm1(residual_dropout(tokens, attended, self._rate(self.dropout1.p)))
        hidden = relu_dropout(self.linear1(tokens), self._rate(self.dropout.p))
        return self.norm2(residual_dropout(tokens, self.linear2(hidden), self._rate(self.dropout2.p)))

    @torch.no_grad()
    def attention_weights(
        self, tokens: Tensor, ignored: Tensor | None = None, exchange: Exchange | None = None
    ) -> Tensor:
        """Return the weights of the attention, without dropout, for the arguments of :meth:`forward`.

        Returns:
            (S, H, B, B) float32 for H heads, with ``exchange`` (P, H, A, A): entry [s, h, i, j] is the weight that
            token s of image i gives to token s of image j. Rows sum to 1, or to 0 if every image is ignored at s.
        """
        query, key, _ = self._packed(tokens, exchange).float().unbind(2)
        scores = torch.einsum("ishd,jshd->shij", query, key) / math.sqrt(query.shape[-1])
        if ignored is not None:
            scores = scores.masked_fill(ignored.T[:, None, None], -math.inf)
        return scores.softmax(-1).nan_to_num(0.0)

    def _attend(self, tokens: Tensor, ignored: Tensor | None, exchange: Exchange | None) -> Tensor:
        attention = self.self_attn
        attended = batch_attention_packed(self._packed(tokens, exchange), ignored, self._rate(attention.dropout))
        attended = attended if exchange is None else exchange.collect(attended)
        return attention.out_proj(attended.flatten(2))

    def _packed(self, tokens: Tensor, exchange: Exchange | None) -> Tensor:
        """Return query, key and value (B, S, 3, H, D), with ``exchange`` (A, P, 3, H, D)."""
        attention = self.self_attn
        packed = F.linear(tokens, attention.in_proj_weight, attention.in_proj_bias)
        packed = packed.unflatten(-1, (3, attention.num_heads, attention.head_dim))
        return packed if exchange is None else exchange.spread(packed)

    def _rate(self, dropout: float) -> float:
        return dropout if self.training else 0.0


class BatchFormerLayer(nn.Module):
    """Stack of standard post-norm transformer encoder layers along the batch (Hou et al. 2022, section 3.2).

    Each layer has 6 C^2 + 10 C parameters: the feed-forward width is C, the activation ReLU, no position encoding.
    """

    def __init__(self, dim: int, *, heads: int = 4, dropout: float = 0.5, num_layers: int = 1) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise InputError(f"heads={heads} must divide the width {dim}")
        if not 0 <= dropout < 1:
            raise InputError(f"dropout={dropout} must be 0 or more and less than 1")
        if num_layers < 1:
            raise InputError(f"num_layers={num_layers} must be 1 or more")
        self.layers = nn.ModuleList(
            BatchEncoderLayer(dim, heads, feedforward_dim=dim, dropout=dropout) for _ in range(num_layers)
        )
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)  # as every matrix of DETR's transformer

    def initialize_as_pytorch(self) -> None:
        """Give all weights the initial values of ``nn.TransformerEncoderLayer`` instead of Xavier's."""
        for layer in cast("Iterable[BatchEncoderLayer]", self.layers):
            for part in (layer.linear1, layer.linear2, layer.self_attn.out_proj):
                part.reset_parameters()
            layer.self_attn._reset_parameters()  # query, key and value, and zeros as biases

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None, exchange: Exchange | None = None) -> Tensor:
        """Mix (B, S, C) along B, with ``exchange`` along the images of all ranks.

        ``padding_mask`` (B, S), True = padding: padded entries are not attended to and stay unchanged. An image
        alone at its position attends to itself.
        """
        mixed = tokens
        ignored = padding_mask if exchange is None else exchange.ignored(padding_mask, tokens.device)
        for layer in self.layers:
            mixed = layer(mixed, ignored, exchange)
        return mixed if padding_mask is None else torch.where(padding_mask[..., None], tokens, mixed)


BATCH_MIXERS: Registry[Callable[..., nn.Module]] = Registry("batch mixer", {"attention": BatchFormerLayer})
