"""Plug-ins for unmodified timm models, and some for the encoders of our detectors."""

from detr_bf.common.weights import without_plugins
from detr_bf.plugins.batchformer import add_batchformer, add_batchformer_v2, num_streams
from detr_bf.plugins.context_broadcasting import ContextBroadcasting, add_context_broadcasting
from detr_bf.plugins.criterion import PluginCriterion, plugin_losses
from detr_bf.plugins.diverse_patch import DiversePatchLoss, PatchMix, add_diverse_patch, mixing_patch_size, patch_cutmix
from detr_bf.plugins.plugin import Plugin
from detr_bf.plugins.relative_localization import RelativeLocalizationLoss, add_relative_localization, ramped

__all__ = [
    "ContextBroadcasting",
    "DiversePatchLoss",
    "PatchMix",
    "Plugin",
    "PluginCriterion",
    "RelativeLocalizationLoss",
    "add_batchformer",
    "add_batchformer_v2",
    "add_context_broadcasting",
    "add_diverse_patch",
    "add_relative_localization",
    "mixing_patch_size",
    "num_streams",
    "patch_cutmix",
    "plugin_losses",
    "ramped",
    "without_plugins",
]
