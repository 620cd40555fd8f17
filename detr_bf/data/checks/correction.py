"""Copies of annotations without the errors that the checks report; every change is a row of a list.

Nothing is guessed: an entry whose meaning is uncertain is dropped. The rules, by the code of the check:

- entries of the JSON without a required key, category-unknown, image-unknown, box-not-numbers, iscrowd-unknown,
  box-without-area, mask-missing, segmentation-unusable: dropped;
- box-outside: clipped to the image, or dropped if outside; area-not-number: the area of the box is used;
- file-missing, file-unreadable, size-differs: the image and its annotations are dropped; a missing file that exists
  under an end of its path is renamed, and a size that is no size is replaced by that of the file;
- image-id-repeated: entries of one file become one; of several files all are dropped, because it is not known to which
  the annotations belong;
- file-repeated: the entries become one image with the annotations of all, equal ones once;
- object-repeated: one is kept, with masks only if they are equal, too;
- class-name-repeated: categories that differ in their ids, or in spaces around the name, alone become one;
- train-val-overlap: dropped from the training images; class-unknown-to-train: the class is dropped from val.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from detr_bf.common.errors import InputError
from detr_bf.common.files import cache_folder, read_json
from detr_bf.common.text import printable
from detr_bf.data.annotation_values import (
    annotated_size,
    is_box,
    is_crowd,
    is_id,
    object_area,
    unit_problem,
    value_text,
)
from detr_bf.data.checks.annotations import exceeds
from detr_bf.data.checks.files import ImageRecord, check_files, existing_name
from detr_bf.data.coco import REQUIRED_KEYS, CocoAnnotations, Source, check_entry, read_annotations
from detr_bf.data.images import RGB, PixelFormat, check_folder
from detr_bf.data.masks import parts_of

Entry = dict[str, Any]


class Correction(NamedTuple):
    """Row of the list of changes."""

    split: str
    action: str  # dropped, changed or merged
    image_id: Any
    file_name: str
    annotation_id: Any  # empty for an image, and together with image_id and file_name for a category
    reason: str


class Corrected(NamedTuple):
    """Annotations of a split without errors, and how they differ from the given ones."""

    images: Path  # folder
    content: CocoAnnotations
    records: Mapping[str, ImageRecord]
    rows: list[Correction]


def corrected_splits(
    sources: Mapping[str, Source], *, masks: bool, workers: int, max_pixels: int, pixel_format: PixelFormat = RGB
) -> dict[str, Corrected]:
    """Return the corrected annotations of ``train`` and, if given, ``val``.

    Args:
        sources: of the splits; a COCO file may have entries that are no valid entries.
        masks: the segmentations are used.
        workers: threads that read image files.
        max_pixels: limit of an image.
        pixel_format: of the images.

    Raises:
        InputError: a file cannot be read as a COCO detection file, or nothing would be left of a split.
    """
    splits = {}
    for name, source in sources.items():
        check_folder(source.images)
        splits[name] = _SplitCorrection(name, source, masks, workers, max_pixels, pixel_format)
    merged = _merged_categories([split.content for split in splits.values()])
    found = {name: split.corrected(merged) for name, split in splits.items()}
    if "val" in found:
        found["train"] = _without_shared(found["train"], found["val"])
        found["val"] = _without_unknown_classes(found["train"], found["val"])
    for name, each in found.items():
        if not any(not is_crowd(annotation) for annotation in each.content.annotations):
            reasons = "; ".join(dict.fromkeys(row.reason for row in each.rows if row.action == "dropped"))
            raise InputError(
                f"data.{name}: no image with an object would be left, so nothing was written. Dropped because: "
                f"{printable(reasons) or 'nothing, it has none'}"
            )
    return found


class _SplitCorrection:
    """Corrections of one split."""

    def __init__(
        self, name: str, source: Source, masks: bool, workers: int, max_pixels: int, pixel_format: PixelFormat
    ) -> None:
        self.name, self.folder, self.masks, self.rows = name, source.images, masks, list[Correction]()
        content = self._read(source.annotations)
        if content.maps is not None:
            raise InputError(
                f"{printable(content.path)} is a panoptic file: --fix corrects detection files, whose masks are no PNGs"
            )
        self.content = content
        self.names = {image["id"]: image["file_name"] for image in content.images}
        images = list(self._renamed(self._once(content.images)))
        file_names = [image["file_name"] for image in images]
        reading = cache_folder("doctor"), workers, max_pixels, pixel_format
        self.records = check_files(ImageRecord, self.folder, file_names, *reading)
        self.images = {image["id"]: image for image in self._usable(images)}

    def corrected(self, merged: Mapping[int, int]) -> Corrected:
        """Return the corrected split; ``merged`` are the ids of categories that become another one.

        Raises:
            InputError: the boxes are in another unit, so that each of them would be wrong.
        """
        if problem := unit_problem(self.content.annotations, self._size_of):
            raise InputError(f"data.{self.name}: {problem}. --fix does not change the unit of boxes")
        owners = self._owners()
        annotations = [
            right for each in self.content.annotations if (right := self._corrected(each, owners, merged)) is not None
        ]
        annotations = self._with_ids(self._distinct(annotations))
        images = [image for number, image in self.images.items() if owners[number] == number]
        categories = list(self._categories(merged))
        plain = [[self._plain(each) for each in part] for part in (images, annotations, categories)]
        content = CocoAnnotations(self.content.path, plain[0], plain[1], plain[2])
        return Corrected(self.folder, content, self.records, self.rows)

    def _note(self, action: str, entry: Mapping[str, Any], reason: str) -> None:
        is_image = "file_name" in entry and "image_id" not in entry
        image_id = entry.get("id" if is_image else "image_id")
        name = entry["file_name"] if is_image else self.names.get(image_id, "") if is_id(image_id) else ""
        number = "" if is_image else entry.get("id", "")
        self.rows.append(Correction(self.name, action, image_id, str(name), number, reason))

    def _read(self, path: Path | CocoAnnotations) -> CocoAnnotations:
        """Return the annotations without the entries that no COCO file may have."""
        if isinstance(path, CocoAnnotations):
            return path
        try:
            content = read_json(path)
        except (ValueError, FileNotFoundError):
            return read_annotations(path)  # raises the error with what to do
        if not isinstance(content, dict):
            return read_annotations(path, content)
        annotations = content.get("annotations")
        listed = annotations if isinstance(annotations, list) else []
        if any(isinstance(each, dict) and "segments_info" in each for each in listed):
            return read_annotations(path, content)
        for part in ("images", "annotations"):
            if isinstance(content.get(part), list):
                content[part] = [each for each in content[part] if self._is_entry(part, each)]
        return read_annotations(path, content)

    def _is_entry(self, part: str, entry: object) -> bool:
        try:
            check_entry(f"entry of {part}", entry, REQUIRED_KEYS[part])
        except InputError as error:
            known = entry if isinstance(entry, dict) else {}
            name = value_text(known.get("file_name")) if part == "images" and "file_name" in known else ""
            ids = ("id", "") if part == "images" else ("image_id", known.get("id", ""))
            number = value_text(known[ids[0]]) if ids[0] in known else ""
            self.rows.append(
                Correction(self.name, "dropped", number, name, value_text(ids[1]) if ids[1] != "" else "", str(error))
            )
            return False
        return True

    def _once(self, images: Sequence[Mapping[str, Any]]) -> Iterator[Entry]:
        """Yield the images whose id is not that of another file."""
        files = defaultdict(set)
        for image in images:
            files[image["id"]].add(image["file_name"])
        seen = set()
        for image in images:
            if len(files[image["id"]]) > 1:
                self._note("dropped", image, f"id {image['id']} is that of several files")
            elif image["id"] in seen:
                self._note("merged", image, "listed twice")
            else:
                seen.add(image["id"])
                yield dict(image)

    def _renamed(self, images: Iterator[Entry]) -> Iterator[Entry]:
        """Yield the images whose file exists, with the name under which it exists."""
        found = [(image, existing_name(self.folder, image["file_name"])) for image in images]
        given = defaultdict(set)
        for image, name in found:
            given[name].add(image["file_name"])
        for image, name in found:
            if name is None:
                self._note("dropped", image, "there is no such file")
                continue
            if name != image["file_name"] and len(given[name]) > 1:
                self._note("dropped", image, f"there is no such file, and {printable(name)} may be that of others")
                continue
            if name != image["file_name"]:
                self._note("changed", image, f"the file is {printable(name)}")
            yield {**image, "file_name": name}

    def _usable(self, images: Sequence[Entry]) -> Iterator[Entry]:
        """Yield the images that can be decoded and have the size of their file."""
        for image in images:
            record = self.records.get(image["file_name"])
            if record is None or record.sizes is None:
                self._note("dropped", image, record.problem if record else "there is no such file")
                continue
            try:
                size = annotated_size(image)
            except InputError:
                size = (0, 0)
            if size is not None and min(size) < 1:
                self._note("changed", image, f"width and height are those of the file, {record.sizes.rotated[::-1]}")
                size = None
                image["height"], image["width"] = record.sizes.rotated
            elif size is None and self.masks:  # their evaluation needs it
                image["height"], image["width"] = record.sizes.rotated
            try:
                record.sizes.wants_rotation(size)
            except ValueError as error:
                self._note("dropped", image, f"{error}: its boxes may be those of another image")
                continue
            yield image

    def _owners(self) -> dict[int, int]:
        """Return for each image the id under which its annotations are listed: the first one of its file and size."""
        first: dict[tuple[str, Any], int] = {}
        owners = {}
        for number, image in self.images.items():
            owners[number] = first.setdefault((image["file_name"], annotated_size(image)), number)
            if owners[number] != number:
                self._note("merged", image, f"the same file as image {owners[number]}")
        return owners

    def _corrected(
        self, given: Mapping[str, Any], owners: Mapping[int, int], merged: Mapping[int, int]
    ) -> Entry | None:
        """Return an annotation without errors, None if it is dropped."""
        reason, annotation = self._problem(given), dict(given)
        if not reason and not is_crowd(given):
            reason = self._clip(annotation)
        if reason:
            self._note("dropped", given, reason)
            return None
        try:
            object_area(annotation)
        except ValueError as error:
            self._note("changed", given, f"{error}: removed, so that the area of the box is used")
            del annotation["area"]
        annotation["image_id"] = owners[given["image_id"]]
        category_id = given["category_id"]
        if category_id in merged:
            self._note("changed", given, f"category {category_id} is merged with {merged[category_id]}")
            annotation["category_id"] = merged[category_id]
        return annotation

    def _problem(self, annotation: Mapping[str, Any]) -> str:
        """Return the error for which an annotation is dropped; empty without one."""
        image = self.images.get(annotation["image_id"])
        if image is None:
            known = annotation["image_id"] in self.names
            return "its image was dropped" if known else f"image {annotation['image_id']} is not in images"
        if annotation["category_id"] not in self.content.class_map.index:
            return f"category {annotation['category_id']} is not in categories"
        if not is_box(annotation.get("bbox")):
            return f"bbox {value_text(annotation.get('bbox'))} is not four finite numbers"
        try:
            is_crowd(annotation)
            if self.masks:
                parts_of(annotation.get("segmentation"), self._size(image))
        except ValueError as error:
            return str(error)
        return ""

    def _size_of(self, image_id: int) -> tuple[int, int] | None:
        image = self.images.get(image_id)
        return self._size(image) if image else None

    def _size(self, image: Mapping[str, Any]) -> tuple[int, int]:
        record = self.records[image["file_name"]]
        assert record.sizes is not None, "others are dropped"
        return annotated_size(image) or record.sizes.rotated

    def _clip(self, annotation: Entry) -> str:
        """Clip the box of an object to its image in place; return the reason to drop it, empty if it has an area."""
        x, y, width, height = annotation["bbox"]
        if min(width, height) <= 0:
            return f"bbox {value_text(annotation['bbox'])} has no area"
        size = self._size(self.images[annotation["image_id"]])
        if not exceeds(annotation["bbox"], size):
            return ""
        left, top, right, bottom = max(x, 0), max(y, 0), min(x + width, size[1]), min(y + height, size[0])
        if min(right - left, bottom - top) <= 0:
            return f"bbox {value_text(annotation['bbox'])} is outside the image of {size[1]} x {size[0]} pixels"
        annotation["bbox"] = [left, top, right - left, bottom - top]
        self._note(
            "changed",
            annotation,
            f"bbox {value_text([x, y, width, height])} is clipped to {size[1]} x {size[0]} pixels",
        )
        if isinstance(annotation.get("area"), (int, float)):
            annotation["area"] = min(annotation["area"], (right - left) * (bottom - top))
        return ""

    def _distinct(self, annotations: Sequence[Entry]) -> Iterator[Entry]:
        """Yield the annotations, equal ones once."""
        seen = set()
        for each in annotations:
            mask = repr(each.get("segmentation")) if self.masks else ""
            key = (each["image_id"], each["category_id"], tuple(each["bbox"]), bool(is_crowd(each)), mask)
            if key in seen:
                self._note("dropped", each, "the same image, category and box as another annotation")
                continue
            seen.add(key)
            yield each

    def _with_ids(self, annotations: Iterator[Entry]) -> list[Entry]:
        """Return the annotations with their ids, or numbered from 1 if these are not distinct numbers."""
        listed = list(annotations)
        ids = [each["id"] for each in listed if "id" in each]
        if all(map(is_id, ids)) and len(set(ids)) == len(ids):
            return listed
        reason = "not all annotation ids are distinct numbers: all are numbered from 1"
        self.rows.append(Correction(self.name, "changed", "", "", "all", reason))
        return [{**each, "id": number} for number, each in enumerate(listed, 1)]

    def _categories(self, merged: Mapping[int, int]) -> Iterator[Entry]:
        """Yield the categories, those that become one once, without an ``isthing`` that is none."""
        seen = set()
        for category in self.content.categories:
            number = merged.get(category["id"], category["id"])
            if number in merged.values():
                if number != category["id"]:
                    reason = f"category {category['id']} ({value_text(category['name'])}) is merged with {number}"
                    self.rows.append(Correction(self.name, "merged", "", "", "", reason))
                if number in seen:
                    continue
                seen.add(number)
                category = {**category, "id": number, "name": category["name"].strip()}
            if category.get("isthing", 1) not in (0, 1):
                reason = f"category {category['id']}: isthing {value_text(category['isthing'])} is removed"
                self.rows.append(Correction(self.name, "changed", "", "", "", reason))
                category = {key: value for key, value in category.items() if key != "isthing"}
            yield dict(category)

    def _plain(self, entry: Entry) -> Entry:
        """Return an entry without the values that JSON cannot hold, such as NaN."""
        with suppress(ValueError):
            json.dumps(entry, allow_nan=False)
            return entry
        kept = {}
        for key, value in entry.items():
            try:
                json.dumps(value, allow_nan=False)
                kept[key] = value
            except ValueError as error:
                self._note("changed", entry, f"{printable(key)} is removed: {error}")
        return kept


def _merged_categories(contents: Sequence[CocoAnnotations]) -> dict[int, int]:
    """Return the ids of categories that become another one, the lowest id, in all splits.

    Two entries of a file are certainly the same class if they differ in nothing but the id and spaces around the name.
    """
    merged: dict[int, int] = {}
    for content in contents:
        parents = {category["id"] for category in content.parents}
        same: dict[str, list[int]] = defaultdict(list)
        for category in content.categories:
            if category["id"] not in parents and isinstance(name := category.get("name"), str):
                same[repr(sorted({**category, "id": 0, "name": name.strip()}.items()))].append(category["id"])
        for ids in same.values():
            kept = min(merged.get(number, number) for number in ids)
            merged |= {number: kept for number in ids if number != kept}
    return {number: merged.get(kept, kept) for number, kept in merged.items()}


def _without_shared(train: Corrected, val: Corrected) -> Corrected:
    """Return the training split without the images whose files are those of validation images, too."""
    held_out = {val.records[image["file_name"]].sha256: image["file_name"] for image in val.content.images}
    shared = {
        image["id"]: (image["file_name"], held_out[digest])
        for image in train.content.images
        if (digest := train.records[image["file_name"]].sha256) in held_out
    }
    rows = [
        Correction("train", "dropped", number, name, "", f"the same image as {printable(other)} of val")
        for number, (name, other) in shared.items()
    ]
    rows += [
        Correction(
            "train", "dropped", each["image_id"], shared[each["image_id"]][0], each.get("id", ""), "its image is in val"
        )
        for each in train.content.annotations
        if each["image_id"] in shared
    ]
    content = replace(
        train.content,
        images=[image for image in train.content.images if image["id"] not in shared],
        annotations=[each for each in train.content.annotations if each["image_id"] not in shared],
    )
    return train._replace(content=content, rows=[*train.rows, *rows])


def _without_unknown_classes(train: Corrected, val: Corrected) -> Corrected:
    """Return the validation split without the annotations and categories that the training split lacks."""
    known = train.content.class_map.index
    names = {image["id"]: image["file_name"] for image in val.content.images}
    rows = [
        Correction(
            "val",
            "dropped",
            each["image_id"],
            names[each["image_id"]],
            each.get("id", ""),
            f"category {each['category_id']} is no class of train",
        )
        for each in val.content.annotations
        if each["category_id"] not in known
    ]
    content = replace(
        val.content,
        annotations=[each for each in val.content.annotations if each["category_id"] in known],
        categories=[each for each in val.content.categories if each["id"] in known],
    )
    return val._replace(content=content, rows=[*val.rows, *rows])
