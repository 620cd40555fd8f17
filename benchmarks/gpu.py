"""Timings of one GPU within a few minutes: a phase of gpu.sh, which docs/gpu.md describes.

python benchmarks/gpu.py PHASE --seconds 60 --output results.json [--device cpu --quick]

A phase stops when its seconds are over, and says which cases it left out. Every row is added to the file as soon as it
is measured. The exit code is 1 if something failed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from command import moment, seconds_between
from detr_bf.common.devices import float32_products
from detr_bf.common.files import write_json
from detr_bf.common.timing import Spread
from detr_bf.ops import batch_attention_packed, library, ms_deform_attn
from detr_bf.ops.build import digest_of_sources
from detr_bf.report import machine_info
from ms_deform_attn import CHANNELS, HEADS, POINTS, SHAPES, STARTS, deterministic, make_inputs, peers

START = time.monotonic()
VARIANTS = "DETR_BF_CUDA_VARIANTS"  # environment variable that chooses kernels
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
PRECISIONS = {"float32": "highest", "tf32": "high", "bf16": "high"}  # of float32 products
LARGER_THAN_CACHE = 192 << 20  # bytes; an H200 has 60 MB of L2
CASES = (("encoder_local", 4), ("decoder", 16), ("encoder_local", 1), ("encoder_local", 8), ("encoder_uniform", 4))
STEPS = (  # recipe, height x width, images, precision; the most wanted first
    ("deformable_detr_r50", "800x1066", 8, "bf16"),
    ("rtdetr_r50", "640x640", 16, "bf16"),
    ("detr_r50", "800x1066", 16, "bf16"),
    ("deformable_detr_r50", "800x1066", 8, "tf32"),
    ("deformable_detr_r50_bfv2", "800x1066", 8, "bf16"),
    ("detr_r50", "800x1066", 2, "bf16"),
    ("rtdetr_r50", "640x640", 16, "tf32"),
    ("deformable_detr_r50", "800x1066", 1, "bf16"),
    ("detr_r50_bfv2", "800x1066", 16, "bf16"),
    ("rtdetr_r50_bfv2", "640x640", 16, "bf16"),
    ("deformable_detr_r50", "800x1066", 8, "float32"),
    ("detr_r50", "800x1066", 16, "tf32"),
    ("conditional_detr_r50", "800x1066", 8, "bf16"),
    ("detr_r50", "800x1066", 16, "float32"),
)
QUICK_STEPS = (("rtdetr_r18", "160x160", 2, "float32"), ("deformable_detr_r50_bfv2", "64x64", 2, "bf16"))
INFERENCES = tuple(
    (name, size, images, precision)
    for precision, images in (("bf16", 1), ("bf16", 16), ("tf32", 1), ("float32", 1))
    for name, size in (("rtdetr_r50", "640x640"), ("deformable_detr_r50", "800x1066"), ("detr_r50", "800x1066"))
)


class Phase:
    """Device, time limit and results of a phase."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.name, self.quick, self.output = options.phase, options.quick, options.output
        self.device = torch.device(options.device)
        self.cuda = self.device.type == "cuda"
        self.end = START + options.seconds
        self.machine = machine_info()
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.left_out: list[str] = []

    def over(self, title: str, needed: float) -> bool:
        """Return True, and note the title, if fewer than ``needed`` seconds are left."""
        late = time.monotonic() + needed > self.end
        if late:
            self.left_out.append(title)
        return late

    def note(self, **values: Any) -> None:
        """Print a row and write all rows so far."""
        self.rows.append(values)
        shown = (
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
        )
        print("  ".join(shown), flush=True)
        self.write()

    def write(self) -> None:
        """Merge the results of this phase into the file."""
        if self.output is None:
            return
        known = json.loads(self.output.read_text()) if self.output.is_file() else {}
        known[self.name] = {
            "machine": self.machine,
            "sources": digest_of_sources(),
            "seconds": time.monotonic() - START,
            "rows": self.rows,
            "failures": self.failures,
            "left_out": self.left_out,
        }
        write_json(self.output, known)

    @contextmanager
    def case(self, title: str) -> Iterator[None]:
        """Run one case; an exception is a failure of this case only, unless the CUDA context is lost."""
        try:
            yield
        except Exception as error:
            self.failures.append(f"{title}: {type(error).__name__}: {str(error)[:300]}")
            print(f"FAILED {title}\n{traceback.format_exc(limit=-4)[-1500:]}", flush=True)
            self.write()
            if "CUDA error" in str(error) or "illegal memory" in str(error):
                raise
        finally:
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()

    def finish(self) -> int:
        """Print what failed and was left out; return the exit code."""
        self.write()
        for title in self.left_out:
            print(f"left out, no time: {title}")
        print(f"{len(self.rows)} results, {len(self.failures)} failures, {len(self.left_out)} cases left out")
        for failure in self.failures:
            print("FAILURE", failure)
        return int(bool(self.failures))


