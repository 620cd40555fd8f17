"""Load test of `detr-bf serve` on this machine, with a rising number of clients.

python benchmarks/serving.py                             # the detector of the demo with random weights
python benchmarks/serving.py --checkpoint runs/mine --clients 1 4 16 --seconds 30
python benchmarks/serving.py --output benchmarks/results/serving_cpu.json

Each client sends one image after the other over a connection of its own and compares the answer with the one that the
image got when it was sent alone. Then more clients than the queue takes are started, which must get 200 or 429, and at
last the server is stopped with SIGTERM while clients send. Exit code 1: a request was lost, or an answer is wrong.
Clients and server share the processor, so the server alone is faster than shown.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image

from command import write_record
from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.common.terminal import run_tool
from detr_bf.common.text import printable
from detr_bf.config import config_to_dict, packaged_configs
from detr_bf.engine import Checkpoint
from detr_bf.inference.loading import create_model, recipe_config

CLASSES = ClassMap(tuple(range(1, 11)), tuple(f"class {number}" for number in range(1, 11)))
LIMIT = 120.0  # seconds of a request or of the start of the server
TOLERANCE = 0.1  # pixels, of the same box


@dataclass
class Load:
    """Requests of some clients in some seconds."""

    clients: int
    seconds: float = 0.0
    sent: int = 0
    statuses: Counter[str] = field(default_factory=Counter)  # or what happened instead of an answer
    wrong: int = 0  # answers of other objects
    latencies: list[float] = field(default_factory=list)  # seconds of answers with status 200

    @property
    def lost(self) -> int:
        return self.sent - sum(self.statuses.values())

    def summary(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        p50, p99 = np.quantile(self.latencies, (0.5, 0.99)).tolist() if self.latencies else (None, None)
        rate = len(self.latencies) / self.seconds
        kept = {"clients": self.clients, "seconds": self.seconds, "sent": self.sent, "statuses": dict(self.statuses)}
        return {**kept, "lost": self.lost, "wrong": self.wrong, "per_second": rate, "p50": p50, "p99": p99}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the load test and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", metavar="RUN_OR_FILE", help="detector, by default one with random weights")
    parser.add_argument("--recipe", default="demo", help="of random weights, default %(default)s")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each number of clients, default %(default)s")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="default %(default)s")
    parser.add_argument("--max-wait", type=float, default=5.0, metavar="MS", help="default %(default)s")
    parser.add_argument("--size", type=int, nargs=2, default=(640, 480), metavar=("W", "H"), help="of the images")
    parser.add_argument("--device", default="cpu", help="default %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all numbers here, as JSON")
    options = parser.parse_args(arguments)
    return run_tool(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Measure, print and write; return 1 if a request was lost or an answer is wrong."""
    if min(options.clients) < 1 or options.seconds <= 0:
        raise InputError("--clients and --seconds must be above 0")
    busy = os.getloadavg()[0]
    images = [_jpeg(number, *options.size) for number in range(16)]
    with tempfile.TemporaryDirectory(prefix="serving-") as folder:
        checkpoint = options.checkpoint or _random_weights(Path(folder) / "random.pt", options.recipe)
        with served(checkpoint, options) as (url, _):
            expected = [_answer(_connection(url), image)[1] for image in images]
            _require_different(expected)
            print(f"load average before: {busy:.1f}\nclients  requests/s  p50 ms  p99 ms  statuses")
            loads = [_shown(measure(url, images, expected, clients, options.seconds)) for clients in options.clients]
            batches = _batch_sizes(url)
        print(f"images of a batch, on average: {batches:.2f}\na queue of 4:")
        with served(checkpoint, options, "--queue", "4") as (url, _):
            full = _shown(measure(url, images, expected, 16, options.seconds))
        print("SIGTERM while clients send:")
        with served(checkpoint, options) as (url, process):
            threading.Timer(options.seconds / 2, process.send_signal, (signal.SIGTERM,)).start()
            stopped = _shown(measure(url, images, expected, 8, options.seconds))
            code = process.wait(LIMIT)
        print(f"exit code {code}")
    faults = sum(load.lost + load.wrong for load in (*loads, full, stopped)) + code + stopped.statuses["broken off"]
    write_record(
        options,
        load_average_before=busy,
        loads=[load.summary() for load in loads],
        mean_batch=batches,
        full_queue=full.summary(),
        stopped=stopped.summary(),
        exit_code=code,
    )
    return int(faults > 0)


