"""Panoptic quality and COCO panoptic files of whole splits.

Quality: Kirillov et al. 2019, "Panoptic Segmentation", section 4 (arXiv 1801.00868). Void, crowds, areas and the order
of the sums are those of COCO's panopticapi in one process with ascending image ids; the results are bit-identical.
File format: https://cocodataset.org/#format-data, "Panoptic Segmentation".
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from detr_bf.common.errors import InputError
from detr_bf.common.files import atomic_write, is_folder, read_json, write_json
from detr_bf.common.structures import ClassMap, PanopticMap, Segment
from detr_bf.common.text import printable
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
from detr_bf.evaluation.panoptic_errors import SegmentMatches, SegmentPair, segment_errors
from detr_bf.evaluation.results import PANOPTIC_METRIC_NAMES, PanopticClassResult, PanopticSummary
from detr_bf.evaluation.semantic import SemanticResult, summarize_counts


class PanopticFile(Mapping[int, PanopticMap]):
    """Mapping from image id to panoptic map for an annotation or result file; PNGs are read on access.

    Args:
        annotations: COCO panoptic JSON with ``annotations`` and ``categories``.
        folder: of its PNG files.
        class_map: the model's classes; ``Segment.label`` indexes into it. ``Segment.area`` is the JSON's.
        max_pixels: limit for a PNG.

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
        """Read the PNG of an image; :class:`InputError` if that fails, KeyError for an image without annotation."""
        entry = self._entries[image_id]
        return PanopticMap(image_id, read_ids(self._folder / entry.file_name, self._max_pixels), entry.segments)

    @property
    def file_names(self) -> dict[int, str]:
        """Names of the PNG files by image id."""
        return {image_id: entry.file_name for image_id, entry in self._entries.items()}

    def __contains__(self, image_id: object) -> bool:
        return image_id in self._entries

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        """Compare the entries; the folders of the PNGs may differ."""
        return isinstance(other, PanopticFile) and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]


def write_panoptic(
    json_path: str | Path,
    folder: str | Path,
    maps: Iterable[PanopticMap],
    class_map: ClassMap,
    file_names: Mapping[int, str],
) -> None:
    """Write maps as COCO panoptic results: one PNG an image in ``folder``, then the JSON, each file atomically.

    Args:
        json_path: file for ``annotations`` and ``categories``, with the category ids of the annotation file.
        folder: for the PNG files.
        maps: written one by one.
        class_map: ``Segment.label`` indexes into it.
        file_names: image id -> name of the image or PNG, relative; its ending is replaced by ``.png``.

    Raises:
        InputError: an image has no name, a name outside ``folder``, or the name of another image; the ids and
            segments of a map disagree; a label is outside the class map.
    """
    write_encoded(json_path, folder, (encode(found, class_map, file_names) for found in maps), class_map)


class EncodedMap(NamedTuple):
    """Panoptic map in COCO's format."""

    annotation: dict[str, Any]  # its entry in the JSON
    png: bytes


def encode(found: PanopticMap, class_map: ClassMap, file_names: Mapping[int, str]) -> EncodedMap:
    """Return a map in COCO's format; arguments and errors as in :func:`write_panoptic`."""
    name = _png_name(found.image_id, file_names)
    areas = areas_of(found, class_map.num_classes)
    segments = [_segment_info(found.ids.cpu().numpy(), s, areas[s.id], class_map) for s in found.segments]
    annotation = {"image_id": found.image_id, "file_name": name, "segments_info": segments}
    return EncodedMap(annotation, encoded_ids(found.ids))


def write_encoded(json_path: str | Path, folder: str | Path, maps: Iterable[EncodedMap], class_map: ClassMap) -> None:
    """Write encoded maps as :func:`write_panoptic` does; the JSON lists them by image id."""
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
    """Return the pixels of each segment, counted in the map; InputError if map, segments and classes disagree."""
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
    """Return the number of pixels of each value of an (H, W) integer array, by ascending value.

    Sorts only the first pixels of runs along the rows; on maps this is ten times as fast as np.unique of all pixels.
    """
    flat = values.ravel()
    starts = np.flatnonzero(np.concatenate([[True], flat[1:] != flat[:-1]]))
    distinct, inverse = np.unique(flat[starts], return_inverse=True)
    pixels = np.bincount(inverse, weights=np.diff(starts, append=flat.size))
    return dict(zip(distinct.tolist(), pixels.astype(np.int64).tolist(), strict=True))


class _Entry(NamedTuple):
    """Annotation of one image in the JSON."""

    file_name: str  # of the PNG
    segments: tuple[Segment, ...]


def _read_entries(path: Path, class_map: ClassMap) -> dict[int, _Entry]:
    """Return the entries by image id; :class:`InputError` if the file is missing or invalid, or the classes differ."""
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
    """Return ``entry[key]``; :class:`InputError` if it is missing or not of ``kind``."""
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
    """Return an entry of ``segments_info``; bbox is x, y, width, height in pixels."""
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


