"""``detr-bf train`` from a checkout."""

import sys

from detr_bf.commands.train import main

if __name__ == "__main__":
    sys.exit(main())