@contextmanager
def served(checkpoint: str, options: argparse.Namespace, *more: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run the server; yield its URL and process."""
    command = [sys.executable, "-m", "detr_bf", "serve", checkpoint, "--port", "0", "--device", options.device]
    command += ["--batch-size", str(options.batch_size), "--max-wait", str(options.max_wait), "--threshold", "0", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().rpartition(" ")[2].strip()
        end = time.monotonic() + LIMIT
        while url and process.poll() is None and time.monotonic() < end and not _is_ready(url):
            time.sleep(0.1)
        if process.poll() is not None or not url:
            raise InputError("the server has not started: see its message")
        yield url, process
    finally:
        process.terminate()
        process.wait(LIMIT)


def measure(url: str, images: Sequence[bytes], expected: Sequence[Any], clients: int, seconds: float) -> Load:
    """Send images with a number of clients for some seconds."""
    load, lock, numbers = Load(clients), threading.Lock(), count()
    start = time.monotonic()

    def client() -> None:
        connection = _connection(url)
        while time.monotonic() < start + seconds:
            number = next(numbers) % len(images)
            begun = time.monotonic()
            with lock:
                load.sent += 1
            try:
                status, found = _answer(connection, images[number])
                name = str(status)
            except ConnectionRefusedError:
                name = "refused"
            except (ConnectionResetError, BrokenPipeError, HTTPException) as error:
                # an idle connection that the server closes; a request that it accepted has the beginning of an answer
                name = "closed" if isinstance(error, OSError) else "broken off"
                connection = _connection(url)
            with lock:
                load.statuses[name] += 1
                if name == "200":
                    load.latencies.append(time.monotonic() - begun)
                    load.wrong += not _same(found, expected[number])
            if name in ("refused", "closed"):
                return  # the server has ended

    with ThreadPoolExecutor(clients) as threads:
        for each in [threads.submit(client) for _ in range(clients)]:
            each.result()
    load.seconds = time.monotonic() - start
    return load


def _connection(url: str) -> HTTPConnection:
    parts = urlsplit(url)
    return HTTPConnection(str(parts.hostname), parts.port, timeout=LIMIT)


def _answer(connection: HTTPConnection, image: bytes) -> tuple[int, Any]:
    """Return status and content."""
    connection.request("POST", "/predict", image, {"Content-Type": "image/jpeg"})
    answer = connection.getresponse()
    content = answer.read()
    return answer.status, json.loads(content) if answer.status == 200 else None


def _is_ready(url: str) -> bool:
    connection = _connection(url)
    connection.request("GET", "/health")
    return connection.getresponse().status == 200


def _batch_sizes(url: str) -> float:
    """Return the mean number of images of a batch."""
    connection = _connection(url)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    values = {line.partition(" ")[0]: float(line.partition(" ")[2]) for line in lines if not line.startswith("#")}
    return values["detr_bf_batch_size_sum"] / values["detr_bf_batch_size_count"]


def _boxes(found: Any) -> np.ndarray[Any, Any]:
    """Return the boxes (N, 4)."""
    return np.array([each["bbox"] for each in found["objects"]]).reshape(-1, 4)


def _same(found: Any, expected: Any) -> bool:
    """Return True if at least half of the boxes are the same.

    Rounding depends on the batch size, and where a detector chooses its queries by score, it decides between near-equal
    ones: then single boxes differ.
    """
    one, other = _boxes(found), _boxes(expected)
    if len(one) != len(other):
        return False
    near = (np.abs(one[:, None] - other).max(axis=2, initial=0) < TOLERANCE).any(axis=1)
    return not len(one) or bool(near.mean() >= 0.5)


def _require_different(answers: Sequence[Any]) -> None:
    """Raise InputError if answers of other images would not be noticed."""
    if any(_same(one, other) for number, one in enumerate(answers) for other in answers[:number]):
        raise InputError("the detector finds the same in several images, so mixed-up answers would not be noticed")


def _shown(load: Load) -> Load:
    """Print a row."""
    found = load.summary()
    times = [f"{1000 * found[name]:.0f}" if found[name] is not None else "-" for name in ("p50", "p99")]
    statuses = ", ".join(f"{name}: {number}" for name, number in sorted(load.statuses.items()))
    row = f"{load.clients:7}  {found['per_second']:10.1f}  {times[0]:>6}  {times[1]:>6}  {statuses}"
    print(f"{row}; lost {load.lost}, wrong {load.wrong}", flush=True)
    return load


def _random_weights(path: Path, recipe: str) -> str:
    """Save the detector of a packaged config; its weights are large enough that boxes depend on the image."""
    if recipe not in packaged_configs():
        raise InputError(f"there is no packaged config {printable(recipe)}: 'detr-bf recipes' lists them")
    file = str(packaged_configs()[recipe])
    torch.manual_seed(0)
    model = create_model(file, num_classes=CLASSES.num_classes)
    for name, parameter in model.named_parameters():
        if not name.startswith("backbone."):
            torch.nn.init.normal_(parameter, std=0.1)
    Checkpoint(model.state_dict(), CLASSES.to_dict(), config_to_dict(recipe_config(file))).save(path)
    return str(path)


def _jpeg(number: int, width: int, height: int) -> bytes:
    """Return an image of random blocks."""
    blocks = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(blocks).resize((width, height)).save(file, "JPEG", quality=90)
    return file.getvalue()


if __name__ == "__main__":
    sys.exit(main())
