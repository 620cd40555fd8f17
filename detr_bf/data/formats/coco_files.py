"""A folder with COCO JSON files and their images, such as COCO's own or the export of CVAT and Label Studio.

Read are the files ``instances_*.json``; without any, all JSON files whose content is of COCO's form. A file is a split
named as it (``instances_train2017.json`` is ``train2017``), or if its name says nothing (``annotations.json``) or is
that of several files, as its folder. Category ids are those of the files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from detr_bf.common.errors import InputError
from detr_bf.common.files import read_json
from detr_bf.common.text import listed, printable
from detr_bf.data.coco import CocoAnnotations, read_annotations
from detr_bf.data.formats.folder import DataFolder, NamedSplit
from detr_bf.data.formats.foreign import check_foreign
from detr_bf.data.formats.roboflow import ANNOTATION_FILE, read_roboflow
from detr_bf.data.paths import PathIndex, leads_out
from detr_bf.data.references import KEY

_PREFIX = "instances_"
_PLAIN = frozenset(("annotations", "_annotations", "coco", "instances_default", "labels", "result", "result_coco"))
_PARTS = frozenset(("images", "annotations", "categories"))
_TRIED = 50  # images of a file that are searched


def read_coco(root: Path, names: Sequence[str]) -> DataFolder:
    """Read a folder of COCO files; one of Roboflow's export with :func:`read_roboflow`.

    The ids of images and annotations are those of the files if they are unique over all of them; otherwise both count
    from 1.

    Args:
        root: of the data set.
        names: its files, relative to the root.

    Raises:
        InputError: there is no COCO file, its images are not found, or two files contradict each other.
    """
    if any(PurePosixPath(name).name == ANNOTATION_FILE for name in names):
        return read_roboflow(root, names)
    files = {name: content for name in _candidates(names) if (content := _read(root / name)) is not None}
    if not files:
        check_foreign(root, names)
        raise InputError(
            f"{printable(root)} has no JSON file with images, annotations and categories (COCO); "
            "JSON files of labelme under other names than their images: data.format=labelme"
        )
    index = PathIndex(names)
    located = {name: _located(root, name, content, index) for name, content in files.items()}
    images: list[Mapping[str, Any]] = [image for content in located.values() for image in content.images]
    annotations: list[Mapping[str, Any]] = [each for content in located.values() for each in content.annotations]
    splits: dict[str, NamedSplit] = {}
    names_of_splits = _split_names(located)
    for name, content in located.items():
        split, chosen = names_of_splits[name], [image["file_name"] for image in content.images]
        if split in splits:
            raise InputError(f"{printable(splits[split].path)} and {printable(root / name)} are both the split {split}")
        if split:
            splits[split] = NamedSplit(root / name, partial(frozenset, chosen))
    _check_distinct(root, located)
    if len({image["id"] for image in images}) < len(images):
        images, annotations = _renumbered(located.values())
    if len({repr(each.get("id")) for each in annotations}) < len(annotations):
        annotations = [{**each, "id": number} for number, each in enumerate(annotations, 1)]
    whole = CocoAnnotations(root, images, annotations, _categories(root, located))
    templates = {
        new["file_name"]: old[KEY]
        for name, content in files.items()
        for old, new in zip(content.images, located[name].images, strict=True)
        if old.get(KEY) != new.get(KEY)
    }
    return DataFolder(root, whole, splits if len(located) > 1 else {}, templates=templates)


def _candidates(names: Sequence[str]) -> list[str]:
    found = [name for name in names if name.lower().endswith(".json")]
    return [name for name in found if PurePosixPath(name).name.startswith(_PREFIX)] or found


def _read(path: Path) -> CocoAnnotations | None:
    """Return the content of a COCO detection file; None for any other JSON."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{printable(path)} is not JSON ({error}): mend it, or move it out of the folder") from None
    if not (isinstance(content, dict) and content.keys() >= _PARTS):
        return None
    found = read_annotations(path, content)
    return found if found.maps is None else None


def _split_of(name: str) -> str:
    """Return the split that a file is named after, "" if nothing names one."""
    path = PurePosixPath(name)
    if path.stem not in _PLAIN:
        return path.stem.removeprefix(_PREFIX)
    return path.parent.name if path.parent.name not in _PLAIN else ""


def _split_names(files: Iterable[str]) -> dict[str, str]:
    """Return the split of each file; files of the same name are told apart by their folders."""
    found = {name: _split_of(name) for name in files}
    count = Counter(found.values())
    repeated = {split for split, number in count.items() if split and number > 1}
    return {name: PurePosixPath(name).parent.name if split in repeated else split for name, split in found.items()}


