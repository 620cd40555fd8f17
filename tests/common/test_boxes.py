"""Generalized IoU compared with torchvision's, and degenerate boxes for which torchvision divides by zero."""

from __future__ import annotations

import pytest
import torch
from torchvision.ops import box_convert
from torchvision.ops import generalized_box_iou as pairwise_giou

from detr_bf.common.boxes import generalized_iou, inverse_sigmoid, relative_boxes
from tests.references.examples import random_boxes


def corners(*shape: int, seed: int = 0) -> torch.Tensor:
    boxes = random_boxes(*shape, generator=torch.Generator().manual_seed(seed))
    return box_convert(boxes.double(), "cxcywh", "xyxy")


def test_all_pairs_as_torchvision() -> None:
    a, b = corners(6), corners(4, seed=1)
    torch.testing.assert_close(generalized_iou(a[:, None], b), pairwise_giou(a, b))


def test_single_pairs_and_leading_dimensions_broadcast() -> None:
    a, b = corners(2, 3, 5), corners(3, 4, seed=1)
    overlaps = generalized_iou(a[..., :, None, :], b[:, None])
    assert overlaps.shape == (2, 3, 5, 4)
    for layer in range(2):
        for row in range(3):
            torch.testing.assert_close(overlaps[layer, row], pairwise_giou(a[layer, row], b[row]))
    torch.testing.assert_close(generalized_iou(a[0, 0, :4], b[0]), pairwise_giou(a[0, 0, :4], b[0]).diagonal())


def test_known_values() -> None:
    unit = torch.tensor([0.0, 0.0, 1.0, 1.0])
    others = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 2], [1, 0, 2, 1], [3, 0, 4, 1], [1, 1, 2, 2]], dtype=torch.float)
    torch.testing.assert_close(generalized_iou(unit, others), torch.tensor([1.0, 0.5, 0.0, -0.5, -0.5]))


def test_symmetric_and_independent_of_scale_and_place() -> None:
    a, b = corners(20), corners(20, seed=1)
    overlap = generalized_iou(a, b)
    assert ((overlap >= -1) & (overlap <= 1)).all()
    torch.testing.assert_close(generalized_iou(b, a), overlap)
    for scale, shift in ((3.0, 7.0), (1e-3, 0.5)):
        torch.testing.assert_close(generalized_iou(scale * a + shift, scale * b + shift), overlap)


def test_gradient() -> None:
    a, b = corners(3).requires_grad_(), corners(3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(generalized_iou, (a, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((0.5, 0.5, 0.5, 0.5), (0.2, 0.2, 0.6, 0.7), 0.0),  # a point inside a box: the hull has no other area
        ((0.5, 0.5, 0.5, 0.5), (0.5, 0.5, 0.5, 0.5), 0.0),  # a point with itself
        ((0.1, 0.1, 0.1, 0.1), (0.5, 0.5, 0.5, 0.5), -1.0),  # two points
        ((0.5, 0.1, 0.5, 0.6), (0.5, 0.1, 0.5, 0.6), 0.0),  # a line with itself
        ((0.1, 0.1, 0.4, 0.1), (0.2, 0.3, 0.6, 0.3), -1.0),  # two lines
        ((0.6, 0.6, 0.4, 0.4), (0.6, 0.6, 0.8, 0.8), 0.0),  # corners in the wrong order have no area
    ],
)
def test_degenerate_boxes(a: tuple[float, ...], b: tuple[float, ...], expected: float, dtype: torch.dtype) -> None:
    box, other = torch.tensor(a, dtype=dtype, requires_grad=True), torch.tensor(b, dtype=dtype)
    overlap = generalized_iou(box, other)
    overlap.backward()
    assert overlap.item() == pytest.approx(expected, abs=1e-6)
    assert box.grad.isfinite().all()


def test_inverse_sigmoid_and_its_ends() -> None:
    x = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    torch.testing.assert_close(inverse_sigmoid(x), x.logit())
    torch.testing.assert_close(
        inverse_sigmoid(torch.tensor([-1.0, 0.0, 1.0, 2.0])).sign(), torch.tensor([-1.0, -1, 1, 1])
    )
    assert inverse_sigmoid(torch.tensor([0.0, 1.0])).isfinite().all()


def test_boxes_relative_to_nothing_a_point_and_a_box() -> None:
    offsets = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    box = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(relative_boxes(offsets, None), offsets.sigmoid())
    torch.testing.assert_close(relative_boxes(offsets, box), (offsets + box.logit()).sigmoid())
    by_point = relative_boxes(offsets, box[:, :2])
    torch.testing.assert_close(by_point[:, :2], (offsets + box.logit())[:, :2].sigmoid())
    torch.testing.assert_close(by_point[:, 2:], offsets[:, 2:].sigmoid())
    torch.testing.assert_close(relative_boxes(torch.zeros(3, 4, dtype=torch.float64), box), box)
