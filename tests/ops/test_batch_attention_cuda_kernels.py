"""CUDA kernels of batch attention on an emulated GPU, compared with the reference in float64.

The emulation also checks every access to memory: inside its tensor, aligned to its size, written where it may be.
"""

from __future__ import annotations

import ctypes
import subprocess
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from detr_bf.ops.reference import batch_attention_reference
from tests.ops.emulation.harness import (
    FLAGS,
    HERE,
    INCLUDES,
    SANITIZER,
    SMALL_GRID,
    TYPES,
    Buffer,
    EmulationError,
    bytes_spanned,
    compiler,
)

SEED = torch.tensor(0x0123_4567_89AB_CDEF)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class Case(NamedTuple):
    dtype: torch.dtype = torch.float32
    images: int = 2
    positions: int = 5
    heads: int = 2
    channels: int = 64

    def __str__(self) -> str:
        sizes = f"B{self.images}N{self.positions}H{self.heads}D{self.channels}"
        return f"{str(self.dtype).removeprefix('torch.')}-{sizes}"


CASES = [
    Case(),  # a lane holds four queries; 16 lanes
    Case(images=4, positions=20, heads=3, channels=32),  # 60 pairs: more blocks than the grid has
    Case(images=1, channels=4, heads=1),  # one lane of four has channels
    Case(images=5, channels=20),  # a lane holds eight queries
    Case(images=8, channels=128),
    Case(images=9, positions=2),  # a second block of queries adds to the gradients of the first
    Case(images=17, positions=1, channels=36),
    Case(images=3, channels=7),  # channels one by one
    Case(images=3, positions=2, heads=1, channels=70),  # more channels than a warp has lanes
    Case(images=6, positions=2, heads=1, channels=132),
    Case(torch.float64, images=3, channels=8),
    Case(torch.float64, images=6, positions=2, channels=34),
    Case(torch.bfloat16, images=3),
    Case(torch.bfloat16, images=7, channels=32),
    Case(torch.bfloat16, images=9, positions=2, channels=32),
    Case(torch.float16, images=4, channels=24),
    Case(torch.float16, images=5, channels=6),
]


