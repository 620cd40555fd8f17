"""COCO average precision of boxes and masks with pycocotools or hotcoco.

The engine (bit-identical either way) matches and accumulates; the twelve metrics are computed here from its precision
and recall arrays. Definitions: https://cocodataset.org/#detection-eval; ``pycocotools.cocoeval``.

Shape legend: T IoU thresholds, R recall thresholds, K classes, A size ranges (all, small, medium, large),
M detection limits.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from detr_bf.acceleration.allocator import without_garbage_collection
from detr_bf.common.errors import InputError
from detr_bf.common.files import is_number, write_json
from detr_bf.common.structures import ClassMap, Detections
from detr_bf.common.text import listed, printable
from detr_bf.data.annotation_values import (
    BOX_ROUNDING,
    annotated_size,
    annotation_values,
    crowd_mask,
    object_area,
    suspect_areas,
    suspect_boxes,
    suspect_crowds,
    unknown_ids,
    value_text,
)
from detr_bf.data.coco import CocoAnnotations, check_maps, read_annotations
from detr_bf.data.columns import Entries, distinct
from detr_bf.data.image_headers import header_size
from detr_bf.data.images import MAX_PIXELS
from detr_bf.data.masks import Segmentations, parts_of, read_ids
from detr_bf.evaluation.error_types import scored_hits
from detr_bf.evaluation.matching import ImageErrors, columns_of, image_errors
from detr_bf.evaluation.results import BOX_METRIC_NAMES, ClassResult, CocoSummary, ScoredHits, all_classes
from detr_bf.losses.postprocess import encoded

logger = logging.getLogger(__name__)

ENGINES = ("auto", "pycocotools", "hotcoco")
_warned: set[Path] = set()  # files with objects that differ from those of training
_IOU_50, _IOU_75 = 0, 5  # positions in the engines' thresholds 0.50, 0.55, ..., 0.95
_LARGEST_EXACT = 2**53  # whole number in float64
_SIZE_BOUNDS = {"small": (0, 32**2), "medium": (32**2, 96**2), "large": (96**2, 1e10)}  # pixels, both ends included


class Curves(NamedTuple):
    """Curves accumulated by an engine; -1 if a class or size has no ground truth. K is sorted by category id."""

    precision: np.ndarray  # (T, R, K, A, M) float64
    recall: np.ndarray  # (T, K, A, M) float64


class CocoEvaluator:
    """Collector of the detections of a split, every image once, that computes their COCO metrics.

    The annotations may lack ``area`` (then width x height of the box), ``iscrowd`` (then 0) and ``id``; they are set in
    a copy. Ids are always renumbered there, because the metric reads annotation id 0 as "no match". Objects are those
    of training: boxes are clipped to the image, and objects without area are left out.

    Args:
        annotations: COCO JSON with ``images``, ``annotations`` and ``categories``, or its content.
        class_map: the model's classes; ``Detections.labels`` index into it.
        engine: ``auto`` is hotcoco if installed, else pycocotools; their results are bit-identical.
        max_detections: limit per class and image, highest scores first.
        images: folder of the image files, which have the sizes that the annotations do not state.
        masks: read the masks of the ground truth too, for :meth:`summarize_masks`.
        panoptic: folder of the PNG files of a panoptic JSON.
        max_pixels: limit for one of them.

    Raises:
        InputError: the file is missing, is not COCO or has an invalid value, its categories contradict ``class_map``,
            or the engine is unknown or not installed.
    """

    def __init__(
        self,
        annotations: str | Path | CocoAnnotations,
        class_map: ClassMap,
        engine: str = "auto",
        max_detections: int = 100,
        *,
        images: Path | None = None,
        masks: bool = False,
        panoptic: Path | None = None,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        if max_detections < 1:
            raise InputError(f"max_detections must be at least 1, got {max_detections}")
        self.engine = resolve_engine(engine)
        self.class_map = class_map
        self.max_detections = max_detections
        self._ground_truth = load_ground_truth(
            Path(annotations) if isinstance(annotations, str) else annotations,
            class_map,
            images=images,
            masks=masks,
            panoptic=panoptic,
            max_pixels=max_pixels,
        )
        self._image_ids = [image["id"] for image in self._ground_truth["images"]]
        self._known_ids = frozenset(self._image_ids)
        self._detections: dict[int, Detections] = {}
        self.errors: list[ImageErrors] = []  # of the last summary of boxes
        self.mask_errors: list[ImageErrors] = []  # of the last summary of masks
        self.precision: np.ndarray | None = None  # (T, R, K) by IoU, recall and class, of the same summary

    def update(self, detections: Sequence[Detections]) -> None:
        """Add images; an image without a detection counts and must be given too, with no boxes.

        Raises:
            InputError: an image is not in the annotation file or was given before, a box or score is not finite.
        """
        _check_detections(detections, self.class_map.num_classes)
        for image in detections:
            if image.image_id not in self._known_ids:
                raise InputError(
                    f"detections for image id {image.image_id}, which the annotation file does not list: "
                    "evaluate with the annotation file the images were read from"
                )
            if image.image_id in self._detections:
                raise InputError(
                    f"image id {image.image_id} was given twice: every image counts once. "
                    "Join the results of several processes with merge_shards"
                )
            self._detections[image.image_id] = image

    @property
    def ground_truth(self) -> Mapping[str, Any]:
        """Return the COCO data set with complete annotations; not to be changed."""
        return self._ground_truth

    @property
    def detections(self) -> list[Detections]:
        """Return all detections in the order of the updates."""
        return list(self._detections.values())

    @without_garbage_collection()
    def summarize(self, partial: bool = False) -> CocoSummary:
        """Return the metrics of the boxes for all images of the file; with ``partial``, for those added so far only.

        Raises:
            InputError: images are missing and ``partial`` is False.
        """
        summary, curves = self._summary("bbox", self.class_map, partial)
        columns = np.argsort(np.argsort(self.class_map.category_ids))  # the engines' classes ascend by id
        self.precision = curves.precision[:, :, columns, 0, 2]
        self.errors = image_errors(self._ground_truth, self.detections, self.class_map)
        return _with_thresholds(summary, scored_hits(self.errors, self.class_map.num_classes))

    @without_garbage_collection()
    def summarize_masks(self, partial: bool = False) -> CocoSummary:
        """Return the same metrics by the IoU of masks, for the thing classes.

        Needs an evaluator with ``masks`` and detections with masks.
        """
        classes = zip(self.class_map.category_ids, self.class_map.names, self.class_map.is_thing, strict=True)
        things = [(category_id, name) for category_id, name, is_thing in classes if is_thing]
        classes_of_things = ClassMap(tuple(i for i, _ in things), tuple(name for _, name in things))
        summary, _ = self._summary("segm", classes_of_things, partial)
        self.mask_errors = image_errors(self._ground_truth, self.detections, self.class_map, masks=True)
        scored = scored_hits(self.mask_errors, self.class_map.num_classes)
        return _with_thresholds(
            summary, [own for own, is_thing in zip(scored, self.class_map.is_thing, strict=True) if is_thing]
        )

    def _summary(self, kind: str, classes: ClassMap, partial: bool) -> tuple[CocoSummary, Curves]:
        """Return metrics and curves of ``classes`` by the IoU of ``kind``, ``bbox`` or ``segm``."""
        missing = [image_id for image_id in self._image_ids if image_id not in self._detections]
        if missing and not partial:
            raise InputError(
                f"{len(missing)} of {len(self._image_ids)} images were not evaluated (image ids {listed(missing)}): "
                "evaluate all images, or call summarize(partial=True)"
            )
        ground_truth = _restrict(self._ground_truth, self._detections.keys(), classes)
        boxes = box_results(self.detections, self.class_map) if kind == "bbox" else None
        results = _mask_results(self.detections, self.class_map, classes) if boxes is None else boxes
        limits = (1, min(10, self.max_detections), self.max_detections)
        curves = match_and_accumulate(self.engine, ground_truth, results, limits, kind)
        objects = [annotation for annotation in ground_truth["annotations"] if not annotation["iscrowd"]]
        summary = CocoSummary(
            **_twelve_numbers(curves),
            per_class=_per_class(curves, objects, classes),
            num_objects_by_size={  # like the metric, an object exactly on a bound counts on both sides
                name: sum(low <= annotation["area"] <= high for annotation in objects)
                for name, (low, high) in _SIZE_BOUNDS.items()
            },
            num_images=len(self._detections),
            num_detections=len(results),
            max_detections=self.max_detections,
            engine=self.engine,
            best=None,
        )
        return summary, curves


def _with_thresholds(summary: CocoSummary, scored: Sequence[ScoredHits]) -> CocoSummary:
    """Add the thresholds with the highest F1; ``scored`` are those of the classes of the summary."""
    per_class = {
        name: replace(result, best=own.best())
        for (name, result), own in zip(summary.per_class.items(), scored, strict=True)
    }
    return replace(summary, per_class=per_class, best=all_classes(scored).best())


def merge_shards(shards: Iterable[Sequence[Detections]]) -> list[Detections]:
    """Join the detections of several ranks, ordered by image id.

    A distributed sampler repeats images to fill its last batches; the first result of each image id is kept.
    """
    by_image: dict[int, Detections] = {}
    for shard in shards:
        for image in shard:
            by_image.setdefault(image.image_id, image)
    return [by_image[image_id] for image_id in sorted(by_image)]


def to_coco_results(detections: Iterable[Detections], class_map: ClassMap) -> list[dict[str, Any]]:
    """Return COCO results: category ids of the annotation file, boxes x, y, width, height in pixels, masks as RLE."""
    results = []
    for image in detections:
        corners = image.boxes.detach().to("cpu", torch.float64)
        boxes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], dim=1).tolist()
        for number, (box, score, label) in enumerate(
            zip(boxes, image.scores.tolist(), image.labels.tolist(), strict=True)
        ):
            category_id = class_map.category_ids[label]
            result = {"image_id": image.image_id, "category_id": category_id, "bbox": box, "score": score}
            results.append(result if image.masks is None else {**result, "segmentation": image.masks[number]})
    return results


def check_results(results: Any, ground_truth: Mapping[str, Any], name: str) -> None:
    """Check the content of the file ``name`` in COCO's results format against :attr:`CocoEvaluator.ground_truth`.

    Raises:
        InputError: an entry is not a detection, or has an image or a category that is not known.
    """
    for number, result in enumerate(results if isinstance(results, list) else [results]):
        box = result.get("bbox") if isinstance(result, dict) else None
        if not (
            isinstance(box, list)
            and len(box) == 4
            and all(map(is_number, (*box, result.get("score"))))
            and all(type(result.get(key)) is int for key in ("image_id", "category_id"))
        ):
            raise InputError(
                f"{name}: entry {number} is not a detection in COCO's results format: expected a list of "
                '{"image_id": 1, "category_id": 1, "bbox": [x, y, width, height], "score": 0.5}'
            )
    for key, part in (("image_id", "images"), ("category_id", "categories")):
        if unknown := {result[key] for result in results} - {entry["id"] for entry in ground_truth[part]}:
            raise InputError(
                f"{name} has detections for the {key.replace('_', ' ')}s {listed(sorted(unknown))}, which the "
                "validation annotations do not list: compare with the annotations of the run"
            )


def box_results(detections: Sequence[Detections], class_map: ClassMap) -> np.ndarray | list[dict[str, Any]]:
    """Return the boxes of :func:`to_coco_results` as an array, which the engines read faster.

    Its columns are image id, x, y, width, height, score and category id, (N, 7) float64. Ids that float64 cannot hold
    give the list.
    """
    image_ids = np.array([image.image_id for image in detections], dtype=np.int64)
    category_ids = np.array(class_map.category_ids, dtype=np.int64)
    if max(image_ids.max(initial=0), category_ids.max(initial=0)) > _LARGEST_EXACT:
        results = to_coco_results(detections, class_map)
        return [{key: value for key, value in result.items() if key != "segmentation"} for result in results]
    corners, scores, labels = columns_of(detections)
    counts = [len(image.scores) for image in detections]
    xywh = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)
    return np.column_stack([np.repeat(image_ids, counts), xywh, scores, category_ids[labels]])


def write_results(path: str | Path, detections: Iterable[Detections], class_map: ClassMap) -> None:
    """Atomically write :func:`to_coco_results` as JSON."""
    write_json(path, to_coco_results(detections, class_map))


@without_garbage_collection()
def load_ground_truth(
    path: Path | CocoAnnotations,
    class_map: ClassMap,
    *,
    images: Path | None = None,
    masks: bool = False,
    panoptic: Path | None = None,
    max_pixels: int = MAX_PIXELS,
) -> dict[str, Any]:
    """Read a COCO file and return it with complete annotations and only the keys that the engines need.

    The objects are those of training: boxes that exceed their image are clipped, and objects whose box has no area in
    it are left out. One whose mask has no pixel stays, so that the AP of boxes is the same with and without ``masks``
    and that of masks is pycocotools'. The folder ``images`` has the files whose sizes are not stated.

    Raises:
        InputError: the file is missing, is not COCO, or contradicts ``class_map``; a mask cannot be read.
    """
    content = read_annotations(path)
    if masks:
        content = with_run_lengths(content, panoptic, max_pixels)
    sizes = {
        image["id"]: annotated_size(image) or (header_size(images / image["file_name"]) if images else None)
        for image in content.images
    }
    image_ids = sizes.keys()
    kept = content.annotations
    if isinstance(kept, Entries):
        kept = kept.where(~unknown_ids(kept, "image_id", image_ids))
    else:
        kept = [annotation for annotation in kept if annotation["image_id"] in image_ids]
    _check_categories(content, class_map)
    _check_known(content.path, kept, class_map)
    names = dict(zip(class_map.category_ids, class_map.names, strict=True))
    annotations = (None if masks else _complete_columns(kept)) or [
        _complete(content.path, annotation, number, masks) for number, annotation in enumerate(kept, 1)
    ]
    return {
        # pycocotools needs a size if there are masks; run lengths have their own, so 0 is fine if it is not known
        "images": [
            {"id": i, "height": height, "width": width}
            for i, (height, width) in ((i, sizes[i] or (0, 0)) for i in sorted(image_ids))
        ],
        "annotations": _learnable(content.path, annotations, sizes),
        "categories": [{"id": category_id, "name": names[category_id]} for category_id in sorted(names)],
    }


def with_run_lengths(content: CocoAnnotations, panoptic: Path | None, max_pixels: int) -> CocoAnnotations:
    """Return the annotations with ``segmentation`` as compressed run lengths, whatever form the masks have.

    ``max_pixels`` is the limit for a PNG.

    Raises:
        InputError: a file or a mask cannot be read, or the size of an image is not known.
    """
    check_maps(content, panoptic, masks=True)
    if panoptic is None:
        sizes = {image["id"]: annotated_size(image) for image in content.images}
        found = [
            {**annotation, "segmentation": _run_lengths_of(annotation, sizes[annotation["image_id"]])}
            for annotation in content.annotations
            if annotation["image_id"] in sizes  # others are not evaluated
        ]
        return replace(content, annotations=found)
    found = []
    for file_name, segments in groupby(content.annotations, key=lambda segment: segment["file_name"]):
        ids = read_ids(panoptic / file_name, max_pixels)  # the segments of an image are consecutive
        found += [{**segment, "segmentation": encoded(ids == segment["id"])} for segment in segments]
    return replace(content, annotations=found)


def _run_lengths_of(annotation: Mapping[str, Any], size: tuple[int, int] | None) -> dict[str, Any]:
    where = f"annotation {value_text(annotation.get('id'))} of image {annotation['image_id']}"
    if size is None:
        raise InputError(f"{where}: masks need the size of the image: give its height and width in images")
    try:
        masks = Segmentations([parts_of(annotation.get("segmentation"), size)]).read(0, slice(0, 1), size)
    except ValueError as error:
        raise InputError(
            f"{where} has no usable mask: {error}; detr-bf check lists all of them, and with --fix OUT it writes a "
            "copy without them"
        ) from error
    return encoded(masks[0])


def _complete(path: Path, annotation: Mapping[str, Any], number: int, masks: bool) -> dict[str, Any]:
    try:
        values = annotation_values(annotation)
    except ValueError as error:
        raise InputError(
            f"{printable(path)}: image {annotation['image_id']} has {error}; detr-bf check lists everything that "
            "is wrong with the data, and with --fix OUT it writes a corrected copy"
        ) from None
    return {
        "id": number,
        "image_id": annotation["image_id"],
        "category_id": annotation["category_id"],
        "bbox": values.bbox,
        "area": values.area,
        "iscrowd": int(values.is_crowd),
        **({"segmentation": annotation["segmentation"]} if masks else {}),
    }


def _complete_columns(annotations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return :func:`_complete` of annotations in columns; None for a list, or if a value may be invalid."""
    if not isinstance(annotations, Entries) or annotations.boxes is None:
        return None
    if any(suspects(annotations).any() for suspects in (suspect_boxes, suspect_areas, suspect_crowds)):
        return None
    bbox = annotations.listed("bbox", np.arange(len(annotations)))
    area = annotations.numbers("area").astype(np.float64).tolist()
    for row in np.flatnonzero(annotations.is_none("area")).tolist():
        area[row] = object_area({"bbox": bbox[row]})
    numbers = (annotations.numbers(key).tolist() for key in ("image_id", "category_id"))
    columns = (*numbers, bbox, area, crowd_mask(annotations).astype(int).tolist())
    names = ("id", "image_id", "category_id", "bbox", "area", "iscrowd")
    return [dict(zip(names, row, strict=True)) for row in zip(range(1, len(bbox) + 1), *columns, strict=True)]


