"""Parts every transformer here is made of."""

from detr_bf.layers.attention import MultiHeadAttention, check_heads, multi_head_attention
from detr_bf.layers.deformable_attention import DeformableAttention
from detr_bf.layers.feed_forward import MLP, FeedForward
from detr_bf.layers.position import LearnedPosition, SinePosition, sine_of_coordinates, sine_position
from detr_bf.layers.precision import full_precision

__all__ = [
    "MLP",
    "DeformableAttention",
    "FeedForward",
    "LearnedPosition",
    "MultiHeadAttention",
    "SinePosition",
    "check_heads",
    "full_precision",
    "multi_head_attention",
    "sine_of_coordinates",
    "sine_position",
]
