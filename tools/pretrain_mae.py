"""Pre-train a ViT as a masked autoencoder, with or without BatchFormerV2 in its decoder, or evaluate one.

python tools/pretrain_mae.py --config configs/masked/mae_vit_base.yaml data.root=ImageNet output_dir=runs/mae
python tools/train_classifier.py --config configs/masked/linear_probe_vit_base.yaml init_from=runs/mae
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from detr_bf.config import MaskedConfig
from detr_bf.run import training_command
from detr_bf.tasks import MaskedTask


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return training_command(MaskedTask, MaskedConfig, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
