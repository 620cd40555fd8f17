"""Layers shared by all transformers of this package."""

from detr_bf.layers.attention import DeformableAttention, MultiHeadAttention, check_heads, multi_head_attention
from detr_bf.layers.blocks import MLP, FeedForward, Residual, full_precision, xavier
from detr_bf.layers.convolution import FoldedWeights, FoldingModule
from detr_bf.layers.position import LearnedPosition, SinePosition, sine_of_coordinates, sine_position

__all__ = [
    "MLP",
    "DeformableAttention",
    "FeedForward",
    "FoldedWeights",
    "FoldingModule",
    "LearnedPosition",
    "MultiHeadAttention",
    "Residual",
    "SinePosition",
    "check_heads",
    "full_precision",
    "multi_head_attention",
    "sine_of_coordinates",
    "sine_position",
    "xavier",
]
