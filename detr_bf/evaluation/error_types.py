"""Errors of a detector: their types and costs, confused classes, calibration of scores, and single images.

Error types are those of :mod:`detr_bf.evaluation.matching`, costs those of TIDE (Bolya et al., ECCV 2020): the AP50 of
the repaired data minus AP50.
hotcoco 1.3 finds the same types, confusion matrix and calibration error in data without crowds. It counts detections on
crowds as errors, and its costs of class, localisation and missed errors are not those of the repaired data.

Shape legend: D detections, O objects without crowds, K classes, B bins.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from detr_bf.common.files import read_json, write_json
from detr_bf.evaluation.matching import (
    BACKGROUND_IOU,
    CROWD,
    HIT,
    IGNORED,
    MATCH_IOU,
    ImageErrors,
    match_objects,
    pairwise_ious,
)
from detr_bf.evaluation.results import ScoredHits, all_classes

ERROR_TYPES = ("class", "localisation", "both", "duplicate", "background", "missed")
MOST_CONFUSED = 100  # classes; data with more have no confusion matrix
_RECALLS = np.linspace(0.0, 1.0, 101)  # as in pycocotools


def scored_hits(images: Iterable[ImageErrors], num_classes: int) -> list[ScoredHits]:
    """Return the detections that count of each class, with the number of its objects."""
    columns = [
        (image.scores[counted], image.matches[counted] >= 0, image.labels[counted], image.object_labels)
        for image in images
        for counted in [image.matches != CROWD]
    ]
    empty = np.empty(0), np.empty(0, dtype=bool), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    scores, hits, labels, objects = (np.concatenate(parts) for parts in zip(empty, *columns, strict=True))
    totals = np.bincount(objects, minlength=num_classes)
    order = np.argsort(labels, kind="stable")
    ends = np.searchsorted(labels[order], np.arange(1, num_classes))
    rows = zip(np.split(scores[order], ends), np.split(hits[order], ends), totals.tolist(), strict=True)
    return [ScoredHits.of(*each) for each in rows]


class _Rows(NamedTuple):
    """Detections of all images, N of them, by image and descending score."""

    kinds: np.ndarray  # (N,) type of error
    labels: np.ndarray  # (N,) int64
    scores: np.ndarray  # (N,) float64

    @classmethod
    def of(cls, images: Sequence[ImageErrors]) -> _Rows:
        kinds = np.array([kind for image in images for kind in image.types], dtype="U12")
        return cls(kinds, _joined([image.labels for image in images]), _joined([image.scores for image in images]))

    def mean_ap(self, totals: np.ndarray) -> float | None:
        """Return the mean AP of the classes with objects; None if no class has any."""
        counted = np.flatnonzero(self.kinds != IGNORED)
        order = counted[np.lexsort((-self.scores[counted], self.labels[counted]))]  # stable, as in pycocotools
        hits, labels = self.kinds[order] == HIT, self.labels[order]
        known = np.flatnonzero(totals)
        places = zip(known, *(np.searchsorted(labels, known, side=side) for side in ("left", "right")), strict=True)
        values = [_sorted_precision(hits[begin:end], int(totals[k])) for k, begin, end in places]
        return float(np.mean(values)) if values else None

    def at(self, kept: np.ndarray) -> _Rows:
        return _Rows(*(column[kept] for column in self))


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


class ErrorCost(NamedTuple):
    """Number of errors of one type, and the AP50 that a detector without them would have more."""

    number: int
    cost: float


def error_costs(images: Sequence[ImageErrors], num_classes: int) -> tuple[float | None, dict[str, ErrorCost]]:
    """Return AP50 and the cost of each error type; None and no costs without objects.

    Each type is repaired alone. The object of a class or localisation error is found by the detection with the highest
    score among those of the type, unless a detection is matched with it already; the others of the type are removed, as
    are both, duplicate and background errors. Missed objects are left out. ``false positives`` removes all errors of
    detections, ``false negatives`` leaves out all objects that no detection is matched with (TIDE, section 2.3).
    """
    rows, becomes = _Rows.of(images), _joined([_becomes(image) for image in images])
    labels = _joined([image.object_labels for image in images])
    missed = np.bincount(labels[_joined([image.missed for image in images]) > 0], minlength=num_classes)
    unmatched = np.bincount(labels[_joined([~_is_found(image) for image in images]) > 0], minlength=num_classes)
    totals = np.bincount(labels, minlength=num_classes)
    base = rows.mean_ap(totals)
    if base is None:
        return None, {}
    names, numbers = np.unique(rows.kinds, return_counts=True)
    counts = dict.fromkeys(ERROR_TYPES, 0) | dict(zip(names.tolist(), numbers.tolist(), strict=True))

    def gain(repaired: _Rows, objects: np.ndarray) -> float:
        after = repaired.mean_ap(objects)
        return (1.0 if after is None else after) - base

    costs = {}
    for kind in ERROR_TYPES[:-1]:
        repairs = rows.kinds == kind
        kept = ~repairs | (becomes >= 0)
        changed = _Rows(np.where(repairs, HIT, rows.kinds), np.where(repairs, becomes, rows.labels), rows.scores)
        costs[kind] = ErrorCost(counts[kind], gain(changed.at(kept), totals))
    costs["missed"] = ErrorCost(int(missed.sum()), gain(rows, totals - missed))
    hits = rows.kinds == HIT
    wrong = int((~hits & (rows.kinds != IGNORED)).sum())
    costs["false positives"] = ErrorCost(wrong, gain(rows.at(hits), totals))
    costs["false negatives"] = ErrorCost(int(unmatched.sum()), gain(rows, totals - unmatched))
    return base, costs


def _is_found(image: ImageErrors) -> np.ndarray:
    """Return for each object whether a detection is matched with it, (O,) bool."""
    found = np.zeros(len(image.object_labels), dtype=bool)
    found[image.matches[image.matches >= 0]] = True
    return found


def _becomes(image: ImageErrors) -> np.ndarray:
    """Return for each detection the class of the object that it finds when it is repaired, else -1: (D,) int64."""
    becomes = np.full(len(image.types), -1, dtype=np.int64)
    found, repaired = _is_found(image), set()
    for at, (kind, cause) in enumerate(zip(image.types, image.causes.tolist(), strict=True)):
        if kind in ("class", "localisation") and not found[cause] and (kind, cause) not in repaired:
            repaired.add((kind, cause))
            becomes[at] = image.object_labels[cause]
    return becomes


def average_precision(detections: Sequence[tuple[float, bool]], num_objects: int) -> float:
    """Return COCO's AP of one class at one IoU: mean interpolated precision at 101 recalls.

    Args:
        detections: score, and whether it is a hit.
        num_objects: at least 1.
    """
    scores = np.array([score for score, _ in detections], dtype=np.float64)
    hits = np.array([hit for _, hit in detections], dtype=bool)
    return _sorted_precision(hits[np.argsort(-scores, kind="stable")], num_objects)


def _sorted_precision(hits: np.ndarray, num_objects: int) -> float:
    """Return :func:`average_precision` of detections (D,) bool by descending score."""
    found = np.cumsum(hits)
    precision = found / (np.arange(len(hits)) + 1)
    best_from = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
    return float(best_from[np.searchsorted(found / num_objects, _RECALLS, side="left")].mean())


def confusion_matrix(images: Iterable[ImageErrors], num_classes: int, threshold: float) -> np.ndarray:
    """Return counts (K + 1, K + 1) of true class x detected class; the last row and column are background.

    Detections with a score of at least ``threshold`` are matched with free objects of any class, highest score first,
    each with the object of the highest IoU from 0.5.
    """
    counts = np.zeros((num_classes + 1, num_classes + 1), dtype=np.int64)
    for image in images:
        counted = (image.scores >= threshold) & (image.matches != CROWD)
        matches = match_objects(image.ious[counted])
        truth = np.append(image.object_labels, num_classes)[matches]  # the last one for no object
        np.add.at(counts, (truth, image.labels[counted]), 1)
        free = np.ones(len(image.object_labels), dtype=bool)
        free[matches[matches >= 0]] = False
        np.add.at(counts[:, num_classes], image.object_labels[free], 1)
    return counts


class Calibration(NamedTuple):
    """Scores against the share that is right, in B bins of equal width; NaN in empty bins."""

    counts: np.ndarray  # (B,) int64
    scores: np.ndarray  # (B,) mean score
    precision: np.ndarray  # (B,) share of hits, or accuracy
    error: float  # mean of |score - precision| over all: ECE, of detections D-ECE; NaN if there are none

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, None for NaN."""
        return {
            "error": _plain(self.error),
            "counts": self.counts.tolist(),
            "scores": [_plain(value) for value in self.scores],
            "precision": [_plain(value) for value in self.precision],
        }


