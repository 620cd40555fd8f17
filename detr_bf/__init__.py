"""Batch attention (BatchFormerV2) for DETR-family detectors and image classifiers."""

from detr_bf.models import create_model, list_models
from detr_bf.predictor import ClassifierPredictor, Predictor, load, load_classifier

__all__ = ["ClassifierPredictor", "Predictor", "create_model", "list_models", "load", "load_classifier"]
__version__ = "0.1.0"
