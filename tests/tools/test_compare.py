"""``detr-bf compare``: reports on records alone, comparisons of run folders, wrong arguments, a whole experiment."""

from __future__ import annotations

import copy
import json
import math
import shutil
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from detr_bf.comparison.experiment import ExperimentCell, flat_settings, read_experiment
from detr_bf.config import load_config
from detr_bf.data.coco import CocoDetection
from tests.comparison.conftest import base, file  # noqa: F401  fixtures
from tests.comparison.stubs import modules
from tests.comparison.test_runner import finished_run
from tests.tools.test_train_net import tool

BCCD = Path(__file__).parents[3] / "shared" / "data" / "bccd"

compare = tool("compare").main


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace statistics and page."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def runs(file: Path, names: dict[str, tuple[ExperimentCell, list[str]]]) -> list[str]:  # noqa: F811
    """Write finished runs of cells, with further settings, into folders of these names."""
    found = []
    for name, (cell, extra) in names.items():
        path = file.parent / name
        finished_run(path, read_experiment(file, extra), cell)
        found.append(str(path))
    return found


def record(arm: str, seed: int, **changes: Any) -> dict[str, Any]:
    settings = {**flat_settings(load_config(None)), "batch_former.enabled": arm != "off"}
    split = {"sha256": "0" * 64, "images": 4, "objects": 8}
    return {
        "format": "detr_bf cell 1",
        "arm": arm,
        "seed": seed,
        "fold": None,
        "settings": settings,
        "metrics": {"AP": 0.5},
        "curve": [{"epoch": 1, "step": 5, "metrics": {"AP": 0.5}}],
        "cost": {"train_seconds": 1.0, "steps": 5, "step_seconds": 0.2, "peak_memory_mib": 300, "rows": 2},
        "machine": {"command": "x"},
        "data": {"train": split, "val": split},
        "table": {"kind": "boxes"},
    } | changes


def write_cells(folder: Path, *records: dict[str, Any]) -> Path:
    for each in records:
        path = folder / "cells" / each["arm"] / f"seed_{each['seed']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(each))
    return folder


