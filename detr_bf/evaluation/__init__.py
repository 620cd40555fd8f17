"""COCO average precision, panoptic quality, accuracy of classifiers, and the files that go with them."""

from detr_bf.evaluation.coco import CocoEvaluator, merge_shards, to_coco_results, write_results
from detr_bf.evaluation.panoptic import PanopticClassResult, PanopticEvaluator, PanopticSummary
from detr_bf.evaluation.panoptic_file import EncodedMap, PanopticFile, encode, write_encoded, write_panoptic
from detr_bf.evaluation.result import Result
from detr_bf.evaluation.summary import ClassResult, CocoSummary

__all__ = [
    "ClassResult",
    "CocoEvaluator",
    "CocoSummary",
    "EncodedMap",
    "PanopticClassResult",
    "PanopticEvaluator",
    "PanopticFile",
    "PanopticSummary",
    "Result",
    "encode",
    "merge_shards",
    "to_coco_results",
    "write_encoded",
    "write_panoptic",
    "write_results",
]
