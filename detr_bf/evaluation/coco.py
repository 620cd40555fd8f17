"""COCO average precision of boxes and masks: one thin adapter over pycocotools and hotcoco.

The engines match and accumulate; the twelve numbers are read here, once, from the precision and recall arrays, so that
they mean the same whichever engine ran. Definitions: https://cocodataset.org/#detection-eval; ``pycocotools.cocoeval``.

Shape legend: T IoU thresholds, R recall thresholds, K classes, A size ranges (all, small, medium, large),
M detection limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from detr_bf.data.annotation_values import annotation_values
from detr_bf.data.coco import CocoAnnotations, annotated_size, read_annotations
from detr_bf.data.images import MAX_PIXELS
from detr_bf.errors import InputError
from detr_bf.evaluation.engines import Curves, match_and_accumulate, resolve_engine
from detr_bf.evaluation.run_lengths import with_run_lengths
from detr_bf.evaluation.summary import METRIC_NAMES, SIZE_NAMES, ClassResult, CocoSummary
from detr_bf.files import write_json
from detr_bf.structures import ClassMap, Detections
from detr_bf.text import printable

_IOU_50, _IOU_75 = 0, 5  # positions in the engines' thresholds 0.50, 0.55, ..., 0.95
_SIZE_BOUNDS = {"small": (0, 32**2), "medium": (32**2, 96**2), "large": (96**2, 1e10)}  # pixels, both ends included


class CocoEvaluator:
    """Collects the detections of a split, every image once, and measures them against its annotation file.

    The file may lack ``area`` (width x height of the box is taken), ``iscrowd`` (0) and ``id`` of the annotations: they
    are filled in on a copy. Ids are always renumbered there, because the metric reads annotation id 0 as "no match".

    Args:
        annotations: COCO JSON with ``images``, ``annotations`` and ``categories``.
        class_map: the model's classes; ``Detections.labels`` index into it.
        engine: ``auto`` takes hotcoco when it is installed, else pycocotools; their results are bit-identical.
        max_detections: counted per class and image, best scores first, as COCO does.
        masks: read the masks of the ground truth too, for :meth:`summarize_masks`.
        panoptic: folder of the PNG files of a panoptic JSON.
        max_pixels: that one of them may have.

    Raises:
        InputError: the file is missing or is not COCO, a value in it cannot be used, its categories contradict
            ``class_map``, the engine is unknown or not installed.
    """

    def __init__(
        self,
        annotations: str | Path,
        class_map: ClassMap,
        engine: str = "auto",
        max_detections: int = 100,
        *,
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
            Path(annotations), class_map, masks=masks, panoptic=panoptic, max_pixels=max_pixels
        )
        self._image_ids = [image["id"] for image in self._ground_truth["images"]]
        self._known_ids = frozenset(self._image_ids)
        self._detections: dict[int, Detections] = {}

    def update(self, detections: Sequence[Detections]) -> None:
        """Add images; an image without a detection counts and must be given too, with no boxes.

        Raises:
            InputError: an image is not in the annotation file or was given before, a box or score is not finite.
        """
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
            _check_detections(image, self.class_map.num_classes)
            self._detections[image.image_id] = image

    @property
    def detections(self) -> list[Detections]:
        """All that was collected, in the order it came."""
        return list(self._detections.values())

    def summarize(self, partial: bool = False) -> CocoSummary:
        """The numbers of the boxes for all images of the file; with ``partial``, for those seen so far only.

        Raises:
            InputError: images are missing and ``partial`` is False.
        """
        return self._summary("bbox", self.class_map, partial)

    def summarize_masks(self, partial: bool = False) -> CocoSummary:
        """The same numbers by the IoU of masks, of the classes that are things.

        The evaluator must have been made with ``masks`` and have been given detections with masks.
        """
        classes = zip(self.class_map.category_ids, self.class_map.names, self.class_map.is_thing, strict=True)
        things = [(category_id, name) for category_id, name, is_thing in classes if is_thing]
        return self._summary("segm", ClassMap(tuple(i for i, _ in things), tuple(name for _, name in things)), partial)

    def _summary(self, kind: str, classes: ClassMap, partial: bool) -> CocoSummary:
        """By the IoU of ``kind``, of these ``classes``."""
        missing = [image_id for image_id in self._image_ids if image_id not in self._detections]
        if missing and not partial:
            raise InputError(
                f"{len(missing)} of {len(self._image_ids)} images were not evaluated (image ids "
                f"{', '.join(map(str, missing[:5]))}{', ...' if len(missing) > 5 else ''}): "
                "run them all, or ask for summarize(partial=True)"
            )
        ground_truth = _restrict(self._ground_truth, self._detections.keys(), classes)
        results = _of_kind(kind, to_coco_results(self.detections, self.class_map), classes)
        limits = (1, min(10, self.max_detections), self.max_detections)
        curves = match_and_accumulate(self.engine, ground_truth, results, limits, kind)
        objects = [annotation for annotation in ground_truth["annotations"] if not annotation["iscrowd"]]
        return CocoSummary(
            **_twelve_numbers(curves),
            per_class=_per_class(curves, objects, classes),
            num_objects_by_size=_count_sizes(objects),
            num_images=len(self._detections),
            num_detections=len(results),
            max_detections=self.max_detections,
            engine=self.engine,
        )


def merge_shards(shards: Iterable[Sequence[Detections]]) -> list[Detections]:
    """Join the detections of several processes, ordered by image id.

    A distributed sampler repeats images to fill its last round: the first result of an image id stays, the rest go.
    """
    by_image: dict[int, Detections] = {}
    for shard in shards:
        for image in shard:
            by_image.setdefault(image.image_id, image)
    return [by_image[image_id] for image_id in sorted(by_image)]


def to_coco_results(detections: Iterable[Detections], class_map: ClassMap) -> list[dict[str, Any]]:
    """COCO's results format: category ids of the annotation file, boxes x, y, width, height in pixels, masks as RLE."""
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


