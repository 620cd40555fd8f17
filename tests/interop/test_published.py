"""Published weights by name: the table, the cache, and what is built from a downloaded file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import detr_bf
from detr_bf.assembly import build_model
from detr_bf.assembly.training import read_initial_weights
from detr_bf.commands import main
from detr_bf.common.errors import InputError
from detr_bf.common.files import file_sha256
from detr_bf.common.structures import ClassMap
from detr_bf.config import DetectionConfig, config_to_yaml, load_config, packaged_configs, saved_config
from detr_bf.inference import finetuning
from detr_bf.inference.finetuning import fine_tuning_files, published_start
from detr_bf.inference.loading import list_models, recipe_config
from detr_bf.interop import published as module
from detr_bf.interop.classes import coco_classes
from detr_bf.interop.published import (
    PublishedWeights,
    find_weights,
    get_published,
    list_weights,
    published,
    published_for,
)
from detr_bf.interop.weights import under_our_names, write_weights
from detr_bf.tasks import task_of
from tests.data.formats.test_coco_and_csv import write
from tests.server import WebServer, web_server

TINY = [
    *("model.hidden_dim=32", "model.heads=2", "model.encoder_layers=1", "model.decoder_layers=2"),
    *("model.feedforward_dim=32", "model.num_queries=6", "model.backbone.name=resnet18"),
    *("data.transforms.eval_short_side=64", "data.transforms.max_size=96"),
]
IMAGE = torch.randint(256, (3, 50, 70), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WebServer]:
    monkeypatch.setattr("detr_bf.interop.downloads.WAIT", 0.0)
    for name in ("http_proxy", "HTTP_PROXY", "DETR_BF_MIRROR", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with web_server() as served:
        yield served


@pytest.fixture
def tiny(server: WebServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Publish a small DETR on the server, in the authors' form: a row for each category id and one for no object."""
    torch.manual_seed(0)
    config = recipe_config("detr_r50", TINY)
    state = build_model(config, 91, pretrained=False).state_dict()
    write_weights(tmp_path / "authors.pth", state, "detr")
    server.files["/tiny.pth"] = (tmp_path / "authors.pth").read_bytes()
    row = PublishedWeights("tiny_detr", "detr_r50", tuple(TINY), "https://page", f"{server.url}/tiny.pth", "mit")
    monkeypatch.setitem(module._TABLE, "tiny_detr", row)
    return tmp_path / "authors.pth"


def test_every_row_has_a_recipe_and_its_own_file() -> None:
    rows = [published(name) for name in list_weights()]
    assert len(rows) > 50
    assert len({row.file for row in rows if row}) == len({row.url or row.name for row in rows if row})
    for row in rows:
        assert row is not None
        assert row.recipe in list_models()
        assert row.url.startswith("https://") or not row.url
        assert set(row.sha256 or "") <= set("0123456789abcdef")
    assert list_weights("detr_r50*") == sorted(
        ["detr_r50", "detr_r50_bfv2", "detr_r50_dc5", "detr_r50_dc5_panoptic", "detr_r50_panoptic"]
    )


def test_names_of_cocos_classes() -> None:
    classes = coco_classes(stuff=True)
    by_id = dict(zip(classes.category_ids, classes.names, strict=True))
    assert (by_id[1], by_id[13], by_id[90], by_id[92], by_id[200]) == (
        *("person", "stop sign", "toothbrush"),
        *("banner", "rug-merged"),
    )
    assert (classes.num_classes, sum(classes.is_thing)) == (133, 80)
    assert coco_classes().names == classes.names[:80]


def test_load_by_name_gives_the_detector_with_cocos_classes(tiny: Path) -> None:
    detector = detr_bf.load("tiny_detr", "cpu")
    found = detector(IMAGE, 0)
    assert detector.class_map == coco_classes()
    assert len(found) == 6
    again = detr_bf.load("tiny_detr", "cpu")
    assert torch.equal(again(IMAGE, 0).boxes, found.boxes)
    config = recipe_config("detr_r50", TINY)
    theirs = build_model(config, 91, pretrained=False)
    theirs.load_state_dict(under_our_names(torch.load(tiny)["model"], "file"))
    head, ours = (model.state_dict()["decoder.heads.classes.0.weight"] for model in (theirs, detector.model))
    assert torch.equal(ours, head[[*coco_classes().category_ids, 91]])


