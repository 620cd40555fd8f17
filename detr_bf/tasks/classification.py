"""Classifiers: what is done before, with and after their training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import nn

from detr_bf.build import (
    build_classifier,
    build_classifier_evaluation,
    build_classifier_trainer,
    build_image_splits,
    check_image_data,
    device_of,
    read_network_weights,
)
from detr_bf.config import ClassifierConfig
from detr_bf.engine import Checkpoint, Measurement, RunFolder, Trainer, load_strict
from detr_bf.evaluation import ClassificationEvaluator, write_predictions
from detr_bf.report import ClassifiedImage, save_classification_sheet
from detr_bf.tasks.pictures import pixels, shown
from detr_bf.tasks.task import Evaluate, Task, require_sound


class ClassificationTask(Task[ClassifierConfig]):
    """Train a classifier of timm's, with or without plug-ins."""

    def check(self) -> None:
        if self.config.data.check:
            require_sound(check_image_data(self.config))

    def build_trainer(self, folder: RunFolder, resume_from: Checkpoint | None) -> Trainer:
        return build_classifier_trainer(self.config, folder, resume_from)

    def build_evaluation(self, source: Path, folder: RunFolder) -> tuple[nn.Module, Evaluate]:
        device, splits = device_of(self.config), build_image_splits(self.config)
        model = build_classifier(self.config, splits.class_map.num_classes, pretrained=False)
        load_strict(model, read_network_weights(source), str(source))
        return model.to(device), build_classifier_evaluation(self.config, splits, device)

    def leave(self, folder: RunFolder, evaluate: Measurement[ClassificationEvaluator], model: nn.Module) -> None:
        assert evaluate.evaluator is not None, "the main process has evaluated"
        write_predictions(folder.predictions, evaluate.evaluator.predictions(), evaluate.evaluator.class_map)
        if self.config.eval.pictures:
            rows = list(self._rows(evaluate.evaluator))
            save_classification_sheet(folder.sheet, rows, evaluate.evaluator.class_map.distinct_names)

    def _rows(self, evaluator: ClassificationEvaluator) -> Iterator[ClassifiedImage]:
        """The surest mistakes and, for the other half, the surest right answers."""
        val, found = build_image_splits(self.config).val, evaluator.predictions()
        half = -(-self.config.eval.pictures // 2)
        for row in (*found.most_confident(False, half), *found.most_confident(True, half)):
            image = shown(pixels(val, int(found.places[row])), self.config.data.transforms)
            yield ClassifiedImage(image, int(found.labels[row]), int(found.predicted[row]), float(found.scores[row]))
