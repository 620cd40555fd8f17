"""A trained segmentation network ready for images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from detr_bf.common.devices import device_of
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, ClassMap
from detr_bf.data.images import MAX_PIXELS, RGB, PixelFormat
from detr_bf.data.inputs import ImageLike, image_pixels
from detr_bf.engine import Checkpoint, build_and_load
from detr_bf.inference.prediction import summary
from detr_bf.segmentation.assembly import build_eval_resize
from detr_bf.segmentation.augmentation import EvalResize
from detr_bf.segmentation.batch import IGNORE
from detr_bf.segmentation.config import SegmentationConfig
from detr_bf.tasks import task_of


@dataclass(frozen=True)
class SegmentationPredictor:
    """Images in, the class of every pixel out.

    An image is what :class:`~detr_bf.inference.predictor.Predictor` takes.
    """

    model: nn.Module
    class_map: ClassMap
    transform: EvalResize
    device: torch.device
    max_pixels: int = MAX_PIXELS  # of an image
    pixel_format: PixelFormat = RGB  # of the images
    kind: ClassVar[str] = "a segmentation network"  # in messages
    __repr__ = summary

    @torch.no_grad()
    def __call__(self, image: ImageLike) -> Tensor:
        """Return the index of the class of each pixel, (H, W) uint8 on the CPU.

        Raises:
            InputError: it is no image, it cannot be read, or the model's answer is not finite.
        """
        pixels = image_pixels(image, "the image", self.max_pixels, pixel_format=self.pixel_format)
        resized, _ = self.transform(pixels, torch.empty(0))
        size, original = (resized.shape[1], resized.shape[2]), (pixels.shape[1], pixels.shape[2])
        batch = Batch(resized[None], torch.zeros(1, *size, dtype=torch.bool))
        found: Tensor = self.model(batch.to(self.device)).labels(0, size, original).cpu()
        if bool((found == IGNORE).any()):
            raise InputError("the model's logits are not finite; train it anew, or take an earlier checkpoint")
        return found


def segmentation_predictor(config: SegmentationConfig, checkpoint: Checkpoint, source: Path) -> SegmentationPredictor:
    """Return the trained network of a checkpoint (InputError: the weights are another model's)."""
    classes, device = checkpoint.classes, device_of(config.device)
    model = build_and_load(lambda: task_of(config).build_model(classes.num_classes), checkpoint.weights, source)
    return SegmentationPredictor(
        model=model.to(device).eval(),
        class_map=classes,
        transform=build_eval_resize(config.data.transforms),
        device=device,
        max_pixels=config.data.max_pixels,
        pixel_format=PixelFormat(grey_bits=config.data.grey_bits),
    )
