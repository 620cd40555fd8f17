"""A pass through a network on tensors without numbers: what does not fit is told before the first step, in no time."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from timm.layers.patch_embed import PatchEmbed
from torch import Tensor, nn
from torch.func import functional_call

from detr_bf.errors import InputError

MISFIT = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def try_network(network: nn.Module, name: str, *, image_size: int, num_classes: int) -> None:
    """Two images through a network without plug-ins, in evaluation; it is left in training mode.

    Args:
        name: of the setting ``model.name``.
        image_size: in pixels, ``data.transforms.size``.
        num_classes: 0 for a network without a classifier, whose outputs may have any shape.

    Raises:
        InputError: it does not take RGB images of this size, or does not make ``num_classes`` logits of each.
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
            f"model.name={name} makes {shape} of two images, expected one row of {num_classes} logits each: take out "
            "of model.options what changes its classifier, such as global_pool or num_classes"
        )


def check_batch_norm(network: nn.Module, *, image_size: int, rows: int) -> None:
    """Batches of ``rows`` images, as one process sees them, must leave batch norm two values a channel in training.

    The network is left in training mode; its statistics stay as they are.

    Raises:
        InputError: a batch norm would see one value.
    """
    if rows != 1:  # none at all is the loader's business
        return
    network.train()
    getattr(network, "plugins", nn.Identity()).eval()  # they see no images of other processes in here
    try:
        with suppress(RuntimeError):  # what depends on numbers shows in training
            _hollow_outputs(network, rows, image_size)
    except ValueError as error:
        raise InputError(
            f"batch norm cannot learn from {rows} image of {image_size} x {image_size} pixels ({error}): give "
            "train.batch_size=2 or more, and at least two training images for each process"
        ) from error
    finally:
        network.train()


def _check_patches(network: nn.Module, image_size: int) -> None:
    """timm drops the pixels behind the last whole patch without a word."""
    embed = getattr(network, "patch_embed", None)
    if not isinstance(embed, PatchEmbed) or embed.dynamic_img_pad:
        return
    if any(image_size % side for side in embed.patch_size):
        height, width = embed.patch_size
        raise InputError(
            f"data.transforms.size={image_size} is no multiple of the model's patches of {height} x {width} pixels: "
            f"give {max(1, image_size // height) * height} for instance, or another model.options.patch_size"
        )


def _outputs(network: nn.Module, rows: int, image_size: int) -> Any:
    """Without numbers if they do not matter, else with them; None where there are none.

    Raises:
        InputError: the pass fails.
    """
    try:
        return _hollow_outputs(network, rows, image_size)
    except MISFIT as error:
        if next(network.parameters()).is_meta:
            if isinstance(error, NotImplementedError):  # it has no numbers, and needs them
                return None
            raise _misfit(image_size, error) from error
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            return network(torch.zeros(rows, 3, image_size, image_size))
    except MISFIT as error:
        raise _misfit(image_size, error) from error


def _hollow_outputs(network: nn.Module, rows: int, image_size: int) -> Any:
    """Of the network with its weights and buffers, which stay as they are, without numbers."""
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    hollow = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    with torch.no_grad(), torch.device("meta"), torch.random.fork_rng(devices=()):
        return functional_call(network, hollow, (torch.empty(rows, 3, image_size, image_size),))


def _misfit(image_size: int, error: Exception) -> InputError:
    return InputError(
        f"the model does not work on colour images of data.transforms.size={image_size} ({error}): change the size, or "
        "what model.options says of sizes and channels"
    )
