"""Training, evaluation and checks of a Pascal VOC folder through the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from detr_bf.assembly.data import data_source
from detr_bf.commands import main
from detr_bf.common.structures import ClassMap
from detr_bf.config import load_config, saved_config
from detr_bf.data.formats import read_folder, read_split
from detr_bf.data.formats.splitting import divided
from detr_bf.engine import RunFolder
from detr_bf.tasks import task_of
from tests.tools.conftest import TINY

XML = (
    "<annotation><size><width>64</width><height>48</height></size>{objects}</annotation>",
    "<object><name>{name}</name><bndbox><xmin>{x}</xmin><ymin>5</ymin><xmax>40</xmax><ymax>30</ymax></bndbox></object>",
)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write twelve images of two classes with XML files beside them, and a config of a tiny detector."""
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    root = tmp_path / "cells"
    root.mkdir()
    for number in range(12):
        Image.effect_noise((64, 48), 90).convert("RGB").save(root / f"{number:02d}.JPG")
        objects = "".join(XML[1].format(name=name, x=2 + number) for name in ("red", "white")[: 1 + number % 2])
        (root / f"{number:02d}.xml").write_text(XML[0].format(objects=objects))
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.replace("data:\n", f"data:\n  root: {root}\n") + f"output_dir: {tmp_path / 'run'}\n")
    return path


