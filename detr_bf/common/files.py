"""Atomic writing of files, and reading that never executes code or waits for another process."""

from __future__ import annotations

import argparse
import errno
import hashlib
import io
import json
import os
import pickle
import re
import stat
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detr_bf.common.errors import InputError
from detr_bf.common.text import listed, printable

if TYPE_CHECKING:  # torch is imported where it is used, because the command line reads its arguments without it
    from torch import Tensor, nn

_ZIP = b"PK\x03\x04"
_SMALL_ARCHIVE, _MOST_COMPRESSED = 2**26, 20  # bytes, and times: an archive that expands to more is refused

UNFINISHED = ".detr_bf-unfinished-"  # prefix of temporary files; only files with it are removed
_STEM = 40  # characters of the file name in the temporary name, which is limited to 255 bytes
# files of a run folder that its report reads or writes
CONFIG_FILE = "config.yaml"
MACHINE_FILE = "machine.json"
CHOSEN_SETTINGS = "chosen for its steps"  # a key of machine.json: numbers for auto, as on the command line
METRICS_FILE = "metrics.jsonl"
MARKER_FILE = "detr_bf-run.json"
EVALUATION_FILE = "evaluation.json"
ERRORS_FILE = "errors.json"
DATA_FILE = "data_statistics.json"
REPORT_FILE = "report.html"
SHEET_FILE = "pictures/validation.png"
PANOPTIC_SHEET_FILE = "pictures/panoptic.png"
WORST_FILE, SUSPECTS_FILE = "pictures/worst.jpg", "pictures/suspects.jpg"
WORST_MAPS_FILE = "pictures/worst_panoptic.jpg"
MAX_JSON_BYTES = 2**33  # limit of an annotation file; the largest published ones have about 2**31


@contextmanager
def atomic_write(path: str | Path, previous: Path | None = None) -> Iterator[Path]:
    """Context manager with a temporary path next to ``path``; on success it is flushed to disk and replaces ``path``.

    If given, ``previous`` gets the replaced file: one of the two is complete at any time. If the body raises, ``path``
    is not changed and the temporary file is removed.

    Raises:
        InputError: ``path`` is a folder, a FIFO, a socket or a device, which a file would replace.
        OSError: it cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if (mode := _mode(path)) and not stat.S_ISREG(mode):
        raise InputError(f"{printable(path)} is {_kind(mode)}: give the name of a file, new or to be replaced")
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
        with suppress(OSError):  # flush the folder, too, where it can be opened: the new name survives a power loss
            handle = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    finally:
        temporary.unlink(missing_ok=True)


def check_output_file(path: str | Path, option: str) -> None:
    """Check before a long computation that the user's output file can be written; leaves nothing behind.

    Args:
        option: its command-line option, such as ``--json``, for messages.

    Raises:
        InputError: the name is not valid, its folder cannot be made or written, or the path is not a regular file.
    """
    output_path(path, option)
    path = Path(path)
    mode, shown = _mode(path), f"{option} {printable(path)}"
    if stat.S_ISDIR(mode):
        raise InputError(f"{shown} is a folder: name the file to write")
    if mode and not stat.S_ISREG(mode):
        raise InputError(f"{shown} is {_kind(mode)} and would be replaced: name another file to write")
    try:
        remove_empty(_made(path.parent))
    except (OSError, ValueError) as error:
        raise _unwritable(path, option, error) from error


def check_output_folder(path: str | Path, option: str) -> None:
    """Check that the user's output folder can be written, as :func:`make_output_folder`; leaves nothing behind."""
    remove_empty(make_output_folder(path, option))


def make_output_folder(path: str | Path, option: str) -> list[Path]:
    """Make the user's output folder and check that files can be written there.

    Args:
        option: its command-line option, such as ``--output``, for messages.

    Returns:
        The new folders, innermost first, for :func:`remove_empty`.

    Raises:
        InputError: the name is not valid, it is a file, or no file can be written there. No new folder is left.
    """
    try:
        return _made(Path(path))
    except (OSError, ValueError) as error:
        raise _unwritable(path, option, error) from error


