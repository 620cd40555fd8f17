"""The parts of a report that depend on the task of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detr_bf.report.curves import CurvePlan


@dataclass(frozen=True)
class TaskPage:
    """The parts of ``report.html`` that depend on the task; config and result have the task's types."""

    task: str  # as in the config
    curves: CurvePlan
    read_result: Callable[[Mapping[str, Any]], Any]  # inverse of the result's to_dict
    sentences: Callable[[Any], list[str]]  # config -> summary of what was trained
    results: Callable[[Any], Iterable[str]]  # result or None -> sections above the curves
    details: Callable[[Path, Any], Iterable[str]]  # run folder, result or None -> sections below the curves
    classes: Callable[[Any], Mapping[str, float | None]]  # result -> its main metric by class
    costs: Callable[[Mapping[str, Path]], str]  # runs by name -> table of what their errors cost, may be empty
