"""Training loop, evaluation loop, optimizer, checkpoints and recovery; nothing here reads a config."""

from detr_bf.common.weights import checkpoint_of
from detr_bf.engine.checkpoint import (
    Checkpoint,
    build_and_load,
    is_checkpoint,
    load_checkpoint,
    load_fitting,
    load_strict,
)
from detr_bf.engine.evaluate import DetectionEvaluator, Evaluation, EvaluationLoop, EvaluationResult, PanopticEvaluation
from detr_bf.engine.loggers import Logger, check_loggers, make_loggers
from detr_bf.engine.metrics import MetricsLog
from detr_bf.engine.optimizer import LearningRate, build_optimizer, image_parameter_groups, parameter_groups
from detr_bf.engine.run_folder import CreatedFiles, RunFolder, RunMarker
from detr_bf.engine.step import TrainingStep
from detr_bf.engine.trainer import Trainer, TrainSettings

__all__ = [
    "Checkpoint",
    "CreatedFiles",
    "DetectionEvaluator",
    "Evaluation",
    "EvaluationLoop",
    "EvaluationResult",
    "LearningRate",
    "Logger",
    "MetricsLog",
    "PanopticEvaluation",
    "RunFolder",
    "RunMarker",
    "TrainSettings",
    "Trainer",
    "TrainingStep",
    "build_and_load",
    "build_optimizer",
    "check_loggers",
    "checkpoint_of",
    "image_parameter_groups",
    "is_checkpoint",
    "load_checkpoint",
    "load_fitting",
    "load_strict",
    "make_loggers",
    "parameter_groups",
]
