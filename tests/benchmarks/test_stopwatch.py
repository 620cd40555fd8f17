from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stopwatch
from detr_bf.structures import TokenBatch
from stopwatch import Stopwatch, Timed


class Clock:
    """Only work moves it."""

    def __init__(self) -> None:
        self.now = 0.0


class Work(torch.autograd.Function):
    """The identity, which takes ``forward`` seconds and its gradient ``backward``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, forward: float, backward: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, backward
        clock.now += forward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.now += ctx.seconds
        return gradient, None, None, None


class Outer(nn.Module):
    def __init__(self, clock: Clock, inner: nn.Module) -> None:
        super().__init__()
        self.clock, self.inner = clock, inner

    def forward(self, batch: TokenBatch) -> TokenBatch:
        batch = batch.with_tokens(Work.apply(batch.tokens, self.clock, 1.0, 2.0))
        batch = self.inner(batch, factor=3)
        return batch.with_tokens(Work.apply(batch.tokens, self.clock, 4.0, 8.0))


class Inner(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, batch: TokenBatch, factor: int) -> TokenBatch:
        tokens = factor * Work.apply(batch.tokens, self.clock, 16.0, 32.0)
        position = Work.apply(batch.per_sample["position"], self.clock, 64.0, 128.0)
        return replace(batch, tokens=tokens, per_sample={**batch.per_sample, "position": position})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: made.now)
    return made


def test_every_moment_counts_once_for_the_innermost_part(clock: Clock) -> None:
    watch = Stopwatch(torch.device("cpu"))
    module = Timed(Outer(clock, Timed(Inner(clock), watch, "inner")), watch, "outer")
    tokens, position = (torch.ones(1, 2, 3, requires_grad=True) for _ in range(2))
    for _ in range(2):  # the second is a measurement of its own
        watch.start("rest")
        clock.now += 256.0
        batch = module(TokenBatch(tokens, {"position": position}, {"spatial_shapes": ((1, 2),)}))
        with watch.inside("loss"):
            clock.now += 512.0
            total = Work.apply(batch.tokens.sum() + batch.per_sample["position"].sum(), clock, 0.0, 1024.0)
            total.backward()
        clock.now += 2048.0
        assert watch.stop() == {
            "rest": 256.0 + 2048.0,
            "loss": 512.0 + 1024.0,
            "outer": 1.0 + 2.0 + 4.0 + 8.0,
            "inner": 16.0 + 32.0 + 64.0 + 128.0,
        }


def test_values_and_gradients_pass_unchanged() -> None:
    watch = Stopwatch(torch.device("cpu"))
    linear, x = nn.Linear(3, 2), torch.randn(4, 3)
    watch.start("rest")
    plain, timed = linear(x), Timed(linear, watch, "part")(x)
    assert torch.equal(timed, plain)
    (expected,) = torch.autograd.grad(plain.square().sum(), linear.weight)
    (actual,) = torch.autograd.grad(timed.square().sum(), linear.weight)
    assert torch.equal(actual, expected)
