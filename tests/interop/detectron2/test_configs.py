"""The example configs: each says what our recipe of the name says."""

from __future__ import annotations

from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("detectron2.config")

from detectron2.config import LazyConfig, get_cfg
from omegaconf import OmegaConf

from detr_bf.config import DetectionConfig, load_config
from detr_bf.interop.detectron2 import add_detr_bf_config
from detr_bf.interop.detectron2.config import core_config
from detr_bf.models import recipe_config

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs" / "detectron2"
YACS = sorted(path for path in (CONFIGS / "yacs").glob("*_r50*.yaml"))
LAZY = sorted(path for path in (CONFIGS / "lazy").glob("*_r50*.py"))
IMAGES = 118287  # of COCO train2017


def settings_of(config: DetectionConfig) -> dict[str, Any]:
    """What an adapter's model is built of."""
    tree = asdict(config)
    evaluation = {key: tree["eval"][key] for key in ("max_detections", "mask_threshold", "panoptic")}
    kept = {key: tree[key] for key in ("model", "loss", "batch_former", "plugins", "freeze")}
    return {**kept, "eval": evaluation, "recompute": tree["train"]["recompute_encoder"]}


def schedule_of(config: DetectionConfig, batch: int) -> tuple[int, int, int]:
    """Steps of an epoch, of training, and up to the drop."""
    epoch = ceil(IMAGES / batch)
    return epoch, epoch * config.train.epochs, epoch * config.optimizer.drop_epochs[0]


def lazy_settings_of(cfg: Any) -> dict[str, Any]:
    model: Any = OmegaConf.to_container(cfg.model)
    kept = {key: model[key] for key in ("model", "loss", "batch_former", "plugins", "freeze", "eval")}
    return {**kept, "recompute": model["train"]["recompute_encoder"]}


def test_every_detector_has_both_forms_in_both_styles() -> None:
    names = {
        f"{name}_r50{end}" for name in ("detr", "conditional_detr", "smca", "deformable_detr") for end in ("", "_bfv2")
    }
    names |= {"panoptic_detr_r50_boxes_bfv2", "panoptic_detr_r50_bfv2"}
    assert {path.stem for path in LAZY} == names
    assert {path.stem for path in YACS} == names | {"detr_r50_bfv2_d2_backbone"}


@pytest.mark.parametrize("path", YACS, ids=lambda path: path.stem)
def test_a_yacs_config_is_our_recipe(path: Path) -> None:
    cfg = get_cfg()
    add_detr_bf_config(cfg)
    cfg.merge_from_file(str(path))
    wanted = recipe_config(path.stem.removesuffix("_d2_backbone"))
    found = core_config(cfg)
    if path.stem.endswith("_d2_backbone"):
        assert found.model.backbone.name == "detectron2"
        found.model.backbone.name = wanted.model.backbone.name
    assert settings_of(found) == settings_of(wanted)
    solver, optimizer = cfg.SOLVER, wanted.optimizer
    assert (133 if "panoptic" in path.stem else 80) == cfg.MODEL.DETR_BF.NUM_CLASSES
    assert wanted.train.batch_size == solver.IMS_PER_BATCH
    assert optimizer.lr == solver.BASE_LR
    assert pytest.approx(optimizer.backbone_lr) == solver.BASE_LR * solver.BACKBONE_MULTIPLIER
    assert (optimizer.point_lr_factor, optimizer.weight_decay) == (solver.POINT_MULTIPLIER, solver.WEIGHT_DECAY)
    assert ("full_model", optimizer.clip_norm) == (solver.CLIP_GRADIENTS.CLIP_TYPE, solver.CLIP_GRADIENTS.CLIP_VALUE)
    epoch, steps, drop = schedule_of(wanted, wanted.train.batch_size)
    assert (solver.MAX_ITER, tuple(solver.STEPS), cfg.TEST.EVAL_PERIOD) == (steps, (drop,), epoch)
    assert epoch == solver.CHECKPOINT_PERIOD
    transforms = wanted.data.transforms
    assert list(cfg.INPUT.MIN_SIZE_TRAIN) == transforms.short_sides
    assert tuple(cfg.INPUT.CROP.SIZE) == (transforms.crop_min, transforms.crop_max)
    assert list(cfg.INPUT.CROP_SHORT_SIDES) == transforms.crop_short_sides
    assert transforms.random_crop == cfg.INPUT.CROP_PROBABILITY


@pytest.mark.parametrize("path", LAZY, ids=lambda path: path.stem)
def test_a_lazy_config_is_our_recipe(path: Path) -> None:
    cfg = LazyConfig.load(str(path))
    wanted = recipe_config(path.stem)
    assert lazy_settings_of(cfg) == settings_of(wanted)
    batch = cfg.dataloader.train.total_batch_size
    epoch, steps, drop = schedule_of(wanted, batch)
    assert batch == wanted.train.batch_size
    assert (cfg.train.eval_period, cfg.train.max_iter) == (epoch, steps)
    assert cfg.lr_multiplier.scheduler.milestones == [drop]
    assert cfg.lr_multiplier.scheduler.num_updates == steps
    assert cfg.optimizer.lr == cfg.optimizer.params.lr == wanted.optimizer.lr
    assert cfg.optimizer.lr * cfg.optimizer.params.backbone_multiplier == pytest.approx(wanted.optimizer.backbone_lr)
    assert cfg.optimizer.params.get("point_multiplier", 1.0) == wanted.optimizer.point_lr_factor
    assert cfg.optimizer.clip_norm == wanted.optimizer.clip_norm
    assert cfg.dataloader.train.mapper.masks == wanted.model.masks == cfg.dataloader.evaluator.masks
    assert cfg.dataloader.evaluator.panoptic == wanted.model.masks
    assert cfg.dataloader.evaluator.output_dir == f"{cfg.train.output_dir}/inference"


def test_the_digits_are_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("detr_bf.interop.detectron2.datasets.register_coco", lambda *paths: None)
    demo = load_config(ROOT / "configs" / "demo.yaml")
    yacs = get_cfg()
    add_detr_bf_config(yacs)
    yacs.merge_from_file(str(CONFIGS / "yacs" / "digits.yaml"))
    lazy = LazyConfig.load(str(CONFIGS / "lazy" / "digits.py"))
    assert settings_of(core_config(yacs)) == lazy_settings_of(lazy) == settings_of(demo)
    assert yacs.SOLVER.IMS_PER_BATCH == lazy.dataloader.train.total_batch_size == demo.train.batch_size
    assert yacs.SOLVER.BASE_LR == lazy.optimizer.lr == demo.optimizer.lr
    multiplier = lazy.optimizer.params.backbone_multiplier
    assert yacs.SOLVER.BACKBONE_MULTIPLIER == multiplier == demo.optimizer.backbone_lr / demo.optimizer.lr
    assert yacs.SOLVER.MAX_ITER == lazy.train.max_iter == 3000
