"""DAB-Deformable-DETR: Deformable DETR with anchor boxes as queries (Liu et al. 2022, arXiv 2201.12329, appendix)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from detr_bf.detectors.dab_detr import EPS, AnchorPosition, AnchorQueries
from detr_bf.detectors.deformable_detr import deformable_detr
from detr_bf.detectors.detector import Detector, Options


def dab_deformable_detr(
    backbone: nn.Module,
    channels: Sequence[int],
    options: Options,
    *,
    patterns: int = 0,
    random_points: bool = False,
    extra_levels: int = 1,
    encoder_points: int = 4,
    decoder_points: int = 4,
    box_refine: bool = True,
) -> Detector:
    """Build DAB-Deformable-DETR: anchors with a learned content each, whose boxes give the positions of the queries.

    Args:
        backbone, channels, options: feature maps and shared options.
        patterns, random_points: as of DAB-DETR.
        extra_levels, encoder_points, decoder_points, box_refine: as of Deformable DETR.
    """
    queries = AnchorQueries(
        options.num_queries,
        options.hidden_dim,
        patterns=patterns,
        learned_content=True,
        random_points=random_points,
        further=options.groups,
    )
    return deformable_detr(
        backbone,
        channels,
        options,
        extra_levels=extra_levels,
        encoder_points=encoder_points,
        decoder_points=decoder_points,
        box_refine=box_refine,
        queries=queries,
        update_queries=AnchorPosition(options.hidden_dim, options.decoder_layers),
        eps=EPS,
    )
