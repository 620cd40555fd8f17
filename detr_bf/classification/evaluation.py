"""How well images are classified: of all, of classes often and seldom seen in training, and how sure the model is.

Shape legend: B images of a batch, N of the split, K classes.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detr_bf.classification.image_rows import ImageRows
from detr_bf.errors import InputError
from detr_bf.files import atomic_write
from detr_bf.labelled import LabelledImages
from detr_bf.structures import ClassMap
from detr_bf.text import csv_cell, printable

GROUPS = ("many", "medium", "few")
METRIC_NAMES = ("top1", "top5", *GROUPS, "balanced", "ece", "loss")
_BINS = 15  # of the calibration error, as Guo et al. 2017 have
_MAX_CONFUSION = 100  # classes


@dataclass(frozen=True)
class ClassAccuracy:
    """One class."""

    accuracy: float | None  # None without an image in the split
    images: int  # of the split
    train_images: int
    group: str  # many, medium or few


@dataclass(frozen=True)
class ClassificationResult:
    """Fractions in [0, 1]; None where there is nothing to measure, which never enters a mean.

    Many, medium and few shot are means of the accuracies of their classes, not of their images (Liu et al. 2019,
    "Large-Scale Long-Tailed Recognition in an Open World", arXiv 1904.05160); with as many images of every class in the
    split both are the same. An image whose logits are not finite counts as wrong everywhere.
    """

    top1: float
    top5: float | None  # None with fewer than 6 classes
    many: float | None
    medium: float | None
    few: float | None
    balanced: float  # mean of the accuracies of all classes
    ece: float | None  # expected calibration error, 15 bins; None where some logits are not finite
    loss: float | None  # cross-entropy of the logits as they are, without smoothing; None likewise
    per_class: Mapping[str, ClassAccuracy]  # by class name, in the order of the class map
    num_images: int
    num_not_finite: int  # images
    confusion: tuple[tuple[int, ...], ...] | None  # images, true class x predicted class; None with over 100 classes

    @property
    def metrics(self) -> dict[str, float | None]:
        """The numbers by name."""
        return {name: getattr(self, name) for name in METRIC_NAMES}

    @property
    def score(self) -> float:
        """What the best checkpoint is chosen by."""
        return self.top1

    def __str__(self) -> str:
        groups = ((name, self.metrics[name]) for name in GROUPS)
        shown = [f"{name} {value:.3f}" for name, value in (("top-1", self.top1), *groups) if value is not None]
        if self.num_not_finite:
            shown.append(f"({self.num_not_finite:,} of {self.num_images:,} images without finite logits)")
        return "  ".join(shown)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers, ready for JSON."""
        confusion = self.confusion and [list(row) for row in self.confusion]
        return {**dataclasses.asdict(self), "confusion": confusion}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> ClassificationResult:
        """Inverse of :meth:`to_dict`."""
        per_class = {name: ClassAccuracy(**result) for name, result in state["per_class"].items()}
        confusion = state["confusion"] and tuple(tuple(row) for row in state["confusion"])
        return cls(**{**state, "per_class": per_class, "confusion": confusion})


@dataclass(frozen=True)
class Predictions:
    """What the model says of each image, by ascending place in the data set."""

    places: Tensor  # (N,) int64
    labels: Tensor  # (N,) int64
    predicted: Tensor  # (N,) int64; -1 where the logits are not finite
    scores: Tensor  # (N,) float32, probability of the predicted class; NaN where the logits are not finite

    def most_confident(self, right: bool, count: int) -> list[int]:
        """Rows of the ``count`` images, at most, whose right or wrong prediction has the highest score, best first."""
        wanted = ((self.predicted == self.labels) == right) & (self.predicted >= 0)
        rows = wanted.nonzero().flatten()
        return rows[self.scores[rows].argsort(descending=True, stable=True)[:count]].tolist()


def write_predictions(path: str | Path, predictions: Predictions, class_map: ClassMap) -> None:
    """Atomically write CSV: place in the data set, name of the class, of the predicted one, its probability.

    The last two are empty where the logits are not finite. Names are written so that a spreadsheet runs none.
    """
    names = [csv_cell(printable(name)) for name in class_map.distinct_names]
    columns = (predictions.places, predictions.labels, predictions.predicted, predictions.scores)
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("place", "class", "predicted", "score"))
        for place, label, predicted, score in zip(*(column.tolist() for column in columns), strict=True):
            found = ("", "") if predicted < 0 else (names[predicted], f"{score:.6f}")
            writer.writerow((place, names[label], *found))


