"""Training loop on a linear regression: updates, evaluations, checkpoints, signals and errors."""

from __future__ import annotations

import copy
import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detr_bf.common import distributed
from detr_bf.common.devices import HostCopy
from detr_bf.common.errors import InputError, Interrupted, TrainingError
from detr_bf.engine import Checkpoint, LearningRate, MetricsLog, RunFolder, Trainer, TrainingStep, TrainSettings
from detr_bf.engine.checkpoint import load_checkpoint
from detr_bf.engine.optimizer import RunSchedule
from detr_bf.engine.recovery import load_capture
from detr_bf.engine.state import TrainingState
from detr_bf.evaluation import ScoreThresholds
from detr_bf.interop.weights import read_state
from detr_bf.losses import LossReport
from tests.engine.steps import BATCHES, CLASSES, FEATURES, Examples, examples, regression, spoilt, squared_error
from tests.kernels import A_GPU
from tests.processes import run_together

CPU = torch.device("cpu")


@dataclass
class Scores:
    """Evaluation that returns the given scores in turn and keeps the weights it received."""

    scores: Sequence[float] = (0.1,)
    losses: Sequence[float | None] = (None,)
    seen: list[dict[str, Tensor]] = field(default_factory=list)

    def __call__(self, model: nn.Module, should_stop: Callable[[], bool]) -> Result:
        self.seen.append({name: value.clone() for name, value in model.state_dict().items()})
        score, loss = (each[min(len(self.seen), len(each)) - 1] for each in (self.scores, self.losses))
        return Result(score, loss)


@dataclass(frozen=True)
class Result:
    score: float
    loss: float | None = None

    @property
    def metrics(self) -> dict[str, float | None]:
        return {"AP": self.score, "loss": self.loss}

    @property
    def thresholds(self) -> ScoreThresholds | None:
        if not 0 <= self.score < math.inf:
            return None
        return ScoreThresholds(self.score / 2, (self.score / 4,) * CLASSES.num_classes)

    def to_dict(self) -> dict[str, Any]:
        return {"AP": self.score}


