"""A masked autoencoder, its training and its evaluation."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from detr_bf import interop
from detr_bf.assembly.acceleration import accelerate
from detr_bf.assembly.classifier_data import ImageSplits, build_image_splits, val_loop
from detr_bf.assembly.image_training import image_trainer
from detr_bf.assembly.model import device_of
from detr_bf.assembly.network import ENCODER, build_network
from detr_bf.assembly.plugins import layers_of, named
from detr_bf.assembly.training import PRECISIONS, check_same_classes
from detr_bf.batchformer import BatchFormerV2
from detr_bf.classification.masked_autoencoder import MaskedAutoencoder, MaskedCriterion, initialize_as_published
from detr_bf.classification.metrics import ReconstructionEvaluator
from detr_bf.config import MaskedConfig
from detr_bf.engine import Checkpoint, Measurement, RunFolder, Trainer, TrainingStep, checkpoint_of, load_fitting
from detr_bf.plugins.plugin import chosen

logger = logging.getLogger(__name__)


def build_masked_autoencoder(config: MaskedConfig) -> MaskedAutoencoder:
    """The encoder, initialised as published, and the decoder.

    Raises:
        InputError: the encoder is no plain vision transformer, or the decoder's settings do not fit together.
    """
    model = config.model
    options = {"global_pool": "token", "class_token": True, **model.options}
    encoder = build_network(model.name, num_classes=0, image_size=config.data.transforms.size, options=options)
    initialize_as_published(encoder)
    return MaskedAutoencoder(
        encoder,
        decoder_dim=model.decoder_dim,
        decoder_depth=model.decoder_depth,
        decoder_heads=model.decoder_heads,
        mask_ratio=model.mask_ratio,
        norm_pix_loss=model.normalize_pixels,
        batch_former=_batch_former(config),
    )


def _batch_former(config: MaskedConfig) -> BatchFormerV2 | None:
    settings, model = config.batch_former, config.model
    if not settings.enabled:
        return None
    with named("batch_former", settings):
        return BatchFormerV2(
            model.decoder_dim,
            layers=chosen(layers_of(settings.layers), model.decoder_depth),
            num_encoder_layers=model.decoder_depth,
            position=settings.position,
            shared=settings.shared,
            num_layers=settings.num_layers,
            heads=settings.heads or model.decoder_heads,
            dropout=settings.dropout,
            gather=settings.gather,
        )


def _initial_weights(path: Path) -> dict[str, Tensor]:
    """Of a masked autoencoder, or of a plain network, which becomes the encoder, but for its positions."""
    weights = interop.read_state(checkpoint_of(path))
    if any(name.startswith(ENCODER) for name in weights):
        return weights
    if "pos_embed" in weights:
        logger.info("init_from %s: its pos_embed is left out, positions of a masked autoencoder are fixed sines", path)
    return {ENCODER + name: value for name, value in weights.items() if name != "pos_embed"}


def build_masked_trainer(config: MaskedConfig, folder: RunFolder, resume_from: Checkpoint | None = None) -> Trainer:
    """Everything a pre-training run needs, from where ``resume_from`` stands if given."""
    torch.manual_seed(config.seed)  # the same weights in all processes
    device, splits = device_of(config), build_image_splits(config)
    check_same_classes(splits.class_map, resume_from, folder)
    model = build_masked_autoencoder(config)
    if resume_from is None and config.init_from:
        logger.info(load_fitting(model, _initial_weights(Path(config.init_from)), config.init_from))
    accelerate(model, config)
    model.to(device)
    step = TrainingStep(model, MaskedCriterion(), device, PRECISIONS[config.train.precision])
    evaluate = build_masked_evaluation(config, splits, device)
    return image_trainer(config, splits, step, evaluate, config.batch_former, folder, resume_from)


def build_masked_evaluation(
    config: MaskedConfig, splits: ImageSplits, device: torch.device
) -> Measurement[ReconstructionEvaluator]:
    """How well the masked patches of the validation split are guessed."""
    return Measurement(val_loop(config, splits, device), ReconstructionEvaluator)
