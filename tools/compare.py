"""``detr-bf compare`` from a checkout."""

import sys

from detr_bf.commands import command_main

main = command_main("compare")

if __name__ == "__main__":
    sys.exit(main())
