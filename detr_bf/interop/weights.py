"""Weights in files, whoever wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from detr_bf.errors import InputError
from detr_bf.files import atomic_write, read_safetensors, read_torch
from detr_bf.interop.formats import format_named, format_of, from_foreign, is_ours, to_foreign, without_wrapper

SUFFIXES = (".pth", ".pt", ".bin", ".safetensors")
WRAPPERS = ("ema", "model", "state_dict")  # entries of a checkpoint that hold weights, the best ones first


def read_weights(path: Path) -> dict[str, Tensor]:
    """Weights under our names: of a checkpoint of ours, averaged ones first, or of any foreign format.

    Raises:
        InputError: the file is missing, damaged, holds no weights, or weights of an unknown format.
    """
    state = read_state(path)
    if format_of(state) is None and is_ours(state):
        return state
    return from_foreign(state, str(path))


def read_state(path: Path) -> dict[str, Tensor]:
    """Weights under the names they have in the file; averaged ones first.

    Raises:
        InputError: the file is missing, damaged or holds no weights.
    """
    content = read_safetensors(path) if path.suffix == ".safetensors" else read_torch(path)
    return without_wrapper(_state_in(content, path))


def write_weights(path: Path, weights: Mapping[str, Tensor], format_name: str | None = None) -> None:
    """Write weights, given under our names, atomically; what they look like is said by the format and by the suffix.

    Args:
        path: ``.safetensors`` holds the weights alone; the others what torch saves, with the entries of the format.
        weights: under our names.
        format_name: None keeps our names.

    Raises:
        InputError: another suffix, no such format, the weights do not fit it, or the file cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: the name of a file of weights must end in one of {', '.join(SUFFIXES)}")
    named = to_foreign(weights, format_name) if format_name else weights
    wrapper = format_named(format_name).wrapper if format_name else None
    # one memory each: safetensors refuses tensors that share it, and torch would write all of what a part is cut from
    state = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in named.items()}
    with atomic_write(path) as temporary:
        if path.suffix == ".safetensors":
            save_file(state, temporary, metadata={"format": "pt"})
        else:
            torch.save({wrapper: state} if wrapper else state, temporary)


def _state_in(content: Any, path: Path) -> Mapping[str, Tensor]:
    """The state dict in a checkpoint, or the content itself."""
    entries = [content.get(name) for name in WRAPPERS] if isinstance(content, Mapping) else []
    state = next((entry for entry in (*entries, content) if _is_state(entry)), None)
    if state is None:
        raise InputError(f"{path} holds no weights: expected names and tensors, by themselves or under 'model'")
    return state


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(tensor, Tensor) for tensor in value.values())
