"""Frames of videos that the tests write themselves: order, numbers, times, rotation and damage."""

from __future__ import annotations

import json
import signal
import struct
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from torch import nn

from detr_bf.cli import run_tool
from detr_bf.commands import predict as command
from detr_bf.commands.model_arguments import predict_arguments
from detr_bf.data.video import read_frames
from detr_bf.errors import InputError
from detr_bf.prediction import FramePrediction
from detr_bf.predictor import Predictor
from detr_bf.structures import ClassMap, Detections

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

    class Finder(Predictor):
        def _detect(self, batch: Any, half: bool = False) -> list[Detections]:
            lefts = [float(left_of(image)) for image in batch.images]
            return [
                Detections(t.image_id, torch.tensor([[x, 0, x + 16, 16.0]]), torch.tensor([0.9]), torch.tensor([0]))
                for x, t in zip(lefts, batch.targets, strict=True)
            ]

    nothing: Any = None
    classes = ClassMap((7,), ("square",))
    parts: dict[str, Any] = {"postprocess": nothing, "panoptic_postprocess": nothing, "device": torch.device("cpu")}
    return Finder(model=nn.Identity(), class_map=classes, transform=lambda sample: sample, **parts)  # type: ignore[arg-type]


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


def run(detector: Predictor, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(command, "load_predictor", lambda checkpoint, device: detector)
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.mp4", "b.mp4"], "a video must be the only input"),
        (["a.mp4", "--format", "csv"], "a video gives predictions.jsonl alone"),
        (["a.mp4", "--panoptic"], "a video gives predictions.jsonl alone"),
        (["a.mp4", "--save-pictures"], "a video gives predictions.jsonl alone"),
        (["a.mp4", "--every", "0"], "every must be a whole number from 1"),
        (["photo.jpg", "--every", "2"], "--every is for a video, and none is given"),
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
