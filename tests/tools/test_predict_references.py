"""A detector that compares images with references on the command line: training, evaluation, prediction."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import detr_bf
from detr_bf.commands import main
from detr_bf.config import DetectionConfig
from detr_bf.data.samples import build_pairs
from detr_bf.inference.loading import evaluated_run
from tests.data.test_video import HEIGHT, WIDTH, clip
from tests.tools.conftest import TINY

SHARED = Path(__file__).parents[3] / "shared" / "data" / "deeppcb"
SIDE = 64  # of a cut-out, in pixels


def run(command: str, *arguments: object) -> int:
    return main([command, *map(str, arguments)])


def cut_out(folder: Path, split: str, count: int) -> None:
    """Write parts of circuit boards around a defect, half as large, with their templates, as ``split`` of a folder."""
    content = json.loads((SHARED / f"{split}.json").read_text())
    of_images: dict[int, list[dict[str, Any]]] = {}
    for each in content["annotations"]:
        of_images.setdefault(each["image_id"], []).append(each)
    images, objects = [], []
    for image in content["images"][: count * 7 : 7]:
        x, y, width, height = of_images[image["id"]][0]["bbox"]
        left, top = (max(0, min(round(middle) - SIDE, 640 - 2 * SIDE)) for middle in (x + width / 2, y + height / 2))
        name = f"{image['id']}.png"
        for kind, source in (("images", "tested"), ("templates", "templates")):
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
            board = Image.open(SHARED / source / image["file_name" if kind == "images" else "template"]).convert("L")
            part = board.crop((left, top, left + 2 * SIDE, top + 2 * SIDE)).resize((SIDE, SIDE))
            part.save(folder / kind / split / name)
        box = [(x - left) / 2, (y - top) / 2, width / 2, height / 2]
        entry = {"category_id": of_images[image["id"]][0]["category_id"], "area": box[2] * box[3], "iscrowd": 0}
        objects.append({"id": len(objects) + 1, "image_id": image["id"], "bbox": box, **entry})
        template = f"../../templates/{split}/{name}"
        images.append({"id": image["id"], "file_name": name, "width": SIDE, "height": SIDE, "template": template})
    content = {"images": images, "annotations": objects, "categories": content["categories"]}
    (folder / f"{split}.json").write_text(json.dumps(content))


def marked_photographs(folder: Path, split: str, of: Path) -> None:
    """Write the images of the sample data ``pairs`` of a split ``train`` or ``val`` as :func:`cut_out` does."""
    content = json.loads((of / f"{'val' if split == 'test' else split}.json").read_text())
    for image in content["images"]:
        name = Path(image["file_name"]).name
        for kind, key in (("images", "file_name"), ("templates", "template")):
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
            Image.open(of / image[key]).save(folder / kind / split / f"{Path(name).stem}.png")
        image["file_name"] = f"{Path(name).stem}.png"
        image["template"] = f"../../templates/{split}/{image['file_name']}"
    (folder / f"{split}.json").write_text(json.dumps(content))


def trained(folder: Path) -> Path:
    """Train a tiny detector on the splits in a folder: ``run`` in it."""
    tiny = TINY.replace("batch_former: {enabled: true}", "batch_former: {enabled: true, references: true, dropout: 0}")
    tiny = tiny.replace("epochs: 3", "epochs: 1").replace("report: false\n", "")
    paths = "\n".join(
        f"  {name}: {{images: {folder}/images/{split}, annotations: {folder}/{split}.json}}"
        for name, split in (("train", "train"), ("val", "test"))
    )
    tiny = tiny.replace("data:\n", f"data:\n  reference: own\n{paths}\n")
    config = folder / "tiny.yaml"
    config.write_text(f"{tiny}output_dir: {folder / 'run'}\n")
    assert run("train", config, "batch_former.mode=single_stream_inference") == 0
    return folder / "run"


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a tiny detector on sample pairs: ``run``, ``images``, ``templates`` and ``test.json`` in the folder."""
    folder = tmp_path_factory.mktemp("boards")
    samples = build_pairs(folder / "samples", num_train=9, num_val=5, image_size=SIDE)
    for split in ("train", "test"):
        marked_photographs(folder, split, samples)
    trained(folder)
    return folder


def test_circuit_boards(tmp_path: Path) -> None:
    """Train on real pairs of DeepPCB, and predict one."""
    if not SHARED.is_dir():
        pytest.skip("needs the data set deeppcb of ../shared/data beside the checkout")
    for split, count in (("train", 9), ("test", 5)):
        cut_out(tmp_path, split, count)
    detector = trained(tmp_path)
    statistics = json.loads((detector / "data_statistics.json").read_text())
    assert [statistics["splits"][split]["references"]["images"] for split in ("train", "val")] == [9, 5]
    images, references = (tmp_path / kind / "test" for kind in ("images", "templates"))
    assert (
        run("predict", detector, images, "--reference", references, "--output", tmp_path / "out", "--threshold", 0) == 0
    )
    assert len(objects(tmp_path / "out")) == 5


