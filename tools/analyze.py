"""``detr-bf analyze`` from a checkout."""

import sys

from detr_bf.commands import command_main

main = command_main("analyze")

if __name__ == "__main__":
    sys.exit(main())
