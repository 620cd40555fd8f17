"""Every detector with tiny parts, on tiny images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from detr_bf.batchformer import BatchFormerV2
from detr_bf.detectors import Detector, Options, conditional_detr, deformable_detr, detr, smca, smca_multi_scale
from detr_bf.structures import Batch, FeatureMap

IMAGES, CHANNELS, DIM, QUERIES, LOGITS, LAYERS = 2, 3, 32, 5, 4, 2

# How many feature maps each uses, and how it is made.
DETECTORS: dict[str, tuple[int, Callable[..., Detector]]] = {
    "detr": (1, detr),
    "conditional_detr": (1, conditional_detr),
    "smca": (1, partial(smca, stride=4, strides=(4,))),
    "smca_multi_scale": (3, smca_multi_scale),
    "deformable_detr": (2, deformable_detr),
    "deformable_detr_refine": (2, partial(deformable_detr, box_refine=True)),
    "deformable_detr_two_stage": (2, partial(deformable_detr, box_refine=True, two_stage=True)),
}
# Those in which padded cells count for nothing: group norm and convolutions see padding.
BLIND_TO_PADDING = ("detr", "conditional_detr", "smca")


class Averages(nn.Module):
    """A backbone without weights: the means over cells of 4 x 4 pixels, 8 x 8, and so on."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels

    def forward(self, images: Tensor, padding_mask: Tensor) -> Sequence[FeatureMap]:
        pixels = images.to(torch.get_default_dtype()) / 255 * ~padding_mask[:, None]
        strides = [4 * 2**level for level in range(self.levels)]
        return [
            FeatureMap(nn.functional.avg_pool2d(pixels, stride, ceil_mode=True), padding_mask[:, ::stride, ::stride])
            for stride in strides
        ]


def model(name: str = "detr", **changes: object) -> Detector:
    torch.manual_seed(0)
    settings = {
        "num_logits": LOGITS,
        "hidden_dim": DIM,
        "heads": 2,
        "encoder_layers": LAYERS,
        "decoder_layers": LAYERS,
        "feedforward_dim": 12,
        "num_queries": QUERIES,
    }
    levels, make = DETECTORS[name]
    return make(Averages(levels), [CHANNELS] * levels, Options(**(settings | changes)))


def shaken(module: Detector, std: float = 0.3) -> Detector:
    """Every parameter random: what starts at zero would hide paths."""
    torch.manual_seed(2)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


def batch_former(**changes: object) -> BatchFormerV2:
    return BatchFormerV2(DIM, **({"layers": [0], "num_encoder_layers": LAYERS} | changes))


def images() -> Batch:
    """Two images of 32 x 48 pixels, the second only 16 x 24 without padding."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(256, (IMAGES, CHANNELS, 32, 48), generator=generator, dtype=torch.uint8)
    mask = torch.zeros(IMAGES, 32, 48, dtype=torch.bool)
    mask[1, 16:] = mask[1, :, 24:] = True
    return Batch(pixels, mask)
