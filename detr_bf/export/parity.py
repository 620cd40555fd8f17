"""Comparison of the outputs of an exported file with those of torch."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torchvision.transforms.v2 import functional as transforms

from detr_bf.common.errors import CommandError, InputError
from detr_bf.common.structures import Batch
from detr_bf.common.text import printable
from detr_bf.data.transforms import SampleTransform, eval_sample
from detr_bf.export.graph import ONNX_SUFFIX, OPENVINO_SUFFIX, ExportGraph, ExportSignature, imported
from detr_bf.export.runtime import FileDetector, OnnxDetector, OpenVinoDetector, PackageDetector

logger = logging.getLogger(__name__)

# Largest absolute differences; boxes are in fractions of the image.
TOLERANCES = {"logits": 1e-3, "boxes": 1e-4, "masks": 1e-2, "scores": 1e-3, "labels": 0.0, "selection": 1e-3}
COMPARED_SCALES = (1.0, 0.8, 0.6)  # of the images, so that batches have padding
COMPARED_BATCH = 3  # images of the larger batch, if the file takes any number


class ParityError(CommandError, RuntimeError):
    """The outputs of the file differ by more than the tolerance, or are not finite; the message has the table."""


@dataclass(frozen=True)
class Comparison:
    """Largest absolute difference of each output of a file from torch, for one batch."""

    images: int
    size: tuple[int, int]  # height, width of the padded batch
    padded: bool
    differences: Mapping[str, float]
    tolerances: Mapping[str, float] | None  # None: any finite difference

    @property
    def values(self) -> dict[str, Any]:
        """All values but the tolerances, for the metadata of a file."""
        return {name: value for name, value in asdict(self).items() if name != "tolerances"}

    @property
    def beyond(self) -> list[str]:
        """Names of the outputs that differ by more than the tolerance; NaN does."""
        limits = self.tolerances or dict.fromkeys(self.differences, sys.float_info.max)
        return [name for name, value in self.differences.items() if not value <= limits[name]]


def compared_batches(
    images: Sequence[Tensor], transform: SampleTransform, form: ExportSignature, square: int | None
) -> Iterator[Batch]:
    """Yield batches of one image and of several that the form allows, of several sizes where it does."""
    samples = [eval_sample(transform, pixels, index) for index, pixels in enumerate(images)]
    if square is None:
        samples = [_scaled(*each, scale) for each, scale in zip(samples, cycle(COMPARED_SCALES), strict=False)]
    if form.batch in (None, 1):
        yield from (Batch.collate([sample]) for sample in samples)
    if form.batch != 1:
        yield Batch.collate(list(islice(cycle(samples), form.batch or COMPARED_BATCH)))


def _scaled(pixels: Tensor, target: Any, scale: float) -> tuple[Tensor, Any]:
    size = tuple(max(1, int(side * scale)) for side in target.size)
    return transforms.resize(pixels, list(size), antialias=True), replace(target, size=size)


def synthetic_images(count: int = COMPARED_BATCH) -> list[Tensor]:
    """Return images (3, h, w) uint8 of coloured patches in several aspect ratios."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(480, 640), (640, 480), (375, 500)]
    patches = (torch.randint(256, (3, 12, 16), generator=generator, dtype=torch.uint8) for _ in range(count))
    return [transforms.resize(patch, list(size)) for patch, size in zip(patches, cycle(sizes), strict=False)]


