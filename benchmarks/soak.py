"""Training runs killed at random moments, again and again: none may be lost, hang, or end with other weights.

python benchmarks/soak.py --kills 200 --output benchmarks/results/soak_cpu.json

Tiny detectors train on generated data, in one process or in several under torchrun, and are killed with SIGKILL: one
process, all of them, or torchrun and all of them. The same command resumes each time until the run is done. Its
weights, optimizer, random states, records and detections are then compared with those of an uninterrupted run. Exit
code 1 if anything differs; differences are listed. Results depend on the moments of the kills, which no seed fixes.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from attempts import (
    ALONE,
    EPOCHS,
    EVERY_ONE,
    LAUNCHER,
    ONE,
    STEPS,
    Attempt,
    Launch,
    Standing,
    fingerprints,
    phase_of_a_kill,
)
from command import write_record
from detr_bf.common.errors import InputError
from detr_bf.common.terminal import run_tool

EARLY = 0.25  # share of the kills that may happen while a run is starting
LEAST = 0.6  # least share of a run's time assumed to be left, so that some attempts reach the end
LIMIT = 300  # seconds until an attempt counts as hanging


@dataclass
class Counts:
    """Numbers of kills, resumptions and faults."""

    kills: Counter[str] = field(default_factory=Counter)  # by what was killed
    phases: Counter[str] = field(default_factory=Counter)  # by what the run was doing
    resumed: int = 0  # attempts that found a checkpoint to go on from
    restarted: int = 0  # of these, by torchrun itself
    finished: Counter[str] = field(default_factory=Counter)  # runs, by the number of processes
    longest_resume: float = 0.0  # seconds from the start of an attempt until it had its checkpoint
    faults: Counter[str] = field(default_factory=Counter)  # by kind
    details: list[str] = field(default_factory=list)  # of the faults

    def __str__(self) -> str:
        lines = [
            f"kills: {sum(self.kills.values())} ({_listed(self.kills)})",
            f"while: {_listed(self.phases)}",
            f"resumed {self.resumed} times, of which {self.restarted} by torchrun, the slowest after "
            f"{self.longest_resume:.1f} s",
            f"finished with the same bits: {_listed(self.finished)}",
            f"faults: {_listed(self.faults)}",
        ]
        return "\n".join([*lines, *self.details])

    def fault(self, kind: str, detail: str) -> None:
        """Count a fault."""
        self.faults[kind] += 1
        self.details.append(f"{kind}: {detail}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="default %(default)s")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="under torchrun, default %(default)s")
    parser.add_argument(
        "--alone",
        type=float,
        default=0.7,
        metavar="SHARE",
        help="of the kills: of runs of one process; default %(default)s",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choices, default %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the counts here, as JSON")
    options = parser.parse_args(arguments)
    return run_tool(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Kill, check, print and write; return 1 if there are faults."""
    if options.kills < 1 or options.processes < 2 or not 0 <= options.alone <= 1:
        raise InputError(
            f"--kills must be 1 or more, --processes 2 or more and --alone from 0 to 1; got {options.kills}, "
            f"{options.processes} and {options.alone}"
        )
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as work:
        counts = Soak(Path(work), options).run()
    seconds = time.monotonic() - start
    print(f"{counts}\n{seconds:.0f} s, {seconds / sum(counts.kills.values()):.1f} s a kill")
    write_record(options, seconds=seconds, **vars(counts))
    return 1 if counts.faults else 0


class Undisturbed(NamedTuple):
    """An uninterrupted run."""

    launch: Launch
    prints: dict[str, str]  # of its results
    starting: float  # seconds until the first step is done
    seconds: float  # until it ends


