"""Compare training settings over seeds, folds and images."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

from detr_bf.commands.arguments import folder_of_run, split_settings
from detr_bf.common.errors import InputError
from detr_bf.common.files import check_output_folder, is_folder, make_output_folder
from detr_bf.common.progress import setup_logging
from detr_bf.common.text import listed, printable, safe_message
from detr_bf.comparison.experiment import arm_command, read_experiment
from detr_bf.comparison.records import ExperimentFolder, collect, collect_runs
from detr_bf.comparison.runner import (
    CellRunner,
    check_data,
    command_of,
    remove_weights,
    shell_line,
    unfinished_cells,
)
from detr_bf.config import load_config, packaged_experiments, parse_override

logger = logging.getLogger(__name__)


def main(options: argparse.Namespace) -> int:
    """Run an experiment, report on one, or compare runs."""
    actions = {"run": _run, "report": _report, "command": _command, "compare": _compare}
    return actions[options.action](options)


def _run(options: argparse.Namespace) -> int:
    setup_logging()
    for name in ("jobs", "threads"):
        if (value := getattr(options, name)) is not None and not 1 <= value <= 1000:
            raise InputError(f"--{name} must be from 1 to 1000, got {value}")
    experiment = read_experiment(_experiment_file(options.file), options.settings, quick=options.quick)
    output = options.output or Path("runs") / "compare" / experiment.name
    text = f"{os.path.normpath(output)}{'-quick' if options.quick else ''}"
    if "${" in text or parse_override(f"output_dir={text}/x") != {"output_dir": f"{text}/x"}:
        raise InputError(f"--output {printable(text)} has characters with a meaning in YAML: choose another folder")
    folder = ExperimentFolder(Path(text))
    known = set(experiment.cells())
    cells = unfinished_cells(experiment, folder, write_records=not options.print)
    if options.print:
        for cell in cells:
            print(safe_message(shell_line(command_of(experiment, folder, cell), options.threads)))
        return 0
    check_output_folder(folder.path, "--output")
    from detr_bf.comparison.page import check_result_files

    check_result_files(folder.path)
    check_data(experiment, cells)
    folder.describe(experiment)
    if others := [cell.name for cell in folder.trained() if cell.arm in experiment.arms and cell not in known]:
        logger.warning("the report includes cells that the experiment file does not have: %s", listed(others))
    runner = CellRunner(experiment, folder, options.jobs or experiment.jobs, options.threads, options.discard_weights)
    runner.train(cells)
    if options.discard_weights:
        for cell in experiment.cells():
            if folder.record(cell).exists():
                remove_weights(folder.run(cell))
    if len(runner.failures) < len(cells) or not cells:
        try:
            _write(collect(folder), folder.path)
        except InputError as error:
            if not runner.failures:
                raise
            logger.error("no report: %s", error)
    runner.raise_failures()
    return 0


def _experiment_file(text: str) -> Path:
    """Return the path of an experiment file, given by its path or by the name of a packaged one."""
    known = packaged_experiments()
    if text in known and not Path(text).is_file():
        return known[text]
    if Path(text).suffix or os.path.lexists(text):
        return Path(text)
    raise InputError(
        f"'{printable(text)}' is neither an experiment file nor a packaged experiment: {listed(sorted(known))}"
    )


def _report(options: argparse.Namespace) -> int:
    setup_logging()
    if not is_folder(options.folder):
        raise InputError(f"{printable(options.folder)} is not a folder: give the folder of an experiment")
    found = collect(ExperimentFolder(options.folder), options.baseline, options.primary)
    _write(found, options.output or options.folder)
    return 0


def _command(options: argparse.Namespace) -> int:
    """Train one cell by a command, as ``detr-bf compare run`` does in a process of its own."""
    files, overrides = split_settings(options.settings)
    config = load_config(files, overrides, task="detection")
    from detr_bf.comparison.command import train_by_command

    if outcome := train_by_command(config, arm_command("cell", {"command": options.line, "seconds": options.seconds})):
        print(safe_message(outcome))
    return 0


def _compare(options: argparse.Namespace) -> int:
    setup_logging()
    found = collect_runs([folder_of_run(run) for run in options.runs], options.baseline, options.primary)
    _write(found, options.output or Path("comparison"))
    return 0


def _write(arguments: dict[str, Any], folder: Path) -> None:
    """Analyse the cells, write the result and print it as a Markdown table."""
    from detr_bf.comparison.document import analyze  # imports scipy, which --print does not need
    from detr_bf.comparison.page import markdown_table, write_page

    make_output_folder(folder, "--output")
    document = analyze(**arguments)
    page = write_page(document, folder)
    sentences = "\n".join(document["sentences"])
    print(safe_message(f"{markdown_table(document)}\n{sentences}\n\npage {page}"))
