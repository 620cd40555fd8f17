"""Tables of the per-image results of a run, from which the metrics of resamples of the images are accumulated.

A table keeps what the metrics need of each validation image, so that a resample (images drawn with replacement) is not
evaluated again. A resample is given by the multiplicity of each image, and its metrics are those of the data set in
which every image occurs that often. (An implementation that counts a repeated image once, such as ``compare`` of
hotcoco, has too narrow intervals: about 0.79 of the right standard error.)

Shape legend: I images, K classes, D detections, R resamples, T IoU thresholds (0.50, 0.55, ..., 0.95), A size ranges
(all, small, medium, large).

JSON: ``to_dict`` gives ``kind``, plain lists, ids without a gap as ``{"first", "last"}``, and arrays as ``{"dtype",
"shape", "data"}``, where ``data`` is base85 (``base64.b85encode``) of the zlib-compressed bytes of the array in C
order, little-endian.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from scipy import sparse

from detr_bf.common.errors import InputError
from detr_bf.evaluation import PanopticEvaluator

BOX_TABLE_METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")
PANOPTIC_TABLE_METRICS = ("PQ", "SQ", "RQ", "PQ_th", "PQ_st")
_NUM_THRESHOLDS, _NUM_SIZES = 10, 4
_RECALLS = np.linspace(0.0, 1.0, 101)  # as in pycocotools
_CHUNK = 2**22  # numbers of one temporary array
_MAX_ARRAY = 2**32  # bytes of one array of a file
_MAX_IMAGES = 10**7  # of ids given by the first and the last
_DTYPES = ("|u1", "<u2", "<u4", "<u8")  # of whole numbers


class ImageTable(Protocol):
    """Results of one run by image."""

    @property
    def kind(self) -> str:
        """Kind of the results: boxes, panoptic or classifier."""

    @property
    def image_ids(self) -> tuple[int, ...]:
        """Ids of the images, ascending."""

    def metrics(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """Return each metric (R,) of the resamples; NaN where a resample has no ground truth for it.

        Args:
            weights: (R, I) whole numbers, how often each resample holds each image.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""


