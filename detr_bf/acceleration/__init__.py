"""Everything that makes a CPU faster; results differ by rounding at most. ``accelerate`` applies it to a model."""

import os

ON = os.environ.get("DETR_BF_ACCELERATION", "on").lower() not in ("off", "0", "false", "no")  # all tricks here
