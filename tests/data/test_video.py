"""Frames of videos that the tests write themselves: order, numbers, times, rotation and damage."""

from __future__ import annotations

import http.server
import io
import json
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from detr_bf.commands import predict as command
from detr_bf.commands.model_arguments import predict_arguments
from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap, Detections
from detr_bf.common.terminal import run_tool
from detr_bf.data import video
from detr_bf.data.video import read_frames
from detr_bf.inference.backends import TorchBackend
from detr_bf.inference.prediction import FramePrediction
from detr_bf.inference.predictor import Predictor

HEIGHT, WIDTH, COUNT, RATE = 48, 80, 12, 25


def clip(path: Path, codec: str = "mpeg4") -> Path:
    """Write a bright square of 16 pixels that moves to the right by 4 pixels a frame, from the upper left corner."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=RATE)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = WIDTH, HEIGHT, "yuv420p", 4_000_000
        for number in range(COUNT):
            pixels = np.full((HEIGHT, WIDTH, 3), 20, dtype=np.uint8)
            pixels[:16, 4 * number : 4 * number + 16] = 220
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


def left_of(pixels: torch.Tensor) -> int:
    """Return the first column of the square in (3, H, W)."""
    return int((pixels.float().mean(0)[:16].mean(0) > 120).nonzero()[0])


@pytest.mark.parametrize(
    ("name", "codec"), [("a.mp4", "mpeg4"), ("a.mp4", "libx264"), ("a.avi", "mpeg4"), ("a.mkv", "ffv1")]
)
def test_frames_come_in_order_with_numbers_and_times(name: str, codec: str, tmp_path: Path) -> None:
    """libx264 stores frames in another order than they are shown in."""
    frames = list(read_frames(clip(tmp_path / name, codec)))
    assert [frame.number for frame in frames] == list(range(COUNT))
    assert [frame.seconds for frame in frames] == pytest.approx([number / RATE for number in range(COUNT)], abs=1e-3)
    assert [left_of(frame.pixels) for frame in frames] == pytest.approx([4 * x for x in range(COUNT)], abs=2)
    assert all(frame.pixels.shape == (3, HEIGHT, WIDTH) and frame.pixels.dtype == torch.uint8 for frame in frames)


def test_each_nth_frame(tmp_path: Path) -> None:
    frames = list(read_frames(clip(tmp_path / "a.mp4"), every=5))
    assert [frame.number for frame in frames] == [0, 5, 10]
    assert frames[1].seconds == pytest.approx(5 / RATE)
    for every in (0, -1, True, 1.5):
        with pytest.raises(InputError, match="every must be a whole number from 1"):
            read_frames(tmp_path / "a.mp4", every=every)  # type: ignore[arg-type]


def test_frames_are_rotated_as_the_file_says(tmp_path: Path) -> None:
    """The matrix of the track header takes column x and row y of a frame to column H - 1 - y and row x."""
    plain = [frame.pixels for frame in read_frames(clip(tmp_path / "a.mp4"))]
    content = bytearray((tmp_path / "a.mp4").read_bytes())
    at = content.index(b"tkhd") + 4 + 40
    one, whole = 1 << 16, 1 << 30
    assert struct.unpack(">9i", content[at : at + 36]) == (one, 0, 0, 0, one, 0, 0, 0, whole)
    content[at : at + 36] = struct.pack(">9i", 0, one, 0, -one, 0, 0, 0, 0, whole)
    (tmp_path / "a.mp4").write_bytes(content)
    rotated = [frame.pixels for frame in read_frames(tmp_path / "a.mp4")]
    for before, after in zip(plain, rotated, strict=True):
        expected = torch.stack([before[:, HEIGHT - 1 - column, :] for column in range(HEIGHT)], dim=2)
        assert torch.equal(after, expected)


def test_what_is_no_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "list.mp4").write_text("#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n#EXT-X-ENDLIST\n")
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = 8000, Fraction(1, 8000), 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    clip(tmp_path / "a.mp4")
    for source, said in (
        (tmp_path / "text.mp4", "cannot be opened as a video"),
        (tmp_path / "list.mp4", "cannot be opened as a video"),
        (tmp_path / "sound.mp4", "has no video stream"),
        (tmp_path / "missing.mp4", "^there is no video file"),
        (tmp_path, "there is no video file"),
        ("http://127.0.0.1:9/a.mp4", "cannot be opened as a video"),
        (987, "there is no camera 987: /dev/video987 does not exist"),
        (1.5, "a video is a file, an address or the number of a camera, not float"),
    ):
        with pytest.raises(InputError, match=said):
            read_frames(source)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"frames of 80 x 48 pixels \(width x height\), more than max_pixels=100"):
        read_frames(tmp_path / "a.mp4", max_pixels=100)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InputError, match=r"videos need the package av \(PyAV\): pip install av"):
        read_frames(tmp_path / "a.mp4")


def incomplete(path: Path) -> Path:
    """Write a clip whose header, at its beginning, states more frames than are left of the file."""
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number in range(COUNT):
            noise = np.random.default_rng(number).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(noise, format="rgb24")))
        container.mux(stream.encode())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    return path


def test_frames_that_an_edit_list_hides_are_not_missing(tmp_path: Path) -> None:
    with av.open(str(clip(tmp_path / "a.mp4"))) as source, av.open(str(tmp_path / "b.mp4"), "w") as target:
        stream = source.streams.video[0]
        copied, step = target.add_stream_from_template(stream), int(1 / RATE / stream.time_base)
        for packet in source.demux(stream):
            if packet.size:
                packet.stream, packet.pts, packet.dts = copied, packet.pts - 5 * step, packet.dts - 5 * step
                target.mux(packet)
    with av.open(str(tmp_path / "b.mp4")) as container:
        assert container.streams.video[0].frames == COUNT
    assert [left_of(frame.pixels) for frame in read_frames(tmp_path / "b.mp4")] == pytest.approx(
        [4 * number for number in range(5, COUNT)], abs=2
    )


def test_an_incomplete_file_that_starts_late(tmp_path: Path) -> None:
    with (
        av.open(str(clip(tmp_path / "a.mp4"))) as source,
        av.open(str(tmp_path / "b.mp4"), "w", options={"movflags": "faststart"}) as target,
    ):
        stream = source.streams.video[0]
        copied, late = target.add_stream_from_template(stream), int(6 / stream.time_base)
        for packet in source.demux(stream):
            if packet.size:
                packet.stream, packet.pts, packet.dts = copied, packet.pts + late, packet.dts + late
                target.mux(packet)
    whole = list(read_frames(tmp_path / "b.mp4"))
    assert len(whole) == COUNT
    assert whole[0].seconds >= 5
    content = (tmp_path / "b.mp4").read_bytes()
    (tmp_path / "c.mp4").write_bytes(content[: len(content) * 4 // 5])
    with pytest.raises(InputError, match=r"incomplete|damaged"):
        list(read_frames(tmp_path / "c.mp4"))


def test_frames_before_the_end_of_an_incomplete_file_are_read(tmp_path: Path) -> None:
    numbers: list[int] = []
    with pytest.raises(InputError, match=r"is (incomplete: it has \d+ of the 12 frames|damaged after \d+ frames)"):
        numbers.extend(frame.number for frame in read_frames(incomplete(tmp_path / "a.mp4")))
    assert 0 < len(numbers) < COUNT
    assert numbers == list(range(len(numbers)))


@pytest.fixture
def detector() -> Predictor:
    """Return a detector that finds the bright square."""

    class Finder(TorchBackend):
        reads_references = False

        def compute(self, batch: Any, convert: Any, half: bool) -> list[Any]:
            lefts = [float(left_of(image)) for image in batch.images]
            return [
                Detections(t.image_id, torch.tensor([[x, 0, x + 16, 16.0]]), torch.tensor([0.9]), torch.tensor([0]))
                for x, t in zip(lefts, batch.targets, strict=True)
            ]

    nothing: Any = None
    classes = ClassMap((7,), ("square",))
    backend = Finder(nn.Identity(), torch.device("cpu"))  # type: ignore[arg-type]
    return Predictor(backend, classes, lambda sample: sample, nothing, nothing)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_size", [1, 5])
def test_predictions_of_frames(detector: Predictor, batch_size: int, tmp_path: Path) -> None:
    source = clip(tmp_path / "a.mp4")
    found = list(detector.predict_video(source, every=3, batch_size=batch_size))
    assert [each.frame for each in found] == [each.image_id for each in found] == [0, 3, 6, 9]
    assert [each.seconds for each in found] == pytest.approx([0, 3 / RATE, 6 / RATE, 9 / RATE])
    assert [float(each.boxes[0, 0]) for each in found] == pytest.approx([0, 12, 24, 36], abs=2)
    assert str(found[1]) == f"frame 3, 0.12 s of {source}: square 0.90"
    assert found[1].plot().size[0] / found[1].plot().size[1] == WIDTH / HEIGHT
    content = json.loads(found[1].to_json())
    assert list(content) == ["file", "frame", "seconds", "objects"]
    assert content["objects"][0]["name"] == "square"
    damaged, before = incomplete(tmp_path / "b.mp4"), list[int]()
    with pytest.raises(InputError, match=r"incomplete|damaged"):
        before.extend(each.frame for each in detector.predict_video(damaged, batch_size=batch_size, threshold=0))
    assert before == list(range(len(before)))
    assert before


class Camera:
    """HTTP server that sends JPEG images as network cameras do, and notes the time of each.

    ``scripts`` has one entry for each connection: the number of frames, and what follows: "end" or "stall".
    """

    def __init__(self) -> None:
        self.scripts: list[tuple[int, str]] = []
        self.pause = 0.02
        self.sent: list[float] = []
        self.done = threading.Event()
        self.files: dict[str, tuple[bytes, int]] = {}  # content and stated length by path
        camera = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                with suppress(OSError):  # the reader has closed the connection
                    if self.path in camera.files:
                        content, length = camera.files[self.path]
                        self.send_response(200)
                        self.send_header("Content-Length", str(length))
                        self.end_headers()
                        self.wfile.write(content)
                    else:
                        camera.send(self)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def send(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        count, then = self.scripts.pop(0)
        handler.send_response(200)
        handler.send_header("Content-Type", "multipart/x-mixed-replace;boundary=frame")
        handler.end_headers()
        for _ in range(count):
            pixels = np.full((HEIGHT, WIDTH, 3), 20, dtype=np.uint8)
            left = 4 * (len(self.sent) % 16)
            pixels[:16, left : left + 16] = 220
            image = io.BytesIO()
            Image.fromarray(pixels).save(image, "JPEG", quality=95)
            content = image.getvalue()
            head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(content)}\r\n\r\n"
            self.sent.append(time.monotonic())
            handler.wfile.write(head.encode() + content + b"\r\n")
            time.sleep(self.pause)
        if then == "stall":
            self.done.wait(20)


@pytest.fixture
def camera(monkeypatch: pytest.MonkeyPatch) -> Iterator[Camera]:
    monkeypatch.setattr(video, "_FIRST_PAUSE", 0.05)
    found = Camera()
    yield found
    found.done.set()
    found.server.shutdown()
    found.server.server_close()


def slow(detector: Predictor, seconds: float, monkeypatch: pytest.MonkeyPatch) -> Predictor:
    backend: Any = type(detector.backend)
    compute = backend.compute
    monkeypatch.setattr(backend, "compute", lambda *given, **more: (time.sleep(seconds), compute(*given, **more))[1])
    return detector


def test_the_delay_of_a_live_source_does_not_grow(
    detector: Predictor, camera: Camera, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 frames in 2 s, and 0.1 s for each detection: with all frames the last one would be 8 s late."""
    camera.scripts = [(100, "stall")]
    delays = []
    for found in slow(detector, 0.1, monkeypatch).predict_video(camera.address):
        delays.append(time.monotonic() - camera.sent[found.frame])
        assert float(found.boxes[0, 0]) == pytest.approx(4 * (found.frame % 16), abs=2), "numbers count all frames"
        if found.frame == 99:
            break
    assert max(delays) < 1.5
    assert len(delays) < 50
    camera.scripts = [(20, "end")]
    camera.pause = 0.0
    every = detector.predict_video(camera.address, live=False)
    numbers: list[int] = []
    with pytest.raises(InputError, match="failed after 20 frames"):  # such a stream has no end that it states
        numbers.extend(found.frame for found in every)
    assert numbers == list(range(20))


