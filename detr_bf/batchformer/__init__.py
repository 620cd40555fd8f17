"""Batch attention: the idea of this project, in one place."""

from detr_bf.batchformer.v2 import BatchFormerLayer, BatchFormerV2

__all__ = ["BatchFormerLayer", "BatchFormerV2"]
