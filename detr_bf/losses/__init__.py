"""Matching, classification losses and the set criterion."""

from detr_bf.losses.classification import (
    CLASSIFICATIONS,
    Classification,
    CrossEntropy,
    Focal,
    IouAware,
    MatchabilityAware,
    Varifocal,
)
from detr_bf.losses.matcher import MATCHING_COSTS, HungarianMatcher, Matches
from detr_bf.losses.set_criterion import LOGGED_METRICS, STREAM_NAMES, LossReport, SetCriterion

__all__ = [
    "CLASSIFICATIONS",
    "LOGGED_METRICS",
    "MATCHING_COSTS",
    "STREAM_NAMES",
    "Classification",
    "CrossEntropy",
    "Focal",
    "HungarianMatcher",
    "IouAware",
    "LossReport",
    "MatchabilityAware",
    "Matches",
    "SetCriterion",
    "Varifocal",
]
