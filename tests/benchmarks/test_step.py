"""Parts of a training step, on a tiny model."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cases
import step
from detr_bf.assembly import build_criterion, build_model
from detr_bf.common.structures import TokenBatch
from step import Stopwatch, Timed

TINY = (
    "batch_former.enabled=true",
    "model.backbone.name=resnet18",
    "model.backbone.strides=[32]",
    "model.hidden_dim=32",
    "model.feedforward_dim=32",
    "model.encoder_layers=2",
    "model.decoder_layers=1",
    "model.num_queries=12",
    "model.dropout=0",
)
SIZE = ("--height", "64", "--width", "96", "--rounds", "2", "--device", "cpu")


def setting(*overrides: str) -> cases.Setting:
    preset = cases.Preset(64, 96, 2, (*TINY, "device=cpu", *overrides))
    return cases.Setting(preset, torch.device("cpu"), rounds=2)


@pytest.mark.slow
def test_every_row_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rows.json"
    kinds = ["--batch-sizes", "2", "3", "--precisions", "float32", "bf16", "fp16"]
    assert step.main([*SIZE, *kinds, "--output", str(output), *TINY]) == 0
    record = json.loads(output.read_text())
    found = [(row["precision"], row["batch_size"]) for row in record["rows"]]
    assert found == [(precision, size) for precision in ("float32", "bf16", "fp16") for size in (2, 3)]
    for row in record["rows"]:
        assert set(row["shares"]) == set(step.PARTS)
        assert all(share > 0 for share in row["shares"].values()), row["shares"]
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert row["images_per_second"] == pytest.approx(row["batch_size"] / row["step"]["median"])
        assert row["kept"] > 0
        assert row["peak"] is None, "no GPU columns on a CPU"
    kept = {(row["precision"], row["batch_size"]): row["kept"] for row in record["rows"]}
    assert kept["float32", 3] > kept["float32", 2]  # most is the scaled weights of the backbone, at this size
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2 + len(found)
    assert len({line.count("|") for line in shown}) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("train.recompute_encoder=true", "train.channels_last=true"),
        ("model.name=deformable_detr", "model.backbone.strides=[8,16,32]", "model.extra_levels=1"),
        ("model.name=dfine", "model.backbone.strides=[8,16,32]", "loss.classification=varifocal"),
    ],
)
def test_the_parts_are_the_step(overrides: tuple[str, ...]) -> None:
    measured = step.Step(setting(*overrides), "float32")
    measured()
    start = time.perf_counter()
    parts = measured()
    elapsed = time.perf_counter() - start
    assert set(parts) == set(step.PARTS)
    assert all(seconds > 0 for seconds in parts.values())
    assert sum(parts.values()) == pytest.approx(elapsed, rel=0.1)


def test_it_is_the_step_of_a_training_run() -> None:
    config, batch = setting().preset.config(), cases.make_batch(setting())
    torch.manual_seed(cases.SEED)
    plain = build_model(config, cases.NUM_CLASSES).train()
    measured = step.Step(setting(), "float32")
    torch.manual_seed(1)
    cases.training_step(plain, cases.make_optimizer(config, plain), build_criterion(config), batch, 0.1)
    torch.manual_seed(1)
    measured()
    weights = {key.replace("module.", ""): value for key, value in measured.model.state_dict().items()}
    assert weights.keys() == plain.state_dict().keys()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(weights[key], value, msg=key)


def test_recomputation_keeps_less() -> None:
    assert step.Step(setting("train.recompute_encoder=true"), "float32").kept() < step.Step(setting(), "float32").kept()


@pytest.mark.full
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 7 bytes")],
)
def test_out_of_memory_is_a_row(
    error: RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = step.Step.__call__

    def call(self: step.Step) -> Any:
        if len(self.batch) == 3:
            raise error
        return usual(self)

    monkeypatch.setattr(step.Step, "__call__", call)
    output = tmp_path / "rows.json"
    assert step.main([*SIZE, "--batch-sizes", "3", "2", "--output", str(output), *TINY]) == 0
    first, second = json.loads(output.read_text())["rows"]
    assert first["step"] is None
    assert second["step"]["median"] > 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[2].startswith("| float32 | 3 | out of memory |")
    assert shown[2].count("|") == shown[3].count("|")
    assert step.main([*TINY, *SIZE, "--batch-sizes", "3", "--compare", "seed=1"]) == 0
    assert capsys.readouterr().out.splitlines()[2] == "| all | float32 | 3 | out of memory | | |"


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(self: step.Step) -> Any:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(step.Step, "__call__", call)
    with pytest.raises(RuntimeError, match="shapes differ"):
        step.main([*TINY, *SIZE, "--batch-sizes", "2"])


@pytest.mark.full
def test_settings_are_compared_with_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variants = ["train.recompute_encoder=true", "train.channels_last=true,train.recompute_encoder=true", "seed=1"]
    output = tmp_path / "rows.json"
    arguments = [*SIZE, "--batch-sizes", "2", "--compare", *variants, "--output", str(output)]
    assert step.main([*arguments, "--recipe", "small"]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["settings"] for row in rows] == variants
    assert rows[0]["kept"] < 1
    assert rows[1]["kept"] < 1
    assert rows[2]["kept"] == 1
    assert all(row["time"]["median"] > 0 for row in rows)
    assert capsys.readouterr().out.count("\n| ") == len(variants)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "1"], "--rounds must be 2 or more"),
        (["--recipe", "detr/none"], "config file not found"),
        (["model.masks=true"], "the images of this benchmark have no masks"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert step.main(["--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


# ---- stopwatch ----


class Clock:
    """Clock that advances only by work."""

    def __init__(self) -> None:
        self.now = 0.0


class Work(torch.autograd.Function):
    """Identity whose forward takes ``forward`` seconds and whose backward takes ``backward``."""

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
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    return made


def test_every_moment_counts_once_for_the_innermost_part(clock: Clock) -> None:
    watch = Stopwatch(torch.device("cpu"))
    module = Timed(Outer(clock, Timed(Inner(clock), watch, "inner")), watch, "outer")
    tokens, position = (torch.ones(1, 2, 3, requires_grad=True) for _ in range(2))
    for _ in range(2):  # the second call is a separate measurement
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
