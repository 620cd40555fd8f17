"""The operators, raw (``torch.ops.detr_bf``) and through ``detr_bf.ops``, with invalid shapes, numbers and tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.hostile.battery import Build, Case, CaseFiles

ORDINARY = (
    "RuntimeError",
    "ValueError",
    "TypeError",
    "NotImplementedError",
    "InputError",
    "IndexError",
    "OverflowError",
)
HUGE = 2**63 - 1


class Deformable:
    """Arguments of ms_deform_attn: one image, 6 cells (2 x 3), 2 heads of 4 channels, 5 queries, 1 level, 2 points."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.value = torch.rand(1, 6, 2, 4)
        self.shapes: Any = [2, 3]
        self.starts: Any = [0]
        self.locations = torch.rand(1, 5, 2, 1, 2, 2)
        self.weights = torch.rand(1, 5, 2, 1, 2)
        self.gradient = torch.rand(1, 5, 8)

    def forward(self) -> Any:
        return self.torch.ops.detr_bf.ms_deform_attn(self.value, self.shapes, self.starts, self.locations, self.weights)

    def backward(self) -> Any:
        return self.torch.ops.detr_bf.ms_deform_attn_backward(
            self.gradient, self.value, self.shapes, self.starts, self.locations, self.weights, True
        )


def deformable(change: Callable[[Deformable], Any], backward: bool = False) -> Build:
    def build(files: CaseFiles) -> Callable[[], Any]:
        import torch

        import detr_bf.ops  # noqa: F401

        call = Deformable(torch)
        change(call)
        return call.backward if backward else call.forward

    return build


def given(**values: Any) -> Callable[[Deformable], None]:
    """Set arguments; functions are called with the object."""

    def change(call: Deformable) -> None:
        for name, value in values.items():
            setattr(call, name, value(call) if callable(value) else value)

    return change