def output_path(path: str | Path, option: str) -> Path:
    """Return the absolute path of the user's output, with links resolved; it may be missing.

    Raises:
        InputError: the name is not valid, or the path cannot be accessed.
    """
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            Path(path).stat()
        return Path(path).resolve()
    except (OSError, ValueError) as error:
        raise _unwritable(path, option, error) from error


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove the empty folders of a list, innermost first."""
    for folder in folders:
        with suppress(OSError, ValueError):
            folder.rmdir()


def _made(folder: Path) -> list[Path]:
    missing: list[Path] = []
    try:
        if (mode := _mode(folder)) and not stat.S_ISDIR(mode):
            raise NotADirectoryError(errno.ENOTDIR, f"{printable(folder)} is {_kind(mode)}, not a folder")
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return missing
    except (OSError, ValueError):
        remove_empty(missing)
        raise


def _unwritable(path: str | Path, option: str, error: Exception) -> InputError:
    reason = printable((error.strerror if isinstance(error, OSError) else None) or error)
    return InputError(f"{option} {printable(path)} cannot be written ({reason}): choose another path")


def remove_unfinished(folder: Path, stem: str = "") -> None:
    """Remove temporary files of :func:`atomic_write` that killed processes left in a folder.

    No process may be writing to the folder, or with ``stem`` to files whose names begin with it. Folders and links with
    such a name are kept.
    """
    for path in folder.glob(f"{UNFINISHED}{stem}*"):
        if path.is_file() and not path.is_symlink():
            path.unlink(missing_ok=True)


def cache_folder(name: str) -> Path:
    """Return the cache folder ``name`` below $DETR_BF_HOME, by default ``~/.cache/detr_bf``."""
    return Path(os.environ.get("DETR_BF_HOME") or Path.home() / ".cache" / "detr_bf").expanduser() / name


_MAX_STEP = 2**53  # of a run; larger ones are not valid


def read_records(path: Path) -> list[tuple[str, dict[str, Any] | None]]:
    """Return the lines of a run's ``metrics.jsonl`` with their records, in order; empty if the file is missing.

    A record is a JSON object with ``kind``, ``train`` or ``val``, and ``step``, an integer from 0. A line without a
    valid record, such as the last line of a killed run, is returned with None.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        content = read_regular(path, MAX_JSON_BYTES)
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise InputError(f"{printable(path)} cannot be used: {error} of one JSON object a line") from error
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    return [(line.decode("utf-8", errors="replace").rstrip("\r"), _record(line)) for line in lines]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):  # not UTF-8, not JSON, a number of thousands of digits, or nested too deeply
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
    """Atomically write ``value`` as JSON; ValueError for non-finite numbers, which are not JSON."""
    write_text(path, json.dumps(value, allow_nan=False, indent=None) + "\n")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def read_regular(path: str | Path, limit: int) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes; never waits for another process.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder, a FIFO, a socket or a device, it is too large, it cannot be read, or its name is not
            valid; the message does not name the file.
    """
    try:
        if b"\0" in os.fsencode(path):
            raise ValueError("no file name can hold a NUL character")
        _require_regular(Path(path).stat(), limit)  # before opening, which may have an effect on a device
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _require_regular(os.fstat(file.fileno()), limit)
            return file.read()
    except FileNotFoundError:
        raise
    except UnicodeEncodeError as error:
        raise ValueError("no file name can hold a lone surrogate") from error
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror or error}") from error


_KINDS = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "a device")


def _require_regular(status: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"it is {_kind(status.st_mode)}, expected a regular file")
    if status.st_size > limit:
        raise ValueError(f"it has {status.st_size:,} bytes, more than the limit of {limit:,}")


def file_size(path: str | Path) -> int:
    """Return the size of a regular file in bytes, 0 for anything else."""
    with suppress(OSError, ValueError):
        status = Path(path).stat()
        return status.st_size if stat.S_ISREG(status.st_mode) else 0
    return 0


def is_file(path: Path) -> bool:
    """Return True for a regular file; False if the name is too long or cannot be accessed."""
    return stat.S_ISREG(_mode(path))


def read_json(path: str | Path, limit: int = MAX_JSON_BYTES) -> Any:
    """Return the value in a JSON file of at most ``limit`` bytes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read (:func:`read_regular`), is not JSON, or is nested too deeply.
    """
    data = read_regular(path, limit)
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of at most 128 MiB; empty if the file is missing, damaged or holds no object."""
    try:
        content = read_json(path, limit=2**27)
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def is_number(value: object, lowest: float = -sys.float_info.max, highest: float = sys.float_info.max) -> bool:
    """Return True for a number of a file (not a bool, not NaN) between the bounds, by default a finite one."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and lowest <= value <= highest


def read_torch(path: str | Path, *, own: bool = False) -> Any:
    """Return the content of a file of ``torch.save`` on the CPU: tensors and plain values.

    ``argparse.Namespace`` is allowed, because checkpoints of DETR and its successors have one. The checksums of zip
    archives (torch 1.6 and later) are compared; older files have none.

    Args:
        own: the file was written by this package and must be a zip archive.

    Raises:
        InputError: the file is missing, damaged, or holds objects that could execute code when loaded.
    """
    import torch

    path = readable_file(path)
    try:
        with path.open("rb") as file:
            is_zip = file.read(len(_ZIP)) == _ZIP
        source: Any = path
        if is_zip or own:
            check_sums(path)
            source = _as_torch_writes(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(source, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} was refused: it is damaged, or it holds more than tensors and plain values, and loading that "
            "could execute code; nothing was executed. If you trust its origin, load it yourself and save its state "
            "dict alone"
        ) from error
    except Exception as error:  # a damaged file can make the unpickler raise almost anything
        raise InputError(f"{path} is truncated or damaged ({_reason(error)}): use another copy of it") from error


def check_sums(path: Path) -> None:
    """Compare every part of a zip archive of ``torch.save`` with its CRC-32.

    Raises:
        InputError: the file is missing, truncated, not a zip archive, or damaged.
    """
    path = readable_file(path)
    try:
        with zipfile.ZipFile(path) as parts:
            size = sum(part.file_size for part in parts.infolist())
            if size > max(_SMALL_ARCHIVE, _MOST_COMPRESSED * path.stat().st_size):
                raise ValueError(f"its {path.stat().st_size:,} bytes expand to {size:,}")
            damaged = parts.testzip()
    except Exception as error:  # a damaged file can raise almost anything
        raise InputError(f"{path} is truncated or damaged ({_reason(error)}): use another copy of it") from error
    if damaged is not None:
        raise InputError(
            f"{path} is damaged: its part {printable(damaged)} is not what was written; use another copy of it"
        )


def _as_torch_writes(path: Path) -> Path | io.BytesIO:
    """Return the path, or the content of an archive that another program has packed again in the form of torch.

    torch never compresses, and takes entries with the attributes of files for folders.
    """
    with zipfile.ZipFile(path) as parts:
        listed = [part for part in parts.infolist() if not part.is_dir() and not part.filename.startswith("__MACOSX/")]
        if not any(part.external_attr or part.compress_type for part in listed):
            return path
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as stored:
            for part in listed:
                with stored.open(zipfile.ZipInfo(part.filename), "w", force_zip64=True) as target:
                    target.write(parts.read(part))
    return io.BytesIO(content.getvalue())


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file on the CPU; the format has no checksums.

    Raises:
        InputError: the file is missing or damaged.
    """
    from safetensors.torch import load_file

    path = readable_file(path)
    try:
        return load_file(path)
    except Exception as error:  # SafetensorError, OSError, and errors of torch for unknown types
        raise InputError(f"{path}: not a readable safetensors file ({_reason(error)}); get the file again") from error


