"""Training and evaluation inside detectron2, from yacs configs and LazyConfig files; DETR's optimizer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode, LazyCall, LazyConfig, get_cfg, instantiate
from detectron2.data import build_detection_test_loader, build_detection_train_loader
from detectron2.engine import (
    AMPTrainer,
    DefaultTrainer,
    SimpleTrainer,
    create_ddp_model,
    default_setup,
    default_writers,
    hooks,
)
from detectron2.evaluation import DatasetEvaluator, inference_on_dataset, print_csv_format
from detectron2.solver.build import maybe_add_gradient_clipping
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger
from omegaconf import DictConfig, OmegaConf
from torch import nn

from detr_bf.common.errors import InputError
from detr_bf.config import load_config
from detr_bf.detectron2.checkpoint import DetrBfCheckpointer
from detr_bf.detectron2.datasets import register_coco, register_coco_panoptic
from detr_bf.detectron2.evaluation import build_evaluator
from detr_bf.detectron2.mapper import DetrBfDatasetMapper
from detr_bf.detectron2.meta_arch import DetrBf, add_detr_bf_config, build_detr_bf
from detr_bf.detectron2.parts import check_classes
from detr_bf.engine import parameter_groups
from detr_bf.inference.loading import recipe_config

FULL_MODEL = "full_model"  # SOLVER.CLIP_GRADIENTS.CLIP_TYPE that clips the norm over all parameters


def detector_parameters(
    model: DetrBf,
    *,
    lr: float,
    weight_decay: float = 1e-4,
    backbone_multiplier: float = 0.1,
    point_multiplier: float = 1.0,
    decay_vectors: bool = True,
    batch_former_multiplier: float = 1.0,
    batch_former_weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Return up to eight groups of the trainable parameters; multipliers are relative to ``lr``.

    Without ``decay_vectors``, as in RT-DETR, biases and norms are not decayed. See
    :func:`detr_bf.engine.parameter_groups`.
    """
    return parameter_groups(
        model.detector,
        lr=lr,
        backbone_lr=lr * backbone_multiplier,
        weight_decay=weight_decay,
        point_lr_factor=point_multiplier,
        decay_vectors=decay_vectors,
        batch_former_lr_factor=batch_former_multiplier,
        batch_former_weight_decay=batch_former_weight_decay,
    )


def build_clipped_optimizer(
    params: Sequence[dict[str, Any]],
    *,
    name: str = "ADAMW",
    lr: float,
    momentum: float = 0.9,
    nesterov: bool = False,
    clip_norm: float = 0.1,
) -> torch.optim.Optimizer:
    """Build AdamW or SGD over parameter groups.

    Args:
        params: groups with their own learning rates and weight decay.
        name: ADAMW or SGD.
        lr: default of groups without one.
        momentum, nesterov: for SGD.
        clip_norm: largest norm over all gradients; 0 turns clipping off.

    Raises:
        InputError: unknown name.
    """
    if name == "ADAMW":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, lr=lr)
    elif name == "SGD":
        optimizer = torch.optim.SGD(params, lr=lr, momentum=momentum, nesterov=nesterov)
    else:
        raise InputError(f"the optimizer must be ADAMW or SGD, got '{name}': set SOLVER.OPTIMIZER")
    if clip_norm > 0:
        clip_all(optimizer, clip_norm)
    return optimizer


def clip_all(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    """Clip the norm over all gradients of the optimizer to ``max_norm`` before every step.

    A gradient scaler unscales before the step, so the true norm is clipped. Fused optimizers unscale inside the step
    instead and are therefore refused.

    Raises:
        InputError: a fused optimizer.
    """
    if any(group.get("fused") for group in optimizer.param_groups):
        raise InputError("gradients of a fused optimizer are still scaled when they are clipped: use fused=False")

    def clip(stepping: torch.optim.Optimizer, *_: Any) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in stepping.param_groups for p in group["params"]], max_norm)

    optimizer.register_step_pre_hook(clip)