DEFORMABLE: dict[str, Callable[[Deformable], Any]] = {
    "sizes whose product overflows": given(shapes=[2147483629, 4049596863820871141]),
    "sizes of 2**32": given(shapes=[2**32, 2**32]),
    "sizes of 2**63 - 1": given(shapes=[HUGE, HUGE]),
    "a size of 2**63 - 1": given(shapes=[1, HUGE]),
    "start of 2**63 - 1": given(starts=[HUGE]),
    "start and size that overflow": given(starts=[HUGE - 3], shapes=[2, 3]),
    "negative start": given(starts=[-1]),
    "start of -2**63": given(starts=[-(2**63)]),
    "negative sizes": given(shapes=[-2, -3]),
    "sizes of 0": given(shapes=[0, 0]),
    "a level too large": given(shapes=[3, 3]),
    "no levels": given(shapes=[], starts=[]),
    "an odd number of sizes": given(shapes=[2, 3, 4]),
    "two starts for a level": given(starts=[0, 3]),
    "levels that overlap": given(
        shapes=[1, 3, 1, 3],
        starts=[0, 1],
        locations=lambda c: c.torch.rand(1, 5, 2, 2, 2, 2),
        weights=lambda c: c.torch.rand(1, 5, 2, 2, 2),
    ),
    "levels whose sum overflows": given(
        shapes=[1, HUGE, 1, 3],
        starts=[0, HUGE],
        locations=lambda c: c.torch.rand(1, 5, 2, 2, 2, 2),
        weights=lambda c: c.torch.rand(1, 5, 2, 2, 2),
    ),
    "value of three dimensions": given(value=lambda c: c.value[0]),
    "value of another batch": given(value=lambda c: c.torch.rand(3, 6, 2, 4)),
    "value of other heads": given(value=lambda c: c.torch.rand(1, 6, 3, 4)),
    "value of integers": given(value=lambda c: c.value.long()),
    "value of complex numbers": given(value=lambda c: c.value.to(c.torch.complex64)),
    "value of float8": given(value=lambda c: c.value.to(c.torch.float8_e4m3fn)),
    "value of half with float weights": given(value=lambda c: c.value.half()),
    "value on meta": given(value=lambda c: c.value.to("meta")),
    "value sparse": given(value=lambda c: c.value.to_sparse()),
    "value quantized": given(value=lambda c: c.torch.quantize_per_tensor(c.value, 0.1, 0, c.torch.qint8)),
    "locations on meta": given(locations=lambda c: c.locations.to("meta")),
    "weights on meta": given(weights=lambda c: c.weights.to("meta")),
    "locations of five dimensions": given(locations=lambda c: c.locations[0]),
    "locations in 3D": given(locations=lambda c: c.torch.rand(1, 5, 2, 1, 2, 3)),
    "locations of other queries": given(locations=lambda c: c.torch.rand(1, 4, 2, 1, 2, 2)),
    "locations of integers": given(locations=lambda c: c.locations.long()),
    "locations of doubles": given(locations=lambda c: c.locations.double()),
    "weights of other points": given(weights=lambda c: c.torch.rand(1, 5, 2, 1, 3)),
    "weights of doubles": given(weights=lambda c: c.weights.double()),
    "value is null": given(value=None),
    "shapes are text": given(shapes="2x3"),
    "shapes are fractions": given(shapes=[2.5, 3.5]),
    "shapes of 2**70": given(shapes=[2**70, 1]),
}
FINE: dict[str, Callable[[Deformable], Any]] = {  # no exception needed, and no crash
    "locations of NaN": given(locations=lambda c: c.locations * float("nan")),
    "locations of infinity": given(locations=lambda c: c.locations * float("inf")),
    "locations of 1e38": given(locations=lambda c: c.locations * 1e38),
    "locations of -1e38": given(locations=lambda c: c.locations * -1e38),
    "weights of NaN": given(weights=lambda c: c.weights * float("nan")),
    "no queries": given(
        locations=lambda c: c.locations[:, :0], weights=lambda c: c.weights[:, :0], gradient=lambda c: c.gradient[:, :0]
    ),
    "no images": given(
        value=lambda c: c.value[:0],
        locations=lambda c: c.locations[:0],
        weights=lambda c: c.weights[:0],
        gradient=lambda c: c.gradient[:0],
    ),
    "no channels": given(value=lambda c: c.value[..., :0], gradient=lambda c: c.gradient[..., :0]),
    "no points": given(locations=lambda c: c.locations[:, :, :, :, :0], weights=lambda c: c.weights[..., :0]),
    "value expanded": given(value=lambda c: c.torch.rand(1, 1, 1, 4).expand(1, 6, 2, 4)),
    "value in strange strides": given(value=lambda c: c.torch.rand(4, 2, 6, 1).permute(3, 2, 1, 0)),
}
GRADIENTS: dict[str, Callable[[Deformable], Any]] = {
    "gradient of another shape": given(gradient=lambda c: c.torch.rand(1, 5, 7)),
    "gradient of fewer queries": given(gradient=lambda c: c.torch.rand(1, 4, 8)),
    "gradient of one dimension": given(gradient=lambda c: c.torch.rand(40)),
    "gradient that is empty": given(gradient=lambda c: c.torch.rand(0)),
    "gradient of doubles": given(gradient=lambda c: c.gradient.double()),
    "gradient on meta": given(gradient=lambda c: c.gradient.to("meta")),
    "gradient is null": given(gradient=None),
}

