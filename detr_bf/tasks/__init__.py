"""Tasks: what a config trains, by the name in its ``task`` setting.

A task is one module with one subclass of :class:`Task`. Modules are imported when a config asks for them, so that
training a detector imports nothing that only classifiers need.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from detr_bf.common.devices import device_of
from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.config import RunConfig, config_from_dict
from detr_bf.engine import Checkpoint, build_and_load, checkpoint_of, load_checkpoint
from detr_bf.tasks.task import Task

TASKS = {  # name -> (module, class)
    "detection": ("detr_bf.tasks.detection", "DetectionTask"),
    "classification": ("detr_bf.classification.task", "ClassificationTask"),
    "masked_autoencoding": ("detr_bf.classification.task", "MaskedTask"),
    "contrastive_learning": ("detr_bf.classification.task", "ContrastiveTask"),
    "segmentation": ("detr_bf.segmentation.task", "SegmentationTask"),
}

__all__ = ["TASKS", "Task", "read_trained", "require_task", "task_class", "task_of"]


def task_class(name: str) -> type[Task[Any]]:
    """Return the class of a task; the config loader has checked the name."""
    module, cls = TASKS[name]
    found: type[Task[Any]] = getattr(import_module(module), cls)
    return found


def task_of(config: RunConfig) -> Task[Any]:
    """Return the task of a config."""
    return task_class(config.task)(config)


def read_trained(
    source: Path, expected: Sequence[str], overrides: Sequence[str] = (), device: torch.device | None = None
) -> tuple[Task[Any], nn.Module, ClassMap]:
    """Return the task, the model in evaluation mode and the classes of a run folder or checkpoint.

    Args:
        expected: names of tasks.
        overrides: settings to change, such as ``data.root=DIR``.
        device: of the model; None: that of the settings.

    Raises:
        InputError: the source is no checkpoint of an expected task.
    """
    checkpoint = load_checkpoint(checkpoint_of(source))
    config = config_from_dict(checkpoint.config, overrides, source=f"the config in {source}")
    if config.task not in expected:
        raise InputError(f"{source} is a run of the task {config.task}, expected {' or '.join(expected)}")
    task, classes = task_of(config), checkpoint.classes
    model = build_and_load(lambda: task.build_model(classes.num_classes), checkpoint.weights, source)
    return task, model.to(device or device_of(config.device)).eval(), classes


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