def _learnable(
    path: Path, annotations: Sequence[dict[str, Any]], sizes: Mapping[int, tuple[int, int] | None]
) -> list[dict[str, Any]]:
    """Return the crowds, unchanged, and what training keeps of the objects; log how many differ, once for a file.

    Boxes that exceed their image by a rounding error stay, so that files such as COCO's give pycocotools' numbers.
    """
    boxes = np.array([each["bbox"] for each in annotations], dtype=np.float64).reshape(-1, 4)
    known = [sizes[each["image_id"]] or (np.inf, np.inf) for each in annotations]
    limits = np.array(known, dtype=np.float64).reshape(-1, 2)[:, [1, 0, 1, 0]]
    is_crowd = np.array([each["iscrowd"] for each in annotations], dtype=bool)
    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    inside = np.clip(corners, 0, limits)
    sides = inside[:, 2:] - inside[:, :2]
    lost = (sides <= 0).any(1) & ~is_crowd
    clipped = (np.abs(inside - corners) > BOX_ROUNDING).any(1) & ~is_crowd & ~lost
    kept = [each for each, gone in zip(annotations, lost.tolist(), strict=True) if not gone]
    for row in np.flatnonzero(clipped).tolist():
        annotations[row]["bbox"] = [*inside[row, :2].tolist(), *sides[row].tolist()]
        annotations[row]["area"] = min(annotations[row]["area"], float(sides[row].prod()))
    if (lost.any() or clipped.any()) and path not in _warned:
        _warned.add(path)
        logger.warning(
            "%s: as in training, %d objects without area are left out of the evaluation, and %d boxes that exceed "
            "their image are clipped",
            printable(path),
            lost.sum(),
            clipped.sum(),
        )
    return kept


