"""The evaluation loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from detr_bf.evaluation import CocoEvaluator, CocoSummary
from detr_bf.postprocess import Postprocess
from detr_bf.progress import progress_bar
from detr_bf.structures import Batch, ClassMap, Detections


@dataclass
class Evaluation:
    """Measures a model on one split, as often as it is called.

    Args:
        make_batches: the batches of the split, every image once.
        make_evaluator: an empty evaluator.
        detections: what the last call found, by image.
    """

    make_batches: Callable[[], Iterable[Batch]]
    make_evaluator: Callable[[], CocoEvaluator]
    postprocess: Postprocess
    class_map: ClassMap
    device: torch.device
    precision: torch.dtype = torch.float32
    detections: list[Detections] = field(default_factory=list)

    @torch.no_grad()
    def __call__(self, model: nn.Module, after_batch: Callable[[], None] = lambda: None) -> CocoSummary:
        """Run the model in evaluation mode over all batches; ``after_batch`` may raise to stop."""
        evaluator = self.make_evaluator()
        was_training = model.training
        model.eval()
        try:
            for batch in progress_bar(self.make_batches(), desc="evaluating", unit="batch", leave=False):
                moved = batch.to(self.device, non_blocking=True)
                with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
                    outputs = model(moved)
                evaluator.update(self.postprocess(outputs, moved.targets))
                after_batch()
        finally:
            model.train(was_training)
        self.detections = evaluator.detections
        return evaluator.summarize()
