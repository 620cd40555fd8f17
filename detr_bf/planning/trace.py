"""Forward pass and losses of a training step on fake tensors: memory, arithmetic and traffic of every operator.

Fake tensors have shapes and devices, but no content: nothing large is allocated, no weights are loaded, and a GPU's
step is traced without a GPU. A :class:`Recorder` watches the operators.

Shape legend: B images, S tokens of an image, H heads, D channels of a head.
"""

from __future__ import annotations

import copy
import logging
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from detr_bf.assembly import build_classification, build_model
from detr_bf.assembly.data import build_pixel_format
from detr_bf.assembly.model import train_low_rank
from detr_bf.batchformer.mixers import BatchEncoderLayer
from detr_bf.common.structures import Batch, Outputs, Target
from detr_bf.config import DetectionConfig
from detr_bf.data.images import pixel_values
from detr_bf.detectors import Detector
from detr_bf.ops import library
from detr_bf.transformer import Encoder

FORWARD, TRAINED = 1, 3  # forward passes; a backward pass costs about two of them
OBJECTS = 7  # in an image, by which denoising queries are counted; COCO: 7.3 on average
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
ALIGNMENT = 8  # fused attention pads the rows of its bias to a multiple of this number of elements


@dataclass(frozen=True)
class Work:
    """Work of one operator in the forward pass."""

    name: str
    flops: int  # a multiply-add counts as 2
    moved: int  # bytes read and written
    kind: str  # selects the peak rate: convolution (in float32), float32 or half
    times: int  # multiple of this work in the whole step


@dataclass(frozen=True)
class Sizes:
    """Bytes of the model itself, independent of the batch."""

    weights: int  # parameters and buffers
    trainable: int  # parameters with a gradient
    stored: int  # weights that a checkpoint holds

    @classmethod
    def of(cls, model: nn.Module) -> Sizes:
        parameters = list(model.parameters())
        stored = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
        return cls(
            sum(tensor.nbytes for tensor in (*parameters, *model.buffers())),
            sum(tensor.nbytes for tensor in parameters if tensor.requires_grad),
            sum(tensor.nbytes for tensor in stored.values()),
        )


@dataclass(frozen=True)
class Trace:
    """Forward pass and losses of one batch in one process. Bytes do not include the model itself."""

    sizes: Sizes
    kept: int  # bytes alive at the end, for the backward pass
    peak: int  # peak bytes alive
    layers: tuple[int, ...]  # bytes that each encoder layer keeps, without its result
    recomputed: int  # bytes of the largest recomputed encoder layer; 0: none is recomputed
    batch_attention: tuple[int, ...]  # bytes of query, key and value at each insertion
    work: tuple[Work, ...]

    @property
    def needed(self) -> int:
        """Peak bytes of forward and backward pass, without gradients of parameters."""
        return max(self.peak, self.kept + self.recomputed)

    @property
    def flops(self) -> int:
        """FLOPs of forward pass, backward pass and recomputation."""
        return sum(item.flops * item.times for item in self.work)


def trace(
    config: DetectionConfig, num_classes: int, size: tuple[int, int], *, device: str = "cuda", processes: int = 1
) -> Trace:
    """Trace the forward pass of ``train.batch_size`` images of one size (height, width).

    Args:
        device: cuda or cpu; operators are chosen as on this device, which is not used.
        processes: number of processes that share images with ``batch_former.gather``.
    """
    settings = copy.deepcopy(config)
    settings.train.recompute_encoder = False  # the recorder emulates it
    recompute = config.train.recompute_encoder
    recomputed = max(trace(settings, num_classes, size, device=device).layers, default=0) if recompute else 0
    with fake_tensors(device):
        with unset_fake_temporarily(), torch.device("meta"):  # timm reads numbers from tensors
            model = build_model(settings, num_classes, pretrained=False).train()
            if settings.freeze.lora:
                train_low_rank(model, settings.freeze.lora)
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        objects = Target(0, torch.zeros(OBJECTS, 4), torch.zeros(OBJECTS, dtype=torch.int64), size, size)
        recorder = Recorder(model, recompute=recompute, processes=processes if config.batch_former.gather else 1)
        with recorder, FusedAttention() if device == "cuda" else nullcontext():
            count = settings.train.batch_size
            images = pixel_values(build_pixel_format(config.data).blank(*size)).repeat(count, 1, 1, 1)
            references = images.clone() if settings.reads_references("train") else None
            batch = Batch(images, torch.zeros(count, *size, dtype=torch.bool), (objects,) * count, references)
            with autocast(device, HALF.get(settings.train.precision)):
                outputs = model(batch)
                masks = _masks(outputs)
            losses = _losses(config, outputs)
        result = Trace(
            Sizes.of(model),
            recorder.live,
            recorder.peak,
            tuple(recorder.layers),
            recomputed,
            tuple(recorder.batch_attention),
            tuple(recorder.work),
        )
        del masks, losses  # alive until here
    return result


