"""Small adapter models and inputs, for tests that have detectron2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def tiny_cfg() -> Callable[..., Any]:
    """A yacs config of a detector that is built and run in a moment."""

    def make(architecture: str = "detr", *, batch_former: bool = False, masks: bool = False, d2_backbone: bool = False):
        from detectron2.config import get_cfg

        from detr_bf.interop.detectron2 import add_detr_bf_config

        cfg = get_cfg()
        add_detr_bf_config(cfg)
        cfg.merge_from_list(TINY)
        node = cfg.MODEL.DETR_BF
        node.ARCHITECTURE = architecture
        node.BATCHFORMER.ENABLED = batch_former
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
D2_RESNET18 = [
    *("MODEL.DETR_BF.BACKBONE.NAME", "detectron2", "MODEL.BACKBONE.NAME", "build_resnet_backbone"),
    *("MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64, "MODEL.RESNETS.STRIDE_IN_1X1", False),
    *("MODEL.RESNETS.OUT_FEATURES", ["res2", "res3", "res4", "res5"]),
    *("MODEL.PIXEL_MEAN", [123.675, 116.28, 103.53], "MODEL.PIXEL_STD", [58.395, 57.12, 57.375]),
]


@pytest.fixture
def inputs() -> list[dict[str, Any]]:
    """Two images of different sizes with one object each, to be shown at twice their sizes."""
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
    """Takes back what a test registers."""
    from detectron2.data import DatasetCatalog, MetadataCatalog

    before = set(DatasetCatalog.list()), set(MetadataCatalog.list())
    yield
    for catalog, names in zip((DatasetCatalog, MetadataCatalog), before, strict=True):
        for name in set(catalog.list()) - names:
            catalog.remove(name)
