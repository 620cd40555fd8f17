"""Networks of others, by name, and their weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from torch import Tensor, nn

from detr_bf import interop
from detr_bf.backbones.cifar_resnet import cifar_resnet
from detr_bf.engine import checkpoint_of
from detr_bf.errors import InputError

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
    """A model of timm, or ``cifar_resnet`` with its depth.

    Args:
        image_size: in pixels, for networks made for one size.
        options: further arguments of ``timm.create_model``.

    Raises:
        InputError: there is no such model, it does not take the options, or its weights cannot be had.
    """
    chosen = dict(options or {})
    if name.startswith(CIFAR_RESNET):
        return _cifar_resnet(name, num_classes, chosen)
    _check_known(name)
    given: dict[str, Any] = {"num_classes": num_classes}
    given |= {"drop_rate": dropout} if dropout else {}
    given |= {"drop_path_rate": drop_path} if drop_path else {}
    given |= {"img_size": image_size} if timm.models.get_pretrained_cfg_value(name, "fixed_input_size") else {}
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained, **given | chosen)
    except (TypeError, AssertionError, ValueError) as error:
        raise InputError(f"model.name={name} does not take {given | chosen}: {error}") from error
    except (RuntimeError, OSError) as error:
        raise InputError(
            f"model.pretrained=true: the weights of {name} cannot be had ({error}). Give a file with "
            "init_from=FILE, or train from scratch with model.pretrained=false"
        ) from error
    return model


def _check_known(name: str) -> None:
    if timm.is_model(name):
        return
    near = timm.list_models(f"*{name.split('_')[0]}*")[:8]
    raise InputError(
        f"model.name={name}: timm {timm.__version__} has no such model. Near it are {', '.join(near) or 'none'}; "
        f"besides timm's there are {CIFAR_RESNET}20, 32, 44 and 56"
    )


def _cifar_resnet(name: str, num_classes: int, options: Mapping[str, Any]) -> nn.Module:
    depth = name.removeprefix(CIFAR_RESNET)
    if not depth.isdecimal():
        raise InputError(f"model.name={name}: give a depth, such as {CIFAR_RESNET}32")
    try:
        return cifar_resnet(int(depth), num_classes, **options)
    except TypeError as error:
        raise InputError(f"model.name={name} does not take {dict(options)}: {error}") from error


def read_network_weights(path: Path) -> dict[str, Tensor]:
    """Weights of a run or file for a timm network; of a masked autoencoder those of its encoder."""
    weights = interop.read_state(checkpoint_of(path))
    if any(name.startswith(ENCODER) for name in weights):
        return {name.removeprefix(ENCODER): value for name, value in weights.items() if name.startswith(ENCODER)}
    return weights
