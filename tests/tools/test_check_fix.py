"""``detr-bf check --fix``: hostile annotations become data without errors, and the given files stay as they are."""

from __future__ import annotations

import copy
import csv
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from detr_bf.commands import main
from detr_bf.config import DetectionConfig, load_config
from detr_bf.data.formats import read_folder, read_split
from tests.hostile import fixtures
from tests.hostile.annotations import BAD, FILES, HERE, ODD, dumps
from tests.tools.conftest import TINY
from tests.tools.test_data_folder import XML

CASES: dict[str, Callable[[dict[str, Any]], Any]] = {**{name: change for name, (change, _) in BAD.items()}, **ODD}
REFUSED = {  # nothing that could be kept is left, or the categories or the unit of the boxes are not known
    "boxes are fractions",
    "boxes are corners",
    "images is null",
    "images is an object",
    "no images",
    "annotations is a string",
    "categories is empty",
    "category is a string",
    "category without id",
    "category id of 70 bits",
    "category id is a fraction",
    "category id twice",
    "only crowds",
    "no annotations",
    "category name is a list",
    "category id is negative",
    "category name is null",  # it is another one than in the other split
    "category name is a number",
    "category name is empty",
}
IN_VAL = ("images is null", "area is NaN", "iscrowd is 'yes'", "file name is a folder", "annotation of no image")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    fixtures.write_split(folder / "train", fixtures.coco())
    fixtures.write_split(folder / "val", fixtures.coco(first=101))
    (folder / "train" / "notes.md").write_text("no image")
    return folder


@pytest.fixture
def config(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    monkeypatch.setenv("DETR_BF_HOME", str(images / "cache"))

    def write(train: str, val: str | None = None) -> Path:
        lines = []
        for name, text in (("train", train), ("val", val or json.dumps(fixtures.coco(first=101)))):
            (tmp_path / f"{name}.json").write_text(text)
            lines.append(f"  {name}: {{images: {images}/{name}/images, annotations: {tmp_path}/{name}.json}}\n")
        path = tmp_path / "config.yaml"
        path.write_text(f"{fixtures.MODEL}data:\n{''.join(lines)}{fixtures.REST}output_dir: {tmp_path / 'run'}\n")
        return path

    return write


def rows(folder: Path) -> list[tuple[str, str, str, str, str]]:
    with (folder / "changes.csv").open(newline="") as file:
        return [(r["split"], r["action"], r["image_id"], r["annotation_id"], r["reason"]) for r in csv.DictReader(file)]


def corrected(folder: Path, split: str = "train") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "annotations" / f"{split}.json").read_text())
    return content


def state(*folders: Path) -> dict[str, str]:
    files = (path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if "cache" not in path.parts}


