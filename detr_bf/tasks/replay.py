"""Replay of a captured step: is it still not finite, and which module breaks first?"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from detr_bf.assembly.training import PRECISIONS
from detr_bf.common.devices import device_of, float32_products
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch
from detr_bf.config import DetectionConfig, RunConfig, config_from_dict, known_keys
from detr_bf.engine.recovery import Capture, Fault, find_fault, load_capture
from detr_bf.engine.step import TrainingStep
from detr_bf.tasks import task_of

ANOMALY = "returned nan values"  # in the message of torch's anomaly detection


@dataclass(frozen=True)
class Replay:
    """Result of running a captured step again."""

    source: Path
    capture: Capture
    fault: Fault
    differences: list[str]  # from the run, a sentence each
    anomaly: str | None = None  # the message of torch's anomaly detection, if it was used

    @property
    def reproduced(self) -> bool:
        """True if a loss or gradient is not finite again."""
        return self.fault.found

    def __str__(self) -> str:
        capture, before = self.capture, Fault.from_dict(self.capture.fault)
        lines = [
            f"{self.source}: step {capture.step}, rank {capture.rank} of {capture.world_size}, {capture.device}, "
            f"{_name(capture.precision)}, torch {capture.torch_version}"
        ]
        for number, batch in enumerate(capture.batches, start=1):
            lines.append(f"batch {number} holds {', '.join(batch.names)}")
        lines += str(self.fault).splitlines()
        if self.anomaly is not None:
            lines.append(f"anomaly detection: {self.anomaly}")
        if before.forward_lines() == self.fault.forward_lines():
            lines.append("losses and module equal those of the run")
        else:
            lines += ["in the run", *(f"  {line}" for line in str(before).splitlines())]
        lines += [f"different here: {difference}" for difference in self.differences]
        if self.reproduced:
            lines.append("REPRODUCED: it is not finite again")
        else:
            why = "the differences above" if self.differences else "kernels that do not always add in the same order"
            lines.append(f"NOT REPRODUCED: everything is finite now, perhaps because of {why}")
        return "\n".join(lines)


def replay(source: Path, *, device: str = "auto", precision: str | None = None, anomaly: bool = False) -> Replay:
    """Run the forward and backward passes of a captured step again, in one process.

    Args:
        device: see the setting of that name.
        precision: see train.precision; None: the precision of the run.
        anomaly: also run torch's anomaly detection, which names the operation whose gradient is NaN and warns with its
            traceback.

    Raises:
        InputError: the file is missing, damaged or no capture, or of another version; no such device; the training
            split, whose classes Balanced Softmax counts, is missing.
    """
    if precision is not None and precision not in PRECISIONS:
        raise InputError(f"the precision must be one of {', '.join(PRECISIONS)}; got '{precision}'")

    def config_of(stored: dict[str, Any]) -> RunConfig:
        return config_from_dict(stored, source=f"the config in {source}")

    capture = load_capture(source, lambda stored: task_of(config_of(stored)).batch_type)
    config = config_of(capture.config)
    config.device = device
    channels = {each.images.shape[1] for each in capture.batches if isinstance(each, Batch)}
    if isinstance(config, DetectionConfig) and channels != {config.data.channels}:
        raise InputError(
            f"{source}: its images do not have data.channels={config.data.channels}: use another copy of it"
        )
    target, dtype = device_of(config.device), capture.precision if precision is None else PRECISIONS[precision]
    differences = _differences(capture, config, target, dtype)
    config.train.compile = False
    if target.type == "cuda":
        torch.cuda.set_device(target)
    step = task_of(config).build_step(capture.model, capture.classes.num_classes, target, dtype, str(source))
    step.begin_epoch(capture.epoch)
    with float32_products(target, config.train.float32_matmul):
        fault = find_fault(step, capture.batches, capture.rng, scale=capture.scale)
        return Replay(source, capture, fault, differences, _anomaly(step, capture) if anomaly else None)


def _anomaly(step: TrainingStep, capture: Capture) -> str:
    try:
        with torch.autograd.set_detect_anomaly(True):
            find_fault(step, capture.batches, capture.rng, scale=capture.scale)
    except RuntimeError as error:
        if ANOMALY not in str(error):
            raise
        return str(error)
    return "no operation of the backward pass gives NaN (infinity is not searched)"


def _name(precision: torch.dtype) -> str:
    return next(name for name, dtype in PRECISIONS.items() if dtype == precision)


def _differences(capture: Capture, config: RunConfig, device: torch.device, precision: torch.dtype) -> list[str]:
    """Return the differences between this machine and the run, a sentence each."""
    found = []
    if device.type != capture.device:
        found.append(f"it ran on {capture.device}, now on {device.type}: other kernels and random numbers")
    if precision != capture.precision:
        found.append(f"it ran in {_name(capture.precision)}, now in {_name(precision)}")
    if torch.get_num_threads() != capture.threads:
        found.append(f"it had {capture.threads} threads, now {torch.get_num_threads()}: sums in another order")
    if str(torch.__version__) != capture.torch_version:
        found.append(f"it ran in torch {capture.torch_version}, now in {torch.__version__}")
    if config.train.compile:
        found.append("it was compiled, and is not now: other kernels and random numbers")
    if capture.world_size > 1:
        found.append(f"it had {capture.world_size} ranks: the objects and gradients of the others are missing here")
        for key in known_keys(type(config)):
            group, _, name = key.rpartition(".")
            if name == "gather" and attrgetter(key)(config) and attrgetter(f"{group}.enabled")(config):
                found.append(f"{key}=true let images attend to those of other ranks, which are missing here")
    return found
