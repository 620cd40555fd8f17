"""``python -m detr_bf``: the console command ``detr-bf``."""

import sys

from detr_bf.commands import main

sys.exit(main())
