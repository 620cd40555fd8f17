"""Write a commented config for the folder of a data set, with what the data checks find."""

from __future__ import annotations

import argparse
import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from detr_bf.assembly.data import data_source
from detr_bf.assembly.training import RUN_STEPS
from detr_bf.common.errors import InputError
from detr_bf.common.files import check_output_file, is_folder, write_text
from detr_bf.common.progress import setup_logging
from detr_bf.common.text import listed, printable, safe_message
from detr_bf.config import DetectionConfig, config_to_dict, flatten_settings, load_config, packaged_configs
from detr_bf.data.checks.annotations import Report
from detr_bf.data.coco import CocoAnnotations, read_annotations
from detr_bf.inference.finetuning import MOST_EPOCHS, chosen_settings, fine_tuning_files, published_start
from detr_bf.tasks import task_of
from detr_bf.tasks.corrected import yaml_text

_MOST_CLASSES = 100  # named in the comment
_COMMENTS = {  # of settings, in the order of the file; the others follow as those of the recipe
    "output_dir": "folder of the run, new for each run",
    "init_from": "trained detector to start from: published weights, or a checkpoint; null: the backbone's weights",
    "data.root": "folder of the data set",
    "data.train.split": "training images; null: all images of the folder",
    "data.val.split": "validation images, for the AP after each epoch; null with val_fraction",
    "data.val_fraction": "share of the training images that is used for validation instead of a split; 0: none",
    "data.workers": "processes that load images; about the number of CPU cores",
    "data.transforms.short_sides": "shorter side of the training images in pixels; larger for small objects",
    "data.transforms.max_size": "longest side; larger sizes need more memory and time",
    "data.transforms.eval_short_side": "shorter side in validation; later images are resized as these",
    "data.transforms.square": "side of square images, instead of the three above; null: keep the aspect ratio",
    "data.plain_last_epochs": "last epochs without augmentation; with augment_strong a tenth of train.epochs",
    "data.transforms.horizontal_flip": "0 where left and right have a meaning (text, arrows)",
    "train.epochs": f"about {RUN_STEPS:,} steps, at most {MOST_EPOCHS} epochs; more if AP still rises at the end",
    "train.minutes": "minutes of training instead of train.epochs",
    "train.batch_size": "images of a step on one GPU; train.auto_batch=true chooses it by the GPU's memory",
    "train.accumulate": "batches of a step",
    "train.patience": "epochs without a better AP after which training ends; 0: never",
    "train.precision": "float32, bf16, fp16, or auto: by the GPU, float32 on a CPU",
    "optimizer.lr": "auto, for RT-DETR and D-FINE: by the number of steps; with init_from 1e-4",
    "optimizer.backbone_lr": "auto: a tenth of lr",
    "optimizer.schedule": "of the learning rate",
    "optimizer.warmup_steps": "steps with a rising learning rate; auto: a tenth of the steps, at most 100",
    "train.ema.decay": "of the averaged weights; auto: 1 - 6 / steps of the run, at most 0.9997",
    "model.num_queries": "more than the objects of any image, see too-many-objects of the checks",
}


def main(options: argparse.Namespace) -> int:
    """Check the data, write the config, print both, and return 1 if the data have errors.

    Raises:
        InputError: the folder cannot be read, there is no such recipe, or the file exists.
    """
    folder, output, model = options.folder, options.output, options.model
    if not is_folder(folder):
        raise InputError(f"there is no folder {printable(folder)}: give the folder of a data set (docs/data.md)")
    path = Path(f"{folder.resolve().name or 'mine'}.yaml") if output is None else output
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(f"--output {printable(path)}: a config is a file with the suffix .yaml")
    check_output_file(path, "--output")
    if path.exists():
        raise InputError(f"--output {printable(path)} exists: name another file; nothing is replaced")
    files, own = fine_tuning_files(model)
    given = [f"data.root={yaml_text(str(folder.resolve()))}", f"output_dir={yaml_text(f'runs/{path.stem}')}", *own]
    setup_logging()  # tells of a wait for another download
    start, said = published_start(model, files, given)
    given += start
    augment, chosen = chosen_settings(files, given)
    files.append(packaged_configs()[f"augment_{augment}"])
    config: DetectionConfig = load_config(files, [*given, *chosen], task="detection")
    content = read_annotations(data_source(config, "train").annotations)
    most = max(Counter(each["image_id"] for each in content.annotations).values(), default=0)
    config.model.num_queries = max(config.model.num_queries, most)
    report = task_of(config).examine()
    print(safe_message(report))
    if said:
        print(safe_message(said))
    lines = [
        *_head(path, printable(model), config, content, report),
        *[f"# {printable(said, limit=2000)}"] * bool(said),
    ]
    write_text(path, "\n".join([*lines, *_settings(config), ""]))
    shown = shlex.quote(printable(path))
    if report.errors:
        print(f"wrote {shown}; next: correct the errors, or detr-bf check {shown} --fix FOLDER for a corrected copy")
        return 1
    print(f"wrote {shown}; next: detr-bf train {shown} --dry-run, then without --dry-run")
    return 0


def _head(path: Path, model: str, config: DetectionConfig, content: CocoAnnotations, report: Report) -> Iterator[str]:
    """Yield the comment at the head of the file."""
    shown, run = (shlex.quote(printable(each)) for each in (path, config.output_dir))
    yield f"# Written by detr-bf new. Settings without a comment are as in {model}, finetune or augment_*."
    yield "# docs/settings.md has all settings."
    yield f"#   detr-bf check {shown}              checks the data"
    yield f"#   detr-bf train {shown} --dry-run    checks everything and times a step"
    yield f"#   detr-bf train {shown}              trains, evaluates and writes a report to {run}"
    yield f"#   detr-bf predict {run} IMAGE --output found"
    yield "# Data:"
    yield from (f"#   {printable(line, limit=2000)}" for line in (*report.contents, *report.learning))
    counts = Counter(each["category_id"] for each in content.annotations)
    classes = zip(content.class_map.category_ids, content.class_map.distinct_names, strict=True)
    yield f"# Classes, with training boxes: {listed((f'{name} ({counts[i]})' for i, name in classes), _MOST_CLASSES)}"
    yield from (
        f"# {each.severity} {each.code}: {each.count}, {each.meaning}: {each.example}" for each in report.findings
    )


def _settings(config: DetectionConfig) -> Iterator[str]:
    """Yield nested lines of the settings that have a comment, then of the others that differ from the defaults."""
    values, defaults = (flatten_settings(config_to_dict(each)) for each in (config, DetectionConfig()))
    tree: dict[str, Any] = {}
    changed = [key for key in values if key not in defaults or values[key] != defaults[key]]  # options have own keys
    for key in (*_COMMENTS, *(key for key in changed if key not in _COMMENTS)):
        *groups, name = key.split(".")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        value = values[key]
        text = yaml_text(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        inner[name] = f"{text}  # {_COMMENTS[key]}" if key in _COMMENTS else text
    yield from _nested(tree)


def _nested(tree: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _nested(value, indent + "  ")
        else:
            yield f"{indent}{key}: {value}"
