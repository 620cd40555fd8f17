"""``detr-bf replay`` from a checkout."""

import sys

from detr_bf.commands import command_main

main = command_main("replay")

if __name__ == "__main__":
    sys.exit(main())
