"""State dicts of tiny detectors, and comparing state dicts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tests.detectors.tiny import model, shaken


def state_of(name: str, **changes: object) -> dict[str, Tensor]:
    """Of a tiny detector of ours, every tensor random."""
    return shaken(model(name, **changes)).state_dict()


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names with the same tensors, to the bit."""
    assert actual.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)] == []
