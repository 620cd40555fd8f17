"""Training and evaluation from yacs configs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.data import build_detection_test_loader, build_detection_train_loader
from detectron2.engine import DefaultTrainer
from detectron2.evaluation import DatasetEvaluator

from detr_bf.interop.detectron2.checkpoint import DetrBfCheckpointer
from detr_bf.interop.detectron2.config import add_detr_bf_config
from detr_bf.interop.detectron2.datasets import register_coco, register_coco_panoptic
from detr_bf.interop.detectron2.evaluation import build_evaluator
from detr_bf.interop.detectron2.mapper import DetrBfDatasetMapper
from detr_bf.interop.detectron2.meta_arch import DetrBf
from detr_bf.interop.detectron2.optimizer import optimizer_of
from detr_bf.interop.detectron2.preparation import check_evaluable, set_up


class Trainer(DefaultTrainer):
    """Detectron2's trainer with DETR's augmentation and optimizer, our evaluators, and weights of any known format."""

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        return build_detection_train_loader(cfg, mapper=DetrBfDatasetMapper(cfg, True))

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Any:
        return build_detection_test_loader(cfg, dataset_name, mapper=DetrBfDatasetMapper(cfg, False))

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: DetrBf) -> torch.optim.Optimizer:
        return optimizer_of(cfg, model)

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        return build_evaluator(
            dataset_name,
            Path(cfg.OUTPUT_DIR) / "inference",
            masks=cfg.MODEL.MASK_ON,
            panoptic=cfg.MODEL.DETR_BF.PANOPTIC.ENABLED,
        )

    def resume_or_load(self, resume: bool = True) -> None:
        """Go on from the last checkpoint in the output folder; without one, or without ``resume``, start anew."""
        if resume and self.checkpointer.has_checkpoint():
            super().resume_or_load(resume=True)
        else:
            DetrBfCheckpointer(self.model).load(self.cfg.MODEL.WEIGHTS)


def train_yacs(options: argparse.Namespace) -> Any:
    """What one process of tools/d2_train_net.py does: train, or evaluate; the results.

    Raises:
        InputError: there is nothing to evaluate, or the settings make no sense.
    """
    cfg = _setup(options)
    if not options.eval_only:
        trainer = Trainer(cfg)
        trainer.resume_or_load(resume=options.resume)
        trainer.train()
        return getattr(trainer, "_last_eval_results", None)
    check_evaluable(options, cfg.MODEL.WEIGHTS, cfg.OUTPUT_DIR)
    model = Trainer.build_model(cfg)
    DetrBfCheckpointer(model, save_dir=cfg.OUTPUT_DIR).resume_or_load(cfg.MODEL.WEIGHTS, resume=options.resume)
    return Trainer.test(cfg, model)


def _setup(options: argparse.Namespace) -> CfgNode:
    cfg = get_cfg()
    add_detr_bf_config(cfg)
    cfg.merge_from_file(options.config_file)
    cfg.merge_from_list(options.opts)
    cfg.freeze()
    set_up(cfg, options, cfg.OUTPUT_DIR)
    for paths in cfg.DATASETS.REGISTER_COCO:
        _register(*paths)
    return cfg


def _register(name: str, images: str, annotations: str, panoptic: str = "") -> None:
    if panoptic:
        register_coco_panoptic(name, images, annotations, panoptic)
    else:
        register_coco(name, images, annotations)
