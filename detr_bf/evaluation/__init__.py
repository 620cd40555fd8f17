"""COCO average precision and the files that go with it."""

from detr_bf.evaluation.coco import CocoEvaluator, merge_shards, to_coco_results, write_results
from detr_bf.evaluation.summary import ClassResult, CocoSummary

__all__ = ["ClassResult", "CocoEvaluator", "CocoSummary", "merge_shards", "to_coco_results", "write_results"]
