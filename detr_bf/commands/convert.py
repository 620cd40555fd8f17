"""Read a checkpoint of any known implementation and write it under our names, another's or timm's."""

from __future__ import annotations

import argparse
from pathlib import Path

from detr_bf.common.errors import InputError
from detr_bf.common.files import check_weights, readable_file
from detr_bf.common.structures import ClassMap
from detr_bf.common.text import safe_message
from detr_bf.config import config_from_dict
from detr_bf.engine import checkpoint_of, is_checkpoint, load_checkpoint
from detr_bf.interop.classes import COCO_IDS, class_rows, renumbered
from detr_bf.interop.conversion import check_target, writing
from detr_bf.interop.formats import format_named
from detr_bf.interop.published import find_weights
from detr_bf.interop.weights import read_weights, write_weights
from detr_bf.plugins import without_plugins
from detr_bf.tasks import require_task, task_of


def main(options: argparse.Namespace) -> int:
    """Write a checkpoint in another format, or without training-only weights, and print a sentence about it."""
    if options.task:
        done = deploy(Path(options.run), options.target, options.task)
    else:
        done = convert(Path(options.run), options.target, options.to, options.classes)
    print(safe_message(done))
    return 0


def convert(source: Path, target: Path, format_name: str | None = None, numbering: str | None = None) -> str:
    """Write the weights of ``source`` under our names or a foreign format's, and return a sentence about it.

    Args:
        numbering: of COCO's classes, see :func:`detr_bf.interop.classes.renumbered`; None leaves the class heads alone.

    Raises:
        InputError: ``source`` is a checkpoint of another task or of other classes, or its weights are not finite; see
            also :func:`detr_bf.interop.weights.read_weights`,
            :func:`detr_bf.interop.weights.write_weights` and :func:`detr_bf.interop.classes.renumbered`.
    """
    source = readable_file(checkpoint_of(find_weights(source)))
    check_target(source, target)
    foreign = format_name is not None and not format_named(format_name).own
    if is_checkpoint(source):
        checkpoint = load_checkpoint(source)
        require_task(checkpoint, "detection", source)
        if numbering is not None:
            _check_classes(checkpoint.classes, numbering, source)
    weights = read_weights(source)
    if foreign and any("context_broadcasting" in name.split(".") for name in weights):
        raise InputError(
            f"{source} was trained with plugins.context_broadcasting, which no other format knows: its weights "
            "would belong to another model there"
        )
    weights = without_plugins(weights) if foreign else weights  # evaluation does not use the others
    weights = renumbered(weights, numbering) if numbering else weights
    check_weights(weights, str(source))
    with writing(target):
        write_weights(target, weights, format_name)
    heads = f", class heads of {class_rows(weights)} rows" if numbering else ""
    return f"{len(weights)} tensors of {source} written under {format_name or 'our'} names{heads}: {target}"


def deploy(source: Path, target: Path, task: str) -> str:
    """Write a run's weights without what only training needs, see :meth:`detr_bf.tasks.Task.deploy`.

    Raises:
        InputError: ``source`` is no checkpoint of the task, or evaluation would change.
    """
    source = readable_file(checkpoint_of(source))
    check_target(source, target)
    checkpoint = load_checkpoint(source)
    require_task(checkpoint, task, source)
    config = config_from_dict(checkpoint.config, source=f"the config in {source}")
    return task_of(config).deploy(checkpoint, source, target)


def _check_classes(classes: ClassMap, numbering: str, source: Path) -> None:
    """Refuse classes that cannot be renumbered: a checkpoint of ours has contiguous ones, which must be COCO's."""
    if numbering == "contiguous":
        raise InputError(f"{source} is a checkpoint of ours, whose classes are contiguous: leave --classes out")
    if classes.category_ids not in COCO_IDS:
        raise InputError(
            f"{source} has {classes.num_classes} classes, which are not those of COCO (80, or 133 with stuff): "
            "leave --classes out"
        )
