"""The HTTP server: answers, batches, limits, faults and shutdown, over real connections."""

from __future__ import annotations

import ast
import gc
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import HTTPException
from PIL import Image
from scipy.optimize import linear_sum_assignment

import detr_bf
from detr_bf.commands import main
from detr_bf.common.errors import InputError
from detr_bf.data import images
from detr_bf.inference import http_server
from detr_bf.inference.batching import Batcher, ServingMetrics, ServingOptions
from detr_bf.inference.http_server import DetectorServer, DetectorService, address, listen
from detr_bf.inference.prediction import Prediction
from detr_bf.inference.predictor import Predictor
from tests.hostile.images import BROKEN, FORMATS
from tests.test_architecture import PACKAGE, imported_names
from tests.tools.test_convert_checkpoint import checkpoint

PNG = {"Content-Type": "image/png"}
SECONDS = 20  # limit of all waiting
TOKEN = "correct-horse"
FRAMEWORK = {"fastapi", "uvicorn", "starlette", "pydantic"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "tiny.pt"
    checkpoint("data.transforms.eval_short_side=64", "data.transforms.max_size=128", average=False).save(path)
    return path


@pytest.fixture(scope="module")
def detector(weights: Path) -> Predictor:
    return detr_bf.load(weights, "cpu")


def photo(number: int, width: int = 64, height: int = 48) -> bytes:
    """PNG file of random blocks; the red value of its first pixel is ``number``."""
    blocks = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)).copy()
    pixels[0, 0, 0] = number
    return encoded(Image.fromarray(pixels), "PNG")


def encoded(image: Image.Image, form: str) -> bytes:
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


