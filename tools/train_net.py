"""Train a detector, or evaluate one with --eval-only.

python tools/train_net.py --config configs/demo.yaml train.epochs=12 output_dir=runs/mine
torchrun --nproc-per-node=8 tools/train_net.py --config configs/detr/detr_r50_bfv2.yaml train.batch_size=2
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from detr_bf.run import training_command
from detr_bf.tasks import DetectionTask


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return training_command(DetectionTask, "detection", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