def _check_categories(content: CocoAnnotations, class_map: ClassMap) -> None:
    known = dict(zip(class_map.category_ids, class_map.names, strict=True))
    found = content.class_map
    for category_id, name in zip(found.category_ids, found.names, strict=True):
        if known.get(category_id, name) != name:
            raise InputError(
                f"{printable(content.path)} calls category id {category_id} '{name}', the model was trained with it as "
                f"'{known[category_id]}': evaluate with annotations of the same categories"
            )


def _check_known(path: Path, objects: Sequence[Mapping[str, Any]], class_map: ClassMap) -> None:
    unknown = distinct(objects, "category_id").difference(class_map.category_ids)
    if unknown:
        raise InputError(
            f"{printable(path)} has objects of category ids {sorted(unknown)}, which the model does not know; "
            f"it knows {sorted(class_map.category_ids)}"
        )


def _check_detections(detections: Sequence[Detections], num_classes: int) -> None:
    boxes, scores, labels = columns_of(detections)
    finite = np.isfinite(boxes).all(1) & np.isfinite(scores)
    if not finite.all():
        numbers = np.repeat(np.arange(len(detections)), [len(image.scores) for image in detections])
        raise InputError(
            f"the model's boxes or scores for image id {detections[numbers[~finite][0]].image_id} are not finite: its "
            "weights or the image are broken, AP would mean nothing"
        )
    assert not len(labels) or 0 <= int(labels.min()) <= int(labels.max()) < num_classes, "labels outside the class map"


