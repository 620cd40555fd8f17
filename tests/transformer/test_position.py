"""Position encodings compared with their formulas, cell by cell."""

from __future__ import annotations

import math

import pytest
import torch

from detr_bf.common.errors import InputError
from detr_bf.transformer.position import LearnedPosition, SinePosition, sine_position


def mask_of(*sizes: tuple[int, int], height: int = 5, width: int = 7) -> torch.Tensor:
    """Padding mask (B, height, width); each image fills the top left corner."""
    mask = torch.ones(len(sizes), height, width, dtype=torch.bool)
    for row, (h, w) in enumerate(sizes):
        mask[row, :h, :w] = False
    return mask


def cell(index: int, length: int, channels: int, temperature: float) -> list[float]:
    """The encoding of cell ``index`` of ``length``, counted from 0, along one axis."""
    angle = 2 * math.pi * (index + 1) / length
    values = []
    for pair in range(channels // 2):
        phase = angle / temperature ** (2 * pair / channels)
        values += [math.sin(phase), math.cos(phase)]
    return values


@pytest.mark.parametrize(("dim", "temperature"), [(8, 10000.0), (12, 20.0)])
def test_sine_as_the_formula(dim: int, temperature: float) -> None:
    sizes = [(5, 7), (2, 3), (4, 1)]
    position = sine_position(mask_of(*sizes), dim, temperature=temperature)
    assert position.shape == (3, 5 * 7, dim)
    for image, (height, width) in enumerate(sizes):
        for y in range(height):
            for x in range(width):
                expected = cell(y, height, dim // 2, temperature) + cell(x, width, dim // 2, temperature)
                torch.testing.assert_close(position[image, y * 7 + x], torch.tensor(expected), rtol=0, atol=2e-5)


def test_sine_does_not_depend_on_how_much_is_padded() -> None:
    padded = sine_position(mask_of((3, 4), height=6, width=9), 16).unflatten(1, (6, 9))[:, :3, :4]
    alone = sine_position(mask_of((3, 4), height=3, width=4), 16).unflatten(1, (3, 4))
    torch.testing.assert_close(padded, alone)


def test_sine_tells_all_cells_apart() -> None:
    position = SinePosition(16)(mask_of((5, 7)))[0]
    distance = torch.cdist(position, position) + 10 * torch.eye(35)
    assert distance.min() > 1e-2


@pytest.mark.parametrize(("module", "dim"), [(SinePosition, 6), (LearnedPosition, 7)])
def test_width_that_does_not_split_is_refused(module: type[torch.nn.Module], dim: int) -> None:
    with pytest.raises(InputError, match=f"dim={dim} must be"):
        module(dim)


def test_learned_is_the_vector_of_the_column_then_of_the_row() -> None:
    torch.manual_seed(0)
    module = LearnedPosition(6)
    position = module(mask_of((5, 7), (2, 3)))
    assert position.shape == (2, 35, 6)
    for y in range(5):
        for x in range(7):
            expected = torch.cat([module.column.weight[x], module.row.weight[y]])
            assert torch.equal(position[0, y * 7 + x], expected)
    assert torch.equal(position[0], position[1]), "the same for every image"


def test_learned_starts_uniform_and_is_trained() -> None:
    torch.manual_seed(0)
    module = LearnedPosition(128)
    for weight in (module.column.weight, module.row.weight):
        assert 0 <= weight.min() < 0.01
        assert 0.99 < weight.max() <= 1
    module(mask_of((5, 7))).sum().backward()
    assert module.column.weight.grad.sum(1).tolist() == [5 * 64] * 7 + [0] * 43
    assert module.row.weight.grad.sum(1).tolist() == [7 * 64] * 5 + [0] * 45


@pytest.mark.parametrize(("height", "width"), [(4, 3), (3, 4)])
def test_map_with_more_cells_than_vectors_is_refused(height: int, width: int) -> None:
    module = LearnedPosition(4, length=3)
    assert module(mask_of((3, 3), height=3, width=3)).shape == (1, 9, 4)
    with pytest.raises(InputError, match=rf"holds 3 rows and columns.* {height} x {width}.*position_encoding=sine"):
        module(mask_of((height, width), height=height, width=width))
