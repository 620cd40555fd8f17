"""Panoptic quality, one image at a time, and the files that go with it.

Definition: Kirillov et al. 2019, "Panoptic Segmentation", section 4 (arXiv 1801.00868). Void, crowds, areas and the
order of the sums follow COCO's panopticapi run in one process over ascending image ids, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from detr_bf.errors import InputError
from detr_bf.files import write_json
from detr_bf.panoptic_png import MAX_ID, read_ids, write_ids
from detr_bf.structures import ClassMap, PanopticMap, Segment

_METRIC_NAMES = ("PQ", "SQ", "RQ", "PQ_th", "SQ_th", "RQ_th", "PQ_st", "SQ_st", "RQ_st")
_PAIR = MAX_ID + 1  # a pair of ids as one number: id of the truth * _PAIR + id of the prediction


@dataclass(frozen=True)
class PanopticClassResult:
    """One class; the three numbers are fractions, None where it has neither ground truth nor predictions."""

    PQ: float | None
    SQ: float | None
    RQ: float | None
    tp: int  # segments
    fp: int
    fn: int
    is_thing: bool


@dataclass(frozen=True)
class PanopticSummary:
    """Panoptic, segmentation and recognition quality: fractions, means over classes, None where there is no class.

    A class without ground truth and predictions enters no mean.
    """

    PQ: float | None
    SQ: float | None
    RQ: float | None
    PQ_th: float | None  # things
    SQ_th: float | None
    RQ_th: float | None
    PQ_st: float | None  # stuff
    SQ_st: float | None
    RQ_st: float | None
    per_class: Mapping[str, PanopticClassResult]  # by class name, in the order of the class map
    num_images: int

    @property
    def metrics(self) -> dict[str, float | None]:
        """The nine numbers by name."""
        return {name: getattr(self, name) for name in _METRIC_NAMES}

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries and numbers, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> PanopticSummary:
        """Inverse of :meth:`to_dict`."""
        per_class = {name: PanopticClassResult(**result) for name, result in state["per_class"].items()}
        return cls(**{**state, "per_class": per_class})


class PanopticEvaluator:
    """Compares the panoptic maps of a split, every image once, with its ground truth; the maps are not kept.

    The images of the split are those that have an annotation. Predicted areas are counted in the maps, those of the
    ground truth are the annotation file's. Ids of a ground-truth PNG that its annotation does not list match nothing
    and are not void.

    Args:
        annotations: COCO panoptic JSON with ``annotations`` and ``categories``.
        folder: where its PNG files lie.
        class_map: the model's classes; ``Segment.label`` indexes into it.

    Raises:
        InputError: a path is missing, the file is not a COCO panoptic JSON, its categories contradict ``class_map``.
    """

    def __init__(self, annotations: str | Path, folder: str | Path, class_map: ClassMap) -> None:
        self.class_map = class_map
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise InputError(f"there is no folder {folder}; expected the PNG files of {annotations} there")
        self._truths = _read_truths(Path(annotations), class_map)
        self._counts: dict[int, _Counts] = {}

    def update(self, maps: Sequence[PanopticMap]) -> None:
        """Add images; an image without a segment counts and must be given too.

        Raises:
            InputError: an image has no annotation or was given before, its size is not that of the ground truth, its
                ids and segments disagree, a label is outside the class map, a ground-truth PNG cannot be read.
        """
        for found in maps:
            truth = self._truths.get(found.image_id)
            if truth is None:
                raise InputError(
                    f"a panoptic map for image id {found.image_id}, which has no annotation in the annotation file: "
                    "evaluate with the annotation file the images were read from"
                )
            if found.image_id in self._counts:
                raise InputError(
                    f"image id {found.image_id} was given twice: every image counts once. "
                    "Join the evaluators of several processes with merge"
                )
            wanted = read_ids(self._folder / truth.file_name).numpy()
            if wanted.shape != tuple(found.ids.shape):
                raise InputError(
                    f"the panoptic map of image id {found.image_id} is of shape {tuple(found.ids.shape)}, its ground "
                    f"truth {truth.file_name} of shape {wanted.shape}: make maps of the file's height x width"
                )
            areas = _areas(found, self.class_map.num_classes)
            self._counts[found.image_id] = _compare(wanted, truth.segments, found, areas)

    def merge(self, other: PanopticEvaluator) -> None:
        """Add the images that ``other`` has seen; of an image that both have seen, what is here stays.

        However a split was divided and in whatever order it is merged, the numbers are bit for bit the same.

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
        """The numbers for all images of the file; with ``partial``, for those seen so far only.

        Raises:
            InputError: images are missing and ``partial`` is False.
        """
        missing = sorted(self._truths.keys() - self._counts.keys())
        if missing and not partial:
            raise InputError(
                f"{len(missing)} of {len(self._truths)} images were not evaluated, the first of image id {missing[0]}: "
                "run them all, or ask for summarize(partial=True)"
            )
        per_class = _per_class([self._counts[image_id] for image_id in sorted(self._counts)], self.class_map)
        return PanopticSummary(**_nine_numbers(per_class.values()), per_class=per_class, num_images=len(self._counts))


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
    annotations = []
    written: dict[str, int] = {}
    for found in maps:
        name = _png_name(found.image_id, file_names)
        if name in written:
            raise InputError(
                f"image ids {written[name]} and {found.image_id} would both be written to {name}: "
                "give every image once, with a name of its own"
            )
        written[name] = found.image_id
        areas = _areas(found, class_map.num_classes)
        write_ids(Path(folder) / name, found.ids)
        segments = [_segment_info(found.ids.cpu().numpy(), s, areas[s.id], class_map) for s in found.segments]
        annotations.append({"image_id": found.image_id, "file_name": name, "segments_info": segments})
    classes = zip(class_map.category_ids, class_map.names, class_map.is_thing, strict=True)
    categories = [{"id": i, "name": name, "isthing": int(is_thing)} for i, name, is_thing in classes]
    write_json(json_path, {"annotations": annotations, "categories": categories})


