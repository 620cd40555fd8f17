"""The analyses by name, as a command runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from matplotlib.figure import Figure

from detr_bf.classification.analysis.attention_distance import attention_distance, draw_attention_distance
from detr_bf.classification.analysis.attention_entropy import attention_entropy, draw_attention_entropy
from detr_bf.classification.analysis.feature_maps import draw_feature_maps, feature_maps
from detr_bf.classification.analysis.fgsm import draw_fgsm, fgsm
from detr_bf.classification.analysis.grad_cam import draw_grad_cam, grad_cam
from detr_bf.classification.analysis.gradient_influence import draw_gradient_influence, gradient_influence
from detr_bf.classification.analysis.occlusion import draw_occlusion, occlusion
from detr_bf.classification.analysis.patch_similarity import draw_patch_similarity, patch_similarity
from detr_bf.classification.analysis.scale_ratios import draw_scale_ratios, scale_ratios
from detr_bf.classification.analysis.subject import Subject


class Result(Protocol):
    """What every analysis gives."""

    def rows(self) -> list[dict[str, object]]:
        """A table, the same columns in every row."""


@dataclass(frozen=True)
class Analysis:
    """One analysis."""

    run: Callable[[Subject], Result]
    draw: Callable[[Mapping[str, Any]], Figure]  # results by the name of their run
    images: int  # that are enough, as a rule; 0: none are needed


def _influence(of: Subject) -> Result:
    names, counts = of.class_names, of.class_counts
    return gradient_influence(of.model, of.batches, class_names=names, class_counts=counts, loss=of.loss)


def _cam(of: Subject) -> Result:
    return grad_cam(of.model, of.batches, class_names=of.class_names, pixels=of.pixels)


def _maps(of: Subject) -> Result:
    return feature_maps(of.model, of.batches, class_names=of.class_names, pixels=of.pixels)


ANALYSES: dict[str, Analysis] = {
    "attention-entropy": Analysis(lambda of: attention_entropy(of.model, of.batches), draw_attention_entropy, 256),
    "attention-distance": Analysis(lambda of: attention_distance(of.model, of.batches), draw_attention_distance, 256),
    "scale-ratios": Analysis(lambda of: scale_ratios(of.model), draw_scale_ratios, 0),
    "patch-similarity": Analysis(lambda of: patch_similarity(of.model, of.batches), draw_patch_similarity, 256),
    "gradient-influence": Analysis(_influence, draw_gradient_influence, 256),
    "grad-cam": Analysis(_cam, draw_grad_cam, 12),
    "feature-maps": Analysis(_maps, draw_feature_maps, 12),
    "occlusion": Analysis(
        lambda of: occlusion(of.model, of.batches, pixels=of.pixels, patch=of.patch), draw_occlusion, 1000
    ),
    "fgsm": Analysis(lambda of: fgsm(of.model, of.batches, pixels=of.pixels, epsilons=of.epsilons), draw_fgsm, 1000),
}