def test_a_file_on_a_server_keeps_every_frame(detector: Predictor, camera: Camera, tmp_path: Path) -> None:
    with av.open(str(tmp_path / "b.mp4"), "w", options={"movflags": "faststart"}) as target:
        stream = target.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for _ in range(COUNT):
            target.mux(stream.encode(av.VideoFrame(WIDTH, HEIGHT, "yuv420p")))
        target.mux(stream.encode())
    content = (tmp_path / "b.mp4").read_bytes()
    camera.files["/b.mp4"] = content, len(content)
    frames = read_frames(camera.address + "b.mp4")
    numbers = [(time.sleep(0.01), each.number)[1] for each in frames]
    assert numbers == list(range(COUNT))
    for source, given in ((camera.address + "b.mp4", "reconnect"), (tmp_path / "b.mp4", "live")):
        with pytest.raises(InputError, match=f"leave {given} out, which is for cameras and live streams"):
            read_frames(source, **{given: True})  # type: ignore[arg-type]


def test_a_stall_is_told(camera: Camera, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "_SECONDS", 0.5)
    for live, failure in ((None, "no data for 0.5 s"), (False, "after 5 frames: no data for 0.5 s")):
        camera.scripts = [(5, "stall")]
        numbers: list[int] = []
        with pytest.raises(InputError, match=failure):
            numbers.extend(each.number for each in read_frames(camera.address, live=live))
        assert numbers[-1] == 4
        assert live is None or numbers == list(range(5))


