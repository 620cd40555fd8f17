"""Tests that need the compiled kernels say so with this mark."""

from __future__ import annotations

import pytest

from detr_bf.ops import library

needs_kernels = pytest.mark.skipif(not library.DECLARED, reason=f"compiled kernels: {library.PROBLEMS['cpu']}")
