"""Fixtures of the operator tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

GIBIBYTES = 24  # that the tests of more than 2^31 elements need


@pytest.fixture
def much_memory(device: torch.device) -> Iterator[None]:
    """Skip a test on a GPU with too little free memory, and give back what the test took."""
    if device.type == "cpu":
        yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < GIBIBYTES:
        pytest.skip(f"needs {GIBIBYTES} GiB of GPU memory, {free} are free")
    yield
    gc.collect()
    torch.cuda.empty_cache()
