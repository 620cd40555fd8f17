"""Tables of finished runs, and the paired bootstrap of their metrics over images.

A cell is a run of one arm, named by its seed and fold. Shape legend: R resamples, I images, n pairs of cells.
"""

from __future__ import annotations

import csv
import io
import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from detr_bf.common.errors import InputError, prefix_errors
from detr_bf.common.files import MAX_JSON_BYTES, is_file, read_json, read_regular
from detr_bf.common.progress import progress_bar
from detr_bf.common.text import csv_cell, printable
from detr_bf.comparison.statistics import (
    Estimate,
    bootstrap_df,
    images_estimate,
    seeds_and_images_estimate,
    student_estimate,
)
from detr_bf.comparison.tables import BoxTable, ClassifierTable, ImageTable, PanopticTable
from detr_bf.config import saved_config
from detr_bf.engine import DetectionEvaluator, Evaluation, RunFolder
from detr_bf.evaluation import PanopticFile, check_results
from detr_bf.tasks import task_of

_Cell = tuple[int, int | None]  # seed and fold
Key = TypeVar("Key", bound=Hashable)
_CHUNK = 2**23  # multiplicities in memory at a time
_LEAST_KNOWN = 0.5  # of the resamples must have ground truth for a metric


def table_of(run: Path) -> ImageTable:
    """Return the table of a finished run from its folder and the validation data that its config names.

    A run with panoptic results gives a :class:`PanopticTable`, another detector a :class:`BoxTable`, a classifier a
    :class:`ClassifierTable`.

    Raises:
        InputError: the folder holds no finished run, a run without these results, or files that cannot be read; the
            validation data has changed or is missing.
    """
    folder = RunFolder(run)
    with prefix_errors(printable(run)):
        for path in (folder.config, folder.evaluation):
            if not is_file(path):
                raise InputError(f"{path.name} is missing: this is not the folder of a finished run, finish it first")
        if is_file(folder.predictions):
            return _classifier_table(folder)
        if not is_file(folder.results):
            raise InputError(
                f"it has neither {folder.results.name} of a detector nor {folder.predictions.name} of a classifier, "
                "so there is nothing to compare image by image"
            )
        task = task_of(saved_config(folder.config))
        evaluation = task.build_evaluation(task.load_data().class_map, folder)
        evaluator = evaluation.make_evaluator() if isinstance(evaluation, Evaluation) else None
        assert isinstance(evaluator, DetectionEvaluator), "only detectors write results of boxes"
        return _panoptic_table(folder, evaluator) if evaluator.panoptic else _box_table(folder, evaluator)


def _box_table(folder: RunFolder, evaluator: DetectionEvaluator) -> BoxTable:
    boxes, results = evaluator.boxes, _read(folder.results)
    check_results(results, boxes.ground_truth, folder.results.name)
    names = dict(zip(boxes.class_map.category_ids, boxes.class_map.distinct_names, strict=True))
    return BoxTable.match(boxes.ground_truth, results, names, boxes.max_detections)


def _panoptic_table(folder: RunFolder, evaluator: DetectionEvaluator) -> PanopticTable:
    assert evaluator.panoptic is not None
    quality, classes = evaluator.panoptic.make_evaluator(), evaluator.class_map
    found = PanopticFile(folder.panoptic_results, folder.panoptic, classes)
    for image_id in found:
        quality.update([found[image_id]])
    return PanopticTable.of(quality)


def _classifier_table(folder: RunFolder) -> ClassifierTable:
    """Read the predictions, and from the evaluation the group of each class."""
    evaluation, name = _read(folder.evaluation), folder.predictions.name
    try:
        per_class = {key: entry["group"] for key, entry in evaluation["per_class"].items()}
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{folder.evaluation.name} has no classes with their groups: evaluate the run again") from None
    index = {csv_cell(printable(key)): number for number, key in enumerate(per_class)}
    try:
        text = read_regular(folder.predictions, MAX_JSON_BYTES).decode("utf-8")
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
        numbers = [
            (int(row["index"]), index[row["class"]], index[row["predicted"]] if row["predicted"] else -1)
            for row in rows
        ]
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise InputError(f"{name} is damaged ({printable(error)}): evaluate the run again") from None
    if not numbers or len({image for image, _, _ in numbers}) < len(numbers):
        raise InputError(f"{name} must list every image once, and at least one: evaluate the run again")
    columns = np.array(sorted(numbers), dtype=np.int64)
    return ClassifierTable(tuple(columns[:, 0].tolist()), columns[:, 1], columns[:, 2], tuple(per_class.values()))


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path.name} cannot be read ({printable(error)}): evaluate the run again") from None


class Resampled(NamedTuple):
    """Metrics of one cell on its images and on resamples of them."""

    values: Mapping[str, float]  # NaN without ground truth
    draws: Mapping[str, np.ndarray]  # (R,)
    image_ids: tuple[int, ...]


