"""Reading and writing COCO panoptic files, for whole splits.

Format: https://cocodataset.org/#format-data, "Panoptic Segmentation".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from detr_bf.data.annotation_values import (
    MAX_ID,
    MAX_INT,
    is_crowd,
    is_id,
    png_name,
    segment_area,
    segment_id,
    value_text,
)
from detr_bf.data.images import MAX_PIXELS
from detr_bf.data.masks import encoded_ids, read_ids
from detr_bf.errors import InputError
from detr_bf.files import atomic_write, is_folder, read_json, write_json
from detr_bf.structures import ClassMap, PanopticMap, Segment
from detr_bf.text import printable


class PanopticFile(Mapping[int, PanopticMap]):
    """The maps of an annotation or result file by image id; PNGs are read when they are asked for.

    Args:
        annotations: COCO panoptic JSON with ``annotations`` and ``categories``.
        folder: where its PNG files lie.
        class_map: the model's classes; ``Segment.label`` indexes into it. ``Segment.area`` is that of the JSON.
        max_pixels: that a PNG may have.

    Raises:
        InputError: a path is missing, the file is not a COCO panoptic JSON, its categories contradict ``class_map``.
    """

    def __init__(
        self, annotations: str | Path, folder: str | Path, class_map: ClassMap, max_pixels: int = MAX_PIXELS
    ) -> None:
        self._folder = Path(folder)
        self._max_pixels = max_pixels
        if not is_folder(self._folder):
            raise InputError(
                f"there is no folder {printable(folder)}; expected the PNG files of {printable(annotations)} there"
            )
        self._entries = _read_entries(Path(annotations), class_map)

    def __getitem__(self, image_id: int) -> PanopticMap:
        """Read one PNG; InputError if that fails, KeyError for an image without annotation."""
        entry = self._entries[image_id]
        return PanopticMap(image_id, read_ids(self._folder / entry.file_name, self._max_pixels), entry.segments)

    def __contains__(self, image_id: object) -> bool:
        return image_id in self._entries

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        """Whether all is listed alike, wherever the PNGs lie."""
        return isinstance(other, PanopticFile) and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]


def write_panoptic(
    json_path: str | Path,
    folder: str | Path,
    maps: Iterable[PanopticMap],
    class_map: ClassMap,
    file_names: Mapping[int, str],
) -> None:
    """Write maps as COCO panoptic results: a PNG per image in ``folder``, then the JSON, each file atomically.

    Args:
        json_path: gets ``annotations`` and ``categories``, with the category ids of the annotation file.
        folder: gets the PNG files.
        maps: written one by one as they come.
        class_map: ``Segment.label`` indexes into it.
        file_names: image id -> name of the image or PNG, relative; its ending is replaced by ``.png``.

    Raises:
        InputError: an image has no name, one that leads out of ``folder``, or that of another image; the ids and
            segments of a map disagree; a label is outside the class map.
    """
    write_encoded(json_path, folder, (encode(found, class_map, file_names) for found in maps), class_map)


class EncodedMap(NamedTuple):
    """A map as it stands in the files."""

    annotation: dict[str, Any]  # its entry in the JSON
    png: bytes


def encode(found: PanopticMap, class_map: ClassMap, file_names: Mapping[int, str]) -> EncodedMap:
    """The map in COCO's format; arguments and errors as of :func:`write_panoptic`."""
    name = _png_name(found.image_id, file_names)
    areas = areas_of(found, class_map.num_classes)
    segments = [_segment_info(found.ids.cpu().numpy(), s, areas[s.id], class_map) for s in found.segments]
    annotation = {"image_id": found.image_id, "file_name": name, "segments_info": segments}
    return EncodedMap(annotation, encoded_ids(found.ids))


def write_encoded(json_path: str | Path, folder: str | Path, maps: Iterable[EncodedMap], class_map: ClassMap) -> None:
    """Write maps as :func:`write_panoptic` does; the JSON lists them by image id."""
    annotations = []
    written: dict[str, int] = {}
    for annotation, png in maps:
        name, image_id = annotation["file_name"], annotation["image_id"]
        if name in written:
            raise InputError(
                f"image ids {written[name]} and {image_id} would both be written to {name}: "
                "give every image once, with a name of its own"
            )
        written[name] = image_id
        with atomic_write(Path(folder) / name) as temporary:
            temporary.write_bytes(png)
        annotations.append(annotation)
    classes = zip(class_map.category_ids, class_map.names, class_map.is_thing, strict=True)
    categories = [{"id": i, "name": name, "isthing": int(is_thing)} for i, name, is_thing in classes]
    annotations.sort(key=lambda annotation: annotation["image_id"])
    write_json(json_path, {"annotations": annotations, "categories": categories})


def areas_of(found: PanopticMap, num_classes: int) -> dict[int, int]:
    """Pixels of each segment, counted in the map; InputError where the map, its segments and the classes disagree."""
    where = f"the panoptic map of image id {found.image_id}"
    areas = pixels_of_values(found.ids.cpu().numpy())
    areas.pop(0, None)
    listed = [segment.id for segment in found.segments]
    if len(set(listed)) < len(listed) or not all(1 <= segment_id <= MAX_ID for segment_id in listed):
        raise InputError(f"{where} lists segment ids {listed}, expected each once and from 1 to {MAX_ID}")
    if areas.keys() != set(listed):
        raise InputError(
            f"{where} has pixels of ids {sorted(areas.keys() - set(listed))} that no segment lists, and segments "
            f"{sorted(set(listed) - areas.keys())} without pixels: list exactly the segments of the map"
        )
    outside = sorted({segment.label for segment in found.segments}.difference(range(num_classes)))
    if outside:
        raise InputError(f"{where} has labels {outside}, expected class indices from 0 to {num_classes - 1}")
    return areas


