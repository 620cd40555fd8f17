"""Panoptic quality, one image at a time.

Definition: Kirillov et al. 2019, "Panoptic Segmentation", section 4 (arXiv 1801.00868). Void, crowds, areas and the
order of the sums are those of COCO's panopticapi in one process with ascending image ids; the results are
bit-identical.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from detr_bf.data.annotation_values import MAX_ID
from detr_bf.data.images import MAX_PIXELS
from detr_bf.errors import InputError
from detr_bf.evaluation.panoptic_file import PanopticFile, areas_of, pixels_of_values
from detr_bf.evaluation.results import PANOPTIC_METRIC_NAMES, PanopticClassResult, PanopticSummary
from detr_bf.structures import ClassMap, PanopticMap, Segment

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
        self._counts: dict[int, _Counts] = {}

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
            self._counts[found.image_id] = _compare(truth, found, areas_of(found, self.class_map.num_classes))

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
        per_class = _per_class([self._counts[image_id] for image_id in sorted(self._counts)], self.class_map)
        return PanopticSummary(**_nine_numbers(per_class.values()), per_class=per_class, num_images=len(self._counts))


class _Counts(NamedTuple):
    """Matches and errors of one image, as class indices, one entry for each segment."""

    matches: tuple[tuple[int, float], ...]  # class index and IoU, by ground-truth id, then predicted id
    false_positives: tuple[int, ...]
    false_negatives: tuple[int, ...]


def _compare(wanted: PanopticMap, found: PanopticMap, areas: Mapping[int, int]) -> _Counts:
    """Compare ground truth and prediction of one image; ``areas`` are the pixels of the predicted segments."""
    overlaps = pixels_of_values(wanted.ids.numpy().astype(np.int64) * _PAIR + found.ids.cpu().numpy())
    truths = wanted.segments
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


def _per_class(counts: Sequence[_Counts], class_map: ClassMap) -> dict[str, PanopticClassResult]:
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
