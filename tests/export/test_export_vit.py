"""A plain vision transformer in an exported graph: open sizes, padding and windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from detr_bf.assembly import build_model
from detr_bf.common.structures import ClassMap
from detr_bf.config import config_to_dict, load_config
from detr_bf.export.sharing import SourceCheckpoint
from detr_bf.inference.backends import TorchBackend
from detr_bf.inference.predictor import Predictor
from tests.detectors.tiny import shaken
from tests.export.test_export import SMALL, check_every_form

VIT = (
    "model.name=conditional_detr",
    "model.hidden_dim=32",
    "model.heads=2",
    "model.encoder_layers=1",
    "model.decoder_layers=1",
    "model.feedforward_dim=32",
    "model.num_queries=5",
    "model.backbone.name=timm:vit_small_patch14_reg4_dinov2",
    "model.backbone.weights=none",
    "model.backbone.strides=[16]",
    "model.backbone.frozen_stages=0",
    "model.backbone.vit.options={patch_size: 8, embed_dim: 16, depth: 2, num_heads: 2, img_size: 32}",
    "model.backbone.vit.global_blocks=[1]",
    "loss.classification=focal",
)
WINDOWS = ("model.backbone.vit.window=3",)
MAPS = (  # as in RF-DETR
    "model.name=rfdetr",
    "model.encoder_layers=0",
    "model.rfdetr.cross_heads=4",
    "model.backbone.strides=[8]",
    "model.backbone.vit.maps=[0,1]",
    "model.backbone.vit.windows=2",
)


@pytest.mark.full
@pytest.mark.parametrize("settings", [WINDOWS, MAPS], ids=["windows", "maps"])
def test_the_file_computes_the_same(settings: tuple[str, ...], tmp_path: Path) -> None:
    config = load_config(None, [*SMALL, *VIT, *settings])
    classes = ClassMap((3, 7), ("a", "b"))
    torch.manual_seed(0)
    detector = shaken(build_model(config, classes.num_classes)).eval()
    backend = TorchBackend(detector, torch.device("cpu"))
    original = Predictor.from_config(
        backend, config, classes, thresholds=None, origin=SourceCheckpoint(config_to_dict(config), Path("run"), None)
    )
    check_every_form(original, tmp_path / "it.onnx")
