"""Multi-scale deformable attention: the one door, whatever answers behind it. Installed as ``detr_bf.ops``."""

from detr_bf.ops.functional import ms_deform_attn

__all__ = ["ms_deform_attn"]
