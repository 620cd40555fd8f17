"""Metrics of classifiers, masked autoencoders and contrastive pre-training, from one row per image.

Shape legend: B images of a batch, N of the split, K classes.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from detr_bf.classification.batch import LabelledImages
from detr_bf.common.errors import InputError
from detr_bf.common.files import atomic_write
from detr_bf.common.structures import ClassMap
from detr_bf.common.text import csv_cell, printable
from detr_bf.evaluation.error_types import Calibration

if TYPE_CHECKING:
    from detr_bf.classification.contrastive import Embedded  # loads timm
    from detr_bf.classification.masked_autoencoder import Reconstructed  # loads timm

P = TypeVar("P", bound="PretrainingResult")

GROUPS = ("many", "medium", "few")
CLASSIFICATION_METRIC_NAMES = ("top1", "top5", *GROUPS, "balanced", "ece", "loss")
_BINS = 15  # of the calibration error, as in Guo et al. 2017
_MAX_CONFUSION = 100  # classes
_MAX_KEYS = 4096  # images among which a query looks for its key, MoCo v3's batch


class ImageRows:
    """Columns of numbers with one row per image, keyed by the image's index in the data set.

    The first row of an image is kept: ranks that share a split may process an image twice.
    """

    def __init__(self) -> None:
        self._parts: list[dict[str, Tensor]] = []

    def add(self, index: Tensor, **columns: Tensor) -> None:
        """Add rows of the images ``index`` (B,); each column is (B, ...) on any device, the same ones in each call."""
        self._parts.append({name: column.detach().cpu() for name, column in {"index": index, **columns}.items()})

    def extend(self, other: ImageRows) -> None:
        """Add the rows of ``other`` after the rows already present."""
        self._parts += other._parts

    def joined(self) -> dict[str, Tensor]:
        """Return ``index`` (N,) ascending and the other columns (N, ...), independent of how images were distributed.

        Raises:
            InputError: there is no image.
        """
        if not any(len(part["index"]) for part in self._parts):
            raise InputError("no image was evaluated: the split is empty, or its batches were not given to update")
        columns = {name: torch.cat([part[name] for part in self._parts]) for name in self._parts[0]}
        _, first = np.unique(columns["index"].numpy(), return_index=True)
        return {name: column[torch.from_numpy(first)] for name, column in columns.items()}


@dataclass(frozen=True)
class ClassAccuracy:
    """Accuracy of one class."""

    accuracy: float | None  # None without an image in the split
    images: int  # of the split
    train_images: int
    group: str  # many, medium or few


@dataclass(frozen=True)
class ClassificationResult:
    """Fractions in [0, 1]; None if there is nothing to measure, which is left out of means.

    Many, medium and few shot are means of class accuracies, not of images (Liu et al. 2019, "Large-Scale Long-Tailed
    Recognition in an Open World", arXiv 1904.05160); with the same number of images of every class in the split both
    agree. An image with non-finite logits counts as wrong in every metric.
    """

    top1: float
    top5: float | None  # None for fewer than 6 classes among which images are classified
    many: float | None
    medium: float | None
    few: float | None
    balanced: float  # mean of the accuracies of all classes
    ece: float | None  # expected calibration error, 15 bins; None if some logits are not finite
    loss: float | None  # cross-entropy of the logits without smoothing; None as for ece
    per_class: Mapping[str, ClassAccuracy]  # by class name, in the order of the class map
    num_images: int
    num_not_finite: int  # images
    confusion: tuple[tuple[int, ...], ...] | None  # images, true class x predicted class; None for over 100 classes

    @property
    def metrics(self) -> dict[str, float | None]:
        """All metrics by name."""
        return {name: getattr(self, name) for name in CLASSIFICATION_METRIC_NAMES}

    @property
    def score(self) -> float:
        """Value that selects the best checkpoint."""
        return self.top1

    @property
    def thresholds(self) -> None:
        """None: classifiers have no thresholds."""

    def __str__(self) -> str:
        groups = ((name, self.metrics[name]) for name in GROUPS)
        shown = [f"{name} {value:.3f}" for name, value in (("top-1", self.top1), *groups) if value is not None]
        if self.num_not_finite:
            shown.append(f"({self.num_not_finite:,} of {self.num_images:,} images without finite logits)")
        return "  ".join(shown)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists and numbers for JSON."""
        confusion = self.confusion and [list(row) for row in self.confusion]
        return {**dataclasses.asdict(self), "confusion": confusion}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> ClassificationResult:
        """Create a result from :meth:`to_dict`."""
        per_class = {name: ClassAccuracy(**result) for name, result in state["per_class"].items()}
        confusion = state["confusion"] and tuple(tuple(row) for row in state["confusion"])
        return cls(**{**state, "per_class": per_class, "confusion": confusion})


@dataclass(frozen=True)
class Predictions:
    """Predictions of the model, by ascending index in the data set."""

    indices: Tensor  # (N,) int64, in the data set
    labels: Tensor  # (N,) int64
    predicted: Tensor  # (N,) int64; -1 if the logits are not finite
    scores: Tensor  # (N,) float32, probability of the predicted class; NaN if the logits are not finite
    true_scores: Tensor  # (N,) float32, probability of the true class; NaN if the logits are not finite

    def most_confident(self, right: bool, count: int) -> list[int]:
        """Return the rows of at most ``count`` right or wrong predictions with the highest scores, highest first."""
        wanted = ((self.predicted == self.labels) == right) & (self.predicted >= 0)
        rows = wanted.nonzero().flatten()
        return rows[self.scores[rows].argsort(descending=True, stable=True)[:count]].tolist()


def write_predictions(path: str | Path, predictions: Predictions, class_map: ClassMap) -> None:
    """Atomically write CSV: index in the data set, class name, predicted class name, its probability.

    The last two are empty if the logits are not finite. Names are escaped so that a spreadsheet does not run them.
    """
    names = [csv_cell(printable(name)) for name in class_map.distinct_names]
    columns = (predictions.indices, predictions.labels, predictions.predicted, predictions.scores)
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("index", "class", "predicted", "score"))
        for index, label, predicted, score in zip(*(column.tolist() for column in columns), strict=True):
            found = ("", "") if predicted < 0 else (names[predicted], f"{score:.6f}")
            writer.writerow((index, names[label], *found))


