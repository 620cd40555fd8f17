"""``detr-bf train`` from a checkout."""

import sys
from collections.abc import Sequence

from detr_bf.commands import command_main, spin_less_beside_others


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    spin_less_beside_others()  # before torch is loaded
    return command_main("train")(sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
