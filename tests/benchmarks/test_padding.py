"""Share of padding in training batches, on few images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import padding
from padding import RECORD, Sizes, shares


def annotations(tmp_path: Path, sizes: list[tuple[int, int]]) -> Path:
    path = tmp_path / "coco.json"
    images = [{"id": i, "height": height, "width": width} for i, (height, width) in enumerate(sizes)]
    path.write_text(json.dumps({"images": images}))
    return path


def test_the_table_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rows.json"
    path = annotations(tmp_path, [(480, 640), (640, 480)] * 10)
    few = ["--batch-sizes", "2", "4", "--buckets", "1", "2", "--seeds", "1", "--epochs", "2"]
    assert padding.main(["--annotations", str(path), *few, "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    rows = {(row["batch_size"], row["buckets"]): row for row in record["rows"]}
    assert list(rows) == [(2, 1), (2, 2), (4, 1), (4, 2)]
    assert all(0 < row["spread"]["low"] <= row["mean"] <= row["spread"]["high"] < 1 for row in rows.values())
    for batch_size in (2, 4):
        assert rows[batch_size, 1]["pixels"] == 1
        assert rows[batch_size, 2]["pixels"] < 1
        assert rows[batch_size, 2]["mean"] < rows[batch_size, 1]["mean"]
    assert rows[2, 1]["mean"] < rows[4, 1]["mean"]
    assert capsys.readouterr().out.count("\n| ") == len(rows)


def test_a_record_holds_the_sizes_it_was_made_from(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    path = annotations(tmp_path, [(480, 640), (640, 480), (480, 640)])
    few = ["--batch-sizes", "2", "--buckets", "1", "--seeds", "1", "--epochs", "2"]
    records = []
    for source in (path, output):
        assert padding.main(["--annotations", str(source), *few, "--output", str(output)]) == 0
        records.append(json.loads(output.read_text()))
    assert records[0]["rows"] == records[1]["rows"]
    assert records[0]["sizes"] == records[1]["sizes"] == [[480, 640, 2], [640, 480, 1]]
    assert records[1]["source"] == "coco.json"


def test_the_share_is_that_of_all_batches_together() -> None:
    """A batch of 4 x 6 and 2 x 6 is padded to 4 x 6 twice; one of 3 x 3 and 4 x 6 has 15 of 48 pixels padded."""
    same = (0, 0, np.array([[4, 6], [2, 6]]))
    assert shares(Sizes("", [(1, 1)] * 2), [same], 2, 1) == [12 / 48]
    assert shares(Sizes("", [(1, 1)] * 2), [(0, 0, np.array([[3, 3], [4, 6]]))], 2, 1) == [15 / 48]
    four = (0, 0, np.array([[4, 6], [2, 6], [4, 6], [4, 6]]))
    assert shares(Sizes("", [(1, 1)] * 4), [four], 2, 1) == [12 / 96]


def test_images_go_through_the_training_transforms() -> None:
    [(_, _, first), (_, _, second)] = padding.simulated_epochs(Sizes("", [(480, 640)] * 200), 1, 2)
    shorter = first.min(axis=1)
    assert set(np.unique(shorter)) >= set(range(480, 801, 32))
    assert first.max() <= 1333
    ratios = first[:, 1] / first[:, 0]
    assert 0.3 < np.isclose(ratios, 4 / 3, atol=0.01).mean() < 0.7, "half of the images are cropped"
    assert not np.array_equal(first, second)


def test_the_recorded_sizes_are_those_of_coco_val2017() -> None:
    sizes = Sizes.read(RECORD)
    assert len(sizes.images) == 5000
    assert sizes.images.count((480, 640)) == 1061


@pytest.mark.parametrize("content", ["no JSON", "[]", '{"images": []}', '{"images": [{"id": 1, "width": 4}]}'])
def test_other_files_are_refused(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    assert padding.main(["--annotations", str(path)]) == 2
    assert f"--annotations {path}" in capsys.readouterr().err


@pytest.mark.parametrize("few", [["--seeds", "0"], ["--seeds", "1", "--epochs", "1"], ["--seeds=-1", "--epochs=-3"]])
def test_one_epoch_is_refused(few: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert padding.main(few) == 2
    assert "--seeds and --epochs must be 1 or more" in capsys.readouterr().err
