"""Watches operators run: which memory is alive, and how much each of them does.

Shape legend: B images, S tokens of an image, H heads, D channels of a head.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from detr_bf.batchformer.mixers import BatchEncoderLayer
from detr_bf.detectors import Detector
from detr_bf.transformer import Encoder

FORWARD, TRAINED = 1, 3  # a backward pass does about twice the work of the forward one


@dataclass(frozen=True)
class Work:
    """What one operator does in the forward pass."""

    name: str
    flops: int  # two for a multiply-add
    moved: int  # bytes of what it reads and writes
    kind: str  # convolution (in float32), float32 or half: whose peak rate applies
    times: int  # how often the step does as much


class Recorder(TorchDispatchMode):
    """Within the block the forward pass of ``model`` is followed; the parameters themselves do not count as memory.

    Args:
        model: its parts without trainable parameters have no backward pass.
        recompute: encoder layers keep what enters them alone and run once more in the backward pass.
        processes: over whose images batch attention goes.
    """

    def __init__(self, model: Detector, *, recompute: bool = False, processes: int = 1) -> None:
        super().__init__()
        self.live = self.peak = 0  # bytes
        self.work: list[Work] = []
        self.layers: list[int] = []  # bytes that stay of each encoder layer, without its result
        self.batch_attention: list[int] = []  # bytes of query, key and value, each time
        self._model, self._recompute, self._processes = model, recompute, processes
        self._known: dict[int, Any] = {}  # storages alive, by address
        self._times = [TRAINED]  # of the modules that are running, the innermost last
        self._entered: list[Any] = []  # what recomputed layers keep
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Recorder:
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = storage
        self._handles = list(self._hooks())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace != "prim":  # questions, such as that for the device
            made = [self._note(tensor) for tensor in _tensors(result)]
            if any(made) or func._schema.is_mutable:
                self._count(func, args, kwargs, result)
        return result

    def _note(self, tensor: Tensor) -> bool:
        """Whether its storage is new; then it is alive until nobody holds it."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return False
        self._known[key] = weakref.finalize(storage, self._gone, key, size)
        self.live += size
        self.peak = max(self.peak, self.live)
        return True

    def _gone(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        inputs = _tensors((args, kwargs))
        name = str(func.overloadpacket).rpartition(".")[2]
        own, known = OWN_FLOPS.get(name), flop_registry.get(func.overloadpacket)
        flops = 0
        if own is not None:
            flops = own(inputs, self._processes)
        elif known is not None:
            flops = known(*args, **kwargs, out_val=result)
        moved = sum(min(tensor.untyped_storage().nbytes(), bytes_of(tensor)) for tensor in (*inputs, *_tensors(result)))
        half = any(tensor.is_floating_point() and tensor.element_size() == 2 for tensor in inputs)
        kind = "half" if half else "convolution" if name == "convolution" else "float32"
        self.work.append(Work(name, int(flops), moved, kind, self._times[-1]))

    def _hooks(self) -> Iterator[RemovableHandle]:
        for part in self._model.children():
            trained = any(parameter.requires_grad for parameter in part.parameters())
            yield from self._hook(part, TRAINED if trained else FORWARD)
            for module in part.modules():
                if isinstance(module, Encoder):
                    for layer in module.layers:
                        yield from self._hook_layer(layer)
                        if trained and self._recompute:
                            yield from self._hook(layer, TRAINED + FORWARD)
                            yield from self._hook_recomputed(layer)
                elif isinstance(module, BatchEncoderLayer):
                    yield module.self_attn.out_proj.register_forward_pre_hook(self._attended)

    def _hook(self, module: nn.Module, times: int) -> Iterator[RemovableHandle]:
        yield module.register_forward_pre_hook(lambda *_: self._times.append(times))
        yield module.register_forward_hook(lambda *_: _nothing(self._times.pop()))

    def _hook_layer(self, layer: nn.Module) -> Iterator[RemovableHandle]:
        def enter(*_: Any) -> None:
            self.layers.append(-self.live)

        def leave(_: Any, __: Any, result: Tensor) -> None:
            self.layers[-1] += self.live - bytes_of(result)

        yield layer.register_forward_pre_hook(enter)
        yield layer.register_forward_hook(leave)

    def _hook_recomputed(self, layer: nn.Module) -> Iterator[RemovableHandle]:
        """As torch.utils.checkpoint, whose own care for random numbers needs the GPU."""

        def enter(_: Any, inputs: Any) -> None:
            self._entered.append(inputs)
            torch.set_grad_enabled(False)

        def leave(_: Any, __: Any, result: Tensor) -> None:
            torch.set_grad_enabled(True)
            result.requires_grad_()

        yield layer.register_forward_pre_hook(enter)
        yield layer.register_forward_hook(leave)

    def _attended(self, _: nn.Module, inputs: tuple[Tensor]) -> None:
        self.batch_attention.append(3 * bytes_of(inputs[0]))


def batch_attention_flops(inputs: list[Tensor], processes: int) -> int:
    """Of packed (B, S, 3, H, D): two products over pairs of images.

    With more processes there are as many more images, and each process has as many fewer positions.
    """
    packed = inputs[0]
    return 4 * len(packed) * processes * (packed.numel() // 3)


def deformable_flops(inputs: list[Tensor], processes: int) -> int:
    """Four corners and a weight are ten operations for each channel of each point."""
    value, _, weights = inputs
    return 10 * weights.numel() * value.shape[-1]


OWN_FLOPS: dict[str, Callable[[list[Tensor], int], int]] = {
    "batch_attention_packed": batch_attention_flops,
    "ms_deform_attn": deformable_flops,
}


def _nothing(_: Any) -> None:
    """A hook's way to leave the result as it is."""


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def bytes_of(tensor: Tensor) -> int:
    """Of its elements, however often they lie in memory."""
    return tensor.numel() * tensor.element_size()
