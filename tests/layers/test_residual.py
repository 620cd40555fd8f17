"""Residual connection with pre- and post-norm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from detr_bf.layers import Residual


def residual(**changes: object) -> Residual:
    torch.manual_seed(0)
    module = Residual(4, **changes)
    torch.nn.init.normal_(module.norm.weight)
    torch.nn.init.normal_(module.norm.bias)
    return module


def norm(module: Residual, x: Tensor) -> Tensor:
    return F.layer_norm(x, (4,), module.norm.weight, module.norm.bias)


def test_pre_and_post_norm() -> None:
    x = torch.randn(2, 3, 4)
    post, pre = residual(), residual(pre_norm=True)
    torch.testing.assert_close(post(x, torch.sin), norm(post, x + x.sin()))
    torch.testing.assert_close(pre(x, torch.sin), x + norm(pre, x).sin())


@pytest.mark.parametrize("pre_norm", [False, True])
def test_dropout_takes_from_the_function_and_never_from_the_input(pre_norm: bool) -> None:
    module, x = residual(dropout=1.0, pre_norm=pre_norm), torch.randn(2, 3, 4)
    torch.testing.assert_close(module(x, torch.exp), x if pre_norm else norm(module, x))
    assert not torch.allclose(module.eval()(x, torch.exp), module.train()(x, torch.exp))
