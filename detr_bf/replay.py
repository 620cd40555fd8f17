"""A captured step run again: is it still not finite, and where does that begin?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import torch

from detr_bf.assembly import device_of
from detr_bf.assembly.training import PRECISIONS
from detr_bf.config import RunConfig, config_from_dict, known_keys
from detr_bf.engine.capture import Capture, load_capture
from detr_bf.engine.fault import Fault, find_fault
from detr_bf.engine.step import TrainingStep
from detr_bf.errors import InputError
from detr_bf.tasks import task_of

ANOMALY = "returned nan values"  # in the message of torch's anomaly detection


@dataclass(frozen=True)
class Replay:
    """What a captured step does now."""

    source: Path
    capture: Capture
    fault: Fault
    differences: list[str]  # from the run it was captured in
    anomaly: str | None = None  # what torch's anomaly detection said, where it was asked

    @property
    def reproduced(self) -> bool:
        """Whether a loss or gradient is not finite again."""
        return self.fault.found

    def __str__(self) -> str:
        capture, before = self.capture, Fault.from_dict(self.capture.fault)
        lines = [
            f"{self.source}: step {capture.step}, process {capture.process} of {capture.processes}, {capture.device}, "
            f"{_name(capture.precision)}, torch {capture.torch_version}"
        ]
        for number, batch in enumerate(capture.batches, start=1):
            lines.append(f"batch {number} holds {', '.join(batch.names)}")
        lines += str(self.fault).splitlines()
        if self.anomaly is not None:
            lines.append(f"anomaly detection: {self.anomaly}")
        if before.forward_lines() == self.fault.forward_lines():
            lines.append("losses and module are those of the run")
        else:
            lines += ["in the run it was", *(f"  {line}" for line in str(before).splitlines())]
        lines += [f"different here: {difference}" for difference in self.differences]
        lines.append(self._verdict())
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.reproduced:
            return "REPRODUCED: it is not finite again"
        why = "the differences above" if self.differences else "kernels that do not always add up in the same order"
        return f"NOT REPRODUCED: everything is finite now, perhaps because of {why}"


def replay(source: Path, *, device: str = "auto", precision: str | None = None, anomaly: bool = False) -> Replay:
    """Run the forward and backward passes of a captured step again, in this one process.

    Args:
        device: as the setting of that name.
        precision: as train.precision; None: as the run had it.
        anomaly: let torch say too which operation turned the gradient into NaN. The traceback of that operation is a
            warning.

    Raises:
        InputError: the file is missing, damaged or no capture, or it does not fit this version; no such device; the
            training split that Balanced Softmax counts is not at hand.
    """
    capture = load_capture(source)
    config = config_from_dict(capture.config, source=f"the config in {source}")
    config.device = device
    place, dtype = device_of(config), capture.precision if precision is None else _precision(precision)
    differences = _differences(capture, config, place, dtype)
    config.train.compile = False
    if place.type == "cuda":
        torch.cuda.set_device(place)
    step = task_of(config).build_step(capture.model, capture.classes.num_classes, place, dtype, str(source))
    fault = find_fault(step, capture.batches, capture.rng, scale=capture.scale)
    said = _anomaly(step, capture) if anomaly else None
    return Replay(source, capture, fault, differences, said)


def _anomaly(step: TrainingStep, capture: Capture) -> str:
    try:
        with torch.autograd.set_detect_anomaly(True):
            find_fault(step, capture.batches, capture.rng, scale=capture.scale)
    except RuntimeError as error:
        if ANOMALY not in str(error):
            raise
        return str(error)
    return "no operation of the backward pass gives NaN (it does not look for infinity)"


def _precision(name: str) -> torch.dtype:
    if name not in PRECISIONS:
        raise InputError(f"the precision must be one of {', '.join(PRECISIONS)}; got '{name}'")
    return PRECISIONS[name]


def _name(precision: torch.dtype) -> str:
    return next(name for name, dtype in PRECISIONS.items() if dtype == precision)


def _differences(capture: Capture, config: RunConfig, device: torch.device, precision: torch.dtype) -> list[str]:
    """What is not as it was in the run, a sentence each."""
    found = []
    if device.type != capture.device:
        found.append(f"it ran on {capture.device}, now on {device.type}: other kernels, other numbers for dropout")
    if precision != capture.precision:
        found.append(f"it ran in {_name(capture.precision)}, now in {_name(precision)}")
    if torch.get_num_threads() != capture.threads:
        found.append(f"it had {capture.threads} threads, now {torch.get_num_threads()}: sums in another order")
    if str(torch.__version__) != capture.torch_version:
        found.append(f"it ran in torch {capture.torch_version}, now in {torch.__version__}")
    if config.train.compile:
        found.append("it was compiled, and is not now: other kernels, other numbers for dropout")
    if capture.processes > 1:
        found.append(f"it had {capture.processes} processes: the objects and gradients of the others are missing here")
        found += [
            f"{key}=true let images attend to those of other processes, which are missing here"
            for key in _gathering(config)
        ]
    return found


def _gathering(config: RunConfig) -> Iterator[str]:
    """The settings with which batch attention spans all processes."""
    for key in known_keys(type(config)):
        group, _, name = key.rpartition(".")
        if name == "gather" and attrgetter(key)(config) and attrgetter(f"{group}.enabled")(config):
            yield key
