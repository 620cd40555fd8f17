"""Graph of a detector as a file for phones and boards: ExecuTorch, LiteRT and Core ML."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from detr_bf.common.errors import InputError
from detr_bf.common.text import printable
from detr_bf.export.graph import (
    COREML_SUFFIX,
    EXECUTORCH_SUFFIX,
    LITERT_SUFFIX,
    MOBILE_FORMATS,
    MOBILE_METADATA,
    ExportGraph,
    ExportSignature,
    SelectionGraph,
    imported,
    quiet_export,
    traced,
)

_EXTRAS = {  # by suffix: name of the format, its extra, and the modules that write and read it
    EXECUTORCH_SUFFIX: ("ExecuTorch", "executorch", ("executorch.exir", "executorch.runtime")),
    LITERT_SUFFIX: ("LiteRT", "litert", ("litert_torch", "ai_edge_litert.interpreter")),
    COREML_SUFFIX: ("Core ML", "coreml", ("coremltools",)),
}


def check_mobile(suffix: str, form: ExportSignature, precision: str, device: str) -> None:
    """Raise InputError if a mobile file cannot have the form, the precision or the device, or a package is missing."""
    name, extra, modules = _EXTRAS[suffix]
    if form.batch != 1 or form.size is None:
        raise InputError(f"{name} files ({suffix}) take one image of a fixed size: give --batch 1 --size HEIGHTxWIDTH")
    if precision != "float32":
        raise InputError(f"precision={precision}: {name} files ({suffix}) are in float32: leave --half and --int8 out")
    if device != "cpu":
        raise InputError(f"device={printable(device)}: {name} files ({suffix}) are not compiled for a device")
    with quiet_export():
        for module in modules:
            imported(module, f"{name} files", extra)


def mobile_file(
    suffix: str, graph: ExportGraph, form: ExportSignature, *, padded: bool
) -> Callable[[Path, Mapping[str, Any]], None]:
    """Return a function that writes the graph, in the format of a suffix, with metadata.

    Raises:
        InputError: the format cannot express an operator of the detector.
    """
    name = _EXTRAS[suffix][0]
    if graph.postprocess is not None and graph.postprocess.nms is not None:  # its number of outputs is open
        raise InputError(
            f"{name} cannot express the operator torchvision::nms of eval.nms={graph.postprocess.nms}: leave "
            "--with-postprocess out, or the filter with --nms null"
        )
    if suffix == COREML_SUFFIX and not graph.pixel_format.is_rgb:
        raise InputError(
            f"{name} images are RGB of 8 bits, not data.channels={graph.pixel_format.channels} of "
            f"{graph.pixel_format.depth} bits: export another format"
        )
    with torch.no_grad(), _converting(name):
        if suffix == COREML_SUFFIX:
            model = _coreml_model(graph, form, padded=padded)
        else:
            with_selections = SelectionGraph(graph)
            reads, kind = graph.reads_references, graph.pixel_format
            program = traced(with_selections, form, padded=padded, references=reads, pixel_format=kind)
            num_selections = len(program.graph_signature.user_outputs) - len(graph.names)
            outputs = [*graph.names, *(f"selection_{number}" for number in range(num_selections))]
            inputs = ["images", *["sizes"] * padded, *["references"] * graph.reads_references]
            is_litert = suffix == LITERT_SUFFIX
            content = _litert_model(program, inputs, outputs) if is_litert else _executorch_program(program)
    if suffix != COREML_SUFFIX:
        own = {"outputs": outputs, "padded": padded}
        return lambda path, metadata: write_mobile(content, path, {**metadata, **own})

    def save(path: Path, metadata: Mapping[str, Any]) -> None:
        values = json.dumps({"format": MOBILE_FORMATS[suffix], **metadata})
        model.user_defined_metadata["detr_bf"] = values
        model.save(str(path))

    return save


@contextmanager
def _converting(name: str) -> Iterator[None]:
    """Leave out what a converter prints, and raise its errors, which have no common class, as InputError."""
    try:
        with quiet_export(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{name} cannot express the detector: {printable(error, 1000)}") from error


def _executorch_program(program: torch.export.ExportedProgram) -> bytes:
    """Return a program for ExecuTorch: what XNNPACK knows is computed by it, the rest by portable operators."""
    exir = imported("executorch.exir")
    program = program.run_decompositions({torch.ops.aten.sort.default: _sort})
    xnnpack = imported("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    lowered = exir.to_edge_transform_and_lower(program, partitioner=[xnnpack.XnnpackPartitioner()]).to_executorch()
    (plan,) = lowered.executorch_program.execution_plan
    needed = {f"{each.name}.{each.overload}".removesuffix(".") for each in plan.operators}
    known = imported("executorch.runtime").Runtime.get().operator_registry.operator_names
    if missing := sorted(needed - known):
        raise InputError(f"ExecuTorch cannot express the detector: its runtime lacks {printable(', '.join(missing))}")
    return bytes(lowered.buffer)


def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> Sequence[Tensor]:
    """Sort by the indices of ``topk``: ExecuTorch 1.5 and LiteRT 2.3 have no sort, to which LiteRT turns its values."""
    indices = x.topk(x.shape[dim], dim, largest=descending).indices
    return x.gather(dim, indices), indices


class _Named(nn.Module):
    """Program with inputs and outputs that have names."""

    def __init__(self, program: nn.Module, outputs: Sequence[str]) -> None:
        super().__init__()
        self.program, self.outputs = program, list(outputs)
        self.training = False  # programs know no eval()

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.outputs, self.program(*inputs.values()), strict=True))


def _litert_model(program: torch.export.ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
    """Return a model for LiteRT; its integers of 64 bits become those of 32."""
    litert, aten = imported("litert_torch"), torch.ops.aten
    program = program.run_decompositions({aten.split_with_sizes.default: _split, aten.sort.default: _sort})
    examples = dict(zip(inputs, program.example_inputs[0], strict=True))
    return bytes(
        litert.convert(_Named(program.module(), outputs), sample_kwargs=examples, strict_export=False).model_content()
    )


def _split(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    """Split by slices: litert-torch 0.10 fails at a split into one part."""
    return [x.narrow(dim, sum(sizes[:index]), size) for index, size in enumerate(sizes)]


def _coreml_model(graph: ExportGraph, form: ExportSignature, *, padded: bool) -> Any:
    """Return a model for Core ML, whose ``images`` and ``references`` are images instead of arrays."""
    coremltools, aten = imported("coremltools"), torch.ops.aten
    program = traced(graph, form, padded=padded, references=graph.reads_references, pixels=torch.float32)
    program = program.run_decompositions(
        {
            aten.__or__.Tensor: lambda a, b: torch.logical_or(a, b) if a.dtype == torch.bool else NotImplemented,
            aten.__and__.Tensor: lambda a, b: torch.logical_and(a, b) if a.dtype == torch.bool else NotImplemented,
            aten.alias.default: lambda x: x.view(x.shape),
            # of coremltools 9 it is a float, which is no index
            aten.floor_divide.default: lambda a, b: torch.div(a, b, rounding_mode="floor").int().to(a.dtype),
            aten.where.ScalarOther: lambda condition, x, other: torch.where(condition, x, torch.full_like(x, other)),
        }
    )
    assert form.size is not None, "mobile files have a fixed size"
    shape = (1, 3, *form.size)

    def image(name: str) -> Any:
        return coremltools.ImageType(name, shape=shape, color_layout=coremltools.colorlayout.RGB)

    sizes = [coremltools.TensorType("sizes", shape=(1, 2), dtype=int)] if padded else []
    return coremltools.convert(
        program,
        inputs=[image("images"), *sizes, *([image("references")] if graph.reads_references else [])],
        outputs=[coremltools.TensorType(name) for name in graph.names],
        minimum_deployment_target=coremltools.target.iOS17,
        compute_precision=coremltools.precision.FLOAT32,
        skip_model_load=True,
    )


def write_mobile(content: bytes, path: Path, metadata: Mapping[str, Any]) -> None:
    """Write a program and, in a ZIP archive behind it, its metadata, as TensorFlow Lite has associated files."""
    own = {"format": MOBILE_FORMATS[path.suffix], "program": hashlib.sha256(content).hexdigest()}
    path.write_bytes(content)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(MOBILE_METADATA, json.dumps({**metadata, **own}))
