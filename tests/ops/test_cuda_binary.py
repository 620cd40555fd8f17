"""Machine code of the CUDA kernels: wide loads, vector atomics, and no spilled registers."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

CSRC = Path(__file__).parents[2] / "ops" / "csrc"
TORCH = Path(torch.__file__).parent / "include"


def _tool(name: str) -> str | None:
    """Find the tool on the path or in the Triton package."""
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        brought = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / name
        if brought.is_file():
            return shutil.which(name) or str(brought)
    return shutil.which(name)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _compile(source: str, folder: Path) -> Path:
    nvcc = shutil.which("nvcc")
    if nvcc is None or _tool("cuobjdump") is None:
        pytest.skip("nvcc and cuobjdump are needed")
    out = folder / "sm_90.cubin"
    includes = (f"-isystem={TORCH}", f"-isystem={TORCH}/torch/csrc/api/include")
    flags = ("-std=c++17", "-O3", "-arch=sm_90", "-cubin", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000")
    _run(nvcc, *flags, *includes, str(CSRC / "cuda" / source), "-o", str(out))
    return out


@pytest.fixture(scope="module")
def cubin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _compile("ms_deform_attn.cu", tmp_path_factory.mktemp("cubin"))


@pytest.fixture(scope="module")
def attention_cubin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _compile("batch_attention.cu", tmp_path_factory.mktemp("cubin"))


def _dump(option: str, cubin: Path) -> str:
    cuobjdump = _tool("cuobjdump")
    assert cuobjdump is not None
    return _run(cuobjdump, option, str(cubin))


def _functions(cubin: Path) -> dict[str, str]:
    """Return the machine code of every kernel by its mangled name."""
    parts = re.split(r"Function : (\S+)", _dump("--dump-sass", cubin))
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _stack(cubin: Path) -> dict[str, int]:
    """Return the bytes of stack of every kernel."""
    usage = re.findall(r"Function (\S+):\s*REG:\d+ STACK:(\d+)", _dump("--dump-resource-usage", cubin))
    assert usage
    return {name: int(stack) for name, stack in usage}


@pytest.fixture(scope="module")
def functions(cubin: Path) -> dict[str, str]:
    return _functions(cubin)


def _code(functions: dict[str, str], kernel: str) -> str:
    found = [code for name, code in functions.items() if kernel in name]
    assert len(found) == 1, f"{kernel} among {sorted(functions)}"
    return found[0]


# Mangled names: f float32, 6__half, 13__nv_bfloat16, then the channels per lane; 6Layout, 7Patches. The
# backward kernels have the type of the sums in memory before the layout; S2_ repeats the first type.
WIDE_READS = {
    "forward_kernelIfLi4ENS0_6LayoutE": 8,
    "forward_kernelI6__halfLi8ENS0_6LayoutE": 8,
    "forward_kernelI13__nv_bfloat16Li8ENS0_6LayoutE": 8,
    "forward_kernelIdLi2ENS0_6LayoutE": 8,
    "backward_kernelIfLi4ELb1EfNS0_6LayoutE": 16,
    "backward_kernelIfLi4ELb0EfNS0_6LayoutE": 16,
    "forward_kernelIfLi4ENS0_7PatchesE": 8,
    "forward_kernelI6__halfLi8ENS0_7PatchesE": 8,
    "forward_kernelI13__nv_bfloat16Li8ENS0_7PatchesE": 8,
    "backward_kernelIfLi4ELb1EfNS0_7PatchesE": 16,
    "backward_kernelI13__nv_bfloat16Li8ELb1EfNS0_7PatchesE": 16,
    "gather_kernelIfLi4E": 4,
    "gather_kernelI13__nv_bfloat16Li8E": 4,
}


@pytest.mark.full
@pytest.mark.parametrize(("kernel", "corners"), WIDE_READS.items())
def test_corners_are_read_16_bytes_at_once(functions: dict[str, str], kernel: str, corners: int) -> None:
    assert len(re.findall(r"\bLDG\.E\.128", _code(functions, kernel))) >= corners


@pytest.mark.full
@pytest.mark.parametrize("layout", ["6Layout", "7Patches"])
@pytest.mark.parametrize("kernel", ["forward_kernelIfLi4ENS0_", "forward_kernelI13__nv_bfloat16Li8ENS0_"])
def test_all_reads_are_under_way_before_the_first_is_used(functions: dict[str, str], kernel: str, layout: str) -> None:
    code = _code(functions, kernel + layout)
    reads = [match.start() for match in re.finditer(r"\bLDG\.E\.128", code)]
    assert len(reads) == 8  # four corners of two samples
    assert "FFMA" not in code[reads[0] : reads[-1]]


@pytest.mark.parametrize("layout", ["6Layout", "7Patches"])
@pytest.mark.parametrize("kernel", ["backward_kernelIfLi4ELb1EfNS0_", "backward_kernelI13__nv_bfloat16Li8ELb1EfNS0_"])
def test_gradients_are_added_16_bytes_at_once(functions: dict[str, str], kernel: str, layout: str) -> None:
    added = re.findall(r"\b(?:RED|ATOM)\S+", _code(functions, kernel + layout))
    assert len(added) >= 16  # four corners of four samples
    assert all(".F32x4" in one for one in added), added


@pytest.mark.parametrize("layout", ["6Layout", "7Patches"])
@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("backward_kernelI13__nv_bfloat16Li8ELb1ES2_NS0_", ".BF16x8"),
        ("backward_kernelI6__halfLi8ELb1ES2_NS0_", ".F16x8"),
    ],
)
def test_gradients_of_16_bits_are_added_16_bytes_at_once(
    functions: dict[str, str], kernel: str, kind: str, layout: str
) -> None:
    added = re.findall(r"\b(?:RED|ATOM)\S+", _code(functions, kernel + layout))
    assert len(added) == 16  # four corners of four samples, once each
    assert all(kind in one for one in added), added


@pytest.mark.parametrize("kernel", ["backward_kernelIfLi4ELb0EfNS0_6LayoutE", "gather_kernelIfLi4E"])
def test_sums_in_order_need_no_additions_to_memory(functions: dict[str, str], kernel: str) -> None:
    assert not re.search(r"\b(RED|ATOM)", _code(functions, kernel))


def test_everything_is_in_registers(cubin: Path) -> None:
    assert {name: stack for name, stack in _stack(cubin).items() if stack > 0} == {}


@pytest.mark.full
def test_attention_in_one_pass(attention_cubin: Path) -> None:
    """One wide load for every row, as many exponentials as a lane owns, and everything in registers."""
    stacks, functions = _stack(attention_cubin), _functions(attention_cubin)
    for number, channels, images in (("f", 4, 4), ("f", 4, 8), ("13__nv_bfloat16", 8, 4), ("6__half", 4, 8)):
        load = r"\bLDG\.E\.128" if number == "f" or channels == 8 else r"\bLDG\.E\.64"
        for kernel, rows in (("15one_pass_kernel", 3), ("24one_pass_backward_kernel", 4)):
            name = f"{kernel}I{number}Li{channels}ELi{images}E"
            code = _code(functions, name)
            assert {stack for function, stack in stacks.items() if name in function} == {0}
            assert len(re.findall(load, code)) in (rows * images, rows * images + 1)  # and the seed of dropout
            assert len(re.findall(r"\bMUFU\.EX2", code)) == images