def make(
    folder: Path,
    *,
    model: nn.Module | None = None,
    batches: Callable[[int, int], Examples] = examples,
    phases: list[int] | None = None,
    evaluate: Scores | None = None,
    resume_from: Checkpoint | None = None,
    new_val: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    later: bool = False,
    device: torch.device = CPU,
    precision: torch.dtype = torch.float32,
    **settings: Any,
) -> Trainer:
    """Build a trainer; with ``later`` it checks each step during the next one, as on a GPU."""
    model, run = (model or regression()).to(device), RunFolder(folder)
    run.create()
    progress = resume_from.training["progress"] if resume_from is not None and resume_from.training else None
    kept = {"train": progress["step"], "val": progress["evaluated_step"]} if progress else None
    trained = TrainSettings(**{"epochs": 2, "log_every": 1, "clip_norm": 0.5, **settings})
    parameters = [{"name": "all", "params": list(model.parameters()), "lr": 0.1, "base_lr": 0.1}]
    total = trained.epochs * math.ceil(BATCHES / trained.accumulate)

    def make_batches(epoch: int, start: int, phase: int) -> Iterator[Examples]:
        if phases is not None:
            phases.append(phase)
        return (batches(epoch, number) for number in range(start, BATCHES))

    trainer = Trainer(
        step=TrainingStep(model, squared_error, device, precision),
        optimizer=optimizer(parameters, fused=True),
        learning_rate=LearningRate("cosine", total_steps=total, warmup_steps=2),
        reschedule=lambda steps: RunSchedule(LearningRate("cosine", steps, warmup_steps=2), [0.1], 1 - 6 / steps, 0),
        make_batches=make_batches,
        batches_per_epoch=BATCHES,
        evaluate=evaluate or Scores(),
        settings=trained,
        folder=run,
        metrics=MetricsLog(run.metrics, kept, new_val=new_val),
        class_map=CLASSES,
        config={"of": "a test"},
        resume_from=resume_from,
        new_val=new_val,
    )
    trainer.checks_later |= later
    return trainer


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def plain_loop(epochs: int, accumulate: int, clip: float, decay: float, warmup: int) -> tuple[nn.Module, nn.Module]:
    """Reference training loop with the moving average of its weights."""
    model = regression()
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    steps = math.ceil(BATCHES / accumulate)
    for step in range(epochs * steps):
        progress = max(0, step - 2) / (epochs * steps - 2)
        optimizer.param_groups[0]["lr"] = 0.1 * min(1, (step + 1) / 3) * 0.5 * (1 + math.cos(math.pi * progress))
        first = step % steps * accumulate
        numbers = range(first, min(first + accumulate, BATCHES))
        for number in numbers:
            batch = examples(step // steps, number)
            (2 * (model(batch.inputs)[:, 0] - batch.targets).square().mean() / len(numbers)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        kept = decay * (1 - math.exp(-(step + 1) / warmup)) if warmup else decay
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.copy_(value if step == 0 else kept * mean + (1 - kept) * value)
    return model, average


class Clock:
    """A clock that advances by the given seconds at a batch, an evaluation and a checkpoint."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow: Sequence[float] = ()) -> None:
        self.now, self.slow = 0.0, slow
        monkeypatch.setattr("detr_bf.engine.state.time.monotonic", lambda: self.now)
        save = TrainingState.save

        def saving(state: TrainingState, *others: Path) -> None:
            self.now += 50
            save(state, *others)

        monkeypatch.setattr(TrainingState, "save", saving)

    def batches(self, epoch: int, number: int) -> Examples:
        """Return a batch, which takes a second; the first ones of the run take ``slow`` seconds more."""
        self.now += 1 + sum(self.slow[number : number + 1] if epoch == 0 else ())
        return examples(epoch, number)

    def evaluate(self) -> Scores:
        clock = self

        class Slow(Scores):
            def __call__(self, model: nn.Module, should_stop: Callable[[], bool]) -> Result:
                clock.now += 100
                return super().__call__(model, should_stop)

        return Slow()


@pytest.mark.parametrize("slow", [(), (9.0,), (0.0, 6.0)])
def test_a_run_by_time_ends_with_its_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: Sequence[float]
) -> None:
    """Neither ``epochs`` nor evaluations and checkpoints count, and the schedule ends with the minutes."""
    clock, phases = Clock(monkeypatch, slow), list[int]()
    timed = {"minutes": 40 / 60, "checkpoint_every": 3, "ema_decay": 0.9}
    trainer = make(tmp_path, batches=clock.batches, phases=phases, evaluate=clock.evaluate(), **timed)
    trainer.train()
    steps = 40 - int(sum(slow))
    assert (trainer.progress.step, trainer.progress.seconds) == (steps, 40)
    assert trainer.progress.evaluated_step == steps
    assert phases == ([0] * 4 + [1] * 4 if not slow else [0] * 3 + [1] * 4)  # of 2 epochs: each half of the minutes
    rates = [record["lr/all"] for record in records(tmp_path, "train")]
    rate = LearningRate("cosine", total_steps=steps, warmup_steps=2)
    assert rates[4:] == pytest.approx([0.1 * rate(step) for step in range(4, steps)])
    assert trainer.ema is not None
    assert trainer.ema.decay == 1 - 6 / steps


def test_a_run_by_time_may_check_its_steps_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a step is known during the next one, as on a GPU."""
    trainer = make(tmp_path, batches=Clock(monkeypatch).batches, minutes=0.5, later=True)
    trainer.train()
    assert trainer.progress.step_seconds == 1
    assert trainer.learning_rate.total_steps == 31
    assert trainer.progress.step in (30, 31)


@pytest.mark.parametrize(("step", "slow"), [(2, ()), (13, ()), (13, (3, 3, 3, 3))])
def test_a_resumed_run_by_time_goes_on_with_the_minutes_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, slow: Sequence[float]
) -> None:
    """The schedule, and the phase of an epoch that is resumed in its middle, stay; also after slow first steps."""
    clock, timed = Clock(monkeypatch, slow), {"minutes": 0.5, "epochs": 10}
    phases, in_parts = list[int](), list[int]()

    def stopping(epoch: int, number: int) -> Examples:
        if epoch * BATCHES + number == step - 1:
            signal.raise_signal(signal.SIGTERM)
        return clock.batches(epoch, number)

    torch.manual_seed(1)
    whole = make(tmp_path / "whole", batches=clock.batches, phases=phases, **timed)
    whole.train()
    torch.manual_seed(1)
    with pytest.raises(Interrupted):
        make(tmp_path / "parts", batches=stopping, phases=in_parts, **timed).train()
    last, clock.now = load_checkpoint(tmp_path / "parts" / "last.pt"), 1e6
    resumed = make(tmp_path / "parts", batches=clock.batches, phases=in_parts, resume_from=last, **timed)
    if step > 4:
        assert resumed.learning_rate == whole.learning_rate
    resumed.train()
    assert resumed.progress == whole.progress
    assert whole.progress.step == 30 - sum(slow)
    started = step // BATCHES  # epochs before the one that is resumed, whose phase is given twice
    assert in_parts == [*phases[: started + 1], *phases[started:]]
    if step > 4:  # before that the time of a step is measured again
        for name, value in whole.model.state_dict().items():
            assert torch.equal(resumed.model.state_dict()[name], value), name
    longer = make(tmp_path / "parts", minutes=1, resume_from=load_checkpoint(tmp_path / "parts" / "last.pt"))
    assert longer.learning_rate.total_steps == (15 if slow else 60)
    assert not longer.finished


def test_raw_weights_are_evaluated_without_a_compiler_as_averaged_ones_are(tmp_path: Path) -> None:
    model, ran, in_evaluations = regression(), list[int](), list[int]()

    def compiled(graph: Any, inputs: Any) -> Callable[..., Any]:
        return lambda *given: (ran.append(1), graph(*given))[1]

    class Counted(Scores):
        def __call__(self, model: nn.Module, should_stop: Callable[[], bool]) -> Result:
            before = len(ran)
            model(torch.zeros(2, FEATURES))
            in_evaluations.append(len(ran) - before)
            return super().__call__(model, should_stop)

    model.compile(backend=compiled)
    make(tmp_path / "averaged", model=model, evaluate=Counted(), ema_decay=0.9).train()
    assert ran, "training is compiled"
    assert in_evaluations == [0] * 4
    make(tmp_path / "raw", model=model, evaluate=Counted()).train()
    assert in_evaluations[4:] == [1] * 2


def test_freed_memory_is_kept_with_each_window_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[int] = []
    monkeypatch.setattr("detr_bf.engine.trainer.keep_large_blocks_if_possible", processes.append)
    make(tmp_path / "run", log_every=2).train()
    assert processes == [1] * (2 * BATCHES // 2)


@pytest.mark.full
def test_the_time_of_a_step_is_without_evaluations_and_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Scores):
        def __call__(self, model: nn.Module, should_stop: Callable[[], bool]) -> Result:
            time.sleep(0.5)
            return super().__call__(model, should_stop)

    def save(self: TrainingState, *others: Path) -> None:
        time.sleep(0.5)

    monkeypatch.setattr(TrainingState, "save", save)
    make(tmp_path, evaluate=Slow(), epochs=2).train()
    found = [record["step_seconds"] for record in records(tmp_path, "train")]
    assert len(found) == 2 * BATCHES
    assert max(found) < 0.4


@pytest.mark.parametrize("accumulate", [1, 2, 9])
@pytest.mark.parametrize(("clip", "warmup"), [(0.0, 0), (0.5, 0), (0.5, 4)])
def test_it_equals_a_plain_loop(tmp_path: Path, accumulate: int, clip: float, warmup: int) -> None:
    average = {"ema_decay": 0.7, "ema_warmup_steps": warmup}
    trainer = make(tmp_path, epochs=3, accumulate=accumulate, clip_norm=clip, **average)
    torch.manual_seed(9)
    trainer.train()
    torch.manual_seed(9)  # of the dropout
    model, expected_average = plain_loop(3, accumulate, clip, 0.7, warmup)
    assert trainer.progress.step == 3 * math.ceil(BATCHES / accumulate)
    for trained, expected in ((trainer.model, model), (trainer.evaluation_model, expected_average)):
        for name, value in expected.state_dict().items():
            assert torch.allclose(trained.state_dict()[name], value, rtol=1e-6, atol=1e-7), name


def test_the_averaged_weights_are_evaluated_and_saved_beside_the_others(tmp_path: Path) -> None:
    scores = Scores()
    trainer = make(tmp_path, ema_decay=0.5, epochs=1, evaluate=scores)
    trainer.train()
    saved = load_checkpoint(tmp_path / "last.pt")
    for name, value in trainer.evaluation_model.state_dict().items():
        assert torch.equal(scores.seen[-1][name], value)
        assert torch.equal(saved.weights[name], value)
    assert not torch.equal(saved.model["0.weight"], saved.weights["0.weight"])


def test_evaluations_and_the_best_checkpoint(tmp_path: Path) -> None:
    scores = Scores((0.3, 0.5, 0.5, 0.4))
    trainer = make(tmp_path, epochs=7, eval_every=2, keep_every=3, evaluate=scores)
    result = trainer.train()
    assert result.score == 0.4
    found = records(tmp_path, "val")
    assert [(record["epoch"], record["step"], record["score"]) for record in found] == [
        *((2, 10, 0.3), (4, 20, 0.5), (6, 30, 0.5), (7, 35, 0.4))
    ]
    best = load_checkpoint(tmp_path / "best.pt")
    assert best.training is not None
    assert best.training["progress"]["step"] == 30, "the later of two equal scores"
    assert best.thresholds == {"overall": 0.25, "by_class": [0.125] * CLASSES.num_classes}, (
        "those of its own evaluation"
    )
    assert torch.equal(best.model["0.weight"], scores.seen[2]["0.weight"])
    assert trainer.epochs_text == "last epoch 7 (last.pt), best epoch 6 (best.pt)"
    assert {path.name for path in tmp_path.glob("epoch_*")} == {"epoch_0003.pt", "epoch_0006.pt"}


def test_training_ends_without_a_better_score_for_some_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scores = (0.3, 0.5, 0.5, 0.4, 0.45, 0.9)
    trainer = make(tmp_path, epochs=6, patience=3, evaluate=Scores(scores))
    with caplog.at_level("INFO"):
        assert trainer.train().score == 0.45
    assert trainer.progress.step == 5 * BATCHES
    assert "no better score for 3 epochs, train.patience=3: training ends here" in caplog.text
    assert trainer.epochs_text == "last epoch 5 (last.pt), best epoch 3 (best.pt)", "an equal score is no better one"
    last = load_checkpoint(tmp_path / "last.pt")
    resumed = make(tmp_path, epochs=6, patience=3, evaluate=Scores(scores[5:]), resume_from=last)
    assert resumed.train().score == 0.9, "one evaluation and no step"
    assert resumed.progress.step == 5 * BATCHES
    longer = make(tmp_path, epochs=6, patience=4, evaluate=Scores(scores[5:]), resume_from=last)
    longer.train()
    assert longer.progress.step == 6 * BATCHES


@pytest.mark.parametrize(
    ("scores", "losses", "best"),
    [
        ((0.0, 0.0, 0.0), (None,), 3),
        ((0.0, 0.0, 0.0), (3.0, 1.0, 2.0), 2),
        ((0.0, 0.0, 0.0), (3.0, 2.0, 2.0), 3),
        ((0.0, 0.0, 0.0), (1.0, None, 2.0), 3),
        ((0.5, 0.4, 0.5), (2.0, 1.0, 3.0), 1),
        ((0.5, 0.6, 0.5), (1.0, 2.0, 1.0), 2),
        ((math.nan, -math.inf, -1.0), (None,), 3),
    ],
)
def test_among_equal_scores_the_lower_loss_or_the_later_epoch_is_best(
    tmp_path: Path, scores: tuple[float, ...], losses: tuple[float | None, ...], best: int
) -> None:
    trainer = make(tmp_path, epochs=3, evaluate=Scores(scores, losses))
    trainer.train()
    assert trainer.epochs_text == f"last epoch 3 (last.pt), best epoch {best} (best.pt)"
    saved = load_checkpoint(tmp_path / "best.pt").training
    assert saved is not None
    assert saved["progress"]["step"] == best * BATCHES


@pytest.mark.parametrize(
    ("scores", "calls", "best", "which"),
    [
        ((0.3, 0.1, 0.05, 0.2), "raw averaged averaged raw", 1, "raw"),
        ((0.3, 0.1, 0.6, 0.4, 0.6), "raw averaged averaged raw averaged", 2, "averaged"),  # outputs of the better ones
        ((0.3, 0.3, 0.2, 0.1, 0.2), "raw averaged raw averaged raw", 1, "averaged"),
        ((math.nan, 0.1, 0.0, 0.2), "raw averaged raw averaged", 2, "averaged"),
    ],
)
def test_the_better_of_raw_and_averaged_weights_are_those_of_the_best(
    tmp_path: Path, scores: tuple[float, ...], calls: str, best: int, which: str
) -> None:
    """The order of the evaluations is such that the last one is as a rule that of the better weights."""
    evaluate = Scores(scores)
    trainer = make(tmp_path, epochs=2, ema_decay=0.9, evaluate=evaluate)
    result = trainer.train()
    states = {"raw": trainer.model.state_dict(), "averaged": trainer.ema.module.state_dict() if trainer.ema else {}}
    found = [
        "".join(name for name, state in states.items() if all(torch.equal(x, seen[key]) for key, x in state.items()))
        for seen in evaluate.seen[2:]
    ]
    assert found == calls.split()[2:]
    assert trainer.epochs_text.endswith(f"best epoch {best} (best.pt) with {which} weights")
    assert result.score == scores[len(calls.split()) - 1], "that of the last evaluation, whose outputs are written"
    checkpoint = load_checkpoint(tmp_path / "best.pt")
    assert checkpoint.weights is (checkpoint.model if which == "raw" else checkpoint.ema)
    read = read_state(tmp_path / "best.pt")  # for init_from
    assert all(torch.equal(value, read[name]) for name, value in checkpoint.weights.items())
    for record, names, of_epoch in zip(records(tmp_path, "val"), (calls.split()[:2], found[:2]), (0, 2), strict=True):
        numbers = [None if math.isnan(each) else each for each in scores[of_epoch : of_epoch + 2]]
        assert {f"score/{name}": number for name, number in zip(names, numbers, strict=True)}.items() <= record.items()
        assert record["score"] == max(each for each in numbers if each is not None)


@pytest.mark.parametrize(("none", "epochs"), [(0.0, 6), (-math.inf, 6), (-1.0, 3)])
def test_patience_counts_from_the_first_score_that_is_not_zero(tmp_path: Path, none: float, epochs: int) -> None:
    scores = (none, none, none, 0.1, 0.05, 0.1, 0.3)
    trainer = make(tmp_path, epochs=7, patience=2, evaluate=Scores(scores))
    trainer.train()
    assert trainer.progress.step == epochs * BATCHES


@pytest.mark.parametrize(("patience", "epochs"), [(1, 4), (2, 4), (3, 6), (None, 8)])
def test_patience_counts_epochs_and_not_evaluations(tmp_path: Path, patience: int | None, epochs: int) -> None:
    trainer = make(tmp_path, epochs=8, eval_every=2, patience=patience, evaluate=Scores((0.5, 0.4, 0.3, 0.2)))
    trainer.train()
    assert trainer.progress.step == epochs * BATCHES


def test_without_a_score_there_is_no_best(tmp_path: Path) -> None:
    trainer = make(tmp_path, epochs=1, evaluate=Scores((-math.inf,)))
    trainer.train()
    assert not (tmp_path / "best.pt").exists()
    assert trainer.epochs_text == "last epoch 1 (last.pt), no epoch with a score"


def test_max_steps_ends_within_an_epoch_and_evaluates_there(tmp_path: Path) -> None:
    trainer = make(tmp_path, epochs=4, max_steps=7, eval_every=4)
    trainer.train()
    assert trainer.progress.step == 7
    assert [(record["epoch"], record["step"]) for record in records(tmp_path, "val")] == [(2, 7)]
    assert [record["step"] for record in records(tmp_path, "train")] == list(range(1, 8))


def test_the_log_has_means_over_its_windows(tmp_path: Path) -> None:
    for name, every in (("each", 1), ("two", 2)):
        torch.manual_seed(5)
        make(tmp_path / name, epochs=1, log_every=every).train()
    each, two = (records(tmp_path / name, "train") for name in ("each", "two"))
    assert [record["step"] for record in two] == [2, 4, 5]
    losses = [record["loss"] for record in each]
    means = [sum(losses[:2]) / 2, sum(losses[2:4]) / 2, losses[4]]
    assert [record["loss"] for record in two] == pytest.approx(means)
    assert [record["lr"] for record in each] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1, 0.075, 0.025])


