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
from detr_bf.text import printable

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
        shown = {name: _shown(content[name]) for name in ("fault", "device", "torch_version")}
        capture = Capture(**content | shown | {"batches": tuple(map(_read, content["batches"]))})
        str(Fault.from_dict(capture.fault))
        valid = bool(capture.batches) and all(_fits(batch, capture.classes.num_classes) for batch in capture.batches)
        valid &= is_rng_state(capture.rng) and isinstance(capture.precision, torch.dtype) and capture.scale > 0
        valid &= min(capture.step, capture.process + 1, capture.processes, capture.threads) > 0
        valid &= all(isinstance(text, str) for text in (capture.device, capture.torch_version))
    except InputError:
        raise
    except Exception as error:  # whatever a part of another type or structure raises
        raise InputError(f"{path} is a damaged capture of detr_bf ({error!r}): use another copy of it") from error
    if not valid:
        raise InputError(
            f"{path} is a damaged capture of detr_bf: its batches, random states, scale or step are not valid. Use "
            "another copy of it"
        )
    return capture


def _written(batch: Any) -> dict[str, Any]:
    return {"kind": type(batch).__name__, **asdict(batch)}


def _read(content: Mapping[str, Any]) -> TrainingBatch:
    """Inverse of :func:`_written`; earlier versions knew the batches of detectors alone."""
    values = {name: value for name, value in content.items() if name != "kind"}
    kind = content.get("kind", Batch.__name__)
    if kind == LabelledImages.__name__:
        return LabelledImages(**{**values, "targets": ClassTargets(**values["targets"])})
    if kind != Batch.__name__:
        raise ValueError(f"no batches are of the kind {kind!r}")
    targets = (Target(**{**target, "file_name": printable(target["file_name"])}) for target in values["targets"])
    return Batch(**{**values, "targets": tuple(targets)})


def _shown(value: Any) -> Any:
    """Return plain values with every text in them as it is shown."""
    if isinstance(value, dict):
        return {_shown(name): _shown(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return printable(value) if isinstance(value, str) else value


def _fits(batch: TrainingBatch, num_classes: int) -> bool:
    """Return whether the tensors of a batch have the shapes and types that its class says, and labels of classes."""
    if isinstance(batch, LabelledImages):
        images, targets = batch.images, batch.targets
        rows, soft_labels, patches = len(images), targets.soft_labels, targets.patch_labels
        return (
            _is_tensor(images, (rows, 3, *images.shape[2:]), torch.float32)
            and images.dim() == 4
            and _are_labels(targets.labels, (rows,), num_classes)
            and (soft_labels is None or _is_tensor(soft_labels, (rows, num_classes), torch.float32))
            and (patches is None or _are_labels(patches, (rows, patches.shape[-1]), num_classes))
            and _is_tensor(batch.indices, (rows,), torch.int64)
        )
    assert isinstance(batch, Batch), "there are two kinds of batches"
    rows, _, height, width = batch.images.shape
    return (
        _is_tensor(batch.images, (rows, 3, height, width), torch.uint8)
        and _is_tensor(batch.padding_mask, (rows, height, width), torch.bool)
        and len(batch.targets) == rows
        and all(_target_fits(target, height, width, num_classes) for target in batch.targets)
    )


def _target_fits(target: Target, height: int, width: int, num_classes: int) -> bool:
    count, size, masks = len(target.boxes), target.size, target.masks
    return (
        _is_tensor(target.boxes, (count, 4), torch.float32)
        and _are_labels(target.labels, (count,), num_classes)
        and 0 < size[0] <= height
        and 0 < size[1] <= width
        and (masks is None or _is_tensor(masks, (count, *size), torch.bool))
    )


def _are_labels(labels: Tensor, shape: tuple[int, ...], num_classes: int) -> bool:
    return _is_tensor(labels, shape, torch.int64) and bool(((labels >= 0) & (labels < num_classes)).all())


def _is_tensor(value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether it is a dense tensor of that shape and type with values."""
    return (
        isinstance(value, Tensor)
        and not (value.is_nested or value.is_meta)
        and value.layout == torch.strided
        and (value.shape, value.dtype) == (shape, dtype)
    )


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
    told = [text for text in distributed.all_gather_object(text) if text]
    where = "\n".join(told) or "run again, everything is finite: the fault depends on the order of sums, or on memory"
    return f"the loss or the gradient of step {capture.step} is not finite\n{where}"