def _restrict(ground_truth: Mapping[str, Any], image_ids: Iterable[int], classes: ClassMap) -> dict[str, Any]:
    """Return the data set with these images and classes only."""
    kept = set(image_ids)
    return {
        "images": [image for image in ground_truth["images"] if image["id"] in kept],
        "annotations": [
            item
            for item in ground_truth["annotations"]
            if item["image_id"] in kept and item["category_id"] in classes.index
        ],
        "categories": [category for category in ground_truth["categories"] if category["id"] in classes.index],
    }


def _mask_results(detections: Iterable[Detections], class_map: ClassMap, classes: ClassMap) -> list[dict[str, Any]]:
    """Return the results of these classes without their boxes."""
    return [
        {key: value for key, value in result.items() if key != "bbox"}
        for result in to_coco_results(detections, class_map)
        if result["category_id"] in classes.index
    ]


def _mean_valid(values: np.ndarray) -> float | None:
    valid = values[values > -1]
    return float(np.mean(valid)) if valid.size else None


def _twelve_numbers(curves: Curves) -> dict[str, float | None]:
    precision, recall = curves
    views = (
        precision[:, :, :, 0, 2],
        precision[_IOU_50, :, :, 0, 2],
        precision[_IOU_75, :, :, 0, 2],
        *(precision[:, :, :, size, 2] for size in (1, 2, 3)),
        *(recall[:, :, 0, limit] for limit in (0, 1, 2)),
        *(recall[:, :, size, 2] for size in (1, 2, 3)),
    )
    return {name: _mean_valid(view) for name, view in zip(BOX_METRIC_NAMES, views, strict=True)}


