"""What the page of a run needs to know of its task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detr_bf.report.curves import CurvePlan


@dataclass(frozen=True)
class TaskPage:
    """The parts of ``report.html`` that differ from task to task; config and result are of the task's types."""

    curves: CurvePlan
    curves_description: str
    read_result: Callable[[Mapping[str, Any]], Any]  # inverse of the result's to_dict
    sentences: Callable[[Any], list[str]]  # of the config: what was trained
    results: Callable[[Any], Iterable[str]]  # sections above the curves, of the result; None: there is none
    details: Callable[[Path, Any], Iterable[str]]  # sections below the curves, of run folder and result
