"""Hybrid encoder of D-FINE: several levels with encoder layers, and refused settings.

What it has in common with RT-DETR's is tested in test_rtdetr.py, its maps in tests/golden/test_dfine_encoder.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.detectors import Options
from detr_bf.detectors.dfine_encoder import AggregationBlock, dfine_encoder
from tests.detectors.tiny import DETECTORS, DIM, IMAGES, LOGITS, Averages, batch_former, images

OPTIONS = Options(num_logits=LOGITS, hidden_dim=DIM, heads=2, encoder_layers=1, dropout=0.0)
build = partial(dfine_encoder, OPTIONS, width=DIM, feedforward_dim=12, levels=3)


def outputs(levels: list[int] | None, options: Options = OPTIONS) -> Tensor:
    """Return the logits of two images in training, without objects."""
    torch.manual_seed(0)
    module = DETECTORS["dfine"].make(Averages(3), [3] * 3, options, attention_levels=levels).train()
    logits: Tensor = module(replace(images(), targets=())).logits
    return logits


def test_batch_attention_is_on_the_coarsest_level_of_several() -> None:
    """The clean stream is that without batch attention; the encoders of finer levels do not fork."""
    options = replace(OPTIONS, batch_former=batch_former(num_encoder_layers=1, dropout=0.0), num_queries=5)
    both, plain = outputs([0, 1, 2], options), outputs([0, 1, 2], replace(options, batch_former=None))
    assert both.shape[1] == 2 * plain.shape[1] == 2 * IMAGES
    encoder = dfine_encoder(options, width=DIM, feedforward_dim=12, levels=3, attention_levels=[0, 1, 2])
    assert [each.batch_former is not None for each in (*encoder.finer, encoder.encoder)] == [False, False, True]
    assert encoder.finer_levels == (0, 1)


def test_levels_with_encoder_layers_change_the_result() -> None:
    found = [outputs(levels, replace(OPTIONS, num_queries=5)) for levels in (None, [2], [1, 2])]
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[1], found[2])


@pytest.mark.parametrize("levels", [[], [0, 1], [2, 1], [1, 1, 2], [2, 3]])
def test_wrong_levels_are_refused(levels: list[int]) -> None:
    with pytest.raises(InputError, match=r"attention_levels=.*expected some of 0 to 2 in ascending order"):
        build(attention_levels=levels)


def test_wrong_widths_are_refused() -> None:
    with pytest.raises(InputError, match="encoder_dim=34 of the encoder must be divisible by 4"):
        build(width=34)
    with pytest.raises(InputError, match=r"expansion=0\.01 of 32 channels leaves none: give at least 2/32"):
        build(expansion=0.01)


@pytest.mark.parametrize(
    ("dim", "expansion", "hidden"), [(128, 0.34, 21), (256, 0.5, 64), (256, 1.0, 128), (384, 1.0, 192)]
)
def test_width_of_the_branches(dim: int, expansion: float, hidden: int) -> None:
    """The widths of N, S, M and L, and X."""
    assert AggregationBlock(dim, expansion=expansion, blocks=1).first[1].convolution.out_channels == hidden
