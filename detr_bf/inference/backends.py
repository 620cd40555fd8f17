"""Computation of a batch: by torch, or by the engine of an exported file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import torch

from detr_bf.batchformer import InsertedBatchFormer
from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, Outputs, Target
from detr_bf.common.text import printable
from detr_bf.detectors import Detector
from detr_bf.export.runtime import FileDetector
from detr_bf.losses.postprocess import Postprocess

T = TypeVar("T")
Convert: TypeAlias = Callable[[Outputs, Sequence[Target]], list[T]]  # outputs of a batch to the result of each image


@dataclass(frozen=True)
class TorchBackend:
    """Detector that torch computes on one device."""

    model: Detector
    device: torch.device
    precision = "float32"
    _copies: dict[str, TorchBackend] = field(default_factory=dict, init=False, repr=False, compare=False)  # by device

    def on(self, device: str | torch.device | None) -> TorchBackend:
        """Return the backend that computes on ``device``; for None and ``"auto"`` this one.

        Raises:
            InputError: there is no such device.
        """
        if device is None or device == "auto":
            return self
        try:
            wanted = torch.device(device)
            if wanted.type == "cuda" and wanted.index is None:
                wanted = torch.device("cuda", torch.cuda.current_device())
            if wanted == self.device or (self.device.index is None and wanted.type == self.device.type == "cuda"):
                return self
            if wanted.type == "meta":
                raise RuntimeError("its tensors have no values")
            if str(wanted) not in self._copies:
                self._copies[str(wanted)] = replace(self, model=copy.deepcopy(self.model).to(wanted), device=wanted)
        except (RuntimeError, AssertionError, TypeError) as error:  # torch without CUDA raises an AssertionError
            raise InputError(f"device={printable(str(device))} cannot be used: {printable(error)}") from error
        return self._copies[str(wanted)]

    @torch.no_grad()
    def compute(self, batch: Batch, convert: Convert[T], half: bool) -> list[T]:
        """Return the result of each image of a batch; with ``half`` the model computes in half precision."""
        batch, half_precision = batch.to(self.device), torch.float16 if self.device.type == "cuda" else torch.bfloat16
        with torch.autocast(self.device.type, half_precision, enabled=half):
            outputs = self.model(batch)
        return convert(outputs, batch.targets)

    @property
    def mixes_images(self) -> bool:
        """True if the images of a batch attend to each other in evaluation: images of all sizes are in one batch."""
        modules = self.model.modules()
        return any(isinstance(each, InsertedBatchFormer) and each.mixes_evaluated_images for each in modules)

    @property
    def reads_references(self) -> bool:
        """True if evaluation reads a reference beside each image."""
        return self.model.reads_references


@dataclass(frozen=True)
class FileBackend:
    """Detector of an exported file, on the device and in the precision of the export; its outputs are on the CPU."""

    model: FileDetector
    device = torch.device("cpu")
    mixes_images = False

    @property
    def reads_references(self) -> bool:
        """True if the file reads a reference beside each image."""
        return self.model.reads_references

    @property
    def precision(self) -> str:
        """Precision of the export."""
        return printable(str(self.model.metadata.get("precision", "float32")))

    def on(self, device: str | torch.device | None) -> FileBackend:
        """Return this backend (InputError: the file is computed on another device than ``device``)."""
        if str(device or "auto") not in ("auto", self.model.device.type):
            where = "the CPU" if self.model.device.type == "cpu" else "the GPU"
            raise InputError(
                f"device={printable(str(device))}: {self.model.kind} like this one are computed on {where}"
            )
        return self

    def compute(self, batch: Batch, convert: Convert[T], half: bool) -> list[T]:
        """Return the result of each image of a batch.

        Raises:
            InputError: ``half`` is asked for, or the file does not take such a batch.
        """
        if half:
            raise InputError(
                f"{self.model.kind} are computed in the precision of the export, {self.precision}: leave half out"
            )
        if not (self.model.form.postprocess and isinstance(convert, Postprocess)):
            return convert(self.model(batch), batch.targets)
        values, targets, detections = self.model.run(batch), batch.targets, list[Any]()
        masks = self.model.masks_over(batch, values["masks"]) if "masks" in values else None
        for image, target in enumerate(targets):
            boxes, scores, labels = (values[name][image] for name in ("boxes", "scores", "labels"))
            row, kept = torch.tensor([image]), convert.kept(boxes, scores, labels)
            coded = None
            if masks is not None:
                coded = convert.coded_masks((masks.of(row, query)[0] for query in kept.split(1)), target, targets)
            detections.append(convert.detections(boxes[kept], scores[kept], labels[kept], coded, target))
        return detections


Backend: TypeAlias = TorchBackend | FileBackend
