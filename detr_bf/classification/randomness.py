"""Random numbers of libraries that draw from global generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch


@contextmanager
def seeded(seed: int, *, numpy: bool = True) -> Iterator[None]:
    """Within the block the generators of Python, NumPy and torch (CPU) start from ``seed``; then all are as they were.

    Args:
        numpy: whether NumPy's, too: its state takes much longer to keep than those of the others.
    """
    python = random.getstate()
    try:
        random.seed(seed)
        # not torch.manual_seed, which would seed the generators of every accelerator too
        with _numpy_seeded(seed) if numpy else nullcontext(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        random.setstate(python)


@contextmanager
def _numpy_seeded(seed: int) -> Iterator[None]:
    state = np.random.get_state()
    try:
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        yield
    finally:
        np.random.set_state(state)
