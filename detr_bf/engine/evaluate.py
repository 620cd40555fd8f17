"""The evaluation loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from detr_bf.evaluation import CocoEvaluator, PanopticEvaluator, Result
from detr_bf.postprocess import PanopticPostprocess, Postprocess
from detr_bf.progress import progress_bar
from detr_bf.structures import Batch, ClassMap, Detections, PanopticMap


@dataclass(frozen=True)
class PanopticEvaluation:
    """How panoptic maps are made, measured and kept.

    Args:
        make_evaluator: an empty evaluator.
        write: takes the maps of all images, one by one as they are made.
    """

    postprocess: PanopticPostprocess
    make_evaluator: Callable[[], PanopticEvaluator]
    write: Callable[[Iterable[PanopticMap]], None]


@dataclass
class Evaluation:
    """Measures a model on one split, as often as it is called.

    Args:
        make_batches: the batches of the split, every image once.
        make_evaluator: an empty evaluator.
        masks: measure the masks of the detections too.
        panoptic: for models with a mask head and data with panoptic annotations.
        detections: what the last call found, by image.
    """

    make_batches: Callable[[], Iterable[Batch]]
    make_evaluator: Callable[[], CocoEvaluator]
    postprocess: Postprocess
    class_map: ClassMap
    device: torch.device
    precision: torch.dtype = torch.float32
    masks: bool = False
    panoptic: PanopticEvaluation | None = None
    detections: list[Detections] = field(default_factory=list)

    @torch.no_grad()
    def __call__(self, model: nn.Module, after_batch: Callable[[], None] = lambda: None) -> Result:
        """Run the model in evaluation mode over all batches; ``after_batch`` may raise to stop."""
        boxes = self.make_evaluator()
        panoptic = self.panoptic.make_evaluator() if self.panoptic else None
        was_training = model.training
        model.eval()
        try:
            maps = self._run(model, boxes, panoptic, after_batch)
            if self.panoptic:
                self.panoptic.write(maps)
            else:
                deque(maps, maxlen=0)  # there are none, but the loop runs
        finally:
            model.train(was_training)
        self.detections = boxes.detections
        return Result(
            boxes.summarize(),
            boxes.summarize_masks() if self.masks else None,
            panoptic.summarize() if panoptic else None,
        )

    def _run(
        self,
        model: nn.Module,
        boxes: CocoEvaluator,
        panoptic: PanopticEvaluator | None,
        after_batch: Callable[[], None],
    ) -> Iterator[PanopticMap]:
        """Every batch through the model and into the evaluators; the panoptic maps, if any are made."""
        for batch in progress_bar(self.make_batches(), desc="evaluating", unit="batch", leave=False):
            moved = batch.to(self.device, non_blocking=True)
            with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
                outputs = model(moved)
            boxes.update(self.postprocess(outputs, moved.targets))
            if self.panoptic and panoptic:
                maps = self.panoptic.postprocess(outputs, moved.targets)
                panoptic.update(maps)
                yield from maps
            after_batch()
