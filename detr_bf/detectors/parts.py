"""What every detector file is given, and the parts several of them choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from detr_bf.batchformer import BatchFormerV2
from detr_bf.detectors.detector import Detector
from detr_bf.detectors.mask_head import MaskHead
from detr_bf.errors import InputError
from detr_bf.layers import MLP, LearnedPosition, SinePosition
from detr_bf.transformer import Decoder, Encoder, EncoderLayer, FeatureTokens, Heads, QueryAttention, TokenAttention

M = TypeVar("M", bound=nn.Module)
NORM_GROUPS = 32  # of Deformable DETR (Zhu et al. 2021, arXiv 2010.04159)


@dataclass(frozen=True)
class Options:
    """The settings all detectors share; defaults are DETR's.

    ``num_logits`` is K, with cross-entropy the classes and, last, no-object. ``class_prior`` is the score every class
    starts with, for sigmoid scores. ``position_temperature`` of the sine encoding: lower tells neighbouring cells apart
    better. ``input_norm``: group norm after the input projections, for features that are not of unit size.
    ``recompute_encoder``: its layers need less memory and more time in training.
    """

    num_logits: int
    hidden_dim: int = 256
    heads: int = 8
    encoder_layers: int = 6
    decoder_layers: int = 6
    feedforward_dim: int = 2048
    dropout: float = 0.1
    pre_norm: bool = False
    num_queries: int = 100
    position_encoding: str = "sine"
    position_temperature: float = 10000.0
    input_norm: bool = False
    aux_loss: bool = True
    class_prior: float | None = None
    batch_former: BatchFormerV2 | None = None
    mask_head: MaskHead | None = None
    recompute_encoder: bool = False

    @property
    def encoder(self) -> dict[str, Any]:
        """What the encoder is told beside its layers and their norm."""
        return {"batch_former": self.batch_former, "recompute": self.recompute_encoder}

    @property
    def layer(self) -> dict[str, Any]:
        """What encoder and decoder layers are told beside their attention."""
        return {
            "dim": self.hidden_dim,
            "feedforward_dim": self.feedforward_dim,
            "dropout": self.dropout,
            "pre_norm": self.pre_norm,
        }

    @property
    def attention(self) -> dict[str, Any]:
        """What multi-head attention is told."""
        return {"dim": self.hidden_dim, "heads": self.heads, "dropout": self.dropout}


def single_level_detector(backbone: nn.Module, channels: Sequence[int], options: Options, decoder: Decoder) -> Detector:
    """DETR's encoder over the tokens of one feature map, with batch attention where it is on.

    Raises:
        InputError: the backbone gives several maps.
    """
    if len(channels) != 1:
        raise InputError(
            f"this detector uses one feature map, model.backbone.strides asks for {len(channels)}: name one stride, or "
            "use model.name=deformable_detr"
        )
    tokens = FeatureTokens([projection(channels[0], options, norm=options.input_norm)], position(options))
    layers = [EncoderLayer(TokenAttention(**options.attention), **options.layer) for _ in range(options.encoder_layers)]
    norm = nn.LayerNorm(options.hidden_dim) if options.pre_norm else None
    encoder = Encoder(layers, norm=norm, **options.encoder)
    return Detector(backbone, tokens=tokens, encoder=encoder, decoder=decoder, mask_head=options.mask_head)


def projection(in_channels: int, options: Options, *, norm: bool, kernel: int = 1, stride: int = 1) -> nn.Module:
    """A convolution to the transformer's width; with ``norm`` a group norm behind it."""
    convolution = nn.Conv2d(in_channels, options.hidden_dim, kernel, stride, padding=kernel // 2)
    if norm and options.hidden_dim % NORM_GROUPS:
        raise InputError(
            f"model.input_norm=true needs model.hidden_dim divisible by {NORM_GROUPS}, got {options.hidden_dim}"
        )
    return nn.Sequential(convolution, nn.GroupNorm(NORM_GROUPS, options.hidden_dim)) if norm else convolution


def position(options: Options, *, offset: float = 0.0) -> nn.Module:
    """The position encoding of a feature map, by name."""
    if options.position_encoding == "sine":
        return SinePosition(options.hidden_dim, temperature=options.position_temperature, offset=offset)
    if options.position_encoding == "learned":
        return LearnedPosition(options.hidden_dim)
    raise InputError(f"model.position_encoding must be sine or learned; got '{options.position_encoding}'")


def query_attention(options: Options) -> QueryAttention:
    """DETR's attention among the queries."""
    return QueryAttention(**options.attention)


def shared_heads(options: Options, box: nn.Module | None = None) -> Heads:
    """One class head and one box head for all decoder layers."""
    return Heads([class_head(options)], [box or box_head(options)])


def class_head(options: Options) -> nn.Linear:
    """Class logits; the bias says ``class_prior`` where there is one (Lin et al. 2017, arXiv 1708.02002)."""
    head = nn.Linear(options.hidden_dim, options.num_logits)
    if options.class_prior is not None:
        nn.init.constant_(head.bias, math.log(options.class_prior / (1 - options.class_prior)))
    return head


def box_head(options: Options) -> MLP:
    """Box logits from a three-layer perceptron."""
    return MLP([options.hidden_dim] * 3 + [4])


def neutral_box_head(options: Options, *, size_logit: float = 0.0) -> MLP:
    """A box head that starts at the reference itself, with one logit for width and height."""
    head = box_head(options)
    *_, weight, bias = head.parameters()
    nn.init.zeros_(weight)
    with torch.no_grad():
        bias.copy_(torch.tensor([0.0, 0.0, size_logit, size_logit]))
    return head


def xavier(module: M) -> M:
    """Xavier-uniform for every matrix of ``module``, as the parts of DETR's transformer start."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return module
