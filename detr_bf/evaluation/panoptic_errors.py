"""Causes of lost panoptic quality: why segments are wrong or missed, which classes are confused, and single images.

IoU is that of panoptic quality: pixels on void do not count. A predicted segment that matches nothing and lies on void
or on the crowd of its class counts nowhere (:mod:`detr_bf.evaluation.panoptic`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from detr_bf.common.structures import Segment
from detr_bf.evaluation.error_types import MOST_CONFUSED
from detr_bf.evaluation.matching import BACKGROUND_IOU, MATCH_IOU
from detr_bf.evaluation.results import PanopticSummary

PANOPTIC_CAUSES = ("class", "thing or stuff", "merged", "split", "outline", "both", "background")  # in this order
MATCHES = "matches"  # of right segments: their IoU is below 1


class SegmentPair(NamedTuple):
    """True and predicted segment with common pixels."""

    truth: Segment
    found: Segment
    iou: float
    of_truth: float  # share of the true segment that both have in common
    of_found: float  # share of the predicted segment without its pixels on void


class SegmentError(NamedTuple):
    """One wrong or missed segment."""

    segment: int  # id in its map
    label: int
    cause: str  # one of PANOPTIC_CAUSES
    other: int | None = None  # class of the other segment, where the class is the cause


class SegmentMatches(NamedTuple):
    """Matches and errors of one image."""

    matches: tuple[tuple[int, float], ...]  # class index and IoU, by ground-truth id, then predicted id
    wrong: tuple[SegmentError, ...]  # predicted segments without match, in the order of the map
    missed: tuple[SegmentError, ...]  # true segments without match
    ignored: tuple[int, ...]  # ids of predicted segments that count nowhere
    pixels: tuple[tuple[int, int, int], ...] = ()  # true class, predicted class (-1: none), number of their pixels

    @property
    def false_positives(self) -> tuple[int, ...]:
        """Return the class of each wrong segment."""
        return tuple(error.label for error in self.wrong)

    @property
    def false_negatives(self) -> tuple[int, ...]:
        """Return the class of each missed segment."""
        return tuple(error.label for error in self.missed)

    @property
    def lost(self) -> float:
        """Return the sum of 1 - IoU over matches, 0.5 for each wrong and 0.5 for each missed segment."""
        return sum(1 - iou for _, iou in self.matches) + 0.5 * (len(self.wrong) + len(self.missed))


def segment_errors(
    pairs: Sequence[SegmentPair], wrong: Sequence[Segment], missed: Sequence[Segment], is_thing: Sequence[bool]
) -> tuple[tuple[SegmentError, ...], tuple[SegmentError, ...]]:
    """Return the cause of each wrong and of each missed segment, the first of these that fits.

    - ``class``: IoU above 0.5 with a segment of another class; ``thing or stuff``: that one is a thing and the other is
      stuff. Such a pair is one wrong and one missed segment.
    - ``merged``: a predicted segment covers more than half of each of two or more segments of its class.
    - ``split``: two or more predicted segments lie with more than half of their pixels on one segment of their class.
    - ``outline``: IoU of 0.1 or more with a segment of the class.
    - ``both``: IoU of 0.1 or more with a segment of another class.
    - ``background``: none of these; where a segment is wrong, none is annotated, and where it is missed, none is found.

    Args:
        pairs: without crowds and without predicted segments that count nowhere.
        wrong: predicted segments without match that count.
        missed: true segments without match, without crowds.
        is_thing: for each class.
    """
    unmatched_found, unmatched_truths = {segment.id for segment in wrong}, {segment.id for segment in missed}
    class_of_truth: dict[int, int] = {}  # predicted id -> class of the true segment that it is confused with
    class_of_found: dict[int, int] = {}
    for truth, found, iou, *_ in pairs:
        if iou > MATCH_IOU and found.id in unmatched_found and truth.id in unmatched_truths:
            unmatched_found.remove(found.id)
            unmatched_truths.remove(truth.id)
            class_of_truth[found.id], class_of_found[truth.id] = truth.label, found.label
    own = [pair for pair in pairs if pair.truth.label == pair.found.label]
    covered = Counter(pair.found.id for pair in own if pair.of_truth > 0.5)
    pieces = Counter(pair.truth.id for pair in own if pair.of_found > 0.5)

    def error(segment: Segment, confused: Mapping[int, int], near: Sequence[SegmentPair]) -> SegmentError:
        if segment.id in confused:
            other = confused[segment.id]
            same_kind = is_thing[other] == is_thing[segment.label]
            return SegmentError(segment.id, segment.label, "class" if same_kind else "thing or stuff", other)
        same = [pair for pair in near if pair.truth.label == pair.found.label]
        if any(pair.of_truth > 0.5 and covered[pair.found.id] > 1 for pair in same):
            cause = "merged"
        elif any(pair.of_found > 0.5 and pieces[pair.truth.id] > 1 for pair in same):
            cause = "split"
        elif any(pair.iou >= BACKGROUND_IOU for pair in same):
            cause = "outline"
        else:
            cause = "both" if any(pair.iou >= BACKGROUND_IOU for pair in near) else "background"
        return SegmentError(segment.id, segment.label, cause)

    return (
        tuple(error(each, class_of_truth, [pair for pair in pairs if pair.found.id == each.id]) for each in wrong),
        tuple(error(each, class_of_found, [pair for pair in pairs if pair.truth.id == each.id]) for each in missed),
    )


def segment_confusion(images: Sequence[SegmentMatches], num_classes: int) -> np.ndarray:
    """Return counts (K + 1, K + 1) of true class x predicted class at IoU above 0.5; the last of each is background.

    A row adds up to the matched and missed segments of its class, a column to the matched and wrong ones.
    """
    counts = np.zeros((num_classes + 1, num_classes + 1), dtype=np.int64)
    for image in images:
        for label, _ in image.matches:
            counts[label, label] += 1
        for missed in image.missed:
            counts[missed.label, num_classes if missed.other is None else missed.other] += 1
        for wrong in image.wrong:
            counts[num_classes, wrong.label] += wrong.other is None  # the others are counted as missed
    return counts


def worst_maps(images: Mapping[int, SegmentMatches], most: int) -> list[int]:
    """Return the ids of up to ``most`` images with the highest loss, only those with any; of equal ones the lowest id.

    See :attr:`SegmentMatches.lost`.
    """
    ranked = sorted(images, key=lambda image_id: (-images[image_id].lost, image_id))
    return [image_id for image_id in ranked[:most] if images[image_id].lost > 0]


def _causes_by_class(images: Iterable[SegmentMatches], num_classes: int) -> list[dict[str, dict[str, Any]]]:
    """Return for each class the number of wrong and missed segments by cause, and the lost share of its quality."""
    ious: list[list[float]] = [[] for _ in range(num_classes)]
    wrong: list[Counter[str]] = [Counter() for _ in range(num_classes)]
    missed: list[Counter[str]] = [Counter() for _ in range(num_classes)]
    for image in images:
        for label, iou in image.matches:
            ious[label].append(iou)
        for counts, errors in ((wrong, image.wrong), (missed, image.missed)):
            for error in errors:
                counts[error.label][error.cause] += 1
    found = []
    for matched, false, absent in zip(ious, wrong, missed, strict=True):
        segments = max(0.5, len(matched) + 0.5 * false.total() + 0.5 * absent.total())
        causes: dict[str, dict[str, Any]] = {
            MATCHES: {"wrong": 0, "missed": 0, "lost": sum(1 - iou for iou in matched) / segments}
        }
        for cause in PANOPTIC_CAUSES:
            lost = 0.5 * (false[cause] + absent[cause]) / segments
            causes[cause] = {"wrong": false[cause], "missed": absent[cause], "lost": lost}
        found.append(causes)
    return found


def panoptic_document(images: Mapping[int, SegmentMatches], summary: PanopticSummary, most: int) -> dict[str, Any]:
    """Return everything about the errors of panoptic maps as plain values for JSON.

    The quality of a class is 1 minus what its causes have lost: 1 - IoU of each match and 0.5 for each wrong and each
    missed segment, divided by the number of segments, TP + FP / 2 + FN / 2. Means are those over classes.

    Args:
        images: by image id.
        summary: of the same images.
        most: limit for the worst images.
    """
    causes_by_class = _causes_by_class(images.values(), len(summary.per_class))
    per_class: dict[str, dict[str, Any]] = {
        name: {"pq": result.PQ, "is_thing": result.is_thing, "causes": causes}
        for (name, result), causes in zip(summary.per_class.items(), causes_by_class, strict=True)
    }
    seen = [entry["causes"] for entry in per_class.values() if entry["pq"] is not None]
    means = {
        cause: {
            "wrong": sum(causes[cause]["wrong"] for causes in seen),
            "missed": sum(causes[cause]["missed"] for causes in seen),
            "lost": float(np.mean([causes[cause]["lost"] for causes in seen])) if seen else 0.0,
        }
        for cause in (MATCHES, *PANOPTIC_CAUSES)
    }
    few = len(per_class) <= MOST_CONFUSED
    return {
        "pq": summary.PQ,
        "classes": list(per_class),
        "causes": means,
        "per_class": per_class,
        "confusion": segment_confusion(list(images.values()), len(per_class)).tolist() if few else None,
        "worst": [
            {
                "image_id": image_id,
                "lost": images[image_id].lost,
                "wrong": dict(Counter(error.cause for error in images[image_id].wrong)),
                "missed": dict(Counter(error.cause for error in images[image_id].missed)),
            }
            for image_id in worst_maps(images, most)
        ],
    }
