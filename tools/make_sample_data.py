"""``detr-bf sample-data`` from a checkout."""

import sys

from detr_bf.commands.sample_data import main

if __name__ == "__main__":
    sys.exit(main())
