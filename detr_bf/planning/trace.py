"""A training step's forward pass and losses over tensors without content: what it keeps in memory and how much it does.

Nothing large is allocated, no weights are loaded, and what happens on a GPU is seen without one.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from detr_bf.assembly import build_classification, build_model
from detr_bf.config import DetectionConfig
from detr_bf.planning.pretence import FusedAttention, autocast, without_numbers
from detr_bf.planning.recorder import Recorder, Work, bytes_of
from detr_bf.structures import Batch, Outputs

OBJECTS = 7  # of an image: 7.3 on average in COCO
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Sizes:
    """Bytes of what belongs to the model, whatever the batch."""

    weights: int  # parameters and buffers
    trainable: int  # parameters with a gradient
    stored: int  # those of the weights that a checkpoint holds

    @classmethod
    def of(cls, model: nn.Module) -> Sizes:
        parameters = list(model.parameters())
        stored = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
        return cls(
            sum(map(bytes_of, (*parameters, *model.buffers()))),
            sum(bytes_of(tensor) for tensor in parameters if tensor.requires_grad),
            sum(map(bytes_of, stored.values())),
        )


@dataclass(frozen=True)
class Trace:
    """The forward pass of one batch in one process, with losses. Bytes are without those of the model."""

    sizes: Sizes
    kept: int  # bytes alive at its end: what the backward pass needs
    peak: int  # most bytes alive at a time
    layers: tuple[int, ...]  # bytes that stay of each encoder layer, without its result
    recomputed: int  # bytes of the largest encoder layer, which the backward pass works out again; 0: none is
    batch_attention: tuple[int, ...]  # bytes of query, key and value, each time
    work: tuple[Work, ...]

    @property
    def needed(self) -> int:
        """Bytes that forward and backward pass hold at most, gradients aside."""
        return max(self.peak, self.kept + self.recomputed)

    @property
    def flops(self) -> int:
        """Of forward and backward pass, and of what is worked out again."""
        return sum(item.flops * item.times for item in self.work)


def trace(
    config: DetectionConfig, num_classes: int, size: tuple[int, int], *, device: str = "cuda", processes: int = 1
) -> Trace:
    """The forward pass of ``train.batch_size`` images, all of one size (height, width).

    Args:
        device: cuda or cpu: whose operators run; neither is used.
        processes: over whose images batch attention goes, with ``batch_former.gather``.
    """
    settings = copy.deepcopy(config)
    settings.train.recompute_encoder = False  # the recorder sees to it
    recompute = config.train.recompute_encoder
    recomputed = max(trace(settings, num_classes, size, device=device).layers, default=0) if recompute else 0
    with without_numbers(device):
        model = build_model(settings, num_classes, pretrained=False).train()
        recorder = Recorder(
            model,
            recompute=recompute,
            processes=processes if config.batch_former.gather else 1,
        )
        with recorder, FusedAttention() if device == "cuda" else nullcontext():
            batch = _blank(settings.train.batch_size, *size)
            with autocast(device, HALF.get(settings.train.precision)):
                outputs = model(batch)
                masks = _masks(outputs)
            losses = _losses(config, outputs)
        result = Trace(
            Sizes.of(model),
            recorder.live,
            recorder.peak,
            tuple(recorder.layers),
            recomputed,
            tuple(recorder.batch_attention),
            tuple(recorder.work),
        )
        del masks, losses  # alive until here
    return result


def _blank(count: int, height: int, width: int) -> Batch:
    images = torch.zeros(count, 3, height, width, dtype=torch.uint8)
    return Batch(images, torch.zeros(count, height, width, dtype=torch.bool))


def _masks(outputs: Outputs) -> Tensor | None:
    """Those of the matched queries."""
    if outputs.masks is None:
        return None
    place = torch.zeros(outputs.masks.rows * min(OBJECTS, outputs.masks.queries), dtype=torch.int64)
    return outputs.masks.of(place, place)


def _losses(config: DetectionConfig, outputs: Outputs) -> list[Tensor]:
    """Those of classification, by far the largest; those of boxes see matched queries alone."""
    classification = build_classification(config)
    found = [outputs] if outputs.proposals is None else [outputs, outputs.proposals]
    return [
        classification.loss(logits.float(), torch.zeros(logits.shape[:3], dtype=torch.int64), torch.ones(()))
        for part in found
        for logits in part.logits.chunk(part.num_streams, 1)
    ]