def test_convert_and_predict_by_name(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "tiny_detr", "ours.pth"]) == 0
    expected = under_our_names(torch.load(tiny)["model"], "file")
    written = torch.load("ours.pth")
    assert {name: x.shape for name, x in written.items()} == {name: x.shape for name, x in expected.items()}
    assert all(torch.equal(written[name], x) for name, x in expected.items())
    from detr_bf.report import save_picture

    save_picture(tmp_path / "photo.png", IMAGE)
    arguments = ["tiny_detr", "--output", "out", "--device", "cpu", "--threshold", "0", "photo.png"]
    assert main(["predict", *arguments]) == 0
    assert len(json.loads((tmp_path / "out/predictions.json").read_text())[0]["objects"]) == 6


def test_a_run_starts_from_a_name(tiny: Path) -> None:
    config = load_config(None, ["init_from=tiny_detr"], task="detection")
    found = read_initial_weights(Path(config.init_from or ""))
    expected = under_our_names(torch.load(tiny)["model"], "file")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert load_config(None, ["init_from=hf://me/cats@main"]).init_from == "hf://me/cats@main"
    for address in ("https://host/w.pth", "hf://cats"):
        with pytest.raises(InputError, match=r"init_from must be a path .* or hf://user/name"):
            load_config(None, [f"init_from={address}"])


