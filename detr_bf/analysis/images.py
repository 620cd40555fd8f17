"""Analyses with one map per image: Grad-CAM, and feature maps of both streams of BatchFormerV2.

Shape legend: B images, C channels, K classes, S tokens with the class token, h x w positions of a feature map.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from matplotlib.figure import Figure
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from detr_bf.analysis.subject import Pixels, evaluating, hooked, moved, two_streams
from detr_bf.batchformer import BatchFormerV2
from detr_bf.classification.batch import LabelledImages
from detr_bf.common.errors import InputError
from detr_bf.common.text import printable
from detr_bf.losses.classification import check_labels
from detr_bf.plugins.plugin import patches_of, require_vit
from detr_bf.report.figures import Cell, check_same_images, draw_sheet

_STEMS = ("patch_embed", "stem")  # modules with the only convolutions of transformers and MLP networks


@dataclass(frozen=True)
class CamImage:
    """One image and the Grad-CAM of its class."""

    index: int  # in the data set
    name: str  # of its class
    predicted: str
    probability: float  # of its class
    picture: np.ndarray  # (H, W, 3) from 0 to 1
    heat: np.ndarray  # (h, w) from 0 to 1


@dataclass(frozen=True)
class CamSheet:
    """Grad-CAMs of all images."""

    images: tuple[CamImage, ...]

    def rows(self) -> list[dict[str, object]]:
        """Return a table, one row per image; the centre of the heat is in parts of height and width (None: no heat)."""
        return [
            {
                "index": image.index,
                "class": image.name,
                "predicted": image.predicted,
                "probability": image.probability,
                **dict(zip(("centre_row", "centre_column"), _centre(image.heat), strict=True)),
            }
            for image in self.images
        ]


def _centre(heat: np.ndarray) -> tuple[float | None, float | None]:
    if not heat.any():
        return None, None
    row, column = ((np.arange(side) + 0.5) / side for side in heat.shape)
    return float((heat.sum(1) * row).sum() / heat.sum()), float((heat.sum(0) * column).sum() / heat.sum())


def class_activation(maps: Tensor, gradients: Tensor) -> Tensor:
    """Maps (B, C, h, w) and the gradients of a score with respect to them -> (B, h, w), each with a maximum of 1 or 0.

    The result is the rectified sum of the maps, each weighted by its mean gradient.
    """
    weights = gradients.mean((2, 3), keepdim=True)
    heat = (weights * maps).sum(1).relu()
    largest = heat.amax((1, 2), keepdim=True)
    return torch.where(largest > 0, heat / largest, heat)


@torch.enable_grad()
def grad_cam(
    model: nn.Module, batches: Iterable[LabelledImages], *, class_names: Sequence[str], pixels: Pixels
) -> CamSheet:
    """Compute Grad-CAM for the true class (Selvaraju et al. 2017, arXiv 1610.02391), as in figure 5 of BatchFormer.

    The maps of a timm ViT are the patch tokens after the first norm of the last block. Those of other networks are the
    last module output with the shape of the last convolution's output, such as that of a ResNet's last stage; of
    experts those of the last one.

    Raises:
        InputError: the model is of another kind, its last map has one position, there are no images, or labels are
            outside the classes.
    """
    found: list[CamImage] = []
    source: nn.Module | None = None
    with evaluating(model):
        for batch in moved(batches, model):
            labels = batch.targets.labels
            check_labels(labels, len(class_names))
            source = source or _source(model, batch.images)
            logits, heat = _heat(model, source, batch)
            best, probability = logits.argmax(1).tolist(), logits.softmax(1).gather(1, labels[:, None])[:, 0].tolist()
            pictures, heats = pixels.shown(batch.images).numpy(), heat.float().cpu().numpy()
            for row, (index, label) in enumerate(zip(batch.indices.tolist(), labels.tolist(), strict=True)):
                found.append(
                    CamImage(
                        index,
                        class_names[label],
                        class_names[best[row]],
                        probability[row],
                        pictures[row],
                        heats[row],
                    )
                )
    return CamSheet(tuple(found))


def _heat(model: nn.Module, source: nn.Module, batch: LabelledImages) -> tuple[Tensor, Tensor]:
    """Return logits (B, K) and heat (B, h, w), detached."""
    leaves: list[Tensor] = []

    def cut(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()  # the next module may be in-place

    with hooked([source.register_forward_hook(cut)]):
        logits = model(batch.images)
    # images are independent, so each has its own gradient
    scores = logits.gather(1, batch.targets.labels[:, None])
    maps, gradients = leaves[0].detach(), torch.autograd.grad(scores.sum(), leaves)[0]
    if isinstance(model, VisionTransformer):  # (B, S, C) to (B, C, h, w)
        grid = cast("Any", model.patch_embed).dynamic_feat_size(batch.images.shape[-2:])
        maps = patches_of(maps, model.num_prefix_tokens).transpose(1, 2).unflatten(2, grid)
        gradients = patches_of(gradients, model.num_prefix_tokens).transpose(1, 2).unflatten(2, grid)
    return logits.detach(), class_activation(maps, gradients)


@torch.no_grad()
def _source(model: nn.Module, images: Tensor) -> nn.Module:
    """Return the module whose output the maps are."""
    if isinstance(model, VisionTransformer):
        blocks = cast("Any", require_vit(model).blocks)
        found = [block.norm1 for block in blocks if hasattr(block, "norm1")]  # the block of extra_mlp has none
        if not found:
            raise InputError(f"{type(model).__name__} has no block with norm1, which the maps are taken from")
        return found[-1]
    shapes: list[tuple[str, nn.Module, tuple[int, ...]]] = []

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() == 4 and min(output.shape[2:]) > 1:
            shapes.append((name, module, tuple(output.shape)))

    modules = ((name, module) for name, module in model.named_modules() if name)
    with hooked(module.register_forward_hook(partial(note, name)) for name, module in modules):
        model(images[:1])
    convolved = next(((name, shape) for name, module, shape in reversed(shapes) if isinstance(module, nn.Conv2d)), None)
    if convolved is None or convolved[0].split(".")[0] in _STEMS:
        raise InputError(
            f"{type(model).__name__} has no convolution whose output has two or more rows and columns for images of "
            f"{tuple(images.shape[2:])}, after its stem: Grad-CAM needs a convolutional network or timm's "
            "VisionTransformer, and images large enough for a last map of more than one position"
        )
    return next(module for name, module, shape in reversed(shapes) if shape == convolved[1])


def draw_grad_cam(runs: Mapping[str, CamSheet]) -> Figure:
    """Draw the images, and for each run the heat over them with the probability of the class.

    Raises:
        InputError: the runs have different images.
    """
    columns = _image_column(runs)
    for name, sheet in runs.items():
        captions = (f"{printable(image.predicted, limit=18)}, p = {image.probability:.2f}" for image in sheet.images)
        columns[name] = [
            Cell(image.picture, caption, image.heat, over=True)
            for image, caption in zip(sheet.images, captions, strict=True)
        ]
    return draw_sheet("Grad-CAM of the true class; below each the predicted class, p of the true one", columns)


def _image_column(runs: Mapping[str, CamSheet | FeatureMaps]) -> dict[str, list[Cell]]:
    """Return the column of the images themselves; InputError if the runs have different ones."""
    check_same_images({name: [(image.index, image.name) for image in run.images] for name, run in runs.items()})
    return {"image": [Cell(image.picture, image.name) for image in next(iter(runs.values())).images]}


@dataclass(frozen=True)
class StreamMaps:
    """Mean over channels of one image's tokens in both streams."""

    index: int  # in the data set
    name: str  # of its class
    picture: np.ndarray  # (H, W, 3) from 0 to 1
    clean: np.ndarray  # (h, w)
    batchformer: np.ndarray | None  # (h, w); None: the model has no second stream

    def row(self) -> dict[str, object]:
        """Return mean and standard deviation of both maps, and their correlation (None: one is constant)."""
        a, b = self.clean, self.batchformer
        varies = b is not None and a.std() and b.std()
        return {
            "index": self.index,
            "class": self.name,
            "clean_mean": float(a.mean()),
            "clean_std": float(a.std()),
            "batchformer_mean": None if b is None else float(b.mean()),
            "batchformer_std": None if b is None else float(b.std()),
            "correlation": float(np.corrcoef(a.ravel(), b.ravel())[0, 1]) if b is not None and varies else None,
        }


