"""Matching and the set criterion."""

from detr_bf.losses.cross_entropy import CrossEntropy
from detr_bf.losses.focal import Focal
from detr_bf.losses.matcher import HungarianMatcher, Matches, PaddedTargets
from detr_bf.losses.report import LossReport
from detr_bf.losses.set_criterion import SetCriterion

__all__ = [
    "CrossEntropy",
    "Focal",
    "HungarianMatcher",
    "LossReport",
    "Matches",
    "PaddedTargets",
    "SetCriterion",
]
