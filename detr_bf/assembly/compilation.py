"""Memory format and ``torch.compile`` of a model."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import nn

from detr_bf.common.devices import device_of
from detr_bf.common.errors import InputError
from detr_bf.config import RunConfig
from detr_bf.detectors import Detector
from detr_bf.transformer import Decoder, Encoder

# Compiled versions of one kind of layer: training and evaluation, kinds of queries, batches of one image.
RECOMPILE_LIMIT = 64


def compile_model(model: nn.Module, config: RunConfig) -> None:
    """Apply ``train.channels_last`` and ``train.compile`` to a new model (in-place).

    Names, values and shapes of parameters stay the same, and so do checkpoints. Compilation takes place at the first
    call. Of a detector, the backbone and each encoder and decoder layer are compiled, for images of any size; batch
    attention and mask head are not. Other models are compiled as a whole. A copy of the model is not compiled. Compiled
    layers draw other random numbers for dropout than eager ones, from the same generator.

    Raises:
        InputError: a requirement of ``torch.compile`` on the device is missing.
    """
    detector = isinstance(model, Detector)
    if config.train.channels_last:
        (model.backbone if isinstance(model, Detector) else model).to(memory_format=torch.channels_last)
    if config.train.compile:
        _check_compiler(device_of(config.device))
        # At the default limit of 8 torch warns once and runs the layer without its compiler.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
        for module in _compiled_parts(model):
            module.compile(dynamic=detector or None)


def _compiled_parts(model: nn.Module) -> Iterator[nn.Module]:
    if not isinstance(model, Detector):
        yield model
        return
    yield model.backbone
    for module in model.modules():
        if isinstance(module, (Encoder, Decoder)):
            yield from module.layers


def _check_compiler(device: torch.device) -> None:
    """Raise a short InputError before the first step; torch's own error has a hundred lines."""
    advice = "or set train.compile=false"
    if device.type == "cuda":
        if find_spec("triton") is None:
            raise InputError(f"train.compile=true needs the package triton on a GPU: pip install triton, {advice}")
        return
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # as torch chooses
    if shutil.which(compiler.split()[0]) is None:
        raise InputError(
            f"train.compile=true needs a C++ compiler on a CPU, and {compiler} is not found: install it, set CXX to "
            f"another, {advice}"
        )
