"""Decoder loop, decoder layer with its two attentions, heads, learned queries, and groups of further queries.

Shape legend: R rows (streams x images), Q queries, S tokens, C channels, L layers, K class logits.
``x`` is the input of the residual branch: already normalised in a pre-norm layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from detr_bf.batchformer import QueryBatchFormer
from detr_bf.common.boxes import relative_boxes
from detr_bf.common.devices import tensor_on
from detr_bf.common.structures import Outputs, Queries, QueryGroup, Target, TokenBatch
from detr_bf.transformer.attention import MultiHeadAttention
from detr_bf.transformer.blocks import FeedForward, Residual, full_precision


class Decoder(nn.Module):
    """Decoder layers in sequence; the heads predict from the queries of every layer.

    Args:
        layers: (queries, memory) -> content (R, Q, C).
        queries: (memory, targets) -> queries of the first layer; may use the targets, given in training, for groups.
        heads: (layer, content, reference) -> class logits and boxes.
        norm: applied to the content before the heads.
        update_queries: (layer, queries, memory) -> queries, called before every layer; may set ``position``,
            ``reference`` or ``modulation``.
        refine: use the boxes of a layer, detached, as the reference of the next layer.
        refine_before_norm: compute these boxes from the content before ``norm`` (DAB-DETR, Liu et al. 2022, arXiv
            2201.12329); the predictions are computed from the content after it.
        look_forward_twice: predict relative to these boxes with their gradient (DINO, Zhang et al. 2022, arXiv
            2203.03605, section 3.5); the next layer attends around the detached ones.
        batch_former: attention between the queries of all images before chosen layers. The predictions of the layers
            before the first of them are then the same in both streams.
        aux_loss: return the predictions of every layer instead of those of the last only.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        queries: nn.Module,
        heads: Heads,
        norm: nn.Module | None = None,
        update_queries: Callable[[int, Queries, TokenBatch], Queries] | None = None,
        refine: bool = False,
        refine_before_norm: bool = False,
        look_forward_twice: bool = False,
        batch_former: QueryBatchFormer | None = None,
        aux_loss: bool = True,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.queries = queries
        self.heads = heads
        self.norm = norm or nn.Identity()
        self.update_queries = update_queries
        self.refine = refine
        self.refine_before_norm = refine_before_norm
        self.look_forward_twice = look_forward_twice
        self.batch_former = batch_former
        self.aux_loss = aux_loss

    def forward(self, memory: TokenBatch, targets: Sequence[Target] = ()) -> Outputs:
        """Memory (R, S, C) -> logits (L, R, Q, K) and boxes (L, R, Q, 4) of the main queries and of each group."""
        first: Queries = self.queries(memory, targets)
        # Layers do not read proposals and groups, and torch.compile would recompile for each value of their numbers.
        queries = replace(first, proposals=None, groups=())
        main, *_ = self.sizes_of(first)
        base, streams = queries.reference, memory.num_streams
        predictions: list[Sequence[Tensor]] = []
        states: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            if self.batch_former is not None:
                queries, memory, base = self._batch_attention(queries, memory, base, layer=index, main=main)
            if self.update_queries is not None:
                queries = self.update_queries(index, queries, memory)
                base = base if self.look_forward_twice and index else queries.reference
            queries = replace(queries, content=layer(queries, memory))
            state = self.norm(queries.content)
            states.append(state)
            predictions.append(self.heads(index, state, base))
            if self.refine and index + 1 < len(self.layers):
                refined = predictions[-1][1]
                if self.refine_before_norm or base is not queries.reference:
                    source = queries.content if self.refine_before_norm else state
                    refined = self.heads.predicted_boxes(index, source, queries.reference)
                queries = replace(queries, reference=refined.detach())
                base = refined if self.look_forward_twice else queries.reference
        if memory.num_streams > streams:  # forked between the queries
            first = first.fork(first.content)
            predictions = [tuple(in_streams(x, len(state)) for x in parts) for parts in predictions]
            states = [in_streams(x, len(state)) for x in states]
        return self.outputs_of(first, predictions, states, memory.num_streams)

    def outputs_of(
        self, first: Queries, predictions: Sequence[Sequence[Tensor]], states: Sequence[Tensor], num_streams: int
    ) -> Outputs:
        """Stack the predictions of the layers, and divide them among the main queries and the groups.

        Args:
            first: queries of the first layer, with all streams.
            predictions: logits and boxes of each layer.
            states: (R, Q, C) each, inputs of the heads of all layers, or of the last.
        """
        sizes = self.sizes_of(first)
        parts = [
            torch.stack(layers).split(sizes, 2)
            for layers in zip(*predictions if self.aux_loss else predictions[-1:], strict=True)
        ]
        divided = zip(*(state.split(sizes, 1) for state in (states if self.aux_loss else states[-1:])), strict=True)
        main, *others = (
            Outputs(logits, boxes, num_streams, states=own) for logits, boxes, own in zip(*parts, divided, strict=True)
        )
        return replace(main, proposals=first.proposals, groups=tuple(zip(first.groups, others, strict=True)))

    @staticmethod
    def sizes_of(queries: Queries) -> list[int]:
        """Return the number of main queries and that of each group."""
        sizes = [group.size for group in queries.groups]
        return [len(queries.content[0]) - sum(sizes), *sizes]

    def _batch_attention(
        self, queries: Queries, memory: TokenBatch, base: Tensor | None, *, layer: int, main: int
    ) -> tuple[Queries, TokenBatch, Tensor | None]:
        """Return queries, memory and ``base``, from which the boxes are predicted, after batch attention."""
        assert self.batch_former is not None
        mixed, tokens = self.batch_former(queries, memory, layer=layer, main=main)
        if base is queries.reference:
            base = mixed.reference
        elif base is not None and tokens.num_streams > memory.num_streams:
            base = torch.cat([base, base])
        return mixed, tokens, base


