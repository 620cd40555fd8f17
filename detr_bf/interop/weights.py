"""Weights in files, whoever wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from detr_bf.errors import InputError
from detr_bf.files import atomic_write, check_weights, read_safetensors, read_torch
from detr_bf.interop.formats import format_named, format_of, from_foreign, is_ours, to_foreign, without_wrapper

SUFFIXES = (".pth", ".pt", ".bin", ".safetensors")
WRAPPERS = ("ema", "model", "state_dict")  # entries of a checkpoint that hold weights, the best ones first


def read_weights(path: Path) -> dict[str, Tensor]:
    """Weights under our names: of a checkpoint of ours, averaged ones first, or of any foreign format.

    Raises:
        InputError: the file is missing, damaged, holds no weights, or weights of an unknown format.
    """
    return under_our_names(read_state(path), str(path))


def under_our_names(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """A state dict of ours as it is, or that of any foreign format under our names.

    Raises:
        InputError: it is of an unknown format.
    """
    if format_of(state) is None and is_ours(state):
        return dict(state)
    return from_foreign(state, source)


def read_state(path: Path) -> dict[str, Tensor]:
    """Weights under the names they have in the file; averaged ones first.

    Raises:
        InputError: the file is missing, damaged or holds no weights.
    """
    return state_in(read_content(path), path)


def read_content(path: Path) -> Any:
    """All that is in the file, read without executing anything.

    Raises:
        InputError: the file is missing or damaged.
    """
    return read_safetensors(path) if path.suffix == ".safetensors" else read_torch(path)


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


def state_in(content: Any, path: Path) -> dict[str, Tensor]:
    """The state dict in a checkpoint that was read from ``path``, averaged weights first, or the content itself.

    Raises:
        InputError: there is none, or it holds what cannot be weights.
    """
    entries = [content.get(name) for name in WRAPPERS] if isinstance(content, Mapping) else []
    state = next((entry for entry in (*entries, content) if _is_state(entry)), None)
    if state is None:
        raise InputError(f"{path} holds no weights: expected names and tensors, by themselves or under 'model'")
    check_weights(state, str(path), finite=False)
    return without_wrapper(state)


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(tensor, Tensor) for tensor in value.values())
