"""Torch's multi-head attention with the weights of ours."""

from __future__ import annotations

import torch
from torch import nn

from detr_bf.transformer.attention import MultiHeadAttention


def packed_attention(ours: MultiHeadAttention) -> nn.MultiheadAttention:
    """Build torch's layer: batch first, projections of query, key and value in one matrix, dtype and mode as ours."""
    weight = ours.query.weight
    packed = nn.MultiheadAttention(weight.shape[0], ours.heads, dropout=ours.dropout, batch_first=True)
    projections = (ours.query, ours.key, ours.value)
    state = {
        "in_proj_weight": torch.cat([projection.weight for projection in projections]),
        "in_proj_bias": torch.cat([projection.bias for projection in projections]),
        "out_proj.weight": ours.out.weight,
        "out_proj.bias": ours.out.bias,
    }
    packed.to(weight.dtype).load_state_dict(state)
    return packed.train(ours.training)