class _Call(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("images", "positions", "heads", "channels")),
        ("dropout_p", ctypes.c_double),
        ("buffers", ctypes.POINTER(Buffer)),
        ("strides", ctypes.POINTER(ctypes.c_int64 * 3)),
        ("variants", ctypes.c_char_p),
        ("number_of_buffers", ctypes.c_int32),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    gxx = compiler()
    if gxx is None:
        pytest.skip("g++ is not installed")
    built = tmp_path_factory.mktemp("emulation") / "emulated.so"
    source = str(HERE / "batch_attention_driver.cpp")
    command = [gxx, *FLAGS, SMALL_GRID, *SANITIZER, *INCLUDES, source, "-o", str(built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(built))
    for name in ("attend", "attend_backward"):
        getattr(loaded, f"emulate_{name}").restype = ctypes.c_char_p
    return loaded


def call_of(
    read: dict[str, Tensor], written: dict[str, Tensor], p: float, dtype: torch.dtype, variants: str = ""
) -> _Call:
    tensors = read | written
    buffers = [
        Buffer(name.encode(), tensor.data_ptr(), bytes_spanned(tensor), name in written)
        for name, tensor in tensors.items()
    ]
    strides = [(ctypes.c_int64 * 3)(*(*tensor.stride(), 0, 0, 0)[:3]) for tensor in tensors.values()]
    query = tensors.get("query")
    sizes = tuple(tensors["query"].shape) if query is not None else (0, 0, 0, 0)
    return _Call(
        TYPES[dtype],
        *(*sizes, p),
        (Buffer * len(buffers))(*buffers),
        (ctypes.c_int64 * 3 * len(strides))(*strides),
        variants.encode(),
        len(buffers),
    )


def emulate(
    library: ctypes.CDLL,
    name: str,
    read: dict[str, Tensor],
    written: dict[str, Tensor],
    p: float,
    dtype: torch.dtype,
    variants: str = "",
) -> None:
    problem = getattr(library, f"emulate_{name}")(ctypes.byref(call_of(read, written, p, dtype, variants)))
    if problem is not None:
        raise EmulationError(problem.decode())


def example(case: Case) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return query, key and value as views of one packed tensor, a gradient of the output, and a mask.

    At the first position all keys are ignored.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = (case.images, case.positions, case.heads, case.channels)
    packed = torch.randn(*sizes[:2], 3, *sizes[2:], generator=generator).to(case.dtype)
    mask = torch.rand(case.images, case.positions, generator=generator) < 0.3
    mask[:, 0] = True
    return list(packed.unbind(2)), torch.randn(sizes, generator=generator).to(case.dtype), mask


def inputs_of(tensors: list[Tensor], mask: Tensor | None, p: float) -> dict[str, Tensor]:
    read = dict(zip(("query", "key", "value"), tensors, strict=True))
    return read | ({} if mask is None else {"key_mask": mask.short()}) | ({"seed": SEED} if p else {})


def run(
    library: ctypes.CDLL, tensors: list[Tensor], gradient: Tensor, mask: Tensor | None, p: float, variants: str = ""
) -> tuple[Tensor, ...]:
    """Return output and gradients as the binding computes them."""
    read, dtype = inputs_of(tensors, mask, p), gradient.dtype
    output = torch.full(gradient.shape, torch.inf, dtype=dtype)
    emulate(library, "attend", read, {"output": output}, p, dtype, variants)
    read["grad_output"] = gradient
    narrow = library.emulate_writes_narrow(ctypes.byref(call_of(read, {}, p, dtype)))
    images, positions, heads, channels = gradient.shape
    wide = dtype if narrow else torch.promote_types(dtype, torch.float32)
    packed = torch.full((images, positions, 3, heads, channels), torch.inf, dtype=wide)
    parts = packed.unbind(2)
    written = dict(zip(("grad_query", "grad_key", "grad_value"), parts, strict=True))
    emulate(library, "attend_backward", read, written, p, dtype, variants)
    return output, *parts


def expected(tensors: list[Tensor], gradient: Tensor, mask: Tensor | None, p: float) -> tuple[Tensor, ...]:
    leaves = [tensor.double().requires_grad_() for tensor in tensors]
    output = batch_attention_reference(*leaves, mask, p, SEED if p else None)
    return output.detach(), *torch.autograd.grad(output, leaves, gradient.double())


def assert_close(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], tolerance: float) -> None:
    """Compare relative to the largest number: sums of many terms lose small summands."""
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance * max(1.0, float(other.abs().max())))


@pytest.mark.default_tier("float32-B2N5H2D64-0.0", "float32-B17N1H2D36-0.4")
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(library: ctypes.CDLL, case: Case, p: float) -> None:
    tensors, gradient, mask = example(case)
    for ignored in (None, mask):
        found = run(library, tensors, gradient, ignored, p)
        assert_close(found, expected(tensors, gradient, ignored, p), TOLERANCE[case.dtype])


IN_ONE_PASS = [
    *CASES,  # some of them fall back: float64, more than eight images, channels one by one
    *(Case(images=images, positions=3, channels=32) for images in range(1, 9)),
    *(Case(torch.bfloat16, images=images, positions=3, channels=32) for images in (1, 2, 4, 5, 6, 8)),
    Case(torch.float16, images=8, positions=2, channels=128),  # 32 lanes
    Case(torch.float16, images=3, positions=2, channels=256),
    Case(torch.bfloat16, images=2, positions=2, channels=8),  # one lane of four has channels
]


