"""Dense relative localization compared with loops, in cases with known results, and in models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from detr_bf.common.errors import InputError
from detr_bf.common.structures import TokenBatch
from detr_bf.plugins import add_relative_localization, ramped
from detr_bf.plugins.relative_localization import (
    PairPredictor,
    distance_loss,
    entropy_loss,
    index_moments,
    offsets,
    pooled,
    regression_loss,
    sample_pairs,
    tokens_at,
)
from tests.plugins import tiny

ROWS, PAIRS, DIM, GRID = 2, 7, 4, (3, 5)


def example() -> tuple[Tensor, Tensor]:
    """Return tokens (R, S, C) of a non-square grid, and positions."""
    torch.manual_seed(0)
    tokens = torch.randn(ROWS, GRID[0] * GRID[1], DIM, dtype=torch.float64)
    return tokens, sample_pairs(torch.tensor([GRID] * ROWS), PAIRS)


def predictor(variant: str, **changes: Any) -> PairPredictor:
    settings: dict[str, Any] = {"grid": GRID, "pairs": PAIRS, "normalize": True} | changes
    return PairPredictor(DIM, variant=variant, **settings).double()


def every_pair() -> Iterator[tuple[int, int]]:
    """Yield each image and each of its pairs, for the slow loops."""
    return itertools.product(range(ROWS), range(PAIRS))


def every_class(logits: Sequence[Tensor], offset: Tensor) -> Iterator[tuple[list[float], int]]:
    """Yield for each axis and pair the probabilities of all offsets and the index of the right one."""
    for axis, side in enumerate(GRID):
        for row, pair in every_pair():
            exponentials = [math.exp(value) for value in logits[axis][row, pair].tolist()]
            probabilities = [value / sum(exponentials) for value in exponentials]
            yield probabilities, int(offset[row, pair, axis]) + side - 1


def test_pairs_are_the_features_at_row_and_column() -> None:
    tokens, positions = example()
    features = tokens.transpose(1, 2).unflatten(2, GRID)
    pairs = tokens_at(tokens, positions, GRID[1])
    for row, pair in every_pair():
        (r1, c1), (r2, c2) = positions[row, pair].tolist()
        assert torch.equal(pairs[row, pair], torch.cat([features[row, :, r1, c1], features[row, :, r2, c2]]))


def test_places_are_uniform_over_each_image_and_each_axis() -> None:
    extent = torch.tensor([[3, 5], [2, 1]])
    positions = sample_pairs(extent, 30_000)
    for row, (height, width) in enumerate(extent.tolist()):
        for which in (0, 1):
            for axis, length in enumerate((height, width)):
                share = torch.bincount(positions[row, :, which, axis], minlength=length) / 30_000
                assert len(share) == length, "no position beyond the image"
                torch.testing.assert_close(share, torch.full((length,), 1 / length), rtol=0, atol=0.02)


def test_swapping_flips_signed_targets_only_and_a_pair_of_one_token_has_target_0() -> None:
    _, positions = example()
    assert torch.equal(offsets(positions.flip(2)), -offsets(positions))
    assert (offsets(positions) != 0).any()
    assert not offsets(positions[:, :, :1].expand(-1, -1, 2, -1)).any()


def slow_loss(network: Any, maps: Tensor, positions: Tensor, units: tuple[int, int], signed: bool = False) -> float:
    """Return the loss of Fig. 2 for maps (R, C, H, W) by loops: the mean over images, pairs and axes.

    Distances are counted in ``units``, the height and width of the grid for shares of it. The L1 norm of Eq. 7 is the
    sum of both axes, twice this value.
    """
    values = []
    for row, pairs in enumerate(positions.tolist()):
        for (r1, c1), (r2, c2) in pairs:
            hidden = torch.cat([maps[row, :, r1, c1], maps[row, :, r2, c2]])
            for layer in network.mlp.layers[:-1]:
                hidden = F.linear(hidden, layer.weight, layer.bias).clamp(min=0)
            out = F.linear(hidden, network.mlp.layers[-1].weight, network.mlp.layers[-1].bias)
            target = [(r1 - r2) / units[0], (c1 - c2) / units[1]]
            target = target if signed else [abs(t) for t in target]
            values += [abs(float(o.detach()) - t) for o, t in zip(out, target, strict=True)]
    return sum(values) / len(values)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("variant", ["abs", "signed"])
def test_distances_as_a_loop_over_pairs(variant: str, normalize: bool) -> None:
    tokens, positions = example()
    network = predictor(variant, normalize=normalize)
    torch.manual_seed(0)
    torch.randn(ROWS, GRID[0] * GRID[1], DIM, dtype=torch.float64)
    loss = network(tokens, GRID)
    maps, units = tokens.transpose(1, 2).unflatten(2, GRID), GRID if normalize else (1, 1)
    assert loss.item() == pytest.approx(slow_loss(network, maps, positions, units, variant == "signed"), rel=1e-12)


@pytest.mark.parametrize(("changes", "hidden"), [({}, 512), ({"hidden": 256}, 256)])
def test_the_network_is_that_of_table_15(changes: dict[str, Any], hidden: int) -> None:
    shapes = [tuple(layer.weight.shape) for layer in predictor("abs", **changes).mlp.layers]
    assert shapes == [(hidden, 2 * DIM), (hidden, hidden), (2, hidden)]
    plugin = add_relative_localization(tiny.swin(), **changes)
    assert [layer.weight.shape[0] for layer in plugin.predictors[0].mlp.layers] == [hidden, hidden, 2]


@pytest.mark.parametrize("side", [2, 7])
def test_predicting_0_costs_the_mean_distance(side: int) -> None:
    network = predictor("abs", grid=(side, side), pairs=4_000)
    nn.init.zeros_(network.mlp.layers[-1].weight)
    nn.init.zeros_(network.mlp.layers[-1].bias)
    torch.manual_seed(0)
    loss = network(torch.zeros(1, side * side, DIM, dtype=torch.float64), (side, side))
    assert loss.item() == pytest.approx((side**2 - 1) / (3 * side**2), abs=0.01)
    exact = torch.cartesian_prod(*[torch.arange(side, dtype=torch.float64)] * 2)
    distance = (exact[:, :1] - exact[:, 1:]).abs().expand(-1, 2)[None] / side
    assert distance_loss(torch.zeros_like(distance), distance).item() == pytest.approx((side**2 - 1) / (3 * side**2))


def classes() -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return logits of 5 and 9 classes for a grid of 3 x 5, and offsets."""
    torch.manual_seed(1)
    logits = tuple(torch.randn(ROWS, PAIRS, 2 * side - 1, dtype=torch.float64) for side in GRID)
    return logits, offsets(example()[1])  # type: ignore[return-value]


