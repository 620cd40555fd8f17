"""RT-DETR (Zhao et al. 2023, arXiv 2304.08069) and RT-DETRv2 (Lv et al. 2024, arXiv 2407.17140).

Shape legend: B images, R rows (streams x B), Q queries, D denoising queries, S tokens of all levels, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from detr_bf.boxes import inverse_sigmoid
from detr_bf.detectors.deformable_detr import DeformableMemoryAttention
from detr_bf.detectors.denoising import NoiseDraws, add_contrastive_noise, contrastive_slots, group_count
from detr_bf.detectors.detector import (
    Detector,
    Options,
    class_head,
    decoder_layer,
    encoder,
    encoder_layer,
    query_attention,
    xavier,
    zero_init_box_head,
)
from detr_bf.detectors.hybrid_encoder import CrossScaleFusion, HybridEncoder, NormedConvolution
from detr_bf.detectors.two_stage import anchor_boxes, inverse_of_anchors
from detr_bf.errors import InputError
from detr_bf.layers import MLP, MultiHeadAttention, full_precision
from detr_bf.structures import Outputs, Queries, QueryGroup, Target, TokenBatch
from detr_bf.transformer import Decoder, DecoderLayer, FeatureTokens, Heads, TokenAttention, append_queries


@dataclass(frozen=True)
class RtdetrOptions:
    """Options of RT-DETR beside the shared ones.

    Args:
        version: 1, or 2 for the initialisation of RT-DETRv2 and its denoising of batches without objects.
        encoder_dim, encoder_feedforward_dim: widths in the hybrid encoder; None: those of the shared options.
        expansion, fusion_blocks: width and number of the RepVGG blocks of the fusion.
        points: sampling points per head, of all levels or of each; ``discrete``: read whole cells (RT-DETRv2).
        learned_content: learned content of the queries instead of the tokens' features.
        denoising: about so many noised objects per image in training; 0: none. ``label_noise`` and ``box_noise``: of
            :func:`detr_bf.detectors.denoising.add_contrastive_noise`.
        as_released: on maps that are not square, use the positions and the discrete sampling of the released code.
    """

    version: int = 1
    encoder_dim: int | None = None
    encoder_feedforward_dim: int | None = None
    expansion: float = 1.0
    fusion_blocks: int = 3
    points: int | Sequence[int] = 4
    discrete: bool = False
    learned_content: bool = False
    denoising: int = 100
    label_noise: float = 0.5
    box_noise: float = 1.0
    as_released: bool = False


def rtdetr(backbone: nn.Module, channels: Sequence[int], options: Options, **settings: Any) -> Detector:
    """Build RT-DETR: hybrid encoder, queries from the best tokens, decoder with deformable attention.

    Args:
        backbone, channels, options: feature maps and shared options.
        settings: fields of :class:`RtdetrOptions`.

    Raises:
        InputError: another position encoding than sine, or a mask head with an ``encoder_dim`` of its own.
    """
    own, dim, levels = RtdetrOptions(**settings), options.hidden_dim, len(channels)
    width = own.encoder_dim or dim
    feedforward_dim = own.encoder_feedforward_dim or options.feedforward_dim
    inner = replace(options, hidden_dim=width, feedforward_dim=feedforward_dim, activation="gelu")
    if options.position_encoding != "sine":
        raise InputError(f"position_encoding must be sine in RT-DETR; got '{options.position_encoding}'")
    if width % 4:
        raise InputError(f"hidden_dim={width} of the encoder must be divisible by 4 for the sine encoding")
    if options.mask_head is not None and width != dim:
        raise InputError(f"encoder_dim={width} must equal hidden_dim={dim} with a mask head")
    layers = [_decoder_layer(options, own, levels) for _ in range(options.decoder_layers)]
    return Detector(
        backbone,
        tokens=FeatureTokens([NormedConvolution(count, width) for count in channels], None),
        encoder=_hybrid_encoder(inner, own, [NormedConvolution(width, dim) for _ in channels]),
        decoder=Decoder(
            layers,
            queries=SelectedQueries(options, own),
            heads=Heads(*([head(options) for _ in layers] for head in (class_head, zero_init_box_head))),
            norm=nn.LayerNorm(dim) if options.pre_norm else None,
            update_queries=BoxPosition(dim),
            refine=True,
            look_forward_twice=True,
            aux_loss=options.aux_loss,
        ),
        mask_head=options.mask_head,
        levels=levels,
    )


def rtdetrv2(backbone: nn.Module, channels: Sequence[int], options: Options, **settings: Any) -> Detector:
    """Build RT-DETRv2; see :func:`rtdetr`."""
    return rtdetr(backbone, channels, options, version=2, **settings)


def _decoder_layer(options: Options, own: RtdetrOptions, levels: int) -> DecoderLayer:
    """Build a decoder layer with the initialisation of the authors' code, in which the versions differ."""
    attention = DeformableMemoryAttention(
        options.hidden_dim,
        heads=options.heads,
        levels=levels,
        points=[own.points] * levels if own.version == 2 and isinstance(own.points, int) else own.points,
        discrete=own.discrete,
        released_cells=own.as_released,
    )
    self_attention = query_attention(options)
    _default_attention(self_attention.attention)
    layer = decoder_layer(options, self_attention, attention)
    if own.version == 1:
        _default_linear(layer.feed_forward.expand, layer.feed_forward.contract)
    return layer


