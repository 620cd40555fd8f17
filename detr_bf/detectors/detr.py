"""DETR: End-to-End Object Detection with Transformers (Carion et al. 2020, arXiv 2005.12872)."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from detr_bf.batchformer import BatchFormerV2
from detr_bf.detectors.detector import Detector
from detr_bf.errors import InputError
from detr_bf.layers import MLP, LearnedPosition, SinePosition
from detr_bf.transformer import Decoder, DecoderLayer, Encoder, EncoderLayer, FeatureTokens

NORM_GROUPS = 32  # of Deformable DETR (Zhu et al. 2021, arXiv 2010.04159)


def detr(
    backbone: nn.Module,
    in_channels: int,
    *,
    num_logits: int,
    hidden_dim: int = 256,
    heads: int = 8,
    encoder_layers: int = 6,
    decoder_layers: int = 6,
    feedforward_dim: int = 2048,
    dropout: float = 0.1,
    pre_norm: bool = False,
    num_queries: int = 100,
    position_encoding: str = "sine",
    position_temperature: float = 10000.0,
    input_norm: bool = False,
    aux_loss: bool = True,
    class_prior: float | None = None,
    batch_former: BatchFormerV2 | None = None,
) -> Detector:
    """Multi-head attention everywhere, queries that look nowhere in particular, boxes through a sigmoid.

    Args:
        backbone: gives one feature map of ``in_channels`` channels.
        position_temperature: of the sine encoding; lower tells neighbouring cells apart better.
        input_norm: group norm after the input projection, for backbones whose features are not of unit size.
        num_logits: K; with cross-entropy the classes and, last, no-object.
        class_prior: score every class starts with; for sigmoid scores trained with the focal loss.
        batch_former: batch attention in the encoder.
    """
    layer: dict[str, Any] = {
        "heads": heads,
        "feedforward_dim": feedforward_dim,
        "dropout": dropout,
        "pre_norm": pre_norm,
    }
    return Detector(
        backbone,
        tokens=FeatureTokens(
            [_projection(in_channels, hidden_dim, norm=input_norm)],
            _position(position_encoding, hidden_dim, position_temperature),
        ),
        encoder=Encoder(
            [EncoderLayer(hidden_dim, **layer) for _ in range(encoder_layers)],
            norm=nn.LayerNorm(hidden_dim) if pre_norm else None,
            batch_former=batch_former,
        ),
        decoder=Decoder(
            [DecoderLayer(hidden_dim, **layer) for _ in range(decoder_layers)], dim=hidden_dim, num_queries=num_queries
        ),
        class_head=_class_head(hidden_dim, num_logits, class_prior),
        box_head=MLP([hidden_dim, hidden_dim, hidden_dim, 4]),
        aux_loss=aux_loss,
    )


def _class_head(dim: int, num_logits: int, prior: float | None) -> nn.Linear:
    head = nn.Linear(dim, num_logits)
    if prior is not None:
        nn.init.constant_(head.bias, math.log(prior / (1 - prior)))
    return head


def _projection(in_channels: int, dim: int, *, norm: bool) -> nn.Module:
    convolution = nn.Conv2d(in_channels, dim, 1)
    if norm and dim % NORM_GROUPS:
        raise InputError(f"model.input_norm=true needs model.hidden_dim divisible by {NORM_GROUPS}, got {dim}")
    return nn.Sequential(convolution, nn.GroupNorm(NORM_GROUPS, dim)) if norm else convolution


def _position(name: str, dim: int, temperature: float) -> nn.Module:
    if name == "sine":
        return SinePosition(dim, temperature=temperature)
    if name == "learned":
        return LearnedPosition(dim)
    raise InputError(f"model.position_encoding must be sine or learned; got '{name}'")
