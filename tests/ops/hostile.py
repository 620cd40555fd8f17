"""Calls of the raw operators with inconsistent arguments, run as a program so that a crash ends only this process.

``python -m tests.ops.hostile FIRST COUNT`` makes random calls with seeds FIRST to FIRST + COUNT - 1. Every call must
raise an exception or return tensors with valid memory; the program then prints the number of each outcome.
``python -m tests.ops.hostile CASES`` makes the calls of CASES and prints the message of each, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from detr_bf.ops import library

assert library.DECLARED
SEED = torch.tensor(3)
GIBIBYTE = 1 << 30
HUGE = (2**31 - 1, 2**31, 2**32 + 1, 2**33, 2**62, 2**63 - 1, 4049596863820871141, 2147483629)
NUMBERS = (*HUGE, *(-number for number in HUGE), -(2**63), -1, 0, 1, 2, 5, 6, 7, 24, 30)
DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64)


def deformable(backward: bool) -> list[Any]:
    value, locations, weights = torch.rand(2, 30, 2, 3), torch.rand(2, 3, 2, 2, 2, 2), torch.rand(2, 3, 2, 2, 2)
    arguments = [value, [4, 6, 3, 2], [0, 24], locations, weights]
    return [torch.rand(2, 3, 6), *arguments, False] if backward else arguments


def attention(*first: Tensor) -> list[Any]:
    return [*first, torch.zeros(2, 5, dtype=torch.bool), 0.5, SEED]


OPERATORS: dict[str, Callable[[], list[Any]]] = {
    "ms_deform_attn": lambda: deformable(backward=False),
    "ms_deform_attn_backward": lambda: deformable(backward=True),
    "batch_attention": lambda: attention(*torch.rand(3, 2, 5, 2, 4)),
    "batch_attention_packed": lambda: attention(torch.rand(2, 5, 3, 2, 4)),
    "batch_attention_backward": lambda: attention(*torch.rand(4, 2, 5, 2, 4)),
    "dropout_add": lambda: [torch.rand(300), torch.rand(300), 0.5, SEED],
    "relu_dropout": lambda: [torch.rand(300), 0.5, SEED],
    "relu_dropout_backward": lambda: [torch.rand(300), torch.rand(300), 0.5],
}


def emptied(tensor: Tensor) -> Tensor:
    """Return a tensor with freed storage, as sharded training leaves unused parameters."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def spoilt_tensor(tensor: Tensor, choose: random.Random) -> Any:
    dim = choose.randrange(tensor.dim()) if tensor.dim() else None
    sizes, strides = list(tensor.shape), list(tensor.stride())
    changes: list[Callable[[], Any]] = [
        lambda: tensor.to("meta"),
        lambda: tensor.to(choose.choice(DTYPES)),
        lambda: emptied(tensor),
        lambda: tensor.unsqueeze(choose.randrange(tensor.dim() + 1)),
        lambda: tensor.to_sparse(),
        lambda: torch._efficientzerotensor(sizes),
        lambda: tensor.clone().requires_grad_(),
        lambda: torch.empty(0),
        lambda: torch.tensor(1.0),
    ]
    if dim is not None:
        number = choose.choice([number for number in NUMBERS if number >= 0])
        resized, strided = [*sizes], [*strides]
        resized[dim], strided[dim] = number, number
        changes += [
            lambda: tensor.narrow(dim, 0, choose.randrange(sizes[dim])),
            lambda: tensor.select(dim, 0),
            lambda: tensor.narrow(dim, 0, 1).expand(resized),
            lambda: tensor.transpose(0, dim),
            lambda: tensor.narrow(dim, 0, 1).as_strided([*sizes[:dim], 1, *sizes[dim + 1 :]], strided),
            lambda: tensor.new_empty([0]).as_strided([0, *resized[1:]], strides),
            lambda: tensor.new_empty([0 if at == dim else choose.choice(NUMBERS) for at in range(tensor.dim())]),
            lambda: tensor[(slice(None),) * dim + (slice(None, None, 2),)],
        ]
    return choose.choice(changes)()


