"""Panoptic quality computed with loops over pixels and sets of pixels, from its definition; slow.

Kirillov et al. 2019 (arXiv 1801.00868), section 4.1; crowds and areas as in the COCO panoptic task.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from detr_bf.data.annotation_values import MAX_ID


@dataclass(frozen=True)
class Scene:
    """Scene of one image: ids by rows, and for every id its entry of ``segments_info``."""

    image_id: int
    truth: Sequence[Sequence[int]]
    truth_segments: Sequence[Mapping[str, Any]]
    found: Sequence[Sequence[int]]
    found_segments: Sequence[Mapping[str, Any]]


@dataclass
class Tally:
    """Sum one category over all images."""

    iou: float = 0.0
    tp: int = 0
    fp: int = 0
    fn: int = 0

    @property
    def quality(self) -> tuple[float, float, float] | None:
        """Return PQ, SQ and RQ."""
        if self.tp == 0 and self.fp == 0 and self.fn == 0:
            return None
        size = self.tp + self.fp / 2 + self.fn / 2
        return self.iou / size, self.iou / self.tp if self.tp else 0.0, self.tp / size


def tallies(scenes: Iterable[Scene], category_ids: Iterable[int]) -> dict[int, Tally]:
    """Return sums by category, the images in ascending order of their ids."""
    result = {category_id: Tally() for category_id in category_ids}
    for scene in sorted(scenes, key=lambda scene: scene.image_id):
        add_image(result, scene)
    return result


def add_image(result: Mapping[int, Tally], scene: Scene) -> None:
    truth_pixels, found_pixels = pixels_by_id(scene.truth), pixels_by_id(scene.found)
    void = truth_pixels.get(0, set())
    matched_truths, matched_found = set(), set()
    for truth in sorted(scene.truth_segments, key=lambda entry: entry["id"]):
        for found in sorted(scene.found_segments, key=lambda entry: entry["id"]):
            inside = truth_pixels.get(truth["id"], set())
            guessed = found_pixels[found["id"]]
            common = len(inside & guessed)
            if truth["iscrowd"] or truth["category_id"] != found["category_id"] or common == 0:
                continue
            iou = common / (truth["area"] + len(guessed - void) - common)
            if iou > 0.5:
                result[truth["category_id"]].tp += 1
                result[truth["category_id"]].iou += iou
                matched_truths.add(truth["id"])
                matched_found.add(found["id"])
    for truth in scene.truth_segments:
        if truth["id"] not in matched_truths and not truth["iscrowd"]:
            result[truth["category_id"]].fn += 1
    for found in scene.found_segments:
        if found["id"] not in matched_found and not mostly_uncounted(scene, found, truth_pixels, found_pixels):
            result[found["category_id"]].fp += 1


def mostly_uncounted(
    scene: Scene,
    found: Mapping[str, Any],
    truth_pixels: Mapping[int, set[tuple[int, int]]],
    found_pixels: Mapping[int, set[tuple[int, int]]],
) -> bool:
    """Return whether more than half of a predicted segment lies on void or on the last crowd of its category."""
    uncounted = set(truth_pixels.get(0, set()))
    crowds = [e for e in scene.truth_segments if e["iscrowd"] and e["category_id"] == found["category_id"]]
    if crowds:
        uncounted |= truth_pixels.get(crowds[-1]["id"], set())
    guessed = found_pixels[found["id"]]
    return len(guessed & uncounted) / len(guessed) > 0.5


def pixels_by_id(ids: Sequence[Sequence[int]]) -> dict[int, set[tuple[int, int]]]:
    result: dict[int, set[tuple[int, int]]] = {}
    for row, line in enumerate(ids):
        for column, value in enumerate(line):
            result.setdefault(int(value), set()).add((row, column))
    return result


def averages(
    result: Mapping[int, Tally], category_ids: Iterable[int]
) -> tuple[float | None, float | None, float | None]:
    """Return the means of PQ, SQ and RQ over these categories."""
    totals, count = [0.0, 0.0, 0.0], 0
    for category_id in category_ids:
        quality = result[category_id].quality
        if quality is not None:
            count += 1
            for place in range(3):
                totals[place] += quality[place]
    if count == 0:
        return None, None, None
    return totals[0] / count, totals[1] / count, totals[2] / count


def drawn(*rows: str) -> list[list[int]]:
    """Parse ids by rows; a dot is 0."""
    return [[0 if mark == "." else int(mark) for mark in row] for row in rows]


def entries(
    ids: Sequence[Sequence[int]], categories: Mapping[int, int], crowds: Collection[int] = ()
) -> list[dict[str, Any]]:
    """Return ``segments_info`` in the order of ``categories`` (id -> category id), with counted areas."""
    flat = [value for row in ids for value in row]
    return [
        {"id": i, "category_id": category, "area": flat.count(i), "bbox": [0, 0, 1, 1], "iscrowd": int(i in crowds)}
        for i, category in categories.items()
    ]


def scene(
    truth: Sequence[str],
    categories: Mapping[int, int],
    found: Sequence[str],
    found_categories: Mapping[int, int],
    crowds: Collection[int] = (),
    image_id: int = 1,
) -> Scene:
    truth_ids, found_ids = drawn(*truth), drawn(*found)
    return Scene(
        image_id,
        truth_ids,
        entries(truth_ids, categories, crowds),
        found_ids,
        entries(found_ids, found_categories),
    )


def random_scene(image_id: int, category_ids: Sequence[int], rng: np.random.Generator) -> Scene:
    """Draw patches of random ids; predictions are the truth with patches painted over and some classes wrong."""
    height, width = (int(side) for side in rng.integers(6, 16, 2))
    truth_ids = (rng.choice(MAX_ID, size=9, replace=False) + 1).tolist()
    truth = painted(np.full((height, width), truth_ids[0]), truth_ids[1:], rng, patches=9)
    truth = painted(truth, [0], rng, patches=int(rng.integers(0, 3)))
    listed = [i for i in rng.permutation(truth_ids).tolist() if rng.random() < 0.85]  # some absent, some not listed
    categories = {i: int(rng.choice(category_ids)) for i in listed}
    crowds = {i for i in listed if rng.random() < 0.25}
    truth_entries = [{**entry, "area": max(entry["area"], 1)} for entry in entries(truth.tolist(), categories, crowds)]

    names = dict(zip(truth_ids, (rng.choice(MAX_ID, size=9, replace=False) + 1).tolist(), strict=True))
    found = np.vectorize(lambda value: names.get(value, 0), otypes=[np.int64])(truth)
    found = painted(found, [*names.values(), 0], rng, patches=int(rng.integers(0, 5)))
    found *= rng.random() > 0.05  # nothing predicted
    found_categories = {
        names[i]: categories[i] if i in categories and rng.random() < 0.8 else int(rng.choice(category_ids))
        for i in rng.permutation(truth_ids).tolist()
        if (found == names[i]).any()
    }
    return Scene(image_id, truth.tolist(), truth_entries, found.tolist(), entries(found.tolist(), found_categories))


def painted(ids: np.ndarray, values: Sequence[int], rng: np.random.Generator, patches: int) -> np.ndarray:
    ids = ids.copy()
    for _ in range(patches):
        top, left = (int(rng.integers(0, side)) for side in ids.shape)
        height, width = (int(side) for side in rng.integers(1, 8, 2))
        ids[top : top + height, left : left + width] = rng.choice(values)
    return ids


def random_split(seed: int, category_ids: Sequence[int], num_images: int = 8) -> list[Scene]:
    """Draw scenes with void, crowds, unlisted ids, ids without pixels, wrong classes and images without predictions."""
    rng = np.random.default_rng(seed)
    image_ids = sorted(rng.choice(10_000, size=num_images, replace=False).tolist())
    return [random_scene(image_id, category_ids, rng) for image_id in image_ids]