def _hybrid_encoder(options: Options, own: RtdetrOptions, projections: Sequence[nn.Module]) -> HybridEncoder:
    """Build the encoder of width ``options.hidden_dim`` with ``projections`` to the width of the decoder."""
    width = options.hidden_dim
    layers = []
    for _ in range(options.encoder_layers):
        attention = TokenAttention(width, heads=options.heads, dropout=options.dropout)
        layers.append(encoder_layer(options, attention))
        _default_attention(attention.attention)
        _default_linear(layers[-1].feed_forward.expand, layers[-1].feed_forward.contract)
    if own.version == 2:
        for projection in projections:
            xavier(projection)
    return HybridEncoder(
        encoder(options, layers, nn.LayerNorm(width) if options.pre_norm else None),
        CrossScaleFusion(width, len(projections), expansion=own.expansion, blocks=own.fusion_blocks),
        projections,
        temperature=options.position_temperature,
        released_position=own.as_released,
    )


def _default_attention(attention: MultiHeadAttention) -> None:
    """Initialise the output projection as torch's multi-head attention does."""
    _default_linear(attention.out)
    nn.init.zeros_(attention.out.bias)


def _default_linear(*layers: nn.Linear) -> None:
    for layer in layers:
        layer.reset_parameters()


class BoxPosition(nn.Module):
    """Position of every query from its reference box, before every layer (``query_pos_head`` of the authors' code)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.head = xavier(MLP([4, 2 * dim, dim]))

    def forward(self, layer: int, queries: Queries, memory: TokenBatch) -> Queries:
        assert queries.reference is not None
        return replace(queries, position=full_precision(self.head, queries.reference).to(queries.content.dtype))


class SelectedQueries(nn.Module):
    """The tokens with the best logit of any class become queries (IoU-aware query selection, section 4.3).

    The selected predictions are trained as those of a decoder layer; varifocal loss makes their logits follow the IoU.
    """

    def __init__(self, options: Options, own: RtdetrOptions) -> None:
        super().__init__()
        dim = options.hidden_dim
        self.num_queries, self.num_logits = options.num_queries, options.num_logits
        self.project = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.project.weight)
        self.norm = nn.LayerNorm(dim)
        self.class_head = class_head(options)
        self.box_head = zero_init_box_head(options)
        self.content = xavier(nn.Embedding(options.num_queries, dim)) if own.learned_content else None
        self.own = own
        # The last row belongs to slots without an object.
        self.labels = nn.Embedding(self.num_logits + 1, dim, padding_idx=self.num_logits) if own.denoising else None

    def forward(self, memory: TokenBatch, targets: Sequence[Target] = ()) -> Queries:
        """Memory (R, S, C) -> queries (R, Q, C) with reference boxes (R, Q, 4), in training followed by D noised ones.

        Raises:
            InputError: there are fewer tokens than queries.
        """
        if memory.tokens.shape[1] < self.num_queries:
            raise InputError(
                f"RT-DETR takes its {self.num_queries} queries from the image's tokens, of which there are "
                f"{memory.tokens.shape[1]}: use larger images or a smaller num_queries"
            )
        anchors, usable = anchor_boxes(memory)
        tokens = self.norm(self.project(memory.tokens.masked_fill(~usable, 0.0)))
        logits = full_precision(self.class_head, tokens)
        best = logits.amax(-1).topk(self.num_queries, dim=1).indices[..., None]
        chosen, logits, start = (
            x.gather(1, best.expand(-1, -1, x.shape[2])) for x in (tokens, logits, inverse_of_anchors(anchors, usable))
        )
        boxes = (full_precision(self.box_head, chosen) + start).sigmoid()
        content = chosen.detach() if self.content is None else self.content.weight.expand_as(chosen)
        proposals = Outputs(logits[None], boxes[None], memory.num_streams)
        queries = Queries(content, torch.zeros_like(content), boxes.detach(), proposals=proposals)
        return self._with_denoising(queries, targets, memory.num_streams) if targets and self.labels else queries

    def _with_denoising(self, queries: Queries, targets: Sequence[Target], num_streams: int) -> Queries:
        """Append the noised objects, the same ones in every stream."""
        assert self.labels is not None
        slots = contrastive_slots(targets, group_count(self.own.denoising, targets), dummy=self.own.version == 2)
        draws = NoiseDraws.draw((len(targets), slots.labels.shape[1]), self.num_logits, slots.labels.device)
        noised = add_contrastive_noise(slots, draws, label_noise=self.own.label_noise, box_noise=self.own.box_noise)
        content = self.labels(torch.where(noised.labels < 0, self.num_logits, noised.labels))
        reference = inverse_sigmoid(noised.boxes).sigmoid()
        repeated = (x.repeat(num_streams, *[1] * (x.dim() - 1)) for x in (content, reference, noised.objects))
        content, reference, objects = repeated
        group = QueryGroup("dn", slots.labels.shape[1], assigned=objects, parts=slots.groups)
        return append_queries(queries, content.to(queries.content.dtype), group, reference=reference, sees_main=True)
