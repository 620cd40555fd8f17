"""Run a captured training step again and report the first module whose output is not finite."""

from __future__ import annotations

import argparse

from detr_bf.common.text import safe_message
from detr_bf.tasks.replay import replay

FINITE = 3


def main(options: argparse.Namespace) -> int:
    """Run the step and print the first module whose output is not finite."""
    outcome = replay(options.file, device=options.device, precision=options.precision, anomaly=options.anomaly)
    print(safe_message(outcome))
    return 0 if outcome.reproduced else FINITE
