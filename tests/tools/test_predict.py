"""Prediction and the files of the user: broken images, folders in use, names, and no files left behind."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO

import detr_bf
from detr_bf.commands import command_main
from detr_bf.common.structures import ClassMap
from detr_bf.data.formats import read_folder
from detr_bf.report import fonts
from tests.tools.test_convert_checkpoint import checkpoint

module: ModuleType = importlib.import_module("detr_bf.commands.predict")
main = command_main("predict")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny untrained detector; its third class has a Chinese name."""
    path = tmp_path_factory.mktemp("weights") / "tiny.pt"
    sizes = ["data.transforms.eval_short_side=32", "data.transforms.max_size=64"]
    made = checkpoint(*sizes, average=False)
    made.class_map.update(ClassMap((3, 7, 90), ("cat", "=1+1\x1b[2J", "猫")).to_dict())
    made.save(path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Write a folder with two images of one name and another."""
    for number, name in enumerate(("a/x.png", "a/y.png", "b/x.png")):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (20 * number, 80, 90)).save(path)
    return tmp_path / "photos"


def predict(weights: Path, output: Path | str, *arguments: object) -> int:
    command = [weights, "--output", output, "--device", "cpu", "--threshold", "0", *arguments]
    return main([str(argument) for argument in command])


def predicted(output: Path) -> list[str]:
    return [entry["file"] for entry in json.loads((output / "predictions.json").read_text())]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_images_of_one_name_have_pictures_of_their_own(weights: Path, photos: Path, tmp_path: Path) -> None:
    assert predict(weights, tmp_path / "out", photos) == 0
    pictures = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert pictures == {"0000_x.png", "0001_y.png", "0002_x.png"}


def test_duplicates_are_left_out_on_request(
    weights: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["eval.nms=0.05", "eval.nms_across_classes=true"]
    options = ["--nms", "0.05", "--nms-across-classes"]
    assert predict(weights, tmp_path / "out", photos, *options) == 0
    written = json.loads((tmp_path / "out" / "predictions.json").read_text())
    few, all_of_them = detr_bf.load(weights, "cpu", settings), detr_bf.load(weights, "cpu")
    for entry in written:
        assert len(entry["objects"]) == len(few(entry["file"], 0.0)) < len(all_of_them(entry["file"], 0.0))
    few.save(tmp_path / "saved")
    assert detr_bf.load(tmp_path / "saved", "cpu").postprocess == few.postprocess
    capsys.readouterr()
    for wrong, message in (
        (["--nms", "7"], "eval.nms must be"),
        (["--nms", "0.5", "--panoptic"], "--panoptic does not use --nms, --threshold"),
    ):
        assert predict(weights, tmp_path / "out", photos, *wrong) == 2
        assert message in capsys.readouterr().err


def test_grey_images_of_16_bits_are_scaled_as_in_training(tmp_path: Path) -> None:
    made = checkpoint("data.transforms.eval_short_side=32", "data.grey_bits=12", average=False)
    made.save(tmp_path / "tiny.pt")
    values = np.random.default_rng(0).integers(0, 256, (30, 40), dtype=np.uint16)  # 8 of 12 bits: a dark image
    Image.fromarray(values).save(tmp_path / "dark.png")
    assert predict(tmp_path / "tiny.pt", tmp_path / "out", tmp_path / "dark.png") == 0
    (found,) = json.loads((tmp_path / "out" / "predictions.json").read_text())
    expected = detr_bf.load(tmp_path / "tiny.pt", "cpu")(tmp_path / "dark.png", 0.0)
    assert found["objects"] == json.loads(expected.to_json())["objects"]


def test_a_broken_image_is_left_out_and_named(
    weights: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "a" / "xx.jpg").write_bytes(b"no image")
    (photos / "c.png").write_bytes(b"")
    (photos / "d.png").symlink_to("nowhere")
    (photos / "e.png").symlink_to("e.png")
    os.mkfifo(photos / "f.png")
    (photos / "g.png").mkdir()
    assert predict(weights, tmp_path / "out", photos) == 1
    printed = capsys.readouterr()
    assert "objects in 3 images" in printed.out
    lines = printed.err.splitlines()
    assert lines[-6] == "5 of 8 images cannot be read and were left out:"
    assert "a/xx.jpg cannot be used" in lines[-5]
    assert "c.png cannot be used" in lines[-4]
    assert "d.png does not exist" in lines[-3]
    assert "e.png cannot be used: it cannot be read: Too many levels of symbolic links" in lines[-2]
    assert "f.png cannot be used: it is a FIFO" in lines[-1]
    assert predicted(tmp_path / "out") == [str(photos / name) for name in ("a/x.png", "a/y.png", "b/x.png")]
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"0000_x.png", "0002_y.png", "0003_x.png"}


BAD = [
    (["broken"], "broken.png cannot be used"),
    (["broken", "broken"], "no image can be read:\n  image file"),
    (["nothing"], "no image files in"),
    (["missing"], "no such file or folder"),
    (["photos", "--threshold", "nan"], "--threshold must be a number from 0 to 1, or 'class'; got nan"),
    (["photos", "--threshold", "7"], "--threshold must be a number from 0 to 1, or 'class'; got 7"),
    (["photos", "--threshold", "much"], "or 'class'; got much"),
    (["photos", "--threshold", "-0.1"], "--threshold must be a number from 0 to 1"),
    (["photos", "--device", "foo"], "device must be auto, cpu, cuda or cuda:N; got 'foo'"),
    (["photos", "--panoptic"], "--panoptic does not use --threshold"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=range(len(BAD)))
def test_bad_input_leaves_no_folder(
    weights: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    (tmp_path / "broken.png").write_text("no image")
    (tmp_path / "nothing").mkdir()
    names = {"broken": tmp_path / "broken.png", "nothing": tmp_path / "nothing", "photos": photos}
    before = set(tmp_path.rglob("*"))
    assert predict(weights, tmp_path / "new" / "out", *[names.get(argument, argument) for argument in arguments]) == 2
    assert said in capsys.readouterr().err
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/proc/a", "--output /proc/a cannot be written"),
        ("/proc/\x1b[2J\n", r"--output /proc/\x1b[2J\n cannot be written"),
        ("/proc/\udcff", r"--output /proc/\udcff cannot be written"),
        ("a\0b", r"--output a\x00b cannot be written"),
        ("n" * 300, "File name too long"),
        ("mine", "mine is a file, not a folder"),
    ],
)
def test_an_output_that_cannot_be_written(
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    said: str,
) -> None:
    """The output is refused before the checkpoint, which is none, is read."""
    monkeypatch.chdir(tmp_path)
    Path("mine").write_text("text")
    before = set(tmp_path.rglob("*"))
    assert predict(photos, name, photos) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: --output ")
    assert said in printed
    assert set(tmp_path.rglob("*")) == before


def test_a_list_of_written_files_that_is_no_file_is_not_waited_for(
    weights: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / module.WRITTEN)
    assert predict(weights, tmp_path / "out", photos) == 2
    assert f"{module.WRITTEN} is a FIFO and would be replaced" in capsys.readouterr().err
    assert (tmp_path / "out" / module.WRITTEN).is_fifo()


@pytest.mark.parametrize(
    ("output", "images"), [(".", "photos"), ("photos", "photos"), (".", "."), ("photos/a", "photos")]
)
def test_the_output_may_hold_the_input(
    weights: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, images: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    for _ in range(2):
        assert predict(weights, output, images) == 0
        assert [Path(file).name for file in predicted(Path(output))] == ["x.png", "y.png", "x.png"]
    assert {name: content for name, content in contents(tmp_path).items() if name in before} == before


@pytest.mark.parametrize("name", ["predictions.json", "0001_y.png"])
def test_a_file_of_the_user_is_not_replaced(
    weights: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    assert predict(weights, tmp_path / "out", photos) == 2
    assert f"{tmp_path / 'out' / name} exists and was not written by this command" in capsys.readouterr().err
    assert contents(tmp_path / "out") == {name: b"mine"}


def test_an_input_is_not_replaced(
    weights: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert predict(weights, out, photos) == 0
    before = contents(out)
    assert predict(weights, out, photos / "a" / "x.png", out / "0000_x.png") == 2
    assert "0000_x.png is an input and would be replaced" in capsys.readouterr().err
    assert contents(out) == before


def test_names_of_files_are_harmless(
    weights: Path, photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    for name in ("a\n0 errors.png", "\x1b]0;owned\x07.png", os.fsdecode(b"caf\xe9.png"), "猫" * 80 + ".png"):
        (photos / "a" / "x.png").rename(folder / name)
        Image.new("RGB", (40, 30)).save(photos / "a" / "x.png")
    (folder / "\x1b[2Jbroken\n.png").write_text("no image")
    assert predict(weights, tmp_path / "out", folder) == 1
    printed = capfd.readouterr()
    assert "\x1b" not in printed.out + printed.err.replace("\x1b[A", "")  # the progress bar moves up a line
    assert r"\x1b[2Jbroken\n.png" in printed.err.splitlines()[-1]
    assert ("pictures show their ids: #90 (猫)" in printed.err) == (fonts._entry_with(frozenset("猫")) is None)
    assert set(predicted(tmp_path / "out")) == {str(file) for file in folder.iterdir() if "broken" not in file.name}
    assert len(list((tmp_path / "out").glob("*.png"))) == 4


@pytest.mark.parametrize("at", ["0001_y.png", "predictions.json"])
def test_a_full_disk(
    weights: Path,
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    def limited(write: Callable[[Path, object], None]) -> Callable[[Path, object], None]:
        def full(path: Path, content: object) -> None:
            if path.name == at:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            write(path, content)

        return full

    for name in ("save_picture", "write_json"):
        monkeypatch.setattr(module, name, limited(getattr(module, name)))
    out = tmp_path / "out"
    assert predict(weights, out, photos) == 2
    assert f"{out / at}: No space left on device; free some space or choose another folder" in capsys.readouterr().err
    assert at not in contents(out)
    monkeypatch.undo()
    (out / at).write_text("mine")
    assert predict(weights, out, photos) == 2, "a file that was planned but never written is not ours"
    assert "exists and was not written by this command" in capsys.readouterr().err


def test_a_folder_without_permission(
    weights: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path, content: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(module, "make_output_folder", denied)
    assert predict(weights, tmp_path / "out", photos) == 2
    assert "Permission denied; change the permissions or choose another folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_predictions_that_the_user_has_changed_are_not_replaced(
    weights: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        assert predict(weights, out, photos) == 0
    (out / "predictions.json").write_text("[]  corrected by hand")
    assert predict(weights, out, photos) == 2
    assert "predictions.json exists and was not written by this command" in capsys.readouterr().err
    assert (out / "predictions.json").read_text() == "[]  corrected by hand"


@pytest.mark.parametrize(
    "claim", ['{"predictions.json": null}', '{"predictions.json": [5, 1]}', '["predictions.json"]']
)
def test_a_list_that_claims_a_file_of_the_user_is_not_believed(
    weights: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], claim: str
) -> None:
    """A killed prediction left a list of files that it was going to write."""
    out = tmp_path / "out"
    out.mkdir()
    (out / module.WRITTEN).write_text(claim)
    (out / "predictions.json").write_text("mine!")
    assert predict(weights, out, photos) == 2
    assert "predictions.json exists and was not written by this command" in capsys.readouterr().err
    assert (out / "predictions.json").read_text() == "mine!"


def test_two_predictions_into_one_folder_list_the_files_of_both(
    weights: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, save, nested = tmp_path / "out", module.save_picture, []

    def meanwhile(path: Path, picture: object) -> None:
        if not nested:
            nested.append(path)
            (out / "9999_z.png").write_bytes(b"another's")
            stamp = module._stamp(out / "9999_z.png")
            (out / module.WRITTEN).write_text(json.dumps({"9999_z.png": stamp}))
        save(path, picture)

    monkeypatch.setattr(module, "save_picture", meanwhile)
    assert predict(weights, out, photos) == 0
    listed = json.loads((out / module.WRITTEN).read_text())
    assert listed.keys() == {path.name for path in out.iterdir()} - {module.WRITTEN}


@pytest.mark.default_tier("coco", "yolo")
@pytest.mark.parametrize("form", ["json", "jsonl", "csv", "coco", "yolo", "labelme"])
def test_formats_hold_the_same_objects(weights: Path, photos: Path, tmp_path: Path, form: str) -> None:
    output = tmp_path / "out"
    assert predict(weights, output, "--format", form, "--no-save-pictures", photos) == 0
    found = list(detr_bf.load(weights, "cpu").predict(photos, threshold=0))
    assert sum(map(len, found)) > 10
    if form == "json":
        assert json.loads((output / "predictions.json").read_text()) == [each.to_dict() for each in found]
    elif form == "jsonl":
        lines = (output / "predictions.jsonl").read_text().splitlines()
        assert lines == [each.to_json() for each in found]
    elif form == "csv":
        rows = [row for each in found for row in each.rows()]
        frame = pd.read_csv(output / "predictions.csv", keep_default_na=False)
        assert frame.equals(pd.DataFrame(rows, columns=list(frame.columns)))
    elif form == "coco":
        content = json.loads((output / "coco.json").read_text())
        assert [image["file_name"] for image in content["images"]] == [each.source for each in found]
        assert [each["score"] for each in content["annotations"]] == [x for each in found for x in each.scores.tolist()]
        assert COCO(output / "coco.json").getAnnIds()
    elif form == "labelme":
        for each in found:
            label = output / "labels" / Path(each.source).relative_to(photos).with_suffix(".json")
            content = json.loads(label.read_text())
            assert (label.parent / content["imagePath"]).resolve() == Path(each.source).resolve()
            assert content == each.to_labelme(content["imagePath"])
    else:
        assert (output / "classes.txt").read_text().splitlines() == list(found[0].class_map.names)
        for each in found:
            label = output / "labels" / Path(each.source).relative_to(photos).with_suffix(".txt")
            assert label.read_text() == each.to_yolo()
        assert (output / "images.txt").read_text().splitlines() == [each.source for each in found]
    suffix = ".txt" if form == "yolo" else ".json"
    names = {"json": "predictions.json", "jsonl": "predictions.jsonl", "csv": "predictions.csv", "coco": "coco.json"}
    own = (
        {names[form]}
        if form in names
        else {
            *(("classes.txt", "images.txt") if form == "yolo" else ()),
            *(f"labels/{Path(each.source).relative_to(photos).with_suffix(suffix)}" for each in found),
        }
    )
    assert set(contents(output)) == {*own, ".detr_bf_predict.json"}
    assert predict(weights, output, "--format", form, "--no-save-pictures", photos) == 0, "own files are replaced"


@pytest.mark.parametrize("layout", ["images/train", "train/images", "images"])
def test_yolo_labels_are_read_as_a_data_set(weights: Path, photos: Path, tmp_path: Path, layout: str) -> None:
    root = tmp_path / "set"
    (root / layout).mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in photos.rglob("*") if path.is_file())):
        shutil.copy(file, root / layout / f"{number}{file.suffix}")
    assert predict(weights, root, "--format", "yolo", "--no-save-pictures", root) == 0
    content = read_folder(root).content
    found = list(detr_bf.load(weights, "cpu").predict(root, threshold=0))
    read = [[x, y, x + w, y + h] for x, y, w, h in (each["bbox"] for each in content.annotations)]
    assert len(read) > 10
    size = torch.tensor([40.0, 30.0, 40.0, 30.0])
    expected = [torch.minimum(box.clamp(0), size).tolist() for one in found for box in one.boxes]
    assert torch.allclose(torch.tensor(read), torch.tensor(expected), atol=1e-3)


def test_images_with_one_yolo_label_file_are_refused(
    weights: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = next(path for path in photos.rglob("*") if path.is_file())
    for name in ("a/1.png", "b/1.png", "c/classes.png"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(one, tmp_path / name)
    command = ("--format", "yolo", "--no-save-pictures")
    assert predict(weights, tmp_path / "out", *command, tmp_path / "a" / "1.png", tmp_path / "b") == 2
    assert "would have the same label file labels/1.txt: give the folder that holds both" in capsys.readouterr().err
    assert predict(weights, tmp_path / "out", *command, tmp_path / "c") == 2
    assert "would be read as the class names" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "c" / "classes.png").unlink()
    assert predict(weights, tmp_path / "new", *command, tmp_path / "a" / "..") == 0
    assert {"labels/a/1.txt", "labels/b/1.txt"} <= set(contents(tmp_path / "new"))


def typed(text: str) -> io.TextIOWrapper:
    """Return standard input with a text."""
    return io.TextIOWrapper(io.BytesIO(text.encode()))


@pytest.mark.parametrize("option", [["--format", "csv"], ["--tile", "9", "2"], ["--half"], ["--no-save-pictures"]])
def test_options_that_would_be_ignored_are_refused(
    weights: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    command = [str(weights), "--output", str(tmp_path / "out"), "--panoptic", *option, str(photos)]
    assert main(command) == 2
    assert f"--panoptic does not use {option[0]}: leave it out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_empty_folder_of_the_user_stays(weights: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "labels").mkdir(parents=True)
    assert predict(weights, tmp_path / "out", photos) == 0
    assert (tmp_path / "out" / "labels").is_dir()


def test_patterns_and_standard_input(
    weights: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(weights, tmp_path / "a", f"{photos}/**/x.png") == 0
    assert predicted(tmp_path / "a") == [str(photos / "a/x.png"), str(photos / "b/x.png")]
    (photos / "notes.txt").write_text("no image")
    assert predict(weights, tmp_path / "e", f"{photos}/**") == 0, "files and folders of files, each once"
    assert predicted(tmp_path / "e") == [str(photos / name) for name in ("a/x.png", "a/y.png", "b/x.png")]
    assert predict(weights, tmp_path / "f", f"{photos.parent}/pho*") == 0
    assert predicted(tmp_path / "f") == predicted(tmp_path / "e")
    monkeypatch.setattr("sys.stdin", typed(f"{photos}/b/x.png\n\n{photos}/a\n"))
    assert predict(weights, tmp_path / "b", "-") == 0
    assert predicted(tmp_path / "b") == [str(photos / name) for name in ("b/x.png", "a/x.png", "a/y.png")]
    (photos / "a[1].png").write_bytes((photos / "a/x.png").read_bytes())
    assert predict(weights, tmp_path / "c", photos / "a[1].png") == 0, "a file whose name looks like a pattern"
    capsys.readouterr()
    assert predict(weights, tmp_path / "d", f"{photos}/*.gif") == 2
    assert "no file matches" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", typed(""))
    assert predict(weights, tmp_path / "d", "-") == 2
    assert "standard input has no file names" in capsys.readouterr().err


def test_parts_and_half_precision(
    weights: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(weights, tmp_path / "a", "--tile", 20, 5, "--half", photos / "a/x.png") == 0
    (entry,) = json.loads((tmp_path / "a" / "predictions.json").read_text())
    expected = detr_bf.load(weights, "cpu")(photos / "a/x.png", 0, tile=(20, 5), half=True)
    assert entry == expected.to_dict()
    assert predict(weights, tmp_path / "b", "--tile", 20, 20, photos) == 2
    assert "tile must be None or (size, overlap)" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