def in_streams(x: Tensor, rows: int) -> Tensor:
    """Repeat x (B, ...) of one stream for ``rows`` of several. Not for export, where it would fix the batch size."""
    return x.repeat(rows // len(x), *[1] * (x.dim() - 1))


class Heads(nn.Module):
    """Class logits and boxes from decoder states, in full precision.

    Args:
        classes, boxes: one (..., C) -> (..., K) and one (..., C) -> (..., 4) for all layers, or one for each.
        eps: of the logits of the references, see :func:`detr_bf.common.boxes.inverse_sigmoid`.
        relative: (output of a box head, reference) -> boxes; None: sums of logits.
    """

    def __init__(
        self,
        classes: Sequence[nn.Module],
        boxes: Sequence[nn.Module],
        *,
        eps: float = 1e-5,
        relative: Callable[[Tensor, Any], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.classes = nn.ModuleList(classes)
        self.boxes = nn.ModuleList(boxes)
        self.eps = eps
        self.relative = relative or partial(relative_boxes, eps=eps)

    def forward(self, layer: int, state: Tensor, reference: Tensor | None) -> tuple[Tensor, Tensor]:
        """State (R, Q, C) of decoder layer ``layer`` -> logits (R, Q, K), boxes (R, Q, 4) relative to the reference."""
        classes = self.classes[min(layer, len(self.classes) - 1)]
        return full_precision(classes, state), self.predicted_boxes(layer, state, reference)

    def predicted_boxes(self, layer: int, state: Tensor, reference: Tensor | None) -> Tensor:
        """State (R, Q, C) of decoder layer ``layer`` -> boxes (R, Q, 4) relative to the reference."""
        boxes = self.boxes[min(layer, len(self.boxes) - 1)]
        return self.relative(full_precision(boxes, state), reference)


class DecoderLayer(nn.Module):
    """Attention between the queries, attention to the memory, then a feed-forward network.

    Args:
        self_attention: (x (R, Q, C), queries) -> (R, Q, C).
        cross_attention: (x (R, Q, C), queries, memory) -> (R, Q, C); ``queries`` are the input of the layer.
        cross_residual: (x, function) -> x combined with function(x), instead of a residual connection.
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
        activation: str = "relu",
        cross_residual: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.self_attention = self_attention
        self.self_residual = Residual(dim, dropout=dropout, pre_norm=pre_norm)
        self.cross_attention = cross_attention
        self.cross_residual = cross_residual or Residual(dim, dropout=dropout, pre_norm=pre_norm)
        self.feed_forward = FeedForward(dim, feedforward_dim, dropout, activation=activation)
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
        return self.attention(with_position, with_position, x, blocked=queries.blocked)


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
        learned_content: learn the content as well; by default it starts at zero.
        reference: position (R, Q, C) -> logits (R, Q, 2) of the query's reference point; None: no reference points.
        groups: further learned queries, used in training only.
    """

    def __init__(
        self,
        num_queries: int,
        dim: int,
        *,
        learned_content: bool = False,
        reference: nn.Module | None = None,
        groups: Sequence[QueryGroup] = (),
    ) -> None:
        super().__init__()
        self.num_queries = num_queries
        self.groups = tuple(groups)
        total = num_queries + sum(group.size for group in groups)
        self.position = nn.Embedding(total, dim)
        self.content = nn.Embedding(total, dim) if learned_content else None
        self.reference = reference

    def forward(self, memory: TokenBatch, targets: Sequence[Target] = ()) -> Queries:
        """Memory of R rows -> queries (R, Q, C)."""
        rows, groups = memory.tokens.shape[0], self.groups if self.training else ()
        count = self.num_queries + sum(group.size for group in groups)
        position = self.position.weight[:count].expand(rows, -1, -1)
        content = torch.zeros_like(position)
        if self.content is not None:
            content = self.content.weight[:count].expand(rows, -1, -1)
        point = None if self.reference is None else full_precision(self.reference, position).sigmoid()
        return in_groups(Queries(content, position, point), groups)


def append_queries(
    queries: Queries, content: Tensor, group: QueryGroup, *, reference: Tensor | None = None, sees_main: bool = False
) -> Queries:
    """Append the queries of a group, which no other query attends to.

    Args:
        queries: main queries and earlier groups.
        content: (R, group.size, C).
        group: description of the new queries; ``group.parts`` divides their number.
        reference: as that of ``queries``; the positions are zero.
        sees_main: the new queries attend to the main queries as well as to those of their own part.
    """
    before, size = queries.content.shape[1], group.size
    main = before - sum(each.size for each in queries.groups)
    blocked = torch.ones(before + size, before + size, dtype=torch.bool, device=content.device)
    blocked[:before, :before] = False if queries.blocked is None else queries.blocked
    blocked[before:, :main] = not sees_main
    part = torch.arange(size, device=content.device) // max(size // group.parts, 1)
    blocked[before:, before:] = part[:, None] != part
    references = [each for each in (queries.reference, reference) if each is not None]
    assert len(references) in (0, 2), "either all queries have references or none"
    return replace(
        queries,
        content=torch.cat([queries.content, content], 1),
        position=torch.cat([queries.position, torch.zeros_like(content)], 1),
        reference=torch.cat(references, 1) if references else None,
        blocked=blocked,
        groups=(*queries.groups, group),
    )


def in_groups(queries: Queries, groups: Sequence[QueryGroup]) -> Queries:
    """Declare the last queries to be ``groups``, in their order; the parts of all groups attend to themselves only."""
    if not groups:
        return queries
    count, device = queries.content.shape[1], queries.content.device
    parts = [group.size // group.parts for group in groups for _ in range(group.parts)]
    sizes = tensor_on(device, [count - sum(parts), *parts])
    part = torch.arange(len(sizes), device=device).repeat_interleave(sizes, output_size=count)
    return replace(queries, blocked=part[:, None] != part, groups=tuple(groups))
