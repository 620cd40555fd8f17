"""Batch attention: the idea of this project, in one place."""

from detr_bf.batchformer.v1 import BatchFormer, StreamLoss, contrast_streams, repeat_targets
from detr_bf.batchformer.v2 import BatchFormerLayer, BatchFormerV2

__all__ = ["BatchFormer", "BatchFormerLayer", "BatchFormerV2", "StreamLoss", "contrast_streams", "repeat_targets"]
