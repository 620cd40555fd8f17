"""Maps of images: Grad-CAM, and feature maps of both streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.analysis.classification import feature_maps, grad_cam
from detr_bf.analysis.images import (
    CamImage,
    CamSheet,
    FeatureMaps,
    class_activation,
    draw_feature_maps,
    draw_grad_cam,
)
from detr_bf.classification.cifar_resnet import cifar_resnet
from detr_bf.common.errors import InputError
from detr_bf.plugins import add_batchformer, add_batchformer_v2
from tests.analysis.classification.examples import NAMES, PIXELS, batches, convolutional
from tests.plugins import tiny

STEP = 1e-6
SHOWN: dict[str, Any] = {"class_names": NAMES, "pixels": PIXELS}


def cam(model: nn.Module, *sizes: int) -> CamSheet:
    return grad_cam(model, batches(*sizes), **SHOWN)


def test_activation_as_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    maps, gradients = (torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    for image, found in enumerate(class_activation(maps, gradients)):
        expected = np.zeros((4, 5))
        for row in range(4):
            for column in range(5):
                for channel in range(3):
                    expected[row, column] += float(
                        gradients[image, channel].sum() / 20 * maps[image, channel, row, column]
                    )
        expected = np.maximum(expected, 0)
        np.testing.assert_allclose(found.numpy(), expected / expected.max(), rtol=1e-12)


def test_an_image_without_any_heat_stays_0() -> None:
    assert not class_activation(torch.ones(1, 2, 3, 3), -torch.ones(1, 2, 3, 3)).any()
    image = CamImage(7, "a", "b", 0.5, np.zeros((4, 4, 3)), np.zeros((3, 3)))
    assert CamSheet((image,)).rows() == [
        {"index": 7, "class": "a", "predicted": "b", "probability": 0.5, "centre_row": None, "centre_column": None}
    ]


def test_of_a_network_with_pooling_and_a_linear_layer_it_is_the_class_activation_map() -> None:
    """With pooling, the mean gradient of channel c is its weight divided by the number of positions."""
    model, [batch] = convolutional(), batches(4)
    with torch.no_grad():
        maps = model.features(batch.images)
        expected = torch.einsum("bchw,bc->bhw", maps, model.fc.weight[batch.targets.labels]).relu()
        logits = model(batch.images)
    sheet = cam(model, 4)
    for image, heat, scores in zip(sheet.images, expected, logits, strict=True):
        np.testing.assert_allclose(image.heat, (heat / heat.max()).numpy(), rtol=1e-5, atol=1e-7)
        assert image.predicted == NAMES[int(scores.argmax())]
        assert image.probability == pytest.approx(float(scores.softmax(0)[NAMES.index(image.name)]))
    assert [image.index for image in sheet.images] == [0, 1, 2, 3]


def test_of_a_vit_it_is_that_of_the_patches_behind_the_last_first_norm() -> None:
    model, [batch] = tiny.deit(), batches(2)
    block: Any = model.blocks[-1]
    with torch.no_grad():
        tokens = model._pos_embed(model.patch_embed(batch.images))
        for earlier in model.blocks[:-1]:
            tokens = earlier(tokens)
        normed = block.norm1(tokens)

        def scores(changed: Tensor) -> Tensor:
            after = tokens + block.attn(changed)
            logits = model.forward_head(model.norm(after + block.mlp(block.norm2(after))))
            return logits[torch.arange(2), batch.targets.labels]

        gradient = torch.zeros_like(normed)
        for index in np.ndindex(*normed.shape[1:]):
            up, down = normed.clone(), normed.clone()
            up[(slice(None), *index)] += STEP
            down[(slice(None), *index)] -= STEP
            gradient[(slice(None), *index)] = (scores(up) - scores(down)) / (2 * STEP)
    for row, image in enumerate(cam(model, 2).images):
        weights = gradient[row, 2:].mean(0)
        heat = torch.stack([(weights * patch).sum().clamp(min=0) for patch in normed[row, 2:]]).view(4, 4)
        np.testing.assert_allclose(image.heat, (heat / heat.max()).numpy(), atol=1e-5)


def test_heat_is_where_the_network_looks() -> None:
    model = convolutional()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.features[3].weight.fill_(1)
        model.features[0].weight[0, :, 1, 1] = 1  # brightness
        model.features[2].weight[0, 0, 1, 1] = 1
        model.fc.weight.fill_(1)
    [batch] = batches(1)
    batch.images.fill_(0)
    batch.images[:, :, 4:8, 24:28] = 5
    [image] = grad_cam(model, [batch], **SHOWN).images
    assert np.argwhere(image.heat > 0).tolist() == [[1, 6]]
    [row] = CamSheet((image,)).rows()
    assert (row["centre_row"], row["centre_column"]) == ((1 + 0.5) / 8, (6 + 0.5) / 8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: timm.create_model("resnet10t", num_classes=tiny.CLASSES),
        lambda: timm.create_model("legacy_seresnet18", num_classes=tiny.CLASSES),  # its last feature map is 1 x 1
        lambda: cifar_resnet(20, tiny.CLASSES),
    ],
)
def test_in_residual_networks_it_is_the_class_activation_map_of_the_last_stage(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model, [batch] = make().double().eval(), batches(3)
    images = F.interpolate(batch.images, size=(64, 64))
    kept: list[Tensor] = []
    last_stage = [module for name, module in model.named_children() if name in ("layer4", "stage3", "layer3")][-1]
    with torch.no_grad(), last_stage.register_forward_hook(lambda module, args, output: kept.append(output)):
        model(images)
    weights = nn.init.uniform_(model.get_classifier().weight, -0.5, 1.0)[batch.targets.labels].detach()
    expected = torch.einsum("bchw,bc->bhw", kept[0], weights).relu()
    assert expected.any()
    sheet = grad_cam(model, [replace(batch, images=images)], **SHOWN)
    for image, heat in zip(sheet.images, expected, strict=True):
        largest = heat.max() if heat.any() else torch.tensor(1.0)
        np.testing.assert_allclose(image.heat, (heat / largest).numpy(), rtol=1e-5, atol=1e-6)


def test_of_convnext_it_is_the_last_stage() -> None:
    torch.manual_seed(0)
    model, [batch] = timm.create_model("convnext_atto", num_classes=tiny.CLASSES).double().eval(), batches(2)
    sheet = grad_cam(model, [replace(batch, images=F.interpolate(batch.images, size=(96, 64)))], **SHOWN)
    assert [image.heat.shape for image in sheet.images] == [(3, 2)] * 2


def test_models_without_a_last_map_are_refused() -> None:
    for model in (tiny.swin(), tiny.mixer()):
        with pytest.raises(InputError, match="Grad-CAM needs a convolutional network or timm's VisionTransformer"):
            cam(model, 2)
    with pytest.raises(InputError, match="labels must be from 0 to 0"):
        grad_cam(convolutional(), batches(2), class_names=NAMES[:1], pixels=PIXELS)


def test_the_picture_has_a_column_a_run_and_refuses_runs_of_other_images() -> None:
    runs = {"one": cam(convolutional(), 3), "two": cam(tiny.vit(), 3)}
    axes = draw_grad_cam(runs).axes
    assert [ax.get_title().split("\n")[0] for ax in axes[:6]] == ["image", "one", "two"] * 2
    for other in (cam(tiny.vit(), 2), CamSheet(runs["two"].images[::-1])):
        with pytest.raises(InputError, match="'one' and 'two' show different images"):
            draw_grad_cam({"one": runs["one"], "two": other})


def maps_of(model: Any, *sizes: int) -> FeatureMaps:
    return feature_maps(model, batches(*sizes), class_names=NAMES, pixels=PIXELS)


def by_hand(images: Tensor, *, position: str) -> Tensor:
    """Map (2B, 4, 4) of the block that reads both streams, with one insertion at block 2."""
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
        assert (image.index, image.name) == (row, NAMES[row])
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
    with pytest.raises(InputError, match=r"no positions.*batchformer_v2"):
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
