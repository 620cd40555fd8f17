"""Our settings among those of detectron2's yacs configs.

``MODEL.DETR_BF`` mirrors :mod:`detr_bf.config`: the same names in upper case, the same defaults, checked by the same
rules. Only what detectron2 has a place for already is said there: ``MODEL.MASK_ON`` (a mask head),
``TEST.DETECTIONS_PER_IMAGE``, ``INPUT``, ``SOLVER``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from detectron2.config import CfgNode

from detr_bf.config import DetectionConfig, config_from_dict
from detr_bf.config.detection import BackboneConfig
from detr_bf.errors import InputError

DETECTRON2 = "detectron2"  # MODEL.DETR_BF.BACKBONE.NAME of what build_backbone(cfg) gives
SECTIONS = {  # of MODEL.DETR_BF, and where our config has them
    "LOSS": "loss",
    "BATCHFORMER": "batch_former",
    "PLUGINS": "plugins",
    "FREEZE": "freeze",
}


def add_detr_bf_config(cfg: CfgNode) -> None:
    """Add ``MODEL.DETR_BF``, and what else DETR needs, to detectron2's default config; register the architecture.

    The values are those of DETR on COCO without batch attention. ``MODEL.DETR_BF.BACKBONE`` is one of ours; with the
    name ``detectron2`` it is what ``MODEL.BACKBONE`` says, of which the maps of ``STRIDES`` are used.
    """
    import_module("detr_bf.interop.detectron2.meta_arch")  # which imports this module
    defaults = DetectionConfig()
    node = CfgNode({"ARCHITECTURE": defaults.model.name, "NUM_CLASSES": 80})
    node.update({name: value for name, value in _node(defaults.model).items() if name not in ("NAME", "MASKS")})
    for section, ours in SECTIONS.items():
        node[section] = _node(getattr(defaults, ours))
    node.BATCHFORMER.ENABLED = False
    node.PANOPTIC = CfgNode({"ENABLED": False, **_node(defaults.eval.panoptic)})
    node.MASK_THRESHOLD = defaults.eval.mask_threshold
    node.RECOMPUTE_ENCODER = defaults.train.recompute_encoder
    cfg.MODEL.DETR_BF = node
    cfg.SOLVER.OPTIMIZER = "ADAMW"
    cfg.SOLVER.BACKBONE_MULTIPLIER = 0.1
    cfg.SOLVER.POINT_MULTIPLIER = 1.0  # what predicts reference points and sampling offsets
    cfg.DATASETS.REGISTER_COCO = ()  # (name, images, annotations) each, of panoptic data (..., folder of the PNGs)
    cfg.INPUT.CROP_PROBABILITY = 0.5  # where INPUT.CROP.ENABLED
    cfg.INPUT.CROP_SHORT_SIDES = (400, 500, 600)  # pixels the shorter side has when the crop is cut


def core_config(cfg: CfgNode) -> DetectionConfig:
    """Our config with what ``cfg`` says of the model and its losses.

    Raises:
        InputError: a value out of range, or one that a backbone of detectron2 does not heed.
    """
    _check_backbone(cfg.MODEL.DETR_BF.BACKBONE)
    tree = _lower(cfg.MODEL.DETR_BF)
    sections = {ours: tree.pop(section.lower()) for section, ours in SECTIONS.items()}
    panoptic = tree.pop("panoptic")
    del panoptic["enabled"], tree["num_classes"]
    evaluation = {
        "panoptic": panoptic,
        "mask_threshold": tree.pop("mask_threshold"),
        "max_detections": cfg.TEST.DETECTIONS_PER_IMAGE,
    }
    train = {"recompute_encoder": tree.pop("recompute_encoder")}
    model = {"name": tree.pop("architecture"), "masks": cfg.MODEL.MASK_ON, **tree}
    settings = {"model": model, **sections, "eval": evaluation, "train": train}
    config: DetectionConfig = config_from_dict(settings, source="MODEL.DETR_BF (in lower case)")
    return config


def _check_backbone(node: CfgNode) -> None:
    defaults = _node(BackboneConfig())
    ours = ("DILATION", "FROZEN_STAGES", "FROZEN_NORM")
    ignored = [name for name in ours if node[name] != defaults[name]]
    if node.NAME == DETECTRON2 and ignored:
        raise InputError(
            f"MODEL.DETR_BF.BACKBONE.{', '.join(ignored)}: these are settings of our backbones, and its NAME is "
            f"{DETECTRON2}; use MODEL.BACKBONE, MODEL.RESNETS and MODEL.WEIGHTS"
        )


def _node(settings: Any) -> CfgNode:
    """A group of settings as a node, names in upper case."""
    found = {field.name.upper(): getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return CfgNode({name: _node(value) if dataclasses.is_dataclass(value) else value for name, value in found.items()})


def _lower(node: Mapping[str, Any]) -> dict[str, Any]:
    """A node as plain dictionaries, names in lower case."""
    return {name.lower(): _lower(value) if isinstance(value, Mapping) else value for name, value in node.items()}