class Held:
    """Detector whose passes wait for ``go``, are recorded, and fail for some images."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.go = threading.Event()
        self.go.set()
        self.batches: list[list[torch.Tensor]] = []
        self.fault: Callable[[Sequence[torch.Tensor]], None] = lambda images: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.predictor, name)

    def predict(self, images: list[torch.Tensor], *arguments: Any, **options: Any) -> Iterator[Prediction]:
        self.batches.append(images)
        assert self.go.wait(SECONDS)
        self.fault(images)
        return self.predictor.predict(images, *arguments, **options)

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]

    @property
    def numbers(self) -> list[list[int]]:
        """Number of each image of each batch, see :func:`photo`."""
        return [[int(image[0, 0, 0]) for image in batch] for batch in self.batches]


class Running:
    """Server in a thread of this process."""

    def __init__(
        self, predictor: Any, service: Callable[..., DetectorService] = DetectorService, **options: Any
    ) -> None:
        self.service = service(predictor, ServingOptions(**options), "tiny")
        self.server = DetectorServer(self.service)
        listening = listen("127.0.0.1", 0)
        self.url = address(listening)[0]
        self.end: Future[int] = Future()
        self.threads = ThreadPoolExecutor(20)
        self.end = ThreadPoolExecutor(1).submit(self.server.serve_all, listening)
        self.client = httpx.Client(
            base_url=self.url, timeout=SECONDS, trust_env=False, limits=httpx.Limits(max_connections=50)
        )

    def predict(self, image: bytes, **options: Any) -> httpx.Response:
        return self.client.post("/predict", content=image, headers=PNG, **options)

    def later(self, image: bytes, **options: Any) -> Future[httpx.Response]:
        """Send the image, return once it is in work."""
        before = self.service.metrics_text()
        work = int(gauge(before, "detr_bf_requests_in_work"))
        answer = self.threads.submit(self.predict, image, **options)
        until(lambda: gauge(self.service.metrics_text(), "detr_bf_requests_in_work") > work or answer.done())
        return answer

    def queued(self, count: int) -> None:
        """Wait until the batcher has ``count`` images in its queue."""
        until(lambda: len(self.service.batcher._jobs) == count)

    def metric(self, sample: str) -> float:
        return gauge(self.client.get("/metrics").text, sample)


@contextmanager
def running(predictor: Any, *, ready: bool = True, **options: Any) -> Iterator[Running]:
    server = Running(predictor, **options)
    try:
        if ready:
            until(lambda: server.client.get("/health").status_code == 200)
            if isinstance(predictor, Held):
                predictor.batches.clear()
        yield server
    finally:
        if isinstance(predictor, Held):
            predictor.go.set()
        server.server.shut_down()
        server.threads.shutdown()
        server.client.close()
    assert server.end.result(SECONDS) == 0


def gauge(text: str, sample: str) -> float:
    """Return the value of a sample; 0 if it is missing."""
    values = [line.rpartition(" ")[2] for line in text.splitlines() if line.rpartition(" ")[0] == sample]
    return float(values[0]) if values else 0.0


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


def objects(prediction: Prediction) -> Any:
    return json.loads(prediction.to_json())["objects"]


def close_to(found: Any, expected: Any, *, score: float, pixels: float) -> bool:
    """Compare objects in pairs of the least difference, since those of near-equal scores may change places."""
    assert len(found) == len(expected)
    limits = np.array([*4 * [pixels], score])
    first, second = (np.array([[*each["bbox"], each["score"]] for each in some]) / limits for some in (found, expected))
    differences = np.abs(first[:, None] - second[None]).max(axis=-1)
    return bool((differences[linear_sum_assignment(differences)] <= 1).all())


def median_score(detector: Predictor, image: bytes) -> float:
    return float(detector(image, 0.0).scores.median())


def test_an_answer_is_that_of_the_detector_to_the_bit(detector: Predictor) -> None:
    turned = Image.open(io.BytesIO(photo(3, 40, 60)))
    turned.getexif()[0x0112] = 6
    jpeg = io.BytesIO()
    turned.save(jpeg, "JPEG", exif=turned.getexif())
    files = [photo(1), photo(2, 33, 57), jpeg.getvalue(), encoded(Image.new("I;16", (30, 20), 900), "PNG")]
    with running(detector, max_wait=0) as server:
        for file in files:
            some = median_score(detector, file)
            for threshold in (0.0, some, 1.0, "class"):
                answer = server.predict(file, params={"threshold": threshold})
                assert answer.status_code == 200, answer.text
                assert answer.json()["objects"] == objects(detector(file, threshold))
            found = answer.json()
            assert (found["height"], found["width"]) == detector(file).size
            assert 0 < found["seconds"] < SECONDS
        kept = len(server.predict(files[0], params={"threshold": median_score(detector, files[0])}).json()["objects"])
        assert 0 < kept < 6, "the threshold divides the objects"
        octets = {"Content-Type": "application/octet-stream"}
        answer = server.client.post("/predict", params={"threshold": 0}, content=files[0], headers=octets)
        assert len(answer.json()["objects"]) == 6


def test_the_default_threshold_is_the_option(detector: Predictor) -> None:
    some = median_score(detector, photo(1))
    with running(detector, threshold=some) as server:
        found = server.predict(photo(1)).json()["objects"]
        assert found == objects(detector(photo(1), some))
        classes = server.client.get("/model").json()["classes"]
        assert classes[0] == {"category_id": 3, "name": "cat", "threshold": some}


def test_requests_that_arrive_together_share_a_batch(detector: Predictor) -> None:
    """To the bit as :meth:`Predictor.predict` on the batch; as alone but for rounding, which the batch size changes."""
    held = Held(detector)
    with running(held, batch_size=4) as server:
        held.go.clear()
        answers = [server.later(photo(1), params={"threshold": 0})]
        until(lambda: held.batches)
        answers += [server.later(photo(number), params={"threshold": 0}) for number in range(2, 7)]
        server.queued(5)
        assert server.metric("detr_bf_queue_length") == 5
        held.go.set()
        found = [answer.result(SECONDS).json()["objects"] for answer in answers]
        assert held.sizes == [1, 4, 1]
        for batch, numbers in zip(held.batches, held.numbers, strict=True):
            for each, number in zip(detector.predict(batch, len(batch), 0.0), numbers, strict=True):
                assert found[number - 1] == objects(each)
        for number, each in enumerate(found, 1):
            assert close_to(each, objects(detector(photo(number), 0.0)), score=1e-5, pixels=1e-3)
        other = objects(detector(photo(7), 0.0))
        assert not close_to(found[0], other, score=1e-5, pixels=1e-3), "the images differ by more"
        assert server.metric('detr_bf_batch_size_bucket{le="1.0"}') == 2
        assert server.metric('detr_bf_batch_size_bucket{le="4.0"}') == 3
        assert server.metric("detr_bf_batch_size_sum") == 6


def test_answers_do_not_depend_on_the_other_images_of_a_batch(detector: Predictor) -> None:
    files = [photo(1, 64, 32), photo(2, 32, 64)]  # resized to these sizes, multiples of 32
    held = Held(detector)
    with running(held, batch_size=2, max_wait=SECONDS / 2) as server:
        answers = [server.later(file, params={"threshold": 0}) for file in files]
        for file, answer in zip(files, answers, strict=True):
            found, alone = answer.result(SECONDS).json()["objects"], objects(detector(file, 0.0))
            assert found == alone, "to the bit: each is alone in its size"
        assert held.sizes == [2]


def test_each_request_of_a_batch_has_its_own_threshold(detector: Predictor) -> None:
    some = median_score(detector, photo(1))
    held = Held(detector)
    with running(held, batch_size=3, max_wait=SECONDS / 2) as server:
        answers = [server.later(photo(1), params={"threshold": each}) for each in (0, some, 1)]
        counts = [len(answer.result(SECONDS).json()["objects"]) for answer in answers]
        assert held.sizes == [3]
        assert counts[0] == 6
        assert 0 < counts[1] < 6
        assert counts[2] == 0


def test_a_full_batch_does_not_wait_and_a_lone_image_waits_for_others(detector: Predictor) -> None:
    held = Held(detector)
    with running(held, batch_size=2, max_wait=1.0) as server:
        start = time.monotonic()
        first, second = server.later(photo(1)), server.later(photo(2))
        assert (first.result(SECONDS).status_code, second.result(SECONDS).status_code) == (200, 200)
        assert time.monotonic() - start < 0.9
        assert server.predict(photo(3)).json()["seconds"] >= 1.0
        assert held.sizes == [2, 1]


@pytest.mark.parametrize("kind", ["exception", "not finite", "missing"])
def test_a_faulty_image_does_not_fail_the_others_of_its_batch(
    detector: Predictor, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(images: Sequence[torch.Tensor]) -> None:
        if any(int(image[0, 0, 0]) == 13 for image in images):
            raise {"exception": RuntimeError, "not finite": InputError, "missing": IndexError}[kind]("of image 13")

    held = Held(detector)
    held.fault = fault
    with running(held, batch_size=4, max_wait=SECONDS / 2) as server:
        numbers = (1, 13, 2, 3)
        answers = [server.later(photo(number), params={"threshold": 0}) for number in numbers]
        for number, answer in zip(numbers, answers, strict=True):
            if number == 13:
                assert answer.result(SECONDS).status_code == 500
                assert ("of image 13" in answer.result().text) == (kind == "not finite"), "internal errors are logged"
            else:
                assert answer.result(SECONDS).status_code == 200
                assert answer.result().json()["objects"] == objects(detector(photo(number), 0.0)), "computed alone"
        warm_ups = 0 if kind == "not finite" else 1
        assert sorted(held.sizes) == sorted([4, 1, 1, 1, 1, *[1] * warm_ups])
        assert server.metric("detr_bf_failed_batches_total") == 1
        assert server.metric('detr_bf_requests_total{path="/predict",status="500"}') == 1
        held.batches.clear()
        assert server.client.get("/health").status_code == 200, "it goes on"
    assert any("of image 13" in record.getMessage() or record.exc_info for record in caplog.records)


def test_a_broken_detector_ends_the_server(detector: Predictor, caplog: pytest.LogCaptureFixture) -> None:
    held = Held(detector)
    server = Running(held, batch_size=1)
    until(lambda: server.client.get("/health").status_code == 200)

    def fault(images: Sequence[torch.Tensor]) -> None:
        raise RuntimeError("device lost")

    held.fault = fault
    held.go.clear()
    answers = [server.later(photo(number)) for number in (1, 2, 3)]
    server.queued(1)
    held.go.set()
    assert sorted(answer.result(SECONDS).status_code for answer in answers) == [500, 503, 503]
    with pytest.raises(RuntimeError, match="device lost"):
        server.end.result(SECONDS)
    assert server.service.health() == "stopping"
    assert server.service.batcher.state == "failed"


def test_a_detector_that_cannot_run_is_an_error(detector: Predictor) -> None:
    held = Held(detector)

    def fault(images: Sequence[torch.Tensor]) -> None:
        raise InputError("not finite")

    held.fault = fault
    with pytest.raises(InputError, match="not finite"):
        Running(held).end.result(SECONDS)


def test_too_many_bytes_or_pixels(detector: Predictor) -> None:
    image = photo(1)
    with running(detector, max_bytes=len(image), max_pixels=64 * 48) as server:
        assert server.predict(image).status_code == 200, "the limits are included"
        longer = image + b"\0"
        declared = server.predict(longer)
        assert (declared.status_code, "bytes" in declared.text) == (413, True)
        chunks = (longer[start : start + 100] for start in range(0, len(longer), 100))
        counted = server.client.post("/predict", content=chunks, headers=PNG)
        assert "content-length" not in counted.request.headers
        assert counted.status_code == 413
        wide = server.predict(encoded(Image.new("RGB", (64 * 48 + 1, 1)), "PNG"))
        assert (wide.status_code, "pixels" in wide.text) == (413, True)
        assert server.predict(image).status_code == 200, "the connection and the server go on"
    with running(detector, max_pixels=10**12) as server:
        assert server.client.get("/model").json()["max_pixels"] == detector.max_pixels, "the limit of the run holds"


def test_too_many_bytes_are_answered_before_the_upload_ends(detector: Predictor) -> None:
    with running(detector, max_bytes=10_000) as server:
        with raw(server, "Content-Length: 10001") as connection:
            assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")
        with raw(server, "Transfer-Encoding: chunked") as connection:
            for _ in range(11):  # chunks of 1,000 bytes
                connection.sendall(b"3e8\r\n" + bytes(1000) + b"\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"no image", PNG),
        (b"", PNG),
        (photo(1)[:200], PNG),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", PNG),
        (b"http://127.0.0.1/a.png", PNG),
        (__file__.encode(), PNG),
        (photo(1), {"Content-Type": "text/plain"}),
        (photo(1), {"Content-Type": "application/x-www-form-urlencoded"}),
        (photo(1), {"Content-Type": "multipart/form-data; boundary=x"}),
        (photo(1), {}),
        (photo(1), {**PNG, "Content-Encoding": "gzip"}),
    ],
)
def test_what_is_not_an_image(detector: Predictor, body: bytes, headers: dict[str, str]) -> None:
    with running(detector) as server:
        assert server.client.post("/predict", content=body, headers=headers).status_code == 415
        assert server.predict(photo(1)).status_code == 200


def test_hostile_images(detector: Predictor, tmp_path: Path) -> None:
    """Files of the hostile battery of at most 1 MB, with good images in between."""
    expected = objects(detector(photo(1), 0.0))
    with running(detector, max_bytes=10**6) as server:
        for number, (name, make) in enumerate({**BROKEN, **FORMATS}.items()):
            path = tmp_path / str(number)
            make(path)
            if path.is_symlink() or not path.is_file() or path.stat().st_size > 10**6:
                continue
            status = server.predict(path.read_bytes()).status_code
            assert status in ((413, 415) if name in BROKEN else (200, 415)), name
            assert server.predict(photo(1), params={"threshold": 0}).json()["objects"] == expected
        for size in ((1, 1), (20_000, 1), (1, 20_000)):
            assert server.predict(encoded(Image.new("RGB", size), "PNG")).status_code == 200, size
    assert not Path("EXECUTED").exists()


def test_wrong_parameters_and_paths(detector: Predictor) -> None:
    with running(detector) as server:
        for query in ("threshold=2", "threshold=-1", "threshold=nan", "threshold=x", "threshold=", "treshold=0.5"):
            answer = server.predict(photo(1), params=query)
            assert (answer.status_code, query.partition("=")[0] in answer.text) == (422, True)
        assert server.client.get("/predict").status_code == 405
        assert server.client.get("/etc/passwd").status_code == 404
        assert server.metric('detr_bf_requests_total{path="other",status="404"}') == 1
        assert "passwd" not in server.client.get("/metrics").text, "paths of clients make no labels"


def test_small_answers_are_sent_at_once(detector: Predictor) -> None:
    """Without TCP_NODELAY the body of an answer waits 40 ms for the acknowledgement of its head."""
    with running(detector) as server:
        seconds = []
        for _ in range(15):
            start = time.monotonic()
            server.client.get("/health")
            seconds.append(time.monotonic() - start)
        assert np.median(seconds) < 0.03


def test_a_full_queue(detector: Predictor) -> None:
    held = Held(detector)
    with running(held, batch_size=1, queue=2) as server:
        held.go.clear()
        answers = [server.later(photo(1)), server.later(photo(2))]
        start = time.monotonic()
        refused = server.predict(photo(3))
        assert time.monotonic() - start >= 0.1, "clients that try again at once do not take the processor"
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        held.go.set()
        assert [answer.result(SECONDS).status_code for answer in answers] == [200, 200]
        assert server.predict(photo(3)).status_code == 200
        assert server.metric('detr_bf_requests_total{path="/predict",status="429"}') == 1


def test_two_batches_at_most_are_decoded(detector: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = 0

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal decoded
        decoded += 1
        return images.decode_image(*arguments, **options)

    monkeypatch.setattr(http_server, "decode_image", counted)
    held = Held(detector)
    with running(held, batch_size=2) as server:
        held.go.clear()
        answers = [server.later(photo(number)) for number in range(8)]
        until(lambda: decoded == 4)
        time.sleep(0.1)
        assert decoded == 4
        held.go.set()
        assert {answer.result(SECONDS).status_code for answer in answers} == {200}


def test_another_name_is_refused_without_a_token(detector: Predictor) -> None:
    for token, status in ((None, 403), (TOKEN, 200)):
        with running(detector, token=token) as server:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            for host, expected in (("evil.example", status), ("localhost:1", 200), ("[::1]:80", 200)):
                assert server.client.get("/model", headers=headers | {"Host": host}).status_code == expected


def test_the_token(detector: Predictor) -> None:
    with running(detector, token=TOKEN) as server:
        for given in ({}, *({"Authorization": text} for text in ("", TOKEN, f"Bearer {TOKEN}x", f"Basic {TOKEN}"))):
            for path in ("/model", "/metrics", "/nothing"):
                answer = server.client.get(path, headers=given)
                assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer"), (path, given)
            answer = server.client.post("/predict", content=photo(1), headers=PNG | given)
            assert answer.status_code == 401
        right = {"Authorization": f"Bearer {TOKEN}"}
        assert server.client.post("/predict", content=photo(1), headers=PNG | right).status_code == 200
        assert server.client.get("/model", headers=right).status_code == 200
        assert server.client.get("/health").status_code == 200, "for load balancers"
        described = server.client.get("/openapi.json").json()
        assert {"/predict", "/health", "/model", "/metrics"} <= set(described["paths"])
        assert described["paths"]["/predict"]["post"]["security"]
        assert TOKEN not in server.client.get("/metrics", headers=right).text


def test_a_request_that_takes_too_long(detector: Predictor) -> None:
    held = Held(detector)
    with running(held, batch_size=1, timeout=0.5) as server:
        held.go.clear()
        answers = [server.later(photo(number)) for number in (1, 2)]
        assert [answer.result(SECONDS).status_code for answer in answers] == [504, 504]
        until(lambda: server.client.get("/health").status_code == 503)  # its pass may have begun later
        assert server.client.get("/health").json() == {"status": "overdue"}
        held.go.set()
        until(lambda: server.client.get("/health").status_code == 200)
        assert server.predict(photo(3)).status_code == 200
        assert held.numbers in ([[1], [3]], [[2], [3]]), "the one that waited was dropped"
        assert server.metric("detr_bf_requests_in_work") == 0


def test_an_image_that_does_not_arrive(detector: Predictor) -> None:
    with running(detector, timeout=0.3) as server, raw(server, "Content-Length: 100") as connection:
        connection.sendall(b"begin")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")
        assert server.predict(photo(1)).status_code == 200


def test_the_image_of_a_client_that_has_left_is_dropped(detector: Predictor) -> None:
    held = Held(detector)
    with running(held, batch_size=1) as server:
        held.go.clear()
        first = server.later(photo(1))
        until(lambda: held.batches)
        with raw(server, f"Content-Length: {len(photo(2))}") as connection:
            connection.sendall(photo(2))
            server.queued(1)
        until(lambda: server.metric('detr_bf_requests_total{path="/predict",status="499"}') == 1)
        with raw(server, "Content-Length: 1000") as connection:
            connection.sendall(b"begin")
            until(lambda: server.metric("detr_bf_requests_in_work") == 2)
        until(lambda: server.metric('detr_bf_requests_total{path="/predict",status="499"}') == 2)
        held.go.set()
        assert first.result(SECONDS).status_code == 200
        assert server.predict(photo(3)).status_code == 200
        assert held.numbers == [[1], [3]]


@contextmanager
def raw(server: Running, header: str) -> Iterator[socket.socket]:
    """Connection on which the head of a request was sent."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
        head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n{header}\r\n\r\n"
        connection.sendall(head.encode())
        yield connection


