"""Compare training settings over seeds, folds and images.

detr-bf compare run FILE [key=value ...]    train every cell of an experiment file, then report
detr-bf compare report DIR                  report on the finished cells of an experiment, without training
detr-bf compare RUN RUN ...                 compare existing run folders; the settings of the first are the baseline
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detr_bf.cli import run_tool
from detr_bf.comparison.experiment import read_experiment
from detr_bf.comparison.records import ExperimentFolder, collect, collect_runs
from detr_bf.comparison.runner import (
    CellRunner,
    check_data,
    command_of,
    remove_weights,
    shell_line,
    unfinished_cells,
    write_slurm_script,
)
from detr_bf.config import packaged_experiments, parse_override
from detr_bf.errors import InputError
from detr_bf.files import check_output_folder, is_folder, make_output_folder
from detr_bf.progress import setup_logging
from detr_bf.text import counted, listed, printable, safe_message

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an experiment, report on one, or compare runs, and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["run"]:
        options = _run_parser().parse_intermixed_args(given[1:])
        return run_tool(lambda: _run(options))
    if given[:1] == ["report"]:
        options = _report_parser().parse_args(given[1:])
        return run_tool(lambda: _report(options))
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="'detr-bf compare run --help' and 'detr-bf compare report --help' say more. A run folder of the name "
        "run or report is given as ./run.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a finished run")
    _add_report_arguments(parser, "folder of the result, default ./comparison")
    options = parser.parse_args(given)
    return run_tool(lambda: _compare(options))


def _run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{Path(sys.argv[0]).name} run",
        description="Train every cell of an experiment file, then report. The same command goes on where it was "
        "stopped or killed; finished cells are not trained again.",
    )
    parser.add_argument("file", metavar="FILE", help="experiment file, or the name of a packaged one")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of all cells, which win over others")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder of the experiment, default runs/compare/NAME"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="cells to train at a time, default as in the file, or 1")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of each cell, default %(default)s")
    parser.add_argument("--quick", action="store_true", help="try the file out: 4 steps of every arm, in DIR-quick")
    parser.add_argument("--discard-weights", action="store_true", help="remove the checkpoints of finished cells")
    parser.add_argument("--print", action="store_true", help="only print the commands of the unfinished cells")
    parser.add_argument(
        "--slurm", type=Path, metavar="FILE", help="only write a SLURM job array of the unfinished cells"
    )
    return parser


def _report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{Path(sys.argv[0]).name} report",
        description="Report on the finished cells of an experiment, without training. The folder needs only cells/, "
        "the records of its cells; those of finished runs are written if they are missing.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of an experiment")
    _add_report_arguments(parser, "folder of the result, default DIR")
    return parser


def _add_report_arguments(parser: argparse.ArgumentParser, output: str) -> None:
    parser.add_argument("--output", type=Path, metavar="DIR", help=output)
    parser.add_argument("--baseline", metavar="ARM", help="arm that the others are compared with")
    parser.add_argument("--primary", metavar="METRIC", help="metric of the verdict, such as AP50")


def _run(options: argparse.Namespace) -> int:
    setup_logging()
    for name in ("jobs", "threads"):
        if (value := getattr(options, name)) is not None and not 1 <= value <= 1000:
            raise InputError(f"--{name} must be from 1 to 1000, got {value}")
    if options.print and options.slurm:
        raise InputError("--print and --slurm exclude each other")
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
    if options.slurm:
        if not cells:
            raise InputError("all cells are finished: there is nothing to submit")
        write_slurm_script(options.slurm, experiment, folder, cells, options.threads)
        folder.describe(experiment)
        print(safe_message(f"{counted(len(cells), 'cell')}: sbatch {options.slurm}"))
        return 0
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
    raise InputError(f"{printable(text)} is neither a file nor a packaged experiment: {listed(sorted(known))}")


def _report(options: argparse.Namespace) -> int:
    setup_logging()
    if not is_folder(options.folder):
        raise InputError(f"{printable(options.folder)} is not a folder: give the folder of an experiment")
    found = collect(ExperimentFolder(options.folder), options.baseline, options.primary)
    _write(found, options.output or options.folder)
    return 0


def _compare(options: argparse.Namespace) -> int:
    setup_logging()
    found = collect_runs(options.runs, options.baseline, options.primary)
    _write(found, options.output or Path("comparison"))
    return 0


def _write(arguments: dict[str, Any], folder: Path) -> None:
    """Analyse the cells, write the result and print it as a Markdown table."""
    from detr_bf.comparison.analysis import analyze  # imports scipy, which --print does not need
    from detr_bf.comparison.page import markdown_table, write_page

    make_output_folder(folder, "--output")
    document = analyze(**arguments)
    page = write_page(document, folder)
    sentences = "\n".join(document["sentences"])
    print(safe_message(f"{markdown_table(document)}\n{sentences}\n\npage {page}"))
