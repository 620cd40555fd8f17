"""Analyses of trained classifiers: each turns a model and labelled images into a table and a figure.

:data:`ANALYSES` names them for ``detr-bf analyze``; each is also a function of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Analysis:
    """One analysis."""

    measure: Callable[..., Any]  # (model, batches, settings) -> result; its rows() are a table with equal columns
    draw: Callable[[Mapping[str, Any]], Figure]  # results by the name of their run
    images: int  # default number of images; 0: none are needed
    settings: tuple[str, ...] = ()  # fields of a subject that ``measure`` takes too

    def run(self, subject: Subject) -> Any:
        """Return the result for a model."""
        batches = [subject.batches] if self.images else []
        return self.measure(subject.model, *batches, **{name: getattr(subject, name) for name in self.settings})


ANALYSES: dict[str, Analysis] = {
    "attention-entropy": Analysis(attention_entropy, draw_attention_entropy, 256),
    "class-token-entropy": Analysis(class_token_entropy, draw_class_token_entropy, 256),
    "attention-distance": Analysis(attention_distance, draw_attention_distance, 256),
    "scale-ratios": Analysis(scale_ratios, draw_scale_ratios, 0),
    "patch-similarity": Analysis(patch_similarity, draw_patch_similarity, 256),
    "gradient-influence": Analysis(
        gradient_influence, draw_gradient_influence, 256, ("class_names", "class_counts", "loss")
    ),
    "grad-cam": Analysis(grad_cam, draw_grad_cam, 12, ("class_names", "pixels")),
    "feature-maps": Analysis(feature_maps, draw_feature_maps, 12, ("class_names", "pixels")),
    "occlusion": Analysis(occlusion, draw_occlusion, 1000, ("pixels",)),
    "missing-patches": Analysis(missing_patches, draw_missing_patches, 1000, ("pixels", "patch")),
    "fgsm": Analysis(fgsm, draw_fgsm, 1000, ("pixels", "epsilons")),
}
