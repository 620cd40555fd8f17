"""The one decoder loop.

Shape legend: R rows (streams x images), Q queries, S tokens, C channels, L layers, K class logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from detr_bf.boxes import relative_boxes
from detr_bf.layers import FeedForward, full_precision
from detr_bf.structures import Outputs, Queries, TokenBatch
from detr_bf.transformer.residual import Residual


class Decoder(nn.Module):
    """Decoder layers in turn; every layer's queries are read by the heads.

    Args:
        layers: (queries, memory) -> content (R, Q, C).
        queries: memory -> the queries of the first layer.
        heads: what turns contents into classes and boxes.
        norm: of the contents, before the heads.
        look: (layer, queries) -> queries, run before every layer: where the queries look, and how.
        refine: the boxes of a layer are the reference of the next, without gradient between them.
        aux_loss: predict from every layer, so that each is trained, instead of from the last only.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        queries: nn.Module,
        heads: Heads,
        norm: nn.Module | None = None,
        look: Callable[[int, Queries], Queries] | None = None,
        refine: bool = False,
        aux_loss: bool = True,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.queries = queries
        self.heads = heads
        self.norm = norm or nn.Identity()
        self.look = look
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
    """Attention among the queries, attention to the memory, a feed-forward network.

    Args:
        self_attention: (x (R, Q, C), queries) -> (R, Q, C).
        cross_attention: (x (R, Q, C), queries, memory) -> (R, Q, C); ``queries`` hold what entered the layer.
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
        """The new content (R, Q, C)."""
        content = self.self_residual(queries.content, lambda x: self.self_attention(x, queries))
        content = self.cross_residual(content, lambda x: self.cross_attention(x, queries, memory))
        return self.feed_forward_residual(content, self.feed_forward)
