"""Comparison of the outputs of an exported file with those of torch."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torchvision.transforms.v2 import functional as transforms

from detr_bf.common.errors import CommandError, InputError
from detr_bf.common.structures import Batch, Target
from detr_bf.common.text import printable
from detr_bf.data.images import RGB, PixelFormat, pixel_values
from detr_bf.data.references import other_size
from detr_bf.data.transforms import SampleTransform, eval_sample
from detr_bf.export.graph import ONNX_SUFFIX, OPENVINO_SUFFIX, ExportGraph, ExportSignature, imported
from detr_bf.export.runtime import FileDetector, OnnxDetector, OpenVinoDetector, file_detector

logger = logging.getLogger(__name__)

ImagePair: TypeAlias = tuple[Tensor, Tensor | None]  # image (C, h, w) and its reference; None: none is read
PairSample: TypeAlias = tuple[Tensor, Target] | tuple[Tensor, Target, Tensor | None]  # as Batch.collate takes it

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
    reference_effect: float | None = None  # of the references on the outputs of the file; None: it reads none

    @property
    def values(self) -> dict[str, Any]:
        """All values but the tolerances, for the metadata of a file."""
        left_out = {"tolerances"} | ({"reference_effect"} if self.reference_effect is None else set())
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    @property
    def beyond(self) -> list[str]:
        """Names of the outputs that differ by more than the tolerance; NaN does."""
        limits = self.tolerances or dict.fromkeys(self.differences, sys.float_info.max)
        return [name for name, value in self.differences.items() if not value <= limits[name]]


def compared_batches(
    images: Sequence[ImagePair], transform: SampleTransform, form: ExportSignature, square: int | None
) -> Iterator[Batch]:
    """Yield batches of one image and of several that the form allows, of several sizes where it does.

    With references the last one is repeated with the negative of each image as its reference, which differs from it.

    Raises:
        InputError: see :func:`pair_sample`.
    """
    samples = [pair_sample(transform, pair, index) for index, pair in enumerate(images)]
    if square is None:
        samples = [_scaled(each, scale) for each, scale in zip(samples, cycle(COMPARED_SCALES), strict=False)]
    batches = [Batch.collate([sample]) for sample in samples] if form.batch in (None, 1) else []
    if form.batch != 1:
        batches.append(Batch.collate(list(islice(cycle(samples), form.batch or COMPARED_BATCH))))
    yield from batches
    if batches and (last := batches[-1]).references is not None:
        yield replace(last, references=255 - last.images)


def pair_sample(transform: SampleTransform, pair: ImagePair, index: int) -> PairSample:
    """Return a transformed image with its target and its transformed reference, if it has one.

    Raises:
        InputError: the reference has another size than the image.
    """
    (image, target), reference = eval_sample(transform, pair[0], index), pair[1]
    if reference is None:
        return image, target
    if reference.shape != pair[0].shape:
        raise InputError(other_size(f"of image {index}", reference, pair[0]))
    return image, target, eval_sample(transform, reference, index)[0]


def _scaled(sample: PairSample, scale: float) -> PairSample:
    image, target, *references = sample
    size = (max(1, int(target.size[0] * scale)), max(1, int(target.size[1] * scale)))
    image, *references = (transforms.resize(each, list(size), antialias=True) for each in (image, *references))
    return (image, replace(target, size=size), *references)


def synthetic_pairs(references: bool, pixel_format: PixelFormat = RGB) -> list[ImagePair]:
    """Return the images of :func:`synthetic_images`, with ``references`` the mirror image of each beside it."""
    images = synthetic_images(pixel_format=pixel_format)
    return [(image, image.flip(-1) if references else None) for image in images]


def synthetic_images(count: int = COMPARED_BATCH, pixel_format: PixelFormat = RGB) -> list[Tensor]:
    """Return images (C, h, w) of coloured patches in several aspect ratios."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(480, 640), (640, 480), (375, 500)]
    patches = (pixel_format.random_pixels(12, 16, generator=generator) for _ in range(count))
    images = [transforms.resize(pixel_values(patch), list(size)) for patch, size in zip(patches, cycle(sizes))]
    return images if pixel_format.depth == 8 else [(image * 257).round().to(torch.uint16) for image in images]


