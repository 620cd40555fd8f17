"""Downloads from a server on this machine: broken, wrong, resumed, redirected, by several processes at once."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import multiprocessing
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from detr_bf.common.errors import InputError
from detr_bf.interop import downloads
from detr_bf.interop.downloads import download_file
from tests.server import WebServer, web_server

DATA = random.Random(0).randbytes(700_000)
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setattr(downloads, "WAIT", 0.0)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with web_server() as served:
        served.files["/w.pth"] = DATA
        yield served


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_a_file_is_downloaded_once(server: WebServer, tmp_path: Path) -> None:
    target = tmp_path / "new" / "w.pth"
    for _ in range(2):
        assert download_file(f"{server.url}/w.pth", target, sha256=SHA256[:8]) == target
    assert target.read_bytes() == DATA
    assert left(target.parent) == ["w.pth"]
    assert len(server.requests) == 1


def test_a_connection_that_breaks_is_resumed(server: WebServer, tmp_path: Path) -> None:
    server.cuts["/w.pth"] = [300_000, 500_000, 600_000, 650_000]
    download_file(f"{server.url}/w.pth", tmp_path / "w.pth", sha256=SHA256)
    assert (tmp_path / "w.pth").read_bytes() == DATA
    assert server.paths("/w.pth") == ["", "bytes=300000-", "bytes=500000-", "bytes=600000-", "bytes=650000-"]


def test_the_next_call_resumes_what_the_last_one_left(server: WebServer, tmp_path: Path) -> None:
    server.cuts["/w.pth"] = [400_000]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(downloads, "DOWNLOAD_ATTEMPTS", 1)
        with pytest.raises(InputError, match=r"400,000 of 700,000.*goes on from"):
            download_file(f"{server.url}/w.pth", tmp_path / "w.pth", sha256=SHA256)
    assert left(tmp_path) == ["w.pth.part", "w.pth.part.json"]
    download_file(f"{server.url}/w.pth", tmp_path / "w.pth", sha256=SHA256)
    assert (tmp_path / "w.pth").read_bytes() == DATA
    assert left(tmp_path) == ["w.pth"]
    assert server.paths("/w.pth") == ["", "bytes=400000-"]


@pytest.mark.parametrize("changed", ["file", "no_etag", "longer_part"])
def test_a_part_of_another_file_is_not_continued(server: WebServer, tmp_path: Path, changed: str) -> None:
    server.cuts["/w.pth"] = [400_000]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(downloads, "DOWNLOAD_ATTEMPTS", 1)
        with pytest.raises(InputError, match="goes on from there"):
            download_file(f"{server.url}/w.pth", tmp_path / "w.pth")
    if changed == "file":
        server.files["/w.pth"] = DATA[::-1]
    elif changed == "no_etag":
        server.etags = False
    else:
        (tmp_path / "w.pth.part").write_bytes(b"x" * 800_000)
    download_file(f"{server.url}/w.pth", tmp_path / "w.pth")
    assert (tmp_path / "w.pth").read_bytes() == server.files["/w.pth"]


def test_a_wrong_hash_leaves_nothing(server: WebServer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"SHA-256 of what arrived is {SHA256}, expected 0123abcd\.\.\."):
        download_file(f"{server.url}/w.pth", tmp_path / "w.pth", sha256="0123abcd")
    assert left(tmp_path) == []


def test_the_hash_that_the_hub_states_is_compared(server: WebServer, tmp_path: Path) -> None:
    server.redirects["/resolve"] = f"{server.url}/w.pth"
    server.headers["/resolve"] = {"X-Linked-Etag": f'"{SHA256}"'}
    server.cuts["/w.pth"] = [100_000]
    download_file(f"{server.url}/resolve", tmp_path / "good")
    assert (tmp_path / "good").read_bytes() == DATA
    server.headers["/resolve"] = {"X-Linked-Etag": f'"{"0" * 64}"'}
    with pytest.raises(InputError, match=r"expected 0{64}"):
        download_file(f"{server.url}/resolve", tmp_path / "bad")


@pytest.mark.parametrize(("status", "asked"), [(404, 1), (403, 1), (503, 2), (429, 2)])
def test_errors_of_the_server(server: WebServer, tmp_path: Path, status: int, asked: int) -> None:
    server.statuses["/w.pth"] = [status]
    if asked == 1:
        with pytest.raises(InputError, match=rf"the server answered {status} .*\. Put it here"):
            download_file(f"{server.url}/w.pth", tmp_path / "w.pth", advice=" Put it here")
        assert left(tmp_path) == []
    else:
        download_file(f"{server.url}/w.pth", tmp_path / "w.pth", sha256=SHA256)
    assert len(server.requests) == asked


def test_a_web_page_is_not_the_file(server: WebServer, tmp_path: Path) -> None:
    server.headers["/w.pth"] = {"Content-Type": "text/html; charset=utf-8"}
    with pytest.raises(InputError, match="a web page instead of the file"):
        download_file(f"{server.url}/w.pth", tmp_path / "w.pth")
    assert left(tmp_path) == []
    assert len(server.requests) == 1


def test_the_rest_of_a_file_is_promised_only_if_it_can_be_asked_for(server: WebServer, tmp_path: Path) -> None:
    server.cuts["/w.pth"], server.etags = [400_000] * downloads.DOWNLOAD_ATTEMPTS, False
    with pytest.raises(InputError, match=r"could not be downloaded: [^.]*\.$"):
        download_file(f"{server.url}/w.pth", tmp_path / "w.pth")


def test_without_a_network_the_error_says_what_to_do(server: WebServer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"w\.pth could not be downloaded: .*refused.* Put it here"):
        download_file("http://127.0.0.1:9/w.pth", tmp_path / "w.pth", advice=" Put it here")
    with pytest.raises(InputError, match="could not be downloaded"):
        download_file("no-url", tmp_path / "w.pth")


def test_an_unknown_host_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(downloads.time, "sleep", lambda seconds: pytest.fail("another attempt"))
    with pytest.raises(InputError, match="could not be downloaded: Name or service not known"):
        download_file("http://example.org/w.pth", tmp_path / "w.pth")


def test_a_redirect_to_an_unencrypted_address_is_refused() -> None:
    request = downloads.urllib.request.Request("https://example.org/w.pth")
    with pytest.raises(InputError, match="not encrypted"):
        downloads._Redirects().redirect_request(request, None, 302, "", {}, "http://example.org/w.pth")


def test_the_proxy_of_the_environment_is_used(
    server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", "")
    download_file("http://weights.invalid/w.pth", tmp_path / "w.pth", sha256=SHA256)
    assert server.requests == [("http://weights.invalid/w.pth", "")]


def test_of_several_processes_one_downloads(server: WebServer, tmp_path: Path) -> None:
    server.delay = 0.5
    fork = multiprocessing.get_context("fork")
    running = [fork.Process(target=download_file, args=(f"{server.url}/w.pth", tmp_path / "w.pth")) for _ in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0, 0, 0]
    assert (tmp_path / "w.pth").read_bytes() == DATA
    assert len(server.requests) == 1


def test_a_folder_that_cannot_be_made(server: WebServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="set DETR_BF_HOME to another folder"):
        download_file(f"{server.url}/w.pth", tmp_path / "file" / "w.pth")


@pytest.mark.parametrize("step", ["_copy", "write_json"])
def test_a_full_disk_names_the_file(
    step: str, server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(downloads, step, full)
        with pytest.raises(InputError, match=r"w\.pth\.part cannot be written \(No space left on device\): free some"):
            download_file(f"{server.url}/w.pth", tmp_path / "w.pth")
    assert download_file(f"{server.url}/w.pth", tmp_path / "w.pth").read_bytes() == DATA


def test_what_is_waited_for_is_said(server: WebServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (tmp_path / "w.pth.lock").open("w") as held, caplog.at_level("INFO"):
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Timer(0.3, fcntl.flock, (held.fileno(), fcntl.LOCK_UN)).start()
        download_file(f"{server.url}/w.pth", tmp_path / "w.pth")
    assert f"waiting for another process that downloads w.pth (it holds {tmp_path / 'w.pth.lock'})" in caplog.text
