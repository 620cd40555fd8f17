"""``detr-bf check`` from a checkout."""

import sys

from detr_bf.commands.train import check as main

if __name__ == "__main__":
    sys.exit(main())
