"""A trained detector ready for images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat, Image

from detr_bf.build import (
    build_eval_transform,
    build_model,
    build_panoptic_postprocess,
    build_postprocess,
    device_of,
)
from detr_bf.config import config_from_dict
from detr_bf.data.images import read_image
from detr_bf.data.transforms import Sample, SampleTransform
from detr_bf.detectors import Detector
from detr_bf.engine import checkpoint_of, load_checkpoint, load_strict
from detr_bf.errors import InputError
from detr_bf.postprocess import PanopticPostprocess, Postprocess
from detr_bf.structures import Batch, ClassMap, Detections, PanopticMap, Target


@dataclass(frozen=True)
class Predictor:
    """Images in, :class:`~detr_bf.structures.Detections` out, in pixels of the image given.

    With a mask head the detections have masks, and :meth:`panoptic` gives panoptic maps.
    """

    model: Detector
    class_map: ClassMap
    transform: SampleTransform
    postprocess: Postprocess
    panoptic_postprocess: PanopticPostprocess
    device: torch.device

    def __call__(self, image: str | Path | Tensor) -> Detections:
        """Detect in one image: a file, or a (3, H, W) uint8 RGB tensor."""
        (detections,) = self.predict([image])
        return detections

    @torch.no_grad()
    def panoptic(self, image: str | Path | Tensor) -> PanopticMap:
        """The panoptic map of one image: a file, or a (3, H, W) uint8 RGB tensor.

        Raises:
            InputError: the detector has no mask head.
        """
        if self.model.mask_head is None:
            raise InputError("this detector has no mask head: train one with model.masks=true, on data with masks")
        batch = Batch.collate([self._sample(image, 0)]).to(self.device)
        (found,) = self.panoptic_postprocess(self.model(batch), batch.targets)
        return found

    def predict(self, images: Iterable[str | Path | Tensor], batch_size: int = 1) -> Iterator[Detections]:
        """Detect in many images; ``image_id`` is the place in the sequence, from 0.

        Batches pad smaller images, which moves scores and boxes a little: 1 is the exact choice.
        """
        numbered = enumerate(images)
        while chunk := list(islice(numbered, batch_size)):
            yield from self._detect([self._sample(image, place) for place, image in chunk])

    @torch.no_grad()
    def _detect(self, samples: Sequence[tuple[Tensor, Target]]) -> list[Detections]:
        batch = Batch.collate(samples).to(self.device)
        return self.postprocess(self.model(batch), batch.targets)

    def _sample(self, image: str | Path | Tensor, place: int) -> tuple[Tensor, Target]:
        pixels = image if isinstance(image, Tensor) else read_image(Path(image))
        original_size = (pixels.shape[-2], pixels.shape[-1])
        no_boxes = BoundingBoxes(torch.empty(0, 4), format=BoundingBoxFormat.XYXY, canvas_size=original_size)
        resized, _, labels, _ = self.transform(Sample(Image(pixels), no_boxes, torch.empty(0, dtype=torch.int64)))
        size = (resized.shape[-2], resized.shape[-1])
        target = Target(place, torch.empty(0, 4), labels, size, original_size)
        return resized.as_subclass(Tensor), target


def load(path: str | Path, device: str = "auto") -> Predictor:
    """The detector of a checkpoint, or of a run folder's best (else last) checkpoint, in evaluation mode.

    Raises:
        InputError: the file is missing, damaged or not a checkpoint of ours.
    """
    source = checkpoint_of(path)
    checkpoint = load_checkpoint(source)
    config = config_from_dict(checkpoint.config)
    config.device = device
    model = build_model(config, checkpoint.classes.num_classes, pretrained=False)
    load_strict(model, checkpoint.weights, str(source))
    return Predictor(
        model=model.to(device_of(config)).eval(),
        class_map=checkpoint.classes,
        transform=build_eval_transform(config),
        postprocess=build_postprocess(config),
        panoptic_postprocess=build_panoptic_postprocess(config, checkpoint.classes),
        device=device_of(config),
    )
