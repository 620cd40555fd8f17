"""Networks and losses of classifiers, masked autoencoders and contrastive pre-training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from detr_bf.acceleration.model import accelerate
from detr_bf.assembly.plugins import add_context, add_localization, if_enabled, layers_of, named
from detr_bf.batchformer import BatchFormer, BatchFormerV2
from detr_bf.classification.config import (
    BatchFormerPluginConfig,
    BatchFormerV2PluginConfig,
    ClassifierConfig,
    DiversePatchConfig,
)
from detr_bf.classification.contrastive import MomentumContrast
from detr_bf.classification.contrastive_config import ContrastiveConfig
from detr_bf.classification.criterion import BalancedSoftmax, ClassifierCriterion, RideLoss, cross_entropy
from detr_bf.classification.experts import SCALE
from detr_bf.classification.masked_autoencoder import MaskedAutoencoder, initialize_as_published
from detr_bf.classification.masked_config import MaskedConfig
from detr_bf.classification.network import CIFAR_RESNET, build_network
from detr_bf.common.errors import InputError, prefix_errors
from detr_bf.common.weights import PLUGINS
from detr_bf.config.common import resolved_number
from detr_bf.engine import build_optimizer, image_parameter_groups
from detr_bf.plugins import add_batchformer, add_batchformer_v2, add_diverse_patch, ramped
from detr_bf.plugins.batchformer import classifiers_of
from detr_bf.plugins.plugin import chosen

# plug-ins that evaluation does not use
TRAINING_ONLY = ("batchformer_v2", "batchformer", "diverse_patch", "relative_localization")


@if_enabled("plugins.batchformer_v2")
def add_v2(model: nn.Module, settings: BatchFormerV2PluginConfig) -> None:
    """Add BatchFormerV2; InputError if it does not fit the model."""
    add_batchformer_v2(
        model,
        layers_of(settings.layers),
        position=settings.position,
        shared=settings.shared,
        mode=settings.mode,
        num_layers=settings.num_layers,
        heads=settings.heads,
        dropout=settings.dropout,
        gather=settings.gather,
        init=settings.init,
        log_attention=settings.log_attention,
    )


@if_enabled("plugins.batchformer")
def add_v1(model: nn.Module, settings: BatchFormerPluginConfig) -> None:
    """Add BatchFormer; InputError if it does not fit the model."""
    add_batchformer(
        model,
        heads=settings.heads,
        dropout=settings.dropout,
        num_layers=settings.num_layers,
        shared_classifier=settings.shared_classifier,
        gather=settings.gather,
        init=settings.init,
    )


@if_enabled("plugins.diverse_patch")
def add_diverse(model: nn.Module, settings: DiversePatchConfig, num_classes: int) -> None:
    """Add DiversePatch; InputError if it does not fit the model."""
    add_diverse_patch(
        model, num_classes, cosine=settings.cosine, contrastive=settings.contrastive, mixing=settings.mixing
    )


def build_classifier(config: ClassifierConfig, num_classes: int, *, pretrained: bool = True) -> nn.Module:
    """Return the network with its plug-ins; without ``pretrained`` its weights are to come from a checkpoint.

    Raises:
        InputError: timm has no such model, it does not take the options, or a plug-in does not fit it.
    """
    model = config.model
    network = build_network(
        model.name,
        num_classes=num_classes,
        image_size=config.data.transforms.size,
        pretrained=pretrained and model.pretrained,
        dropout=model.dropout,
        drop_path=model.drop_path,
        experts=model.experts,
        variant=model.variant,
        options=model.options,
    )
    if model.linear_probe:
        _check_probe(config)
        make_linear_probe(network, num_classes)
    elif model.frozen:
        freeze_trunk(network)
    plugins = config.plugins
    add_context(network, plugins.context_broadcasting)
    add_v2(network, plugins.batchformer_v2)
    add_v1(network, plugins.batchformer)
    add_diverse(network, plugins.diverse_patch, num_classes)
    add_localization(network, plugins.relative_localization, plugins.relative_localization.pool)
    return accelerate(network)


def _check_probe(config: ClassifierConfig) -> None:
    enabled = [name for name in TRAINING_ONLY if getattr(config.plugins, name).enabled]
    if config.model.frozen:
        raise InputError("model.linear_probe=true freezes the network already: set model.frozen=false")
    if enabled:
        raise InputError(
            f"model.linear_probe=true trains the classifier alone, on a network in evaluation mode: "
            f"plugins.{enabled[0]} has nothing to do there, set plugins.{enabled[0]}.enabled=false"
        )


def make_linear_probe(network: nn.Module, num_classes: int) -> None:
    """Freeze a timm network in evaluation mode, except for a new head: batch norm without parameters, then linear.

    The head of MAE's linear probing (He et al. 2022, arXiv 2111.06377, appendix A.1). InputError if the network has no
    linear layer called ``head``.
    """
    head: Any = getattr(network, "head", None)
    if not isinstance(head, nn.Linear):
        raise InputError(
            "model.linear_probe=true needs a network whose classifier is a linear layer called head: a ViT"
        )
    network.requires_grad_(False)
    linear = nn.Linear(head.in_features, num_classes)
    nn.init.trunc_normal_(linear.weight, std=0.01)
    nn.init.zeros_(linear.bias)
    network.head = nn.Sequential(nn.BatchNorm1d(head.in_features, affine=False, eps=1e-6), linear)
    network.register_forward_pre_hook(_keep_trunk_in_evaluation)


def freeze_trunk(network: nn.Module) -> None:
    """Freeze a network in evaluation mode, except for its linear classifiers and the plug-ins it gets later.

    InputError if it has no linear classifier.
    """
    with prefix_errors("model.frozen=true"):
        heads = classifiers_of(network)
    network.requires_grad_(False)
    for head in heads:
        head.requires_grad_(True)
    network.register_forward_pre_hook(_keep_trunk_in_evaluation)


def _keep_trunk_in_evaluation(network: nn.Module, args: Any) -> None:
    for name, child in network.named_children():
        if name not in ("head", PLUGINS):
            child.eval()


def build_classifier_criterion(
    config: ClassifierConfig, network: nn.Module, class_counts: Sequence[int]
) -> ClassifierCriterion:
    """Return the loss of the logits with the losses of the plug-ins."""
    loss: Callable[[Tensor, Tensor], Tensor]
    if config.loss.name == "ride":
        ride = config.loss.ride
        loss = RideLoss(
            class_counts,
            scale=SCALE,
            diversity=ride.diversity,
            margin=ride.margin,
            reweight_epoch=ride.reweight_epoch,
            reweight_factor=ride.reweight_factor,
        )
    elif config.loss.name == "balanced_softmax":
        loss = BalancedSoftmax(class_counts, loss_scale=config.loss.loss_scale)
    else:
        loss = cross_entropy(config.loss.label_smoothing)
    return ClassifierCriterion(network, loss, _localization_weight(config, network))


def _localization_weight(config: ClassifierConfig, network: nn.Module) -> Callable[[int], float] | None:
    settings = config.plugins.relative_localization
    if not (settings.enabled and settings.ramp_epochs):
        return None
    if settings.ramp_epochs >= config.train.epochs:
        raise InputError(
            f"plugins.relative_localization.ramp_epochs={settings.ramp_epochs} must be less than "
            f"train.epochs={config.train.epochs}: the weight falls after it"
        )
    weight = cast("Any", network).plugins["relative_localization"].weight
    return lambda epoch: ramped(weight, epoch, config.train.epochs, settings.ramp_epochs)


def build_masked_autoencoder(config: MaskedConfig) -> MaskedAutoencoder:
    """Return the encoder, initialised as published, with the decoder.

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


