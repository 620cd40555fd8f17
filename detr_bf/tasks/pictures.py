"""Images of a labelled data set as they are shown."""

from __future__ import annotations

import torch
from torch import Tensor

from detr_bf.classification.data import LabelledImageSet
from detr_bf.config.classification import ImageTransformConfig
from detr_bf.data.sample_key import SampleKey


def pixels(data: LabelledImageSet, place: int) -> Tensor:
    """(3, H, W) float32, normalised: as the model gets the image."""
    return data[SampleKey(0, place)].pixels


def shown(images: Tensor, transforms: ImageTransformConfig) -> Tensor:
    """Normalised (..., 3, H, W) -> uint8."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (transforms.mean, transforms.std))
    return ((images.cpu().float() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
