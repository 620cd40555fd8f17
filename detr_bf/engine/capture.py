"""A step that went wrong, in a file from which it can be run again elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detr_bf import distributed
from detr_bf.engine.checkpoint import check_stored, is_rng_state
from detr_bf.engine.fault import Fault, find_fault
from detr_bf.engine.step import TrainingBatch, TrainingStep
from detr_bf.errors import InputError
from detr_bf.files import atomic_write, check_weights, read_torch
from detr_bf.labelled import ClassTargets, LabelledImages
from detr_bf.structures import Batch, ClassMap, Target

FORMAT = 1


@dataclass(frozen=True)
class Capture:
    """A step of one process with all that is needed to run its forward and backward passes again."""

    model: dict[str, Tensor]
    class_map: dict[str, Any]  # ClassMap.to_dict
    config: dict[str, Any]
    batches: tuple[TrainingBatch, ...]
    rng: dict[str, Any]  # checkpoint.rng_state, from before the first forward pass
    step: int  # from 1
    precision: torch.dtype
    scale: float  # of the loss
    fault: dict[str, Any]
    process: int
    processes: int
    threads: int
    device: str  # its type
    torch_version: str
    format: int = FORMAT

    @property
    def classes(self) -> ClassMap:
        return ClassMap.from_dict(self.class_map)

    def save(self, path: Path) -> None:
        """Write atomically."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        with atomic_write(path) as temporary:
            torch.save(content | {"batches": [_written(batch) for batch in self.batches]}, temporary)


def load_capture(path: Path) -> Capture:
    """Return a capture of ours; its weights may be NaN, which may be why the step was captured.

    Raises:
        InputError: as :func:`detr_bf.files.read_torch`, or the file is something else.
    """
    content = read_torch(path, own=True)
    expected = {field.name for field in fields(Capture)}
    if not isinstance(content, dict) or set(content) != expected or content["format"] != FORMAT:
        raise InputError(
            f"{path} is not a captured step of detr_bf, format {FORMAT}: give a file that a training run wrote when "
            "its loss or gradient was not finite"
        )
    check_stored(content["config"], content["class_map"], path)
    try:
        check_weights(content["model"], str(path), finite=False)
        capture = Capture(**content | {"batches": tuple(map(_read, content["batches"]))})
        Fault.from_dict(capture.fault)
        sound = is_rng_state(capture.rng) and isinstance(capture.precision, torch.dtype) and capture.scale > 0
        sound &= min(capture.step, capture.process + 1, capture.processes, capture.threads) > 0
        sound &= all(isinstance(text, str) for text in (capture.device, capture.torch_version))
    except InputError:
        raise
    except Exception as error:  # whatever a part of another type or structure raises
        raise InputError(f"{path} is no sound capture of detr_bf ({error!r}): use another copy of it") from error
    if not sound:
        raise InputError(f"{path} is no sound capture of detr_bf: its rng, scale or step is none. Use another copy")
    return capture


def _written(batch: Any) -> dict[str, Any]:
    return {"kind": type(batch).__name__, **asdict(batch)}


def _read(content: Mapping[str, Any]) -> TrainingBatch:
    """Inverse of :func:`_written`; earlier versions knew the batches of detectors alone."""
    values = {name: value for name, value in content.items() if name != "kind"}
    if content.get("kind", Batch.__name__) == LabelledImages.__name__:
        return LabelledImages(**{**values, "targets": ClassTargets(**values["targets"])})
    return Batch(**{**values, "targets": tuple(Target(**target) for target in values["targets"])})


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
    """Find the fault of a step and keep the step; all processes call it together.

    ``number`` is the step's, from 1. The others are as for :func:`find_fault`. The weights are copied as they are now.
    """
    fault = find_fault(step, batches, rng, scale=scale, with_backward=with_backward)
    return Capture(
        model={name: value.detach().to("cpu", copy=True) for name, value in step.model.state_dict().items()},
        class_map=class_map.to_dict(),
        config=config,
        batches=tuple(batch.to("cpu") for batch in batches),
        rng=rng,
        step=number,
        precision=step.precision,
        scale=scale,
        fault=asdict(fault),
        process=distributed.rank(),
        processes=distributed.world_size(),
        threads=torch.get_num_threads(),
        device=step.device.type,
        torch_version=str(torch.__version__),
    )


def told_together(capture: Capture, path: Path | None) -> str:
    """Save the captures of the processes concerned; all call it and get the text about them.

    Args:
        path: where this process saves its own; None saves nothing.
    """
    fault = Fault.from_dict(capture.fault)
    text = ""
    if fault.found:
        names = ", ".join(name for batch in capture.batches for name in batch.names)
        lines = [f"process {capture.process}, images {names}", *str(fault).splitlines()]
        if path is not None:
            capture.save(path)
            lines.append(f"captured in {path}; run it again with tools/replay_capture.py")
        text = "\n  ".join(lines)
    told = [text for text in distributed.known_to_all(text) if text]
    where = "\n".join(told) or "run again, everything is finite: the fault depends on the order of sums, or on memory"
    return f"the loss or the gradient of step {capture.step} is not finite\n{where}"