class _Truth(NamedTuple):
    """Ground truth of one image."""

    file_name: str  # of the PNG
    segments: tuple[Segment, ...]


class _Counts(NamedTuple):
    """What one image contributes; class indices, one entry for every segment."""

    matches: tuple[tuple[int, float], ...]  # class index and IoU, by ascending id of the truth, then of the prediction
    false_positives: tuple[int, ...]
    false_negatives: tuple[int, ...]


def _compare(wanted: np.ndarray, truths: Sequence[Segment], found: PanopticMap, areas: Mapping[int, int]) -> _Counts:
    """wanted (H, W) ids of the ground truth, areas in pixels of the predicted segments."""
    overlaps = _pixels_of_values(wanted.astype(np.int64) * _PAIR + found.ids.cpu().numpy())
    true_segments = {segment.id: segment for segment in truths}
    found_segments = {segment.id: segment for segment in found.segments}
    matches = []
    matched_truths, matched_found = set(), set()
    for pair, pixels in overlaps.items():
        true_id, found_id = divmod(pair, _PAIR)
        truth, guess = true_segments.get(true_id), found_segments.get(found_id)
        if truth is None or guess is None or truth.is_crowd or truth.label != guess.label:
            continue
        on_void = overlaps.get(found_id, 0)  # the pair with id 0
        iou = pixels / (truth.area + areas[found_id] - pixels - on_void)
        if iou > 0.5:
            matches.append((truth.label, iou))
            matched_truths.add(true_id)
            matched_found.add(found_id)

    crowds = {segment.label: segment.id for segment in truths if segment.is_crowd}  # the last one of a class

    def is_ignored(guess: Segment) -> bool:
        pixels = overlaps.get(guess.id, 0)
        if guess.label in crowds:
            pixels += overlaps.get(crowds[guess.label] * _PAIR + guess.id, 0)
        return pixels / areas[guess.id] > 0.5

    return _Counts(
        tuple(matches),
        tuple(s.label for s in found.segments if s.id not in matched_found and not is_ignored(s)),
        tuple(s.label for s in truths if s.id not in matched_truths and not s.is_crowd),
    )


def _pixels_of_values(values: np.ndarray) -> dict[int, int]:
    """How often each value of an (H, W) integer array occurs, by ascending value.

    Sorts the first pixels of runs along the rows, not all pixels as np.unique would: ten times faster on maps.
    """
    flat = values.ravel()
    starts = np.flatnonzero(np.concatenate([[True], flat[1:] != flat[:-1]]))
    distinct, place = np.unique(flat[starts], return_inverse=True)
    pixels = np.bincount(place, weights=np.diff(starts, append=flat.size))
    return dict(zip(distinct.tolist(), pixels.astype(np.int64).tolist(), strict=True))


