"""Compiles the kernels with the compilers at hand and the torch that is installed.

Used by ``setup.py`` at installation and by ``python -m detr_bf.ops build`` afterwards. Imports the standard library
alone: at installation torch may be hidden from this process (pip isolates builds) though it is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "csrc"
FOLDER = Path(__file__).parent / "compiled"
RECORD = "build.json"

# The oldest torch the libraries load in: they use nothing of its stable interface that is younger.
TARGET_VERSION = "2.11"
TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"
WARNINGS = ["-Wall", "-Wextra"]
CXX_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", TARGET]
# Kernels of one file are compiled once for each instruction set; processor.cpp chooses at run time.
X86_FLAGS = {"kernels_v3": ["-march=x86-64-v3"], "kernels_v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"]}
CUDA_FLAGS = ["-std=c++17", "-O3", "-DUSE_CUDA", "--cudart", "static", "--extended-lambda", TARGET]
CUDA_ARCHITECTURES = ("80", "90")  # machine code for these, and PTX of the last for what comes after


class BuildError(Exception):
    """What is missing or went wrong, in words for the user."""


@dataclass(frozen=True)
class Torch:
    """A torch on disk: its folder, its version and the CUDA version it was built with, if any."""

    folder: Path
    version: str
    cuda: str | None

    @property
    def includes(self) -> list[str]:
        return ["-isystem", str(self.folder / "include")]


def find_torch() -> Torch:
    """The torch of this environment, found by its files: an isolated build cannot import it.

    Raises:
        BuildError: there is none, or it is older than the libraries can be built for.
    """
    places = [sysconfig.get_path(kind) for kind in ("platlib", "purelib")] + sys.path
    for place in places:
        version_file = Path(place) / "torch" / "version.py"
        if (version_file.parent / "include" / "torch" / "csrc" / "stable" / "ops.h").is_file():
            text = version_file.read_text()
            version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
            cuda = re.search(r"^cuda[^=]*= '([^']+)'", text, re.MULTILINE)
            return Torch(version_file.parent, version.group(1) if version else "unknown", cuda and cuda.group(1))
    raise BuildError(f"torch {TARGET_VERSION} or newer is not installed in this environment ({sys.prefix})")


def find_compiler() -> str:
    """The C++ compiler: ``CXX``, or the first of c++, g++ and clang++."""
    wish = os.environ.get("CXX")
    for name in [wish] if wish else ["c++", "g++", "clang++"]:
        if found := shutil.which(name.split()[0]):
            return found
    raise BuildError(f"no C++ compiler: {f'CXX={wish} is not found' if wish else 'install g++ or clang++, or set CXX'}")


def find_cuda() -> tuple[str, Path]:
    """nvcc, and the folder with CUDA's headers, which need not be beside it.

    Raises:
        BuildError: one of the two is missing.
    """
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvcc = next((str(home / "bin" / "nvcc") for home in homes if (home / "bin" / "nvcc").is_file()), None)
    nvcc = nvcc or shutil.which("nvcc")
    homes += [Path(nvcc).resolve().parent.parent] if nvcc else []
    homes += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    homes += sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob("cu*"), reverse=True)
    nvcc = nvcc or next((str(home / "bin" / "nvcc") for home in homes if (home / "bin" / "nvcc").is_file()), None)
    if nvcc is None:
        raise BuildError("nvcc is not found: set CUDA_HOME")
    for home in homes:
        if (home / "include" / "cuda_runtime.h").is_file():
            return nvcc, home
    raise BuildError(f"cuda_runtime.h is not found; looked under {', '.join(map(str, homes))}: set CUDA_HOME")


def digest_of_sources() -> str:
    """Of all sources of the kernels: libraries built from others do not fit the Python code beside these."""
    digest = hashlib.sha256()
    for path in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def build(folder: Path = FOLDER, *, strict: bool = False, extra: Sequence[str] = ()) -> dict[str, Path | BuildError]:
    """Compile what can be compiled into ``folder``: for each library where it lies, or why it was not built.

    ``strict`` makes warnings errors; ``extra`` flags go to compiler and linker of the library for the CPU.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:  # side by side: nvcc takes its time
        pending = {
            "cuda": pool.submit(_or_error, build_cuda, folder / "cuda.so", strict),
            "cpu": pool.submit(_or_error, build_cpu, folder / "cpu.so", strict, extra),
        }
    results = {name: pending[name].result() for name in ("cpu", "cuda")}
    (folder / RECORD).unlink(missing_ok=True)
    if isinstance(results["cpu"], Path):  # without it the other is of no use, and make tries again
        record = {"sources": digest_of_sources(), "torch": find_torch().version, "compiler": find_compiler()}
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return results


