"""Write the folder of a data set (COCO, Roboflow, Pascal VOC, YOLO, CSV) as COCO JSON files."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from detr_bf.assembly.data import data_source
from detr_bf.config.detection import DataConfig, DetectionConfig, SplitConfig
from detr_bf.data.coco import CocoAnnotations, read_annotations
from detr_bf.data.formats import read_split
from detr_bf.errors import InputError
from detr_bf.files import check_output_file, write_json
from detr_bf.text import printable, safe_message


def main(options: argparse.Namespace) -> int:
    """Write the JSON files that the options name, print their classes, and return 0.

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
    for path, content in files.items():
        parts = {"images": content.images, "annotations": content.annotations, "categories": content.categories}
        try:
            write_json(path, {"info": {"description": f"written by detr-bf convert-data from {options.root}"}, **parts})
        except ValueError as error:  # NaN in a COCO file of Roboflow
            raise InputError(f"{printable(content.path)} has values that JSON cannot hold: {error}") from error
        print(safe_message(_summary(path, content)))
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


def _summary(path: Path, content: CocoAnnotations) -> str:
    """Return the numbers of images and objects, and of the objects and images of each class."""
    objects = Counter(annotation["category_id"] for annotation in content.annotations)
    pairs = {(annotation["category_id"], annotation["image_id"]) for annotation in content.annotations}
    images = Counter(category_id for category_id, _ in pairs)
    lines = [f"{printable(path)}: {len(content.images)} images, {len(content.annotations)} objects"]
    for category in content.categories:
        number = category["id"]
        lines.append(f"  {printable(category['name'])}: {objects[number]} objects in {images[number]} images")
    if crowds := sum(bool(annotation.get("iscrowd")) for annotation in content.annotations):
        lines.append(f"  {crowds} of them are crowds (iscrowd 1: difficult objects of Pascal VOC)")
    return "\n".join(lines)
