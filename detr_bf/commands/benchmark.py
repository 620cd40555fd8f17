"""Measure how fast a detector finds objects on this machine, by format, precision, batch size and threads."""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.files import check_output_file, write_json
from detr_bf.common.progress import setup_logging
from detr_bf.common.text import printable
from detr_bf.common.timing import Spread, alternate, paired_ratios
from detr_bf.data.images import read_image
from detr_bf.data.inputs import image_files
from detr_bf.export import synthetic_images
from detr_bf.export.graph import FILE_SUFFIXES
from detr_bf.inference.backends import TorchBackend
from detr_bf.inference.loading import load
from detr_bf.inference.predictor import Predictor
from detr_bf.report import machine_info, process_memory

MOST_BATCH, MOST_THREADS, MOST_ROUNDS = 1024, 1024, 100_000


@dataclass(frozen=True)
class Timing:
    """Seconds of the calls of one candidate at one batch size and number of threads."""

    source: str
    precision: str  # float32; half: bfloat16 on a CPU, float16 on a GPU; of a file: float32, float16 or int8
    batch_size: int
    threads: int
    seconds: Spread  # of a call with a batch of images
    images_per_second: float  # of a call of median time
    ratio: Spread  # time of the call / that of the first candidate in the same round
    memory_mib: float | None  # most memory of a process with this candidate alone; None: not measured
    device_memory_mib: float | None  # likewise, of tensors on a GPU


def main(options: argparse.Namespace) -> int:
    """Check the arguments, measure, print the table and write the file."""
    setup_logging()
    threads = options.threads or [torch.get_num_threads()]
    for name, values, least, most in (
        ("--batch-sizes", options.batch_sizes, 1, MOST_BATCH),
        ("--threads", threads, 1, MOST_THREADS),
        ("--rounds", [options.rounds], 2, MOST_ROUNDS),
    ):
        if wrong := [value for value in values if not least <= value <= most]:
            raise InputError(f"{name} {wrong[0]}: expected whole numbers from {least} to {most:,}")
    if repeated := [each for each in options.runs if options.runs.count(each) > 1]:
        raise InputError(f"{printable(repeated[0])} is given twice: name each source once")
    if options.output is not None:
        check_output_file(options.output, "--output")
        if options.output.exists():
            raise InputError(f"--output {printable(options.output)} exists: name another file; nothing is replaced")
    images, described = _images(options, max(options.batch_sizes))
    batch_sizes = list(dict.fromkeys(options.batch_sizes))
    timings = [
        timing
        for index, number in enumerate(dict.fromkeys(threads))
        for timing in _measure(options, number, images, batch_sizes, index == 0 and not options.no_memory)
    ]
    print(f"{len(images)} {described}, {options.rounds} rounds; [10th, 90th percentile]")
    print(_table(timings))
    if options.output is not None:
        content = {"machine": machine_info(), "images": described, "rounds": options.rounds}
        write_json(options.output, {**content, "timings": [asdict(each) for each in timings]})
    return 0


def _images(options: argparse.Namespace, number: int) -> tuple[list[Tensor], str]:
    """Return ``number`` images as (C, H, W) tensors, repeated if the folder has fewer, and their description.

    They are read as the first of the detectors reads images.

    Raises:
        InputError: the folder has no images, one cannot be read, or the detector cannot be loaded.
    """
    first = _loaded(options.runs[0], "cpu")
    if options.images is None:
        return synthetic_images(number, first.pixel_format), "synthetic images"
    files = list(islice(image_files([options.images]), number))
    read = [read_image(file, max_pixels=first.max_pixels, pixel_format=first.pixel_format) for file in files]
    return [read[index % len(read)] for index in range(number)], f"images of {printable(options.images)}"


def _candidates(options: argparse.Namespace) -> Iterator[tuple[str, str, Predictor]]:
    """Load each source with torch's present number of threads, and yield its name, precision and predictor."""
    for source in options.runs:
        predictor = _loaded(source, options.device)
        yield source, predictor.backend.precision, predictor
        if options.half and isinstance(predictor.backend, TorchBackend):
            yield source, "half", predictor


def _loaded(source: str, device: str) -> Predictor:
    return load(source, "auto" if Path(source).suffix in FILE_SUFFIXES else device)


def _measure(
    options: argparse.Namespace, threads: int, images: Sequence[Tensor], batch_sizes: Sequence[int], with_memory: bool
) -> Iterator[Timing]:
    """Yield the timings of all candidates at one number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        candidates = list(_candidates(options))
        for batch_size in batch_sizes:
            calls = {
                f"{source}, {precision}": _call(predictor, images[:batch_size], precision == "half")
                for source, precision, predictor in candidates
            }
            seconds = alternate(calls, options.rounds, description=f"batch {batch_size}, {threads} threads")
            for (source, precision, _), name in zip(candidates, seconds, strict=True):
                memory: dict[str, float | None] = {}
                if with_memory:
                    memory = _memory(options, source, precision, threads, images[:batch_size])
                time = Spread.of(seconds[name])
                yield Timing(
                    source=source,
                    precision=precision,
                    batch_size=batch_size,
                    threads=threads,
                    seconds=time,
                    images_per_second=batch_size / time.median,
                    ratio=Spread.of(paired_ratios(seconds, name, next(iter(seconds)))),
                    memory_mib=memory.get("peak_memory_mib"),
                    device_memory_mib=memory.get("device_memory_mib"),
                )
    finally:
        torch.set_num_threads(before)


def _call(predictor: Predictor, images: Sequence[Tensor], half: bool) -> Callable[[], object]:
    """Return a function that detects in the images, all of them in one batch, each its own reference if one is read."""
    references = list(images) if predictor.backend.reads_references else None
    return lambda: list(predictor.predict(list(images), len(images), half=half, reference=references))


def _memory(
    options: argparse.Namespace, source: str, precision: str, threads: int, images: Sequence[Tensor]
) -> dict[str, float | None]:
    """Return the most memory of a new process that loads the source and detects twice; empty if it was killed."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        arrays = [each.numpy() for each in images]
        try:
            return pool.submit(measure_memory, source, options.device, precision == "half", threads, arrays).result()
        except BrokenProcessPool:
            return {}


def measure_memory(
    source: str, device: str, half: bool, threads: int, arrays: Sequence[Any]
) -> dict[str, float | None]:
    """Detect twice in one batch of (3, H, W) arrays, and return the most memory that this process ever had."""
    torch.set_num_threads(threads)
    predictor = _loaded(source, device)
    call = _call(predictor, [torch.from_numpy(each) for each in arrays], half)
    call()
    call()
    return process_memory(predictor.device)


def _table(timings: Sequence[Timing]) -> str:
    """Return the timings as a Markdown table."""
    lines = [
        "| source | precision | batch | threads | ms a call | images/s | time / first | memory MiB |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for each in timings:
        time, ratio = each.seconds, each.ratio
        memory = "" if each.memory_mib is None else f"{each.memory_mib:.0f}"
        if each.device_memory_mib is not None:
            memory += f" + {each.device_memory_mib:.0f} on the GPU"
        lines.append(
            f"| {printable(each.source)} | {each.precision} | {each.batch_size} | {each.threads} "
            f"| {1e3 * time.median:.1f} [{1e3 * time.low:.1f}, {1e3 * time.high:.1f}] | {each.images_per_second:.1f} "
            f"| {ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] | {memory} |"
        )
    return "\n".join(lines)
