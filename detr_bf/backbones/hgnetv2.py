"""HGNetv2, the backbone of D-FINE (Peng et al. 2024, arXiv 2410.13842), as timm's ``hgnetv2_bN`` with two differences.

PaddleClas's PP-HGNetV2. D-FINE gives it the colours from 0 to 1 without a normalisation, and freezes the stem alone,
which is a stage of its own here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import timm

from detr_bf.backbones.backbone import Network
from detr_bf.backbones.timm_backbone import build_timm
from detr_bf.backbones.weights import copy_by_name, load_network_weights, read_network_file

TAG = "ssld_stage1_in22k_in1k"  # timm's name of the weights that D-FINE starts from


def build_hgnetv2(name: str, *, weights: str, strides: Sequence[int], finer: bool = False) -> Network:
    """Build an HGNetv2 up to the stage of its largest stride.

    Args:
        name: ``hgnetv2_b0`` to ``hgnetv2_b6``; up to ``hgnetv2_b3`` every activation is scaled and shifted.
        weights: ``none``; ``imagenet`` (those of the first stage of their training, by timm); or a file with the state
            dict of timm's classifier or of the D-FINE authors' backbone.
        strides: of the feature maps, among 4, 8, 16, 32.
        finer: also return the maps of every finer stride, from 4 on.

    Raises:
        InputError: an unknown stride, or the weights are not available or of another network.
    """
    for_timm = weights if weights == "imagenet" else "none"
    network = build_timm(f"{name}.{TAG}", weights=for_timm, strides=strides, finer=finer)
    if weights not in ("imagenet", "none"):
        complete = timm.create_model(name)
        load_network_weights(complete, read_network_file(weights), classifier=("head",), source=weights)
        copy_by_name(network.body, complete.state_dict())
    return replace(network, stages=("stem", *network.stages), mean=(0.0,) * 3, std=(1.0,) * 3)
