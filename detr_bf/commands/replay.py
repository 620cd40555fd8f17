"""Run a captured training step again and report the first module whose output is not finite.

detr-bf replay runs/mine/captures/step_0000017_rank_0.pt
detr-bf replay FILE --device cpu --precision float32    # is it finite in full precision?

Exit code 0: it is not finite again; 3: everything is finite now; 2: bad input.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from detr_bf.cli import run_tool
from detr_bf.replay import replay
from detr_bf.text import safe_message

FINITE = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", type=Path, help="written by a run whose step was not finite")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--precision", help="float32, bf16 or fp16; default: as in the run")
    parser.add_argument(
        "--anomaly",
        action="store_true",
        help="use torch's anomaly detection to find the operation whose gradient is NaN",
    )
    options = parser.parse_args(arguments)

    def run() -> int:
        outcome = replay(options.file, device=options.device, precision=options.precision, anomaly=options.anomaly)
        print(safe_message(outcome))
        return 0 if outcome.reproduced else FINITE

    return run_tool(run)