def write_results(path: str | Path, detections: Iterable[Detections], class_map: ClassMap) -> None:
    """Atomically write :func:`to_coco_results` as JSON."""
    write_json(path, to_coco_results(detections, class_map))


def load_ground_truth(
    path: Path,
    class_map: ClassMap,
    *,
    masks: bool = False,
    panoptic: Path | None = None,
    max_pixels: int = MAX_PIXELS,
) -> dict[str, Any]:
    """Read a COCO file into a fresh, complete and minimal data set (see :class:`CocoEvaluator`).

    Raises:
        InputError: the file is missing, is not COCO, or contradicts ``class_map``; a mask cannot be read.
    """
    content = read_annotations(path)
    if masks:
        content = with_run_lengths(content, panoptic, max_pixels)
    sizes = {image["id"]: annotated_size(image) for image in content.images}
    image_ids = sizes.keys()
    listed = [annotation for annotation in content.annotations if annotation["image_id"] in image_ids]
    _check_categories(content, class_map)
    _check_known(path, listed, class_map)
    names = dict(zip(class_map.category_ids, class_map.names, strict=True))
    return {
        "images": [{"id": image_id, **_sides(sizes[image_id])} for image_id in sorted(image_ids)],
        "annotations": [_complete(path, annotation, number, masks) for number, annotation in enumerate(listed, 1)],
        "categories": [{"id": category_id, "name": names[category_id]} for category_id in sorted(names)],
    }


def _sides(size: tuple[int, int] | None) -> dict[str, int]:
    """What pycocotools wants to find of an image with masks; run lengths know their size themselves."""
    height, width = size or (0, 0)
    return {"height": height, "width": width}


def _complete(path: Path, annotation: Mapping[str, Any], number: int, masks: bool) -> dict[str, Any]:
    try:
        values = annotation_values(annotation)
    except ValueError as error:
        raise InputError(
            f"{printable(path)}: image {annotation['image_id']} has {error}; tools/check_data.py lists everything that "
            "is wrong with the data"
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


def _check_categories(content: CocoAnnotations, class_map: ClassMap) -> None:
    known = dict(zip(class_map.category_ids, class_map.names, strict=True))
    listed = content.class_map
    for category_id, name in zip(listed.category_ids, listed.names, strict=True):
        if known.get(category_id, name) != name:
            raise InputError(
                f"{printable(content.path)} calls category id {category_id} '{name}', the model was trained with it as "
                f"'{known[category_id]}': evaluate with annotations of the same categories"
            )


def _check_known(path: Path, objects: Sequence[Mapping[str, Any]], class_map: ClassMap) -> None:
    unknown = {annotation["category_id"] for annotation in objects}.difference(class_map.category_ids)
    if unknown:
        raise InputError(
            f"{printable(path)} has objects of category ids {sorted(unknown)}, which the model does not know; "
            f"it knows {sorted(class_map.category_ids)}"
        )


def _check_detections(image: Detections, num_classes: int) -> None:
    if not (torch.isfinite(image.boxes).all() and torch.isfinite(image.scores).all()):
        raise InputError(
            f"the model's boxes or scores for image id {image.image_id} are not finite: its weights or the image are "
            "broken, AP would mean nothing"
        )
    labels = image.labels
    assert not len(labels) or 0 <= int(labels.min()) <= int(labels.max()) < num_classes, "labels outside the class map"


def _restrict(ground_truth: Mapping[str, Any], image_ids: Iterable[int], classes: ClassMap) -> dict[str, Any]:
    """The same data set with these images and classes only, all dictionaries fresh: the engines write into them."""
    kept = set(image_ids)
    return {
        "images": [dict(image) for image in ground_truth["images"] if image["id"] in kept],
        "annotations": [
            dict(item)
            for item in ground_truth["annotations"]
            if item["image_id"] in kept and item["category_id"] in classes.index
        ],
        "categories": [dict(category) for category in ground_truth["categories"] if category["id"] in classes.index],
    }


def _of_kind(kind: str, results: Iterable[dict[str, Any]], classes: ClassMap) -> list[dict[str, Any]]:
    """What an engine reads of the results of these classes: boxes, or masks."""
    unread = {"bbox": "segmentation", "segm": "bbox"}[kind]
    return [
        {key: value for key, value in result.items() if key != unread}
        for result in results
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
    return {name: _mean_valid(view) for name, view in zip(METRIC_NAMES, views, strict=True)}


def _per_class(curves: Curves, objects: Iterable[Mapping[str, Any]], class_map: ClassMap) -> dict[str, ClassResult]:
    """In the order of the class map; a name that several categories share is followed by its id."""
    columns = {category_id: column for column, category_id in enumerate(sorted(class_map.category_ids))}
    objects_of = Counter(annotation["category_id"] for annotation in objects)
    per_class = {}
    for category_id, name in zip(class_map.category_ids, class_map.distinct_names, strict=True):
        precision = curves.precision[:, :, columns[category_id], 0, 2]  # (T, R)
        per_class[name] = ClassResult(_mean_valid(precision), _mean_valid(precision[_IOU_50]), objects_of[category_id])
    return per_class


def _count_sizes(objects: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Like the metric, an object exactly on a bound counts on both sides."""
    return {
        name: sum(low <= annotation["area"] <= high for annotation in objects)
        for name, (low, high) in ((name, _SIZE_BOUNDS[name]) for name in SIZE_NAMES)
    }