def optimizer_of(cfg: CfgNode, model: DetrBf) -> torch.optim.Optimizer:
    """Build the optimizer from ``SOLVER``.

    Raises:
        InputError: unknown optimizer, or a norm type that ``full_model`` does not support.
    """
    solver, batch_former = cfg.SOLVER, cfg.MODEL.DETR_BF.BATCHFORMER
    clipping = solver.CLIP_GRADIENTS
    whole = clipping.ENABLED and clipping.CLIP_TYPE == FULL_MODEL
    if whole and clipping.NORM_TYPE != 2.0:
        raise InputError(f"{FULL_MODEL} clips the 2-norm, got SOLVER.CLIP_GRADIENTS.NORM_TYPE {clipping.NORM_TYPE}")
    groups = detector_parameters(
        model,
        lr=solver.BASE_LR,
        weight_decay=solver.WEIGHT_DECAY,
        backbone_multiplier=solver.BACKBONE_MULTIPLIER,
        point_multiplier=solver.POINT_MULTIPLIER,
        decay_vectors=solver.DECAY_VECTORS,
        batch_former_multiplier=batch_former.LR_FACTOR,
        batch_former_weight_decay=batch_former.WEIGHT_DECAY,
    )
    optimizer = build_clipped_optimizer(
        groups,
        name=solver.OPTIMIZER,
        lr=solver.BASE_LR,
        momentum=solver.MOMENTUM,
        nesterov=solver.NESTEROV,
        clip_norm=clipping.CLIP_VALUE if whole else 0.0,
    )
    return optimizer if whole else maybe_add_gradient_clipping(cfg, optimizer)


# ---- shared by both kinds of configs ----


def set_up(cfg: Any, options: argparse.Namespace, output_dir: str) -> None:
    """Run detectron2's default setup; send our log messages to its console and log.txt too."""
    default_setup(cfg, options)
    setup_logger(output_dir, distributed_rank=comm.get_rank(), name="detr_bf")


def check_evaluable(options: argparse.Namespace, weights: str, output_dir: str) -> None:
    """Raise InputError if there are no weights to evaluate: none named, and no checkpoint to resume from."""
    if not (weights or (options.resume and DetectionCheckpointer(nn.Module(), output_dir).has_checkpoint())):
        raise InputError(
            "nothing to evaluate: give weights with MODEL.WEIGHTS FILE (train.init_checkpoint=FILE), or --resume to "
            "evaluate the last checkpoint of the output folder"
        )


# ---- yacs configs ----


class DetrBfTrainer(DefaultTrainer):
    """Detectron2's trainer with DETR's augmentation and optimizer, our evaluators and our checkpoint formats."""

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
        """Resume from the last checkpoint of the output folder; without one, or without ``resume``, start fresh."""
        if resume and self.checkpointer.has_checkpoint():
            super().resume_or_load(resume=True)
        else:
            DetrBfCheckpointer(self.model).load(self.cfg.MODEL.WEIGHTS)


def train_yacs(options: argparse.Namespace) -> Any:
    """Train or evaluate in one process of tools/d2_train_net.py; return the results.

    Raises:
        InputError: there is nothing to evaluate, or a setting is invalid.
    """
    cfg = _setup(options)
    if not options.eval_only:
        trainer = DetrBfTrainer(cfg)
        trainer.resume_or_load(resume=options.resume)
        trainer.train()
        return getattr(trainer, "_last_eval_results", None)
    check_evaluable(options, cfg.MODEL.WEIGHTS, cfg.OUTPUT_DIR)
    model = DetrBfTrainer.build_model(cfg)
    DetrBfCheckpointer(model, save_dir=cfg.OUTPUT_DIR).resume_or_load(cfg.MODEL.WEIGHTS, resume=options.resume)
    return DetrBfTrainer.test(cfg, model)


def _setup(options: argparse.Namespace) -> CfgNode:
    cfg = get_cfg()
    add_detr_bf_config(cfg)
    cfg.merge_from_file(options.config_file)
    cfg.merge_from_list(options.opts)
    cfg.freeze()
    set_up(cfg, options, cfg.OUTPUT_DIR)
    for name, images, path, *panoptic in cfg.DATASETS.REGISTER_COCO:
        if any(panoptic):
            register_coco_panoptic(name, images, path, *panoptic)
        else:
            register_coco(name, images, path)
    return cfg


# ---- LazyConfig files ----


