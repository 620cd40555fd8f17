"""The detectors: one class, and one module for the parts each of them chooses, with a function of the module's name."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from importlib import import_module

from detr_bf.detectors.conditional_detr import conditional_detr
from detr_bf.detectors.deformable_detr import deformable_detr
from detr_bf.detectors.detector import Detector
from detr_bf.detectors.detr import detr
from detr_bf.detectors.mask_head import MaskHead
from detr_bf.detectors.parts import Options
from detr_bf.detectors.smca import smca
from detr_bf.detectors.smca_multi_scale import smca_multi_scale
from detr_bf.errors import InputError

__all__ = [
    "Detector",
    "MaskHead",
    "Options",
    "conditional_detr",
    "deformable_detr",
    "detector_named",
    "detr",
    "own_settings",
    "smca",
    "smca_multi_scale",
]


def detector_named(name: str) -> Callable[..., Detector]:
    """``(backbone, channels, options, **its own settings) -> Detector``, the function ``name`` of the module ``name``.

    Raises:
        InputError: there is no such detector.
    """
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    found = {short: getattr(module, short, None) for module in modules for short in [module.__name__.split(".")[-1]]}
    detectors = {short: function for short, function in found.items() if inspect.isfunction(function)}
    if name not in detectors:
        raise InputError(f"model.name must be one of {', '.join(sorted(detectors))}; got '{name}'")
    return detectors[name]


def own_settings(detector: Callable[..., Detector]) -> list[str]:
    """The keyword arguments a detector takes beside what all take."""
    parameters = inspect.signature(detector).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
