"""Console command ``detr-bf``: one module per subcommand, imported when it is called.

detr-bf train CONFIG key=value ...       detr-bf evaluate CONFIG output_dir=RUN
detr-bf predict --checkpoint RUN --output DIR IMAGE_OR_FOLDER ...
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from detr_bf.config import packaged_configs
from detr_bf.errors import InputError
from detr_bf.text import printable

COMMANDS = {  # name -> (module, function, help)
    "new": ("new", "main", "write a commented config for the folder of a data set"),
    "train": ("train", "main", "train what a config describes, with data checks, evaluation and a report"),
    "evaluate": ("train", "evaluate", "evaluate a trained run, or weights given as init_from=FILE"),
    "predict": ("predict", "main", "detect objects in images, or classify them"),
    "serve": ("serve", "main", "serve a detector over HTTP"),
    "check": ("train", "check", "check the data of a config"),
    "export": ("export", "main", "write a detector for ONNX, OpenVINO or as machine code that gives the same outputs"),
    "benchmark": ("benchmark", "main", "measure the speed and memory of a detector, by format and precision"),
    "convert": ("convert", "main", "write a checkpoint in another format, or without training-only weights"),
    "compare": ("compare", "main", "compare settings over seeds and images, with intervals"),
    "report": ("report", "main", "write the report of a run again, or of several runs side by side"),
    "analyze": ("analyze", "main", "analyse trained classifiers"),
    "plan": ("plan", "main", "estimate memory, time and learning rates before a run"),
    "replay": ("replay", "main", "run a captured training step again"),
    "sample-data": ("sample_data", "main", "build a sample data set"),
    "convert-data": ("convert_data", "main", "write the folder of a data set as COCO JSON"),
    "recipes": ("train", "recipes", "list the packaged configs, or published weights"),
    "completion": ("completion", "main", "print a script for completion in bash or zsh"),
}
OPENMP_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
BUSY_SHARE = 0.25  # of the cores, used by other programs

EXIT_CODES = (
    "exit codes:",
    "  0      done",
    "  1      errors were found, or a part failed: data with errors, training stopped, an image was skipped",
    "  2      bad input: nothing was started; the message says what was expected and what to do",
    "  3      only replay: everything is finite now",
    "  128+N  stopped by signal N (130: Ctrl-C, 143: SIGTERM); a training run is saved for --resume",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    lines = [f"  {name:<12} {text}" for name, (_, _, text) in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="detr-bf",
        description="Train and use detectors with batch attention, and classifiers with its sibling ideas.",
        epilog="\n".join(
            ["commands:", *lines, "", *EXIT_CODES, "", "detr-bf COMMAND --help shows options and examples."]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = parser.parse_args(given[:1]).command
    sys.argv[0] = f"detr-bf {command}"  # the name in usage messages
    if command in ("train", "evaluate"):
        spin_less_beside_others()
    return command_main(command)(given[1:])


def spin_less_beside_others(seconds: float = 0.2) -> None:
    """Set ``GOMP_SPINCOUNT=1000`` if other programs use a quarter of the cores or more (Linux only).

    OpenMP's threads wait for each other by spinning, which beside other programs makes a step several times slower; few
    spins cost about a tenth alone (benchmarks/README.md, "Threads beside other programs"). The runtime reads the
    variable when torch is loaded, so this must be called before. Settings of the user are kept.

    Args:
        seconds: duration of the measurement.
    """
    if sys.platform != "linux" or "torch" in sys.modules or any(name in os.environ for name in OPENMP_SETTINGS):
        return
    with suppress(OSError, ValueError):  # no /proc, or another format
        before = _busy_and_all_ticks()
        time.sleep(seconds)
        busy, ticks = (after - start for after, start in zip(_busy_and_all_ticks(), before, strict=True))
        if ticks > 0 and busy >= BUSY_SHARE * ticks:
            os.environ["GOMP_SPINCOUNT"] = "1000"
            print(
                f"other programs use {100 * busy / ticks:.0f} % of the cores: OpenMP's threads wait with few spins "
                "(GOMP_SPINCOUNT=1000)",
                file=sys.stderr,
            )


def _busy_and_all_ticks() -> tuple[int, int]:
    """Return the busy and all clock ticks of the cores that this process may use, since the start of the system.

    Raises:
        OSError: there is no /proc/stat.
        ValueError: it has another format.
    """
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    ticks = [[int(value) for value in row[1:9]] for row in rows if row[0] in cores]  # user to steal
    if not all(len(row) == 8 for row in ticks):
        raise ValueError("/proc/stat has fewer than 8 columns")
    everything = sum(map(sum, ticks))
    return everything - sum(idle + waiting for _, _, _, idle, waiting, *_ in ticks), everything


def command_main(command: str) -> Callable[[Sequence[str]], int]:
    """Return the function of a command: arguments -> exit code."""
    module, function, _ = COMMANDS[command]
    found: Callable[[Sequence[str]], int] = getattr(import_module(f"detr_bf.commands.{module}"), function)
    return found


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add configs, by ``--config`` or as positional arguments, and ``key=value`` overrides."""
    parser.add_argument(
        "--config", metavar="CONFIG", nargs="+", action="extend", default=[], help="the same as positional arguments"
    )
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="CONFIG|key=value",
        help="YAML files or names of packaged configs, which are merged in order, and settings that replace theirs",
    )


def configs_and_overrides(options: argparse.Namespace) -> tuple[list[Path], list[str]]:
    """Return the config files and the overrides of a command line.

    Raises:
        InputError: a config is neither a file nor the name of a packaged config.
    """
    given = [*options.config, *options.settings]
    if not all(text.strip() for text in given):
        raise InputError("an empty argument: expected a config, or an override such as train.epochs=12")
    overrides = [text for text in given if "=" in text and "/" not in text.partition("=")[0] and not _is_yaml(text)]
    return [_config_file(text) for text in given if text not in overrides], overrides


def _is_yaml(text: str) -> bool:
    """Return True for an existing YAML file, whose name may contain ``=``."""
    return text.endswith((".yaml", ".yml")) and os.path.isfile(text)  # noqa: PTH113  False for names that are too long


def _config_file(text: str) -> Path:
    path = Path(text)
    if os.path.isfile(path) or path.suffix in (".yaml", ".yml") or len(path.parts) != 1:  # noqa: PTH113
        return path  # the loader reports a missing file
    known = packaged_configs()
    if text not in known:
        near = difflib.get_close_matches(text, known, n=3, cutoff=0.4)
        hint = f"; nearest names: {', '.join(near)}" if near else ""
        raise InputError(
            f"'{printable(text)}' is neither a file nor a packaged config{hint}. 'detr-bf recipes' lists all "
            f"{len(known)}; settings are given as key=value"
        )
    return known[text]
