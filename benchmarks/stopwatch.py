"""Where the time of a training step goes: one line of time through forward and backward pass, cut at parts' borders.

A step runs on one stream, and autograd works off a graph in the reverse order of its making. So everything between two
borders belongs to one part, and of a part inside another each moment counts once, for the inner one.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn


class Stopwatch:
    """Which part the device works for, from when on.

    With CUDA the borders are events on the stream, so that nothing waits for them; where the host keeps the device
    waiting, that counts for the part in which it does.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.part = ""
        self._borders: list[tuple[str, Any]] = []  # a part, and the moment from which time is its own

    def start(self, part: str) -> None:
        """From now on time belongs to ``part``."""
        self.part = part
        self._borders.append((part, self._moment()))

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """Time belongs to ``part`` within the block, and to the part before it afterwards."""
        outer = self.part
        self.start(part)
        yield
        self.start(outer)

    def stop(self) -> dict[str, float]:
        """Seconds of each part since the last stop."""
        self.start("")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds: dict[str, float] = defaultdict(float)
        for (part, begin), (_, end) in zip(self._borders, self._borders[1:], strict=False):
            seconds[part] += begin.elapsed_time(end) / 1000 if self.device.type == "cuda" else end - begin
        self._borders.clear()
        return dict(seconds)

    def border(self, value: Any, part: str) -> Any:
        """``value`` itself; when the gradient of one of its tensors arrives, the backward pass enters ``part``."""
        return _each_tensor(value, lambda tensor: _Border.apply(tensor, self, part) if tensor.requires_grad else tensor)

    def _moment(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Timed(nn.Module):
    """A module that counts as ``part``, forward and backward."""

    def __init__(self, module: nn.Module, watch: Stopwatch, part: str) -> None:
        super().__init__()
        self.module = module
        self.watch = watch
        self.part = part

    def forward(self, *inputs: Any, **settings: Any) -> Any:
        inputs = self.watch.border(inputs, self.watch.part)
        with self.watch.inside(self.part):
            return self.watch.border(self.module(*inputs, **settings), self.part)


class _Border(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, watch: Stopwatch, part: str) -> Tensor:
        ctx.watch, ctx.part = watch, part
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.watch.start(ctx.part)
        return gradient, None, None


def _each_tensor(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same nest of dataclasses, dictionaries and sequences with other tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_each_tensor(item, function) for item in value)
    if isinstance(value, Mapping):
        return {key: _each_tensor(item, function) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: _each_tensor(getattr(value, field.name), function) for field in fields(value)}
        return replace(value, **changed)
    return value
