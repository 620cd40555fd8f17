"""What changes the speed of a model, and nothing it computes but for rounding and the random numbers of dropout."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import nn

from detr_bf.assembly.model import device_of
from detr_bf.config import RunConfig
from detr_bf.detectors import Detector
from detr_bf.errors import InputError
from detr_bf.transformer import Decoder, Encoder

# Versions of one kind of layer: training and evaluation, kinds of queries, and batches of one image, each its own.
MOST_VERSIONS = 64


def accelerate(model: nn.Module, config: RunConfig) -> None:
    """Do with a new model what ``train.channels_last`` and ``train.compile`` ask for, in place.

    Names, values and shapes of parameters stay, so that checkpoints do not know of it. Compilation is at the first
    call: of a detector the backbone and each encoder and decoder layer, for images of any size, while batch attention
    and mask head stay as they are; other models are compiled whole. A copy of the model is not compiled. Compiled
    layers draw other random numbers for dropout than plain ones, from the same generator.

    Raises:
        InputError: what ``torch.compile`` needs on the device is missing.
    """
    detector = isinstance(model, Detector)
    if config.train.channels_last:
        (model.backbone if isinstance(model, Detector) else model).to(memory_format=torch.channels_last)
    if config.train.compile:
        _check_compiler(device_of(config))
        # torch gives up at 8, says so once, and goes on without its compiler
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VERSIONS)
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
    """torch would tell of it in the first step, in a hundred lines."""
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
