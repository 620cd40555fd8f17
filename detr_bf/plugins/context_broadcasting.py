"""Context Broadcasting: add the mean token to every token (Hyeon-Woo et al., ICCV 2023, arXiv 2210.08457).

Shape legend: R rows (images, or streams x images), S tokens with the class token, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from detr_bf.errors import InputError
from detr_bf.plugins.plugin import Plugin, chosen, feed_forwards
from detr_bf.structures import TokenBatch
from detr_bf.transformer import Encoder


def broadcast_context(tokens: Tensor, scale: Tensor | None = None, padding_mask: Tensor | None = None) -> Tensor:
    """(R, S, C) -> (R, S, C): (token + mean) / 2, or with ``scale`` (C,) token + scale * mean.

    ``padding_mask`` (R, S), True = padding, excludes tokens from the mean.
    """
    if padding_mask is None:
        mean = tokens.mean(1, keepdim=True)
    else:
        valid = ~padding_mask[..., None]
        mean = tokens.masked_fill(~valid, 0).sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp(min=1)
    return (tokens + mean) / 2 if scale is None else tokens + scale.to(tokens.dtype) * mean


class ContextBroadcasting(Plugin):
    """Context Broadcasting at the end of chosen feed-forward networks, in training and in evaluation.

    It is applied to the network's output, before layer scale, drop path and the residual sum. ``scales`` are the
    learned scales by block index; they start at 0, which is the identity, and need no weight decay. Without scales each
    block has a buffer in the state dict, so that loading the weights into a model with other blocks fails.
    """

    name = "context_broadcasting"
    in_evaluation = True

    def __init__(self, layers: Sequence[int], scales: dict[int, Tensor]) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.scales = nn.ParameterDict({str(layer): nn.Parameter(scale) for layer, scale in scales.items()})
        for layer in self.layers if not scales else ():
            self.register_buffer(f"block_{layer}", torch.ones((), dtype=torch.int64))

    def attach(self, model: nn.Module, networks: Sequence[nn.Module]) -> None:
        """Register the hooks on the chosen ``networks``; in our encoder also on its layers, for their padding masks."""
        self.join(model, self._hooks(model, networks))

    def _hooks(self, model: nn.Module, networks: Sequence[nn.Module]) -> Iterator[RemovableHandle]:
        for layer in self.layers:
            name = str(layer)  # torch.compile with dynamic sizes would treat an int as a size
            yield networks[layer].register_forward_hook(partial(self._broadcast, name))
            if isinstance(model, Encoder):
                yield model.layers[layer].register_forward_pre_hook(partial(self._keep_padding, name))

    def _keep_padding(self, layer: str, module: nn.Module, args: tuple[TokenBatch, ...]) -> None:
        self._kept[layer] = args[0].per_sample["padding_mask"]

    def _broadcast(self, layer: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        scale = self.scales[layer] if len(self.scales) else None
        return broadcast_context(output, scale, self._kept.pop(layer, None))

    def extra_repr(self) -> str:
        return f"layers {list(self.layers)}, scaled={len(self.scales) > 0}"


def add_context_broadcasting(
    model: nn.Module, layers: Sequence[int] | str = "upper", *, scaled: bool = False, skip: Sequence[int] = ()
) -> ContextBroadcasting:
    """Add Context Broadcasting to a timm ViT, DeiT, PiT or Mixer, or to one of our detectors' encoders.

    Args:
        model: the bare model.
        layers: ``upper``, the upper half of the blocks; ``all``; or indices from 0, counted through PiT's stages.
        scaled: learn a factor per channel (CB_S) instead of one half. The paper uses it in ``all`` blocks.
        skip: excluded blocks, such as those whose output a feature pyramid reads.

    Raises:
        InputError: the model is unsupported or already has the plug-in, layers do not exist, or ``skip`` leaves none.
    """
    networks = feed_forwards(model)
    where = [layer for layer in chosen(layers, len(networks)) if layer not in skip]
    if not where:
        raise InputError(f"layers={layers!r} with skip={list(skip)} leaves no block: skip fewer")
    linear = [[m for m in network.modules() if isinstance(m, nn.Linear)] for network in networks]
    scales = {layer: torch.zeros(linear[layer][-1].out_features) for layer in where if scaled}
    plugin = ContextBroadcasting(where, scales)
    plugin.attach(model, networks)
    return plugin
