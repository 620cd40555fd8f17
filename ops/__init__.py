"""Public operators; dispatch to compiled kernel or PyTorch reference. Installed as ``detr_bf.ops``."""

from detr_bf.ops.batch_attention import batch_attention, batch_attention_packed
from detr_bf.ops.deformable_attention import ms_deform_attn
from detr_bf.ops.dropout import relu_dropout, residual_dropout

__all__ = [
    "batch_attention",
    "batch_attention_packed",
    "ms_deform_attn",
    "relu_dropout",
    "residual_dropout",
]