_PAIR = MAX_ID + 1  # a pair of ids is encoded as: ground-truth id * _PAIR + predicted id


class PanopticEvaluator:
    """Panoptic quality of a split, to which every image is added once; the maps are not stored.

    The images of the split are those with an annotation. Areas of predicted segments are counted in the maps, those of
    the ground truth are read from the annotation file. Ids of a ground-truth PNG that its annotation does not list
    match nothing and are not void.

    Args:
        annotations: COCO panoptic JSON with ``annotations`` and ``categories``.
        folder: of its PNG files.
        class_map: the model's classes; ``Segment.label`` indexes into it.
        max_pixels: limit for a PNG file.

    Raises:
        InputError: a path is missing, the file is not a COCO panoptic JSON, its categories contradict ``class_map``.
    """

    def __init__(
        self, annotations: str | Path, folder: str | Path, class_map: ClassMap, max_pixels: int = MAX_PIXELS
    ) -> None:
        self.class_map = class_map
        self._truths = PanopticFile(annotations, folder, class_map, max_pixels)
        self._counts: dict[int, SegmentMatches] = {}

    @property
    def counts(self) -> Mapping[int, SegmentMatches]:
        """Return matches and errors by image id."""
        return self._counts

    def update(self, maps: Sequence[PanopticMap]) -> None:
        """Add images, including images without segments.

        Raises:
            InputError: an image has no annotation or was given before, its size is not that of the ground truth, its
                ids and segments disagree, a label is outside the class map, a ground-truth PNG cannot be read.
        """
        for found in maps:
            if found.image_id not in self._truths:
                raise InputError(
                    f"a panoptic map for image id {found.image_id}, which has no annotation in the annotation file: "
                    "evaluate with the annotation file the images were read from"
                )
            if found.image_id in self._counts:
                raise InputError(
                    f"image id {found.image_id} was given twice: every image counts once. "
                    "Join the evaluators of several processes with merge"
                )
            truth = self._truths[found.image_id]
            if truth.ids.shape != found.ids.shape:
                raise InputError(
                    f"the panoptic map of image id {found.image_id} is of shape {tuple(found.ids.shape)}, its ground "
                    f"truth of shape {tuple(truth.ids.shape)}: make maps of the file's height x width"
                )
            self._counts[found.image_id] = _compare(
                truth, found, areas_of(found, self.class_map.num_classes), self.class_map.is_thing
            )

    def merge(self, other: PanopticEvaluator) -> None:
        """Add the images of ``other``; for an image in both, the result of ``self`` is kept.

        The metrics are bit-identical for every division of the split and every order of merging.

        Raises:
            InputError: ``other`` was made for another ground truth or other classes.
        """
        if (self._truths, self.class_map) != (other._truths, other.class_map):
            raise InputError(
                "panoptic evaluators of different annotation files or classes cannot be merged: use the same in all"
            )
        for image_id, counts in other._counts.items():
            self._counts.setdefault(image_id, counts)

    def summarize(self, partial: bool = False) -> PanopticSummary:
        """Return the metrics of all images of the file; with ``partial``, of those added so far only.

        Raises:
            InputError: images are missing and ``partial`` is False.
        """
        missing = sorted(self._truths.keys() - self._counts.keys())
        if missing and not partial:
            raise InputError(
                f"{len(missing)} of {len(self._truths)} images were not evaluated, the first of image id {missing[0]}: "
                "evaluate all images, or call summarize(partial=True)"
            )
        images = [self._counts[image_id] for image_id in sorted(self._counts)]
        per_class = _per_class(images, self.class_map)
        return PanopticSummary(
            **_nine_numbers(per_class.values()),
            per_class=per_class,
            num_images=len(self._counts),
            mIoU=self._semantic(images).mIoU,
        )

    def _semantic(self, images: Sequence[SegmentMatches]) -> SemanticResult:
        """Return the quality of the maps merged to classes."""
        num_classes = self.class_map.num_classes
        counts = np.zeros((num_classes, num_classes + 1), dtype=np.int64)
        for image in images:
            for true, found, pixels in image.pixels:
                counts[true, found] += pixels  # -1, no class, is the last column
        return summarize_counts(counts, self.class_map.distinct_names, len(images))