def test_classes_as_a_loop_over_pairs() -> None:
    logits, offset = classes()
    values = [-math.log(probability[right]) for probability, right in every_class(logits, offset)]
    assert entropy_loss(logits, offset).item() == pytest.approx(sum(values) / (ROWS * PAIRS), rel=1e-12)


def test_uniform_classes_cost_the_logarithm_of_their_number() -> None:
    _, offset = classes()
    uniform = [torch.zeros(ROWS, PAIRS, 2 * 5 - 1)] * 2
    assert entropy_loss(uniform, offset).item() == pytest.approx(2 * math.log(2 * 5 - 1))


@pytest.mark.parametrize("side", [3, 7])
def test_variance_of_uniform_classes(side: int) -> None:
    mean, variance = index_moments(torch.zeros(2 * side - 1))
    assert mean.item() == pytest.approx(side - 1), "offset 0"
    assert variance.item() == pytest.approx(((2 * side - 1) ** 2 - 1) / 12)


def test_regression_as_a_loop_over_pairs() -> None:
    logits, offset = classes()
    values = []
    for probability, right in every_class(logits, offset):
        mean = sum(p * index for index, p in enumerate(probability))
        variance = sum(p * (index - mean) ** 2 for index, p in enumerate(probability)) + 1e-8
        values.append((right - mean) ** 2 / variance + 0.001 * math.log(math.sqrt(variance)))
    assert regression_loss(logits, offset).item() == pytest.approx(sum(values) / (ROWS * PAIRS), rel=1e-10)