class Saves:
    """Record the steps at which ``last.pt`` is written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[int] = []
        save = Checkpoint.save

        def noted(checkpoint: Checkpoint, path: Path, previous: Path | None = None) -> None:
            if path.name == "last.pt":
                assert checkpoint.training is not None
                self.steps.append(checkpoint.training["progress"]["step"])
            save(checkpoint, path, previous)

        monkeypatch.setattr(Checkpoint, "save", noted)


def test_it_saves_at_the_start_every_few_steps_and_at_the_end_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = Saves(monkeypatch)
    make(tmp_path, epochs=2, checkpoint_every=3, evaluate=Scores((0.5, 0.1))).train()
    assert saves.steps == [0, 3, 5, 5, 6, 9, 10, 10], "once after an epoch, and once more after its evaluation"
    previous = load_checkpoint(tmp_path / "previous.pt").training
    assert previous is not None
    assert previous["progress"]["step"] == 10
    assert previous["progress"]["evaluated_step"] == 5


def test_it_saves_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves, clock = Saves(monkeypatch), iter(range(0, 10_000, 60))
    monkeypatch.setattr("detr_bf.engine.state.time.monotonic", lambda: next(clock))  # a minute later at every call
    make(tmp_path, epochs=1, eval_every=9, checkpoint_minutes=2.5).train()
    assert 0 < len([step for step in saves.steps if 0 < step < BATCHES]) < BATCHES - 1


@pytest.mark.parametrize("step", [1, 4, 5, 7])
def test_a_stopped_and_resumed_run_ends_with_the_same_bits(tmp_path: Path, step: int) -> None:
    settings: dict[str, Any] = {"epochs": 2, "ema_decay": 0.5, "ema_warmup_steps": 5, "evaluate": Scores((0.2, 0.6))}
    whole = make(tmp_path / "whole", **settings)
    torch.manual_seed(1)
    whole.train()
    asked: list[tuple[int, int]] = []

    def stopping(epoch: int, number: int) -> Examples:
        if epoch * BATCHES + number == step - 1:
            signal.raise_signal(signal.SIGTERM)
        return examples(epoch, number)

    def noting(epoch: int, number: int) -> Examples:
        asked.append((epoch, number))
        return examples(epoch, number)

    torch.manual_seed(1)
    with pytest.raises(Interrupted, match=f"stopped at step {step}; everything is saved") as stopped:
        make(tmp_path / "parts", **settings | {"evaluate": Scores((0.2, 0.6))}, batches=stopping).train()
    assert stopped.value.signal_number == signal.SIGTERM
    torch.manual_seed(77)  # the saved random state is used, not this one
    last = load_checkpoint(tmp_path / "parts" / "last.pt")
    scores = Scores((0.2, 0.6) if step <= 5 else (0.6,))
    resumed = make(tmp_path / "parts", **settings | {"evaluate": scores}, batches=noting, resume_from=last)
    resumed.train()
    assert asked == [divmod(number, BATCHES) for number in range(step, 2 * BATCHES)]
    assert resumed.progress == whole.progress
    assert resumed.state.thresholds == whole.state.thresholds
    assert (last.thresholds is None) == (last.training["progress"]["evaluated_step"] == 0)
    for part in ("model", "evaluation_model"):
        for name, value in getattr(whole, part).state_dict().items():
            assert torch.equal(getattr(resumed, part).state_dict()[name], value), name
    for kind in ("train", "val"):
        untimed = [
            [{key: value for key, value in record.items() if key != "step_seconds"} for record in records(path, kind)]
            for path in (tmp_path / "whole", tmp_path / "parts")
        ]
        assert untimed[0] == untimed[1]


@pytest.mark.parametrize(
    ("before", "after", "step", "asked", "total"),
    [
        ({}, {"accumulate": 2}, 12, (2, 2), 15),  # 2 of 5 batches are a step; 2 more steps, and 3 of the last epoch
        ({}, {"accumulate": 2}, 13, (2, 4), 15),  # 3 batches, so that the next whole step is the third
        ({"accumulate": 2}, {}, 7, (2, 2), 15),
        ({"batch_images": 4}, {"batch_images": 2}, 13, None, 15),
    ],
)
def test_the_place_of_a_resumed_run_is_counted_in_epochs_and_images(
    tmp_path: Path,
    before: dict[str, int],
    after: dict[str, int],
    step: int,
    asked: tuple[int, int] | None,
    total: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After a change of the batch size or accumulation the epoch is the same, and so is the learning rate."""
    first: list[tuple[int, int]] = []

    def noting(epoch: int, number: int) -> Examples:
        first.append((epoch, number))
        return examples(epoch, number)

    stopped = make(tmp_path, epochs=4, max_steps=step, **before)
    stopped.train()
    last = load_checkpoint(tmp_path / "last.pt")
    resumed = make(tmp_path, epochs=4, batches=noting, resume_from=last, **after)
    assert resumed.progress.step == step
    resumed.train()
    assert resumed.progress.epoch == 4
    assert resumed.progress.images == 0
    if asked is not None:
        assert first[0] == asked
    found = records(tmp_path, "train")
    assert [record["step"] for record in found] == list(range(1, len(found) + 1))
    assert [record["epoch"] for record in found] == sorted({record["epoch"] for record in found})
    assert found[-1]["epoch"] == 4
    per_epoch = math.ceil(BATCHES / after.get("accumulate", 1))
    rate = LearningRate("cosine", total_steps=4 * per_epoch, warmup_steps=2)
    place = round(found[step]["epoch"] * per_epoch) - 1
    assert found[step]["lr"] == pytest.approx(0.1 * rate(place))


