"""``detr-bf convert`` from a checkout."""

import sys

from detr_bf.commands import command_main

main = command_main("convert")

if __name__ == "__main__":
    sys.exit(main())
