"""Training and evaluation from LazyConfig files."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import LazyCall, LazyConfig, instantiate
from detectron2.engine import AMPTrainer, SimpleTrainer, create_ddp_model, default_writers, hooks
from detectron2.evaluation import inference_on_dataset, print_csv_format
from detectron2.utils import comm
from omegaconf import DictConfig, OmegaConf
from torch import nn

from detr_bf.config import load_config
from detr_bf.interop.detectron2.checkpoint import DetrBfCheckpointer
from detr_bf.interop.detectron2.meta_arch import build_detr_bf
from detr_bf.interop.detectron2.parts import check_classes
from detr_bf.interop.detectron2.preparation import check_evaluable, set_up
from detr_bf.models import recipe_config


def recipe(name: str, *, num_classes: int = 80) -> DictConfig:
    """The model of one of our recipes, ``configs/*/NAME.yaml``, as a lazy call whose settings can be overridden.

    Args:
        name: of the recipe, or a YAML file of the core.
        num_classes: of the data, without no-object.

    Raises:
        InputError: there is no such recipe or file.
    """
    settings = asdict(load_config(name, task="detection") if name.endswith(".yaml") else recipe_config(name))
    evaluation = {key: settings["eval"][key] for key in ("max_detections", "mask_threshold", "panoptic")}
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
    """What one process of tools/d2_lazy_train_net.py does: train, or evaluate; the results.

    Raises:
        InputError: there is nothing to evaluate, or the settings make no sense.
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
    return evaluate(cfg, model)


def _datasets(cfg: DictConfig) -> list[str]:
    """The names in ``dataloader``, where they stand as in the examples."""
    names = [OmegaConf.select(cfg, f"dataloader.{split}.dataset.names") for split in ("train", "test")]
    return [name for each in names if each is not None for name in ([each] if isinstance(each, str) else each)]


def evaluate(cfg: DictConfig, model: nn.Module) -> Any:
    """What ``dataloader.evaluator`` finds on ``dataloader.test``."""
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
        found["results"] = evaluate(cfg, parallel)
        return found["results"]

    trainer.register_hooks(
        [
            hooks.IterationTimer(),
            hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier)),
            hooks.PeriodicCheckpointer(checkpointer, **cfg.train.checkpointer) if comm.is_main_process() else None,
            hooks.EvalHook(cfg.train.eval_period, test),
            _writer(cfg) if comm.is_main_process() else None,
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


def _writer(cfg: DictConfig) -> hooks.HookBase:
    return hooks.PeriodicWriter(default_writers(cfg.train.output_dir, cfg.train.max_iter), period=cfg.train.log_period)