def test_a_run_of_more_epochs_than_asked_for_is_not_resumed(tmp_path: Path) -> None:
    make(tmp_path, epochs=3).train()
    last = load_checkpoint(tmp_path / "last.pt")
    with pytest.raises(InputError, match=r"trained for 3 epochs and 0 images, more than train\.epochs=2: .*init_from="):
        make(tmp_path, epochs=2, resume_from=last)
    make(tmp_path, epochs=3, resume_from=last).train()


@pytest.mark.parametrize("step", [5, 7, 10])
def test_scores_on_other_validation_data_are_forgotten(tmp_path: Path, step: int) -> None:
    make(tmp_path, epochs=2, max_steps=step, evaluate=Scores((0.9, 0.8))).train()
    last = load_checkpoint(tmp_path / "last.pt")
    resumed = make(tmp_path, epochs=2, evaluate=Scores((0.1, 0.2)), resume_from=last, new_val=True)
    resumed.train()
    assert resumed.progress.best_score == (0.2 if step == 5 else 0.1)
    assert load_checkpoint(tmp_path / "best.pt").training["progress"]["step"] == 10  # type: ignore[index]
    scores = [record.get("score") for record in records(tmp_path, "val")]
    assert scores == {5: [None, 0.1, 0.2], 7: [None, None, 0.1], 10: [None, None, 0.1]}[step]
    assert records(tmp_path, "val")[0]["AP"] == 0.9, "the metrics are kept"