@pytest.mark.parametrize("by_path", [False, True], ids=["name", "file in the cache"])
def test_rows_of_cocos_classes_are_kept_by_name(by_path: bool, tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file has a row for each category id and does not say the names; classes in any order have those of COCO."""
    given = str(find_weights("tiny_detr")) if by_path else "tiny_detr"
    task = task_of(load_config(None, [*TINY, "model.backbone.weights=none", f"init_from={given}"], task="detection"))
    model = task.build_model(3)
    fresh = {name: value.clone() for name, value in model.state_dict().items()}
    with caplog.at_level(logging.INFO):
        task.initialize(model, ClassMap((4, 5, 9), ("dog", "elk", "person")))
    theirs, ours = under_our_names(torch.load(tiny)["model"], "file"), model.state_dict()
    for name in ("decoder.heads.classes.0.weight", "decoder.heads.classes.0.bias"):
        assert torch.equal(ours[name][[0, 2, 3]], theirs[name][[18, 1, 91]]), "ids of dog and person; no object"
        assert torch.equal(ours[name][1], fresh[name][1])
    assert f"init_from {given}: 2 of 3 classes by name (dog, person), 1 new: elk" in caplog.text


def test_a_file_or_folder_of_that_name_wins(tiny: Path, server: WebServer, tmp_path: Path) -> None:
    (tmp_path / "tiny_detr").mkdir()
    assert find_weights("tiny_detr") == Path("tiny_detr")
    with pytest.raises(InputError, match=r"tiny_detr/last\.pt"):
        detr_bf.load("tiny_detr", "cpu")
    assert server.requests == []


def test_a_mirror_has_the_files_of_the_cache(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETR_BF_MIRROR", f"{server.url}/weights/")
    server.files["/weights/dino_r50_4scale.pth"] = b"by hand elsewhere, here from the mirror"
    row = published("dino_r50_4scale")
    assert row is not None
    assert get_published(row).read_bytes() == server.files["/weights/dino_r50_4scale.pth"]
    server.files["/weights/detr-r50-e632da11.pth"] = b"not the file"
    with pytest.raises(InputError, match=r"expected e632da11\.\.\."):
        find_weights("detr_r50")


def test_another_endpoint_of_the_hub(server: WebServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    server.files["/PekingU/rtdetr_r18vd/resolve/main/model.safetensors"] = b"x"
    path = find_weights("PekingU/rtdetr_r18vd")
    assert path == tmp_path / "home" / "weights" / "PekingU--rtdetr_r18vd.safetensors"


def test_weights_that_must_be_got_by_hand(server: WebServer, tmp_path: Path) -> None:
    wanted = tmp_path / "home" / "weights" / "dino_r50_4scale.pth"
    with pytest.raises(InputError, match=rf"get them from https://github.com/IDEA-Research/DINO .* save .* {wanted}"):
        find_weights("dino_r50_4scale")
    wanted.parent.mkdir(parents=True)
    wanted.write_bytes(b"x")
    assert find_weights("dino_r50_4scale") == wanted


def test_offline_the_error_names_url_and_file(
    server: WebServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    assert main(["convert", "detr_r50", "x.pth"]) == 2
    said = capsys.readouterr().err
    assert "download https://dl.fbaipublicfiles.com/detr/detr-r50-e632da11.pth elsewhere and save it as" in said
    assert "home/weights/detr-r50-e632da11.pth" in said


def test_a_name_that_is_almost_right(server: WebServer) -> None:
    with pytest.raises(InputError, match=r"nearest names: .*detr_r101_dc5"):
        find_weights("detr_r101-dc5")
    assert find_weights("missing.pth") == Path("missing.pth")


def test_the_list_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--weights", "detr_r50", "dino*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["detr_r50", "159", "MB", "apache-2.0", "https://github.com/facebookresearch/detr"]
    assert lines[1].split()[:3] == ["dino_r50_4scale", "by", "hand"]


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("rtdetr_r18", "rtdetr_r18"),
        ("rtdetr_r50_bfv2", "rtdetr_r50"),
        ("detr_r50_bfv2", "detr_r50"),
        ("deformable_detr_r50_refine", "deformable_detr_r50_refine"),
        ("h_deformable_detr_r50", "h_deformable_detr_r50_36ep"),
        ("panoptic_detr_r50_bfv2", "detr_r50_panoptic"),
        ("smca_r50", None),
        ("demo", None),
        ("mine.yaml", None),
    ],
)
def test_the_weights_of_a_recipe(recipe: str, name: str | None) -> None:
    row = published_for(recipe)
    assert (row.name if row else None) == name


@pytest.fixture
def recipe(tiny: Path, tmp_path: Path, coco_folder: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Publish the small DETR as that of a recipe; return the arguments of a command on a folder of photographs."""
    row = published("tiny_detr")
    assert row is not None
    monkeypatch.setitem(module._TABLE, "tiny_detr", replace(row, recipe="tiny_detr", settings=()))
    config = recipe_config("detr_r50", [*TINY, "model.backbone.weights=none"])
    (tmp_path / "tiny_recipe.yaml").write_text(config_to_yaml(config))
    known = {**packaged_configs(), "tiny_detr": tmp_path / "tiny_recipe.yaml"}
    monkeypatch.setattr(finetuning, "packaged_configs", lambda: known)
    write(tmp_path / "photos", "train/annotations.json", "train", coco_folder(name="train"))
    write(tmp_path / "photos", "val/annotations.json", "val", coco_folder(name="val", first_image_id=101))
    return ["photos", "--model", "tiny_detr"]


ONE_STEP = [
    *("train.epochs=1", "train.max_steps=1", "data.workers=0", "report=false", "eval.pictures=0", "device=cpu"),
    *("data.transforms.short_sides=[64]", "data.transforms.max_size=96", "data.transforms.eval_short_side=64"),
]


def test_fine_tuning_starts_from_published_weights(
    recipe: list[str], server: WebServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are named with size and licence in the log and in the config, and fetched once."""
    size = f"{len(server.files['/tiny.pth']) / 1e6:.3g} MB"
    sentence = f"start: the published weights tiny_detr (licence mit, trained on COCO, {size}, from https://page)"
    assert main(["new", *recipe, "--output", "mine.yaml"]) == 0
    assert f"\n{sentence}\n" in capsys.readouterr().out
    written = Path("mine.yaml").read_text()
    assert f"# {sentence}\n" in written
    assert '\ninit_from: "tiny_detr"  # ' in written
    fetched = list(server.requests)
    assert len(fetched) == 2, "a question and the file"
    assert main(["finetune", *recipe, "--output", "run", *ONE_STEP]) == 0
    assert f"{sentence}\n" in capsys.readouterr().err
    config: DetectionConfig = saved_config(Path("run") / "config.yaml")
    assert config.init_from == "tiny_detr"
    assert server.requests == fetched, "the file is in the cache"
    module._TABLE["tiny_detr"].path.write_bytes(b"damaged")
    assert main(["train", "mine.yaml", "--dry-run", *ONE_STEP]) == 2
    assert "It is the copy of published weights: delete it to download it again" in capsys.readouterr().err
    assert server.requests == fetched


FAULTS: dict[str, tuple[Callable[[WebServer], Any], str]] = {
    "no such file": (lambda server: server.files.clear(), "the server answered 404"),
    "cut off": (lambda server: server.cuts.update({"/tiny.pth": [1000] * 9}), "the connection ended after 1,000 of"),
    "another file": (lambda server: server.files.update({"/tiny.pth": b"another"}), "the SHA-256 of what arrived is"),
    "no answer": (lambda server: setattr(server, "delay", 4.0), "no answer within 0.5 s"),
    "an error of the server": (lambda server: server.statuses.update({"/tiny.pth": [503] * 9}), "answered 503"),
    "a login": (lambda server: server.headers.update({"/tiny.pth": {"Content-Type": "text/html"}}), "a web page"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_without_the_weights_training_says_what_it_starts_from(
    name: str, recipe: list[str], server: WebServer, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = file_sha256(tiny)
    monkeypatch.setitem(module._TABLE, "tiny_detr", replace(module._TABLE["tiny_detr"], sha256=digest, megabytes=0.5))
    monkeypatch.setattr(finetuning, "ANSWER_SECONDS", 0.5)
    change, reason = FAULTS[name]
    change(server)
    files, _ = fine_tuning_files("tiny_detr")
    chosen, text = published_start("tiny_detr", files, ["data.root=photos"])
    assert chosen == []
    assert text.startswith(
        "start: random weights and not the published weights tiny_detr (licence mit, trained on COCO)"
    )
    assert reason in text
    target = module._TABLE["tiny_detr"].path
    assert f"To start from them (0.5 MB): 'curl -fL --create-dirs -o {target} {server.url}/tiny.pth'" in text
    assert not module._TABLE["tiny_detr"].path.exists()


def test_a_resumed_run_keeps_its_start(
    recipe: list[str], server: WebServer, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = dict(server.files)
    server.files.clear()
    command = ["finetune", *recipe, "--output", "run", *ONE_STEP]
    assert main(command) == 0
    assert "start: random weights and not the published weights" in capsys.readouterr().err
    server.files.update(whole)
    assert main([*command, "train.max_steps=2", "train.epochs=2", "--resume"]) == 0
    assert "start: " not in capsys.readouterr().err
    assert saved_config(Path("run") / "config.yaml").init_from is None


def test_a_start_that_the_user_chose_stays(recipe: list[str], server: WebServer, tmp_path: Path) -> None:
    files, _ = fine_tuning_files("tiny_detr")
    for given in (["init_from=null"], ["init_from=other.pth"]):
        assert published_start("tiny_detr", files, ["data.root=photos", *given]) == ([], "")
    chosen, text = published_start("tiny_detr", files, ["data.root=photos", "model.hidden_dim=16"])
    assert chosen == []
    assert "because model.hidden_dim may make another detector; init_from=tiny_detr takes what fits" in text
    with pytest.raises(InputError, match="nowhere does not exist"):
        published_start("tiny_detr", files, ["data.root=nowhere"])
    assert server.requests == [], "before a download"
    assert published_start("tiny_detr", files, ["data.root=photos", "model.num_queries=5"])[0] == [
        'init_from="tiny_detr"'
    ]
    (tmp_path / "tiny_detr").mkdir()
    path = module._TABLE["tiny_detr"].path
    assert published_start("tiny_detr", files, ["data.root=photos"])[0] == [f'init_from="{path}"'], "not that folder"


def test_weights_by_hand_are_used_if_they_are_there(server: WebServer, tmp_path: Path) -> None:
    files, _ = fine_tuning_files("dino_r50_4scale")
    chosen, text = published_start("dino_r50_4scale", files, ["data.root=''"])
    assert chosen == []
    assert "get them from https://github.com/IDEA-Research/DINO" in text
    wanted = tmp_path / "home" / "weights" / "dino_r50_4scale.pth"
    wanted.parent.mkdir(parents=True)
    wanted.write_bytes(b"x" * 1500)
    chosen, text = published_start("dino_r50_4scale", files, ["data.root=''"])
    assert chosen == ['init_from="dino_r50_4scale"']
    assert "0.0015 MB" in text
