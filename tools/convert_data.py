"""``detr-bf convert-data`` from a checkout."""

import sys

from detr_bf.commands.convert_data import main

if __name__ == "__main__":
    sys.exit(main())
