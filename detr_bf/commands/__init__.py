"""Console command ``detr-bf``.

detr-bf train CONFIG key=value ...       detr-bf evaluate RUN
detr-bf predict RUN IMAGE_OR_FOLDER ... --output DIR

The arguments of a command are read first, without importing torch; the module that does the work is imported then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from typing import NamedTuple

from detr_bf.acceleration.threads import spin_less_beside_others
from detr_bf.commands import arguments as of_data
from detr_bf.commands import model_arguments as of_models
from detr_bf.common.terminal import run_tool


class Command(NamedTuple):
    """Subcommand: its reader of arguments, the module and function that do the work, and its help."""

    read: Callable[[Sequence[str] | None], argparse.Namespace]
    module: str
    help: str
    function: str = "main"


COMMANDS = {
    "new": Command(of_data.new_arguments, "new", "write a commented config for the folder of a data set"),
    "finetune": Command(
        of_data.finetune_arguments, "train", "train a detector on a folder of labelled images", "fine_tune"
    ),
    "train": Command(
        of_data.train_arguments, "train", "train what a config describes, with data checks, evaluation and a report"
    ),
    "evaluate": Command(
        of_data.evaluate_arguments, "train", "evaluate a trained run, a checkpoint or published weights", "evaluate"
    ),
    "predict": Command(of_models.predict_arguments, "predict", "detect objects in images, or classify them"),
    "serve": Command(of_models.serve_arguments, "serve", "serve a detector over HTTP"),
    "check": Command(of_data.check_arguments, "check", "check the data of a folder, a config or a run"),
    "export": Command(
        of_models.export_arguments,
        "export",
        "write a detector for ONNX, OpenVINO or as machine code that gives the same outputs",
    ),
    "benchmark": Command(
        of_models.benchmark_arguments,
        "benchmark",
        "measure the speed and memory of a detector, by format and precision",
    ),
    "convert": Command(
        of_models.convert_arguments, "convert", "write a checkpoint in another format, or without training-only weights"
    ),
    "compare": Command(of_data.compare_arguments, "compare", "compare settings over seeds and images, with intervals"),
    "report": Command(
        of_data.report_arguments, "report", "write the report of a run again, or of several runs side by side"
    ),
    "analyze": Command(of_models.analyze_arguments, "analyze", "analyse trained detectors and classifiers"),
    "plan": Command(of_data.plan_arguments, "plan", "estimate memory, time and learning rates before a run"),
    "replay": Command(of_data.replay_arguments, "replay", "run a captured training step again"),
    "sample-data": Command(of_data.sample_data_arguments, "sample_data", "build a sample data set"),
    "convert-data": Command(
        of_data.convert_data_arguments, "convert_data", "write the folder of a data set as COCO JSON"
    ),
    "recipes": Command(
        of_data.recipes_arguments, "lists", "list the packaged configs, or published weights", "recipes"
    ),
    "settings": Command(of_data.settings_arguments, "lists", "list settings with default and meaning", "settings"),
    "completion": Command(of_data.completion_arguments, "completion", "print a script for completion in bash or zsh"),
}

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
    lines = [f"  {name:<12} {command.help}" for name, command in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="detr-bf",
        description="Train and use detectors with batch attention, and classifiers with its sibling ideas.",
        epilog="\n".join(
            ["commands:", *lines, "", *EXIT_CODES, "", "detr-bf COMMAND --help shows options and examples."]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"detr-bf {metadata.version('detr_bf')}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = parser.parse_args(given[:1]).command
    sys.argv[0] = f"detr-bf {command}"  # the name in usage messages
    if command in ("train", "evaluate", "finetune"):
        spin_less_beside_others()
    return command_main(command)(given[1:])


def command_main(command: str) -> Callable[..., int]:
    """Return the function of a command: arguments (None: those of the process) -> exit code."""
    read, module, _, function = COMMANDS[command]

    def main(arguments: Sequence[str] | None = None) -> int:
        options = read(arguments)
        given = vars(options)
        runs = given.get("runs") or [given[name] for name in ("run", "init_from") if given.get(name)]

        def run() -> int:
            for each in runs:
                of_data.check_run(each)
            work: Callable[[argparse.Namespace], int] = getattr(import_module(f"detr_bf.commands.{module}"), function)
            return work(options)

        return run_tool(run)

    return main
