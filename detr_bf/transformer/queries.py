"""The queries of the first decoder layer.

Shape legend: R rows (streams x images), Q queries, C channels.
"""

from __future__ import annotations

import torch
from torch import nn

from detr_bf.layers import full_precision
from detr_bf.structures import Queries, TokenBatch


class LearnedQueries(nn.Module):
    """The same learned queries for every image.

    Args:
        num_queries: Q.
        dim: C.
        learned_content: the content is learned as well, instead of starting at zero.
        reference: position (R, Q, C) -> logits (R, Q, 2) of the point a query looks at; None: nowhere in particular.
    """

    def __init__(
        self, num_queries: int, dim: int, *, learned_content: bool = False, reference: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.position = nn.Embedding(num_queries, dim)
        self.content = nn.Embedding(num_queries, dim) if learned_content else None
        self.reference = reference

    def forward(self, memory: TokenBatch) -> Queries:
        rows = len(memory.tokens)
        position = self.position.weight.expand(rows, -1, -1)
        content = torch.zeros_like(position) if self.content is None else self.content.weight.expand(rows, -1, -1)
        point = None if self.reference is None else full_precision(self.reference, position).sigmoid()
        return Queries(content, position, point)
