"""Classification losses: softmax cross-entropy and losses of sigmoids, each with its matching cost and scores.

Shape legend: L decoder layers, R rows, Q queries, K logits, T objects (padded).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss

from detr_bf.common import distributed
from detr_bf.common.errors import InputError
from detr_bf.common.settings import setting

NO_OBJECT = -1  # class of a query that should predict no object
NOT_SUPERVISED = -2  # class of a query without a loss
LEAST_TARGET = 0.01  # of a matched query's class in the IoU-aware cross-entropy


class Classification(Protocol):
    """Interface of a classification loss with its matching cost and scores."""

    needs_quality: bool  # loss() reads the IoU of the matched pairs

    def num_logits(self, num_classes: int) -> int:
        """Return K for a data set of ``num_classes``."""
        ...

    def match_cost(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits (..., R, Q, K), labels (R, T) -> cost (..., R, Q, T)."""
        ...

    def loss(self, logits: Tensor, classes: Tensor, num_boxes: Tensor, *, quality: Tensor | None = None) -> Tensor:
        """logits (L, N, Q, K), classes (L, N, Q) -> (L,), over all N rows.

        Classes are -1 for no object and -2 for queries without supervision, which add nothing. ``quality`` (L, N, Q)
        is the IoU of the matched pairs, without gradient, and 0 for other queries; only if :attr:`needs_quality`. Any
        divisor is averaged over all ranks, as ``num_boxes`` is, unless the classification was built as local.
        """
        ...

    def scores(self, logits: Tensor) -> Tensor:
        """logits (..., K) -> scores (..., num_classes) in [0, 1]."""
        ...

    def candidates(self, scores: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
        """scores (Q, num_classes) of one image -> score, query and class of the best ``limit`` pairs, best first."""
        ...

    def is_object(self, logits: Tensor, threshold: float = ...) -> Tensor:
        """logits (..., K) -> bool (...): the query predicts an object with a score above ``threshold``."""
        ...


def check_factors(owner: str, factors: dict[str, float]) -> None:
    """Check the costs of a matcher or the weights of a loss, named ``owner`` in messages.

    Raises:
        InputError: a factor is negative, infinite or NaN, or all are 0.
    """
    wrong = {name: value for name, value in factors.items() if not 0 <= value < math.inf}
    if wrong:
        raise InputError(f"{owner}: {', '.join(f'{name}={value}' for name, value in wrong.items())} must be 0 or more")
    if not any(factors.values()):
        raise InputError(f"{owner}: {', '.join(factors)} are all 0: give one of them a value greater than 0")


def gather_labels(values: Tensor, labels: Tensor) -> Tensor:
    """Select values (..., R, Q, K) at labels (R, T) -> (..., R, Q, T)."""
    index = labels[:, None, :].expand(*values.shape[:-1], -1)
    return values.gather(-1, index)


def one_hot(classes: Tensor, logits: Tensor) -> Tensor:
    """Classes (...), negative for none -> one-hot vectors (..., K) like the logits (..., K), zeros for none."""
    return F.one_hot(classes.clamp(min=-1) + 1, logits.shape[-1] + 1)[..., 1:].to(logits.dtype)


def supervised(losses: Tensor, classes: Tensor) -> Tensor:
    """Set losses (..., K) of queries without supervision to zero; classes (...)."""
    return losses.masked_fill((classes == NOT_SUPERVISED)[..., None], 0.0)


def at_least_float32(values: Tensor) -> Tensor:
    """Convert half precision to float32, because losses are sums; float64 stays."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Check labels of any shape, int64; on a GPU this waits for them.

    Raises:
        InputError: a label is outside 0 to ``num_classes`` - 1.
    """
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if outside.numel():
        raise InputError(
            f"labels must be from 0 to {num_classes - 1} for {num_classes} classes; got {outside.unique().tolist()}: "
            "build the model with the number of classes of the data set"
        )


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross-entropy with a down-weighted no-object class (Carion et al. 2020, arXiv 2005.12872, section 3.1).

    The last logit is no-object, weighted with ``no_object_weight``; the mean divides by the sum of the weights, which
    is averaged over the ranks unless the loss is ``local``.
    """

    no_object_weight: float = setting("no_object_weight", 0.1)
    local: bool = False
    needs_quality = False

    def __post_init__(self) -> None:
        if not 0 <= self.no_object_weight < math.inf:
            raise InputError(f"CrossEntropy: no_object_weight={self.no_object_weight} must be 0 or more and finite")

    def num_logits(self, num_classes: int) -> int:
        return num_classes + 1

    def match_cost(self, logits: Tensor, labels: Tensor) -> Tensor:
        return -gather_labels(logits.softmax(-1), labels)

    def loss(self, logits: Tensor, classes: Tensor, num_boxes: Tensor, *, quality: Tensor | None = None) -> Tensor:
        no_object = logits.shape[-1] - 1
        target = torch.where(classes < 0, no_object, classes)
        weight = torch.where(classes < 0, self.no_object_weight, 1.0).to(logits.dtype)
        weight = weight.masked_fill(classes == NOT_SUPERVISED, 0.0)
        entropy = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none").view_as(target)
        total = weight.sum((1, 2))
        divisor = total if self.local else distributed.all_reduce_mean(total)
        return (entropy * weight).sum((1, 2)) / torch.where(divisor == 0, 1.0, divisor)

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)[..., :-1]

    def candidates(self, scores: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return every query with its best class."""
        best, label = scores.max(-1)
        best, query = best.sort(descending=True, stable=True)
        return best[:limit], query[:limit], label[query[:limit]]

    def is_object(self, logits: Tensor, threshold: float = 0.0) -> Tensor:
        best, label = logits.softmax(-1).max(-1)
        return (label != logits.shape[-1] - 1) & (best > threshold)


@dataclass(frozen=True)
class Focal:
    """Sigmoid focal loss (Lin et al. 2017, arXiv 1708.02002) with Deformable DETR's matching cost (arXiv 2010.04159).

    One logit per class, none for no-object; the sum over queries and classes is divided by the number of boxes.
    """

    alpha: float = setting("focal_alpha", 0.25)
    gamma: float = setting("focal_gamma", 2.0)
    needs_quality = False

    def __post_init__(self) -> None:
        if not (0 <= self.alpha <= 1 and 0 <= self.gamma < math.inf):
            raise InputError(
                f"Focal: alpha={self.alpha} must be between 0 and 1, gamma={self.gamma} must be 0 or more and finite"
            )

    def num_logits(self, num_classes: int) -> int:
        return num_classes

    def match_cost(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of predicting the label minus the loss of predicting no object."""
        logit = gather_labels(logits, labels)
        probability = logit.sigmoid()
        positive = self.alpha * (1 - probability) ** self.gamma * -(probability + 1e-8).log()
        negative = (1 - self.alpha) * probability**self.gamma * -(1 - probability + 1e-8).log()
        return positive - negative

    def loss(self, logits: Tensor, classes: Tensor, num_boxes: Tensor, *, quality: Tensor | None = None) -> Tensor:
        losses = sigmoid_focal_loss(
            logits, one_hot(classes, logits), alpha=self.alpha, gamma=self.gamma, reduction="none"
        )
        return supervised(losses, classes).sum((1, 2, 3)) / num_boxes

    def scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def candidates(self, scores: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best of all pairs of query and class."""
        best, index = scores.flatten().sort(descending=True, stable=True)
        index = index[:limit]
        return best[:limit], index // scores.shape[1], index % scores.shape[1]

    def is_object(self, logits: Tensor, threshold: float = 0.5) -> Tensor:
        return logits.sigmoid().max(-1).values > threshold


@dataclass(frozen=True)
class Varifocal(Focal):
    """Varifocal loss (Zhang et al. 2021, arXiv 2008.13367, equation 2) with the matching cost of :class:`Focal`.

    The target of the class of a matched query is the IoU of its box with the object; its cross-entropy is weighted by
    that IoU. All other logits have target 0 and the weight ``background`` x score^``gamma``.
    """

    background: float = setting("varifocal_background", 0.75)
    needs_quality = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.background < math.inf:
            raise InputError(f"Varifocal: background={self.background} must be 0 or more and finite")

    def loss(self, logits: Tensor, classes: Tensor, num_boxes: Tensor, *, quality: Tensor | None = None) -> Tensor:
        assert quality is not None, "varifocal loss needs the quality of the matched pairs"
        positive = one_hot(classes, logits)
        target = positive * quality.to(logits.dtype)[..., None]
        weight = self.background * logits.detach().sigmoid() ** self.gamma * (1 - positive) + target
        losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none") * weight
        return supervised(losses, classes).sum((1, 2, 3)) / num_boxes


@dataclass(frozen=True)
class MatchabilityAware(Focal):
    """Matchability-aware loss of DEIM (Huang et al. 2024, arXiv 2412.04234, equations 5 and 6), with the cost of Focal.

    Binary cross-entropy. The target of a matched query's class is its IoU to the power of ``quality_gamma``; the other
    logits have target 0 and the weight ``background`` x p ** ``quality_gamma`` of their probability p, without
    gradient. The sum over queries and classes is divided by the number of boxes.
    """

    quality_gamma: float = setting("mal_gamma", 1.5)
    background: float = setting("mal_background", 1.0)
    needs_quality = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.quality_gamma < math.inf and 0 <= self.background < math.inf):
            raise InputError(
                f"MatchabilityAware: quality_gamma={self.quality_gamma} and background={self.background} must be 0 or "
                "more and finite"
            )

    def loss(self, logits: Tensor, classes: Tensor, num_boxes: Tensor, *, quality: Tensor | None = None) -> Tensor:
        assert quality is not None, "the criterion gives the IoU of the matched pairs"
        matched = one_hot(classes, logits)
        target = matched * quality[..., None].to(logits.dtype) ** self.quality_gamma
        weight = torch.where(matched > 0, 1.0, self.background * logits.detach().sigmoid() ** self.quality_gamma)
        losses = F.binary_cross_entropy_with_logits(logits, target, weight=weight, reduction="none")
        return supervised(losses, classes).sum((1, 2, 3)) / num_boxes


@dataclass(frozen=True)
class IouAware(Focal):
    """IoU-aware cross-entropy of LW-DETR (Chen et al. 2024, arXiv 2406.03459, section 3.2), with the cost of Focal.

    Binary cross-entropy. The target of a matched query's class is p ** ``alpha`` x IoU ** (1 - ``alpha``) of its
    probability p, without gradient and at least ``LEAST_TARGET``; the other logits have target 0 and the weight
    p ** ``gamma``, with gradient. The sum over queries and classes is divided by the number of boxes.
    """

    needs_quality = True

    def loss(self, logits: Tensor, classes: Tensor, num_boxes: Tensor, *, quality: Tensor | None = None) -> Tensor:
        assert quality is not None, "the criterion gives the IoU of the matched pairs"
        matched, probability = one_hot(classes, logits) > 0, logits.sigmoid()
        wanted = probability.detach() ** self.alpha * quality[..., None].to(logits.dtype) ** (1 - self.alpha)
        target = torch.where(matched, wanted.clamp(min=LEAST_TARGET), 0.0)
        weight = torch.where(matched, 1.0, probability**self.gamma)
        losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none") * weight
        return supervised(losses, classes).sum((1, 2, 3)) / num_boxes


CLASSIFICATIONS: dict[str, type[CrossEntropy] | type[Focal]] = {
    "cross_entropy": CrossEntropy,
    "focal": Focal,
    "varifocal": Varifocal,
    "mal": MatchabilityAware,
    "ia_bce": IouAware,
}
