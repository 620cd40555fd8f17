"""One training step under DDP, the flags reduced after each batch, and deferred signals."""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from detr_bf.batchformer import BatchFormerV2, InsertedBatchFormer
from detr_bf.common import distributed
from detr_bf.common.devices import tensor_on
from detr_bf.losses import LossReport

SAME_SIGNAL_SECONDS = 2.0  # a terminal or scheduler and torchrun may each send the same request to stop
B = TypeVar("B")


class TrainingBatch(Protocol):
    """A batch as the engine uses it."""

    @property
    def inputs(self) -> Any:
        """Argument of the model."""

    @property
    def targets(self) -> Any:
        """Second argument of the criterion."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the images in messages."""

    @property
    def replaced(self) -> tuple[str, ...]:
        """Errors of unreadable images that others replace, one message each."""

    def not_finite(self) -> list[str]:
        """Return the names of the images whose data hold infinity or NaN."""

    def to(self: B, device: torch.device | str, non_blocking: bool = False) -> B:
        """Return a copy on another device."""

    def to_dict(self) -> dict[str, Any]:
        """Return tensors and plain values, for a capture of the step."""

    @classmethod
    def from_dict(cls: type[B], content: Mapping[str, Any]) -> B:
        """Inverse of :meth:`to_dict`; any exception means damage."""

    def fits(self, num_classes: int) -> bool:
        """Return True if the tensors have their documented shapes and types, and labels are below ``num_classes``."""


@runtime_checkable
class ModelWithSteps(Protocol):
    """A model that changes its own state once in an optimizer step, such as a momentum encoder."""

    def begin_step(self, share: float) -> None:
        """Begin an optimizer step; ``share`` of the run is done, from 0 to 1."""


Criterion = Callable[[Any, Any], LossReport]  # (what the model returns, the targets of the batch)


class TrainingStep(nn.Module):
    """The model under autocast and its losses outside of it, as one module.

    DistributedDataParallel must see every use of a parameter, and the losses use the mask head.

    Args:
        criterion: if it is a module, its parameters are in the model as well.
    """

    def __init__(self, model: nn.Module, criterion: Criterion, device: torch.device, precision: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion
        self.device = device
        self.precision = precision
        self.epoch = 0
        self.logs_attention = False  # in the next forward pass, of batch attention with ``log_attention``

    def begin_epoch(self, epoch: int) -> None:
        """Announce an epoch, counted from 0, to the modules that depend on it."""
        self.epoch = epoch
        for module in self.model.modules():
            if isinstance(module, InsertedBatchFormer):
                module.begin_epoch(epoch)

    def begin_step(self, share: float) -> None:
        """Announce an optimizer step, before its first batch, to a model with a method ``begin_step``.

        Args:
            share: of the run that is done, from 0 to 1.
        """
        if isinstance(self.model, ModelWithSteps):
            self.model.begin_step(share)

    def forward(self, batch: TrainingBatch) -> LossReport:
        """Return the losses of a batch, which may be on any device."""
        moved = batch.to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            outputs, logged = (
                self._with_statistics(moved.inputs) if self.logs_attention else (self.model(moved.inputs), {})
            )
        report = self.criterion(outputs, moved.targets)
        report.logged.update(logged)
        return report

    def _with_statistics(self, inputs: Any) -> tuple[Any, dict[str, Tensor]]:
        """Return the outputs of the model, and the statistics of batch attention with ``log_attention``."""
        logged = [each for each in self.model.modules() if isinstance(each, BatchFormerV2) and each.log_attention]
        if not logged:
            return self.model(inputs), {}
        from detr_bf.batchformer.inspection import SAMPLED_POSITIONS, recorded, statistics  # a rare setting

        with ExitStack() as stack:
            recordings = [stack.enter_context(recorded(each, SAMPLED_POSITIONS)) for each in logged]
            outputs = self.model(inputs)
        return outputs, {name: value for each in recordings for name, value in statistics(each).items()}


def wrap_ddp(step: TrainingStep, *, unused_parameters: bool = False) -> nn.Module:
    """Wrap the step in DistributedDataParallel; with one rank return the step itself.

    Args:
        unused_parameters: some parameters get no gradient in a step; costs a search through the graph.
    """
    if distributed.world_size() == 1:
        return step
    # gradients of 1 x 1 convolutions have strides of their own, and torch warns of them at every start
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    return DistributedDataParallel(step, gradient_as_bucket_view=True, find_unused_parameters=unused_parameters)


@contextmanager
def sync_gradients(step: nn.Module, enabled: bool) -> Iterator[None]:
    """Accumulate gradients within the block, and reduce them over the ranks only if ``enabled``."""
    if enabled or not isinstance(step, DistributedDataParallel):
        yield
        return
    with step.no_sync():
        yield


class ReducedFlags(NamedTuple):
    """Sums over all ranks after a batch."""

    loss: float  # of the ranks whose loss is finite
    not_finite: float  # ranks whose loss is not finite
    stop: float  # ranks that received a signal
    save: float  # 1 if the main rank wants a checkpoint
    replaced: float  # unreadable images
    seconds: float = 0.0  # of training, by the clock of the main rank


def reduce_flags(loss: Tensor, *, stop: bool, save: bool, replaced: int, seconds: float = 0.0) -> Tensor:
    """All-reduce loss and flags so that all ranks branch alike: the fields of ReducedFlags, float64, on the device."""
    value = loss.detach().double()
    finite = value.isfinite()
    flags = tensor_on(loss.device, [stop, save, replaced, seconds], torch.float64)
    losses = torch.stack([torch.where(finite, value, 0.0), (~finite).double()])
    return distributed.all_reduce_sum(torch.cat([losses, flags]))


def nan_unless_finite(loss: Tensor, flags: Tensor) -> Tensor:
    """Return the loss, or NaN if that of any rank is not finite, so that no gradient is; ``flags`` are reduced."""
    not_finite: Any = ReducedFlags(*flags).not_finite
    return loss * torch.where(not_finite > 0, torch.nan, 1.0).to(loss.dtype)


class DeferredSignals:
    """Context in which the first SIGINT or SIGTERM is only stored in ``received``; a later one acts as usual.

    Signals within :data:`SAME_SIGNAL_SECONDS` of the first belong to the same request.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: int | None = None
        self._received_at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> DeferredSignals:
        self._previous = {number: signal.signal(number, self._receive) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
        elif time.monotonic() - self._received_at > SAME_SIGNAL_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
