"""DAB-DETR: Dynamic Anchor Boxes are Better Queries for DETR (Liu et al. 2022, arXiv 2201.12329).

Shape legend: R rows, A anchors, P patterns, Q queries (A x P), C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from detr_bf.common.boxes import inverse_sigmoid
from detr_bf.common.errors import InputError
from detr_bf.common.settings import setting
from detr_bf.common.structures import Queries, QueryGroup, Target, TokenBatch
from detr_bf.detectors.conditional_detr import conditional_layers, content_scale
from detr_bf.detectors.declaration import declare
from detr_bf.detectors.detector import Detector, Options
from detr_bf.detectors.parts import shared_heads, single_level_detector, zero_init_box_head
from detr_bf.transformer import Decoder, in_groups
from detr_bf.transformer.blocks import MLP, xavier
from detr_bf.transformer.position import sine_of_coordinates

EPS = 1e-3  # of the logits of boxes, in DAB-DETR and the detectors made of it
LARGEST_QUOTIENT = 1000.0  # of the sizes in float16: a box of a thousandth of the image


@dataclass(frozen=True)
class DabOptions:
    """Options of DAB-DETR beside the shared ones."""

    patterns: int = setting("dab.patterns", 0)  # learned contents that every anchor is combined with, 0 for zeros
    random_points: bool = setting("dab.random_points", False)  # initial centres uniformly over the image


@declare(DabOptions)
def dab_detr(
    backbone: nn.Module, channels: Sequence[int], options: Options, own: DabOptions, queries: nn.Module | None = None
) -> Detector:
    """Build DAB-DETR: the queries are boxes, which every layer refines; by default :class:`AnchorQueries`."""
    dim = options.hidden_dim
    decoder = Decoder(
        conditional_layers(options),
        queries=queries
        or AnchorQueries(
            options.num_queries, dim, patterns=own.patterns, random_points=own.random_points, further=options.groups
        ),
        heads=shared_heads(options, zero_init_box_head(options), eps=EPS),
        norm=nn.LayerNorm(dim),
        update_queries=ModulatedAnchors(dim, options.decoder_layers),
        refine=True,
        refine_before_norm=True,
        look_forward_twice=True,
        batch_former=options.query_batch_former,
        aux_loss=options.aux_loss,
    )
    scale = xavier(MLP([dim, dim, dim])).requires_grad_(options.encoder_layers > 0)
    return single_level_detector(backbone, channels, options, decoder, position_scale=scale)


class AnchorQueries(nn.Module):
    """Learned anchor boxes, each combined with every pattern: all anchors with the first pattern, with the second, ...

    Args:
        patterns: P, 0 for one pattern of zeros.
        learned_content: add a learned content for each anchor.
        random_points: initialise the centres of the boxes uniformly over the image.
        further: groups of further anchors in training.

    Raises:
        InputError: ``dim`` is not divisible by 4, or there are patterns and groups.
    """

    def __init__(
        self,
        num_anchors: int,
        dim: int,
        *,
        patterns: int = 0,
        learned_content: bool = False,
        random_points: bool = False,
        further: Sequence[QueryGroup] = (),
    ) -> None:
        super().__init__()
        if dim % 4:
            raise InputError(f"dim={dim} must be divisible by 4 for the sine encoding of anchor boxes")
        if patterns and further:
            raise InputError(f"patterns={patterns} cannot be combined with groups of further queries: use one of them")
        self.dim = dim
        self.further = tuple(further)
        self.num_anchors = num_anchors
        num_anchors += sum(group.size for group in further)
        self.anchors = nn.Embedding(num_anchors, 4)  # logits
        self.content = nn.Embedding(num_anchors, dim) if learned_content else None
        self.patterns = nn.Embedding(patterns, dim) if patterns else None
        if random_points:
            with torch.no_grad():
                self.anchors.weight[:, :2] = inverse_sigmoid(torch.rand(num_anchors, 2), EPS)

    def forward(self, memory: TokenBatch, targets: Sequence[Target] = ()) -> Queries:
        """Memory of R rows -> queries (R, Q, C) with reference boxes (R, Q, 4)."""
        groups = self.further if self.training else ()
        count = self.num_anchors + sum(group.size for group in groups)
        boxes, content = self.anchors.weight[:count].sigmoid(), self.content_of_anchors()[:count]
        if self.patterns is not None:
            count = self.patterns.num_embeddings
            boxes = boxes.repeat(count, 1)
            content = content.repeat(count, 1) + self.patterns.weight.repeat_interleave(len(content), dim=0)
        rows = memory.tokens.shape[0]
        content = content.expand(rows, -1, -1)
        return in_groups(Queries(content, torch.zeros_like(content), boxes.expand(rows, -1, -1)), groups)

    def content_of_anchors(self) -> Tensor:
        """Return the content (A, C) of every anchor without a pattern."""
        if self.content is not None:
            return self.content.weight
        return self.anchors.weight.new_zeros(self.anchors.num_embeddings, self.dim)


class AnchorPosition(nn.Module):
    """Position of a query: a perceptron of the sine encoding of its box in fractions of the padded first level.

    Args:
        scaled_layers: number of decoder layers; from the second on the position is multiplied by a function of the
            content (DAB-Deformable-DETR). None: in no layer.
        once: compute it before the first layer only, as the boxes stay the same.
    """

    def __init__(self, dim: int, scaled_layers: int | None = None, *, once: bool = False) -> None:
        super().__init__()
        self.once = once
        self.point = xavier(MLP([2 * dim, dim, dim]))
        self.scale = None if scaled_layers is None else content_scale(dim, scaled_layers)

    def forward(self, layer: int, queries: Queries, memory: TokenBatch) -> Queries:
        assert queries.reference is not None
        if self.once and layer:
            return queries
        ratio = memory.per_sample["valid_ratios"][:, None, 0]
        boxes = queries.reference * torch.cat([ratio, ratio], dim=-1)
        position = self.point(box_sine(boxes, queries.content.shape[-1]))
        if self.scale is not None and layer:
            position = position * self.scale(queries.content)
        return replace(queries, position=position)


class ModulatedAnchors(nn.Module):
    """Position of a query, and its position for a cross-attention that follows the size of the box (section 4.4).

    The second is the encoding of the centre alone, from the second layer on scaled by a function of the content. Its
    y and x parts are multiplied by a height and a width that the content asks for, relative to those of the box. In
    float16 this quotient is at most ``LARGEST_QUOTIENT``, because that of a tiny box would overflow.
    """

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.point = xavier(MLP([2 * dim, dim, dim]))
        self.scale = content_scale(dim, layers)
        self.size = xavier(MLP([dim, dim, 2]))

    def forward(self, layer: int, queries: Queries, memory: TokenBatch) -> Queries:
        boxes, content = queries.reference, queries.content
        assert boxes is not None
        encoding = box_sine(boxes, content.shape[-1])
        centre = encoding[..., : content.shape[-1]]
        if layer:
            centre = centre * self.scale(content)
        size = self.size(content).sigmoid()
        factor = (size / boxes[..., 2:]).flip(-1)  # of y and of x
        if size.dtype == torch.float16:
            factor = factor.clamp(max=LARGEST_QUOTIENT)
        modulation = (centre.unflatten(-1, (2, -1)) * factor[..., None]).flatten(-2)
        return replace(queries, position=self.point(encoding), modulation=modulation)


def box_sine(boxes: Tensor, dim: int) -> Tensor:
    """Return the sine encoding (..., 2 C) of boxes (..., 4): ``dim`` / 2 channels each of y, x, width, height."""
    return sine_of_coordinates(boxes[..., [1, 0, 2, 3]], dim // 2)
