"""``detr-bf train`` from a checkout."""

import sys

from detr_bf.commands import command_main

main = command_main("train")

if __name__ == "__main__":
    sys.exit(main())
