"""The evaluation loop, and the evaluator of detectors: boxes, masks, panoptic maps.

Every task evaluates by the same protocol: each rank updates an :class:`Evaluator` with its batches, the main rank
merges those of all ranks and summarizes. Evaluators of classifiers are in :mod:`detr_bf.classification`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from detr_bf.common import distributed
from detr_bf.common.progress import progress_bar
from detr_bf.common.structures import Batch, ClassMap, Detections, Outputs, PanopticMap
from detr_bf.data.workers import restart_dead_workers
from detr_bf.engine.step import Criterion, TrainingBatch
from detr_bf.evaluation import CocoEvaluator, EncodedMap, PanopticEvaluator, Result, ScoreThresholds, merge_shards
from detr_bf.evaluation.error_types import never_found, update_never_found
from detr_bf.losses.postprocess import PanopticPostprocess, Postprocess

logger = logging.getLogger(__name__)


class EvaluationResult(Protocol):
    """Metrics of one evaluation; ``str()`` gives one line."""

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """All metrics by name."""

    @property
    def score(self) -> float:
        """The metric that chooses the best checkpoint; higher is better."""

    @property
    def thresholds(self) -> ScoreThresholds | None:
        """The scores from which the detections of a detector are shown; None for other models."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries and numbers, ready for JSON."""


class Evaluator(Protocol):
    """Collects the outputs of one rank for a split; picklable, because it is gathered to the main rank."""

    def update(self, batch: Any, outputs: Any) -> None:
        """Add a batch and the outputs of the model."""

    def merge(self, other: Any) -> None:
        """Add the images of another rank."""

    def summarize(self) -> Any:
        """Return the :class:`EvaluationResult` of all images."""


class EvaluationStopped(BaseException):
    """Raised on all ranks because one of them was asked to stop."""


@dataclass(frozen=True)
class EvaluationLoop:
    """Inference over one split, whose images the ranks share.

    Args:
        make_batches: index of the first batch -> the remaining batches of this rank, ``num_batches`` in all. Every
            image is in a batch of exactly one rank.
    """

    make_batches: Callable[[int], Iterator[Any]]
    num_batches: int
    device: torch.device
    precision: torch.dtype = torch.float32

    def __call__(self, model: nn.Module, should_stop: Callable[[], bool]) -> Iterator[tuple[Any, Any]]:
        """Yield every batch, on the device, with the outputs of the model in evaluation mode, without gradients.

        Raises:
            EvaluationStopped: ``should_stop`` was True after a batch, on any rank.
        """
        was_training, stop = model.training, False
        model.eval()
        try:
            batches = restart_dead_workers(self.make_batches, 0)
            for batch in progress_bar(batches, total=self.num_batches, desc="evaluating", unit="batch", leave=False):
                moved = batch.to(self.device, non_blocking=True)
                yield moved, self._outputs(model, moved)
                if stop := should_stop():
                    break
        finally:
            model.train(was_training)
        if any(distributed.all_gather_object(stop)):
            raise EvaluationStopped

    @torch.no_grad()
    def _outputs(self, model: nn.Module, batch: TrainingBatch) -> Any:
        with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            return model(batch.inputs)


E = TypeVar("E", bound=Evaluator)


@dataclass
class Evaluation(Generic[E]):
    """Evaluation of a model on one split, for every task.

    Args:
        evaluator: the evaluator of the last call, with the images of all ranks; on the main rank only.
    """

    loop: EvaluationLoop
    make_evaluator: Callable[[], E]
    evaluator: E | None = None

    def __call__(self, model: nn.Module, should_stop: Callable[[], bool] = lambda: False) -> Any:
        """Return the :class:`EvaluationResult` on every rank; a collective.

        Raises:
            EvaluationStopped: see :class:`EvaluationLoop`.
        """
        self.evaluator = None  # its results may be large
        evaluator = self.make_evaluator()
        with torch.no_grad():
            for batch, outputs in self.loop(model, should_stop):
                evaluator.update(batch, outputs)
        others = distributed.gather_to_main(None if distributed.is_main() else evaluator)

        def summarize() -> Any:
            self.evaluator = evaluator
            for other in (others or [])[1:]:
                evaluator.merge(other)
            return evaluator.summarize()

        return distributed.run_on_main(summarize)