class ClassificationEvaluator:
    """Evaluator of the predictions for a split, each image once.

    Args:
        class_map: the K classes.
        class_counts: training images of each of the K classes.
        many: a class with more training images is many-shot.
        few: a class with fewer training images is few-shot; classes in between are medium-shot.
        label_sets: all right labels of each image, by its index in the data set, as in ImageNet-ReaL (Beyer et al.
            2020, arXiv 2006.07159); the label of an image is then that with the highest logit. Empty: one label each.
        scored_classes: classes among which images are classified, as in ImageNet-A (Hendrycks et al. 2021, arXiv
            1907.07174); None: all. Images have no other labels.

    Raises:
        InputError: ``class_counts`` are not K numbers of 0 or more, or ``few`` is greater than ``many``.
    """

    def __init__(
        self,
        class_map: ClassMap,
        class_counts: Sequence[int],
        many: int = 100,
        few: int = 20,
        *,
        label_sets: Sequence[Sequence[int]] = (),
        scored_classes: Sequence[int] | None = None,
    ) -> None:
        if len(class_counts) != class_map.num_classes or min(class_counts, default=0) < 0:
            raise InputError(
                f"class_counts must be {class_map.num_classes} numbers of training images, 0 or more, one per class; "
                f"got {list(class_counts)}"
            )
        if few > many:
            raise InputError(f"few-shot classes must end below many-shot ones: few <= many, got {few} and {many}")
        self.class_map = class_map
        self.class_counts = tuple(class_counts)
        self.many, self.few = many, few
        self.label_sets = label_sets
        self.scored_classes = tuple(range(class_map.num_classes)) if scored_classes is None else tuple(scored_classes)
        self._rows = ImageRows()

    def update(self, batch: LabelledImages, logits: Tensor) -> None:
        """Add the images of a batch with their logits (B, K); the first result of an image is kept.

        Of equal logits the class with the lower number ranks first.

        Raises:
            InputError: the logits have another shape, or a label is outside the classes.
        """
        self._check(batch, logits)
        logits = logits.float()
        finite = logits.isfinite().all(1)
        if len(self.scored_classes) < self.class_map.num_classes:
            outside = torch.ones(logits.shape[1], dtype=torch.bool)
            outside[list(self.scored_classes)] = False
            logits = logits.masked_fill(outside.to(logits.device), -torch.inf)
        labels = self._labels(batch, logits).where(finite, batch.targets.labels)
        log_probabilities = logits.log_softmax(1)
        best = logits.argmax(1)
        true = logits.gather(1, labels[:, None])
        before = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
        rank = ((logits > true) | ((logits == true) & before)).sum(1)
        self._rows.add(
            batch.indices,
            label=labels,
            predicted=best.where(finite, -1),
            in_top5=(rank < 5) & finite,
            score=log_probabilities.gather(1, best[:, None])[:, 0].exp().where(finite, torch.nan),
            loss=-log_probabilities.gather(1, labels[:, None])[:, 0].where(finite, torch.nan),
        )

    def _labels(self, batch: LabelledImages, logits: Tensor) -> Tensor:
        """Return the label (B,) of each image: the one of its labels that has the highest logit."""
        if not self.label_sets:
            return batch.targets.labels
        right = torch.zeros(logits.shape, dtype=torch.bool)
        for row, index in enumerate(batch.indices.tolist()):
            right[row, list(self.label_sets[index])] = True
        return logits.masked_fill(~right.to(logits.device), -torch.inf).argmax(1)

    def merge(self, other: ClassificationEvaluator) -> None:
        """Add the images of ``other``; images present in both keep their present row.

        Raises:
            InputError: ``other`` has other classes, numbers of training images, groups or scored classes.
        """
        ours, theirs = ((e.class_map, e.class_counts, e.many, e.few, e.scored_classes) for e in (self, other))
        if ours != theirs:
            raise InputError("evaluators of different classes, training images or groups cannot be merged")
        self._rows.extend(other._rows)

    def predictions(self) -> Predictions:
        """Return the predictions for all images; InputError if there is no image."""
        rows = self._rows.joined()
        return Predictions(rows["index"], rows["label"], rows["predicted"], rows["score"], (-rows["loss"]).exp())

    def summarize(self) -> ClassificationResult:
        """Return the metrics of all images, bitwise independent of how the split was divided among ranks.

        Raises:
            InputError: there is no image.
        """
        rows = self._rows.joined()
        labels, predicted = rows["label"], rows["predicted"]
        right = predicted == labels
        per_class = self._per_class(labels, right)
        not_finite = int((predicted < 0).sum())
        num_classes = self.class_map.num_classes
        balanced = _mean_accuracy(per_class.values())
        assert balanced is not None, "there is an image"
        return ClassificationResult(
            top1=_mean(right),
            top5=_mean(rows["in_top5"]) if len(self.scored_classes) > 5 else None,
            **{name: _mean_accuracy(c for c in per_class.values() if c.group == name) for name in GROUPS},
            balanced=balanced,
            ece=None if not_finite else reliability(rows["score"], right).error,
            loss=None if not_finite else _mean(rows["loss"]),
            per_class=per_class,
            num_images=len(labels),
            num_not_finite=not_finite,
            confusion=_confusion(labels, predicted, num_classes) if num_classes <= _MAX_CONFUSION else None,
        )

    def _check(self, batch: LabelledImages, logits: Tensor) -> None:
        wanted = (len(batch), self.class_map.num_classes)
        if logits.shape != wanted:
            raise InputError(
                f"logits must be of shape {wanted}, images x classes, got {tuple(logits.shape)}: evaluate one stream, "
                "in evaluation mode, of a model with as many classes as the data"
            )
        for name, label in zip(batch.names, batch.targets.labels.tolist(), strict=True):
            if not 0 <= label < wanted[1]:
                raise InputError(
                    f"{name} has the label {label}, but the {wanted[1]} classes are numbered from 0 to {wanted[1] - 1}"
                )

    def _per_class(self, labels: Tensor, right: Tensor) -> dict[str, ClassAccuracy]:
        """Return accuracies by class name; names shared by several classes get their id appended."""
        count = self.class_map.num_classes
        images = labels.bincount(minlength=count).tolist()
        hits = labels[right].bincount(minlength=count).tolist()
        return {
            name: ClassAccuracy(hits[c] / images[c] if images[c] else None, images[c], train, self._group(train))
            for c, (name, train) in enumerate(zip(self.class_map.distinct_names, self.class_counts, strict=True))
        }

    def _group(self, train_images: int) -> str:
        if train_images > self.many:
            return "many"
        return "few" if train_images < self.few else "medium"


