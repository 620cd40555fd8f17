"""``detr-bf predict`` from a checkout."""

import sys

from detr_bf.commands.predict import main

if __name__ == "__main__":
    sys.exit(main())
