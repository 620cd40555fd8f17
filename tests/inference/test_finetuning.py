"""Fine-tuning on a folder from Python: a thin front to the training command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import detr_bf
from detr_bf.assembly.training import RUN_STEPS, resolved, resolved_text
from detr_bf.commands import command_main
from detr_bf.common.errors import InputError
from detr_bf.comparison.experiment import flat_settings, read_experiment
from detr_bf.config import DetectionConfig, load_config, packaged_configs, packaged_experiments
from detr_bf.data.formats import read_folder
from detr_bf.engine import load_checkpoint
from detr_bf.inference import finetuning
from detr_bf.inference.finetuning import (
    MOST_EPOCHS,
    chosen_settings,
    fine_tuning_files,
    folder_splits,
)
from detr_bf.inference.loading import recipe_file
from detr_bf.tasks import task_of
from tests.data.formats.test_coco_and_csv import CORNERS, table, write

Factory = Callable[..., SimpleNamespace]
TINY = """
model:
  hidden_dim: 32
  heads: 2
  encoder_layers: 1
  decoder_layers: 1
  feedforward_dim: 32
  num_queries: 6
  backbone: {name: resnet18, weights: none}
data: {transforms: {short_sides: [64], max_size: 96, eval_short_side: 64}, workers: 0}
"""
SMALL = ["device=cpu", "train.epochs=2", "data.workers=0", "train.ema.enabled=false"]


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "tiny.yaml").write_text(TINY)
    return str(tmp_path / "tiny.yaml")


@pytest.fixture
def photos(coco_folder: Factory, tmp_path: Path) -> Path:
    """Write a folder with the splits train and valid."""
    for name, first in (("train", 1), ("valid", 101)):
        write(tmp_path / "photos", f"{name}/annotations.json", name, coco_folder(name=name, first_image_id=first))
    return tmp_path / "photos"


@pytest.mark.full
def test_it_is_the_command_that_it_logs(
    photos: Path, tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    detector = detr_bf.finetune(photos, model=tiny, output=tmp_path / "run", overrides=SMALL)
    assert {"best.pt", "last.pt", "report.html", "evaluation.json"} <= {
        each.name for each in (tmp_path / "run").iterdir()
    }
    found = detector(photos / "valid" / "0101.png", 0)
    assert 0 < len(found) <= 6
    assert set(found.names) <= {"class3", "class7", "class90"}
    (logged,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("same as: ")]
    program, command, *arguments = shlex.split(logged.removeprefix("same as: "))
    assert (program, command) == ("detr-bf", "train")
    assert command_main("train")([*arguments, f"output_dir={tmp_path / 'again'}"]) == 0
    first, second = (load_checkpoint(tmp_path / name / "last.pt").model for name in ("run", "again"))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_run_is_continued_or_refused(photos: Path, tiny: str, tmp_path: Path) -> None:
    detr_bf.finetune(photos, model=tiny, output=tmp_path / "run", overrides=[*SMALL, "train.max_steps=1"])
    with pytest.raises(InputError, match="run"):
        detr_bf.finetune(photos, model=tiny, output=tmp_path / "run", overrides=SMALL)
    detr_bf.finetune(photos, model=tiny, output=tmp_path / "run", overrides=SMALL, resume=True)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in records if each["kind"] == "val"] == [1, 2]
    started = ["train.max_steps=1", *SMALL]
    detr_bf.finetune(photos, model=tiny, output=tmp_path / "more", init_from=tmp_path / "run", overrides=started)


def test_ranks_wait_as_long_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(
        finetuning.distributed, "process_group", lambda device, timeout: nullcontext(waits.append(timeout))
    )
    files, _ = fine_tuning_files("detr_r50")
    finetuning._start("detr_r50", files, ["train.timeout_minutes=90", "init_from=null"], resume=False)
    assert waits == [90]


def config_of(root: Path, *settings: str) -> DetectionConfig:
    files = [recipe_file("deformable_detr_r50_refine"), packaged_configs()["finetune"]]
    return load_config(files, [f"data.root={root}", *settings], task="detection")


def test_length_follows_the_folder(tmp_path: Path) -> None:
    single = table(tmp_path / "single", CORNERS)
    assert folder_splits(config_of(single)) == ["data.val_fraction=0.2"]
    assert chosen_for(single, "data.val_fraction=0.2")["train.epochs"] == MOST_EPOCHS
    rows = ["file,class,x,y,w,h", *(f"{number}.jpg,dog,1,2,3,4" for number in range(1000))]
    for number in range(1000):
        (single / f"{number}.jpg").write_bytes((single / "a.jpg").read_bytes())
    (single / "labels.csv").write_text("\n".join(rows))
    read_folder.cache_clear()
    epochs = -(-RUN_STEPS // -(-0.8 * 1003 // 4))
    expected = {"train.epochs": epochs}
    assert chosen_for(single, "data.val_fraction=0.2") == expected
    strong = {**expected, "data.plain_last_epochs": epochs // 10}
    assert chosen_for(single, "data.val_fraction=0.2", augment="strong") == strong
    chosen = chosen_for(single, "data.folds=2", "train.batch_size=2")
    assert chosen["train.epochs"] == -(-RUN_STEPS // -(-1003 // 4))
    assert chosen_for(single, "data.folds=2", "train.epochs=2") == {}


def chosen_for(root: Path, *given: str, augment: str | None = None) -> dict[str, float]:
    """Return the settings that are chosen for Deformable DETR, without those of the splits."""
    files = [recipe_file("deformable_detr_r50_refine"), packaged_configs()["finetune"]]
    _, settings = chosen_settings(files, [f"data.root={root}", *given], augment)
    pairs = [setting.split("=") for setting in settings]
    return {name: float(value) for name, value in pairs if not name.startswith("data.") or "last" in name}


@pytest.mark.parametrize(
    ("model", "steps", "given", "expected"),
    [
        ("rtdetr_r50", 3000, (), {"warmup_steps": 100, "decay": 0.998, "lr": 4e-4, "backbone_lr": 4e-5}),
        ("rtdetrv2_r18", 750, (), {"warmup_steps": 75, "decay": 0.992, "lr": 8e-4}),  # its backbone has 1e-4
        ("rtdetr_r50", 100, (), {"warmup_steps": 10, "decay": 0.94, "lr": 2e-3, "backbone_lr": 2e-4}),
        # the recipe's rate is larger
        ("rtdetr_r50", 100_000, (), {"warmup_steps": 100, "decay": 0.9997, "lr": 1e-4, "backbone_lr": 1e-5}),
        ("rtdetr_r50", 1, (), {"warmup_steps": 0, "decay": 0.0, "lr": 2e-3, "backbone_lr": 2e-4}),
        ("rtdetr_r50", 750, ("optimizer.lr=3e-3",), {"warmup_steps": 75, "decay": 0.992, "backbone_lr": 3e-4}),
        (
            "rtdetr_r50",
            750,
            ("init_from=a.pth",),
            {"warmup_steps": 75, "decay": 0.992, "lr": 1e-4, "backbone_lr": 1e-5},
        ),
        ("rtdetr_r50", 750, ("train.ema.decay=0.9",), {"warmup_steps": 75, "lr": 8e-4, "backbone_lr": 8e-5}),
        ("dfine_s", 750, (), {"warmup_steps": 75, "decay": 0.992, "lr": 8e-4, "backbone_lr": 8e-5}),
        ("dfine_s", 750, ("init_from=a.pth",), {"warmup_steps": 75, "decay": 0.992, "lr": 1e-4, "backbone_lr": 1e-5}),
        (
            "rtdetr_r50",
            1,
            ("init_from=a.pth", "freeze.lora=8"),
            {"warmup_steps": 0, "decay": 0.0, "lr": 1e-3, "backbone_lr": 1e-4},
        ),
        ("dino_r50_4scale", 750, (), {"warmup_steps": 75, "decay": 0.992}),
        (
            "dino_r50_4scale",
            750,
            ("optimizer.schedule=step", "train.epochs=12"),
            {"warmup_steps": 75, "decay": 0.992, "drop_epochs": [10]},
        ),
    ],
)
def test_settings_follow_the_number_of_steps(
    model: str, steps: int, given: tuple[str, ...], expected: dict[str, float]
) -> None:
    """Whatever the length was when they were written to a config."""
    files = [recipe_file(model), packaged_configs()["finetune"]]
    rates = finetuning._rates(load_config(files, task="detection"))
    config = load_config(files, [*(f"{name}={value}" for name, value in rates.items()), *given], task="detection")
    chosen = dict(each.split("=") for each in resolved_text(config, steps).split())
    assert {name.split(".")[-1]: json.loads(value) for name, value in chosen.items()} == expected
    numbers = load_config(files, [*given, *(f"{name}={value}" for name, value in chosen.items())], task="detection")
    assert flat_settings(resolved(config, steps)).items() >= {name: json.loads(x) for name, x in chosen.items()}.items()
    assert resolved_text(numbers, 1) == ""


def test_other_detectors_have_no_rate_by_the_number_of_steps() -> None:
    config = load_config([recipe_file("dino_r50_4scale")], ["optimizer.lr=auto"], task="detection")
    with pytest.raises(InputError, match=r"optimizer\.lr=auto is known for RT-DETR and D-FINE only: give a number"):
        task_of(config).check_settings()


@pytest.mark.parametrize(
    ("given", "epochs", "expected"),
    [(None, 11, "light"), (None, 10, "none"), (None, 1, "none"), ("none", 20, "none"), ("strong", 10, "strong")],
)
def test_augmentation_follows_the_length(
    given: str | None,
    epochs: int,
    expected: str,
    photos: Path,
    tiny: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs: list[DetectionConfig] = []
    monkeypatch.setattr(finetuning, "train", lambda task, resume_if_possible: runs.append(task.config))
    monkeypatch.setattr(finetuning, "load", lambda folder, device: None)
    overrides = ["data.augment.iou_crop=0.9", f"train.epochs={epochs}"]
    detr_bf.finetune(photos, model=tiny, output=tmp_path / "run", augment=given, overrides=overrides)
    assert f"finetune augment_{expected} " in capsys.readouterr().err
    augment = runs[0].data.augment
    assert augment.iou_crop == 0.9, "settings of the user come last"
    assert (augment.mosaic > 0, augment.photometric_distort > 0) == (expected == "strong", expected != "none")
    assert runs[0].data.plain_last_epochs == (epochs // 10 if expected == "strong" else 0)


def test_a_dry_run_does_everything_up_to_the_first_step(
    photos: Path, tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert detr_bf.finetune(photos, model=tiny, output=tmp_path / "run", overrides=SMALL, dry_run=True) is None
    assert not (tmp_path / "run").exists()
    logged = capsys.readouterr().err
    assert f"a run would be written to {tmp_path / 'run'}" in logged
    [line] = [line for line in logged.splitlines() if line.startswith("same as: ")]
    assert command_main("train")(shlex.split(line.removeprefix("same as: detr-bf train "))) == 0
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="exclude each other"):
        detr_bf.finetune(photos, model=tiny, output=tmp_path / "run", overrides=SMALL, dry_run=True, resume=True)
    assert not (tmp_path / "run").exists()


def test_the_command_names_the_settings_of_a_file(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "data: {transforms: {horizontal_flip: 0.0}}\ntrain: {epochs: 7}\ninit_from: of_the_file.pth\n"
    (tmp_path / "mine.yaml").write_text(text)
    runs: list[DetectionConfig] = []
    monkeypatch.setattr(finetuning, "train", lambda task, resume_if_possible: runs.append(task.config))
    monkeypatch.setattr(finetuning, "load", lambda folder, device: None)
    mine = str(tmp_path / "mine.yaml")
    detr_bf.finetune(photos, model=mine, output=tmp_path / "run", init_from="given.pth")
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("same as: ")]
    arguments = shlex.split(line.removeprefix("same as: detr-bf train "))
    files = [each if each.endswith(".yaml") else packaged_configs()[each] for each in arguments if "=" not in each]
    assert load_config(files, [each for each in arguments if "=" in each]) == runs[0]
    assert (runs[0].train.epochs, runs[0].data.transforms.horizontal_flip) == (7, 0)
    assert runs[0].init_from == "given.pth"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("train", "valid"), ['data.train.split="train"', 'data.val.split="valid"']),
        (("Train", "VAL", "test"), ['data.train.split="Train"', 'data.val.split="VAL"']),
        (("train/cam1", "train/cam2", "val/cam1"), ['data.train.split="train"', 'data.val.split="val"']),
        (("train", "test"), ['data.train.split="train"', "data.val_fraction=0.2"]),
        (("cam1", "cam2"), ["data.val_fraction=0.2"]),
        (("trainval", "test"), None),
        (("val", "other"), None),
    ],
)
def test_splits_follow_the_folder(tmp_path: Path, names: tuple[str, ...], expected: list[str] | None) -> None:
    for name in names:
        table(tmp_path / "data" / name, CORNERS)
    if expected is not None:
        assert folder_splits(config_of(tmp_path / "data")) == expected
        return
    with pytest.raises(InputError, match=r"has no split train; its splits: .*data.train.split=NAME"):
        folder_splits(config_of(tmp_path / "data"))


def test_settings_of_the_user_replace_those_chosen(photos: Path, tiny: str, tmp_path: Path) -> None:
    for name in ("labels.csv", "a.xml"):
        (photos / name).write_text("")  # the form is no longer clear
    chosen = [*SMALL, "train.max_steps=1", "data.folds=2", "data.fold=1", f"output_dir={tmp_path / 'other'}"]
    with pytest.raises(InputError, match=r"give data\.format"):
        detr_bf.finetune(photos, model=tiny, output=tmp_path / "run", overrides=chosen)
    detector = detr_bf.finetune(photos, model=tiny, output=tmp_path / "run", overrides=[*chosen, "data.format=coco"])
    assert detector.device.type == "cpu"
    assert (tmp_path / "other" / "last.pt").is_file()
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_names_that_yaml_would_read_otherwise(
    photos: Path, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photos.rename(tmp_path / "photos #1: a")
    detr_bf.finetune("photos #1: a", model=tiny, output="007", overrides=[*SMALL, "train.max_steps=1"])
    assert (tmp_path / "007" / "last.pt").is_file()


@pytest.mark.parametrize("name", ["detr_r50_bfv2", "dino_r50_4scale", "rtdetr_r50"])
def test_the_preset_is_merged_after_any_recipe(name: str, photos: Path) -> None:
    files = [recipe_file(name), packaged_configs()["finetune"]]
    config = load_config(files, [f"data.root={photos}"], task="detection")
    assert config.train.patience == 15
    assert config.data.root == str(photos)
    assert not config.data.train.images
    assert config.model.name == load_config(recipe_file(name), task="detection").model.name


def test_what_can_be_corrected_is_said_before_training(photos: Path, tiny: str, tmp_path: Path) -> None:
    for arguments, said in (
        ({"data": tmp_path / "missing"}, "does not exist: give data.root"),
        ({"model": "toaster"}, "there is no model 'toaster'"),
        ({"model": "smal"}, "nearest: small"),
        ({"output": ""}, "finetune needs the folder of the run"),
        ({"overrides": ["train.epoch=3"]}, "train.epoch"),
        ({"augment": "some"}, "augment must be one of none, light, strong, or None; got 'some'"),
    ):
        with pytest.raises(InputError, match=said):
            detr_bf.finetune(**{"data": photos, "model": tiny, "output": tmp_path / "run", **arguments})
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["detr_r50_bfv2", "rtdetr_r50", "panoptic_detr_r50_bfv2"])
def test_augmentation_presets_replace_that_of_a_recipe(name: str) -> None:
    """RT-DETR's recipe has augmentation of its own."""
    found = {}
    for preset in finetuning.AUGMENTATION:
        files = [recipe_file(name), packaged_configs()["finetune"], packaged_configs()[f"augment_{preset}"]]
        config = load_config(files, task="detection")
        augment, transforms = config.data.augment, config.data.transforms
        found[preset] = [augment.mosaic, augment.iou_crop, augment.photometric_distort, transforms.horizontal_flip]
        assert augment.copy_paste == config.data.mixup.prob == transforms.random_crop == 0
    assert found["none"] == [0, 0, 0, 0]
    assert found["light"][0] == 0
    assert all(light < strong for light, strong in zip(found["light"][:3], found["strong"][:3], strict=True))


