"""Train a detector, or evaluate one with --eval-only.

python tools/train_net.py --config configs/demo.yaml train.epochs=12 output_dir=runs/mine
torchrun --nproc-per-node=8 tools/train_net.py --config configs/detr/detr_r50_bfv2.yaml train.batch_size=2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from detr_bf.cli import run_tool
from detr_bf.config import load_config
from detr_bf.errors import InputError
from detr_bf.session import evaluate_only, evaluation_source, train


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="FILE", required=True, help="YAML file, configs/demo.yaml for instance")
    parser.add_argument("--resume", action="store_true", help="go on from output_dir/last.pt")
    parser.add_argument("--auto-resume", action="store_true", help="the same if it is there, else start")
    parser.add_argument("--eval-only", action="store_true", help="evaluate init_from, or the run in output_dir")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    options = parser.parse_intermixed_args(arguments)

    def run() -> int:
        config = load_config(options.config, options.overrides)
        if options.eval_only + options.resume + options.auto_resume > 1:
            raise InputError("--eval-only, --resume and --auto-resume exclude each other")
        if options.eval_only:
            outcome = evaluate_only(config, evaluation_source(config))
        else:
            outcome = train(config, resume=options.resume, resume_if_possible=options.auto_resume)
        if outcome is not None:  # the first process has it
            print(outcome)
        return 0

    return run_tool(run)


if __name__ == "__main__":
    sys.exit(main())
