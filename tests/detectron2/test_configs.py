"""Settings in yacs; the example configs equal our recipes of the same names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("detectron2.config")

from detectron2.config import CfgNode, LazyConfig, get_cfg
from omegaconf import OmegaConf

from detr_bf.common.errors import InputError
from detr_bf.config import DetectionConfig, config_to_dict, load_config
from detr_bf.config.loader import flatten_settings
from detr_bf.detectron2 import add_detr_bf_config
from detr_bf.detectron2.meta_arch import SECTIONS, core_config
from detr_bf.inference.loading import list_models, recipe_config

from .conftest import DETECTORS

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "detectron2"
YACS = sorted(path for path in (CONFIGS / "yacs").glob("*_r50*.yaml"))
LAZY = sorted(path for path in (CONFIGS / "lazy").glob("*_r50*.py"))
IMAGES = 118287  # of COCO train2017


def settings_of(config: DetectionConfig) -> dict[str, Any]:
    """Settings that define a model of the adapter."""
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


def test_the_digits_are_those_of_deformable_detr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("detr_bf.detectron2.datasets.register_coco", lambda *paths: None)
    demo = load_config(ROOT / "configs" / "demo_deformable.yaml")
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


# ---- yacs settings ----


def with_ours() -> CfgNode:
    cfg = get_cfg()
    add_detr_bf_config(cfg)
    return cfg


def test_the_defaults_are_ours_without_batch_attention() -> None:
    wanted = DetectionConfig()
    wanted.batch_former.enabled = False
    assert config_to_dict(core_config(with_ours())) == config_to_dict(wanted)


def test_every_setting_of_a_model_reaches_our_config() -> None:
    cfg = with_ours()
    cfg.merge_from_list(
        [
            *("MODEL.DETR_BF.ARCHITECTURE", "deformable_detr", "MODEL.DETR_BF.NUM_QUERIES", 300),
            *("MODEL.DETR_BF.DEFORMABLE.TWO_STAGE", True, "MODEL.DETR_BF.BACKBONE.STRIDES", "[8, 16, 32]"),
            *("MODEL.DETR_BF.LOSS.MATCHER.CLASS_COST", 2.0, "MODEL.DETR_BF.BATCHFORMER.ENABLED", True),
            *("MODEL.DETR_BF.BATCHFORMER.LAYERS", "[0, 2]", "MODEL.DETR_BF.BATCHFORMER.WEIGHT_DECAY", 0.5),
            *("MODEL.DETR_BF.PLUGINS.CONTEXT_BROADCASTING.ENABLED", True, "MODEL.DETR_BF.FREEZE.KEEP_DROPOUT", True),
            *("MODEL.MASK_ON", True, "MODEL.DETR_BF.PANOPTIC.MIN_AREA", 9, "MODEL.DETR_BF.MASK_THRESHOLD", 0.25),
            *("MODEL.DETR_BF.RECOMPUTE_ENCODER", True, "TEST.DETECTIONS_PER_IMAGE", 17),
        ]
    )
    config = core_config(cfg)
    assert (config.model.name, config.model.num_queries, config.model.masks) == ("deformable_detr", 300, True)
    assert (config.model.deformable.two_stage, config.model.backbone.strides) == (True, [8, 16, 32])
    assert config.loss.matcher.class_cost == 2.0
    assert (config.batch_former.layers, config.batch_former.weight_decay) == ([0, 2], 0.5)
    assert config.plugins.context_broadcasting.enabled
    assert config.freeze.keep_dropout
    assert (config.eval.panoptic.min_area, config.eval.mask_threshold, config.eval.max_detections) == (9, 0.25, 17)
    assert config.train.recompute_encoder


@pytest.mark.parametrize("name", list_models())
def test_every_recipe_can_be_written_in_yacs(name: str, tmp_path: Path) -> None:
    wanted = recipe_config(name)
    wanted.eval.max_detections = 100
    groups = {"model": wanted.model, **{ours: getattr(wanted, ours) for ours in SECTIONS.values()}}
    sections = {"model": ""} | {ours: f"{section}." for section, ours in SECTIONS.items()}
    flat = {
        f"MODEL.DETR_BF.{sections[group]}{key.upper()}": value
        for group, settings in groups.items()
        for key, value in flatten_settings(asdict(settings)).items()
    }
    cfg, read = with_ours(), with_ours()
    cfg.MODEL.MASK_ON = flat.pop("MODEL.DETR_BF.MASKS")
    flat["MODEL.DETR_BF.ARCHITECTURE"] = flat.pop("MODEL.DETR_BF.NAME")
    cfg.merge_from_list([part for key, value in flat.items() for part in (key, str(value))])
    (tmp_path / "config.yaml").write_text(cfg.dump())
    read.merge_from_file(str(tmp_path / "config.yaml"))
    assert settings_of(core_config(cfg)) == settings_of(core_config(read)) == settings_of(wanted)


def test_a_value_out_of_range_is_told() -> None:
    cfg = with_ours()
    cfg.MODEL.DETR_BF.DROPOUT = 1.5
    with pytest.raises(InputError, match=r"model\.dropout must be .*got 1\.5"):
        core_config(cfg)


def test_a_misspelt_key_is_told_by_yacs() -> None:
    with pytest.raises(AssertionError, match=r"Non-existent key: MODEL.DETR_BF.NUM_QUERY"):
        with_ours().merge_from_list(["MODEL.DETR_BF.NUM_QUERY", 5])


@pytest.mark.parametrize("architecture", DETECTORS)
def test_a_config_survives_its_file(tmp_path: Any, tiny_cfg: Callable[..., Any], architecture: str) -> None:
    cfg = tiny_cfg(architecture, batch_former=True)
    (tmp_path / "config.yaml").write_text(cfg.dump())
    read = with_ours()
    read.merge_from_file(str(tmp_path / "config.yaml"))
    assert read.MODEL.DETR_BF == cfg.MODEL.DETR_BF  # detectron2 turns tuples of its own into lists
