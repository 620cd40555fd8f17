"""Write the folder of a data set (COCO, Roboflow, Pascal VOC, YOLO, labelme, CSV) as COCO JSON files."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from detr_bf.assembly.data import data_source
from detr_bf.common.errors import InputError
from detr_bf.common.files import check_output_file, write_json
from detr_bf.common.text import counted, printable, safe_message
from detr_bf.config.data import DataConfig, SplitConfig
from detr_bf.config.detection import DetectionConfig
from detr_bf.data.checks.annotations import examine
from detr_bf.data.coco import CocoAnnotations, Source, read_annotations
from detr_bf.data.formats import read_folder, read_split
from detr_bf.data.formats.folder import coco_document


def main(options: argparse.Namespace) -> int:
    """Check the data, write the JSON files that the options name, and print their classes.

    Returns:
        the exit code: 0, or 1 if the data have errors, so that nothing is written.

    Raises:
        InputError: the folder cannot be read or divided, or a file exists or cannot be written.
    """
    if options.folds is not None or options.val_fraction is not None:
        contents = _divided(options)
    else:
        contents = {name or "all": read_split(options.root, options.format, name) for name in options.split or [""]}
    files = {options.output / f"{name.strip('/').replace('/', '_')}.json": each for name, each in contents.items()}
    for path in files:
        check_output_file(path, "--output")
        if path.exists() and not options.overwrite:
            raise InputError(f"{printable(path)} exists: give --overwrite to replace it, or another --output")
    checked = [_has_errors(options.root, path.stem, content) for path, content in files.items()]  # all are printed
    if any(checked):
        print(
            "nothing is written: correct the errors; many kinds are corrected in a copy by detr-bf check "
            f"{shlex.quote(printable(options.root))} --fix OUT"
        )
        return 1
    for path, content in files.items():
        info = {"description": f"written by detr-bf convert-data from {options.root}"}
        try:
            write_json(path, {"info": info, **coco_document(content)})
        except ValueError as error:  # NaN in a COCO file of Roboflow
            raise InputError(f"{printable(content.path)} has values that JSON cannot hold: {error}") from error
        print(safe_message(_summary(path, content, read_folder(options.root, options.format).form)))
    print(
        f"train on them with data.train.images={printable(options.root)} data.train.annotations=FILE, likewise data.val"
    )
    return 0


def _divided(options: argparse.Namespace) -> dict[str, CocoAnnotations]:
    """Return training and validation images as a training run divides them."""
    settings: dict[str, Any] = {"val_fraction": options.val_fraction or 0.0}
    if options.folds is not None:
        settings = {"folds": options.folds, "fold": options.fold}
        if not 0 <= options.fold < options.folds or options.folds < 2:
            raise InputError(f"--folds {options.folds} --fold {options.fold}: expected 2 folds or more, counted from 0")
    elif not 0 < options.val_fraction < 1:
        raise InputError(f"--val-fraction is {options.val_fraction:g}, expected a number between 0 and 1")
    train = SplitConfig(split=options.split[0] if options.split else None)
    data = DataConfig(
        root=str(options.root), format=options.format, train=train, split_seed=options.split_seed, **settings
    )
    return {
        split: read_annotations(data_source(DetectionConfig(data=data), split).annotations)
        for split in ("train", "val")
    }


def _has_errors(root: Path, name: str, content: CocoAnnotations) -> bool:
    """Check the images and annotations of a file, print what is found, and return True if there are errors."""
    report = examine(Source(root, content), None, num_queries=sys.maxsize, workers=os.cpu_count() or 1)
    findings = tuple(replace(finding, split=name) for finding in report.findings)
    if findings:
        print(safe_message(replace(report, contents=(), findings=findings, statistics=None)))
    return bool(report.errors)


def _summary(path: Path, content: CocoAnnotations, form: str) -> str:
    """Return the numbers of images and objects, and of the objects and images of each class, of a folder's form."""
    objects = Counter(annotation["category_id"] for annotation in content.annotations)
    pairs = {(annotation["category_id"], annotation["image_id"]) for annotation in content.annotations}
    images = Counter(category_id for category_id, _ in pairs)
    lines = [
        f"{printable(path)}: {counted(len(content.images), 'image')}, {counted(len(content.annotations), 'object')}"
    ]
    for category in content.categories:
        number = category["id"]
        found = f"{counted(objects[number], 'object')} in {counted(images[number], 'image')}"
        lines.append(f"  {printable(category['name'])}: {found}")
    if crowds := sum(bool(annotation.get("iscrowd")) for annotation in content.annotations):
        kind = "difficult objects" if form == "Pascal VOC" else "crowds"
        lines.append(f"  {crowds} of them are {kind} (iscrowd 1): not trained on, and ignored in evaluation")
    return "\n".join(lines)
