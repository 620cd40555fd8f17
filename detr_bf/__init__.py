"""Batch attention (BatchFormerV2) for DETR-family detectors."""

from detr_bf.predictor import Predictor, load

__all__ = ["Predictor", "load"]
__version__ = "0.1.0"
