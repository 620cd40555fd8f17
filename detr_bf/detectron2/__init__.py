"""Our detectors inside detectron2: its configs, trainer, data sets, evaluators and checkpoints.

Nothing else in detr_bf imports this package. Its public names are imported on first use, because only ``tensors``
works without detectron2.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from detr_bf.common.errors import InputError
from detr_bf.common.terminal import run_tool

INSTALL_GUIDE = "https://detectron2.readthedocs.io/en/latest/tutorials/install.html"
_MODULES = {
    "DetrBf": "meta_arch",
    "DetrBfCheckpointer": "checkpoint",
    "DetrBfDatasetMapper": "mapper",
    "PanopticQualityEvaluator": "evaluation",
    "DetrBfTrainer": "training",
    "add_detr_bf_config": "meta_arch",
    "build_detr_bf": "meta_arch",
    "build_evaluator": "evaluation",
    "build_clipped_optimizer": "training",
    "detector_parameters": "training",
    "optimizer_of": "training",
    "recipe": "training",
    "register_coco": "datasets",
    "register_coco_panoptic": "datasets",
    "train_lazy": "training",
    "train_yacs": "training",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute '{name}'")
    found = find_spec("detectron2")
    if found is None or found.origin is None:  # a mere folder of that name, for instance a clone, has no origin
        raise ImportError(
            f"{__name__}.{name} needs detectron2, which is not installed and is not on PyPI: see {INSTALL_GUIDE}"
        )
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def run_training(name: str, arguments: Sequence[str] | None) -> int:
    """Run ``train_yacs`` or ``train_lazy`` in the requested number of processes and return the exit code."""

    def run() -> int:
        try:
            function = __getattr__(name)
        except ImportError as error:
            raise InputError(str(error)) from error
        from detectron2.engine import default_argument_parser, launch

        options = default_argument_parser().parse_args(arguments)
        if not options.config_file:
            raise InputError("give a config with --config-file FILE; examples are in configs/detectron2")
        launch(
            function,
            options.num_gpus,
            num_machines=options.num_machines,
            machine_rank=options.machine_rank,
            dist_url=options.dist_url,
            args=(options,),
        )
        return 0

    return run_tool(run)
