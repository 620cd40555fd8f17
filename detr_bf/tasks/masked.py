"""Masked autoencoders: what is done before, with and after their training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from detr_bf import interop
from detr_bf.assembly import (
    build_image_splits,
    build_masked_autoencoder,
    build_masked_evaluation,
    build_masked_trainer,
    check_image_data,
    device_of,
)
from detr_bf.classification.masked_autoencoder import MaskedCriterion
from detr_bf.classification.metrics import ReconstructionEvaluator
from detr_bf.classification.report.reconstructions import save_reconstructions
from detr_bf.config import MaskedConfig
from detr_bf.data.checks.annotations import Report
from detr_bf.engine import Checkpoint, Measurement, RunFolder, Trainer, load_strict
from detr_bf.engine.step import Criterion
from detr_bf.report import tolerating
from detr_bf.tasks.pictures import pixels, shown
from detr_bf.tasks.task import Evaluate, Task


class MaskedTask(Task[MaskedConfig]):
    """Pre-train a vision transformer as a masked autoencoder."""

    def examine(self) -> Report:
        return check_image_data(self.config)

    def build_model(self, num_classes: int) -> nn.Module:
        """Classes are nothing to it."""
        return build_masked_autoencoder(self.config)

    def build_criterion(self, model: nn.Module) -> Criterion:
        return MaskedCriterion()

    def build_trainer(self, folder: RunFolder, resume_from: Checkpoint | None) -> Trainer:
        return build_masked_trainer(self.config, folder, resume_from)

    def build_evaluation(self, source: Path, folder: RunFolder) -> tuple[nn.Module, Evaluate]:
        device, splits = device_of(self.config), build_image_splits(self.config)
        model = self.build_model(splits.class_map.num_classes)
        load_strict(model, interop.read_state(source), str(source))
        return model.to(device), build_masked_evaluation(self.config, splits, device)

    @torch.no_grad()
    def leave(self, folder: RunFolder, evaluate: Measurement[ReconstructionEvaluator], model: nn.Module) -> None:
        count = self.config.eval.pictures
        if not count:
            return
        with tolerating(str(folder.sheet)):
            folder.sheet.unlink(missing_ok=True)
            val, transforms = build_image_splits(self.config).val, self.config.data.transforms
            places = torch.linspace(0, len(val) - 1, min(count, len(val))).round().long().tolist()
            device = next(model.parameters()).device
            images = torch.stack([pixels(val, place) for place in places]).to(device)
            autoencoder = cast("Any", model.eval())
            seen, guessed = autoencoder.pictures(images, autoencoder(images))
            save_reconstructions(folder.sheet, *(shown(batch, transforms) for batch in (images, seen, guessed)))