def test_not_ready_before_the_warm_up_pass(detector: Predictor) -> None:
    held = Held(detector)
    held.go.clear()
    with running(held, ready=False) as server:
        until(lambda: held.batches)
        health = server.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "starting"})
        assert server.predict(photo(1)).status_code == 503
        assert server.metric("detr_bf_ready") == 0
        held.go.set()
        until(lambda: server.client.get("/health").status_code == 200)
        assert server.metric("detr_bf_ready") == 1
        assert held.sizes == [1], "nothing but the warm-up pass"


def test_shutdown_answers_what_is_queued_and_refuses_the_rest(detector: Predictor) -> None:
    held = Held(detector)
    with running(held, batch_size=2) as server:
        held.go.clear()
        answers = [server.later(photo(number), params={"threshold": 0}) for number in range(1, 8)]
        with raw(server, f"Content-Length: {len(photo(8))}") as connection:
            connection.sendall(photo(8)[:50])
            until(lambda: server.service._in_work == 8)
            server.server.shut_down()
            until(lambda: refused(server))
            connection.sendall(photo(8)[50:])
            assert connection.recv(1000).startswith(b"HTTP/1.1 503 ")
        assert not server.end.done()
        held.go.set()
        for number, answer in enumerate(answers, 1):
            found = answer.result(SECONDS)
            assert found.status_code == 200
            assert close_to(found.json()["objects"], objects(detector(photo(number), 0.0)), score=1e-5, pixels=1e-3)
        assert server.end.result(SECONDS) == 0


