"""``python -m detr_bf``: the console command ``detr-bf``."""

import sys

from detr_bf.commands import main

if __name__ == "__main__":
    sys.exit(main())
