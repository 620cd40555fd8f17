"""Check of an ONNX model against the table of operators that TensorRT's ONNX parser takes.

Source: ``docs/operators.md`` of onnx-tensorrt, release 10.1 (TensorRT 10.0 and 10.1; opsets 9 to 20). Newer releases
take more. The table is what the parser states; no file of this project was built by TensorRT so far.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from detr_bf.export.graph import imported

MAX_OPSET = 20
MAX_TOPK = 3839
_FLOATS, _INTEGERS = {"FLOAT", "FLOAT16", "BFLOAT16"}, {"INT32", "INT64"}
_NUMBERS, _ANY = _FLOATS | _INTEGERS, _FLOATS | _INTEGERS | {"BOOL"}
_HALF = {"FLOAT", "FLOAT16"}
_OPERATORS = (  # by the types of their data
    ({"BOOL"}, "And Not Or Xor"),
    (_FLOATS, "Floor"),
    (_HALF, "DeformConv GridSample Mish NonMaxSuppression NonZero RoiAlign"),
    ({"INT8", "FLOAT8E4M3FN", "INT4"}, "DequantizeLinear"),
    (_ANY | {"UINT8"}, "Cast CastLike"),
    (_NUMBERS | {"INT8"}, "Gelu"),
    (
        _FLOATS,
        "Acos Acosh Asin Asinh Atan Atanh AveragePool BatchNormalization Ceil Celu Clip Conv ConvTranspose Cos Cosh "
        "CumSum Dropout Einsum Elu Erf Exp Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool GroupNormalization "
        "GRU HardSigmoid HardSwish Hardmax InstanceNormalization IsInf LayerNormalization LeakyRelu Log LogSoftmax LRN "
        "LSTM LpNormalization LpPool MatMul MaxPool MeanVarianceNormalization PRelu Pow QuantizeLinear RandomNormal "
        "RandomNormalLike RandomUniform RandomUniformLike Reciprocal Resize RNN Round Scan Selu Sigmoid Sin Sinh "
        "Softmax Softplus Softsign Sqrt Tan Tanh ThresholdedRelu Upsample",
    ),
    (
        _NUMBERS,
        "Abs Add ArgMax ArgMin DepthToSpace Div Equal Greater GreaterOrEqual IsNaN Less LessOrEqual Max Mean Min Mod "
        "Mul Neg Pad Range ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
        "ReduceSum ReduceSumSquare Relu Scatter ScatterElements ScatterND Shrink Sign SpaceToDepth Sub Sum TopK",
    ),
    (
        _ANY,
        "Concat Constant ConstantOfShape Expand EyeLike Flatten Gather GatherElements GatherND Identity If Loop OneHot "
        "Reshape ReverseSequence Shape Size Slice Split Squeeze Tile Transpose Trilu Unsqueeze Where",
    ),
)
_TYPES: Mapping[str, set[str]] = {name: types for types, names in _OPERATORS for name in names.split()}
_CONSTANT_INPUTS = {"CumSum": 1, "OneHot": 1, "Pad": 3, "Slice": 3, "Squeeze": 1, "Unsqueeze": 1}  # reductions: 1
_RESIZE_MODES = ("half_pixel", "pytorch_half_pixel", "tf_half_pixel_for_nn", "asymmetric", "align_corners")


def tensorrt_refusals(onnx_model: Any) -> list[str]:
    """Return what TensorRT 10 would refuse in an ONNX model, such as ``CumSum of INT64 (3 nodes)``; none: empty."""
    onnx = imported("onnx")
    model = copy.copy(onnx_model)
    del model.graph.value_info[:]  # those of float16 files are of before the conversion
    graph = onnx.shape_inference.infer_shapes(model).graph
    named = {each.name: each.type.tensor_type for each in (*graph.input, *graph.value_info, *graph.output)}
    types = {name: onnx.TensorProto.DataType.Name(each.elem_type) for name, each in named.items()}
    types |= {each.name: onnx.TensorProto.DataType.Name(each.data_type) for each in graph.initializer}
    ranks = {name: len(each.shape.dim) for name, each in named.items() if each.HasField("shape")}
    known = {each.name: each for each in graph.initializer}
    known |= {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}
    constants = {name: onnx.numpy_helper.to_array(each) for name, each in known.items()}
    refused: Counter[str] = Counter()
    for node in _nodes(graph):
        if node.domain not in ("", "ai.onnx") or node.op_type not in _TYPES:
            refused[f"{node.domain or 'ONNX'}.{node.op_type}"] += 1
            continue
        data = [name for name in node.input if name][node.op_type == "Where" :][:1]
        if data and (kind := types.get(data[0], "unknown type")) not in _TYPES[node.op_type]:
            refused[f"{node.op_type} of {kind}"] += 1
        refused.update(_restrictions(node, onnx, constants, ranks, types))
    opset = next((each.version for each in onnx_model.opset_import if each.domain in ("", "ai.onnx")), 0)
    newer = [f"opset {opset}: at most {MAX_OPSET}"] if opset > MAX_OPSET else []
    return newer + [f"{text} ({count} node{'s' * (count > 1)})" for text, count in sorted(refused.items())]


def _nodes(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph and of the graphs in their attributes."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from _nodes(inner)


def _restrictions(
    node: Any, onnx: Any, constants: Mapping[str, Any], ranks: Mapping[str, int], types: Mapping[str, str]
) -> Iterator[str]:
    """Yield the restrictions of an operator that a node breaks."""
    kind, inputs = node.op_type, [*node.input, "", "", "", ""]
    values = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    place = 1 if kind.startswith("Reduce") else _CONSTANT_INPUTS.get(kind, 0)
    if place and inputs[place] and inputs[place] not in constants:
        yield f"{kind} whose input {place} is no constant"
    if kind == "TopK":
        if values.get("sorted", 1) != 1:
            yield "TopK that is not sorted"
        if inputs[1] in constants and int(constants[inputs[1]].max()) > MAX_TOPK:
            yield f"TopK of more than {MAX_TOPK}"
    if kind == "Resize":
        mode = values.get("mode", b"nearest").decode()
        position = values.get("coordinate_transformation_mode", b"half_pixel").decode()
        if mode == "cubic" or position not in _RESIZE_MODES or values.get("antialias", 0):
            yield f"Resize with {mode}, {position}{', antialias' * values.get('antialias', 0)}"
    if kind in ("AveragePool", "LpPool", "MaxPool") and set(values.get("dilations", [1])) != {1}:
        yield f"{kind} with dilations"
    if kind in ("MaxPool", "LayerNormalization") and any(list(node.output)[1:]):
        yield f"{kind} with more than one output"
    if kind == "GridSample" and ranks.get(inputs[0], 4) != 4:
        yield "GridSample of other than four dimensions"
    if kind == "ScatterND" and values.get("reduction", b"none") != b"none":
        yield "ScatterND with a reduction"
    if kind in ("QuantizeLinear", "DequantizeLinear") and inputs[2]:
        if kind == "QuantizeLinear" and (to := types.get(inputs[2], "INT8")) not in _TYPES["DequantizeLinear"]:
            yield f"QuantizeLinear to {to}"
        if inputs[2] not in constants or constants[inputs[2]].any():
            yield f"{kind} with a zero point"


def tensorrt_line(path: Path) -> str:
    """Return a sentence for the user about an ONNX file."""
    model = imported("onnx").load(str(path))
    if refused := tensorrt_refusals(model):
        return f"TensorRT 10 refuses, by its table of operators: {'; '.join(refused)}"
    said = "TensorRT 10 takes every operator of the file, by its table; building was not tried"
    if any(node.op_type == "NonMaxSuppression" for node in model.graph.node):
        said += ". The number of outputs of its NonMaxSuppression (eval.nms) depends on the data: --nms null is safer"
    return said
