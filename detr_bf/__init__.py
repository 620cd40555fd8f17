"""Batch attention (BatchFormerV2) for DETR-family detectors and image classifiers.

The public names are imported at their first use, so that ``import detr_bf`` is quick and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from detr_bf.common.extensions import use_plugins
    from detr_bf.inference.classifier import ClassifierPredictor
    from detr_bf.inference.finetuning import finetune
    from detr_bf.inference.loading import create_model, list_models, load, load_classifier
    from detr_bf.inference.prediction import Prediction
    from detr_bf.inference.predictor import Predictor
    from detr_bf.interop.published import list_weights

__all__ = [
    "ClassifierPredictor",
    "Prediction",
    "Predictor",
    "create_model",
    "finetune",
    "list_models",
    "list_weights",
    "load",
    "load_classifier",
    "use_plugins",
]
__version__ = "0.1.0"

_MODULES = {
    "ClassifierPredictor": "detr_bf.inference.classifier",
    "Prediction": "detr_bf.inference.prediction",
    "Predictor": "detr_bf.inference.predictor",
    "finetune": "detr_bf.inference.finetuning",
    "list_weights": "detr_bf.interop.published",
    "use_plugins": "detr_bf.common.extensions",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'detr_bf' has no attribute '{name}'")
    return getattr(import_module(_MODULES.get(name, "detr_bf.inference.loading")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
