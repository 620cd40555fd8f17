"""State dicts of tiny detectors, and comparing state dicts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tests.detectors.tiny import model, shaken


def state_of(name: str, **changes: object) -> dict[str, Tensor]:
    """Return the state dict of a tiny detector with random tensors."""
    return shaken(model(name, **changes)).state_dict()


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert equal names and bitwise equal tensors."""
    assert actual.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)] == []
