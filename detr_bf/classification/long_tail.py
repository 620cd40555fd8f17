"""A training split thinned out to a long tail, as CIFAR-100-LT was made (Cui et al. 2019, arXiv 1901.05555)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from detr_bf.errors import InputError

_SHUFFLE_SEED = 0  # of every run, whatever its own seed
_ROUNDING = 1 + 1e-12  # more than what the error of a power takes from a whole number


def long_tail_counts(n: int, classes: int, imbalance: float) -> list[int]:
    """How many images the classes keep, head first: n * imbalance ** (-c / (classes - 1)) for c = 0 ... classes - 1.

    Rounded down, as the authors do.

    Raises:
        InputError: ``imbalance`` is below 1, or leaves a class without images.
    """
    if not 1 <= imbalance < math.inf:
        raise InputError(
            f"data.long_tail.imbalance must be 1 or more and finite, got {imbalance}: it is the images of the first "
            "class / those of the last"
        )
    counts = [int(n * imbalance ** (-c / max(classes - 1, 1)) * _ROUNDING) for c in range(classes)]
    if counts[-1] < 1:
        raise InputError(
            f"data.long_tail.imbalance={imbalance:g} leaves no image of the last class, of {n} in the first: expected "
            f"{n} or less, or more images of a class"
        )
    return counts


def kept_places(
    labels: Tensor,
    num_classes: int,
    *,
    per_class: int | None = None,
    imbalance: float = 1.0,
    order: Sequence[int] = (),
) -> Tensor:
    """Which images (n,) int64 a thinned split keeps, in ascending order; a pure function of the arguments.

    At first at most ``per_class`` of each class are kept, all of a class that has fewer. Then, where ``imbalance``
    is above 1, the class at place c of ``order`` keeps as many as :func:`long_tail_counts` says for what is left of the
    first one, or all of its own if they are fewer. Those kept are the first in one fixed shuffle of the class: the
    same for every seed, and those of a larger imbalance are among those of a smaller one.

    Args:
        labels: (N,) int64.
        order: classes from the most to the fewest images; empty: as they are numbered.

    Raises:
        InputError: ``order`` is not a permutation of the classes, ``per_class`` is below 1, or what
            :func:`long_tail_counts` raises.
    """
    order = list(order) or list(range(num_classes))
    if sorted(order) != list(range(num_classes)):
        raise InputError(
            f"data.long_tail.order must name each of the {num_classes} classes, 0 to {num_classes - 1}, once; "
            f"got {order}"
        )
    if per_class is not None and per_class < 1:
        raise InputError(f"data.per_class must be 1 or more, got {per_class}")
    counts = torch.bincount(labels, minlength=num_classes).clamp(max=len(labels) if per_class is None else per_class)
    if imbalance != 1:
        tail = long_tail_counts(int(counts[order[0]]), num_classes, imbalance)
        counts[order] = torch.minimum(counts[order], torch.tensor(tail))
    shuffle = np.random.RandomState(_SHUFFLE_SEED).permutation(len(labels))  # NumPy never changes its numbers
    shuffled = labels.numpy()[shuffle]
    kept = [shuffle[shuffled == label][:count] for label, count in enumerate(counts.tolist())]
    return torch.from_numpy(np.sort(np.concatenate(kept)))