def reliability(scores: Tensor, right: Tensor, bins: int = _BINS) -> Calibration:
    """Return scores against accuracy by bin, with the expected calibration error.

    The error is the mean over all images of the difference between the accuracy and the mean score of their bin (Guo et
    al. 2017, arXiv 1706.04599, equation 3).

    Args:
        scores: (N,) probabilities of the predicted classes.
        right: (N,) bool.
        bins: number of bins of equal width; each includes its upper edge.
    """
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]
    bin_of = torch.bucketize(scores.double(), edges)  # upper edges belong to their bins
    counts, score, hits = (
        torch.zeros(bins, dtype=torch.float64).index_add_(0, bin_of, values.double())
        for values in (torch.ones_like(scores), scores, right)
    )
    error = ((hits - score).abs().sum() / len(scores)).item()  # NaN without images
    return Calibration(counts.long().numpy(), (score / counts).numpy(), (hits / counts).numpy(), error)


def _confusion(labels: Tensor, predicted: Tensor, num_classes: int) -> tuple[tuple[int, ...], ...]:
    pairs = (labels * num_classes + predicted)[predicted >= 0]
    table = pairs.bincount(minlength=num_classes**2).reshape(num_classes, num_classes)
    return tuple(tuple(row) for row in table.tolist())


def _mean(values: Tensor) -> float:
    return values.double().mean().item()


