"""A trained classifier ready for images."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from detr_bf.classification.assembly_data import build_image_eval_transform
from detr_bf.classification.augmentation import EvalTransform
from detr_bf.classification.config import ClassifierConfig
from detr_bf.common.devices import device_of
from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.common.text import printable
from detr_bf.config import RunConfig
from detr_bf.data.images import MAX_PIXELS, RGB, PixelFormat
from detr_bf.data.inputs import ImageLike, chunks, image_pixels
from detr_bf.engine import Checkpoint, build_and_load
from detr_bf.inference.prediction import summary
from detr_bf.tasks import task_of


@dataclass(frozen=True)
class ClassifierPredictor:
    """Images in, the probabilities of the classes out.

    An image is what :class:`Predictor` takes.
    """

    model: nn.Module
    class_map: ClassMap
    transform: EvalTransform
    device: torch.device
    max_pixels: int = MAX_PIXELS  # of an image
    pixel_format: PixelFormat = RGB  # of the images
    kind: ClassVar[str] = "a classifier"  # in messages
    __repr__ = summary

    def __call__(self, image: ImageLike) -> Tensor:
        """Return (K,) float32 on the CPU for one image.

        Raises:
            InputError: it is no image, it cannot be read, or the model's answer is not finite.
        """
        (probabilities,) = self._classify({"the image": image})
        return probabilities

    def predict(self, images: Iterable[ImageLike], batch_size: int = 1) -> Iterator[Tensor]:
        """Classify many images, in their order.

        Raises:
            InputError: as :meth:`Predictor.predict`, or the model's answer is not finite.
        """
        return (
            found
            for chunk in chunks(images, batch_size)
            for found in self._classify({f"image {number}": image for number, image in chunk})
        )

    @torch.no_grad()
    def _classify(self, images: Mapping[str, ImageLike]) -> Iterator[Tensor]:
        batch = torch.stack(
            [
                self.transform(image_pixels(image, name, self.max_pixels, pixel_format=self.pixel_format), 0)
                for name, image in images.items()
            ]
        )
        logits: Tensor = self.model(batch.to(self.device))
        for (name, image), each in zip(images.items(), logits.float().softmax(1).cpu(), strict=True):
            if not each.isfinite().all():
                shown = printable(image) if isinstance(image, (str, os.PathLike)) else name
                raise InputError(f"{shown}: the model's logits are not finite; train it anew, or take an earlier one")
            yield each


def classifier_predictor(config: RunConfig, checkpoint: Checkpoint, source: Path) -> ClassifierPredictor:
    """Return the trained classifier of a checkpoint.

    Raises:
        InputError: the weights are another model's, or it is of pre-training, which predicts no classes.
    """
    if not isinstance(config, ClassifierConfig):
        raise InputError(
            f"{source} is of {task_of(config).kind}, which knows no classes: train a classifier with "
            f"init_from={source}, with model.linear_probe=true or without"
        )
    classes, device = checkpoint.classes, device_of(config.device)
    model = build_and_load(lambda: task_of(config).build_model(classes.num_classes), checkpoint.weights, source)
    return ClassifierPredictor(
        model=model.to(device).eval(),
        class_map=classes,
        transform=build_image_eval_transform(config.data.transforms),
        device=device,
        max_pixels=config.data.max_pixels,
        pixel_format=PixelFormat(grey_bits=config.data.grey_bits),
    )
