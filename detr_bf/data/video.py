"""Frames of video files, streams and cameras, read with PyAV (FFmpeg)."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.text import printable
from detr_bf.data.images import MAX_PIXELS

logger = logging.getLogger(__name__)

VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".wmv")
_SCHEMES = ("http://", "https://", "rtsp://", "rtmp://")
_FILE_PROTOCOLS = "file,crypto,data"  # a playlist in a local file must not open addresses
_SECONDS = 30.0  # without data from a server or a camera
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # seconds before an attempt to reconnect; doubled after each


@dataclass(frozen=True)
class VideoFrame:
    """One frame of a video."""

    number: int  # from 0, counting frames that were left out
    seconds: float  # presentation time in the video
    pixels: Tensor  # (3, H, W) uint8 RGB, rotated as the video says


_Decoded: TypeAlias = tuple[int, float, Any]  # number, seconds in the video, and PyAV's frame


def is_video_stream(source: object) -> bool:
    """Return True for an address that :func:`read_frames` opens."""
    return isinstance(source, str) and source.lower().startswith(_SCHEMES)


def read_frames(
    source: str | Path | int,
    *,
    every: int = 1,
    live: bool | None = None,
    reconnect: bool = False,
    max_pixels: int = MAX_PIXELS,
) -> Iterator[VideoFrame]:
    """Open a video and return its frames, one after the other, in the order in which they are shown.

    Every frame of a file is returned. Of a live source a thread decodes all frames, and the newest one is returned
    when the next one is asked for; those that came in between are left out, so that the delay does not grow.

    Args:
        source: video file, address (http, https, rtsp, rtmp), or number of a camera.
        every: return only the frames whose number is a multiple of it.
        live: return the newest frame. None: of cameras, of rtsp and rtmp, and of http and https without a duration.
        reconnect: when a live source fails, ends or sends no data for 30 s, open it again until it answers. Numbers
            of frames go on.
        max_pixels: largest number of pixels of a frame.

    Raises:
        InputError: PyAV is not installed, ``source`` cannot be opened or is no video, its frames are too large, or
            ``live`` or ``reconnect`` is given for a file; in the iteration, after the frames that were decoded: the
            video ends before the number of frames that its header states, is damaged, or sends no data for 30 s.
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise InputError(f"every must be a whole number from 1, got {printable(repr(every))}")
    try:
        import av
    except ImportError as error:
        raise InputError("videos need the package av (PyAV): pip install av") from error
    name = f"camera {source}" if isinstance(source, int) else printable(source)

    def opened() -> Any:
        return _opened(av, source, name, max_pixels)

    container = opened()
    is_file = not isinstance(source, int) and not is_video_stream(source)
    endless = isinstance(source, int) or (
        not is_file and (container.duration is None or not str(source).lower().startswith("http"))
    )
    if (live and is_file) or (reconnect and not endless):
        container.close()
        unfit, instead = ("live", "every frame of a file is read") if live else ("reconnect", "it has an end")
        raise InputError(f"{name}: {instead}; leave {unfit} out, which is for cameras and live streams")
    newest = endless if live is None else live
    return _connected(container, opened, _Connection(av, name, every, newest, is_file), reconnect)


def _opened(av: Any, source: str | Path | int, name: str, max_pixels: int) -> Any:
    """Open a source with a video stream; InputError if it is none."""
    try:
        container = _container(av, source)
    except InputError:
        raise
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise InputError(f"{name} cannot be opened as a video: {_reason(av, error)}") from error
    if not container.streams.video:
        container.close()
        raise InputError(f"{name} has no video stream")
    stream = container.streams.video[0]
    if stream.width * stream.height > max_pixels:
        container.close()
        raise InputError(
            f"{name} has frames of {stream.width} x {stream.height} pixels (width x height), more than "
            f"max_pixels={max_pixels}"
        )
    return container


def _reason(av: Any, error: Exception) -> str:
    """Return the text of an error; FFmpeg calls the end of its time limit a requested exit."""
    return f"no data for {_SECONDS:g} s" if isinstance(error, av.error.ExitError) else printable(error)


def _container(av: Any, source: str | Path | int) -> Any:
    """Open a source; InputError if it does not exist."""
    if isinstance(source, bool) or not isinstance(source, (int, str, Path)):
        raise InputError(f"a video is a file, an address or the number of a camera, not {type(source).__name__}")
    if isinstance(source, int):
        if not sys.platform.startswith("linux"):
            raise InputError("cameras by number are supported on Linux only: give the address of a stream")
        device = f"/dev/video{source}"
        if not Path(device).exists():
            raise InputError(f"there is no camera {source}: {device} does not exist")
        return av.open(device, format="v4l2")
    if is_video_stream(source):
        return av.open(source, timeout=_SECONDS)
    if not Path(source).is_file():
        raise InputError(f"there is no video file {printable(source)}")
    return av.open(str(Path(source).absolute()), options={"protocol_whitelist": _FILE_PROTOCOLS})


