"""``detr-bf convert`` from a checkout."""

import sys

from detr_bf.commands.convert import main

if __name__ == "__main__":
    sys.exit(main())
