"""Context Broadcasting: add the mean token to every token (Hyeon-Woo et al., ICCV 2023, arXiv 2210.08457).

Shape legend: R rows (images, or streams x images), S tokens with the class token, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from detr_bf.common.errors import InputError
from detr_bf.common.structures import TokenBatch
from detr_bf.plugins.plugin import Plugin, chosen, parts_of_blocks
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


CONTEXT_POSITIONS = ("end", "mid", "front", "attention", "both")
FEED_FORWARDS, ATTENTIONS = ("mlp", "mlp_channels", "feed_forward"), ("attn", "attention")  # names in a block


class ContextBroadcasting(Plugin):
    """Context Broadcasting in chosen blocks, in training and in evaluation.

    It is applied to the output of a feed-forward network or of the attention, before layer scale, drop path and the
    residual sum, or inside the feed-forward network. ``scales`` are the learned scales by block index; they start at 0,
    which is the identity, and need no weight decay. Without scales each place has a buffer in the state dict, so that
    loading the weights into a model with other places fails.
    """

    name = "context_broadcasting"
    in_evaluation = True

    def __init__(self, layers: Sequence[int], scales: dict[int, Tensor], position: str = "end") -> None:
        super().__init__()
        self.layers, self.position = tuple(layers), position
        self.scales = nn.ParameterDict({str(layer): nn.Parameter(scale) for layer, scale in scales.items()})
        for place in self._places() if not scales else ():
            self.register_buffer(place, torch.ones((), dtype=torch.int64))

    def _places(self) -> list[str]:
        """Return the names of the places, block by block; ``block_N`` is the end of a feed-forward network."""
        kinds = {"end": ["block"], "both": ["attention", "block"]}.get(self.position, [self.position])
        return [f"{kind}_{layer}" for layer in self.layers for kind in kinds]

    def hooks_on(self, model: nn.Module) -> Iterator[RemovableHandle]:
        """Register the hooks on ``model``; in our encoder and in a ViT also on the blocks, for their padding masks."""
        for place in self._places():
            kind, layer = place.split("_")
            module = parts_of_blocks(model, ATTENTIONS if kind == "attention" else FEED_FORWARDS)[int(layer)]
            if kind == "mid":
                module = _linear_layers(module)[-1]
            if kind in ("front", "mid"):
                yield module.register_forward_pre_hook(partial(self._broadcast_input, place))
            else:
                yield module.register_forward_hook(partial(self._broadcast_output, place))
            if isinstance(model, Encoder):
                yield model.layers[int(layer)].register_forward_pre_hook(partial(self._keep_padding, place))
            if isinstance(model, VisionTransformer):
                hook = partial(self._keep_masked_keys, place)
                yield model.blocks[int(layer)].register_forward_pre_hook(hook, with_kwargs=True)

    def _keep_padding(self, place: str, module: nn.Module, args: tuple[TokenBatch, ...]) -> None:
        self._kept[place] = args[0].per_sample["padding_mask"]

    def _keep_masked_keys(self, place: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Keep the padding of a block whose ``attn_mask`` (R, 1, 1, S) hides the same tokens from all others."""
        mask = kwargs.get("attn_mask")
        if mask is not None and mask.dim() == 4 and mask.shape[1] == mask.shape[2] == 1:
            self._kept[place] = ~mask[:, 0, 0] if mask.dtype == torch.bool else mask[:, 0, 0].isneginf()

    def _broadcast_input(self, place: str, module: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        return broadcast_context(args[0], None, self._kept.pop(place, None))

    def _broadcast_output(self, place: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        scale = self.scales[place.removeprefix("block_")] if len(self.scales) else None
        return broadcast_context(output, scale, self._kept.pop(place, None))

    def extra_repr(self) -> str:
        return f"layers {list(self.layers)}, position={self.position}, scaled={len(self.scales) > 0}"


def _linear_layers(network: nn.Module) -> list[nn.Linear]:
    return [module for module in network.modules() if isinstance(module, nn.Linear)]


def add_context_broadcasting(
    model: nn.Module,
    layers: Sequence[int] | str = "upper",
    *,
    position: str = "end",
    scaled: bool = False,
    skip: Sequence[int] = (),
) -> ContextBroadcasting:
    """Add Context Broadcasting to a timm ViT, DeiT, PiT or Mixer, or to one of our detectors' encoders.

    Args:
        model: the bare model.
        layers: ``upper``, the upper half of the blocks; ``all``; or indices from 0, counted through PiT's stages. The
            paper says "upper layers" (Table 2, section 4.1) and not which: half of the blocks is a choice made here.
        position: in the feed-forward network: ``end``, its output; ``mid``, the input of its last linear layer;
            ``front``, its input. ``attention``: the output of the attention; ``both``: attention and ``end``. Mixer has
            no attention.
        scaled: learn a factor per channel (CB_S) instead of one half; only at the ``end``. The paper's number of
            parameters is that of ``all`` blocks.
        skip: excluded blocks, such as those whose output a feature pyramid reads.

    Raises:
        InputError: the model is unsupported, has no attention or already has the plug-in, ``position`` is unknown,
            layers do not exist, or ``skip`` leaves none.
    """
    if position not in CONTEXT_POSITIONS:
        raise InputError(f"position={position!r}: give one of {', '.join(CONTEXT_POSITIONS)}")
    if scaled and position != "end":
        raise InputError(f"position={position!r} with scaled=True: scales are learned at the end only, give 'end'")
    networks = parts_of_blocks(model, FEED_FORWARDS)
    if unknown := [block for block in skip if not 0 <= block < len(networks)]:
        raise InputError(f"skip={list(skip)}: there is no block {unknown[0]}; the model has 0 to {len(networks) - 1}")
    where = [layer for layer in chosen(layers, len(networks)) if layer not in skip]
    if not where:
        raise InputError(f"layers={layers!r} with skip={list(skip)} leaves no block: skip fewer")
    scales = {layer: torch.zeros(_linear_layers(networks[layer])[-1].out_features) for layer in where if scaled}
    if position in ("attention", "both"):
        parts_of_blocks(model, ATTENTIONS)
    plugin = ContextBroadcasting(where, scales, position)
    plugin.join(model, plugin.hooks_on(model))
    return plugin
