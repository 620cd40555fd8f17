"""Modes, streams and epochs that batch attention has wherever it is inserted.

Shape legend: B images, S tokens of an image, C channels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from detr_bf.batchformer.mixers import BATCH_MIXERS
from detr_bf.common.errors import InputError

logger = logging.getLogger(__name__)

# of these, the last two use batch attention in evaluation
MODES = ("two_stream", "single_stream", "duplicate", "self_only", "mini_batch_inference", "single_stream_inference")
EVALUATED_MODES = ("mini_batch_inference", "single_stream_inference")
SEPARATE_MODES = ("duplicate", "self_only")  # controls in which no image attends to another
SHORT_SEQUENCE = 3


class InsertedBatchFormer(nn.Module):
    """Base class of batch attention at chosen layers: the mixers, and what they do in each mode and epoch.

    Args:
        dim: channels C.
        layers: indices of the layers, counted from 0, strictly ascending.
        places: number of layers to choose from.
        of: text around this number in an error, such as ``the encoder has {} layers``.
        shared, mode, mixer, num_layers, heads, dropout, until_epoch, keep_streams, group_size: see
            :class:`detr_bf.batchformer.BatchFormerV2`.

    Raises:
        InputError: no layers, layers that repeat, do not ascend or do not exist, an unknown mode or mixer, settings
            that exclude each other, or arguments that the mixer refuses.
    """

    title = "BatchFormerV2"  # in the log

    def __init__(
        self,
        dim: int,
        *,
        layers: Sequence[int],
        places: int,
        of: str,
        shared: bool,
        mode: str,
        mixer: str,
        num_layers: int,
        heads: int,
        dropout: float,
        until_epoch: int | None,
        keep_streams: bool,
        group_size: int | None,
    ) -> None:
        super().__init__()
        check_layers(layers, places, of=of)
        check_choice("mode", mode, MODES)
        build = BATCH_MIXERS.find(mixer, "mixer")
        check_others("group_size", group_size, mode)
        if keep_streams and (until_epoch is None or mode.startswith("single_stream")):
            raise InputError(
                "keep_streams=true keeps two streams after until_epoch: give until_epoch, and a mode with two"
            )
        if until_epoch is not None and mode == "single_stream_inference":
            raise InputError(
                "until_epoch would train without batch attention, and mode=single_stream_inference evaluates with it: "
                "leave until_epoch out, or choose mode=mini_batch_inference"
            )
        self.insertions = tuple(layers)
        self.mode = mode
        self.shared = shared
        self.until_epoch = until_epoch
        self.keep_streams = keep_streams
        self.group_size = group_size
        names = [] if mode == "duplicate" else ["shared"] if shared else list(map(str, layers))
        self.mixers = nn.ModuleDict(
            {name: build(dim, heads=heads, dropout=dropout, num_layers=num_layers) for name in names}
        )
        self._ended = False
        self._announced = False

    @property
    def num_streams(self) -> int:
        """Number of streams after the last insertion, in the current mode."""
        return 2 if self._trains and not self.mode.startswith("single_stream") else 1

    @property
    def mixes_evaluated_images(self) -> bool:
        """True if the images of a batch attend to each other in evaluation."""
        return self.mode in EVALUATED_MODES

    @property
    def _trains(self) -> bool:
        """True in training, up to ``until_epoch`` unless two equal streams are kept."""
        return self.training and (self.keep_streams or not self._ended)

    @property
    def _is_active(self) -> bool:
        """True unless the forward pass is the identity, in the current mode and epoch."""
        return self._trains or (self.mode in EVALUATED_MODES and not self.training)

    @property
    def _replaces(self) -> bool:
        """True if mixed tokens replace the tokens; otherwise they become a second stream."""
        return not self.training or self.mode.startswith("single_stream")

    @property
    def _mixes(self) -> bool:
        """True if an insertion applies its mixer; otherwise the second stream equals the first."""
        return self.mode != "duplicate" and not (self.training and self._ended)

    def begin_epoch(self, epoch: int) -> None:
        """Switch batch attention on or off for a training epoch, counted from 0."""
        ended = self.until_epoch is not None and epoch >= self.until_epoch
        if ended and not self._ended:
            logger.info("%s is off from epoch %d on (until_epoch=%d)", self.title, epoch + 1, self.until_epoch)
        self._ended = ended

    def mixer_of(self, layer: int) -> nn.Module:
        """Return the mixer of the insertion at ``layer``."""
        return self.mixers["shared" if self.shared else str(layer)]

    def _announce(self, position: str, images: int, sequence: str, *, warn: bool = True) -> None:
        """Log the settings once, and warn once if ``images``, which attend to each other, are few.

        Args:
            position: such as ``before encoder layer``.
            sequence: length of a sequence, such as ``B = 2``.
        """
        if self._announced:
            return
        self._announced = True
        logger.info(
            "%s is on: %s%s %s (counted from 0), mode %s, %s, sequence length %s",
            self.title,
            position,
            "" if len(self.insertions) == 1 else "s",
            ", ".join(map(str, self.insertions)),
            self.mode,
            "shared" if self.shared else "not shared",
            sequence,
        )
        if warn and self.mode not in SEPARATE_MODES:
            warn_of_short(self.title, images)


def mix_in_groups(
    mixer: Callable[[Tensor, Tensor | None, None], Tensor], tokens: Tensor, padding_mask: Tensor | None, size: int
) -> Tensor:
    """Mix the tokens (B, S, C) within random groups of ``size`` images; padding_mask (B, S) bool."""
    count = len(tokens)
    order = torch.randperm(count).to(tokens.device)
    parts = order.tensor_split(-(-count // size))
    mixed = [mixer(tokens[part], None if padding_mask is None else padding_mask[part], None) for part in parts]
    return torch.cat(mixed)[order.argsort()]


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise InputError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise InputError(f"{name} must be one of {', '.join(choices)}; got '{value}'")


def check_others(name: str, count: int | None, mode: str) -> None:
    """Raise InputError unless ``count``, a number of images to attend to, fits the mode; None: all images."""
    if count is None:
        return
    if count < 1:
        raise InputError(f"{name} must be 1 or more, got {count}")
    if mode in SEPARATE_MODES:
        raise InputError(f"{name} has no effect with mode={mode}, in which no image attends to another")


def warn_of_short(name: str, sequence: int) -> None:
    """Warn if a batch of ``sequence`` images is too small for batch attention."""
    if sequence == 1:
        logger.warning("%s has no effect across images: the batch holds one image, use batch size 2 or more", name)
    elif sequence < SHORT_SEQUENCE:
        logger.warning("%s sees only %d images at a time; %d or more are better", name, sequence, SHORT_SEQUENCE)


def check_layers(layers: Sequence[int], count: int, *, of: str) -> None:
    """Raise InputError unless ``layers`` are ascending indices below ``count``; ``of`` is text around the count."""
    if not layers or any(not 0 <= layer < count for layer in layers):
        raise InputError(
            f"layers={list(layers)}: {of.format(count)}, counted from 0; give one or more indices from 0 to {count - 1}"
        )
    if any(later <= earlier for earlier, later in pairwise(layers)):
        raise InputError(f"layers={list(layers)} must ascend without repetition")
