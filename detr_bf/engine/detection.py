"""What is measured of a detector: boxes, masks, panoptic maps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from detr_bf import distributed
from detr_bf.engine.evaluate import EvaluationLoop
from detr_bf.evaluation import CocoEvaluator, EncodedMap, PanopticEvaluator, Result, merge_shards
from detr_bf.postprocess import PanopticPostprocess, Postprocess
from detr_bf.structures import ClassMap, Detections, PanopticMap


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
    """Measures a detector on one split, as often as it is called; several processes share the images.

    Args:
        make_evaluator: an empty evaluator.
        masks: measure the masks of the detections too.
        panoptic: for models with a mask head and data with panoptic annotations.
        detections: what the last call found, ordered by image id; on the main process only.
    """

    loop: EvaluationLoop
    make_evaluator: Callable[[], CocoEvaluator]
    postprocess: Postprocess
    class_map: ClassMap
    masks: bool = False
    panoptic: PanopticEvaluation | None = None
    detections: list[Detections] = field(default_factory=list)

    def __call__(self, model: nn.Module, should_stop: Callable[[], bool] = lambda: False) -> Result:
        """Run the model in evaluation mode over all batches; all processes get the result.

        Raises:
            EvaluationStopped: as :class:`EvaluationLoop`.
        """
        boxes = self.make_evaluator()
        panoptic = self.panoptic.make_evaluator() if self.panoptic else None
        maps = self._maps_of_all(self._run(model, boxes, panoptic, should_stop))
        if self.panoptic and distributed.is_main():
            self.panoptic.write(maps)
        else:
            deque(maps, maxlen=0)  # there are none to write, but the loop runs
        others = distributed.gather_to_main((boxes.detections, panoptic))
        return distributed.run_on_main(lambda: self._summary(boxes, panoptic, others or []))

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

    @torch.no_grad()
    def _run(
        self,
        model: nn.Module,
        boxes: CocoEvaluator,
        panoptic: PanopticEvaluator | None,
        should_stop: Callable[[], bool],
    ) -> Iterator[EncodedMap]:
        """Every batch through the model and into the evaluators; the panoptic maps, if any are made."""
        for batch, outputs in self.loop(model, should_stop):
            boxes.update(self.postprocess(outputs, batch.targets))
            if self.panoptic and panoptic:
                maps = self.panoptic.postprocess(outputs, batch.targets)
                panoptic.update(maps)
                yield from map(self.panoptic.encode, maps)

    @staticmethod
    def _maps_of_all(own: Iterator[EncodedMap]) -> Iterator[EncodedMap]:
        """On the main process its own maps as they come, then those of the others; on the others nothing."""
        if distributed.is_main():
            yield from own
            nothing: list[EncodedMap] = []
            for maps in (distributed.gather_to_main(nothing) or [])[1:]:
                yield from maps
        else:
            distributed.gather_to_main(list(own))
