"""Trained models with images of their validation split, for pictures of what happens inside them.

Shape legend: B images, T objects of an image, S tokens, h x w cells of a feature map.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.ops import box_convert

from detr_bf.analysis.classification import Pixels
from detr_bf.assembly.data import build_val_data
from detr_bf.assembly.model import build_postprocess
from detr_bf.classification.assembly_data import build_image_splits
from detr_bf.classification.batch import LabelledImages
from detr_bf.classification.config import ClassifierConfig
from detr_bf.common.devices import device_of
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, ClassMap, Target, TokenBatch
from detr_bf.common.text import listed, printable
from detr_bf.config import DetectionConfig, RunConfig
from detr_bf.data.batches import SampleKey
from detr_bf.data.images import displayed
from detr_bf.engine import checkpoint_of, load_checkpoint
from detr_bf.tasks import read_trained, task_of


class Level(NamedTuple):
    """A feature map within the tokens."""

    start: int  # index of its first token
    height: int  # cells
    width: int


@dataclass(frozen=True)
class ShownImage:
    """An image of a batch as a picture."""

    name: str
    picture: np.ndarray  # (h, w, 3) float from 0 to 1, as the model gets it, without padding
    original_size: tuple[int, int]  # height and width of the file in pixels
    boxes: np.ndarray  # (T, 4) float, x0, y0, x1, y1 in pixels of the picture; none for classifiers


@dataclass(frozen=True)
class ShownBatch:
    """A batch for a model, and its images as pictures in its upper left corner."""

    inputs: Any  # argument of the model
    images: tuple[ShownImage, ...]
    size: tuple[int, int]  # height and width in pixels, with padding


class InspectedRun(ABC):
    """A trained model in evaluation mode, and its validation images."""

    def __init__(self, name: str, model: nn.Module, config: RunConfig, classes: ClassMap) -> None:
        self.name = name
        self.device = device_of(config.device)
        self.model = model.to(self.device).eval()
        self.config = config
        self.classes = classes

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """Names of all validation images."""

    @abstractmethod
    def load(self, indices: Sequence[int]) -> ShownBatch:
        """Return a batch of validation images."""

    @abstractmethod
    def levels(self, tokens: TokenBatch, batch: ShownBatch) -> list[Level]:
        """Return the feature maps in the tokens of a batch, finest first."""

    @property
    def attends_to_references(self) -> bool:
        """True if each image attends to its reference alone in evaluation."""
        return False

    def with_reference(self, batch: ShownBatch) -> ShownBatch:
        """Return a batch of one image with the picture of its reference behind it (InputError: it has none)."""
        raise NotImplementedError

    def detected(self, outputs: Any, batch: ShownBatch) -> np.ndarray:
        """Return the detected boxes of the first image (N, 4), best first, x0, y0, x1, y1 in pixels of its picture."""
        raise NotImplementedError

    def untrained(self) -> nn.Module:
        """Return the model as it was before training."""
        task = task_of(self.config)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.config.seed)
            model = task.build_model(self.classes.num_classes, pretrained=not self.config.init_from)
            task.initialize(model, self.classes)
        return model.to(self.device).eval()

    def find(self, name: str) -> int:
        """Return the index of an image, given by its file name with or without folders.

        Raises:
            InputError: there is none, or there are several.
        """
        exact = [index for index, each in enumerate(self.names) if each == name]
        found = exact or [index for index, each in enumerate(self.names) if Path(each).name == name]
        if len(found) != 1:
            near = [each for each in self.names if Path(name).stem in each][:5]
            several = f"is the name of {len(found)} validation images: give it with its folder"
            missing = f"is no validation image of {printable(self.name)}; such as {listed(near or self.names[:5])}"
            raise InputError(f"--image {printable(name)} {several if found else missing}")
        return found[0]


class InspectedDetector(InspectedRun):
    """A detector."""

    def __init__(self, name: str, model: nn.Module, config: DetectionConfig, data: Any) -> None:
        super().__init__(name, model, config, data.class_map)
        self.settings = config
        self.data = data

    @property
    def names(self) -> Sequence[str]:
        return [printable(name) for name in self.data.file_names]

    @property
    def attends_to_references(self) -> bool:
        return bool(cast("Any", self.model).attends_to_references)

    def with_reference(self, batch: ShownBatch) -> ShownBatch:
        image, pixels = batch.images[0], batch.inputs.references
        if pixels is None:
            raise InputError(f"{image.name} has no reference to attend to: choose another image with --image")
        height, width = image.picture.shape[:2]
        picture = displayed(pixels[0, :, :height, :width].cpu()).permute(1, 2, 0).float() / 255
        name = f"{image.name} (reference)"
        return replace(batch, images=(image, replace(image, name=name, picture=picture.numpy())))

    def detected(self, outputs: Any, batch: ShownBatch) -> np.ndarray:
        [found, *_] = build_postprocess(self.settings)(outputs, batch.inputs.targets)
        image = batch.images[0]
        (height, width), (own_height, own_width) = image.picture.shape[:2], image.original_size
        return found.boxes.numpy() * np.array([width / own_width, height / own_height] * 2)

    def load(self, indices: Sequence[int]) -> ShownBatch:
        batch = Batch.collate([self.data[SampleKey(0, index)] for index in indices])
        images = []
        for pixels, target in zip(batch.images, batch.targets, strict=True):
            height, width = target.size
            boxes = box_convert(target.boxes, "cxcywh", "xyxy") * torch.tensor([width, height, width, height])
            picture = displayed(pixels[:, :height, :width]).permute(1, 2, 0).float() / 255
            images.append(ShownImage(target.file_name, picture.numpy(), target.original_size, boxes.numpy()))
        height, width = batch.images.shape[-2:]
        return ShownBatch(batch.to(self.device), tuple(images), (height, width))

    def levels(self, tokens: TokenBatch, batch: ShownBatch) -> list[Level]:
        return level_list(tokens.static["spatial_shapes"])

    def original(self, index: int) -> tuple[Tensor, Target]:
        """Return an image (3, H, W) uint8 as in its file, with its objects."""
        plain = build_val_data(self.settings, self.data.class_map, transform=lambda sample: sample, references=False)
        image, target, *_ = plain[SampleKey(0, index)]
        return displayed(image), target


class InspectedClassifier(InspectedRun):
    """A ViT classifier; the class token and other prefix tokens are no part of its map."""

    def __init__(self, name: str, model: nn.Module, config: ClassifierConfig, data: Any) -> None:
        super().__init__(name, model, config, data.class_map)
        self.data = data
        self.pixels = Pixels(config.data.transforms.mean, config.data.transforms.std)

    @property
    def names(self) -> Sequence[str]:
        return [f"image {index}" for index in range(len(self.data))]

    def load(self, indices: Sequence[int]) -> ShownBatch:
        batch = LabelledImages.collate([self.data[SampleKey(0, index)] for index in indices])
        size = (batch.images.shape[-2], batch.images.shape[-1])
        pictures, none = self.pixels.shown(batch.images).numpy(), np.zeros((0, 4))
        names = [self.names[index] for index in indices]
        images = [ShownImage(name, picture, size, none) for name, picture in zip(names, pictures, strict=True)]
        return ShownBatch(batch.images.to(self.device), tuple(images), size)

    def levels(self, tokens: TokenBatch, batch: ShownBatch) -> list[Level]:
        vit = cast("VisionTransformer", self.model)
        return level_list([cast("Any", vit.patch_embed).dynamic_feat_size(batch.size)], vit.num_prefix_tokens)


def level_list(shapes: Sequence[tuple[int, int]], start: int = 0) -> list[Level]:
    """Return the levels of maps with these heights and widths, one after another from token ``start`` on."""
    levels = []
    for height, width in shapes:
        levels.append(Level(start, height, width))
        start += height * width
    return levels


def level_numbered(levels: Sequence[Level], level: int) -> Level:
    """Return one of the levels; InputError if it does not exist."""
    if not 0 <= level < len(levels):
        raise InputError(f"--level {level}: the model has the levels 0 to {len(levels) - 1}, 0 is the finest")
    return levels[level]


def load_inspected(name: str, source: Path, overrides: Sequence[str] = ()) -> InspectedRun:
    """Return the trained model of a run folder or checkpoint, with the validation images of its config.

    Args:
        overrides: settings to change, such as ``data.root=DIR`` and ``device=cpu``.

    Raises:
        InputError: the source is no checkpoint of a detector or classifier, or the images cannot be read.
    """
    task, model, classes = read_trained(source, ("detection", "classification"), overrides)
    config = task.config
    if isinstance(config, DetectionConfig):
        return InspectedDetector(name, model, config, build_val_data(config, classes))
    return InspectedClassifier(name, model, config, build_image_splits(config).val)


def task_of_checkpoint(source: Path) -> str:
    """Return the task of a run folder or checkpoint."""
    task = load_checkpoint(checkpoint_of(source)).config.get("task", "detection")
    return task if isinstance(task, str) else ""
