"""Files of Debian packages: downloaded with apt-get, checked by hash, unpacked, not installed."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from detr_bf.common.errors import InputError


@dataclass(frozen=True)
class Package:
    """One version of an architecture-independent Debian package."""

    name: str
    version: str
    sha256: str  # of the .deb file

    @property
    def file_name(self) -> str:
        """File name that ``apt-get download`` writes."""
        return f"{self.name}_{self.version.replace(':', '%3a')}_all.deb"


def unpacked(package: Package, cache: Path) -> Path:
    """Return the folder with a package's files, ``usr/...``; downloaded and unpacked into ``cache`` the first time.

    Raises:
        InputError: a tool is missing, the package cannot be downloaded, or its hash differs.
    """
    folder = cache / f"{package.name}-{package.sha256[:12]}"
    if folder.is_dir():
        return folder
    archive = cache / package.file_name
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the cache folder {cache}: {error}; set DETR_BF_HOME to another") from error
    if not archive.is_file():
        _download(package, cache)
    verify(archive, package.sha256)
    partial = cache / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    _run(["dpkg-deb", "-x", archive.name, partial.name], cache, f"unpack {archive}")
    partial.rename(folder)
    return folder


def verify(archive: Path, sha256: str) -> None:
    """Raise ``InputError`` unless the file has this SHA-256."""
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != sha256:
        raise InputError(f"{archive} has SHA-256 {found}, expected {sha256}: delete the file and run again")


def _download(package: Package, cache: Path) -> None:
    pinned = f"{package.name}={package.version}"
    _run(
        ["apt-get", "download", pinned],
        cache,
        f"download {pinned} (Debian 12 has it: try `apt-get update` first, or put {package.file_name} into {cache})",
    )
    if not (cache / package.file_name).is_file():
        raise InputError(f"`apt-get download {pinned}` did not write {cache / package.file_name}")


def _run(command: list[str], folder: Path, purpose: str) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise InputError(
            f"cannot {purpose}: there is no {command[0]} here; Debian and its derivatives have it"
        ) from error
    except subprocess.CalledProcessError as error:
        raise InputError(f"cannot {purpose}: `{' '.join(command)}` said: {error.stderr.strip()}") from error
