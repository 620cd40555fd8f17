"""Examine the data sets of a config of any task and print what is wrong with them; exit code 2 if there are errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from detr_bf.cli import run_tool
from detr_bf.config import load_config
from detr_bf.tasks import task_of
from detr_bf.text import safe_message


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", metavar="FILE", help="YAML file; without it the defaults are used")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example data.train.images=FOLDER")
    options = parser.parse_intermixed_args(arguments)

    def run() -> int:
        report = task_of(load_config(options.config, options.overrides)).examine()
        print(safe_message(report))
        return 2 if report.errors else 0

    return run_tool(run)


if __name__ == "__main__":
    sys.exit(main())
