"""What every process does before it trains or evaluates."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from detectron2.engine import default_setup
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger

from detr_bf.errors import InputError


def set_up(cfg: Any, options: argparse.Namespace, output_dir: str) -> None:
    """Detectron2's own preparation; our messages go where its own go, to the screen and into log.txt."""
    default_setup(cfg, options)
    setup_logger(output_dir, distributed_rank=comm.get_rank(), name="detr_bf")


def check_evaluable(options: argparse.Namespace, weights: str, output_dir: str) -> None:
    """Raise InputError where there are no weights to evaluate: neither named, nor to be resumed from in the folder."""
    if not (weights or (options.resume and (Path(output_dir) / "last_checkpoint").is_file())):
        raise InputError(
            "nothing to evaluate: give weights with MODEL.WEIGHTS FILE (train.init_checkpoint=FILE), or --resume for "
            "those in the output folder"
        )
