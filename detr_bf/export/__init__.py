"""Files of detectors: ONNX, OpenVINO, compiled packages, phones; metadata, comparison with torch, loading."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from detr_bf.common.errors import InputError
from detr_bf.common.files import UNFINISHED, atomic_write, check_output_file, file_sha256
from detr_bf.common.structures import Batch
from detr_bf.common.text import listed, printable
from detr_bf.export.graph import (
    COREML_SUFFIX,
    EXAMPLE_SIDE,
    FILE_SUFFIXES,
    MOBILE_SUFFIXES,
    ONNX_FORMAT,
    ONNX_SUFFIX,
    OPENVINO_SUFFIX,
    OPSET,
    PACKAGE_SUFFIX,
    WEIGHTS_SUFFIX,
    Exported,
    ExportGraph,
    ExportSignature,
    FitResize,
    SelectionGraph,
    compile_package,
    export_graph,
    file_metadata,
    fixed_transform,
    imported,
    imported_openvino,
    onnx_model,
    pads_by_size,
    set_metadata,
    traced,
    write_openvino,
    write_package,
)
from detr_bf.export.mobile import check_mobile, mobile_file
from detr_bf.export.parity import (
    COMPARED_BATCH,
    TOLERANCES,
    Comparison,
    GivenSelections,
    ImagePair,
    ParityError,
    compare_outputs,
    compared_batches,
    pair_sample,
    parity_refusal,
    parity_table,
    selection_names,
    synthetic_images,
    synthetic_pairs,
)
from detr_bf.export.precision import (
    EXPORT_PRECISIONS,
    MAX_CALIBRATION,
    calibration_files,
    half_precision,
    int8_precision,
)
from detr_bf.export.runtime import (
    FileDetector,
    OnnxDetector,
    OpenVinoDetector,
    PackageDetector,
    file_detector,
    machine_features,
)

__all__ = [
    "COMPARED_BATCH",
    "EXPORT_PRECISIONS",
    "FILE_SUFFIXES",
    "MAX_CALIBRATION",
    "ONNX_FORMAT",
    "OPSET",
    "TOLERANCES",
    "Comparison",
    "ExportGraph",
    "ExportSignature",
    "Exported",
    "FileDetector",
    "FitResize",
    "GivenSelections",
    "ImagePair",
    "OnnxDetector",
    "OpenVinoDetector",
    "PackageDetector",
    "ParityError",
    "calibration_files",
    "compare_outputs",
    "compared_batches",
    "export_detector",
    "file_detector",
    "file_metadata",
    "file_names",
    "fixed_transform",
    "parity_table",
    "synthetic_images",
    "synthetic_pairs",
]

logger = logging.getLogger(__name__)

Save = Callable[[Path, Mapping[str, Any]], None]  # writes a file with metadata


def export_detector(
    path: Path,
    exported: Exported,
    form: ExportSignature,
    images: Sequence[ImagePair],
    *,
    source: str,
    license: str | None = None,
    precision: str = "float32",
    calibration: Iterable[ImagePair] = (),
    evaluate: Callable[[Path], Mapping[str, Any]] | None = None,
    device: str = "cpu",
) -> list[Comparison]:
    """Write a file after comparing its outputs with those of torch.

    Args:
        path: new file ``.onnx``, ``.xml`` (OpenVINO, with the weights in ``.bin``), ``.pt2`` (AOTInductor), ``.pte``
            (ExecuTorch), ``.tflite`` (LiteRT), or folder ``.mlpackage`` (Core ML), which is not compared.
        images: to compare with, each with its reference if the detector reads references in evaluation, else None.
        source: short description of the images, for the metadata.
        precision: one of ``EXPORT_PRECISIONS``, of packages and mobile files float32. The outputs of others only have
            to be finite.
        calibration: such pairs, with which the activations of int8 are measured; read one after the other.
        evaluate: called with the unfinished file, which :func:`detr_bf.load` reads; its result is metadata ``ap``.
        device: ``cpu``, or ``cuda`` for a package that computes on a GPU.

    Raises:
        InputError: a Python package is missing, the file exists or cannot be written, the images of a batch attend to
            each other, the graph does not allow the form, the detector cannot be quantised, compiled or expressed in
            the format, or a reference is missing, is not read or has another size than its image.
        ParityError: an output is beyond its tolerance or not finite, or references have no effect; nothing is written.
    """
    settings = exported.config["data"]["transforms"]
    is_fixed = path.suffix in (PACKAGE_SUFFIX, *MOBILE_SUFFIXES) or pads_by_size(exported.model)
    if form.size is None and settings["square"] and is_fixed:
        form = replace(form, size=(settings["square"],) * 2)
        logger.info("the size of the images is fixed: the squares of the training, %d pixels", settings["square"])
    _check_possible(path, form, precision, device)
    transform = fixed_transform(exported.transform, form, settings["square"])
    graph = export_graph(exported, form, torch.device(device))
    _check_references(images, graph.reads_references)
    batches = list(compared_batches(images, transform, form, settings["square"]))
    metadata = {**file_metadata(exported, form, license), "reads_references": graph.reads_references}
    metadata["precision"] = precision
    given = (Batch.collate([pair_sample(transform, pair, index)]) for index, pair in enumerate(calibration))
    with tempfile.TemporaryDirectory() as folder:
        save = _converted(path, graph, form, metadata, given, Path(folder), settings, device)
        draft = Path(folder) / f"draft{path.suffix}"
        save(draft, metadata)
        tolerances = TOLERANCES if precision == "float32" else None
        compared = [] if path.suffix == COREML_SUFFIX else compare_outputs(graph, draft, batches, tolerances)
        if refusal := parity_refusal(path, compared):
            raise ParityError(refusal)
        values = [each.values for each in compared]
        metadata["parity"] = {"images": source, "tolerances": tolerances, "batches": values} if compared else None
        save(draft, metadata)
        if evaluate is not None:
            save(draft, {**metadata, "ap": evaluate(draft)})
        _place(draft, path)
    return compared


def _converted(
    path: Path,
    graph: ExportGraph,
    form: ExportSignature,
    metadata: Mapping[str, Any],
    calibration: Iterable[Batch],
    folder: Path,
    settings: Mapping[str, Any],
    device: str,
) -> Save:
    """Return a function that writes the graph in the format of ``path``; a package is compiled in ``folder``."""
    padded = form.pads(settings["square"])
    if path.suffix == PACKAGE_SUFFIX:
        return _package(graph, form, folder, padded=padded, device=device)
    if path.suffix in MOBILE_SUFFIXES:
        return mobile_file(path.suffix, graph, form, padded=padded)
    short_side = settings["square"] or settings["eval_short_side"]
    return _onnx(path, graph, form, metadata, calibration, padded=padded, short_side=short_side)


def _check_references(images: Sequence[ImagePair], reads_references: bool) -> None:
    for index, (_, reference) in enumerate(images):
        if (reference is not None) != reads_references:
            reads, has = ("a reference", "none") if reads_references else ("no references", "one")
            raise InputError(f"the detector reads {reads} in evaluation, and image {index} has {has}")


def _place(draft: Path, path: Path) -> None:
    """Copy the files of an export; none is left if one fails."""
    if draft.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=path.parent) as folder:
            shutil.copytree(draft, Path(folder) / path.name).rename(path)
        return
    placed: list[Path] = []
    try:
        with atomic_write(path) as temporary:
            shutil.copyfile(draft, temporary)
            for weights in file_names(path)[1:]:
                with atomic_write(weights) as other:
                    shutil.copyfile(draft.with_suffix(weights.suffix), other)
                placed.append(weights)
    except BaseException:
        for weights in placed:
            weights.unlink(missing_ok=True)
        raise


def file_names(path: Path) -> list[Path]:
    """Return the files that an export to ``path`` writes: ``path``, and with the graph of OpenVINO its weights."""
    return [path, path.with_suffix(WEIGHTS_SUFFIX)] if path.suffix == OPENVINO_SUFFIX else [path]


def _onnx(
    path: Path,
    graph: ExportGraph,
    form: ExportSignature,
    metadata: Mapping[str, Any],
    calibration: Iterable[Batch],
    *,
    padded: bool,
    short_side: int,
) -> Save:
    """Return a function that writes the graph as the suffix of ``path`` says, in the precision of the metadata."""
    references, short_side = graph.reads_references, max(short_side, EXAMPLE_SIDE)
    program = traced(
        graph,
        form,
        padded=padded,
        references=references,
        pixel_format=graph.pixel_format,
        short_side=short_side,
    )
    model = onnx_model(program, form, graph.names, padded=padded, references=references)
    if metadata["precision"] == "int8":
        set_metadata(model, metadata)
        model = int8_precision(model, calibration)
    if path.suffix == OPENVINO_SUFFIX:
        return _openvino(model, graph.names, half=metadata["precision"] == "float16")
    if metadata["precision"] == "float16":
        model = half_precision(model)

    def save(path: Path, values: Mapping[str, Any]) -> None:
        set_metadata(model, values)
        path.write_bytes(model.SerializeToString())

    return save


def _openvino(onnx_model: Any, outputs: Sequence[str], *, half: bool) -> Save:
    """Return a function that writes an ONNX model in the form of OpenVINO, with ``half`` weights in float16.

    Raises:
        InputError: OpenVINO cannot convert the model.
    """
    own: dict[str, Any] = {"outputs": list(outputs), "selections": selection_names(onnx_model)}
    del onnx_model.metadata_props[:]  # they would be converted as well
    try:
        model = imported_openvino().Core().read_model(onnx_model.SerializeToString())
    except Exception as error:  # RuntimeError and others
        raise InputError(f"OpenVINO cannot convert the detector: {printable(error, 500)}") from error

    def save(path: Path, values: Mapping[str, Any]) -> None:
        if "weights" not in own:
            write_openvino(model, path, {}, half=half)
            own["weights"] = file_sha256(path.with_suffix(WEIGHTS_SUFFIX))
        write_openvino(model, path, {**values, **own}, half=half)

    return save


def _package(graph: ExportGraph, form: ExportSignature, folder: Path, *, padded: bool, device: str) -> Save:
    """Return a function that writes the graph as machine code, compiled in ``folder``."""
    program = traced(
        SelectionGraph(graph),
        form,
        padded=padded,
        references=graph.reads_references,
        pixel_format=graph.pixel_format,
        device=torch.device(device),
    )
    compiled = compile_package(program, folder)
    num_selections = len(program.graph_signature.user_outputs) - len(graph.names)
    outputs = [*graph.names, *(f"selection_{number}" for number in range(num_selections))]
    own = {"device": device, "outputs": outputs, "padded": padded, "compiled_for": machine_features()}
    return lambda path, metadata: write_package(compiled, path, {**metadata, **own})


def _check_possible(path: Path, form: ExportSignature, precision: str, device: str) -> None:
    """Check before the long computation that what it needs is installed and the file can be written."""
    assert precision in EXPORT_PRECISIONS
    if path.suffix not in FILE_SUFFIXES:
        raise InputError(
            f"{printable(path)}: the name of an ONNX file ends in {ONNX_SUFFIX}, that of an OpenVINO file in "
            f"{OPENVINO_SUFFIX}, that of a compiled package in {PACKAGE_SUFFIX}, those for phones in "
            f"{listed(MOBILE_SUFFIXES)}"
        )
    if path.suffix in MOBILE_SUFFIXES:
        check_mobile(path.suffix, form, precision, device)
    elif path.suffix != PACKAGE_SUFFIX:
        for name in ("onnx", "onnxscript", "onnxruntime"):
            imported(name)
        if path.suffix == OPENVINO_SUFFIX:
            imported_openvino()
        if device != "cpu":
            raise InputError(f"device={printable(device)}: only packages ({PACKAGE_SUFFIX}) are compiled for a device")
    elif precision != "float32":
        raise InputError(f"precision={precision}: packages ({PACKAGE_SUFFIX}) are in float32: leave --half, --int8 out")
    elif form.size is None:
        raise InputError(f"a package ({PACKAGE_SUFFIX}) has a fixed size of images: give --size HEIGHTxWIDTH")
    if device not in ("cpu", "cuda"):
        raise InputError(f"device={printable(device)}: a package is compiled for cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device=cuda: torch finds no GPU to compile for and to compare the outputs on")
    for file in file_names(path):
        if path.suffix != COREML_SUFFIX or not file.is_dir():  # Core ML's files are folders
            check_output_file(file, "output")
        if file.exists() or file.is_symlink():
            raise InputError(f"{printable(file)} exists: give another name, or remove it")