@pytest.mark.usefixtures("stubbed")
def test_records_alone_are_enough_for_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a description the baseline is off, and arms state their difference from it."""
    folder = write_cells(tmp_path / "c", *(record(arm, seed) for arm in ("bf", "off") for seed in (0, 1, 10)))
    assert compare(["report", str(folder), "--output", str(tmp_path / "out")]) == 0
    assert "| AP | 6 cells |" in capsys.readouterr().out
    document = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert document["cells"][:4] == ["off 0 None", "off 1 None", "off 10 None", "bf 0 None"]
    assert document["arms"] == {"off": [], "bf": ["batch_former.enabled=true"]}
    assert (document["baseline"], document["title"], document["resamples"]) == ("off", "c", 2000)
    assert not (folder / "comparison.json").exists()
    assert compare(["report", str(folder), "--baseline", "bf", "--primary", "AP50"]) == 0
    document = json.loads((folder / "comparison.json").read_text())
    assert (document["baseline"], document["primary"], next(iter(document["arms"]))) == ("bf", "AP50", "bf")


OTHER = {"sha256": "1" * 64, "images": 4, "objects": 8}


@pytest.mark.usefixtures("stubbed")
@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "has no finished cells"),
        ([record("off", 0)], "only the arm 'off' has finished cells"),
        ([record("off", 0), record("bf", 0, data={"train": OTHER, "val": OTHER})], "different validation data"),
        ([record("off", 0), record("bf", 0, table={"kind": "classifier"})], "compare runs of one task"),
        ([record("off", 0), record("off", 1, settings={"train.epochs": 3}), record("bf", 0)], "different settings"),
        ([record("off", 0), record("bf", 0, format="detr_bf cell 0")], "is not a cell record of this version"),
        ([{"arm": "off", "seed": 0}], "is not a cell record of this version"),
    ],
)
def test_records_that_cannot_be_compared_are_refused(
    tmp_path: Path, records: list[dict[str, Any]], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(["report", str(write_cells(tmp_path, *records))]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("stubbed")
def test_a_record_under_the_name_of_another_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_cells(tmp_path, record("off", 0), record("bf", 0))
    (folder / "cells/off/seed_0.json").rename(folder / "cells/off/seed_1.json")
    assert compare(["report", str(folder)]) == 2
    assert "is the record of another cell" in capsys.readouterr().err


BAD = (None, True, -1, 3, math.nan, "x", "../x", "\x1b[2J", [], [1], {}, {"a": 1})


def spoiled(tree: Any, random: Random) -> Any:
    """Return a copy of a JSON value with one node replaced or left out."""
    if not isinstance(tree, (dict, list)) or not tree or random.random() < 0.25:
        return random.choice(BAD)
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    chosen = random.choice(keys)
    changed = copy.copy(tree)
    if random.random() < 0.2:
        del changed[chosen]
    else:
        changed[chosen] = spoiled(tree[chosen], random)
    return changed


@pytest.mark.usefixtures("stubbed")
def test_spoiled_records_give_a_report_or_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random, codes = Random(0), Counter[int]()
    whole = [record("off", 0), record("bf", 0)]
    description = {
        "format": "detr_bf experiment 1",
        "title": "t",
        "baseline": "off",
        "primary": "AP",
        "resamples": 50,
        "contrasts": [],
        "contrasts_only": False,
        "arms": {"off": [], "bf": ["batch_former.enabled=true"]},
    }
    folder = write_cells(tmp_path, *whole)
    for number in range(400):
        one = whole[1] if number % 4 == 0 else spoiled(whole[1], random)
        (folder / "cells/bf/seed_0.json").write_text(json.dumps(one))
        told = spoiled(description, random) if number % 4 == 0 else description
        (folder / "cells/experiment.json").write_text(json.dumps(told))
        codes[compare(["report", str(folder)])] += 1
        said = capsys.readouterr()
        assert "\x1b" not in said.err + said.out
    assert set(codes) == {0, 2}
    assert codes[2] > 100


@pytest.mark.usefixtures("stubbed")
def test_training_data_may_differ_between_arms(tmp_path: Path) -> None:
    """A comparison may be about the training data; only the validation data must be the same."""
    one = record("bf", 0)
    one["data"] = {**one["data"], "train": OTHER}
    assert compare(["report", str(write_cells(tmp_path, record("off", 0), one))]) == 0


@pytest.mark.usefixtures("stubbed")
def test_run_folders_are_grouped_by_their_settings(
    file: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders = runs(
        file,
        {
            "plain-seed_0": (ExperimentCell("off", 0, None), ["data.check=false"]),
            "deep/seed_0": (ExperimentCell("two_stream", 0, None), []),
            "plain-seed_1": (ExperimentCell("off", 1, None), []),
            "deep/seed_1": (ExperimentCell("two_stream", 1, None), []),
            "deep/other": (ExperimentCell("two_stream", 1, None), ["optimizer.lr=0.5"]),
        },
    )
    monkeypatch.chdir(tmp_path)
    assert compare(folders) == 0
    document = json.loads((tmp_path / "comparison" / "comparison.json").read_text())
    assert document["cells"] == ["plain 0 None", "plain 1 None", "deep 0 None", "deep 1 None", "other 1 None"]
    assert document["arms"] == {
        "plain": [],
        "deep": ["batch_former.enabled=true"],
        "other": ["batch_former.enabled=true", "optimizer.lr=0.5"],
    }
    assert document["baseline"] == "plain"
    assert compare([*folders, "--baseline", "other", "--output", "elsewhere"]) == 0
    assert json.loads((tmp_path / "elsewhere" / "comparison.json").read_text())["baseline"] == "other"


@pytest.mark.usefixtures("stubbed")
def test_run_folders_that_cannot_be_compared_are_refused(
    file: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, two, same = runs(
        file,
        {
            "one": (ExperimentCell("off", 0, None), []),
            "two": (ExperimentCell("two_stream", 0, None), []),
            "same": (ExperimentCell("off", 0, None), []),
        },
    )
    output = ["--output", str(tmp_path / "out")]
    assert compare([one, two, same, *output]) == 2
    assert "have the same settings and the same seed" in capsys.readouterr().err
    assert compare([one, *output]) == 2
    assert "nothing to compare" in capsys.readouterr().err
    assert compare([one, str(tmp_path), *output]) == 2
    assert "is not the folder of a finished run: config.yaml, evaluation.json missing" in capsys.readouterr().err
    assert compare([one, two, "--baseline", "three", *output]) == 2
    assert "the baseline 'three' has no finished cells" in capsys.readouterr().err
    shutil.copytree(tmp_path / "val", tmp_path / "val2")
    content = json.loads((tmp_path / "val2" / "annotations.json").read_text())
    content["annotations"].pop()
    (tmp_path / "val2" / "annotations.json").write_text(json.dumps(content))
    extra = [f"data.val.annotations={tmp_path / 'val2' / 'annotations.json'}"]
    assert compare([one, *runs(file, {"else": (ExperimentCell("two_stream", 0, None), extra)}), *output]) == 2
    assert "different validation data" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_fingerprint_of_data_says_what_the_model_sees(base: Path, tmp_path: Path) -> None:  # noqa: F811
    def fingerprint(images: str = "val/images") -> dict[str, Any]:
        content = CocoDetection(tmp_path / images, tmp_path / "val/annotations.json", lambda sample: sample)
        return content.fingerprint()

    first, path = fingerprint(), tmp_path / "val" / "annotations.json"
    assert (first["images"], first["objects"]) == (4, 8)
    content = json.loads(path.read_text())
    content["images"].reverse()
    content["info"] = {"year": 2000}
    path.write_text(json.dumps(content))
    assert fingerprint() == first, "neither the order of the images nor remarks matter"
    shutil.copytree(tmp_path / "val/images", tmp_path / "copy")
    assert fingerprint("copy") == first, "nor the folder"
    content["annotations"][3]["bbox"][2] -= 1
    path.write_text(json.dumps(content))
    changed = fingerprint()
    assert changed["sha256"] != first["sha256"], "a box"
    with next((tmp_path / "val/images").glob("*.png")).open("ab") as image:
        image.write(b"\0")
    assert fingerprint()["sha256"] != changed["sha256"], "the size of a file"


def test_wrong_arguments_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(["run", str(tmp_path / "none.yaml")]) == 2
    assert "experiment file not found" in capsys.readouterr().err
    assert compare(["run", "bcd"]) == 2
    assert "'bcd' is neither an experiment file nor a packaged experiment: bccd, " in capsys.readouterr().err
    assert compare(["report", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    for arguments in ([], ["run"], ["report"]):
        with pytest.raises(SystemExit):
            compare(arguments)


def test_what_can_be_known_is_refused_before_training(
    file: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "index.html").write_text("mine")
    assert compare(["run", str(file), "--output", str(out)]) == 2
    assert "index.html was not written by a comparison" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["index.html"]
    for primary, said in (
        ("AP/nothing", "names no class of the data; classes: "),
        ("PQ", "primary must be one of AP,"),
    ):
        wrong = file.with_name("wrong.yaml")
        wrong.write_text(f"{file.read_text()}primary: {primary}\n")
        assert compare(["run", str(wrong), "--output", str(tmp_path / "other")]) == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "other").exists()


def test_a_packaged_experiment_is_found_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(["run", "long_tail_digits", "--print", "--output", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * 5
    assert "balanced_softmax_batchformer/seed_4" in lines[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_whole_experiment_of_classifiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real runs, real statistics: two arms of a small network, four steps each."""
    arguments = ["run", "long_tail_digits", "--quick", "--jobs", "2", "--output", str(tmp_path / "out")]
    assert compare(arguments) == 0
    out = tmp_path / "out-quick"
    document = json.loads((out / "comparison.json").read_text())
    assert document["arms"][0]["name"] == "cross_entropy"
    assert document["primary"] == "top1"
    assert {row["key"] for row in document["settings"]} == {"loss.name", "plugins.batchformer.enabled"}
    found = json.loads((out / "runs/cross_entropy/seed_0/evaluation.json").read_text())
    assert document["arms"][0]["metrics"]["top1"]["values"] == [pytest.approx(found["top1"], abs=1e-12)]
    assert "<html" in (out / "index.html").read_text()
    assert "cross_entropy" in capsys.readouterr().out
    first = (out / "comparison.json").read_bytes()
    shutil.copytree(out / "cells", tmp_path / "committed" / "cells")
    assert compare(["report", str(tmp_path / "committed")]) == 0
    assert (tmp_path / "committed" / "comparison.json").read_bytes() == first, "the records alone give the same result"


