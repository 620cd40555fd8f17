"""Write the report of a run again from the files of its folder, or put several runs side by side.

detr-bf report RUN                          write RUN/report.html again
detr-bf report RUN RUN ... --output FILE    results, settings, curves and pictures of several runs on one page
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from detr_bf.cli import run_tool
from detr_bf.config import saved_config
from detr_bf.errors import InputError
from detr_bf.files import CONFIG_FILE, check_output_file, is_file
from detr_bf.progress import setup_logging
from detr_bf.report import write_report, write_side_by_side
from detr_bf.tasks import task_class
from detr_bf.text import printable, safe_message


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a page and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="page of several runs, default ./runs.html")
    options = parser.parse_args(arguments)
    return run_tool(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    setup_logging()
    first = options.runs[0]
    if not is_file(first / CONFIG_FILE):
        raise InputError(f"{printable(first)} is no run folder: {CONFIG_FILE} is missing. Give output_dir of a run")
    page = task_class(saved_config(first / CONFIG_FILE).task).page
    if len(options.runs) == 1:
        if options.output is not None:
            raise InputError("--output is for several runs: the report of one run is written into its folder")
        print(safe_message(write_report(first, page)))
        return 0
    output = options.output or Path("runs.html")
    check_output_file(output, "--output")
    print(safe_message(write_side_by_side(options.runs, page, output)))
    return 0