def refused(server: Running) -> bool:
    host, _, port = server.url.removeprefix("http://").partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except ConnectionRefusedError:
        return True
    return False


def test_requests_that_are_cut_off_make_another_exit_code(
    detector: Predictor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A detector that hangs cannot be waited for, and a second Ctrl-C ends everything at once."""
    monkeypatch.setattr(http_server, "GRACE", 0.5)
    held = Held(detector)
    server = Running(held)
    until(lambda: server.client.get("/health").status_code == 200)
    held.go.clear()
    answer = server.later(photo(1))
    until(lambda: held.sizes == [1, 1])
    server.server.handle_exit(signal.SIGINT, None)
    server.server.handle_exit(signal.SIGINT, None)
    assert server.end.result(SECONDS) == 1
    assert answer.result(SECONDS).status_code == 503
    assert [record.getMessage() for record in caplog.records if record.name == http_server.__name__] == [
        "the detector is still running, for no request",
        "1 requests were cut off",
    ]
    held.go.set()
    assert server.service.batcher.close(SECONDS), "no thread runs when the interpreter ends"


def test_metrics_are_in_the_text_format(detector: Predictor) -> None:
    with running(detector, batch_size=5) as server:
        for number in range(3):
            assert server.predict(photo(number)).status_code == 200
        server.predict(b"")
        answer = server.client.get("/metrics")
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.text.splitlines()
        sample = re.compile(r'[a-z_]+(\{[a-z]+="[^"]+"(,[a-z]+="[^"]+")*\})? \d+(\.\d+)?(e-?\d+)?')
        assert all(line.startswith(("# HELP ", "# TYPE ")) or sample.fullmatch(line) for line in lines)
        assert 'detr_bf_requests_total{path="/predict",status="200"} 3.0' in lines
        assert 'detr_bf_requests_total{path="/predict",status="415"} 1.0' in lines
        assert "detr_bf_predict_seconds_count 3.0" in lines
        assert "detr_bf_forward_seconds_count 3.0" in lines
        assert "detr_bf_batch_size_sum 3.0" in lines
        bounds = [line for line in lines if line.startswith("detr_bf_batch_size_bucket")]
        assert [re.findall('"(.*)"', line)[0] for line in bounds] == ["1.0", "2.0", "4.0", "5.0", "+Inf"]
        assert server.metric("detr_bf_predict_seconds_sum") >= server.metric("detr_bf_forward_seconds_sum") > 0


def test_the_description_names_classes_and_limits_and_no_paths(detector: Predictor, weights: Path) -> None:
    with running(detector, batch_size=3) as server:
        answer = server.client.get("/model")
        assert str(weights.parent) not in answer.text
        found = answer.json()
        assert [each["name"] for each in found["classes"]] == ["cat", "dog", "bird"]
        assert [each["category_id"] for each in found["classes"]] == [3, 7, 90]
        assert (found["name"], found["version"], found["batch_size"]) == ("tiny", detr_bf.__version__, 3)
        assert found["reference"] == "none"


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"queue": 0},
        {"max_bytes": 0},
        {"max_pixels": 0},
        {"timeout": 0},
        {"timeout": float("inf")},
        {"max_wait": -1},
        {"max_wait": 30},
        {"max_wait": float("nan")},
        {"token": ""},
        {"token": " "},
        {"token": "a\nb"},
        {"token": "é"},
        {"token": "abc "},
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        ServingOptions(**options)


def test_attention_between_the_images_of_a_batch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mini.pt"
    checkpoint("batch_former.enabled=true", "batch_former.mode=mini_batch_inference", average=False).save(path)
    predictor = detr_bf.load(path, "cpu")
    with pytest.raises(InputError, match="--batch-size 1"):
        DetectorService(predictor, ServingOptions(), "mini")
    DetectorService(predictor, ServingOptions(batch_size=1), "mini")


@pytest.fixture(scope="module")
def comparing(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """Load a detector that compares each image with its reference."""
    path = tmp_path_factory.mktemp("comparing") / "tiny.pt"
    changes = ["batch_former.references=true", "batch_former.mode=single_stream_inference", "data.reference=own"]
    sizes = ["data.transforms.eval_short_side=64", "data.transforms.max_size=128"]
    checkpoint(*changes, *sizes, average=False).save(path)
    return detr_bf.load(path, "cpu")


def post_form(server: Running, **files: bytes) -> httpx.Response:
    return server.client.post("/predict", params={"threshold": 0}, files=files)


def test_a_form_brings_image_and_reference(comparing: Predictor) -> None:
    turned = io.BytesIO()
    Image.open(io.BytesIO(photo(3, 40, 60))).save(turned, "JPEG")
    with running(comparing, max_wait=0) as server:
        for image, reference in ((photo(1), photo(2)), (photo(2), photo(1)), (turned.getvalue(), photo(4, 40, 60))):
            answer = post_form(server, image=image, reference=reference)
            assert answer.status_code == 200, answer.text
            assert answer.json()["objects"] == objects(comparing(image, 0.0, reference=reference))
        body = server.client.get("/openapi.json").json()["paths"]["/predict"]["post"]["requestBody"]["content"]
        assert body["multipart/form-data"]["schema"]["required"] == ["image", "reference"]
        assert len(body) == 1
        assert server.client.get("/model").json()["reference"] == "needed"


def test_requests_of_a_batch_keep_their_references(comparing: Predictor) -> None:
    held = Held(comparing)
    with running(held, max_wait=20, batch_size=3) as server:
        numbers = range(3)
        futures = [
            server.threads.submit(post_form, server, image=photo(number), reference=photo(number + 10))
            for number in numbers
        ]
        answers = [future.result(SECONDS) for future in futures]
        assert held.sizes == [3]
    for number, answer in zip(numbers, answers, strict=True):
        expected = objects(comparing(photo(number), 0.0, reference=photo(number + 10)))
        assert close_to(answer.json()["objects"], expected, score=1e-4, pixels=1e-2)


def test_a_reference_can_be_fixed_when_the_server_starts(comparing: Predictor, tmp_path: Path) -> None:
    path = tmp_path / "template.png"
    path.write_bytes(photo(7))
    service = partial(DetectorService, reference=path)
    with running(comparing, service=service) as server:
        assert server.client.get("/model").json()["reference"] == "fixed"
        found = server.predict(photo(1), params={"threshold": 0})
        assert found.json()["objects"] == objects(comparing(photo(1), 0.0, reference=photo(7)))
        assert post_form(server, image=photo(1)).json()["objects"] == found.json()["objects"]
        own = post_form(server, image=photo(1), reference=photo(2)).json()["objects"]
        assert own == objects(comparing(photo(1), 0.0, reference=photo(2)))
        other = server.predict(photo(1, 33, 57))
        assert other.status_code == 422
        assert "the reference given has 64 x 48 pixels (width x height) and its image 33 x 57" in other.text


def test_requests_without_a_usable_reference(comparing: Predictor, detector: Predictor) -> None:
    image, other, most = photo(1), photo(2, 33, 57), 20_000
    large = photo(1) + bytes(most)
    form = b'--x\r\nContent-Disposition: form-data; name="image"\r\n\r\n' + image
    with running(comparing, max_bytes=most) as server:
        for answer, status, said in (
            (server.predict(image), 422, "this detector compares each image with its reference: send a form"),
            (post_form(server, image=image), 422, "the form has image, expected one image and one reference"),
            (post_form(server, image=image, template=other), 422, "the form has image, template, expected"),
            (post_form(server, image=image, reference=other), 422, "33 x 57 pixels (width x height) and its image 64"),
            (post_form(server, image=image, reference=b"text"), 415, "the reference is not an image"),
            (post_form(server, image=b"text", reference=image), 415, "the image is not an image"),
            (post_form(server, image=image, reference=large), 413, "the reference has more than 20,000 bytes"),
            (post_form(server, image=large, reference=image), 413, "the image has more than 20,000 bytes"),
            (post_form(server, image=large * 5, reference=large), 413, "the form has more than 105,536 bytes: each"),
            (send(server, form, "multipart/form-data; boundary=x"), 422, "the form is not complete"),
            (send(server, form + b"\r\n--x--", "multipart/form-data; boundary=x"), 422, "the form has image, expected"),
            (send(server, form, "multipart/form-data"), 415, "without a boundary"),
            (send(server, b"", 'multipart/form-data; boundary="x'), 422, "the form is not complete"),
            (send(server, b"\r\n--x\r\n\r\n\r\n--x--", "multipart/form-data; boundary=x"), 422, "expected one image"),
            (send(server, image, "text/plain"), 415, "send a form with the two files"),
            (post_form(server, image=image, reference=image, other=image), 422, "more than two parts"),
            (send(server, form + b"\r\n--x" + bytes(9000), FORM), 422, "no header that ends within 8,192 bytes"),
            (send(server, form.replace(b"name=", b"name*%s=" % DIGITS), FORM), 422, "header that cannot be read"),
            (send(server, form, f"{FORM}; name*{DIGITS.decode()}=x"), 415, "without a boundary"),
            (send(server, form, FORM, {"Content-Encoding": "gzip"}), 415, "gzip; send a form with the two files"),
            (send(server, form, FORM, {"Origin": "http://["}), 403, "a page of another site"),
        ):
            assert (answer.status_code, said in answer.text) == (status, True), answer.text
        assert post_form(server, image=image, reference=image).status_code == 200
    with running(detector) as server:
        assert post_form(server, image=image, reference=image).status_code == 415


FORM = "multipart/form-data; boundary=x"
DIGITS = b"9" * 5000


def send(server: Running, body: bytes, kind: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
    return server.client.post("/predict", content=body, headers={"Content-Type": kind, **(headers or {})})


@pytest.mark.parametrize("part", [b"\r\n--x", b"\r\n--x\r\n\r\n", b"\r\n--x\r\na: b\r\n" + b"c: d\r\n" * 4])
def test_a_form_of_many_parts_or_headers_takes_no_time(part: bytes) -> None:
    start = time.process_time()
    with pytest.raises(HTTPException, match=r"^422"):
        http_server._form_parts(part * (2**21 // len(part)) + b"\r\n--x--", b"x")
    assert time.process_time() - start < 0.2


def test_forms_are_read_in_a_thread_and_in_time(comparing: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests are answered meanwhile."""
    go, parts = threading.Event(), http_server._form_parts
    monkeypatch.setattr(http_server, "_form_parts", lambda *given: (go.wait(SECONDS), parts(*given))[1])
    with running(comparing, timeout=1.5) as server:
        answer = server.threads.submit(post_form, server, image=photo(1), reference=photo(2))
        until(lambda: gauge(server.service.metrics_text(), "detr_bf_requests_in_work") == 1)
        assert server.client.get("/health", timeout=1).status_code == 200
        assert answer.result(SECONDS).status_code == 504
        go.set()


def test_the_files_of_a_form_are_held_once(comparing: Predictor) -> None:
    """While a request waits for the detector, the body is held, and no copies of its files."""
    held, size = Held(comparing), 4_000_000
    with running(held, max_bytes=size, timeout=SECONDS) as server:
        held.go.clear()
        tracemalloc.start()
        try:
            padded = photo(1) + bytes(size - len(photo(1)))
            answer = server.threads.submit(post_form, server, image=padded, reference=padded)
            until(lambda: held.batches)
            gc.collect()
            blocks = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, http_server.__file__)])
            assert sum(each.size for each in blocks.traces) < 2.2 * size
        finally:
            tracemalloc.stop()
            held.go.set()
        assert answer.result(SECONDS).status_code == 200


