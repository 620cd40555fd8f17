"""Fixtures of the operator tests."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

GIBIBYTES = 24  # that the tests of more than 2^31 elements need


@pytest.fixture
def much_memory(device: torch.device) -> Iterator[None]:
    """Skip a test on a GPU with too little free memory. One such test runs at a time, and gives back what it took."""
    if device.type == "cpu":
        yield
        return
    with FileLock(Path(tempfile.gettempdir()) / "detr_bf_tests_much_memory.lock"):
        gc.collect()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] >> 30
        if free < GIBIBYTES:
            pytest.skip(f"needs {GIBIBYTES} GiB of GPU memory, {free} are free")
        yield
        gc.collect()
        torch.cuda.empty_cache()
