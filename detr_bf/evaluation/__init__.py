"""COCO average precision, panoptic quality, and the result files of both."""

from detr_bf.evaluation.coco import CocoEvaluator, check_results, merge_shards, to_coco_results, write_results
from detr_bf.evaluation.panoptic import (
    EncodedMap,
    PanopticEvaluator,
    PanopticFile,
    encode,
    write_encoded,
    write_panoptic,
)
from detr_bf.evaluation.results import (
    DEFAULT_THRESHOLD,
    ClassResult,
    CocoSummary,
    OperatingPoint,
    PanopticClassResult,
    PanopticSummary,
    Result,
    ScoreThresholds,
)

__all__ = [
    "DEFAULT_THRESHOLD",
    "ClassResult",
    "CocoEvaluator",
    "CocoSummary",
    "EncodedMap",
    "OperatingPoint",
    "PanopticClassResult",
    "PanopticEvaluator",
    "PanopticFile",
    "PanopticSummary",
    "Result",
    "ScoreThresholds",
    "check_results",
    "encode",
    "merge_shards",
    "to_coco_results",
    "write_encoded",
    "write_panoptic",
    "write_results",
]
