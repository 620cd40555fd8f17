"""timm and CIFAR classifiers by name, a dry run of each, and their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers.helpers import to_2tuple
from timm.layers.patch_embed import PatchEmbed
from torch import Tensor, nn
from torch.func import functional_call

from detr_bf.classification.cifar_resnet import cifar_resnet
from detr_bf.classification.experts import NARROW, ExpertResNet
from detr_bf.classification.variants import PLAIN, complete_variant, variant_layers
from detr_bf.common.errors import InputError, prefix_errors
from detr_bf.common.text import printable
from detr_bf.common.weights import checkpoint_of, network_of, read_state

CIFAR_RESNET = "cifar_resnet"
_MISFIT = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def build_network(
    name: str,
    *,
    num_classes: int,
    image_size: int,
    pretrained: bool = False,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    experts: int = 1,
    variant: str = PLAIN,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build a timm model, or ``cifar_resnet`` with its depth, and dry-run it on two images.

    Args:
        image_size: in pixels.
        experts: more than 1: :class:`ExpertResNet` of residual networks with narrower last stages.
        variant: changed ViT or DeiT of :mod:`detr_bf.classification.variants`.
        options: further arguments of ``timm.create_model``.

    Raises:
        InputError: there is no such model, it does not accept the settings or the images, or its weights cannot be
            loaded.
    """
    chosen = {**variant_layers(variant, name, pretrained), **(options or {})}
    if experts > 1:
        _reject_settings("model.experts", {"pretrained": pretrained, "dropout": dropout})
    build: Callable[[], nn.Module]
    if name.startswith(CIFAR_RESNET):
        absent = {"pretrained": pretrained, "dropout": dropout, "drop_path": drop_path}
        _reject_settings(f"model.name={name}", absent)
        chosen = {"narrow": True, **chosen} if experts > 1 else chosen
        build = partial(_cifar_resnet, name, num_classes, chosen)
    else:
        _check_timm(name, chosen, image_size)
        size = image_size if timm.models.get_pretrained_cfg_value(name, "fixed_input_size") else 0
        channels = NARROW if experts > 1 else ()
        optional = {"drop_rate": dropout, "drop_path_rate": drop_path, "img_size": size, "channels": channels}
        given = {"num_classes": num_classes, **{key: value for key, value in optional.items() if value}, **chosen}
        build = partial(_of_timm, name, pretrained, given)
    if experts > 1:
        with prefix_errors(f"model.experts={experts} needs a ResNet of timm or of CIFAR with these settings"):
            network: nn.Module = ExpertResNet([build() for _ in range(experts)], num_classes)
    else:
        network = build()
    complete_variant(network, variant)
    check_shapes(network, name, image_size=image_size, num_classes=num_classes)
    return network


def _of_timm(name: str, pretrained: bool, given: Mapping[str, Any]) -> nn.Module:
    if pretrained:
        config = timm.get_pretrained_cfg(name)
        if config is None or not config.has_weights:
            raise InputError(f"model.pretrained=true: timm has no weights of {name}; set model.pretrained=false")
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained, **given)
    except OSError as error:
        raise InputError(
            f"model.pretrained=true: the weights of {name} cannot be loaded ({error}). Give a file with "
            "init_from=FILE, or train from scratch with model.pretrained=false"
        ) from error
    except InputError:  # of a layer of model.variant
        raise
    except _MISFIT as error:
        weights = " with its pretrained weights" if pretrained else ""
        raise InputError(f"model.name={name}{weights} does not take {given}: {error}") from error
    return model


def _check_timm(name: str, options: Mapping[str, Any], image_size: int) -> None:
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.split('_')[0]}*")[:8]
        raise InputError(
            f"model.name={name}: timm {timm.__version__} has no such model. Similar names: "
            f"{', '.join(near) or 'none'}; there are also {CIFAR_RESNET}20, 32, 44 and 56"
        )
    given = options.get("img_size")
    if given is not None and not options.get("dynamic_img_size") and to_2tuple(given) != (image_size, image_size):
        raise InputError(
            f"model.options.img_size={given} and data.transforms.size={image_size} differ: remove img_size, which is "
            "taken from the data"
        )


