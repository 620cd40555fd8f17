"""Read and write weights in files of any known format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.files import atomic_write
from detr_bf.common.weights import read_state
from detr_bf.interop.classes import with_own_labels
from detr_bf.interop.formats import format_named, format_of, from_foreign, is_ours, to_foreign

SUFFIXES = (".pth", ".pt", ".bin", ".safetensors")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read weights under our names from our or a foreign checkpoint, see :func:`state_in`.

    Raises:
        InputError: the file is missing or damaged, or holds no weights or an unknown format.
    """
    return under_our_names(read_state(path), str(path))


def under_our_names(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Return a state dict under our names; ``source`` is named in errors (InputError: unknown format)."""
    if format_of(state) is None and is_ours(state):
        return dict(state)
    return with_own_labels(from_foreign(state, source), source)


def write_weights(path: Path, weights: Mapping[str, Tensor], format_name: str | None = None) -> None:
    """Write weights atomically in a foreign format.

    Args:
        path: ``.safetensors`` holds only weights; other suffixes mean torch.save, with the format's wrapper.
        format_name: None keeps our names.
        weights: state dict under our names.

    Raises:
        InputError: unknown suffix or format, weights that do not fit the format, or the file cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: the name of a file of weights must end in one of {', '.join(SUFFIXES)}")
    named = to_foreign(weights, format_name) if format_name else weights
    wrapper = format_named(format_name).wrapper if format_name else None
    # clones share no memory: safetensors rejects shared memory, and torch would write the whole storage of a view
    state = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in named.items()}
    with atomic_write(path) as temporary:
        if path.suffix == ".safetensors":
            save_file(state, temporary, metadata={"format": "pt"})
        else:
            content: Mapping[str, Any] = state
            for key in reversed(wrapper.split(".") if wrapper else []):
                content = {key: content}
            torch.save(content, temporary)
