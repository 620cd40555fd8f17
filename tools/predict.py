"""``detr-bf predict`` from a checkout."""

import sys

from detr_bf.commands import command_main

main = command_main("predict")

if __name__ == "__main__":
    sys.exit(main())
