"""Run a training command and cause a fault at an exact moment, alone or under torchrun.

python driver.py FAULT MARKER COMMAND ARGUMENTS...

FAULT is a name in ``FAULTS`` with its arguments, separated by colons. A fault that must happen once happens only if the
file MARKER does not exist, and creates it. COMMAND is a file in tools.
"""

from __future__ import annotations

import functools
import io
import multiprocessing
import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from detr_bf.common import distributed
from detr_bf.common.files import UNFINISHED
from detr_bf.detectors import Detector
from detr_bf.engine.state import AveragedWeights
from detr_bf.engine.step import TrainingStep
from detr_bf.evaluation import CocoEvaluator

TOOLS = Path(__file__).parents[2] / "tools"
YEAR = 365 * 86400.0


def main(fault: str, marker: str, command: str, *arguments: str) -> None:
    name, *parameters = fault.split(":")
    FAULTS[name](Path(marker), *parameters)
    sys.argv = [str(TOOLS / command), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def kill(marker: Path, moment: str, who: str, count: str) -> None:
    """Send SIGKILL to rank ``who``, or ``all``, when it reaches ``moment`` for the ``count``-th time."""

    def strike() -> None:
        if who in ("all", str(distributed.rank())) and once(marker):
            for process in siblings() if who == "all" else ():
                os.kill(process, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    MOMENTS[moment](at(int(count), strike))


def before_a_step(strike: Callable[[], None]) -> None:
    before(TrainingStep, "forward", strike)


def in_a_backward_pass(strike: Callable[[], None]) -> None:
    """Strike in the middle of the backward pass."""
    forward = TrainingStep.forward

    def hooked(self: TrainingStep, *arguments: Any) -> Any:
        def halfway(gradient: torch.Tensor) -> None:
            hook.remove()
            strike()

        hook = next(self.model.encoder.parameters()).register_hook(halfway)
        return forward(self, *arguments)

    TrainingStep.forward = hooked  # type: ignore[method-assign]


def in_an_evaluation(strike: Callable[[], None]) -> None:
    """Strike after the first batch of the evaluation, if ``strike`` counts to 1."""
    after(CocoEvaluator, "update", strike)


def while_writing(strike: Callable[[], None]) -> None:
    """Strike with half of ``last.pt`` in its temporary file."""
    save = torch.save

    def half(content: object, target: Any, **options: Any) -> None:
        if isinstance(target, Path) and target.name.startswith(f"{UNFINISHED}last."):
            whole = io.BytesIO()
            save(content, whole)
            target.write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
            strike()
        save(content, target, **options)

    torch.save = half


def between_two_renamings(strike: Callable[[], None]) -> None:
    """Strike when ``last.pt`` is renamed to ``previous.pt`` and the new ``last.pt`` does not exist yet."""
    rename = Path.replace

    def struck(self: Path, target: Path) -> Path:
        if target.name == "last.pt":
            strike()
        return rename(self, target)

    Path.replace = struck  # type: ignore[method-assign,assignment]


def not_finite(marker: Path, what: str, image_id: str) -> None:
    """Make the loss, or only its gradient, not finite whenever the image is in the batch."""
    forward = Detector.forward

    def spoilt(self: Detector, batch: Any) -> Any:
        outputs = forward(self, batch)
        if int(image_id) not in [target.image_id for target in batch.targets]:
            return outputs
        nothing = outputs.logits * 0
        return replace(outputs, logits=outputs.logits + (nothing.sqrt() if what == "gradient" else nothing / 0))

    Detector.forward = spoilt  # type: ignore[method-assign]


def undone(marker: Path, step: str) -> None:
    """Undo a step except for its random numbers."""
    buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def remembering(forward: Callable[..., Any], step: TrainingStep, *arguments: Any) -> Any:
        buffers.extend((buffer, buffer.clone()) for buffer in step.model.buffers())
        return forward(step, *arguments)

    def restoring(learn: Callable[..., Any], *arguments: Any) -> None:
        for buffer, before_it in buffers:
            buffer.copy_(before_it)

    replaced(TrainingStep, "forward", int(step), remembering)
    replaced(torch.optim.AdamW, "step", int(step), restoring)
    replaced(AveragedWeights, "update_parameters", int(step), lambda method, *arguments: None)


def broken_image(marker: Path, count: str, file: str) -> None:
    """Cut an image file in half before a step."""

    def truncate() -> None:
        if once(marker):
            content = Path(file).read_bytes()
            Path(file).write_bytes(content[: len(content) // 2])

    before(TrainingStep, "forward", at(int(count), truncate))


def dead_worker(marker: Path, count: str) -> None:
    """Kill a loader worker during a step."""

    def strike() -> None:
        if once(marker):
            os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)

    before(TrainingStep, "forward", at(int(count), strike))


def late(marker: Path, who: str, seconds: str) -> None:
    """Delay the start of a rank."""
    if os.environ.get("RANK") == who:
        time.sleep(float(seconds))


def wild_clock(marker: Path) -> None:
    """Set the time of day to a year too late and a year too early in turn."""
    right = time.time
    sign = 1.0

    def wrong() -> float:
        nonlocal sign
        sign = -sign
        return right() + sign * YEAR

    time.time = wrong


def small_files(marker: Path, count: str, file: str, more: str) -> None:
    """Limit files from a step on to the size of this one and ``more`` bytes, like a full disk."""

    def strike() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (Path(file).stat().st_size + int(more), resource.RLIM_INFINITY))

    before(TrainingStep, "forward", at(int(count), strike))


FAULTS: dict[str, Callable[..., None]] = {
    "kill": kill,
    "not_finite": not_finite,
    "undone": undone,
    "broken_image": broken_image,
    "dead_worker": dead_worker,
    "late": late,
    "wild_clock": wild_clock,
    "small_files": small_files,
}
MOMENTS: dict[str, Callable[[Callable[[], None]], None]] = {
    "step": before_a_step,
    "backward": in_a_backward_pass,
    "evaluation": in_an_evaluation,
    "writing": while_writing,
    "renaming": between_two_renamings,
}


def once(marker: Path) -> bool:
    """Return True in the first process that calls it."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def at(count: int, strike: Callable[[], None]) -> Callable[[], None]:
    """Return a function that strikes at its ``count``-th call."""
    calls = 0

    def counting() -> None:
        nonlocal calls
        calls += 1
        if calls == count:
            strike()

    return counting


def before(kind: type, name: str, strike: Callable[[], None]) -> None:
    method = getattr(kind, name)

    @functools.wraps(method)
    def struck(*arguments: Any, **options: Any) -> Any:
        strike()
        return method(*arguments, **options)

    setattr(kind, name, struck)


def replaced(kind: type, name: str, number: int, instead: Callable[..., Any]) -> None:
    """Replace the ``number``-th call of a method by ``instead``, which gets the method and its arguments."""
    method, calls = getattr(kind, name), 0

    @functools.wraps(method)
    def struck(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return instead(method, *arguments, **options) if calls == number else method(*arguments, **options)

    setattr(kind, name, struck)


def after(kind: type, name: str, strike: Callable[[], None]) -> None:
    method = getattr(kind, name)

    @functools.wraps(method)
    def struck(*arguments: Any, **options: Any) -> Any:
        result = method(*arguments, **options)
        strike()
        return result

    setattr(kind, name, struck)


def siblings() -> Iterator[int]:
    """Yield the other processes of this torchrun."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            command = (process / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue  # it has ended
        if parent == os.getppid() and int(process.name) != os.getpid() and Path(__file__).name.encode() in command:
            yield int(process.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
