"""What every process does before it trains or evaluates."""

from __future__ import annotations

import argparse
from typing import Any

from detectron2.engine import default_setup
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger


def set_up(cfg: Any, options: argparse.Namespace, output_dir: str) -> None:
    """Detectron2's own preparation; our messages go where its own go, to the screen and into log.txt."""
    default_setup(cfg, options)
    setup_logger(output_dir, distributed_rank=comm.get_rank(), name="detr_bf")