@dataclass(frozen=True)
class FeatureMaps:
    """Feature maps of all images."""

    images: tuple[StreamMaps, ...]

    def rows(self) -> list[dict[str, object]]:
        """Return a table, one row per image."""
        return [image.row() for image in self.images]


@torch.no_grad()
def feature_maps(
    model: nn.Module, batches: Iterable[LabelledImages], *, class_names: Sequence[str], pixels: Pixels
) -> FeatureMaps:
    """Compute the mean over channels of the patches after BatchFormerV2 (Hou et al. 2022, arXiv 2204.01254, figure 8).

    The tokens are those after the block that follows the last insertion. The insertion itself ends in a layer norm,
    whose mean over channels depends on its weights only. Dropout is off; batch attention sees the images of the batch.

    Raises:
        InputError: the model is not a timm ViT with BatchFormerV2 in two streams, a batch has one image, or there are
            no images.
    """
    vit = require_vit(model)
    patch_embed: Any = vit.patch_embed
    found: list[StreamMaps] = []
    kept: list[Tensor] = []
    with two_streams(model) as batch_former:
        if not isinstance(batch_former, BatchFormerV2):
            raise InputError(
                "the model has BatchFormer, whose features have no positions: feature maps need a model trained with "
                "plugins.batchformer_v2.enabled=true"
            )
        block = [*vit.blocks, vit.norm][batch_former.insertions[-1] + (batch_former.position == "after")]
        with hooked([block.register_forward_hook(lambda module, args, output: kept.append(output))]):
            for batch in moved(batches, model):
                if len(batch) < 2:
                    raise InputError("batch attention is between images: give batches of two or more, got one")
                model(batch.images)
                grid = patch_embed.dynamic_feat_size(batch.images.shape[-2:])
                means = patches_of(kept.pop(), vit.num_prefix_tokens).mean(-1).unflatten(1, grid).float().cpu().numpy()
                names = [class_names[label] for label in batch.targets.labels.tolist()]
                pictures, (clean, mixed) = pixels.shown(batch.images).numpy(), np.split(means, 2)
                of_images = zip(batch.indices.tolist(), names, pictures, clean, mixed, strict=True)
                found += [StreamMaps(*image) for image in of_images]
    return FeatureMaps(tuple(found))


def draw_feature_maps(runs: Mapping[str, FeatureMaps]) -> Figure:
    """Draw the images, and for each run both maps, each scaled from its minimum to its maximum.

    Raises:
        InputError: the runs have different images.
    """
    columns = _image_column(runs)
    for name, maps in runs.items():
        columns[f"{name}\nclean stream"] = [Cell(image.picture, heat=image.clean) for image in maps.images]
        if all(image.batchformer is not None for image in maps.images):
            second = [Cell(image.picture, heat=image.batchformer) for image in maps.images]
            columns[f"{name}\nBatchFormer stream"] = second
    return draw_sheet("Mean over channels, each map from its least to its largest value", columns)
