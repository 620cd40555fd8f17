"""Check the data sets of a config of any task and print all errors and warnings; exit code 2 if there are errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from detr_bf.cli import run_tool
from detr_bf.config import load_config, schema_of
from detr_bf.tasks import task_of
from detr_bf.text import safe_message


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", metavar="FILE", help="YAML file; without it the defaults are used")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example data.train.images=FOLDER")
    options = parser.parse_intermixed_args(arguments)

    def run() -> int:
        report = task_of(config_of_any_task(options.config, options.overrides)).examine()
        print(safe_message(report))
        return 2 if report.errors else 0

    return run_tool(run)


def config_of_any_task(path: str | None, overrides: Sequence[str]) -> Any:
    """Load a config of the task that the file names; detection without a file."""
    if path is None:
        return load_config(None, overrides)
    return load_config(path, overrides, schema=schema_of(Path(path)))


if __name__ == "__main__":
    sys.exit(main())
