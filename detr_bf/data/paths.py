"""Files that the paths of annotations mean on this machine.

Exported annotations have paths of another machine (``/home/ann/pets/images/a.jpg``, ``..\\..\\upload\\4\\a.png``), a
suffix in another case, or letters in another Unicode form (macOS separates accents from letters). A path that does not
exist means the file that has its longest end (``pets/images/a.jpg``, then ``images/a.jpg``, then ``a.jpg``). Only files
inside the given folder are found.
"""

from __future__ import annotations

import posixpath
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import PurePosixPath, PureWindowsPath
from urllib.parse import unquote

from detr_bf.common.errors import InputError
from detr_bf.common.text import printable

LEADING_OUT = re.compile(r"^(\.\./)*(\.\.$)?")


def path_key(path: str) -> str:
    """Return a path in one Unicode form, with its suffix in lower case: equal for the spellings of one file name."""
    stem, suffix = posixpath.splitext(path)
    return unicodedata.normalize("NFC", stem + suffix.lower())


def path_spellings(path: str) -> Iterator[str]:
    """Yield a path, and the common paths with the same :func:`path_key`."""
    spellings = [path]
    for form in ("NFC", "NFD"):
        stem, suffix = posixpath.splitext(unicodedata.normalize(form, path))
        spellings += [stem + suffix, stem + suffix.lower(), stem + suffix.upper()]
    yield from dict.fromkeys(spellings)


def path_ends(path: str) -> Iterator[str]:
    """Yield the ends of a path, the longest first, without folders that lead out.

    Backslashes separate folders as slashes do. An end with escapes of URLs (``%20``) is followed by the same without.
    """
    parts = [part for part in posixpath.normpath(path.replace("\\", "/")).split("/") if part not in ("", ".", "..")]
    for start in range(len(parts)):
        end = "/".join(parts[start:])
        yield end
        decoded = unquote(end).lstrip("/")
        if decoded != end and ".." not in decoded.split("/"):
            yield decoded


def longest_end(path: str, file_of: Callable[[str], str | None]) -> str | None:
    """Return the file of the longest end of a path for which ``file_of`` returns one, else None."""
    return next((name for end in path_ends(path) if (name := file_of(end)) is not None), None)


def leads_out(path: str) -> bool:
    """Return True for an absolute path and for one with ``..``, of this system or of Windows."""
    return any(kind(path).is_absolute() or ".." in kind(path).parts for kind in (PurePosixPath, PureWindowsPath))


class PathIndex:
    """Files of a folder, found by the paths of annotations.

    Args:
        names: of the files, relative to the folder, with forward slashes.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        spellings: dict[str, list[str]] = defaultdict(list)
        for name in self._names:
            spellings[path_key(name)].append(name)
        self._by_key = {key: found[0] for key, found in spellings.items() if len(found) == 1}

    def find(self, path: str, folders: Sequence[str] = ("",)) -> str | None:
        """Return the file that has a path relative to one of the folders, None without one.

        Leading ``..`` are dropped if they lead out of all folders, as those that Roboflow writes.
        """
        plain = path.replace("\\", "/")
        for form in dict.fromkeys((path, plain, unquote(plain), LEADING_OUT.sub("", plain))):
            if (name := self._below(folders, form)) is not None:
                return name
        return None

    def find_all(self, paths: Sequence[str], folders: Sequence[str] = ("",)) -> list[str | None]:
        """Return the files of all paths of a list, None for a path without file.

        If not one of the paths exists, they are those of another machine: each then means the file below one of
        the folders that has its longest end.

        Raises:
            InputError: two different paths of another machine would be the same file.
        """
        found = [self.find(path, folders) for path in paths]
        if any(name is not None for name in found):
            return found
        found = [longest_end(path, partial(self._below, folders)) for path in paths]
        given: dict[str, str] = {}
        for path, name in zip(paths, found, strict=True):
            if name is not None and given.setdefault(name, path) != path:
                raise InputError(
                    f"{printable(given[name])} and {printable(path)} would both be the file {printable(name)}: put the "
                    "files into the folders that these paths name, or correct the paths"
                )
        return found

    def _below(self, folders: Sequence[str], path: str) -> str | None:
        """Return the file that has the path relative to the first possible folder, None without one."""
        for name in (posixpath.normpath(posixpath.join(folder, path)) for folder in folders):
            if (file := name if name in self._names else self._by_key.get(path_key(name))) is not None:
                return file
        return None