def _mean_accuracy(classes: Iterable[ClassAccuracy]) -> float | None:
    known = [result.accuracy for result in classes if result.accuracy is not None]
    return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class PretrainingResult:
    """Mean loss of a split."""

    loss: float | None  # None if that of some image is not finite
    num_images: int

    @property
    def metrics(self) -> dict[str, float | None]:
        """All metrics by name."""
        return {"loss": self.loss}

    @property
    def score(self) -> float:
        """Value that selects the best checkpoint: the negative loss."""
        return -math.inf if self.loss is None else -self.loss

    @property
    def thresholds(self) -> None:
        """None: there are no thresholds without classes."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls: type[P], state: Mapping[str, Any]) -> P:
        """Create a result from :meth:`to_dict`."""
        return cls(**state)


@dataclass(frozen=True)
class ReconstructionResult(PretrainingResult):
    """Mean reconstruction loss of a split, on masked patches."""

    num_not_finite: int = 0  # images

    def __str__(self) -> str:
        if self.loss is None:
            return f"loss n/a  ({self.num_not_finite:,} of {self.num_images:,} images without a finite loss)"
        return f"loss {self.loss:.4f}"


class ReconstructionEvaluator:
    """Evaluator of the losses of a split, each image once."""

    def __init__(self) -> None:
        self._rows = ImageRows()

    def update(self, batch: LabelledImages, outputs: Reconstructed) -> None:
        """Add the images of a batch; the first loss of an image is kept.

        Raises:
            InputError: there is not one loss per image.
        """
        losses = outputs.loss_per_image
        if losses.shape != (len(batch),):
            raise InputError(
                f"a batch of {len(batch)} images needs one loss per image, got losses of shape {tuple(losses.shape)}: "
                "evaluate one stream, in evaluation mode"
            )
        self._rows.add(batch.indices, loss=losses.float())

    def merge(self, other: ReconstructionEvaluator) -> None:
        """Add the images of ``other``; images present in both keep their present row."""
        self._rows.extend(other._rows)

    def summarize(self) -> ReconstructionResult:
        """Return the metrics of all images; InputError if there is no image."""
        losses = self._rows.joined()["loss"].double()
        missing = int((~losses.isfinite()).sum())
        return ReconstructionResult(None if missing else losses.mean().item(), len(losses), missing)


@dataclass(frozen=True)
class ContrastiveResult(PretrainingResult):
    """Contrastive loss (InfoNCE of both directions) and instance discrimination of a split."""

    instance_accuracy: float | None = None  # share of the queries nearest to their own key, mean of both directions

    @property
    def metrics(self) -> dict[str, float | None]:
        return {"loss": self.loss, "instance_accuracy": self.instance_accuracy}

    def __str__(self) -> str:
        if self.loss is None or self.instance_accuracy is None:
            return "loss n/a  (embeddings that are not finite)"
        return f"loss {self.loss:.4f}  instance accuracy {100 * self.instance_accuracy:.1f}"


class ContrastiveEvaluator:
    """Evaluator of the embeddings of a split, each image once.

    Images are compared in groups of at most 4,096 in the order of their indices, as equal in size as possible, so that
    the result depends neither on the batch size nor on the number of ranks.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self._rows = ImageRows()

    def update(self, batch: LabelledImages, outputs: Embedded) -> None:
        """Add the images of a batch; the first embeddings of an image are kept."""
        queries, keys = outputs.of_images()
        self._rows.add(batch.indices, queries=queries.float(), keys=keys.float())

    def merge(self, other: ContrastiveEvaluator) -> None:
        """Add the images of ``other``; images present in both keep their present row."""
        self._rows.extend(other._rows)

    def summarize(self) -> ContrastiveResult:
        """Return the metrics of all images; InputError if there is no image."""
        from detr_bf.classification.contrastive import info_nce, similarities  # loads timm

        rows = self._rows.joined()
        queries, keys = rows["queries"].double(), rows["keys"].double()
        if not (queries.isfinite().all() and keys.isfinite().all()):
            return ContrastiveResult(None, len(queries))
        loss, right = 0.0, 0
        groups = -(-len(queries) // _MAX_KEYS)
        for query, key in zip(queries.tensor_split(groups), keys.tensor_split(groups), strict=True):
            for view in (0, 1):
                own, others = query[:, view], key[:, 1 - view]
                loss += len(own) * info_nce(own, others, temperature=self.temperature).item()
                right += int((similarities(own, others).argmax(1) == torch.arange(len(own))).sum())
        return ContrastiveResult(loss / len(queries), len(queries), right / (2 * len(queries)))
