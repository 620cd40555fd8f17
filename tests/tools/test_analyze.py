"""Analysis of real runs on scikit-learn's digits: tables, figures, and wrong arguments."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from PIL import Image

from detr_bf.analysis.classification import ANALYSES
from detr_bf.commands import command_main
from detr_bf.commands.analyze import run_names, write_table
from detr_bf.common.text import printable
from tools.train_net import main as train_net

analyze = command_main("analyze")

TINY = """task: classification
model: {name: vit_tiny_patch16_224, options: {patch_size: 4, embed_dim: 24, depth: 2, num_heads: 2}}
data:
  name: digits
  per_class: 6
  transforms: {size: 16, crop: none, auto_augment: '', color_jitter: 0.0, erase: 0.0, horizontal_flip: 0.0}
  mix: {probability: 0.0}
  workers: 0
optimizer: {warmup_epochs: 0}
train: {epochs: 1, batch_size: 30}
eval: {batch_size: 100, pictures: 2}
report: false
"""
V2 = ("plugins.batchformer_v2.enabled=true", "plugins.batchformer_v2.layers=[1]", "loss.name=balanced_softmax")
SCALED = (
    "plugins.context_broadcasting.enabled=true",
    "plugins.context_broadcasting.layers=all",
    "plugins.context_broadcasting.scaled=true",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the runs ``batches``, with BatchFormerV2, and ``scales``, with scaled broadcasting, in one folder."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.yaml").write_text(TINY)
    for name, settings in {"batches": V2, "scales": SCALED}.items():
        arguments = ["--config", str(folder / "tiny.yaml"), *settings, f"output_dir={folder / name}"]
        assert train_net(arguments) == 0
    return folder


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.default_tier("attention-entropy", "scale-ratios", "grad-cam", "fgsm")
@pytest.mark.parametrize("name", ANALYSES)
def test_every_analysis_writes_a_table_and_a_picture_of_its_runs(runs: Path, tmp_path: Path, name: str) -> None:
    given = {"scale-ratios": ["scales"], "gradient-influence": ["batches"], "feature-maps": ["batches"]}
    names = given.get(name, ["batches", "scales"])
    sources = [str(runs / run) for run in names]
    size = ["--images", "25", "--batch-size", "10"] if ANALYSES[name].images else []
    assert analyze([name, *sources, "--output", str(tmp_path), *size]) == 0
    rows = table(tmp_path / f"{name}.csv")
    assert list(dict.fromkeys(row["run"] for row in rows)) == names
    with Image.open(tmp_path / f"{name}.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > 400


def test_the_table_of_fgsm_begins_with_the_accuracy_that_the_run_has(runs: Path, tmp_path: Path) -> None:
    arguments = ["fgsm", str(runs / "batches"), "--output", str(tmp_path), "--images", "5000"]
    assert analyze([*arguments, "--epsilons", "0,3", "--format", "svg"]) == 0
    first, last = table(tmp_path / "fgsm.csv")
    with (runs / "batches" / "predictions.csv").open() as file:
        right = [row["class"] == row["predicted"] for row in csv.DictReader(file)]
    assert float(first["accuracy"]) == pytest.approx(sum(right) / len(right), abs=2 / len(right))
    assert int(first["images"]) == len(right)
    assert (float(first["epsilon"]), float(last["epsilon"])) == (0.0, 3 / 255)
    assert "<svg" in (tmp_path / "fgsm.svg").read_text()


def test_gradient_influence_uses_the_classes_and_the_loss_of_the_run(runs: Path, tmp_path: Path) -> None:
    command = ["gradient-influence", str(runs / "batches"), "--images", "20", "--batch-size", "10"]
    for folder, settings in {"own": [], "other": ["loss.name=cross_entropy", "loss.label_smoothing=0.9"]}.items():
        assert analyze([*command, "--output", str(tmp_path / folder), *settings]) == 0
    own, other = (table(tmp_path / folder / "gradient-influence.csv") for folder in ("own", "other"))
    assert {row["training_images"] for row in own} == {"6"}
    assert all(float(row["clean"]) == 0 < float(row["batchformer"]) for row in own)
    assert [row["label"] for row in own] == [row["label"] for row in other]
    assert [row["batchformer"] for row in own] != [row["batchformer"] for row in other]


@pytest.mark.default_tier("grad-cam")
@pytest.mark.parametrize("name", ["grad-cam", "feature-maps", "batch-attention"])
def test_images_are_a_function_of_the_seed(runs: Path, tmp_path: Path, name: str) -> None:
    found = []
    for folder, seed in {"one": [], "two": ["--seed", "0"], "three": ["--seed", "7"]}.items():
        arguments = [name, str(runs / "batches"), "--output", str(tmp_path / folder), "--images", "5", *seed]
        assert analyze(arguments) == 0
        found.append((tmp_path / folder / f"{name}.csv").read_text())
    assert found[0] == found[1] != found[2]
    assert name != "grad-cam" or len(found[0].splitlines()) == 6, "a row for each image"


@pytest.mark.full
def test_training_images_are_those_of_the_run_without_augmentation(runs: Path, tmp_path: Path) -> None:
    command = ["patch-similarity", str(runs / "batches"), "--split", "train", "--images", "1000"]
    for folder, settings in {"one": [], "two": ["data.transforms.erase=1", "data.mix.probability=1"]}.items():
        assert analyze([*command, "--output", str(tmp_path / folder), *settings]) == 0
    one, two = ((tmp_path / folder / "patch-similarity.csv").read_text() for folder in ("one", "two"))
    assert one == two
    classes = ["grad-cam", str(runs / "scales"), "--split", "train", "--images", "1000"]
    assert analyze([*classes, "--output", str(tmp_path)]) == 0
    found = [row["class"] for row in table(tmp_path / "grad-cam.csv")]
    assert {found.count(name) for name in set(found)} == {6}, "data.per_class of the run"
    assert len(found) == 60


def test_runs_are_named_by_folder_and_files_by_folder_and_name(runs: Path, tmp_path: Path) -> None:
    assert list(run_names([runs / "scales", runs / "batches" / "last.pt"])) == ["scales", "batches/last"]
    alike = [tmp_path / "plain" / "seed_0", tmp_path / "scaled" / "seed_0"]
    assert list(run_names(alike)) == ["plain", "scaled"], "the parts of their paths that they do not share"
    assert list(run_names([tmp_path / "a" / "b" / "a", tmp_path / "b" / "a"])) == ["a/b", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scale-ratios", "batches"], "no learned scales"),
        (["feature-maps", "scales"], "no batch attention"),
        (["grad-cam", "scales", "scales"], "the same RUN is given twice"),
        (["fgsm", "scales", "--epsilons", "one"], "--epsilons must be numbers"),
        (["fgsm", "scales", "--images", "0"], "--images must be 1 or more, got 0"),
        (["missing-patches", "scales", "--patch", "3"], "do not fill images of 16 x 16"),
        (["fgsm", "nowhere"], "nowhere"),
        (["fgsm", "scales", "--seed", "-1"], "--seed must be from 0 to 2^63 - 1, got -1"),
        (["scale-ratios", "scales", "--split", "train"], "scale-ratios takes no images: leave out --split"),
        (["scale-ratios", "scales", "--seed", "0"], "scale-ratios takes no images: leave out --seed"),
        (["mini-batch-inference", "scales", "--format", "png"], "without a picture, leave it out"),
        (["batch-attention", "batches", "--split", "train"], "batch-attention takes validation images"),
        (["fgsm", "scales", "data.name=fashion"], "data.name must be one of"),
        (["fgsm", "scales", "--device", "tpu"], "device must be auto, cpu, cuda or cuda:N"),
    ],
)
def test_bad_input_ends_with_code_2_and_writes_nothing(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    given = [str(runs / value) if value in ("batches", "scales", "nowhere") else value for value in arguments]
    assert analyze([*given, "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", ["bmp", "png/../../x.png", "\x1b[2J"])
def test_a_format_is_one_of_a_list(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str) -> None:
    with pytest.raises(SystemExit) as ended:
        analyze(["fgsm", str(runs / "scales"), "--output", str(tmp_path / "out"), "--format", given])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert f"--format: invalid choice: {given!r} (choose from 'svg', 'png', 'pdf')" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["mine", "/proc/a", "a\0b", "taken"])
def test_an_output_that_cannot_be_written_is_told_before_the_runs_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").write_text("text")
    Path("taken/fgsm.csv").mkdir(parents=True)
    Path("run.pt").write_text("no checkpoint")
    before = set(tmp_path.rglob("*"))
    assert analyze(["fgsm", "run.pt", "--output", name]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --output {printable(name)}/fgsm.csv ")
    assert set(tmp_path.rglob("*")) == before


def test_an_error_has_a_line_of_its_own(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also holds while a progress bar is open."""
    command = ["missing-patches", str(runs / "scales"), "--patch", "3", "--output", str(tmp_path / "out")]
    assert analyze(command) == 2
    printed = capsys.readouterr().err
    assert "missing-patches" in printed.split("error:")[0], "the progress bar"
    assert re.search(r"[\r\n]error: patches of 3 x 3", printed)


def test_text_in_the_table_is_no_formula_and_numbers_stay_numbers(tmp_path: Path) -> None:
    rows = [{"run": "=cmd()", "class": "@a\x1b", "value": -1.5, "none": None}]
    write_table(tmp_path / "a.csv", rows)
    assert (tmp_path / "a.csv").read_text() == "run,class,value,none\n'=cmd(),'@a\\x1b,-1.5,\n"
