"""RT-DETR (Zhao et al. 2023, arXiv 2304.08069) and RT-DETRv2 (Lv et al. 2024, arXiv 2407.17140).

Shape legend: B images, R rows (streams x B), Q queries, D denoising queries, S tokens of all levels, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from detr_bf.common.boxes import inverse_sigmoid
from detr_bf.common.errors import InputError
from detr_bf.common.settings import setting
from detr_bf.common.structures import Queries, TokenBatch
from detr_bf.detectors.declaration import declare
from detr_bf.detectors.deformable_detr import DeformableMemoryAttention
from detr_bf.detectors.denoising import EMPTY, ContrastiveDenoising, DenoisingSlots
from detr_bf.detectors.detector import Detector, Options
from detr_bf.detectors.dino import DENOISING, ContrastiveQueries
from detr_bf.detectors.hybrid_encoder import (
    CrossScaleFusion,
    FusionBlock,
    HybridEncoder,
    NormedConvolution,
    projected_tokens,
)
from detr_bf.detectors.parts import (
    class_head,
    decoder_layer,
    default_attention,
    default_linear,
    encoder_with_default_weights,
    query_attention,
    zero_init_box_head,
)
from detr_bf.transformer import Decoder, DecoderLayer, Heads
from detr_bf.transformer.attention import DeformableAttention
from detr_bf.transformer.blocks import MLP, full_precision, xavier


@dataclass(frozen=True)
class RtdetrOptions:
    """Options of RT-DETR beside the shared ones.

    Args:
        version: 1, or 2 for the initialisation of RT-DETRv2 and its denoising of batches without objects.
        encoder_dim, encoder_feedforward_dim: widths in the hybrid encoder; None: those of the shared options.
        expansion, fusion_blocks: width and number of the RepVGG blocks of the fusion.
        points: sampling points per head, of all levels or of each (RT-DETRv2).
        sampling: ``bilinear``, or ``discrete`` to read whole cells (RT-DETRv2).
        learned_content: learned content of the queries instead of the tokens' features.
        head_activation: activation in the box heads and of the positions of the queries; SiLU in DEIM.
        deep_position: three layers, of which none is wider, for the positions of the queries, as in DEIM.
        deim_noise: make noised boxes with a negative width or height positive, and leave out the denoising of batches
            without objects, as in DEIM (Huang et al. 2024, arXiv 2412.04234).
        denoising: settings of the noised objects in training.
        as_released: on maps that are not square, use the positions and the discrete sampling of the released code, and
            count whole cells (see :class:`~detr_bf.transformer.FeatureTokens`), as without ``options.strides``.
    """

    version: int = 1
    denoising: ContrastiveDenoising = DENOISING
    encoder_dim: int | None = setting("rtdetr.encoder_dim", None)
    encoder_feedforward_dim: int | None = setting("rtdetr.encoder_feedforward_dim", None)
    expansion: float = setting("rtdetr.expansion", 1.0)
    fusion_blocks: int = setting("rtdetr.fusion_blocks", 3)
    points: int | Sequence[int] = setting("rtdetr.points", 4)
    sampling: str = setting("rtdetr.sampling", "bilinear")
    learned_content: bool = setting("rtdetr.learned_content", False)
    head_activation: str = setting("rtdetr.head_activation", "relu")
    deep_position: bool = setting("rtdetr.deep_position", False)
    deim_noise: bool = setting("rtdetr.deim_noise", False)
    as_released: bool = setting("rtdetr.as_released", False)


@declare(RtdetrOptions, no_object=False, from_tokens=True, encoder_width="rtdetr.encoder_dim")
def rtdetr(backbone: nn.Module, channels: Sequence[int], options: Options, own: RtdetrOptions) -> Detector:
    """Build RT-DETR: hybrid encoder, queries from the best tokens, decoder with deformable attention.

    Raises:
        InputError: a wrong number of points, another position encoding than sine, or a mask head with another
            ``encoder_dim`` than ``hidden_dim``.
    """
    dim, levels = options.hidden_dim, len(channels)
    width = own.encoder_dim or dim
    feedforward_dim = own.encoder_feedforward_dim or options.feedforward_dim
    inner = replace(options, hidden_dim=width, feedforward_dim=feedforward_dim, activation="gelu")
    if options.position_encoding != "sine":
        raise InputError(f"position_encoding must be sine in RT-DETR; got '{options.position_encoding}'")
    if width % 4:
        name = "hidden_dim" if width == dim else "encoder_dim"
        raise InputError(f"{name}={width} of the encoder must be divisible by 4 for the sine encoding")
    if options.mask_head is not None and width != dim:
        raise InputError(f"encoder_dim={width} must equal hidden_dim={dim} with a mask head")
    layers = [_decoder_layer(options, own, _points(own, levels)) for _ in range(options.decoder_layers)]
    return Detector(
        backbone,
        tokens=projected_tokens(channels, width, None if own.as_released else options.strides),
        encoder=_hybrid_encoder(inner, own, [NormedConvolution(width, dim) for _ in channels]),
        decoder=Decoder(
            layers,
            queries=SelectedQueries(
                options,
                learned_content=own.learned_content,
                denoising=own.denoising,
                activation=own.head_activation,
                dummy=own.version == 2 and not own.deim_noise,
                positive_sizes=own.deim_noise,
            ),
            heads=Heads(
                [class_head(options) for _ in layers],
                [zero_init_box_head(options, activation=own.head_activation) for _ in layers],
            ),
            norm=nn.LayerNorm(dim) if options.pre_norm else None,
            update_queries=BoxPosition(dim, activation=own.head_activation, deep=own.deep_position),
            refine=True,
            look_forward_twice=True,
            batch_former=options.query_batch_former,
            aux_loss=options.aux_loss,
        ),
        mask_head=options.mask_head,
        levels=levels,
    )


@declare(RtdetrOptions, no_object=False, from_tokens=True, encoder_width="rtdetr.encoder_dim")
def rtdetrv2(backbone: nn.Module, channels: Sequence[int], options: Options, own: RtdetrOptions) -> Detector:
    """Build RT-DETRv2; see :func:`rtdetr`."""
    return rtdetr.build(backbone, channels, options, replace(own, version=2))


def _points(own: RtdetrOptions, levels: int) -> list[int]:
    """Return the number of points of each level, which only version 2 lets differ."""
    points = [own.points] if isinstance(own.points, int) else list(own.points)
    if len(points) not in (1, levels):
        raise InputError(f"points={points}: expected one number, or one for each of the {levels} levels")
    if own.version == 1 and points != points[:1] * len(points):
        raise InputError(f"points={points} differ between the levels: use model.name=rtdetrv2")
    return points * levels if len(points) == 1 else points


def _decoder_layer(options: Options, own: RtdetrOptions, points: Sequence[int]) -> DecoderLayer:
    """Build a decoder layer with the initialisation of the authors' code, in which the versions differ."""
    attention = DeformableAttention(
        options.hidden_dim,
        heads=options.heads,
        levels=len(points),
        points=points if own.version == 2 else points[0],
        discrete=own.sampling == "discrete",
        released_cells=own.as_released,
    )
    self_attention = query_attention(options)
    default_attention(self_attention.attention)
    layer = decoder_layer(options, self_attention, DeformableMemoryAttention(attention))
    if own.version == 1:
        default_linear(layer.feed_forward.expand, layer.feed_forward.contract)
    return layer