def calibration(found: ScoredHits, bins: int = 10) -> Calibration:
    """Return how far scores are from probabilities of a hit.

    The error is the detection expected calibration error over scores alone (Kueppers et al., CVPR Workshops 2020).
    """
    scores, hits = found.scores, found.hits
    which = np.minimum((scores * bins).astype(np.int64), bins - 1)
    counts = np.bincount(which, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean_scores = np.bincount(which, scores, bins) / counts
        precision = np.bincount(which, hits, bins) / counts
    used = counts > 0
    gaps = np.abs(mean_scores - precision)[used] * counts[used]
    return Calibration(counts, mean_scores, precision, float(gaps.sum() / len(scores)) if len(scores) else float("nan"))


class ObjectGroup(NamedTuple):
    """Result for the objects with one property."""

    name: str
    objects: int
    ap50: float | None  # None without objects
    found: float | None  # recall at the threshold


# Property -> names of its groups; the group of a value is the number of bounds below it.
_GROUPS: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "size": (("small: to 32² pixels", "medium: to 96² pixels", "large"), (32.0**2, 96.0**2)),
    "shape": (("tall: width / height to 1/2", "between", "wide: width / height above 2"), (0.5, 2.0)),
    "neighbours": (("no other object", "one other object", "two or more"), (0.5, 1.5)),
    "border": (("at the border of the image: to 1 pixel", "inside"), (1.0,)),
}


