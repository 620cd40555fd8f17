"""Train a classifier, with or without plug-ins, or evaluate one with --eval-only.

python tools/train_classifier.py --config configs/classification/fashion_long_tail.yaml train.epochs=12
torchrun --nproc-per-node=8 tools/train_classifier.py --config configs/classification/FILE.yaml train.batch_size=128
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from detr_bf.run import training_command
from detr_bf.tasks import ClassificationTask


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return training_command(ClassificationTask, "classification", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
