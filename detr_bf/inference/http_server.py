"""HTTP server for one detector, on FastAPI and uvicorn: each request brings an image, or an image and its reference.

Images that arrive together are computed together. A request is checked and read in the event loop, decoded in a small
pool of threads, and computed in the thread of :class:`~detr_bf.inference.batching.Batcher`, the only one that calls the
model. At most ``queue`` requests are in work, and the images of at most two batches are decoded, so images need at most
about ``queue * max_bytes + 2 * batch_size * max_pixels * 3`` bytes, twice as many with references. Only ``detr-bf
serve`` imports this module, which needs ``pip install 'detr_bf[serve]'``.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import math
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from email.message import Message as EmailHeaders
from email.parser import BytesHeaderParser
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Literal, TypeVar

import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request, Response, Security
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.security import HTTPBearer
from prometheus_client import Gauge, generate_latest
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.text import printable
from detr_bf.data.image_headers import TooLargeError
from detr_bf.data.images import MissingPackageError, decode_image, read_image
from detr_bf.data.references import other_size
from detr_bf.inference.batching import Batcher, ServingMetrics, ServingOptions, StoppedError
from detr_bf.inference.prediction import Prediction
from detr_bf.inference.predictor import Predictor
from detr_bf.inference.references import check_given

logger = logging.getLogger(__name__)

T = TypeVar("T")
OPEN_PATHS = ("/health", "/docs", "/openapi.json")  # answered without the token
KNOWN_PATHS = ("/predict", "/health", "/metrics", "/model", "/docs", "/openapi.json")
CLIENT_GONE = 499  # status in the metrics of a client that closed the connection before its answer
_DECODERS = 4  # threads, at most
GRACE = 5  # seconds at shutdown: after the timeout of the last request, and for the batch that is in the model then
_REFUSAL = 0.1  # seconds until a full queue is answered: clients that try again at once would slow down the model
_RETRY = {"Retry-After": "1"}
_HOW = "send the image file itself as the body: curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' URL"
_FORM = "multipart/form-data"
_HOW_FORM = "send a form with the two files: curl -F image=@board.png -F reference=@template.png URL"
_FORM_BYTES = 2**16  # of a form beside its two files
_HEADER_BYTES = 2**13  # of the header of a part of a form
_FILE = {"type": "string", "format": "binary"}
_BODIES = {"image/*": {"schema": _FILE}, "application/octet-stream": {"schema": _FILE}}  # in the OpenAPI description
_STATUSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "objects (as in predictions.json), width, height, seconds"},
    401: {"description": "no token, or a wrong one"},
    403: {"description": "a local server without a token was asked under another name"},
    408: {"description": "the image did not arrive in time"},
    413: {"description": "too many bytes or pixels"},
    415: {"description": "not an image, or a wrong Content-Type"},
    422: {"description": "a wrong parameter; a reference is missing or has another size than its image"},
    429: {"description": "the queue is full"},
    500: {"description": "the detector failed on this image"},
    503: {"description": "starting or shutting down"},
    504: {"description": "no result in time"},
}


class PredictQuery(BaseModel):
    """Query parameters of a prediction; any other is an error."""

    model_config = ConfigDict(extra="forbid")
    threshold: Annotated[float, Field(ge=0, le=1)] | Literal["class"] | None = Field(
        None, description="least score of an object, or 'class' for the stored threshold of each class"
    )


class DetectorService:
    """Requests for the predictions of one detector.

    Args:
        reference: file with the reference of the images that come without one.

    Raises:
        InputError: the options do not fit the detector, or the reference cannot be read or is not needed.
    """

    def __init__(self, predictor: Predictor, options: ServingOptions, name: str, reference: Path | None = None) -> None:
        if predictor.backend.mixes_images and options.batch_size > 1:
            raise InputError(
                "the images of a batch attend to each other in evaluation (batch_former.mode), so an answer would "
                "depend on other requests: give --batch-size 1"
            )
        self.predictor, self.options, self.name = predictor, options, name
        self.max_pixels = min(options.max_pixels, predictor.max_pixels)
        self.reads_references = predictor.backend.reads_references
        self.reference: Tensor | None = None
        if reference is not None:
            check_given(self.reads_references, reference)
            self.reference = read_image(reference, max_pixels=self.max_pixels, pixel_format=predictor.pixel_format)
        self.default_least = predictor.least_scores(options.threshold)  # an InputError now, not for each request
        self.metrics = ServingMetrics(options.batch_size)
        self.batcher = Batcher(predictor, options, self.metrics)
        self.stopping = False
        self.cut_off = 0  # requests without an answer at the end
        self._in_work = 0
        for name, text, function in (
            ("requests_in_work", "prediction requests between their start and their end", lambda: self._in_work),
            (
                "queue_length",
                "of these, not in the model: being read, decoded or waiting",
                lambda: max(self._in_work - self.batcher.running, 0),
            ),
            ("ready", "1 if predictions are answered", lambda: self.health() == "ready"),
        ):
            Gauge(f"detr_bf_{name}", text, registry=self.metrics.registry).set_function(function)
        self._decoded = asyncio.Semaphore(2 * options.batch_size)
        self._decoders = ThreadPoolExecutor(min(_DECODERS, os.cpu_count() or 1), thread_name_prefix="detr_bf decoder")

    async def predict(self, request: Request, threshold: float | str | None) -> dict[str, Any]:
        """Return the content of the answer to an image.

        Raises:
            HTTPException: see the statuses in docs/serving.md.
        """
        start = monotonic()
        self._check_ready()
        most, boundary = self._check_headers(request)
        least = self.default_least if threshold is None else self.predictor.least_scores(threshold)
        async with self._place_in_queue():
            late = f"the image did not arrive within {self.options.timeout:g} s"
            data = await _until(start + self.options.timeout, self._read(request, most, boundary), 408, late)
            self._check_ready()
            late = f"no result within {self.options.timeout:g} s"
            result = self._detect(request, partial(self._decode, data, boundary), least)
            found = await _until(start + self.options.timeout, result, 504, late)
        height, width = found.size
        return {**found.to_dict(), "width": width, "height": height, "seconds": monotonic() - start}

    def health(self) -> str:
        """Return ``ready``, or why there would be no prediction."""
        return "stopping" if self.stopping else self.batcher.state

    def describe(self) -> dict[str, Any]:
        """Return names, classes, threshold, limits, and if a reference is needed or fixed."""
        least = self.default_least.tolist()
        classes = self.predictor.class_map
        return {
            "name": self.name,
            "version": version("detr_bf"),
            "device": str(self.predictor.device),
            "classes": [
                {"category_id": number, "name": name, "threshold": score}
                for number, name, score in zip(classes.category_ids, classes.names, least, strict=True)
            ],
            "batch_size": self.options.batch_size,
            "max_bytes": self.options.max_bytes,
            "max_pixels": self.max_pixels,
            "timeout": self.options.timeout,
            "reference": "none" if not self.reads_references else "needed" if self.reference is None else "fixed",
        }

    def metrics_text(self) -> str:
        """Return the metrics in the text format of Prometheus."""
        return generate_latest(self.metrics.registry).decode()

    def close(self) -> bool:
        """End the threads; return False if the model is still running."""
        self._decoders.shutdown(wait=False, cancel_futures=True)
        return self.batcher.close(GRACE)

    def _check_ready(self) -> None:
        if (state := self.health()) not in ("ready", "overdue"):
            raise HTTPException(503, f"the server is not ready: {state}", _RETRY)

    @asynccontextmanager
    async def _place_in_queue(self) -> AsyncIterator[None]:
        if self._in_work >= self.options.queue:
            await asyncio.sleep(_REFUSAL)
            raise HTTPException(429, f"{self.options.queue} images are in work already: try again", _RETRY)
        self._in_work += 1
        try:
            yield
        finally:
            self._in_work -= 1

    def _check_headers(self, request: Request) -> tuple[int, bytes | None]:
        """Refuse what need not be read; return the most bytes of the body, and the boundary if it is a form.

        A body must be declared as an image: a page of another site cannot make a browser send that without asking
        first. It can make it send a form, with the header Origin.
        """
        most, boundary, header = self.options.max_bytes, None, request.headers.get("content-type", "")
        kind = header.partition(";")[0].strip().lower()
        how = _HOW_FORM if self.reads_references else _HOW
        if self.reads_references and kind == _FORM:
            origin = request.headers.get("origin")
            if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
                raise HTTPException(403, "a form that a page of another site sends is not accepted")
            most, boundary = 2 * most + _FORM_BYTES, _boundary(header)
        elif not (kind.startswith("image/") or kind == "application/octet-stream"):
            raise HTTPException(415, f"Content-Type is {printable(kind) or 'missing'}; {how}")
        elif self.reads_references and self.reference is None:
            raise HTTPException(422, f"this detector compares each image with its reference: {_HOW_FORM}")
        if (encoding := request.headers.get("content-encoding", "identity").lower()) != "identity":
            raise HTTPException(415, f"Content-Encoding is {printable(encoding)}; {how}")
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > most:
            raise self._too_large(most, boundary)
        return most, boundary

    def _too_large(self, most: int, boundary: bytes | None) -> HTTPException:
        if boundary is None:
            return HTTPException(413, f"the image has more than {most:,} bytes")
        limit = f"each of its two files may have {self.options.max_bytes:,}"
        return HTTPException(413, f"the form has more than {most:,} bytes: {limit}")

    def _form_files(self, data: bytes, boundary: bytes) -> dict[str, bytes]:
        """Return the files of a form, ``image`` and ``reference``; the latter may be missing if there is a fixed one.

        Raises:
            HTTPException: the form is not complete, has other files, or one has too many bytes.
        """
        parts = _form_parts(data, boundary)
        names = [name for name, _ in parts]
        if sorted(names) != ["image", "reference"] and not (names == ["image"] and self.reference is not None):
            given = printable(", ".join(names)) or "nothing"
            raise HTTPException(422, f"the form has {given}, expected one image and one reference: {_HOW_FORM}")
        for name, content in parts:
            if len(content) > self.options.max_bytes:
                raise HTTPException(413, f"the {name} has more than {self.options.max_bytes:,} bytes")
        return dict(parts)

    async def _read(self, request: Request, most: int, boundary: bytes | None) -> bytes:
        data = bytearray()
        try:
            async for chunk in request.stream():
                data += chunk
                if len(data) > most:
                    raise self._too_large(most, boundary)
        except ClientDisconnect:
            raise HTTPException(CLIENT_GONE, "the client closed the connection") from None
        return bytes(data)

    async def _detect(self, request: Request, decode: Callable[[], list[Tensor]], least: Tensor) -> Prediction:
        """Decode the image and wait for its result; one whose client is gone is dropped."""
        async with self._decoded:
            pixels, *others = await asyncio.get_running_loop().run_in_executor(self._decoders, decode)
            reference = others[0] if others else self.reference
            if reference is not None and reference.shape != pixels.shape:
                raise HTTPException(422, other_size("given", reference, pixels))
            try:
                return await _unless_gone(request, self.batcher.submit(pixels, least, reference))
            except StoppedError:
                raise HTTPException(503, "the detector has failed", _RETRY) from None
            except InputError as error:
                raise HTTPException(500, printable(error, limit=500)) from error
            except HTTPException:
                raise
            except Exception as error:  # the batcher has logged it
                raise HTTPException(500, "the detector failed on this image") from error

    def _decode(self, data: bytes, boundary: bytes | None) -> list[Tensor]:
        """Return the pixels (C, H, W) of the body, or of the image and its reference in a form."""
        files = {"body": data} if boundary is None else self._form_files(data, boundary)
        decoded = []
        for name in ("body", "image", "reference"):
            try:
                if name in files:
                    form = self.predictor.pixel_format
                    decoded.append(decode_image(files[name], self.max_pixels, pixel_format=form))
            except MissingPackageError as error:
                raise HTTPException(500, printable(error)) from None
            except TooLargeError:
                shown = name.replace("body", "image")
                raise HTTPException(413, f"the {shown} has more than {self.max_pixels:,} pixels") from None
            except ValueError as error:
                raise HTTPException(415, f"the {name} is not an image that can be used: {printable(error)}") from error
        return decoded


def _boundary(content_type: str) -> bytes:
    """Return the boundary of a form; HTTPException if there is none."""
    header = EmailHeaders()
    header["Content-Type"] = content_type
    try:
        boundary = header.get_boundary()
    except ValueError:  # such as a parameter with a number of thousands of digits
        boundary = None
    if not boundary:
        raise HTTPException(415, f"Content-Type is {_FORM} without a boundary; {_HOW_FORM}")
    return boundary.encode("latin-1", errors="replace")


def _form_parts(data: bytes, boundary: bytes) -> list[tuple[str, bytes]]:
    """Return name and content of the parts of a form (RFC 7578), at most two.

    Raises:
        HTTPException: its end is missing, it has more parts, or the header of a part is too long or not valid.
    """
    mark, found = b"\r\n--" + boundary, list[tuple[str, bytes]]()
    start = 0 if data.startswith(mark[2:]) else data.find(mark) + 2  # of a mark without its line end; 1: none
    while start != 1:
        start += len(mark) - 2
        if data.startswith(b"--", start):
            return found
        if len(found) == 2:
            raise HTTPException(422, f"the form has more than two parts; {_HOW_FORM}")
        end = data.find(b"\r\n\r\n", start, start + _HEADER_BYTES)
        if end == -1:
            raise HTTPException(422, f"a part of the form has no header that ends within {_HEADER_BYTES:,} bytes")
        try:
            header = BytesHeaderParser().parsebytes(data[start:end].lstrip())
            name = str(header.get_param("name", "", "Content-Disposition"))
        except ValueError as error:
            raise HTTPException(422, f"a part of the form has a header that cannot be read; {_HOW_FORM}") from error
        start = data.find(mark, end + 4) + 2
        found.append((name, data[end + 4 : start - 2]))
    raise HTTPException(422, f"the form is not complete; {_HOW_FORM}")


async def _until(deadline: float, result: Awaitable[T], status: int, message: str) -> T:
    """Wait for a result until ``deadline``, a time of :func:`time.monotonic`; cancel it and raise ``status`` then."""
    try:
        return await asyncio.wait_for(result, max(deadline - monotonic(), 0))
    except (asyncio.TimeoutError, TimeoutError):
        raise HTTPException(status, message) from None


async def _unless_gone(request: Request, result: Future[Prediction]) -> Prediction:
    """Wait for the result, and cancel it when the client closes the connection."""
    answer, gone = asyncio.wrap_future(result), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise HTTPException(CLIENT_GONE, "the client closed the connection")
        return answer.result()
    finally:
        answer.cancel()
        gone.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Gate:
    """ASGI middleware that checks the token and counts answers and seconds."""

    def __init__(self, app: ASGIApp, service: DetectorService) -> None:
        self.app, self.service = app, service
        token = service.options.token
        self.token = None if token is None else token.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, started, status = monotonic(), False, 500  # the status if the app raises an exception

        async def counted(message: Message) -> None:
            nonlocal started, status
            if message["type"] == "http.response.start":
                started, status = True, message["status"]
            await send(message)

        path = scope["path"]
        try:
            if self.token is None and not _is_own_name(scope):
                detail = {"detail": "a server without a token answers only as localhost or under its local address"}
                await JSONResponse(detail, 403)(scope, receive, counted)
            elif path in OPEN_PATHS or self._is_allowed(scope):
                await self.app(scope, receive, counted)
            else:
                detail = {"detail": "give the token of this server: Authorization: Bearer TOKEN"}
                await JSONResponse(detail, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, counted)
        except asyncio.CancelledError:  # a second SIGINT, or the request does not end
            self.service.cut_off += 1
            if started:
                raise
            await JSONResponse({"detail": "the server was stopped"}, 503)(scope, receive, counted)
        finally:
            self.service.metrics.requests.labels(path if path in KNOWN_PATHS else "other", status).inc()
            if path == "/predict" and status == 200:
                self.service.metrics.answer_seconds.observe(monotonic() - start)
        return None

    def _is_allowed(self, scope: Scope) -> bool:
        if self.token is None:
            return True
        kind, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return hmac.compare_digest(given.strip(), self.token) and kind.lower() == b"bearer"


def _is_own_name(scope: Scope) -> bool:
    """Return False if a local server is asked under another name: a web page can give its own name a local address."""
    if not _is_loopback((scope.get("server") or ("",))[0]):
        return True
    host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
    name = re.sub(r":\d*$", "", host).strip("[]")
    return name == "localhost" or _is_loopback(name)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def build_app(service: DetectorService) -> FastAPI:
    """Return the ASGI application of a service."""
    app = FastAPI(
        title=f"detr_bf: {service.name}",
        version=version("detr_bf"),
        description="Objects in images. Needs the token as `Authorization: Bearer TOKEN` if the server has one.",
        redoc_url=None,
        dependencies=[Security(HTTPBearer(auto_error=False))],  # description only: the middleware checks
    )
    app.add_middleware(_Gate, service=service)

    bodies: dict[str, Any] = {} if service.reads_references and service.reference is None else dict(_BODIES)
    if service.reads_references:
        form = {"type": "object", "properties": {"image": _FILE, "reference": _FILE}}
        bodies[_FORM] = {"schema": {**form, "required": ["image"] if bodies else ["image", "reference"]}}
    upload = {"requestBody": {"required": True, "content": bodies}}  # the body is read by hand to stop at max_bytes

    @app.post("/predict", openapi_extra=upload, responses=_STATUSES, response_class=JSONResponse)
    async def predict(request: Request, query: Annotated[PredictQuery, Query()]) -> Response:
        """Detect objects in an image (JPEG, PNG, WebP, BMP, TIFF, GIF or AVIF), the body or a file of a form."""
        found = await service.predict(request, query.threshold)
        return Response(json.dumps(found), media_type="application/json")

    @app.get("/health", responses={503: {"description": "starting, stopping, overdue or failed"}})
    async def health() -> Response:
        """Return 200 if predictions are answered."""
        status = service.health()
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    @app.get("/model")
    async def model() -> dict[str, Any]:
        """Return name, version, classes with their default thresholds, and limits."""
        return service.describe()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return counts and histograms in the text format of Prometheus."""
        return Response(service.metrics_text(), media_type="text/plain; version=0.0.4")

    return app


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 is any free one (InputError: the address is wrong or taken)."""
    if not (host and 0 <= port < 2**16):
        raise InputError(f"expected a host and a port from 0 to 65535, got {printable(repr(host))} and {port}")
    # with the protocol given, asyncio sets TCP_NODELAY, without which each answer takes 40 ms longer
    listening = socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen()
        return listening
    except (OSError, UnicodeError) as error:
        listening.close()
        why = (isinstance(error, OSError) and error.strerror) or error
        raise InputError(
            f"cannot listen at {printable(host)}, port {port}: {printable(why)}; choose another with --host and --port "
            "(port 0 is any free one)"
        ) from error


class DetectorServer(uvicorn.Server):
    """Server that answers what it has accepted before it ends.

    SIGINT and SIGTERM close the listening socket; new requests on open connections get status 503. A second SIGINT ends
    it at once. Unlike uvicorn's own server it does not send the signal to itself again at the end.
    """

    def __init__(self, service: DetectorService) -> None:
        self.service = service
        config = uvicorn.Config(
            build_app(service),
            http="h11",  # whatever else is installed: this one is tested
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=math.ceil(service.options.timeout) + GRACE,
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to shut down."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.shut_down()

    def shut_down(self) -> None:
        """Accept no more requests and end when the accepted ones are answered; may be called in any thread."""
        self.service.stopping = self.should_exit = True

    def serve_all(self, listening: socket.socket) -> int:
        """Serve until a signal comes; return 0 if every accepted request was answered, else 1.

        Raises:
            InputError: the detector's outputs are not finite.
            Exception: the detector cannot be run.
        """
        self.service.batcher.start(self.shut_down)
        try:
            self.run(sockets=[listening])
        finally:
            ended = self.service.close()
        if self.service.batcher.error is not None:
            raise self.service.batcher.error
        if not ended:
            logger.error("the detector is still running, for no request")
        if self.service.cut_off:
            logger.error("%d requests were cut off", self.service.cut_off)
        return int(self.service.cut_off > 0 or not ended)


def address(listening: socket.socket) -> tuple[str, bool]:
    """Return the URL of a socket, and True if only this machine can reach it."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}", ipaddress.ip_address(host).is_loopback
