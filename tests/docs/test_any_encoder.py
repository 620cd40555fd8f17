"""Example of the guide: it runs as printed, and its model has the claimed properties."""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

PAGE = Path(__file__).parents[2] / "docs" / "any_encoder.md"


@cache
def page() -> dict[str, Any]:
    """Return the names defined after all code of the page has run."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {"__name__": "any_encoder"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def trained() -> Any:
    """Model of the page in training mode without dropout."""
    model = copy.deepcopy(page()["model"]).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def inputs() -> tuple[Tensor, Tensor]:
    return page()["features"].clone(), page()["outside"]


def test_the_page_runs() -> None:
    assert page()["num_streams"] == 1


def test_clean_half_of_training_is_evaluation() -> None:
    model = trained()
    guessed, streams = model(*inputs())
    evaluated, _ = copy.deepcopy(model).eval()(*inputs())
    assert streams == 2
    clean, second = guessed.chunk(2)
    torch.testing.assert_close(clean, evaluated, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(second, evaluated, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stream", [0, 1])
def test_masked_cells_reach_the_points_of_their_own_hand_in_neither_stream(stream: int) -> None:
    """The mask is repeated for both streams: padded cells get a gradient only through the mean, the same for all."""
    features, outside = inputs()
    features.requires_grad_()
    guessed = trained()(features, outside)[0].unflatten(0, (2, -1))
    (gradient,) = torch.autograd.grad(guessed[stream, 1].sum(), features)
    own = gradient[1] - gradient[1, -1]
    assert not own[outside[1]].any()
    assert own[~outside[1]].any(1).all()


def test_gradients_cross_images_in_the_second_stream_only() -> None:
    features, outside = inputs()
    features.requires_grad_()
    guessed = trained()(features, outside)[0].unflatten(0, (2, -1))
    for stream in range(2):
        (gradient,) = torch.autograd.grad(guessed[stream, 0].sum(), features, retain_graph=True)
        assert bool(gradient[1:].any()) == (stream == 1)


def test_evaluation_reads_no_parameter_of_batch_attention() -> None:
    model = copy.deepcopy(page()["model"]).eval()
    expected = model(*inputs())[0]
    for parameter in model.batch_former.parameters():
        nn.init.constant_(parameter, float("nan"))
    assert torch.equal(model(*inputs())[0], expected)
