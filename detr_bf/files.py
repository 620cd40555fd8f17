"""Files: written whole or not at all, read without executing anything."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import stat
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from detr_bf.errors import InputError
from detr_bf.text import printable

_ZIP = b"PK\x03\x04"


@contextmanager
def atomic_write(path: str | Path, previous: Path | None = None) -> Iterator[Path]:
    """Give a temporary path beside ``path``; on success it is flushed to disk and moved over ``path``.

    What stood there before becomes ``previous`` if that is given: at every moment one of the two is whole. When the
    body raises, ``path`` is left as it was and the temporary file is removed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        if previous is not None and path.exists():
            path.replace(previous)
        temporary.replace(path)
        _flush_names(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _flush_names(folder: Path) -> None:
    """Make a renaming outlive a loss of power, on systems where folders can be opened."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files that killed processes have left in a folder that nobody writes to now."""
    for path in folder.glob(".*.*.*"):
        path.unlink(missing_ok=True)


def cache_folder(name: str) -> Path:
    """The folder ``name`` for what can be made again: below $DETR_BF_CACHE, by default ``~/.cache/detr_bf``."""
    return Path(os.environ.get("DETR_BF_CACHE") or Path.home() / ".cache" / "detr_bf").expanduser() / name


def write_text(path: str | Path, text: str) -> None:
    """Atomically write UTF-8 text."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Atomically write ``value`` as JSON; non-finite numbers are refused because they are not JSON."""
    write_text(path, json.dumps(value, allow_nan=False, indent=None) + "\n")


def read_torch(path: str | Path, *, own: bool = False) -> Any:
    """Return the content of a file of ``torch.save`` on the CPU: tensors and plain values, or command lines of them.

    The checkpoints of DETR and its successors hold their ``argparse.Namespace``, which executes nothing. The checksums
    of zip archives, which torch has written since 1.6, are compared; older files have none.

    Args:
        own: it is a file of ours, which is a zip archive in any case.

    Raises:
        InputError: the file is missing, damaged, or holds objects whose loading could execute code.
    """
    path = readable_file(path)
    try:
        with path.open("rb") as file:
            is_zip = file.read(len(_ZIP)) == _ZIP
        if is_zip or own:
            check_sums(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} was refused: it is damaged, or it holds more than tensors and plain values, and loading that "
            "could execute code; nothing was executed. If you trust its origin, load it yourself and save its state "
            "dict alone"
        ) from error
    except Exception as error:  # the unpickler meets garbage with almost any of them
        raise InputError(f"{path} is truncated or damaged ({_reason(error)}): use another copy of it") from error


def check_sums(path: Path) -> None:
    """Compare every part of a zip archive of ``torch.save`` with its CRC-32.

    Raises:
        InputError: the file is missing, cut off, no such archive, or a bit of it has changed.
    """
    path = readable_file(path)
    try:
        with zipfile.ZipFile(path) as parts:
            listed = parts.infolist()
            # torch takes an entry with attributes for a folder, and itself never compresses: a bomb would
            changed = [part.filename for part in listed if part.external_attr or part.compress_type]
            damaged = next(iter(changed), None) or parts.testzip()
    except Exception as error:  # a file of garbage meets almost any of them
        raise InputError(f"{path} is truncated or damaged ({_reason(error)}): use another copy of it") from error
    if damaged is not None:
        raise InputError(
            f"{path} is damaged: its part {printable(damaged)} is not what was written; use another copy of it"
        )


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file on the CPU; the format has no checksums.

    Raises:
        InputError: the file is missing or damaged.
    """
    path = readable_file(path)
    try:
        return load_file(path)
    except Exception as error:  # SafetensorError, OSError, and whatever torch says of a type it does not know
        raise InputError(f"{path}: not a readable safetensors file ({_reason(error)}); get the file again") from error


def readable_file(path: str | Path) -> Path:
    """Return the path of a regular file, which can be opened without waiting for another process.

    Raises:
        InputError: there is no such file, or it is a URL, a folder, a FIFO or a device.
    """
    path = Path(path)
    shown, mode = printable(path), _mode(path)
    if stat.S_ISREG(mode):
        return path
    if re.match(r"(https?|ftp|s3|hf|gs)://?", str(path)):
        raise InputError(f"{shown}: files are not fetched from a URL; download it and give the path of the file")
    if stat.S_ISDIR(mode):
        raise InputError(f"{shown} is a folder, expected a file")
    if mode:
        raise InputError(f"{shown} is a FIFO, a socket or a device, expected a regular file")
    raise InputError(f"file not found: {shown}")


def is_folder(path: str | Path) -> bool:
    """Return whether it is a folder; a name that is too long for the system is none."""
    return stat.S_ISDIR(_mode(Path(path)))


def _mode(path: Path) -> int:
    """Return the type and permissions of a file; 0 where there is none."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):  # the latter for a null byte in the name
        return 0


def check_weights(weights: Mapping[Any, Any], source: str, *, finite: bool = True) -> None:
    """Refuse tensors that no network can be filled with.

    Args:
        weights: names to tensors.
        source: the file, for messages.
        finite: also refuse NaN and infinity.

    Raises:
        InputError: a name is no text; or a value is no dense, real tensor with numbers and memory of its own for each;
            or it is not finite. The tensors are named.
    """
    strange = [f"{name} ({found})" for name, value in weights.items() if (found := _strange(name, value))]
    if strange:
        raise InputError(f"{source} holds what cannot be weights: {listed(strange)}. Expected names and dense tensors")
    broken = [name for name, value in weights.items() if finite and not _is_finite(value)]
    if broken:
        raise InputError(
            f"{source} holds NaN or infinite weights, so that every answer would be wrong, in {listed(broken)}. Use an "
            "earlier checkpoint, or train again"
        )


def listed(names: Sequence[str], limit: int = 8) -> str:
    """Return the first ``limit`` names, followed by the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(printable, names[:limit])) + more


def _strange(name: Any, value: Any) -> str | None:
    """Return the reason why it is not a weight, or None."""
    if not isinstance(name, str):
        return f"a name of type {type(name).__name__}"
    if not isinstance(value, Tensor):
        return f"a value of type {type(value).__name__}"
    if value.is_meta or value.is_nested:
        return "without numbers" if value.is_meta else "nested"
    if value.layout != torch.strided:
        return "sparse"
    if value.is_quantized or value.is_complex():
        return "quantized" if value.is_quantized else "complex"
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        return "overlapping memory"
    return None


def _is_finite(value: Tensor) -> bool:
    if not value.is_floating_point():
        return True
    return bool((value if value.element_size() > 1 else value.float()).isfinite().all())


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return printable(lines[0] if lines else type(error).__name__)