def objects(output: Path) -> dict[str, Any]:
    entries = json.loads((output / "predictions.json").read_text())
    return {"/".join(Path(each["file"]).parts[-2:]): each["objects"] for each in entries}


def test_a_run_shows_its_images_and_is_evaluated(boards: Path, tmp_path: Path) -> None:
    pictures = {path.name for path in (boards / "run" / "pictures").iterdir()}
    assert {"validation.png", "worst.jpg"} <= pictures
    errors = json.loads((boards / "run" / "errors.json").read_text())
    assert {each["file"] for each in errors["worst"]} <= {path.name for path in (boards / "images/test").iterdir()}
    assert errors["worst"]
    report = (boards / "run" / "report.html").read_text()
    assert "Images with the most errors" in report
    trained = json.loads((boards / "run" / "evaluation.json").read_text())
    assert run("evaluate", boards / "run", f"output_dir={tmp_path / 'again'}") == 0
    again = json.loads((tmp_path / "again" / "evaluation.json").read_text())
    assert again["losses"] == pytest.approx(trained["losses"], rel=1e-4)
    found = detr_bf.load(boards / "run", "cpu").evaluate(boards / "test.json", boards / "images" / "test")
    assert found.metrics["AP"] == pytest.approx(trained["AP"], abs=1e-6)


