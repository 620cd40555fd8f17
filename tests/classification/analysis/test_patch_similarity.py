"""Similarity of patches against a loop over pairs, and where it is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from detr_bf.classification.analysis import patch_similarity
from detr_bf.classification.analysis.patch_similarity import draw_patch_similarity
from detr_bf.errors import InputError
from tests.classification.analysis.examples import all_images, batches
from tests.plugins import tiny


def block_outputs(model: Any, images: Tensor) -> list[Tensor]:
    """By calling the parts of timm's model one after another."""
    with torch.no_grad():
        tokens = model._pos_embed(model.patch_embed(images))
        found = []
        for block in model.blocks:
            tokens = block(tokens)
            found.append(tokens)
    return found


def test_similarity_as_a_loop_over_pairs() -> None:
    model, images = tiny.deit(), batches(3, 2)
    curve = patch_similarity(model, images)
    for at, tokens in zip(curve.layers, block_outputs(model, all_images(images)), strict=True):
        values = []
        for image in tokens[:, 2:]:
            pairs = [(a, b) for i, a in enumerate(image) for j, b in enumerate(image) if i != j]
            cosines = [abs(float(a @ b) / float(a.norm() * b.norm())) for a, b in pairs]
            values.append(sum(cosines) / len(cosines))
        assert at.mean == pytest.approx(sum(values) / 5, rel=1e-10)
        assert (at.low, at.high) == pytest.approx(tuple(np.percentile(values, [15, 85])), rel=1e-10)


def test_patches_that_are_all_the_same_have_similarity_1() -> None:
    model = tiny.vit()
    nn.init.zeros_(model.patch_embed.proj.weight)  # the bias alone is left
    nn.init.zeros_(model.pos_embed)
    curve = patch_similarity(model, batches(2))
    assert [at.mean for at in curve.layers] == pytest.approx([1.0] * tiny.DEPTH, rel=1e-12)
    assert curve.bound == 1.0


def test_another_model_is_refused_and_a_picture_is_drawn() -> None:
    with pytest.raises(InputError, match="expected timm's VisionTransformer"):
        patch_similarity(tiny.swin(), batches(2))
    [axes] = draw_patch_similarity({"run": patch_similarity(tiny.vit(), batches(2))}).axes
    assert [line.get_label() for line in axes.lines] == ["run", "upper bound 1.000"]