def _reject_settings(network: str, settings: Mapping[str, float]) -> None:
    """Raise InputError if one of the settings of ``model`` that ``network`` does not have is on."""
    for setting, value in settings.items():
        if value:
            off = "false" if value is True else "0"
            raise InputError(f"{network} has no {setting}: set model.{setting}={off}")


def _cifar_resnet(name: str, num_classes: int, options: Mapping[str, Any]) -> nn.Module:
    depth = name.removeprefix(CIFAR_RESNET)
    if not (depth.isdecimal() and len(depth) <= 4):
        raise InputError(f"model.name={printable(name)}: give a depth of at most four digits, such as {CIFAR_RESNET}32")
    try:
        return cifar_resnet(int(depth), num_classes, **options)
    except TypeError as error:
        raise InputError(f"model.name={name} does not take {dict(options)}: {error}") from error


def check_shapes(network: nn.Module, name: str, *, image_size: int, num_classes: int) -> None:
    """Run two images through a network without plug-ins in evaluation mode, to find shape errors early.

    The network is left in training mode. ``image_size`` is in pixels. With ``num_classes`` 0, without a classifier, its
    outputs may have any shape.

    Raises:
        InputError: the network does not accept RGB images of this size, or does not return ``num_classes`` logits each.
    """
    _check_patches(network, image_size)
    network.eval()
    try:
        output = _outputs(network, 2, image_size)
    finally:
        network.train()
    shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if num_classes and output is not None and shape != (2, num_classes):
        raise InputError(
            f"model.name={name} returns {shape} for two images, expected one row of {num_classes} logits each: remove "
            "what changes the classifier from model.options, such as global_pool or num_classes"
        )


def check_batch_norm(network: nn.Module, *, image_size: int, rows: int) -> None:
    """Check that a training batch of ``rows`` images per rank gives batch norm two or more values per channel.

    The network is left in training mode; its statistics do not change.

    Raises:
        InputError: a batch norm would get a single value.
    """
    if rows != 1:  # the loader reports batches without images
        return
    network.train()
    getattr(network, "plugins", nn.Identity()).eval()  # they do not gather the images of other ranks here
    try:
        with suppress(RuntimeError):  # operators that need values are checked in training
            _meta_outputs(network, rows, image_size)
    except ValueError as error:
        raise InputError(
            f"batch norm cannot train on {rows} image of {image_size} x {image_size} pixels ({error}): give "
            "train.batch_size=2 or more, and at least two training images for each process"
        ) from error
    finally:
        network.train()


def _check_patches(network: nn.Module, image_size: int) -> None:
    """timm silently drops pixels beyond the last full patch."""
    embed = getattr(network, "patch_embed", None)
    if not isinstance(embed, PatchEmbed) or embed.dynamic_img_pad:
        return
    height, width = embed.patch_size
    if image_size % height or image_size % width:
        raise InputError(
            f"data.transforms.size={image_size} is not a multiple of the model's patches of {height} x {width} pixels: "
            f"give {max(1, image_size // height) * height} for instance, or another model.options.patch_size"
        )


def _outputs(network: nn.Module, rows: int, image_size: int) -> Any:
    """Return the outputs on meta tensors, or on zeros if an operator needs values; None if neither is possible.

    InputError if the forward pass fails.
    """
    try:
        return _meta_outputs(network, rows, image_size)
    except _MISFIT as error:
        if next(network.parameters()).is_meta:
            if isinstance(error, NotImplementedError):  # the network needs values and has none
                return None
            raise _misfit(image_size, error) from error
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            return network(torch.zeros(rows, 3, image_size, image_size))
    except _MISFIT as error:
        raise _misfit(image_size, error) from error


def _meta_outputs(network: nn.Module, rows: int, image_size: int) -> Any:
    """Run the network on meta copies of its weights and buffers, which stay unchanged."""
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    meta = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    with torch.no_grad(), torch.device("meta"), torch.random.fork_rng(devices=()):
        return functional_call(network, meta, (torch.empty(rows, 3, image_size, image_size),))


def _misfit(image_size: int, error: Exception) -> InputError:
    return InputError(
        f"the model does not work on colour images of data.transforms.size={image_size} ({error}): change the size, or "
        "the sizes and channels in model.options"
    )


def read_network_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights of a run or file for a timm network; of pre-training only the encoder's."""
    return network_of(read_state(checkpoint_of(path)))
