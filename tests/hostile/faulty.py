"""Deliberately faulty cases, each with the fault that the battery must report."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.hostile.battery import SECRET, USERS, Case, CaseFiles


def refused(text: str = "error: bad.json is no JSON") -> int:
    print(text, file=sys.stderr)
    return 2


def fails(error: BaseException) -> Any:
    raise error


def hang(files: CaseFiles) -> int:
    time.sleep(60)
    return 2


def hang_of_a_child(files: CaseFiles) -> int:
    subprocess.run(["sleep", "60"], check=False)
    return 2


def crash(files: CaseFiles) -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 2


def changes(name: str) -> Callable[[CaseFiles], int]:
    def call(files: CaseFiles) -> int:
        (files.folder / name).write_text("yours no more\n")
        return refused()

    return call


def same_size(files: CaseFiles) -> int:
    path = files.folder / "notes.md"
    status = path.stat()
    path.write_text(USERS["notes.md"].swapcase())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return refused()


def removes(files: CaseFiles) -> int:
    (files.folder / ".terraform.lock.hcl").unlink()
    return refused()


def leaves(files: CaseFiles) -> int:
    (files.folder / "run").mkdir()
    return refused()


def leaves_in_tmp(files: CaseFiles) -> int:
    (files.base / "tmp" / "rest").write_text("")
    return refused()


def changes_the_fixtures(files: CaseFiles) -> int:
    (files.fixtures / "evil.txt").write_text("")
    (files.fixtures / "evil.txt").unlink()
    (files.fixtures / f"evil_{os.getpid()}.txt").write_text("")
    return refused()


def writes_a_secret(files: CaseFiles) -> int:
    (files.folder / "config.yaml").write_text(f"seed: {SECRET}\n")
    return 0


def prints_traceback(files: CaseFiles) -> int:
    import traceback

    try:
        fails(ValueError("deep inside"))
    except ValueError:
        traceback.print_exc()
    return refused()


RAW = "raw characters in the output"
FAULTS: dict[str, tuple[Callable[[CaseFiles], Any], str]] = {
    "a raw exception": (lambda _: fails(KeyError("bad.json")), "traceback: KeyError"),
    "a printed traceback": (prints_traceback, "a traceback is printed"),
    "a wrong exit code": (lambda _: 0, "exit code 0, expected 2"),
    "a silent exit": (lambda _: 2, "without an error message"),
    "two messages": (lambda _: refused("error: bad.json\nerror: bad.json"), "more than one error message"),
    "a message without the culprit": (
        lambda _: refused("error: it failed"),
        "does not name 'bad.json'",
    ),
    "a hang": (hang, "hang: the call took more than"),
    "a child that hangs": (hang_of_a_child, "hang: the call took more than"),
    "a crash": (crash, "crash: signal 11 (SIGSEGV)"),
    "an exit from below": (lambda _: os._exit(2), "ended by itself"),
    "a changed file": (changes("notes.md"), "touched: work/notes.md"),
    "a changed file of the same size and time": (same_size, "touched: work/notes.md"),
    "a removed file": (removes, "touched: work/.terraform.lock.hcl"),
    "a folder left behind": (leaves, "left behind: work/run"),
    "a temporary file left behind": (leaves_in_tmp, "left behind: tmp/rest"),
    "changed fixtures": (changes_the_fixtures, "evil"),
    "an escape": (
        lambda _: refused("error: bad.json \x1b]0;owned\x07"),
        f"{RAW}: U+0007, U+001B",
    ),
    "a C1 control": (lambda _: refused("error: bad.json \x9b2J"), f"{RAW}: U+009B"),
    "a bidi override": (lambda _: refused("error: bad.json \u202e"), f"{RAW}: U+202E"),
    "bytes that are no text": (
        lambda _: (os.write(2, b"\xff\n"), refused())[1],
        f"{RAW}: U+DCFF",
    ),
    "a forged line": (lambda _: refused("error: bad.json\nFORGED\n"), "forges a line"),
    "a secret": (lambda _: refused(f"error: bad.json {SECRET}"), "leaks into the output"),
    "a secret in a file": (writes_a_secret, "leaks into work/config.yaml"),
    "a flood": (lambda _: refused("error: bad.json " + "m" * 50_000), "the output has 50"),
    "memory without end": (lambda _: len(bytearray(2**45)), "traceback: MemoryError"),
}
RAISED: dict[str, tuple[Callable[[CaseFiles], Any], str]] = {
    "another exception": (lambda _: fails(KeyError("bad.json is not there")), "expected InputError"),
    "no exception": (lambda _: None, "expected an exception"),
    "no sentence": (lambda _: fails(ValueError("5")), "without a sentence"),
}


def bound(call: Callable[[CaseFiles], Any]) -> Callable[[CaseFiles], Callable[[], Any]]:
    return lambda files: lambda: call(files)


def cases() -> Iterator[Case]:
    """Yield all cases; the expected fault of each is in :data:`FAULTS` or :data:`RAISED`, by name."""
    for name, (call, _) in FAULTS.items():
        secret = name == "a secret in a file"
        yield Case(
            "faulty", name, bound(call), codes=(0,) if secret else (2,), says=("bad.json",), writes=("config.yaml",)
        )
    for name, (call, _) in RAISED.items():
        raises = ("ValueError",) if name == "no sentence" else ("InputError",)
        yield Case("faulty", name, bound(call), codes=(), raises=raises)
    yield Case("faulty", "a broken case", lambda _: fails(RuntimeError("cannot be built")))
    yield Case("right", "refused", bound(lambda _: refused()), says=("bad.json|other",))
    yield Case(
        "right",
        "progress and cursor",
        bound(lambda _: refused("\r 5 %\x1b[A\nerror: bad.json")),
        says=("bad.json",),
    )
    yield Case("right", "an error of ours", bound(lambda _: fails(_error())), codes=(), raises=("InputError",))
    yield Case("right", "an allowed file", bound(leaves), writes=("run",))


def _error() -> BaseException:
    from detr_bf.common.errors import InputError

    return InputError("bad.json: expected a list, got 5")