Call = Callable[[Any], Any]
ATTENTION: dict[str, Call] = {  # raw operators
    "one dimension": lambda t: t.ops.detr_bf.batch_attention(t.rand(4), t.rand(4), t.rand(4), None, 0.0, None),
    "keys of another length": lambda t: t.ops.detr_bf.batch_attention(
        _q(t), t.rand(5, 3, 2, 8), _q(t), None, 0.0, None
    ),
    "values of another shape": lambda t: t.ops.detr_bf.batch_attention(
        _q(t), _q(t), t.rand(2, 3, 2, 4), None, 0.0, None
    ),
    "fewer positions": lambda t: t.ops.detr_bf.batch_attention(_q(t), _q(t), t.rand(2, 1, 2, 8), None, 0.0, None),
    "keys of half": lambda t: t.ops.detr_bf.batch_attention(_q(t), _q(t).half(), _q(t), None, 0.0, None),
    "integers": lambda t: t.ops.detr_bf.batch_attention(_q(t).long(), _q(t).long(), _q(t).long(), None, 0.0, None),
    "complex": lambda t: t.ops.detr_bf.batch_attention(*[_q(t).to(t.complex64)] * 3, None, 0.0, None),
    "keys on meta": lambda t: t.ops.detr_bf.batch_attention(_q(t), _q(t).to("meta"), _q(t), None, 0.0, None),
    "values on meta": lambda t: t.ops.detr_bf.batch_attention(_q(t), _q(t), _q(t).to("meta"), None, 0.0, None),
    "mask on meta": lambda t: t.ops.detr_bf.batch_attention(
        *[_q(t)] * 3, t.zeros(2, 3, dtype=t.bool, device="meta"), 0.0, None
    ),
    "mask of another shape": lambda t: t.ops.detr_bf.batch_attention(
        *[_q(t)] * 3, t.zeros(5, 5, dtype=t.bool), 0.0, None
    ),
    "mask of one dimension": lambda t: t.ops.detr_bf.batch_attention(*[_q(t)] * 3, t.zeros(6, dtype=t.bool), 0.0, None),
    "mask of floats": lambda t: t.ops.detr_bf.batch_attention(*[_q(t)] * 3, t.zeros(2, 3), 0.0, None),
    "dropout of NaN": lambda t: t.ops.detr_bf.batch_attention(*[_q(t)] * 3, None, float("nan"), _seed(t)),
    "dropout of 2": lambda t: t.ops.detr_bf.batch_attention(*[_q(t)] * 3, None, 2.0, _seed(t)),
    "dropout of -1": lambda t: t.ops.detr_bf.batch_attention(*[_q(t)] * 3, None, -1.0, _seed(t)),
    "dropout without seed": lambda t: t.ops.detr_bf.batch_attention(*[_q(t)] * 3, None, 0.5, None),
    "seed of floats": lambda t: t.ops.detr_bf.batch_attention(*[_q(t)] * 3, None, 0.5, t.tensor(0.5)),
    "seed that is empty": lambda t: t.ops.detr_bf.batch_attention(*[_q(t)] * 3, None, 0.5, t.zeros(0, dtype=t.int64)),
    "seed on meta": lambda t: t.ops.detr_bf.batch_attention(*[_q(t)] * 3, None, 0.5, _seed(t).to("meta")),
    "sparse": lambda t: t.ops.detr_bf.batch_attention(*[_q(t).to_sparse()] * 3, None, 0.0, None),
    "null": lambda t: t.ops.detr_bf.batch_attention(None, None, None, None, 0.0, None),
    "packed of four dimensions": lambda t: t.ops.detr_bf.batch_attention_packed(t.rand(2, 3, 3, 8), None, 0.0, None),
    "packed of two": lambda t: t.ops.detr_bf.batch_attention_packed(t.rand(2, 3, 2, 2, 8), None, 0.0, None),
    "packed with a wrong mask": lambda t: t.ops.detr_bf.batch_attention_packed(
        t.rand(2, 3, 3, 2, 8), t.zeros(9, 9, dtype=t.bool), 0.0, None
    ),
    "packed with a mask on meta": lambda t: t.ops.detr_bf.batch_attention_packed(
        t.rand(2, 3, 3, 2, 8), t.zeros(2, 3, dtype=t.bool, device="meta"), 0.0, None
    ),
    "backward with another gradient": lambda t: t.ops.detr_bf.batch_attention_backward(
        t.rand(1, 1, 1, 1), *[_q(t)] * 3, None, 0.0, None
    ),
    "backward with an empty gradient": lambda t: t.ops.detr_bf.batch_attention_backward(
        t.rand(0), *[_q(t)] * 3, None, 0.0, None
    ),
    "backward with a gradient on meta": lambda t: t.ops.detr_bf.batch_attention_backward(
        _q(t).to("meta"), *[_q(t)] * 3, None, 0.0, None
    ),
    "backward with a gradient of half": lambda t: t.ops.detr_bf.batch_attention_backward(
        _q(t).half(), *[_q(t)] * 3, None, 0.0, None
    ),
    "backward with dropout of NaN": lambda t: t.ops.detr_bf.batch_attention_backward(
        *[_q(t)] * 4, None, float("nan"), _seed(t)
    ),
    "dropout_add: another shape": lambda t: t.ops.detr_bf.dropout_add(t.rand(4), t.rand(5), 0.5, _seed(t)),
    "dropout_add: another dtype": lambda t: t.ops.detr_bf.dropout_add(t.rand(4), t.rand(4).half(), 0.5, _seed(t)),
    "dropout_add: residual on meta": lambda t: t.ops.detr_bf.dropout_add(
        t.rand(4), t.rand(4).to("meta"), 0.5, _seed(t)
    ),
    "dropout_add: p of NaN": lambda t: t.ops.detr_bf.dropout_add(t.rand(4), None, float("nan"), _seed(t)),
    "dropout_add: p of 1e300": lambda t: t.ops.detr_bf.dropout_add(t.rand(4), None, 1e300, _seed(t)),
    "dropout_add: p of -1": lambda t: t.ops.detr_bf.dropout_add(t.rand(4), None, -1.0, _seed(t)),
    "dropout_add: an empty seed": lambda t: t.ops.detr_bf.dropout_add(t.rand(4), None, 0.5, t.zeros(0, dtype=t.int64)),
    "dropout_add: a seed of bytes": lambda t: t.ops.detr_bf.dropout_add(
        t.rand(4), None, 0.5, t.zeros((), dtype=t.uint8)
    ),
    "dropout_add: a seed on meta": lambda t: t.ops.detr_bf.dropout_add(t.rand(4), None, 0.5, _seed(t).to("meta")),
    "dropout_add: integers": lambda t: t.ops.detr_bf.dropout_add(t.ones(4, dtype=t.int64), None, 0.5, _seed(t)),
    "relu_dropout: p of 2": lambda t: t.ops.detr_bf.relu_dropout(t.rand(4), 2.0, _seed(t)),
    "relu_dropout: integers": lambda t: t.ops.detr_bf.relu_dropout(t.ones(4, dtype=t.int64), 0.5, _seed(t)),
    "relu_dropout: sparse": lambda t: t.ops.detr_bf.relu_dropout(t.rand(4, 4).to_sparse(), 0.5, _seed(t)),
    "relu_dropout_backward: another shape": lambda t: t.ops.detr_bf.relu_dropout_backward(t.rand(4), t.rand(5), 0.5),
    "relu_dropout_backward: another dtype": lambda t: t.ops.detr_bf.relu_dropout_backward(
        t.rand(4), t.rand(4).double(), 0.5
    ),
    "relu_dropout_backward: on meta": lambda t: t.ops.detr_bf.relu_dropout_backward(
        t.rand(4), t.rand(4).to("meta"), 0.5
    ),
    "relu_dropout_backward: p of NaN": lambda t: t.ops.detr_bf.relu_dropout_backward(
        t.rand(4), t.rand(4), float("nan")
    ),
}
EMPTY: dict[str, Call] = {  # no exception needed, and no crash
    "no images": lambda t: t.ops.detr_bf.batch_attention(*[t.rand(0, 3, 2, 8)] * 3, None, 0.0, None),
    "no positions": lambda t: t.ops.detr_bf.batch_attention(*[t.rand(2, 0, 2, 8)] * 3, None, 0.0, None),
    "no heads": lambda t: t.ops.detr_bf.batch_attention(*[t.rand(2, 3, 0, 8)] * 3, None, 0.0, None),
    "no channels": lambda t: t.ops.detr_bf.batch_attention(*[t.rand(2, 3, 2, 0)] * 3, None, 0.0, None),
    "of NaN": lambda t: t.ops.detr_bf.batch_attention(*[_q(t) * float("nan")] * 3, None, 0.0, None),
    "expanded": lambda t: t.ops.detr_bf.batch_attention(*[t.rand(1, 1, 1, 8).expand(2, 3, 2, 8)] * 3, None, 0.0, None),
    "of 3,000 images": lambda t: t.ops.detr_bf.batch_attention(*[t.rand(3000, 1, 1, 1)] * 3, None, 0.0, None),
    "dropout of nothing": lambda t: t.ops.detr_bf.dropout_add(t.rand(0), None, 0.5, _seed(t)),
}
WRAPPED: dict[str, Callable[[Any, Any], Any]] = {  # detr_bf.ops
    "batch_attention: three dimensions": lambda t, ops: ops.batch_attention(*[t.rand(2, 3, 8)] * 3),
    "batch_attention: dropout of NaN": lambda t, ops: ops.batch_attention(*[_q(t)] * 3, dropout_p=float("nan")),
    "batch_attention: mask of floats": lambda t, ops: ops.batch_attention(*[_q(t)] * 3, t.zeros(2, 3)),
    "batch_attention: integers": lambda t, ops: ops.batch_attention(*[_q(t).long()] * 3),
    "batch_attention: keys on meta": lambda t, ops: ops.batch_attention(_q(t), _q(t).to("meta"), _q(t)),
    "batch_attention_packed: four dimensions": lambda t, ops: ops.batch_attention_packed(t.rand(2, 3, 3, 8)),
    "ms_deform_attn: sizes that overflow": lambda t, ops: ops.ms_deform_attn(
        t.rand(1, 6, 2, 4), [(2147483629, 4049596863820871141)], None, t.rand(1, 5, 2, 1, 2, 2), t.rand(1, 5, 2, 1, 2)
    ),
    "ms_deform_attn: sizes of text": lambda t, ops: ops.ms_deform_attn(
        t.rand(1, 6, 2, 4), "2x3", None, t.rand(1, 5, 2, 1, 2, 2), t.rand(1, 5, 2, 1, 2)
    ),
    "ms_deform_attn: starts of 2**63 - 1": lambda t, ops: ops.ms_deform_attn(
        t.rand(1, 6, 2, 4), [(2, 3)], [HUGE], t.rand(1, 5, 2, 1, 2, 2), t.rand(1, 5, 2, 1, 2)
    ),
    "relu_dropout: p of 2": lambda t, ops: ops.relu_dropout(t.rand(4), 2.0),
    "residual_dropout: another shape": lambda t, ops: ops.residual_dropout(t.rand(4), t.rand(5), 0.5),
    "residual_dropout: p of NaN": lambda t, ops: ops.residual_dropout(t.rand(4), t.rand(4), float("nan")),
}


