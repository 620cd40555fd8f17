"""``detr-bf sample-data`` from a checkout."""

import sys

from detr_bf.commands import command_main

main = command_main("sample-data")

if __name__ == "__main__":
    sys.exit(main())
