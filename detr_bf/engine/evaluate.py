"""The evaluation loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from detr_bf import distributed
from detr_bf.data.loader import steady
from detr_bf.evaluation import CocoEvaluator, EncodedMap, PanopticEvaluator, Result, merge_shards
from detr_bf.postprocess import PanopticPostprocess, Postprocess
from detr_bf.progress import progress_bar
from detr_bf.structures import Batch, ClassMap, Detections, PanopticMap


class EvaluationStopped(BaseException):
    """Some process was asked to stop; all of them raise it."""


@dataclass(frozen=True)
class PanopticEvaluation:
    """How panoptic maps are made, measured and kept.

    Args:
        make_evaluator: an empty evaluator.
        encode: a map as it is sent and written.
        write: takes the maps of all images, one by one as they are made.
    """

    postprocess: PanopticPostprocess
    make_evaluator: Callable[[], PanopticEvaluator]
    encode: Callable[[PanopticMap], EncodedMap]
    write: Callable[[Iterable[EncodedMap]], None]


@dataclass
class Evaluation:
    """Measures a model on one split, as often as it is called; several processes share the images.

    Args:
        make_batches: first batch -> those of the split from there on that this process takes, ``num_batches`` in all;
            some process takes every image, once.
        make_evaluator: an empty evaluator.
        masks: measure the masks of the detections too.
        panoptic: for models with a mask head and data with panoptic annotations.
        detections: what the last call found, ordered by image id; on the main process only.
    """

    make_batches: Callable[[int], Iterator[Batch]]
    num_batches: int
    make_evaluator: Callable[[], CocoEvaluator]
    postprocess: Postprocess
    class_map: ClassMap
    device: torch.device
    precision: torch.dtype = torch.float32
    masks: bool = False
    panoptic: PanopticEvaluation | None = None
    detections: list[Detections] = field(default_factory=list)

    @torch.no_grad()
    def __call__(self, model: nn.Module, should_stop: Callable[[], bool] = lambda: False) -> Result:
        """Run the model in evaluation mode over all batches; all processes get the result.

        Raises:
            EvaluationStopped: ``should_stop`` said so after a batch.
        """
        boxes = self.make_evaluator()
        panoptic = self.panoptic.make_evaluator() if self.panoptic else None
        was_training = model.training
        model.eval()
        try:
            maps = self._maps_of_all(self._run(model, boxes, panoptic, should_stop))
            if self.panoptic and distributed.is_main():
                self.panoptic.write(maps)
            else:
                deque(maps, maxlen=0)  # there are none to write, but the loop runs
        finally:
            model.train(was_training)
        others = distributed.gathered((boxes.detections, panoptic))
        return distributed.on_main(lambda: self._summary(boxes, panoptic, others or []))

    def _summary(
        self,
        boxes: CocoEvaluator,
        panoptic: PanopticEvaluator | None,
        shards: list[tuple[list[Detections], PanopticEvaluator | None]],
    ) -> Result:
        """What this process, the first, and the others have seen, measured as one."""
        for detections, their_panoptic in shards[1:]:
            boxes.update(detections)
            if panoptic and their_panoptic:
                panoptic.merge(their_panoptic)
        self.detections = merge_shards(detections for detections, _ in shards)
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
        should_stop: Callable[[], bool],
    ) -> Iterator[EncodedMap]:
        """Every batch through the model and into the evaluators; the panoptic maps, if any are made."""
        stop = False
        batches = steady(self.make_batches, 0)
        for batch in progress_bar(batches, total=self.num_batches, desc="evaluating", unit="batch", leave=False):
            moved = batch.to(self.device, non_blocking=True)
            with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
                outputs = model(moved)
            boxes.update(self.postprocess(outputs, moved.targets))
            if self.panoptic and panoptic:
                maps = self.panoptic.postprocess(outputs, moved.targets)
                panoptic.update(maps)
                yield from map(self.panoptic.encode, maps)
            if stop := should_stop():
                break
        if any(distributed.known_to_all(stop)):
            raise EvaluationStopped

    @staticmethod
    def _maps_of_all(own: Iterator[EncodedMap]) -> Iterator[EncodedMap]:
        """On the main process its own maps as they come, then those of the others; on the others nothing."""
        if distributed.is_main():
            yield from own
            nothing: list[EncodedMap] = []
            for maps in (distributed.gathered(nothing) or [])[1:]:
                yield from maps
        else:
            distributed.gathered(list(own))