def _areas(found: PanopticMap, num_classes: int) -> dict[int, int]:
    """Pixels of each segment, counted in the map; InputError where the map, its segments and the classes disagree."""
    where = f"the panoptic map of image id {found.image_id}"
    areas = _pixels_of_values(found.ids.cpu().numpy())
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


def _per_class(counts: Sequence[_Counts], class_map: ClassMap) -> dict[str, PanopticClassResult]:
    """In the order of the class map; a name that several categories share is followed by its id."""
    ious: list[list[float]] = [[] for _ in class_map.names]
    for image in counts:
        for label, iou in image.matches:
            ious[label].append(iou)
    fp = Counter(label for image in counts for label in image.false_positives)
    fn = Counter(label for image in counts for label in image.false_negatives)
    name_count = Counter(class_map.names)
    per_class = {}
    for index, name in enumerate(class_map.names):
        key = name if name_count[name] == 1 else f"{name} ({class_map.category_ids[index]})"
        per_class[key] = _class_result(ious[index], fp[index], fn[index], class_map.is_thing[index])
    return per_class


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
    return dict(zip(_METRIC_NAMES, means, strict=True))


def _sum(values: Iterable[float]) -> float:
    """From left to right, each step rounded: the builtin of Python 3.12 compensates and would differ."""
    return functools.reduce(operator.add, values, 0.0)


def _read_truths(path: Path, class_map: ClassMap) -> dict[int, _Truth]:
    """Image id -> ground truth; InputError when the file is missing, is not COCO panoptic, contradicts the classes."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"annotation file {path} cannot be read ({error}); expected a COCO panoptic JSON") from error
    _check_categories(path, _value(str(path), content, "categories", list), class_map)
    truths: dict[int, _Truth] = {}
    for number, annotation in enumerate(_value(str(path), content, "annotations", list)):
        where = f"{path}: annotations[{number}]"
        image_id = _value(where, annotation, "image_id", int)
        if image_id in truths:
            raise InputError(f"{where} is the second one of image id {image_id}, expected one with all its segments")
        entries = _value(where, annotation, "segments_info", list)
        segments = tuple(_segment(f"{where}: segments_info[{n}]", s, class_map) for n, s in enumerate(entries))
        if len({segment.id for segment in segments}) < len(segments):
            raise InputError(f"{where}: segment ids {[s.id for s in segments]} of segments_info, expected each once")
        truths[image_id] = _Truth(_value(where, annotation, "file_name", str), segments)
    if not truths:
        raise InputError(f"{path} has no annotations, expected one for each image")
    return truths


def _segment(where: str, entry: object, class_map: ClassMap) -> Segment:
    segment_id, category_id, area = (_value(where, entry, key, int) for key in ("id", "category_id", "area"))
    if not (1 <= segment_id <= MAX_ID and area >= 1):
        raise InputError(f"{where} has id {segment_id} and area {area}, expected 1 to {MAX_ID} and 1 pixel or more")
    if category_id not in class_map.index:
        known = sorted(class_map.category_ids)
        raise InputError(f"{where} has category id {category_id}, which the model does not know; it knows {known}")
    return Segment(segment_id, class_map.index[category_id], area, _value(where, entry, "iscrowd", int) == 1)


def _check_categories(path: Path, categories: Sequence[dict[str, Any]], class_map: ClassMap) -> None:
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
        found = (", ".join(entry) or "nothing") if isinstance(entry, dict) else type(entry).__name__
        raise InputError(f"{where} has no {key}, it has {found}; expected a COCO panoptic JSON")
    value = entry[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        expected = {int: "a whole number", str: "a string", list: "a list"}[kind]
        raise InputError(f"{where}: {key} is {value!r}, expected {expected}")
    return value


def _png_name(image_id: int, file_names: Mapping[int, str]) -> str:
    if image_id not in file_names:
        raise InputError(f"image id {image_id} has no file name to write its panoptic PNG to: name every image")
    name = PurePosixPath(file_names[image_id])
    if not name.name or name.is_absolute() or ".." in name.parts:
        raise InputError(f"image id {image_id} has the file name '{name}', expected a relative one without '..'")
    return str(name.with_suffix(".png"))


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