@pytest.mark.parametrize("later", [False, True])
def test_a_loss_that_is_not_finite_ends_the_training_without_an_update(tmp_path: Path, later: bool) -> None:
    trainer = make(tmp_path, batches=spoilt, later=later)
    with pytest.raises(TrainingError, match="the loss or the gradient of step 2 is not finite") as failed:
        trainer.train()
    assert "0-1-0" in str(failed.value), "the images of the batch"
    once = make(tmp_path / "once", max_steps=1, seed=0)
    before = {name: value.clone() for name, value in once.model.state_dict().items()}
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())
    assert not torch.equal(trainer.model.state_dict()["0.weight"], before["0.weight"]), "the first step was done"


def test_steps_that_are_not_finite_can_be_skipped(tmp_path: Path) -> None:
    trainer = make(tmp_path, batches=spoilt, max_skipped=2, optimizer=torch.optim.SGD)
    trainer.train()
    assert trainer.progress.step == 10
    assert trainer.progress.skipped == 2
    assert {path.name for path in (tmp_path / "captures").iterdir()} == {
        f"step_{step:07d}_rank_0.pt" for step in (2, 7)
    }

    skipping = make(tmp_path / "other", max_steps=2, batches=spoilt, max_skipped=1, optimizer=torch.optim.SGD)
    one = make(tmp_path / "one", max_steps=1, optimizer=torch.optim.SGD)
    for each in (skipping, one):
        torch.manual_seed(4)
        each.train()
    for name, value in one.model.state_dict().items():
        assert torch.equal(skipping.model.state_dict()[name], value), "the second step changed nothing"


