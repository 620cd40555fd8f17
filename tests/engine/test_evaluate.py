"""Evaluation loop on toy batches, and the detection evaluator merged over ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detr_bf import distributed
from detr_bf.data.coco import read_annotations
from detr_bf.engine import DetectionEvaluator, Evaluation, EvaluationLoop
from detr_bf.engine.evaluate import EvaluationStopped
from detr_bf.evaluation import CocoEvaluator
from detr_bf.structures import Detections
from tests.engine.steps import Examples, examples
from tests.processes import run_together


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
