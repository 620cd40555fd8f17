"""The programs that match detections with ground truth and accumulate: pycocotools and hotcoco, bit-identical.

Shape legend: T IoU thresholds, R recall thresholds, K classes, A size ranges (all, small, medium, large),
M detection limits.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from detr_bf.errors import InputError

ENGINES = ("auto", "pycocotools", "hotcoco")

DataSet = dict[str, Any]  # COCO's images, annotations and categories
Results = list[dict[str, Any]]


class Curves(NamedTuple):
    """What an engine accumulates; -1 where a class or size has no ground truth. K runs by ascending category id."""

    precision: np.ndarray  # (T, R, K, A, M) float64
    recall: np.ndarray  # (T, K, A, M) float64


def resolve_engine(engine: str) -> str:
    """``pycocotools`` or ``hotcoco``; InputError when the engine is unknown or not installed."""
    if engine not in ENGINES:
        raise InputError(f"evaluation engine must be one of {', '.join(ENGINES)}; got '{engine}'")
    has_hotcoco = importlib.util.find_spec("hotcoco") is not None
    if engine == "hotcoco" and not has_hotcoco:
        raise InputError(
            "evaluation engine 'hotcoco' is not installed: run pip install 'detr_bf[fast-eval]', "
            "or choose engine 'pycocotools'"
        )
    if engine == "auto":
        return "hotcoco" if has_hotcoco else "pycocotools"
    return engine


def match_and_accumulate(
    engine: str, ground_truth: DataSet, results: Results, limits: Sequence[int], kind: str
) -> Curves:
    """COCO's curves by ``kind`` of IoU, ``bbox`` or ``segm``. Both arguments are written into.

    Args:
        engine: ``pycocotools`` or ``hotcoco``.
        ground_truth: a COCO data set.
        results: in COCO's results format.
        limits: detections an image and class, ascending.
    """
    run = _run_hotcoco if engine == "hotcoco" else _run_pycocotools
    return run(ground_truth, results, limits, kind)


def _run_pycocotools(
    ground_truth: dict[str, Any], results: list[dict[str, Any]], limits: Sequence[int], kind: str
) -> Curves:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth, found = COCO(), COCO()
        truth.dataset = ground_truth
        truth.createIndex()
        if results:
            found = truth.loadRes(results)
        else:  # loadRes fails on an empty list
            found.dataset = {**ground_truth, "annotations": []}
            found.createIndex()
        return _accumulate(COCOeval(truth, found, kind), limits)


def _run_hotcoco(
    ground_truth: dict[str, Any], results: list[dict[str, Any]], limits: Sequence[int], kind: str
) -> Curves:
    import hotcoco

    truth = hotcoco.COCO(ground_truth)
    return _accumulate(hotcoco.COCOeval(truth, truth.load_res(results), kind), limits)


def _accumulate(evaluation: Any, limits: Sequence[int]) -> Curves:
    """Run either engine's ``COCOeval``: both answer to the same names."""
    evaluation.params.maxDets = list(limits)
    evaluation.evaluate()
    evaluation.accumulate()
    return Curves(evaluation.eval["precision"], evaluation.eval["recall"])