def readable_file(path: str | Path) -> Path:
    """Return the path of a regular file.

    Raises:
        InputError: the file is missing, or the path is a URL, a folder, a FIFO or a device.
    """
    path = Path(path)
    shown, mode = printable(path), _mode(path)
    if stat.S_ISREG(mode):
        return path
    if re.match(r"(https?|ftp|s3|hf|gs)://?", str(path)):
        raise InputError(f"{shown}: files are not fetched from a URL; download it and give the path of the file")
    if mode:
        raise InputError(f"{shown} is {_kind(mode)}, expected a file")
    raise InputError(f"file not found: {shown}")


def is_folder(path: str | Path) -> bool:
    """Return True for a folder; False if the name is too long for the system."""
    return stat.S_ISDIR(_mode(Path(path)))


def _mode(path: Path) -> int:
    """Return the type and permissions of a file; 0 if there is none."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):  # the latter for a null byte in the name
        return 0


def check_weights(
    weights: Mapping[Any, Any], source: str, *, finite: bool = True, model: nn.Module | None = None
) -> None:
    """Check that tensors can be loaded as the weights of a network.

    Args:
        weights: names to tensors.
        source: the file, for messages.
        finite: also refuse NaN and infinity.
        model: also refuse integers and booleans for its floating-point tensors; None allows them.

    Raises:
        InputError: a name is not a string; a value is not finite or not a dense tensor of real numbers with its own
            memory; an integer tensor replaces a floating-point one. The message names the tensors.
    """
    strange = [f"{name} ({found})" for name, value in weights.items() if (found := _strange(name, value))]
    if strange:
        raise InputError(f"{source} holds what cannot be weights: {listed(strange)}. Expected names and dense tensors")
    floating = {name for name, value in (model.state_dict() if model else {}).items() if value.is_floating_point()}
    whole = [
        f"{name} ({str(value.dtype).removeprefix('torch.')})"
        for name, value in weights.items()
        if name in floating and not value.is_floating_point()
    ]
    if whole:
        raise InputError(
            f"{source}: expected floating-point weights, got {listed(whole)}. Use another copy of the file"
        )
    broken = [name for name, value in weights.items() if finite and not _is_finite(value)]
    if broken:
        raise InputError(
            f"{source} holds NaN or infinite weights, which give wrong results, in {listed(broken)}. Use an "
            "earlier checkpoint, or train again"
        )


def _strange(name: Any, value: Any) -> str | None:
    """Return the reason why the value is not a weight, or None."""
    import torch

    if not isinstance(name, str):
        return f"a name of type {type(name).__name__}"
    if not isinstance(value, torch.Tensor):
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