class Soak:
    """Runs one after the other until there are enough kills."""

    def __init__(self, work: Path, options: argparse.Namespace) -> None:
        self.work = work
        self.kills: int = options.kills
        self.group: int = options.processes
        self.alone: float = options.alone
        self.random = random.Random(options.seed)
        self.counts = Counts()
        self.undisturbed: dict[int, Undisturbed] = {}  # by the number of processes

    def run(self) -> Counts:
        """Run until there are enough kills, and return the counts."""
        with tqdm(total=self.kills, unit="kill", disable=None) as bar:
            number = 0
            while self.counts.kills.total() < self.kills:
                processes = 1 if self.counts.kills[ALONE] <= self.alone * self.counts.kills.total() else self.group
                if processes not in self.undisturbed:
                    self.undisturbed[processes] = self._undisturbed(processes)
                self._one_run(self.work / f"run{number}", processes, bar)
                number += 1
        return self.counts

    def _undisturbed(self, processes: int) -> Undisturbed:
        """Run twice, the first to warm up; both must end with the same bits."""
        launch, found = Launch.prepared(self.work, processes), []
        for number in range(2):
            folder, start = self.work / f"undisturbed{processes}_{number}", time.monotonic()
            with Attempt(launch, folder) as attempt:
                if attempt.wait(LIMIT) != 0:
                    raise InputError(f"even an uninterrupted run fails; output\n{attempt.said()}")
            seconds = time.monotonic() - start
            found.append(Undisturbed(launch, fingerprints(folder), attempt.trained_after or 0, seconds))
        if found[0].prints != found[1].prints:
            raise InputError("two uninterrupted runs end with different bits: nothing can be compared with them")
        return found[1]

    def _one_run(self, folder: Path, processes: int, bar: tqdm) -> None:
        """Run from an empty folder until it is finished or has a fault, killed a random number of times."""
        known = self.undisturbed[processes]
        before, code, faults, story = Standing(), None, self.counts.faults.total(), list[str]()
        while code != 0 and self.counts.faults.total() == faults:
            moment, killed = self._moment(known, before), False
            with Attempt(known.launch, folder, self.random.randrange(2) if processes > 1 else 0) as attempt:
                if self.counts.kills.total() < self.kills and attempt.wait(moment) is None:
                    killed = True
                    story.append(f"{self._kill(attempt, before)} at {moment:.1f} s, restarts {attempt.restarts}")
                    bar.update()
                code = attempt.wait(LIMIT)
                before = self._judged(attempt, before, code, killed)
        if code == 0:
            found = fingerprints(folder)
            different = [name for name, value in known.prints.items() if found[name] != value]
            self.counts.finished[f"of {processes}"] += not different
            if different:
                self.counts.fault("other bits", f"{folder.name}, after {'; '.join(story)}: {', '.join(different)}")
        shutil.rmtree(folder)

    def _moment(self, known: Undisturbed, before: Standing) -> float:
        """Return the seconds from a start to a kill, uniform; some runs are done by then."""
        left = max(1 - (before.step or 0) / (STEPS * EPOCHS), LEAST)
        earliest = 0.0 if self.random.random() < EARLY else known.starting
        return self.random.uniform(earliest, known.starting + left * (known.seconds - known.starting))

    def _kill(self, attempt: Attempt, before: Standing) -> str:
        """Kill a process, count it, and return its kind and the phase of the run."""
        kind = ALONE if attempt.launch.processes == 1 else self.random.choice((ONE, EVERY_ONE, LAUNCHER))
        kind = attempt.kill(kind, self.random)
        if attempt.restarts and kind != LAUNCHER:
            phase = "not known"  # torchrun restarts the group, which changes the files
        else:
            attempt.wait(LIMIT)
            phase = phase_of_a_kill(attempt.folder, before)
        self.counts.kills[kind] += 1
        self.counts.phases[phase] += 1
        return f"{kind} killed while {phase}"

    def _judged(self, attempt: Attempt, before: Standing, code: int | None, killed: bool) -> Standing:
        """Return the progress of the run, and count its faults."""
        if code is None:
            self.counts.fault("hang", f"no end within {LIMIT} s; output\n{attempt.said()}")
        elif code != 0 and not killed:
            self.counts.fault("failure", f"exit code {code} without a kill; output\n{attempt.said()}")
        after = Standing.of(attempt.folder)
        for kind, detail in after.faults(before):
            self.counts.fault(kind, f"{attempt.folder.name}: {detail}")
        resumed = after.resumptions - before.resumptions
        self.counts.resumed += resumed
        self.counts.restarted += max(0, resumed - 1) if before.step is not None else resumed
        self.counts.longest_resume = max(self.counts.longest_resume, attempt.resumed_after or 0.0)
        return after


def _listed(counter: Counter[Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counter.items())) or "none"


if __name__ == "__main__":
    sys.exit(main())
