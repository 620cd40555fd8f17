from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from detr_bf.classification.debian import Package, unpacked
from detr_bf.common.errors import InputError


def test_file_name_is_the_one_apt_writes() -> None:
    assert Package("a", "1:2-3", "").file_name == "a_1%3a2-3_all.deb"


def test_another_hash_is_refused_and_both_are_named(tmp_path: Path) -> None:
    package = Package("a", "1", "0" * 64)
    (tmp_path / package.file_name).write_bytes(b"not the package")
    with pytest.raises(InputError) as caught:
        unpacked(package, tmp_path)
    assert hashlib.sha256(b"not the package").hexdigest() in str(caught.value)
    assert "0" * 64 in str(caught.value)


def test_missing_apt_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="there is no apt-get here"):
        unpacked(Package("a", "1", "0" * 64), tmp_path / "cache")


def test_a_failed_download_says_what_apt_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "apt-get").write_text("#!/bin/sh\necho 'E: Unable to locate package a' >&2\nexit 100\n")
    (tools / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/bin:/usr/bin")
    with pytest.raises(InputError, match=r"cannot download a=1 .*Unable to locate package a"):
        unpacked(Package("a", "1", "0" * 64), tmp_path / "cache")


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_a_cached_package_is_unpacked_once_without_apt(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(
        "Package: a\nVersion: 1\nArchitecture: all\nMaintainer: t <t@t>\nDescription: t\n"
    )
    (tree / "usr").mkdir()
    (tree / "usr/file").write_text("content")
    cache = tmp_path / "cache"
    cache.mkdir()
    archive = cache / "a_1_all.deb"
    subprocess.run(["dpkg-deb", "-b", str(tree), str(archive)], check=True, capture_output=True)
    package = Package("a", "1", hashlib.sha256(archive.read_bytes()).hexdigest())
    assert (unpacked(package, cache) / "usr/file").read_text() == "content"
    archive.unlink()
    assert (unpacked(package, cache) / "usr/file").read_text() == "content"
