"""Detectron2's backbones in the place of ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from detectron2.modeling import Backbone as ForeignBackbone
from torch import Tensor

from detr_bf.backbones import Backbone
from detr_bf.backbones.backbone import Network, check_consecutive, select_levels

TRIAL = 64  # pixels of a side of the image that tells which parameters the maps in use depend on


class Detectron2Backbone(Backbone):
    """A backbone of detectron2 with its normalisation and a padding mask for each of its feature maps.

    Args:
        body: gives feature maps by name.
        strides: pixels per cell of the maps that become tokens, ascending.
        pixel_mean, pixel_std: of the channels in the order of the images, in units of 0 to 255.
        finer: also give every finer map that the body has: what a mask head looks at.

    Raises:
        InputError: the body has no map of a stride, or, with ``finer``, not every one from its finest on.
    """

    def __init__(
        self,
        body: ForeignBackbone,
        *,
        strides: Sequence[int],
        pixel_mean: Sequence[float],
        pixel_std: Sequence[float],
        finer: bool = False,
    ) -> None:
        shapes = body.output_shape()
        names = {shape.stride: name for name, shape in shapes.items()}
        title = type(body).__name__
        select_levels({stride: stride for stride in names}, strides, title)
        used = sorted(stride for stride in names if stride <= max(strides)) if finer else list(strides)
        if finer:
            check_consecutive(used, strides, title)
        super().__init__(
            Network(
                body,
                channels=tuple(shapes[names[stride]].channels for stride in used),
                strides=tuple(used),
                stages=(),
                mean=tuple(value / 255 for value in pixel_mean),
                std=tuple(value / 255 for value in pixel_std),
            )
        )
        self.names = [names[stride] for stride in used]
        if len(used) < len(names):
            self._freeze_unused()

    def maps(self, pixels: Tensor) -> Sequence[Tensor]:
        found = self.body(pixels)
        return [found[name] for name in self.names]

    def _freeze_unused(self) -> None:
        """Switch off the gradients of what only other maps are made of: detectron2's processes wait for all of them."""
        learning = [parameter for parameter in self.body.parameters() if parameter.requires_grad]
        training = self.body.training
        self.body.eval()
        with torch.enable_grad():
            total = sum(level.sum() for level in self.maps(torch.zeros(1, 3, TRIAL, TRIAL)))
        self.body.train(training)
        if isinstance(total, Tensor) and total.requires_grad:
            reached = torch.autograd.grad(total, learning, allow_unused=True)
            for parameter, gradient in zip(learning, reached, strict=True):
                parameter.requires_grad_(gradient is not None)
