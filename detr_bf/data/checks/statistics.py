"""Numbers and distributions of both splits of detection data, and sentences where the splits differ.

Histograms have the same edges for every data set and split (:data:`EDGES`). The distance of two histograms is the total
variation: the share of one split that would have to move to another bin to give the other split. Two splits differ in
a distribution if their distance is at least :data:`LEAST_DISTANCE` and larger than that of :data:`RESPLITS` random
divisions of all images into parts of the same sizes. Images, not objects, are divided, because the objects of an image
resemble each other. Splits of fewer than :data:`LEAST_IMAGES` images are not compared.

Shape legend: N images, M objects without crowds, V values of a distribution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array

from detr_bf.common.text import listed
from detr_bf.data.checks.report import Split
from detr_bf.data.columns import Entries, integers, values_of

LEAST_DISTANCE = 0.15
RESPLITS = 499
LEAST_IMAGES = 10
FEW_OBJECTS = 10  # fewer training objects of a class are reported
SIZE_LIMITS = (32**2, 96**2)  # pixels of a small and of a medium object in COCO's evaluation, both included


def _octaves(low: float, high: float, per_octave: int) -> tuple[float, ...]:
    """Return powers of 2 with exponents from ``low`` to ``high``."""
    steps = round((high - low) * per_octave)
    return tuple(float(2 ** (low + step / per_octave)) for step in range(steps + 1))


# A bin holds the values from its lower edge to below its upper one; the first and the last bin are open.
EDGES: Mapping[str, tuple[float, ...]] = {
    "image_size": _octaves(6, 13, 2),  # longer side in pixels
    "image_aspect": _octaves(-1.375, 1.375, 4),  # width / height; 1 is in the middle of a bin
    "object_size": _octaves(-7, 0, 3),  # root of the box's share of the image's area
    "object_aspect": _octaves(-19 / 6, 19 / 6, 3),  # width / height; 1 is in the middle of a bin
    "objects_per_image": (1, 2, 3, 4, 5, 7, 10, 14, 20, 28, 40, 56, 80, 112, 160),
}
NAMES: Mapping[str, str] = {
    "image_size": "longer side of the images, pixels",
    "image_aspect": "width / height of the images",
    "object_size": "size of the objects / image",
    "object_aspect": "width / height of the objects",
    "objects_per_image": "objects per image",
}


class _Values(NamedTuple):
    """Values of one distribution, each of an image."""

    values: np.ndarray  # (V,)
    images: np.ndarray  # (V,) int64, index of the image


class _Numbers(NamedTuple):
    """Arrays of one split."""

    images: int
    classes: _Values  # (M,) category ids
    distributions: Mapping[str, _Values]
    areas: np.ndarray  # (M,) pixels


def describe_splits(splits: Sequence[Split]) -> dict[str, Any]:
    """Return the content of ``data_statistics.json``: numbers, histograms, classes, distances and sentences.

    The annotations must be without errors. Crowds are counted, and left out of everything else. Boxes without area and
    images of unknown size are left out of the distributions that need them.

    Args:
        splits: ``train``, ``val`` or both, in this order.
    """
    found = {split.name: _numbers(split) for split in splits}
    names: dict[int, str] = {}
    for split in splits:
        class_map = split.content.class_map
        names = dict(zip(class_map.category_ids, class_map.distinct_names, strict=True)) | names
    classes = _class_counts(found, names)
    document: dict[str, Any] = {
        "edges": {name: list(edges) for name, edges in EDGES.items()},
        "splits": {split.name: _summary_numbers(split, found[split.name]) for split in splits},
        "classes": classes,
        "distances": {},
        "statements": [],
    }
    if {"train", "val"} <= found.keys():
        train, val = found["train"], found["val"]
        document["statements"] += _missing_classes(classes)
        for name in (*EDGES, "classes"):
            distance, differs = _distance(name, train, val, list(names))
            document["distances"][name] = distance
            if differs:
                document["statements"].append(_difference(name, document))
    return document


def statistics_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of the splits' numbers, and the sentences."""
    splits = document["splits"]
    rows = [("", *splits)]
    rows.append(("images without objects", *(f"{each['images_without_objects']:,}" for each in splits.values())))
    rows.append(("crowds", *(f"{each['crowds']:,}" for each in splits.values())))
    shares = ([100 * n / max(1, each["objects"]) for n in each["objects_by_size"].values()] for each in splits.values())
    rows.append(("small, medium, large objects, %", *(" ".join(f"{share:.0f}" for share in each) for each in shares)))
    for name, label in NAMES.items():
        rows.append(
            (f"{label}, median (5 % to 95 %)", *(_quantile_text(each["quantiles"][name]) for each in splits.values()))
        )
    if any("references" in each for each in splits.values()):
        of = [each.get("references") for each in splits.values()]
        rows.append(("images with a reference", *(f"{each['images']:,}" if each else "not read" for each in of)))
        shares = (each and each["differing"] and [100 * share for share in each["differing"]] for each in of)
        unlike = (_quantile_text(each) if read else "not read" for each, read in zip(shares, of, strict=True))
        rows.append(("pixels unlike the reference, %, median (5 % to 95 %)", *unlike))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield from document["statements"]


