"""BatchFormerV2: attention over the images of a batch, one position at a time (Hou et al. 2022, arXiv 2204.01254).

Shape legend: B images, S tokens of an image, C channels. In a transformer layer the tokens of one image attend to each
other; here the B tokens that share a position do, so B is the sequence and S the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from detr_bf import distributed
from detr_bf.batchformer.gather import Exchange
from detr_bf.batchformer.layer import BatchEncoderLayer
from detr_bf.errors import InputError
from detr_bf.structures import TokenBatch

logger = logging.getLogger(__name__)

MODES = ("two_stream", "single_stream", "duplicate", "mini_batch_inference")
POSITIONS = ("before", "after")
SHORT_SEQUENCE = 3


class BatchFormerLayer(nn.Module):
    """A stack of standard post-norm transformer encoder layers whose sequence is the batch (section 3.2).

    Each has 6 C^2 + 10 C parameters: the feed-forward width is C, the activation ReLU, no position encoding.
    """

    def __init__(self, dim: int, *, heads: int = 4, dropout: float = 0.5, num_layers: int = 1) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise InputError(f"batch_former.heads={heads} must divide the width {dim}")
        if not 0 <= dropout < 1:
            raise InputError(f"batch_former.dropout={dropout} must be 0 or more and less than 1")
        if num_layers < 1:
            raise InputError(f"batch_former.num_layers={num_layers} must be 1 or more")
        self.layers = nn.ModuleList(
            BatchEncoderLayer(dim, heads, feedforward_dim=dim, dropout=dropout) for _ in range(num_layers)
        )
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)  # as every matrix of DETR's transformer

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None, exchange: Exchange | None = None) -> Tensor:
        """Mix (B, S, C) over B, with ``exchange`` over the images of all processes.

        ``padding_mask`` (B, S), True = padding: padded entries are not attended to and pass through unchanged. An image
        alone at its position attends to itself.
        """
        mixed = tokens
        ignored = padding_mask if exchange is None else exchange.ignored(padding_mask, tokens.device)
        for layer in self.layers:
            mixed = layer(mixed, ignored, exchange)
        return mixed if padding_mask is None else torch.where(padding_mask[..., None], tokens, mixed)


class BatchFormerV2(nn.Module):
    """BatchFormerV2 before or after chosen encoder layers.

    In training with ``two_stream`` the first insertion forks the batch into a clean stream and a batch-attended one;
    later insertions mix the second stream only. In evaluation it is the identity, except with ``mini_batch_inference``.

    Args:
        dim: channels C.
        layers: encoder layers it stands at, counted from 0, strictly ascending.
        num_encoder_layers: how many encoder layers there are.
        position: ``before`` the encoder layer, or ``after`` it (the authors' released code).
        shared: one module for all insertions, or one each.
        mode: ``two_stream``; ``single_stream`` replaces the tokens in training instead of forking; ``duplicate`` forks
            but mixes nothing (control: twice the batch without batch attention); ``mini_batch_inference`` trains as
            ``two_stream`` and replaces the tokens by the batch-attended ones in evaluation.
        num_layers, heads, dropout: of each :class:`BatchFormerLayer`.
        mask_padding: leave padded positions out; the released code lets them take part.
        gather: in training, attend over the images of all processes (:mod:`detr_bf.batchformer.gather`); the released
            code sees those of one process.

    Raises:
        InputError: no layers, layers that repeat, do not ascend or do not exist, an unknown mode or position, heads,
            dropout or layers of each that no :class:`BatchFormerLayer` can have.
    """

    def __init__(
        self,
        dim: int,
        *,
        layers: Sequence[int],
        num_encoder_layers: int,
        position: str = "before",
        shared: bool = True,
        mode: str = "two_stream",
        num_layers: int = 1,
        heads: int = 4,
        dropout: float = 0.5,
        mask_padding: bool = False,
        gather: bool = False,
    ) -> None:
        super().__init__()
        _check_places(layers, num_encoder_layers)
        _check_choice("position", position, POSITIONS)
        _check_choice("mode", mode, MODES)
        self.insertions = tuple(layers)
        self.position = position
        self.mode = mode
        self.mask_padding = mask_padding
        self.gather = gather
        self.shared = shared
        names = [] if mode == "duplicate" else ["shared"] if shared else list(map(str, layers))
        self.mixers = nn.ModuleDict(
            {name: BatchFormerLayer(dim, heads=heads, dropout=dropout, num_layers=num_layers) for name in names}
        )
        self._announced = False

    @property
    def num_streams(self) -> int:
        """How many streams leave the last insertion now."""
        return 2 if self.training and self.mode != "single_stream" else 1

    def forward(self, batch: TokenBatch, *, layer: int, position: str) -> TokenBatch:
        """What enters encoder layer ``layer`` (``position`` before) or leaves it (after)."""
        if position != self.position or layer not in self.insertions or not self._active():
            return batch
        exchange = self._exchange(batch)
        self._announce(sum(exchange.images) if exchange else len(batch.tokens) // batch.num_streams)
        if self._replaces():
            return batch.with_tokens(self._mix(batch.tokens, batch, layer, exchange))
        if batch.num_streams == 1:
            return batch.fork(self._mix(batch.tokens, batch, layer, exchange))
        clean, second = batch.tokens.chunk(2)
        return batch.with_tokens(torch.cat([clean, self._mix(second, batch, layer, exchange)]))

    def _active(self) -> bool:
        return self.training or self.mode == "mini_batch_inference"

    def _replaces(self) -> bool:
        return self.mode == "single_stream" or not self.training

    def _exchange(self, batch: TokenBatch) -> Exchange | None:
        """With whom images are shared, or None."""
        if not (self.gather and self.training and distributed.world_size() > 1) or self.mode == "duplicate":
            return None
        whole_image = ((1, batch.tokens.shape[1]),)
        shapes = batch.static.get("spatial_shapes", whole_image)
        return Exchange.agree(len(batch.tokens) // batch.num_streams, shapes)

    def _mix(self, tokens: Tensor, batch: TokenBatch, layer: int, exchange: Exchange | None) -> Tensor:
        if self.mode == "duplicate":
            return tokens
        padding_mask = batch.per_sample["padding_mask"][: len(tokens)] if self.mask_padding else None
        return self.mixers["shared" if self.shared else str(layer)](tokens, padding_mask, exchange)

    def _announce(self, sequence: int) -> None:
        """Say once what is done, and warn once when the sequence is too short to do much."""
        if self._announced:
            return
        self._announced = True
        logger.info(
            "BatchFormerV2 is on: %s encoder layer%s %s (counted from 0), mode %s, %s, sequence length B = %d%s",
            self.position,
            "" if len(self.insertions) == 1 else "s",
            ", ".join(map(str, self.insertions)),
            self.mode,
            "shared" if self.shared else "not shared",
            sequence,
            f" over {distributed.world_size()} processes" if self.gather else "",
        )
        warn_of_short("BatchFormerV2", sequence)

    def extra_repr(self) -> str:
        return f"{self.position} layers {list(self.insertions)}, mode={self.mode}, mask_padding={self.mask_padding}"


def warn_of_short(name: str, sequence: int) -> None:
    """Say that there are too few images to attend to."""
    if sequence == 1:
        logger.warning("%s has no effect across images: the batch holds one image, use batch size 2 or more", name)
    elif sequence < SHORT_SEQUENCE:
        logger.warning("%s sees only %d images at a time; %d or more are better", name, sequence, SHORT_SEQUENCE)


def _check_places(layers: Sequence[int], num_encoder_layers: int) -> None:
    if not layers:
        raise InputError(
            "batch_former.layers is empty while batch_former.enabled=true. "
            "List the encoder layers it stands at, [0] for the first, or set batch_former.enabled=false."
        )
    if any(not 0 <= layer < num_encoder_layers for layer in layers):
        raise InputError(
            f"batch_former.layers={list(layers)}: the encoder has {num_encoder_layers} layers, counted from 0; "
            f"give indices from 0 to {num_encoder_layers - 1}"
        )
    if any(later <= earlier for earlier, later in pairwise(layers)):
        raise InputError(f"batch_former.layers={list(layers)} must ascend without repetition")


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InputError(f"batch_former.{name} must be one of {', '.join(choices)}; got '{value}'")
