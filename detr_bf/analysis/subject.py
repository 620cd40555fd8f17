"""Model and images of an analysis, and the mode of the model during it.

Shape legend: B images, H x W pixels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from detr_bf.batchformer import BatchFormer, BatchFormerV2
from detr_bf.classification.batch import LabelledImages
from detr_bf.common.errors import InputError
from detr_bf.plugins.batchformer import BatchAttention

Loss = Callable[[Tensor, Tensor], Tensor]  # logits (B, K), labels (B,) -> ()
EPSILONS = tuple(n / 255 for n in (0, 1, 2, 4, 8))


@dataclass(frozen=True)
class Pixels:
    """Normalisation of images: (pixel - mean) / std, with pixels from 0 (black) to 1."""

    mean: Sequence[float]  # red, green, blue
    std: Sequence[float]

    def normalised(self, pixel: float, like: Tensor) -> Tensor:
        """Return the normalised value (3, 1, 1) of a grey pixel, in device and dtype of ``like``."""
        mean, std = self._channels(like)
        return (pixel - mean) / std

    def step(self, size: float, like: Tensor) -> Tensor:
        """Return a step of ``size``, with black to white 1, in normalised images: (3, 1, 1)."""
        return size / self._channels(like)[1]

    def shown(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) normalised -> (B, H, W, 3) float32 from 0 to 1, on the CPU."""
        mean, std = self._channels(images)
        return (images * std + mean).clamp(0, 1).permute(0, 2, 3, 1).float().cpu()

    def _channels(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (
            torch.tensor(list(values), dtype=like.dtype, device=like.device) for values in (self.mean, self.std)
        )
        return mean[:, None, None], std[:, None, None]


@dataclass(frozen=True)
class Subject:
    """Trained classifier, and the images and settings of its analysis."""

    model: nn.Module
    batches: Iterable[LabelledImages]  # iterated once
    class_names: Sequence[str]  # K
    class_counts: Sequence[int]  # K numbers of training images
    pixels: Pixels
    loss: Loss = F.cross_entropy  # training loss of the model
    epsilons: Sequence[float] = EPSILONS  # steps of FGSM, black to white is 1
    patch: int | None = None  # side of occluded patches in pixels; None: a ViT's own, else a 14th of the image


@contextmanager
def evaluating(model: nn.Module, *training: nn.Module) -> Iterator[None]:
    """Set evaluation mode within the block, except for the modules ``training`` (without their children)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for module in training:
        module.training = True
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Register hooks by iterating over ``handles``, and remove them at the end of the block."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield


def moved(batches: Iterable[LabelledImages], model: nn.Module) -> Iterator[LabelledImages]:
    """Move the batches to the model's device; InputError if there are no batches."""
    device, empty = next(model.parameters()).device, True
    for batch in batches:
        empty = False
        yield batch.to(device)
    if empty:
        raise InputError("an analysis needs one or more images, got none: check the data set, or raise --images")


@contextmanager
def two_streams(model: nn.Module) -> Iterator[BatchFormer | BatchFormerV2]:
    """Set evaluation mode within the block, but return both streams; batch attention has no dropout.

    Raises:
        InputError: the model has no batch attention, or it has no second stream.
    """
    found = [module for module in model.modules() if isinstance(module, BatchAttention)]
    if not found:
        raise InputError(
            f"{type(model).__name__} has no batch attention: this analysis needs a model trained with "
            "plugins.batchformer.enabled=true or plugins.batchformer_v2.enabled=true"
        )
    plugin = found[0]
    with evaluating(model, plugin, plugin.batch_former):
        if plugin.num_streams != 2:
            raise InputError(
                "the model's batch attention replaces the features instead of making a second stream: this analysis "
                "needs plugins.batchformer.shared_classifier=true, or plugins.batchformer_v2.mode=two_stream"
            )
        yield plugin.batch_former