def _quantile_text(quantiles: Sequence[float] | None) -> str:
    if quantiles is None:
        return "none"
    low, middle, high = (f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in quantiles)
    return f"{middle} ({low} to {high})"


def _numbers(split: Split) -> _Numbers:
    objects, images = split.objects, split.content.images
    order = integers(values_of(images, "id"))
    by_id = np.argsort(order)
    ids, labels, boxes, areas = _arrays_of(objects)
    owner = by_id[np.searchsorted(order, ids, sorter=by_id)]
    width, height = boxes[:, 2], boxes[:, 3]
    areas = np.where(np.isnan(areas), width.clip(0) * height.clip(0), areas)
    sizes = np.array([split.size(image) or (0, 0) for image in images], dtype=np.float64).reshape(-1, 2)
    known = np.all(sizes > 0, axis=1)
    solid = (width > 0) & (height > 0)
    placed = solid & known[owner]
    shares = width[placed] * height[placed] / sizes[owner[placed]].prod(1)
    each_image = np.arange(len(images))
    distributions = {
        "image_size": _Values(sizes[known].max(1), each_image[known]),
        "image_aspect": _Values(sizes[known, 1] / sizes[known, 0], each_image[known]),
        "object_size": _Values(np.sqrt(shares), owner[placed]),
        "object_aspect": _Values(width[solid] / height[solid], owner[solid]),
        "objects_per_image": _Values(np.bincount(owner, minlength=len(images)), each_image),
    }
    return _Numbers(len(images), _Values(labels, owner), distributions, areas)