def test_a_form_of_a_page_of_another_site_is_refused(comparing: Predictor) -> None:
    files = {"image": photo(1), "reference": photo(2)}
    with running(comparing) as server:
        for origin, status in (("https://example.com", 403), ("null", 403), (server.url, 200)):
            answer = server.client.post("/predict", files=files, headers={"Origin": origin})
            assert answer.status_code == status, origin


def test_closing_the_batcher_computes_what_is_left(detector: Predictor) -> None:
    held = Held(detector)
    batcher = Batcher(held, ServingOptions(batch_size=4, max_wait=20.0), ServingMetrics(4))  # type: ignore[arg-type]
    batcher.start(lambda: None)
    assert batcher.ready.wait(SECONDS)
    least = detector.least_scores(0.0)
    futures = [batcher.submit(torch.full((3, 8, 8), number, dtype=torch.uint8), least) for number in range(3)]
    futures[1].cancel()
    start = time.monotonic()
    assert batcher.close(SECONDS)
    assert time.monotonic() - start < 10, "the last image does not wait for others"
    assert [future.done() for future in futures] == [True, True, True]
    assert sorted(number for batch in held.numbers[1:] for number in batch) == [0, 2]


def serve(*arguments: object) -> int:
    return main(["serve", *map(str, arguments)])


