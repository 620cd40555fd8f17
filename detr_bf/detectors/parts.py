"""Parts that several detectors use: encoder and decoder layers, heads, projections and positions.

Shape legend: B images, R rows (streams x images), Q queries, K class logits, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from detr_bf.common.errors import InputError
from detr_bf.detectors.detector import Detector, Options
from detr_bf.transformer import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    FeatureTokens,
    Heads,
    QueryAttention,
    TokenAttention,
)
from detr_bf.transformer.attention import MultiHeadAttention
from detr_bf.transformer.blocks import MLP
from detr_bf.transformer.position import LearnedPosition, SinePosition

NORM_GROUPS = 32  # of Deformable DETR (Zhu et al. 2021, arXiv 2010.04159)


def single_level_detector(
    backbone: nn.Module,
    channels: Sequence[int],
    options: Options,
    decoder: Decoder,
    position_scale: nn.Module | None = None,
) -> Detector:
    """Build a detector with DETR's encoder over the tokens of one feature map; ``position_scale`` is the encoder's.

    Raises:
        InputError: the backbone has several feature maps.
    """
    if len(channels) != 1:
        raise InputError(
            f"strides: this detector uses one feature map, got {len(channels)}; give one stride and, in "
            "backbone.vit.maps, one block, or use deformable_detr"
        )
    tokens = FeatureTokens([projection(channels[0], options, norm=options.input_norm)], position(options))
    layers = [
        encoder_layer(options, TokenAttention(options.hidden_dim, heads=options.heads, dropout=options.dropout))
        for _ in range(options.encoder_layers)
    ]
    loop = encoder(options, layers, position_scale)
    return Detector(backbone, tokens=tokens, encoder=loop, decoder=decoder, mask_head=options.mask_head)


def encoder_layer(options: Options, attention: nn.Module) -> EncoderLayer:
    """Build an encoder layer around ``attention``."""
    return EncoderLayer(
        attention,
        dim=options.hidden_dim,
        feedforward_dim=options.feedforward_dim,
        dropout=options.dropout,
        pre_norm=options.pre_norm,
        activation=options.activation,
    )


def decoder_layer(
    options: Options,
    self_attention: nn.Module,
    cross_attention: nn.Module,
    cross_residual: nn.Module | None = None,
) -> DecoderLayer:
    """Build a decoder layer around its two attentions; ``cross_residual`` as of DecoderLayer."""
    return DecoderLayer(
        self_attention,
        cross_attention,
        dim=options.hidden_dim,
        feedforward_dim=options.feedforward_dim,
        dropout=options.dropout,
        pre_norm=options.pre_norm,
        activation=options.activation,
        cross_residual=cross_residual,
    )


def encoder(options: Options, layers: Sequence[nn.Module], position_scale: nn.Module | None = None) -> Encoder:
    """Build the encoder loop over ``layers``, with batch attention if enabled and a last norm for pre-norm layers."""
    return Encoder(
        layers,
        norm=nn.LayerNorm(options.hidden_dim) if options.pre_norm else None,
        batch_former=options.batch_former,
        activation_checkpointing=options.activation_checkpointing,
        position_scale=position_scale,
    )


def encoder_with_default_weights(options: Options) -> Encoder:
    """Build DETR's encoder with torch's initialisation, which the authors of RT-DETR and D-FINE kept."""
    layers = []
    for _ in range(options.encoder_layers):
        attention = TokenAttention(options.hidden_dim, heads=options.heads, dropout=options.dropout)
        layers.append(encoder_layer(options, attention))
        default_attention(attention.attention)
        default_linear(layers[-1].feed_forward.expand, layers[-1].feed_forward.contract)
    return encoder(options, layers)


def default_attention(attention: MultiHeadAttention) -> None:
    """Initialise the output projection as torch's multi-head attention does."""
    default_linear(attention.out)
    nn.init.zeros_(attention.out.bias)


def default_linear(*layers: nn.Linear) -> None:
    """Initialise linear layers as torch does."""
    for layer in layers:
        layer.reset_parameters()


def projection(in_channels: int, options: Options, *, norm: bool, kernel: int = 1, stride: int = 1) -> nn.Module:
    """Build a convolution to ``hidden_dim`` channels, followed by a group norm if ``norm``."""
    convolution = nn.Conv2d(in_channels, options.hidden_dim, kernel, stride, padding=kernel // 2)
    if norm and options.hidden_dim % NORM_GROUPS:
        raise InputError(f"hidden_dim must be divisible by {NORM_GROUPS}, got {options.hidden_dim} (group norm)")
    return nn.Sequential(convolution, nn.GroupNorm(NORM_GROUPS, options.hidden_dim)) if norm else convolution


def position(options: Options, *, offset: float = 0.0) -> nn.Module:
    """Build the position encoding of a feature map by name."""
    if options.position_encoding == "sine":
        return SinePosition(options.hidden_dim, temperature=options.position_temperature, offset=offset)
    if options.position_encoding == "learned":
        return LearnedPosition(options.hidden_dim)
    raise InputError(f"position_encoding must be sine or learned; got '{options.position_encoding}'")


def query_attention(options: Options) -> QueryAttention:
    """Build DETR's attention between the queries."""
    return QueryAttention(options.hidden_dim, heads=options.heads, dropout=options.dropout)


def shared_heads(options: Options, box: nn.Module | None = None, *, eps: float = 1e-5) -> Heads:
    """Build one class head and one box head for all decoder layers."""
    return Heads([class_head(options)], [box or box_head(options)], eps=eps)


def class_head(options: Options) -> nn.Linear:
    """Build the class head; its bias is initialised to ``class_prior`` if given (Lin et al. 2017, arXiv 1708.02002)."""
    head = nn.Linear(options.hidden_dim, options.num_logits)
    if options.class_prior is not None:
        nn.init.constant_(head.bias, math.log(options.class_prior / (1 - options.class_prior)))
    return head


def box_head(options: Options, outputs: int = 4, activation: str = "relu") -> MLP:
    """Build the box head, a three-layer perceptron."""
    return MLP([options.hidden_dim] * 3 + [outputs], activation)


def zero_init_box_head(options: Options, *, size_logit: float = 0.0, outputs: int = 4, activation: str = "relu") -> MLP:
    """Build a box head that initially returns the reference itself; ``size_logit`` is added to width and height."""
    head = box_head(options, outputs, activation)
    *_, weight, bias = head.parameters()
    nn.init.zeros_(weight)
    nn.init.zeros_(bias)
    if size_logit:
        nn.init.constant_(bias[2:], size_logit)
    return head
