"""``detr-bf plan`` from a checkout."""

import sys

from detr_bf.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
