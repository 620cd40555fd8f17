"""Plug-ins of the encoders of detectors and of classifiers, by config; config keys in error messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, ParamSpec

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from detr_bf.common.errors import InputError
from detr_bf.config.common import ContextBroadcastingConfig, LocalizationConfig
from detr_bf.config.detection import DetectorPluginsConfig
from detr_bf.plugins import add_context_broadcasting, add_relative_localization
from detr_bf.transformer import Encoder

P = ParamSpec("P")


def if_enabled(group: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorate a function (model, settings, ...): skip disabled plug-ins, name config keys of ``group`` in errors."""

    def decorate(add: Callable[P, None]) -> Callable[P, None]:
        @wraps(add)
        def add_if_on(*args: P.args, **kwargs: P.kwargs) -> None:
            settings: Any = args[1]
            if settings.enabled:
                with named(group, settings):
                    add(*args, **kwargs)

        return add_if_on

    return decorate


@if_enabled("plugins.context_broadcasting")
def add_context(model: nn.Module, settings: ContextBroadcastingConfig) -> None:
    """Add Context Broadcasting; InputError if it does not fit the model."""
    layers = layers_of(settings.layers)
    add_context_broadcasting(model, layers, position=settings.position, scaled=settings.scaled, skip=settings.skip)


@if_enabled("plugins.relative_localization")
def add_localization(model: nn.Module, settings: LocalizationConfig, pool: bool | None = None) -> None:
    """Add relative localization; InputError if it does not fit the model."""
    add_relative_localization(
        model,
        settings.variant,
        weight=settings.weight,
        pairs=settings.num_pairs,
        normalize=settings.normalize,
        pool=pool,
        hidden=settings.hidden,
    )


def add_detector_plugins(detector: nn.Module, plugins: DetectorPluginsConfig) -> None:
    """Add the enabled plug-ins to the detector's encoder or backbone (InputError: a plug-in does not fit it)."""
    encoder, context = encoder_of(detector), plugins.context_broadcasting
    in_backbone = context.where == "backbone"
    if not encoder.layers and ((context.enabled and not in_backbone) or plugins.relative_localization.enabled):
        raise InputError("plugins work on encoder layers: give model.encoder_layers=1 or more, or disable them")
    add_context(_plain_vit_of(detector) if context.enabled and in_backbone else encoder, context)
    add_localization(encoder, plugins.relative_localization)


def _plain_vit_of(detector: nn.Module) -> nn.Module:
    for module in detector.get_submodule("backbone").modules():
        if isinstance(module, VisionTransformer):
            return module
    raise InputError(
        "plugins.context_broadcasting.where=backbone needs a plain vision transformer, such as "
        "model.backbone.name=timm:vit_tiny_patch16_224, or set where=encoder"
    )


def encoder_of(detector: nn.Module) -> Encoder:
    """Return the loop over the encoder layers; it may be a submodule of the detector's encoder."""
    return next(module for module in detector.modules() if isinstance(module, Encoder))


def layers_of(value: Any) -> Sequence[int] | str:
    """Check a setting that is a word or a list of numbers (InputError: it is neither)."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    raise InputError(f"layers must be a word such as all, or a list of block numbers from 0; got {value!r}")


@contextmanager
def named(group: str, settings: Any, **renamed: str) -> Iterator[None]:
    """Prefix errors with the config key that they are about.

    A message that begins with a setting of ``settings`` or of a group within, or with a key of ``renamed`` (argument
    name -> setting, with that of its group if several have it), is prefixed with the full key of the setting; any
    other with ``group``.
    """
    try:
        yield
    except InputError as error:
        message = str(error)
        if message.startswith(f"{group}."):
            raise
        word = message[: len(message) - len(message.lstrip("abcdefghijklmnopqrstuvwxyz_"))]
        *inside, name = renamed.get(word, word).split(".")
        wanted = ".".join([group, *inside])
        paths = (path for path, owner in _groups(group, settings) if hasattr(owner, name))
        key = next((f"{path}.{name}" for path in paths if path == wanted or not inside), "")
        raise InputError(key + message[len(word) :] if word and key else f"{group}: {message}") from error


def _groups(name: str, settings: Any) -> Iterator[tuple[str, Any]]:
    """Yield a group of settings and the groups within, outer ones first."""
    yield name, settings
    for field in fields(settings):
        if is_dataclass(value := getattr(settings, field.name)):
            yield from _groups(f"{name}.{field.name}", value)
