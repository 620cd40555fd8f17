"""Evaluation loop on toy batches, and the detection evaluator merged over ranks."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detr_bf.common import distributed
from detr_bf.common.structures import Detections, Outputs, Target
from detr_bf.config import load_config
from detr_bf.data.coco import read_annotations
from detr_bf.engine import DetectionEvaluator, Evaluation, EvaluationLoop, RunFolder
from detr_bf.engine.evaluate import EvaluationStopped
from detr_bf.evaluation import CocoEvaluator, Result
from detr_bf.losses import LossReport
from detr_bf.tasks import task_of
from tests.engine.steps import Examples, examples
from tests.processes import run_together
from tests.references.set_criterion import set_losses


class Sums:
    """Evaluator that adds up outputs and counts batches."""

    def __init__(self) -> None:
        self.total, self.batches = 0.0, 0

    def update(self, batch: Examples, outputs: Tensor) -> None:
        assert not outputs.requires_grad
        self.total += outputs.sum().item()
        self.batches += 1

    def merge(self, other: Sums) -> None:
        self.total += other.total
        self.batches += other.batches

    def summarize(self) -> tuple[float, int]:
        return self.total, self.batches


def evaluation(num_batches: int) -> Evaluation[Sums]:
    def make_batches(start: int) -> Iterator[Examples]:
        return (examples(distributed.rank(), number) for number in range(start, num_batches))

    return Evaluation(EvaluationLoop(make_batches, num_batches, torch.device("cpu")), Sums)


def expected(*batches: tuple[int, int]) -> tuple[Any, int]:
    total = sum(examples(rank, number).inputs.sum().item() for rank, number in batches)
    return pytest.approx(total, abs=1e-4), len(batches)


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        return x


def test_the_model_is_evaluated_on_every_batch_and_left_in_its_mode() -> None:
    evaluate, model = evaluation(3), Same().train()
    assert evaluate(model) == expected((0, 0), (0, 1), (0, 2))
    assert model.training
    assert evaluate.evaluator is not None
    assert evaluate.evaluator.batches == 3


def on_a_rank() -> tuple[Any, bool]:
    evaluate = evaluation(1 + distributed.rank())
    return evaluate(Same()), evaluate.evaluator is not None


def test_every_rank_gets_the_result_of_all_images() -> None:
    (first, kept), (second, also_kept) = run_together(2, on_a_rank)
    assert first == second == expected((0, 0), (1, 0), (1, 1))
    assert (kept, also_kept) == (True, False), "the evaluator stays on the main rank"


def stopped_on_one_rank() -> str:
    try:
        evaluation(2)(Same(), lambda: distributed.rank() == 1)
    except EvaluationStopped:
        return "stopped"
    return "finished"


def test_a_request_to_stop_on_one_rank_stops_all() -> None:
    assert run_together(2, stopped_on_one_rank) == ["stopped", "stopped"]


def test_detections_of_two_ranks_are_merged(coco_folder: Callable[..., SimpleNamespace]) -> None:
    data = coco_folder(num_images=4)
    content = read_annotations(data.annotations)
    found = [
        Detections(image["id"], torch.tensor([[1.0, 1.0, 9.0, 9.0]]), torch.tensor([0.5]), torch.tensor([0]))
        for image in content.images
    ]
    batch = SimpleNamespace(targets=())

    def evaluator() -> DetectionEvaluator:
        boxes = CocoEvaluator(data.annotations, content.class_map)
        return DetectionEvaluator(boxes, lambda outputs, targets: outputs, content.class_map)  # type: ignore[arg-type]

    whole, first, second = evaluator(), evaluator(), evaluator()
    whole.update(batch, found)  # type: ignore[arg-type]
    first.update(batch, found[2:])  # type: ignore[arg-type]
    second.update(batch, found[:2])  # type: ignore[arg-type]
    first.merge(pickle.loads(pickle.dumps(second)))
    assert [each.image_id for each in first.detections] == sorted(each.image_id for each in found)
    assert first.summarize().to_dict() == whole.summarize().to_dict()


WEIGHTS = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
SETTINGS = (
    "batch_former.enabled=true",
    *("model.hidden_dim=32", "model.heads=2", "model.encoder_layers=1", "model.decoder_layers=2"),
    *("model.feedforward_dim=32", "model.num_queries=6", "model.backbone.name=resnet18", "model.backbone.weights=none"),
    *("model.backbone.strides=[8]", "data.transforms.eval_short_side=32", "data.workers=0", "eval.batch_size=2"),
    *("batch_former.heads=2", "eval.engine=pycocotools"),
)


@pytest.fixture
def settings(coco_folder: Callable[..., SimpleNamespace], tmp_path: Path) -> list[str]:
    """Return the settings of a tiny detector; of five validation images one has no object, one only a crowd."""
    val = coco_folder(num_images=5, name="val")
    val.content["annotations"] = [each for each in val.content["annotations"] if each["image_id"] != 2]
    for annotation in val.content["annotations"]:
        annotation["iscrowd"] = int(annotation["image_id"] == 3)
    val.save()
    keys = ("images", "annotations")
    paths = [f"data.{split}.{key}={getattr(val, key)}" for split in ("train", "val") for key in keys]
    return [*SETTINGS, *paths, f"output_dir={tmp_path}"]


def evaluated(settings: list[str], folder: Path, *more: str) -> tuple[Result, list[tuple[Outputs, list[Target]]]]:
    """Return the result of a tiny detector, the same at every call, and the outputs and targets of this rank."""
    config = load_config(None, [*settings, *more])
    task, seen = task_of(config), []
    torch.manual_seed(0)
    model = task.build_model(3)
    evaluate = task.build_evaluation(task.load_data().class_map, RunFolder(folder))
    model.register_forward_hook(lambda _, inputs, outputs: seen.append((outputs, list(inputs[0].targets))))
    before, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    result = evaluate(model)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return result, seen


def test_losses_are_those_of_the_batches_weighted_by_their_images(settings: list[str], tmp_path: Path) -> None:
    result, batches = evaluated(settings, tmp_path)
    assert [[len(target.labels) for target in targets] for _, targets in batches] == [[2, 0], [0, 2], [2]]
    expected = dict.fromkeys((*WEIGHTS, "loss"), 0.0)
    for outputs, targets in batches:
        (layers,) = set_losses(outputs, targets, 0.1)
        for name, weight in WEIGHTS.items():
            expected[name] += len(targets) / 5 * layers[-1][name].item()
            expected["loss"] += len(targets) / 5 * weight * sum(layer[name].item() for layer in layers)
    assert result.losses == pytest.approx(expected, rel=1e-5)
    assert result.metrics == {**result.boxes.metrics, **result.losses}
    assert Result.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_losses_change_nothing_else_and_can_be_left_out(settings: list[str], tmp_path: Path) -> None:
    (on, first), (off, second) = (evaluated(settings, tmp_path, f"eval.loss={each}") for each in ("true", "false"))
    assert on.boxes == off.boxes
    assert off.losses == {}
    assert off.metrics == off.boxes.metrics
    names = [[[target.file_name for target in targets] for _, targets in batches] for batches in (first, second)]
    assert names[0] == names[1]
    assert all(torch.equal(a.boxes, b.boxes) for (a, _), (b, _) in zip(first, second, strict=True))


def on_two_ranks(settings: list[str], folder: Path) -> tuple[dict[str, Any], int]:
    result, batches = evaluated(settings, folder)
    return result.to_dict(), len(batches)


@pytest.mark.parametrize("loss", ["cross_entropy", "focal"])
def test_two_ranks_with_different_numbers_of_batches_have_the_losses_of_one(
    settings: list[str], tmp_path: Path, loss: str
) -> None:
    settings = [*settings, f"loss.classification={loss}"]
    (first, most), (second, least) = run_together(2, on_two_ranks, settings, tmp_path)
    assert (most, least) == (2, 1)
    alone = evaluated(settings, tmp_path)[0].to_dict()
    assert first == second == {**alone, "losses": pytest.approx(alone["losses"], rel=1e-5)}


def test_masks_have_losses(panoptic_folder: Callable[..., SimpleNamespace], tmp_path: Path) -> None:
    """The masks are those of the training targets; boxes and maps do not depend on them."""
    val = panoptic_folder(3)
    keys = ("images", "annotations", "panoptic")
    paths = [f"data.{split}.{key}={getattr(val, key)}" for split in ("train", "val") for key in keys]
    settings = [*SETTINGS, *paths, "model.masks=true", "eval.batch_size=1", f"output_dir={tmp_path}"]
    result, batches = evaluated(settings, tmp_path)
    assert {"loss_mask", "loss_dice"} <= result.losses.keys()
    criterion = task_of(load_config(None, settings)).build_criterion(nn.Identity())
    reports = [criterion(outputs, targets) for outputs, targets in batches]
    for name in ("loss_mask", "loss_dice"):
        assert result.losses[name] == pytest.approx(sum(report.losses[name].item() for report in reports) / 3)
    assert result.losses["loss"] == pytest.approx(sum(report.total.item() for report in reports) / 3)
    without, _ = evaluated(settings, tmp_path, "eval.loss=false")
    assert (without.boxes, without.masks, without.panoptic) == (result.boxes, result.masks, result.panoptic)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_none(coco_folder: Callable[..., SimpleNamespace], value: float) -> None:
    data = coco_folder(num_images=2)
    classes = read_annotations(data.annotations).class_map

    def criterion(outputs: Any, targets: Any) -> LossReport:
        return LossReport(
            {"loss_ce": torch.tensor(1.0), "loss_bbox": torch.tensor(value)}, {"loss_ce": 1, "loss_bbox": 1}
        )

    boxes = CocoEvaluator(data.annotations, classes)
    evaluator = DetectionEvaluator(boxes, lambda outputs, targets: outputs, classes, criterion=criterion)  # type: ignore[arg-type]
    nothing = torch.empty(0)
    for image_id in (1, 2):
        found = [Detections(image_id, torch.empty(0, 4), nothing, nothing.long())]
        evaluator.update(SimpleNamespace(targets=(image_id,)), found)  # type: ignore[arg-type]
    result = evaluator.summarize()
    assert result.losses == {"loss": None, "loss_ce": 1.0, "loss_bbox": None}
    assert json.dumps(result.to_dict(), allow_nan=False)