def object_groups(
    images: Sequence[ImageErrors], sizes: Mapping[int, tuple[int, int] | None], num_classes: int, threshold: float
) -> dict[str, list[ObjectGroup]]:
    """Return AP50 and recall by size, shape, neighbours and distance from the border.

    Size and shape are those of boxes. Neighbours are other objects with an IoU of at least 0.1. As for COCO's sizes, a
    detection that is matched with an object of another group is ignored, and so is an error that has the property of
    another group; here matches stay those of all objects together.

    Args:
        images: of :func:`image_errors`.
        sizes: image id -> height and width in pixels; an image without them is not counted for the border.
        num_classes: K.
        threshold: least score of a detection for the recall.
    """
    every = _Rows.of(images)
    object_labels = _joined([image.object_labels for image in images])
    found: dict[str, list[ObjectGroup]] = {}
    for name, (labels, bounds) in _GROUPS.items():
        values = [_properties(name, image, sizes.get(image.image_id)) for image in images]
        objects = _joined([of_objects for of_objects, _ in values])
        detections = _joined(
            [
                np.where(image.matches >= 0, np.append(of_objects, np.nan)[np.maximum(image.matches, -1)], own)
                for image, (of_objects, own) in zip(images, values, strict=True)
            ]
        )
        of_object, of_detection = np.searchsorted(bounds, objects), np.searchsorted(bounds, detections)
        known, counted = ~np.isnan(objects), ~np.isnan(detections)
        found[name] = []
        for group, label in enumerate(labels):
            totals = np.bincount(object_labels[known & (of_object == group)], minlength=num_classes)
            rows = every.at(counted & (of_detection == group))
            hits = int(((rows.kinds == HIT) & (rows.scores >= threshold)).sum())
            number = int(totals.sum())
            found[name].append(ObjectGroup(label, number, rows.mean_ap(totals), hits / number if number else None))
    return found