@pytest.mark.parametrize("variant", ["abs", "signed", "ce", "reg"])
def test_gradients_are_those_of_finite_differences(variant: str) -> None:
    """Check the gradients of the complete predictor, with the same pairs every time."""
    tokens = example()[0].requires_grad_()
    network = predictor(variant)

    def loss(tokens: Tensor) -> Tensor:
        torch.manual_seed(5)
        return network(tokens, GRID)

    assert torch.autograd.gradcheck(loss, (tokens,))


def test_pooling_halves_the_grid_by_means_of_what_is_inside() -> None:
    tokens = torch.randn(ROWS, 4 * 5, DIM, dtype=torch.float64)
    small, grid = pooled(tokens, (4, 5))
    assert grid == (2, 3)
    maps = tokens.unflatten(1, (4, 5))
    for row in range(2):
        for column in range(3):
            window = maps[:, max(2 * row - 1, 0) : 2 * row + 2, max(2 * column - 1, 0) : 2 * column + 2]
            torch.testing.assert_close(small[:, 3 * row + column], window.flatten(1, 2).mean(1))


def test_a_vit_of_224_pixels_has_a_grid_of_7_by_7() -> None:
    plugin = add_relative_localization(tiny.vit(img_size=224, patch_size=16), "ce")
    assert plugin.predictors[0].grid == (7, 7)
    assert pooled(torch.zeros(1, 196, 1), (14, 14))[1] == (7, 7)


def last_maps(model: Any) -> tuple[Tensor, tuple[int, int]]:
    """Return the outputs of the last block, computed by calling timm's model."""
    if hasattr(model, "blocks"):
        embedded = model.norm_pre(model._pos_embed(model.patch_embed(tiny.images())))
        return pooled(model.blocks(embedded)[:, model.num_prefix_tokens :], (4, 4))
    return model.layers(model.patch_embed(tiny.images())).flatten(1, 2), (4, 4)


@pytest.mark.parametrize("variant", ["abs", "signed", "ce", "reg"])
@pytest.mark.parametrize(("build", "weight"), [(tiny.vit, 0.01), (tiny.deit, 0.01), (tiny.swin, 0.5)])
def test_in_a_model_it_reads_the_last_grid(build: Callable[[], Any], weight: float, variant: str) -> None:
    model = build()
    plugin = add_relative_localization(model, variant)
    tokens, grid = last_maps(model)
    model.train()(tiny.images())
    torch.manual_seed(4)
    loss = plugin()
    torch.manual_seed(4)
    torch.testing.assert_close(loss, weight * plugin.predictors[0](tokens, grid))


def test_class_token_gets_no_direct_gradient() -> None:
    model = tiny.vit()
    plugin = add_relative_localization(model)
    leaving: list[Tensor] = []
    model.blocks[-1].register_forward_hook(lambda module, args, output: leaving.append(output))
    model.train()(tiny.images())
    (gradient,) = torch.autograd.grad(plugin(), leaving)
    assert not gradient[:, 0].any()
    assert gradient[:, 1:].any()