class ClassificationEvaluator:
    """Compares the predictions for a split, every image once, with its labels.

    Args:
        class_map: the K classes.
        class_counts: K numbers of training images.
        many: a class of more training images is one of the many-shot classes.
        few: a class of fewer is a few-shot one, and those between are medium-shot.

    Raises:
        InputError: the counts are not K numbers from 0, or ``few`` is greater than ``many``.
    """

    def __init__(self, class_map: ClassMap, class_counts: Sequence[int], many: int = 100, few: int = 20) -> None:
        if len(class_counts) != class_map.num_classes or min(class_counts, default=0) < 0:
            raise InputError(
                f"{class_map.num_classes} classes need as many numbers of training images, none below 0; got "
                f"{list(class_counts)}"
            )
        if few > many:
            raise InputError(f"few-shot classes must end below many-shot ones: few <= many, got {few} and {many}")
        self.class_map = class_map
        self.class_counts = tuple(class_counts)
        self.many, self.few = many, few
        self._rows = ImageRows()

    def update(self, batch: LabelledImages, logits: Tensor) -> None:
        """Add the images of a batch with their logits (B, K); an image that was given before stays as it is.

        Of equal logits the first class counts as the higher.

        Raises:
            InputError: the logits are of another shape, or a label is no class.
        """
        labels = batch.targets.labels
        self._check(batch, logits)
        logits = logits.float()
        finite = logits.isfinite().all(1)
        log_shares = logits.log_softmax(1)
        best = logits.argmax(1)
        true = logits.gather(1, labels[:, None])
        before = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
        rank = ((logits > true) | ((logits == true) & before)).sum(1)
        self._rows.add(
            batch.places,
            label=labels,
            predicted=best.where(finite, -1),
            in_top5=(rank < 5) & finite,
            score=log_shares.gather(1, best[:, None])[:, 0].exp().where(finite, torch.nan),
            loss=-log_shares.gather(1, labels[:, None])[:, 0].where(finite, torch.nan),
        )

    def merge(self, other: ClassificationEvaluator) -> None:
        """Add the images that ``other`` has seen; of an image that both have seen, what is here stays.

        Raises:
            InputError: ``other`` was made for other classes, numbers of training images or groups.
        """
        ours, theirs = ((e.class_map, e.class_counts, e.many, e.few) for e in (self, other))
        if ours != theirs:
            raise InputError("evaluators of different classes, training images or groups cannot be merged")
        self._rows.extend(other._rows)

    def predictions(self) -> Predictions:
        """What the model says of all images seen.

        Raises:
            InputError: there are none.
        """
        rows = self._rows.joined()
        return Predictions(rows["place"], rows["label"], rows["predicted"], rows["score"])

    def summarize(self) -> ClassificationResult:
        """The numbers for all images seen; the same bit for bit however the split was divided.

        Raises:
            InputError: there are none.
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
            top5=_mean(rows["in_top5"]) if num_classes > 5 else None,
            **{name: _mean_accuracy(c for c in per_class.values() if c.group == name) for name in GROUPS},
            balanced=balanced,
            ece=None if not_finite else calibration_error(rows["score"], right),
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
        """By class name; a name that several classes share is followed by its id."""
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


def calibration_error(scores: Tensor, right: Tensor, bins: int = _BINS) -> float:
    """Expected calibration error of Guo et al. 2017 (arXiv 1706.04599, equation 3).

    Args:
        scores: (N,) probabilities of the predicted classes.
        right: (N,) bool.
        bins: of one width, each with its upper edge.

    Returns:
        the mean distance, over all images, between the accuracy of a bin and its mean score.
    """
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]
    place = torch.bucketize(scores.double(), edges)  # right edges belong to their bins
    surplus = torch.zeros(bins, dtype=torch.float64).index_add_(0, place, right.double() - scores.double())
    return (surplus.abs().sum() / len(scores)).item()


def _confusion(labels: Tensor, predicted: Tensor, num_classes: int) -> tuple[tuple[int, ...], ...]:
    pairs = (labels * num_classes + predicted)[predicted >= 0]
    table = pairs.bincount(minlength=num_classes**2).reshape(num_classes, num_classes)
    return tuple(tuple(row) for row in table.tolist())


def _mean(values: Tensor) -> float:
    return values.double().mean().item()


def _mean_accuracy(classes: Iterable[ClassAccuracy]) -> float | None:
    known = [result.accuracy for result in classes if result.accuracy is not None]
    return sum(known) / len(known) if known else None
