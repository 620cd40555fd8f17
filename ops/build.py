"""Compilation of the kernels with the available compilers and the installed torch.

Used by ``setup.py`` at installation and by ``python -m detr_bf.ops build`` later. Imports the standard library only:
at installation pip's build isolation may hide an installed torch from this process.
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
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "csrc"
FOLDER = Path(__file__).parent / "compiled"
RECORD = "build.json"

# The oldest torch that the libraries load in: they only use its version of the stable interface.
TARGET_VERSION = "2.11"
TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"
WARNINGS = ["-Wall", "-Wextra"]
CXX_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", TARGET]
# The kernels are compiled once per instruction set; processor.cpp selects one at run time.
X86_FLAGS = {"kernels_v3": ["-march=x86-64-v3"], "kernels_v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"]}
CUDA_FLAGS = ["-std=c++17", "-O3", "-DUSE_CUDA", "--cudart", "static", "--extended-lambda", TARGET]
CUDA_ARCHITECTURES = ("80", "90")  # machine code for these, and PTX of the last for newer GPUs


class BuildError(Exception):
    """Error shown to the user: a missing tool, or a failed command."""


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
    """Find the torch of this environment by its files: an isolated build cannot import it.

    Raises:
        BuildError: there is none, or it is too old.
    """
    folders = [sysconfig.get_path(kind) for kind in ("platlib", "purelib")] + sys.path
    for folder in folders:
        version_file = Path(folder) / "torch" / "version.py"
        if (version_file.parent / "include" / "torch" / "csrc" / "stable" / "ops.h").is_file():
            text = version_file.read_text()
            version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
            cuda = re.search(r"^cuda[^=]*= '([^']+)'", text, re.MULTILINE)
            return Torch(version_file.parent, version.group(1) if version else "unknown", cuda and cuda.group(1))
    raise BuildError(f"torch {TARGET_VERSION} or newer is not installed in this environment ({sys.prefix})")


def find_compiler() -> str:
    """Find the C++ compiler: ``CXX``, or the first of c++, g++ and clang++."""
    requested = os.environ.get("CXX")
    for name in [requested] if requested else ["c++", "g++", "clang++"]:
        if found := shutil.which(name.split()[0]):
            return found
    problem = f"CXX={requested} is not found" if requested else "install g++ or clang++, or set CXX"
    raise BuildError(f"no C++ compiler: {problem}")


def find_cuda() -> tuple[str, Path]:
    """Find nvcc and the folder with CUDA's headers, which may be elsewhere.

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
    """Hash all kernel sources; a library built from other sources is not loaded."""
    digest = hashlib.sha256()
    for path in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def has_gpu() -> bool:
    """Return True if the driver of an NVIDIA GPU is loaded, also that of Windows in WSL."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def build(
    folder: Path = FOLDER,
    *,
    strict: bool = False,
    extra: Sequence[str] = (),
    cuda: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Path | BuildError]:
    """Compile the libraries into ``folder``, CPU first; return the path of each, or the error that prevented it.

    Args:
        folder: of the libraries.
        strict: warnings are errors, and the CUDA library is compiled without a GPU, too.
        extra: flags for compiler and linker of the CPU library.
        cuda: compile the CUDA library without a GPU, too; ``FORCE_CUDA=1`` in the environment does the same.
        say: called with a line before and after each step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = cuda or strict or os.environ.get("FORCE_CUDA") == "1" or has_gpu()
    results = {
        "cpu": _or_error(build_cpu, folder / "cpu.so", strict, extra, say),
        "cuda": _or_error(build_cuda, folder / "cuda.so", strict, wanted, say),
    }
    (folder / RECORD).unlink(missing_ok=True)
    if isinstance(results["cpu"], Path):  # without it the other is useless; without the record make tries again
        record = {"sources": digest_of_sources(), "torch": find_torch().version, "compiler": find_compiler()}
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return results


def _or_error(make: Callable[..., None], result: Path, *arguments: Any) -> Path | BuildError:
    """Return the library, or the error after removing an older library."""
    try:
        if platform.system() == "Windows":
            raise BuildError("Windows is not supported yet; the plain PyTorch reference runs there")
        make(result, *arguments)
    except BuildError as error:
        result.unlink(missing_ok=True)
        return error
    return result


def build_cpu(result: Path, strict: bool, extra: Sequence[str], say: Callable[[str], None]) -> None:
    """Compile and link the CPU library.

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
    _compile_and_link(commands, link, [f"-L{torch.folder / 'lib'}", "-ltorch_cpu"], result, say)


def build_cuda(result: Path, strict: bool, wanted: bool, say: Callable[[str], None]) -> None:
    """Compile and link the CUDA library; no GPU is needed.

    Raises:
        BuildError: torch with CUDA, nvcc or CUDA's headers are missing, it is not wanted, or nvcc failed.
    """
    torch = find_torch()
    if torch.cuda is None:
        raise BuildError(f"torch {torch.version} is built without CUDA")
    nvcc, home = find_cuda()
    if not wanted:
        raise BuildError("there is no NVIDIA GPU here; to compile it nevertheless: python -m detr_bf.ops build --cuda")
    codes = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in CUDA_ARCHITECTURES]
    codes.append(f"-gencode=arch=compute_{CUDA_ARCHITECTURES[-1]},code=compute_{CUDA_ARCHITECTURES[-1]}")
    host = ["-fPIC", *WARNINGS, *(["-Werror"] if strict else [])]
    flags = [*CUDA_FLAGS, *codes, f"-Xcompiler={','.join(host)}", *(["-Werror=all-warnings"] if strict else [])]
    includes = [*torch.includes, "-isystem", str(home / "include")]
    commands = [
        [nvcc, *flags, *includes, "-c", str(source), "-o"] for source in sorted((SOURCES / "cuda").glob("*.cu"))
    ]
    # --no-as-needed: the library uses no symbol of libtorch_cuda that the linker can see.
    libraries = [f"-L{torch.folder / 'lib'}", "-Xlinker=--no-as-needed", "-ltorch_cuda", "-ltorch_cpu"]
    _compile_and_link(commands, [nvcc, "-shared", "--cudart", "static"], libraries, result, say)


def _compile_and_link(
    commands: Sequence[list[str]],
    link: Sequence[str],
    libraries: Sequence[str],
    result: Path,
    say: Callable[[str], None],
) -> None:
    """Compile in parallel, link, and replace the library atomically: a running program keeps the old one."""
    start, workers = time.monotonic(), os.cpu_count() or 1
    say(f"{result.stem}: compiling {len(commands)} files with {link[0]}, up to {workers} at a time; this takes minutes")
    with tempfile.TemporaryDirectory(dir=result.parent) as scratch:
        objects = {str(Path(scratch, f"{number}.o")): command for number, command in enumerate(commands)}
        with ThreadPoolExecutor(workers) as pool:
            running = {pool.submit(_run, [*command, name]): Path(command[-2]).name for name, command in objects.items()}
            for number, done in enumerate(as_completed(running), 1):
                done.result()
                say(f"{result.stem}: {number} of {len(commands)}, {running[done]}, {time.monotonic() - start:.0f} s")
        linked = Path(scratch, result.name)
        _run([*link, *objects, *libraries, "-o", str(linked)])
        linked.replace(result)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"this command failed:\n  {' '.join(command)}\n{(done.stderr or done.stdout).strip()[-4000:]}")
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)