def _properties(name: str, image: ImageErrors, size: tuple[int, int] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the value of a property for objects (O,) and detections (D,); NaN if it is not known."""
    if name == "neighbours":
        boxes = image.object_boxes
        xywh = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)
        others = (pairwise_ious(xywh, xywh, np.zeros(len(boxes), dtype=bool)) >= BACKGROUND_IOU).sum(1) - 1
        near = (image.ious >= BACKGROUND_IOU).sum(1) - 1
        return others.astype(np.float64), np.maximum(near, 0).astype(np.float64)
    return _box_property(name, image.object_boxes, size), _box_property(name, image.boxes, size)


def _box_property(name: str, boxes: np.ndarray, size: tuple[int, int] | None) -> np.ndarray:
    width, height = (boxes[:, 2:] - boxes[:, :2]).T
    if name == "size":
        area: np.ndarray = width * height
        return area
    if name == "shape":
        return np.divide(width, height, out=np.full(len(boxes), np.inf), where=height > 0)
    if size is None or 0 in size:
        return np.full(len(boxes), np.nan)
    return np.minimum(boxes[:, :2].min(1), np.minimum(size[1] - boxes[:, 2], size[0] - boxes[:, 3]))


def worst_images(images: Iterable[ImageErrors], threshold: float, most: int) -> list[ImageErrors]:
    """Return up to ``most`` images with the most errors and missed objects at a threshold, only those with any.

    Of equal numbers the image with the higher scores of errors is first.
    """
    ranked = []
    for image in images:
        kept = image.above(threshold)
        wrong = [score for score, kind in zip(kept.scores, kept.types, strict=True) if kind not in (HIT, IGNORED)]
        ranked.append(((len(wrong) + kept.missed.sum(), sum(wrong), -image.image_id), kept))
    ranked.sort(key=lambda each: each[0], reverse=True)
    return [image for (errors, *_), image in ranked[:most] if errors]


class LabelSuspect(NamedTuple):
    """A place where the annotation may be wrong."""

    image_id: int
    box: tuple[float, float, float, float]  # x0, y0, x1, y1 in pixels
    label: int | None  # class of the detection; None where no detection matches the object
    score: float | None  # of the detection
    annotated: int | None  # class of the object; None where no object is annotated


def never_found(images: Iterable[ImageErrors]) -> list[tuple[int, int]]:
    """Return the objects that no detection of any class and score overlaps with an IoU of at least 0.5.

    An object is given by the id of its image and its number among the objects of the image, from 0.
    """
    found = []
    for image in images:
        overlap = image.ious.max(0) if len(image.ious) else np.zeros(len(image.object_labels))
        found += [(image.image_id, int(at)) for at in np.flatnonzero(overlap < MATCH_IOU)]
    return found


def update_never_found(path: Path, images: Sequence[ImageErrors]) -> set[tuple[int, int]]:
    """Return the objects that neither these detections nor those of earlier calls have found; write them to ``path``.

    The file is atomically replaced. One that is damaged, or of other annotations, is ignored.
    """
    missing, digest = set(never_found(images)), hashlib.sha256()
    for image in images:
        digest.update(f"{image.image_id} {image.object_labels.tolist()} {image.object_boxes.tolist()}".encode())
    try:
        before = read_json(path)
        if before["annotations"] == digest.hexdigest():
            missing &= {(int(image_id), int(at)) for image_id, at in before["never_found"]}
    except (OSError, ValueError, KeyError, TypeError, OverflowError):  # the first evaluation of a run
        pass
    write_json(path, {"annotations": digest.hexdigest(), "never_found": sorted(missing)})
    return missing


def label_suspects(
    images: Sequence[ImageErrors], most: int, missing: Collection[tuple[int, int]]
) -> list[LabelSuspect]:
    """Return places where annotations are most likely wrong, at most ``most`` of each kind.

    These are the most confident detections where no object is annotated (background errors) or one of another class
    (class errors), and the largest objects of ``missing``, see :func:`never_found`.
    """
    rows, superfluous = _Rows.of(images), []
    ends = np.cumsum([0, *(len(image.types) for image in images)])
    suspects: list[LabelSuspect] = []
    for kind in ("background", "class"):
        own = np.flatnonzero(rows.kinds == kind)
        for row in own[np.argsort(-rows.scores[own], kind="stable")][:most].tolist():
            number = int(np.searchsorted(ends, row, side="right")) - 1
            image, at = images[number], row - ends[number]
            annotated = int(image.object_labels[image.causes[at]]) if kind == "class" else None
            detected = int(image.labels[at]), float(image.scores[at])
            suspects.append(LabelSuspect(image.image_id, tuple(image.boxes[at].tolist()), *detected, annotated))
    by_id = {image.image_id: image for image in images}
    for image_id, at in sorted(missing):
        if image_id in by_id:
            box, label = by_id[image_id].object_boxes[at], int(by_id[image_id].object_labels[at])
            if (box[2:] > box[:2]).all():
                superfluous.append(LabelSuspect(image_id, tuple(box.tolist()), None, None, label))
    superfluous.sort(key=lambda each: -(each.box[2] - each.box[0]) * (each.box[3] - each.box[1]))
    return [*suspects, *superfluous[:most]]


def error_document(
    images: Sequence[ImageErrors],
    sizes: Mapping[int, tuple[int, int] | None],
    precision: np.ndarray,
    class_names: Sequence[str],
    threshold: float,
    most: int,
    missing: Collection[tuple[int, int]],
    *,
    masks: Sequence[ImageErrors] | None = None,
    panoptic: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return everything about the errors of a detector as plain values for JSON.

    Args:
        images: of :func:`image_errors`.
        sizes: image id -> height and width in pixels.
        precision: (T, R, K), COCO's precision at IoU 0.50, 0.55, ... and recall 0, 0.01, ..., 1; -1 without objects.
        class_names: K names, all different.
        threshold: least score of a detection for the confusion matrix, the recall of groups and the worst images.
        most: limit for the images and for each kind of suspects.
        missing: see :func:`label_suspects`.
        masks: the same images by the IoU of masks, None without masks.
        panoptic: of :func:`~detr_bf.evaluation.panoptic_errors.panoptic_document`, None without panoptic maps.
    """
    num_classes = len(class_names)
    with_objects = precision.reshape(-1, num_classes).min(0) > -1
    known = precision[:, :, with_objects]
    by_iou = known.mean(2) if known.shape[2] else np.empty((0, precision.shape[1]))
    return {
        "images": len(images),
        "threshold": threshold,
        **_matched_part(images, num_classes),
        "confusion": confusion_matrix(images, num_classes, threshold).tolist()
        if num_classes <= MOST_CONFUSED
        else None,
        "classes": list(class_names),
        "groups": {
            name: [group._asdict() for group in groups]
            for name, groups in object_groups(images, sizes, num_classes, threshold).items()
        },
        "precision_by_iou": {
            f"{0.5 + 0.05 * at:.2f}": [round(float(v), 4) for v in row] for at, row in enumerate(by_iou)
        },
        "precision_by_class": {
            name: [round(float(value), 4) for value in precision[0, :, k]]
            for k, name in enumerate(class_names)
            if with_objects[k]
        },
        "worst": [_worst_entry(image) for image in worst_images(images, threshold, most)],
        "suspects": [
            {**suspect._asdict(), "box": list(suspect.box)} for suspect in label_suspects(images, most, missing)
        ],
        "masks": None if masks is None else _matched_part(masks, num_classes),
        "panoptic": panoptic,
    }


def _matched_part(images: Sequence[ImageErrors], num_classes: int) -> dict[str, Any]:
    """Return what exists for boxes and for masks: AP50, costs, calibration, and precision and recall by threshold."""
    ap50, costs = error_costs(images, num_classes)
    scored = all_classes(scored_hits(images, num_classes))
    best = scored.best()
    return {
        "ap50": ap50,
        "costs": {kind: cost._asdict() for kind, cost in costs.items()},
        "calibration": calibration(scored).to_dict(),
        "best": best and asdict(best),
        "thresholds": [asdict(scored.at(number / 100)) for number in range(101)],
    }


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _worst_entry(image: ImageErrors) -> dict[str, Any]:
    counts = Counter(kind for kind in image.types if kind not in (HIT, IGNORED))
    return {"image_id": image.image_id, "missed": int(image.missed.sum()), "errors": dict(counts)}
