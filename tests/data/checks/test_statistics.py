"""Statistics of both splits, by hand and on simulated divisions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from detr_bf.data.checks import statistics
from detr_bf.data.checks.annotations import examine
from detr_bf.data.checks.report import Split
from detr_bf.data.checks.statistics import EDGES, NAMES, RESPLITS, describe_splits, statistics_lines
from detr_bf.data.coco import CocoAnnotations, Source

Factory = Callable[..., SimpleNamespace]
Sizes = dict[int, tuple[int, int]]  # width and height by image id


def split(name: str, sizes: Sizes, objects: Iterable[dict[str, Any]], classes: int = 3) -> Split:
    images = [{"id": i, "file_name": f"{i}.jpg", "width": w, "height": h} for i, (w, h) in sizes.items()]
    categories = [{"id": 10 * i, "name": f"class{i}"} for i in range(1, classes + 1)]
    return Split(name, Path(), CocoAnnotations(Path(f"{name}.json"), images, list(objects), categories), {}, 100)


def thing(image: int, category: int, width: float, height: float, **more: Any) -> dict[str, Any]:
    return {"image_id": image, "category_id": category, "bbox": [0, 0, width, height], **more}


def bin_of(name: str, value: float) -> int:
    """Return the number of edges at or below the value."""
    return sum(edge <= value for edge in EDGES[name])


def test_numbers_by_hand() -> None:
    train = split(
        "train",
        {7: (640, 480), 3: (100, 200), 5: (50, 50)},
        [
            thing(3, 20, 50, 100),
            thing(7, 10, 32, 32),
            thing(7, 10, 64, 48, area=1025),
            thing(7, 30, 640, 480, iscrowd=1),
            thing(3, 20, 0, 10),
            thing(3, 10, 100, 200, area=96**2 + 1),
        ],
    )
    document = describe_splits([train])
    found = document["splits"]["train"]
    assert document["splits"].keys() == {"train"}
    assert (document["statements"], document["distances"]) == ([], {})
    assert [found[key] for key in ("images", "images_without_objects", "objects", "crowds")] == [3, 1, 5, 1]
    assert found["objects_by_size"] == {"small": 2, "medium": 2, "large": 1}
    expected = {
        "image_size": [640, 200, 50],
        "image_aspect": [4 / 3, 0.5, 1],
        "object_size": [math.sqrt(32 * 32 / (640 * 480)), 0.1, 0.5, 1],
        "object_aspect": [1, 64 / 48, 0.5, 0.5],
        "objects_per_image": [2, 3, 0],
    }
    for name, values in expected.items():
        counts = [0] * (len(EDGES[name]) + 1)
        for value in values:
            counts[bin_of(name, value)] += 1
        assert found["histograms"][name] == counts
        assert found["quantiles"][name] == pytest.approx(np.quantile(values, (0.05, 0.5, 0.95)).tolist())
    assert document["classes"] == [
        {"id": 10, "name": "class1", "train": {"objects": 3, "images": 2}},
        {"id": 20, "name": "class2", "train": {"objects": 2, "images": 1}},
        {"id": 30, "name": "class3", "train": {"objects": 0, "images": 0}},
    ]
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_round_values_lie_inside_bins() -> None:
    """Frequent values must not be edges, or rounding would move all of them to the next bin."""
    for name, values in {"image_aspect": (1, 4 / 3, 3 / 4), "object_aspect": (1,), "image_size": (640, 1333)}.items():
        assert not any(math.isclose(edge, value, rel_tol=0.01) for edge in EDGES[name] for value in values)


def test_images_of_unknown_size_count_without_sizes() -> None:
    train = split("train", {1: (640, 480), 2: (640, 480)}, [thing(1, 10, 64, 48), thing(2, 10, 30, 30)])
    del train.content.images[1]["width"]  # type: ignore[attr-defined]
    found = describe_splits([train])["splits"]["train"]
    assert (found["images"], found["images_without_size"], found["objects"]) == (2, 1, 2)
    assert sum(found["histograms"]["object_size"]) == sum(found["histograms"]["image_size"]) == 1
    assert sum(found["histograms"]["object_aspect"]) == 2


def test_a_split_of_crowds_alone_has_no_distribution_of_objects() -> None:
    train = split("train", {1: (640, 480)}, [thing(1, 10, 64, 48)])
    val = split("val", {1: (640, 480)}, [thing(1, 10, 64, 48, iscrowd=1)])
    document = describe_splits([train, val])
    assert document["splits"]["val"]["quantiles"]["object_size"] is None
    assert document["distances"]["object_size"] is document["distances"]["classes"] is None
    assert document["distances"]["objects_per_image"] == 1
    assert any("none" in line for line in statistics_lines(document))


def simulated(seed: int, images: int, classes: int = 4) -> tuple[Sizes, list[dict[str, Any]]]:
    """Return data whose images have their own scale and class, so that their objects are no independent draws."""
    random = np.random.default_rng(seed)
    sizes, objects = {}, []
    for image in range(images):
        sizes[image] = [(640, 480), (480, 640), (1024, 768), (800, 800)][random.integers(4)]
        scale, own = random.lognormal(3.5, 0.8), int(random.integers(classes))
        for _ in range(random.poisson(random.gamma(1.5, 5))):
            side, aspect = scale * random.lognormal(0, 0.2), random.lognormal(0, 0.4)
            category = own if random.random() < 0.8 else int(random.integers(classes))
            objects.append(thing(image, 10 * category + 10, side * aspect**0.5, side / aspect**0.5))
    return sizes, objects


def divided(seed: int, images: int, share: float, change: Callable[[dict[str, Any]], Any] = dict) -> dict[str, Any]:
    """Describe random parts of simulated data; ``change`` is applied to the objects of the second part."""
    sizes, objects = simulated(seed, images)
    held_out = set(np.random.default_rng(seed).permutation(images)[: int(share * images)].tolist())
    parts = []
    for name, chosen in (("train", sizes.keys() - held_out), ("val", held_out)):
        own = [item for item in objects if item["image_id"] in chosen]
        own = [change(item) for item in own] if name == "val" else own
        parts.append(split(name, {i: sizes[i] for i in chosen}, [item for item in own if item], classes=4))
    return describe_splits(parts)


@pytest.mark.parametrize(("images", "share"), [(40, 0.5), (100, 0.2), (300, 0.2)])
def test_random_divisions_do_not_differ(images: int, share: float) -> None:
    """Chance alone explains 240 / 500 of the reports: 6 distributions in 40 divisions, each with a risk of 1 / 500."""
    documents = [divided(seed, images, share) for seed in range(40)]
    reported = sum("differ in" in text for document in documents for text in document["statements"])
    assert reported <= 3
    assert 6 * len(documents) / (RESPLITS + 1) < 1
    large = sum(value >= 0.15 for document in documents for value in document["distances"].values())
    assert large > 10


def larger(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "bbox": [0, 0, 3 * item["bbox"][2], 3 * item["bbox"][3]]}


def wider(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "bbox": [0, 0, 2 * item["bbox"][2], item["bbox"][3] / 2]}


def rarer(item: dict[str, Any]) -> dict[str, Any] | None:
    return item if item["bbox"][2] % 1 < 0.3 else None


def relabelled(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "category_id": 10 if item["category_id"] == 40 else item["category_id"]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (larger, "size of the objects / image: median "),
        (wider, "width / height of the objects: median "),
        (rarer, "objects per image: median "),
        (relabelled, "their classes, most in class"),
    ],
)
def test_a_difference_is_found_and_named(change: Callable[..., Any], expected: str) -> None:
    (statement,) = divided(0, 400, 0.3, change)["statements"]
    assert statement.startswith(f"train and val differ in {expected}")
    assert "(total variation 0." in statement


def test_image_sizes_that_differ_are_found_and_few_images_are_not_compared() -> None:
    for images, expected in ((9, 0), (10, 1)):
        parts = [
            split(name, dict.fromkeys(range(images), size), [thing(i, 10, 50, 50) for i in range(images)])
            for name, size in (("train", (640, 480)), ("val", (1280, 960)))
        ]
        statements = describe_splits(parts)["statements"]
        assert sum("longer side" in text for text in statements) == expected


def test_classes_without_training_objects_are_named() -> None:
    sizes: Sizes = dict.fromkeys(range(20), (640, 480))
    train = split("train", sizes, [thing(i, 10, 50, 50) for i in range(20)] + [thing(0, 30, 50, 50)])
    val = split("val", sizes, [thing(i, 10 * (1 + i % 3), 50, 50) for i in range(3)])
    assert describe_splits([train, val])["statements"][:2] == [
        "classes of val without training objects: class2",
        "classes of val with fewer than 10 training objects: class3 (1)",
    ]


def test_the_doctor_prints_them_unless_there_are_errors(coco_folder: Factory, tmp_path: Path) -> None:
    train, val = coco_folder(name="train"), coco_folder(num_images=3, name="val", first_image_id=101)
    sources = [Source(each.images, each.annotations) for each in (train, val)]

    def report(*given: Source | None) -> Any:
        return examine(*given, num_queries=10, cache_dir=tmp_path / "cache")  # type: ignore[misc]

    both, alone = report(*sources), report(sources[0], None)
    assert both.statistics["splits"].keys() == {"train", "val"}
    assert alone.statistics["splits"].keys() == {"train"}
    lines = str(both).splitlines()
    assert all(sum(line.startswith(label) for line in lines) == 1 for label in NAMES.values())
    assert len(lines) <= 14
    del train.content["annotations"][0]["bbox"]
    train.save()
    broken = report(*sources)
    assert broken.errors
    assert broken.statistics is None


def test_a_division_with_all_objects_in_one_part_tells_no_difference() -> None:
    """One image alone has objects: every division of the images puts them into one part."""
    by_image = csr_array(np.array([[4, 2], *[[0, 0]] * 19]))
    assert statistics._by_chance(0.5, by_image, 10)
    assert not statistics._by_chance(0.5, csr_array(np.full((20, 2), 3)), 10)
