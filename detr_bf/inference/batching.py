"""Queue of images, batches and metrics of a server; needs prometheus_client, but no web framework."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.text import printable
from detr_bf.data.inputs import check_batch_size
from detr_bf.inference.prediction import Prediction
from detr_bf.inference.predictor import Predictor

logger = logging.getLogger(__name__)

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # bounds of the histograms of times


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Limits of a server.

    Args:
        batch_size: largest number of images of a forward pass.
        max_wait: seconds that the first image of a batch waits for others while the model is idle.
        queue: largest number of requests in work, from the first byte of a request to its answer.
        max_bytes, max_pixels: of an image.
        timeout: seconds from the start of a request to its answer.
        threshold: of requests that give none, see :class:`~detr_bf.inference.predictor.Predictor`.
        half: see :class:`~detr_bf.inference.predictor.Predictor`.
        token: secret that requests must give, None for none.

    Raises:
        InputError: a value is out of range.
    """

    batch_size: int = 8
    max_wait: float = 0.005
    queue: int = 64
    max_bytes: int = 2**24
    max_pixels: int = 50_000_000
    timeout: float = 30.0
    threshold: float | str | None = None
    half: bool = False
    token: str | None = None

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)
        for name in ("queue", "max_bytes", "max_pixels"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be a whole number from 1, got {getattr(self, name)}")
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise InputError(f"the timeout must be a number of seconds above 0, got {self.timeout}")
        if not 0 <= self.max_wait < self.timeout:
            raise InputError(
                f"an image can wait for others from 0 to less than the timeout, {self.timeout:g} s; got "
                f"{self.max_wait:g} s"
            )
        token = self.token
        if token is not None and not (token.isascii() and token.isprintable() and token and token == token.strip()):
            raise InputError("the token must be one line of printable ASCII characters without blanks around it")


class ServingMetrics:
    """Counts of a server."""

    def __init__(self, batch_size: int) -> None:
        disable_created_metrics()  # times at which each count began
        self.registry = registry = CollectorRegistry()
        labels = ("path", "status")
        self.requests = Counter("detr_bf_requests_total", "answered requests", labels, registry=registry)
        self.failed_batches = Counter(
            "detr_bf_failed_batches_total", "batches whose images were computed again one by one", registry=registry
        )
        self.answer_seconds, self.forward_seconds = (
            Histogram(name, text, registry=registry, buckets=_SECONDS)
            for name, text in (
                ("detr_bf_predict_seconds", "seconds of a prediction with status 200"),
                ("detr_bf_forward_seconds", "seconds of a batch in the model"),
            )
        )
        sizes = sorted({size for size in (1, 2, 4, 8, 16, 32, 64) if size < batch_size} | {batch_size})
        self.batch_sizes = Histogram("detr_bf_batch_size", "images of a batch", registry=registry, buckets=sizes)


class StoppedError(Exception):
    """The batcher takes no images any more."""


@dataclass(eq=False)
class _Job:
    """An image in the queue."""

    pixels: Tensor  # (C, H, W)
    least: Tensor  # (K,) score from which the detections of each class are returned
    result: Future[Prediction]
    arrived: float
    reference: Tensor | None = None  # of the size of the image


class Batcher:
    """Thread that collects images into batches and runs the detector.

    Args:
        predictor: has the backend and the methods ``predict`` and ``least_scores`` of
            :class:`~detr_bf.inference.predictor.Predictor`.
    """

    def __init__(self, predictor: Predictor, options: ServingOptions, metrics: ServingMetrics) -> None:
        self.predictor, self.options, self.metrics = predictor, options, metrics
        self.error: BaseException | None = None  # that has ended the thread
        self.ready = threading.Event()  # the warm-up pass is done
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.running = 0  # images in the model
        self._since = math.inf  # start of the batch in the model
        self._on_failure: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="detr_bf batcher", daemon=True)

    @property
    def state(self) -> str:
        """``starting``, ``ready``, ``overdue`` (the batch in the model takes longer than a request may), ``failed``."""
        if self.error is not None:
            return "failed"
        if not self.ready.is_set():
            return "starting"
        return "overdue" if monotonic() - self._since > self.options.timeout else "ready"

    def start(self, on_failure: Callable[[], None]) -> None:
        """Start the thread, which begins with a warm-up pass; it calls ``on_failure`` if the detector is broken."""
        self._on_failure = on_failure
        self._thread.start()

    def submit(self, pixels: Tensor, least: Tensor, reference: Tensor | None = None) -> Future[Prediction]:
        """Put an image (C, H, W) into the queue; a result that is cancelled before its batch costs nothing.

        ``reference`` is needed by a detector that reads references, and by no other.

        Raises:
            StoppedError: the batcher was closed or has failed.
        """
        job = _Job(pixels, least, Future(), monotonic(), reference)
        with self._changed:
            if self._closed:
                raise StoppedError
            self._jobs.append(job)
            self._changed.notify()
        return job.result

    def close(self, timeout: float) -> bool:
        """Compute what is in the queue, end the thread, and return False if that takes over ``timeout`` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._warm_up()
            self.ready.set()
            while (jobs := self._next_batch()) is not None:
                with self._in_model(len(jobs)):
                    self._compute(jobs)
        except BaseException as error:  # also the InputError of a detector without finite outputs
            self.error = error
            with self._changed:
                self._closed, left = True, list(self._jobs)
            for job in left:
                if job.result.set_running_or_notify_cancel():
                    job.result.set_exception(StoppedError())
            self._on_failure()

    def _warm_up(self) -> None:
        """Run the detector once, which also compiles and allocates what the first image would wait for."""
        start, blank = monotonic(), self.predictor.pixel_format.blank(3, 4)
        self._predict([blank], [blank])
        logger.info("warm-up pass: %.2f s", monotonic() - start)

    def _next_batch(self) -> list[_Job] | None:
        """Wait for images and return those of the next batch; None after :meth:`close` if there are none."""
        with self._changed:
            while True:
                batch = self._fitting()
                left = batch[0].arrived + self.options.max_wait - monotonic() if batch else math.inf
                if batch and (len(batch) == self.options.batch_size or left <= 0 or self._closed):
                    break
                if not batch and self._closed:
                    return None
                self._changed.wait(None if math.isinf(left) else left)
            for job in batch:
                self._jobs.remove(job)
        return [job for job in batch if job.result.set_running_or_notify_cancel()]

    def _fitting(self) -> list[_Job]:
        """Drop cancelled images, and return the first ones for a batch."""
        self._jobs = deque(job for job in self._jobs if not job.result.cancelled())
        return list(islice(self._jobs, self.options.batch_size))

    @contextmanager
    def _in_model(self, images: int) -> Iterator[None]:
        self.running, self._since = images, monotonic()
        try:
            yield
        finally:
            self.running, self._since = 0, math.inf

    def _compute(self, jobs: Sequence[_Job]) -> None:
        """Run the detector and set the results; if it fails, compute each image alone, and the faulty one fails."""
        if not jobs:
            return
        start = monotonic()
        try:
            predictions = self._predict([job.pixels for job in jobs], [job.reference for job in jobs])
            found = list(zip(jobs, predictions, strict=True))
        except Exception as error:
            if len(jobs) > 1:
                logger.warning("a batch of %d images failed, each is computed alone: %s", len(jobs), printable(error))
                self.metrics.failed_batches.inc()
                for job in jobs:
                    self._compute([job])
                return
            jobs[0].result.set_exception(error)
            if not isinstance(error, InputError):
                logger.exception("the detector failed on an image of shape %s", tuple(jobs[0].pixels.shape))
                self._warm_up()  # a device that is lost fails here, which ends the server
            return
        self.metrics.forward_seconds.observe(monotonic() - start)
        self.metrics.batch_sizes.observe(len(jobs))
        for job, each in found:
            job.result.set_result(each.above(job.least))

    def _predict(self, images: list[Tensor], references: list[Tensor | None]) -> list[Prediction]:
        """Return all objects of each image; the requests of a batch may have different thresholds."""
        given: Any = references if self.predictor.backend.reads_references else None
        return list(self.predictor.predict(images, len(images), 0.0, half=self.options.half, reference=given))
