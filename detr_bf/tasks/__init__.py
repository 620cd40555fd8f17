"""Tasks: what a config trains, by the name in its ``task`` setting.

A task is one module with one subclass of :class:`Task`. Modules are imported when a config asks for them, so that
training a detector imports nothing that only classifiers need.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from detr_bf.common.errors import InputError
from detr_bf.config import RunConfig
from detr_bf.engine import Checkpoint
from detr_bf.tasks.task import Task

TASKS = {  # name -> (module, class)
    "detection": ("detr_bf.tasks.detection", "DetectionTask"),
    "classification": ("detr_bf.classification.task", "ClassificationTask"),
    "masked_autoencoding": ("detr_bf.classification.task", "MaskedTask"),
    "contrastive_learning": ("detr_bf.classification.task", "ContrastiveTask"),
    "segmentation": ("detr_bf.segmentation.task", "SegmentationTask"),
}

__all__ = ["TASKS", "Task", "require_task", "task_class", "task_of"]


def task_class(name: str) -> type[Task[Any]]:
    """Return the class of a task; the config loader has checked the name."""
    module, cls = TASKS[name]
    found: type[Task[Any]] = getattr(import_module(module), cls)
    return found


def task_of(config: RunConfig) -> Task[Any]:
    """Return the task of a config."""
    return task_class(config.task)(config)


def require_task(checkpoint: Checkpoint, name: str, source: Path) -> None:
    """Refuse a checkpoint of another task, except one that the same option of ``detr-bf convert`` is for.

    Raises:
        InputError: naming the option of ``detr-bf convert`` for the task that the checkpoint is of.
    """
    found = checkpoint.config.get("task", "detection")
    if isinstance(found, str) and found in TASKS and found != name:
        task, expected = task_class(found), task_class(name)
        if task.deploy_option == expected.deploy_option:
            return
        raise InputError(
            f"{source} is a checkpoint of {task.kind}, expected one of {expected.kind}: use {task.deploy_option}"
        )
