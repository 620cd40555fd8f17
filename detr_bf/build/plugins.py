"""The plug-ins that both classifiers and the encoders of detectors can have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from detr_bf.config.plugins import ContextBroadcastingConfig, LocalizationConfig
from detr_bf.config.schema import DetectorPluginsConfig
from detr_bf.errors import InputError
from detr_bf.transformer import Encoder
from detr_bf.vit import add_context_broadcasting, add_relative_localization


def add_context(model: nn.Module, settings: ContextBroadcastingConfig) -> None:
    """Context Broadcasting, where it is on.

    Raises:
        InputError: it does not fit the model.
    """
    if settings.enabled:
        with _named("plugins.context_broadcasting"):
            add_context_broadcasting(model, layers_of(settings.layers), scaled=settings.scaled)


def add_localization(model: nn.Module, settings: LocalizationConfig) -> None:
    """Relative localization, where it is on.

    Raises:
        InputError: it does not fit the model.
    """
    if settings.enabled:
        with _named("plugins.relative_localization"):
            add_relative_localization(
                model, settings.variant, weight=settings.weight, pairs=settings.num_pairs, normalize=settings.normalize
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
def _named(setting: str) -> Iterator[None]:
    """Errors say which group of settings they are about."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{setting}: {error}") from error
