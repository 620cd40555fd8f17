"""Network of RIDE: experts with stages of their own on a shared trunk (Wang et al. 2021, ICLR, arXiv 2010.01809).

Shape legend: B images, E experts, C channels, H x W pixels, K classes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.resnet import ResNet
from torch import Tensor, nn

from detr_bf.classification.cifar_resnet import CifarResNet
from detr_bf.common.errors import InputError

SCALE = 30.0  # of the cosine logits; the margins of the loss have the same one
NARROW = (64, 128, 192, 384)  # channels of timm's stages before expansion: the last two have 3/4 of the usual ones


class CosineLinear(nn.Linear):
    """Cosine of the angles between the features and the vector of each class, times :data:`SCALE`."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__(channels, num_classes, bias=False)
        nn.init.normal_(self.weight, std=channels**-0.5)

    def forward(self, features: Tensor) -> Tensor:
        """(B, C) -> (B, K)."""
        return SCALE * F.linear(F.normalize(features, dim=1), F.normalize(self.weight, dim=1))


class ExpertResNet(nn.Module):
    """A shared trunk; for each expert two residual stages, average pooling and a cosine classifier.

    Args:
        networks: one residual network for each expert, all alike. The first gives the stem and all but the last two
            stages, which every network gives to its expert.

    Raises:
        InputError: they are no residual networks of timm or of CIFAR.
    """

    def __init__(self, networks: Sequence[nn.Module], num_classes: int) -> None:
        super().__init__()
        first: Any = networks[0]
        if not isinstance(first, ResNet | CifarResNet):
            raise InputError(f"the experts need a ResNet of timm or of CIFAR, got a {type(first).__name__}")
        names = [name for name, _ in first.named_children()]
        own = [name for name in names if name.startswith("layer")][-2:]
        self.trunk = _parts(first, names[: names.index(own[0])])
        self.experts = nn.ModuleList(_parts(network, own) for network in networks)
        self.classifiers = nn.ModuleList(CosineLinear(first.fc.in_features, num_classes) for _ in networks)

    def get_classifier(self) -> tuple[nn.Module, ...]:
        """Return the classifiers of the experts, like timm's models with several."""
        return tuple(self.classifiers)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> in training the logits of each expert (B, E, K), in evaluation their mean (B, K)."""
        shared = self.trunk(images)
        pairs = zip(self.experts, self.classifiers, strict=True)
        logits = torch.stack([classify(expert(shared).mean((2, 3))) for expert, classify in pairs], 1)
        return logits if self.training else logits.mean(1)


def _parts(network: nn.Module, names: Sequence[str]) -> nn.Sequential:
    return nn.Sequential(OrderedDict((name, network.get_submodule(name)) for name in names))
