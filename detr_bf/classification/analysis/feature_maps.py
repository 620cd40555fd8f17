"""Feature maps with and without batch attention (Hou et al. 2022, arXiv 2204.01254, figure 8).

Shape legend: B images, S tokens with the class token, C channels, h x w patches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from detr_bf.batchformer import BatchFormerV2
from detr_bf.classification.analysis.figures import Cell, check_same_images, draw_sheet
from detr_bf.classification.analysis.subject import Pixels, hooked, moved, two_streams
from detr_bf.errors import InputError
from detr_bf.labelled import LabelledImages
from detr_bf.plugins.plugin import patches_of, require_vit


@dataclass(frozen=True)
class StreamMaps:
    """The mean over channels of one image's tokens in both streams."""

    place: int  # in the data set
    name: str  # of its class
    picture: np.ndarray  # (H, W, 3) from 0 to 1
    clean: np.ndarray  # (h, w)
    batchformer: np.ndarray  # (h, w)


@dataclass(frozen=True)
class FeatureMaps:
    """All images."""

    images: tuple[StreamMaps, ...]

    def rows(self) -> list[dict[str, object]]:
        """One an image, for a table: mean and deviation of both maps, and their correlation (none: one is flat)."""
        return [
            {
                "place": image.place,
                "class": image.name,
                "clean_mean": float(image.clean.mean()),
                "clean_std": float(image.clean.std()),
                "batchformer_mean": float(image.batchformer.mean()),
                "batchformer_std": float(image.batchformer.std()),
                "correlation": _correlation(image.clean, image.batchformer),
            }
            for image in self.images
        ]


def _correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1]) if a.std() and b.std() else None


@torch.no_grad()
def feature_maps(
    model: nn.Module, batches: Iterable[LabelledImages], *, class_names: Sequence[str], pixels: Pixels
) -> FeatureMaps:
    """The mean over channels of the patches that leave the block behind the last insertion of BatchFormerV2.

    Of the insertion itself the mean would say little: it ends in a layer norm, whose mean over channels is its
    weights' doing. Dropout is off; the other images of the batch are those that batch attention sees.

    Raises:
        InputError: not a timm ViT with BatchFormerV2 in two streams, batches of one image, or no images.
    """
    vit = require_vit(model)
    patch_embed: Any = vit.patch_embed
    found: list[StreamMaps] = []
    kept: list[Tensor] = []
    with two_streams(model) as batch_former:
        if not isinstance(batch_former, BatchFormerV2):
            raise InputError(
                "the model has BatchFormer, whose features have no places: feature maps need a model trained with "
                "plugins.batchformer_v2.enabled=true"
            )
        block = _behind(batch_former, [*vit.blocks, vit.norm])
        with hooked([block.register_forward_hook(lambda module, args, output: kept.append(output))]):
            for batch in moved(batches, model):
                if len(batch) < 2:
                    raise InputError("batch attention is between images: give batches of two or more, got one")
                model(batch.images)
                grid = patch_embed.dynamic_feat_size(batch.images.shape[-2:])
                means = patches_of(kept.pop(), vit.num_prefix_tokens).mean(-1).unflatten(1, grid).float().cpu().numpy()
                found += _of_batch(batch, means, class_names, pixels)
    return FeatureMaps(tuple(found))


def _behind(batch_former: BatchFormerV2, modules: Sequence[nn.Module]) -> nn.Module:
    """The first module that reads what the last insertion gives."""
    return modules[batch_former.insertions[-1] + (batch_former.position == "after")]


def _of_batch(batch: LabelledImages, means: np.ndarray, class_names: Sequence[str], pixels: Pixels) -> list[StreamMaps]:
    """From the maps (2B, h, w), clean stream first."""
    labels, places = batch.targets.labels.tolist(), batch.places.tolist()
    pictures, count = pixels.shown(batch.images).numpy(), len(batch)
    return [
        StreamMaps(places[row], class_names[labels[row]], pictures[row], means[row], means[count + row])
        for row in range(count)
    ]


def draw_feature_maps(runs: Mapping[str, FeatureMaps]) -> Figure:
    """The images, and for each run both maps, each from its own least to its largest value.

    Raises:
        InputError: the runs show different images.
    """
    check_same_images({name: [(image.place, image.name) for image in maps.images] for name, maps in runs.items()})
    first = next(iter(runs.values()))
    columns = {"image": [Cell(image.picture, image.name) for image in first.images]}
    for name, maps in runs.items():
        columns[f"{name}\nclean stream"] = [Cell(image.picture, heat=image.clean) for image in maps.images]
        columns[f"{name}\nBatchFormer stream"] = [Cell(image.picture, heat=image.batchformer) for image in maps.images]
    return draw_sheet("Mean over channels, each map from its least to its largest value", columns)
