"""torchvision's ResNets, also with the dilated last stage of DETR-DC5."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torchvision.models import resnet as torchvision_resnet
from torchvision.models._api import WeightsEnum

from detr_bf.backbones.backbone import Network, check_consecutive, select_levels
from detr_bf.backbones.weights import download_failed, load_classifier, read_weights
from detr_bf.errors import InputError

# The IMAGENET1K_V1 weights are those that DETR and its successors start from.
RESNETS: dict[str, tuple[Callable[..., torchvision_resnet.ResNet], WeightsEnum]] = {
    "resnet18": (torchvision_resnet.resnet18, torchvision_resnet.ResNet18_Weights.IMAGENET1K_V1),
    "resnet34": (torchvision_resnet.resnet34, torchvision_resnet.ResNet34_Weights.IMAGENET1K_V1),
    "resnet50": (torchvision_resnet.resnet50, torchvision_resnet.ResNet50_Weights.IMAGENET1K_V1),
    "resnet101": (torchvision_resnet.resnet101, torchvision_resnet.ResNet101_Weights.IMAGENET1K_V1),
}
STEM = ("conv1", "bn1", "relu", "maxpool")
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


class ResNetBody(nn.Module):
    """A ResNet up to its deepest used stage; submodules keep torchvision's names.

    Args:
        resnet: whose submodules are taken over.
        levels: stages whose output is returned, 1 to 4, ascending.
    """

    def __init__(self, resnet: nn.Module, levels: Sequence[int]) -> None:
        super().__init__()
        for name in (*STEM, *(f"layer{level}" for level in range(1, levels[-1] + 1))):
            self.add_module(name, resnet.get_submodule(name))
        self.outputs = frozenset(f"layer{level}" for level in levels)

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) normalised images to one (B, C, h, w) map per level, shallow to deep."""
        maps = []
        for name, module in self.named_children():
            images = module(images)
            if name in self.outputs:
                maps.append(images)
        return maps


def build_resnet(name: str, *, weights: str, strides: Sequence[int], dilation: bool, finer: bool = False) -> Network:
    """A ResNet of ``RESNETS`` cut after the stage of its largest stride.

    Args:
        name: key of ``RESNETS``.
        weights: ``none``, ``imagenet`` or a file with a classifier's state dict.
        strides: of the feature maps, among 4, 8, 16, 32; with ``dilation`` 4, 8, 16.
        dilation: DC5, the last stage keeps stride 16.
        finer: also give the maps of all stages before those.

    Raises:
        InputError: a stride the network does not have, dilation of a network without bottlenecks, or no weights.
    """
    constructor, published = RESNETS[name]
    if dilation and name in ("resnet18", "resnet34"):
        raise InputError(f"backbone dilation: {name} cannot be dilated; use resnet50 or resnet101, or set it to false")
    # Dilated, stages 3 and 4 share stride 16, and the deeper one is meant.
    available = {4: 1, 8: 2, 16: 4} if dilation else {4: 1, 8: 2, 16: 3, 32: 4}
    title = f"{name} with dilation" if dilation else name
    levels = select_levels(available, strides, title)
    stage_strides = (4, 8, 16, 16 if dilation else 32)
    if finer:
        check_consecutive(stage_strides[: levels[-1]], strides, title)
        levels = list(range(1, levels[-1] + 1))
    resnet = constructor(replace_stride_with_dilation=[False, False, dilation])
    if weights == "imagenet":
        resnet.load_state_dict(download(published))
    elif weights != "none":
        load_classifier(resnet, read_weights(weights), classifier=("fc",), source=weights)
    widest = resnet.fc.in_features  # channels of stage 4; each stage before it has half as many
    return Network(
        body=ResNetBody(resnet, levels),
        channels=tuple(widest >> (4 - level) for level in levels),
        strides=tuple(stage_strides[level - 1] for level in levels),
        stages=("maxpool", *(f"layer{level}" for level in range(1, levels[-1] + 1))),
        mean=MEAN,
        std=STD,
    )


def download(published: WeightsEnum) -> dict[str, Tensor]:
    """State dict of published weights, from torch's cache or the network.

    Raises:
        InputError: they could be had from neither.
    """
    try:
        return dict(published.get_state_dict(progress=True, check_hash=True, weights_only=True))
    except (OSError, RuntimeError) as error:  # no network (URLError is an OSError), disk full; hash mismatch
        raise download_failed(published.url, error) from error
