"""``detr-bf analyze`` from a checkout."""

import sys

from detr_bf.commands.analyze import main

if __name__ == "__main__":
    sys.exit(main())
