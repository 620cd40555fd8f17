"""Runner for bad inputs: every case runs in a separate process and is checked from outside.

A case builds its files in a new folder and calls a tool or a function of the API. The runner forks for every case, so
that a crash or a hang ends only that case. Then it checks the exit code or exception, the output, and all files:
existing files must be byte-identical, and new files must be allowed by the case.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import re
import resource
import select
import shutil
import signal
import stat
import struct
import sys
import tempfile
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

SECONDS = 10.0  # limit of a call; a longer one counts as a hang
BUILD_SECONDS = 60.0  # limit of the preparation of a case
MEMORY = 8 * 2**30  # bytes of address space of a case beyond that of the runner
LONGEST = 30_000  # characters of output
SECRET = "hostile-secret-93f1c7"  # value of $HOSTILE_SECRET, which must not appear in any output
FORGED = "FORGED"  # a line that only a line break in a name can produce
NEXT_COMMAND = "==== next command"  # on standard output and standard error, between the commands of a case
DISAGREE = 99  # exit code of a case whose two commands returned different exit codes
USERS = {  # files of the user in the working directory of every case
    "notes.md": "my notes\n",
    ".terraform.lock.hcl": "provider {}\n",
    ".env.production.local": "KEY=value\n",
    ".eslintrc.base.json": "{}\n",
}
CURSOR_UP = "\x1b[A"  # printed by nested tqdm progress bars


def fork() -> int:
    """Fork as ``os.fork``; the child keeps inherited garbage, as the workers of :mod:`detr_bf.data.loader` do."""
    collects = gc.isenabled()
    gc.disable()
    try:
        child = os.fork()
        if child == 0:
            gc.freeze()
        return child
    finally:
        if collects:
            gc.enable()


@dataclass(frozen=True)
class CaseFiles:
    """Folders of a case."""

    folder: Path  # the working directory; holds the files of USERS
    fixtures: Path  # data and runs shared by all cases, read-only
    base: Path  # contains the folder, $HOME, $TMPDIR and the cache

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        return path

    def copy(self, name: str, target: str | None = None) -> Path:
        """Copy a fixture file or folder to the folder of the case."""
        source, path = self.fixtures / name, self.folder / (target or Path(name).name)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, path) if source.is_dir() else shutil.copy2(source, path)
        return path


Build = Callable[[CaseFiles], Callable[[], Any]]


@dataclass(frozen=True)
class Case:
    """A bad input and the expected reaction."""

    group: str
    name: str
    build: Build  # writes the files and returns the call
    codes: tuple[int, ...] = (2,)  # exit codes of a tool; empty: a function of the API
    raises: tuple[str, ...] = ()  # names of allowed exceptions of an API function, without subclasses
    may_return: bool = False  # an API function may also return
    says: tuple[str, ...] = ()  # words required in output or message; "|" separates alternatives
    never: tuple[str, ...] = ()  # words forbidden in output and new files
    writes: tuple[str, ...] = ()  # patterns of allowed new files, relative to the folder
    rewrites: tuple[str, ...] = ()  # patterns of files that may be new or changed
    leaves: tuple[str, ...] = ()  # files that must exist afterwards
    seconds: float = SECONDS

    @property
    def title(self) -> str:
        return f"{self.group}/{self.name}"


@dataclass
class Verdict:
    """Result of a case."""

    case: str
    faults: list[str] = field(default_factory=list)
    outcome: str = ""
    output: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        shown = "\n".join(f"    | {shown_line(line)}" for line in self.output.splitlines()[-12:])
        faults = "\n".join(f"  {shown_line(fault)}" for fault in self.faults)
        return f"FAILED {self.case} ({shown_line(self.outcome)}, {self.seconds:.1f} s)\n{faults}\n{shown}"


def shown_line(text: str) -> str:
    """Escape control characters, independently of the code under test."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)[:400]


# ---- one case ----


