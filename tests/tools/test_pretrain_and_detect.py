"""Networks that were pre-trained here as backbones of detectors, as docs/vision_transformers.md does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from detr_bf.engine import load_checkpoint
from tests.tools.image_runs import classifier_config, contrastive_config, masked_config
from tools.train_net import main as train_net

BACKBONE = (
    "model.backbone.name=timm:vit_tiny_patch16_224",
    "model.backbone.vit.options={patch_size: 4, embed_dim: 24, depth: 2, num_heads: 2, img_size: 16}",
    "model.backbone.strides=[4]",
)
WITHOUT_A_CHANGE = ("optimizer.lr=0", "optimizer.backbone_lr=0", "train.max_steps=1", "train.ema.enabled=false")


@pytest.mark.parametrize(
    ("write", "folder", "prefix", "plugin"),
    [
        (classifier_config, "run", "", "plugins.context_broadcasting.enabled=true"),
        (masked_config, "mae", "encoder.", "batch_former.enabled=true"),
        (contrastive_config, "moco", "encoder.", "batch_former={enabled: true, heads: 2}"),
    ],
)
def test_a_run_becomes_a_backbone(
    write: Callable[[Path], Path], folder: str, prefix: str, plugin: str, tiny: Path, tmp_path: Path
) -> None:
    before = tmp_path / "before"
    before.mkdir()
    assert train_net(["--config", str(write(before)), "train.max_steps=2", plugin]) == 0
    run = before / folder
    settings = [*BACKBONE, *WITHOUT_A_CHANGE, f"model.backbone.weights={run}"]
    assert train_net(["--config", str(tiny), *settings]) == 0
    given, used = load_checkpoint(run / "last.pt").weights, load_checkpoint(tmp_path / "run" / "last.pt").model
    names = {name for name in given if name.startswith(f"{prefix}blocks.")}
    assert len(names) == 24
    for name in names:
        assert torch.equal(used[f"backbone.body.vit.{name.removeprefix(prefix)}"], given[name]), name
