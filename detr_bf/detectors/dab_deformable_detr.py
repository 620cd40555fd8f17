"""DAB-Deformable-DETR: Deformable DETR with anchor boxes as queries (Liu et al. 2022, arXiv 2201.12329, appendix)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from detr_bf.common.settings import setting
from detr_bf.detectors.dab_detr import EPS, AnchorPosition, AnchorQueries, DabOptions
from detr_bf.detectors.declaration import declare
from detr_bf.detectors.deformable_detr import DeformableOptions, LevelOptions, deformable_detr
from detr_bf.detectors.detector import Detector, Options


@dataclass(frozen=True)
class DabDeformableOptions(LevelOptions, DabOptions):
    """Options of DAB-Deformable-DETR beside the shared ones."""

    box_refine: bool = setting("deformable.box_refine", True)  # as of Deformable DETR


@declare(DabDeformableOptions)
def dab_deformable_detr(
    backbone: nn.Module, channels: Sequence[int], options: Options, own: DabDeformableOptions
) -> Detector:
    """Build DAB-Deformable-DETR: anchors with a learned content each, whose boxes give the positions of the queries."""
    queries = AnchorQueries(
        options.num_queries,
        options.hidden_dim,
        patterns=own.patterns,
        learned_content=True,
        random_points=own.random_points,
        further=options.groups,
    )
    return deformable_detr.build(
        backbone,
        channels,
        options,
        DeformableOptions(own.extra_levels, own.encoder_points, own.decoder_points, own.box_refine),
        queries=queries,
        update_queries=AnchorPosition(options.hidden_dim, options.decoder_layers),
        eps=EPS,
    )
