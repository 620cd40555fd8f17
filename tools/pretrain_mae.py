"""Pre-train a ViT as a masked autoencoder, with or without BatchFormerV2 in its decoder, or evaluate one.

python tools/pretrain_mae.py --config configs/masked/batchformer_v2/mae_vit_base.yaml data.root=ImageNet
python tools/train_classifier.py --config configs/classification/batchformer_v2/mae_vit_base_probe.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from detr_bf.run import training_command
from detr_bf.tasks import MaskedTask


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return training_command(MaskedTask, "masked_autoencoding", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
