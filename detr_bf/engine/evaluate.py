"""The evaluation loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from detr_bf import distributed
from detr_bf.data.loader import steady
from detr_bf.engine.step import TrainingBatch
from detr_bf.progress import progress_bar


class Measured(Protocol):
    """What an evaluation says; printed it is one line."""

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """All numbers by name."""

    @property
    def score(self) -> float:
        """What the best checkpoint is chosen by: the higher, the better."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries and numbers, ready for JSON."""


class EvaluationStopped(BaseException):
    """Some process was asked to stop; all of them raise it."""


@dataclass(frozen=True)
class EvaluationLoop:
    """A model over one split, as often as it is called; several processes share the images.

    Args:
        make_batches: first batch -> those of the split from there on that this process takes, ``num_batches`` in all;
            some process takes every image, once.
    """

    make_batches: Callable[[int], Iterator[Any]]
    num_batches: int
    device: torch.device
    precision: torch.dtype = torch.float32

    def __call__(self, model: nn.Module, should_stop: Callable[[], bool]) -> Iterator[tuple[Any, Any]]:
        """Every batch, on the device, with what the model makes of it in evaluation mode and without gradients.

        Raises:
            EvaluationStopped: ``should_stop`` said so after a batch, in some process.
        """
        was_training, stop = model.training, False
        model.eval()
        try:
            batches = steady(self.make_batches, 0)
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


class Evaluator(Protocol):
    """Collects what a process sees of a split; travels between processes."""

    def update(self, batch: Any, outputs: Any) -> None:
        """Take in a batch and what the model made of it."""

    def merge(self, other: Any) -> None:
        """Take in what another process has seen."""

    def summarize(self) -> Any:
        """What was measured, a :class:`Measured`."""


E = TypeVar("E", bound=Evaluator)


@dataclass
class Measurement(Generic[E]):
    """Measures a model with one evaluator.

    Args:
        make_evaluator: an empty one.
        evaluator: that of the last call, with what all processes saw; on the main process only.
    """

    loop: EvaluationLoop
    make_evaluator: Callable[[], E]
    evaluator: E | None = None

    def __call__(self, model: nn.Module, should_stop: Callable[[], bool] = lambda: False) -> Any:
        """All processes get the result.

        Raises:
            EvaluationStopped: as :class:`EvaluationLoop`.
        """
        own = self.make_evaluator()
        for batch, outputs in self.loop(model, should_stop):
            own.update(batch, outputs)
        everybody = distributed.gather_to_main(own)
        return distributed.run_on_main(lambda: self._summary(everybody or []))

    def _summary(self, everybody: list[E]) -> Any:
        self.evaluator, *others = everybody
        for other in others:
            self.evaluator.merge(other)
        return self.evaluator.summarize()