# ---- timing ----


def milliseconds(
    phase: Phase, ways: Mapping[str, Callable[[], object]], budget: float = 0.3, *, launched: bool = False
) -> dict[str, Spread]:
    """Time the functions in turn with CUDA events, with a cold L2 cache, about ``budget`` seconds each.

    Args:
        launched: the GPU is busy while the host launches the kernels of a call, so that this time does not count.
    """
    for function in ways.values():
        for _ in range(1 if phase.quick else 3):
            function()
    rounds = 2 if phase.quick else _rounds_within(phase, ways, budget)
    waste = torch.empty(LARGER_THAN_CACHE if phase.cuda else 1, dtype=torch.uint8, device=phase.device)
    borders: dict[str, list[tuple[Any, Any]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, function in ways.items():
            waste.zero_()
            if phase.cuda and launched:
                torch.cuda._sleep(2_000_000)  # about 1 ms
            begin = moment(phase.device)
            function()
            borders[name].append((begin, moment(phase.device)))
    _wait(phase)
    return {name: Spread.of([1e3 * seconds_between(*pair) for pair in pairs]) for name, pairs in borders.items()}


def _rounds_within(phase: Phase, ways: Mapping[str, Callable[[], object]], budget: float) -> int:
    _wait(phase)
    begin = time.perf_counter()
    for function in ways.values():
        function()
    _wait(phase)
    return int(min(max(budget * len(ways) / (time.perf_counter() - begin), 5), 60))


def _wait(phase: Phase) -> None:
    if phase.cuda:
        torch.cuda.synchronize()


def peak(phase: Phase, function: Callable[[], object]) -> float | None:
    """Return the largest growth of allocated memory, MiB; None on a CPU."""
    if not phase.cuda:
        return None
    _wait(phase)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    _wait(phase)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def copy_rate(phase: Phase) -> float:
    """Measure the ceilings of the device; return the bytes that a copy reads and writes in a second."""
    one = torch.randn((1 << 18) if phase.quick else (1 << 28), device=phase.device)
    other, side = torch.empty_like(one), 128 if phase.quick else 8192
    a, b = (torch.randn(side, side, device=phase.device, dtype=torch.bfloat16) for _ in range(2))
    keys = torch.randint(0, 1 << 24, (1 << (12 if phase.quick else 24),), device=phase.device, dtype=torch.int32)
    ways: dict[str, Callable[[], object]] = {
        "copy": partial(other.copy_, one),
        "bf16": partial(torch.mm, a, b),
        "sort": partial(torch.sort, keys, stable=True),
    }
    found = {name: spread.median for name, spread in milliseconds(phase, ways).items()}
    rate = 2e3 * one.numel() * one.element_size() / found["copy"]
    phase.note(
        ceiling="copy", TB_per_s=rate / 1e12, bf16_TFLOP_per_s=2e-9 * side**3 / found["bf16"], sort_ms=found["sort"]
    )
    return rate


# ---- operators ----


def with_variants(names: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with these variants of our kernels."""

    def run(*arguments: Any) -> Any:
        os.environ[VARIANTS] = names
        try:
            return function(*arguments)
        finally:
            os.environ.pop(VARIANTS)

    return run


def operators(phase: Phase) -> None:
    """Deformable attention against other implementations and against the bytes that must move."""
    rate = copy_rate(phase)
    if not phase.cuda:
        torch.set_num_threads(1)
    contestants = {name: op for name, op in peers(phase.device).items() if name != "transformers"}
    if not Path(os.environ.get("DEFORMOPS", os.devnull)).exists():  # its kernels are not compiled
        contestants.pop("deformops", None)
    for dtype, (case, images) in itertools.product(DTYPES, CASES):
        title = f"{case} B={images} {DTYPES[dtype]}"
        if (phase.quick and (case != "decoder" or dtype != torch.float32)) or phase.over(title, 6):
            continue
        with phase.case(title):
            value, x, w = make_inputs(case, 1 if phase.quick else images, dtype, phase.device)
            result = value.shape[0] * x.shape[1] * HEADS * CHANNELS * value.element_size()
            read = sum(each.numel() * each.element_size() for each in (value, x, w))
            _operators_of_case(phase, title, contestants, [value, x, w], (read + result) / rate * 1e3)


def _operators_of_case(
    phase: Phase, title: str, contestants: Mapping[str, Callable[..., Tensor]], inputs: list[Tensor], copy_ms: float
) -> None:
    """Time forward and backward passes; ``copy_ms`` is the time of a copy of the bytes of a forward pass."""
    forward: dict[str, Callable[[], object]] = {}
    backward: dict[str, Callable[[], object]] = {}
    whole: dict[str, Callable[[], object]] = {}
    leaves = [each.detach().requires_grad_() for each in inputs]
    ours = {"detr_bf": contestants["detr_bf"]}
    if phase.cuda:
        variants = ("tiles", *(("half_atomics", "tiles,half_atomics") if inputs[0].dtype != torch.float32 else ()))
        ours |= {f"detr_bf, {names}": with_variants(names, contestants["detr_bf"]) for names in variants}
    ways = {**ours, "detr_bf, deterministic": contestants["detr_bf"], **contestants}
    for name, op in ways.items():
        change = deterministic if name.endswith("deterministic") else lambda function: function
        if name in ours and name != "detr_bf":
            change = partial(with_variants, name.removeprefix("detr_bf, "))
        try:
            output = op(*leaves)
            gradient = torch.randn_like(output)
            gradients = change(partial(torch.autograd.grad, output, leaves, gradient, retain_graph=True))
            gradients()
        except Exception as error:  # a peer that does not support the case
            phase.note(case=title, way=name, error=f"{type(error).__name__}: {str(error)[:200]}")
            continue
        forward[name] = torch.no_grad()(partial(op, *inputs))
        backward[name] = gradients
        whole[name] = change(lambda op=op, gradient=gradient: torch.autograd.grad(op(*leaves), leaves, gradient))
    times = [milliseconds(phase, each, launched=True) for each in (forward, backward)]
    for name, function in whole.items():
        there, back = (each[name] for each in times)
        phase.note(
            case=title,
            way=name,
            forward_ms=there.median,
            forward_range=(there.low, there.high),
            backward_ms=back.median,
            backward_range=(back.low, back.high),
            peak_MiB=peak(phase, function),
            forward_of_copy_rate=copy_ms / there.median,
        )


def attention(phase: Phase) -> None:
    """Batch attention against scaled_dot_product_attention and against the bytes that must move."""
    rate = copy_rate(phase)
    positions, heads, channels = (100 if phase.quick else 13_000), 4, 64
    for dtype, images, p in itertools.product((torch.bfloat16, torch.float32), (2, 8, 4, 16, 32), (0.1, 0.0)):
        title = f"B={images} {DTYPES[dtype]} dropout={p}"
        if (phase.quick and images > 2) or phase.over(title, 2):
            continue
        with phase.case(title):
            packed = torch.randn(images, positions, 3, heads, channels, device=phase.device).to(dtype).requires_grad_()
            parts = [part.permute(1, 2, 0, 3).contiguous().requires_grad_() for part in packed.detach().unbind(2)]
            ours = partial(batch_attention_packed, packed, None, p)
            ways: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
                "detr_bf": (ours, [packed]),
                "sdpa": (partial(F.scaled_dot_product_attention, parts[0], parts[1], parts[2], dropout_p=p), parts),
            }
            if phase.cuda and images <= 8:
                ways["detr_bf, one_pass"] = (with_variants("one_pass", ours), [packed])
            backward: dict[str, Callable[[], object]] = {}
            for name, (call, leaves) in ways.items():
                output = call()
                gradients = partial(torch.autograd.grad, output, leaves, torch.randn_like(output), retain_graph=True)
                backward[name] = with_variants("one_pass", gradients) if "one_pass" in name else gradients
            there = milliseconds(phase, {name: call for name, (call, _) in ways.items()}, 0.1, launched=True)
            back = milliseconds(phase, backward, 0.1, launched=True)
            row = images * positions * heads * channels * packed.element_size()
            for name in ways:
                phase.note(
                    case=title,
                    way=name,
                    forward_ms=there[name].median,
                    backward_ms=back[name].median,
                    forward_of_copy_rate=4e3 * row / there[name].median / rate,
                    backward_of_copy_rate=7e3 * row / back[name].median / rate,
                )


# ---- detectors ----


def steps(phase: Phase) -> None:
    """Training steps of our detectors and of transformers', in turn on the same GPU."""
    from peers import OURS, THEIRS  # imports transformers

    for name, size, images, precision in QUICK_STEPS if phase.quick else STEPS:
        title = f"{name} {size} B={images} {precision}"
        if phase.over(title, 12):
            continue
        with phase.case(title), float32_products(phase.device, PRECISIONS[precision]):
            ways = [OURS] if name.endswith("_bfv2") else [OURS, THEIRS]
            functions = training_ways(phase, name, size, images, precision, ways)
            _note_ways(phase, title, functions, images, budget=1.5)
            if phase.cuda:
                _note_kernels(phase, title, functions[OURS])
            del functions


def training_ways(
    phase: Phase, name: str, size: str, images: int, precision: str, ways: Sequence[str]
) -> dict[str, Callable[[], object]]:
    """Build a detector and that of transformers with its weights; return a training step of each."""
    from cases import make_batch, make_optimizer
    from detr_bf.assembly import build_criterion
    from peers import OURS, THEIRS, freeze_like, peer_inputs, peer_of, peer_optimizer, peer_settings, random_model

    setting = setting_of(phase, name, size, images)
    config = setting.preset.config("loss.class_weight=1")
    model, criterion, batch = random_model(config), build_criterion(config), make_batch(setting)
    half = _autocast(phase, precision)
    functions: dict[str, Callable[[], object]] = {}
    if THEIRS in ways:
        is_rtdetr = name.startswith("rtdetr")  # has settings of its own, and its published backbone is not frozen
        peer = peer_of(model, config, **({} if is_rtdetr else peer_settings(config)))
        if not is_rtdetr:
            freeze_like(model, peer)
        peer = peer.to(phase.device).train()
        labels = [{"class_labels": each.labels, "boxes": each.boxes} for each in batch.targets]
        inputs = {**peer_inputs(model.to(phase.device), batch), "labels": labels}

        their_loss = half(lambda: peer(**inputs).loss)
        functions[THEIRS] = partial(_step, their_loss, peer, peer_optimizer(config, peer))
    model = model.to(phase.device).train()
    forward = half(model)

    def our_loss() -> Tensor:
        return criterion(forward(batch), batch.targets).total

    return {OURS: partial(_step, our_loss, model, make_optimizer(config, model)), **functions}


def _step(loss: Callable[[], Tensor], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Run forward pass, loss, backward pass, clipping and optimizer step."""
    from cases import update

    loss().backward()
    update(model, optimizer, 0.1)


def inference(phase: Phase) -> None:
    """Forward passes of our detectors and of transformers', in turn on the same GPU."""
    from cases import make_batch
    from peers import OURS, THEIRS, last_layer, output_difference, peer_inputs, peer_of, peer_outputs, random_model

    cases = (("rtdetr_r18", "160x160", 1, "float32"),) if phase.quick else INFERENCES
    for name, size, images, precision in cases:
        title = f"{name} {size} B={images} {precision}"
        if phase.over(title, 8):
            continue
        with phase.case(title), float32_products(phase.device, PRECISIONS[precision]), torch.no_grad():
            setting = setting_of(phase, name, size, images)
            model, batch, half = random_model(setting.preset.config()), make_batch(setting), _autocast(phase, precision)
            peer = peer_of(model, setting.preset.config()).to(phase.device)
            model = model.to(phase.device)
            inputs = peer_inputs(model, batch)
            ways = {OURS: half(partial(last_layer, model, batch)), THEIRS: half(partial(peer_outputs, peer, inputs))}
            if precision == "float32":
                phase.note(case=title, **output_difference(ways[OURS](), ways[THEIRS]()))
            _note_ways(phase, title, ways, images, budget=0.7)
            if phase.cuda:
                _note_kernels(phase, title, ways[OURS])


def setting_of(phase: Phase, name: str, size: str, images: int) -> Any:
    """Return images and recipe of a detector."""
    import cases
    from detr_bf.interop.transformers_folder import transformers_library

    transformers_library().utils.logging.disable_progress_bar()
    height, width = map(int, size.split("x"))
    recipe = f"{name.partition('_r')[0]}/{name}"
    return cases.setting_of(recipe, str(phase.device), 2, height=height, width=width, batch_size=images)


def _autocast(phase: Phase, precision: str) -> torch.autocast:
    return torch.autocast(phase.device.type, torch.bfloat16, enabled=precision == "bf16")


def _note_ways(phase: Phase, title: str, ways: Mapping[str, Callable[[], object]], images: int, budget: float) -> None:
    ways = {name: function for name, function in ways.items() if _works(phase, title, name, function)}
    times = milliseconds(phase, ways, budget)
    for name, function in ways.items():
        spread = times[name]
        phase.note(
            case=title,
            way=name,
            ms=spread.median,
            range=(spread.low, spread.high),
            images_per_s=1e3 * images / spread.median,
            peak_MiB=peak(phase, function),
        )


def _works(phase: Phase, title: str, name: str, function: Callable[[], object]) -> bool:
    """Call a function once; note the error of one that is not ours."""
    try:
        function()
    except Exception as error:
        if name.startswith("ours"):
            raise
        phase.note(case=title, way=name, error=f"{type(error).__name__}: {str(error)[:200]}")
        return False
    return True


def _note_kernels(phase: Phase, title: str, function: Callable[[], object]) -> None:
    """Note the share of the time in which the GPU computes, and that of each of the longest kernels."""
    from torch.profiler import ProfilerActivity, profile

    _wait(phase)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        begin = time.perf_counter()
        function()
        _wait(phase)
        seconds = time.perf_counter() - begin
    table = sorted(recorded.key_averages(), key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in table) or 1.0
    longest = {each.key[:90]: each.self_device_time_total / total for each in table[:12]}
    phase.note(
        case=title,
        busy=total / 1e6 / seconds,
        kernels=sum(each.count for each in table if each.self_device_time_total),
        shares=longest,
    )


# ---- calls for compute-sanitizer and ncu ----


def target(phase: Phase) -> None:
    """Call every kernel; with BIG in the environment at the size of an encoder."""
    big = "BIG" in os.environ
    shapes = SHAPES if big else ((5, 7), (3, 4), (2, 1))
    cells = sum(height * width for height, width in shapes)
    for names, dtype in itertools.product(("", "tiles,half_atomics"), DTYPES):
        sample = (2, cells, HEADS, len(shapes), POINTS)
        leaves = [
            torch.randn(2, cells, HEADS, CHANNELS, device=phase.device).to(dtype),
            1.2 * torch.rand(*sample, 2, device=phase.device) - 0.1,
            torch.rand(sample, device=phase.device).to(dtype),
        ]
        leaves = [each.requires_grad_() for each in leaves]

        def step(leaves: list[Tensor] = leaves) -> None:
            output = ms_deform_attn(leaves[0], shapes, STARTS if big else None, leaves[1], leaves[2])
            torch.autograd.grad(output, leaves, torch.ones_like(output))

        if names and not phase.cuda:
            continue
        with_variants(names, step)()
        if not names:
            deterministic(step)()
    for names, images, dtype in itertools.product(("", "one_pass"), (8,) if big else (3, 8, 11), DTYPES):
        packed = torch.randn(images, 13_000 if big else 37, 3, 4, 64, device=phase.device).to(dtype).requires_grad_()
        call = partial(batch_attention_packed, packed, None, 0.1)
        if phase.cuda or not names:
            with_variants(names, lambda call=call, packed=packed: torch.autograd.grad(call().sum(), [packed]))()
    _wait(phase)
    phase.note(target="done")


def exported(phase: Phase) -> None:
    """Build the ONNX files in $CARRY with TensorRT, and time them in onnxruntime, with what is installed."""
    onnxruntime = importlib.import_module("onnxruntime")
    provider = "CUDAExecutionProvider" if phase.cuda else "CPUExecutionProvider"
    trtexec = shutil.which("trtexec")
    for name, found in ((provider, provider in onnxruntime.get_available_providers()), ("trtexec", trtexec)):
        if not found:
            phase.note(missing=name)
    files = sorted(Path(os.environ["CARRY"]).glob("*.onnx"))
    if not files:
        phase.failures.append("no ONNX file: give some to carry.sh")
    for file in files:
        with phase.case(file.name):
            reference = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
            feeds = _feeds(reference)
            if provider in onnxruntime.get_available_providers():
                session = onnxruntime.InferenceSession(str(file), providers=[provider])
                if session.get_providers()[0] != provider:
                    raise RuntimeError(f"onnxruntime has fallen back to {session.get_providers()}")
                pairs = zip(session.run(None, feeds), reference.run(None, feeds), strict=True)
                differences = [float(abs(one.astype("f8") - other).max()) for one, other in pairs]
                phase.note(case=file.name, way=f"onnxruntime {provider}", differences_from_cpu=differences)
                phase.failures += [] if np.isfinite(differences).all() else [f"{file.name}: differs by {differences}"]
                _note_ways(phase, file.name, {provider: partial(session.run, None, feeds)}, len(feeds["images"]), 2.0)
            if trtexec:
                shapes = ",".join(f"{name}:{'x'.join(map(str, value.shape))}" for name, value in feeds.items())
                is_open = any(not isinstance(side, int) for each in reference.get_inputs() for side in each.shape)
                command = [trtexec, f"--onnx={file}", "--stronglyTyped", *([f"--shapes={shapes}"] if is_open else [])]
                limit = max(10.0, phase.end - time.monotonic())
                done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
                lines = [line for line in done.stdout.splitlines() if "[E]" in line or "Latency: " in line]
                phase.note(case=file.name, way="trtexec", command=" ".join(command), exit=done.returncode, said=lines)
                if done.returncode:
                    phase.failures.append(f"{file.name}: trtexec ended with {done.returncode}")


def _feeds(session: Any) -> dict[str, Any]:
    """Return random images for an ONNX file; open sizes are one image of 640 x 640."""
    generator, feeds = np.random.default_rng(0), {}
    for each in session.get_inputs():
        sides = (1, 3, 640, 640) if len(each.shape) == 4 else (1, 2)
        shape = [side if isinstance(side, int) else usual for side, usual in zip(each.shape, sides, strict=True)]
        kind = "uint8" if each.type == "tensor(uint8)" else "float32"  # with data.depth=16
        feeds[each.name] = generator.integers(256, size=shape).astype(kind)
    if "sizes" in feeds:
        feeds["sizes"] = np.tile(np.array(feeds["images"].shape[2:], dtype=np.int64), (len(feeds["images"]), 1))
    return feeds


def deformops(phase: Phase) -> None:
    """Call deformops once, which compiles its kernels then."""
    leaves = [each.requires_grad_() for each in make_inputs("decoder", 1, torch.float32, phase.device, queries=50)]
    with phase.case("deformops"):
        output = peers(phase.device)["deformops"](*leaves)
        torch.autograd.grad(output, leaves, torch.ones_like(output))


PHASES = {
    "deformops": deformops,
    "operators": operators,
    "attention": attention,
    "steps": steps,
    "inference": inference,
    "exported": exported,
    "target": target,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a phase and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=PHASES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default %(default)s")
    parser.add_argument("--seconds", type=float, default=60.0, help="no case begins later, default %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file of all phases")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try this out on a CPU")
    phase = Phase(parser.parse_args(arguments))
    if not library.compiled(phase.device) and phase.name not in ("deformops", "exported"):
        print(f"no compiled kernels on {phase.device}: {library.PROBLEMS.get(phase.device.type)}", file=sys.stderr)
        return 1
    PHASES[phase.name](phase)
    return phase.finish()


if __name__ == "__main__":
    sys.exit(main())
