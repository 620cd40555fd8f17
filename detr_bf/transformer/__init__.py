"""The one encoder loop, the one decoder loop, and what they are made of."""

from detr_bf.transformer.decoder import Decoder, DecoderLayer
from detr_bf.transformer.encoder import Encoder, EncoderLayer
from detr_bf.transformer.residual import Residual
from detr_bf.transformer.tokens import FeatureTokens

__all__ = ["Decoder", "DecoderLayer", "Encoder", "EncoderLayer", "FeatureTokens", "Residual"]
