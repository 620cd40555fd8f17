"""Names of facebookresearch/detr and of the BatchFormerV2 authors' DETR fork -> ours."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

SIGNATURE = "transformer.decoder.layers.0.multihead_attn.in_proj_weight"

RENAMES = (
    (r"^backbone\.0\.body\.", r"backbone.body."),
    (r"^backbone\.1\.col_embed\.", r"tokens.position.column."),
    (r"^backbone\.1\.row_embed\.", r"tokens.position.row."),
    (r"^input_proj\.", r"tokens.projections.0."),
    (r"^query_embed\.", r"decoder.query_position."),
    (r"^class_embed\.", r"class_head."),
    (r"^bbox_embed\.", r"box_head."),
    (r"^transformer\.(encoder|decoder)\.", r"\1."),
    (r"^(encoder\.layers\.\d+)\.self_attn\.", r"\1.attention."),
    (r"^(encoder\.layers\.\d+)\.norm1\.", r"\1.attention_residual.norm."),
    (r"^(encoder\.layers\.\d+)\.norm2\.", r"\1.feed_forward_residual.norm."),
    (r"^(decoder\.layers\.\d+)\.self_attn\.", r"\1.self_attention."),
    (r"^(decoder\.layers\.\d+)\.multihead_attn\.", r"\1.cross_attention."),
    (r"^(decoder\.layers\.\d+)\.norm1\.", r"\1.self_residual.norm."),
    (r"^(decoder\.layers\.\d+)\.norm2\.", r"\1.cross_residual.norm."),
    (r"^(decoder\.layers\.\d+)\.norm3\.", r"\1.feed_forward_residual.norm."),
    (r"^((?:en|de)coder\.layers\.\d+)\.linear1\.", r"\1.feed_forward.expand."),
    (r"^((?:en|de)coder\.layers\.\d+)\.linear2\.", r"\1.feed_forward.contract."),
    (r"attention\.out_proj\.", r"attention.out."),
)


def is_official_detr(names: Mapping[str, Tensor]) -> bool:
    """Whether these are the names of an official DETR checkpoint."""
    return SIGNATURE in names and "bbox_embed.layers.0.weight" in names


def from_official_detr(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An official state dict under our names; the packed attention projections are taken apart.

    The fork stores modules that are not shared twice, under ``transformer.bf`` and ``transformer.encoder.bf``, at the
    index of their encoder layer; they are read once, in order.
    """
    ours: dict[str, Tensor] = {}
    for name, value in _batch_former_in_order(state).items():
        for pattern, replacement in RENAMES:
            name = re.sub(pattern, replacement, name)
        ours |= _unpacked(name, value)
    return ours


def _unpacked(name: str, value: Tensor) -> dict[str, Tensor]:
    prefix, packed, kind = name.partition(".in_proj_")
    if not packed or name.startswith("encoder.batch_former"):
        return {name: value}
    return {
        f"{prefix}.{part}.{kind}": chunk for part, chunk in zip(("query", "key", "value"), value.chunk(3), strict=True)
    }


def _batch_former_in_order(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = [re.match(r"transformer\.bf\.(\d+)\.", name) for name in state]
    places = sorted({int(match[1]) for match in found if match})
    renamed = {}
    for name, value in state.items():
        if name.startswith("transformer.encoder.bf."):
            continue
        match = re.match(r"transformer\.bf\.(?:(\d+)\.)?(.*)", name)
        if match:
            insertion = places.index(int(match[1])) if match[1] else 0
            name = f"encoder.batch_former.mixers.{insertion}.layers.0.{match[2]}"
        renamed[name] = value
    return renamed