def _connected(
    container: Any, opened: Callable[[], Any], connection: _Connection, reconnect: bool
) -> Iterator[VideoFrame]:
    """Yield the frames of a container, and with ``reconnect`` those of the following ones."""
    number, pause = 0, _FIRST_PAUSE
    while True:
        try:
            if container is None:
                container = opened()
            for each in connection.frames(container, number):
                number, pause = each.number + 1, _FIRST_PAUSE
                yield each
            problem = f"{connection.name} has ended"
        except InputError as error:
            if not reconnect:
                raise
            problem = str(error)
        if not reconnect:
            return
        logger.warning("%s; connecting again in %g s", problem, pause)
        time.sleep(pause)
        container, pause = None, min(2 * pause, _LONGEST_PAUSE)


@dataclass(frozen=True)
class _Connection:
    """Frames of an open container: each of them, or the newest."""

    av: Any
    name: str
    every: int
    newest: bool
    is_file: bool

    def frames(self, container: Any, first: int) -> Iterator[VideoFrame]:
        """Yield the frames, numbered from ``first``."""
        decoded = self._decoded(container, first)
        frames = _newest(decoded, self.name, self.every) if self.newest else decoded
        for number, seconds, frame in frames:
            if number % self.every == 0:
                pixels = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
                channels_first = np.ascontiguousarray(pixels.transpose(2, 0, 1))
                yield VideoFrame(number, seconds, torch.from_numpy(channels_first))

    def _decoded(self, container: Any, first: int) -> Iterator[_Decoded]:
        """Yield number, seconds and frame; InputError after the last one of a source that fails."""
        stream, number, end = container.streams.video[0], first, 0.0
        rate, stated = stream.average_rate, stream.frames
        packets, failure = 0, None

        def all_frames() -> Iterator[Any]:
            nonlocal packets, failure
            try:
                for packet in container.demux(stream):
                    packets += packet.size > 0
                    try:
                        yield from packet.decode()
                    except self.av.error.InvalidDataError:
                        if not self.newest:  # a live stream goes on after a damaged packet
                            raise
            except (self.av.error.FFmpegError, OSError) as error:
                failure = error
                with suppress(self.av.error.FFmpegError):
                    yield from stream.decode(None)  # those that the decoder has kept back

        with container:
            # of what is shown: edit lists may hide frames
            duration = float(((stream.start_time or 0) + (stream.duration or 0)) * stream.time_base)
            for frame in all_frames():
                seconds = float(frame.time if frame.time is not None else (number - first) / float(rate or 1))
                yield number, seconds, frame
                number, end = number + 1, seconds + 2 / float(rate or 1)
        count = number - first
        if failure is not None:
            what = "is damaged" if self.is_file else "failed"
            raise InputError(f"{self.name} {what} after {count} frames: {_reason(self.av, failure)}") from failure
        if packets < stated and end < duration:
            raise InputError(f"{self.name} is incomplete: it has {count} of the {stated} frames that its header states")
        if not count:
            raise InputError(f"{self.name} has no frame that can be decoded")


def _newest(frames: Iterator[_Decoded], name: str, every: int) -> Iterator[_Decoded]:
    """Yield the newest of the frames, which a thread reads, each time that one is asked for.

    The thread ends with the source, or at the next frame after this generator is closed.

    Raises:
        InputError: no frame for 30 s, also from a camera whose driver waits for ever.
    """
    changed, stopped = threading.Condition(), False
    newest: _Decoded | None = None
    end: list[BaseException | None] = []
    at = time.monotonic()

    def read() -> None:
        nonlocal newest, at
        failure: BaseException | None = None
        try:
            with closing(frames):  # type: ignore[type-var]
                for each in frames:
                    with changed:
                        if stopped:
                            return
                        at, newest = time.monotonic(), each if each[0] % every == 0 else newest
                        changed.notify()
        except BaseException as error:  # raised where the frames are used
            failure = error
        with changed:
            end.append(failure)
            changed.notify()

    threading.Thread(target=read, name=f"frames of {name}", daemon=True).start()
    try:
        while True:
            with changed:
                while newest is None and not end:
                    if (left := at + _SECONDS - time.monotonic()) <= 0:
                        raise InputError(f"{name}: no data for {_SECONDS:g} s")
                    changed.wait(left)
                each, newest = newest, None
            if each is None:
                break
            yield each
    finally:
        with changed:
            stopped = True
    if end[0] is not None:
        raise end[0]
