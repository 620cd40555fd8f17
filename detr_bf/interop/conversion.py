"""Parts of checkpoint conversion: checks of the target file, equal outputs, and writing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from detr_bf.common.errors import InputError
from detr_bf.common.files import check_output_file
from detr_bf.common.structures import Outputs
from detr_bf.interop.weights import write_weights

CHECKPOINT_SUFFIXES = (".pt", ".pth", ".bin")


def check_target(source: Path, target: Path) -> None:
    """Refuse a target that cannot be written or is the source itself."""
    check_output_file(target, "target")
    with suppress(FileNotFoundError):
        if target.samefile(source):
            raise InputError(f"{target} is the checkpoint that is read: name another file to write")


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn a failing write into an InputError.

    Torch raises RuntimeError for it, with a message about the position in the file.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"{target} cannot be written ({reason}): free some space, or name another file") from error


def save_weights(target: Path, weights: Mapping[str, Tensor]) -> None:
    """Write weights under their own names."""
    with writing(target):
        write_weights(target, weights)


@torch.inference_mode()
def same_outputs(one: nn.Module, other: nn.Module, images: Any) -> bool:
    """Return whether two models give the same bits in evaluation mode."""
    return all(torch.equal(a, b) for a, b in zip(_tensors(one, images), _tensors(other, images), strict=True))


def _tensors(model: nn.Module, images: Any) -> Iterator[Tensor]:
    outputs = model.eval()(images)
    if not isinstance(outputs, Outputs):
        yield outputs
        return
    yield from (outputs.logits, outputs.boxes)
    if outputs.proposals is not None:
        yield from (outputs.proposals.logits, outputs.proposals.boxes)
