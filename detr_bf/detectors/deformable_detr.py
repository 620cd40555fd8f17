"""Deformable DETR: Deformable Transformers for End-to-End Object Detection (Zhu et al. 2021, arXiv 2010.04159).

Shape legend: R rows, Q queries, S tokens of all levels, N levels, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from detr_bf.common.errors import InputError
from detr_bf.common.settings import setting
from detr_bf.common.structures import GROUP, Queries, TokenBatch
from detr_bf.detectors.declaration import declare
from detr_bf.detectors.detector import Detector, Options
from detr_bf.detectors.parts import (
    class_head,
    decoder_layer,
    encoder,
    encoder_layer,
    position,
    projection,
    query_attention,
    zero_init_box_head,
)
from detr_bf.detectors.two_stage import ProposalQueries
from detr_bf.transformer import Decoder, DecoderLayer, Encoder, FeatureTokens, Heads, LearnedQueries
from detr_bf.transformer.attention import DeformableAttention
from detr_bf.transformer.blocks import xavier

SIZE_LOGIT = -2.0  # initial boxes are 0.12 of the image wide and high


@dataclass(frozen=True)
class LevelOptions:
    """Levels of the tokens, and sampling points per head and level."""

    extra_levels: int = setting("extra_levels", 1)  # each of half the size, computed from the last feature map
    encoder_points: int = setting("deformable.encoder_points", 4)
    decoder_points: int = setting("deformable.decoder_points", 4)


@dataclass(frozen=True)
class DeformableOptions(LevelOptions):
    """Options of Deformable DETR beside the shared ones.

    Raises:
        InputError: ``two_stage`` or ``look_forward_twice`` without ``box_refine``, or ``mixed_selection`` without
            ``two_stage``, which are not defined in the papers' code.
    """

    box_refine: bool = setting("deformable.box_refine", False)  # of the previous layer's boxes, with heads of its own
    two_stage: bool = setting("deformable.two_stage", False)  # queries and boxes from the best tokens of the encoder
    mixed_selection: bool = setting("deformable.mixed_selection", False)  # learned contents, see ProposalQueries
    look_forward_twice: bool = setting("deformable.look_forward_twice", False)  # see transformer.Decoder

    def __post_init__(self) -> None:
        if self.two_stage and not self.box_refine:
            raise InputError("two_stage=true needs box_refine=true as well")
        if self.look_forward_twice and not self.box_refine:
            raise InputError("look_forward_twice=true needs box_refine=true as well")
        if self.mixed_selection and not self.two_stage:
            raise InputError("mixed_selection=true needs two_stage=true as well")


@declare(DeformableOptions, two_stage="deformable.two_stage")
def deformable_detr(
    backbone: nn.Module,
    channels: Sequence[int],
    options: Options,
    own: DeformableOptions,
    queries: nn.Module | None = None,
    update_queries: nn.Module | None = None,
    eps: float = 1e-5,
) -> Detector:
    """Build Deformable DETR: deformable attention of tokens and queries to the tokens of several levels.

    Args:
        queries, update_queries, eps: of decoder and heads; by default learned queries or those of ``two_stage``.
    """
    levels = len(channels) + own.extra_levels
    tokens_encoder = deformable_encoder(options, levels, own.encoder_points)
    layers = deformable_decoder_layers(options, levels, own.decoder_points)
    return Detector(
        backbone,
        tokens=level_tokens(channels, levels, options, offset=-0.5),
        encoder=tokens_encoder,
        decoder=Decoder(
            layers,
            queries=queries
            or (_proposal_queries(options, own.mixed_selection) if own.two_stage else _learned_queries(options)),
            heads=_heads(options, own.box_refine, own.two_stage, eps),
            norm=nn.LayerNorm(options.hidden_dim) if options.pre_norm else None,
            update_queries=update_queries,
            refine=own.box_refine,
            look_forward_twice=own.look_forward_twice,
            batch_former=options.query_batch_former,
            aux_loss=options.aux_loss,
        ),
        mask_head=options.mask_head,
        levels=len(channels),
    )


def level_tokens(channels: Sequence[int], levels: int, options: Options, *, offset: float) -> FeatureTokens:
    """Build the tokens of all maps and of further levels, computed from the last map; ``offset`` of the positions."""
    dim = options.hidden_dim
    projections = [projection(count, options, norm=True) for count in channels]
    for level in range(levels - len(channels)):
        source = dim if level else channels[-1]
        projections.append(projection(source, options, norm=True, kernel=3, stride=2))
    for name, parameter in nn.ModuleList(map(xavier, projections)).named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    embedding = nn.Parameter(torch.randn(levels, dim))
    return FeatureTokens(projections, position(options, offset=offset), level_embedding=embedding)


def deformable_encoder(options: Options, levels: int, points: int) -> Encoder:
    """Build the encoder loop over layers of deformable attention."""
    dim, heads = options.hidden_dim, options.heads
    layers = [
        encoder_layer(
            options, DeformableTokenAttention(DeformableAttention(dim, heads=heads, levels=levels, points=points))
        )
        for _ in range(options.encoder_layers)
    ]
    return encoder(options, layers)


def deformable_decoder_layers(options: Options, levels: int, points: int) -> list[DecoderLayer]:
    """Build decoder layers with attention between the queries and deformable attention to the tokens."""
    dim, heads = options.hidden_dim, options.heads
    return [
        decoder_layer(
            options,
            query_attention(options),
            DeformableMemoryAttention(DeformableAttention(dim, heads=heads, levels=levels, points=points)),
        )
        for _ in range(options.decoder_layers)
    ]


def _learned_queries(options: Options) -> LearnedQueries:
    point = xavier(nn.Linear(options.hidden_dim, 2))
    nn.init.zeros_(point.bias)
    return LearnedQueries(
        options.num_queries, options.hidden_dim, learned_content=True, reference=point, groups=options.groups
    )


def _proposal_queries(options: Options, mixed_selection: bool) -> ProposalQueries:
    if any(group.name == GROUP for group in options.groups):
        raise InputError("groups.group_detr needs learned queries: set two_stage=false, or use groups.one_to_many")
    return ProposalQueries(
        options.num_queries,
        options.hidden_dim,
        class_head=class_head(options),
        box_head=zero_init_box_head(options),
        learned_content=mixed_selection,
        groups=options.groups,
    )


def _heads(options: Options, refine: bool, two_stage: bool, eps: float) -> Heads:
    """Build one pair of heads, or with ``refine`` one per layer; only the first sets the initial size."""
    count = options.decoder_layers if refine else 1
    first = 0.0 if two_stage else SIZE_LOGIT
    boxes = [zero_init_box_head(options, size_logit=0.0 if layer else first) for layer in range(count)]
    return Heads([class_head(options) for _ in range(count)], boxes, eps=eps)


class DeformableTokenAttention(nn.Module):
    """Deformable attention of every token around its own position, to all levels."""

    def __init__(self, attention: DeformableAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, batch: TokenBatch) -> Tensor:
        """(R, S, C) -> (R, S, C)."""
        shapes = batch.static["spatial_shapes"]
        reference = cell_centres(shapes, batch.per_sample["valid_ratios"])
        with_position = x + batch.per_sample["position"]
        return self.attention(with_position, reference, x, shapes, batch.per_sample["padding_mask"])


class DeformableMemoryAttention(nn.Module):
    """Deformable attention of every query around its reference point or in its reference box, to all levels."""

    def __init__(self, attention: DeformableAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, queries: Queries, memory: TokenBatch) -> Tensor:
        """(R, Q, C) -> (R, Q, C)."""
        assert queries.reference is not None
        ratios = memory.per_sample["valid_ratios"].repeat(1, 1, queries.reference.shape[-1] // 2)
        return self.attention(
            x + queries.position,
            queries.reference[:, :, None] * ratios[:, None],
            memory.tokens,
            memory.static["spatial_shapes"],
            memory.per_sample["padding_mask"],
        )


def cell_centres(spatial_shapes: Sequence[tuple[int, int]], valid_ratios: Tensor) -> Tensor:
    """Return the centre of every cell on every level: (R, S, N, 2), x and y in fractions of the padded level.

    The point is the same fraction of the unpadded part (``valid_ratios`` (R, N, 2)) on all levels.
    """
    centres = []
    for level, (height, width) in enumerate(spatial_shapes):
        y, x = torch.meshgrid(
            (torch.arange(height, device=valid_ratios.device) + 0.5) / height,
            (torch.arange(width, device=valid_ratios.device) + 0.5) / width,
            indexing="ij",
        )
        centres.append(torch.stack([x, y], dim=-1).flatten(0, 1) / valid_ratios[:, level, None])
    return torch.cat(centres, dim=1)[:, :, None] * valid_ratios[:, None]