def spoilt(argument: Any, choose: random.Random) -> Any:
    if isinstance(argument, Tensor):
        return spoilt_tensor(argument, choose)
    if isinstance(argument, list):
        longer = [*argument, *choose.choices(NUMBERS, k=choose.randrange(3))]
        return [choose.choice(NUMBERS) if choose.random() < 0.4 else number for number in longer]
    if isinstance(argument, bool):
        return not argument
    return choose.choice([float("nan"), float("inf"), -0.1, 1.5, 0.0, 1.0, 1e-9, 1e300, None])


def call(name: str, choose: random.Random) -> str:
    """Make one call with one to three invalid arguments and return its outcome in a word."""
    arguments = OPERATORS[name]()
    try:
        for index in choose.sample(range(len(arguments)), choose.choice([1, 1, 2, 3][: len(arguments)])):
            arguments[index] = spoilt(arguments[index], choose)
    except (RuntimeError, ValueError, TypeError):
        return "not made"  # torch itself refuses such a tensor
    try:
        results = getattr(torch.ops.detr_bf, name)(*arguments)
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return "refused"
    for result in (results,) if isinstance(results, Tensor) else results:
        if result.device.type == "cpu" and result.numel():
            assert result.untyped_storage().nbytes() >= result.numel() * result.element_size()
            result.detach().clone()  # reads all of it
    return "done"


def given(name: str, **changes: Any) -> Callable[[], Any]:
    """Make a call with other arguments, by their names in the schema."""

    def make() -> Any:
        operator = getattr(torch.ops.detr_bf, name).default
        names = [argument.name for argument in operator._schema.arguments]
        arguments = dict(zip(names, OPERATORS[name](), strict=True))
        assert changes.keys() <= arguments.keys()
        return operator(**arguments | changes)

    return make


def dispatched(name: str, key: DispatchKey, device: str) -> Callable[[], Any]:
    """Make a call that reaches the kernels of another device than that of the tensors."""

    def make() -> Any:
        arguments = [
            argument.to(device) if isinstance(argument, Tensor) else argument for argument in OPERATORS[name]()
        ]
        return getattr(torch.ops.detr_bf, name).default.redispatch(DispatchKeySet(key), *arguments)

    return make


BIG, WIDE = 2**63 - 1, 2**40
OVERFLOWING = [2147483629, 4049596863820871141, 3, 2]
LEVEL = "level {} of {} x {} cells, from cell {}, does not fit into the 30 cells of value"
TYPES = "expected float64, float32, float16 or bfloat16"
TOO_LARGE = "the sizes of the tensors are too large"
META = torch.device("meta")

