"""Our detectors inside detectron2: its configs, trainer, data sets, evaluators and checkpoints.

Nothing else in detr_bf imports this, and what is named here is imported when it is asked for. Of the modules only
``tensors`` works without detectron2.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

INSTALL_GUIDE = "https://detectron2.readthedocs.io/en/latest/tutorials/install.html"
_HOMES = {
    "DetrBf": "meta_arch",
    "DetrBfCheckpointer": "checkpoint",
    "DetrBfDatasetMapper": "mapper",
    "PanopticQualityEvaluator": "evaluation",
    "Trainer": "trainer",
    "add_detr_bf_config": "config",
    "build_detr_bf": "meta_arch",
    "build_evaluator": "evaluation",
    "build_optimizer": "optimizer",
    "detector_parameters": "optimizer",
    "optimizer_of": "optimizer",
    "recipe": "lazy",
    "register_coco": "datasets",
    "register_coco_panoptic": "datasets",
    "train_lazy": "lazy",
    "train_yacs": "trainer",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute '{name}'")
    found = find_spec("detectron2")
    if found is None or found.origin is None:  # a folder of that name, a clone for instance, is no installation
        raise ImportError(
            f"{__name__}.{name} needs detectron2, which is not installed and is not on PyPI: see {INSTALL_GUIDE}"
        )
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
