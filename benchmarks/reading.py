"""Time and memory of reading a COCO file: into Python objects, into columns, and mapped from the cache.

python benchmarks/reading.py --images 100000 --rounds 3 --output benchmarks/results/reading_cpu.json

The file has random boxes, eight for each image, and the keys of Objects365. Each measurement is a process of its own;
the ways alternate. ``objects`` is json's reader, ``columns`` the first reading, ``cache`` each later one; then the
tables of the training data set are made. ``checks`` are those of the annotations, without the image files. The memory
is the largest resident set of the process, less that of the same process before reading; ``private`` is what it does
not share with other processes in the end, that of the imported libraries included.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from command import make_parser, measured_in_process, print_header, run_benchmark, write_record
from detr_bf.common.errors import InputError
from detr_bf.common.timing import Spread
from detr_bf.data import coco
from detr_bf.data.checks.annotations import CHECKS
from detr_bf.data.checks.report import Split
from detr_bf.data.coco import CocoDetection, read_annotations
from detr_bf.data.transforms import eval_transform

WAYS = ("objects", "columns", "cache")
CLASSES = 365
_FILE_CHECKS = frozenset(("file-missing", "file-unreadable", "size-differs", "size-not-rotated", "image-16-bit"))
_MEGABYTE = 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = make_parser(__doc__, rounds=3, devices=("cpu",))
    parser.add_argument("--images", type=int, default=100_000, metavar="N", help="default %(default)s")
    parser.add_argument("--objects", type=int, default=8, metavar="N", help="boxes of an image, default %(default)s")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="default all")
    parser.add_argument("--checks", action="store_true", help="run the checks of the annotations, too")
    return run_benchmark(run, parser.parse_args(arguments))


def run(options: argparse.Namespace) -> int:
    """Write the file, measure, print and write.

    Raises:
        InputError: no images.
    """
    if min(options.images, options.objects) < 1:
        raise InputError(f"--images and --objects must be 1 or more; got {options.images} and {options.objects}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "annotations.json"
        write_annotations(path, options.images, options.objects)
        size = path.stat().st_size
        measured: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
        for _ in range(options.rounds):
            for way in options.ways:
                measured[way].append(_in_process(way, path, options.checks))
    print(f"{options.images:,} images, {options.images * options.objects:,} boxes, {size / 1e6:,.0f} MB")
    print_header("way", "reading, s", "of the first way", "data set, s", "checks, s", "memory, MB", "private, MB")
    first = options.ways[0]
    for way, rows in measured.items():
        ratios = [row["read"] / other["read"] for row, other in zip(rows, measured[first], strict=True)]
        middle = {key: Spread.of([row[key] for row in rows]).median for key in rows[0]}
        times = f"{middle['read']:.2f} | {Spread.of(ratios).median:.2f} | {middle['dataset']:.2f}"
        checks = f"{middle['checks']:.1f}" if options.checks else ""
        print(f"| {way} | {times} | {checks} | {middle['memory']:.0f} | {middle['private']:.0f} |", flush=True)
    write_record(options, file_bytes=size, measured=measured)
    return 0


def write_annotations(path: Path, images: int, objects: int) -> None:
    """Write a COCO file of random boxes with the keys of Objects365."""
    random = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"images": [')
        for number in range(1, images + 1):
            image = {"id": number, "file_name": f"patch{number % 50}/objects365_v2_{number:08d}.jpg"}
            size = {"height": 512, "width": 683, "license": number % 8, "url": f"http://example.org/{number}.jpg"}
            file.write(f"{', ' if number > 1 else ''}{json.dumps({**image, **size})}")
        file.write('], "annotations": [')
        for number in range(1, images + 1):
            boxes = (random.random((objects, 4)) * (300, 200, 300, 200) + (0, 0, 5, 5)).tolist()
            labels = random.integers(1, CLASSES + 1, objects).tolist()
            entries = [
                {
                    "id": key,
                    "iscrowd": 0,
                    "isfake": 0,
                    "area": bbox[2] * bbox[3],
                    "isreflected": 0,
                    "bbox": bbox,
                    "image_id": number,
                    "category_id": label,
                }
                for key, (bbox, label) in enumerate(zip(boxes, labels, strict=True), objects * (number - 1) + 1)
            ]
            file.write(f"{', ' if number > 1 else ''}{json.dumps(entries)[1:-1]}")
        categories = [{"id": number, "name": f"class {number}"} for number in range(1, CLASSES + 1)]
        file.write(f'], "categories": {json.dumps(categories)}}}')


def _in_process(way: str, path: Path, checks: bool) -> dict[str, float]:
    """Measure one way in a fresh process; the cache is that of the folder of the file."""
    home = path.parent / "home"
    if way == "columns" and home.exists():
        for each in home.rglob("*.columns"):
            each.unlink()
    arguments = ["--measure", way, str(path), *(["checks"] if checks else [])]
    found: dict[str, float] = measured_in_process(__file__, *arguments, DETR_BF_HOME=str(home))
    return found


def measure(way: str, path: str, checks: str = "") -> None:
    """Read a file, print seconds and megabytes as JSON."""
    if way == "objects":
        coco.LARGE_FILE = 2**60
    before = _peak()
    start = time.perf_counter()
    content = read_annotations(Path(path))
    read = time.perf_counter()
    data = CocoDetection(Path(path).parent, content, eval_transform(short_side=800, max_size=1333))
    end = time.perf_counter()
    found: dict[str, Any] = {"read": read - start, "dataset": end - read, "memory": _peak() - before}
    found["private"] = _private()
    if checks:
        split = Split("train", Path(path).parent, content, {}, 300)
        start = time.perf_counter()
        for check in CHECKS:
            if check.code not in _FILE_CHECKS:
                check.on("train", split)
        found["checks"] = time.perf_counter() - start
        found["memory_checks"] = _peak() - before
    assert len(data) == len(content.images)
    print(json.dumps(found))


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _private() -> float:
    """Return the megabytes that no other process shares, 0 where the system does not tell."""
    try:
        text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0.0
    return sum(int(size) for size in re.findall(r"^Private_Dirty:\s+(\d+) kB", text, re.MULTILINE)) * 1024 / _MEGABYTE


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(*sys.argv[2:])
    else:
        sys.exit(main())
