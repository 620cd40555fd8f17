"""A classifier with its plug-ins, its losses, its training and its evaluation."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from detr_bf.assembly.model import device_of
from detr_bf.assembly.network import build_network
from detr_bf.assembly.plugins import add_context, add_diverse, add_localization, add_v1, add_v2
from detr_bf.classification.criterion import BalancedSoftmax, ClassifierCriterion, cross_entropy
from detr_bf.config import ClassifierConfig, config_from_dict
from detr_bf.engine import build_and_load, checkpoint_of, load_checkpoint
from detr_bf.errors import InputError
from detr_bf.plugins import ramped
from detr_bf.plugins.plugin import PREFIX
from detr_bf.structures import ClassMap

logger = logging.getLogger(__name__)

# plug-ins that evaluation does not read
TRAINING_ONLY = ("batchformer_v2", "batchformer", "diverse_patch", "relative_localization")


def build_classifier(config: ClassifierConfig, num_classes: int, *, pretrained: bool = True) -> nn.Module:
    """The network with its plug-ins; without ``pretrained`` timm's weights are left to a checkpoint.

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
        options=model.options,
    )
    if config.model.linear_probe:
        _check_probe(config)
        make_linear_probe(network, num_classes)
    add_plugins(network, config, num_classes)
    return network


def _check_probe(config: ClassifierConfig) -> None:
    enabled = [name for name in TRAINING_ONLY if getattr(config.plugins, name).enabled]
    if enabled:
        raise InputError(
            f"model.linear_probe=true trains the classifier alone, on a network in evaluation mode: "
            f"plugins.{enabled[0]} has nothing to do there, set plugins.{enabled[0]}.enabled=false"
        )


def make_linear_probe(network: nn.Module, num_classes: int) -> None:
    """Freeze a timm network in evaluation mode, but for its new head: batch norm without parameters, then linear.

    As in MAE (He et al. 2022, arXiv 2111.06377, appendix A.1).

    Raises:
        InputError: the network has no head of that name.
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


def _keep_trunk_in_evaluation(network: nn.Module, args: Any) -> None:
    for name, child in network.named_children():
        if name != "head":
            child.eval()


def add_plugins(network: nn.Module, config: ClassifierConfig, num_classes: int) -> None:
    """Attach what is enabled.

    Raises:
        InputError: one does not fit the network.
    """
    plugins = config.plugins
    add_context(network, plugins.context_broadcasting)
    add_v2(network, plugins.batchformer_v2)
    add_v1(network, plugins.batchformer)
    add_diverse(network, plugins.diverse_patch, num_classes)
    add_localization(network, plugins.relative_localization)


def build_classifier_criterion(
    config: ClassifierConfig, network: nn.Module, class_counts: Sequence[int]
) -> ClassifierCriterion:
    """Cross-entropy or Balanced Softmax, and the losses of the plug-ins."""
    loss: Callable[[Tensor, Tensor], Tensor]
    if config.loss.name == "balanced_softmax":
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


def as_evaluated(config: ClassifierConfig) -> ClassifierConfig:
    """The same without the plug-ins that evaluation does not read."""
    plain = copy.deepcopy(config)
    for name in TRAINING_ONLY:
        getattr(plain.plugins, name).enabled = False
    return plain


def evaluated_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a network of :func:`as_evaluated` has of the weights of any."""
    prefixes = tuple(f"{PREFIX}.{name}." for name in TRAINING_ONLY)
    return {name: value for name, value in weights.items() if not name.startswith(prefixes)}


@dataclass(frozen=True)
class LoadedClassifier:
    """A trained classifier in evaluation mode."""

    model: nn.Module
    config: ClassifierConfig
    class_map: ClassMap


def load_classifier(
    source: Path, overrides: Sequence[str] = (), device: torch.device | None = None
) -> LoadedClassifier:
    """The classifier of a run folder or checkpoint of ours, with its plug-ins.

    Args:
        overrides: settings to change, such as ``data.root=DIR``.

    Raises:
        InputError: it is no checkpoint of a classifier.
    """
    checkpoint = load_checkpoint(checkpoint_of(source))
    config = config_from_dict(checkpoint.config, overrides, source=f"the config in {source}")
    if not isinstance(config, ClassifierConfig):
        raise InputError(f"{source} is a run of the task {config.task}, expected a classifier's")
    num_classes = checkpoint.classes.num_classes
    model = build_and_load(lambda: build_classifier(config, num_classes, pretrained=False), checkpoint.weights, source)
    return LoadedClassifier(model.to(device or device_of(config)).eval(), config, checkpoint.classes)