@pytest.mark.parametrize(("name", "split"), [*((name, "train") for name in CASES), *((name, "val") for name in IN_VAL)])
def test_hostile_annotations_become_clean(
    name: str,
    split: str,
    config: Callable[..., Path],
    images: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = fixtures.coco(first=1 if split == "train" else 101)
    replaced = CASES[name](content)
    text = dumps(replaced if isinstance(replaced, dict) else content).replace(HERE, str(images / "train"))
    path = config(**{"train": json.dumps(fixtures.coco()), split: text})
    before, out = state(images, tmp_path), tmp_path / "fixed"
    code = main(["check", str(path), "--fix", str(out)])
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    assert {key: value for key, value in state(images, tmp_path).items() if not key.startswith(f"{out}/")} == before
    if name in REFUSED:
        assert code == 2
        assert "error: " in printed.err
        assert not out.exists()
        return
    assert code == 0, printed.err
    assert "the corrected data: 0 errors" in printed.out
    assert main(["check", str(path), str(out / "corrected.yaml")]) == 0, capsys.readouterr().out
    assert "\n0 errors, " in f"\n{capsys.readouterr().out}"
    assert main(["check", str(out)]) == 0, "the folder alone"
    kept = len(corrected(out, split)["annotations"])
    assert kept == 3 or any(row[1] == "dropped" for row in rows(out)), "what is missing is listed"
    assert kept >= 1


def test_each_rule(config: Callable[..., Path], images: Path, tmp_path: Path) -> None:
    content = fixtures.coco(count=3)
    box = content["annotations"][0]

    def add(number: int, image: int = 1, **values: Any) -> None:
        content["annotations"].append({**copy.deepcopy(box), "id": number, "image_id": image, **values})

    add(10, bbox=[25, 2, 10, 10], area=100)  # of 32 x 24 pixels: clipped to a width of 7
    add(11, bbox=[40, 2, 10, 10])
    add(12, bbox=[3, 3, 0, 5])
    add(13, category_id=8)
    add(14, iscrowd=5)
    add(15, area="wide", bbox=[2, 2, 9, 9])
    add(16, image=77)
    add(17, bbox=[31, 2, 1.5, 4])  # within the rounding
    content["images"][1]["file_name"] = "C:\\pictures\\0002.png"
    content["images"].append({**content["images"][2], "id": 4})  # 0003.png again
    add(18, image=4, bbox=content["annotations"][2]["bbox"], category_id=content["annotations"][2]["category_id"])
    add(19, image=4, bbox=[1, 1, 5, 5])
    del content["annotations"][-1]["area"]
    Image.new("RGB", (9, 9)).save(images / "train" / "images" / "small.png")
    content["images"].append({"id": 5, "file_name": "small.png", "width": 32, "height": 24})
    add(20, image=5)
    assert main(["check", str(config(json.dumps(content))), "--fix", str(tmp_path / "fixed")]) == 0
    found = corrected(tmp_path / "fixed")
    assert [(image["id"], image["file_name"]) for image in found["images"]] == [
        (1, "images/train/0001.png"),
        (2, "images/train/0002.png"),
        (3, "images/train/0003.png"),
    ]
    kept = {annotation["id"]: annotation for annotation in found["annotations"]}
    assert list(kept) == [1, 2, 3, 10, 15, 17, 19]
    assert kept[1] == box
    assert (kept[10]["bbox"], kept[10]["area"]) == ([25, 2, 7, 10], 70)
    assert "area" not in kept[15]
    assert kept[17]["bbox"] == [31, 2, 1.5, 4]
    assert kept[19]["image_id"] == 3
    listed = {(action, image, annotation): reason for _, action, image, annotation, reason in rows(tmp_path / "fixed")}
    assert listed.keys() == {
        ("changed", "1", "10"),
        *(("dropped", "1", str(number)) for number in (11, 12, 13, 14)),
        ("changed", "1", "15"),
        ("dropped", "77", "16"),
        ("changed", "2", ""),
        ("merged", "4", ""),
        ("dropped", "3", "18"),
        ("dropped", "5", ""),
        ("dropped", "5", "20"),
    }
    assert "outside the image of 32 x 24 pixels" in listed["dropped", "1", "11"]
    assert "32 x 24 pixels (width x height), but the file has 9 x 9 pixels" in listed["dropped", "5", ""]


def test_files_of_paths_of_windows_are_found(config: Callable[..., Path], images: Path, tmp_path: Path) -> None:
    content = fixtures.coco()
    names = [entry["file_name"] for entry in content["images"]]
    for entry in content["images"]:
        entry["file_name"] = "C:\\set\\" + entry["file_name"]
    content["images"][1]["file_name"] = f"D:\\{names[0]}"
    out = tmp_path / "fixed"
    assert main(["check", str(config(json.dumps(content))), "--fix", str(out)]) == 0
    assert [entry["file_name"] for entry in corrected(out)["images"]] == [f"images/train/{names[2]}"]
    dropped = [row for row in rows(out) if row[1] == "dropped" and not row[3]]
    assert [row[2:] for row in dropped] == [
        (str(content["images"][number]["id"]), "", f"there is no such file, and {names[0]} may be that of others")
        for number in (0, 1)
    ]


def test_copies_of_objects_and_categories_become_one(
    config: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A category in another case may be another class, and stays; so does another supercategory."""
    contents = [fixtures.coco(), fixtures.coco(first=101)]
    for content in contents:
        content["categories"] += [
            {"id": 20, "name": "cell"},
            {"id": 21, "name": "cell"},
            {"id": 22, "name": " cell "},
            {"id": 23, "name": "Cell"},
            {"id": 24, "name": "cell", "supercategory": "prison"},
        ]
        box = content["annotations"][0]
        content["annotations"] += [
            {**box, "id": 300 + number, "category_id": category, "bbox": [1 + number // 2, 2, 9, 9]}
            for number, category in enumerate((20, 21, 22, 23, 24, 24))
        ]
    contents[1]["categories"] = [each for each in contents[1]["categories"] if each["id"] != 20]
    contents[1]["annotations"] = [each for each in contents[1]["annotations"] if each["category_id"] != 20]
    assert main(["check", str(config(*map(json.dumps, contents)))]) == 0
    checks = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert ["warning", "train", "class-name-repeated", "1"] in checks
    assert ["warning", "train", "object-repeated", "1"] in checks
    assert main(["check", str(config(*map(json.dumps, contents))), "--fix", str(tmp_path / "fixed")]) == 0
    assert "train: 2 annotations changed, 2 annotations dropped, 2 categories merged; " in capsys.readouterr().out
    for split, ids in (("train", [300, 302, 303, 304]), ("val", [301, 302, 303, 304])):
        found = corrected(tmp_path / "fixed", split)
        categories = [(each["id"], each["name"]) for each in found["categories"]][-3:]
        assert categories == [(20, "cell"), (23, "Cell"), (24, "cell")]
        kept = {each["id"]: each["category_id"] for each in found["annotations"] if each["id"] >= 300}
        assert kept == dict(zip(ids, (20, 20, 23, 24), strict=True))
    reasons = {row[4] for row in rows(tmp_path / "fixed")}
    assert "category 22 (' cell ') is merged with 20" in reasons
    assert "the same image, category and box as another annotation" in reasons


def test_validation_images_leave_the_training_images(config: Callable[..., Path], images: Path, tmp_path: Path) -> None:
    train, val = fixtures.coco(), fixtures.coco(first=101)
    (images / "val" / "images" / "copy.png").write_bytes((images / "train" / "images" / "0002.png").read_bytes())
    val["images"].append({**val["images"][0], "id": 104, "file_name": "copy.png"})
    val["categories"].append({"id": 9, "name": "cow"})
    val["annotations"].append({**val["annotations"][0], "id": 200, "category_id": 9})
    assert main(["check", str(config(json.dumps(train), json.dumps(val))), "--fix", str(tmp_path / "fixed")]) == 0
    assert [image["id"] for image in corrected(tmp_path / "fixed")["images"]] == [1, 3]
    assert [image["id"] for image in corrected(tmp_path / "fixed", "val")["images"]] == [101, 102, 103, 104]
    assert {row[:4] for row in rows(tmp_path / "fixed")} == {
        ("train", "dropped", "2", ""),
        ("train", "dropped", "2", "2"),
        ("val", "dropped", "101", "200"),
    }


def test_a_folder_is_corrected_outside_of_itself(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed command names the config, and the division of the images is that of the run."""
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    root = tmp_path / "it's ${home}"
    fixtures.write_split(root, fixtures.coco(count=6))
    for number in range(1, 7):  # no near-duplicates
        Image.effect_noise((fixtures.WIDTH, fixtures.HEIGHT), 90).save(root / "images" / f"{number:04d}.png")
    (tmp_path / "config.yaml").write_text(f"{fixtures.MODEL}data:{fixtures.REST}")
    command = ["check", str(tmp_path / "config.yaml"), "data.val_fraction=0.34", "seed=3"]
    command.append(f"data.root={json.dumps(str(root).replace('${', chr(92) + '${'))}")
    assert main([*command, "--fix", str(root / "fixed")]) == 2
    assert "is inside of the data" in capsys.readouterr().err
    out = tmp_path / "fixed"
    assert main([*command, "--fix", str(out)]) == 0
    assert f"next: detr-bf train {tmp_path}/config.yaml {out}/corrected.yaml seed=3\n" in capsys.readouterr().out
    config = load_config([tmp_path / "config.yaml", out / "corrected.yaml"])
    assert (config.data.root, config.data.train.split, config.data.val.split) == (str(out), "train", "val")
    assert [len(corrected(out, name)["images"]) for name in ("train", "val")] == [4, 2]
    assert rows(out) == []
    assert main([*command, "--fix", str(out)]) == 2
    assert "give a new or an empty folder" in capsys.readouterr().err
    [annotations] = root.glob("*.json")
    content = json.loads(annotations.read_text())
    del content["annotations"][0]["category_id"]
    annotations.write_text(json.dumps(content))
    read_folder.cache_clear()
    read_split.cache_clear()
    assert main([*command, "--fix", str(tmp_path / "other")]) == 2
    said = capsys.readouterr().err
    assert "annotations[0] has no category_id" in said
    assert "given by data.train.images=DIR and data.train.annotations=FILE" in said


@pytest.mark.parametrize("settings", [(), ("data.val_fraction=0.34",)])
def test_references_stay_with_their_images(
    settings: tuple[str, ...], config: Callable[..., Path], images: Path, tmp_path: Path
) -> None:
    contents = [fixtures.coco(), fixtures.coco(first=101)]
    references = {"train": tmp_path / "plain", "val": tmp_path / "other"}
    if settings:  # copies are divided together
        (tmp_path / "noise").mkdir()
        for image in contents[0]["images"]:
            Image.effect_noise((image["width"], image["height"]), 90).save(tmp_path / "noise" / image["file_name"])
    for folder, content in zip(references.values(), contents, strict=True):
        folder.mkdir()
        for image in content["images"]:
            image["template"] = f"{image['id']}.png"
            Image.effect_noise((image["width"], image["height"]), 90).convert("RGB").save(folder / image["template"])
    contents[0]["annotations"].append({**contents[0]["annotations"][0], "id": 999, "bbox": "wrong"})
    given = [str(config(*map(json.dumps, contents))), "data.reference=own", "batch_former.references=true"]
    given += ["batch_former.mode=single_stream_inference", f"data.train.references={references['train']}"]
    if settings:
        given += ["data.val.images=''", "data.val.annotations=''", f"data.train.images={tmp_path}/noise", *settings]
    else:
        given.append(f"data.val.references={references['val']}")
    assert main(["check", *given, "--fix", str(tmp_path / "fixed")]) == 0
    kept = [each for each in given if not each.startswith(("data.train.", "data.val"))]
    fixed = load_config([kept[0], tmp_path / "fixed" / "corrected.yaml"], kept[1:])
    assert fixed.data.train.references == fixed.data.val.references == ""
    for split in ("train", "val"):
        folder = references["train" if settings else split]
        for image in corrected(tmp_path / "fixed", split)["images"]:
            given = (folder / f"{image['id']}.png").read_bytes()
            assert (tmp_path / "fixed" / image["template"]).read_bytes() == given
    assert main(["check", kept[0], str(tmp_path / "fixed" / "corrected.yaml"), *kept[1:]]) == 0


def test_references_of_one_name_and_those_that_are_not_read_are_kept(
    config: Callable[..., Path], tmp_path: Path
) -> None:
    """Both a.jpg and a.png have a reference with the suffix .png."""
    content, folder = fixtures.coco(), tmp_path / "own"
    folder.mkdir()
    size = (fixtures.WIDTH, fixtures.HEIGHT)
    for number, (image, name) in enumerate(zip(content["images"], ("a.jpg", "a.png", "b.png"), strict=True)):
        image |= {"file_name": name, "template": f"golden{number}.png"}
        for file in (name, image["template"]):
            Image.effect_noise(size, 90).convert("RGB").save(folder / file)
    command = ["check", str(config(json.dumps(content))), f"data.train.images={folder}"]
    assert main([*command, "--fix", str(tmp_path / "fixed")]) == 0
    found = corrected(tmp_path / "fixed")["images"]
    assert [image["template"] for image in found] == [f"references/train/{name}.png" for name in ("a", "_a", "b")]
    for number, image in enumerate(found):
        assert (tmp_path / "fixed" / image["template"]).read_bytes() == (folder / f"golden{number}.png").read_bytes()


@pytest.mark.parametrize(
    "settings",
    [("batch_former.references=true", "data.reference=own"), ("data.reference=none",)],
    ids=["two_stream", "none"],
)
def test_folders_of_references_that_are_not_read_are_kept(
    settings: tuple[str, ...], config: Callable[..., Path], images: Path, tmp_path: Path
) -> None:
    folders = {split: images / split / "images" for split in ("train", "val")}
    given = [str(config(json.dumps(fixtures.coco()))), *settings]
    references = [f"data.{split}.references={folder}" for split, folder in folders.items()]
    assert main(["check", *given, *references, "--fix", str(tmp_path / "fixed")]) == 0
    for split, folder in folders.items():
        for image in corrected(tmp_path / "fixed", split)["images"]:
            given_file = folder / Path(image["file_name"]).name
            assert (tmp_path / "fixed" / image["template"]).read_bytes() == given_file.read_bytes()


@pytest.mark.parametrize("text", [FILES["empty file"], FILES["a list of results"], json.dumps(fixtures.panoptic())])
def test_files_of_another_kind_are_refused(
    text: str, config: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(config(text)), "--fix", str(tmp_path / "fixed")]) == 2
    assert "train.json" in capsys.readouterr().err
    assert not (tmp_path / "fixed").exists()


def test_errors_that_need_a_decision_are_refused(
    config: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    val = fixtures.coco(first=101)
    val["categories"][0]["name"] = "cow"
    assert main(["check", str(config(json.dumps(fixtures.coco()), json.dumps(val))), "--fix", str(tmp_path / "a")]) == 2
    printed = capsys.readouterr().err
    assert "these errors cannot be corrected by --fix; nothing was written" in printed
    assert "class-name-differs" in printed
    assert not (tmp_path / "a").exists()


def labelled(root: Path, form: str, count: int = 12) -> Path:
    """Write photographs of noise with a box each, three of them broken: cut off, text, and empty."""
    root.mkdir()
    entries: dict[str, list[Any]] = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "dog"}]}
    for number in range(count):
        file = root / f"{number:02d}.jpg"
        Image.effect_noise((64, 48), 90).convert("RGB").save(file)
        whole = file.read_bytes()
        file.write_bytes({3: whole[: len(whole) // 2], 5: b"no picture", 8: b""}.get(number, whole))
        if form == "voc":
            file.with_suffix(".xml").write_text(XML[0].format(objects=XML[1].format(name="dog", x=2 + number)))
        elif form == "yolo":
            file.with_suffix(".txt").write_text("0 0.5 0.5 0.25 0.5\n")
        entries["images"].append({"id": number, "file_name": file.name, "width": 64, "height": 48})
        box = {"bbox": [2, 2, 20 + number, 20], "area": 20 * (20 + number), "iscrowd": 0}
        entries["annotations"].append({"id": number, "image_id": number, "category_id": 1, **box})
    if form == "yolo":
        (root / "classes.txt").write_text("dog\n")
    elif form == "coco":
        (root / "instances.json").write_text(json.dumps(entries))
    return root


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return str(tmp_path / "tiny.yaml")


@pytest.mark.default_tier("voc")
@pytest.mark.parametrize("form", ["coco", "voc", "yolo"])
def test_all_commands_read_the_corrected_folder(
    form: str, small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = labelled(tmp_path / "photos", form)
    assert main(["finetune", "photos", "--model", small, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "'detr-bf check photos --fix OUT' writes a folder without these errors" in said
    assert main(["check", "photos", "data.skip_unreadable=0.2"]) == 2
    assert "'detr-bf check photos data.skip_unreadable=0.2 --fix OUT'" in capsys.readouterr().out
    before = state(photos)
    assert main(["check", "photos", "--fix", "fixed"]) == 0
    assert "\nnext: detr-bf finetune fixed\n" in capsys.readouterr().out
    dropped = [row for row in rows(Path("fixed")) if row[1] == "dropped" and not row[3]]
    assert len(dropped) == 3, "the broken photographs"
    photos.rename(tmp_path / "elsewhere")
    one = ["train.max_steps=1", "train.epochs=1", "data.workers=0", "report=false"]
    splits = ["data.train.split=train", "data.val.split=val"]
    for command in (
        ["check", "fixed"],
        ["new", "fixed", "--model", small, "--output", "mine.yaml"],
        ["plan", small, "data.root=fixed"],
        ["finetune", "fixed", "--model", small, "--dry-run"],
        ["train", small, "fixed/corrected.yaml", "output_dir=run", "--dry-run"],
        ["train", small, "data.root=fixed", *splits, "output_dir=run", *one],
        ["evaluate", "run", "fixed", "output_dir=again"],
        ["convert-data", "fixed", "--split", "train", "--output", "as_coco"],
    ):
        assert main(command) == 0, (command, capsys.readouterr())
    found: DetectionConfig = load_config("mine.yaml")
    assert (found.data.train.split, found.data.val.split) == ("train", "val")
    assert state(tmp_path / "elsewhere") == {key.replace("photos", "elsewhere"): each for key, each in before.items()}


def test_names_that_a_folder_cannot_have_are_replaced(
    config: Callable[..., Path], images: Path, tmp_path: Path
) -> None:
    content = fixtures.coco()
    folder = images / "train" / "images"
    (folder / ".hidden.png").write_bytes((folder / "0001.png").read_bytes() + b" ")
    content["images"][0]["file_name"] = ".hidden.png"
    content["images"][1]["file_name"] = str(folder / "0002.png")
    assert main(["check", str(config(json.dumps(content))), "--fix", str(tmp_path / "fixed")]) == 0
    names = [image["file_name"] for image in corrected(tmp_path / "fixed")["images"]]
    assert names == ["images/train/1_hidden.png", "images/train/2_0002.png", "images/train/0003.png"]
    assert main(["check", str(tmp_path / "fixed")]) == 0


def test_images_with_new_names_stay_in_their_group(config: Callable[..., Path], images: Path, tmp_path: Path) -> None:
    content, folder = fixtures.coco(count=5), images / "train" / "images"
    names = ("../cam/a.png", "cam/.b.png", "cam/c.png", str(folder / "0004.png"), "../cam/e.png")
    for number, (image, name) in enumerate(zip(content["images"], names, strict=True), 1):
        (folder / name).parent.mkdir(exist_ok=True)
        Image.effect_noise((fixtures.WIDTH, fixtures.HEIGHT), 80 + number).convert("RGB").save(folder / name)
        image["file_name"] = name
    content["images"][4]["group"] = "mine"
    assert main(["check", str(config(json.dumps(content))), "--fix", str(tmp_path / "fixed")]) == 0
    found = [(image["file_name"], image.get("group")) for image in corrected(tmp_path / "fixed")["images"]]
    assert found == [
        ("images/train/1_a.png", "images/train/../cam"),
        ("images/train/2_b.png", "images/train/cam"),
        ("images/train/cam/c.png", None),
        ("images/train/4_0004.png", str(folder)),
        ("images/train/5_e.png", "mine"),
    ]


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("empty", [True, False], ids=["empty", "missing"])
def test_nothing_is_left_of_an_unfinished_copy(
    fault: BaseException, empty: bool, config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new" / "fixed"
    if empty:
        out.mkdir(parents=True)
    command = ["check", str(config(json.dumps(fixtures.coco()))), "--fix", str(out)]

    def failing(*_: object) -> str:
        assert {each.name for each in out.iterdir()} == {"images", "annotations", "changes.csv"}
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr("detr_bf.tasks.corrected._settings", failing)
        assert main(command) == (2 if isinstance(fault, OSError) else 130)
    assert list(out.iterdir()) == [] if empty else not out.parent.exists()
    assert main(command) == 0


def test_a_file_system_without_links_gets_copies(
    config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refused)
    assert main(["check", str(config(json.dumps(fixtures.coco()))), "--fix", str(tmp_path / "fixed")]) == 0
    assert main(["check", str(tmp_path / "fixed")]) == 0


def test_entries_that_no_coco_file_may_have_name_the_correction(
    config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    content = fixtures.coco()
    del content["annotations"][0]["category_id"]
    assert main(["train", str(config(json.dumps(content)))]) == 2
    said = capsys.readouterr().err
    assert "annotations[0] has no category_id" in said
    assert "'detr-bf check CONFIG --fix OUT' writes a copy without such entries" in said
