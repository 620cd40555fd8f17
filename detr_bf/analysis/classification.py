"""Analyses of trained classifiers: each turns a model and labelled images into a table and a figure.

:data:`ANALYSES` names them for ``detr-bf analyze``; each is also a function of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from matplotlib.figure import Figure

from detr_bf.analysis.blocks import (
    attention_distance,
    attention_entropy,
    class_token_entropy,
    draw_attention_distance,
    draw_attention_entropy,
    draw_class_token_entropy,
    draw_patch_similarity,
    draw_scale_ratios,
    patch_similarity,
    scale_ratios,
)
from detr_bf.analysis.gradient_influence import draw_gradient_influence, gradient_influence
from detr_bf.analysis.images import draw_feature_maps, draw_grad_cam, feature_maps, grad_cam
from detr_bf.analysis.robustness import (
    draw_fgsm,
    draw_missing_patches,
    draw_occlusion,
    fgsm,
    missing_patches,
    occlusion,
)
from detr_bf.analysis.subject import EPSILONS, Pixels, Subject

__all__ = [
    "ANALYSES",
    "EPSILONS",
    "Analysis",
    "Pixels",
    "Subject",
    "attention_distance",
    "attention_entropy",
    "class_token_entropy",
    "feature_maps",
    "fgsm",
    "grad_cam",
    "gradient_influence",
    "missing_patches",
    "occlusion",
    "patch_similarity",
    "scale_ratios",
]


class AnalysisResult(Protocol):
    """Result of an analysis."""

    def rows(self) -> list[dict[str, object]]:
        """Return a table, the same columns in every row."""


@dataclass(frozen=True)
class Analysis:
    """One analysis."""

    run: Callable[[Subject], AnalysisResult]
    draw: Callable[[Mapping[str, Any]], Figure]  # results by the name of their run
    images: int  # default number of images; 0: none are needed


ANALYSES: dict[str, Analysis] = {
    "attention-entropy": Analysis(lambda s: attention_entropy(s.model, s.batches), draw_attention_entropy, 256),
    "class-token-entropy": Analysis(lambda s: class_token_entropy(s.model, s.batches), draw_class_token_entropy, 256),
    "attention-distance": Analysis(lambda s: attention_distance(s.model, s.batches), draw_attention_distance, 256),
    "scale-ratios": Analysis(lambda s: scale_ratios(s.model), draw_scale_ratios, 0),
    "patch-similarity": Analysis(lambda s: patch_similarity(s.model, s.batches), draw_patch_similarity, 256),
    "gradient-influence": Analysis(
        lambda s: gradient_influence(
            s.model, s.batches, class_names=s.class_names, class_counts=s.class_counts, loss=s.loss
        ),
        draw_gradient_influence,
        256,
    ),
    "grad-cam": Analysis(
        lambda s: grad_cam(s.model, s.batches, class_names=s.class_names, pixels=s.pixels), draw_grad_cam, 12
    ),
    "feature-maps": Analysis(
        lambda s: feature_maps(s.model, s.batches, class_names=s.class_names, pixels=s.pixels), draw_feature_maps, 12
    ),
    "occlusion": Analysis(lambda s: occlusion(s.model, s.batches, pixels=s.pixels), draw_occlusion, 1000),
    "missing-patches": Analysis(
        lambda s: missing_patches(s.model, s.batches, pixels=s.pixels, patch=s.patch), draw_missing_patches, 1000
    ),
    "fgsm": Analysis(lambda s: fgsm(s.model, s.batches, pixels=s.pixels, epsilons=s.epsilons), draw_fgsm, 1000),
}
