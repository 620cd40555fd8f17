"""Recorded attention weights and stream distances, against the operator and against loops."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from detr_bf.batchformer import BatchFormerLayer, BatchFormerV2
from detr_bf.batchformer.inspection import (
    attending,
    batch_entropy,
    batch_former_of,
    recorded,
    share_of_others,
    statistics,
    stream_distance,
)
from detr_bf.common.errors import InputError
from detr_bf.common.structures import TokenBatch
from detr_bf.config import load_config
from detr_bf.engine import RunFolder
from detr_bf.tasks import task_of
from detr_bf.transformer import Encoder, EncoderLayer, TokenAttention

IMAGES, TOKENS, DIM, HEADS = 4, 6, 16, 2


def encoder(**changes: object) -> Encoder:
    torch.manual_seed(0)
    layers = [
        EncoderLayer(TokenAttention(DIM, heads=2, dropout=0.1), dim=DIM, feedforward_dim=32, dropout=0.1)
        for _ in range(3)
    ]
    settings = {"layers": [0], "num_encoder_layers": 3, "heads": HEADS, "dropout": 0.5} | changes
    return Encoder(layers, batch_former=BatchFormerV2(DIM, **settings)).train()  # type: ignore[arg-type]


def batch(padded: Tensor | None = None, images: int = IMAGES) -> TokenBatch:
    generator = torch.Generator().manual_seed(1)
    mask = torch.zeros(images, TOKENS, dtype=torch.bool) if padded is None else padded
    tokens = torch.randn(images, TOKENS, DIM, generator=generator)
    return TokenBatch(tokens, {"padding_mask": mask, "position": torch.zeros_like(tokens)})


@pytest.mark.parametrize("masked", [False, True])
def test_weights_reproduce_the_output_of_the_operator(masked: bool) -> None:
    torch.manual_seed(0)
    layer = BatchFormerLayer(DIM, heads=HEADS, dropout=0.5).eval().layers[0]
    nn.init.normal_(layer.self_attn.in_proj_bias)
    tokens = batch().tokens
    ignored = torch.rand(IMAGES, TOKENS) < 0.5 if masked else None
    if ignored is not None:
        ignored[:, 2] = True  # nothing to attend to
    weights = layer.attention_weights(tokens, ignored)
    assert weights.shape == (TOKENS, HEADS, IMAGES, IMAGES)
    value = layer._packed(tokens, None)[:, :, 2]
    mixed = torch.einsum("shij,jshd->ishd", weights, value)
    torch.testing.assert_close(
        layer.self_attn.out_proj(mixed.flatten(2)), layer._attend(tokens, ignored, None), atol=1e-5, rtol=1e-5
    )
    sums = torch.ones(TOKENS)
    sums[2] = 0.0 if masked else 1.0
    torch.testing.assert_close(weights.sum(-1), sums[:, None, None].expand(-1, HEADS, IMAGES))


def test_recording_changes_nothing() -> None:
    states = []
    for record in (False, True):
        network = encoder(layers=[0, 2], num_layers=2)
        torch.manual_seed(3)
        if record:
            with recorded(batch_former_of(network)) as recording:
                found = network(batch()).tokens
        else:
            found = network(batch()).tokens
        states.append((found, torch.get_rng_state()))
    assert torch.equal(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])
    assert [(each.insertion, each.depth) for each in recording.attention] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert [each.layer for each in recording.insertions] == [0, 2]
    assert [len(each.after.tokens) for each in recording.insertions] == [2 * IMAGES] * 2
    torch.manual_seed(3)
    with recorded(batch_former_of(network), positions=3) as few:
        network(batch())
    assert few.attention[0].positions is not None
    assert few.attention[0].positions.tolist() == [0, 2, 5]
    torch.testing.assert_close(few.attention[0].weights, recording.attention[0].weights[[0, 2, 5]])
    network(batch())
    assert len(few.attention) == 4, "nothing is recorded after the block"


@pytest.mark.parametrize("mode", ["two_stream", "mini_batch_inference"])
def test_two_streams_without_dropout(mode: str) -> None:
    network = encoder(mode=mode, until_epoch=1)
    network.batch_former.begin_epoch(5)
    network.layers[1].eval()
    modes = [module.training for module in network.modules()]
    with attending(network) as batch_former:
        first, second = network(batch()), network(batch())
        assert batch_former.num_streams == first.num_streams == 2
    assert torch.equal(first.tokens, second.tokens)
    assert [module.training for module in network.modules()] == modes
    assert network.batch_former.num_streams == 1, "ended as before"
    plain = Encoder(list(network.layers)).eval()
    torch.testing.assert_close(first.tokens.chunk(2)[0], plain(batch()).tokens)


def test_models_without_attention_between_images_are_refused() -> None:
    with pytest.raises(InputError, match="the model has no BatchFormerV2"):
        batch_former_of(nn.Linear(1, 1))
    for mode in ("duplicate", "self_only"):
        with pytest.raises(InputError, match=f"batch_former.mode={mode} no image attends to another"):
            batch_former_of(encoder(mode=mode))


def test_statistics_equal_loops() -> None:
    padded = torch.zeros(IMAGES, TOKENS, dtype=torch.bool)
    padded[0, 3:] = padded[2, 5:] = True
    network = encoder(layers=[1], num_layers=2)
    network.eval()
    with attending(network), recorded(network.batch_former) as recording:
        network(batch(padded))
    found = statistics(recording)
    for depth, name in ((0, "attention/1"), (1, "attention/1.1")):
        weights = recording.attention[depth].weights
        others, entropy = ([[] for _ in range(HEADS)] for _ in range(2))
        for s in range(TOKENS):
            for i in range(IMAGES):
                for head in range(HEADS):
                    row = weights[s, head, i].tolist()
                    if not padded[i, s]:
                        others[head].append(sum(w for j, w in enumerate(row) if j != i))
                        entropy[head].append(-sum(w * math.log(w) for w in row) / math.log(IMAGES))
        for kind, values in (("others", others), ("entropy", entropy)):
            means = [sum(own) / len(own) for own in values]
            assert [found[f"{name}/{kind}/head_{head}"].item() for head in range(HEADS)] == pytest.approx(means)
            assert found[f"{name}/{kind}"].item() == pytest.approx(sum(means) / HEADS)
    clean, second = recording.insertions[0].after.tokens.chunk(2)
    far = [
        ((second[i, s] - clean[i, s]).norm() / clean[i, s].norm()).item()
        for i in range(IMAGES)
        for s in range(TOKENS)
        if not padded[i, s]
    ]
    assert found["stream_distance/1"].item() == pytest.approx(sum(far) / len(far))
    assert len(found) == 2 * 2 * (1 + HEADS) + 1


def test_ends_of_the_scales() -> None:
    uniform = torch.full((1, 1, IMAGES, IMAGES), 1 / IMAGES)
    own = torch.eye(IMAGES)[None, None]
    assert share_of_others(uniform)[0, 0].tolist() == pytest.approx([1 - 1 / IMAGES] * IMAGES)
    assert share_of_others(own).abs().max() == 0
    assert batch_entropy(uniform)[0, 0].tolist() == pytest.approx([1.0] * IMAGES)
    assert batch_entropy(own).abs().max() == 0
    assert batch_entropy(torch.ones(1, 1, 1, 1)).item() == 0, "one image"
    assert stream_distance(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 1.0])).item() == pytest.approx(0.6)


@pytest.mark.parametrize("mode", ["two_stream", "self_only"])
def test_training_logs_attention_without_a_change_of_the_weights(
    mode: str, tmp_path: Path, coco_folder: Callable[..., SimpleNamespace]
) -> None:
    train, val = coco_folder(num_images=8), coco_folder(num_images=2, name="val", first_image_id=101)
    settings = [
        "model={hidden_dim: 16, heads: 2, encoder_layers: 1, decoder_layers: 1, feedforward_dim: 16, num_queries: 6}",
        "model.backbone={name: resnet18, weights: none, strides: [32]}",
        f"batch_former={{heads: {HEADS}, mode: {mode}}}",
        "data.transforms={short_sides: [32], max_size: 64, eval_short_side: 32, random_crop: 0.0}",
        "data.workers=0",
        "train={epochs: 1, batch_size: 2, log_every: 2}",
        *(f"data.{name}.{key}={getattr(s, key)}" for name, s in (("train", train), ("val", val)) for key in KEYS),
    ]
    weights, records = [], []
    for on in ("false", "true"):
        folder = RunFolder(tmp_path / on)
        config = load_config(
            None, [*settings, f"batch_former={{enabled: true, log_attention: {on}}}", f"output_dir={folder.path}"]
        )
        folder.path.mkdir()
        trainer = task_of(config).build_trainer(folder)
        trainer.train()
        weights.append(trainer.model.state_dict())
        records.append([json.loads(line) for line in folder.metrics.read_text().splitlines()])
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    plain, logged = ([each for each in own if each["kind"] == "train"] for own in records)
    names = {"attention/0/others", "attention/0/entropy/head_1", "stream_distance/0"}
    for before, after in zip(plain, logged, strict=True):
        assert before["loss"] == after["loss"]
        assert names.isdisjoint(before)
        expected = names if mode == "two_stream" else {"stream_distance/0"}
        assert names & set(after) == expected
        assert after["stream_distance/0"] > 0
        if mode == "two_stream":
            assert 0 < after["attention/0/others"] < 1


KEYS = ("images", "annotations")
