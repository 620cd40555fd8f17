"""What every process does before it trains or evaluates."""

from __future__ import annotations

import argparse
from typing import Any

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.engine import default_setup
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger
from torch import nn

from detr_bf.errors import InputError


def set_up(cfg: Any, options: argparse.Namespace, output_dir: str) -> None:
    """Detectron2's own preparation; our messages go where its own go, to the screen and into log.txt."""
    default_setup(cfg, options)
    setup_logger(output_dir, distributed_rank=comm.get_rank(), name="detr_bf")


def check_evaluable(options: argparse.Namespace, weights: str, output_dir: str) -> None:
    """Raise InputError where there are no weights to evaluate: neither named, nor to be resumed from in the folder."""
    if not (weights or (options.resume and DetectionCheckpointer(nn.Module(), output_dir).has_checkpoint())):
        raise InputError(
            "nothing to evaluate: give weights with MODEL.WEIGHTS FILE (train.init_checkpoint=FILE), or --resume for "
            "those in the output folder"
        )
