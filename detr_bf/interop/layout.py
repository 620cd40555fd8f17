"""What a table has to know of a checkpoint, read from its names, foreign or ours, and once from its numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How many layers there are, and which of Deformable DETR's forms it is."""

    encoder_layers: int
    decoder_layers: int
    refine: bool  # box heads of their own for every decoder layer
    two_stage: bool  # queries from the encoder's proposals
    class_heads: int  # class heads that are stored in a list, 0 where there is no list
    batch_former_layers: frozenset[int]  # encoder layers with a BatchFormer of their own
    batch_former_depth: int  # layers of one BatchFormer
    backbone_blocks: int  # blocks of the longest ResNet stage

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> Layout:
        text = "\n".join(state)
        two_stage = bool(re.search(r"\b(?:transformer|model)\.enc_output\.|\bdecoder\.queries\.box_head\.", text))
        own_heads = r"decoder\.bbox_embed\.|decoder\.heads\.boxes\.1\."
        own = re.findall(r"(?:\btransformer\.bf|\.encoder\.bf|\.mixers)\.(\d+)\.", text)
        return cls(
            encoder_layers=_count(r"encoder\.layers\.(\d+)\.", text),
            decoder_layers=_count(r"decoder\.layers\.(\d+)\.", text),
            refine=two_stage or bool(re.search(own_heads, text)) or _heads_differ(state),
            two_stage=two_stage,
            class_heads=_count(r"(?:\bclass_embed|heads\.classes)\.(\d+)\.", text),
            batch_former_layers=frozenset(map(int, own)),
            batch_former_depth=_count(r"(?:\.bf|\.bf\.\d+|\.mixers\.\w+)\.layers\.(\d+)\.", text) or 1,
            backbone_blocks=_count(r"\bstages\.\d+\.layers\.(\d+)\.|\b(?:layer|res)\d\.(\d+)\.", text),
        )


def _count(pattern: str, text: str) -> int:
    return max((int(match[match.lastindex or 1]) + 1 for match in re.finditer(pattern, text)), default=0)


def _heads_differ(state: Mapping[str, Tensor]) -> bool:
    """Box heads of their own, stored once each: without refinement the list repeats one head."""
    first, second = (state.get(f"bbox_embed.{layer}.layers.0.weight") for layer in range(2))
    return first is not None and second is not None and not first.is_meta and not torch.equal(first, second)
