"""``detr-bf report`` from a checkout."""

import sys

from detr_bf.commands.report import main

if __name__ == "__main__":
    sys.exit(main())
