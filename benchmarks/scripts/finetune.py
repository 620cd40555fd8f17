"""``detr-bf finetune`` with one thread, and processor time as the clock of ``train.minutes``, as the other scripts."""

import sys
import time
from types import SimpleNamespace

import torch

from detr_bf.commands import main
from detr_bf.engine import state

torch.set_num_threads(1)
vars(state)["time"] = SimpleNamespace(monotonic=time.process_time)  # the clock of training steps
sys.exit(main(["finetune", *sys.argv[1:]]))