def test_missing_references_of_an_evaluation_are_told(
    boards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((boards / "test.json").read_text())
    for image in content["images"][:2]:
        del image["template"]
    (tmp_path / "some.json").write_text(json.dumps(content))
    for image in content["images"]:
        image.pop("template", None)
    (tmp_path / "none.json").write_text(json.dumps(content))

    def evaluated(name: str, *more: str) -> tuple[int, str]:
        overrides = [f"output_dir={tmp_path / name}", f"data.val.annotations={tmp_path / f'{name}.json'}", *more]
        code = run("evaluate", boards / "run", *overrides)
        return code, capsys.readouterr().err

    code, said = evaluated("some")
    assert (code, said.count("data.val: 2 of 5 images have no reference")) == (0, 1)
    code, said = evaluated("none")
    assert code == 2
    assert "each image needs its own reference, and none is given: give the key template" in said
    code, said = evaluated("none", f"data.val.references={boards / 'templates' / 'test'}")
    assert (code, "have no reference" in said) == (0, False)


def test_another_folder_is_evaluated_with_its_own_references(boards: Path, tmp_path: Path) -> None:
    """The run's data.val.references belong to the images of the run."""
    other = shutil.copytree(boards / "images" / "test", tmp_path / "other" / "valid").parent
    shutil.copy(boards / "test.json", other / "valid" / "_annotations.coco.json")
    checkpoint = torch.load(boards / "run" / "best.pt", weights_only=True)
    checkpoint["config"]["data"]["val"]["references"] = str(tmp_path)
    (tmp_path / "run").mkdir()
    torch.save(checkpoint, tmp_path / "run" / "best.pt")
    for overrides, expected in (
        ([], ("valid", "")),
        (["data.val.references=mine"], ("valid", "mine")),
        (["data.val.split=valid"], ("valid", "")),
        (["data.val.split=valid", "data.val.references=mine"], ("valid", "mine")),
    ):
        config, *_ = evaluated_run(tmp_path / "run", overrides=overrides, folder=other)
        assert isinstance(config, DetectionConfig)
        assert (config.data.val.split, config.data.val.references) == expected, overrides
    for overrides, references in (
        (["data.val.images=new", "data.val.annotations=new.json"], ""),
        (["data.val.images=new", "data.val.references=mine"], "mine"),
        (["data.val.annotations=new.json"], str(tmp_path)),
    ):
        config, *_ = evaluated_run(tmp_path / "run", overrides=overrides)
        assert isinstance(config, DetectionConfig)
        assert config.data.val.references == references, overrides
    config, *_ = evaluated_run(tmp_path / "run")
    assert isinstance(config, DetectionConfig)
    assert config.data.val.references == str(tmp_path)


def test_images_are_predicted_with_the_references_of_their_names(boards: Path, tmp_path: Path) -> None:
    output, images = tmp_path / "out", boards / "images"
    common = ["--output", output, "--threshold", 0, "--device", "cpu"]
    assert run("predict", boards / "run", images, "--reference", boards / "templates", *common) == 0
    found = objects(output)
    assert len(found) == 14
    detector = detr_bf.load(boards / "run", "cpu")
    for path in sorted((images / "test").iterdir()):
        expected = detector(path, 0.0, reference=boards / "templates" / "test" / path.name)
        assert found[f"test/{path.name}"] == json.loads(expected.to_json())["objects"]
        alone = detector(path, 0.0, reference=path)
        assert found[f"test/{path.name}"] != json.loads(alone.to_json())["objects"]
    one = next((images / "test").iterdir())
    template = boards / "templates" / "test" / one.name
    for number, reference in enumerate((template, template.parent)):
        single = tmp_path / f"single{number}"
        assert run("predict", boards / "run", one, "--reference", reference, *["--output", single, *common[2:]]) == 0
        assert objects(single) == {f"test/{one.name}": found[f"test/{one.name}"]}
    tiles = ["--tile", 48, 16, "--format", "jsonl", "--no-save-pictures"]
    assert run("predict", boards / "run", one, "--reference", template, *tiles, *common) == 0
    tiled = json.loads((output / "predictions.jsonl").read_text())["objects"]
    assert tiled == json.loads(detector(one, 0.0, tile=(48, 16), reference=template).to_json())["objects"]


def test_images_without_reference_are_left_out_and_named(
    boards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    templates = shutil.copytree(boards / "templates" / "test", tmp_path / "templates")
    first, second, *_ = sorted(templates.iterdir())
    first.unlink()
    Image.new("RGB", (30, 40)).save(second)
    assert (
        run("predict", boards / "run", boards / "images" / "test", "--reference", templates, "--output", tmp_path) == 1
    )
    said = capsys.readouterr().err
    assert "2 of 5 images or their references cannot be used and were left out:" in said
    assert f"{first.name} has no reference: in {templates} there is no image file {first.stem}, with any suffix" in said
    assert "has 30 x 40 pixels (width x height) and its image 64 x 64" in said
    assert len(objects(tmp_path)) == 3


def wrong(boards: Path) -> list[tuple[list[Any], str]]:
    images, templates = boards / "images" / "test", boards / "templates" / "test"
    one = next(images.iterdir())
    return [
        ([images], "this detector compares each image with its reference"),
        ([images, "--reference", boards / "templates"], "no file has the name of an image"),
        ([images, "--reference", "missing.png"], "missing.png does not exist"),
        ([one, "--reference", boards / "test.json"], "test.json cannot be used"),
        ([images, "--reference", templates, "--output", templates], "predictions.json"),
        (["clip.avi", "--reference", templates], "give one reference image for all frames of a video"),
        (["clip.avi"], "this detector compares each image with its reference"),
    ]


@pytest.mark.parametrize("case", range(7))
def test_wrong_references_leave_no_folder(
    boards: Path, tmp_path: Path, case: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    clip(tmp_path / "clip.avi")
    arguments, said = wrong(boards)[case]
    if "--output" in arguments:
        copied = shutil.copytree(arguments[2], tmp_path / "templates")
        name = sorted(arguments[0].iterdir())[0].stem
        (copied / f"{name}.png").rename(copied / f"0000_{name}.png")
        image = shutil.copy(arguments[0] / f"{name}.png", tmp_path / f"{name}.png")
        arguments, said = (
            [image, "--reference", copied / f"0000_{name}.png", "--output", copied],
            "is an input and would",
        )
    else:
        arguments = [*arguments, "--output", "new"]
    before = set(tmp_path.rglob("*"))
    assert run("predict", boards / "run", *arguments) == 2
    assert said in capsys.readouterr().err
    assert set(tmp_path.rglob("*")) == before


def test_all_frames_of_a_video_have_one_reference(boards: Path, tmp_path: Path) -> None:
    clip(tmp_path / "clip.avi")
    Image.new("RGB", (WIDTH, HEIGHT), (20, 20, 20)).save(tmp_path / "empty.png")
    arguments = [tmp_path / "clip.avi", "--reference", tmp_path / "empty.png", "--threshold", 0, "--every", 5]
    assert run("predict", boards / "run", *arguments, "--output", tmp_path / "out") == 0
    lines = (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    detector = detr_bf.load(boards / "run", "cpu")
    expected = detector.predict_video(tmp_path / "clip.avi", 5, threshold=0.0, reference=tmp_path / "empty.png")
    assert [json.loads(line)["objects"] for line in lines] == [
        json.loads(each.to_json())["objects"] for each in expected
    ]


@pytest.mark.full
def test_the_speed_of_a_detector_with_references_is_measured(boards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("benchmark", boards / "run", "--rounds", 2, "--device", "cpu") == 0
    assert "float32" in capsys.readouterr().out
