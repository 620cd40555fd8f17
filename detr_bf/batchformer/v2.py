"""BatchFormerV2: attention over the images of a batch, one position at a time (Hou et al. 2022, arXiv 2204.01254).

Attention runs along the batch dimension: token s of image i attends to token s of the other images.

Shape legend: B images, S tokens of an image, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from detr_bf.batchformer.gather import Exchange
from detr_bf.batchformer.modes import (
    EVALUATED_MODES,
    SEPARATE_MODES,
    InsertedBatchFormer,
    check_choice,
    check_others,
    mix_in_groups,
)
from detr_bf.common import distributed
from detr_bf.common.errors import InputError
from detr_bf.common.structures import TokenBatch

POSITIONS = ("before", "after")
_PLACES = {  # the layers, and text around their number
    "encoder": ("encoder layer", "the encoder has {} layers"),
    "backbone": ("backbone block", "the feature maps come from {} blocks of the backbone"),
}


class BatchFormerV2(InsertedBatchFormer):
    """BatchFormerV2 before or after chosen encoder layers, or blocks of a backbone.

    In training with ``two_stream`` the first insertion forks the batch into a clean stream and a batch-attended one;
    later insertions mix the second stream only. In evaluation it is the identity, except in
    :data:`~detr_bf.batchformer.modes.EVALUATED_MODES`.

    With ``references`` each image attends to itself and to its reference image alone, and the reference to both; an
    image without one attends to itself. The rows of the references leave the batch after the last insertion.

    Args:
        dim: channels C.
        layers: indices of the encoder layers, or of the blocks of the backbone, counted from 0, strictly ascending.
        num_encoder_layers: number of encoder layers, or of blocks.
        place: ``encoder``, or ``backbone`` if the layers are blocks of a backbone; this has no ``references``.
        position: ``before`` the layer, or ``after`` it (the authors' released code).
        shared: use one mixer for all insertions, or one for each.
        mode: ``two_stream``; ``single_stream`` replaces the tokens in training instead of forking; ``duplicate`` forks
            but mixes nothing (control: twice the batch without batch attention); ``self_only`` forks and applies the
            mixer to each image alone (control: the layers of ``two_stream`` without attention to other images);
            ``mini_batch_inference`` trains as ``two_stream`` and replaces the tokens by the batch-attended ones in
            evaluation; ``single_stream_inference`` replaces them in training and in evaluation.
        mixer: key of ``BATCH_MIXERS``.
        num_layers, heads, dropout: arguments of each mixer.
        mask_padding: exclude padded positions; the released code includes them.
        gather: in training, attend over the images of all ranks (:mod:`detr_bf.batchformer.gather`); the released code
            uses those of one rank.
        until_epoch: train with batch attention up to this epoch, counted from 0 and exclusive, and as without it from
            there on; None: up to the end. :meth:`begin_epoch` announces the epoch.
        keep_streams: after ``until_epoch``, train with two equal streams instead of one.
        group_size: images that attend to each other: the batch is divided at random into groups of this size, the last
            ones smaller by one where it is not a multiple; None: the whole batch.
        neighbours: each image attends to itself and to so many of the images most similar to it by the cosine of their
            mean tokens; None: to all.
        references: each image attends to itself and to its reference alone, instead of the other images.
        log_attention: the training step logs :func:`detr_bf.batchformer.inspection.statistics` where it logs the loss.

    Raises:
        InputError: no layers, layers that repeat, do not ascend or do not exist, an unknown mode, position or mixer,
            settings that exclude each other, or arguments that the mixer refuses.
    """

    def __init__(
        self,
        dim: int,
        *,
        layers: Sequence[int],
        num_encoder_layers: int,
        place: str = "encoder",
        position: str = "before",
        shared: bool = True,
        mode: str = "two_stream",
        mixer: str = "attention",
        num_layers: int = 1,
        heads: int = 4,
        dropout: float = 0.5,
        mask_padding: bool = False,
        gather: bool = False,
        until_epoch: int | None = None,
        keep_streams: bool = False,
        group_size: int | None = None,
        neighbours: int | None = None,
        references: bool = False,
        log_attention: bool = False,
    ) -> None:
        check_choice("place", place, tuple(_PLACES))
        super().__init__(
            dim,
            layers=layers,
            places=num_encoder_layers,
            of=_PLACES[place][1],
            shared=shared,
            mode=mode,
            mixer=mixer,
            num_layers=num_layers,
            heads=heads,
            dropout=dropout,
            until_epoch=until_epoch,
            keep_streams=keep_streams,
            group_size=group_size,
        )
        check_choice("position", position, POSITIONS)
        if references and place == "backbone":
            raise InputError(
                "references=true works in the encoder alone, where the images of references leave the batch: set it to "
                "false, or place batch attention in the encoder (at=tokens in a config)"
            )
        check_others("neighbours", neighbours, mode)
        chosen = {"group_size": group_size is not None, "neighbours": neighbours is not None, "references": references}
        given = [name for name, is_given in chosen.items() if is_given]
        if given and gather:
            raise InputError(f"{given[0]} chooses among the images of one process: set gather=false")
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} both choose the images to attend to: give one of them")
        self.place = place
        self.position = position
        self.mask_padding = mask_padding
        self.gather = gather
        self.neighbours = neighbours
        self.references = references
        self.log_attention = log_attention

    @property
    def cuts(self) -> tuple[int, ...]:
        """Number of layers before each insertion."""
        return tuple(layer + (self.position == "after") for layer in self.insertions)

    @property
    def reads_references(self) -> bool:
        """True if the forward pass, in the current mode and epoch, uses the references of the images."""
        if not self.references or self.mode in SEPARATE_MODES:
            return False
        return not self._ended if self.training else self.mode in EVALUATED_MODES

    @property
    def mixes_evaluated_images(self) -> bool:
        """True if the images of a batch attend to each other in evaluation."""
        return self.mode in EVALUATED_MODES and not self.references

    def forward(self, batch: TokenBatch, *, layer: int, position: str) -> TokenBatch:
        """Transform the input (``position`` before) or output (after) of encoder layer ``layer``."""
        if position != self.position or layer not in self.insertions or not self._is_active:
            return batch
        exchange, images = self._exchange(batch), batch.num_images
        together = sum(exchange.images) if exchange else images
        self._announce_sequence(together)
        if batch.num_streams == 2:
            clean, second = batch.tokens[:images], batch.tokens[images:]
            batch = batch.with_tokens(torch.cat([clean, self._mix(second, batch, layer, exchange)]))
        else:
            mixed = self._mix(batch.tokens, batch, layer, exchange)
            batch = batch.with_tokens(mixed) if self._replaces else batch.fork(mixed)
        return batch.without_references() if batch.references and layer == self.insertions[-1] else batch

    def _exchange(self, batch: TokenBatch) -> Exchange | None:
        """Return the exchange between the ranks, or None."""
        if not (self.gather and self.training and distributed.world_size() > 1):
            return None
        if self.mode in SEPARATE_MODES:
            return None
        whole_image = ((1, batch.tokens.shape[1]),)
        shapes = batch.static.get("spatial_shapes", whole_image)
        return Exchange.agree(batch.num_images, shapes)

    def _mix(self, tokens: Tensor, batch: TokenBatch, layer: int, exchange: Exchange | None) -> Tensor:
        """Mix the tokens of the last stream, and those of the references behind it."""
        if not self._mixes:
            return tokens
        rows = tokens.shape[0]
        padding_mask = batch.per_sample["padding_mask"][-rows:] if self.mask_padding else None
        mixer = self.mixer_of(layer)
        if batch.references:
            missing = batch.per_sample.get("missing")
            return _with_references(mixer, tokens, padding_mask, None if missing is None else missing[-rows:])
        if self.group_size is not None:
            return mix_in_groups(mixer, tokens, padding_mask, self.group_size)
        if self.neighbours is not None:
            valid = ~batch.per_sample["padding_mask"][-rows:] if "padding_mask" in batch.per_sample else None
            return _with_neighbours(mixer, tokens, padding_mask, most_similar(tokens, valid, self.neighbours))
        if self.mode == "self_only" or self.references:  # tokens as positions of one image: sequences of length 1
            padding_mask = None if padding_mask is None else padding_mask.reshape(1, -1)
            return mixer(tokens.reshape(1, -1, tokens.shape[-1]), padding_mask, None).view_as(tokens)
        return mixer(tokens, padding_mask, exchange)

    def _announce_sequence(self, together: int) -> None:
        """Log the settings and the length of a sequence once; ``together`` images can attend to each other."""
        images = min(self.group_size or together, (self.neighbours or together) + 1, together)
        length = 1 if self.mode == "self_only" else 2 if self.reads_references else images
        ranks = f" over {distributed.world_size()} processes" if self.gather else ""
        self._announce(
            f"{self.position} {_PLACES[self.place][0]}", length, f"B = {length}{ranks}", warn=not self.references
        )

    def extra_repr(self) -> str:
        return f"{self.position} layers {list(self.insertions)}, mode={self.mode}, mask_padding={self.mask_padding}"


@torch.no_grad()
def most_similar(tokens: Tensor, valid: Tensor | None, count: int) -> Tensor:
    """Return (K, B) int64: for each image itself and the ``count`` other images most similar to it, K <= count + 1.

    Args:
        tokens: (B, S, C).
        valid: (B, S) bool, the tokens that count; None: all.
        count: number of other images; all if there are fewer.
    """
    weights = torch.ones(tokens.shape[:2], device=tokens.device) if valid is None else valid.float()
    means = torch.einsum("bs,bsc->bc", weights / weights.sum(1, keepdim=True).clamp(min=1), tokens.float())
    means = torch.nn.functional.normalize(means, dim=1)
    similarity = (means @ means.T).fill_diagonal_(torch.inf)
    return similarity.topk(min(count + 1, len(tokens))).indices.T


def _with_neighbours(mixer: nn.Module, tokens: Tensor, padding_mask: Tensor | None, images: Tensor) -> Tensor:
    """Mix each image of (B, S, C) with those that ``images`` (K, B) names; row 0 is the image itself."""
    sequences = tokens[images].flatten(1, 2)  # (K, B * S, C): position s of image b is one sequence
    mask = None if padding_mask is None else padding_mask[images].flatten(1, 2)
    return mixer(sequences, mask, None)[0].view_as(tokens)


def _with_references(mixer: nn.Module, tokens: Tensor, padding_mask: Tensor | None, missing: Tensor | None) -> Tensor:
    """Mix each image with its reference.

    Args:
        tokens: (2B, S, C), first all images, then their references.
        padding_mask: (2B, S) bool.
        missing: (2B,) bool, True for a reference that does not exist; it is not attended to and stays unchanged.
    """
    ignored = padding_mask
    if missing is not None:
        row = missing[:, None].expand(tokens.shape[:2])
        ignored = row if padding_mask is None else row | padding_mask
    mask = None if ignored is None else ignored.reshape(2, -1)
    return mixer(tokens.reshape(2, -1, tokens.shape[-1]), mask, None).view_as(tokens)
