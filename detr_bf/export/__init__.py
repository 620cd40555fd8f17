"""ONNX files of detectors: graph, metadata, comparison with torch, and detectors that onnxruntime computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from detr_bf.data.transforms import eval_sample
from detr_bf.errors import InputError
from detr_bf.export.graph import (
    ONNX_FORMAT,
    OPSET,
    Exported,
    ExportGraph,
    FitResize,
    Form,
    OnnxDetector,
    export_graph,
    file_metadata,
    fixed_transform,
    imported,
    onnx_content,
    set_metadata,
    traced,
)
from detr_bf.export.parity import (
    COMPARED_BATCH,
    TOLERANCES,
    Comparison,
    GivenSelections,
    ParityError,
    compare_outputs,
    compared_batches,
    parity_refusal,
    parity_table,
    synthetic_images,
)
from detr_bf.export.precision import (
    EXPORT_PRECISIONS,
    MAX_CALIBRATION,
    calibration_files,
    half_precision,
    int8_precision,
)
from detr_bf.files import atomic_write, check_output_file
from detr_bf.structures import Batch
from detr_bf.text import printable

__all__ = [
    "COMPARED_BATCH",
    "EXPORT_PRECISIONS",
    "MAX_CALIBRATION",
    "ONNX_FORMAT",
    "ONNX_SUFFIX",
    "OPSET",
    "TOLERANCES",
    "Comparison",
    "ExportGraph",
    "Exported",
    "FitResize",
    "Form",
    "GivenSelections",
    "OnnxDetector",
    "ParityError",
    "calibration_files",
    "compare_outputs",
    "compared_batches",
    "export_onnx",
    "file_metadata",
    "fixed_transform",
    "onnx_content",
    "parity_table",
    "synthetic_images",
]

ONNX_SUFFIX = ".onnx"


def export_onnx(
    path: Path,
    exported: Exported,
    form: Form,
    images: Sequence[Tensor],
    *,
    source: str,
    license: str | None = None,
    precision: str = "float32",
    calibration: Iterable[Tensor] = (),
    evaluate: Callable[[Path], Mapping[str, Any]] | None = None,
) -> list[Comparison]:
    """Write an ONNX file after comparing its outputs in onnxruntime with those of torch.

    Args:
        path: new file.
        exported: the detector.
        form: inputs and outputs.
        images: uint8 (3, h, w), to compare with.
        source: short description of the images, for the metadata.
        license: of the weights.
        precision: one of ``EXPORT_PRECISIONS``. float16 and int8 have no tolerance: outputs only have to be finite.
        calibration: uint8 (3, h, w), with which the activations of int8 are measured; read one after the other.
        evaluate: called with the path of the unfinished file, which :func:`detr_bf.load` reads; its result is the
            metadata ``ap``.

    Raises:
        InputError: a package is missing, the file exists or cannot be written, the images of a batch attend to each
            other, the graph does not allow the form, or the detector cannot be quantised.
        ParityError: an output differs by more than its tolerance, or is not finite; nothing was written.
    """
    assert precision in EXPORT_PRECISIONS
    _check_possible(path)
    settings = exported.config["data"]["transforms"]
    transform = fixed_transform(exported.transform, form, settings["square"])
    graph = export_graph(exported, form)
    short_side = settings["square"] or settings["eval_short_side"]
    onnx_model = traced(graph, form, padded=form.pads(settings["square"]), short_side=short_side)
    set_metadata(onnx_model, {**file_metadata(exported, form, license), "precision": precision})
    batches = list(compared_batches(images, transform, form, settings["square"]))
    with atomic_write(path) as temporary:
        temporary.write_bytes(onnx_model.SerializeToString())
        if precision == "float16":
            onnx_model = half_precision(onnx_model)
        elif precision == "int8":
            samples = (eval_sample(transform, pixels, index) for index, pixels in enumerate(calibration))
            onnx_model = int8_precision(onnx_model, temporary, (Batch.collate([sample]) for sample in samples))
        temporary.write_bytes(onnx_model.SerializeToString())
        tolerances = TOLERANCES if precision == "float32" else None
        compared = compare_outputs(graph, temporary, batches, tolerances)
        if any(each.beyond for each in compared):
            raise ParityError(parity_refusal(path, compared))
        values = [{name: value for name, value in asdict(each).items() if name != "tolerances"} for each in compared]
        set_metadata(onnx_model, {"parity": {"images": source, "tolerances": tolerances, "batches": values}})
        if evaluate is not None:
            set_metadata(onnx_model, {"ap": evaluate(temporary)})
        temporary.write_bytes(onnx_model.SerializeToString())
    return compared


def _check_possible(path: Path) -> None:
    """Check before the long computation that the packages are installed and the file can be written."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        imported(name)
    if path.suffix != ONNX_SUFFIX:
        raise InputError(f"{printable(path)}: the name of an ONNX file ends in {ONNX_SUFFIX}")
    check_output_file(path, "output")
    if path.exists() or path.is_symlink():
        raise InputError(f"{printable(path)} exists: give another name, or remove it")
