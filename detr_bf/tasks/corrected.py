"""Folder with annotations without errors, for ``detr-bf check --fix``; the given data are only read."""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from detr_bf.assembly.data import data_root, data_sources, references_folder
from detr_bf.common.errors import InputError
from detr_bf.common.files import (
    atomic_write,
    check_output_folder,
    make_output_folder,
    output_path,
    remove_empty,
    write_json,
    write_text,
)
from detr_bf.common.text import printable
from detr_bf.config import DetectionConfig
from detr_bf.data.checks.annotations import Report
from detr_bf.data.checks.correction import Corrected, Correction, corrected_splits
from detr_bf.data.coco import Source
from detr_bf.tasks.detection import DetectionTask

CHANGES_FILE = "changes.csv"
SETTINGS_FILE = "data.yaml"
_OPTION = "--fix"
_PLURALS = {"annotation": "annotations", "category": "categories", "image": "images"}


def check_new_folder(output: Path, config: DetectionConfig) -> None:
    """Check that ``output`` is missing or empty, and outside of the folders of the data (InputError: it is not)."""
    place = output_path(output, _OPTION)
    if os.path.lexists(output) and not (output.is_dir() and not any(output.iterdir())):
        raise InputError(f"{_OPTION} {printable(output)} exists: give a new or an empty folder; nothing is replaced")
    data = config.data
    folders = {data_root(data)} if data.root else {Path(path) for path in (data.train.images, data.val.images) if path}
    for folder in folders:
        if place.is_relative_to(output_path(folder, "data")):
            raise InputError(f"{_OPTION} {printable(output)} is inside of the data, {printable(folder)}: name another")
    check_output_folder(output, _OPTION)


def write_corrected(config: DetectionConfig, output: Path) -> str:
    """Write corrected annotations, the list of changes and a config with the paths; return the text about them.

    Args:
        output: a folder for which :func:`check_new_folder` has passed.

    Raises:
        InputError: the annotations cannot be corrected, or the folder cannot be written.
    """
    try:
        sources = data_sources(config)
    except InputError as error:
        if not config.data.root:
            raise
        raise InputError(
            f"{error}\n{_OPTION} corrects a COCO file with such entries if it is given by data.train.images=DIR and "
            "data.train.annotations=FILE (and data.val) instead of data.root"
        ) from error
    splits = corrected_splits(
        sources,
        masks=config.model.masks or config.data.augment.copy_paste > 0,
        workers=max(1, config.data.workers),
        max_pixels=config.data.max_pixels,
    )
    kept = {name: Source(each.images, each.content) for name, each in splits.items()}
    report = DetectionTask(config).examine(kept)
    if report.errors:
        raise InputError(f"these errors cannot be corrected by {_OPTION}; nothing was written\n{report}")
    settings = _settings(config, output, splits)
    folders = make_output_folder(output, _OPTION)
    try:
        for name, each in splits.items():
            parts = {key: getattr(each.content, key) for key in ("images", "annotations", "categories")}
            write_json(_annotations(output, name), parts)
        _write_changes(output / CHANGES_FILE, splits)
        write_text(output / SETTINGS_FILE, settings)
    except OSError as error:
        remove_empty(folders)
        raise InputError(
            f"{_OPTION} {printable(output)} cannot be written ({error.strerror or error}): free some space, or choose "
            "another folder"
        ) from error
    return _summary(output, splits, report)


def _annotations(output: Path, split: str) -> Path:
    return output / "annotations" / f"{split}.json"


def _write_changes(path: Path, splits: Mapping[str, Corrected]) -> None:
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Correction._fields)
        for each in splits.values():
            writer.writerows([printable(value, limit=400) for value in row] for row in each.rows)


def _settings(config: DetectionConfig, output: Path, splits: Mapping[str, Corrected]) -> str:
    lines = ["# Annotations corrected by detr-bf check --fix. Name this file after your config.", "data:"]
    lines += ['  root: ""', "  val_fraction: 0.0", "  folds: 0", "  fold: 0"]
    for name in ("train", "val"):
        folder, annotations = "", ""
        if name in splits:
            folder, annotations = (str(each.resolve()) for each in (splits[name].images, _annotations(output, name)))
        paths = f"images: {yaml_text(folder)}, annotations: {yaml_text(annotations)}"
        references = references_folder(config, name)
        own = yaml_text(str(references.resolve())) if references else '""'
        lines.append(f'  {name}: {{split: null, {paths}, panoptic: "", references: {own}}}')
    return "\n".join([*lines, ""])


def yaml_text(text: str) -> str:
    """Return text as a value of a YAML config, quoted, and escaped where omegaconf would interpolate."""
    return json.dumps(re.sub(r"(\\*)\$\{", r"\1\1\\${", text), ensure_ascii=False)


def _summary(output: Path, splits: Mapping[str, Corrected], report: Report) -> str:
    lines = []
    for name, each in splits.items():
        counts = Counter((row.action, _kind(row)) for row in each.rows)
        done = ", ".join(
            f"{count} {kind if count == 1 else _PLURALS[kind]} {action}"
            for (action, kind), count in sorted(counts.items())
        )
        size = f"{len(each.content.images)} images, {len(each.content.annotations)} annotations"
        lines.append(f"{name}: {done or 'nothing to correct'}; {size} in {printable(_annotations(output, name))}")
    lines.append(f"changes: {printable(output / CHANGES_FILE)}; the given data are as before")
    lines.append(f"the corrected data: {report.outcome}")
    return "\n".join(lines)


def _kind(row: Correction) -> str:
    if row.annotation_id != "":
        return "annotation"
    return "image" if row.image_id != "" or row.file_name else "category"
