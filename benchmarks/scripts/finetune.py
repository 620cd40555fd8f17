"""``detr-bf finetune`` with processor time as the clock of ``train.minutes``, as in the other scripts."""

import sys
import time
from types import SimpleNamespace

from detr_bf.commands import main
from detr_bf.engine import state

vars(state)["time"] = SimpleNamespace(monotonic=time.process_time)  # the clock of training steps
sys.exit(main(["finetune", *sys.argv[1:]]))
