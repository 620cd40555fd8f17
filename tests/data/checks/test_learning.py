"""Numbers that a detector learns from, by hand, and the warnings around their thresholds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from detr_bf.data.checks.annotations import examine
from detr_bf.data.checks.learning import (
    LEAST_STEPS,
    LEAST_STEPS_FINE_TUNING,
    LEAST_TRAIN_IMAGES,
    LEAST_VAL_IMAGES,
    Training,
    learned_from,
    learning_findings,
    learning_lines,
)
from detr_bf.data.checks.report import Finding, Split
from detr_bf.data.coco import Source
from tests.data.checks.test_statistics import Factory, split, thing

PLENTY = Training(
    epochs=100,
    images_together=4,
    accumulate=2,
    max_steps=None,
    fine_tuned=False,
    stride=8,
    short_side=100,
    max_size=150,
    square=False,
)


def images(count: int, objects: int = 1, side: float = 100, name: str = "train") -> Split:
    """Images of 200 x 200 pixels with square boxes."""
    boxes = [thing(number, 10, side, side) for number in range(count) for _ in range(objects)]
    return split(name, dict.fromkeys(range(count), (200, 200)), boxes, classes=1)


def found(train: Split, training: Training, val: Split | None = None) -> list[Finding]:
    return list(learning_findings(learned_from(train, training), val, training))


def codes(train: Split, training: Training, val: Split | None = None) -> list[str]:
    return [finding.code for finding in found(train, training, val)]


def lines(train: Split, training: Training) -> list[str]:
    return list(learning_lines(learned_from(train, training), training))


def test_averaged_weights_slower_than_the_run() -> None:
    """0.98 leaves 37 % of the first weights after 50 steps, and less than 5 % with a warm-up over 50 steps."""
    slow, train = PLENTY._replace(epochs=2, decay=0.98, fine_tuned=True), images(200)
    (finding,) = [each for each in found(train, slow) if each.code == "ema-too-slow"]
    assert finding.example.startswith("train.ema.decay=0.98 in 50 steps: 37%. Set train.ema.decay=auto, here 0.88,")
    for changes in ({"average_warmup": 50}, {"decay": 0.94}, {"decay": None}, {"max_steps": 20}, {"minutes": 1.0}):
        assert "ema-too-slow" not in codes(train, slow._replace(**changes)), changes


def test_the_steps_of_a_run_by_time_are_not_judged() -> None:
    by_time = PLENTY._replace(epochs=1, minutes=15)
    assert codes(images(LEAST_TRAIN_IMAGES), PLENTY._replace(epochs=1)) == ["few-steps"]
    assert codes(images(LEAST_TRAIN_IMAGES), by_time) == []
    assert lines(images(12), by_time)[-1] == "  train.minutes=15; an epoch: 2 steps of 8 images"


def test_lines_by_hand() -> None:
    """A clipped box, an empty one and a crowd; 200 x 400 becomes 75 x 150, because of max_size."""
    boxes = [
        {**thing(0, 10, 100, 100), "bbox": [150, 0, 100, 50]},  # 50 x 50 in the image, 25 x 25 in training
        thing(1, 10, 80, 80),  # 30 x 30
        thing(1, 20, 0, 9),
        thing(1, 30, 200, 400, iscrowd=1),
        {**thing(1, 20, 9, 9), "bbox": [500, 500, 9, 9]},
    ]
    assert lines(split("train", {0: (200, 200), 1: (200, 400)}, boxes), PLENTY) == [
        "to learn from: 2 images, 2 boxes of 3 classes, the rarest class2 (0)",
        "  objects at the training size (shorter side 100): 28 pixels, 5 % below 25 and 5 % above 30",
        "  100 epochs x 1 step of 4 images: 100 steps, 400 images in all",
    ]
    square = PLENTY._replace(square=True, short_side=50)  # 80 x 80 of 200 x 400 becomes 20 x 10
    [_, sizes, _] = lines(split("train", {1: (200, 400)}, boxes[1:2]), square)
    assert f"(images 50 x 50): {math.sqrt(200):.0f} pixels" in sizes
    [_, _, trial] = lines(images(80), PLENTY._replace(max_steps=3))
    assert trial.endswith("100 epochs x 10 steps of 8 images: 3 steps (train.max_steps), 24 images in all")


@pytest.mark.parametrize(("fine_tuned", "least"), [(False, LEAST_STEPS), (True, LEAST_STEPS_FINE_TUNING)])
def test_few_steps(fine_tuned: bool, least: int) -> None:
    train = images(80)  # ten steps an epoch
    enough = PLENTY._replace(epochs=least // 10, fine_tuned=fine_tuned)
    assert "few-steps" not in codes(train, enough)
    few = enough._replace(epochs=least // 10 - 1)
    assert "few-steps" in codes(train, few)
    [finding] = [each for each in found(train, few) if each.code == "few-steps"]
    assert f"set train.epochs={least // 10}, or" in finding.example
    [finding] = [each for each in found(train, few._replace(drops=True)) if each.code == "few-steps"]
    assert f"set train.epochs={least // 10} (and optimizer.drop_epochs with it), or" in finding.example
    assert ("init_from" in finding.example) == (not fine_tuned)
    assert "few-steps" not in codes(train, few._replace(max_steps=5)), "a trial run is ended on purpose"
    assert "few-steps" in codes(train, few._replace(max_steps=10**6))


def test_few_images() -> None:
    long = PLENTY._replace(epochs=10_000)
    assert codes(images(LEAST_TRAIN_IMAGES), long) == []
    assert codes(images(LEAST_TRAIN_IMAGES - 1), long) == ["few-images"]
    assert codes(images(LEAST_TRAIN_IMAGES - 1), long._replace(fine_tuned=True)) == []
    val = images(LEAST_VAL_IMAGES, name="val")
    assert codes(images(LEAST_TRAIN_IMAGES), long, val) == []
    val = images(LEAST_VAL_IMAGES - 1, name="val")
    assert codes(images(LEAST_TRAIN_IMAGES), long, val) == ["few-val-images"]


@pytest.mark.parametrize(("small", "warned"), [(9, False), (11, False), (12, True)])
def test_small_objects(small: int, warned: bool) -> None:
    """Half the size in training: 15.9 pixels are less than a cell of 8, 16 are not; at most a tenth may be."""
    train = images(100, side=16)
    boxes = [*train.content.annotations, *(thing(0, 10, 15.9, 15.9) for _ in range(small))]
    train = split("train", dict.fromkeys(range(100), (200, 200)), boxes, classes=1)
    small_ones = [each for each in found(train, PLENTY) if each.code == "small-objects"]
    assert [each.count for each in small_ones] == [small] * warned
    assert codes(train, PLENTY._replace(short_side=200, max_size=None)) == codes(images(100), PLENTY)


def test_the_report_has_the_lines_only_without_errors(coco_folder: Factory, tmp_path: Path) -> None:
    data = coco_folder()
    options: dict[str, Any] = {"num_queries": 10, "cache_dir": tmp_path / "cache", "training": PLENTY}
    source = Source(data.images, data.annotations)
    report = examine(source, None, **options)
    assert "\nto learn from: 4 images, 8 boxes of 3 classes, the rarest " in str(report)
    assert [finding.code for finding in report.warnings] == ["few-steps", "few-images"]
    data.content["annotations"][0]["bbox"] = None
    data.save()
    broken = examine(source, None, **options)
    assert [finding.code for finding in broken.findings] == ["box-not-numbers"]
    assert "to learn from" not in str(broken)
