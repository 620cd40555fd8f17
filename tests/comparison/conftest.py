from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.comparison.stubs import modules

TINY = """
model:
  hidden_dim: 16
  heads: 2
  encoder_layers: 1
  decoder_layers: 1
  feedforward_dim: 16
  num_queries: 6
  backbone: {{name: resnet18, weights: none, strides: [32], frozen_stages: 0, frozen_norm: false}}
batch_former: {{enabled: true, heads: 2}}
data:
  train: {{images: {train.images}, annotations: {train.annotations}}}
  val: {{images: {val.images}, annotations: {val.annotations}}}
  transforms: {{short_sides: [32], max_size: 64, eval_short_side: 32, random_crop: 0.0}}
  workers: 0
train: {{epochs: 3, batch_size: 3, log_every: 1}}
checkpoint: {{every_steps: 1}}
eval: {{pictures: 0}}
"""
ARMS = "arms:\n  off: [batch_former.enabled=false]\n  two_stream: [batch_former.enabled=true]\n"


@pytest.fixture
def base(tmp_path: Path, coco_folder: Callable[..., SimpleNamespace]) -> Path:
    """Write the config of a tiny detector: two steps an epoch, three epochs, four validation images."""
    train, val = coco_folder(num_images=6), coco_folder(num_images=4, name="val", first_image_id=101)
    (tmp_path / "base.yaml").write_text(TINY.format(train=train, val=val))
    return tmp_path / "base.yaml"


@pytest.fixture
def file(base: Path) -> Path:
    """Write an experiment of two arms and two seeds."""
    path = base.with_name("mine.yaml")
    path.write_text(f"base: base.yaml\n{ARMS}seeds: 2\n")
    return path


@pytest.fixture(autouse=True)
def stubs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace statistics and page in the tests of this package's runner."""
    if request.path.name == "test_runner.py":
        for name, module in modules().items():
            monkeypatch.setitem(sys.modules, name, module)
