"""What the processes of a group compute in parallel, and what they agree on with every batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from detr_bf import distributed
from detr_bf.losses import LossReport

B = TypeVar("B")


class TrainingBatch(Protocol):
    """What the engine needs to know of a batch."""

    @property
    def inputs(self) -> Any:
        """What the model is called with."""

    @property
    def targets(self) -> Any:
        """What the criterion compares the outputs with."""

    @property
    def names(self) -> tuple[str, ...]:
        """What a message calls the images."""

    @property
    def replaced(self) -> tuple[str, ...]:
        """Why images could not be read for which others stand in, one message for each."""

    def not_finite(self) -> list[str]:
        """The names of the images whose data hold infinity or NaN."""

    def to(self: B, device: torch.device | str, non_blocking: bool = False) -> B:
        """The same on another device."""


Criterion = Callable[[Any, Any], LossReport]  # (what the model returns, the targets of the batch)


class TrainingStep(nn.Module):
    """A batch through the model, under autocast, and its losses, outside of it.

    One module, because DistributedDataParallel must see every use of a parameter, and the mask head is used by the
    losses.

    Args:
        criterion: if it is a module, what it learns is in the model as well.
    """

    def __init__(self, model: nn.Module, criterion: Criterion, device: torch.device, precision: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion
        self.device = device
        self.precision = precision

    def forward(self, batch: TrainingBatch) -> LossReport:
        """``batch`` comes from any device."""
        moved = batch.to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32):
            outputs = self.model(moved.inputs)
        return self.criterion(outputs, moved.targets)


def wrap_ddp(step: TrainingStep, *, unused_parameters: bool = False) -> nn.Module:
    """The step whose gradients become the mean over all processes; of one process the step itself.

    Args:
        unused_parameters: some get no gradient in a step, which costs a search through the graph.
    """
    if distributed.world_size() == 1:
        return step
    # gradients of 1 x 1 convolutions have strides of their own, of which torch warns at every start
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    return DistributedDataParallel(step, gradient_as_bucket_view=True, find_unused_parameters=unused_parameters)


@contextmanager
def sync_gradients(step: nn.Module, exchanged: bool) -> Iterator[None]:
    """Forward and backward passes within the block add to the gradients; they are exchanged only if it says so."""
    if exchanged or not isinstance(step, DistributedDataParallel):
        yield
        return
    with step.no_sync():
        yield


class ReducedFlags(NamedTuple):
    """What all processes know after a batch; each is a sum over them."""

    loss: float  # of the finite ones
    not_finite: float  # processes whose loss is not
    stop: float  # processes that were asked to
    save: float  # whether the main process wants a checkpoint
    replaced: float  # images that could not be read


def reduce_flags(loss: Tensor, *, stop: bool, save: bool, replaced: int) -> ReducedFlags:
    """Exchange what must be decided together, so that nobody waits for one that went another way."""
    value = loss.detach().double()
    finite = value.isfinite()
    said = torch.tensor([stop, save, replaced], dtype=torch.float64, device=loss.device)
    both = torch.stack([torch.where(finite, value, 0.0), (~finite).double()])
    return ReducedFlags(*distributed.all_reduce_sum(torch.cat([both, said])).tolist())