def _arrays_of(objects: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return image ids, category ids (M,) int64, boxes (M, 4) and areas (M,) float64, NaN if not given."""
    ids, labels = (integers(values_of(objects, key)).astype(np.int64) for key in ("image_id", "category_id"))
    if isinstance(objects, Entries):
        areas = np.where(objects.is_number("area"), objects.numbers("area"), np.nan)
        return ids, labels, np.array(objects.boxes, dtype=np.float64).reshape(-1, 4), areas
    boxes = np.array([each["bbox"] for each in objects], dtype=np.float64).reshape(-1, 4)
    return ids, labels, boxes, np.array([each.get("area") for each in objects], dtype=np.float64)


def _summary_numbers(split: Split, numbers: _Numbers) -> dict[str, Any]:
    small, medium = ((numbers.areas <= limit).sum() for limit in SIZE_LIMITS)
    objects = len(numbers.areas)
    return {
        **_reference_numbers(split),
        "images": numbers.images,
        "images_without_objects": int((numbers.distributions["objects_per_image"].values == 0).sum()),
        "images_without_size": numbers.images - len(numbers.distributions["image_size"].values),
        "objects": objects,
        "crowds": len(split.content.annotations) - objects,
        "objects_by_size": {
            "small": int(small),
            "medium": int(medium - small),
            "large": int(objects - medium),
        },
        "histograms": {
            name: np.bincount(_bins(name, each), minlength=len(EDGES[name]) + 1).tolist()
            for name, each in numbers.distributions.items()
        },
        "quantiles": {  # 5 %, median, 95 %
            name: np.quantile(each.values, (0.05, 0.5, 0.95)).tolist() if len(each.values) else None
            for name, each in numbers.distributions.items()
        },
    }


def _reference_numbers(split: Split) -> dict[str, Any]:
    """Return the numbers of references, and the shares of pixels that differ from them; nothing without references."""
    if split.references is None:
        return {}
    differing = [each.differing for each in split.alignments.values()]
    quantiles = np.quantile(differing, (0.05, 0.5, 0.95)).tolist() if differing else None
    with_reference = sum(file is not None for file in split.references.files)
    return {"references": {"images": with_reference, "compared": len(differing), "differing": quantiles}}


def _bins(name: str, distribution: _Values) -> np.ndarray:
    return np.searchsorted(EDGES[name], distribution.values, side="right")


def _class_counts(found: Mapping[str, _Numbers], names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the numbers of objects, and of images with one, of each class and split."""
    counts: list[dict[str, Any]] = [{"id": number, "name": name} for number, name in names.items()]
    for split, numbers in found.items():
        labels, images = _class_indices(numbers, list(names)), numbers.classes.images
        objects = np.bincount(labels, minlength=len(names))
        pairs = np.unique(images * len(names) + labels)
        with_class = np.bincount(pairs % len(names), minlength=len(names))
        for at, entry in enumerate(counts):
            entry[split] = {"objects": int(objects[at]), "images": int(with_class[at])}
    return counts


def _class_indices(numbers: _Numbers, ids: Sequence[int]) -> np.ndarray:
    """Return the index of each object's class in ``ids``: (M,) int64."""
    order = np.argsort(ids)
    return order[np.searchsorted(ids, numbers.classes.values, sorter=order)]


def _distance(name: str, train: _Numbers, val: _Numbers, ids: Sequence[int]) -> tuple[float | None, bool]:
    """Return the total variation of a distribution, None without values, and whether the splits differ."""
    if name == "classes":
        bins, count = [_class_indices(each, ids) for each in (train, val)], len(ids)
        images = [each.classes.images for each in (train, val)]
    else:
        both = [each.distributions[name] for each in (train, val)]
        bins, images, count = [_bins(name, each) for each in both], [each.images for each in both], len(EDGES[name]) + 1
    if not all(map(len, bins)):
        return None, False
    first, second = (np.bincount(each, minlength=count) for each in bins)
    distance = _total_variation(first, second)
    if distance < LEAST_DISTANCE or min(train.images, val.images) < LEAST_IMAGES:
        return distance, False
    owner = np.concatenate((images[0], images[1] + train.images))
    cells = (np.ones(len(owner), dtype=np.int64), (owner, np.concatenate(bins)))
    by_image = csr_array(cells, shape=(train.images + val.images, count))
    return distance, not _by_chance(distance, by_image, min(train.images, val.images))


def _by_chance(distance: float, by_image: csr_array, size: int) -> bool:
    """Return True if one of the random divisions of the images has at least the given distance.

    Args:
        distance: total variation.
        by_image: (N, bins) histogram of each image.
        size: images of one part.
    """
    random, total = np.random.default_rng(0), by_image.sum(0)
    for _ in range(RESPLITS):
        part = by_image[random.choice(by_image.shape[0], size, replace=False, shuffle=False)].sum(0)
        if not 0 < part.sum() < total.sum() or _total_variation(part, total - part) >= distance:
            return True
    return False


def _total_variation(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first / first.sum() - second / second.sum()).sum() / 2)


def _difference(name: str, document: Mapping[str, Any]) -> str:
    """Return the sentence about a distribution in which the splits differ."""
    train, val = document["splits"]["train"], document["splits"]["val"]
    ending = f"(total variation {document['distances'][name]:.2f})"
    if name != "classes":
        middles = [f"{each['quantiles'][name][1]:.3g}" for each in (train, val)]
        return f"train and val differ in {NAMES[name]}: median {middles[0]} and {middles[1]} {ending}"
    shares = {
        entry["name"]: [entry[split]["objects"] / document["splits"][split]["objects"] for split in ("train", "val")]
        for entry in document["classes"]
    }
    most = max(shares, key=lambda key: abs(shares[key][0] - shares[key][1]))
    of_train, of_val = (f"{100 * share:.1f} %" for share in shares[most])
    return f"train and val differ in their classes, most in {most}: {of_train} and {of_val} of the objects {ending}"


def _missing_classes(classes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield sentences about the classes of the validation split with no or few training objects."""
    used = [entry for entry in classes if entry["val"]["objects"]]
    if none := [entry["name"] for entry in used if not entry["train"]["objects"]]:
        yield f"classes of val without training objects: {listed(none)}"
    few = [entry for entry in used if 0 < entry["train"]["objects"] < FEW_OBJECTS]
    if few:
        shown = listed([f"{entry['name']} ({entry['train']['objects']})" for entry in few])
        yield f"classes of val with fewer than {FEW_OBJECTS} training objects: {shown}"
