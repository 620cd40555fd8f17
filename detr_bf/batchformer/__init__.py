"""Batch attention: BatchFormer, BatchFormerV2 and the mixers along the batch."""

from detr_bf.batchformer.mixers import BATCH_MIXERS, BatchFormerLayer
from detr_bf.batchformer.modes import InsertedBatchFormer, check_layers
from detr_bf.batchformer.queries import QueryBatchFormer
from detr_bf.batchformer.v1 import BatchFormer, StreamLoss, contrast_streams, repeat_targets
from detr_bf.batchformer.v2 import BatchFormerV2

__all__ = [
    "BATCH_MIXERS",
    "BatchFormer",
    "BatchFormerLayer",
    "BatchFormerV2",
    "InsertedBatchFormer",
    "QueryBatchFormer",
    "StreamLoss",
    "check_layers",
    "contrast_streams",
    "repeat_targets",
]
