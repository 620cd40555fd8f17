"""Measurements inside BatchFormerV2: attention weights, and distances between the two streams.

Shape legend: B images that attend to each other, S tokens of an image, H heads, C channels.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from detr_bf.batchformer.gather import Exchange
from detr_bf.batchformer.mixers import BatchEncoderLayer
from detr_bf.batchformer.modes import EVALUATED_MODES, SEPARATE_MODES, InsertedBatchFormer
from detr_bf.batchformer.v2 import BatchFormerV2
from detr_bf.common.errors import InputError
from detr_bf.common.structures import TokenBatch

SAMPLED_POSITIONS = 256  # of a measurement in training


@dataclass(frozen=True)
class LayerAttention:
    """Attention weights of one layer along the batch."""

    insertion: int  # encoder layer, counted from 0
    depth: int  # layer of the mixer, counted from 0
    weights: Tensor  # (P, H, B, B) float32, see BatchEncoderLayer.attention_weights
    positions: Tensor | None  # (P,) int64, of the S tokens; None: the images are not those of the batch in their order


@dataclass(frozen=True)
class Insertion:
    """Tokens before and after batch attention at one encoder layer."""

    layer: int
    before: TokenBatch
    after: TokenBatch


@dataclass(frozen=True)
class Recording:
    """Content of the forward passes of a block, as far as batch attention is concerned."""

    attention: list[LayerAttention] = field(default_factory=list)
    insertions: list[Insertion] = field(default_factory=list)


def attention_between_images(model: nn.Module) -> InsertedBatchFormer:
    """Return the batch attention of a model, whose images attend to each other.

    Raises:
        InputError: the model has none, or one in which images attend to themselves alone.
    """
    found = next((module for module in model.modules() if isinstance(module, InsertedBatchFormer)), None)
    if found is None:
        raise InputError("the model has no BatchFormerV2: train one with batch_former.enabled=true")
    if found.mode in SEPARATE_MODES:
        raise InputError(f"with batch_former.mode={found.mode} no image attends to another: there is nothing to show")
    if isinstance(found, BatchFormerV2) and found.neighbours is not None:
        raise InputError("with batch_former.neighbours every image has a sequence of its own: this is not shown")
    if isinstance(found, BatchFormerV2) and found.references and found.mode not in EVALUATED_MODES:
        raise InputError(f"with batch_former.mode={found.mode} references are read in training only: nothing to show")
    return found


def batch_former_of(model: nn.Module) -> BatchFormerV2:
    """Return the batch attention between the tokens of a model.

    Raises:
        InputError: as :func:`attention_between_images`, or queries attend to each other instead of tokens.
    """
    found = attention_between_images(model)
    if not isinstance(found, BatchFormerV2):
        raise InputError("with batch_former.at=queries no positions of the images attend to each other: not shown")
    return found


@contextmanager
def attending(model: nn.Module) -> Iterator[BatchFormerV2]:
    """Within the block, evaluate the model without dropout, but with batch attention as in training.

    All images of a batch attend to each other, whatever the ``group_size``.

    Raises:
        InputError: as :func:`batch_former_of`.
    """
    batch_former = batch_former_of(model)
    modes, ended = {module: module.training for module in model.modules()}, batch_former._ended
    group_size = batch_former.group_size
    try:
        model.eval()
        batch_former.training, batch_former._ended, batch_former.group_size = True, False, None
        yield batch_former
    finally:
        batch_former._ended, batch_former.group_size = ended, group_size
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def recorded(batch_former: BatchFormerV2, positions: int | None = None) -> Iterator[Recording]:
    """Record what batch attention does in the block; outputs and random numbers stay the same.

    Args:
        positions: record the attention at so many positions, evenly spaced; None: at all.
    """
    recording = Recording()
    layers = [0]  # the encoder layer in whose insertion the program is

    def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        layers[0] = kwargs["layer"]

    def leave(module: nn.Module, args: tuple[TokenBatch], kwargs: dict[str, Any], output: TokenBatch) -> None:
        if output is not args[0]:  # otherwise batch attention is not inserted there
            recording.insertions.append(Insertion(layers[0], args[0], output))

    def attend(layer: nn.Module, args: tuple[Tensor, Tensor | None, Exchange | None]) -> None:
        assert isinstance(layer, BatchEncoderLayer)
        if batch_former.mode == "self_only":
            return
        tokens, ignored, exchange = args
        chosen = None
        if exchange is None:
            count = tokens.shape[1]
            chosen = torch.linspace(0, count - 1, min(count, positions or count), device=tokens.device).round().long()
            tokens, ignored = tokens[:, chosen], None if ignored is None else ignored[:, chosen]
        with torch.autocast(tokens.device.type, enabled=False):
            weights = layer.attention_weights(tokens.float(), ignored, exchange)
        if batch_former.group_size is not None or batch_former.neighbours is not None or batch_former.references:
            chosen = None
        recording.attention.append(LayerAttention(layers[0], depths[layer], weights, chosen))

    depths = {layer: depth for mixer in batch_former.mixers.values() for depth, layer in enumerate(_layers(mixer))}
    handles = [layer.register_forward_pre_hook(attend) for layer in depths]
    handles.append(batch_former.register_forward_pre_hook(enter, with_kwargs=True))
    handles.append(batch_former.register_forward_hook(leave, with_kwargs=True))
    try:
        yield recording
    finally:
        for handle in handles:
            handle.remove()


def _layers(mixer: nn.Module) -> list[BatchEncoderLayer]:
    return [module for module in mixer.modules() if isinstance(module, BatchEncoderLayer)]


def share_of_others(weights: Tensor) -> Tensor:
    """Return the share of the attention on other images: (P, H, B, B) -> (P, H, B), from 0 to 1."""
    return weights.sum(-1) - weights.diagonal(dim1=-2, dim2=-1)


def batch_entropy(weights: Tensor) -> Tensor:
    """Return the entropy of the attention over the batch: (P, H, B, B) -> (P, H, B), from 0 to 1 (uniform)."""
    return torch.special.entr(weights).sum(-1) / math.log(max(2, weights.shape[-1]))


def stream_distance(clean: Tensor, second: Tensor) -> Tensor:
    """Return the distance of two vectors relative to the length of the first: (..., C) twice -> (...)."""
    return (second - clean).norm(dim=-1) / clean.norm(dim=-1).clamp(min=torch.finfo(clean.dtype).tiny)


@torch.no_grad()
def statistics(recording: Recording) -> dict[str, Tensor]:
    """Return scalars by name, means over the images and the unpadded positions.

    Padded positions are included with ``gather``, ``group_size``, ``neighbours`` and ``references``; with the last,
    means are over the images and their references, of which each is the only other image.

    ``attention/L/others`` and ``attention/L/entropy`` are :func:`share_of_others` and :func:`batch_entropy` at encoder
    layer L, each also by head (``.../head_0``); a further layer D of the mixer has the name ``L.D``.
    ``stream_distance/L`` is that of the tokens of both streams after the insertion at layer L.
    """
    means: dict[str, list[Tensor]] = defaultdict(list)
    masks = {each.layer: each.before.per_sample.get("padding_mask") for each in recording.insertions}
    for layer in recording.attention:
        mask, name = masks.get(layer.insertion), f"attention/{layer.insertion}" + f".{layer.depth}" * (layer.depth > 0)
        images = layer.weights.shape[-1]
        valid = torch.ones(layer.weights[:, 0, 0].shape, device=layer.weights.device)  # (P, B)
        if mask is not None and layer.positions is not None:
            valid = 1.0 - mask[:images, layer.positions].T.float()
        for kind, values in (("others", share_of_others(layer.weights)), ("entropy", batch_entropy(layer.weights))):
            by_head = (values * valid[:, None]).sum((0, 2)) / valid.sum().clamp(min=1)
            means[f"{name}/{kind}"].append(by_head.mean())
            for head, mean in enumerate(by_head):
                means[f"{name}/{kind}/head_{head}"].append(mean)
    for each in recording.insertions:
        if each.after.num_streams == 2:
            clean, second, *_ = each.after.tokens.float().split(each.after.num_images)  # then the references
            distance = stream_distance(clean, second)
            mask = each.before.per_sample.get("padding_mask")
            kept = distance if mask is None else distance[~mask[: len(distance)]]
            means[f"stream_distance/{each.layer}"].append(kept.mean())
    return {name: torch.stack(values).mean() for name, values in means.items()}
