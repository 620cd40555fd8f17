"""The op against loops, its gradients, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from detr_bf.ops import ms_deform_attn
from tests.references.deformable_attention import loops

SHAPES = [(4, 6), (3, 2), (1, 1)]


def example(
    rows: int = 2, queries: int = 3, heads: int = 2, width: int = 3, points: int = 2, spread: float = 1.4
) -> tuple[Tensor, Tensor, Tensor]:
    """Value, locations (some outside the image) and weights (not normalised), float64."""
    generator = torch.Generator().manual_seed(0)
    cells = sum(h * w for h, w in SHAPES)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    value = random(rows, cells, heads, width) - 0.5
    locations = (random(rows, queries, heads, len(SHAPES), points, 2) - 0.5) * spread + 0.5
    return value, locations, random(rows, queries, heads, len(SHAPES), points)


def test_against_loops() -> None:
    value, locations, weights = example()
    assert ((locations < 0) | (locations > 1)).any(), "some points lie outside"
    torch.testing.assert_close(
        ms_deform_attn(value, SHAPES, locations, weights), loops(value, SHAPES, locations, weights)
    )


def test_a_point_on_a_cell_centre_is_that_cell() -> None:
    value = torch.arange(24.0).view(1, 24, 1, 1)
    locations = torch.tensor([(2 + 0.5) / 6, (1 + 0.5) / 4]).view(1, 1, 1, 1, 1, 2)
    assert ms_deform_attn(value, [(4, 6)], locations, torch.ones(1, 1, 1, 1, 1)).item() == pytest.approx(1 * 6 + 2)


def test_points_far_outside_find_nothing() -> None:
    value, locations, weights = example()
    assert not ms_deform_attn(value, SHAPES, locations + 3, weights).any()


def test_gradients() -> None:
    value, locations, weights = (x.requires_grad_() for x in example(rows=1, queries=2, width=2))
    torch.autograd.gradcheck(lambda v, x, w: ms_deform_attn(v, SHAPES, x, w), (value, locations, weights))


def test_inputs_that_are_not_contiguous() -> None:
    value, locations, weights = example()
    strided = value.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    assert not strided.is_contiguous()
    expected = ms_deform_attn(value, SHAPES, locations, weights)
    torch.testing.assert_close(ms_deform_attn(strided, SHAPES, locations, weights), expected)


@pytest.mark.parametrize(("rows", "queries"), [(0, 3), (2, 0)])
def test_nothing_to_do(rows: int, queries: int) -> None:
    value, locations, weights = example(rows=rows, queries=queries)
    assert ms_deform_attn(value, SHAPES, locations, weights).shape == (rows, queries, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype: torch.dtype) -> None:
    value, locations, weights = example()
    """Value and weights are rounded, the locations are not."""
    value, weights = value.to(dtype), weights.to(dtype)
    low = ms_deform_attn(value, SHAPES, locations.float(), weights)
    assert low.dtype == dtype
    exact = ms_deform_attn(value.double(), SHAPES, locations, weights.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(low.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v, x, w: (v[:, :-1], x, w), "30 cells"),
        (lambda v, x, w: (v[..., 0], x, w), r"expected value \(R, S, H, D\)"),
        (lambda v, x, w: (v, x[:, :, :, :2], w), "sampling_locations must be|and sampling_locations"),
        (lambda v, x, w: (v, x, w[..., :1]), "attention_weights must be"),
        (lambda v, x, w: (v[:1], x, w), "attention_weights must be"),
    ],
)
def test_shapes_that_do_not_belong_together(change: object, message: str) -> None:
    value, locations, weights = change(*example())  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        ms_deform_attn(value, SHAPES, locations, weights)
