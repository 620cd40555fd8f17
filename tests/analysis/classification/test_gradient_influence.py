"""Influence between images compared with finite differences, and cases where it must be exactly 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.analysis.classification import gradient_influence
from detr_bf.analysis.gradient_influence import (
    ClassInfluence,
    GradientInfluence,
    draw_gradient_influence,
)
from detr_bf.classification.batch import LabelledImages
from detr_bf.classification.criterion import BalancedSoftmax
from detr_bf.common.errors import InputError
from detr_bf.plugins import add_batchformer, add_batchformer_v2
from tests.analysis.classification.examples import NAMES, Convolutional, batches, convolutional
from tests.plugins import tiny

COUNTS = (3, 40, 7, 40, 1)
STEP = 1e-5


def with_v1() -> nn.Module:
    model = convolutional()
    add_batchformer(model, heads=2)
    return model


def with_v2(**settings: Any) -> nn.Module:
    model = tiny.vit(depth=2)
    add_batchformer_v2(model, **{"layers": [1], **settings})
    return model


def influence(model: nn.Module, images: list[LabelledImages], **more: Any) -> GradientInfluence:
    return gradient_influence(model, images, class_names=NAMES, class_counts=COUNTS, **more)


def stream_logits(model: Any) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return two functions, images to features and features to logits (2B, K), for the two models above."""
    if isinstance(model, Convolutional):
        former = model.plugins["batchformer"].batch_former

        def mix(f: Tensor) -> Tensor:
            return torch.cat([f, former.mixer(f[:, None])[:, 0]])

        return lambda x: model.pool(model.features(x)).flatten(1), lambda f: model.fc.forward(mix(f))
    former = model.plugins["batchformer_v2"].batch_former

    def rest(f: Tensor) -> Tensor:
        tokens = torch.cat([f, former.mixers["shared"](f)])
        return model.forward_head(model.norm(block_without_hooks(model.blocks[1], tokens)))

    return lambda x: model.blocks[0](model._pos_embed(model.patch_embed(x))), rest


def block_without_hooks(block: Any, tokens: Tensor) -> Tensor:
    tokens = tokens + block.attn(block.norm1(tokens))
    return tokens + block.mlp(block.norm2(tokens))


@pytest.mark.parametrize("make", [with_v1, pytest.param(with_v2, marks=pytest.mark.slow)])
def test_influence_as_finite_differences_of_every_number(make: Callable[[], nn.Module]) -> None:
    model, [batch] = make(), batches(3)
    loss = BalancedSoftmax(COUNTS)
    found = {at.label: at for at in influence(model, [batch], loss=loss).classes}
    with torch.no_grad():
        to_features, to_logits = stream_logits(model)
        features = to_features(batch.images)

        def losses(f: Tensor) -> list[float]:
            logits = to_logits(f)[len(batch) :]
            return [loss(logits[i, None], batch.targets.labels[i, None]).item() for i in range(len(batch))]

        sums = [0.0] * 3
        for j in range(3):
            for number in range(features[j].numel()):
                up, down = features.clone(), features.clone()
                up[j].view(-1)[number] += STEP
                down[j].view(-1)[number] -= STEP
                for i, (high, low) in enumerate(zip(losses(up), losses(down), strict=True)):
                    sums[i] += abs(high - low) / (2 * STEP) if i != j else 0.0
    for i, total in enumerate(sums):
        at = found[int(batch.targets.labels[i])]
        assert at.batchformer == pytest.approx(total / (2 * features[0].numel()), rel=1e-4)
        assert at.batchformer > 0
        assert at.clean == 0.0
        assert at.images == 1


@pytest.mark.parametrize("position", ["before", "after"])
def test_with_several_insertions_it_is_that_of_the_first(position: str) -> None:
    model = with_v2(layers=[0, 1], position=position)
    found = influence(model, batches(4, 4))
    assert sum(at.images for at in found.classes) == 8
    assert all(at.clean == 0.0 and at.batchformer > 0 for at in found.classes)


def test_without_batch_attention_in_the_second_stream_nothing_comes_from_others() -> None:
    found = influence(with_v2(mode="duplicate"), batches(3))
    assert [(at.clean, at.batchformer) for at in found.classes] == [(0.0, 0.0)] * 3


def test_classes_stand_by_training_images_with_a_cumulative_mean() -> None:
    images = batches(5)
    found = influence(with_v1(), images)
    assert [at.label for at in found.classes] == [1, 3, 2, 0, 4]
    assert [at.training_images for at in found.classes] == [40, 40, 7, 3, 1]
    values = [at.batchformer for at in found.classes]
    assert found.cumulative() == pytest.approx([sum(values[:n]) / n for n in range(1, 6)])
    assert found.rows()[2]["name"] == "class 2"
    assert found.rows()[2]["cumulative"] == pytest.approx(sum(values[:3]) / 3)


def test_a_class_is_the_mean_of_its_images_and_a_smaller_last_batch_is_left_out() -> None:
    model, images = with_v1(), batches(5, 5, 2)
    both = influence(model, images)
    one, two = (influence(model, [batch]) for batch in images[:2])
    assert [at.images for at in both.classes] == [2] * 5
    for mean, a, b in zip(both.classes, one.classes, two.classes, strict=True):
        assert mean.batchformer == pytest.approx((a.batchformer + b.batchformer) / 2)


def test_it_is_the_same_twice_in_spite_of_dropout_and_leaves_the_model_alone() -> None:
    model = with_v1().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert influence(model, batches(3)) == influence(model, batches(3))
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_loss_makes_a_difference() -> None:
    model, images = with_v1(), batches(5)
    assert influence(model, images) == influence(model, images, loss=F.cross_entropy)
    assert influence(model, images) != influence(model, images, loss=BalancedSoftmax(COUNTS))


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InputError, match=r"no batch attention.*plugins\.batchformer_v2\.enabled=true"):
        influence(tiny.vit(), batches(3))
    replacing = convolutional()
    add_batchformer(replacing, heads=2, shared_classifier=False)
    for model in (replacing, with_v2(mode="single_stream")):
        with pytest.raises(InputError, match="instead of making a second stream"):
            influence(model, batches(3))
    with pytest.raises(InputError, match="two or more, got one"):
        influence(with_v1(), batches(1))
    with pytest.raises(InputError, match="got none"):
        influence(with_v1(), [])
    with pytest.raises(InputError, match="labels must be from 0 to 1"):
        gradient_influence(with_v1(), batches(3), class_names=NAMES[:2], class_counts=(1, 1))


def test_the_picture_names_few_classes_of_one_order() -> None:
    def made(*labels: int) -> GradientInfluence:
        return GradientInfluence(tuple(ClassInfluence(at, NAMES[at], 10 - at, 1, 0.0, 1.0 + at) for at in labels))

    [axes] = draw_gradient_influence({"one": made(0, 2), "two": made(0, 2)}).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["class 0", "class 2"]
    assert list(axes.lines[0].get_ydata()) == [1.0, 2.0]
    [axes] = draw_gradient_influence({"one": made(0, 2), "two": made(0, 1)}).axes
    assert "class 0" not in [text.get_text() for text in axes.get_xticklabels()]