def results(folder: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.full
def test_a_run_on_a_fold_is_evaluated_on_the_same_images(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    settings = ["data.folds=3", "train.max_steps=1", "eval.max_detections=3"]
    validated = []
    for fold in range(3):
        target = f"output_dir={run}_{fold}"
        assert main(["train", str(config), *settings, f"data.fold={fold}", f"seed={fold}", target]) == 0
        found = results(Path(f"{run}_{fold}"))
        validated.append({entry["image_id"] for entry in found})
        saved = Path(f"{run}_{fold}") / "config.yaml"
        assert saved_config(saved).data.fold == fold
    assert [len(images) for images in validated] == [4, 4, 4]
    assert set().union(*validated) == set(range(1, 13))
    assert main(["evaluate", f"{run}_2"]) == 0
    assert {entry["image_id"] for entry in results(run.with_name("run_2") / "eval-best")} == validated[2]
    capsys.readouterr()
    assert main(["check", str(config), "data.val_fraction=0.25"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{config.parent / 'cells'}: Pascal VOC, 12 images, splits: none\n")
    assert "\nto learn from: 9 images, " in printed
    assert "train: 9 images" in printed
    assert "val: 3 images" in printed


def test_a_folder_without_a_validation_split_is_refused_before_training(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config)]) == 2
    assert "take the validation images from the training images with data.val_fraction" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.default_tier("data.split_seed=1")
@pytest.mark.parametrize("changed", ["data.split_seed=1", "data.val_fraction=0.5", "new images"])
def test_a_run_is_not_resumed_with_validation_images_that_were_trained_on(
    changed: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", str(config), "data.val_fraction=0.25", "eval.pictures=0"]
    assert main([*command, "train.max_steps=1"]) == 0
    given = [changed]
    if "=" not in changed:
        given, root = [], tmp_path / "cells"
        for number in range(12, 20):
            Image.effect_noise((64, 48), 90).convert("RGB").save(root / f"{number}.JPG")
            objects = XML[1].format(name="white", x=number)
            (root / f"{number}.xml").write_text(XML[0].format(objects=objects))
        read_folder.cache_clear()
        read_split.cache_clear()
        divided.cache_clear()
    capsys.readouterr()
    assert main([*command, *given, "train.max_steps=2", "--resume"]) == 2
    said = capsys.readouterr().err
    assert "validation would use images that were trained on" in said
    assert "another output_dir" in said
    for division, warned in ((given, True), (["data.val_fraction=0.25"], changed == "new images")):
        main(["evaluate", str(tmp_path / "run"), *division])
        assert ("it may have been trained on some of them" in capsys.readouterr().err) == warned


def copied(root: Path, target: Path, folder: str = "") -> Path:
    """Copy half of the images and labels, all below ``folder``."""
    (target / folder).mkdir(parents=True)
    for path in sorted(root.iterdir())[:12]:
        shutil.copy(path, target / folder / path.name)
    return target


@pytest.mark.full
def test_a_run_is_evaluated_on_another_folder(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder may have no splits, or others than those of the run."""
    root, run = tmp_path / "cells", tmp_path / "run"
    assert main(["train", str(config), "data.val_fraction=0.25", "train.max_steps=1"]) == 0
    plain, split = copied(root, tmp_path / "plain"), copied(root, tmp_path / "split", "valid")
    assert main(["evaluate", str(run), str(plain), f"output_dir={tmp_path / 'a'}"]) == 0
    assert 'data.val.split="."' in capsys.readouterr().err
    assert {entry["image_id"] for entry in results(tmp_path / "a")} == set(range(1, 7)), "all images"
    given = [f"data.root={split}", "data.val_fraction=0", "data.val.split=valid"]
    assert main(["evaluate", str(run / "best.pt"), *given]) == 0
    assert len({entry["image_id"] for entry in results(run / "eval-best")}) == 6
    capsys.readouterr()
    assert main(["evaluate", str(run), str(split), f"output_dir={tmp_path / 'b'}"]) == 0
    assert 'data.val.split="valid"' in capsys.readouterr().err
    moved = root.rename(tmp_path / "moved")
    assert main(["evaluate", str(run), f"data.root={moved}", f"output_dir={tmp_path / 'c'}"]) == 0
    own = {entry["image_id"] for entry in results(run)}
    assert {entry["image_id"] for entry in results(tmp_path / "c")} == own, "those of the run, in another place"
    assert main(["evaluate", str(run), str(plain), str(split)]) == 2
    assert "give one folder" in capsys.readouterr().err
    assert main(["evaluate", str(run / "results.json")]) == 2
    assert "For foreign weights give a config after the file" in capsys.readouterr().err


def test_a_run_with_a_split_is_evaluated_on_a_folder_without_one(config: Path, tmp_path: Path) -> None:
    root = tmp_path / "cells"
    for name in ("train", "test"):
        copied(root, tmp_path / "both", name)
    settings = [f"data.root={tmp_path / 'both'}", "data.train.split=train", "data.val.split=test", "train.max_steps=1"]
    assert main(["train", str(config), *settings]) == 0
    assert main(["evaluate", str(tmp_path / "run"), f"data.root={root}", f"output_dir={tmp_path / 'a'}"]) == 0
    assert {entry["image_id"] for entry in results(tmp_path / "a")} == set(range(1, 13))


def test_squares_fill_the_batches_of_an_evaluation(config: Path, tmp_path: Path) -> None:
    for number in range(12):
        Image.effect_noise((64 + number % 4, 48), 90).convert("RGB").save(tmp_path / "cells" / f"{number:02d}.JPG")
    task = task_of(load_config(config, ["data.val_fraction=0.5", "data.transforms.square=32", "eval.batch_size=4"]))
    found = task.build_evaluation(ClassMap((1, 2), ("red", "white")), RunFolder(tmp_path / "out"))
    assert found.loop.num_batches == 2, "6 images of several sizes"


def test_a_folder_and_a_run_are_checked_without_a_recipe(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(tmp_path / "cells")]) == 0
    printed = capsys.readouterr().out
    assert "12 images" in printed
    assert "val: 2 images" in printed
    assert main(["train", str(config), "data.val_fraction=0.25", "train.max_steps=1"]) == 0
    capsys.readouterr()
    assert main(["check", str(tmp_path / "run")]) == 0
    assert "val: 3 images" in capsys.readouterr().out
    assert main(["check", "detr_r50", f"data.root={tmp_path / 'cells'}"]) == 0, "the files of COCO are replaced"
    assert "12 images" in capsys.readouterr().out


def test_fine_tuning_by_one_command(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--model", str(config), "train.epochs=1", "train.max_steps=1", "data.workers=0", "report=true"]
    output = ["--output", str(tmp_path / "tuned")]
    assert main(["finetune", str(tmp_path / "cells"), *output, *small, "--dry-run"]) == 0
    assert f"a run would be written to {tmp_path / 'tuned'}" in capsys.readouterr().out
    assert main(["finetune", str(tmp_path / "cells"), *output, *small]) == 0
    assert "AP " in capsys.readouterr().out
    assert (tmp_path / "tuned" / "report.html").is_file()
    assert main(["finetune", str(tmp_path / "cells"), "demo"]) == 2
    assert "a recipe is given as --model" in capsys.readouterr().err


def test_broken_photographs_are_left_out_of_fine_tuning(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are named, in training and in evaluation, and more than the allowed share of them is an error."""
    root = tmp_path / "cells"
    (root / "03.JPG").write_bytes((root / "03.JPG").read_bytes()[:500])
    small = ["--model", str(config), "train.epochs=1", "train.max_steps=1", "data.workers=0", "eval.pictures=0"]
    assert main(["finetune", str(root), "--output", str(tmp_path / "tuned"), *small, "report=true"]) == 0
    printed = capsys.readouterr()
    assert "  without 1 image that cannot be decoded  report " in printed.out
    assert json.loads((tmp_path / "tuned" / "evaluation.json").read_text())["num_skipped"] == 1
    assert "Left out of the data: 1 image that cannot be decoded." in (tmp_path / "tuned" / "report.html").read_text()
    said = printed.err
    assert f"{root}: 1 of 12 images cannot be decoded and are left out: 03.JPG: it cannot be decoded" in said
    assert "file-skipped" in said
    saved = saved_config(tmp_path / "tuned" / "config.yaml")
    seen = {image["file_name"] for split in ("train", "val") for image in data_source(saved, split).annotations.images}
    assert len(seen) == 11
    assert "03.JPG" not in seen
    assert main(["evaluate", str(tmp_path / "tuned"), str(root), f"output_dir={tmp_path / 'all'}"]) == 0
    assert {entry["image_id"] for entry in results(tmp_path / "all")} == set(range(1, 13)) - {4}
    assert "  without 1 image that cannot be decoded  " in capsys.readouterr().out
    assert json.loads((tmp_path / "all" / "evaluation.json").read_text())["num_skipped"] == 1
    strict = ["data.skip_unreadable=0", f"output_dir={tmp_path / 'strict'}"]
    assert main(["evaluate", str(tmp_path / "tuned"), str(root), *strict]) == 2
    assert "03.JPG" in capsys.readouterr().err
    assert main(["check", str(root)]) == 0
    assert "file-skipped" in capsys.readouterr().out
    assert main(["check", str(root), "data.skip_unreadable=0.05"]) == 2
    assert "file-unreadable" in capsys.readouterr().out
    assert main(["train", str(config), "data.val_fraction=0.25"]) == 2, "a config without the preset allows none"
    assert f"'detr-bf check {root} --fix OUT'" in capsys.readouterr().err
