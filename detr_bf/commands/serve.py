"""Serve a detector over HTTP: POST an image to /predict, and the answer is its objects as JSON."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

from detr_bf.acceleration.allocator import keep_freed_memory
from detr_bf.commands.model_arguments import TOKEN_VARIABLE
from detr_bf.commands.predict import threshold_of
from detr_bf.common.errors import InputError
from detr_bf.common.files import read_regular
from detr_bf.common.progress import setup_logging
from detr_bf.common.text import printable
from detr_bf.inference.loading import load

logger = logging.getLogger(__name__)

_LONGEST_TOKEN = 4096  # bytes
_LIBRARIES = ("fastapi", "uvicorn", "starlette", "pydantic", "prometheus_client")


def main(options: argparse.Namespace) -> int:
    """Check the options, load the detector, and serve until a signal comes."""
    setup_logging()
    try:
        from detr_bf.inference import http_server
        from detr_bf.inference.batching import ServingOptions
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _LIBRARIES:
            raise
        raise InputError(f"serving needs the package {error.name}: pip install 'detr_bf[serve]'") from error
    limits = ServingOptions(
        batch_size=options.batch_size,
        max_wait=options.max_wait / 1000,
        queue=options.queue,
        max_bytes=options.max_bytes,
        max_pixels=options.max_pixels,
        timeout=options.timeout,
        threshold=threshold_of(options.threshold),
        half=options.half,
        token=_token(options.token_file),
    )
    keep_freed_memory(large=True)
    with http_server.listen(options.host, options.port) as listening:  # before the detector is loaded
        name = Path(options.run).absolute().name
        predictor = load(options.run, options.device, options.overrides)
        service = http_server.DetectorService(predictor, limits, name, options.reference)
        url, is_local = http_server.address(listening)
        if not is_local and limits.token is None:
            logger.warning("anyone who reaches %s can use this server: set --token-file or %s", url, TOKEN_VARIABLE)
        print(f"{printable(name)}: {url}", flush=True)
        return http_server.DetectorServer(service).serve_all(listening)


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
