"""The task that a config is of."""

from __future__ import annotations

from typing import Any

from detr_bf.config import ClassifierConfig, DetectionConfig, MaskedConfig, RunConfig
from detr_bf.tasks.classification import ClassificationTask
from detr_bf.tasks.detection import DetectionTask
from detr_bf.tasks.masked import MaskedTask
from detr_bf.tasks.task import Task

_TASKS: dict[type[RunConfig], type[Task[Any]]] = {
    DetectionConfig: DetectionTask,
    ClassifierConfig: ClassificationTask,
    MaskedConfig: MaskedTask,
}


def task_of(config: RunConfig) -> Task[Any]:
    """What is done with a config of any task."""
    return _TASKS[type(config)](config)
