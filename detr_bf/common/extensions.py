"""Registries of parts by name, and the user's files that add to them (docs/batch_attention.md, "A part of your own").

A file that a config names in ``plugins.files`` is Python code. It is executed only if the user names it: in a config
file or override of a command, in the environment variable ``DETR_BF_PLUGINS``, or with :func:`use_plugins`. Stored
configs hold its name and the SHA-256 of its content, ``mine.py@sha256:...``, and never name a file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from detr_bf.common.errors import InputError
from detr_bf.common.text import printable

logger = logging.getLogger(__name__)

T = TypeVar("T")
E = TypeVar("E")

VARIABLE = "DETR_BF_PLUGINS"  # files, separated as in PATH
_DIGEST = "@sha256:"
_LONGEST = 2**20  # bytes of a file


class UserFile(NamedTuple):
    """Python file that the user has named."""

    path: Path
    source: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.source).hexdigest()

    @property
    def stored(self) -> str:
        """Name and hash for a config."""
        return f"{self.path.name}{_DIGEST}{self.digest}"


class Registry(dict[str, T]):
    """Parts by the name that a config gives.

    Args:
        kind: of the parts, for messages: "batch mixer".
    """

    def __init__(self, kind: str, parts: dict[str, T]) -> None:
        super().__init__(parts)
        self.kind = kind
        self.files: dict[str, UserFile] = {}  # of the parts that :func:`extended` has added

    def register(self, name: str) -> Callable[[E], E]:
        """Return a decorator that enters a function or class (InputError: the name is taken)."""
        if not isinstance(name, str) or not name.isidentifier():
            raise InputError(f"the name of a {self.kind} must be an identifier, got {printable(repr(name))}")
        if name in self:
            raise InputError(f"there is a {self.kind} '{name}' already: choose another name")

        def enter(part: E) -> E:
            if _loading is None:
                self[name] = part  # type: ignore[assignment]
            else:
                _loading.append((self, name, part))
            return part

        return enter

    def find(self, name: str, setting: str) -> T:
        """Return the part that a setting names (InputError: there is none)."""
        if name not in self:
            known = ", ".join(sorted(self)) or "none"
            raise InputError(
                f"{setting} must be one of {known}; got '{printable(name)}'. A {self.kind} of your own is registered "
                "by a file that plugins.files=[FILE.py] names"
            )
        return self[name]


_loading: list[tuple[Registry[Any], str, Any]] | None = None  # what the file that is being executed has registered
_named: dict[str, dict[str, UserFile]] = {}  # files that the user has named, by file name and hash
_lock = RLock()


def use_plugins(*files: str | Path) -> list[str]:
    """Name Python files of your own, whose parts a model or a run may then use; return their stored names.

    Raises:
        InputError: a file is missing or is no Python file.
    """
    return [_name(Path(file).expanduser()).stored for file in files]


def _name(path: Path) -> UserFile:
    shown = printable(path)
    try:
        if path.suffix != ".py" or not path.is_file():
            raise InputError(
                f"plugins.files: {shown} is not a Python file (.py); a relative path starts at {printable(Path.cwd())}"
            )
        if path.stat().st_size > _LONGEST:
            raise InputError(f"plugins.files: {shown} has more than {_LONGEST:,} bytes")
        file = UserFile(path.absolute(), path.read_bytes())
    except OSError as error:
        raise InputError(f"plugins.files: {shown} cannot be read ({error.strerror or error})") from error
    known = _named.setdefault(path.name, {})
    known.pop(file.digest, None)  # the last one named counts if no hash fits
    known[file.digest] = file
    return file


def is_stored(entry: str) -> bool:
    """Return True for the name of a file with its hash, as stored configs have it."""
    return _DIGEST in entry


@contextmanager
def extended(files: Sequence[str | UserFile]) -> Iterator[None]:
    """Add the parts that the user's files register to the registries within the block.

    Args:
        files: values of ``plugins.files``, by which files that the user has named are found.

    Raises:
        InputError: a file is not named by the user, fails, registers nothing, or a name twice.
    """
    added: list[tuple[Registry[Any], str]] = []
    with _lock:
        try:
            found = [each if isinstance(each, UserFile) else _find(each) for each in files]
            executed = [(file, *entry) for file in found for entry in _parts(file)]
            for file, registry, name, part in executed:
                if name in registry:
                    raise InputError(f"plugins.files: two files register the {registry.kind} '{name}'")
                registry[name], registry.files[name] = part, file
                added.append((registry, name))
            yield
        finally:
            for registry, name in added:
                del registry[name], registry.files[name]


def _find(entry: str) -> UserFile:
    """Return the file named by the user that an entry of ``plugins.files`` means.

    Raises:
        InputError: the user has not named it.
    """
    use_plugins(*filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)))
    stored, _, digest = entry.partition(_DIGEST)
    name = Path(stored).name
    found = _named.get(name, {})
    if not found:
        content = f" with the SHA-256 {printable(digest)}" if digest else ""
        raise InputError(
            f"the file {printable(name)}{content} is needed, which holds parts of its author's own and is executed "
            f"only if you name it: set {VARIABLE}=DIR/{printable(name)} in the environment of the command, or call "
            f"detr_bf.use_plugins('DIR/{printable(name)}'). Commands that take settings also accept "
            f"plugins.files=[DIR/{printable(name)}]. Read a file that is not yours first: its code may do anything"
        )
    if digest in found:
        return found[digest]
    file = list(found.values())[-1]
    if digest:
        _warn_of_other_content(file, digest)
    return file


@cache
def _warn_of_other_content(file: UserFile, digest: str) -> None:
    logger.warning(
        "%s is not the file that was used in training: its SHA-256 is %s, that of training %s; results may differ",
        file.path,
        file.digest,
        printable(digest),
    )


@cache
def _parts(file: UserFile) -> tuple[tuple[Registry[Any], str, Any], ...]:
    """Execute a file and return what it registers (InputError: its code fails, or it registers nothing)."""
    global _loading
    shown, outer = printable(file.path), _loading
    module = ModuleType(f"detr_bf_plugin_{file.path.stem}_{file.digest[:16]}")
    module.__file__ = str(file.path)
    sys.modules[module.__name__] = module  # dataclasses and pickle look for it there
    found: list[tuple[Registry[Any], str, Any]] = []
    _loading = found
    try:
        exec(compile(file.source, str(file.path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == str(file.path)]
        line = error.lineno if isinstance(error, SyntaxError) else (lines or [None])[-1]
        where = f"{shown}, line {line}" if line else shown
        raise InputError(f"plugins.files: {where}: {type(error).__name__}: {printable(error)}") from error
    finally:
        _loading = outer
    if not found:
        raise InputError(
            f"plugins.files: {shown} registers nothing: put a decorator such as @BATCH_MIXERS.register('NAME') before "
            "its class or function (docs/batch_attention.md)"
        )
    return tuple(found)