@pytest.mark.default_tier("finetune_bccd")
@pytest.mark.parametrize("name", ["finetune_bccd", "finetune_cards"])
def test_the_experiment_has_the_settings_that_finetune_chooses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arms finetune_* and other_* of docs/results.md against the settings chosen for as many images as the data has."""
    experiment = read_experiment(packaged_experiments()[name])
    images = {"finetune_bccd": 292, "finetune_cards": 296}[name]
    monkeypatch.setattr(finetuning, "_train_images", lambda config: images)
    monkeypatch.setattr(finetuning, "stored_channels", lambda config, names: [])
    for arm, config in experiment.configs.items():
        if arm.startswith("recipe"):
            continue
        given = [f"train.epochs={config.train.epochs}", *experiment.common]
        given += [f"init_from={config.init_from}"] * bool(config.init_from)
        files = [recipe_file("rtdetr_r18"), packaged_configs()["finetune"]]
        augment, chosen = chosen_settings(files, given)
        files.append(packaged_configs()[f"augment_{augment}"])
        expected = load_config(files, [*chosen, *given], task="detection")
        expected = resolved(expected, expected.train.epochs * images // 4)
        found, settings = flat_settings(config), flat_settings(expected)
        unused = {f"data.transforms.{key}" for key in ("short_sides", "max_size", "eval_short_side")}  # square replaces
        unused |= {"optimizer.drop_epochs", "data.skip_unreadable"}  # not read with a cosine; all images can be read
        unused.add("eval.nms")  # the recorded runs are older
        assert {key for key in found if found[key] != settings[key]} <= unused, arm


def test_images_of_coco_files_are_counted_without_a_folder(
    coco_folder: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of the current folder."""
    data = coco_folder(num_images=7, name="elsewhere")
    monkeypatch.chdir(coco_folder(num_images=3, name="here").images)
    settings = [
        f"data.{split}.{key}={getattr(data, key)}" for split in ("train", "val") for key in ("images", "annotations")
    ]
    files, _ = fine_tuning_files("detr_r50")
    _, chosen = chosen_settings(files, ["data.root=''", *settings])
    assert f"train.epochs={MOST_EPOCHS}" in chosen
    assert not [each for each in chosen if each.startswith("data.")]
    config = load_config(files, ["data.root=''", *settings, *chosen])
    assert finetuning._train_images(config) == 7


def test_the_splits_of_a_recipe_are_not_those_of_the_folder(photos: Path) -> None:
    files, own = fine_tuning_files("bccd")
    given = [f"data.root={photos}", *own]
    _, chosen = chosen_settings(files, given)
    assert "data.train.split=null" in chosen or 'data.train.split="train"' in chosen
    data = load_config(files, [*given, *chosen]).data
    assert data.val_fraction or data.val.split