def build_contrastive(config: ContrastiveConfig) -> MomentumContrast:
    """Return the encoder, initialised as published, with projector, predictor and momentum encoder.

    Raises:
        InputError: timm has no such encoder, or BatchFormer does not fit its features.
    """
    model, former = config.model, config.batch_former
    if model.name.startswith(CIFAR_RESNET):
        raise InputError(f"model.name={model.name} has no form without a classifier: give a network of timm")
    size = config.data.transforms.size
    encoder = build_network(model.name, num_classes=0, image_size=size, options=model.options)
    batch_former = None
    if former.enabled:
        with named("batch_former", former):
            batch_former = BatchFormer(
                cast("int", encoder.head_hidden_size),
                heads=former.heads,
                dropout=former.dropout,
                num_layers=former.num_layers,
                gather=former.gather,
            )
        if former.init == "pytorch":
            batch_former.mixer.initialize_as_pytorch()
    return MomentumContrast(
        encoder,
        hidden=model.hidden,
        dim=model.dim,
        momentum=model.momentum,
        cosine=model.momentum_cosine,
        freeze_patches=model.freeze_patches,
        batch_former=batch_former,
        freeze_batch_former=former.frozen,
    )


def image_optimizer(
    config: ClassifierConfig | MaskedConfig | ContrastiveConfig, network: nn.Module
) -> torch.optim.Optimizer:
    """Return the optimizer of an image model; batch attention has its own learning rate and weight decay."""
    optimizer = config.optimizer
    batch_former = config.plugins.batch_former if isinstance(config, ClassifierConfig) else config.batch_former
    groups = image_parameter_groups(
        network,
        lr=resolved_number(optimizer.lr),
        weight_decay=optimizer.weight_decay,
        decay_vectors=optimizer.decay_vectors,
        batch_former_lr_factor=batch_former.lr_factor,
        batch_former_weight_decay=batch_former.weight_decay,
    )
    return build_optimizer(
        groups, optimizer.name, momentum=optimizer.momentum, nesterov=optimizer.nesterov, betas=tuple(optimizer.betas)
    )
