"""Quantiles of the learned scales."""

from __future__ import annotations

import math

import pytest
import torch

from detr_bf.classification.analysis import scale_ratios
from detr_bf.classification.analysis.scale_ratios import draw_scale_ratios
from detr_bf.errors import InputError
from detr_bf.plugins import add_context_broadcasting
from tests.plugins import tiny


def test_the_ratio_of_known_scales() -> None:
    model = tiny.vit(embed_dim=22, num_heads=2)  # quantiles 0.1 and 0.9 of 22 numbers stand 2.1 from the ends
    plugin = add_context_broadcasting(model, [1, 3], scaled=True)
    plugin.scales["3"].data = torch.arange(22, dtype=torch.float64).flip(0) - 10.5
    plugin.scales["1"].data = torch.arange(22, dtype=torch.float64) - 3.1
    first, last = scale_ratios(model).layers
    assert (first.layer, last.layer) == (1, 3)
    assert (first.low, first.high, first.ratio) == pytest.approx((-1.0, 15.8, 1 / 15.8))
    assert (last.low, last.high, last.ratio) == pytest.approx((-8.4, 8.4, 1.0))
    assert scale_ratios(model).rows()[0] == {"layer": 1, "q10": first.low, "q90": first.high, "ratio": first.ratio}


def test_scales_before_training_have_no_ratio() -> None:
    model = tiny.vit()
    add_context_broadcasting(model, "all", scaled=True)
    ratios = scale_ratios(model)
    assert [at.ratio for at in ratios.layers] == [None] * tiny.DEPTH
    [axes] = draw_scale_ratios({"run": ratios}).axes
    assert all(math.isnan(value) for value in axes.lines[0].get_ydata())


def test_a_model_without_scales_is_refused() -> None:
    model = tiny.vit()
    add_context_broadcasting(model)
    for without in (model, tiny.vit()):
        with pytest.raises(InputError, match=r"no learned scales.*context_broadcasting\.scaled=true"):
            scale_ratios(without)
