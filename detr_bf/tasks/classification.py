"""Classifiers: what is done before, with and after their training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import nn

from detr_bf.assembly import (
    as_evaluated,
    build_classifier,
    build_classifier_criterion,
    build_classifier_evaluation,
    build_classifier_trainer,
    build_image_splits,
    check_image_data,
    device_of,
    evaluated_weights,
    read_network_weights,
)
from detr_bf.classification.metrics import ClassificationEvaluator, write_predictions
from detr_bf.classification.report.sheet import ClassifiedImage, save_classification_sheet
from detr_bf.config import ClassifierConfig
from detr_bf.data.checks.annotations import Report
from detr_bf.engine import Checkpoint, Measurement, RunFolder, Trainer, is_checkpoint, load_checkpoint, load_strict
from detr_bf.engine.step import Criterion
from detr_bf.errors import InputError
from detr_bf.report import class_labels, tolerating
from detr_bf.structures import ClassMap
from detr_bf.tasks.pictures import pixels, shown
from detr_bf.tasks.task import Evaluate, Task


class ClassificationTask(Task[ClassifierConfig]):
    """Train a classifier of timm's, with or without plug-ins."""

    def examine(self) -> Report:
        return check_image_data(self.config)

    def build_model(self, num_classes: int) -> nn.Module:
        return build_classifier(self.config, num_classes, pretrained=False)

    def build_criterion(self, model: nn.Module) -> Criterion:
        """Balanced Softmax counts the images of the training split, which must be at hand."""
        balanced = self.config.loss.name == "balanced_softmax"
        return build_classifier_criterion(
            self.config, model, build_image_splits(self.config).class_counts if balanced else ()
        )

    def build_trainer(self, folder: RunFolder, resume_from: Checkpoint | None) -> Trainer:
        return build_classifier_trainer(self.config, folder, resume_from)

    def build_evaluation(self, source: Path, folder: RunFolder) -> tuple[nn.Module, Evaluate]:
        device, splits = device_of(self.config), build_image_splits(self.config)
        if is_checkpoint(source):
            _check_classes(load_checkpoint(source).classes, splits.class_map, source)
        model = build_classifier(as_evaluated(self.config), splits.class_map.num_classes, pretrained=False)
        load_strict(model, evaluated_weights(read_network_weights(source)), str(source))
        return model.to(device), build_classifier_evaluation(self.config, splits, device)

    def leave(self, folder: RunFolder, evaluate: Measurement[ClassificationEvaluator], model: nn.Module) -> None:
        assert evaluate.evaluator is not None, "the main process has evaluated"
        write_predictions(folder.predictions, evaluate.evaluator.predictions(), evaluate.evaluator.class_map)
        if not self.config.eval.pictures:
            return
        with tolerating(str(folder.sheet)):
            folder.sheet.unlink(missing_ok=True)
            if rows := list(self._rows(evaluate.evaluator)):  # none where no logits are finite
                save_classification_sheet(folder.sheet, rows, class_labels(evaluate.evaluator.class_map))

    def _rows(self, evaluator: ClassificationEvaluator) -> Iterator[ClassifiedImage]:
        """The surest mistakes and, for the other half, the surest right answers."""
        val, found = build_image_splits(self.config).val, evaluator.predictions()
        half = -(-self.config.eval.pictures // 2)
        for row in (*found.most_confident(False, half), *found.most_confident(True, half)):
            image = shown(pixels(val, int(found.indices[row])), self.config.data.transforms)
            yield ClassifiedImage(image, int(found.labels[row]), int(found.predicted[row]), float(found.scores[row]))


def _check_classes(trained: ClassMap, found: ClassMap, source: Path) -> None:
    """Labels are numbered by the data at hand: they must mean what they meant in training."""
    if trained.names == found.names:
        return
    pairs = zip(trained.names, found.names, strict=False)
    first = next((pair for pair in pairs if pair[0] != pair[1]), None)
    difference = f"class '{first[0]}' is '{first[1]}' there" if first else "the others are missing"
    raise InputError(
        f"{source} was trained on {trained.num_classes} classes, the data has {found.num_classes} and {difference}: "
        "evaluate on the classes it was trained on"
    )
