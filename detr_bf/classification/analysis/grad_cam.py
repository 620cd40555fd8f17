"""Where a classifier looks: Grad-CAM (Selvaraju et al. 2017, ICCV, arXiv 1610.02391), as in figure 5 of BatchFormer.

Shape legend: B images, C channels, K classes, S tokens with the class token, h x w places of the last feature map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from matplotlib.figure import Figure
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from detr_bf.classification.analysis.figures import Cell, check_same_images, draw_sheet
from detr_bf.classification.analysis.subject import Pixels, evaluating, hooked, moved
from detr_bf.errors import InputError
from detr_bf.labelled import LabelledImages
from detr_bf.losses.classification import check_labels
from detr_bf.plugins.plugin import patches_of, require_vit
from detr_bf.text import printable

_STEMS = ("patch_embed", "stem")  # where transformers and MLP networks have their only convolutions


@dataclass(frozen=True)
class CamImage:
    """One image and where the score of its class comes from."""

    place: int  # in the data set
    name: str  # of its class
    predicted: str
    probability: float  # of its class
    picture: np.ndarray  # (H, W, 3) from 0 to 1
    heat: np.ndarray  # (h, w) from 0 to 1


@dataclass(frozen=True)
class CamSheet:
    """All images."""

    images: tuple[CamImage, ...]

    def rows(self) -> list[dict[str, object]]:
        """One an image, for a table; the heat by its centre, in parts of height and width (none: no heat at all)."""
        return [
            {
                "place": image.place,
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
    """Maps (B, C, h, w) and the gradients of a score in them -> (B, h, w): from 0 to 1, the largest of each image.

    The rectified sum of the maps, each weighted by its mean gradient.
    """
    weights = gradients.mean((2, 3), keepdim=True)
    heat = (weights * maps).sum(1).relu()
    largest = heat.amax((1, 2), keepdim=True)
    return torch.where(largest > 0, heat / largest, heat)


@torch.enable_grad()
def grad_cam(
    model: nn.Module, batches: Iterable[LabelledImages], *, class_names: Sequence[str], pixels: Pixels
) -> CamSheet:
    """The Grad-CAM of every image for the class it belongs to.

    The maps are, in a timm ViT, the patch tokens behind the first norm of the last block, else the last module output
    with the shape of the last convolution's: in a ResNet what its last stage gives.

    Raises:
        InputError: a model of another kind, a last map of one place, no images, or labels outside the classes.
    """
    found: list[CamImage] = []
    source: nn.Module | None = None
    with evaluating(model):
        for batch in moved(batches, model):
            check_labels(batch.targets.labels, len(class_names))
            source = source or _source(model, batch.images)
            logits, heat = _heat(model, source, batch)
            best, labels = logits.argmax(1).tolist(), batch.targets.labels.tolist()
            probability = logits.softmax(1)
            pictures = pixels.shown(batch.images)
            for row, place in enumerate(batch.places.tolist()):
                found.append(
                    CamImage(
                        place,
                        class_names[labels[row]],
                        class_names[best[row]],
                        float(probability[row, labels[row]]),
                        pictures[row].numpy(),
                        heat[row].float().cpu().numpy(),
                    )
                )
    return CamSheet(tuple(found))


def _heat(model: nn.Module, source: nn.Module, batch: LabelledImages) -> tuple[Tensor, Tensor]:
    """Logits (B, K) and heat (B, h, w), without a graph."""
    leaves: list[Tensor] = []

    def cut(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()  # what follows may change it in place

    with hooked([source.register_forward_hook(cut)]):
        logits = model(batch.images)
    score = logits.gather(1, batch.targets.labels[:, None]).sum()  # images do not meet, so each has its own gradient
    [gradient] = torch.autograd.grad(score, leaves)
    to_map = _map_of(model, batch.images)
    return logits.detach(), class_activation(to_map(leaves[0].detach()), to_map(gradient))


def _map_of(model: nn.Module, images: Tensor) -> Callable[[Tensor], Tensor]:
    """How the output of the source becomes (B, C, h, w)."""
    if not isinstance(model, VisionTransformer):
        return lambda maps: maps
    grid = cast("Any", model.patch_embed).dynamic_feat_size(images.shape[-2:])
    return lambda tokens: patches_of(tokens, model.num_prefix_tokens).transpose(1, 2).unflatten(2, grid)


@torch.no_grad()
def _source(model: nn.Module, images: Tensor) -> nn.Module:
    """The module whose output is looked at."""
    if isinstance(model, VisionTransformer):
        return cast("Any", require_vit(model).blocks[-1]).norm1
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
            f"{tuple(images.shape[2:])}, behind its stem: Grad-CAM needs a convolutional network or timm's "
            "VisionTransformer, and images that its last map leaves more than one place of"
        )
    return next(module for name, module, shape in reversed(shapes) if shape == convolved[1])


def draw_grad_cam(runs: Mapping[str, CamSheet]) -> Figure:
    """The images, and for each run the heat over them with the probability of the class.

    Raises:
        InputError: the runs show different images.
    """
    check_same_images({name: [(image.place, image.name) for image in sheet.images] for name, sheet in runs.items()})
    first = next(iter(runs.values()))
    columns = {"image": [Cell(image.picture, image.name) for image in first.images]}
    for name, sheet in runs.items():
        captions = (f"{printable(image.predicted, limit=18)}, p = {image.probability:.2f}" for image in sheet.images)
        columns[name] = [
            Cell(image.picture, caption, image.heat, over=True)
            for image, caption in zip(sheet.images, captions, strict=True)
        ]
    return draw_sheet("Grad-CAM of the true class; below each the predicted class, p of the true one", columns)
