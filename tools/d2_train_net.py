"""Train or evaluate inside detectron2 from a yacs config.

python tools/d2_train_net.py --config-file configs/detectron2/yacs/detr_r50_bfv2.yaml --num-gpus 8
python tools/d2_train_net.py --config-file … --eval-only MODEL.WEIGHTS detr-r50-e632da11.pth

detectron2 is not on PyPI: install it first (https://detectron2.readthedocs.io/en/latest/tutorials/install.html).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from detr_bf.detectron2 import run_training


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_training("train_yacs", arguments)


if __name__ == "__main__":
    sys.exit(main())
