"""Networks of others, by name, and their weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import timm
from timm.layers.helpers import to_2tuple
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor, nn

from detr_bf import interop
from detr_bf.assembly.trial import MISFIT, try_network
from detr_bf.classification.cifar_resnet import cifar_resnet
from detr_bf.engine import checkpoint_of
from detr_bf.errors import InputError
from detr_bf.text import printable

logger = logging.getLogger(__name__)

CIFAR_RESNET = "cifar_resnet"
ENCODER = "encoder."  # of a masked autoencoder


def build_network(
    name: str,
    *,
    num_classes: int,
    image_size: int,
    pretrained: bool = False,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A model of timm, or ``cifar_resnet`` with its depth, that was tried on two images.

    Args:
        image_size: in pixels.
        options: further arguments of ``timm.create_model``.

    Raises:
        InputError: there is no such model, it does not take the settings or the images, or its weights cannot be had.
    """
    chosen = dict(options or {})
    if name.startswith(CIFAR_RESNET):
        network: nn.Module = _cifar_resnet(
            name, num_classes, chosen, pretrained=pretrained, dropout=dropout, drop_path=drop_path
        )
    else:
        _check_known(name)
        _check_size(chosen, image_size)
        network = _of_timm(name, num_classes, image_size, pretrained, dropout, drop_path, chosen)
    try_network(network, name, image_size=image_size, num_classes=num_classes)
    return network


def _of_timm(
    name: str,
    num_classes: int,
    image_size: int,
    pretrained: bool,
    dropout: float,
    drop_path: float,
    options: Mapping[str, Any],
) -> nn.Module:
    given: dict[str, Any] = {"num_classes": num_classes}
    given |= {"drop_rate": dropout} if dropout else {}
    given |= {"drop_path_rate": drop_path} if drop_path else {}
    given |= {"img_size": image_size} if timm.models.get_pretrained_cfg_value(name, "fixed_input_size") else {}
    given |= options
    if pretrained:
        _check_weights(name)
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained, **given)
    except OSError as error:
        raise InputError(
            f"model.pretrained=true: the weights of {name} cannot be had ({error}). Give a file with "
            "init_from=FILE, or train from scratch with model.pretrained=false"
        ) from error
    except MISFIT as error:
        weights = " with its pretrained weights" if pretrained else ""
        raise InputError(f"model.name={name}{weights} does not take {given}: {error}") from error
    return model


def _check_size(options: Mapping[str, Any], image_size: int) -> None:
    """A network made for one size would refuse the images of another at the first step."""
    own = options.get("img_size")
    if own is None or options.get("dynamic_img_size") or to_2tuple(own) == (image_size, image_size):
        return
    raise InputError(
        f"model.options.img_size={own} and data.transforms.size={image_size} differ: leave img_size out, which is "
        "taken from the data"
    )


def _check_weights(name: str) -> None:
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        raise InputError(f"model.pretrained=true: timm has no weights of {name}; set model.pretrained=false")


def _check_known(name: str) -> None:
    if timm.is_model(name):
        return
    near = timm.list_models(f"*{name.split('_')[0]}*")[:8]
    raise InputError(
        f"model.name={name}: timm {timm.__version__} has no such model. Near it are {', '.join(near) or 'none'}; "
        f"besides timm's there are {CIFAR_RESNET}20, 32, 44 and 56"
    )


def _cifar_resnet(name: str, num_classes: int, options: Mapping[str, Any], **foreign: float) -> nn.Module:
    """``foreign``: settings of ``model`` that it does not have."""
    depth = name.removeprefix(CIFAR_RESNET)
    if not (depth.isdecimal() and len(depth) <= 4):
        raise InputError(f"model.name={printable(name)}: give a depth of at most four digits, such as {CIFAR_RESNET}32")
    for setting, value in foreign.items():
        if value:
            off = "false" if value is True else "0"
            raise InputError(f"model.name={name} has no {setting}: set model.{setting}={off}")
    try:
        return cifar_resnet(int(depth), num_classes, **options)
    except TypeError as error:
        raise InputError(f"model.name={name} does not take {dict(options)}: {error}") from error


def with_resized_positions(network: nn.Module, weights: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Interpolate the positions of a vision transformer that was trained on images of another size, and say so.

    What is no square grid of positions of the same width is left as it is.
    """
    model, found = cast("Any", network), weights.get("pos_embed")
    own, grid = getattr(model, "pos_embed", None), getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if found is None or own is None or grid is None or found.shape == own.shape:
        return dict(weights)
    prefix = own.shape[1] - grid[0] * grid[1]  # class tokens with a position of their own
    side = math.isqrt(max(found.shape[1] - prefix, 0)) if found.dim() == own.dim() == 3 else 0
    if not side or side**2 + prefix != found.shape[1] or found.shape[-1] != own.shape[-1]:
        return dict(weights)
    logger.info("init_from %s: its pos_embed of %d x %d patches is interpolated to %d x %d", source, side, side, *grid)
    resized = resample_abs_pos_embed(found, list(grid), [side, side], num_prefix_tokens=prefix)
    return {**weights, "pos_embed": resized}


def read_network_weights(path: Path) -> dict[str, Tensor]:
    """Weights of a run or file for a timm network; of a masked autoencoder those of its encoder."""
    weights = interop.read_state(checkpoint_of(path))
    if any(name.startswith(ENCODER) for name in weights):
        return {name.removeprefix(ENCODER): value for name, value in weights.items() if name.startswith(ENCODER)}
    return weights
