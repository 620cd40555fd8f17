"""Segment ids as PNG files, the way the COCO panoptic format keeps them: id = R + 256 G + 65,536 B.

Definition: https://cocodataset.org/#format-data, "Panoptic Segmentation".
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from detr_bf.errors import InputError
from detr_bf.files import atomic_write

MAX_ID = 256**3 - 1


def read_ids(path: Path) -> Tensor:
    """(H, W) int32 segment ids of a PNG; 0 is no segment.

    Raises:
        InputError: the file is missing, is not an image, or has no three 8-bit channels.
    """
    try:
        with Image.open(path) as image:
            if image.mode not in ("RGB", "RGBA"):
                raise InputError(
                    f"{path} is a {image.mode} image; a COCO panoptic PNG is RGB, its ids R + 256 G + 65536 B"
                )
            pixels = np.asarray(image)[..., :3].astype(np.int32)
    except FileNotFoundError:
        raise InputError(f"there is no panoptic PNG {path}") from None
    except (OSError, SyntaxError) as error:  # Pillow raises SyntaxError for a broken chunk
        raise InputError(f"the panoptic PNG {path} cannot be read ({error})") from error
    return torch.from_numpy(pixels @ np.array([1, 256, 65536], dtype=np.int32))


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
