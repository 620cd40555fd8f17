"""Training losses of classifiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detr_bf.batchformer import StreamLoss
from detr_bf.classification.batch import ClassTargets
from detr_bf.common import distributed
from detr_bf.common.errors import InputError
from detr_bf.losses import STREAM_NAMES, LossReport
from detr_bf.losses.classification import at_least_float32, check_labels
from detr_bf.plugins import num_streams, plugin_losses


def cross_entropy(label_smoothing: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss (logits (R, K), labels (R,) or soft labels (R, K)) -> mean over the rows, in float32.

    Smoothing applies to labels only; soft labels were smoothed when they were mixed.
    """

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        smoothing = 0.0 if targets.is_floating_point() else label_smoothing
        return F.cross_entropy(at_least_float32(logits), targets, label_smoothing=smoothing)

    return loss


class BalancedSoftmax(nn.Module):
    """Mean cross-entropy of ``logits + log n`` with the training images n of each class (Ren et al. 2020, 2007.10740).

    For training on long tails only; predictions use the logits themselves.

    Args:
        class_counts: n, one per class.
        loss_scale: a factor. BatchFormer's released code sums three means, one per stream and one over both, which is
            3 times the mean over both.

    Raises:
        InputError: a class has no images.
    """

    def __init__(self, class_counts: Sequence[int], *, loss_scale: float = 1.0) -> None:
        super().__init__()
        self.loss_scale = loss_scale
        self.register_buffer("log_counts", _counts(class_counts, "Balanced Softmax").log(), persistent=False)
        self.log_counts: Tensor

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Logits (R, K) and labels (R,) int64, or soft labels (R, K) after mixup -> ().

        Raises:
            InputError: the logits have another number of classes, or labels are outside them.
        """
        _check_classes(logits, targets, len(self.log_counts))
        logits = at_least_float32(logits)
        return self.loss_scale * F.cross_entropy(logits + self.log_counts.to(logits.dtype), targets)


class RideLoss(nn.Module):
    """Loss of experts whose distributions are pushed apart (RIDE, Wang et al. 2021, arXiv 2010.01809).

    The sum over the experts i, with logits x_i and their mean x, which gets no gradient, of
    CE(x_i - ``scale`` m_y e_y, y) - ``diversity`` mean(T)^2 KL(softmax(x / T) || softmax(x_i / T)).

    - m_k = ``margin`` (n_min / n_k)^(1/4) is the margin of LDAM (Cao et al. 2019, arXiv 1906.07413).
    - From ``reweight_epoch`` on CE is a mean with the weights (1 - b) / (1 - b^n_k), b = 0.9999, and T_k is
      proportional to ``reweight_factor`` K n_k / sum(n) + 1 - ``reweight_factor``, with a maximum of 1. Before it,
      weights and temperatures are 1. The divisor of CE is the sum of the weights, averaged over all ranks.

    The source is the authors' code, frank-xwang/RIDE-LongTailRecognition at ab8be5c. It differs in one case: with
    ``diversity`` 0 it trains the mean of the logits, once for each expert, and here each expert is still trained alone.

    Args:
        class_counts: n, the training images of each class.
        scale: of the cosine logits, :data:`detr_bf.classification.experts.SCALE`.

    Raises:
        InputError: a class has no images.
    """

    BETA = 0.9999

    def __init__(
        self,
        class_counts: Sequence[int],
        *,
        scale: float = 30.0,
        diversity: float = 0.2,
        margin: float = 0.5,
        reweight_epoch: int = 80,
        reweight_factor: float = 0.02,
    ) -> None:
        super().__init__()
        self.diversity = diversity
        self.reweight_epoch = reweight_epoch
        self.epoch = 0  # of the training, from 0
        counts = _counts(class_counts, "RIDE")
        weights = (1 - self.BETA) / (1 - self.BETA**counts)
        temperatures = reweight_factor * counts / counts.mean() + 1 - reweight_factor
        self.register_buffer("margins", scale * margin * (counts.min() / counts) ** 0.25, persistent=False)
        self.register_buffer("weights", weights / weights.mean(), persistent=False)
        self.register_buffer("temperatures", temperatures / temperatures.max(), persistent=False)
        self.margins: Tensor
        self.weights: Tensor
        self.temperatures: Tensor

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Logits (R, E, K) of E experts, or (R, K) as of one, and labels (R,) int64 -> ().

        The loss of a single row of one expert is the same in every epoch: its weight is divided by itself, and its
        divergence from the mean is 0.

        Raises:
            InputError: labels are mixed or outside the classes, or the logits have another number of classes.
        """
        if targets.is_floating_point():
            raise InputError("the loss of RIDE needs one label for each image: switch off mixup and CutMix")
        _check_classes(logits, targets, len(self.margins))
        logits = at_least_float32(logits if logits.dim() == 3 else logits[:, None])
        margins, weights, temperatures = (x.to(logits.dtype) for x in (self.margins, self.weights, self.temperatures))
        if self.epoch < self.reweight_epoch:
            weights, temperatures = torch.ones_like(weights), torch.ones_like(temperatures)
        shifted = logits - (F.one_hot(targets, len(margins)) * margins)[:, None]
        mean = (logits.detach().mean(1) / temperatures).log_softmax(-1)
        losses = [F.cross_entropy(rows, targets, weights, reduction="sum") for rows in shifted.unbind(1)]
        apart = [
            F.kl_div((rows / temperatures).log_softmax(-1), mean, reduction="batchmean", log_target=True)
            for rows in logits.unbind(1)
        ]
        entropy = torch.stack(losses).sum() / distributed.all_reduce_mean(weights[targets].sum())
        return entropy - self.diversity * temperatures.mean() ** 2 * torch.stack(apart).sum()


