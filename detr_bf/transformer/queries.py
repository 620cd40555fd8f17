"""Queries of the first decoder layer: learned queries, and groups of further queries in training.

Shape legend: R rows (streams x images), Q queries, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from detr_bf.common.devices import tensor_on
from detr_bf.common.structures import Queries, QueryGroup, Target, TokenBatch
from detr_bf.transformer.blocks import full_precision


class LearnedQueries(nn.Module):
    """Learned queries of the first decoder layer, the same for every image.

    Args:
        num_queries: Q.
        dim: C.
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
    queries: Queries,
    content: Tensor,
    group: QueryGroup,
    *,
    position: Tensor | None = None,
    reference: Tensor | None = None,
    sees_main: bool = False,
) -> Queries:
    """Append the queries of a group, which no other query attends to.

    Args:
        queries: main queries and earlier groups.
        content: (R, group.size, C).
        group: description of the new queries; ``group.parts`` divides their number.
        position, reference: as those of ``queries``; a position that is not given is zero.
        sees_main: the new queries attend to the main queries as well as to those of their own part.
    """
    before, size = queries.content.shape[1], group.size
    main = before - sum(each.size for each in queries.groups)
    blocked = torch.ones(before + size, before + size, dtype=torch.bool, device=content.device)
    blocked[:before, :before] = False if queries.blocked is None else queries.blocked
    blocked[before:, :main] = not sees_main
    part = torch.arange(size, device=content.device) // max(size // group.parts, 1)
    blocked[before:, before:] = part[:, None] != part
    position = torch.zeros_like(content) if position is None else position
    references = [each for each in (queries.reference, reference) if each is not None]
    assert len(references) in (0, 2), "either all queries have references or none"
    return replace(
        queries,
        content=torch.cat([queries.content, content], 1),
        position=torch.cat([queries.position, position], 1),
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
