"""Decoder loop, decoder layer with its two attentions, heads, and learned queries.

Shape legend: R rows (streams x images), Q queries, S tokens, C channels, L layers, K class logits.
``x`` is the input of the residual branch: already normalised in a pre-norm layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from detr_bf.boxes import relative_boxes
from detr_bf.layers import FeedForward, MultiHeadAttention, Residual, full_precision
from detr_bf.structures import Outputs, Queries, TokenBatch


class Decoder(nn.Module):
    """Decoder layers in sequence; the heads predict from the queries of every layer.

    Args:
        layers: (queries, memory) -> content (R, Q, C).
        queries: memory -> queries of the first layer.
        heads: (layer, content, reference) -> class logits and boxes.
        norm: applied to the content before the heads.
        update_queries: (layer, queries) -> queries, called before every layer; may set ``reference`` or ``modulation``.
        refine: use the boxes of a layer, detached, as the reference of the next layer.
        aux_loss: return the predictions of every layer instead of those of the last only.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        queries: nn.Module,
        heads: Heads,
        norm: nn.Module | None = None,
        update_queries: Callable[[int, Queries], Queries] | None = None,
        refine: bool = False,
        aux_loss: bool = True,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.queries = queries
        self.heads = heads
        self.norm = norm or nn.Identity()
        self.look = update_queries  # the name in checkpoints
        self.refine = refine
        self.aux_loss = aux_loss

    def forward(self, memory: TokenBatch) -> Outputs:
        """Memory (R, S, C) -> logits (L, R, Q, K) and boxes (L, R, Q, 4)."""
        queries: Queries = self.queries(memory)
        predictions = []
        for index, layer in enumerate(self.layers):
            if self.look is not None:
                queries = self.look(index, queries)
            queries = replace(queries, content=layer(queries, memory))
            state = self.norm(queries.content)
            predictions.append(self.heads(index, state, queries.reference))
            if self.refine:
                queries = replace(queries, reference=predictions[-1][1].detach())
        logits, boxes = zip(*predictions if self.aux_loss else predictions[-1:], strict=True)
        return Outputs(torch.stack(logits), torch.stack(boxes), memory.num_streams, queries.proposals, states=state)


class Heads(nn.Module):
    """Class logits and boxes from decoder states, in full precision.

    Args:
        classes, boxes: one (..., C) -> (..., K) and one (..., C) -> (..., 4) for all layers, or one for each.
    """

    def __init__(self, classes: Sequence[nn.Module], boxes: Sequence[nn.Module]) -> None:
        super().__init__()
        self.classes = nn.ModuleList(classes)
        self.boxes = nn.ModuleList(boxes)

    def forward(self, layer: int, state: Tensor, reference: Tensor | None) -> tuple[Tensor, Tensor]:
        """State (R, Q, C) of decoder layer ``layer`` -> logits (R, Q, K), boxes (R, Q, 4) relative to the reference."""
        classes, boxes = (heads[min(layer, len(heads) - 1)] for heads in (self.classes, self.boxes))
        return full_precision(classes, state), relative_boxes(full_precision(boxes, state), reference)


class DecoderLayer(nn.Module):
    """Attention between the queries, attention to the memory, then a feed-forward network.

    Args:
        self_attention: (x (R, Q, C), queries) -> (R, Q, C).
        cross_attention: (x (R, Q, C), queries, memory) -> (R, Q, C); ``queries`` are the input of the layer.
    """

    def __init__(
        self,
        self_attention: nn.Module,
        cross_attention: nn.Module,
        *,
        dim: int,
        feedforward_dim: int,
        dropout: float = 0.0,
        pre_norm: bool = False,
    ) -> None:
        super().__init__()
        self.self_attention = self_attention
        self.self_residual = Residual(dim, dropout=dropout, pre_norm=pre_norm)
        self.cross_attention = cross_attention
        self.cross_residual = Residual(dim, dropout=dropout, pre_norm=pre_norm)
        self.feed_forward = FeedForward(dim, feedforward_dim, dropout)
        self.feed_forward_residual = Residual(dim, dropout=dropout, pre_norm=pre_norm)

    def forward(self, queries: Queries, memory: TokenBatch) -> Tensor:
        """Return the new content (R, Q, C)."""
        content = self.self_residual(queries.content, lambda x: self.self_attention(x, queries))
        content = self.cross_residual(content, lambda x: self.cross_attention(x, queries, memory))
        return self.feed_forward_residual(content, self.feed_forward)


class QueryAttention(nn.Module):
    """Multi-head self-attention between the queries of each image."""

    def __init__(self, dim: int, *, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(dim, heads, dropout)

    def forward(self, x: Tensor, queries: Queries) -> Tensor:
        """(R, Q, C) -> (R, Q, C)."""
        with_position = x + queries.position
        return self.attention(with_position, with_position, x)


class MemoryAttention(nn.Module):
    """Multi-head cross-attention of the queries to the tokens of their image."""

    def __init__(self, dim: int, *, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(dim, heads, dropout)

    def forward(self, x: Tensor, queries: Queries, memory: TokenBatch) -> Tensor:
        """(R, Q, C) -> (R, Q, C)."""
        with_position = memory.tokens + memory.per_sample["position"]
        return self.attention(x + queries.position, with_position, memory.tokens, memory.per_sample["padding_mask"])


class LearnedQueries(nn.Module):
    """Learned queries of the first decoder layer, the same for every image.

    Args:
        num_queries: Q.
        dim: C.
        learned_content: learn the content as well; by default it starts at zero.
        reference: position (R, Q, C) -> logits (R, Q, 2) of the query's reference point; None: no reference points.
    """

    def __init__(
        self, num_queries: int, dim: int, *, learned_content: bool = False, reference: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.position = nn.Embedding(num_queries, dim)
        self.content = nn.Embedding(num_queries, dim) if learned_content else None
        self.reference = reference

    def forward(self, memory: TokenBatch) -> Queries:
        """Memory of R rows -> queries (R, Q, C)."""
        rows = len(memory.tokens)
        position = self.position.weight.expand(rows, -1, -1)
        content = torch.zeros_like(position) if self.content is None else self.content.weight.expand(rows, -1, -1)
        point = None if self.reference is None else full_precision(self.reference, position).sigmoid()
        return Queries(content, position, point)
