"""Encoder and decoder loops of all detectors, and their standard parts."""

from detr_bf.transformer.decoder import (
    Decoder,
    DecoderLayer,
    Heads,
    MemoryAttention,
    QueryAttention,
)
from detr_bf.transformer.encoder import Encoder, EncoderLayer, TokenAttention
from detr_bf.transformer.queries import LearnedQueries, append_queries, in_groups
from detr_bf.transformer.tokens import FeatureTokens, unpadded

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
