"""Files: written whole or not at all, read without executing anything."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from detr_bf.errors import InputError

UNFINISHED = ".detr_bf-unfinished-"  # temporary files begin with this, and no other files are ever removed as such
_STEM = 40  # characters of a file's name that its temporary name repeats; names are limited to 255 bytes
MAX_JSON_BYTES = 2**33  # of an annotation file; the largest that are published have about 2**31


@contextmanager
def atomic_write(path: str | Path, previous: Path | None = None) -> Iterator[Path]:
    """Give a temporary path beside ``path``; on success it is flushed to disk and moved over ``path``.

    What stood there before becomes ``previous`` if that is given: at every moment one of the two is whole. When the
    body raises, ``path`` is left as it was and the temporary file is removed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{UNFINISHED}{path.stem[:_STEM]}.", suffix=path.suffix)
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
    """Remove the temporary files of :func:`atomic_write` that killed processes have left in a folder.

    No process may be writing to the folder. Folders and links of such a name are left alone.
    """
    for path in folder.glob(f"{UNFINISHED}*"):
        if path.is_file() and not path.is_symlink():
            path.unlink(missing_ok=True)


def cache_folder(name: str) -> Path:
    """The folder ``name`` for what can be made again: below $DETR_BF_CACHE, by default ``~/.cache/detr_bf``."""
    return Path(os.environ.get("DETR_BF_CACHE") or Path.home() / ".cache" / "detr_bf").expanduser() / name


_MAX_STEP = 2**53  # of a run; larger ones are garbage


def read_records(path: Path) -> list[tuple[str, dict[str, Any] | None]]:
    """Return the lines of a run's ``metrics.jsonl`` and their records, in order; none of a file that is missing.

    A record is a JSON object with ``kind``, ``train`` or ``val``, and ``step``, an integer from 0. A line that holds
    none comes with None, such as one that a killed run left unfinished.

    Raises:
        InputError: the path is not that of a file that can be read.
    """
    if not path.exists():
        return []
    if not path.is_file():
        raise InputError(f"{path} must be a file of one JSON object a line; it is something else: move it away")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}): give the right to read it") from error
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    return [(line.decode("utf-8", errors="replace").rstrip("\r"), _record(line)) for line in lines]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):  # no UTF-8, no JSON, a number of thousands of digits, or nested too deeply
        return None
    if not isinstance(record, dict) or record.get("kind") not in ("train", "val"):
        return None
    step = record.get("step")
    return record if type(step) is int and 0 <= step < _MAX_STEP else None


def write_text(path: str | Path, text: str) -> None:
    """Atomically write UTF-8 text."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # lone surrogates are not UTF-8


def write_json(path: str | Path, value: Any) -> None:
    """Atomically write ``value`` as JSON; non-finite numbers are refused because they are not JSON."""
    write_text(path, json.dumps(value, allow_nan=False, indent=None) + "\n")


def read_regular(path: str | Path, limit: int) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes; nothing else is read, or waited for.

    Raises:
        FileNotFoundError: there is no file of that name.
        ValueError: it is a folder, a FIFO, a socket or a device, it is larger, it may not be read, or there can be no
            such name; the message does not name the file.
    """
    try:
        if b"\0" in os.fsencode(path):
            raise ValueError("no file name can hold a NUL character")
        _require_regular(Path(path).stat(), limit)  # before opening, for that alone moves a device
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _require_regular(os.fstat(file.fileno()), limit)
            return file.read()
    except FileNotFoundError:
        raise
    except UnicodeEncodeError as error:
        raise ValueError("no file name can hold a lone surrogate") from error
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror or error}") from error


_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def _require_regular(status: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"it is {_KINDS.get(stat.S_IFMT(status.st_mode), 'a device')}, expected a regular file")
    if status.st_size > limit:
        raise ValueError(f"it has {status.st_size:,} bytes, more than the limit of {limit:,}")


def file_size(path: str | Path) -> int:
    """Return the bytes of a regular file, 0 for anything else, which :func:`read_regular` refuses."""
    with suppress(OSError, ValueError):
        status = Path(path).stat()
        return status.st_size if stat.S_ISREG(status.st_mode) else 0
    return 0


def is_file(path: Path) -> bool:
    """Return whether there is a regular file; there is none of a name that is too long or may not be looked at."""
    with suppress(OSError):
        return path.is_file()
    return False


def is_folder(path: Path) -> bool:
    """Return whether there is a folder; see :func:`is_file`."""
    with suppress(OSError):
        return path.is_dir()
    return False


def read_json(path: str | Path, limit: int = MAX_JSON_BYTES) -> Any:
    """Return the value in a JSON file of at most ``limit`` bytes.

    Raises:
        FileNotFoundError: there is no file of that name.
        ValueError: it cannot be read (:func:`read_regular`), is not JSON, or is nested too deeply.
    """
    data = read_regular(path, limit)
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_torch(path: str | Path) -> Any:
    """What ``torch.save`` wrote, on the CPU, if it holds tensors and plain values only, or command lines of them.

    The checkpoints of DETR and its successors hold their ``argparse.Namespace``, which executes nothing.

    Raises:
        InputError: the file is missing, damaged, or holds objects whose loading could execute code.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"file not found: {path}")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} was refused: it is damaged, or it holds more than tensors and plain values, and loading that "
            "could execute code; nothing was executed. If you trust its origin, load it yourself and save its state "
            "dict alone"
        ) from error
    except Exception as error:  # the unpickler meets garbage with almost any of them
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{path} is truncated or damaged ({reason}): use another copy of it") from error


def read_whole(path: Path) -> Any:
    """As :func:`read_torch`, after :func:`check_sums`: for files of ours, which always have them."""
    check_sums(path)
    return read_torch(path)


def check_sums(path: Path) -> None:
    """Compare every part of a file of ``torch.save`` with the checksum it was written with.

    Raises:
        InputError: the file is missing, cut off, or a bit of it has changed.
    """
    if not path.is_file():
        raise InputError(f"file not found: {path}")
    try:
        with zipfile.ZipFile(path) as parts:
            folders = (part.filename for part in parts.infolist() if part.external_attr)  # to torch they are empty
            damaged = parts.testzip() or next(folders, None)
    except Exception as error:  # a file of garbage meets almost any of them
        raise InputError(f"{path} is truncated or damaged ({error}): use another copy of it") from error
    if damaged is not None:
        raise InputError(f"{path} is damaged: its part {damaged} is not what was written; use another copy of it")


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Raises:
        InputError: the file is missing or damaged.
    """
    if not Path(path).is_file():
        raise InputError(f"file not found: {path}")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a readable safetensors file ({error}); get the file again") from error
