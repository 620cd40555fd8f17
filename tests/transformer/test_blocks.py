"""Position-wise networks, and the residual connection with pre- and post-norm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.common.errors import InputError
from detr_bf.ops import library
from detr_bf.transformer.blocks import MLP, FeedForward, Residual


def test_feed_forward_is_two_matrices_with_relu_between() -> None:
    torch.manual_seed(0)
    module, x = FeedForward(4, 6).double(), torch.randn(2, 3, 4, dtype=torch.float64)
    hidden = (x @ module.expand.weight.T + module.expand.bias).clamp(min=0)
    torch.testing.assert_close(module(x), hidden @ module.contract.weight.T + module.contract.bias)


@pytest.mark.parametrize(("name", "function"), [("gelu", F.gelu), ("prelu", lambda x: F.leaky_relu(x, 0.25))])
def test_feed_forward_with_other_activations(name: str, function: Callable[[Tensor], Tensor]) -> None:
    module, x = FeedForward(4, 6, activation=name), torch.randn(3, 4)
    torch.testing.assert_close(module(x), module.contract(function(module.expand(x))))


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(InputError, match="activation must be relu, prelu, gelu, silu; got 'swish'"):
        FeedForward(4, 6, activation="swish")


def test_feed_forward_treats_every_position_alone() -> None:
    module, x = FeedForward(4, 6), torch.randn(2, 3, 4)
    edited = x.clone()
    edited[1, 2] += 1
    assert (module(edited) != module(x)).any(-1).nonzero().tolist() == [[1, 2]]


def test_feed_forward_drops_hidden_units_in_training_only() -> None:
    module, x = FeedForward(4, 6, dropout=1.0), torch.randn(3, 4)
    assert torch.equal(module(x), module.contract.bias.expand(3, -1))
    assert not torch.allclose(module.eval()(x), module.contract.bias.expand(3, -1))


def test_feed_forward_starts_as_xavier() -> None:
    torch.manual_seed(0)
    module = FeedForward(64, 192)
    for weight in (module.expand.weight, module.contract.weight):
        assert weight.std().item() == pytest.approx((2 / (64 + 192)) ** 0.5, rel=0.03)
        assert weight.abs().max().item() == pytest.approx((6 / (64 + 192)) ** 0.5, rel=0.01)


def test_mlp_is_linear_layers_of_the_widths_with_relu_between_only() -> None:
    torch.manual_seed(0)
    module, x = MLP([3, 5, 7, 2]).double(), torch.randn(10, 3, dtype=torch.float64)
    out = x
    for index, layer in enumerate(module.layers):
        out = (out if index == 0 else out.clamp(min=0)) @ layer.weight.T + layer.bias
    torch.testing.assert_close(module(x), out)
    assert [tuple(layer.weight.shape) for layer in module.layers] == [(5, 3), (7, 5), (2, 7)]
    assert (module(x) < 0).any(), "no ReLU at the end"


def residual(**changes: object) -> Residual:
    torch.manual_seed(0)
    module = Residual(4, **changes)
    torch.nn.init.normal_(module.norm.weight)
    torch.nn.init.normal_(module.norm.bias)
    return module


def norm(module: Residual, x: Tensor) -> Tensor:
    return F.layer_norm(x, (4,), module.norm.weight, module.norm.bias)


def test_residual_with_pre_and_post_norm() -> None:
    x = torch.randn(2, 3, 4)
    post, pre = residual(), residual(pre_norm=True)
    torch.testing.assert_close(post(x, torch.sin), norm(post, x + x.sin()))
    torch.testing.assert_close(pre(x, torch.sin), x + norm(pre, x).sin())


@pytest.mark.parametrize("pre_norm", [False, True])
def test_residual_dropout_takes_from_the_function_and_never_from_the_input(pre_norm: bool) -> None:
    module, x = residual(dropout=1.0, pre_norm=pre_norm), torch.randn(2, 3, 4)
    torch.testing.assert_close(module(x, torch.exp), x if pre_norm else norm(module, x))
    assert not torch.allclose(module.eval()(x, torch.exp), module.train()(x, torch.exp))


@pytest.mark.skipif(not library.compiled(torch.device("cpu")), reason="no compiled operators")
@pytest.mark.parametrize("pre_norm", [False, True])
def test_compiled_dropout_of_residual_and_network(pre_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    residual, network = Residual(8, dropout=0.3, pre_norm=pre_norm), FeedForward(8, 64, dropout=0.3)
    x = torch.randn(20_000, 8)
    seen = []

    def forward(training: bool) -> Tensor:
        torch.manual_seed(1)
        for module in (residual, network):
            module.train(training)
        return residual(x, lambda tokens: seen.append(network(tokens)) or seen[-1])

    with monkeypatch.context() as patch:
        patch.setattr(nn.Dropout, "forward", lambda *_: pytest.fail("torch's dropout was called in training"))
        trained, again = forward(True), forward(True)
    assert torch.equal(trained, again)  # by the seed of torch
    assert not torch.equal(trained, forward(False))
    network.train()
    with torch.no_grad():
        network.contract.weight.copy_(torch.eye(8, 64))
        network.contract.bias.zero_()
        kept = network(x)
        plain = torch.relu(network.expand(x))[:, :8]
    positive = plain > 0
    share = float((kept[positive] == 0).float().mean())
    assert share == pytest.approx(0.3, abs=0.02)
    left = positive & (kept != 0)
    assert torch.allclose(kept[left], plain[left] / 0.7, rtol=1e-4)
