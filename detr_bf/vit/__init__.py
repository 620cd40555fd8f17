"""Ideas for classifiers and vision transformers, as plug-ins of unmodified timm models."""

from detr_bf.vit.batch_former import add_batchformer, add_batchformer_v2, num_streams
from detr_bf.vit.context_broadcasting import ContextBroadcasting, add_context_broadcasting
from detr_bf.vit.criterion import ClassifierCriterion, PluginCriterion, cross_entropy
from detr_bf.vit.diverse_patch import (
    DiversePatchLoss,
    PatchMix,
    add_diverse_patch,
    mixing_patch_size,
    patch_cutmix,
)
from detr_bf.vit.masked_autoencoder import MaskedAutoencoder, initialize_as_published
from detr_bf.vit.plugin import Plugin, without_plugins
from detr_bf.vit.relative_localization import RelativeLocalizationLoss, add_relative_localization, ramped

__all__ = [
    "ClassifierCriterion",
    "ContextBroadcasting",
    "DiversePatchLoss",
    "MaskedAutoencoder",
    "PatchMix",
    "Plugin",
    "PluginCriterion",
    "RelativeLocalizationLoss",
    "add_batchformer",
    "add_batchformer_v2",
    "add_context_broadcasting",
    "add_diverse_patch",
    "add_relative_localization",
    "cross_entropy",
    "initialize_as_published",
    "mixing_patch_size",
    "num_streams",
    "patch_cutmix",
    "ramped",
    "without_plugins",
]
