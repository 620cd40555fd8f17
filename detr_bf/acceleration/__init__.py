"""Everything that makes a CPU faster; results differ by rounding at most. ``accelerate`` applies it to a model."""

import os

ON = os.environ.get("DETR_BF_ACCELERATION") != "off"  # for all tricks of this package