def pixels_of_values(values: np.ndarray) -> dict[int, int]:
    """How often each value of an (H, W) integer array occurs, by ascending value.

    Sorts the first pixels of runs along the rows, not all pixels as np.unique would: ten times faster on maps.
    """
    flat = values.ravel()
    starts = np.flatnonzero(np.concatenate([[True], flat[1:] != flat[:-1]]))
    distinct, place = np.unique(flat[starts], return_inverse=True)
    pixels = np.bincount(place, weights=np.diff(starts, append=flat.size))
    return dict(zip(distinct.tolist(), pixels.astype(np.int64).tolist(), strict=True))


class _Entry(NamedTuple):
    """What the JSON says of one image."""

    file_name: str  # of the PNG
    segments: tuple[Segment, ...]


def _read_entries(path: Path, class_map: ClassMap) -> dict[int, _Entry]:
    """Image id -> entry; InputError when the file is missing, is not COCO panoptic, contradicts the classes."""
    where = file = printable(path)
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"annotation file {where} cannot be read ({error}); expected a COCO panoptic JSON") from error
    _check_categories(file, _value(file, content, "categories", list), class_map)
    entries: dict[int, _Entry] = {}
    for number, annotation in enumerate(_value(file, content, "annotations", list)):
        where = f"{file}: annotations[{number}]"
        image_id = _value(where, annotation, "image_id", int)
        if image_id in entries:
            raise InputError(f"{where} is the second one of image id {image_id}, expected one with all its segments")
        listed = _value(where, annotation, "segments_info", list)
        segments = tuple(_segment(f"{where}: segments_info[{n}]", s, class_map) for n, s in enumerate(listed))
        if len({segment.id for segment in segments}) < len(segments):
            raise InputError(f"{where}: segment ids {[s.id for s in segments]} of segments_info, expected each once")
        entries[image_id] = _Entry(_value(where, annotation, "file_name", str), segments)
    if not entries:
        raise InputError(f"{file} has no annotations, expected one for each image")
    return entries


def _segment(where: str, entry: Any, class_map: ClassMap) -> Segment:
    category_id = _value(where, entry, "category_id", int)
    for key in ("id", "area", "iscrowd"):
        _value(where, entry, key, object)
    try:
        found, area, crowd = segment_id(entry), segment_area(entry), is_crowd(entry, required=True)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None
    if category_id not in class_map.index:
        known = sorted(class_map.category_ids)
        raise InputError(f"{where} has category id {category_id}, which the model does not know; it knows {known}")
    return Segment(found, class_map.index[category_id], area, crowd)


def _check_categories(path: str, categories: Sequence[dict[str, Any]], class_map: ClassMap) -> None:
    for number, category in enumerate(categories):
        _value(f"{path}: categories[{number}]", category, "id", int)
    known, listed = (
        dict(zip(m.category_ids, zip(m.names, m.is_thing, strict=True), strict=True))
        for m in (class_map, ClassMap.from_categories(categories))
    )
    for category_id, said in listed.items():
        if known.get(category_id, said) != said:
            raise InputError(
                f"{path} gives category id {category_id} as {said} (name, is a thing), the model was trained with it "
                f"as {known[category_id]}: evaluate with annotations of the same categories"
            )


def _value(where: str, entry: object, key: str, kind: type) -> Any:
    """``entry[key]``; InputError unless it is there and of that kind."""
    if not isinstance(entry, dict) or key not in entry:
        found = (printable(", ".join(entry)) or "nothing") if isinstance(entry, dict) else type(entry).__name__
        raise InputError(f"{where} has no {key}, it has {found}; expected a COCO panoptic JSON")
    value = entry[key]
    if not (is_id(value) if kind is int else isinstance(value, kind)):
        expected = {int: f"a whole number from 0 to {MAX_INT}", str: "a string", list: "a list"}[kind]
        raise InputError(f"{where}: {key} is {value_text(value)}, expected {expected}")
    return value


def _png_name(image_id: int, file_names: Mapping[int, str]) -> str:
    if image_id not in file_names:
        raise InputError(f"image id {image_id} has no file name to write its panoptic PNG to: name every image")
    try:
        return png_name(file_names[image_id])
    except ValueError as error:
        raise InputError(f"image id {image_id} has {error}") from None


def _segment_info(ids: np.ndarray, segment: Segment, area: int, class_map: ClassMap) -> dict[str, Any]:
    """An entry of ``segments_info``; bbox is x, y, width, height in pixels."""
    mask = ids == segment.id
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    top, left, bottom, right = (int(line) for line in (rows[0], columns[0], rows[-1] + 1, columns[-1] + 1))
    return {
        "id": segment.id,
        "category_id": class_map.category_ids[segment.label],
        "area": area,
        "bbox": [left, top, right - left, bottom - top],
        "iscrowd": 0,
        "isthing": int(class_map.is_thing[segment.label]),
    }
