"""Encoder and decoder loops of all detectors, their standard parts, and the layers of which all are made."""

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

__all__ = [
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderLayer",
    "FeatureTokens",
    "Heads",
    "LearnedQueries",
    "MemoryAttention",
    "QueryAttention",
    "TokenAttention",
    "append_queries",
    "in_groups",
    "unpadded",
]
