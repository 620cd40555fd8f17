"""D-FINE (Peng et al. 2024, arXiv 2410.13842), and with other options DEIM's form of it (arXiv 2412.04234).

Shape legend: R rows (streams x images), Q queries, S tokens of all levels, K class logits, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from detr_bf.common.errors import InputError
from detr_bf.common.settings import setting
from detr_bf.detectors.declaration import declare
from detr_bf.detectors.deformable_detr import DeformableMemoryAttention
from detr_bf.detectors.denoising import ContrastiveDenoising
from detr_bf.detectors.detector import Detector, Options
from detr_bf.detectors.dfine_encoder import dfine_encoder
from detr_bf.detectors.dino import DENOISING
from detr_bf.detectors.distributions import DistributionDecoder, DistributionHeads, Gate
from detr_bf.detectors.hybrid_encoder import projected_tokens
from detr_bf.detectors.parts import class_head, decoder_layer, default_attention, query_attention, zero_init_box_head
from detr_bf.detectors.rtdetr import BoxPosition, SelectedQueries
from detr_bf.transformer import DecoderLayer
from detr_bf.transformer.attention import DeformableAttention

MOST_POSITION = 10.0  # largest absolute value in the position of a query


@dataclass(frozen=True)
class DfineOptions:
    """Options of D-FINE beside the shared ones.

    Args:
        encoder_dim, encoder_feedforward_dim: widths in the hybrid encoder; None: those of the shared options.
        expansion, fusion_blocks, attention_levels: as of :func:`~detr_bf.detectors.dfine_encoder.dfine_encoder`.
        points: sampling points per head, of all levels or of each.
        sampling: ``bilinear``, or ``discrete`` to read whole cells.
        selection: ``tokens`` for queries from the tokens with the best class, ``pairs`` from the best pairs of token
            and class, among which a token may be several times.
        learned_content: learned content of the queries instead of the tokens' features.
        head_activation: activation in box heads, quality and positions of the queries; SiLU in DEIM.
        eval_layer: index of the decoder layer that predicts in evaluation; None: the last.
        layer_scale: width of the layers after it in units of ``hidden_dim``; without effect if there are none.
        reg_max, up, reg_scale: as of :class:`~detr_bf.detectors.distributions.DistributionDecoder`.
        denoising: settings of the noised objects in training.
        as_released: as of RT-DETR.

    With ``pre_norm`` the gate after the attention to tokens still normalises its sum.
    """

    denoising: ContrastiveDenoising = DENOISING
    encoder_dim: int | None = setting("dfine.encoder_dim", None)
    encoder_feedforward_dim: int | None = setting("dfine.encoder_feedforward_dim", None)
    expansion: float = setting("dfine.expansion", 1.0)
    fusion_blocks: int = setting("dfine.fusion_blocks", 3)
    attention_levels: Sequence[int] = setting("dfine.attention_levels", ())  # empty: the coarsest
    points: int | Sequence[int] = setting("dfine.points", 4)
    sampling: str = setting("dfine.sampling", "bilinear")
    selection: str = setting("dfine.selection", "tokens")
    learned_content: bool = setting("dfine.learned_content", False)
    head_activation: str = setting("dfine.head_activation", "relu")
    eval_layer: int | None = setting("dfine.eval_layer", None)
    layer_scale: float = setting("dfine.layer_scale", 1.0)
    reg_max: int = setting("dfine.reg_max", 32)
    up: float = setting("dfine.up", 0.5)
    reg_scale: float = setting("dfine.reg_scale", 4.0)
    as_released: bool = setting("dfine.as_released", False)


@declare(DfineOptions, no_object=False, from_tokens=True, encoder_width="dfine.encoder_dim")
def dfine(backbone: nn.Module, channels: Sequence[int], options: Options, own: DfineOptions) -> Detector:
    """Build D-FINE: hybrid encoder, queries from the best tokens, decoder that refines distributions of box sides.

    Raises:
        InputError: a wrong number of points, a layer that is not there, options that exclude each other, or those of
            :func:`~detr_bf.detectors.dfine_encoder.dfine_encoder`.
    """
    dim, levels = options.hidden_dim, len(channels)
    width = own.encoder_dim or dim
    evaluated = options.decoder_layers - 1 if own.eval_layer is None else own.eval_layer
    _check(options, own, width, evaluated)
    return Detector(
        backbone,
        tokens=projected_tokens(channels, width, None if own.as_released else options.strides),
        encoder=dfine_encoder(
            options,
            width=width,
            feedforward_dim=own.encoder_feedforward_dim or options.feedforward_dim,
            levels=levels,
            expansion=own.expansion,
            blocks=own.fusion_blocks,
            attention_levels=own.attention_levels or None,
            as_released=own.as_released,
        ),
        decoder=_decoder(options, own, levels, evaluated),
        mask_head=options.mask_head,
        levels=levels,
    )


def _check(options: Options, own: DfineOptions, width: int, evaluated: int) -> None:
    """Refuse options that the detector cannot be built with."""
    dim, last = options.hidden_dim, options.decoder_layers - 1
    if not 0 <= evaluated <= last:
        raise InputError(f"eval_layer={evaluated} must be from 0 to {last}, as there are {last + 1} decoder layers")
    if own.layer_scale < 1:
        raise InputError(f"layer_scale={own.layer_scale} must be 1 or more")
    if own.layer_scale > 1 and (options.query_batch_former is not None or options.pre_norm):
        raise InputError(
            f"layer_scale={own.layer_scale}: batch attention between queries and pre_norm need decoder layers of one "
            "width; set layer_scale=1"
        )
    if evaluated != last and not options.aux_loss:
        raise InputError(
            f"aux_loss=False trains the last layer alone, and eval_layer={evaluated} predicts in evaluation"
        )
    if options.position_encoding != "sine":
        raise InputError(f"position_encoding must be sine in D-FINE; got '{options.position_encoding}'")
    if options.mask_head is not None and width != dim:
        raise InputError(f"encoder_dim={width} must equal hidden_dim={dim} with a mask head")
    if options.mask_head is not None and evaluated != last:
        raise InputError(f"eval_layer={evaluated}: a mask head reads the last decoder layer; set eval_layer={last}")


def _decoder(options: Options, own: DfineOptions, levels: int, evaluated: int) -> DistributionDecoder:
    """Build the decoder; the layers after layer ``evaluated`` may be wider."""
    dim, outputs = options.hidden_dim, 4 * (own.reg_max + 1)
    wide = replace(
        options,
        hidden_dim=round(own.layer_scale * dim),
        feedforward_dim=round(own.layer_scale * options.feedforward_dim),
    )
    of_layers = [options if layer <= evaluated else wide for layer in range(options.decoder_layers)]
    return DistributionDecoder(
        [_decoder_layer(each, own, levels) for each in of_layers],
        queries=(PairQueries if own.selection == "pairs" else SelectedQueries)(
            options,
            learned_content=own.learned_content,
            denoising=own.denoising,
            activation=own.head_activation,
            positive_sizes=True,
        ),
        heads=DistributionHeads(
            [class_head(each) for each in of_layers],
            [zero_init_box_head(each, outputs=outputs, activation=own.head_activation) for each in of_layers],
            first_box=zero_init_box_head(options, activation=own.head_activation),
            activation=own.head_activation,
        ),
        norm=nn.LayerNorm(dim) if options.pre_norm else None,
        update_queries=BoxPosition(dim, activation=own.head_activation, limit=MOST_POSITION),
        batch_former=options.query_batch_former,
        aux_loss=options.aux_loss,
        evaluated=evaluated,
        wide=wide.hidden_dim,
        reg_max=own.reg_max,
        up=own.up,
        reg_scale=own.reg_scale,
    )


def _decoder_layer(options: Options, own: DfineOptions, levels: int) -> DecoderLayer:
    """Build a decoder layer with a gate, and attention to the tokens themselves."""
    points = [own.points] if isinstance(own.points, int) else list(own.points)
    attention = DeformableAttention(
        options.hidden_dim,
        heads=options.heads,
        levels=levels,
        points=points * levels if len(points) == 1 else points,
        discrete=own.sampling == "discrete",
        released_cells=own.as_released,
        project=False,
    )
    self_attention = query_attention(options)
    default_attention(self_attention.attention)
    gate = Gate(options.hidden_dim, dropout=options.dropout)
    return decoder_layer(options, self_attention, DeformableMemoryAttention(attention), gate)


class PairQueries(SelectedQueries):
    """The tokens of the best pairs of token and class become queries, so that a token may become several."""

    def best(self, logits: Tensor) -> Tensor:
        return logits.flatten(1).topk(self.num_queries, dim=1).indices // logits.shape[-1]