def test_a_taken_port_is_an_error(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert serve(weights, "--port", port) == 2
    said = capsys.readouterr().err
    assert "Address already in use" in said
    assert "--port" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--port", "70000"), "port"),
        (("--host", ""), "host"),
        (("--host", "no host"), "no host"),
        (("--threshold", "2"), "--threshold"),
        (("--batch-size", "0"), "batch_size"),
        (("--token-file", "missing"), "missing"),
        (("--token-file", "/dev/null"), "/dev/null"),
        (("--token-file", "empty"), "token"),
        (("--reference", "empty"), "this detector reads none when it predicts"),
    ],
)
def test_wrong_arguments(
    arguments: tuple[str, ...],
    expected: str,
    weights: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").write_text("\n")
    assert serve(weights, "--port", "0", *arguments) == 2
    assert expected in capsys.readouterr().err


def test_tokens(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[str | None] = []
    monkeypatch.setattr(DetectorServer, "serve_all", lambda self, _: given.append(self.service.options.token) or 0)
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    arguments = (weights, "--port", "0", "--device", "cpu")
    assert serve(*arguments) == 0
    assert serve(*arguments, "--token-file", file) == 0
    monkeypatch.setenv("DETR_BF_TOKEN", "of the environment")
    assert serve(*arguments) == 0
    assert given == [None, TOKEN, "of the environment"]
    assert serve(*arguments, "--token-file", file) == 2
    assert "exclude each other" in capsys.readouterr().err
    monkeypatch.setenv("DETR_BF_TOKEN", "")
    assert serve(*arguments) == 2, "an empty variable is no server without a token"


@pytest.mark.parametrize(
    ("host", "token", "warns"),
    [("127.0.0.1", "", False), ("::1", "", False), ("0.0.0.0", TOKEN, False), ("0.0.0.0", "", True)],
)
def test_a_server_for_everyone_is_warned_of(
    host: str,
    token: str,
    warns: bool,
    weights: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(DetectorServer, "serve_all", lambda *_: 0)
    if token:
        monkeypatch.setenv("DETR_BF_TOKEN", token)
    try:
        listen(host, 0).close()
    except InputError:
        pytest.skip(f"no {host} here")
    assert serve(weights, "--host", host, "--port", "0", "--device", "cpu") == 0
    printed = capsys.readouterr()
    assert re.fullmatch(r"tiny\.pt: http://(\[::1\]|127\.0\.0\.1|0\.0\.0\.0):\d+\n", printed.out)
    assert ("anyone who reaches" in printed.err) == warns


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "prometheus_client"])
def test_a_missing_package_names_the_extra(
    package: str, weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for module in ("detr_bf.inference.http_server", "detr_bf.inference.batching"):
        monkeypatch.delitem(sys.modules, module)
        monkeypatch.delattr(module)
    assert serve(weights) == 2
    said = capsys.readouterr().err
    assert "pip install 'detr_bf[serve]'" in said
    assert package in said


def test_only_the_command_imports_the_web_framework_and_when_it_runs() -> None:
    nodes = [
        (path.relative_to(PACKAGE).as_posix(), node)
        for path in PACKAGE.rglob("*.py")
        if re.search(rf"{'|'.join(FRAMEWORK)}|http_server", text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
    ]
    importers = {
        path: node
        for path, node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for _, name in imported_names(ast.unparse(node), "")
        if name.split(".")[0] in FRAMEWORK or "http_server" in name
    }
    assert set(importers) == {"inference/http_server.py", "commands/serve.py"}
    assert importers["commands/serve.py"].col_offset > 0, "in a function"
    assert importers["inference/http_server.py"].col_offset == 0


@pytest.mark.default_tier("15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends_with_0_after_its_answers(number: signal.Signals, weights: Path, detector: Predictor) -> None:
    """The request waits three seconds for others when the signal comes."""
    command = [sys.executable, "-m", "detr_bf", "serve", str(weights), "--port", "0", "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DETR_BF_TOKEN": TOKEN}
    process = subprocess.Popen(
        [*command, "--max-wait", "3000"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().rpartition(" ")[2].strip()
        assert url.startswith("http://127.0.0.1:")
        headers = PNG | {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as client, ThreadPoolExecutor() as threads:
            until(lambda: client.get("/health").status_code == 200)
            answer = threads.submit(client.post, "/predict?threshold=0", content=photo(1), headers=headers)
            until(lambda: gauge(client.get("/metrics", headers=headers).text, "detr_bf_requests_in_work") == 1)
            time.sleep(0.4)  # in work begins before the body is read, and what is not read yet is refused
            process.send_signal(number)
            found = answer.result(SECONDS)
        assert found.status_code == 200
        assert close_to(found.json()["objects"], objects(detector(photo(1), 0.0)), score=1e-5, pixels=1e-3)
        out, said = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, said
        assert out == ""
        assert "Traceback" not in said
        assert TOKEN not in said
    finally:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def _no_token_and_no_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the variable of the user, and what a command has added to the log."""
    monkeypatch.delenv("DETR_BF_TOKEN", raising=False)
    logger = logging.getLogger("detr_bf")
    yield
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
