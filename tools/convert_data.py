"""``detr-bf convert-data`` from a checkout."""

import sys

from detr_bf.commands import command_main

main = command_main("convert-data")

if __name__ == "__main__":
    sys.exit(main())
