"""``detr-bf new``: a config that is read back to the settings that fine-tuning chooses, and that trains as written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from detr_bf.commands import main
from detr_bf.config import DetectionConfig, load_config, packaged_configs
from detr_bf.inference.finetuning import chosen_settings
from detr_bf.inference.loading import recipe_file
from tests.tools.conftest import TINY
from tests.tools.test_data_folder import XML

ODD_NAME = "ca\nt # ${oc.env:HOME}: [x]"


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write ten images with Pascal VOC labels of two classes, one of them with an odd name, into an odd folder."""
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    root = tmp_path / 'my "photos" ${x} #1'
    root.mkdir()
    for number in range(10):
        Image.effect_noise((64, 48), 90).convert("RGB").save(root / f"{number:02d}.jpg")
        names = ("dog", ODD_NAME)[: 1 + number % 2]
        objects = "".join(XML[1].format(name=name, x=2 + number) for name in names)
        (root / f"{number:02d}.xml").write_text(XML[0].format(objects=objects))
    return root


def test_the_config_trains_as_written(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    assert main(["new", str(photos), "--model", "tiny.yaml", "--output", "mine.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "\nto learn from: 8 images, 12 boxes of 2 classes" in printed
    assert printed.endswith("wrote mine.yaml; next: detr-bf train mine.yaml --dry-run, then without --dry-run\n")
    head = [line for line in Path("mine.yaml").read_text().splitlines() if line.startswith("#")]
    assert any("Pascal VOC, 10 images" in line for line in head)
    assert any(line.startswith("# Classes, with training boxes: ") and "dog (8)" in line for line in head)
    assert any(line.startswith("# warning few-images: ") for line in head)
    small = ["data.transforms.short_sides=[32]", "data.transforms.max_size=64", "data.transforms.eval_short_side=32"]
    small.append("train.ema.decay=auto")
    run, command = tmp_path / "runs" / "mine", ["train", "mine.yaml", "data.workers=0", "report=true", *small]
    assert main([*command, "train.max_steps=1", "train.epochs=4"]) == 0
    assert (run / "report.html").is_file()
    chosen = "optimizer.warmup_steps=0 train.ema.decay=0.25"  # of 4 epochs with 2 steps, not of those in the file
    assert f"chosen for 8 steps: {chosen}\n" in (run / "log.txt").read_text()
    assert json.loads((run / "machine.json").read_text())["chosen for its steps"] == chosen
    assert load_config(str(run / "config.yaml")).train.ema.decay == "auto"
    assert main([*command, "train.max_steps=2", "train.epochs=6", "--resume"]) == 0
    assert "chosen for 12 steps: optimizer.warmup_steps=1 train.ema.decay=0.5\n" in (run / "log.txt").read_text()


@pytest.mark.parametrize("model", ["deformable_detr_r50_refine", "rtdetr_r50", "detr_r50_bfv2", "rfdetr_nano"])
def test_the_settings_are_those_of_fine_tuning(model: str, photos: Path, tmp_path: Path) -> None:
    assert main(["new", str(photos), "--model", model, "--output", "configs/mine.yaml"]) == 0
    root = json.dumps(str(photos)).replace("${", "\\\\${")
    files, given = [recipe_file(model), packaged_configs()["finetune"]], [f"data.root={root}", "output_dir=runs/mine"]
    augment, chosen = chosen_settings(files, given)
    assert augment == "light"
    expected: DetectionConfig = load_config([*files, packaged_configs()[f"augment_{augment}"]], [*given, *chosen])
    found: DetectionConfig = load_config("configs/mine.yaml")
    assert found == expected
    assert (found.data.root, found.data.val_fraction) == (str(photos), 0.2)
    assert found.train.epochs == 300, "3,000 steps would be more"


def test_a_file_of_the_user_keeps_its_settings(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = "base: b.yaml\ntrain: {epochs: 12, batch_size: 2}\ndata: {transforms: {horizontal_flip: 0.0}, "
    (tmp_path / "b.yaml").write_text(TINY)
    (tmp_path / "o.yaml").write_text(base + 'augment: {mosaic: 0.0}, root: elsewhere}\noutput_dir: "else"\n')
    assert main(["new", str(photos), "--model", "o.yaml", "--output", "a b.yaml"]) == 0
    assert capsys.readouterr().out.endswith(
        "wrote 'a b.yaml'; next: detr-bf train 'a b.yaml' --dry-run, then without --dry-run\n"
    )
    found: DetectionConfig = load_config("a b.yaml")
    assert (found.train.epochs, found.train.batch_size, found.data.root) == (12, 2, str(photos))
    assert (found.data.transforms.horizontal_flip, found.data.augment.mosaic) == (0, 0)
    assert found.data.augment.photometric_distort > 0, "augment_light, which the file does not mention"
    assert found.optimizer.schedule == "cosine"
    assert found.output_dir == "runs/a b"
    assert main(["new", str(photos), "--model", "demo", "--output", "demo.yaml"]) == 0


def test_queries_and_errors_are_those_of_the_data(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "00.xml").write_text(XML[0].format(objects=XML[1].format(name="dog", x=3) * 120))
    for name in ("01.jpg", "02.jpg"):  # more than a tenth of the images
        (photos / name).write_bytes(b"broken")
    assert main(["new", str(photos), "--model", "detr_r50"]) == 1
    printed = capsys.readouterr().out
    assert "file-unreadable" in printed
    [written] = tmp_path.glob("*.yaml")
    assert written.stem == photos.name
    assert load_config(written).model.num_queries in (100, 120), "120 if the image is one of the training images"
    assert "# error file-unreadable: " in written.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["a\0b"], "there is no folder a\\x00b"),
        (["{photos}", "--output", "a\0b.yaml"], "\\x00"),
        (["{photos}", "--output", "mine.txt"], "suffix .yaml"),
        (["{photos}", "--output", "theirs.yaml"], "theirs.yaml exists"),
        (["{photos}", "--model", "deformable_detr_r50_refin"], "nearest: deformable_detr_r50_refine"),
    ],
)
def test_bad_input(
    arguments: list[str], said: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs.yaml").write_text("theirs")
    before = sorted(tmp_path.iterdir())
    assert main(["new", *(each.format(photos=photos) for each in arguments)]) == 2
    assert said in capsys.readouterr().err
    assert sorted(path for path in tmp_path.iterdir() if path.name != "cache") == before
    assert (tmp_path / "theirs.yaml").read_text() == "theirs"