def _hybrid_encoder(options: Options, own: RtdetrOptions, projections: Sequence[nn.Module]) -> HybridEncoder:
    """Build the encoder of width ``options.hidden_dim`` with ``projections`` to the width of the decoder."""
    width, silu = options.hidden_dim, nn.SiLU()
    layers = encoder_with_default_weights(options)
    if own.version == 2:
        for projection in projections:
            xavier(projection)
    fusion = CrossScaleFusion(
        len(projections),
        lateral=partial(NormedConvolution, width, width, activation=silu),
        down=partial(NormedConvolution, width, width, 3, 2, silu),
        fuse=partial(FusionBlock, 2 * width, width, expansion=own.expansion, blocks=own.fusion_blocks),
    )
    return HybridEncoder(
        layers,
        fusion,
        projections,
        temperature=options.position_temperature,
        released_position=own.as_released,
    )


class BoxPosition(nn.Module):
    """Position of every query from its reference box, before every layer (``query_pos_head`` of the authors' code).

    Args:
        limit: largest absolute value.
        deep: three layers, of which none is wider.
    """

    def __init__(self, dim: int, *, activation: str = "relu", deep: bool = False, limit: float = math.inf) -> None:
        super().__init__()
        self.head = MLP([4, dim, dim, dim] if deep else [4, 2 * dim, dim], activation)
        for layer in self.head.layers[:2]:
            xavier(layer)
        self.limit = limit

    def forward(self, layer: int, queries: Queries, memory: TokenBatch) -> Queries:
        assert queries.reference is not None
        position = full_precision(self.head, queries.reference)
        if self.limit < math.inf:
            position = position.clamp(-self.limit, self.limit)
        return replace(queries, position=position.to(queries.content.dtype))


class SelectedQueries(ContrastiveQueries):
    """The tokens with the best logit of any class become queries (IoU-aware query selection, section 4.3).

    The selected predictions are trained as those of a decoder layer; varifocal loss makes their logits follow the IoU.

    Args:
        learned_content: learn the contents; otherwise they are those of the tokens, without gradient.
        activation: in the box head of the tokens.
        positive_sizes: make noised boxes with a negative width or height positive, instead of without extent.
        denoising, dummy: as of :class:`ContrastiveQueries`.
    """

    def __init__(
        self,
        options: Options,
        *,
        learned_content: bool,
        denoising: ContrastiveDenoising,
        activation: str = "relu",
        dummy: bool = False,
        positive_sizes: bool = False,
    ) -> None:
        super().__init__(
            options.num_queries,
            options.hidden_dim,
            options.num_logits,
            # The last row belongs to slots without an object.
            labels=nn.Embedding(options.num_logits + 1, options.hidden_dim, padding_idx=options.num_logits),
            class_head=class_head(options),
            box_head=zero_init_box_head(options, activation=activation),
            mixed_selection=learned_content,
            denoising=denoising,
            dummy=dummy,
        )
        self.positive_sizes = positive_sizes

    def _noised_objects(self, slots: DenoisingSlots) -> tuple[Tensor, Tensor]:
        content = self.labels(torch.where(slots.labels == EMPTY, self.labels.num_embeddings - 1, slots.labels))
        boxes = slots.boxes.abs() if self.positive_sizes else slots.boxes
        return content, inverse_sigmoid(boxes).sigmoid()