def _per_class(curves: Curves, objects: Iterable[Mapping[str, Any]], class_map: ClassMap) -> dict[str, ClassResult]:
    """Return the results by class name in the order of the class map; a repeated name is followed by its id."""
    columns = {category_id: column for column, category_id in enumerate(sorted(class_map.category_ids))}
    objects_of = Counter(annotation["category_id"] for annotation in objects)
    per_class = {}
    for category_id, name in zip(class_map.category_ids, class_map.distinct_names, strict=True):
        precision = curves.precision[:, :, columns[category_id], 0, 2]  # (T, R)
        per_class[name] = ClassResult(_mean_valid(precision), _mean_valid(precision[_IOU_50]), objects_of[category_id])
    return per_class


def resolve_engine(engine: str) -> str:
    """Return ``pycocotools`` or ``hotcoco``; :class:`InputError` if the engine is unknown or not installed."""
    if engine not in ENGINES:
        raise InputError(f"evaluation engine must be one of {', '.join(ENGINES)}; got '{engine}'")
    has_hotcoco = importlib.util.find_spec("hotcoco") is not None
    if engine == "hotcoco" and not has_hotcoco:
        raise InputError(
            "evaluation engine 'hotcoco' is not installed: run pip install 'detr_bf[fast-eval]', "
            "or choose engine 'pycocotools'"
        )
    if engine == "auto":
        return "hotcoco" if has_hotcoco else "pycocotools"
    return engine


