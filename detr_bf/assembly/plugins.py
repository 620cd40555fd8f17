"""Plug-ins of classifiers, and those that the encoders of detectors can have as well, by config."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from typing import Any, ParamSpec

from torch import nn

from detr_bf.config.classification import BatchFormerPluginConfig, BatchFormerV2PluginConfig, DiversePatchConfig
from detr_bf.config.detection import DetectorPluginsConfig
from detr_bf.config.run import ContextBroadcastingConfig, LocalizationConfig
from detr_bf.errors import InputError
from detr_bf.plugins import (
    add_batchformer,
    add_batchformer_v2,
    add_context_broadcasting,
    add_diverse_patch,
    add_relative_localization,
)
from detr_bf.transformer import Encoder

P = ParamSpec("P")

_DETECTORS = "batch_former."  # how batch attention names its settings


def _of_group(group: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Of a function (model, settings, ...): it does something only where the settings are on, and errors name them."""

    def decorate(add: Callable[P, None]) -> Callable[P, None]:
        @wraps(add)
        def add_if_on(*args: P.args, **kwargs: P.kwargs) -> None:
            settings: Any = args[1]
            if settings.enabled:
                with named(group, settings):
                    add(*args, **kwargs)

        return add_if_on

    return decorate


@_of_group("plugins.context_broadcasting")
def add_context(model: nn.Module, settings: ContextBroadcastingConfig) -> None:
    """Context Broadcasting; InputError where it does not fit the model."""
    add_context_broadcasting(model, layers_of(settings.layers), scaled=settings.scaled)


@_of_group("plugins.relative_localization")
def add_localization(model: nn.Module, settings: LocalizationConfig) -> None:
    """Relative localization; InputError where it does not fit the model."""
    add_relative_localization(
        model, settings.variant, weight=settings.weight, pairs=settings.num_pairs, normalize=settings.normalize
    )


@_of_group("plugins.batchformer_v2")
def add_v2(model: nn.Module, settings: BatchFormerV2PluginConfig) -> None:
    """BatchFormerV2; InputError where it does not fit the model."""
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
    )


@_of_group("plugins.batchformer")
def add_v1(model: nn.Module, settings: BatchFormerPluginConfig) -> None:
    """BatchFormer; InputError where it does not fit the model."""
    add_batchformer(
        model,
        heads=settings.heads,
        dropout=settings.dropout,
        num_layers=settings.num_layers,
        shared_classifier=settings.shared_classifier,
        gather=settings.gather,
    )


@_of_group("plugins.diverse_patch")
def add_diverse(model: nn.Module, settings: DiversePatchConfig, num_classes: int) -> None:
    """DiversePatch; InputError where it does not fit the model."""
    add_diverse_patch(
        model, num_classes, cosine=settings.cosine, contrastive=settings.contrastive, mixing=settings.mixing
    )


def add_encoder_plugins(detector: nn.Module, plugins: DetectorPluginsConfig) -> None:
    """What is on, in the detector's encoder.

    Raises:
        InputError: one does not fit it.
    """
    encoder = encoder_of(detector)
    if not encoder.layers and (plugins.context_broadcasting.enabled or plugins.relative_localization.enabled):
        raise InputError("plugins work on encoder layers: give model.encoder_layers=1 or more, or turn them off")
    add_context(encoder, plugins.context_broadcasting)
    add_localization(encoder, plugins.relative_localization)


def encoder_of(detector: nn.Module) -> Encoder:
    """The loop over its encoder layers, which may stand within its encoder."""
    return next(module for module in detector.modules() if isinstance(module, Encoder))


def layers_of(value: Any) -> Sequence[int] | str:
    """A setting that is a word or a list of numbers.

    Raises:
        InputError: it is something else.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    raise InputError(f"layers must be a word such as all, or a list of block numbers from 0; got {value!r}")


@contextmanager
def named(group: str, settings: Any) -> Iterator[None]:
    """Errors begin with the full name of the setting that they are about, or else with that of its ``group``."""
    try:
        yield
    except InputError as error:
        message = str(error).replace(_DETECTORS, f"{group}.")
        if message.startswith(f"{group}."):
            raise InputError(message) from error
        first = re.match(r"\w*", message)
        known = first is not None and first[0] in {field.name for field in fields(settings)}
        raise InputError(f"{group}{'.' if known else ': '}{message}") from error
