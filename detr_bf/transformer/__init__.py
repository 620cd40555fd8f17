"""The one encoder loop, the one decoder loop, and what they are made of."""

from detr_bf.transformer.attend import MemoryAttention, QueryAttention, TokenAttention
from detr_bf.transformer.decoder import Decoder, DecoderLayer, Heads
from detr_bf.transformer.encoder import Encoder, EncoderLayer
from detr_bf.transformer.queries import LearnedQueries
from detr_bf.transformer.residual import Residual
from detr_bf.transformer.tokens import FeatureTokens, resized_mask, unpadded

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
    "Residual",
    "TokenAttention",
    "resized_mask",
    "unpadded",
]