MOMENTUM = partial(torch.optim.SGD, momentum=0.9)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, MOMENTUM], ids=["adamw", "sgd"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("first", [False, True])
def test_steps_checked_later_change_nothing(
    tmp_path: Path, optimizer: Callable[..., torch.optim.Optimizer], accumulate: int, first: bool
) -> None:
    """Weights, averages, log, counters and captures are those of a run that checks each step at once."""

    def bad_twice(epoch: int, number: int) -> Examples:
        """Spoil the loss of the last batch of a step, and only the gradient of the next step."""
        batch, index = examples(epoch, number), number + BATCHES * epoch
        bad = accumulate - 1 if first else 2 * accumulate
        if index == bad:
            return replace(batch, inputs=batch.inputs / 0)
        return replace(batch, targets=batch.targets * 0) if index == bad + accumulate else batch

    def breaking(outputs: Tensor, targets: Tensor) -> LossReport:
        return squared_error(outputs if targets.any() else outputs + (outputs * 0).sqrt(), targets)

    settings = {"epochs": 3, "max_skipped": 3, "ema_decay": 0.5, "log_every": 4, "accumulate": accumulate}
    runs = {}
    for name, later in (("at once", False), ("later", True)):
        torch.manual_seed(5)
        model = nn.Sequential(nn.BatchNorm1d(FEATURES), regression())
        runs[name] = make(tmp_path / name, model=model, batches=bad_twice, optimizer=optimizer, later=later, **settings)
        runs[name].step.criterion = breaking
        runs[name].train()
    wanted, found = runs.values()
    assert found.progress == wanted.progress
    assert wanted.progress.skipped == 2
    for part in ("model", "evaluation_model"):
        for name, value in getattr(wanted, part).state_dict().items():
            assert value.isfinite().all()
            assert torch.equal(getattr(found, part).state_dict()[name], value), name
    logs = [[record | {"step_seconds": 0} for record in records(each.folder.path, "train")] for each in runs.values()]
    assert logs[0] == logs[1]
    captures = [sorted(path.name for path in (each.folder.path / "captures").iterdir()) for each in runs.values()]
    assert captures[0] == captures[1]


def test_after_a_loss_that_is_not_finite_no_other_batch_of_the_step_is_run(tmp_path: Path) -> None:
    """Batches are run one by one, and their losses before the fault are logged."""
    calls: list[int] = []
    trainer = make(tmp_path, epochs=1, batches=spoilt, max_skipped=1, accumulate=3)
    forward = trainer.step.forward
    trainer.step.forward = lambda batch: calls.append(len(calls)) or forward(batch)  # type: ignore[method-assign]
    trainer.train()
    assert len(calls) == 2 + 2 + 2, "two of the first step, once more to find the fault, and the second step"
    assert [record["step"] for record in records(tmp_path, "train")] == [1, 2]


@pytest.mark.parametrize("later", [False, True])
def test_steps_are_skipped_with_a_gradient_scaler(tmp_path: Path, later: bool) -> None:
    scales: list[float] = []

    def noting(epoch: int, number: int) -> Examples:
        scales.append(trainer.scaler.get_scale())
        return spoilt(epoch, number)

    trainer = make(tmp_path, batches=noting, max_skipped=2, precision=torch.float16, later=later, log_every=3)
    trainer.train()
    assert trainer.progress.skipped == 2
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())
    captured = load_capture(tmp_path / "captures" / "step_0000002_rank_0.pt", lambda config: Examples)
    assert captured.scale == scales[1], "that of the step, not of the next one"


