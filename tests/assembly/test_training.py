from __future__ import annotations

import logging
from pathlib import Path

import pytest

from detr_bf.assembly.image_training import image_learning_rate
from detr_bf.assembly.training import check_same_classes, learning_rate
from detr_bf.config import ClassifierConfig, Config, MaskedConfig, load_config
from detr_bf.engine import Checkpoint, RunFolder
from detr_bf.errors import InputError
from detr_bf.structures import ClassMap

FOLDER = RunFolder(Path("run"))


def classifier(*settings: str) -> ClassifierConfig:
    return load_config(None, settings, schema=ClassifierConfig)


def trained_on(classes: ClassMap) -> Checkpoint:
    return Checkpoint({}, classes.to_dict(), {})


@pytest.mark.parametrize("epochs", [1, 5])
def test_a_run_that_is_over_before_its_warm_up_is_refused(epochs: int) -> None:
    message = rf"optimizer.warmup_epochs=5: the warm-up of 20 steps is not over when train.epochs={epochs} are"
    with pytest.raises(InputError, match=message):
        image_learning_rate(classifier(f"train.epochs={epochs}"), 4)
    with pytest.raises(InputError, match=r"optimizer.warmup_epochs=40"):
        image_learning_rate(load_config(None, [f"train.epochs={epochs}"], schema=MaskedConfig), 4)


def test_a_warm_up_in_steps_is_told_in_steps() -> None:
    steps = ("optimizer.warmup_steps=8", "train.epochs=2", "optimizer.drop_epochs=[1]")
    with pytest.raises(InputError, match=r"optimizer.warmup_steps=8: .*train.epochs=2 are, after 8 steps"):
        learning_rate(load_config(None, steps), 4)
    assert learning_rate(load_config(None, steps), 5)(8) == pytest.approx(0.1)
    with pytest.raises(InputError, match="after 8 steps"):
        learning_rate(load_config(None, [*steps, "train.accumulate=2"]), 8)


def test_a_longer_run_and_one_that_is_cut_short_for_trying_out_may_warm_up() -> None:
    assert image_learning_rate(classifier("train.epochs=6"), 4)(20) == 1
    assert image_learning_rate(classifier("train.epochs=1", "train.max_steps=3"), 4).total_steps == 3
    with pytest.raises(InputError, match="warm-up"):
        image_learning_rate(classifier("train.epochs=1", "train.max_steps=4"), 4)


def test_a_cosine_ends_at_the_least_learning_rate() -> None:
    rate = image_learning_rate(classifier("optimizer.lr=0.01", "optimizer.min_lr=0.001", "train.epochs=9"), 4)
    assert rate(36) == pytest.approx(0.1)
    still = classifier("optimizer.lr=0", "optimizer.min_lr=0", "train.epochs=9")
    assert image_learning_rate(still, 4)(30) >= 0


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        (("train.epochs=2",), True),
        (("train.epochs=200",), True),
        (("train.epochs=9", "optimizer.drop_epochs=[]"), True),
        (("train.epochs=300",), False),
        (("train.epochs=2", "optimizer.drop_epochs=[1]"), False),
        (("train.epochs=2", "optimizer.schedule=cosine"), False),
        (("train.epochs=2", "train.max_steps=3"), False),
    ],
)
def test_steps_that_never_come_are_told(
    settings: tuple[str, ...], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config: Config = load_config(None, settings)
    with caplog.at_level(logging.WARNING):
        learning_rate(config, 4)
    assert ("the learning rate never falls" in caplog.text) == warns


def test_the_same_classes_go_on() -> None:
    classes = ClassMap((0, 1), ("cat", "dog"))
    check_same_classes(classes, trained_on(classes), FOLDER)
    check_same_classes(classes, None, FOLDER)


def test_the_first_few_other_classes_are_named() -> None:
    many = ClassMap(tuple(range(1000)), tuple(f"class{index}" for index in range(1000)))
    swapped = ClassMap(many.category_ids, tuple(reversed(many.names)))
    with pytest.raises(InputError) as caught:
        check_same_classes(swapped, trained_on(many), FOLDER)
    said = str(caught.value)
    assert "class 0 was 'class0', is 'class999'; class 1 was" in said
    assert "class 2 was" in said
    assert "; and 997 more. Resume with the same data, or start anew with init_from=run/last.pt" in said
    assert "class 3 " not in said
    assert "annotation" not in said


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (ClassMap((0,), ("cat",)), r"class 1 was 'dog', is absent\. Resume"),
        (ClassMap((0, 1, 2), ("cat", "dog", "owl")), r": class 2 was absent, is 'owl'\."),
        (ClassMap((0, 7), ("cat", "dog")), r": class 1 was 'dog', is 'dog' \(id 7\)\."),
        (ClassMap((0, 1), ("cat", "dog"), (True, False)), r": class 1 was 'dog', is 'dog' \(stuff\)\."),
    ],
)
def test_what_differs_in_a_class_is_said(found: ClassMap, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_same_classes(found, trained_on(ClassMap((0, 1), ("cat", "dog"))), FOLDER)
