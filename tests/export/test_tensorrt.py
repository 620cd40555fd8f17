"""Check of ONNX files against TensorRT's table of operators: files of detectors pass, what it refuses is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from detr_bf.export.precision import half_precision
from detr_bf.export.tensorrt import tensorrt_line, tensorrt_refusals
from tests.export.test_export import predictor

FLOAT = TensorProto.FLOAT


def graph(kind: str, inputs: dict[str, Any], types: dict[str, int], opset: int = 20, **attributes: Any) -> Any:
    """Return a model of one node; ``inputs``: None for an input of the graph, otherwise the value of a constant."""
    given = [helper.make_tensor_value_info(name, types.get(name, FLOAT), [2, 3, 8, 8])
             for name, value in inputs.items() if value is None]  # fmt: skip
    constants = [onnx.numpy_helper.from_array(value.numpy(), name) for name, value in inputs.items()
                 if value is not None]  # fmt: skip
    names = [f"y{number}" for number in range(attributes.pop("outputs", 1))]
    node = helper.make_node(kind, list(inputs), names, **attributes)
    outputs = [helper.make_tensor_value_info(name, FLOAT, None) for name in names]
    made = helper.make_graph([node], "graph", given, outputs, constants)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("own", 1)])


AXES = torch.tensor([1])
REFUSED = {
    "": ("Relu", {"x": None}, {}, {}),
    "opset 22: at most 20": ("Relu", {"x": None}, {}, {"opset": 22}),
    "ONNX.Det (1 node)": ("Det", {"x": None}, {}, {}),
    "own.Attention (1 node)": ("Attention", {"x": None}, {}, {"domain": "own"}),
    "Shape of UINT8 (1 node)": ("Shape", {"x": None}, {"x": TensorProto.UINT8}, {}),
    "Equal of BOOL (1 node)": ("Equal", {"x": None, "y": None}, {"x": TensorProto.BOOL, "y": TensorProto.BOOL}, {}),
    "Sin of DOUBLE (1 node)": ("Sin", {"x": None}, {"x": TensorProto.DOUBLE}, {}),
    "CumSum whose input 1 is no constant (1 node)": ("CumSum", {"x": None, "a": None}, {"a": TensorProto.INT64}, {}),
    "ReduceSum whose input 1 is no constant (1 node)": (
        *("ReduceSum", {"x": None, "a": None}, {"a": TensorProto.INT64}, {}),
    ),
    "TopK of more than 3839 (1 node)": ("TopK", {"x": None, "k": torch.tensor([4000])}, {}, {"outputs": 2}),
    "TopK that is not sorted (1 node)": ("TopK", {"x": None, "k": AXES}, {}, {"outputs": 2, "sorted": 0}),
    "Resize with cubic, half_pixel (1 node)": (
        *("Resize", {"x": None, "": None, "s": torch.ones(4)}, {}, {"mode": "cubic"}),
    ),
    "MaxPool with more than one output (1 node)": ("MaxPool", {"x": None}, {}, {"outputs": 2, "kernel_shape": [2, 2]}),
    "QuantizeLinear to UINT8 (1 node); QuantizeLinear with a zero point (1 node)": (
        *("QuantizeLinear", {"x": None, "s": torch.ones(()), "z": torch.ones((), dtype=torch.uint8)}, {}, {}),
    ),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_what_the_table_refuses_is_named(refused: str) -> None:
    kind, inputs, types, others = REFUSED[refused]
    model = graph(kind, inputs, types, **others)
    for each in list(model.graph.input):
        if not each.name:  # an input that is left out
            model.graph.input.remove(each)
    assert "; ".join(tensorrt_refusals(model)) == refused


@pytest.mark.full
def test_a_file_with_detections_passes_also_in_half_precision(tmp_path: Path) -> None:
    predictor("rtdetr", "eval.nms=0.5").export(tmp_path / "it.onnx", postprocess=True)
    said = tensorrt_line(tmp_path / "it.onnx")
    assert said.startswith("TensorRT 10 takes every operator")
    assert "NonMaxSuppression (eval.nms)" in said
    assert tensorrt_refusals(half_precision(onnx.load(tmp_path / "it.onnx"))) == []
