"""Encoder and decoder loops of all detectors, their standard parts, and the layers of which all are made."""

from detr_bf.transformer.attention import (
    DeformableAttention,
    MultiHeadAttention,
    check_heads,
    multi_head_attention,
)
from detr_bf.transformer.blocks import MLP, FeedForward, Residual, full_precision, without_updating_statistics, xavier
from detr_bf.transformer.decoder import (
    Decoder,
    DecoderLayer,
    Heads,
    LearnedQueries,
    MemoryAttention,
    QueryAttention,
    append_queries,
    in_groups,
)
from detr_bf.transformer.encoder import Encoder, EncoderLayer, FeatureTokens, TokenAttention, unpadded
from detr_bf.transformer.position import LearnedPosition, SinePosition, sine_of_coordinates, sine_position

__all__ = [
    "MLP",
    "Decoder",
    "DecoderLayer",
    "DeformableAttention",
    "Encoder",
    "EncoderLayer",
    "FeatureTokens",
    "FeedForward",
    "Heads",
    "LearnedPosition",
    "LearnedQueries",
    "MemoryAttention",
    "MultiHeadAttention",
    "QueryAttention",
    "Residual",
    "SinePosition",
    "TokenAttention",
    "append_queries",
    "check_heads",
    "full_precision",
    "in_groups",
    "multi_head_attention",
    "sine_of_coordinates",
    "sine_position",
    "unpadded",
    "without_updating_statistics",
    "xavier",
]