def run_case(case: Case, fixtures: Path, scratch: Path) -> Verdict:
    """Fork, build, call, check, and remove the folder."""
    base = Path(tempfile.mkdtemp(prefix="case_", dir=scratch))
    files = CaseFiles(base / "work", fixtures, base)
    for folder in ("work", "home", "tmp", "cache"):
        (base / folder).mkdir()
    for name, text in USERS.items():
        files.write(name, text)
    reader, writer = os.pipe()
    began = time.monotonic()
    child = fork()
    if child == 0:
        os.close(reader)
        _live(case, files, writer)
    os.close(writer)
    verdict = Verdict(case.title)
    try:
        outcome = _watch(case, child, reader, files, verdict)
        verdict.seconds = time.monotonic() - began
        verdict.output = _output(base)
        verdict.faults += judge(case, outcome, verdict.output)
        if outcome is not None:
            before = outcome.pop("before", None)
            if before is not None:
                verdict.faults += compare(case, before, snapshot(base, fixtures), base)
        verdict.outcome = _in_words(outcome)
    finally:
        os.close(reader)
        shutil.rmtree(base, ignore_errors=True)
    return verdict


def _live(case: Case, files: CaseFiles, writer: int) -> None:
    """Run the case in the child process; never returns."""
    status = 0
    try:
        os.setsid()
        _enter(files)
        call = case.build(files)
        _send(writer, {"before": snapshot(files.base, files.fixtures)})
        _send(writer, {"outcome": _call(call)})
    except BaseException:
        status = 70
        _send(writer, {"broken": traceback.format_exc()})
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                status = status or 71
        os._exit(status)


