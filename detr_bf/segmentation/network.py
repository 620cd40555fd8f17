"""UPerNet: pyramid pooling and a feature pyramid over the maps of a backbone (Xiao et al. 2018, arXiv 1807.10221,
section 3.1), with the second head of PSPNet (Zhao et al. 2017, arXiv 1612.01105, section 3.3) for training.

Shape legend: B images, K classes, H x W pixels of the padded batch, C channels, h x w cells of the finest map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.v2.functional import resize_image, resize_mask

from detr_bf.backbones import Backbone
from detr_bf.common.structures import Batch
from detr_bf.segmentation.batch import IGNORE


@dataclass(frozen=True)
class SegmentationOutputs:
    """Logits of the classes, and those of the second head in training."""

    logits: Tensor  # (B, K, h, w)
    size: tuple[int, int]  # H, W
    auxiliary: Tensor | None = None  # (B, K, h', w')

    def labels(self, index: int, size: tuple[int, int], original: tuple[int, int]) -> Tensor:
        """Return the most probable class of each pixel of an image, ``original`` (height, width) uint8.

        ``size`` is that of the image in the batch. The logits are interpolated to the batch, then to the image; IGNORE
        where they are not finite.
        """
        logits = interpolated(self.logits[index : index + 1].float(), self.size)[:, :, : size[0], : size[1]]
        logits = interpolated(logits, original)[0]
        return logits.argmax(0).where(logits.isfinite().all(0), IGNORE).to(torch.uint8)


def interpolated(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Interpolate maps (B, C, h, w) bilinearly to ``size`` (height, width)."""
    if tuple(maps.shape[-2:]) == tuple(size):
        return maps
    return F.interpolate(maps, size=tuple(size), mode="bilinear", align_corners=False)


def _conv(channels: int, out: int, kernel: int) -> nn.Sequential:
    """Return a convolution without bias, batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(channels, out, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(out), nn.ReLU()
    )


class PyramidPooling(nn.Module):
    """A map with its averages over grids of several sizes (Zhao et al. 2017, section 3.2).

    Args:
        in_channels: of the map.
        channels: of each pooled map and of the output.
        bins: cells per side of the grids.
    """

    def __init__(self, in_channels: int, channels: int, bins: Sequence[int]) -> None:
        super().__init__()
        self.pooled = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(n), _conv(in_channels, channels, 1)) for n in bins
        )
        self.fuse = _conv(in_channels + len(bins) * channels, channels, 3)

    def forward(self, features: Tensor) -> Tensor:
        """(B, C, h, w) -> (B, channels, h, w)."""
        size = features.shape[-2:]
        return self.fuse(torch.cat([features, *(interpolated(pool(features), size) for pool in self.pooled)], dim=1))


class UperHead(nn.Module):
    """Feature pyramid whose coarsest map has pyramid pooling; all its maps, at the finest size, are fused.

    Args:
        in_channels: of the feature maps, fine to coarse.
        channels: of all maps of the head.
        num_classes: K.
        bins: see :class:`PyramidPooling`.
        dropout: probability, of whole channels before the classifier.
    """

    def __init__(
        self, in_channels: Sequence[int], channels: int, num_classes: int, *, bins: Sequence[int], dropout: float
    ) -> None:
        super().__init__()
        self.pooling = PyramidPooling(in_channels[-1], channels, bins)
        self.lateral = nn.ModuleList(_conv(count, channels, 1) for count in in_channels[:-1])
        self.smooth = nn.ModuleList(_conv(channels, channels, 3) for _ in in_channels[:-1])
        self.fuse = _conv(len(in_channels) * channels, channels, 3)
        self.classify = _classifier(channels, num_classes, dropout)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Maps (B, C, h, w), fine to coarse -> logits (B, K, h, w) at the size of the finest."""
        maps = [lateral(each) for lateral, each in zip(self.lateral, features, strict=False)]
        maps.append(self.pooling(features[-1]))
        for level in range(len(maps) - 1, 0, -1):
            maps[level - 1] = maps[level - 1] + interpolated(maps[level], maps[level - 1].shape[-2:])
        maps[:-1] = [smooth(each) for smooth, each in zip(self.smooth, maps, strict=False)]
        size = maps[0].shape[-2:]
        logits: Tensor = self.classify(self.fuse(torch.cat([interpolated(each, size) for each in maps], dim=1)))
        return logits


def _classifier(channels: int, num_classes: int, dropout: float) -> nn.Sequential:
    last = nn.Conv2d(channels, num_classes, 1)
    nn.init.normal_(last.weight, std=0.01)
    last.bias.data.zero_()  # type: ignore[union-attr]
    return nn.Sequential(nn.Dropout2d(dropout), last)


class Segmenter(nn.Module):
    """Backbone, UPerNet's head, and in training the second head on the last map but one.

    Args:
        auxiliary_channels: of the second head; 0: there is none.
        scales: in evaluation, factors of the size of the images, whose probabilities are averaged (Xiao et al. 2018,
            section 4.2).
        flip: in evaluation, average the probabilities of the mirrored images too.
    """

    def __init__(
        self,
        backbone: Backbone,
        num_classes: int,
        *,
        channels: int,
        bins: Sequence[int],
        dropout: float,
        auxiliary_channels: int = 0,
        scales: Sequence[float] = (1.0,),
        flip: bool = False,
    ) -> None:
        super().__init__()
        self.scales, self.flip = tuple(scales), flip
        self.backbone = backbone
        self.head = UperHead(backbone.channels, channels, num_classes, bins=bins, dropout=dropout)
        self.auxiliary: nn.Module | None = None
        if auxiliary_channels:
            middle = backbone.channels[max(len(backbone.channels) - 2, 0)]
            self.auxiliary = nn.Sequential(
                _conv(middle, auxiliary_channels, 3), _classifier(auxiliary_channels, num_classes, dropout)
            )

    def forward(self, batch: Batch) -> SegmentationOutputs:
        """Return the logits of the images of a batch, or logarithms of the mean probabilities of several scales."""
        if not self.training and (self.flip or self.scales != (1.0,)):
            return self._averaged(batch)
        features = [level.tensor for level in self.backbone(batch.images, batch.padding_mask)]
        height, width = batch.images.shape[-2:]
        second = None
        if self.training and self.auxiliary is not None:
            second = self.auxiliary(features[max(len(features) - 2, 0)])
        return SegmentationOutputs(self.head(features), (height, width), second)

    def _averaged(self, batch: Batch) -> SegmentationOutputs:
        """Return the logarithms of the mean probabilities over the scales and flips."""
        size = (batch.images.shape[-2], batch.images.shape[-1])
        mean, count = torch.zeros(()), len(self.scales) * (1 + self.flip)
        for scale in self.scales:
            scaled = [max(1, round(scale * side)) for side in size]
            images = resize_image(batch.images, scaled, antialias=True)
            padding = resize_mask(batch.padding_mask, scaled)
            for mirror in (False, True) if self.flip else (False,):
                pixels, mask = (x.flip(-1) if mirror else x for x in (images, padding))
                logits = self.head([level.tensor for level in self.backbone(pixels, mask)])
                probabilities = interpolated(logits.float(), size).softmax(1)
                mean = mean + (probabilities.flip(-1) if mirror else probabilities) / count
        return SegmentationOutputs(mean.clamp(min=torch.finfo(mean.dtype).tiny).log(), size)
