"""Batch attention between the queries of a decoder: those of all images of a batch attend to each other.

A query of one image has no counterpart in another one: two queries have content in common, not a position. The main
queries of all images are therefore one sequence.

Shape legend: B images, R rows (streams x images), Q main queries, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from detr_bf.batchformer.modes import InsertedBatchFormer, mix_in_groups
from detr_bf.common.structures import Queries, TokenBatch


class QueryBatchFormer(InsertedBatchFormer):
    """Batch attention before chosen decoder layers, on the contents of the main queries.

    In training with ``two_stream`` the first insertion forks queries and memory into a clean stream and a mixed one;
    later insertions mix the second stream only. Queries of groups, such as those of denoising, are repeated and never
    mixed: no query of another kind attends to them, as they may contain the objects of the image.

    Args:
        dim: channels C.
        layers: indices of the decoder layers, counted from 0, strictly ascending.
        num_decoder_layers: number of decoder layers.
        shared, mixer, num_layers, heads, dropout, until_epoch, keep_streams: as of
            :class:`detr_bf.batchformer.BatchFormerV2`. The mixer gets the queries of all images as (B x Q, 1, C).
        mode: as of BatchFormerV2; with ``self_only`` the queries of each image attend to each other in the same layers,
            which get (Q, B, C), and to no query of another image.
        group_size: images whose queries attend to each other, divided at random; None: the whole batch.

    Raises:
        InputError: see :class:`InsertedBatchFormer`.
    """

    title = "batch attention between queries"

    def __init__(
        self,
        dim: int,
        *,
        layers: Sequence[int],
        num_decoder_layers: int,
        shared: bool = True,
        mode: str = "two_stream",
        mixer: str = "attention",
        num_layers: int = 1,
        heads: int = 4,
        dropout: float = 0.5,
        until_epoch: int | None = None,
        keep_streams: bool = False,
        group_size: int | None = None,
    ) -> None:
        super().__init__(
            dim,
            layers=layers,
            places=num_decoder_layers,
            of="the decoder has {} layers",
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

    def forward(self, queries: Queries, memory: TokenBatch, *, layer: int, main: int) -> tuple[Queries, TokenBatch]:
        """Transform the input of decoder layer ``layer``; ``main`` is the number Q of main queries, which come first.

        Queries and memory have the same rows, and both are forked.
        """
        if layer not in self.insertions or not self._is_active:
            return queries, memory
        images = memory.num_images
        together = 1 if self.mode == "self_only" else min(self.group_size or images, images)
        self._announce("before decoder layer", together, f"{together} x {main} queries")
        second = queries.content[-images:]
        if self._mixes:
            second = torch.cat([self._mix(second[:, :main], layer), second[:, main:]], 1)
        if memory.num_streams == 2:
            return replace(queries, content=torch.cat([queries.content[:images], second])), memory
        if self._replaces:
            return replace(queries, content=second), memory
        return queries.fork(second), memory.fork(memory.tokens)

    def _mix(self, content: Tensor, layer: int) -> Tensor:
        """Mix the main queries (B, Q, C)."""
        mixer = self.mixer_of(layer)
        if self.mode == "self_only":  # each image is a position of its own
            return mixer(content.transpose(0, 1).contiguous(), None, None).transpose(0, 1)

        def together(part: Tensor, padding_mask: Tensor | None = None, exchange: None = None) -> Tensor:
            mixed: Tensor = mixer(part.reshape(-1, 1, part.shape[-1]), None, None)
            return mixed.view_as(part)

        return together(content) if self.group_size is None else mix_in_groups(together, content, None, self.group_size)

    def extra_repr(self) -> str:
        return f"before decoder layers {list(self.insertions)}, mode={self.mode}"
