"""Recovery from steps whose loss or gradient is not finite, and from unreadable images.

Such a step is run again under hooks to find the first module that breaks, captured in a file, and skipped. The file
holds weights, batches and random states: ``detr-bf replay`` runs the step again elsewhere.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from detr_bf.common import distributed
from detr_bf.common.errors import InputError, TrainingError
from detr_bf.common.files import atomic_write, check_weights, read_torch
from detr_bf.common.structures import ClassMap
from detr_bf.common.text import listed, printable
from detr_bf.engine.checkpoint import check_stored, is_rng_state, rng_state, set_rng_state
from detr_bf.engine.state import TrainingState
from detr_bf.engine.step import ReducedFlags, TrainingBatch, TrainingStep
from detr_bf.losses import LossReport

logger = logging.getLogger(__name__)

CAPTURE_FORMAT = 1  # of a capture
MAX_CAPTURES = 3  # files of skipped steps in a run: each holds all weights


@dataclass(frozen=True)
class BadModule:
    """A module whose output is not finite."""

    name: str  # in the model; empty for the model itself
    kind: str  # its class
    batch: int  # from 1
    call: int  # from 1; modules that layers share are called several times in a batch
    finite_inputs: bool  # False if no module turns finite inputs into such an output: then the first to pass it on
    state: list[str]  # its parameters and buffers that are not finite

    def __str__(self) -> str:
        name = self.name or "the model itself"
        inputs = "its inputs are finite" if self.finite_inputs else "its inputs are not finite either"
        state = f"; not finite in it: {listed(self.state)}" if self.state else ""
        return f"{name} ({self.kind}), batch {self.batch}, call {self.call}: {inputs}{state}"


@dataclass(frozen=True)
class Fault:
    """Values of a step on one rank that are not finite."""

    losses: list[dict[str, float]]  # per batch; ``total`` is the training loss, the others are not weighted
    targets: list[str]  # the images whose data are not finite
    module: BadModule | None  # the first in order of execution
    parameters: list[str]  # parameters and buffers that are not finite
    gradients: list[str] | None = None  # parameters whose gradient is not finite; None: no backward pass was run
    gradient_norm: float | None = None  # of all parameters, unscaled
    bad_gradient_at: str | None = None  # the first module in backward order whose output gets a gradient not finite

    @property
    def found(self) -> bool:
        """True if a loss or the gradient norm is not finite."""
        totals = [losses["total"] for losses in self.losses]
        return not all(map(math.isfinite, [*totals, self.gradient_norm or 0.0])) or bool(self.gradients)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Fault:
        """Inverse of ``dataclasses.asdict``."""
        module = content["module"]
        return cls(**{**content, "module": None if module is None else BadModule(**module)})

    def forward_lines(self) -> list[str]:
        """Return the findings of the forward pass, one per line."""
        lines = []
        for number, losses in enumerate(self.losses, start=1):
            terms = ", ".join(f"{name} {value:.6g}" for name, value in losses.items() if name != "total")
            lines.append(f"batch {number}: loss {losses['total']:.6g} ({terms})")
        if self.targets:
            lines.append(f"data that are not finite in {listed(self.targets)}")
        if self.parameters:
            lines.append(f"parameters that are not finite: {listed(self.parameters)}")
        lines.append(f"first module whose output is not finite: {self.module or 'none'}")
        return lines

    def backward_lines(self) -> list[str]:
        """Return the findings of the backward pass, one per line; none if it was not run."""
        if self.gradients is None:
            return []
        lines = [f"gradient norm {self.gradient_norm:.6g}; not finite: {listed(self.gradients) or 'no gradient'}"]
        if self.bad_gradient_at is not None:
            lines.append(f"the gradient of the output of {self.bad_gradient_at} is already not finite")
        return lines

    def __str__(self) -> str:
        return "\n".join([*self.forward_lines(), *self.backward_lines()])


def find_fault(
    step: TrainingStep,
    batches: Sequence[TrainingBatch],
    rng: Mapping[str, Any],
    *,
    scale: float = 1.0,
    with_backward: bool = True,
) -> Fault:
    """Run a step again from its random states and find the first value that is not finite.

    A collective: every rank passes as many batches and the same ``with_backward``. It runs without ``torch.compile``.
    Gradients, buffers and random states are left unchanged.

    Args:
        step: a :class:`~detr_bf.engine.step.TrainingStep` without its DDP wrapper.
        rng: :func:`~detr_bf.engine.checkpoint.rng_state` from before the step's first forward pass.
        scale: of the gradient scaler; each batch's loss is multiplied by it and divided by their number.
    """
    model = step.model
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    hooks, losses = _Hooks(model), []
    gradients: list[Tensor | None] = [None] * len(trained)
    with _unchanged(model), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        set_rng_state(rng)
        for batch in batches:
            with hooks.forward():
                report: LossReport = step(batch)
            losses.append({name: value.item() for name, value in {"total": report.total, **report.losses}.items()})
            if with_backward:
                total = scale * report.total / len(batches)
                # autograd.grad() leaves .grad alone and triggers no DDP hook
                found = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
                gradients = [
                    new if old is None or new is None else old + new for old, new in zip(gradients, found, strict=True)
                ]
    by_name = {name: value for name, value in zip(trained, gradients, strict=True) if value is not None}
    norm = nn.utils.get_total_norm(by_name.values()).item() / scale
    return Fault(
        losses=losses,
        targets=[name for batch in batches for name in batch.not_finite()],
        module=hooks.module,
        parameters=_bad_state(model),
        gradients=[name for name, value in by_name.items() if not all_finite(value)] if with_backward else None,
        gradient_norm=norm if with_backward else None,
        bad_gradient_at=hooks.bad_gradient_at,
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in dataclasses, mappings and sequences of them, in order."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from tensors_in(item)


def all_finite(value: Any) -> bool:
    """Return True if every floating-point number in :func:`tensors_in` ``value`` is finite."""
    return all(
        bool(tensor.detach().isfinite().all())
        for tensor in tensors_in(value)
        if tensor.is_floating_point() or tensor.is_complex()
    )


class _Hooks:
    """Hooks on the inputs, outputs and gradients of all modules of a model, which store the first bad ones."""

    def __init__(self, model: nn.Module) -> None:
        self.module: BadModule | None = None
        self.bad_gradient_at: str | None = None
        self._names = {module: name for name, module in model.named_modules()}
        self._batch = 0
        self._calls: Counter[nn.Module] = Counter()
        self._finite_inputs: list[bool] = []  # of the modules that are running

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Watch a forward pass, but not the layers that activation checkpointing runs again in the backward pass."""
        self._batch += 1
        self._calls.clear()
        handles = [module.register_forward_pre_hook(self._before, with_kwargs=True) for module in self._names]
        handles += [module.register_forward_hook(self._after) for module in self._names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def _source_found(self) -> bool:
        return self.module is not None and self.module.finite_inputs

    def _before(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        """Check the inputs before the module changes them in-place."""
        self._finite_inputs.append(self._source_found or all_finite((arguments, keywords)))

    def _after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        finite_inputs, name = self._finite_inputs.pop(), self._names[module]
        self._calls[module] += 1
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(self._backward, name or type(module).__name__))
        if (self.module is None or (finite_inputs and not self._source_found)) and not all_finite(output):
            state = _bad_state(module, name)
            self.module = BadModule(name, type(module).__name__, self._batch, self._calls[module], finite_inputs, state)

    def _backward(self, name: str, gradient: Tensor) -> None:
        """Check the gradient of an output of the module ``name``."""
        if self.bad_gradient_at is None and not all_finite(gradient):
            self.bad_gradient_at = name


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore random states and buffers after the block."""
    rng = rng_state()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        set_rng_state(rng)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _bad_state(module: nn.Module, prefix: str = "") -> list[str]:
    """Return the names of parameters and buffers that are not finite, except running statistics that are not read."""
    bad = []
    for path, part in module.named_modules(prefix=prefix):
        unread = part.training and getattr(part, "track_running_stats", False)
        tensors = [*part.named_parameters(recurse=False), *(() if unread else part.named_buffers(recurse=False))]
        bad += [f"{path}.{name}".lstrip(".") for name, tensor in tensors if not all_finite(tensor)]
    return bad


@dataclass(frozen=True)
class Capture:
    """A step of one rank with everything needed to run its forward and backward passes again."""

    model: dict[str, Tensor]
    class_map: dict[str, Any]  # ClassMap.to_dict
    config: dict[str, Any]
    batches: tuple[TrainingBatch, ...]
    rng: dict[str, Any]  # checkpoint.rng_state, from before the first forward pass
    step: int  # from 1
    epoch: int  # from 0
    precision: torch.dtype
    scale: float  # of the loss
    fault: dict[str, Any]
    rank: int
    world_size: int
    threads: int
    device: str  # its type
    torch_version: str
    format: int = CAPTURE_FORMAT

    @property
    def classes(self) -> ClassMap:
        return ClassMap.from_dict(self.class_map)

    def save(self, path: Path) -> None:
        """Write atomically."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        with atomic_write(path) as temporary:
            torch.save(content | {"batches": [batch.to_dict() for batch in self.batches]}, temporary)


def load_capture(path: Path, batch_type_of: Callable[[dict[str, Any]], type[TrainingBatch]]) -> Capture:
    """Read a capture; its weights may be NaN, which may be the reason for it.

    Raises:
        InputError: see :func:`detr_bf.common.files.read_torch`; the file is no capture or damaged; ``batch_type_of``
            refuses the config.
    """
    content = read_torch(path, own=True)
    expected = {field.name for field in fields(Capture)}
    if not isinstance(content, dict) or set(content) != expected or content["format"] != CAPTURE_FORMAT:
        raise InputError(
            f"{path} is not a captured step of detr_bf, format {CAPTURE_FORMAT}: give a file that a run wrote when "
            "its loss or gradient was not finite"
        )
    check_stored(content["config"], content["class_map"], path)
    try:
        check_weights(content["model"], str(path), finite=False)
        batch_type = batch_type_of(content["config"])
        texts = {name: _printable(content[name]) for name in ("fault", "device", "torch_version")}
        capture = Capture(**content | texts | {"batches": tuple(map(batch_type.from_dict, content["batches"]))})
        str(Fault.from_dict(capture.fault))
        valid = bool(capture.batches) and all(batch.fits(capture.classes.num_classes) for batch in capture.batches)
        valid &= is_rng_state(capture.rng) and isinstance(capture.precision, torch.dtype) and capture.scale > 0
        valid &= min(capture.step, capture.epoch + 1, capture.rank + 1, capture.world_size, capture.threads) > 0
        valid &= all(isinstance(text, str) for text in (capture.device, capture.torch_version))
    except InputError:
        raise
    except Exception as error:  # parts of another type or structure raise anything
        raise InputError(f"{path} is a damaged capture of detr_bf ({error!r}): use another copy of it") from error
    if not valid:
        raise InputError(
            f"{path} is a damaged capture of detr_bf: its batches, random states, scale or step are not valid. Use "
            "another copy of it"
        )
    return capture


def _printable(value: Any) -> Any:
    """Make every text in plain values printable."""
    if isinstance(value, dict):
        return {_printable(name): _printable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_printable(each) for each in value]
    return printable(value) if isinstance(value, str) else value


def capture_step(
    step: TrainingStep,
    batches: Sequence[TrainingBatch],
    rng: dict[str, Any],
    *,
    number: int,
    class_map: ClassMap,
    config: dict[str, Any],
    scale: float = 1.0,
    with_backward: bool = True,
) -> Capture:
    """Find the fault of a step and copy the step with the current weights; a collective.

    Args:
        step, batches, rng, scale, with_backward: see :func:`find_fault`.
        number: of the step, from 1.
    """
    fault = find_fault(step, batches, rng, scale=scale, with_backward=with_backward)
    return Capture(
        model={name: value.detach().to("cpu", copy=True) for name, value in step.model.state_dict().items()},
        class_map=class_map.to_dict(),
        config=config,
        batches=tuple(batch.to("cpu") for batch in batches),
        rng=rng,
        step=number,
        epoch=step.epoch,
        precision=step.precision,
        scale=scale,
        fault=asdict(fault),
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        threads=torch.get_num_threads(),
        device=step.device.type,
        torch_version=str(torch.__version__),
    )


def report_fault(capture: Capture, path: Path | None) -> str:
    """Save the capture on the ranks with a fault, and return the findings of all ranks; a collective.

    Args:
        path: file of this rank's capture; None saves nothing.
    """
    fault = Fault.from_dict(capture.fault)
    report = ""
    if fault.found:
        names = ", ".join(name for batch in capture.batches for name in batch.names)
        lines = [f"rank {capture.rank}, images {names}", *str(fault).splitlines()]
        if path is not None:
            capture.save(path)
            lines.append(f"captured in {path}; run it again with detr-bf replay")
        report = "\n  ".join(lines)
    reports = "\n".join(filter(None, distributed.all_gather_object(report)))
    nothing = "run again, everything is finite: the fault depends on the order of sums, or on memory"
    return f"the loss or the gradient of step {capture.step} is not finite\n{reports or nothing}"


class StepStart(NamedTuple):
    """State that is restored if a step is skipped."""

    rng: dict[str, Any]  # checkpoint.rng_state, from before the first forward pass
    statistics: list[tuple[Tensor, Tensor]]  # running statistics of norms, each with a copy; empty if none is skipped


class Recovery:
    """Skips steps that are not finite and counts unreadable images, up to the limits of a run.

    Args:
        max_skipped: steps that may be skipped.
        max_replaced: unreadable images of an epoch that others may replace.
    """

    def __init__(self, step: TrainingStep, state: TrainingState, *, max_skipped: int, max_replaced: float) -> None:
        self.step, self.state = step, state
        self.max_skipped, self.max_replaced = max_skipped, max_replaced
        self.trial = False  # True: of steps whose folder is not kept

    def begin_step(self) -> StepStart:
        """Return what :meth:`skip_step` needs."""
        statistics = []
        if self.max_skipped:
            modules = self.step.model.modules()
            norms = (module for module in modules if isinstance(module, _BatchNorm) and module.training)
            statistics = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
        return StepStart(rng_state(), statistics)

    def skip_step(
        self, start: StepStart, batches: Sequence[TrainingBatch], *, with_backward: bool, scale: float = 1.0
    ) -> None:
        """Capture the last counted step, which is not finite and has changed no weights; a collective.

        Args:
            batches: of the step, up to the first whose loss is not finite.
            with_backward: True if the gradient is the fault, so that its source is searched too.
            scale: of the loss.

        Raises:
            TrainingError: more than ``max_skipped`` steps were skipped.
        """
        state, progress = self.state, self.state.progress
        for buffer, before in start.statistics:
            buffer.copy_(before)
        state.optimizer.zero_grad(set_to_none=True)
        capture = capture_step(
            self.step,
            batches,
            start.rng,
            number=progress.step,
            class_map=state.class_map,
            config=state.config,
            scale=scale,
            with_backward=with_backward,
        )
        kept = progress.skipped < MAX_CAPTURES and not self.trial
        path = state.folder.capture(progress.step, distributed.rank()) if kept else None
        message = report_fault(capture, path)
        progress.skipped += 1
        if progress.skipped > self.max_skipped:
            raise distributed.on_all_ranks(
                TrainingError(
                    f"{message}\n{self._saved('.')}Try a lower optimizer.lr, "
                    "optimizer.clip_norm=0.1, train.precision=float32, check these images with detr-bf check, "
                    "or skip such steps with train.max_skipped=N."
                )
            )
        logger.warning("%s\nThe step is skipped, %d of %d.", message, progress.skipped, self.max_skipped)

    def count_unreadable(self, batch: TrainingBatch, flags: ReducedFlags) -> None:
        """Log the unreadable images of this rank's batch, and count those of all ranks.

        Raises:
            TrainingError: there are more than ``max_replaced`` in this epoch.
        """
        progress = self.state.progress
        for message in batch.replaced:
            logger.error("another image replaces one that cannot be read: %s", message)
        progress.replaced += int(flags.replaced)
        if progress.replaced > self.max_replaced:
            raise distributed.on_all_ranks(
                TrainingError(
                    f"{progress.replaced} images of this epoch cannot be read, data.max_unreadable allows "
                    f"{self.max_replaced:g}: see the messages above and check the disk. "
                    f"{self._saved('; continue with --resume, or')}'detr-bf check DATA --fix OUT' writes a "
                    "copy of detection data without these images for a new run"
                )
            )

    def _saved(self, end: str) -> str:
        """Return a sentence that names the last checkpoint, with its end; empty in a trial."""
        return "" if self.trial else f"The last checkpoint is {self.state.folder.last}{end} "