@pytest.mark.parametrize("build", [tiny.vit, tiny.swin])
def test_after_every_block_the_losses_of_each_with_its_own_predictor_are_summed(build: Callable[[], Any]) -> None:
    """Sum of Eq. 7; Swin's four blocks lie in three stages, whose grids differ."""
    model = build()
    plugin = add_relative_localization(model, "all", weight=2.0, pairs=5, hidden=8, pool=False)
    sources = model.blocks if hasattr(model, "blocks") else [block for stage in model.layers for block in stage.blocks]
    seen: list[Tensor] = []
    for source in sources:
        source.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    model.train()(tiny.images())
    torch.manual_seed(4)
    loss = plugin()
    assert len(plugin.predictors) == len(sources) == len(seen) == 4
    torch.manual_seed(4)
    expected, sides = 0.0, []
    for predict, output in zip(plugin.predictors, seen, strict=True):
        grid = output if output.dim() == 4 else output[:, 1:].unflatten(1, (4, 4))
        sides.append(grid.shape[1])
        positions = sample_pairs(torch.tensor([grid.shape[1:3]] * tiny.IMAGES), 5)
        expected += 2.0 * slow_loss(predict, grid.permute(0, 3, 1, 2), positions, (sides[-1], sides[-1]))
    assert sides == ([4] * 4 if hasattr(model, "blocks") else [16, 8, 4, 4])
    assert loss.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("recompute", [False, True])
def test_tokens_of_a_resnet_are_the_cells_of_its_last_map(recompute: bool) -> None:
    """On images whose map has 4 rows and 6 columns."""
    model = tiny.resnet().train()
    plugin = add_relative_localization(model, weight=2.0, pairs=5, hidden=8)
    model.set_grad_checkpointing(recompute)
    images = torch.randn(ROWS, 3, 32, 48, dtype=torch.float64)
    maps = model.forward_features(images)
    outputs = model(images)
    torch.manual_seed(4)
    loss = plugin()
    torch.manual_seed(4)
    positions = sample_pairs(torch.tensor([[4, 6]] * ROWS), 5)
    assert loss.item() == pytest.approx(2.0 * slow_loss(plugin.predictors[0], maps.detach(), positions, (4, 6)))
    (outputs.sum() + loss).backward()
    assert not plugin._kept
    assert "layer4.0.conv3.weight" in {name for name, each in model.named_parameters() if each.grad is not None}
    model.eval()(images)
    with pytest.raises(InputError, match="Call the model"):
        plugin()


def test_recomputed_blocks_leave_no_tokens_behind() -> None:
    model = tiny.vit()
    plugin = add_relative_localization(model, "all")
    model.train().set_grad_checkpointing()
    with set_checkpoint_early_stop(False):  # otherwise recomputation often stops before the hooks of a block
        (model(tiny.images()).sum() + plugin()).backward()
    assert not plugin._kept
    with pytest.raises(InputError, match="Call the model"):
        plugin()


def test_images_of_other_sizes_have_other_grids() -> None:
    model = tiny.vit(dynamic_img_size=True)
    plugin = add_relative_localization(model, pool=False)
    seen: list[tuple[int, int]] = []
    plugin.predictors[0].register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    model.train()(torch.randn(2, 3, 24, 48, dtype=torch.float64))
    assert plugin().isfinite()
    assert seen == [(3, 6)]
    fixed = tiny.vit(dynamic_img_size=True)
    loss = add_relative_localization(fixed, "ce", pool=False)
    fixed.train()(torch.randn(2, 3, 24, 48, dtype=torch.float64))
    with pytest.raises(InputError, match=r"grid of \(3, 6\) tokens, expected \(4, 4\)"):
        loss()


def test_grid_of_one_token_is_refused() -> None:
    model = tiny.vit(patch_size=16)
    loss = add_relative_localization(model)
    model.train()(tiny.images())
    with pytest.raises(InputError, match="two tokens or more"):
        loss()


COARSE = (3, 4)


