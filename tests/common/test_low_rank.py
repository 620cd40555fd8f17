"""Layers with low-rank changes, and state dicts that hold them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.common.errors import InputError
from detr_bf.common.low_rank import LowRankLinear, add_low_rank, merged

State = dict[str, Tensor]


class ReadsWeight(nn.Module):
    """Network that reads the weight of a layer instead of calling it, as some of timm do, and shares the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.again(F.linear(x, self.first.weight).relu())


def changed(model: nn.Module, *names: str) -> nn.Module:
    """Return a copy with low-rank changes that are not zero."""
    model = copy.deepcopy(model)
    add_low_rank(model, list(names), 2)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(parameter)
    return model


def test_a_weight_that_is_read_and_a_shared_layer_train_as_the_dense_layer() -> None:
    torch.manual_seed(0)
    model = changed(ReadsWeight(), "first", "again").double()
    dense = ReadsWeight().double()
    dense.load_state_dict(merged(model.state_dict()))
    layer = model.get_submodule("first")
    assert isinstance(layer, LowRankLinear)
    x = torch.randn(3, 4, dtype=torch.float64)
    for each in (model, dense):
        each(x).square().sum().backward()
    gradient = dense.first.weight.grad
    torch.testing.assert_close(layer.lora_b.grad, gradient @ layer.lora_a.T)
    torch.testing.assert_close(layer.lora_a.grad, layer.lora_b.T @ gradient)
    assert layer.base_weight.grad is None
    assert [name for name, _ in model.named_parameters()] == ["first.base_weight", "first.lora_a", "first.lora_b"]
    assert torch.equal(model.eval()(x), dense(x)), "in evaluation the same to the bit"
    assert str(layer) == "LowRankLinear(in_features=4, out_features=4, bias=False, rank=2)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_is_that_of_merged_weights_under_autocast_too(dtype: torch.dtype) -> None:
    model = changed(nn.Sequential(nn.Linear(8, 5)), "0").eval()
    plain = nn.Sequential(nn.Linear(8, 5))
    plain.load_state_dict(merged(model.state_dict()))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        assert torch.equal(model(x := torch.randn(3, 8)), plain(x))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state.pop("0.lora_a"),
        lambda state: state.update({"0.lora_a": torch.zeros(2, 7)}),
        lambda state: state.update({"0.lora_b": torch.zeros(5, 3)}),
        lambda state: state.update({"0.lora_b": torch.zeros(10)}),
        lambda state: state.update({"0.lora_b": torch.zeros(5, 2, dtype=torch.float64)}),
        lambda state: state.update({name: x.int() for name, x in state.items()}),
    ],
)
def test_parameters_that_do_not_fit_together_are_damage(spoil: Callable[[State], object]) -> None:
    state = changed(nn.Sequential(nn.Linear(8, 5)), "0").state_dict()
    spoil(state)
    with pytest.raises(InputError, match=r"0\.base_weight, lora_a and lora_b must be floating-point matrices"):
        merged(state)
