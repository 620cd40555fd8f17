"""Training state: averaged weights with the statistics of their batch norms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from detr_bf.engine.state import AveragedWeights


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False))
    model.register_buffer("indices", torch.arange(7) * 7)
    return model.double()


@pytest.mark.parametrize("warmup", [0, 3])
def test_parameters_and_statistics_are_averaged_alike_and_other_buffers_copied(warmup: int) -> None:
    model = network()
    average = AveragedWeights(model, 0.9, warmup)
    expected: dict[str, torch.Tensor] = {}
    for step in range(1, 5):
        decay = 0.9 * (1 - math.exp(-step / warmup)) if warmup else 0.9
        model(torch.randn(8, 3, dtype=torch.float64))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        average.update_parameters(model)
        for name, value in model.state_dict().items():
            if value.is_floating_point() and name in expected:
                expected[name] = decay * expected[name] + (1 - decay) * value
            else:
                expected[name] = value.clone()
    found = average.module.state_dict()
    assert {"1.running_mean", "1.running_var", "0.weight"} <= set(found)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)
    assert not torch.equal(found["1.running_mean"], model.state_dict()["1.running_mean"])
    assert found["indices"].tolist() == model.state_dict()["indices"].tolist()