# Changed arguments for both passes of ms_deform_attn, and a part of the error message.
DEFORMABLE: dict[str, tuple[dict[str, Any], str]] = {
    "overflow": ({"spatial_shapes": OVERFLOWING}, LEVEL.format(0, *OVERFLOWING[:2], 0)),
    "sides": ({"spatial_shapes": [BIG, BIG, 3, 2]}, LEVEL.format(0, BIG, BIG, 0)),
    "start": ({"level_start_index": [0, BIG]}, LEVEL.format(1, 3, 2, BIG)),
    "negative": ({"spatial_shapes": [-4, -6, 3, 2]}, "level 0 is -4 x -6"),
    "zero": ({"spatial_shapes": [4, 6, 0, 2]}, "level 1 is 0 x 2"),
    "before": ({"level_start_index": [-1, 24]}, "level 0 starts at -1"),
    "odd": ({"spatial_shapes": [4, 6, 3, 2, 1]}, "one entry for each of 2 levels"),
    "no levels": ({"spatial_shapes": [], "level_start_index": []}, "one entry for each of 2 levels"),
    "meta": ({"sampling_locations": torch.rand(2, 3, 2, 2, 2, 2, device=META)}, "one device"),
    "freed": ({"value": emptied(torch.rand(2, 30, 2, 3))}, "the memory of value does not hold its elements"),
    "rank": ({"value": torch.rand(2, 30, 6)}, "value must be (B, S, H, D)"),
    "numbers": ({"value": torch.ones(2, 30, 2, 3).long()}, TYPES),
    "images": ({"value": torch.zeros(0, 30, 2, 3)}, "disagree in images or heads"),
}
OTHERS: list[tuple[str, dict[str, Any], str]] = [
    (
        "ms_deform_attn",
        {
            "value": torch.empty(0).as_strided((0, 30, WIDE, WIDE), (1,) * 4),
            "sampling_locations": torch.empty(0).as_strided((0, 3, WIDE, 2, 2, 2), (1,) * 6),
            "attention_weights": torch.empty(0).as_strided((0, 3, WIDE, 2, 2), (1,) * 5),
        },
        TOO_LARGE,
    ),
    ("ms_deform_attn_backward", {"grad_output": torch.rand(6, 3, 2)}, "must be (B, Q, H x D)"),
    ("ms_deform_attn_backward", {"grad_output": torch.rand(2, 3, 6, device=META)}, "one device"),
    (
        "batch_attention",
        {**dict.fromkeys(("query", "key", "value"), torch.zeros(1, 1, 1, 1).expand(2**31, 1, 1, 1)), "key_mask": None},
        TOO_LARGE,
    ),
    ("batch_attention", {"key": torch.rand(2, 5, 2, 4, device=META)}, "one device"),
    ("batch_attention", {"query": torch.rand(2, 5, 2, 4, device=META)}, "one device"),
    ("batch_attention", {"key_mask": torch.zeros(2, 5, dtype=torch.bool, device=META)}, "one device"),
    ("batch_attention", {"key": emptied(torch.rand(2, 5, 2, 4))}, "the memory of key does not hold its elements"),
    ("batch_attention_packed", {"seed": SEED.to(META)}, "one device"),
    ("batch_attention_packed", {"packed": torch.rand(2, 5, 3, 8)}, "(B, N, 3, H, D)"),
    ("batch_attention_backward", {"grad_output": torch.rand(2, 5, 2, 4, device=META)}, "one device"),
    ("dropout_add", {"seed": emptied(SEED)}, "the memory of the seed does not hold its elements"),
    ("dropout_add", {"residual": torch.rand(300, device=META)}, "one device"),
    ("relu_dropout", {"seed": SEED.to(META)}, "one device"),
    ("relu_dropout", {"input": torch.ones(0).long()}, TYPES),
    ("relu_dropout_backward", {"p": float("nan")}, "in [0, 1], got nan"),
    ("relu_dropout_backward", {"output": torch.rand(299)}, "one shape, dtype and device"),
]
# By name: a call and a part of the error message.
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    f"{name} {what}": (given(name, **changes), message)
    for name in ("ms_deform_attn", "ms_deform_attn_backward")
    for what, (changes, message) in DEFORMABLE.items()
}
CASES |= {
    f"{name} {number}": (given(name, **changes), message) for number, (name, changes, message) in enumerate(OTHERS)
}
CASES |= {
    f"{name} {key.name}": (dispatched(name, key, device), "the kernels are not for the device of")
    for name in OPERATORS
    for key, device in ((DispatchKey.CPU, "meta"), (DispatchKey.CUDA, "cpu"))
    if key == DispatchKey.CPU or "dropout" not in name  # dropout has no kernels for CUDA
}


def messages() -> dict[str, str]:
    found = {}
    for name, (make, _) in CASES.items():
        print(name, file=sys.stderr, flush=True)  # the last line names the call that crashed
        try:
            found[name] = f"returned {make()}"
        except (RuntimeError, ValueError) as error:
            found[name] = str(error)
    return found


def main(first: int, count: int) -> None:
    ends: Counter[str] = Counter()
    for seed in range(first, first + count):
        choose = random.Random(seed)
        name = choose.choice(sorted(OPERATORS))
        torch.manual_seed(seed)
        print(f"{seed} {name}", file=sys.stderr, flush=True)  # the last line names the call that crashed
        ends[call(name, choose)] += 1
    print(json.dumps(ends))


if __name__ == "__main__":
    if "asan" not in os.environ.get("LD_PRELOAD", ""):  # the sanitizer has its own limit
        resource.setrlimit(resource.RLIMIT_AS, (8 * GIBIBYTE, 8 * GIBIBYTE))
    torch.set_num_threads(1)
    if sys.argv[1] == "CASES":
        print(json.dumps(messages()))
    else:
        main(int(sys.argv[1]), int(sys.argv[2]))