def _counts(class_counts: Sequence[int], loss: str) -> Tensor:
    """Return the images of each class, (K,) float64; InputError if a class has none."""
    empty = [label for label, count in enumerate(class_counts) if count <= 0]
    if empty or not class_counts:
        raise InputError(
            f"class_counts: the classes {empty} of {len(class_counts)} have no training images, and {loss} needs one "
            "or more of each: leave these classes out of the data set, or use cross-entropy"
        )
    return torch.tensor(class_counts, dtype=torch.float64)


def _check_classes(logits: Tensor, targets: Tensor, classes: int) -> None:
    if logits.shape[-1] != classes:
        raise InputError(f"got logits of {logits.shape[-1]} classes and class_counts of {classes}: they must agree")
    if not targets.is_floating_point() and targets.device.type == "cpu":  # reading them would wait for a GPU
        check_labels(targets, classes)


class ClassifierCriterion(nn.Module):
    """Mean over the streams of the loss of the logits, and the losses of the model's plug-ins.

    Args:
        model: the bare model that computes the logits; its plug-ins keep the features they need of each forward pass.
        loss: (logits, labels or soft labels) -> mean over the rows.
        localization_weight: epoch -> lambda of relative localization; None: unchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        localization_weight: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__()
        self.loss = StreamLoss(loss)
        self.localization_weight = localization_weight
        self.dims = "images, experts, classes" if isinstance(loss, RideLoss) else "images, classes"
        self._model = (model,)  # in a tuple, because an attribute would register it as a child

    def begin_epoch(self, epoch: int) -> None:
        """Announce an epoch, counted from 0, to a loss that depends on it; ``forward`` announces that of its batch."""
        if isinstance(self.loss.criterion, RideLoss):
            self.loss.criterion.epoch = epoch

    def forward(self, logits: Tensor, targets: ClassTargets) -> LossReport:
        """Logits (R, K), clean stream first, of B images; of the experts of RIDE (R, E, K).

        Raises:
            InputError: labels are outside the classes, or ``logits`` are not one row of logits per image.
        """
        model = self._model[0]
        streams, wanted = num_streams(model), targets.labels if targets.soft_labels is None else targets.soft_labels
        _check(logits, targets, self.dims)
        self.begin_epoch(targets.epoch)
        weight = None if self.localization_weight is None else self.localization_weight(targets.epoch)
        terms, weights = plugin_losses(model, targets.patch_labels, localization_weight=weight)
        loss = self.loss(logits, wanted, streams)
        with torch.no_grad():  # accuracy of the clean stream on the labels before mixing
            clean = logits[: len(targets.labels)].reshape(len(targets.labels), -1, logits.shape[-1]).mean(1)
            logged = {"accuracy": (clean.argmax(1) == targets.labels).float().mean()}
        if streams > 1:
            each = self.loss.of_each_stream(logits.detach(), wanted, streams)
            logged |= {f"stream/{name}": loss for name, loss in zip(STREAM_NAMES, each, strict=True)}
        return LossReport({"loss_ce": loss}, {"loss_ce": 1.0}, logged).extended(terms, weights)


def _check(logits: Tensor, targets: ClassTargets, dims: str) -> None:
    if not isinstance(logits, Tensor) or logits.dim() != len(dims.split()):
        given = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise InputError(
            f"the model returns {given} in training, expected logits ({dims}): distilled models and auxiliary "
            "classifiers are not supported"
        )
    targets.check(logits.shape[-1])
