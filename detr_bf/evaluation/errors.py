"""Errors of a detector: their types and costs, confused classes, calibration of scores, and single images.

Detections are matched with the objects of their class as in COCO's evaluation at IoU 0.5: highest score first, each
with the free object of the highest IoU. A detection that is matched with a crowd region instead counts nowhere.

Error types and costs are those of TIDE (Bolya et al., ECCV 2020); a cost is the AP50 of the repaired data minus AP50.
hotcoco 1.3 finds the same types, confusion matrix and calibration error in data without crowds. It counts detections on
crowds as errors, and its costs of class, localisation and missed errors are not those of the repaired data.

Shape legend: D detections, O objects without crowds, K classes, B bins.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pycocotools import mask as coco_mask

from detr_bf.evaluation.results import ScoredHits, all_classes
from detr_bf.files import read_json, write_json
from detr_bf.structures import ClassMap, Detections

MATCH_IOU, BACKGROUND_IOU = 0.5, 0.1
HIT, IGNORED = "hit", "ignored"
ERROR_TYPES = ("class", "localisation", "both", "duplicate", "background", "missed")
MOST_CONFUSED = 100  # classes; data with more have no confusion matrix
_RECALLS = np.linspace(0.0, 1.0, 101)  # as in pycocotools
_NONE, _CROWD = -1, -2  # instead of an object


@dataclass(frozen=True, eq=False)
class ImageErrors:
    """Detections of one image by descending score, its objects, and how they belong together."""

    image_id: int
    boxes: np.ndarray  # (D, 4) float64, x0, y0, x1, y1 in pixels
    scores: np.ndarray  # (D,) float64
    labels: np.ndarray  # (D,) int64
    object_boxes: np.ndarray  # (O, 4) float64
    object_labels: np.ndarray  # (O,) int64
    ious: np.ndarray  # (D, O) float64, of boxes or of masks
    matches: np.ndarray  # (D,) int64, the matched object; negative: none, or a crowd
    types: tuple[str, ...]  # D: hit, ignored, or one of ERROR_TYPES
    causes: np.ndarray  # (D,) int64, the object that a class, localisation or duplicate error is about, else negative

    @property
    def missed(self) -> np.ndarray:
        """Return for each object whether no match, class error or localisation error is about it."""
        explained = [at for at, kind in zip(self.causes, self.types, strict=True) if kind in ("class", "localisation")]
        seen = np.zeros(len(self.object_labels), dtype=bool)
        seen[self.matches[self.matches >= 0]] = True
        seen[explained] = True
        return ~seen

    def above(self, threshold: float) -> ImageErrors:
        """Return the errors that remain if only the detections with a score of at least ``threshold`` are kept.

        Matches stay the same, because higher scores are matched first.
        """
        kept = int((self.scores >= threshold).sum())
        return ImageErrors(
            self.image_id,
            self.boxes[:kept],
            self.scores[:kept],
            self.labels[:kept],
            self.object_boxes,
            self.object_labels,
            self.ious[:kept],
            self.matches[:kept],
            self.types[:kept],
            self.causes[:kept],
        )


def image_errors(
    ground_truth: Mapping[str, Any], detections: Iterable[Detections], class_map: ClassMap, *, masks: bool = False
) -> list[ImageErrors]:
    """Match the detections of each image and find the type of each error; images ascend by id.

    Args:
        ground_truth: COCO data set with ``bbox``, ``iscrowd`` and ``category_id`` in every annotation; for masks also
            ``segmentation``, as compressed run lengths.
        detections: of the images to examine.
        class_map: the classes.
        masks: take the IoU of masks, and things only.
    """
    is_thing = np.array(class_map.is_thing, dtype=bool)
    by_image: dict[int, list[Mapping[str, Any]]] = {}
    for annotation in ground_truth["annotations"]:
        if not masks or is_thing[class_map.index[annotation["category_id"]]]:
            by_image.setdefault(annotation["image_id"], []).append(annotation)
    found = []
    for image in sorted(detections, key=lambda each: each.image_id):
        kept = is_thing[image.labels.cpu().numpy()] | (not masks)
        order = np.flatnonzero(kept)[np.argsort(-image.scores.double().cpu().numpy()[kept], kind="stable")]
        found.append(_examined(image, order, by_image.get(image.image_id, []), class_map, masks))
    return found


def _examined(
    image: Detections, order: np.ndarray, annotations: Sequence[Mapping[str, Any]], class_map: ClassMap, masks: bool
) -> ImageErrors:
    """Match the detections ``order`` of one image, by descending score, and find the type of each error."""
    boxes, scores = (values.double().cpu().numpy()[order] for values in (image.boxes, image.scores))
    labels = image.labels.cpu().numpy()[order]
    is_crowd = np.array([bool(each["iscrowd"]) for each in annotations], dtype=bool)
    own_labels = np.array([class_map.index[each["category_id"]] for each in annotations], dtype=np.int64)
    xywh = np.array([each["bbox"] for each in annotations], dtype=np.float64).reshape(-1, 4)
    if masks:
        assert image.masks is not None, "the detections have masks"
        ious = _ious([image.masks[at] for at in order], [each["segmentation"] for each in annotations], is_crowd)
    else:
        ious = _ious(np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1), xywh, is_crowd)
    free = ious[:, ~is_crowd]
    of_class = labels[:, None] == own_labels[~is_crowd]
    on_crowd = ((ious >= MATCH_IOU) & is_crowd & (labels[:, None] == own_labels)).any(1)
    matches = _match(np.where(of_class, free, 0.0), on_crowd)
    types, causes = _error_types(free, of_class, matches)
    corners = np.concatenate([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], axis=1)[~is_crowd]
    return ImageErrors(
        image.image_id, boxes, scores, labels, corners, own_labels[~is_crowd], free, matches, types, causes
    )


def _ious(one: Sequence[Any] | np.ndarray, other: Sequence[Any] | np.ndarray, is_crowd: np.ndarray) -> np.ndarray:
    """Return the IoU (N, M) of N and M boxes x, y, width, height, or run lengths, with crowds as COCO defines it."""
    if not (len(one) and len(other)):
        return np.zeros((len(one), len(other)))
    return np.asarray(coco_mask.iou(one, other, is_crowd.astype(np.uint8)))


def _match(ious: np.ndarray, on_crowd: np.ndarray) -> np.ndarray:
    """Return the object (or a negative number) of each detection, (D,), from the IoU with objects of its class."""
    matches = np.full(len(ious), _NONE, dtype=np.int64)
    taken = np.zeros(ious.shape[1], dtype=bool)
    for number in np.flatnonzero((ious >= MATCH_IOU).any(1)):
        left = np.where(taken, 0.0, ious[number])
        best = len(left) - 1 - int(left[::-1].argmax())  # the last of several, as in pycocotools
        if left[best] >= MATCH_IOU:
            taken[best], matches[number] = True, best
    matches[(matches == _NONE) & on_crowd] = _CROWD
    return matches


def _error_types(ious: np.ndarray, of_class: np.ndarray, matches: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
    """Return type and cause of each detection: TIDE, section 2.2, for what several types fit in this order."""
    causes = np.full(len(ious), _NONE, dtype=np.int64)
    types = [HIT if match >= 0 else IGNORED if match == _CROWD else "background" for match in matches]
    if not ious.size:
        return tuple(types), causes
    same, other = np.where(of_class, ious, 0.0), np.where(of_class, 0.0, ious)
    for number in np.flatnonzero(matches == _NONE):
        own, strange = int(same[number].argmax()), int(other[number].argmax())
        if BACKGROUND_IOU <= same[number, own] < MATCH_IOU:
            types[number], causes[number] = "localisation", own
        elif other[number, strange] >= MATCH_IOU:
            types[number], causes[number] = "class", strange
        elif same[number, own] >= MATCH_IOU:
            types[number], causes[number] = "duplicate", own
        elif other[number, strange] >= BACKGROUND_IOU:
            types[number] = "both"
    return tuple(types), causes


def scored_hits(images: Iterable[ImageErrors], num_classes: int) -> list[ScoredHits]:
    """Return the detections that count of each class, with the number of its objects."""
    columns = [
        (image.scores[counted], image.matches[counted] >= 0, image.labels[counted], image.object_labels)
        for image in images
        for counted in [image.matches != _CROWD]
    ]
    empty = np.empty(0), np.empty(0, dtype=bool), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    scores, hits, labels, objects = (np.concatenate(parts) for parts in zip(empty, *columns, strict=True))
    totals = np.bincount(objects, minlength=num_classes)
    return [ScoredHits.of(scores[labels == k], hits[labels == k], int(totals[k])) for k in range(num_classes)]


class _Row(NamedTuple):
    """One detection."""

    kind: str
    label: int
    score: float
    becomes: int | None  # class of the object that a repaired class or localisation error finds


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
    totals = np.zeros(num_classes, dtype=np.int64)
    missed, unmatched = totals.copy(), totals.copy()
    rows: list[_Row] = []
    for image in images:
        np.add.at(totals, image.object_labels, 1)
        np.add.at(missed, image.object_labels[image.missed], 1)
        found = np.zeros(len(image.object_labels), dtype=bool)
        found[image.matches[image.matches >= 0]] = True
        np.add.at(unmatched, image.object_labels[~found], 1)
        repaired: set[tuple[str, int]] = set()
        for kind, label, score, cause in zip(image.types, image.labels, image.scores, image.causes, strict=True):
            becomes = None
            if kind in ("class", "localisation") and not found[cause] and (kind, cause) not in repaired:
                repaired.add((kind, cause))
                becomes = int(image.object_labels[cause])
            rows.append(_Row(kind, int(label), float(score), becomes))
    base = _mean_ap(rows, totals)
    if base is None:
        return None, {}
    counts = {kind: sum(row.kind == kind for row in rows) for kind in ERROR_TYPES} | {"missed": int(missed.sum())}

    def gain(repaired: Iterable[_Row], objects: np.ndarray) -> float:
        after = _mean_ap(repaired, objects)
        return (1.0 if after is None else after) - base

    costs = {}
    for kind in ERROR_TYPES[:-1]:
        repaired_rows = []  # in the same order, which matters for equal scores
        for row in rows:
            if row.kind != kind:
                repaired_rows.append(row)
            elif row.becomes is not None:
                repaired_rows.append(_Row(HIT, row.becomes, row.score, None))
        costs[kind] = ErrorCost(counts[kind], gain(repaired_rows, totals))
    costs["missed"] = ErrorCost(counts["missed"], gain(rows, totals - missed))
    wrong = sum(row.kind not in (HIT, IGNORED) for row in rows)
    costs["false positives"] = ErrorCost(wrong, gain((row for row in rows if row.kind == HIT), totals))
    costs["false negatives"] = ErrorCost(int(unmatched.sum()), gain(rows, totals - unmatched))
    return base, costs


def _mean_ap(rows: Iterable[_Row], totals: np.ndarray) -> float | None:
    """Return the mean AP of the classes with objects, from type, class and score; None if no class has any."""
    by_class: dict[int, list[tuple[float, bool]]] = {}
    for row in rows:
        if row.kind != IGNORED:
            by_class.setdefault(row.label, []).append((row.score, row.kind == HIT))
    values = [average_precision(by_class.get(int(k), []), int(totals[k])) for k in np.flatnonzero(totals)]
    return float(np.mean(values)) if values else None


def average_precision(detections: Sequence[tuple[float, bool]], num_objects: int) -> float:
    """Return COCO's AP of one class at one IoU: mean interpolated precision at 101 recalls.

    Args:
        detections: score, and whether it is a hit.
        num_objects: at least 1.
    """
    scores = np.array([score for score, _ in detections], dtype=np.float64)
    hits = np.array([hit for _, hit in detections], dtype=bool)[np.argsort(-scores, kind="stable")]
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
        counted = (image.scores >= threshold) & (image.matches != _CROWD)
        matches = _match(image.ious[counted], np.zeros(int(counted.sum()), dtype=bool))
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
    found: dict[str, list[ObjectGroup]] = {}
    for name, (labels, bounds) in _GROUPS.items():
        rows: list[list[_Row]] = [[] for _ in labels]
        totals = np.zeros((len(labels), num_classes), dtype=np.int64)
        hits = np.zeros(len(labels), dtype=np.int64)
        for image in images:
            objects, detections = _properties(name, image, sizes.get(image.image_id))
            of_object, of_detection = np.searchsorted(bounds, objects), np.searchsorted(bounds, detections)
            known = ~np.isnan(objects)
            np.add.at(totals, (of_object[known], image.object_labels[known]), 1)
            for number, kind in enumerate(image.types):
                matched = image.matches[number]
                group = of_object[matched] if matched >= 0 else of_detection[number]
                if kind != IGNORED and not np.isnan(objects[matched] if matched >= 0 else detections[number]):
                    score = float(image.scores[number])
                    rows[group].append(_Row(kind, int(image.labels[number]), score, None))
                    hits[group] += matched >= 0 and score >= threshold
        found[name] = [
            ObjectGroup(label, int(own.sum()), _mean_ap(row, own), float(hit / own.sum()) if own.any() else None)
            for label, row, own, hit in zip(labels, rows, totals, hits, strict=True)
        ]
    return found


def _properties(name: str, image: ImageErrors, size: tuple[int, int] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the value of a property for objects (O,) and detections (D,); NaN if it is not known."""
    if name == "neighbours":
        boxes = image.object_boxes
        xywh = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)
        others = (_ious(xywh, xywh, np.zeros(len(boxes), dtype=bool)) >= BACKGROUND_IOU).sum(1) - 1
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
    unlabelled: list[LabelSuspect] = []
    confused: list[LabelSuspect] = []
    superfluous: list[LabelSuspect] = []
    for image in images:
        columns = (
            image.boxes.tolist(),
            image.labels.tolist(),
            image.scores.tolist(),
            image.types,
            image.causes.tolist(),
        )
        for box, label, score, kind, cause in zip(*columns, strict=True):
            if kind == "background":
                unlabelled.append(LabelSuspect(image.image_id, tuple(box), label, score, None))
            elif kind == "class":
                annotated = int(image.object_labels[cause])
                confused.append(LabelSuspect(image.image_id, tuple(box), label, score, annotated))
        for at, (box, annotated) in enumerate(zip(image.object_boxes, image.object_labels.tolist(), strict=True)):
            if (image.image_id, at) in missing and (box[2:] > box[:2]).all():
                superfluous.append(LabelSuspect(image.image_id, tuple(box.tolist()), None, None, annotated))
    for found in (unlabelled, confused):
        found.sort(key=lambda each: -(each.score or 0.0))
    superfluous.sort(key=lambda each: -(each.box[2] - each.box[0]) * (each.box[3] - each.box[1]))
    return [*unlabelled[:most], *confused[:most], *superfluous[:most]]


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