def compare_outputs(
    graph: ExportGraph, path: Path, batches: Sequence[Batch], tolerances: Mapping[str, float] | None
) -> list[Comparison]:
    """Compare the outputs of a file with those of torch, on the device of the file.

    A detector that chooses among tokens or detections by their scores may choose others of nearly the same score in
    another program, and the order of the queries changes with it. torch is therefore given the choice of the file; the
    difference ``selection`` is by how much the chosen scores fall short of the best ones.

    Raises:
        InputError: the detector refuses all batches, because they have too few tokens.
    """
    runtime: FileDetector
    if path.suffix == ONNX_SUFFIX:
        content, selections = _with_selections(path)
        runtime = OnnxDetector(content, str(path))
    else:
        is_openvino = path.suffix == OPENVINO_SUFFIX
        runtime = OpenVinoDetector(path, with_selections=True) if is_openvino else PackageDetector(path)
        selections = [name for name in runtime.names if name not in graph.names]
    compared, refused = [], None
    for batch in batches:
        fed = runtime.fitted(batch)
        whole = [value.to(runtime.device) for value in runtime.feeds(fed).values()]
        found = runtime.run(fed)
        given = GivenSelections([found[name].to(runtime.device) for name in selections])
        try:
            with torch.no_grad(), given:
                expected = graph(*whole)
        except InputError as error:
            refused = error
            logger.warning("a batch of %d x %d pixels is not compared: %s", *fed.images.shape[2:], error)
            continue
        values = {name: _difference(found[name], value) for name, value in zip(graph.names, expected, strict=True)}
        values |= {"selection": given.shortfall} if selections else {}
        size = (fed.images.shape[2], fed.images.shape[3])
        compared.append(Comparison(len(fed), size, bool(fed.padding_mask.any()), values, tolerances))
    if compared:
        return compared
    raise refused or InputError("there are no images to compare the outputs with")


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference; NaN if one of the values is not finite."""
    if found.shape != expected.shape:
        return float("nan")
    return float((found.double() - expected.to(found.device).double()).abs().max())


def _with_selections(path: Path) -> tuple[bytes, list[str]]:
    """Return an ONNX file with the indices of its TopK nodes as further outputs, and their names in order."""
    onnx = imported("onnx")
    model = onnx.load(str(path))
    names = selection_names(model)
    for name in names:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None))
    return model.SerializeToString(), names


def selection_names(onnx_model: Any) -> list[str]:
    """Return the names of the tensors with the indices of chosen tokens and detections, in order of computation."""
    return [node.output[1] for node in onnx_model.graph.node if node.op_type == "TopK"]


class GivenSelections(TorchFunctionMode):
    """Replace the indices of every ``topk`` by given ones, and record by how much their values fall short."""

    def __init__(self, indices: Sequence[Tensor]) -> None:
        super().__init__()
        self.indices = list(indices)
        self.shortfall = 0.0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (Tensor.topk, torch.topk):
            return result
        given = self.indices.pop(0)
        difference = _difference(values := args[0].gather(-1, given), result.values)
        if not (math.isnan(self.shortfall) or difference <= self.shortfall):  # NaN stays
            self.shortfall = difference
        return torch.return_types.topk((values, given))


def parity_table(compared: Sequence[Comparison]) -> str:
    """Return the comparisons as a table of text."""
    names = list(compared[0].differences)
    rows = [["images", "height x width", "padded", *names]]
    for each in compared:
        values = [f"{each.differences[name]:.1e}" for name in names]
        rows.append([str(each.images), f"{each.size[0]} x {each.size[1]}", "yes" if each.padded else "no", *values])
    limits = compared[0].tolerances
    if limits is not None:
        rows.append(["tolerance", "", "", *(f"{limits[name]:.0e}" for name in names)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def parity_refusal(path: Path, compared: Sequence[Comparison]) -> str:
    """Return the message for outputs that differ by more than the tolerance, or without one are not finite."""
    names = sorted({name for each in compared for name in each.beyond})
    if compared[0].tolerances is None:
        return (
            f"in this precision the outputs of the file are not finite in {', '.join(names)}; {printable(path)} was "
            f"not written: export it in another precision.\n{parity_table(compared)}"
        )
    return (
        f"the file and torch differ by more than the tolerance in {', '.join(names)}; {printable(path)} was not "
        f"written. Please report it with this table.\n{parity_table(compared)}"
    )
