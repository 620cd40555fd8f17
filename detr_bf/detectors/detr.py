"""DETR: End-to-End Object Detection with Transformers (Carion et al. 2020, arXiv 2005.12872)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from detr_bf.detectors.declaration import declare
from detr_bf.detectors.detector import Detector, Options
from detr_bf.detectors.parts import decoder_layer, query_attention, shared_heads, single_level_detector
from detr_bf.transformer import Decoder, LearnedQueries, MemoryAttention


@declare(masks_see_boxes=False)
def detr(backbone: nn.Module, channels: Sequence[int], options: Options) -> Detector:
    """Build DETR: multi-head attention, learned queries without reference points, boxes through a sigmoid."""
    layers = [
        decoder_layer(
            options,
            query_attention(options),
            MemoryAttention(options.hidden_dim, heads=options.heads, dropout=options.dropout),
        )
        for _ in range(options.decoder_layers)
    ]
    decoder = Decoder(
        layers,
        queries=LearnedQueries(options.num_queries, options.hidden_dim, groups=options.groups),
        heads=shared_heads(options),
        norm=nn.LayerNorm(options.hidden_dim),
        batch_former=options.query_batch_former,
        aux_loss=options.aux_loss,
    )
    return single_level_detector(backbone, channels, options, decoder)
