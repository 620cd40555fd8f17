"""A small masked autoencoder in evaluation mode, in float64: 16 patches, of which 4 are visible."""

from __future__ import annotations

from typing import Any

import torch

from detr_bf.batchformer import BatchFormerV2
from detr_bf.classification.masked_autoencoder import MaskedAutoencoder
from tests.plugins import tiny

PATCHES, SIDE, DIM, DEPTH, VISIBLE = 16, 8, 8, 3, 4
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def batch_former(layers: Any = range(DEPTH), **changes: Any) -> BatchFormerV2:
    torch.manual_seed(1)
    settings = {"num_encoder_layers": DEPTH, "heads": 2, "dropout": 0.0} | changes
    return BatchFormerV2(DIM, layers=list(layers), **settings)


def autoencoder(
    attention: BatchFormerV2 | None = None, encoder: dict[str, Any] | None = None, **changes: Any
) -> MaskedAutoencoder:
    settings = {"decoder_dim": DIM, "decoder_depth": DEPTH, "decoder_heads": 2, "mask_ratio": 0.75} | changes
    settings.setdefault("norm_pix_loss", True)
    vit = tiny.vit(**{"num_classes": 0} | (encoder or {}))
    torch.manual_seed(2)
    return MaskedAutoencoder(vit, **settings, batch_former=attention).double().eval()