@dataclass(frozen=True)
class PanopticEvaluation:
    """Parts of the evaluation of panoptic maps.

    Args:
        encode: encodes a map as a PNG with its JSON entry.
        write: writes the encoded maps of all images; called on the main rank.
    """

    postprocess: PanopticPostprocess
    make_evaluator: Callable[[], PanopticEvaluator]
    encode: Callable[[PanopticMap], EncodedMap]
    write: Callable[[Iterable[EncodedMap]], None]


class DetectionEvaluator:
    """Evaluator of a detector.

    Args:
        boxes: an empty evaluator of detections.
        masks: evaluate the masks of the detections too.
        panoptic: for models with a mask head and data with panoptic annotations.
        never_found: file with the objects that no evaluation of the run has found; None: none is kept.
        criterion: training loss, which must not communicate; None: no losses.
        num_skipped: images of the data that cannot be decoded and were left out.
    """

    def __init__(
        self,
        boxes: CocoEvaluator,
        postprocess: Postprocess,
        class_map: ClassMap,
        *,
        masks: bool = False,
        panoptic: PanopticEvaluation | None = None,
        never_found: Path | None = None,
        criterion: Criterion | None = None,
        num_skipped: int = 0,
    ) -> None:
        self.class_map, self._num_skipped = class_map, num_skipped
        self.result: Result | None = None  # the last summary
        self.missing: set[tuple[int, int]] = set()  # objects that no evaluation of the run has found
        self._never_found = never_found
        self.panoptic = panoptic
        self.boxes, self._postprocess, self._masks = boxes, postprocess, masks
        self._found: Sequence[Detections] = ()  # of a copy that was gathered from another rank
        self.quality = panoptic.make_evaluator() if panoptic else None
        self._maps: list[EncodedMap] = []
        self._criterion = criterion
        self._losses: list[tuple[int, dict[str, float]]] = []  # of each batch: images, total and unweighted terms

    @property
    def detections(self) -> list[Detections]:
        """The detections by image id."""
        return merge_shards([self.boxes.detections])

    def update(self, batch: Batch, outputs: Outputs) -> None:
        """Add a batch and the outputs of the detector."""
        self.boxes.update(self._postprocess(outputs, batch.targets))
        if self._criterion:
            report = self._criterion(outputs, batch.targets)
            values = {"loss": report.total} | {name: report.losses[name] for name in report.term_weights}
            numbers = torch.stack([*values.values()]).tolist()
            self._losses.append((len(batch.targets), dict(zip(values, numbers, strict=True))))
        if self.panoptic and self.quality:
            maps = self.panoptic.postprocess(outputs, batch.targets)
            self.quality.update(maps)
            self._maps += map(self.panoptic.encode, maps)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the results only: every rank has the ground truth and the postprocessing."""
        kept = {"_found": self.boxes.detections, "quality": self.quality, "_maps": self._maps}
        return {**kept, "_losses": self._losses}

    def merge(self, other: DetectionEvaluator) -> None:
        """Add the images of another rank."""
        self.boxes.update(other._found)
        self._maps += other._maps
        self._losses += other._losses
        if self.quality and other.quality:
            self.quality.merge(other.quality)

    def summarize(self) -> Result:
        """Return the metrics; write the panoptic maps and the objects that were never found."""
        if self.panoptic:
            self.panoptic.write(self._maps)
            self._maps = []
        self.result = Result(
            self.boxes.summarize(),
            self.boxes.summarize_masks() if self._masks else None,
            self.quality.summarize() if self.quality else None,
            _mean_losses(self._losses),
            self._num_skipped,
        )
        self.missing = set(never_found(self.boxes.errors))
        if self._never_found is not None:
            try:
                self.missing = update_never_found(self._never_found, self.boxes.errors)
            except OSError as error:
                logger.warning("%s cannot be written: %s", self._never_found, error)
        return self.result


def _mean_losses(batches: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float | None]:
    """Return the mean of every loss, weighted by the images of the batches, in any order; None if not finite."""
    images = sum(count for count, _ in batches)
    names = batches[0][1] if batches else ()
    means = {}
    for name in names:
        values = [count * losses[name] for count, losses in batches]
        means[name] = math.fsum(values) / images if all(map(math.isfinite, values)) else None
    return means
