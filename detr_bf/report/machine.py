"""Hardware, software versions and command of a run."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

_PACKAGES = ("detr_bf", "torchvision", "timm", "numpy", "scipy", "pycocotools", "hotcoco", "onnxruntime", "openvino")


def machine_info() -> dict[str, str]:
    """Return command, versions and hardware: name -> value, in the order of the report.

    ``commit`` exists only if this package runs from a git checkout, ``GPU`` and ``CUDA`` only with a GPU.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    is_console = sys.argv[0].startswith("detr-bf ")  # set by detr_bf.commands; the arguments repeat the subcommand
    program = ["detr-bf"] if is_console else [Path(sys.executable).name, sys.argv[0]]
    info = {
        "command": shlex.join([*program, *sys.argv[1:]]),
        "commit": git_commit(Path(__file__).resolve()),
        "CPU": f"{_cpu_model()}, {cores} of {os.cpu_count()} cores usable",
        **_gpus(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,  # includes the CUDA build, unlike the package metadata
        **{name: _version(name) for name in _PACKAGES},
    }
    return {name: value for name, value in info.items() if value}


def process_memory(device: torch.device) -> dict[str, float | None]:
    """Return ``peak_memory_mib``, the most memory that this process ever had, and ``device_memory_mib``.

    The latter is the most memory of tensors on a CUDA device, None on a CPU. Loader workers are not counted.
    """
    on_device = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    return {
        "peak_memory_mib": round(_peak_memory() / 2**20, 1),
        "device_memory_mib": None if on_device is None else round(on_device, 1),
    }


def _peak_memory() -> int:
    """Return the most resident bytes of this process since its program was started.

    ``ru_maxrss`` of Linux also counts the parent from before ``exec``, VmHWM does not.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 2**10
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def git_commit(file: Path) -> str:
    """Return the commit of the checkout that tracks ``file``, marked if files have changed; "" if there is none."""
    if not _git(file.parent, "ls-files", file.name):  # a virtual environment may lie inside another checkout
        return ""
    return _git(file.parent, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty= (with local changes)")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {}
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"GPU": ", ".join(names), "CUDA": str(torch.version.cuda or torch.version.hip)}


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
