"""``detr-bf replay`` from a checkout."""

import sys

from detr_bf.commands.replay import main

if __name__ == "__main__":
    sys.exit(main())
