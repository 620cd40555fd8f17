"""``detr-bf compare`` from a checkout."""

import sys

from detr_bf.commands.compare import main

if __name__ == "__main__":
    sys.exit(main())
