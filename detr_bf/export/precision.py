"""ONNX models with float16 or int8 weights: conversion and calibration by onnxruntime's own tools."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from detr_bf.common.errors import InputError
from detr_bf.common.files import is_folder
from detr_bf.common.structures import Batch
from detr_bf.common.text import printable
from detr_bf.data.inputs import image_files
from detr_bf.export.graph import imported
from detr_bf.export.runtime import OnnxDetector

EXPORT_PRECISIONS = ("float32", "float16", "int8")
MAX_CALIBRATION = 100  # images
_WEIGHTED = ("Conv", "ConvTranspose", "MatMul", "Gemm")
# Operators whose outputs are features, not coordinates: before them float16 is precise enough.
_FEATURES = {*_WEIGHTED, "LayerNormalization", "GroupNormalization", "Softmax", "GridSample"}
# Inputs that are positions, scores to be sorted, or angles of a position encoding; they are computed in float32.
_EXACT_INPUTS = {"GridSample": 1, "TopK": 0, "Sin": 0, "Cos": 0}


def half_precision(onnx_model: Any) -> Any:
    """Return the model in float16, apart from its inputs and outputs and all that computes coordinates.

    Positions, their inverse sigmoid and sine embedding, sorted scores and outputs stay float32 back to the last layer
    with weights: the positions of float16 between 0.5 and 1 are half a pixel apart in an image of 1,024 pixels.
    """
    onnx = imported("onnx")
    convert = imported("onnxruntime.transformers.float16")
    models = imported("onnxruntime.transformers.onnx_model")
    with _quiet_tools():
        converted = convert.convert_float_to_float16(
            onnx.ModelProto.FromString(onnx_model.SerializeToString()),
            keep_io_types=True,
            op_block_list=sorted({*convert.DEFAULT_OP_BLOCK_LIST, *_EXACT_INPUTS}),
            node_block_list=sorted(exact_nodes(onnx_model.graph)),
        )
        # onnxruntime 1.25 to 1.31 casts a value again for each operator that reads it, under the same name.
        nodes = {tuple(node.output): node for node in converted.graph.node}
        del converted.graph.node[:]
        converted.graph.node.extend(nodes.values())
        sorted_model = models.OnnxModel(converted)
        sorted_model.topological_sort()
    return sorted_model.model


def exact_nodes(graph: Any) -> set[str]:
    """Return the names of the nodes of a graph that compute coordinates, scores and outputs."""
    maker = {name: node for node in graph.node for name in node.output}
    wanted = [output.name for output in graph.output]
    for node in graph.node:
        if node.op_type in _EXACT_INPUTS:
            wanted.append(node.input[_EXACT_INPUTS[node.op_type]])
    found: set[str] = set()
    while wanted:
        node = maker.get(wanted.pop())
        if node is None or node.name in found or node.op_type in _FEATURES:
            continue
        found.add(node.name)
        wanted += node.input
    return found


def int8_precision(onnx_model: Any, batches: Iterable[Batch]) -> Any:
    """Return the model with int8 weights and uint8 activations of its layers; scales are measured on batches.

    All layers with constant weights are quantised. Weights have 7 bits and a scale for each channel: processors
    without VNNI would saturate with 8.

    Args:
        onnx_model: in float32, with its metadata.
        batches: at least one, prepared as for the detector; read one after the other.

    Raises:
        InputError: there is no batch, the images do not fit the file, or onnxruntime cannot quantise the model.
    """
    onnx, tools = imported("onnx"), imported("onnxruntime.quantization")
    content = onnx_model.SerializeToString()
    runtime = OnnxDetector(content, "the detector")
    inputs = (runtime.feeds(runtime.fitted(batch)) for batch in batches)
    feeds = ({name: value.numpy() for name, value in each.items()} for each in inputs)
    reader = type("_Reader", (tools.CalibrationDataReader,), {"get_next": lambda _: next(feeds, None)})()
    with tempfile.TemporaryDirectory() as folder, _quiet_tools():
        source, output = Path(folder) / "float32.onnx", Path(folder) / "int8.onnx"
        source.write_bytes(content)  # the tool writes files beside its input
        try:
            tools.quantize_static(
                str(source),
                str(output),
                reader,
                quant_format=tools.QuantFormat.QDQ,
                op_types_to_quantize=["Conv", "MatMul", "Gemm"],
                per_channel=True,
                reduce_range=True,
                activation_type=tools.QuantType.QUInt8,
                weight_type=tools.QuantType.QInt8,
                extra_options={"MatMulConstBOnly": True},
            )
        except InputError:
            raise
        except Exception as error:  # onnxruntime has many classes of exceptions
            raise InputError(f"onnxruntime cannot quantise the detector: {printable(error, 500)}") from error
        quantised = onnx.load(str(output))
    for node in quantised.graph.node:
        del node.metadata_props[:]  # where a node comes from; about a sixth of an int8 file
    del quantised.metadata_props[:]  # the tool adds some of its own
    quantised.metadata_props.extend(onnx_model.metadata_props)
    return quantised


def calibration_files(folder: Path) -> list[Path]:
    """Return up to ``MAX_CALIBRATION`` image files of a folder, evenly spaced by name.

    Raises:
        InputError: there is no such folder, or it has no images.
    """
    if not is_folder(folder):
        raise InputError(f"there is no folder {printable(folder)}: int8 is calibrated with a folder of images")
    files = list(image_files([folder]))
    count = min(len(files), MAX_CALIBRATION)
    return [files[index * len(files) // count] for index in range(count)]


@contextmanager
def _quiet_tools() -> Iterator[None]:
    """Leave out the advice that onnxruntime's tools log."""
    root, level = logging.getLogger(), logging.getLogger().level
    try:
        root.setLevel(logging.ERROR)
        yield
    finally:
        root.setLevel(level)
