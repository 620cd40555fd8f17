"""Segment ids written as PNG files, the way the COCO panoptic format keeps them: id = R + 256 G + 65,536 B.

Definition: https://cocodataset.org/#format-data, "Panoptic Segmentation". :func:`detr_bf.data.panoptic.read_ids` reads
them.
"""

from __future__ import annotations

import io
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from detr_bf.files import atomic_write

MAX_ID = 256**3 - 1


def write_ids(path: Path, ids: Tensor) -> None:
    """Atomically write (H, W) segment ids as a PNG."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(encoded_ids(ids))


def encoded_ids(ids: Tensor) -> bytes:
    """The bytes of that PNG."""
    assert 0 <= int(ids.min()) <= int(ids.max()) <= MAX_ID, "a PNG holds ids of three bytes"
    pixels = torch.stack([ids & 255, ids >> 8 & 255, ids >> 16 & 255], dim=-1).to(torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels.cpu().numpy()).save(buffer, format="PNG")
    return buffer.getvalue()
