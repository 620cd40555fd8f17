"""What the matcher and the criterion ask of a classification loss.

Shape legend: L decoder layers, R rows, Q queries, K logits, T objects (padded).
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from detr_bf.errors import InputError


class Classification(Protocol):
    """A classification loss, with the matching cost and the scores that belong to it."""

    def num_logits(self, num_classes: int) -> int:
        """K for a data set of ``num_classes``."""
        ...

    def match_cost(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits (..., R, Q, K), labels (R, T) -> cost (..., R, Q, T)."""
        ...

    def loss(self, logits: Tensor, classes: Tensor, num_boxes: Tensor) -> Tensor:
        """logits (L, N, Q, K), classes (L, N, Q) with -1 for no object -> (L,), over all N rows.

        Whatever it divides by is the mean over all processes, as ``num_boxes`` is.
        """
        ...

    def scores(self, logits: Tensor) -> Tensor:
        """logits (..., K) -> scores (..., num_classes) in [0, 1]."""
        ...

    def candidates(self, scores: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
        """scores (Q, num_classes) of one image -> score, query and class of the best ``limit`` candidates."""
        ...

    def is_object(self, logits: Tensor, threshold: float = ...) -> Tensor:
        """logits (..., K) -> bool (...): the query claims an object, with a score above ``threshold``."""
        ...


def check_factors(what: str, factors: dict[str, float]) -> None:
    """Check the costs of a matcher or the weights of a loss.

    Raises:
        InputError: one is negative, infinite or NaN, or all are 0.
    """
    wrong = {name: value for name, value in factors.items() if not 0 <= value < math.inf}
    if wrong:
        raise InputError(f"{what}: {', '.join(f'{name}={value}' for name, value in wrong.items())} must be 0 or more")
    if not any(factors.values()):
        raise InputError(f"{what}: {', '.join(factors)} are all 0: give one of them a value greater than 0")


def gather_labels(values: Tensor, labels: Tensor) -> Tensor:
    """values (..., R, Q, K) at labels (R, T) -> (..., R, Q, T)."""
    index = labels[:, None, :].expand(*values.shape[:-1], -1)
    return values.gather(-1, index)


def at_least_float32(values: Tensor) -> Tensor:
    """Half precision as float32, because losses are sums; float64 stays."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Labels of any shape, int64; reads them, so on a GPU it waits for them.

    Raises:
        InputError: one is outside the classes.
    """
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if outside.numel():
        raise InputError(
            f"labels must be from 0 to {num_classes - 1} for {num_classes} classes; got {outside.unique().tolist()}: "
            "build the model with the number of classes of the data set"
        )
