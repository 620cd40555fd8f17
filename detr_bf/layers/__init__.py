"""Parts every transformer here is made of."""

from detr_bf.layers.attention import MultiHeadAttention, multi_head_attention
from detr_bf.layers.feed_forward import MLP, FeedForward
from detr_bf.layers.position import LearnedPosition, SinePosition, sine_position

__all__ = [
    "MLP",
    "FeedForward",
    "LearnedPosition",
    "MultiHeadAttention",
    "SinePosition",
    "multi_head_attention",
    "sine_position",
]
