"""The detectors: one class, one file for the parts each of them chooses."""

from detr_bf.detectors.detector import Detector
from detr_bf.detectors.detr import detr

__all__ = ["Detector", "detr"]
