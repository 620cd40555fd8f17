"""Settings of the plug-ins that both classifiers and detectors can have. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from detr_bf.config.fields import choice, not_negative, positive


@dataclass
class ContextBroadcastingConfig:
    enabled: bool = False
    layers: Any = "upper"  # upper, all, or blocks (of a detector: encoder layers) from 0 in a list
    scaled: bool = False  # learned scales of the mean (CB_S)


@dataclass
class LocalizationConfig:
    """Relative localization, whatever it is in."""

    enabled: bool = False
    weight: float | None = not_negative(None)  # null: the published 0.01 of a ViT, 0.5 of Swin
    variant: str = choice("abs", "signed", "ce", "reg", "all")
    num_pairs: int = positive(64, 10**6)  # of an image
    normalize: bool = True  # false: distances in cells, as the authors' code
