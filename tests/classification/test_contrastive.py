"""MoCo v3: loss, momentum encoder, BatchFormer, views and evaluation, against written-out versions."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.backbones import build_backbone
from detr_bf.batchformer import BatchFormer
from detr_bf.classification.augmentation import ViewPairTransform
from detr_bf.classification.batch import ClassTargets, ViewPairs
from detr_bf.classification.contrastive import Embedded, MomentumContrast, momentum_contrast_loss
from detr_bf.classification.metrics import ContrastiveEvaluator
from detr_bf.common import distributed
from detr_bf.common.errors import InputError
from detr_bf.config import load_config
from detr_bf.engine import RunFolder, image_parameter_groups
from detr_bf.tasks import task_of
from tests.plugins import tiny
from tests.processes import run_together
from tests.tools.image_runs import contrastive_config

SIDE, DIM = 32, 6
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def former() -> BatchFormer:
    torch.manual_seed(3)
    return BatchFormer(tiny.DIM, heads=2, dropout=0.0)


def vit_contrast(**changes: Any) -> MomentumContrast:
    encoder = tiny.vit(num_classes=0)
    torch.manual_seed(2)
    return MomentumContrast(encoder, **{"hidden": 10, "dim": DIM, "momentum": 0.9} | changes).double().train()


def resnet_contrast(**changes: Any) -> MomentumContrast:
    torch.manual_seed(2)
    encoder = timm.create_model("resnet18", num_classes=0)
    return MomentumContrast(encoder, **{"hidden": 10, "dim": DIM, "momentum": 0.9} | changes).train()


def views(count: int = 4, seed: int = 0) -> Tensor:
    return numbers(count, 2, 3, SIDE, SIDE, seed=seed)


def written_out(query: Tensor, key: Tensor, temperature: float, first: int = 0) -> float:
    """Return InfoNCE of queries (B, D) among keys (A, D) by loops."""
    q, k = (each.numpy() / np.linalg.norm(each.numpy(), axis=1, keepdims=True) for each in (query, key))
    total = 0.0
    for row in range(len(q)):
        scores = [math.exp(float(q[row] @ other) / temperature) for other in k]
        total -= math.log(scores[first + row] / sum(scores))
    return 2 * temperature * total / len(q)


def test_the_loss_is_that_of_both_directions() -> None:
    outputs = Embedded(numbers(2, 5, DIM), numbers(2, 5, DIM, seed=1))
    report = momentum_contrast_loss(outputs, temperature=0.2)
    (q1, q2), (k1, k2) = outputs.queries, outputs.keys
    assert report.total.item() == pytest.approx(written_out(q1, k2, 0.2) + written_out(q2, k1, 0.2), rel=1e-12)
    own = Embedded(outputs.queries, outputs.queries.flip(0))
    assert momentum_contrast_loss(own, temperature=0.2).logged["instance_accuracy"] == 1
    moved = Embedded(outputs.queries, outputs.queries.flip(0).roll(1, dims=1))
    assert momentum_contrast_loss(moved, temperature=0.2).logged["instance_accuracy"] == 0


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_two_streams_have_the_loss_of_all_four_pairs(scale: float) -> None:
    outputs = Embedded(numbers(2, 10, DIM), numbers(2, 10, DIM, seed=1), num_streams=2)
    report = momentum_contrast_loss(outputs, temperature=1.0, loss_scale=scale)
    pairs = [
        written_out(query, key, 1.0)
        for queries, keys in zip(outputs.queries, outputs.keys.flip(0), strict=True)
        for query in queries.split(5)
        for key in keys.split(5)
    ]
    assert len(pairs) == 8
    assert report.total.item() == pytest.approx(scale * sum(pairs) / 4, rel=1e-12)


def test_the_gradient_is_that_of_finite_differences_and_keys_have_none() -> None:
    keys = numbers(2, 6, DIM, seed=1).requires_grad_()

    def loss(queries: Tensor) -> Tensor:
        return momentum_contrast_loss(Embedded(queries, keys, 2), temperature=0.5).total

    queries = numbers(2, 6, DIM).requires_grad_()
    assert torch.autograd.gradcheck(loss, queries)
    loss(queries).backward()
    assert keys.grad is None


def loss_of_a_rank(streams: int) -> tuple[float, Tensor]:
    """Return the loss of 3 images on rank 0 or 2 on rank 1, and the rows gathered."""
    own = slice(0, 3) if distributed.rank() == 0 else slice(3, 5)
    queries, keys = (numbers(2, streams, 5, DIM, seed=seed)[:, :, own].flatten(1, 2) for seed in (0, 1))
    rows, first = distributed.all_gather_rows(torch.arange(5)[own])
    assert first == own.start
    return momentum_contrast_loss(Embedded(queries, keys, streams), temperature=0.3).total.item(), rows


@pytest.mark.parametrize("streams", [1, 2])
def test_the_keys_of_all_ranks_are_negatives(streams: int) -> None:
    queries, keys = (numbers(2, streams, 5, DIM, seed=seed) for seed in (0, 1))
    found = run_together(2, loss_of_a_rank, streams)
    for own, (loss, rows) in zip((slice(0, 3), slice(3, 5)), found, strict=True):
        pairs = [
            written_out(queries[view, at][own], keys[1 - view, other], 0.3, own.start)
            for view in (0, 1)
            for at in range(streams)
            for other in range(streams)
        ]
        assert loss == pytest.approx(sum(pairs) / streams**2, rel=1e-12)
        assert rows.tolist() == [0, 1, 2, 3, 4]


def test_projector_and_predictor_are_those_of_the_paper_s_code() -> None:
    linear, norm, relu = nn.Linear, nn.BatchNorm1d, nn.ReLU
    resnet, vit = resnet_contrast(), vit_contrast()
    assert [type(layer) for layer in resnet.projector] == [linear, norm, relu, linear, norm]
    assert [type(layer) for layer in resnet.predictor] == [linear, norm, relu, linear]
    assert [type(layer) for layer in vit.projector] == [linear, norm, relu, linear, norm, relu, linear, norm]
    assert [type(layer) for layer in vit.predictor] == [linear, norm, relu, linear, norm]
    for part in (resnet.projector, vit.projector, vit.predictor):
        assert not part[-1].affine
        assert part[1].affine
        assert all(layer.bias is None for layer in part if isinstance(layer, linear))


def test_a_vision_transformer_starts_as_in_the_paper_s_code() -> None:
    torch.manual_seed(0)
    encoder = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=32, patch_size=8, depth=1)
    encoder = MomentumContrast(encoder, hidden=8, dim=4, momentum=0.9).encoder
    dim = 192
    qkv, projection = encoder.blocks[0].attn.qkv.weight, encoder.patch_embed.proj.weight
    for weight, bound in ((qkv, math.sqrt(6 / (2 * dim))), (projection, math.sqrt(6 / (3 * 64 + dim)))):
        assert 0.98 * bound < weight.abs().max() <= bound
    positions = encoder.pos_embed[0, 1:].unflatten(0, (4, 4))
    frequency = 1 / 10000 ** (torch.arange(48) / 48)
    angles = torch.arange(4.0)[:, None] * frequency
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    torch.testing.assert_close(positions[0], torch.cat([waves, waves[:1].expand(4, -1)], dim=1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        positions[:, 0], torch.cat([waves[:1].expand(4, -1), waves], dim=1), atol=1e-6, rtol=1e-5
    )
    assert not encoder.pos_embed[0, 0].any()
    assert not encoder.pos_embed.requires_grad


def test_the_momentum_encoder_follows_by_the_formula() -> None:
    model = vit_contrast(batch_former=former())
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for share in (0.0, 0.3, 1.0):
        model.load_state_dict(before)
        model.begin_step(share)
        kept = 1 - (1 - 0.9) * (math.cos(math.pi * share) + 1) / 2
        for name, value in model.state_dict().items():
            expected = before[name]
            if name.startswith("momentum_") and value.is_floating_point() and "running" not in name:
                expected = kept * expected + (1 - kept) * before[name.removeprefix("momentum_")]
            torch.testing.assert_close(value, expected, **CLOSE, msg=name)
    constant = vit_contrast(cosine=False)
    slow, own = constant.momentum_projector[0].weight, constant.projector[0].weight
    with torch.no_grad():
        slow.zero_()
    constant.begin_step(0.9)
    torch.testing.assert_close(slow, 0.1 * own)


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_parts_get_no_gradient_and_all_others_do(frozen: bool) -> None:
    model = vit_contrast(batch_former=former(), freeze_batch_former=frozen)
    momentum_contrast_loss(model(views()), temperature=1.0).total.backward()
    fixed = {
        name
        for name, _ in model.named_parameters()
        if name.startswith(("momentum_", "encoder.patch_embed", "encoder.pos_embed"))
        or (frozen and name.startswith("batch_former"))
    }
    assert {name for name, value in model.named_parameters() if value.grad is None} == fixed
    groups = {group["name"] for group in image_parameter_groups(model, lr=1.0, weight_decay=0.1, decay_vectors=False)}
    assert ("batch_former" in groups) == (not frozen)
    trained = vit_contrast(freeze_patches=False)
    assert trained.encoder.patch_embed.proj.weight.requires_grad


@pytest.mark.parametrize("frozen", [False, True])
def test_one_batchformer_mixes_the_images_before_both_projectors(frozen: bool) -> None:
    model, images = vit_contrast(batch_former=former(), freeze_batch_former=frozen), views()
    with torch.no_grad():
        model.momentum_encoder.norm.bias.add_(1)  # another encoder
    found = model(images)
    assert found.queries.shape == found.keys.shape == (2, 8, DIM)
    sides = (model.encoder, model.projector), (model.momentum_encoder, model.momentum_projector)
    for (encoder, projector), embedded in zip(sides, (found.queries, found.keys), strict=True):
        for view in (0, 1):
            features = encoder(images[:, view])
            mixed = model.batch_former.mixer(features[:, None])[:, 0]
            projected = projector(torch.cat([features, mixed]))
            expected = model.predictor(projected) if encoder is model.encoder else projected
            torch.testing.assert_close(embedded[view], expected, **CLOSE)
    alone = model.eval()(images)
    assert alone.queries.shape == (2, 4, DIM)
    for one in range(4):
        torch.testing.assert_close(model(images[one : one + 1]).queries[:, 0], alone.queries[:, one], **CLOSE)


def test_the_encoder_is_the_plain_network() -> None:
    model = resnet_contrast(batch_former=BatchFormer(512, heads=2)).eval()
    plain = timm.create_model("resnet18", num_classes=0).eval()
    plain.load_state_dict(
        {name.removeprefix("encoder."): x for name, x in model.state_dict().items() if name.startswith("encoder.")}
    )
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(plain(images), model.encoder(images))


@pytest.mark.parametrize("name", ["resnet18", "timm:resnet18"])
def test_the_encoder_of_a_resnet_is_a_backbone(name: str, tmp_path: Path) -> None:
    state = resnet_contrast(batch_former=BatchFormer(512, heads=2)).state_dict()
    torch.save({"model": state}, tmp_path / "run.pt")
    settings = {"strides": [32], "dilation": False, "frozen_stages": 0, "frozen_norm": False}
    backbone = build_backbone(name, weights=str(tmp_path / "run.pt"), **settings)
    found = [value for key, value in backbone.state_dict().items() if key.endswith("layer4.1.conv2.weight")]
    assert len(found) == 1
    assert torch.equal(found[0], state["encoder.layer4.1.conv2.weight"])


def test_training_tells_images_apart() -> None:
    torch.manual_seed(0)
    model, images = resnet_contrast(batch_former=BatchFormer(512, heads=2, dropout=0.0)), torch.randn(6, 1, 3, 32, 32)
    pairs = (images + 0.2 * torch.randn(6, 2, 3, 32, 32)).float()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    losses = []
    for step in range(12):
        model.begin_step(step / 12)
        report = momentum_contrast_loss(model(pairs), temperature=0.2)
        optimizer.zero_grad()
        report.total.backward()
        optimizer.step()
        losses.append(report.total.item())
    assert losses[-1] < 0.7 * losses[0]


def transform(**changes: Any) -> ViewPairTransform:
    settings: dict[str, Any] = {
        "area": (1.0, 1.0),
        "color_jitter": 0.4,
        "jitter_prob": 0.0,
        "grey": 0.0,
        "blur": (0.0, 0.0),
        "solarize": 0.0,
        "horizontal_flip": 0.0,
        "interpolation": "bilinear",
        "mean": (0.0, 0.0, 0.0),
        "std": (1.0, 1.0, 1.0),
    }
    return ViewPairTransform((16, 16), **settings | changes)


def test_views_depend_on_the_seed_alone_and_restore_the_generators() -> None:
    image = torch.randint(256, (3, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    views_of = transform(area=(0.2, 1.0), jitter_prob=0.8, grey=0.2, blur=(1.0, 0.1), solarize=0.2, horizontal_flip=0.5)
    random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), torch.get_rng_state()
    first = views_of(image, 7)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert first.shape == (2, 3, 16, 16)
    assert torch.equal(first, views_of(image, 7))
    assert not torch.equal(first, views_of(image, 8))
    assert not torch.equal(first[0], first[1])


def test_each_operation_changes_the_view_that_it_is_for() -> None:
    image = torch.randint(256, (3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    plain = image / 255
    still = transform()(image, 0)
    torch.testing.assert_close(still[0], plain)
    torch.testing.assert_close(still[1], plain)
    solarized = transform(solarize=1.0)(image, 0)
    torch.testing.assert_close(solarized[0], plain)
    torch.testing.assert_close(solarized[1], torch.where(image < 128, plain, 1 - plain))
    flipped = transform(horizontal_flip=1.0)(image, 0)
    torch.testing.assert_close(flipped, plain.flip(-1).expand(2, -1, -1, -1))
    grey = transform(grey=1.0)(image, 0)
    assert torch.equal(grey[:, 0], grey[:, 1])
    assert torch.equal(grey[:, 0], grey[:, 2])
    blurred = transform(blur=(1.0, 0.0))(image, 0)
    assert blurred[0].var() < plain.var()
    torch.testing.assert_close(blurred[1], plain)
    jittered = transform(jitter_prob=1.0)(image, 0)
    assert not torch.equal(jittered[0], jittered[1])
    torch.testing.assert_close(transform()(image[:1], 0)[0], plain[:1].expand(3, -1, -1))


def batch_of(indices: list[int]) -> ViewPairs:
    count = len(indices)
    return ViewPairs(torch.zeros(count, 2, 3, 4, 4), ClassTargets(torch.zeros(count).long()), torch.tensor(indices))


def test_the_evaluation_is_that_of_all_images_whatever_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys = numbers(2, 7, DIM), numbers(2, 7, DIM, seed=1)

    def result(*batches: list[int], largest: int = 4096) -> Any:
        monkeypatch.setattr("detr_bf.classification.metrics._MAX_KEYS", largest)
        evaluators = [ContrastiveEvaluator(0.2) for _ in batches]
        for evaluator, indices in zip(evaluators, batches, strict=True):
            evaluator.update(batch_of(indices), Embedded(queries[:, indices].float(), keys[:, indices].float()))
            evaluators[0].merge(evaluator) if evaluator is not evaluators[0] else None
        return evaluators[0].summarize()

    whole = result([0, 1, 2, 3, 4, 5, 6])
    expected = written_out(queries[0], keys[1], 0.2) + written_out(queries[1], keys[0], 0.2)
    assert whole.loss == pytest.approx(expected, rel=1e-5)
    assert whole == result([6, 2], [3, 4, 0], [5, 1, 6])
    near = [
        int((F.normalize(q, dim=1) @ F.normalize(k, dim=1).T).argmax(1)[row] == row)
        for q, k in ((queries[0], keys[1]), (queries[1], keys[0]))
        for row in range(7)
    ]
    assert whole.instance_accuracy == sum(near) / 14
    halves = result([0, 1, 2, 3, 4, 5, 6], largest=4)
    parts = [
        len(part)
        * (written_out(queries[0][part], keys[1][part], 0.2) + written_out(queries[1][part], keys[0][part], 0.2))
        for part in ([0, 1, 2, 3], [4, 5, 6])
    ]
    assert halves.loss == pytest.approx(sum(parts) / 7, rel=1e-5)
    queries[0, 3, 0] = math.nan
    assert result([0, 3]).loss is None


def test_pairs_survive_a_capture() -> None:
    batch = batch_of([3, 1])
    again = ViewPairs.from_dict(copy.deepcopy(batch.to_dict()))
    assert type(again) is type(batch.to("cpu")) is ViewPairs
    assert again.fits(1)
    assert not ViewPairs.from_dict(batch.to_dict() | {"images": batch.images[:, 0]}).fits(1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.transforms.blur=[1.0]"], "blur must be two probabilities"),
        (["data.repeats=3"], "would be each other's negatives"),
        (["data.transforms.area=[0.5,0.1]"], "area must be two shares"),
        (["model.name=cifar_resnet20", "model.options={}"], "no form without a classifier"),
        (["batch_former.enabled=true", "batch_former.heads=5"], "heads"),
        (["model.options.global_pool=''"], "expected \\(images, channels\\)"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        task_of(load_config(contrastive_config(tmp_path), settings)).build_model(0)(torch.zeros(2, 2, 3, 16, 16))


def test_a_step_of_several_batches_moves_the_momentum_encoder_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []
    monkeypatch.setattr(MomentumContrast, "begin_step", lambda model, share: shares.append(share))
    config = load_config(contrastive_config(tmp_path), ["train.accumulate=2"])  # two epochs of four batches
    RunFolder(tmp_path / "run").create()
    task_of(config).build_trainer(RunFolder(tmp_path / "run"), None).train()
    assert shares == [0.0, 0.25, 0.5, 0.75]
