"""Published weights by name: the table, the cache, and what is built from a downloaded file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import detr_bf
from detr_bf.assembly import build_model
from detr_bf.assembly.training import read_initial_weights
from detr_bf.commands import main
from detr_bf.common.errors import InputError
from detr_bf.config import load_config
from detr_bf.inference.loading import list_models, recipe_config
from detr_bf.interop import published as module
from detr_bf.interop.classes import coco_classes
from detr_bf.interop.published import PublishedWeights, find_weights, get_published, list_weights, published
from detr_bf.interop.weights import under_our_names, write_weights
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
