"""``detr-bf check`` from a checkout."""

import sys

from detr_bf.commands.check import main

if __name__ == "__main__":
    sys.exit(main())
