"""What ``report.html`` says of plug-ins that classifiers and detectors share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from detr_bf.config.run import ContextBroadcastingConfig, LocalizationConfig


def context_broadcasting(settings: ContextBroadcastingConfig) -> Iterator[str]:
    """Where it is, if it is on."""
    if settings.enabled:
        yield f"Context Broadcasting in {blocks(settings.layers)}{', scaled' if settings.scaled else ''}"


def relative_localization(settings: LocalizationConfig) -> Iterator[str]:
    """Which kind, if it is on."""
    if settings.enabled:
        weight = "published weight" if settings.weight is None else f"weight {settings.weight:g}"
        yield f"relative localization ({settings.variant}, {weight})"


def blocks(layers: Any) -> str:
    """``block 7``, ``blocks 0, 3`` or ``upper blocks``, from a plug-in's setting."""
    if isinstance(layers, str):
        return f"{layers} blocks"
    return f"block{'' if len(layers) == 1 else 's'} {', '.join(map(str, layers))}"
