"""Maps of both streams against the parts of the model called by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from detr_bf.classification.analysis import feature_maps
from detr_bf.classification.analysis.feature_maps import FeatureMaps, draw_feature_maps
from detr_bf.errors import InputError
from detr_bf.plugins import add_batchformer, add_batchformer_v2
from tests.classification.analysis.examples import NAMES, PIXELS, batches
from tests.plugins import tiny


def maps_of(model: Any, *sizes: int) -> FeatureMaps:
    return feature_maps(model, batches(*sizes), class_names=NAMES, pixels=PIXELS)


def by_hand(images: Tensor, *, position: str) -> Tensor:
    """(2B, 4, 4) with one insertion at block 2: what the block that reads both streams gives."""
    plain, with_former = tiny.vit(), tiny.vit()
    mixer: Any = add_batchformer_v2(with_former, [2], position=position).batch_former.mixers["shared"]
    first = 2 if position == "before" else 3
    with torch.no_grad():
        tokens = plain._pos_embed(plain.patch_embed(images))
        for block in plain.blocks[:first]:
            tokens = block(tokens)
        tokens = plain.blocks[first](torch.cat([tokens, mixer.eval()(tokens)]))
    return tokens[:, 1:].mean(-1).view(-1, 4, 4)


@pytest.mark.parametrize("position", ["before", "after"])
def test_maps_are_those_of_the_block_behind_the_insertion(position: str) -> None:
    model, [batch] = tiny.vit(), batches(3)
    add_batchformer_v2(model, [2], position=position)
    found = maps_of(model, 3)
    expected = by_hand(batch.images, position=position).numpy()
    for row, image in enumerate(found.images):
        np.testing.assert_allclose(image.clean, expected[row], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(image.batchformer, expected[3 + row], rtol=1e-5, atol=1e-6)
        assert not np.allclose(image.clean, image.batchformer)
        assert (image.place, image.name) == (row, NAMES[row])
        shown = batch.images[row].permute(1, 2, 0) * torch.tensor(PIXELS.std) + torch.tensor(PIXELS.mean)
        np.testing.assert_allclose(image.picture, shown, atol=1e-6)


def test_behind_the_last_block_stands_the_norm() -> None:
    model = tiny.vit()
    add_batchformer_v2(model, [3], position="after")
    last = tiny.vit()
    [batch] = batches(2)
    with torch.no_grad():
        expected = last.forward_features(batch.images)[:, 1:].mean(-1).view(2, 4, 4)
    for image, clean in zip(maps_of(model, 2).images, expected, strict=True):
        np.testing.assert_allclose(image.clean, clean.numpy(), rtol=1e-5, atol=1e-6)


def test_without_batch_attention_both_maps_are_the_same() -> None:
    model = tiny.vit()
    add_batchformer_v2(model, "all", mode="duplicate")
    for row in maps_of(model, 2, 3).rows():
        assert row["clean_mean"] == row["batchformer_mean"]
        assert row["correlation"] == pytest.approx(1)


def test_what_has_no_maps_is_refused() -> None:
    with pytest.raises(InputError, match="no batch attention"):
        maps_of(tiny.vit(), 2)
    pooled = tiny.vit()
    add_batchformer(pooled, heads=2)
    with pytest.raises(InputError, match=r"no places.*batchformer_v2"):
        maps_of(pooled, 2)
    model = tiny.vit()
    add_batchformer_v2(model, [2])
    with pytest.raises(InputError, match="two or more, got one"):
        maps_of(model, 1)
    with pytest.raises(InputError, match="expected timm's VisionTransformer"):
        maps_of(tiny.mixer(), 2)


def test_the_picture_shows_image_and_both_streams_of_every_run() -> None:
    model = tiny.vit()
    add_batchformer_v2(model, [2])
    maps = maps_of(model, 3)
    axes = draw_feature_maps({"a": maps, "b": maps}).axes
    names = [ax.get_title().split("\n")[:2] for ax in axes[:5]]
    assert names == [["image", "class 0"], *([run, f"{s} stream"] for run in "ab" for s in ("clean", "BatchFormer"))]
    drawn = axes[2].images[0].get_array()
    np.testing.assert_array_equal(drawn, maps.images[0].batchformer)