def on_two_ranks(folder: Path, later: bool) -> dict[str, Tensor]:
    """Train with an image that spoils the second batch of rank 1 alone."""
    rank = distributed.rank()

    def batches(epoch: int, number: int) -> Examples:
        return (spoilt if rank == 1 else examples)(epoch, 10 + 2 * number + rank if number != 1 else 1)

    torch.manual_seed(rank)
    trainer = make(folder / f"{later}{rank}", batches=batches, max_skipped=2, ema_decay=0.5, log_every=3, later=later)
    trainer.train()
    assert trainer.progress.skipped == 2
    return {**trainer.model.state_dict(), **{f"ema.{k}": v for k, v in trainer.evaluation_model.state_dict().items()}}


def test_two_ranks_skip_together_at_once_or_later(tmp_path: Path) -> None:
    at_once, later = (run_together(2, on_two_ranks, tmp_path, each) for each in (False, True))
    for name, value in at_once[0].items():
        assert value.isfinite().all()
        for other in (at_once[1], *later):
            assert torch.equal(other[name], value), name


@pytest.mark.parametrize("device", [CPU, A_GPU])
def test_the_device_does_not_matter(tmp_path: Path, device: torch.device) -> None:
    """Steps checked later, as on a GPU, two of them skipped, give what steps checked at once give on a CPU."""
    settings = {"epochs": 2, "max_skipped": 2, "ema_decay": 0.5, "log_every": 2, "batches": spoilt}
    wanted = make(tmp_path / "cpu", model=without_dropout(), **settings)
    found = make(tmp_path / "device", model=without_dropout(), device=device, later=device == CPU, **settings)
    assert found.checks_later
    for each in (wanted, found):
        each.train()
    assert found.progress == wanted.progress
    assert wanted.progress.skipped == 2
    for part in ("model", "evaluation_model"):
        for name, value in getattr(wanted, part).state_dict().items():
            ours = getattr(found, part).state_dict()[name]
            assert ours.device.type == device.type
            torch.testing.assert_close(ours.cpu(), value, rtol=1e-5, atol=1e-5)
    logs = [[record["loss"] for record in records(each.folder.path, "train")] for each in (wanted, found)]
    assert logs[1] == pytest.approx(logs[0], rel=1e-4)