def confine(folder: Path) -> bool:
    """Restrict writes of this process to a folder, /dev/null and shared memory, with Landlock.

    A faulty case must not damage the machine: a tool that renames a file over its target would replace a device, and
    the battery may run as root. Returns False if the kernel lacks Landlock (Linux 5.19).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    create, add, restrict, version, no_new_privileges = 444, 445, 446, 1, 38
    abi = libc.syscall(create, None, 0, version)
    if abi < 2:
        return False
    write_file, remove_make_and_move, truncate = 1 << 1, sum(1 << bit for bit in range(4, 14)), 1 << 14
    rights = write_file | remove_make_and_move | (truncate if abi >= 3 else 0)
    attributes = struct.pack("=Q", rights)
    rules = libc.syscall(create, attributes, len(attributes), 0)
    semaphores = Path("/dev/shm")
    for path, allowed in ((folder, rights), (semaphores, rights), (Path(os.devnull), write_file | rights & truncate)):
        if not path.exists():
            continue
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if libc.syscall(add, rules, 1, struct.pack("=Qi", allowed, handle), 0):
            return False
        os.close(handle)
    return libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0 and libc.syscall(restrict, rules, 0) == 0


def _enter(files: CaseFiles) -> None:
    """Set up the process of a case with its own home, cache, temporary folder and secret."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the runner
    os.chdir(files.folder)
    confine(files.base)
    os.environ |= {
        "HOME": str(files.base / "home"),
        "TMPDIR": str(files.base / "tmp"),
        "DETR_BF_HOME": str(files.base / "cache"),
        "HOSTILE_SECRET": SECRET,
    }
    tempfile.tempdir = None
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(files.base / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        errors = "strict" if number == 1 else "backslashreplace"  # as Python opens them in a UTF-8 locale
        setattr(sys, name, open(number, "w", encoding="utf-8", errors=errors, buffering=1, closefd=False))  # noqa: SIM115


def _call(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        value = call()
    except SystemExit as error:
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return {"code": 0 if error.code is None else error.code if isinstance(error.code, int) else 1}
    except BaseException as error:
        traceback.print_exc()
        return {"type": type(error).__name__, "message": str(error)}
    return {"code": value} if isinstance(value, int) else {"value": repr(value)[:200]}


def _send(writer: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(writer, data) :]


def _watch(case: Case, child: int, reader: int, files: CaseFiles, verdict: Verdict) -> dict[str, Any] | None:
    """Return the messages of the child and how it ended; kill it at the time limit."""
    messages: dict[str, Any] = {}
    data, limit, began = b"", BUILD_SECONDS, time.monotonic()
    while "outcome" not in messages and "broken" not in messages:  # processes started by a case may keep the pipe open
        left = began + limit - time.monotonic()
        ready = select.select([reader], [], [], max(left, 0))[0]
        if not ready:
            messages["hang"] = limit
            break
        piece = os.read(reader, 1 << 16)
        if not piece:
            break
        data += piece
        *lines, data = data.split(b"\n")
        for line in lines:
            messages |= json.loads(line)
            if "before" in messages and limit == BUILD_SECONDS:
                limit, began = case.seconds, time.monotonic()
    if "hang" in messages:
        _kill_group(child)
    _, status = os.waitpid(child, 0)
    _kill_group(child)  # its remaining processes
    if os.WIFSIGNALED(status) and "hang" not in messages:
        messages["signal"] = os.WTERMSIG(status)
    elif os.WIFEXITED(status) and os.WEXITSTATUS(status) not in (0, 70) and "outcome" not in messages:
        messages["exit"] = os.WEXITSTATUS(status)
    return messages


def _kill_group(child: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)


def _output(base: Path) -> str:
    """Return the output; bytes that are not UTF-8 stay visible as surrogates."""
    return "".join((base / name).read_bytes().decode("utf-8", "surrogateescape") for name in ("stdout", "stderr"))


def _in_words(outcome: dict[str, Any] | None) -> str:
    if not outcome:
        return "no message"
    if "outcome" in outcome:
        result = outcome["outcome"]
        return f"exit code {result['code']}" if "code" in result else result.get("type", "returned")
    return ", ".join(f"{key} {value}" for key, value in outcome.items() if key != "broken") or "broken"


# ---- verdict ----


def judge(case: Case, messages: dict[str, Any] | None, output: str) -> list[str]:
    """Return the faults of the outcome and the output of a case, a sentence each."""
    if not messages:
        return ["the process of the case sent no message"]
    if "broken" in messages:
        return [f"the case itself is broken: {messages['broken'].strip().splitlines()[-1]}"]
    if "hang" in messages:
        stage = "the call" if "before" in messages else "the preparation"
        return [f"hang: {stage} took more than {messages['hang']:g} s"]
    if "signal" in messages:
        return [f"crash: signal {messages['signal']} ({signal.Signals(messages['signal']).name})"]
    if "exit" in messages or "outcome" not in messages:
        return [f"the process ended by itself with {messages.get('exit', 'no exit code')}"]
    outcome = messages["outcome"]
    faults = _of_tool(case, outcome, output) if case.codes else _of_function(case, outcome)
    said = output if case.codes else outcome.get("message", "")
    if "type" in outcome or outcome.get("code") not in (0, None):
        faults += [
            f"the message does not name '{words}'"
            for words in case.says
            if not any(word.lower() in said.lower() for word in words.split("|"))
        ]
    if case.codes:
        return faults + unsafe(output, case.never)
    # an exception message may hold raw characters: the code that prints it must escape them
    return faults + unsafe(_without_traceback(output), case.never) + leaks(said, case.never)


def _of_tool(case: Case, outcome: dict[str, Any], output: str) -> list[str]:
    if "type" in outcome:
        first = outcome["message"].strip().splitlines()
        return [f"traceback: {outcome['type']}: {first[0] if first else ''}"]
    if "Traceback (most recent call last)" in output:
        return ["a traceback is printed"]
    lines = output.replace("\r", "\n")  # a progress bar returns to the start of its line
    code = outcome.get("code")
    faults = [] if code in case.codes else [f"exit code {code}, expected {' or '.join(map(str, case.codes))}"]
    said = r"(?m)^(error: |training stopped: |.*: error: |error +\S)|could not|cannot|skipped"
    if code in (1, 2) and not re.search(said, lines):
        faults.append(f"exit code {code} without an error message")
    if len(re.findall(r"(?m)^(?:error: |training stopped: |usage: )", lines)) > 1 + output.count(NEXT_COMMAND):
        faults.append("more than one error message")
    return faults


def _of_function(case: Case, outcome: dict[str, Any]) -> list[str]:
    if "type" not in outcome:
        return (
            [] if case.may_return else [f"returned {outcome.get('value', outcome.get('code'))}, expected an exception"]
        )
    if outcome["type"] not in case.raises:
        first = [*outcome["message"].strip().splitlines(), ""][0]
        return [f"{outcome['type']}: {first}; expected {' or '.join(case.raises)}"]
    if len(outcome["message"].strip()) < 15:
        return [f"{outcome['type']} without a sentence: {outcome['message']!r}"]
    return []


def _without_traceback(output: str) -> str:
    return output.split("Traceback (most recent call last)")[0]


def unsafe(output: str, never: Sequence[str] = ()) -> list[str]:
    """Return the faults of an output on a terminal: control characters, forged lines, secrets, floods."""
    text = output.replace(CURSOR_UP, "")
    kinds = {character: unicodedata.category(character) for character in set(text) if character not in "\n\r\t"}
    bad = sorted(character for character, kind in kinds.items() if kind in ("Cc", "Cf", "Cs", "Zl", "Zp"))
    faults = (
        [f"raw characters in the output: {', '.join(f'U+{ord(character):04X}' for character in bad)}"] if bad else []
    )
    faults += ["a line break in a name forges a line"] * any(line.strip() == FORGED for line in text.splitlines())
    return faults + leaks(text, never)


def leaks(text: str, never: Sequence[str] = ()) -> list[str]:
    """Return the secrets in a text."""
    faults = [f"'{word}' leaks into the output" for word in dict.fromkeys((SECRET, *never)) if word in text]
    return [*faults, f"the output has {len(text)} characters"] if len(text) > LONGEST else faults


# ---- files ----


def snapshot(base: Path, fixtures: Path) -> dict[str, str]:
    """Describe every file, folder, link and pipe below both folders, except caches and the output of the case."""
    found: dict[str, str] = {}
    for root, prefix in ((base, ""), (fixtures, "FIXTURES/")):
        pending = [root]
        while pending:
            for entry in os.scandir(pending.pop()):
                path = Path(entry.path)
                name = prefix + path.relative_to(root).as_posix()
                if not prefix and name in ("stdout", "stderr", "cache"):
                    continue
                found[_encodable(name)] = _fingerprint(path, content=not prefix)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)
    return found


def _encodable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def _fingerprint(path: Path, content: bool) -> str:
    """Describe kind and content; without ``content`` the ctime, which cannot be set back."""
    status = path.lstat()
    if not content:
        return f"{stat.filemode(status.st_mode)}, {status.st_size} bytes, changed at {status.st_ctime_ns}"
    if stat.S_ISLNK(status.st_mode):
        return f"link to {_encodable(str(path.readlink()))}"
    if not stat.S_ISREG(status.st_mode):
        return f"{stat.filemode(status.st_mode)[0]} {status.st_mode & 0o777:o}"
    if status.st_size > 2**27:  # sparse
        return f"file of {status.st_size} bytes, {status.st_mtime_ns}"
    return f"file of {status.st_size} bytes, {hashlib.sha256(path.read_bytes()).hexdigest()}"


def compare(case: Case, before: dict[str, str], after: dict[str, str], base: Path) -> list[str]:
    """Return forbidden changes of files, missing files, and secrets in new files."""
    faults = [
        f"touched: {name} was {was}, is {after.get(name, 'gone')}"
        for name, was in before.items()
        if after.get(name) != was and not _allowed(name, case.rewrites)
    ]
    new = [name for name in after if name not in before]
    foreign = [name for name in new if not _allowed(name, (*case.writes, *case.rewrites))]
    if foreign:
        faults.append(f"left behind: {', '.join(foreign[:8])}{' ...' if len(foreign) > 8 else ''}")
    for name in new:
        path = base / name
        if path.is_file() and path.stat().st_size < 2**24:
            content = path.read_bytes()
            faults += [
                f"'{w}' leaks into {name}" for w in dict.fromkeys((SECRET, *case.never)) if w.encode() in content
            ]
    faults += [f"{name} is missing" for name in case.leaves if not any(fnmatchcase(n, f"work/{name}") for n in after)]
    return faults


def _allowed(name: str, patterns: Iterable[str]) -> bool:
    inside = name.removeprefix("work/")
    return name != inside and any(fnmatchcase(inside, p) or fnmatchcase(inside, f"{p}/*") for p in patterns)


# ---- all cases ----


def run_battery(
    cases: Sequence[Case], fixtures: Path, scratch: Path, report: Callable[[Verdict], None] | None = None
) -> list[Verdict]:
    """Run all cases, one after another."""
    verdicts = []
    for case in cases:
        verdicts.append(run_case(case, fixtures, scratch))
        if report is not None:
            report(verdicts[-1])
    return verdicts


def table(verdicts: Sequence[Verdict]) -> str:
    """Format the number of passed cases and the time of each group and of all."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.case.partition("/")[0], []).append(verdict)
    rows = [*groups.items(), ("all", list(verdicts))]
    return "\n".join(
        f"{name:<14} passed {sum(v.passed for v in some):>3} of {len(some):>3}   {sum(v.seconds for v in some):6.1f} s"
        for name, some in rows
    )
