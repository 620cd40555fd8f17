"""Batch attention (BatchFormerV2) for DETR-family detectors."""

from detr_bf.models import create_model, list_models
from detr_bf.predictor import Predictor, load

__all__ = ["Predictor", "create_model", "list_models", "load"]
__version__ = "0.1.0"