@dataclass(frozen=True, eq=False)
class BoxTable:
    """Detections of one run in the order of their scores, already matched with the ground truth.

    A detection is a hit at an IoU threshold and for a size range if it is matched with an object of that size; it is
    ignored if it is matched with a crowd or an object of another size, or unmatched and of another size. The scores
    are not kept, only their order enters AP. Of equal scores the image with the lower id is first, then the rank in
    the image; a repeated image repeats each of its detections in place (COCO's own order differs only for equal scores
    in one image and class). Detections after the last hit of their class change nothing and are left out.
    """

    image_ids: tuple[int, ...]  # ascending
    classes: tuple[str, ...]
    objects: np.ndarray  # (I, K, A) int64, ground-truth objects that count; no crowds
    starts: np.ndarray  # (K + 1,) int64, first detection of each class
    images: np.ndarray  # (D,) int64, position of the image of each detection
    hits: np.ndarray  # (A, T, D) bool
    ignored: np.ndarray  # (A, T, D) bool; never with ``hits``

    kind = "boxes"

    @classmethod
    def match(
        cls,
        ground_truth: Mapping[str, Any],
        results: Iterable[Mapping[str, Any]],
        names: Mapping[int, str],
        max_detections: int = 100,
    ) -> BoxTable:
        """Match detections with the objects of each image, by pycocotools, one class at a time.

        Args:
            ground_truth: COCO data set with ``area``, ``iscrowd`` and ids from 1 in every annotation.
            results: detections in COCO's results format, with ``bbox``.
            names: category id -> name of the class, the classes to measure.
            max_detections: limit per image and class, highest scores first.
        """
        image_ids = tuple(sorted({int(image["id"]) for image in ground_truth["images"]}))
        evaluation = _coco_evaluation(ground_truth, results, max_detections)
        columns = [_matched_class(evaluation, category_id, image_ids) for category_id in names]
        counts = [len(column.images) for column in columns]
        return cls(
            image_ids,
            tuple(names.values()),
            np.stack([column.objects for column in columns], axis=1),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            np.concatenate([column.images for column in columns]),
            np.concatenate([column.hits for column in columns], axis=2),
            np.concatenate([column.ignored for column in columns], axis=2),
        )

    def metrics(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """Return AP, AP50, AP75, APs, APm, APl and AP/CLASS of every class; see :meth:`ImageTable.metrics`."""
        assert weights.shape[1:] == (len(self.image_ids),), "weights must be (resamples, images)"
        planes = [self.hits[..., start:end] for start, end in itertools.pairwise(self.starts)]
        most_hits = max((int(plane.sum(-1).max(initial=0)) for plane in planes), default=0)
        rows = max(1, _CHUNK // max(1, most_hits))
        parts = [self._precision(weights[start : start + rows]) for start in range(0, len(weights), rows)]
        precision = np.concatenate(parts) if parts else np.empty((0, len(self.classes), _NUM_SIZES, _NUM_THRESHOLDS))
        views = (
            precision[:, :, 0].mean(-1),
            precision[:, :, 0, 0],
            precision[:, :, 0, 5],
            *(precision[:, :, size].mean(-1) for size in (1, 2, 3)),
        )
        found = {name: _mean_of_known(view) for name, view in zip(BOX_TABLE_METRICS, views, strict=True)}
        return found | {f"AP/{name}": views[0][:, k] for k, name in enumerate(self.classes)}

    def _precision(self, weights: np.ndarray) -> np.ndarray:
        """Return the mean precision at the 101 recall thresholds, (R, K, A, T); NaN without objects."""
        by_image = np.ascontiguousarray(weights.T, dtype=np.float64)  # (I, R)
        found = np.full((len(weights), len(self.classes), _NUM_SIZES, _NUM_THRESHOLDS), np.nan)
        for k, (start, end) in enumerate(itertools.pairwise(self.starts)):
            totals = (weights @ self.objects[:, k]).astype(np.int64)  # (R, A)
            for size in np.flatnonzero(totals.any(0)):
                known, reached = totals[:, size] > 0, _thresholds_reached(totals[:, size])
                for threshold in range(_NUM_THRESHOLDS):
                    at = size, threshold, slice(start, end)
                    curve = _Curve.of(self.images[start:end], self.hits[at], self.ignored[at], len(self.image_ids))
                    found[known, k, size, threshold] = curve.mean_precision(by_image, reached)[known]
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON.

        ``hits`` and ``ignored`` are packed along D; each IoU threshold but the first is stored as the exclusive or with
        the threshold below, which is mostly 0.
        """
        bits = {
            name: np.packbits(np.concatenate([plane[:, :1], plane[:, 1:] ^ plane[:, :-1]], axis=1), axis=-1)
            for name, plane in (("hits", self.hits), ("ignored", self.ignored))
        }
        arrays = {"objects": self.objects, "starts": self.starts, "images": self.images, **bits}
        return {
            "kind": self.kind,
            "image_ids": _packed_ids(self.image_ids),
            "classes": list(self.classes),
            **{name: _packed(array) for name, array in arrays.items()},
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> BoxTable:
        """Inverse of :meth:`to_dict`.

        Raises:
            InputError: the content is damaged.
        """
        image_ids, classes = _ids(state), _names(state, "classes")
        num_images, num_classes = len(image_ids), len(classes)
        starts = _unpacked(state, "starts", (num_classes + 1,))
        steps = np.diff(starts)
        _require(starts[0] == 0 and not (steps < 0).any(), "starts do not ascend from 0")
        count = int(starts[-1])
        images = _unpacked(state, "images", (count,))
        _require(not count or 0 <= images.min() <= images.max() < num_images, "a detection has an unknown image")
        objects = _unpacked(state, "objects", (num_images, num_classes, _NUM_SIZES))
        _require(not objects.size or objects.min() >= 0, "a number of objects is negative")
        planes = []
        for name in ("hits", "ignored"):
            packed = _unpacked(state, name, (_NUM_SIZES, _NUM_THRESHOLDS, -(-count // 8))).astype(np.uint8)
            bits = np.unpackbits(packed, axis=-1, count=count) if count else packed
            planes.append(np.bitwise_xor.accumulate(bits, axis=1).astype(bool))
        hits, ignored = planes
        _require(not (hits & ignored).any(), "a detection is both a hit and ignored")
        return cls(image_ids, classes, objects, starts, images, hits, ignored)


class _Curve(NamedTuple):
    """Precision and recall of one class at one IoU threshold and size range, P hits."""

    counted: sparse.csr_array  # (P, I), detections that are not ignored from after the previous hit up to this one
    hits: np.ndarray  # (P,) position of the image of each hit

    @classmethod
    def of(cls, images: np.ndarray, hits: np.ndarray, ignored: np.ndarray, num_images: int) -> _Curve:
        """Arrays are (D,) in the order of the scores."""
        places = np.flatnonzero(~ignored)
        ends = np.flatnonzero(hits[places])
        places = places[: ends[-1] + 1] if len(ends) else places[:0]
        segments = np.searchsorted(ends, np.arange(len(places)))  # the hit that ends the run of each detection
        ones = np.ones(len(places))
        counted = sparse.coo_array((ones, (segments, images[places])), shape=(len(ends), num_images)).tocsr()
        return cls(counted, images[places[ends]])

    def mean_precision(self, by_image: np.ndarray, reached: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the mean over the recall thresholds of the interpolated precision, (R,); 0 without hits.

        The precision at a recall threshold is the highest one at or after the first detection that reaches the
        threshold. Both are attained at hits, and within the copies of one hit the precision rises, so the last copy of
        each hit is enough. A hit with multiplicity 0 repeats the state of the detection before it.

        Args:
            by_image: (I, R) float64 multiplicities.
            reached: number of recall thresholds not above the recall, by number of hits so far.
        """
        if not len(self.hits):
            return np.zeros(by_image.shape[1])
        seen, hits = self.counted @ by_image, by_image[self.hits]  # (P, R)
        for below, above in zip(range(len(hits) - 1), range(1, len(hits)), strict=True):  # np.cumsum takes 5 times this
            hits[above] += hits[below]
            seen[above] += seen[below]
        thresholds = reached(hits)
        precision = np.divide(hits, np.add(seen, np.spacing(1), out=seen), out=hits)  # spacing as in pycocotools
        for above in range(len(precision) - 1, 0, -1):
            np.maximum(precision[above - 1], precision[above], out=precision[above - 1])
        found = precision[0] * thresholds[0] + np.einsum("pr,pr->r", precision[1:], np.diff(thresholds, axis=0))
        mean: np.ndarray = found / len(_RECALLS)
        return mean


def _thresholds_reached(totals: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function hits (P, R) -> number of recall thresholds at or below hits / ``totals`` (R,)."""
    distinct, which = np.unique(totals, return_inverse=True)
    sizes = distinct + 1
    table = np.concatenate(
        [np.searchsorted(_RECALLS, np.arange(n + 1) / max(n, 1), side="right") for n in distinct]
    ).astype(np.float64)
    offsets = (np.cumsum(sizes) - sizes)[which]
    return lambda hits: table[hits.astype(np.int64) + offsets]


class _Matched(NamedTuple):
    """Detections of one class by descending score, as in :class:`BoxTable`."""

    objects: np.ndarray
    images: np.ndarray
    hits: np.ndarray
    ignored: np.ndarray


def _coco_evaluation(ground_truth: Mapping[str, Any], results: Iterable[Mapping[str, Any]], limit: int) -> Any:
    """Return a ``COCOeval`` of boxes that has not matched anything."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth, found = COCO(), COCO()
    truth.dataset = {key: [dict(entry) for entry in entries] for key, entries in ground_truth.items()}
    listed_results = [dict(result) for result in results]
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        if listed_results:
            found = truth.loadRes(listed_results)
        else:  # loadRes fails on an empty list
            found.dataset = {**truth.dataset, "annotations": []}
            found.createIndex()
    evaluation = COCOeval(truth, found, "bbox")
    evaluation.params.maxDets = [limit]
    return evaluation


def _matched_class(evaluation: Any, category_id: int, image_ids: Sequence[int]) -> _Matched:
    """Match one class, so that only its results are in memory."""
    evaluation.params.catIds = [category_id]
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.evaluate()
    count = len(image_ids)
    objects = np.zeros((count, _NUM_SIZES), dtype=np.int64)
    by_size = []
    for size in range(_NUM_SIZES):
        found = evaluation.evalImgs[size * count : (size + 1) * count]
        by_size.append([entry for entry in found if entry is not None])
        objects[:, size] = [0 if entry is None else np.count_nonzero(entry["gtIgnore"] == 0) for entry in found]
    first = [(place, entry) for place, entry in enumerate(found) if entry is not None]
    scores = np.concatenate([np.empty(0), *(entry["dtScores"] for _, entry in first)])
    images = np.concatenate([np.empty(0), *(np.full(len(entry["dtScores"]), place) for place, entry in first)])
    matched, ignored = (
        np.stack(
            [
                np.concatenate([np.empty((_NUM_THRESHOLDS, 0)), *(entry[key] for entry in entries)], axis=1)
                for entries in by_size
            ]
        )
        for key in ("dtMatches", "dtIgnore")
    )
    order = np.argsort(-scores, kind="stable")
    hits = ((matched > 0) & (ignored == 0))[:, :, order]
    last = int(np.flatnonzero(hits.any((0, 1)))[-1]) + 1 if hits.any() else 0
    order = order[:last]
    return _Matched(objects, images.astype(np.int64)[order], hits[:, :, :last], (ignored > 0)[:, :, order])


@dataclass(frozen=True, eq=False)
class PanopticTable:
    """Matches and errors of one run by image and class, as :class:`detr_bf.evaluation.PanopticEvaluator` counts them.

    Definitions: Kirillov et al. 2019, "Panoptic Segmentation", section 4 (arXiv 1801.00868).
    """

    image_ids: tuple[int, ...]
    is_thing: tuple[bool, ...]  # (K,)
    iou: np.ndarray  # (I, K) float64, sum over the matched segments
    counts: np.ndarray  # (3, I, K) int64: matched segments, false positives, false negatives

    kind = "panoptic"

    @classmethod
    def of(cls, evaluator: PanopticEvaluator) -> PanopticTable:
        """Return the table of the images that the evaluator has got."""
        class_map, image_ids = evaluator.class_map, sorted(evaluator.counts)
        iou = np.zeros((len(image_ids), class_map.num_classes))
        counts = np.zeros((3, *iou.shape), dtype=np.int64)
        for place, image_id in enumerate(image_ids):
            image = evaluator.counts[image_id]
            for label, overlap in image.matches:
                iou[place, label] += overlap
            labels = [label for label, _ in image.matches], image.false_positives, image.false_negatives
            for kind, own in enumerate(labels):
                np.add.at(counts[kind, place], np.array(own, dtype=np.int64), 1)
        return cls(tuple(image_ids), class_map.is_thing, iou, counts)

    def metrics(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """Return PQ, SQ, RQ, PQ_th and PQ_st; see :meth:`ImageTable.metrics`."""
        assert weights.shape[1:] == (len(self.image_ids),), "weights must be (resamples, images)"
        rows = weights.astype(np.float64)
        iou = rows @ self.iou  # (R, K)
        matched, false_positives, false_negatives = (rows @ count for count in self.counts.astype(np.float64))
        size = matched + 0.5 * false_positives + 0.5 * false_negatives
        with np.errstate(invalid="ignore"):  # 0 / 0: classes that do not occur
            quality = np.where(size > 0, iou / size, np.nan)
            segmentation = np.where(size > 0, iou / np.maximum(matched, 1), np.nan)
            recognition = np.where(size > 0, matched / size, np.nan)
        things = np.array(self.is_thing, dtype=bool)
        views = (quality, segmentation, recognition, quality[:, things], quality[:, ~things])
        return {name: _mean_of_known(view) for name, view in zip(PANOPTIC_TABLE_METRICS, views, strict=True)}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        things = [int(is_thing) for is_thing in self.is_thing]
        arrays = {"iou": _packed(self.iou), "counts": _packed(self.counts)}
        return {"kind": self.kind, "image_ids": _packed_ids(self.image_ids), "is_thing": things, **arrays}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> PanopticTable:
        """Inverse of :meth:`to_dict`.

        Raises:
            InputError: the content is damaged.
        """
        image_ids, things = _ids(state), state.get("is_thing")
        if not (isinstance(things, list) and all(type(t) is int and t in (0, 1) for t in things)):
            raise _damaged("no list is_thing")
        shape = len(image_ids), len(things)
        iou, counts = _unpacked(state, "iou", shape, np.float64), _unpacked(state, "counts", (3, *shape))
        _require(not counts.size or counts.min() >= 0, "a count is negative")
        _require(bool(((iou >= 0) & (iou <= counts[0])).all()), "an IoU is not from 0 to 1")
        return cls(image_ids, tuple(map(bool, things)), iou, counts)


@dataclass(frozen=True, eq=False)
class ClassifierTable:
    """True and predicted class of each image; metrics as in :mod:`detr_bf.classification.metrics`."""

    image_ids: tuple[int, ...]  # index in the data set
    labels: np.ndarray  # (I,) int64
    predicted: np.ndarray  # (I,) int64; -1 if the logits were not finite
    groups: tuple[str, ...]  # (K,) many, medium or few, by number of training images

    kind = "classifier"

    def metrics(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """Return top1, balanced, and those of many, medium and few with an image; see :meth:`ImageTable.metrics`."""
        assert weights.shape[1:] == (len(self.image_ids),), "weights must be (resamples, images)"
        order = np.argsort(self.labels, kind="stable")
        present, firsts = np.unique(self.labels[order], return_index=True)
        right = self.labels == self.predicted
        totals = np.add.reduceat(weights[:, order], firsts, axis=1, dtype=np.float64)  # (R, present classes)
        hits = np.add.reduceat((weights * right)[:, order], firsts, axis=1, dtype=np.float64)
        accuracy = np.where(totals > 0, hits / np.maximum(totals, 1), np.nan)
        found = {"top1": hits.sum(1) / totals.sum(1), "balanced": _mean_of_known(accuracy)}
        of_class = np.array(self.groups)[present]
        groups = [group for group in ("many", "medium", "few") if group in of_class]
        return found | {group: _mean_of_known(accuracy[:, of_class == group]) for group in groups}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        arrays = {"labels": _packed(self.labels), "predicted": _packed(self.predicted + 1)}
        return {"kind": self.kind, "image_ids": _packed_ids(self.image_ids), "groups": list(self.groups), **arrays}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> ClassifierTable:
        """Inverse of :meth:`to_dict`; there 0 is a prediction without finite logits.

        Raises:
            InputError: the content is damaged.
        """
        image_ids, groups = _ids(state), _names(state, "groups")
        labels, predicted = (_unpacked(state, name, (len(image_ids),)) for name in ("labels", "predicted"))
        _require(0 <= labels.min() <= labels.max() < len(groups), "a label is not one of the classes")
        _require(0 <= predicted.min() <= predicted.max() <= len(groups), "a prediction is not one of the classes")
        return cls(image_ids, labels, predicted - 1, groups)


TABLES: dict[str, Any] = {cls.kind: cls for cls in (BoxTable, PanopticTable, ClassifierTable)}


def table_from_dict(state: Any) -> ImageTable:
    """Return the table of a cell record.

    Raises:
        InputError: the content is damaged, or of an unknown kind.
    """
    _require(isinstance(state, Mapping) and state.get("kind") in TABLES, f"its kind is not one of {', '.join(TABLES)}")
    table: ImageTable = TABLES[state["kind"]].from_dict(state)
    return table


def _mean_of_known(values: np.ndarray) -> np.ndarray:
    """Return the mean of each row without NaN, (R,); NaN for a row without a number."""
    known = ~np.isnan(values)
    counts = known.sum(1)
    mean: np.ndarray = np.where(counts > 0, np.where(known, values, 0).sum(1) / np.maximum(counts, 1), np.nan)
    return mean


def _packed(array: np.ndarray) -> dict[str, Any]:
    """Return an array for JSON; whole numbers from 0 in the smallest type."""
    if array.dtype.kind in "iu":
        limit = int(array.max(initial=0))
        array = array.astype(next(dtype for dtype in _DTYPES if limit <= np.iinfo(dtype).max))
    data = base64.b85encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode("ascii")
    return {"dtype": array.dtype.newbyteorder("<").str, "shape": list(array.shape), "data": data}


def _unpacked(state: Mapping[str, Any], key: str, shape: tuple[int, ...], dtype: type = np.int64) -> np.ndarray:
    """Return the array ``key`` of that shape as ``dtype``, int64 or float64.

    Raises:
        InputError: it is missing or damaged.
    """
    entry = state.get(key)
    if not (isinstance(entry, Mapping) and entry.get("shape") == list(shape)):
        raise _damaged(f"{key} is not of shape {list(shape)}")
    found, data = entry.get("dtype"), entry.get("data")
    expected = _DTYPES if dtype is np.int64 else ("<f8",)
    if found not in expected or not isinstance(data, str):
        raise _damaged(f"{key} is not of type {' or '.join(expected)}")
    size = math.prod(shape) * np.dtype(found).itemsize
    _require(size <= _MAX_ARRAY, f"{key} is larger than {_MAX_ARRAY} bytes")
    try:
        decoder = zlib.decompressobj()
        content = decoder.decompress(base64.b85decode(data), size + 1)
    except (ValueError, zlib.error) as error:
        raise _damaged(f"{key} cannot be decoded ({error})") from None
    _require(len(content) == size, f"{key} does not hold {size} bytes")
    array: np.ndarray = np.frombuffer(content, dtype=found).reshape(shape).astype(dtype)
    _require(bool(np.isfinite(array).all()), f"{key} is not finite")
    return array


def _packed_ids(ids: tuple[int, ...]) -> list[int] | dict[str, int]:
    first, last = ids[0], ids[-1]
    return {"first": first, "last": last} if len(ids) == last - first + 1 else list(ids)


def _ids(state: Mapping[str, Any]) -> tuple[int, ...]:
    ids = state.get("image_ids")
    if isinstance(ids, Mapping):
        first, last = ids.get("first"), ids.get("last")
        if not (type(first) is int and type(last) is int and 0 <= last - first < _MAX_IMAGES):
            raise _damaged("image_ids have no valid first and last")
        return tuple(range(first, last + 1))
    if not (isinstance(ids, list) and ids and all(type(i) is int for i in ids)):
        raise _damaged("image_ids is not a list of ids")
    _require(all(a < b for a, b in itertools.pairwise(ids)), "image_ids do not ascend")
    return tuple(ids)


def _names(state: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = state.get(key)
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise _damaged(f"{key} is not a list of names")
    return tuple(names)


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise _damaged(problem)


def _damaged(problem: str) -> InputError:
    return InputError(f"the table of per-image results is damaged ({problem}): make the cell record again from its run")