def _or_error(make: Callable[..., None], result: Path, *arguments: Any) -> Path | BuildError:
    """The library, or the error; then no older one is left in its place."""
    try:
        if platform.system() == "Windows":
            raise BuildError("Windows is not supported yet; the plain PyTorch reference runs there")
        make(result, *arguments)
    except BuildError as error:
        result.unlink(missing_ok=True)
        return error
    return result


def build_cpu(result: Path, strict: bool, extra: Sequence[str]) -> None:
    """Compile and link the library for the CPU.

    Raises:
        BuildError: torch or a compiler is missing, or the compiler failed.
    """
    torch, compiler = find_torch(), find_compiler()
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    flags = [*CXX_FLAGS, *WARNINGS, *(["-Werror"] if strict else []), *(["-DDETR_BF_X86"] if x86 else []), *extra]
    sources = [SOURCES / "schema.cpp", *sorted((SOURCES / "cpu").glob("*.cpp"))]
    commands = [
        [compiler, *flags, *X86_FLAGS.get(source.stem, []), *torch.includes, "-c", str(source), "-o"]
        for source in sources
        if x86 or source.stem not in X86_FLAGS
    ]
    link = [compiler, "-shared", *extra]
    _compile_and_link(commands, link, [f"-L{torch.folder / 'lib'}", "-ltorch_cpu"], result)


def build_cuda(result: Path, strict: bool) -> None:
    """Compile and link the library for CUDA; no GPU is needed.

    Raises:
        BuildError: torch with CUDA, nvcc or CUDA's headers are missing, or nvcc failed.
    """
    torch = find_torch()
    if torch.cuda is None:
        raise BuildError(f"torch {torch.version} is built without CUDA")
    nvcc, home = find_cuda()
    codes = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in CUDA_ARCHITECTURES]
    codes.append(f"-gencode=arch=compute_{CUDA_ARCHITECTURES[-1]},code=compute_{CUDA_ARCHITECTURES[-1]}")
    host = ["-fPIC", *WARNINGS, *(["-Werror"] if strict else [])]
    flags = [*CUDA_FLAGS, *codes, f"-Xcompiler={','.join(host)}", *(["-Werror=all-warnings"] if strict else [])]
    includes = [*torch.includes, "-isystem", str(home / "include")]
    commands = [
        [nvcc, *flags, *includes, "-c", str(source), "-o"] for source in sorted((SOURCES / "cuda").glob("*.cu"))
    ]
    # --no-as-needed: the library registers itself and names nothing of libtorch_cuda that the linker could see.
    libraries = [f"-L{torch.folder / 'lib'}", "-Xlinker=--no-as-needed", "-ltorch_cuda", "-ltorch_cpu"]
    _compile_and_link(commands, [nvcc, "-shared", "--cudart", "static"], libraries, result)


def _compile_and_link(
    commands: Iterable[list[str]], link: Sequence[str], libraries: Sequence[str], result: Path
) -> None:
    """Compile side by side, link, and put the library in place in one step: a running program keeps its old one."""
    with tempfile.TemporaryDirectory(dir=result.parent) as scratch:
        objects = {str(Path(scratch, f"{number}.o")): command for number, command in enumerate(commands)}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda item: _run([*item[1], item[0]]), objects.items()))
        linked = Path(scratch, result.name)
        _run([*link, *objects, *libraries, "-o", str(linked)])
        linked.replace(result)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"this command failed:\n  {' '.join(command)}\n{(done.stderr or done.stdout).strip()[-4000:]}")
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)