@pytest.mark.default_tier("float32-B9N2H2D64-0.0", "bfloat16-B9N2H2D32-0.4", "float32-B17N1H2D36-1.0")
@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("case", IN_ONE_PASS, ids=str)
def test_attention_in_one_pass(library: ctypes.CDLL, case: Case, p: float) -> None:
    tensors, gradient, mask = example(case)
    for ignored in (None, mask):
        found = run(library, tensors, gradient, ignored, p, "one_pass")
        assert_close(found, expected(tensors, gradient, ignored, p), TOLERANCE[case.dtype])


def test_one_pass_is_used_up_to_eight_images(library: ctypes.CDLL) -> None:
    """Sums in another order have other bits."""

    def differs(case: Case, unaligned: bool = False) -> bool:
        tensors, gradient, _ = example(case)
        if unaligned:
            tensors[0] = torch.empty(tensors[0].numel() + 1)[1:].view(tensors[0].shape).copy_(tensors[0])
        present, one_pass = (run(library, tensors, gradient, None, 0.0, variants) for variants in ("", "one_pass"))
        return not all(torch.equal(one, other) for one, other in zip(present, one_pass, strict=True))

    for images in (2, 4, 5, 8):
        assert differs(Case(images=images))
    assert not differs(Case(), unaligned=True)
    assert not differs(Case(images=9))
    assert not differs(Case(torch.float64))
    assert not differs(Case(images=3, channels=7))


@pytest.mark.parametrize("name", ["query", "key", "value", "gradient"])
@pytest.mark.parametrize("variant", ["", "one_pass"])
def test_nan_is_seen(library: ctypes.CDLL, name: str, variant: str) -> None:
    """NaN spreads as in the reference: also if it is in every logit of a query."""
    for images in (1, 3, 8) if variant else (1, 3, 8, 9):
        tensors, gradient, _ = example(Case(images=images, positions=2))
        changed = dict(zip(("query", "key", "value", "gradient"), (*tensors, gradient), strict=True))[name]
        changed[0, 1, 0, 3] = torch.nan
        found = run(library, tensors, gradient, None, 0.0, variant)
        for one, other in zip(found, expected(tensors, gradient, None, 0.0), strict=True):
            assert torch.equal(one.isnan(), other.isnan())


def test_an_unknown_variant_is_an_error(library: ctypes.CDLL) -> None:
    tensors, gradient, _ = example(Case())
    with pytest.raises(
        EmulationError, match="'two_pass' is unknown; the variants are tiles, half_atomics and one_pass"
    ):
        run(library, tensors, gradient, None, 0.0, "one_pass,two_pass")


def test_channels_that_do_not_lie_together_16_bytes_wide(library: ctypes.CDLL) -> None:
    """A tensor at an unaligned address is read element by element."""
    tensors, gradient, mask = example(Case())
    odd = []
    for tensor in tensors:
        storage = torch.empty(tensor.numel() + 1)
        odd.append(storage[1:].view(tensor.shape).copy_(tensor))
    assert_close(run(library, odd, gradient, mask, 0.5), expected(tensors, gradient, mask, 0.5), 2e-6)


def test_low_precision_gradients_of_few_images_are_written_once(library: ctypes.CDLL) -> None:
    for images, narrow in ((4, 1), (8, 1), (9, 0)):
        tensors, gradient, _ = example(Case(torch.bfloat16, images=images))
        call = call_of(inputs_of(tensors, None, 0.0) | {"grad_output": gradient}, {}, 0.0, torch.bfloat16)
        assert library.emulate_writes_narrow(ctypes.byref(call)) == narrow


def test_a_write_outside_is_found(library: ctypes.CDLL) -> None:
    """The emulation detects writes outside the buffers, so the other tests would detect them too."""
    tensors, gradient, _ = example(Case())
    with pytest.raises(EmulationError, match="outside all buffers"):
        emulate(library, "attend", inputs_of(tensors, None, 0.0), {"output": gradient[:, :-1]}, 0.0, torch.float32)
