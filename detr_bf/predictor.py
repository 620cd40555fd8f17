"""A trained detector or classifier ready for images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat, Image

from detr_bf.assembly import (
    build_eval_transform,
    build_model,
    build_panoptic_postprocess,
    build_postprocess,
    device_of,
)
from detr_bf.assembly import load_classifier as load_classifier_model
from detr_bf.assembly.classifier_data import build_image_eval_transform
from detr_bf.config import ClassifierConfig, Config, config_from_dict
from detr_bf.data.augmentation import EvalTransform
from detr_bf.data.images import read_image
from detr_bf.data.transforms import Sample, SampleTransform
from detr_bf.detectors import Detector
from detr_bf.engine import Checkpoint, checkpoint_of, load_checkpoint, load_strict
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
        pixels = _pixels(image)
        original_size = (pixels.shape[-2], pixels.shape[-1])
        no_boxes = BoundingBoxes(torch.empty(0, 4), format=BoundingBoxFormat.XYXY, canvas_size=original_size)
        resized, _, labels, _ = self.transform(Sample(Image(pixels), no_boxes, torch.empty(0, dtype=torch.int64)))
        size = (resized.shape[-2], resized.shape[-1])
        target = Target(place, torch.empty(0, 4), labels, size, original_size)
        return resized.as_subclass(Tensor), target


@dataclass(frozen=True)
class ClassifierPredictor:
    """Images in, the probabilities of the classes out."""

    model: nn.Module
    class_map: ClassMap
    transform: EvalTransform
    device: torch.device

    def __call__(self, image: str | Path | Tensor) -> Tensor:
        """(K,) float32 on the CPU, of one image: a file, or a (3, H, W) uint8 RGB tensor."""
        (probabilities,) = self.predict([image])
        return probabilities

    def predict(self, images: Iterable[str | Path | Tensor], batch_size: int = 1) -> Iterator[Tensor]:
        """As :meth:`__call__` for many images, in their order.

        Raises:
            InputError: an image cannot be read, or the model's answer is not finite.
        """
        numbered = enumerate(images)
        while chunk := list(islice(numbered, batch_size)):
            probabilities = self._classify([image for _, image in chunk])
            for (place, image), each in zip(chunk, probabilities, strict=True):
                if not each.isfinite().all():
                    name = f"image {place}" if isinstance(image, Tensor) else image
                    raise InputError(
                        f"{name}: the model's logits are not finite; train it anew, or take an earlier one"
                    )
                yield each

    @torch.no_grad()
    def _classify(self, images: Sequence[str | Path | Tensor]) -> Tensor:
        batch = torch.stack([self.transform(_pixels(image), 0) for image in images])
        logits: Tensor = self.model(batch.to(self.device))
        return logits.float().softmax(1).cpu()


def load(path: str | Path, device: str = "auto") -> Predictor:
    """The detector of a checkpoint, or of a run folder's best (else last) checkpoint, in evaluation mode.

    Raises:
        InputError: the file is missing, damaged or not a checkpoint of ours, or not a detector's.
    """
    predictor = load_predictor(path, device)
    if not isinstance(predictor, Predictor):
        raise InputError(f"{path} is of a classifier, expected a detector: use detr_bf.load_classifier")
    return predictor


def load_classifier(path: str | Path, device: str = "auto") -> ClassifierPredictor:
    """The classifier of a checkpoint or run folder, as :func:`load`.

    Raises:
        InputError: as :func:`load`, or not a classifier's.
    """
    predictor = load_predictor(path, device)
    if not isinstance(predictor, ClassifierPredictor):
        raise InputError(f"{path} is of a detector, expected a classifier: use detr_bf.load")
    return predictor


def load_predictor(path: str | Path, device: str = "auto") -> Predictor | ClassifierPredictor:
    """As :func:`load` or :func:`load_classifier`, whichever the checkpoint is of.

    Raises:
        InputError: as both, or it predicts nothing of an image.
    """
    source = checkpoint_of(path)
    checkpoint = load_checkpoint(source)
    config = config_from_dict(checkpoint.config, source=f"the config in {source}")
    config.device = device
    if isinstance(config, Config):
        return _detector(config, checkpoint, str(source))
    if isinstance(config, ClassifierConfig):
        return _classifier(config, source)
    raise InputError(
        f"{path} is of a masked autoencoder, which knows no classes: train a classifier from it with "
        f"tools/train_classifier.py and init_from={path}, with model.linear_probe=true or without"
    )


def _detector(config: Config, checkpoint: Checkpoint, source: str) -> Predictor:
    model = build_model(config, checkpoint.classes.num_classes, pretrained=False)
    load_strict(model, checkpoint.weights, source)
    return Predictor(
        model=model.to(device_of(config)).eval(),
        class_map=checkpoint.classes,
        transform=build_eval_transform(config),
        postprocess=build_postprocess(config),
        panoptic_postprocess=build_panoptic_postprocess(config, checkpoint.classes),
        device=device_of(config),
    )


def _classifier(config: ClassifierConfig, source: Path) -> ClassifierPredictor:
    device = device_of(config)
    loaded = load_classifier_model(source, device=device)
    return ClassifierPredictor(
        loaded.model, loaded.class_map, build_image_eval_transform(config.data.transforms), device
    )


def _pixels(image: str | Path | Tensor) -> Tensor:
    return image if isinstance(image, Tensor) else read_image(Path(image))