def detector_batch() -> TokenBatch:
    """Two levels; the second image fills 2 x 3 cells of the coarse level."""
    torch.manual_seed(3)
    fine, cells = 5 * 6, COARSE[0] * COARSE[1]
    x, position = torch.randn(2, ROWS, fine + cells, tiny.DIM, dtype=torch.float64)
    coarse = torch.ones(ROWS, *COARSE, dtype=torch.bool)
    coarse[0] = coarse[1, :2, :3] = False
    mask = torch.cat([torch.zeros(ROWS, fine, dtype=torch.bool), coarse.flatten(1)], dim=1)
    return TokenBatch(x, {"padding_mask": mask, "position": position}, {"spatial_shapes": ((5, 6), COARSE)})


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("variant", ["abs", "signed", "all"])
def test_in_our_encoder_pairs_lie_in_the_valid_part_of_the_memory(variant: str, recompute: bool) -> None:
    encoder = tiny.encoder(activation_checkpointing=recompute).train()
    plugin = add_relative_localization(encoder, variant, weight=1.0, pairs=500)
    assert len(plugin.predictors) == (tiny.DEPTH if variant == "all" else 1)
    seen: list[tuple[Any, ...]] = []
    plugin.predictors[-1].register_forward_pre_hook(lambda module, args: seen.append(args))
    memory = encoder(detector_batch()).tokens
    memory.retain_grad()
    plugin().backward()
    tokens, grid, extent = seen[0]
    assert torch.equal(tokens, memory[:, -12:])
    assert grid == COARSE
    assert extent.tolist() == [[3, 4], [2, 3]]
    if variant != "all":
        reached = memory.grad[:, -12:].abs().sum(-1).unflatten(1, COARSE) > 0
        valid = ~detector_batch().per_sample["padding_mask"][:, -12:].unflatten(1, COARSE)
        assert torch.equal(reached, valid)
        assert not memory.grad[:, :-12].any()


def test_in_our_encoder_distances_are_parts_of_each_image() -> None:
    network = predictor("abs", pairs=4_000)
    nn.init.zeros_(network.mlp.layers[-1].weight)
    nn.init.zeros_(network.mlp.layers[-1].bias)
    for side in (2, 3):
        extent = torch.full((1, 2), side)
        loss = network(torch.zeros(1, 15, DIM, dtype=torch.float64), GRID, extent)
        assert loss.item() == pytest.approx((side**2 - 1) / (3 * side**2), abs=0.01)


def test_our_encoder_is_as_before_once_it_is_removed() -> None:
    encoder, plain = tiny.encoder().train(), tiny.encoder().train()
    plugin = add_relative_localization(encoder, "all", weight=1.0)
    assert torch.equal(encoder(detector_batch()).tokens, plain(detector_batch()).tokens)
    plugin.remove()
    assert list(encoder.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (tiny.vit, {"variant": "l1"}, "abs, signed, ce, reg, all"),
        (tiny.vit, {"pairs": 0}, "pairs must be 1 or more, got 0"),
        (tiny.vit, {"hidden": 0}, "hidden must be 1 or more, got 0"),
        (tiny.resnet, {}, "none was published for a ResNet: give one"),
        (tiny.resnet, {"variant": "all", "weight": 1.0}, "needs transformer blocks"),
        (tiny.resnet, {"variant": "reg", "weight": 1.0}, "depends on its images"),
        (tiny.encoder, {}, "give one"),
        (tiny.encoder, {"variant": "ce", "weight": 1.0}, "take abs"),
        (tiny.encoder, {"pool": True, "weight": 1.0}, "without pool"),
        (tiny.pit, {}, "VisionTransformer"),
    ],
)
def test_wrong_settings_are_refused(build: Callable[[], Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        add_relative_localization(build(), **settings)


def test_weight_rises_for_20_epochs_then_falls_to_0() -> None:
    assert [ramped(0.5, epoch, 100) for epoch in (0, 10, 20, 60, 100)] == pytest.approx([0, 0.25, 0.5, 0.25, 0])


def test_weight_is_read_at_each_call() -> None:
    model = tiny.vit()
    plugin = add_relative_localization(model)
    plugin.weight = 0.0
    model.train()(tiny.images())
    assert plugin().item() == 0
