"""Serve a detector over HTTP: POST an image to /predict, and the answer is its objects as JSON.

detr-bf serve runs/mine
detr-bf serve runs/mine --port 0 --batch-size 4 --max-wait 10 --token-file token.txt
curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' http://127.0.0.1:8000/predict

Needs pip install 'detr_bf[serve]'. The token is read from a file or from DETR_BF_TOKEN, so that it is not in the list
of processes. SIGTERM and Ctrl-C end it with exit code 0 after the accepted requests are answered. docs/serving.md has
more.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from detr_bf.cli import run_tool
from detr_bf.commands.predict import threshold_of
from detr_bf.errors import InputError
from detr_bf.evaluation import DEFAULT_THRESHOLD
from detr_bf.files import read_regular
from detr_bf.malloc import keep_freed_memory
from detr_bf.models import load
from detr_bf.progress import setup_logging
from detr_bf.serving.batching import ServingOptions
from detr_bf.text import printable

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "DETR_BF_TOKEN"
_LONGEST_TOKEN = 4096  # bytes
_LIBRARIES = ("fastapi", "uvicorn", "starlette", "pydantic")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="RUN_OR_FILE", help="run folder or checkpoint of a detector")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="0 is any free one (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="most images of a pass (%(default)s)")
    parser.add_argument(
        "--max-wait",
        type=float,
        default=5.0,
        metavar="MS",
        help="milliseconds that an image waits for others while the model is idle (%(default)s)",
    )
    parser.add_argument(
        "--same-size",
        action="store_true",
        help="only images of one size share a pass, so that none is padded",
    )
    parser.add_argument("--queue", type=int, default=64, metavar="N", help="most requests in work (%(default)s)")
    parser.add_argument("--max-bytes", type=int, default=2**24, metavar="N", help="of an image file (%(default)s)")
    parser.add_argument("--max-pixels", type=int, default=50_000_000, metavar="N", help="of an image (%(default)s)")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds of a request (%(default)s)")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"file with the token that requests must give ({TOKEN_VARIABLE})",
    )
    parser.add_argument(
        "--threshold",
        metavar="SCORE",
        help="least score of requests that give none, or 'class' for one of each class (default: the one with the "
        f"highest F1 in the evaluation of the checkpoint, {DEFAULT_THRESHOLD} without an evaluation)",
    )
    parser.add_argument("--half", action="store_true", help="float16 on a GPU, bfloat16 on a CPU")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    options = parser.parse_args(arguments)
    return run_tool(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    """Check the options, load the detector, and serve until a signal comes."""
    setup_logging()
    try:
        from detr_bf.serving import http
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _LIBRARIES:
            raise
        raise InputError(f"serving needs the package {error.name}: pip install 'detr_bf[serve]'") from error
    limits = ServingOptions(
        batch_size=options.batch_size,
        max_wait=options.max_wait / 1000,
        same_size=options.same_size,
        queue=options.queue,
        max_bytes=options.max_bytes,
        max_pixels=options.max_pixels,
        timeout=options.timeout,
        threshold=threshold_of(options.threshold),
        half=options.half,
        token=_token(options.token_file),
    )
    keep_freed_memory(large=True)
    with http.listen(options.host, options.port) as listening:  # before the detector is loaded
        name = Path(options.checkpoint).absolute().name
        service = http.DetectorService(load(options.checkpoint, options.device), limits, name)
        url, is_local = http.address(listening)
        if not is_local and limits.token is None:
            logger.warning("anyone who reaches %s can use this server: set --token-file or %s", url, TOKEN_VARIABLE)
        print(f"{printable(name)}: {url}", flush=True)
        return http.DetectorServer(service).serve_all(listening)


def _token(file: Path | None) -> str | None:
    """Return the token of the file or of the environment; None if neither is given.

    Raises:
        InputError: both are given, the file cannot be read, or the token is empty.
    """
    from_environment = os.environ.get(TOKEN_VARIABLE)
    if file is None:
        return from_environment
    if from_environment is not None:
        raise InputError(f"--token-file and {TOKEN_VARIABLE} exclude each other: give one")
    try:
        return read_regular(file, _LONGEST_TOKEN).decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        raise InputError(f"--token-file: there is no file {printable(file)}") from None
    except ValueError as error:
        raise InputError(f"--token-file: {printable(file)} cannot be used: {error}") from error