def _located(root: Path, name: str, content: CocoAnnotations, index: PathIndex) -> CocoAnnotations:
    """Return the content with file names relative to the root; the data checks report files that are missing.

    Raises:
        InputError: none of the first images is in one of the folders where they may be.
    """
    where, own = printable(root / name), PurePosixPath(name).parent
    above, split = [own, *own.parents], PurePosixPath(name).stem.removeprefix(_PREFIX)
    below = ("", "images", "data", split, f"images/{split}", f"{split}/images")
    folders = list(dict.fromkeys(str(folder / sub) for folder in above for sub in below))
    given = [str(image["file_name"]) for image in content.images]
    counts = [sum(index.find(each, [folder]) is not None for each in given[:_TRIED]) for folder in folders]
    best = folders[counts.index(max(counts))] if given else str(own)
    try:
        found = index.find_all(given, [best] if max(counts) else folders)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    outside = [each for each, file in zip(given, found, strict=True) if file is None and leads_out(each)]
    if outside:
        raise InputError(
            f"{where}: {printable(outside[0])} leads out of the folder, and no end of it is inside; so are "
            f"{len(outside)} of {len(given)} images"
        )
    if given and not any(found):
        raise InputError(
            f"{where}: {printable(given[0])} and the images after it are in none of the folders {listed(folders, 8)}: "
            "give data.train.images and data.train.annotations instead of data.root"
        )
    names = [file or str(PurePosixPath(best, each)) for each, file in zip(given, found, strict=True)]
    images = [
        {**image, "file_name": file} | _located_template(image, file, best, index)
        for image, file in zip(content.images, names, strict=True)
    ]
    return replace(content, images=images)


def _located_template(image: Mapping[str, Any], file: str, folder: str, index: PathIndex) -> dict[str, str]:
    """Return the reference of an image relative to the root, if it is a file there or below the folder of the images.

    Others stay as they are. With a folder of references all do, see :meth:`DataFolder.as_given`.
    """
    given = image.get(KEY)
    found = index.find(given, ["", folder]) if isinstance(given, str) and given else None
    return {} if found in (None, file) else {KEY: str(found)}


def _check_distinct(root: Path, files: dict[str, CocoAnnotations]) -> None:
    """Raise an InputError if an image is listed twice."""
    seen: dict[str, str] = {}
    for name, content in files.items():
        for image in content.images:
            other = seen.setdefault(image["file_name"], name)
            if other != name:
                raise InputError(
                    f"{printable(root)}: {printable(image['file_name'])} is listed in {printable(other)} and in "
                    f"{printable(name)}: give data.train.annotations and data.val.annotations instead of data.root"
                )


def _categories(root: Path, files: dict[str, CocoAnnotations]) -> list[dict[str, Any]]:
    """Return the categories of all files by id.

    Raises:
        InputError: an id has two names.
    """
    found: dict[Any, dict[str, Any]] = {}
    for content in files.values():
        for category in content.categories:
            other = found.setdefault(category["id"], dict(category))
            if other.get("name") != category.get("name"):
                raise InputError(
                    f"{printable(content.path)} calls category {category['id']} {printable(category.get('name'))}, "
                    f"and another file of {printable(root)} {printable(other.get('name'))}: they do not belong together"
                )
    by_name: dict[str, Any] = {}
    together = [{category["id"] for category in content.categories} for content in files.values()]
    for number, category in found.items():
        other_number = by_name.setdefault(str(category.get("name")), number)
        if other_number != number and not any({number, other_number} <= ids for ids in together):
            raise InputError(
                f"the files of {printable(root)} call {printable(category.get('name'))} both category {other_number} "
                f"and category {number}: give data.train.annotations and data.val.annotations with the same ids"
            )
    return [found[number] for number in sorted(found)]


def _renumbered(files: Iterable[CocoAnnotations]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Number the images of all files from 1.

    Raises:
        InputError: the image of an annotation is not listed.
    """
    images: list[Mapping[str, Any]] = []
    annotations: list[Mapping[str, Any]] = []
    for content in files:
        numbers = {image["id"]: len(images) + number for number, image in enumerate(content.images, 1)}
        for each in content.annotations:
            if each["image_id"] not in numbers:
                raise InputError(f"{printable(content.path)} has annotations of image {each['image_id']}, not listed")
            annotations.append({**each, "image_id": numbers[each["image_id"]]})
        images += [{**image, "id": numbers[image["id"]]} for image in content.images]
    return images, annotations
