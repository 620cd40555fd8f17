"""What classifiers have learned: from a model and labelled images to a table and a picture, one analysis a file.

:data:`ANALYSES` names them for ``tools/analyze.py``; each is also a function of its own.
"""

from detr_bf.classification.analysis.attention_distance import attention_distance
from detr_bf.classification.analysis.attention_entropy import attention_entropy
from detr_bf.classification.analysis.feature_maps import feature_maps
from detr_bf.classification.analysis.fgsm import fgsm
from detr_bf.classification.analysis.grad_cam import grad_cam
from detr_bf.classification.analysis.gradient_influence import gradient_influence
from detr_bf.classification.analysis.occlusion import occlusion
from detr_bf.classification.analysis.patch_similarity import patch_similarity
from detr_bf.classification.analysis.registry import ANALYSES, Analysis
from detr_bf.classification.analysis.scale_ratios import scale_ratios
from detr_bf.classification.analysis.subject import EPSILONS, Pixels, Subject

__all__ = [
    "ANALYSES",
    "EPSILONS",
    "Analysis",
    "Pixels",
    "Subject",
    "attention_distance",
    "attention_entropy",
    "feature_maps",
    "fgsm",
    "grad_cam",
    "gradient_influence",
    "occlusion",
    "patch_similarity",
    "scale_ratios",
]
