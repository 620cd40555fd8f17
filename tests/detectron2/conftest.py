"""Small adapter models, inputs and data sets for the detectron2 tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_mask

from detr_bf.data.masks import read_ids

IDS = {3: 150, 7: 90, 100: 2, 120: 120}  # category ids with things and stuff mixed; things of 150 include crowds


@pytest.fixture
def tiny_cfg() -> Callable[..., Any]:
    """Factory of yacs configs of tiny detectors."""

    def make(architecture: str = "detr", *, batch_former: bool = False, masks: bool = False, d2_backbone: bool = False):
        from detectron2.config import get_cfg

        from detr_bf.detectron2 import add_detr_bf_config

        cfg = get_cfg()
        add_detr_bf_config(cfg)
        cfg.merge_from_list(TINY)
        cfg.merge_from_list(["MODEL.DETR_BF.ARCHITECTURE", architecture, *detector_options(architecture)])
        cfg.MODEL.DETR_BF.BATCHFORMER.ENABLED = batch_former
        cfg.MODEL.MASK_ON = masks
        if d2_backbone:
            cfg.merge_from_list(D2_RESNET18)
        return cfg

    return make


TINY = [
    *("MODEL.META_ARCHITECTURE", "DetrBf", "MODEL.DEVICE", "cpu", "MODEL.WEIGHTS", "", "INPUT.FORMAT", "RGB"),
    *("MODEL.DETR_BF.NUM_CLASSES", 3, "MODEL.DETR_BF.HIDDEN_DIM", 64, "MODEL.DETR_BF.HEADS", 4),
    *("MODEL.DETR_BF.ENCODER_LAYERS", 2, "MODEL.DETR_BF.DECODER_LAYERS", 2, "MODEL.DETR_BF.FEEDFORWARD_DIM", 32),
    *("MODEL.DETR_BF.NUM_QUERIES", 7, "MODEL.DETR_BF.DROPOUT", 0.0, "MODEL.DETR_BF.BATCHFORMER.DROPOUT", 0.0),
    *("MODEL.DETR_BF.BACKBONE.NAME", "resnet18", "MODEL.DETR_BF.BACKBONE.WEIGHTS", "none"),
]
LEVELS = {"BACKBONE.STRIDES": "[16, 32]", "EXTRA_LEVELS": 1}
MAPS = {"BACKBONE.STRIDES": "[8, 16, 32]"}
FOCAL = {"LOSS.CLASSIFICATION": "focal", "LOSS.CLASS_WEIGHT": 2.0}
NOISE = {"DENOISING.QUERIES": 4, "DENOISING.LABEL_NOISE": 0.5, "DENOISING.BOX_NOISE": 1.0}
DETECTORS: dict[str, dict[str, Any]] = {  # settings of MODEL.DETR_BF; ARCHITECTURE if it differs from the key
    "detr": {},
    "conditional_detr": {},
    "dab_deformable_detr": {**LEVELS, **FOCAL, "DEFORMABLE.BOX_REFINE": True, "LOSS.GIOU_EPS": 1e-6},
    "dab_detr": {**FOCAL, "DAB.PATTERNS": 2, "ACTIVATION": "prelu", "POSITION_TEMPERATURE": 20.0},
    "deformable_detr": LEVELS,
    "dino": {**LEVELS, **FOCAL, **NOISE},
    "dn_detr": {**FOCAL, "DENOISING.GROUPS": 2, "DAB.RANDOM_POINTS": True},
    "group_detr": {**FOCAL, "ARCHITECTURE": "conditional_detr", "GROUPS.GROUP_DETR": 3},
    "h_deformable_detr": {
        **LEVELS,
        **FOCAL,
        "ARCHITECTURE": "deformable_detr",
        "DEFORMABLE.BOX_REFINE": True,
        "DEFORMABLE.TWO_STAGE": True,
        "DEFORMABLE.MIXED_SELECTION": True,
        "DEFORMABLE.LOOK_FORWARD_TWICE": True,
        "GROUPS.ONE_TO_MANY.QUERIES": 5,
        "GROUPS.ONE_TO_MANY.REPEATS": 2,
    },
    "rtdetr": {**MAPS, **NOISE, "LOSS.CLASSIFICATION": "varifocal", "RTDETR.ENCODER_FEEDFORWARD_DIM": 24},
    "rtdetrv2": {**MAPS, **NOISE, "LOSS.CLASSIFICATION": "mal", "RTDETR.POINTS": "[3, 2, 1]"},
    "smca": {},
    "smca_multi_scale": MAPS,
}
D2_RESNET18 = [
    *("MODEL.DETR_BF.BACKBONE.NAME", "detectron2", "MODEL.BACKBONE.NAME", "build_resnet_backbone"),
    *("MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64, "MODEL.RESNETS.STRIDE_IN_1X1", False),
    *("MODEL.RESNETS.OUT_FEATURES", ["res2", "res3", "res4", "res5"]),
    *("MODEL.PIXEL_MEAN", [123.675, 116.28, 103.53], "MODEL.PIXEL_STD", [58.395, 57.12, 57.375]),
]


def detector_options(name: str) -> list[Any]:
    """Return the settings of one of ``DETECTORS`` as a list of keys and values."""
    return [part for key, value in DETECTORS[name].items() for part in (f"MODEL.DETR_BF.{key}", value)]


@pytest.fixture
def inputs() -> list[dict[str, Any]]:
    """Two images of different sizes with one object each and outputs of twice their sizes."""
    from detectron2.structures import Boxes, Instances, PolygonMasks

    generator = torch.Generator().manual_seed(0)
    found = []
    for height, width in ((64, 96), (80, 64)):
        instances = Instances((height, width))
        instances.gt_boxes = Boxes(torch.tensor([[4.0, 6.0, 40.0, 50.0]]))
        instances.gt_classes = torch.tensor([1])
        instances.gt_masks = PolygonMasks([[[4, 6, 40, 6, 40, 50, 4, 50]]])
        image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)
        found.append({"image": image, "instances": instances, "height": 2 * height, "width": 2 * width})
    return found


@pytest.fixture
def catalogs() -> Iterator[None]:
    """Unregister the data sets that a test registers."""
    from detectron2.data import DatasetCatalog, MetadataCatalog

    before = set(DatasetCatalog.list()), set(MetadataCatalog.list())
    yield
    for catalog, names in zip((DatasetCatalog, MetadataCatalog), before, strict=True):
        for name in set(catalog.list()) - names:
            catalog.remove(name)


def as_bmp(data: SimpleNamespace) -> SimpleNamespace:
    """Replace the images of a data set by BMP files."""
    for image in data.content["images"]:
        old = data.images / image["file_name"]
        image["file_name"] = old.with_suffix(".bmp").name
        Image.open(old).save(data.images / image["file_name"])
        old.unlink()
    data.save()
    return data


def scattered(data: SimpleNamespace) -> SimpleNamespace:
    """Give a panoptic data set unordered category ids, things between stuff, and BMP images."""
    for annotation in data.content["annotations"]:
        for segment in annotation["segments_info"]:
            segment["category_id"] = IDS[segment["category_id"]]
    for category in data.content["categories"]:
        category["id"] = IDS[category["id"]]
    return as_bmp(data)


def with_masks(data: SimpleNamespace, kind: str = "polygon", crowd: bool = False) -> SimpleNamespace:
    """Add masks that fill the boxes; with ``crowd`` the last object of each image is a crowd."""
    sizes = {image["id"]: (image["height"], image["width"]) for image in data.content["images"]}
    last = {annotation["image_id"]: annotation for annotation in data.content["annotations"]}
    for annotation in data.content["annotations"]:
        x, y, w, h = annotation["bbox"]
        polygon = [x, y, x + w, y, x + w, y + h, x, y + h]
        annotation["iscrowd"] = int(crowd and annotation is last[annotation["image_id"]])
        annotation["segmentation"] = [polygon]
        if kind == "run lengths" or annotation["iscrowd"]:
            code: dict[str, Any] = coco_mask.frPyObjects([polygon], *sizes[annotation["image_id"]])[0]
            annotation["segmentation"] = {"size": code["size"], "counts": code["counts"].decode()}
    data.save()
    return data


def segment_ids(data: SimpleNamespace, index: int) -> Any:
    """(h, w) int32 of the panoptic PNG of an image."""
    return read_ids(data.panoptic / data.content["annotations"][index]["file_name"])