def match_and_accumulate(
    engine: str,
    ground_truth: dict[str, Any],
    results: list[dict[str, Any]] | np.ndarray,
    limits: Sequence[int],
    kind: str,
) -> Curves:
    """Return COCO's curves by the IoU of ``kind``, ``bbox`` or ``segm``. pycocotools adds keys to ``results``.

    Args:
        engine: ``pycocotools`` or ``hotcoco``.
        ground_truth: a COCO data set.
        results: in COCO's results format, or the array of :func:`box_results`.
        limits: detections per image and class, ascending.
        kind: ``bbox`` or ``segm``.
    """
    if engine == "hotcoco":
        import hotcoco

        truth = hotcoco.COCO(ground_truth)
        return _accumulate(hotcoco.COCOeval(truth, truth.load_res(results), kind), limits)
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth, found = COCO(), COCO()
        truth.dataset = {
            key: [dict(entry) for entry in entries] for key, entries in ground_truth.items()
        }  # it adds keys
        truth.createIndex()
        if len(results):
            found = truth.loadRes(results)
        else:  # loadRes fails on an empty list
            found.dataset = {**truth.dataset, "annotations": []}
            found.createIndex()
        return _accumulate(COCOeval(truth, found, kind), limits)


def _accumulate(evaluation: Any, limits: Sequence[int]) -> Curves:
    """Run the ``COCOeval`` of either engine; both have the same attributes."""
    evaluation.params.maxDets = list(limits)
    evaluation.evaluate()
    evaluation.accumulate()
    return Curves(evaluation.eval["precision"], evaluation.eval["recall"])
