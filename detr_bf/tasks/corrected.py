"""Data set folder without errors, for ``detr-bf check --fix``; the given data are only read.

It holds COCO files and the images, as hard links where the file system can make them, so that every command reads it.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from detr_bf.assembly.data import build_pixel_format, data_root, data_sources, references_folder
from detr_bf.common.errors import InputError
from detr_bf.common.files import (
    atomic_write,
    check_output_folder,
    is_file,
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
from detr_bf.data.references import GROUP_KEY, KEY, own_files
from detr_bf.tasks.detection import DetectionTask

CHANGES_FILE = "changes.csv"
SETTINGS_FILE = "corrected.yaml"  # not data.yaml, by which folders of YOLO are known
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
    """Write images, corrected annotations, the list of changes and a config with the paths; return text about them.

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
        pixel_format=build_pixel_format(config.data),
    )
    kept = {name: Source(each.images, each.content) for name, each in splits.items()}
    report = DetectionTask(config).examine(kept)
    if report.errors:
        raise InputError(f"these errors cannot be corrected by {_OPTION}; nothing was written\n{report}")
    references = {name: _references(config, name, each) for name, each in splits.items()}
    check_new_folder(output, config)  # again, because the images were read since
    folders, finished = make_output_folder(output, _OPTION), False
    try:
        for name, each in splits.items():
            images = list(_with_images(output, name, each, references[name]))
            parts = {key: getattr(each.content, key) for key in ("annotations", "categories")}
            write_json(_annotations(output, name), {"images": images, **parts})
        _write_changes(output / CHANGES_FILE, splits)
        write_text(output / SETTINGS_FILE, _settings(output, splits))
        finished = True
    except OSError as error:
        raise InputError(
            f"{_OPTION} {printable(output)} cannot be written ({error.strerror or error}): free some space, or choose "
            "another folder"
        ) from error
    finally:
        if not finished:  # by Ctrl-C, too; the folder was missing or empty, so all files below these names are ours
            for made in ("images", "references", "annotations"):
                shutil.rmtree(output / made, ignore_errors=True)
            for file in (CHANGES_FILE, SETTINGS_FILE):
                (output / file).unlink(missing_ok=True)
            remove_empty(folders)
    return _summary(output, splits, report)


def _references(config: DetectionConfig, split: str, corrected: Corrected) -> list[Path | None]:
    """Return the own reference of each image of a split, None for an image without one.

    They are kept also where ``data.reference`` does not read them.
    """
    folder, images = references_folder(config, split), corrected.content.images
    if folder is None and config.data.reference != "own" and not any(isinstance(each.get(KEY), str) for each in images):
        return [None] * len(images)
    return own_files(images, corrected.images, folder)


def _with_images(
    output: Path, split: str, corrected: Corrected, references: list[Path | None]
) -> Iterator[dict[str, Any]]:
    """Put the images and their references into ``output``; yield the entries of the images with the new names."""
    used, used_references = set[str](), set[str]()
    for image, reference in zip(corrected.content.images, references, strict=True):
        given = PurePosixPath(image["file_name"])
        name = _new_name(given, image["id"], used)
        _link(corrected.images / image["file_name"], output / "images" / split / name)
        own = {}
        if image.get(GROUP_KEY) is None and given.parent != PurePosixPath(name).parent:
            own[GROUP_KEY] = str(PurePosixPath("images", split, given.parent))  # the group of others in that folder
        if reference is not None and is_file(reference):
            named = PurePosixPath(name).with_suffix(reference.suffix)
            own[KEY] = f"references/{split}/{_new_name(named, image['id'], used_references)}"
            _link(reference, output / own[KEY])
        yield {**image, "file_name": f"images/{split}/{name}"} | own


def _new_name(given: PurePosixPath, image_id: Any, used: set[str]) -> str:
    """Return the given name of a file, or a new one if that is hidden, leads out of the folder or is in ``used``."""
    name = str(given)
    if given.is_absolute() or any(part.startswith(".") for part in given.parts):
        name = f"{image_id}_{given.name.lstrip('.')}"
    while name.casefold() in used:
        name = f"_{name}"
    used.add(name.casefold())
    return name


def _link(source: Path, target: Path) -> None:
    """Make a hard link, or a copy where the file system cannot; an existing file is not replaced (FileExistsError)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except FileExistsError:
        raise
    except OSError:
        shutil.copy2(source, target)


def _annotations(output: Path, split: str) -> Path:
    return output / "annotations" / f"{split}.json"


def _write_changes(path: Path, splits: Mapping[str, Corrected]) -> None:
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Correction._fields)
        for each in splits.values():
            writer.writerows([printable(value, limit=400) for value in row] for row in each.rows)


def _settings(output: Path, splits: Mapping[str, Corrected]) -> str:
    lines = ["# Data corrected by detr-bf check --fix. Name this file after your config.", "data:"]
    lines += [f"  root: {yaml_text(str(output.resolve()))}", "  format: coco"]
    lines += ["  val_fraction: 0.0", "  folds: 0", "  fold: 0"]
    for name in ("train", "val"):
        split = name if name in splits else "null"
        lines.append(f'  {name}: {{split: {split}, images: "", annotations: "", panoptic: "", references: ""}}')
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