class Recorder(TorchDispatchMode):
    """Context manager that records memory and work of the forward pass of ``model``; parameters are not counted.

    Args:
        model: parts without trainable parameters, and frozen first stages of the backbone, have no backward pass.
        recompute: encoder layers keep only their inputs and run again in the backward pass.
        processes: number of processes whose images batch attention spans.
    """

    def __init__(self, model: Detector, *, recompute: bool = False, processes: int = 1) -> None:
        super().__init__()
        self.live = self.peak = 0  # bytes
        self.work: list[Work] = []
        self.layers: list[int] = []  # bytes that each encoder layer keeps, without its result
        self.batch_attention: list[int] = []  # bytes of query, key and value at each insertion
        self._model, self._recompute, self._processes = model, recompute, processes
        self._known: dict[int, Any] = {}  # storages alive, by address
        self._times = [TRAINED]  # multiples of the running modules, the innermost last
        self._entered: list[Any] = []  # inputs kept by recomputed layers
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
        if func.namespace != "prim":  # queries, for example of the device
            new = [self._track(tensor) for tensor in _tensors(result)]
            if any(new) or func._schema.is_mutable:
                self._count(func, args, kwargs, result)
        return result

    def _track(self, tensor: Tensor) -> bool:
        """Track the storage of a tensor until it is freed; return True if it is new."""
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
        moved = sum(min(tensor.untyped_storage().nbytes(), tensor.nbytes) for tensor in (*inputs, *_tensors(result)))
        half = any(tensor.is_floating_point() and tensor.element_size() == 2 for tensor in inputs)
        kind = "half" if half else "convolution" if name == "convolution" else "float32"
        self.work.append(Work(name, int(flops), moved, kind, self._times[-1]))

    def _hooks(self) -> Iterator[RemovableHandle]:
        for part in self._model.children():
            trained = any(parameter.requires_grad for parameter in part.parameters())
            yield from self._hook(part, TRAINED if trained else FORWARD)
            for module in part.modules():
                if part is self._model.backbone and not any(it.requires_grad for it in module.parameters()):
                    yield from self._hook(module, None)
                if isinstance(module, Encoder):
                    for layer in module.layers:
                        yield from self._hook_layer(layer)
                        if trained and self._recompute:
                            yield from self._hook(layer, TRAINED + FORWARD)
                            yield from self._hook_recomputed(layer)
                elif isinstance(module, BatchEncoderLayer):
                    yield module.self_attn.out_proj.register_forward_pre_hook(
                        lambda _, inputs: self.batch_attention.append(3 * inputs[0].nbytes)
                    )

    def _hook(self, module: nn.Module, times: int | None) -> Iterator[RemovableHandle]:
        """Count the work of a module ``times``; None: as around it if its input has a gradient, else ``FORWARD``."""

        def enter(_: nn.Module, inputs: Any) -> None:
            around = self._times[-1] if any(tensor.requires_grad for tensor in _tensors(inputs)) else FORWARD
            self._times.append(around if times is None else times)

        def leave(*_: Any) -> None:
            self._times.pop()

        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave)

    def _hook_layer(self, layer: nn.Module) -> Iterator[RemovableHandle]:
        def enter(*_: Any) -> None:
            self.layers.append(-self.live)

        def leave(_: Any, __: Any, result: Tensor) -> None:
            self.layers[-1] += self.live - result.nbytes

        yield layer.register_forward_pre_hook(enter)
        yield layer.register_forward_hook(leave)

    def _hook_recomputed(self, layer: nn.Module) -> Iterator[RemovableHandle]:
        """Emulate torch.utils.checkpoint, which would need the GPU to save its random state."""

        def enter(_: Any, inputs: Any) -> None:
            self._entered.append(inputs)
            torch.set_grad_enabled(False)

        def leave(_: Any, __: Any, result: Tensor) -> None:
            torch.set_grad_enabled(True)
            result.requires_grad_()

        yield layer.register_forward_pre_hook(enter)
        yield layer.register_forward_hook(leave)