def image_draws(image_ids: Sequence[int], resamples: int, seed: int, rows: int) -> Iterator[np.ndarray]:
    """Yield multiplicities (at most ``rows``, I), ``resamples`` rows in all: I images drawn with replacement.

    They depend on the images and the seed alone, so that all cells with the same images get the same draws and those
    with other images, such as other folds, independent ones.
    """
    count = len(image_ids)
    rng = np.random.default_rng([seed, zlib.crc32(repr(tuple(image_ids)).encode())])
    for start in range(0, resamples, rows):
        yield rng.multinomial(count, np.full(count, 1 / count), size=min(rows, resamples - start))


def resample(tables: Mapping[Key, ImageTable], resamples: int, seed: int = 0) -> dict[Key, Resampled]:
    """Return the metrics of each cell on its images and on ``resamples`` resamples of them.

    Cells with the same images get the same resamples: differences of their draws are paired.
    """
    groups: dict[tuple[int, ...], list[Key]] = {}
    for key, table in tables.items():
        groups.setdefault(table.image_ids, []).append(key)
    found: dict[Key, Resampled] = {}
    with progress_bar(total=len(tables) * resamples, desc="resampling", leave=False, delay=1) as bar:
        for image_ids, keys in groups.items():
            parts: dict[Key, list[dict[str, np.ndarray]]] = {key: [] for key in keys}
            for weights in image_draws(image_ids, resamples, seed, max(1, _CHUNK // len(image_ids))):
                for key in keys:
                    parts[key].append(tables[key].metrics(weights))
                    bar.update(len(weights))
            for key in keys:
                values = tables[key].metrics(np.ones((1, len(image_ids)), dtype=np.int64))
                draws = {name: np.concatenate([part[name] for part in parts[key]]) for name in values if parts[key]}
                found[key] = Resampled({name: float(value[0]) for name, value in values.items()}, draws, image_ids)
    return found


class DifferenceEstimates(NamedTuple):
    """Paired differences of one metric, and their mean with three sources of variance."""

    values: tuple[float | None, ...]  # one per pair; None without ground truth
    seeds: Estimate  # the images are given; with folds, new seeds and the images of new folds
    images: Estimate | None  # the trained networks are given; None without resamples
    both: Estimate | None  # new seeds and new images: what the verdict rests on


def resample_differences(
    pairs: Mapping[_Cell, tuple[Resampled, Resampled]], test_share: float = 0.0
) -> dict[str, DifferenceEstimates]:
    """Return the differences arm - baseline of each metric with their estimates.

    The variances are those of :mod:`detr_bf.comparison.statistics`. They need of the bootstrap the covariance of the
    differences of one fold over the resamples of its images, times I / (I - 1), because a resample draws from I images
    with the variance of divisor I. Resamples without ground truth for the metric are left out; if they are more than
    half, there are no estimates from images.

    Args:
        pairs: (seed, fold) -> (arm, baseline), of :func:`resample`.
        test_share: test images / training images, read with several folds only.
    """
    names = next(iter(pairs.values()))[0].values
    return {name: _estimates(name, pairs, test_share) for name in names}


def _estimates(name: str, pairs: Mapping[_Cell, tuple[Resampled, Resampled]], test_share: float) -> DifferenceEstimates:
    missing = float("nan")
    values = {cell: arm.values[name] - other.values.get(name, missing) for cell, (arm, other) in pairs.items()}
    known = {cell: value for cell, value in values.items() if np.isfinite(value)}
    shown = tuple(known.get(cell) for cell in pairs)
    if not known:
        return DifferenceEstimates(shown, Estimate(missing), None, None)
    numbers, folds = list(known.values()), [fold for _, fold in known]
    seeds = student_estimate(numbers, folds, test_share)
    covariances: dict[Hashable, np.ndarray] = {}
    images = resamples = 0
    for fold in dict.fromkeys(folds):
        cells = [pairs[cell] for cell in known if cell[1] == fold]
        if any(name not in cell.draws for pair in cells for cell in pair):
            return DifferenceEstimates(shown, seeds, None, None)
        draws = np.stack([arm.draws[name] - other.draws[name] for arm, other in cells])
        finite, count = draws[:, np.isfinite(draws).all(0)], len(cells[0][0].image_ids)
        if count < 2 or finite.shape[1] < max(2, _LEAST_KNOWN * draws.shape[1]):
            return DifferenceEstimates(shown, seeds, None, None)
        covariances[fold] = np.atleast_2d(np.cov(finite)) * count / (count - 1)
        images, resamples = images + count, finite.shape[1]
    df = bootstrap_df(images, len(covariances), resamples)
    return DifferenceEstimates(
        shown,
        seeds,
        images_estimate(numbers, folds, covariances, df),
        seeds_and_images_estimate(numbers, folds, covariances, df, test_share),
    )
