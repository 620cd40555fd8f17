"""Faster modules of a finished model, on a CPU; names, weights and state dicts stay as they are.

Each trick replaces a function of single modules, in their ``__dict__``: what a module is, and what it prints, stays.
While torch compiles or exports, every module computes what its class says. ``DETR_BF_ACCELERATION=off`` leaves out all
tricks of this package, those of memory and threads included. Modules and their replaced functions refer to each other:
the memory of a model is freed when Python's garbage collector runs (``gc.collect()``). Gains: benchmarks/README.md,
"Tricks for CPUs".
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from detr_bf.acceleration import ON, onednn
from detr_bf.acceleration.folding import AcceleratedConvolution, pairs, passed

M = TypeVar("M", bound=nn.Module)
REPLACED = ("forward", "_conv_forward")


def accelerate(model: M, network: nn.Module | None = None) -> M:
    """Let the modules of ``model`` use the tricks of this package, and return it; :func:`restore` undoes it.

    - A norm with fixed statistics is computed by the convolution before it, with scaled weights and a bias.
    - On a processor where oneDNN is faster, it computes linear layers, and convolutions without gradients.

    Args:
        model: is changed in-place. Its norms must not be replaced afterwards: the convolution would apply the former.
        network: part that accepts (B, C, H, W) images; its norms are found with a small image. Other norms are found
            in ``nn.Sequential``.
    """
    if not ON:
        return model
    norms = pairs(model, network)
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and (module in norms or onednn.FASTER):
            vars(module)["_conv_forward"] = AcceleratedConvolution(module, norms.get(module))
        elif onednn.FASTER and type(module).forward is nn.Linear.forward:
            vars(module)["forward"] = partial(_linear, module)
    for norm in norms.values():
        vars(norm)["forward"] = partial(passed, norm)
    return model


def restore(model: M) -> M:
    """Undo :func:`accelerate` in all modules of ``model`` (in-place), and return it."""
    for module in model.modules():
        for name in REPLACED:
            if isinstance(found := vars(module).get(name), AcceleratedConvolution) or (
                isinstance(found, partial) and found.func in (_linear, passed)
            ):
                delattr(module, name)
    return model


def _linear(module: Any, input: Tensor) -> Tensor:  # name of torch's argument
    return onednn.linear(input, module.weight, module.bias)