def compare_outputs(
    graph: ExportGraph, path: Path, batches: Sequence[Batch], tolerances: Mapping[str, float] | None
) -> list[Comparison]:
    """Compare the outputs of a file with those of torch, on the device of the file.

    A detector that chooses among tokens or detections by their scores may choose others of nearly the same score in
    another program, and the order of the queries changes with it. torch is therefore given the choice of the file; the
    difference ``selection`` is by how much the chosen scores fall short of the best ones.

    Where references are read, the effect is the largest difference between the outputs of the file and those with each
    image as its own reference.

    Raises:
        InputError: the detector refuses all batches, because they have too few tokens.
    """
    runtime: FileDetector
    if path.suffix == ONNX_SUFFIX:
        content, selections = _with_selections(path)
        runtime = OnnxDetector(content, str(path))
    else:
        is_openvino = path.suffix == OPENVINO_SUFFIX
        runtime = OpenVinoDetector(path, with_selections=True) if is_openvino else file_detector(path)
        selections = [name for name in runtime.names if name not in graph.names]
    compared, refused = [], None
    for batch in batches:
        fed = runtime.fitted(batch)
        whole = {name: value.to(runtime.device) for name, value in runtime.feeds(fed).items()}
        found = runtime.run(fed)
        given = GivenSelections([found[name].to(runtime.device) for name in selections])
        try:
            with torch.no_grad(), given:
                expected = graph(**whole)
        except InputError as error:
            refused = error
            logger.warning("a batch of %d x %d pixels is not compared: %s", *fed.images.shape[2:], error)
            continue
        values = {name: _difference(found[name], value) for name, value in zip(graph.names, expected, strict=True)}
        values |= {"selection": given.shortfall} if selections else {}
        size = (fed.images.shape[2], fed.images.shape[3])
        effect = None
        if graph.reads_references:
            own = runtime.run(replace(fed, references=fed.images))
            effect = max(_difference(found[name], own[name]) for name in graph.names)
        compared.append(Comparison(len(fed), size, bool(fed.padding_mask.any()), values, tolerances, effect))
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
    """Return the names of the tensors with the indices of chosen tokens and detections, in order of computation.

    Sorting is the same operation; its indices are not used.
    """
    nodes = onnx_model.graph.node
    used = {name for node in nodes for name in node.input} | {output.name for output in onnx_model.graph.output}
    return [node.output[1] for node in nodes if node.op_type == "TopK" and node.output[1] in used]


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
    names, with_effect = list(compared[0].differences), compared[0].reference_effect is not None
    rows = [["images", "height x width", "padded", *names, *["effect of references"] * with_effect]]
    for each in compared:
        values = [f"{each.differences[name]:.1e}" for name in names]
        values += [] if each.reference_effect is None else [f"{each.reference_effect:.1e}"]
        rows.append([str(each.images), f"{each.size[0]} x {each.size[1]}", "yes" if each.padded else "no", *values])
    limits = compared[0].tolerances
    if limits is not None:
        rows.append(["tolerance", "", "", *(f"{limits[name]:.0e}" for name in names), *[""] * with_effect])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def parity_refusal(path: Path, compared: Sequence[Comparison]) -> str | None:
    """Return the message for outputs that differ by more than the tolerance, or without one are not finite.

    Another one is for outputs on which references have no effect; None: the file may be written.
    """
    names = sorted({name for each in compared for name in each.beyond})
    if not names:
        if not compared or compared[0].reference_effect is None or any(each.reference_effect for each in compared):
            return None
        return (
            f"the detector reads references, but they change no output of the file; {printable(path)} was not written. "
            "The weights with which model.backbone.reference=stack reads them are zero before training: train the "
            f"detector first; else report it with this table.\n{parity_table(compared)}"
        )
    if compared[0].tolerances is None:
        return (
            f"in this precision the outputs of the file are not finite in {', '.join(names)}; {printable(path)} was "
            f"not written: export it in another precision.\n{parity_table(compared)}"
        )
    return (
        f"the file and torch differ by more than the tolerance in {', '.join(names)}; {printable(path)} was not "
        f"written. Please report it with this table.\n{parity_table(compared)}"
    )
