"""Random predictions and targets, small enough to check by loops."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from detr_bf.common.structures import Outputs, Target


def random_boxes(*shape: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw boxes (*shape, 4), centre x, centre y, width, height, that lie inside the unit square."""
    size = 0.05 + 0.4 * torch.rand(*shape, 2, generator=generator)
    centre = size / 2 + (1 - size) * torch.rand(*shape, 2, generator=generator)
    return torch.cat([centre, size], dim=-1)


def random_targets(counts: Sequence[int], *, classes: int, seed: int = 0) -> list[Target]:
    """Draw one target for each entry of ``counts``, its number of objects."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Target(
            image_id=image,
            boxes=random_boxes(count, generator=generator),
            labels=torch.randint(classes, (count,), generator=generator),
            size=(32, 48),
            original_size=(64, 96),
        )
        for image, count in enumerate(counts)
    ]


def random_outputs(layers: int, images: int, queries: int, *, logits: int, streams: int = 1, seed: int = 1) -> Outputs:
    """Draw leaf tensors with gradients."""
    generator = torch.Generator().manual_seed(seed)
    rows = streams * images
    return Outputs(
        torch.randn(layers, rows, queries, logits, generator=generator).requires_grad_(),
        random_boxes(layers, rows, queries, generator=generator).requires_grad_(),
        streams,
    )
