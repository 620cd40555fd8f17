from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from detr_bf.assembly import build_model
from detr_bf.assembly.data import _num_tokens, check_enough_tokens
from detr_bf.assembly.training import (
    RUN_STEPS,
    check_same_classes,
    learning_rate,
    metrics_log,
    resolved,
    warn_of_slow_average,
)
from detr_bf.classification.config import ClassifierConfig
from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.config import DetectionConfig, config_to_dict, load_config
from detr_bf.data.coco import CocoDetection
from detr_bf.engine import Checkpoint, RunFolder
from detr_bf.engine.state import AveragedWeights
from detr_bf.tasks.detection import DetectionTask
from tests.checkpoints import training

FOLDER = RunFolder(Path("run"))


def classifier(*settings: str) -> ClassifierConfig:
    return load_config(None, settings, task="classification")


def trained_on(classes: ClassMap) -> Checkpoint:
    return Checkpoint({}, classes.to_dict(), {})


@pytest.mark.parametrize(("epochs", "kept"), [(1, 0), (5, 2)])
def test_a_warm_up_longer_than_the_run_becomes_a_tenth_of_it(
    epochs: int, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        rate = learning_rate(classifier(f"train.epochs={epochs}"), 4)
    assert rate.warmup_steps == kept
    said = f"optimizer.warmup_epochs=5: the warm-up of 20 steps would not be over when train.epochs={epochs} are, after"
    assert said in caplog.text
    assert f"a tenth of the run, {kept} steps" in caplog.text
    assert rate(4 * epochs - 1) < 1, "the cosine schedule decays"
    masked = learning_rate(load_config(None, [f"train.epochs={epochs}"], task="masked_autoencoding"), 4)
    assert masked.warmup_steps == kept


def test_a_warm_up_in_steps_is_told_in_steps(caplog: pytest.LogCaptureFixture) -> None:
    steps = ("optimizer.warmup_steps=8", "train.epochs=2", "optimizer.drop_epochs=[1]")
    with caplog.at_level(logging.WARNING):
        assert learning_rate(load_config(None, steps), 5)(8) == pytest.approx(0.1)
    assert not caplog.text, "8 of 10 steps are the user's choice"
    with caplog.at_level(logging.WARNING):
        assert learning_rate(load_config(None, [*steps, "train.accumulate=2"]), 8).warmup_steps == 0
    assert "optimizer.warmup_steps=8: the warm-up of 8 steps" in caplog.text
    recipe = ("optimizer.warmup_steps=1000", "train.epochs=10", "optimizer.drop_epochs=[9]")
    assert learning_rate(load_config(None, recipe), 30).warmup_steps == 30


def test_a_longer_run_and_one_that_is_cut_short_for_trying_out_keep_their_warm_up() -> None:
    assert learning_rate(classifier("train.epochs=6"), 4)(20) == 1
    assert learning_rate(classifier("train.epochs=1", "train.max_steps=4"), 4).warmup_steps == 0


@pytest.mark.parametrize("schedule", ["step", "cosine"])
@pytest.mark.parametrize("epochs", [1, 6])
def test_a_run_that_is_cut_short_has_the_schedule_of_the_whole_run(schedule: str, epochs: int) -> None:
    settings = (f"train.epochs={epochs}", f"optimizer.schedule={schedule}", "optimizer.drop_epochs=[3]")
    whole, cut = (learning_rate(classifier(*settings, *more), 4) for more in ((), ("train.max_steps=3",)))
    assert cut == whole


@pytest.mark.parametrize("warmup", [0, 50])
def test_averaged_weights_slower_than_the_run_are_told(warmup: int, caplog: pytest.LogCaptureFixture) -> None:
    """The share of the first weights is that of an average of scalars, 1 at the first step and 0 at the others."""
    on = ("train.ema.enabled=true", f"train.ema.warmup_steps={warmup}", "train.ema.decay=0.98", "train.epochs=10")
    config = load_config(None, on, task="classification")
    weight = torch.nn.Linear(1, 1, bias=False)
    averaged = AveragedWeights(weight, 0.98, warmup)
    for step in range(50):
        torch.nn.init.constant_(weight.weight, float(step == 0))
        averaged.update_parameters(weight)
    kept = 100 * averaged.module.weight.item()
    with caplog.at_level(logging.WARNING):
        warn_of_slow_average(config, 50)
    if warmup:
        assert kept < 5
        assert not caplog.text, "the first steps are forgotten quickly"
        return
    assert "ema-too-slow: averaged weights that hold more than 5% of the weights after the first" in caplog.text
    assert f"train.ema.decay=0.98 in 50 steps: {kept:.0f}%. Set train.ema.decay=auto, here 0.88," in caplog.text
    caplog.clear()
    for settings in (["train.ema.decay=0.88"], ["train.max_steps=20"], ["train.ema.enabled=false"]):
        warn_of_slow_average(load_config(None, [*on, *settings], task="classification"), 50)
    for settings in (["train.ema.decay=0"], ["train.ema.decay=0.98"]):
        warn_of_slow_average(load_config(None, [*on, *settings], task="classification"), 1)
    assert not caplog.text


@pytest.mark.parametrize("start", [None, "old.pt"])
def test_a_resumed_run_keeps_the_start_that_chose_its_learning_rate(
    start: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    settings = [f"init_from={start or 'null'}", "model.name=rtdetr", "optimizer.lr=auto"]
    stored = Checkpoint({}, {}, config_to_dict(load_config(None, settings, task="detection")))
    for given in ("init_from=null", f"init_from={start or 'null'}", "init_from=new.pt"):
        task = DetectionTask(load_config(None, [*settings, given], task="detection"))
        with caplog.at_level(logging.WARNING):
            task.adopt_settings(stored)
        assert resolved(task.config, RUN_STEPS).optimizer.lr == (1e-4 if start else 4e-4)
        assert ("init_from=new.pt is not used" in caplog.text) == (given == "init_from=new.pt")


def test_a_cosine_ends_at_the_least_learning_rate() -> None:
    rate = learning_rate(classifier("optimizer.lr=0.01", "optimizer.min_lr=0.001", "train.epochs=9"), 4)
    assert rate(36) == pytest.approx(0.1)
    still = classifier("optimizer.lr=0", "optimizer.min_lr=0", "train.epochs=9")
    assert learning_rate(still, 4)(30) >= 0


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
    config: DetectionConfig = load_config(None, settings)
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
    assert " and 997 more. Resume with the same data, or start anew with init_from=run/last.pt" in said
    assert "class 3 " not in said
    assert "annotation" not in said


def test_a_checkpoint_without_training_state_cannot_be_resumed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("kept")
    with pytest.raises(InputError, match=r"last\.pt holds only weights .*init_from="):
        metrics_log(DetectionConfig(), folder, trained_on(ClassMap((0,), ("cat",))))
    assert folder.metrics.read_text() == "kept"
    broken = Checkpoint({"a": torch.tensor(torch.nan)}, {}, {}, training=training())
    with pytest.raises(InputError, match=r"last\.pt holds NaN or infinite weights"):
        metrics_log(DetectionConfig(), folder, broken)
    assert folder.metrics.read_text() == "kept"


TWO_STAGE = (
    "model.name=deformable_detr",
    "model.deformable.two_stage=true",
    "model.deformable.box_refine=true",
    "model.backbone.strides=[8,16]",
    "model.extra_levels=1",
    "data.transforms.short_sides=[96,64]",
    "data.transforms.eval_short_side=64",
    "data.transforms.random_crop=0",
)


def sized(*sizes: tuple[int, int] | None) -> CocoDetection:
    return cast("CocoDetection", SimpleNamespace(sizes=sizes))


@pytest.mark.parametrize("split", ["train", "val"])
def test_too_few_tokens_for_the_queries_of_two_stages_are_refused(split: str) -> None:
    data = sized((480, 640), (640, 1200), None)  # 8 x 12 + 4 x 6 + 2 x 3 tokens of the first image
    few = load_config(None, [*TWO_STAGE, "model.num_queries=300"])
    with pytest.raises(InputError) as caught:
        check_enough_tokens(few, data, split)
    for part in ("model.num_queries=300", f"an image of 640 x 480 of data.{split}, resized to 96 x 64", "has only 126"):
        assert part in str(caught.value)
    check_enough_tokens(load_config(None, [*TWO_STAGE, "model.num_queries=126"]), data, split)


@pytest.mark.parametrize("name", ["rtdetr", "rtdetrv2", "dfine"])
def test_too_few_tokens_for_rtdetr_are_refused(name: str) -> None:
    """Its levels are those of the backbone: extra_levels adds none."""
    settings = (*TWO_STAGE, f"model.name={name}", "model.backbone.strides=[8,16,32]")
    with pytest.raises(InputError, match=f"model.name={name} takes model.num_queries=300 queries.*has only 126"):
        check_enough_tokens(load_config(None, [*settings, "model.num_queries=300"]), sized((480, 640)), "train")
    check_enough_tokens(load_config(None, [*settings, "model.num_queries=126"]), sized((480, 640)), "train")


def test_a_square_crop_may_have_the_fewest_tokens() -> None:
    crops = load_config(None, [*TWO_STAGE, "model.num_queries=100", "data.transforms.random_crop=0.5"])
    check_enough_tokens(crops, sized((640, 960)), "val")
    with pytest.raises(InputError, match=r"a square crop of data\.train, resized to 64 x 64, has only 84"):
        check_enough_tokens(crops, sized((640, 960)), "train")


def test_squares_batch_sides_and_augmentation_may_have_the_fewest_tokens() -> None:
    squares = load_config(None, [*TWO_STAGE, "data.transforms.square=128", "data.batch_sides=[64,96]"])
    with pytest.raises(InputError, match=r"an image of data\.train, resized to 64 x 64, has only 84.*raise .*square"):
        check_enough_tokens(squares, sized((640, 960)), "train")
    check_enough_tokens(squares, sized((640, 960)), "val")
    augmented = [*TWO_STAGE, "data.transforms.random_crop=0", "model.num_queries=126"]
    check_enough_tokens(load_config(None, augmented), sized((480, 640)), "train")
    for setting in ("data.augment.mosaic=0.5", "data.augment.iou_crop=0.5"):
        with pytest.raises(InputError, match=r"a square crop or mosaic of data\.train, resized to 64 x 64"):
            check_enough_tokens(load_config(None, [*augmented, setting]), sized((480, 640)), "train")


def test_flat_cosine_counts_epochs() -> None:
    settings = [
        "optimizer.schedule=flat_cosine",
        "optimizer.flat_epochs=4",
        "optimizer.final_epochs=2",
        "train.epochs=10",
    ]
    rate = learning_rate(load_config(None, settings), 5)
    assert [rate(step) for step in (0, 19, 20)] == [1, 1, 1]
    assert rate(30) == pytest.approx(0.75)
    assert [rate(step) for step in (40, 49)] == pytest.approx([0.5, 0.5])
    trial = learning_rate(load_config(None, [*settings, "train.max_steps=25"]), 5)
    assert [trial(step) for step in range(50)] == [rate(step) for step in range(50)]
    with pytest.raises(InputError, match=r"leave no epoch for the cosine in a run of train\.epochs=6"):
        load_config(None, [*settings, "train.epochs=6"])


def test_one_stage_and_unknown_sizes_are_not_refused() -> None:
    check_enough_tokens(load_config(None, [*TWO_STAGE, "model.deformable.two_stage=false"]), sized((1, 1)), "train")
    check_enough_tokens(load_config(None, TWO_STAGE), sized(None), "train")


@pytest.mark.parametrize("size", [(64, 96), (65, 70)])
def test_tokens_are_counted_as_the_detector_makes_them(size: tuple[int, int]) -> None:
    settings = ("model.backbone.name=resnet18", "model.backbone.weights=none", "model.hidden_dim=32")
    config = load_config(None, [*TWO_STAGE, *settings, "model.num_queries=10", "batch_former.enabled=false"])
    model = build_model(config, 2)
    images, mask = torch.zeros(1, 3, *size, dtype=torch.uint8), torch.zeros(1, *size, dtype=torch.bool)
    with torch.no_grad():
        tokens = model.tokens(model.backbone(images, mask), mask).tokens
    assert tokens.shape[1] == _num_tokens(config, size)


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
