"""Check the data of a config and print all errors and warnings; exit code 2 if there are errors."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from detr_bf.cli import run_tool
from detr_bf.commands import add_config_arguments, configs_and_overrides
from detr_bf.config import load_config
from detr_bf.tasks import task_of
from detr_bf.text import safe_message


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_arguments(parser)
    options = parser.parse_intermixed_args(arguments)

    def run() -> int:
        report = task_of(load_config(*configs_and_overrides(options))).examine()
        print(safe_message(report))
        return 2 if report.errors else 0

    return run_tool(run)