def _q(torch: Any) -> Any:
    return torch.rand(2, 3, 2, 8)


def _seed(torch: Any) -> Any:
    return torch.tensor(7)


def raw(call: Call) -> Build:
    def build(files: CaseFiles) -> Callable[[], Any]:
        import torch

        import detr_bf.ops  # noqa: F401

        return lambda: call(torch)

    return build


def wrapped(call: Callable[[Any, Any], Any]) -> Build:
    def build(files: CaseFiles) -> Callable[[], Any]:
        import torch

        from detr_bf import ops

        return lambda: call(torch, ops)

    return build


def cases() -> Iterator[Case]:
    """Yield all cases of this module."""
    group = "operators"
    for name, change in DEFORMABLE.items():
        yield Case(group, f"deformable: {name}", deformable(change), codes=(), raises=ORDINARY)
        yield Case(group, f"deformable, backward: {name}", deformable(change, True), codes=(), raises=ORDINARY)
    for name, change in FINE.items():
        for backward in (False, True):
            title = f"deformable{', backward' if backward else ''}: {name}"
            yield Case(group, title, deformable(change, backward), codes=(), raises=ORDINARY, may_return=True)
    for name, change in GRADIENTS.items():
        yield Case(group, f"deformable, backward: {name}", deformable(change, True), codes=(), raises=ORDINARY)
    for name, call in ATTENTION.items():
        yield Case(group, name, raw(call), codes=(), raises=ORDINARY)
    for name, call in EMPTY.items():
        yield Case(group, f"attention {name}", raw(call), codes=(), raises=ORDINARY, may_return=True)
    for name, both in WRAPPED.items():
        yield Case(group, f"wrapped {name}", wrapped(both), codes=(), raises=ORDINARY)
