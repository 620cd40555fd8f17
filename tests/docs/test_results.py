"""Numbers of docs/results.md against the committed records of cells."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from detr_bf.commands import main
from detr_bf.comparison.document import analyze
from detr_bf.comparison.experiment import read_experiment
from detr_bf.comparison.page import markdown_table
from detr_bf.comparison.records import ExperimentFolder, collect
from tests.docs.test_pages import ROOT

RECORDS = ROOT / "benchmarks" / "results" / "compare"
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def cells(name: str) -> list[Path]:
    return sorted((RECORDS / name / "cells").glob("*/seed_*.json"))


def done(name: str) -> bool:
    """Return whether one seed or more is complete, so that the page has a table."""
    experiment = read_experiment(ROOT / "configs" / "compare" / f"{name}.yaml")
    return len(cells(name)) >= len(experiment.arms) * len(experiment.folds)


BEGUN = sorted(path.name for path in RECORDS.iterdir())


@pytest.mark.full
def test_the_state_of_every_experiment_is_stated() -> None:
    listed = {}
    for path in (ROOT / "configs" / "compare").glob("*.yaml"):
        if match := re.search(rf"^\| `{path.stem}` \|.*\| (\d+) of (\d+) \|", PAGE, re.MULTILINE):
            listed[path.stem] = [int(number) for number in match.groups()]
            assert listed[path.stem] == [len(cells(path.stem)), len(read_experiment(path).cells())], path.stem
    assert set(BEGUN) <= set(listed)


@pytest.mark.default_tier("bccd")
@pytest.mark.parametrize("name", BEGUN)
def test_means_of_the_tables_are_those_of_the_records(name: str) -> None:
    if not done(name):
        pytest.skip("no seed is complete")
    arguments = collect(ExperimentFolder(RECORDS / name))
    for line in markdown_table(analyze(**arguments | {"resamples": 0})).splitlines():
        if re.match(r"\| \w+ +\| +[\d.]+ \[", line):  # arm and means; the differences need the bootstrap
            start = re.escape("|".join(line.split("|")[:4]))
            assert re.search(rf"^{start}\|", PAGE, re.MULTILINE), line


@pytest.mark.slow
@pytest.mark.parametrize("name", BEGUN)
def test_tables_are_those_of_the_report(name: str) -> None:
    if not done(name):
        pytest.skip("no seed is complete")
    for line in markdown_table(analyze(**collect(ExperimentFolder(RECORDS / name)))).splitlines():
        assert line in PAGE.splitlines(), line


def test_the_choices_of_fine_tuning_are_those_of_the_recorded_runs() -> None:
    """Every row of the table has the AP of one recorded run, whose command has the settings that the row states."""
    runs = json.loads((ROOT / "benchmarks" / "results" / "finetune_choices_cpu.json").read_text())["runs"]
    table = re.findall(r"^\| (\d+) epochs, ([^|]*) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert len(table) == len(runs)
    for run in runs:
        [(epochs, text)] = [row[:2] for row in table if abs(float(row[2]) - 100 * run["AP"]) < 0.051]
        assert int(epochs) == run["epochs"]
        assert "the same" in text or f"{run['lr']:.1e}".replace("e-0", "e-").replace(".0e", "e") in text
        assert ("cards" in text) == bool(run["init_from"])
        assert f"augment_{run['augment']} " in run["command"]
        assert f"train.epochs={run['epochs']} " in run["command"]
        assert epochs == "3" or text.split(", ")[1].startswith(("no ", run["augment"]))


@pytest.mark.default_tier("bccd", "small_data_digits")
@pytest.mark.parametrize("name", BEGUN)
def test_an_experiment_can_be_continued_from_its_committed_cells(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings of today's files and defaults are those of the records, so that no cell is trained again."""
    folder = shutil.copytree(RECORDS / name, tmp_path / name)
    planned = len(read_experiment(ROOT / "configs" / "compare" / f"{name}.yaml").cells())
    root = [] if name == "detectors_digits" else ["data.root=somewhere"]  # those have their own paths
    assert main(["compare", "run", name, *root, "--output", str(folder), "--print"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == planned - len(cells(name))


def test_the_vision_transformers_of_the_guide_are_those_of_the_recorded_runs() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "results" / "bccd_vit_cpu.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "vision_transformers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ViT-Ti[^|]* \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert rows == [(f"{run['AP']:.3f}", f"{run['AP50']:.3f}") for run in recorded["runs"]]
    assert f"a loss of {recorded['pre_training']['loss']:.3f}" in page
