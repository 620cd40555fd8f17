"""Masked autoencoding: pre-training a vision transformer (He et al. 2022, arXiv 2111.06377)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from detr_bf.classification.assembly import build_masked_autoencoder
from detr_bf.classification.assembly_data import ImageSplits, val_loop
from detr_bf.classification.masked_autoencoder import MaskedAutoencoder, reconstruction_loss
from detr_bf.classification.masked_config import MaskedConfig
from detr_bf.classification.metrics import ReconstructionEvaluator
from detr_bf.classification.network import ENCODER
from detr_bf.classification.page import MASKED_PAGE
from detr_bf.classification.sheet import reconstruction_sheet
from detr_bf.classification.task import ImageTask, pixels, random_images, shown
from detr_bf.common.devices import device_of
from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.engine import (
    Checkpoint,
    Evaluation,
    RunFolder,
    build_and_load,
    checkpoint_of,
    load_fitting,
    load_strict,
)
from detr_bf.engine.step import Criterion
from detr_bf.interop.conversion import same_outputs, save_weights
from detr_bf.interop.weights import read_state
from detr_bf.report import save_picture, tolerating
from detr_bf.tasks.task import Evaluate

logger = logging.getLogger(__name__)


class MaskedTask(ImageTask[MaskedConfig]):
    """A masked autoencoder."""

    kind = "a masked autoencoder"
    page = MASKED_PAGE
    deploy_option = "--encoder"

    def build_model(self, num_classes: int, *, pretrained: bool = False) -> MaskedAutoencoder:
        """Return the autoencoder; both arguments are ignored."""
        return build_masked_autoencoder(self.config)

    def initialize(self, model: nn.Module, classes: ClassMap) -> None:
        """Load ``init_from`` if it is set."""
        if self.config.init_from:
            weights = initial_weights(Path(self.config.init_from))
            logger.info(load_fitting(model, weights, self.config.init_from))

    def build_criterion(self, model: nn.Module, class_counts: Sequence[int] | None = None) -> Criterion:
        return reconstruction_loss

    def build_evaluation(self, class_map: ClassMap, folder: RunFolder, data: ImageSplits | None = None) -> Evaluate:
        loop = val_loop(self.config, data or self.load_data(), device_of(self.config.device))
        return Evaluation(loop, ReconstructionEvaluator)

    def load_evaluated(self, source: Path, checkpoint: Checkpoint | None = None) -> tuple[nn.Module, ClassMap]:
        model = self.build_model(0)
        load_strict(model, read_state(source), str(source))
        return model, ClassMap((), ())  # it has no classes

    @torch.no_grad()
    def write_outputs(self, folder: RunFolder, evaluate: Evaluation[ReconstructionEvaluator], model: nn.Module) -> None:
        count = self.config.eval.pictures
        if not count:
            return
        with tolerating(str(folder.sheet)):
            folder.sheet.unlink(missing_ok=True)
            val, transforms = self.load_data().val, self.config.data.transforms
            indices = torch.linspace(0, len(val) - 1, min(count, len(val))).round().long().tolist()
            device = next(model.parameters()).device
            images = torch.stack([pixels(val, index) for index in indices]).to(device)
            autoencoder = cast("Any", model.eval())
            seen, guessed = autoencoder.pictures(images, autoencoder(images))
            seen, guessed = shown(seen, transforms), shown(guessed, transforms)
            save_picture(folder.sheet, reconstruction_sheet(shown(images, transforms), seen, guessed))

    def deploy(self, checkpoint: Checkpoint, source: Path, target: Path) -> str:
        """Write the averaged weights, or else the last, of the encoder for timm's network, under its own names."""
        whole = build_and_load(lambda: self.build_model(0), checkpoint.weights, source)
        kept = {name.removeprefix(ENCODER): x for name, x in checkpoint.weights.items() if name.startswith(ENCODER)}
        encoder = build_and_load(lambda: self.build_model(0).encoder, kept, source)
        if not same_outputs(whole.encoder, encoder, random_images(self.config)):
            raise InputError(f"{source}: the encoder alone gives other outputs, so nothing was written")
        save_weights(target, kept)
        return (
            f"{len(kept)} tensors of the encoder load into the plain {self.config.model.name} without classes: {target}"
        )


def initial_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights of a masked autoencoder, or of a plain network as those of the encoder, without positions."""
    weights = read_state(checkpoint_of(path))
    if any(name.startswith(ENCODER) for name in weights):
        return weights
    if "pos_embed" in weights:
        logger.info("init_from %s: pos_embed is ignored, a masked autoencoder has fixed sine positions", path)
    return {ENCODER + name: value for name, value in weights.items() if name != "pos_embed"}
