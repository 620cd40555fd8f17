from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from detr_bf.classification.assembly import build_classifier, build_masked_autoencoder
from detr_bf.classification.masked_config import MaskedConfig
from detr_bf.classification.task import initial_weights
from detr_bf.common.errors import InputError
from detr_bf.config import load_config
from detr_bf.engine import load_fitting

SMALL = (
    "model.name=vit_tiny_patch16_224",
    "model.options={patch_size: 8, embed_dim: 16, depth: 1, num_heads: 2}",
    "model.decoder_dim=16",
    "model.decoder_depth=2",
    "model.decoder_heads=2",
    "data.transforms.size=32",
)


def config(*settings: str) -> MaskedConfig:
    return load_config(None, [*SMALL, *settings], task="masked_autoencoding")


@pytest.mark.parametrize(("pool", "pooled"), [("null", True), ("false", False), ("true", True)])
def test_settings_reach_relative_localization(pool: str, pooled: bool) -> None:
    local = ("enabled=true", "num_pairs=9", "hidden=5", f"pool={pool}", "weight=0.25")
    settings = [*SMALL[:2], SMALL[-1], *(f"plugins.relative_localization.{setting}" for setting in local)]
    network: Any = build_classifier(load_config(None, settings, task="classification"), 10, pretrained=False)
    plugin = network.plugins["relative_localization"]
    (predictor,) = plugin.predictors
    assert (plugin.pool, plugin.weight, predictor.pairs) == (pooled, 0.25, 9)
    assert [layer.out_features for layer in predictor.mlp.layers] == [5, 5, 2]


def test_a_plain_network_fills_the_encoder_but_not_its_fixed_positions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_masked_autoencoder(config())
    sines = model.encoder.pos_embed.detach().clone()
    other = {key: torch.full_like(value, 0.5) for key, value in model.encoder.state_dict().items()}
    torch.save(other, tmp_path / "plain.pt")
    with caplog.at_level(logging.INFO):
        load_fitting(model, initial_weights(tmp_path / "plain.pt"), "plain.pt")
    assert "pos_embed is ignored" in caplog.text
    assert torch.equal(model.encoder.pos_embed, sines)
    assert (model.encoder.blocks[0].mlp.fc1.weight == 0.5).all()


def test_a_masked_autoencoder_gives_all_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = build_masked_autoencoder(config()).state_dict()
    torch.save(weights, tmp_path / "whole.pt")
    with caplog.at_level(logging.INFO):
        found = initial_weights(tmp_path / "whole.pt")
    assert found.keys() == weights.keys()
    assert "pos_embed" not in caplog.text


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.transforms.size=33", "size=33 is not a multiple of the model's patches of 8 x 8 pixels"),
        ("model.options.in_chans=1", "does not work on colour images of data.transforms.size=32"),
        ("model.options.img_size=64", "model.options.img_size=64 and data.transforms.size=32 differ"),
        ("batch_former.layers=[a]", r"^batch_former.layers must be a word .* got \['a'\]"),
        ("batch_former.layers=[2]", r"^batch_former.layers=\[2\]: the model has 2 blocks"),
        ("batch_former.layers=some", "^batch_former.layers='some': give 'all'"),
        ("batch_former.heads=3", "^batch_former.heads=3 must divide the width 16"),
    ],
)
def test_bad_settings_are_refused(setting: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_masked_autoencoder(config("batch_former.enabled=true", setting))


def test_positions_between_image_sizes_are_those_of_the_new_size() -> None:
    file, model = build_masked_autoencoder(config()), build_masked_autoencoder(config("data.transforms.size=64"))
    expected = model.encoder.pos_embed.clone()
    said = load_fitting(model, file.state_dict(), "a.pt")
    assert "of another shape, freshly initialised" in said
    assert "encoder.pos_embed" in said
    assert torch.equal(model.encoder.pos_embed, expected)
    assert torch.equal(model.encoder.norm.weight, file.encoder.norm.weight)
