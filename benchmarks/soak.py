"""Training runs that are killed at random moments, again and again: none may be lost, hang, or end with other weights.

python benchmarks/soak.py --kills 200 --output benchmarks/results/soak_cpu.json

Tiny detectors train on generated data, some by one process and some by several under torchrun, and are killed with
SIGKILL: a process, all of them, or the launcher and all of them. The same command goes on each time, until the run is
done and its weights, optimiser, random numbers, records and detections are compared with those of an undisturbed run.
Exit code 1 when anything is not as it must be; it is listed. Results depend on the moments, which no seed fixes.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from attempts import KINDS, Attempt, Launch, Phase, Standing, fingerprint, make_data, phase_of_a_kill, standing
from command import circumstances
from detr_bf.cli import run_tool
from detr_bf.errors import InputError
from detr_bf.files import write_json

EVERY = 2  # steps between checkpoints
LIMIT = 300  # seconds until an attempt counts as hanging


@dataclass
class Counts:
    """What happened, and what must not have."""

    kills: Counter[str] = field(default_factory=Counter)  # by what was killed
    phases: Counter[str] = field(default_factory=Counter)  # by what the run was doing
    resumed: int = 0  # attempts that found a checkpoint to go on from
    restarted: int = 0  # of these, by torchrun itself
    finished: Counter[str] = field(default_factory=Counter)  # runs, by the number of processes
    longest_resume: float = 0.0  # seconds from the start of an attempt until it had its checkpoint
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"kills: {sum(self.kills.values())} ({_listed(self.kills)})",
            f"while: {_listed(self.phases)}",
            f"resumed {self.resumed} times, of which {self.restarted} by torchrun, the slowest after "
            f"{self.longest_resume:.1f} s",
            f"finished with the same bits: {_listed(self.finished)}",
            f"faults: {len(self.faults)}",
        ]
        return "\n".join([*lines, *(f"  {fault}" for fault in self.faults)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="default %(default)s")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="under torchrun, default %(default)s")
    parser.add_argument(
        "--alone", type=float, default=0.7, metavar="SHARE", help="of the runs by one process; default %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choices, default %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the counts here, as JSON")
    options = parser.parse_args(arguments)
    return run_tool(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Kill, check, print, write; 1 when anything is not as it must be."""
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
    if options.output is not None:
        write_json(options.output, {**circumstances(options), "seconds": seconds, **asdict(counts)})
    return 1 if counts.faults else 0


class Soak:
    """Runs one after the other until there were enough kills."""

    def __init__(self, work: Path, options: argparse.Namespace) -> None:
        self.work = work
        self.kills: int = options.kills
        self.group: int = options.processes
        self.alone: float = options.alone
        self.random = random.Random(options.seed)
        self.counts = Counts()
        self.launches = {count: Launch(make_data(work, count, EVERY), count) for count in (1, self.group)}
        self.undisturbed: dict[int, tuple[str, float]] = {}  # fingerprint and seconds, by the number of processes

    def run(self) -> Counts:
        with tqdm(total=self.kills, unit="kill", disable=None) as bar:
            number = 0
            while bar.n < self.kills and not self.counts.faults:
                count = 1 if self.random.random() < self.alone else self.group
                if count not in self.undisturbed:
                    self.undisturbed[count] = self._undisturbed(count)
                self._one_run(self.work / f"run{number}", count, bar)
                number += 1
        return self.counts

    def _undisturbed(self, count: int) -> tuple[str, float]:
        folder = self.work / f"undisturbed{count}"
        start = time.monotonic()
        attempt = Attempt(self.launches[count], folder)
        if attempt.wait(LIMIT) != 0:
            raise InputError(f"training does not work even undisturbed: {attempt.said()}")
        return fingerprint(folder), time.monotonic() - start

    def _one_run(self, folder: Path, count: int, bar: tqdm) -> None:
        """From an empty folder until it is finished, killed as often as chance has it."""
        expected, span = self.undisturbed[count]
        before = standing(folder)
        while not self.counts.faults:
            restarts = self.random.randrange(2) if count > 1 else 0
            attempt = Attempt(self.launches[count], folder, restarts)
            killed = ""
            if bar.n < self.kills:
                killed = self._kill(attempt, folder, before, self.random.uniform(0, span))
                bar.update(bool(killed))
            code = attempt.wait(LIMIT)
            self._learn(attempt, folder, before)
            after = standing(folder)
            self.counts.faults += [f"{folder.name}: {fault}" for fault in after.faults(before, EVERY)]
            if code is None:
                self._fault(folder, attempt, f"no end within {LIMIT} s")
            elif code == 0:
                self._finished(folder, count, expected)
                return
            elif not killed:
                self._fault(folder, attempt, f"ended with exit code {code} though nobody had killed it")
            before = after

    def _kill(self, attempt: Attempt, folder: Path, before: Standing, seconds: float) -> str:
        """Let it run for so long, and kill something; what that was, nothing if it had ended by then."""
        if attempt.wait(seconds) is not None:
            return ""
        kind = self.random.choice(KINDS) if attempt.launch.processes > 1 else "process"
        kind = attempt.kill(kind, self.random)
        if attempt.restarts == 0 or kind == "launcher and all":
            attempt.wait(LIMIT)  # what is left of it must end by itself
            self.counts.phases[phase_of_a_kill(folder, before)] += 1
        else:
            self.counts.phases[Phase.UNKNOWN] += 1  # the next start has changed the files by now
        self.counts.kills[kind] += 1
        return kind

    def _learn(self, attempt: Attempt, folder: Path, before: Standing) -> None:
        resumptions = standing(folder).resumptions - before.resumptions
        self.counts.resumed += resumptions
        self.counts.restarted += max(0, resumptions - (before.step is not None))
        self.counts.longest_resume = max(self.counts.longest_resume, attempt.resumed_after or 0.0)

    def _finished(self, folder: Path, count: int, expected: str) -> None:
        if fingerprint(folder) == expected:
            self.counts.finished[f"of {count}"] += 1
            shutil.rmtree(folder)
        else:
            self.counts.faults.append(f"{folder.name}: finished with other bits than an undisturbed run")

    def _fault(self, folder: Path, attempt: Attempt, what: str) -> None:
        self.counts.faults.append(f"{folder.name}: {what}; it said\n{attempt.said()}")


def _listed(counter: Counter[Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counter.items())) or "none"


if __name__ == "__main__":
    sys.exit(main())
