"""Read a checkpoint of any known implementation and write it under our names, another's or timm's.

detr-bf convert detr-r50-e632da11.pth detr_r50.pth                # then init_from=detr_r50.pth
detr-bf convert detr_r50 detr_r50.pth                             # published weights, downloaded
detr-bf convert runs/mine plain.pt --strip-batchformer            # the same detector without it
detr-bf convert plain.pt model.safetensors --to hf_deformable_detr   # for transformers
detr-bf convert runs/mine model.pth --to detectron2                  # for our detectron2 adapter
detr-bf convert detr-r50-e632da11.pth coco.pth --classes contiguous   # 80 classes instead of 91 ids
detr-bf convert runs/classifier vit.safetensors --strip-plugins      # for timm
detr-bf convert runs/mae encoder.safetensors --encoder               # for timm, without classes

OUT ends in .pth, .pt, .bin or .safetensors. Foreign names are written where their own code looks for them: under
'model' for the authors' repositories and detectron2, by themselves for Hugging Face and in .safetensors files. The
authors' heads for COCO have a row for every category id; ours, and detectron2's data sets, one for every class.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from detr_bf import interop
from detr_bf.cli import run_tool
from detr_bf.config import config_from_dict
from detr_bf.conversion import check_target, writing
from detr_bf.engine import checkpoint_of, is_checkpoint, load_checkpoint
from detr_bf.errors import InputError
from detr_bf.files import check_weights, readable_file
from detr_bf.plugins import without_plugins
from detr_bf.published import find_weights
from detr_bf.structures import ClassMap
from detr_bf.tasks import require_task, task_of
from detr_bf.text import safe_message


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source", metavar="IN", type=Path, help="run folder, checkpoint, file of weights, or name of published ones"
    )
    parser.add_argument("target", metavar="OUT", type=Path, help="file to write")
    parser.add_argument(
        "--classes",
        choices=interop.NUMBERINGS,
        help="rows of class heads for COCO: one for each class, or one for each category id; default: as they are",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--to", metavar="NAME", help=f"write the names of {', '.join(interop.NAMES)}; default: ours")
    action.add_argument(
        "--strip-batchformer",
        dest="task",
        action="store_const",
        const="detection",
        help="write a checkpoint of ours without batch attention, after proving that evaluation stays the same",
    )
    action.add_argument(
        "--strip-plugins",
        dest="task",
        action="store_const",
        const="classification",
        help="write a classifier's weights for the network alone, after proving that evaluation stays the same",
    )
    action.add_argument(
        "--encoder",
        dest="task",
        action="store_const",
        const="masked_autoencoding",
        help="write the encoder of a masked autoencoder",
    )
    options = parser.parse_args(arguments)
    if options.classes and options.task:
        parser.error("--classes goes with --to, or with neither --strip-... nor --encoder")

    def run() -> int:
        if options.task:
            done = deploy(options.source, options.target, options.task)
        else:
            done = convert(options.source, options.target, options.to, options.classes)
        print(safe_message(done))
        return 0

    return run_tool(run)


def convert(source: Path, target: Path, format_name: str | None = None, numbering: str | None = None) -> str:
    """Write the weights of ``source`` under our names or a foreign format's, and return a sentence about it.

    Args:
        numbering: of COCO's classes, see :func:`detr_bf.interop.renumbered`; None leaves the class heads alone.

    Raises:
        InputError: ``source`` is a checkpoint of another task or of other classes, or its weights are not finite; see
            also :func:`detr_bf.interop.read_weights`, :func:`detr_bf.interop.write_weights` and
            :func:`detr_bf.interop.renumbered`.
    """
    source = readable_file(checkpoint_of(find_weights(source)))
    check_target(source, target)
    foreign = format_name is not None and not interop.format_named(format_name).own
    if is_checkpoint(source):
        checkpoint = load_checkpoint(source)
        require_task(checkpoint, "detection", source)
        if numbering is not None:
            _check_classes(checkpoint.classes, numbering, source)
    weights = interop.read_weights(source)
    if foreign and any("context_broadcasting" in name.split(".") for name in weights):
        raise InputError(
            f"{source} was trained with plugins.context_broadcasting, which no other format knows: its weights "
            "would belong to another model there"
        )
    weights = without_plugins(weights) if foreign else weights  # evaluation does not use the others
    weights = interop.renumbered(weights, numbering) if numbering else weights
    check_weights(weights, str(source))
    with writing(target):
        interop.write_weights(target, weights, format_name)
    heads = f", class heads of {interop.class_rows(weights)} rows" if numbering else ""
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
    if classes.category_ids not in interop.COCO_IDS:
        raise InputError(
            f"{source} has {classes.num_classes} classes, which are not those of COCO (80, or 133 with stuff): "
            "leave --classes out"
        )
