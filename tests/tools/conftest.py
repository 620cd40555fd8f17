from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

TINY = """
model:
  hidden_dim: 32
  heads: 2
  encoder_layers: 1
  decoder_layers: 2
  feedforward_dim: 32
  num_queries: 6
  backbone: {name: resnet18, weights: none, strides: [8], frozen_stages: 0, frozen_norm: false}
batch_former: {enabled: true}
data:
  transforms: {short_sides: [32, 40], max_size: 64, eval_short_side: 32, crop_short_sides: [40], crop_min: 24}
  workers: 0
train: {epochs: 3, batch_size: 3, log_every: 1, ema: {enabled: true, decay: 0.9}}
checkpoint: {every_steps: 4}
eval: {pictures: 2}
report: false
"""


@pytest.fixture
def tiny(tmp_path: Path, coco_folder: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a config of a tiny detector with category ids 3, 7 and 90: five steps an epoch, four validation images."""
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    train = coco_folder(num_images=15, name="train")
    val = coco_folder(num_images=4, name="val", first_image_id=101)
    path = tmp_path / "tiny.yaml"
    path.write_text(
        TINY.replace(
            "data:\n",
            f"data:\n  train: {{images: {train.images}, annotations: {train.annotations}}}\n"
            f"  val: {{images: {val.images}, annotations: {val.annotations}}}\n",
        )
        + f"output_dir: {tmp_path / 'run'}\n"
    )
    return path


def with_report(config: Path) -> None:
    """Let the runs of a config of these tests write their report."""
    config.write_text(config.read_text().replace("report: false\n", ""))