def without_dropout() -> nn.Module:
    first, _, last = regression()
    return nn.Sequential(nn.BatchNorm1d(FEATURES), first, last)


def test_a_step_checked_later_is_read_after_the_next_forward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    forward, get = TrainingStep.forward, HostCopy.get
    monkeypatch.setattr(TrainingStep, "forward", lambda *args: events.append("forward") or forward(*args))
    monkeypatch.setattr(HostCopy, "get", lambda copy: events.append("read") or get(copy))
    make(tmp_path / "later", epochs=1, log_every=100, later=True).train()
    first = ["forward", "read"]  # the optimizer has no state before it
    assert events == [*first, "forward", *["forward", "read"] * (BATCHES - 2), "read"]


def test_a_signal_stops_the_run_one_step_later_if_steps_are_checked_later(tmp_path: Path) -> None:
    def stopping(epoch: int, number: int) -> Examples:
        if (epoch, number) == (0, 1):
            signal.raise_signal(signal.SIGTERM)
        return examples(epoch, number)

    with pytest.raises(Interrupted, match="stopped at step 3; everything is saved"):
        make(tmp_path, batches=stopping, log_every=100, later=True).train()
    assert load_checkpoint(tmp_path / "last.pt").training["progress"]["step"] == 3  # type: ignore[index]


@pytest.mark.parametrize("later", [False, True])
def test_too_many_skipped_steps_end_the_training(tmp_path: Path, later: bool) -> None:
    trainer = make(tmp_path, batches=spoilt, max_skipped=1, later=later)
    with pytest.raises(TrainingError, match="step 7 is not finite"):
        trainer.train()


def test_a_capture_holds_the_step(tmp_path: Path) -> None:
    with pytest.raises(TrainingError):
        make(tmp_path, batches=spoilt).train()
    captured = load_capture(tmp_path / "captures" / "step_0000002_rank_0.pt", lambda config: Examples)
    assert captured.step == 2
    assert captured.config == {"of": "a test"}
    assert captured.model.keys() == regression().state_dict().keys()


def test_images_that_cannot_be_read_are_counted_by_epoch(tmp_path: Path) -> None:
    def replaced(epoch: int, number: int) -> Examples:
        return replace(examples(epoch, number), replaced=("lost.jpg cannot be read",) if number in (0, 3) else ())

    make(tmp_path / "few", batches=replaced, max_replaced=2).train()
    with pytest.raises(TrainingError, match="2 images of this epoch cannot be read"):
        make(tmp_path / "many", batches=replaced, max_replaced=1).train()


def test_batch_norms_are_restored_when_a_step_is_skipped(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(FEATURES)
    make(tmp_path, model=nn.Sequential(norm, regression()), batches=spoilt, max_skipped=1, max_steps=2).train()
    assert norm.running_mean is not None
    assert norm.running_mean.isfinite().all()
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("when", [0, 5])
def test_a_checkpoint_that_cannot_be_written_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    save = Checkpoint.save

    def full(checkpoint: Checkpoint, path: Path, previous: Path | None = None) -> None:
        assert checkpoint.training is not None
        if checkpoint.training["progress"]["step"] >= when:
            raise OSError(28, "No space left on device")
        save(checkpoint, path, previous)

    monkeypatch.setattr(Checkpoint, "save", full)
    with pytest.raises(TrainingError, match=f"the checkpoint of step {when} cannot be written"):
        make(tmp_path).train()
    assert (tmp_path / "last.pt").exists() == (when > 0)


def test_a_finished_run_only_evaluates_when_resumed(tmp_path: Path) -> None:
    make(tmp_path, epochs=1).train()
    last = load_checkpoint(tmp_path / "last.pt")

    def none(epoch: int, number: int) -> Iterator[Examples]:
        raise AssertionError("nothing is left to learn")

    scores = Scores((0.7,))
    result = make(tmp_path, epochs=1, resume_from=last, batches=none, evaluate=scores).train()  # type: ignore[arg-type]
    assert result.score == 0.7
    assert len(records(tmp_path, "val")) == 1, "the evaluation of the finished epoch is recorded already"
