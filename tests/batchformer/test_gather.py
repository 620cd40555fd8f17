"""Batch attention over several ranks gives the results of one process with all images, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from detr_bf.batchformer import BatchFormer, BatchFormerLayer, BatchFormerV2
from detr_bf.common import distributed
from detr_bf.common.structures import TokenBatch
from tests.processes import run_together

DIM = 16
SHAPES = ((4, 5), (2, 3))
CELLS = sum(height * width for height, width in SHAPES)
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-10}
PER_PROCESS = {2: (2, 1), 4: (1, 3, 2, 1)}  # images per rank, also unequal


def module(**changes: object) -> BatchFormerV2:
    torch.manual_seed(0)
    settings = {"layers": [0, 1], "num_encoder_layers": 2, "dropout": 0.0, "num_layers": 2, "gather": True} | changes
    return BatchFormerV2(DIM, **settings).double().train()  # type: ignore[arg-type]


def images(count: int, shapes: tuple[tuple[int, int], ...] = SHAPES) -> TokenBatch:
    generator = torch.Generator().manual_seed(1)
    cells = sum(height * width for height, width in shapes)
    tokens = torch.randn(count, cells, DIM, generator=generator, dtype=torch.float64)
    padding = torch.rand(count, cells, generator=generator) < 0.3
    return TokenBatch(tokens, {"padding_mask": padding}, {"spatial_shapes": shapes})


def rows(batch: TokenBatch, start: int, stop: int) -> TokenBatch:
    mask = batch.per_sample["padding_mask"][start:stop]
    return TokenBatch(batch.tokens[start:stop].clone(), {"padding_mask": mask}, batch.static)


def run(batch: TokenBatch, **changes: object) -> dict[str, Any]:
    """Run two insertions; return the outputs and the gradients of a sum that weighs the channels differently."""
    bf = module(**changes)
    batch.tokens.requires_grad_()
    out = bf(bf(batch, layer=0, position="before"), layer=1, position="before")
    (out.tokens.sin() * torch.arange(1, DIM + 1)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in bf.named_parameters()}
    return {"out": out.tokens.detach().chunk(out.num_streams), "input": batch.tokens.grad, "parameters": gradients}


def share(sizes: tuple[int, ...], changes: dict[str, object]) -> dict[str, Any]:
    start = sum(sizes[: distributed.rank()])
    return run(rows(images(sum(sizes)), start, start + sizes[distributed.rank()]), **changes)


@pytest.mark.default_tier("changes0-2", "changes2-2")
@pytest.mark.parametrize("count", PER_PROCESS)
@pytest.mark.parametrize("changes", [{}, {"mask_padding": True}, {"mode": "single_stream", "shared": False}])
def test_several_processes_equal_one_with_all_images(count: int, changes: dict[str, object]) -> None:
    sizes = PER_PROCESS[count]
    check_equal(run_together(count, share, sizes, changes), run(images(sum(sizes)), **changes))


def check_equal(parts: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """Return outputs of each stream, gradients of the inputs, and the summed gradients of the parameters."""
    for stream, expected in enumerate(whole["out"]):
        torch.testing.assert_close(torch.cat([part["out"][stream] for part in parts]), expected, **CLOSE)
    torch.testing.assert_close(torch.cat([part["input"] for part in parts]), whole["input"], **CLOSE)
    for name, expected in whole["parameters"].items():
        summed = sum(part["parameters"][name] for part in parts)
        torch.testing.assert_close(summed, expected, **CLOSE)


def run_pooled(features: Tensor, shared_classifier: bool) -> dict[str, Any]:
    """Run BatchFormer on pooled features, as :func:`run` does."""
    torch.manual_seed(0)
    settings = {"dropout": 0.0, "num_layers": 2, "gather": True}
    bf = BatchFormer(DIM, **settings, shared_classifier=shared_classifier).double().train()
    features.requires_grad_()
    out = bf(features)
    (out.sin() * torch.arange(1, DIM + 1)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in bf.named_parameters()}
    return {"out": out.detach().chunk(bf.num_streams), "input": features.grad, "parameters": gradients}


def share_pooled(sizes: tuple[int, ...], shared_classifier: bool) -> dict[str, Any]:
    start = sum(sizes[: distributed.rank()])
    here = images(sum(sizes)).tokens[start : start + sizes[distributed.rank()], 0]
    return run_pooled(here.clone(), shared_classifier)


@pytest.mark.default_tier("True-2")
@pytest.mark.parametrize("count", PER_PROCESS)
@pytest.mark.parametrize("shared_classifier", [True, False])
def test_pooled_features_of_several_processes_equal_those_of_one(count: int, shared_classifier: bool) -> None:
    sizes = PER_PROCESS[count]
    whole = run_pooled(images(sum(sizes)).tokens[:, 0].clone(), shared_classifier)
    check_equal(run_together(count, share_pooled, sizes, shared_classifier), whole)


OTHER_SHAPES = (((4, 5), (2, 3)), ((3, 7), (1, 4)))  # for two ranks


def mixed_here(mask_padding: bool) -> Tensor:
    batch = images(2, OTHER_SHAPES[distributed.rank()])
    bf = module(layers=[0], mask_padding=mask_padding)
    return bf(batch, layer=0, position="before").tokens[2:].detach()


@pytest.mark.parametrize("mask_padding", [False, True])
def test_grids_of_other_sizes_are_aligned_by_level_at_their_corner(mask_padding: bool) -> None:
    """Compare with a loop over positions: images that have a position attend to each other and to no others."""
    parts = run_together(2, mixed_here, mask_padding)
    layer: BatchFormerLayer = module(layers=[0]).mixers["shared"]
    batches = [images(2, shapes) for shapes in OTHER_SHAPES]
    for level in range(2):
        offsets = [sum(h * w for h, w in shapes[:level]) for shapes in OTHER_SHAPES]
        height, width = (max(shapes[level][side] for shapes in OTHER_SHAPES) for side in (0, 1))
        for y in range(height):
            for x in range(width):
                owners = [
                    (process, image, offsets[process] + y * OTHER_SHAPES[process][level][1] + x)
                    for process in range(2)
                    if y < OTHER_SHAPES[process][level][0] and x < OTHER_SHAPES[process][level][1]
                    for image in range(2)
                ]
                check_position(layer, batches, parts, owners, mask_padding)


def check_position(
    layer: BatchFormerLayer,
    batches: list[TokenBatch],
    parts: list[Tensor],
    owners: list[tuple[int, int, int]],
    mask_padding: bool,
) -> None:
    if not owners:
        return
    tokens = torch.stack([batches[process].tokens[image, cell] for process, image, cell in owners])
    masks = [batches[process].per_sample["padding_mask"][image, cell] for process, image, cell in owners]
    expected = layer(tokens[:, None], torch.stack(masks)[:, None] if mask_padding else None)[:, 0]
    found = torch.stack([parts[process][image, cell] for process, image, cell in owners])
    torch.testing.assert_close(found, expected.detach(), **CLOSE)


def evaluated() -> Tensor:
    bf = module(mode="mini_batch_inference").eval()
    return bf(images(1 + distributed.rank()), layer=0, position="before").tokens.detach()


def test_evaluation_stays_with_the_images_of_its_process() -> None:
    """Ranks may have unequal numbers of batches in evaluation."""
    bf = module(mode="mini_batch_inference").eval()
    for rank, found in enumerate(run_together(2, evaluated)):
        expected = bf(images(1 + rank), layer=0, position="before").tokens
        torch.testing.assert_close(found, expected.detach(), **CLOSE)


def half_precision(dtype: torch.dtype) -> tuple[torch.dtype, bool]:
    batch = images(2)
    tokens = batch.tokens.float().requires_grad_()
    bf = module(layers=[0]).float()
    with torch.autocast("cpu", dtype):
        out = bf(TokenBatch(tokens, batch.per_sample, batch.static), layer=0, position="before").tokens
    out.float().sum().backward()
    return out.dtype, bool(out.isfinite().all() and tokens.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_travels_as_it_is(dtype: torch.dtype) -> None:
    assert [finite for _, finite in run_together(2, half_precision, dtype)] == [True, True]


def test_with_one_process_there_is_nothing_to_gather() -> None:
    batch = images(3)
    alone, gathered = (module(gather=gather)(batch, layer=0, position="before").tokens for gather in (False, True))
    assert torch.equal(alone, gathered)


def two_steps_in_one() -> dict[str, Tensor]:
    """Accumulate gradients over two batches; each sequence holds one batch of all ranks, never two."""
    bf = module(layers=[0])
    for step in range(2):
        batch = images(4)
        out = bf(
            rows(batch, 2 * step + distributed.rank(), 2 * step + distributed.rank() + 1), layer=0, position="before"
        )
        out.tokens.sin().sum().backward()
    return {name: parameter.grad for name, parameter in bf.named_parameters()}


def test_accumulation_adds_the_gradients_of_its_batches() -> None:
    parts = run_together(2, two_steps_in_one)
    bf = module(layers=[0])
    for step in range(2):
        bf(rows(images(4), 2 * step, 2 * step + 2), layer=0, position="before").tokens.sin().sum().backward()
    for name, parameter in bf.named_parameters():
        torch.testing.assert_close(sum(part[name] for part in parts), parameter.grad, **CLOSE)
