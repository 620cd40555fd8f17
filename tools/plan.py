"""``detr-bf plan`` from a checkout."""

import sys

from detr_bf.commands import command_main

main = command_main("plan")

if __name__ == "__main__":
    sys.exit(main())
