"""Errors of a classifier: reliability of its probabilities, confused classes, single images.

Shape legend: N images, K classes. An image without finite logits counts as wrong and has no probability.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from detr_bf.classification.metrics import Predictions, reliability

_MOST_PAIRS = 20


def coverage_accuracy(scores: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the accuracy of the most confident 1, 2, ..., 100 percent of the images, (100,) float64.

    Of images with the same score each counts with their mean, so that their order does not matter.

    Args:
        scores: (N,) probabilities of the predicted classes; NaN is below all others.
        right: (N,) bool; N is at least 1.
    """
    confidence = np.where(np.isnan(scores), -1.0, scores)
    order = np.argsort(-confidence, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(confidence[order])), len(order) - 1) + 1  # images down to each score
    images = len(order) * np.arange(1, 101) / 100
    hits: np.ndarray = np.interp(images, np.append(0, ends), np.append(0, np.cumsum(right[order])[ends - 1]))
    return hits / images


def likely_label_errors(predictions: Predictions, num_classes: int) -> list[int]:
    """Return the rows whose label is likely wrong, the most likely first.

    An image is one if the probability of its predicted class, another than its label, is at least the mean probability
    of that class over the images that are labelled with it (Northcutt et al. 2021, "Confident Learning", section 3.1,
    arXiv 1911.00068; here for the most probable class only). They are ranked by how much more probable the predicted
    class is than the label.
    """
    labels, predicted = predictions.labels.numpy(), predictions.predicted.numpy()
    scores, true_scores = predictions.scores.double().numpy(), predictions.true_scores.double().numpy()
    known = predicted >= 0
    images = np.bincount(labels[known], minlength=num_classes)
    with np.errstate(invalid="ignore"):
        means = np.bincount(labels[known], true_scores[known], num_classes) / images  # NaN without images
    rows = np.flatnonzero(known & (predicted != labels) & (scores >= means[predicted]))
    found: list[int] = rows[np.argsort(-(scores - true_scores)[rows], kind="stable")].tolist()
    return found


def classification_errors(predictions: Predictions, class_names: Sequence[str], most: int) -> dict[str, Any]:
    """Return everything about the errors of a classifier as plain values for JSON.

    Args:
        predictions: of the split, at least one.
        class_names: K names, all different.
        most: limit for the mistakes and for the likely label errors.
    """
    labels, predicted, known = predictions.labels, predictions.predicted, predictions.predicted >= 0
    right = labels == predicted
    images = Counter(labels.tolist())
    pairs = Counter(zip(labels[known & ~right].tolist(), predicted[known & ~right].tolist(), strict=True))
    suspects = likely_label_errors(predictions, len(class_names))
    calibrated = reliability(predictions.scores[known], right[known])
    return {
        "images": len(labels),
        "not_finite": int((~known).sum()),
        "classes": list(class_names),
        "reliability": calibrated.to_dict(),
        "coverage": coverage_accuracy(predictions.scores.numpy(), right.numpy()).tolist(),
        "wrong": int((~right).sum()),
        "pairs": [
            {
                "label": label,
                "predicted": guess,
                "images": number,
                "share": number / images[label],
                "reverse": pairs[guess, label],
            }
            for (label, guess), number in sorted(pairs.items(), key=lambda pair: (-pair[1], pair[0]))[:_MOST_PAIRS]
        ],
        "mistakes": [_entry(predictions, row) for row in predictions.most_confident(False, most)],
        "likely_label_errors": len(suspects),
        "suspects": [_entry(predictions, row) for row in suspects[:most]],
    }


def _entry(predictions: Predictions, row: int) -> dict[str, Any]:
    return {
        "index": int(predictions.indices[row]),
        "label": int(predictions.labels[row]),
        "predicted": int(predictions.predicted[row]),
        "score": float(predictions.scores[row]),
        "true_score": float(predictions.true_scores[row]),
    }
