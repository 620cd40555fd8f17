"""Frames of video files, streams and cameras, read with PyAV (FFmpeg)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detr_bf.data.images import MAX_PIXELS
from detr_bf.errors import InputError
from detr_bf.text import printable

VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".wmv")
_SCHEMES = ("http://", "https://", "rtsp://", "rtmp://")
_FILE_PROTOCOLS = "file,crypto,data"  # a playlist in a local file must not open addresses
_SECONDS = 30.0  # without data from a server


@dataclass(frozen=True)
class VideoFrame:
    """One frame of a video."""

    number: int  # from 0
    seconds: float  # presentation time in the video
    pixels: Tensor  # (3, H, W) uint8 RGB, rotated as the video says


def is_video_stream(source: object) -> bool:
    """Return True for an address that :func:`read_frames` opens."""
    return isinstance(source, str) and source.lower().startswith(_SCHEMES)


def read_frames(source: str | Path | int, *, every: int = 1, max_pixels: int = MAX_PIXELS) -> Iterator[VideoFrame]:
    """Open a video and return its frames, one after the other, in the order in which they are shown.

    Args:
        source: video file, address (http, https, rtsp, rtmp), or number of a camera.
        every: return only the frames whose number is a multiple of it.
        max_pixels: largest number of pixels of a frame.

    Raises:
        InputError: PyAV is not installed, ``source`` cannot be opened or is no video, or its frames are too large; in
            the iteration: the video ends before the number of frames that its header states, or is damaged.
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise InputError(f"every must be a whole number from 1, got {printable(repr(every))}")
    try:
        import av
    except ImportError as error:
        raise InputError("videos need the package av (PyAV): pip install av") from error
    name = f"camera {source}" if isinstance(source, int) else printable(source)
    try:
        container = _opened(av, source)
    except InputError:
        raise
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise InputError(f"{name} cannot be opened as a video: {printable(error)}") from error
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
    return _frames(av, container, name, every)


def _opened(av: Any, source: str | Path | int) -> Any:
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


def _frames(av: Any, container: Any, name: str, every: int) -> Iterator[VideoFrame]:
    stream, number, packets, end = container.streams.video[0], 0, 0, 0.0
    rate, stated = stream.average_rate, stream.frames
    with container:
        # of what is shown: edit lists may hide frames
        duration = float(((stream.start_time or 0) + (stream.duration or 0)) * stream.time_base)
        try:
            for packet in container.demux(stream):
                packets += packet.size > 0
                for frame in packet.decode():
                    seconds = float(frame.time if frame.time is not None else number / float(rate or 1))
                    if number % every == 0:
                        pixels = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
                        channels_first = np.ascontiguousarray(pixels.transpose(2, 0, 1))
                        yield VideoFrame(number, seconds, torch.from_numpy(channels_first))
                    number, end = number + 1, seconds + 2 / float(rate or 1)
        except (av.error.FFmpegError, OSError) as error:
            raise InputError(f"{name} is damaged after {number} frames: {printable(error)}") from error
    if packets < stated and end < duration:
        raise InputError(f"{name} is incomplete: it has {number} of the {stated} frames that its header states")
    if not number:
        raise InputError(f"{name} has no frame that can be decoded")
