"""Folders of transformers, written and read, and folders on a Hub that is imitated on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import constants

import detr_bf
from detr_bf.assembly import build_model
from detr_bf.assembly.training import initial_classes, read_initial_weights
from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.config import config_to_dict
from detr_bf.data.transforms import eval_sample
from detr_bf.engine import Checkpoint
from detr_bf.engine.checkpoint import load_fitting
from detr_bf.inference.loading import recipe_config
from detr_bf.interop.classes import coco_classes
from detr_bf.interop.published import find_weights
from detr_bf.interop.transformers_folder import in_order_of, read_transformers_config

TINY = [
    *("model.hidden_dim=32", "model.heads=2", "model.encoder_layers=1", "model.decoder_layers=2"),
    *("model.feedforward_dim=32", "model.num_queries=6", "device=cpu"),
    *("data.transforms.eval_short_side=64", "data.transforms.max_size=96"),
]
CASES = {
    "detr": ("detr_r50_bfv2", ["model.backbone.name=resnet18"]),
    "conditional_detr": ("conditional_detr_r50", ["model.backbone.name=resnet18"]),
    "dab_detr": ("dab_detr_r50", ["model.backbone.name=resnet18", "model.dab.patterns=2"]),
    "deformable_detr": ("deformable_detr_r50_bfv2", ["model.backbone.name=resnet18"]),
    "two_stage": ("deformable_detr_r50_two_stage", ["model.backbone.name=resnet18"]),
    "single_scale": ("deformable_detr_r50_single_scale", ["model.backbone.name=resnet18"]),
    "rtdetr": ("rtdetr_r18_bfv2", []),
    "rtdetrv2": ("rtdetrv2_r18", []),
    "dfine": ("dfine_s_bfv2", []),
    "dfine_n": ("dfine_n", ["model.position_temperature=20"]),
}
IMAGE = torch.randint(256, (3, 50, 70), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    def save(recipe: str, *more: str) -> Path:
        torch.manual_seed(0)
        config = recipe_config(recipe, [*TINY, *more])
        model = build_model(config, 3, pretrained=False)
        classes = ClassMap((3, 7, 18), ("cat", "dog", "bird"))
        Checkpoint(model.state_dict(), classes.to_dict(), config_to_dict(config)).save(tmp_path / "run.pt")
        return tmp_path / "run.pt"

    return save


@pytest.mark.default_tier("rtdetr")
@pytest.mark.parametrize("case", CASES)
def test_a_folder_for_transformers_and_back(case: str, saved: Callable[..., Path], tmp_path: Path) -> None:
    recipe, more = CASES[case]
    detector = detr_bf.load(saved(recipe, *more), "cpu")
    detector.to_huggingface(tmp_path / "theirs")
    assert sorted(path.name for path in (tmp_path / "theirs").iterdir()) == [
        *("config.json", "model.safetensors", "preprocessor_config.json")
    ]
    theirs, report = transformers.AutoModelForObjectDetection.from_pretrained(
        tmp_path / "theirs", output_loading_info=True
    )
    assert not any(report.values()), report
    assert theirs.config.id2label == {0: "cat", 1: "dog", 2: "bird"}
    back = detr_bf.load(tmp_path / "theirs", "cpu")
    assert back.class_map == detector.class_map
    found, expected = back(IMAGE, 0), detector(IMAGE, 0)
    assert len(expected) > 0
    for name in ("boxes", "scores", "labels"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize(("recipe", "more"), [("dfine_n", ()), ("detr_r50", ("model.backbone.name=resnet18",))])
def test_training_starts_from_such_a_folder(
    recipe: str, more: tuple[str, ...], saved: Callable[..., Path], tmp_path: Path
) -> None:
    """Give the folder, and the file in it; transformers' norms of D-FINE's backbone have no counters."""
    folder, detector = tmp_path / "theirs", detr_bf.load(saved(recipe, *more), "cpu")
    detector.to_huggingface(folder)
    for given in (folder, folder / "model.safetensors"):
        assert initial_classes(str(given)) == detector.class_map
        fresh = build_model(recipe_config(recipe, [*TINY, *more]), 3, pretrained=False)
        text = load_fitting(fresh, read_initial_weights(given), str(given))
        assert re.fullmatch(r"init_from \S+: (\d+) of the model's \1 tensors loaded", text), text
        for name, value in detector.model.state_dict().items():
            assert name.endswith("num_batches_tracked") or torch.equal(fresh.state_dict()[name], value)
    Checkpoint({}, ClassMap((0,), ("moose",)).to_dict(), {}).save(folder / "other.pt")
    other = initial_classes(str(folder / "other.pt"))
    assert other is not None
    assert other.names == ("moose",), "the classes of the file, not of the config.json beside it"
    for content in ({}, {"id2label": {}}, {"id2label": {"1" * 5000: "moose"}}):
        (folder / "config.json").write_text(json.dumps({"model_type": "d_fine", **content}))
        assert initial_classes(str(folder)) is None, "no labels"
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"theirs, a folder of transformers, has no file model\.safetensors"):
        initial_classes(str(folder))


def test_category_ids_are_those_of_coco_for_its_classes(saved: Callable[..., Path], tmp_path: Path) -> None:
    detr_bf.load(saved("detr_r50"), "cpu").to_huggingface(tmp_path / "theirs")
    path, coco = tmp_path / "theirs" / "config.json", coco_classes()
    content = json.loads(path.read_text())
    labels = {str(number): name for number, name in enumerate(coco.names)}
    for names, ids, expected in (
        (labels, None, coco.category_ids),
        (labels | {"0": "man"}, None, tuple(range(80))),
        (labels, list(range(80)), tuple(range(80))),
    ):
        path.write_text(json.dumps(content | {"id2label": names, "detr_bf_category_ids": ids}))
        assert read_transformers_config(path.parent)[2].category_ids == expected
    path.write_text(json.dumps(content | {"detr_bf_category_ids": [1, 1, 2]}))
    with pytest.raises(InputError, match="not 3 different ids"):
        read_transformers_config(path.parent)


@pytest.mark.parametrize(
    ("recipe", "key", "value"),
    [
        ("dfine_n", "normalize_before", True),
        ("dfine_n", "eval_idx", 0),
        ("dfine_n", "encode_proj_layers", [0]),
        ("dfine_n", "decoder_offset_scale", 1.0),
        ("rtdetr_r18", "encoder_activation_function", "relu"),
    ],
)
def test_settings_of_transformers_that_are_not_here(
    recipe: str, key: str, value: object, saved: Callable[..., Path], tmp_path: Path
) -> None:
    detr_bf.load(saved(recipe), "cpu").to_huggingface(tmp_path / "theirs")
    edited(**{key: value})(tmp_path / "theirs")
    with pytest.raises(InputError, match=re.escape(f"has the settings {key}={value} of config.json")):
        read_transformers_config(tmp_path / "theirs")


def test_rounded_sides_are_told_because_transformers_rounds_none(
    saved: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = ("model.backbone.name=resnet18", "model.num_queries=4")
    detr_bf.load(saved("detr_r50", *small), "cpu").to_huggingface(tmp_path / "as_published")
    assert "data.transforms.size_divisor" not in caplog.text
    detr_bf.load(saved("detr_r50", *small, "data.transforms.size_divisor=null"), "cpu").to_huggingface(tmp_path / "own")
    assert "does not round resized sides" in caplog.text


def test_preprocessing_is_that_of_our_evaluation(saved: Callable[..., Path], tmp_path: Path) -> None:
    detector = detr_bf.load(saved("detr_r50", "model.backbone.name=resnet18"), "cpu")
    detector.to_huggingface(tmp_path / "theirs")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "theirs")
    theirs = processor(images=IMAGE, return_tensors="pt")["pixel_values"]
    ours, _ = eval_sample(detector.transform, IMAGE, 0)
    mean, std = (torch.tensor(x)[:, None, None] for x in (processor.image_mean, processor.image_std))
    assert theirs.shape[1:] == ours.shape
    torch.testing.assert_close(theirs[0] * std + mean, ours / 255, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("recipe", "more", "message"),
    [
        ("smca_r50", ["model.backbone.name=resnet18"], "smca cannot be written as a folder of transformers"),
        (
            "rfdetr_nano",
            ["model.encoder_layers=0", "model.rfdetr.cross_heads=2"],
            "only detr, .*; detr-bf convert --to hf_rfdetr writes",
        ),
        ("dfine_n", ["model.dfine.selection=pairs"], "has no D-FINE with model.dfine.selection=pairs"),
        ("dfine_n", ["model.dfine.head_activation=silu"], "has no D-FINE with model.dfine.head_activation=silu"),
        ("dfine_n", ["model.dfine.eval_layer=0"], "has no D-FINE with model.dfine.eval_layer=0"),
        ("dfine_n", ["model.dfine.attention_levels=[1]"], "has no D-FINE with model.dfine.attention_levels="),
        ("dfine_n", ["model.dfine.as_released=true"], "as model.dfine.as_released=false does"),
        ("rtdetr_r18", ["model.rtdetr.as_released=true"], "as model.rtdetr.as_released=false does"),
        ("detr_r50", ["model.backbone.name=hgnetv2_b0"], "backbone hgnetv2_b0 cannot .* only ResNets"),
        ("dfine_n", ["model.backbone.name=timm:tf_efficientnet_lite0"], "dfine on timm:tf_efficientnet_lite0 cannot"),
        ("dfine_n", ["model.backbone.name=resnet18"], "dfine on resnet18 cannot .* only on hgnetv2_b0, "),
        ("rtdetr_r18", ["model.backbone.name=hgnetv2_b0"], "rtdetr on hgnetv2_b0 cannot .* only on resnet18vd, "),
        ("detr_r50", ["model.backbone.name=resnet18", "loss.classification=focal"], "no such detector"),
        ("detr_r50", ["model.backbone.name=resnet18", "model.pre_norm=true"], "gives other|no such|has no names"),
        (
            "detr_r50",
            ["model.backbone.dilation=true", "model.backbone.strides=[16]"],
            "with dilation",
        ),
    ],
)
def test_what_transformers_does_not_have(
    recipe: str, more: list[str], message: str, saved: Callable[..., Path], tmp_path: Path
) -> None:
    detector = detr_bf.load(saved(recipe, *more), "cpu")
    with pytest.raises(InputError, match=message):
        detector.to_huggingface(tmp_path / "theirs")
    assert not list((tmp_path / "theirs").glob("*"))


def test_queries_of_equal_score_may_come_in_another_order(saved: Callable[..., Path], tmp_path: Path) -> None:
    """RT-DETR chooses 300 of 1,344 tokens, among them some whose scores differ by the rounding only."""
    more = ["model.num_queries=300", "model.hidden_dim=256", "model.heads=8", "model.feedforward_dim=1024"]
    detector = detr_bf.load(saved("rtdetr_r18", *more), "cpu")
    detector.to_huggingface(tmp_path / "theirs")
    reference, order = (torch.rand(2, 5, 3), torch.rand(2, 5, 4)), torch.tensor([3, 0, 4, 1, 2])
    found = in_order_of(reference, *(part[:, order] + 1e-6 for part in reference))
    for one, other in zip(found, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


def test_a_difference_is_refused(saved: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detector = detr_bf.load(saved("detr_r50", "model.backbone.name=resnet18"), "cpu")
    monkeypatch.setattr("detr_bf.interop.transformers_folder.MEAN", (0.4, 0.4, 0.4))
    with pytest.raises(InputError, match=r"gives other class logits .*largest difference"):
        detector.to_huggingface(tmp_path / "theirs")
    assert not list((tmp_path / "theirs").glob("*"))


def edited(**changes: object) -> Callable[[Path], object]:
    def edit(folder: Path) -> object:
        content = json.loads((folder / "config.json").read_text()) | changes
        return (folder / "config.json").write_text(json.dumps(content))

    return edit


@pytest.mark.default_tier("edit-belongs to another architecture")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edited(model_type="vit"), "holds a model 'vit' of transformers; known are detr, "),
        (edited(d_model="wide"), "transformers cannot read config.json"),
        (edited(encoder_layers=3), "belongs to another architecture"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no file model.safetensors"),
    ],
)
def test_a_damaged_folder(
    damage: Callable[[Path], object], message: str, saved: Callable[..., Path], tmp_path: Path
) -> None:
    detr_bf.load(saved("detr_r50", "model.backbone.name=resnet18"), "cpu").to_huggingface(tmp_path / "theirs")
    damage(tmp_path / "theirs")
    with pytest.raises(InputError, match=message):
        detr_bf.load(tmp_path / "theirs", "cpu")


class Hub:
    """Repositories of an imitated Hugging Face Hub, one version of each."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.refused = False


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    state, commit = Hub(), "0" * 40

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def send(self, status: int, content: bytes = b"{}", **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", commit)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                name = "/".join(parts[2:4])
                if name not in state.files:
                    return self.send(404, b"{}", X_Error_Code="RepoNotFound")
                files = [
                    {"rfilename": file, "path": file, "type": "file", "oid": "0", "size": 1}
                    for file in state.files[name]
                ]
                whole: Any = files if "tree" in parts else {"id": name, "sha": commit, "siblings": files}
                return self.send(200, json.dumps(whole).encode(), Content_Type="application/json")
            content = state.files.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))
            if content is None:
                return self.send(404, b"", X_Error_Code="EntryNotFound")
            return self.send(200, content, ETag=f'"{hashlib.sha256(content).hexdigest()}"')

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length) if length else self.chunks()
            path = self.path.split("?")[0]
            if state.refused:
                return self.send(401, b'{"error": "Invalid token"}')
            if path == "/api/repos/create":
                given = json.loads(body)
                name = f"{given.get('organization') or 'me'}/{given['name']}"
                state.files.setdefault(name, {})
                state.private[name] = bool(given.get("private") or given.get("visibility") == "private")
                return self.send(200, json.dumps({"url": f"{url}/{name}"}).encode())
            if "/preupload/" in path:
                files = [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for f in json.loads(body)["files"]
                ]
                return self.send(200, json.dumps({"files": files}).encode())
            if "/commit/" in path:
                name = "/".join(path.strip("/").split("/")[2:4])
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        state.files[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                answer = {"success": True, "commitOid": commit, "commitUrl": f"{url}/{name}/commit/{commit}"}
                return self.send(200, json.dumps(answer).encode())
            return self.send(200, b'{"errors": [], "warnings": []}')

        def chunks(self) -> bytes:
            parts = []
            if self.headers.get("Transfer-Encoding") == "chunked":
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
            return b"".join(parts)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_detector_goes_to_the_hub_and_comes_back(hub: Hub, saved: Callable[..., Path]) -> None:
    detector = detr_bf.load(saved("detr_r50", "model.backbone.name=resnet18"), "cpu")
    detector.push_to_hub("me/cats", private=True, license="mit")
    assert sorted(hub.files["me/cats"]) == ["README.md", "config.json", "model.safetensors"]
    assert hub.private == {"me/cats": True}
    assert b"# cats" in hub.files["me/cats"]["README.md"]
    for address in ("hf://me/cats", "hf://me/cats@main", Path("hf://me/cats")):
        assert torch.equal(detr_bf.load(address, "cpu")(IMAGE, 0).boxes, detector(IMAGE, 0).boxes)
    assert find_weights("hf://me/cats").name == "model.safetensors"
    with pytest.raises(InputError, match=r"hf://me/dogs cannot be downloaded"):
        detr_bf.load("hf://me/dogs")
    with pytest.raises(InputError, match="expected hf://user/name"):
        detr_bf.load("hf://cats")
    hub.refused = True
    with pytest.raises(InputError, match=r"me/cats cannot be sent .* HF_TOKEN"):
        detector.push_to_hub("me/cats")
