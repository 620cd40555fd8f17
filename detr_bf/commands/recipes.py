"""List the packaged configs by task; arguments are shell patterns such as '*bfv2'."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Sequence

from detr_bf.cli import run_tool
from detr_bf.commands import packaged_configs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pattern", nargs="*", default=["*"], metavar="PATTERN")
    patterns = parser.parse_args(arguments).pattern

    def run() -> int:
        for name, path in packaged_configs().items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                print(f"{name:<48} {path}")
        return 0

    return run_tool(run)
