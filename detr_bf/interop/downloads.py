"""Download of files over HTTP: resumed, verified, and complete or absent at any time.

No library is used: pooch neither resumes a download nor makes other processes wait, and huggingface_hub has no public
function for addresses outside the Hub, where most of the published weights are.
"""

from __future__ import annotations

import http.client
import logging
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from detr_bf.common.errors import InputError
from detr_bf.common.files import file_sha256, file_size, is_file, read_json, write_json
from detr_bf.common.progress import progress_bar
from detr_bf.common.text import printable

logger = logging.getLogger(__name__)

SECONDS = 30.0  # without an answer or data
DOWNLOAD_ATTEMPTS = 3  # that bring no data; a connection that breaks later is made again without limit
WAIT = 1.0  # seconds before another attempt, doubled each time
_PART = 2**18  # bytes
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TRANSIENT = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class _Answer:
    """Beginning of an answer that holds a file, or the rest of it."""

    body: Any
    start: int  # byte of the file at which the body starts
    size: int | None  # of the whole file; None: not stated
    validator: str  # strong ETag or date, by which the rest can be asked for; "": none
    sha256: str  # that the server states; "": none


class DownloadError(Exception):
    """Download that failed; ``final``: another attempt would fail as well."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


def download_file(url: str, target: Path, *, sha256: str = "", advice: str = "", patience: float | None = None) -> Path:
    """Download a file unless it is there, and return its path.

    Data are written to ``target`` with the suffix ``.part``. A later call asks for the rest of it, if the server states
    by ETag or date that the file is the same, and starts anew if it is not. Redirects are followed, but not from https
    to http; proxies are those of the environment (``https_proxy``, ``no_proxy``). Of several processes that need the
    same file one downloads, and the others wait.

    Args:
        target: the file; its folder is made.
        sha256: hexadecimal SHA-256 of the file, or the beginning of it. Without it, that of the header
            ``X-Linked-Etag`` (Hugging Face Hub) is compared if there is one.
        advice: what to do without a network, for the error.
        patience: seconds within which the server must give its first answer, for a file that is useful but not
            needed; without it, several attempts are made. Neither the download after this answer nor the wait for
            another process has a limit.

    Raises:
        InputError: there is no such file, no connection, or another content than expected; it cannot be written.
    """
    if is_file(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{printable(target.parent)} cannot be made ({error.strerror}): set DETR_BF_HOME to another folder"
        ) from error
    with _locked(target):
        if is_file(target):  # another process was faster
            return target
        part = target.with_name(f"{target.name}.part")
        try:
            if patience is not None:
                _check_answer(url, part, patience)
            expected = _fetch(url, part, sha256)
            _verify(part, expected, url)
            with part.open("rb") as written:
                os.fsync(written.fileno())
            part.replace(target)
            _record(part).unlink(missing_ok=True)
        except DownloadError as error:
            kept = file_size(part) and _known(part, url) is not None
            hint = " What has arrived is kept, and another attempt goes on from there." if kept else ""
            raise InputError(f"{printable(url)} could not be downloaded: {error}.{hint}{advice}") from error.__cause__
        except OSError as error:  # of the files alone: those of the connection are a DownloadError
            raise InputError(
                f"{printable(part)} cannot be written ({_reason(error)}): free some space, or set DETR_BF_HOME to "
                "another folder"
            ) from error
    return target


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock of a file that is being downloaded."""
    lock = FileLock(target.with_name(f"{target.name}.lock"), timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        logger.info("waiting for another process that downloads %s (it holds %s)", target.name, lock.lock_file)
        lock.acquire(timeout=-1)
    except OSError as error:
        raise InputError(
            f"{printable(target.parent)} cannot be written ({error.strerror}): set DETR_BF_HOME to another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _check_answer(url: str, part: Path, seconds: float) -> None:
    """Ask for the file without reading it (DownloadError: no answer that holds it within ``seconds``).

    A thread waits, because the search for the address of a host has no limit of time.
    """
    fault: list[Exception] = [DownloadError(f"no answer within {seconds:g} s")]

    def ask() -> None:
        try:
            with _opened(url, part):
                fault.clear()
        except (DownloadError, InputError) as error:
            fault[:] = [error]

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if fault:
        raise fault[0]


def _fetch(url: str, part: Path, sha256: str) -> str:
    """Complete ``part`` and return the expected hash, "" if none is known.

    Raises:
        DownloadError: the server has no such file, or the connection failed :data:`DOWNLOAD_ATTEMPTS` times in
            sequence.
    """
    failures = 0
    while True:
        before = file_size(part)
        try:
            stated = _fetch_once(url, part)
            return sha256 or stated
        except DownloadError as error:
            failures = 1 if file_size(part) > before else failures + 1
            if error.final or failures >= DOWNLOAD_ATTEMPTS:
                raise
            logger.warning("%s: %s; trying again", printable(url), error)
            time.sleep(WAIT * 2 ** (failures - 1))


def _fetch_once(url: str, part: Path) -> str:
    """Ask for the file, or for what ``part`` lacks, and append it; return the SHA-256 that the server states."""
    with _opened(url, part) as answer:
        if answer.start == 0:
            part.unlink(missing_ok=True)
        write_json(_record(part), {"url": url, "validator": answer.validator, "sha256": answer.sha256})
        name = part.name.removesuffix(".part")
        bar = progress_bar(total=answer.size, initial=answer.start, unit="B", unit_scale=True, desc=name, leave=False)
        with bar, part.open("ab") as file:
            _copy(answer, file, bar)
        if answer.size is not None and file_size(part) != answer.size:
            raise DownloadError(f"the connection ended after {file_size(part):,} of {answer.size:,} bytes")
        return answer.sha256


def _copy(answer: _Answer, file: IO[bytes], bar: Any) -> None:
    while True:
        try:
            data = answer.body.read(_PART)
        except (OSError, http.client.HTTPException) as error:
            raise DownloadError(f"the connection broke ({_reason(error)})") from error
        if not data:
            return
        file.write(data)
        bar.update(len(data))


@contextmanager
def _opened(url: str, part: Path) -> Iterator[_Answer]:
    """Send the request; asks for the rest of ``part`` if the server still has the same file.

    Raises:
        DownloadError: no connection, or an answer without the file.
    """
    have, known = file_size(part), _known(part, url)
    headers = {"User-Agent": "detr_bf", "Accept-Encoding": "identity"}
    if have and known:
        headers |= {"Range": f"bytes={have}-", "If-Range": known["validator"]}
    redirects = _Redirects()
    try:
        request = urllib.request.Request(url, headers=headers)
        response = urllib.request.build_opener(redirects).open(request, timeout=SECONDS)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the part is as long as the file, or longer
            part.unlink(missing_ok=True)
            raise DownloadError("the rest of the file was refused") from error
        raise DownloadError(
            f"the server answered {error.code} {printable(error.reason)}", final=error.code not in _TRANSIENT
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: not a URL
        unknown_host = isinstance(getattr(error, "reason", None), socket.gaierror)  # no network, or a wrong address
        raise DownloadError(_reason(error), final=unknown_host) from error
    with response:
        if response.headers.get_content_type() == "text/html":  # of a login, or of a proxy
            raise DownloadError("the server answered with a web page instead of the file", final=True)
        yield _answer(response, redirects, have, known)


def _answer(response: Any, redirects: _Redirects, have: int, known: dict[str, str] | None) -> _Answer:
    """Read the headers of an answer."""
    headers = response.headers
    etag, date = headers.get("ETag") or "", headers.get("Last-Modified") or ""
    validator = etag if etag.startswith('"') else date
    linked = (redirects.headers.get("X-Linked-Etag") or headers.get("X-Linked-Etag") or "").strip('"').lower()
    sha256 = linked if _SHA256.fullmatch(linked) else ""
    if response.status == 206:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range") or "")
        if found is None or int(found[1]) != have:
            raise DownloadError("the server sent another part of the file than asked for")
        sha256 = sha256 or (known or {}).get("sha256", "")
        return _Answer(response, have, None if found[2] == "*" else int(found[2]), validator, sha256)
    length = headers.get("Content-Length") or ""
    return _Answer(response, 0, int(length) if length.isdecimal() else None, validator, sha256)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirects that keep the headers of the first answer and never leave https."""

    def __init__(self) -> None:
        self.headers: Any = {}

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        self.headers = self.headers or headers
        if req.full_url.startswith("https:") and not newurl.startswith("https:"):
            raise InputError(f"{printable(req.full_url)} redirects to {printable(newurl)}, which is not encrypted")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _known(part: Path, url: str) -> dict[str, str] | None:
    """Return what is known of a part of the file; None if the rest cannot be asked for."""
    with suppress(FileNotFoundError, ValueError):
        content = read_json(_record(part), limit=2**16)
        if isinstance(content, dict) and content.get("url") == url and content.get("validator"):
            return {key: str(content.get(key, "")) for key in ("validator", "sha256")}
    return None


def _record(part: Path) -> Path:
    """Return the file beside a part that says how to ask for the rest."""
    return part.with_name(f"{part.name}.json")


def _verify(part: Path, expected: str, url: str) -> None:
    """Compare the SHA-256 of a complete part; a wrong one is removed (InputError: it is another)."""
    found = file_sha256(part)
    if not found.startswith(expected):
        part.unlink(missing_ok=True)
        _record(part).unlink(missing_ok=True)
        raise InputError(
            f"{printable(url)}: the SHA-256 of what arrived is {found}, expected {expected}"
            f"{'' if len(expected) == 64 else '...'}. The file was removed: try again, or get it from another source"
        )


def _reason(error: BaseException) -> str:
    inner = getattr(error, "reason", None) or error
    return printable(getattr(inner, "strerror", None) or inner or type(inner).__name__)