def recipe(name: str, *, num_classes: int = 80) -> DictConfig:
    """Return the model of a recipe, ``configs/*/NAME.yaml``, as a lazy call whose settings can be overridden.

    Args:
        name: a recipe or a YAML file of the core.
        num_classes: without no-object.

    Raises:
        InputError: there is no such recipe or file.
    """
    settings = asdict(load_config(name, task="detection") if name.endswith(".yaml") else recipe_config(name))
    keys = ("max_detections", "mask_threshold", "nms", "nms_across_classes", "panoptic")
    evaluation = {key: settings["eval"][key] for key in keys}
    return LazyCall(build_detr_bf)(
        num_classes=num_classes,
        **{group: settings[group] for group in ("model", "loss", "batch_former", "plugins", "freeze")},
        eval=evaluation,
        train={"recompute_encoder": settings["train"]["recompute_encoder"]},
        input_format="RGB",
        panoptic_dataset=None,
        pretrained=True,
    )


def train_lazy(options: argparse.Namespace) -> Any:
    """Train or evaluate in one process of tools/d2_lazy_train_net.py; return the results.

    Raises:
        InputError: there is nothing to evaluate, or a setting is invalid.
    """
    cfg = LazyConfig.apply_overrides(LazyConfig.load(options.config_file), options.opts)
    set_up(cfg, options, cfg.train.output_dir)
    if options.eval_only:
        check_evaluable(options, cfg.train.init_checkpoint, cfg.train.output_dir)
    if "pretrained" in cfg.model and (options.eval_only or cfg.train.init_checkpoint):
        cfg.model.pretrained = False  # the weights come from a checkpoint
    model = instantiate(cfg.model).to(cfg.train.device)
    check_classes(_datasets(cfg), cfg.model.num_classes)
    if not options.eval_only:
        return _train(cfg, model, resume=options.resume)
    DetrBfCheckpointer(model, save_dir=cfg.train.output_dir).resume_or_load(
        cfg.train.init_checkpoint, resume=options.resume
    )
    return evaluate_model(cfg, model)


def _datasets(cfg: DictConfig) -> list[str]:
    """Names of the data sets in ``dataloader``, if they are given as in the examples."""
    names = [OmegaConf.select(cfg, f"dataloader.{split}.dataset.names") for split in ("train", "test")]
    return [name for each in names if each is not None for name in ([each] if isinstance(each, str) else each)]


def evaluate_model(cfg: DictConfig, model: nn.Module) -> Any:
    """Return the results of ``dataloader.evaluator`` on ``dataloader.test``."""
    results = inference_on_dataset(model, instantiate(cfg.dataloader.test), instantiate(cfg.dataloader.evaluator))
    if comm.is_main_process():
        print_csv_format(results)
    return results


def _train(cfg: DictConfig, model: nn.Module, *, resume: bool) -> Any:
    cfg.optimizer.params.model = model
    optimizer = instantiate(cfg.optimizer)
    parallel = create_ddp_model(model, **cfg.train.ddp)
    kind = AMPTrainer if cfg.train.amp.enabled else SimpleTrainer
    trainer = kind(parallel, instantiate(cfg.dataloader.train), optimizer)
    checkpointer = DetectionCheckpointer(parallel, cfg.train.output_dir, trainer=trainer)
    found: dict[str, Any] = {}

    def test() -> Any:
        found["results"] = evaluate_model(cfg, parallel)
        return found["results"]

    trainer.register_hooks(
        [
            hooks.IterationTimer(),
            hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier)),
            hooks.PeriodicCheckpointer(checkpointer, **cfg.train.checkpointer) if comm.is_main_process() else None,
            hooks.EvalHook(cfg.train.eval_period, test),
            hooks.PeriodicWriter(default_writers(cfg.train.output_dir, cfg.train.max_iter), period=cfg.train.log_period)
            if comm.is_main_process()
            else None,
        ]
    )
    if resume and checkpointer.has_checkpoint():
        checkpointer.resume_or_load(cfg.train.init_checkpoint, resume=True)
        start = trainer.iter + 1
    else:
        DetrBfCheckpointer(parallel).load(cfg.train.init_checkpoint)
        start = 0
    trainer.train(start, cfg.train.max_iter)
    return found.get("results")
