"""Write the report of a run again from the files of its folder, or put several runs side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from detr_bf.commands.arguments import folder_of_run
from detr_bf.common.errors import InputError
from detr_bf.common.files import CONFIG_FILE, check_output_file, is_file
from detr_bf.common.progress import setup_logging
from detr_bf.common.text import printable, safe_message
from detr_bf.config import saved_config
from detr_bf.report import write_report, write_side_by_side
from detr_bf.tasks import task_class


def main(options: argparse.Namespace) -> int:
    """Write a page of one run, or of several."""
    setup_logging()
    folders = [folder_of_run(run) for run in options.runs]
    first = folders[0]
    if not is_file(first / CONFIG_FILE):
        raise InputError(f"{printable(first)} is no run folder: {CONFIG_FILE} is missing. Give output_dir of a run")
    page = task_class(saved_config(first / CONFIG_FILE).task).page
    if len(folders) == 1:
        if options.output is not None:
            raise InputError("--output is for several runs: the report of one run is written into its folder")
        print(safe_message(write_report(first, page)))
        return 0
    output = options.output or Path("runs.html")
    check_output_file(output, "--output")
    print(safe_message(write_side_by_side(folders, page, output)))
    return 0
