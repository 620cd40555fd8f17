"""Our settings in yacs."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("detectron2.config")

from detectron2.config import CfgNode, get_cfg

from detr_bf.config import DetectionConfig, config_to_dict
from detr_bf.errors import InputError
from detr_bf.interop.detectron2 import add_detr_bf_config
from detr_bf.interop.detectron2.config import core_config


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


def test_a_value_out_of_range_is_told() -> None:
    cfg = with_ours()
    cfg.MODEL.DETR_BF.DROPOUT = 1.5
    with pytest.raises(InputError, match=r"model\.dropout must be .*got 1\.5"):
        core_config(cfg)


def test_a_misspelt_key_is_told_by_yacs() -> None:
    with pytest.raises(AssertionError, match=r"Non-existent key: MODEL.DETR_BF.NUM_QUERY"):
        with_ours().merge_from_list(["MODEL.DETR_BF.NUM_QUERY", 5])


def test_a_config_survives_its_file(tmp_path: Any, tiny_cfg: Callable[..., Any]) -> None:
    cfg = tiny_cfg("smca", batch_former=True)
    (tmp_path / "config.yaml").write_text(cfg.dump())
    read = with_ours()
    read.merge_from_file(str(tmp_path / "config.yaml"))
    assert read.MODEL.DETR_BF == cfg.MODEL.DETR_BF  # detectron2 turns tuples of its own into lists
