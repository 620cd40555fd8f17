"""Fine-grained distribution refinement of D-FINE (Peng et al. 2024, arXiv 2410.13842).

A side of a box is a distribution over distances from the same side of a first box, which the decoder layers refine one
after the other.

Shape legend: R rows (streams x images), Q queries, N bins of a distribution, C channels, K class logits, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.common.boxes import relative_boxes
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Distributions, Outputs, Queries, QueryGroup, Target, TokenBatch
from detr_bf.transformer import MLP, Decoder, Heads
from detr_bf.transformer.blocks import full_precision
from detr_bf.transformer.decoder import in_streams

LIKELY_BINS = 4  # whose probabilities the quality of a side is read from
QUALITY_DIM = 64  # hidden channels of the quality


def bin_distances(reg_max: int, up: Tensor, reg_scale: Tensor) -> Tensor:
    """Return the distance (N,) of each of ``reg_max`` + 1 bins, in units of the width or height of the first box.

    The paper's W(n), divided by ``reg_scale``: fine around 0 in the middle, up to nearly ``up`` at both sides; the
    outermost bins are at twice that. The signs of ``up`` and ``reg_scale``, tensors (1,), do not matter.
    """
    up, reg_scale = up.abs(), reg_scale.abs()
    step = (up * reg_scale + 1) ** (2 / (reg_max - 2))
    curve = (step ** torch.arange(1, reg_max // 2, device=up.device) - 1) / reg_scale
    return torch.cat([-2 * up, -curve.flip(0), torch.zeros_like(up), curve, 2 * up])


def moved_sides(boxes: Tensor, distances: Tensor) -> Tensor:
    """Move the sides of boxes (..., 4) cx, cy, w, h by distances (..., 4) outwards: left, top, right, bottom.

    Distances are fractions of width and height. Sides that cross give a negative width or height.
    """
    centre, size = boxes[..., :2], boxes[..., 2:]
    low, high = centre - (0.5 + distances[..., :2]) * size, centre + (0.5 + distances[..., 2:]) * size
    return torch.cat([(low + high) / 2, high - low], dim=-1)


class Gate(nn.Module):
    """Sum of the input and its update, each channel weighted as a function of both, then a layer norm.

    In place of a residual connection ("target gating layer").
    """

    def __init__(self, dim: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(2 * dim, 2 * dim)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """(..., C) -> (..., C)."""
        update = self.dropout(function(x))
        kept, taken = self.gate(torch.cat([x, update], dim=-1)).sigmoid().chunk(2, dim=-1)
        return self.norm(kept * x + taken * update)


class Refinement(NamedTuple):
    """Values of every query that one decoder layer hands on to the next."""

    boxes: Tensor  # (R, Q, 4), first boxes, without gradient
    bins: Tensor  # (R, Q, 4, N), logits of the bins
    state: Tensor  # (R, Q, C), input of the heads, without gradient


class DistributionHeads(Heads):
    """Class logits, and logits of the bins that are added to those of the layers before.

    The class logits of a query are corrected by its quality, a function of the largest probabilities of its
    distributions ("location quality estimator").

    Args:
        classes, boxes: one (..., C) -> (..., K) and one (..., C) -> (..., 4 N) for each layer.
        first_box: (R, Q, C) -> (R, Q, 4), logits relative to the reference, of the first layer.
    """

    def __init__(
        self, classes: Sequence[nn.Module], boxes: Sequence[nn.Module], *, first_box: nn.Module, activation: str
    ) -> None:
        super().__init__(classes, boxes)
        self.first_box = first_box
        self.quality = nn.ModuleList(
            MLP([4 * (LIKELY_BINS + 1), QUALITY_DIM, 1], activation) for _ in range(len(self.boxes))
        )
        for head in self.quality:
            *_, weight, bias = head.parameters()
            nn.init.zeros_(weight)
            nn.init.zeros_(bias)

    def first(self, state: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
        """Return class logits without quality and first boxes from the state of the first layer."""
        boxes = relative_boxes(full_precision(self.first_box, state), reference, self.eps)
        return full_precision(self.classes[0], state), boxes

    def bins(self, layer: int, state: Tensor, before: Refinement) -> Tensor:
        """Return the logits (R, Q, 4, N) of the bins after decoder layer ``layer``."""
        return full_precision(self.boxes[layer], state + before.state).unflatten(-1, (4, -1)) + before.bins

    def scores(self, layer: int, state: Tensor, bins: Tensor) -> Tensor:
        """Return the class logits (R, Q, K) after decoder layer ``layer``."""
        # Not topk, which the check of exported files takes for a choice of queries
        likely = bins.softmax(-1).sort(dim=-1, descending=True).values[..., :LIKELY_BINS]
        sharpness = torch.cat([likely, likely.mean(-1, keepdim=True)], dim=-1).flatten(2)
        return full_precision(self.classes[layer], state) + full_precision(self.quality[layer], sharpness)


class DistributionDecoder(Decoder):
    """Decoder whose layers refine distributions instead of boxes.

    The first layer predicts a box from the reference of the query. All layers predict distances from that box.

    Args:
        evaluated: index of the last layer that is computed in evaluation.
        wide: channels of the layers after it. Contents, positions and tokens are stretched to that number.
        reg_max: number of bins of a distribution, less one.
        up, reg_scale: see :func:`bin_distances`; buffers, because the checkpoints of the authors contain them.
        others: arguments of :class:`~detr_bf.transformer.Decoder`.

    Raises:
        InputError: ``reg_max`` is odd or less than 4, or ``up`` or ``reg_scale`` is 0.
    """

    heads: DistributionHeads
    up: Tensor
    reg_scale: Tensor

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        evaluated: int,
        wide: int,
        reg_max: int,
        up: float,
        reg_scale: float,
        **others: Any,
    ) -> None:
        if reg_max < 4 or reg_max % 2:
            raise InputError(f"reg_max={reg_max} must be an even number from 4 on")
        if not (up and reg_scale):
            raise InputError(f"up={up} and reg_scale={reg_scale} must not be 0")
        super().__init__(layers, **others)
        self.evaluated, self.wide, self.reg_max = evaluated, wide, reg_max
        self.register_buffer("up", torch.tensor([float(up)]))
        self.register_buffer("reg_scale", torch.tensor([float(reg_scale)]))

    def forward(self, memory: TokenBatch, targets: Sequence[Target] = ()) -> Outputs:
        """Memory (R, S, C) -> outputs with distributions; in training also first boxes, in groups that end in ``pre``.

        Without auxiliary losses these are the outputs of the last layer, and the first boxes.
        """
        first: Queries = self.queries(memory, targets)
        queries = replace(first, proposals=None, groups=())
        main, *_ = self.sizes_of(first)
        streams, distances = memory.num_streams, bin_distances(self.reg_max, self.up, self.reg_scale)
        predictions: list[Sequence[Tensor]] = []
        pre: Sequence[Tensor] = ()
        before: Refinement | None = None
        for index, layer in enumerate(self.layers):
            if index > self.evaluated and not self.training:
                break
            if self.batch_former is not None:
                rows = memory.num_streams
                queries, memory, _ = self._batch_attention(queries, memory, None, layer=index, main=main)
                if before is not None and memory.num_streams > rows:
                    before = Refinement(*(torch.cat([x, x]) for x in before))
            assert self.update_queries is not None
            queries = self.update_queries(index, queries, memory)
            if index > self.evaluated and before is not None:
                queries, before = self._stretched(queries, before)
            queries = replace(queries, content=layer(queries, self._memory_of(index, memory)))
            state = self.norm(queries.content)
            if before is None:
                assert queries.reference is not None
                pre = self.heads.first(state, queries.reference)
                before = Refinement(pre[1].detach(), torch.zeros_like(distances), torch.zeros_like(state))
            bins = self.heads.bins(index, state, before)
            boxes = moved_sides(before.boxes, (bins.softmax(-1) * distances).sum(-1))
            predictions.append((self.heads.scores(index, state, bins), boxes, bins))
            queries = replace(queries, reference=boxes.detach())
            before = Refinement(before.boxes, bins, state.detach())
        assert before is not None
        if memory.num_streams > streams:
            first = first.fork(first.content)
            predictions = [[in_streams(x, len(state)) for x in parts] for parts in predictions]
            pre = [in_streams(x, len(state)) for x in pre]
        outputs = self.outputs_of(first, [parts[:2] for parts in predictions], [state], memory.num_streams)
        kept = torch.stack([parts[2] for parts in (predictions if self.aux_loss else predictions[-1:])])
        return self._with_distributions(outputs, first, kept, before.boxes, distances, pre)

    def _with_distributions(
        self, outputs: Outputs, first: Queries, bins: Tensor, boxes: Tensor, distances: Tensor, pre: Sequence[Tensor]
    ) -> Outputs:
        """Divide ``bins`` (L, R, Q, 4, N), first boxes, and their predictions ``pre``, among all queries' outputs."""
        sizes = self.sizes_of(first)
        main, *others = (
            Distributions(logits, first_boxes, distances)
            for logits, first_boxes in zip(bins.split(sizes, 2), boxes.split(sizes, 1), strict=True)
        )
        predicted = [
            (group, replace(part, distributions=each))
            for (group, part), each in zip(outputs.groups, others, strict=True)
        ]
        if self.queries.training:  # else the decoder is frozen, and has no further queries
            groups = [
                QueryGroup("pre", sizes[0]),
                *(replace(group, name=f"{group.name}_pre") for group in first.groups),
            ]
            predicted += [
                (group, Outputs(logits, first_boxes, outputs.num_streams))
                for group, logits, first_boxes in zip(groups, *(x[None].split(sizes, 2) for x in pre), strict=True)
            ]
        return replace(outputs, distributions=main, groups=tuple(predicted))

    def _stretched(self, queries: Queries, before: Refinement) -> tuple[Queries, Refinement]:
        """Stretch the channels of contents, positions and states to those of the wide layers."""
        content, position, state = (stretched(x, self.wide) for x in (queries.content, queries.position, before.state))
        return replace(queries, content=content, position=position), before._replace(state=state)

    def _memory_of(self, layer: int, memory: TokenBatch) -> TokenBatch:
        return memory if layer <= self.evaluated else memory.with_tokens(stretched(memory.tokens, self.wide))


def stretched(x: Tensor, width: int) -> Tensor:
    """Stretch (R, Q, C) to ``width`` channels, each of which is the nearest of the C channels."""
    return x if x.shape[-1] == width else F.interpolate(x, size=width)