def _compare(
    wanted: PanopticMap, found: PanopticMap, areas: Mapping[int, int], is_thing: Sequence[bool]
) -> SegmentMatches:
    """Compare ground truth and prediction of one image; ``areas`` are the pixels of the predicted segments."""
    overlaps = pixels_of_values(wanted.ids.numpy().astype(np.int64) * _PAIR + found.ids.cpu().numpy())
    pairs = list(_pairs(wanted, found, areas, overlaps))
    right = [pair for pair in pairs if pair.truth.label == pair.found.label and pair.iou > 0.5]
    matched_truths, matched_found = {pair.truth.id for pair in right}, {pair.found.id for pair in right}
    crowds = {segment.label: segment.id for segment in wanted.segments if segment.is_crowd}  # the last one of a class

    def is_ignored(guess: Segment) -> bool:
        pixels = overlaps.get(guess.id, 0)
        if guess.label in crowds:
            pixels += overlaps.get(crowds[guess.label] * _PAIR + guess.id, 0)
        return pixels / areas[guess.id] > 0.5

    unmatched = [segment for segment in found.segments if segment.id not in matched_found]
    ignored = {segment.id for segment in unmatched if is_ignored(segment)}
    wrong, missed = segment_errors(
        [pair for pair in pairs if pair.found.id not in ignored],
        [segment for segment in unmatched if segment.id not in ignored],
        [s for s in wanted.segments if s.id not in matched_truths and not s.is_crowd],
        is_thing,
    )
    matches = tuple((pair.truth.label, pair.iou) for pair in right)
    return SegmentMatches(matches, wrong, missed, tuple(sorted(ignored)), _class_pixels(wanted, found, overlaps))


def _class_pixels(
    wanted: PanopticMap, found: PanopticMap, overlaps: Mapping[int, int]
) -> tuple[tuple[int, int, int], ...]:
    """Return true class, predicted class (-1: none) and number of pixels of an image, crowds included."""
    true_labels, found_labels = ({segment.id: segment.label for segment in each.segments} for each in (wanted, found))
    counts: Counter[tuple[int, int]] = Counter()
    for pair, pixels in overlaps.items():
        true_id, found_id = divmod(pair, _PAIR)
        if true_id in true_labels:
            counts[true_labels[true_id], found_labels.get(found_id, -1)] += pixels
    return tuple((*pair, pixels) for pair, pixels in sorted(counts.items()))


def _pairs(
    wanted: PanopticMap, found: PanopticMap, areas: Mapping[int, int], overlaps: Mapping[int, int]
) -> Iterator[SegmentPair]:
    """Yield the pairs of a true segment, without crowds, and a predicted one with common pixels."""
    true_segments = {segment.id: segment for segment in wanted.segments if not segment.is_crowd}
    found_segments = {segment.id: segment for segment in found.segments}
    true_pixels: Counter[int] = Counter()
    for pair, pixels in overlaps.items():
        true_pixels[pair // _PAIR] += pixels
    for pair, pixels in overlaps.items():
        true_id, found_id = divmod(pair, _PAIR)
        if true_id in true_segments and found_id in found_segments:
            truth, guess = true_segments[true_id], found_segments[found_id]
            counted = areas[found_id] - overlaps.get(found_id, 0)  # the pair with id 0: pixels on void
            iou = pixels / (truth.area + counted - pixels)
            yield SegmentPair(truth, guess, iou, pixels / true_pixels[true_id], pixels / counted)


def _per_class(counts: Sequence[SegmentMatches], class_map: ClassMap) -> dict[str, PanopticClassResult]:
    """Return the results by class name in the order of the class map; a repeated name is followed by its id."""
    ious: list[list[float]] = [[] for _ in class_map.names]
    for image in counts:
        for label, iou in image.matches:
            ious[label].append(iou)
    fp = Counter(label for image in counts for label in image.false_positives)
    fn = Counter(label for image in counts for label in image.false_negatives)
    return {
        name: _class_result(ious[index], fp[index], fn[index], class_map.is_thing[index])
        for index, name in enumerate(class_map.distinct_names)
    }


def _class_result(ious: Sequence[float], fp: int, fn: int, is_thing: bool) -> PanopticClassResult:
    tp = len(ious)
    if tp + fp + fn == 0:
        return PanopticClassResult(None, None, None, 0, 0, 0, is_thing)
    total, weight = _sum(ious), tp + 0.5 * fp + 0.5 * fn
    return PanopticClassResult(total / weight, total / tp if tp else 0.0, tp / weight, tp, fp, fn, is_thing)


def _nine_numbers(results: Iterable[PanopticClassResult]) -> dict[str, float | None]:
    seen = [result for result in results if result.tp + result.fp + result.fn]
    things, stuff = ([result for result in seen if result.is_thing == is_thing] for is_thing in (True, False))
    columns = ([getattr(r, name) for r in group] for group in (seen, things, stuff) for name in ("PQ", "SQ", "RQ"))
    means = (_sum(values) / len(values) if values else None for values in columns)
    return dict(zip(PANOPTIC_METRIC_NAMES, means, strict=True))


def _sum(values: Iterable[float]) -> float:
    """Sum from left to right, each step rounded; sum() of Python 3.12 compensates rounding errors."""
    return functools.reduce(operator.add, values, 0.0)
