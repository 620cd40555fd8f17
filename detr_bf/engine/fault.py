"""What is not finite in a step, and where it begins: the step run again under watch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from detr_bf.engine.checkpoint import rng_state, set_rng_state
from detr_bf.engine.step import TrainingBatch, TrainingStep
from detr_bf.losses import LossReport
from detr_bf.text import listed


@dataclass(frozen=True)
class BadModule:
    """A module whose output is not finite."""

    name: str  # in the model; empty for the model itself
    kind: str  # its class
    batch: int  # from 1
    call: int  # from 1; modules that layers share are called several times in a batch
    clean_inputs: bool  # False where no module turns finite inputs into such an output: then it was first to hand it on
    state: list[str]  # its parameters and buffers that are not finite

    def __str__(self) -> str:
        name = self.name or "the model itself"
        inputs = "its inputs are finite" if self.clean_inputs else "its inputs are not finite either"
        state = f"; not finite in it: {listed(self.state)}" if self.state else ""
        return f"{name} ({self.kind}), batch {self.batch}, call {self.call}: {inputs}{state}"


@dataclass(frozen=True)
class Fault:
    """What is not finite in a step, as this process sees it."""

    losses: list[dict[str, float]]  # of each batch; ``total`` is what is trained on, the others are not weighted
    targets: list[str]  # the images whose data are not finite
    module: BadModule | None  # the first in order of execution
    parameters: list[str]  # not finite, and buffers likewise
    gradients: list[str] | None = None  # the parameters whose gradient is not finite; None: no backward pass was run
    gradient_norm: float | None = None  # of all parameters, unscaled
    broken_behind: str | None = None  # the first module in backward order to whose output a gradient comes broken

    @property
    def found(self) -> bool:
        """Whether a loss or the gradient norm is not finite."""
        totals = [losses["total"] for losses in self.losses]
        return not all(map(math.isfinite, [*totals, self.gradient_norm or 0.0])) or bool(self.gradients)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Fault:
        """Inverse of ``dataclasses.asdict``."""
        module = content["module"]
        return cls(**{**content, "module": None if module is None else BadModule(**module)})

    def forward_lines(self) -> list[str]:
        """What the forward pass showed, a line each."""
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
        """What the backward pass showed, a line each; none where it was not run."""
        if self.gradients is None:
            return []
        lines = [f"gradient norm {self.gradient_norm:.6g}; not finite: {listed(self.gradients) or 'no gradient'}"]
        if self.broken_behind is not None:
            lines.append(f"the gradient that comes to the output of {self.broken_behind} is not finite already")
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
    """Run a step again from its random numbers and say what is not finite first.

    Every process of a group calls it with as many batches and the same ``with_backward``: the passes it runs follow
    from these alone, never from what is found. It runs without ``torch.compile``. Gradients kept in the parameters are
    neither read nor changed; buffers and random numbers are put back as they were.

    Args:
        step: a :class:`~detr_bf.engine.step.TrainingStep`, without the wrapper it has among several processes.
        batches: of the step.
        rng: :func:`~detr_bf.engine.checkpoint.rng_state` from before the step's first forward pass.
        scale: that of the gradient scaler; each batch's loss is multiplied by it and divided by their number.
    """
    model = step.model
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    watch, losses = _Watch(model), []
    gradients: list[Tensor | None] = [None] * len(trained)
    with _left_as_it_was(model), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        set_rng_state(rng)
        for batch in batches:
            with watch.forward():
                report: LossReport = step(batch)
            losses.append(_values(report))
            if with_backward:
                total = scale * report.total / len(batches)
                # unlike backward(), it leaves .grad alone and wakes no hook that would talk to other processes
                found = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
                gradients = [_added(*pair) for pair in zip(gradients, found, strict=True)]
    by_name = {name: value for name, value in zip(trained, gradients, strict=True) if value is not None}
    norm = nn.utils.get_total_norm(by_name.values()).item() / scale
    return Fault(
        losses=losses,
        targets=[name for batch in batches for name in batch.not_finite()],
        module=watch.module,
        parameters=_bad_state(model),
        gradients=[name for name, value in by_name.items() if not all_finite(value)] if with_backward else None,
        gradient_norm=norm if with_backward else None,
        broken_behind=watch.broken_behind,
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in dataclasses, mappings and sequences of them, in order."""
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
    """Whether every floating-point number in :func:`tensors_in` ``value`` is finite."""
    return all(
        bool(tensor.detach().isfinite().all())
        for tensor in tensors_in(value)
        if tensor.is_floating_point() or tensor.is_complex()
    )


class _Watch:
    """Sees what enters and leaves the modules of a model, and the gradients that come back."""

    def __init__(self, model: nn.Module) -> None:
        self.module: BadModule | None = None
        self.broken_behind: str | None = None
        self._names = {module: name for name, module in model.named_modules()}
        self._batch = 0
        self._calls: Counter[nn.Module] = Counter()
        self._clean: list[bool] = []  # whether the inputs of the modules that are running are finite

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Watch a forward pass; the layers that a backward pass works out again are not looked at."""
        self._batch += 1
        self._calls.clear()
        hooks = [module.register_forward_pre_hook(self._entered, with_kwargs=True) for module in self._names]
        hooks += [module.register_forward_hook(self._left) for module in self._names]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def _settled(self) -> bool:
        return self.module is not None and self.module.clean_inputs

    def _entered(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        self._clean.append(self._settled or all_finite((arguments, keywords)))  # before anything is changed in place

    def _left(self, module: nn.Module, arguments: Any, output: Any) -> None:
        clean, name = self._clean.pop(), self._names[module]
        self._calls[module] += 1
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(self._came_back, name or type(module).__name__))
        if (self.module is None or (clean and not self._settled)) and not all_finite(output):
            call = self._calls[module]
            self.module = BadModule(name, type(module).__name__, self._batch, call, clean, _bad_state(module, name))

    def _came_back(self, name: str, gradient: Tensor) -> None:
        if self.broken_behind is None and not all_finite(gradient):
            self.broken_behind = name


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    rng = rng_state()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        set_rng_state(rng)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _values(report: LossReport) -> dict[str, float]:
    return {name: value.item() for name, value in {"total": report.total, **report.losses}.items()}


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return gradient if total is None or gradient is None else total + gradient


def _bad_state(module: nn.Module, prefix: str = "") -> list[str]:
    """Names of the parameters and buffers that are not finite, but for running statistics that nothing reads."""
    bad = []
    for place, part in module.named_modules(prefix=prefix):
        unread = part.training and getattr(part, "track_running_stats", False)
        tensors = [*part.named_parameters(recurse=False), *(() if unread else part.named_buffers(recurse=False))]
        bad += [f"{place}.{name}".lstrip(".") for name, tensor in tensors if not all_finite(tensor)]
    return bad
