"""Detectors: what is done before, with and after their training."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.ops import box_convert

from detr_bf.assembly import (
    build_classification,
    build_detector_criterion,
    build_evaluation,
    build_model,
    build_trainer,
    build_val_data,
    data_source,
    device_of,
    read_initial_weights,
)
from detr_bf.config import DetectionConfig
from detr_bf.config.detection import SplitConfig
from detr_bf.data.checks.annotations import Report, examine
from detr_bf.data.coco import read_annotations
from detr_bf.data.sample_key import SampleKey
from detr_bf.detectors import detector_named
from detr_bf.engine import (
    Checkpoint,
    DetectionEvaluator,
    Evaluation,
    RunFolder,
    Trainer,
    is_checkpoint,
    load_checkpoint,
    load_strict,
)
from detr_bf.engine.step import Criterion
from detr_bf.errors import InputError
from detr_bf.evaluation import PanopticFile, write_results
from detr_bf.report import PanopticSheetRow, SheetRow, class_labels, save_panoptic_sheet, save_sheet, tolerating
from detr_bf.structures import Batch, ClassMap, Target
from detr_bf.tasks.task import Evaluate, Task

logger = logging.getLogger(__name__)

CLASS_BIAS = "decoder.heads.classes.0.bias"


class DetectionTask(Task[DetectionConfig]):
    """Train a detector, or its mask head, on COCO files."""

    batch_type = Batch

    def examine(self) -> Report:
        return examine(
            data_source(self.config, "train"),
            None if self.config.data.val == SplitConfig() else data_source(self.config, "val"),
            num_queries=self.config.model.num_queries,
            masks=self.config.model.masks,
            workers=max(1, self.config.data.workers),
            max_pixels=self.config.data.max_pixels,
        )

    def check(self) -> None:
        detector_named(self.config.model.name)  # before all images are read
        for split in ("train", "val"):  # a run that cannot be evaluated would not get a best checkpoint
            data_source(self.config, split)
        super().check()

    def build_model(self, num_classes: int) -> nn.Module:
        return build_model(self.config, num_classes, pretrained=False)

    def build_criterion(self, model: nn.Module) -> Criterion:
        return build_detector_criterion(self.config, model)

    def build_trainer(self, folder: RunFolder, resume_from: Checkpoint | None) -> Trainer:
        return build_trainer(self.config, folder, resume_from)

    def build_evaluation(self, source: Path, folder: RunFolder) -> tuple[nn.Module, Evaluate]:
        device = device_of(self.config)
        weights, classes = _weights_and_classes(self.config, source)
        plain, weights = _as_evaluated(self.config, weights)
        model = build_model(plain, classes.num_classes, pretrained=False)
        load_strict(model, weights, str(source))
        return model.to(device), build_evaluation(self.config, classes, device, folder)

    def leave(self, folder: RunFolder, evaluate: Evaluation[DetectionEvaluator], model: nn.Module) -> None:
        found = evaluate.evaluator
        assert found is not None, "the main process has evaluated"
        write_results(folder.results, found.detections, found.class_map)
        if not self.config.eval.pictures:
            return
        names = class_labels(found.class_map)
        with tolerating(str(folder.sheet)):
            folder.sheet.unlink(missing_ok=True)
            rows = list(_sheet_rows(self.config, found))
            save_sheet(folder.sheet, rows, names, self.config.eval.picture_threshold)
        if found.panoptic:
            with tolerating(str(folder.panoptic_sheet)):
                folder.panoptic_sheet.unlink(missing_ok=True)
                panoptic_rows = list(_panoptic_rows(folder, self.config, found))
                save_panoptic_sheet(folder.panoptic_sheet, panoptic_rows, names)


def _weights_and_classes(config: DetectionConfig, source: Path) -> tuple[dict[str, Tensor], ClassMap]:
    """A checkpoint of ours says its classes.

    Bare weights do not: as many classes as the annotations have are taken to be those, in the order of their ids; more
    are taken to be numbered by category id, as in the authors' files.

    Raises:
        InputError: neither can be.
    """
    if is_checkpoint(source):
        checkpoint = load_checkpoint(source)
        return checkpoint.weights, checkpoint.classes
    weights = read_initial_weights(source)
    if CLASS_BIAS not in weights:
        raise InputError(f"{source} holds no class head: these are not the weights of a whole detector")
    listed = read_annotations(data_source(config, "val").annotations).class_map
    count = len(weights[CLASS_BIAS]) - build_classification(config).num_logits(0)
    if count == listed.num_classes:
        logger.warning("%s does not say its classes: taken to be the %d of the annotations, by id", source, count)
        return weights, listed
    if count <= max(listed.category_ids):
        raise InputError(
            f"{source} holds {count} classes and does not say which; the annotations have {listed.num_classes}, with "
            f"ids up to {max(listed.category_ids)}: evaluate a run folder or its checkpoint, which knows its classes"
        )
    logger.warning("%s does not say its classes: its %d are taken to be category ids from 0", source, count)
    known = dict(zip(listed.category_ids, zip(listed.names, listed.is_thing, strict=True), strict=True))
    names, is_thing = zip(*(known.get(number, (f"id {number}", True)) for number in range(count)), strict=True)
    return weights, ClassMap(tuple(range(count)), names, is_thing)


def _as_evaluated(config: DetectionConfig, weights: dict[str, Tensor]) -> tuple[DetectionConfig, dict[str, Tensor]]:
    """The model and the weights that evaluation reads.

    Relative localization is for training alone, and so is batch attention but for mini-batch inference.
    """
    plain, unread = copy.deepcopy(config), {"relative_localization"}
    plain.plugins.relative_localization.enabled = False
    if not (config.batch_former.enabled and config.batch_former.mode == "mini_batch_inference"):
        plain.batch_former.enabled = False
        unread.add("batch_former")
    return plain, {name: value for name, value in weights.items() if unread.isdisjoint(name.split("."))}


def _sheet_rows(config: DetectionConfig, evaluation: DetectionEvaluator) -> Iterator[SheetRow]:
    """Images spread evenly over the validation split, with what they hold and what was found."""
    found = {detections.image_id: detections for detections in evaluation.detections}
    for image, target in _shown_images(config, evaluation.class_map):
        height, width = target.size
        boxes = box_convert(target.boxes, "cxcywh", "xyxy") * torch.tensor([width, height, width, height])
        yield SheetRow(image, boxes, target.labels, found[target.image_id], target.file_name)


def _panoptic_rows(
    folder: RunFolder, config: DetectionConfig, evaluation: DetectionEvaluator
) -> Iterator[PanopticSheetRow]:
    """The same images with both panoptic maps."""
    class_map, val = evaluation.class_map, data_source(config, "val")
    assert val.panoptic is not None, "there are maps to compare with"
    truth = PanopticFile(val.annotations, val.panoptic, class_map, config.data.max_pixels)
    found = PanopticFile(folder.panoptic_results, folder.panoptic, class_map, config.data.max_pixels)
    for image, target in _shown_images(config, class_map):
        yield PanopticSheetRow(image, truth[target.image_id], found[target.image_id], target.file_name)


def _shown_images(config: DetectionConfig, class_map: ClassMap) -> Iterator[tuple[Tensor, Target]]:
    """Images spread evenly over the validation split, as they are in their files."""
    data = build_val_data(config, class_map, transform=lambda sample: sample)
    for place in torch.linspace(0, len(data) - 1, min(config.eval.pictures, len(data))).tolist():
        yield data[SampleKey(0, round(place))]
