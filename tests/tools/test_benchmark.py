"""``detr-bf benchmark``: times of alternating calls, and memory of processes of their own."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import detr_bf
from detr_bf.commands import benchmark, main
from tests.tools.test_predict import weights as weights  # a fixture: the checkpoint of a tiny detector


@pytest.mark.full
def test_a_run_is_timed_and_measured(weights: Path, tmp_path: Path) -> None:
    written = tmp_path / "bench.json"
    arguments = ["--batch-sizes", "2", "--threads", "1", "--rounds", "2", "--device", "cpu", "--output", str(written)]
    assert main(["benchmark", str(weights), *arguments]) == 0
    [timing] = json.loads(written.read_text())["timings"]
    assert (timing["source"], timing["precision"], timing["batch_size"]) == (str(weights), "float32", 2)
    assert timing["images_per_second"] == pytest.approx(2 / timing["seconds"]["median"])
    assert 50 < timing["memory_mib"] < 20_000


@pytest.mark.full
def test_a_run_and_its_file_are_timed_in_turn(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiny.onnx"
    detr_bf.load(weights, "cpu").export(file)
    written = tmp_path / "bench.json"
    arguments = ["--half", "--batch-sizes", "1", "2", "--threads", "1", "--rounds", "3", "--device", "cpu"]
    assert main(["benchmark", str(weights), str(file), *arguments, "--output", str(written)]) == 0
    content = json.loads(written.read_text())
    timings = content["timings"]
    assert {"command", "torch", "CPU"} <= set(content["machine"])
    candidates = [(str(weights), "float32"), (str(weights), "half"), (str(file), "float32")]
    expected = [(*candidate, batch) for batch in (1, 2) for candidate in candidates]
    assert [(each["source"], each["precision"], each["batch_size"]) for each in timings] == expected
    for each in timings:
        assert 0 < each["seconds"]["low"] <= each["seconds"]["median"] <= each["seconds"]["high"]
        assert each["images_per_second"] == pytest.approx(each["batch_size"] / each["seconds"]["median"])
        assert each["ratio"]["low"] <= each["ratio"]["median"] <= each["ratio"]["high"]
        assert 50 < each["memory_mib"] < 20_000
        assert each["device_memory_mib"] is None
    assert [each["ratio"]["median"] for each in timings[::3]] == [1, 1], "of the first candidate to itself"
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(timings)
    assert main(["benchmark", str(weights), "--output", str(written)]) == 2
    assert "exists: name another file" in capsys.readouterr().err
    assert json.loads(written.read_text()) == content


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch-sizes", "0"], "--batch-sizes 0: expected whole numbers from 1"),
        (["--rounds", "1"], "--rounds 1: expected whole numbers from 2"),
        (["--threads", "-3"], "--threads -3: expected whole numbers from 1"),
        (["{weights}"], "is given twice"),
        (["missing.pt"], "missing.pt"),
        (["--images", "nowhere"], "no such file or folder: nowhere"),
        (["--output", "{folder}"], "--output"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], said: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [each.format(weights=weights, folder=tmp_path) for each in arguments]
    assert main(["benchmark", str(weights), *given, "--no-memory"]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_images_are_read_as_the_first_detector_reads_them(weights: Path, tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 2**12, (48, 64), dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "1.png")
    content = torch.load(weights, weights_only=True)
    content["config"]["data"]["grey_bits"] = 14
    torch.save(content, tmp_path / "tiny.pt")
    options = Namespace(images=tmp_path, runs=[str(tmp_path / "tiny.pt"), "other"])
    [image], _ = benchmark._images(options, 1)
    assert torch.equal(image, torch.from_numpy((values >> 6).astype(np.uint8)).expand(3, -1, -1))
