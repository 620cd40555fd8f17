"""Weights in checkpoints, of this package and of other training scripts, under the names in the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.files import check_weights, is_folder, read_safetensors, read_torch
from detr_bf.common.low_rank import merged

BEST, LAST = "best.pt", "last.pt"  # checkpoints in the folder of a run
PLUGINS, ENCODER = "plugins", "encoder."  # in names: part of those of plug-ins, prefix of pre-trained encoders
# Entries of a checkpoint that hold weights, averaged weights first
WRAPPERS = ("ema.module", "ema", "model", "state_dict", "state_dict.model", "model.state_dict")

T = TypeVar("T")


def checkpoint_of(path: str | Path) -> Path:
    """Return the best checkpoint of a run folder, or its last; return a file unchanged."""
    path = Path(path)
    if not is_folder(path):
        return path
    return path / BEST if (path / BEST).exists() else path / LAST


def read_state(path: Path) -> dict[str, Tensor]:
    """Read weights under the names in the file, see :func:`state_in`.

    Raises:
        InputError: the file is missing, damaged or holds no weights.
    """
    return state_in(read_content(path), path)


def read_content(path: Path) -> Any:
    """Read the whole content of a file without executing code from it (InputError: the file is missing or damaged)."""
    return read_safetensors(path) if path.suffix == ".safetensors" else read_torch(path)


def state_in(content: Any, path: Path) -> dict[str, Tensor]:
    """Return the state dict in a checkpoint, or the content itself.

    Averaged weights are preferred, unless the checkpoint is one of ours whose other weights were evaluated as better.
    Low-rank changes in ours are merged into them.

    Raises:
        InputError: no state dict, or values that cannot be weights.
    """
    names = ("model",) if _entry(content, "training.progress.raw_is_better") else WRAPPERS
    for state in (*(_entry(content, name) for name in names), content):
        if isinstance(state, Mapping) and state and all(isinstance(tensor, Tensor) for tensor in state.values()):
            break
    else:
        raise InputError(f"{path} holds no weights: expected a dict of tensors, or one in ema, model or state_dict")
    check_weights(state, str(path), finite=False)
    return merged(without_wrapper(state))


def _entry(content: Any, name: str) -> Any:
    """Return an entry of nested mappings, its keys joined by dots; None if there is none."""
    for key in name.split("."):
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def without_wrapper(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefix ``module.`` of torch's data-parallel wrappers, if all names have it."""
    prefix = "module."
    wrapped = bool(state) and all(name.startswith(prefix) for name in state)
    return {name.removeprefix(prefix) if wrapped else name: tensor for name, tensor in state.items()}


def without_plugins(state: Mapping[str, T]) -> dict[str, T]:
    """Remove the tensors of plug-ins from a state dict, for deployment."""
    return {key: value for key, value in state.items() if PLUGINS not in key.split(".")}


def network_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a network for images; of pre-training only the encoder's."""
    if any(name.startswith(ENCODER) for name in weights):
        return {name.removeprefix(ENCODER): value for name, value in weights.items() if name.startswith(ENCODER)}
    return dict(weights)