@pytest.mark.skipif(not BCCD.is_dir(), reason="needs the blood cells of ../shared/data beside the checkout")
@pytest.mark.slow
def test_the_experiment_with_blood_cells(tmp_path: Path) -> None:
    """Every arm, four steps on real photographs of a fold, which are made small."""
    small = ["data.transforms={short_sides: [64], max_size: 96, eval_short_side: 64}", "eval.pictures=0"]
    options = ["--quick", "--jobs", "2", "--output", str(tmp_path / "out")]
    arguments = ["run", "bccd", f"data.root={BCCD}", *small, *options]
    assert compare(arguments) == 0
    out = tmp_path / "out-quick"
    document = json.loads((out / "comparison.json").read_text())
    assert [arm["name"] for arm in document["arms"]] == ["off", "two_stream", "duplicate", "self_only", "mixup"]
    assert [(own["arm"], own["against"]) for own in document["contrasts"]] == [
        ("two_stream", "self_only"),
        ("two_stream", "duplicate"),
    ]
    found = {
        arm["name"]: json.loads((out / f"cells/{arm['name']}/seed_0_fold_0.json").read_text())
        for arm in document["arms"]
    }
    assert {record["cost"]["rows"] for record in found.values()} == {8, 16}
    assert len({json.dumps(record["data"], sort_keys=True) for record in found.values()}) == 1, "one fold for all"
    for arm in document["arms"]:
        evaluated = json.loads((out / f"runs/{arm['name']}/seed_0_fold_0/evaluation.json").read_text())
        assert evaluated["num_images"] == found[arm["name"]]["data"]["val"]["images"] == 74
        for metric in ("AP", "AP50", "APl"):
            assert arm["metrics"][metric]["values"] == [pytest.approx(evaluated[metric], abs=1e-12)]
