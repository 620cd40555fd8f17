"""Evaluators for a data set by the ``evaluator_type`` of its metadata; own panoptic quality."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from detectron2.data import MetadataCatalog
from detectron2.evaluation import (
    CityscapesInstanceEvaluator,
    COCOEvaluator,
    COCOPanopticEvaluator,
    DatasetEvaluator,
    DatasetEvaluators,
    LVISEvaluator,
    PascalVOCDetectionEvaluator,
)
from detectron2.utils import comm
from detectron2.utils.logger import create_small_table

from detr_bf.common.errors import InputError
from detr_bf.common.files import write_json
from detr_bf.common.structures import ClassMap, PanopticMap, Segment
from detr_bf.detectron2.datasets import panoptic_classes
from detr_bf.evaluation import EncodedMap, PanopticEvaluator, encode, write_encoded
from detr_bf.evaluation.coco import load_ground_truth

logger = logging.getLogger(__name__)

EVALUATION_TASKS = {False: ("bbox",), True: ("bbox", "segm")}  # by whether masks are evaluated
Dictionaries = Sequence[Mapping[str, Any]]


def build_evaluator(
    dataset_name: str, output_dir: str | Path, *, masks: bool = False, panoptic: bool = False
) -> DatasetEvaluator:
    """Build the evaluator of a registered data set.

    Args:
        dataset_name: its metadata has an ``evaluator_type``: "coco", "coco_panoptic_seg", "lvis", "pascal_voc" or
            "cityscapes_instance".
        output_dir: folder for predictions and results.
        masks: the model has a mask head; evaluate masks too.
        panoptic: the model predicts ``panoptic_seg``; compute its quality on panoptic data.

    Raises:
        InputError: missing or unknown ``evaluator_type``, or unusable annotations of a panoptic data set.
    """
    if not isinstance(dataset_name, str):
        raise InputError(f"expected the name of one data set, got {dataset_name}: evaluate data sets one by one")
    kind = MetadataCatalog.get(dataset_name).get("evaluator_type")
    folder, tasks = str(output_dir), EVALUATION_TASKS[masks]
    makers: dict[str, Callable[[], DatasetEvaluator]] = {
        "coco": lambda: COCOEvaluator(dataset_name, tasks, output_dir=folder),
        "coco_panoptic_seg": lambda: _panoptic_evaluator(dataset_name, folder, masks, panoptic),
        "lvis": lambda: LVISEvaluator(dataset_name, tasks, output_dir=folder),
        "pascal_voc": lambda: PascalVOCDetectionEvaluator(dataset_name),
        "cityscapes_instance": lambda: CityscapesInstanceEvaluator(dataset_name),
    }
    if kind not in makers:
        raise InputError(
            f"data set '{dataset_name}' has the evaluator_type {kind!r}, expected one of {', '.join(makers)}: set it "
            "in MetadataCatalog, or register the data set with register_coco or register_coco_panoptic"
        )
    return makers[kind]()


def _panoptic_evaluator(dataset_name: str, folder: str, masks: bool, panoptic: bool) -> DatasetEvaluator:
    things = ThingEvaluator(dataset_name, folder, masks=masks)
    if not panoptic:
        return things
    quality = COCOPanopticEvaluator if find_spec("panopticapi") else PanopticQualityEvaluator
    return DatasetEvaluators([things, quality(dataset_name, folder)])


class ThingEvaluator(COCOEvaluator):
    """Average precision of the things of a panoptic data set, by detectron2's evaluator.

    That evaluator needs contiguous classes and a detection file. The things are therefore renumbered, with metadata
    under the name ``{dataset_name}_things``. The file is ``json_file`` of the metadata; if there is none, it is made
    from the panoptic annotations and written to ``output_dir``.

    Args:
        dataset_name: a registered panoptic data set.
        output_dir: folder for that file, predictions and results.
        masks: evaluate masks too.

    Raises:
        InputError: the annotations cannot be used.
    """

    def __init__(self, dataset_name: str, output_dir: str | Path, *, masks: bool = False) -> None:
        classes = panoptic_classes(dataset_name)
        is_thing = torch.tensor(classes.is_thing)
        self._thing_index = torch.where(is_thing, is_thing.cumsum(0) - 1, -1)  # by class; -1: stuff
        entry = _describe_things(dataset_name, classes, Path(output_dir), masks)
        super().__init__(entry, EVALUATION_TASKS[masks], output_dir=str(output_dir))

    def process(self, inputs: Dictionaries, outputs: Dictionaries) -> None:
        """Add images; detections of stuff are ignored."""
        things = []
        for output in outputs:
            instances = output["instances"].to("cpu")
            indices = self._thing_index[instances.pred_classes]
            instances = instances[indices >= 0]
            instances.pred_classes = indices[indices >= 0]
            things.append({"instances": instances})
        super().process(inputs, things)


def _describe_things(dataset_name: str, classes: ClassMap, folder: Path, masks: bool) -> str:
    """Add the metadata of the things and return their name."""
    metadata = MetadataCatalog.get(dataset_name)
    path = metadata.get("json_file")
    if path is None:
        path = str(folder / f"{dataset_name}_things.json")
        if comm.is_main_process():
            write_json(path, _things_as_detection(metadata, classes, masks))
        comm.synchronize()
    pairs = zip(classes.category_ids, classes.distinct_names, classes.is_thing, strict=True)
    things = {category_id: name for category_id, name, is_thing in pairs if is_thing}
    entry = f"{dataset_name}_things"
    MetadataCatalog.pop(entry, None)  # left by an evaluation with another folder
    MetadataCatalog.get(entry).set(
        json_file=path,
        thing_classes=list(things.values()),
        thing_dataset_id_to_contiguous_id={category_id: index for index, category_id in enumerate(things)},
    )
    return entry


def _things_as_detection(metadata: Any, classes: ClassMap, masks: bool) -> dict[str, Any]:
    """Return the things of a panoptic file as a COCO detection dictionary."""
    truth = load_ground_truth(
        Path(metadata.panoptic_json), classes, masks=masks, panoptic=Path(metadata.panoptic_root) if masks else None
    )
    things = {category_id for category_id, index in classes.index.items() if classes.is_thing[index]}
    return {
        "images": truth["images"],
        "annotations": [one for one in truth["annotations"] if one["category_id"] in things],
        "categories": [one for one in truth["categories"] if one["id"] in things],
    }


class PanopticQualityEvaluator(DatasetEvaluator):
    """Panoptic quality by :class:`detr_bf.evaluation.PanopticEvaluator`; panopticapi is not needed.

    The predictions of all ranks are written to ``output_dir``: ``predictions.json`` and the folder ``panoptic``.

    Args:
        dataset_name: a registered panoptic data set.
        output_dir: created if missing.

    Raises:
        InputError: the annotations cannot be used.
    """

    def __init__(self, dataset_name: str, output_dir: str | Path) -> None:
        metadata = MetadataCatalog.get(dataset_name)
        self._class_map = panoptic_classes(dataset_name)
        self._truth = (metadata.panoptic_json, metadata.panoptic_root)
        self._image_root = Path(metadata.image_root)
        self._folder = Path(output_dir)
        self.reset()

    def reset(self) -> None:
        """Remove all images."""
        self._quality = PanopticEvaluator(*self._truth, self._class_map)
        self._maps: list[EncodedMap] = []

    def process(self, inputs: Dictionaries, outputs: Dictionaries) -> None:
        """Add images, each with ``panoptic_seg``: ids (h, w), 0 = no segment, and the list of segments.

        Raises:
            InputError: an image was given twice or has no ground truth; a map and its segments disagree.
        """
        for image, output in zip(inputs, outputs, strict=True):
            ids, listed = output["panoptic_seg"]
            segments = (Segment(int(one["id"]), int(one["category_id"]), int(one["area"])) for one in listed)
            found = PanopticMap(image["image_id"], ids.cpu(), tuple(segments))
            self._quality.update([found])
            path = Path(image["file_name"])
            relative = path.relative_to(self._image_root) if path.is_relative_to(self._image_root) else path.name
            names = {found.image_id: str(relative)}
            self._maps.append(encode(found, self._class_map, names))

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Return the nine metrics in percent, NaN if there is no class to evaluate; empty except on rank 0.

        Raises:
            InputError: an image is missing.
        """
        shards = comm.gather((self._quality, self._maps))
        if not comm.is_main_process():
            return {}
        for quality, _ in shards[1:]:
            self._quality.merge(quality)
        maps = chain.from_iterable(maps for _, maps in shards)
        write_encoded(self._folder / "predictions.json", self._folder / "panoptic", maps, self._class_map)
        metrics = self._quality.summarize().metrics
        result = {name: float("nan") if value is None else 100 * value for name, value in metrics.items()}
        logger.info("panoptic quality:\n%s", create_small_table(result))
        return {"panoptic_seg": result}
