"""Foreign checkpoints: one name table for each family."""

from detr_bf.interop.official_detr import from_official_detr, is_official_detr

__all__ = ["from_official_detr", "is_official_detr"]
