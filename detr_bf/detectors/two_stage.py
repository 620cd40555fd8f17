"""Two-stage Deformable DETR: queries from the best encoder tokens (Zhu et al. 2021, arXiv 2010.04159, app. A.4).

Shape legend: R rows, Q queries, S tokens of all levels, N levels, C channels, K class logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from detr_bf.common.boxes import inverse_sigmoid
from detr_bf.common.devices import tensor_on
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Outputs, Queries, QueryGroup, Target, TokenBatch
from detr_bf.transformer import in_groups
from detr_bf.transformer.blocks import full_precision
from detr_bf.transformer.position import sine_of_coordinates

BASE_SIZE = 0.05  # width and height of a proposal on the finest level; doubled on each coarser level
MARGIN = 0.01  # proposals with a coordinate closer to 0 or 1 are dropped


class TokenProposals(nn.Module):
    """Class logits and a box for every token of the encoder; base of queries that are chosen among the tokens.

    Args:
        class_head, box_head: (R, S, C) -> (R, S, K) and (R, S, 4), the logits of the classes and of the change of the
            token's anchor.
    """

    content: nn.Embedding | None  # learned contents of the queries

    def __init__(self, dim: int, *, class_head: nn.Module, box_head: nn.Module) -> None:
        super().__init__()
        self.project = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.class_head = class_head
        self.box_head = box_head

    @property
    def content_from_tokens(self) -> bool:
        """True if the contents of the queries are those of the tokens, not learned."""
        return self.content is None

    def propose(self, memory: TokenBatch, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the projected tokens (R, S, C), class logits (R, S, K) and logits of the anchors (R, S, 4).

        The box logits of a token are ``full_precision(self.box_head, token)`` plus the logits of its anchor.

        Raises:
            InputError: there are fewer tokens than ``count``, the queries to be chosen.
        """
        check_tokens(memory, count)
        anchors, usable = anchor_boxes(memory)
        tokens = self.norm(self.project(memory.tokens.masked_fill(~usable, 0.0)))
        logits = full_precision(self.class_head, tokens)
        return tokens, logits, inverse_of_anchors(anchors, usable)


class ProposalQueries(TokenProposals):
    """One box proposal per token; the ``num_queries`` proposals with the best logit of class 0 become queries.

    Class 0 means any object, as in the training of the proposals.

    Args:
        learned_content: the contents are learned, and only positions and boxes come from the tokens (mixed query
            selection, Zhang et al. 2022, arXiv 2203.03605, section 3.4).
        groups: further queries in training, from the next best proposals.
    """

    def __init__(
        self,
        num_queries: int,
        dim: int,
        *,
        class_head: nn.Module,
        box_head: nn.Module,
        learned_content: bool = False,
        groups: Sequence[QueryGroup] = (),
    ) -> None:
        super().__init__(dim, class_head=class_head, box_head=box_head)
        self.num_queries = num_queries
        self.groups = tuple(groups)
        self.embed = nn.Linear(2 * dim, 2 * dim)
        self.embed_norm = nn.LayerNorm(2 * dim)
        for linear in (self.project, self.embed):
            nn.init.xavier_uniform_(linear.weight)
        total = num_queries + sum(group.size for group in groups)
        self.content = nn.Embedding(total, dim) if learned_content else None

    def forward(self, memory: TokenBatch, targets: Sequence[Target] = ()) -> Queries:
        """Memory (R, S, C) -> queries (R, Q, C) with reference boxes (R, Q, 4) and proposals (1, R, S, .).

        Raises:
            InputError: there are fewer tokens than queries.
        """
        groups = self.groups if self.training else ()
        count = self.num_queries + sum(group.size for group in groups)
        tokens, logits, anchors = self.propose(memory, count)
        box_logits = full_precision(self.box_head, tokens) + anchors
        best = logits[..., 0].topk(count, dim=1).indices[..., None]
        boxes = box_logits.gather(1, best.expand(-1, -1, 4)).detach().sigmoid()
        embedded = self.embed_norm(self.embed(sine_of_coordinates(boxes, memory.tokens.shape[-1] // 2)))
        position, content = embedded.chunk(2, dim=-1)
        if self.content is not None:
            content = self.content.weight[:count].expand_as(position)
        proposals = Outputs(logits[None], box_logits.sigmoid()[None], memory.num_streams, one_class=True)
        return in_groups(Queries(content, position, boxes, proposals=proposals), groups)


def check_tokens(memory: TokenBatch, count: int) -> None:
    """Raise InputError if there are fewer tokens than ``count``, the queries to be chosen."""
    if memory.tokens.shape[1] < count:
        raise InputError(
            f"the two-stage detector takes its {count} queries from the image's tokens, of which there are "
            f"{memory.tokens.shape[1]}: use larger images or fewer queries (num_queries, or groups.one_to_many)"
        )


def inverse_of_anchors(anchors: Tensor, usable: Tensor) -> Tensor:
    """Return the logits (R, S, 4) of the anchors; infinite (a box of 1) for unusable anchors."""
    return torch.where(usable, inverse_sigmoid(anchors), torch.inf)


def anchor_boxes(memory: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return a box (R, S, 4) around every token in fractions of the unpadded image, and which are usable (R, S, 1)."""
    shapes: Sequence[tuple[int, int]] = memory.static["spatial_shapes"]
    ratios = memory.per_sample["valid_ratios"]
    boxes = []
    for level, (height, width) in enumerate(shapes):
        size = tensor_on(ratios.device, [width, height]) * ratios[:, level]  # (R, 2) unpadded cells
        y, x = torch.meshgrid(
            torch.arange(height, device=ratios.device), torch.arange(width, device=ratios.device), indexing="ij"
        )
        centres = (torch.stack([x, y], dim=-1).flatten(0, 1) + 0.5) / size[:, None]
        boxes.append(torch.cat([centres, torch.full_like(centres, BASE_SIZE * 2**level)], dim=-1))
    anchors = torch.cat(boxes, dim=1)
    inside = ((anchors > MARGIN) & (anchors < 1 - MARGIN)).all(-1)
    return anchors, (inside & ~memory.per_sample["padding_mask"])[..., None]