def batch_attention_flops(inputs: list[Tensor], processes: int) -> int:
    """Return FLOPs of packed (B, S, 3, H, D): two products over pairs of images.

    With P processes there are P times as many images, and each process has 1/P of the positions.
    """
    packed = inputs[0]
    return 4 * len(packed) * processes * (packed.numel() // 3)


def deformable_flops(inputs: list[Tensor], processes: int) -> int:
    """Return FLOPs of deformable attention: 4 corners and a weight are 10 operations per channel and point."""
    value, _, weights = inputs
    return 10 * weights.numel() * value.shape[-1]


OWN_FLOPS: dict[str, Callable[[list[Tensor], int], int]] = {
    "batch_attention_packed": batch_attention_flops,
    "ms_deform_attn": deformable_flops,
}


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def kernels_assumed(device: str) -> bool:
    """True if compiled operators are assumed on the device, False if their PyTorch reference."""
    return library.DECLARED and (device == "cuda" or library.PROBLEMS[device] is None)


@contextmanager
def fake_tensors(device: str) -> Iterator[None]:
    """Create fake tensors on the device inside the block; warnings of models are not logged."""
    found, logged = library.PROBLEMS[device], logging.root.manager.disable
    if kernels_assumed(device):
        library.PROBLEMS[device] = None
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), FakeTensorMode(), torch.device(device):
            warnings.filterwarnings("ignore", "CUDA is not available")  # torch.autocast of a part of the model
            yield
    finally:
        logging.disable(logged)
        library.PROBLEMS[device] = found


@contextmanager
def autocast(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Enable autocast to ``dtype``; unlike torch.autocast it accepts a GPU that does not exist. None: off."""
    if dtype is None:
        yield
        return
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()  # keeps the cache of cast weights after inner blocks
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


class FusedAttention(TorchFunctionMode):
    """Replace scaled dot product attention by the memory-efficient GPU kernel, which does not store its weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return fused_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """Run the memory-efficient kernel: query (R, H, Q, D), key and value (R, H, S, D).

    ``attn_mask`` is bool or a float bias, broadcastable to (R, H, Q, S), ``dropout_p`` the dropout probability of the
    weights; ``is_causal`` hides the keys behind each query.
    """
    bias = attn_mask
    if bias is not None:
        keys = key.shape[2]
        if bias.dtype == torch.bool:
            bias = query.new_zeros(()).masked_fill(~bias, -math.inf)
        if keys % ALIGNMENT:
            bias = F.pad(bias, (0, -keys % ALIGNMENT))[..., :keys]
        bias = bias.expand(*query.shape[:3], keys)
    trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    result: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, trained, dropout_p, is_causal
    )[0]
    return result


def _masks(outputs: Outputs) -> list[Tensor]:
    """Return the masks of the matched queries, of RF-DETR those of all layers, groups and proposals."""
    found = [] if outputs.proposals is None else _masks(outputs.proposals)
    for parts, part in ((1, outputs), *((group.parts, part) for group, part in outputs.groups)):
        for masks in part.layer_masks:
            count = min(OBJECTS * parts, masks.queries)
            found.append(masks.by_row(torch.zeros(masks.rows * count, dtype=torch.int64), [count] * masks.rows))
    if outputs.masks is not None and not outputs.layer_masks:
        index = torch.zeros(outputs.masks.rows * min(OBJECTS, outputs.masks.queries), dtype=torch.int64)
        found.append(outputs.masks.of(index, index))
    return found


def _losses(config: DetectionConfig, outputs: Outputs) -> list[Tensor]:
    """Return the classification losses; box losses, of matched queries only, need far less memory."""
    classification = build_classification(config)
    proposals = outputs.proposals
    found = [outputs] if proposals is None else [outputs, proposals, *(each for _, each in proposals.groups)]
    return [
        classification.loss(
            logits.float(),
            torch.zeros(logits.shape[:3], dtype=torch.int64),
            torch.ones(()),
            quality=torch.zeros(logits.shape[:3]) if classification.needs_quality else None,
        )
        for part in (*found, *(predicted for _, predicted in outputs.groups))
        for logits in part.logits.chunk(part.num_streams, 1)
    ]