def test_a_stall_of_a_driver_that_waits_for_ever_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "_SECONDS", 0.2)
    release = threading.Event()

    def frames() -> Iterator[tuple[int, float, Any]]:
        yield 0, 0.0, None
        release.wait(20)

    found = video._newest(frames(), "camera 0", 1)
    assert next(found) == (0, 0.0, None)
    with pytest.raises(InputError, match=r"^camera 0: no data for 0\.2 s$"):
        next(found)
    release.set()


@pytest.mark.parametrize("then", ["end", "stall"])
def test_a_live_source_is_opened_again_if_asked(
    then: str, camera: Camera, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(video, "_SECONDS", 0.5)
    camera.scripts = [(5, then), (5, "stall")]
    numbers = []
    for each in read_frames(camera.address, reconnect=True):
        numbers.append(each.number)
        if each.number == 9:
            break
    assert numbers == sorted(set(numbers))
    assert "connecting again in 0.05 s" in caplog.text
    assert not camera.scripts


def test_frames_that_the_decoder_keeps_back_come_before_the_error(camera: Camera, tmp_path: Path) -> None:
    """A decoder of H.264 returns frames later than their packets come."""
    content = clip(tmp_path / "a.ts", "libx264").read_bytes()
    packet = 188
    part = content[: len(content) * 3 // 4 // packet * packet]
    (tmp_path / "part.ts").write_bytes(part)
    expected = [left_of(each.pixels) for each in read_frames(tmp_path / "part.ts")]
    assert len(expected) > 2
    camera.files["/a.ts"] = part, len(content)
    found: list[int] = []
    with pytest.raises(InputError, match=f"after {len(expected)} frames"):
        found.extend(left_of(each.pixels) for each in read_frames(camera.address + "a.ts", live=False))
    assert found == expected


def run(detector: Predictor, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(command, "load_predictor", lambda *_: detector)
    return run_tool(lambda: command.main(predict_arguments(["run", *arguments])))


def test_the_command_writes_a_line_for_each_frame(
    detector: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = str(clip(tmp_path / "a.MP4")), str(tmp_path / "out")
    assert run(detector, ["--output", output, source, "--every", "4"], monkeypatch) == 0
    assert "3 objects in 3 frames, scores from 0.5: " in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()]
    assert [(line["file"], line["frame"]) for line in lines] == [(source, 0), (source, 4), (source, 8)]
    assert run(detector, ["--output", output, source, "--format", "jsonl"], monkeypatch) == 0, (
        "its own file is replaced"
    )
    assert len((tmp_path / "out" / "predictions.jsonl").read_text().splitlines()) == COUNT
    interrupted, before = FramePrediction.to_json, [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(FramePrediction, "to_json", lambda self: (signal.raise_signal(number), interrupted(self))[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        assert run(detector, ["--output", output, source], monkeypatch) == 128 + number
        assert "interrupted: the frames before are written" in capsys.readouterr().err
        assert len((tmp_path / "out" / "predictions.jsonl").read_text().splitlines()) == 1
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    monkeypatch.setattr(FramePrediction, "to_json", interrupted)
    damaged = str(incomplete(tmp_path / "b.mp4"))
    assert run(detector, ["--output", output, damaged, "--threshold", "0"], monkeypatch) == 1
    said = capsys.readouterr()
    assert "incomplete" in said.err or "damaged" in said.err
    assert 0 < len((tmp_path / "out" / "predictions.jsonl").read_text().splitlines()) < COUNT


def test_a_signal_ends_the_wait_for_a_frame(
    detector: Predictor,
    camera: Camera,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    camera.scripts = [(3, "stall")]
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(1.0, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    start = time.monotonic()
    assert run(detector, ["--output", str(tmp_path / "out"), camera.address], monkeypatch) == 128 + signal.SIGINT
    assert time.monotonic() - start < 10
    assert "interrupted: the frames before are written" in capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()]
    assert lines[-1]["frame"] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.mp4", "b.mp4"], "a video must be the only input"),
        (["a.mp4", "--format", "csv"], "a video gives predictions.jsonl alone"),
        (["a.mp4", "--panoptic"], "a video gives predictions.jsonl alone"),
        (["a.mp4", "--save-pictures"], "a video gives predictions.jsonl alone"),
        (["a.mp4", "--every", "0"], "every must be a whole number from 1"),
        (["photo.jpg", "--every", "2"], "--every is for a video, and none is given"),
        (["photo.jpg", "--no-live"], "--live is for a video, and none is given"),
        (["a.mp4", "--live"], "every frame of a file is read; leave live out"),
        (["a.mp4", "--reconnect"], "it has an end; leave reconnect out"),
        (["missing.mp4"], "error: there is no video file missing.mp4"),
    ],
)
def test_wrong_arguments(
    arguments: list[str],
    said: str,
    detector: Predictor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    clip(tmp_path / "a.mp4")
    assert run(detector, ["--output", "out", *arguments], monkeypatch) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
