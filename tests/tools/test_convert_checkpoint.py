"""Conversion of checkpoints on the command line, and wrong arguments."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import detr_bf
from detr_bf.assembly import build_model, read_initial_weights
from detr_bf.batchformer import BatchFormerV2
from detr_bf.common.structures import Batch, ClassMap
from detr_bf.config import config_to_dict, load_config
from detr_bf.engine import Checkpoint, load_checkpoint, load_fitting
from detr_bf.interop.classes import COCO_IDS, renumbered
from detr_bf.interop.formats import to_foreign
from detr_bf.interop.weights import read_weights, write_weights
from tests.checkpoints import training
from tests.interop.states import assert_same
from tests.tools.test_train_net import tool

CLASSES = ClassMap((3, 7, 90), ("cat", "dog", "bird"))
SETTINGS = [
    "batch_former.enabled=true",
    *("model.hidden_dim=32", "model.heads=2", "model.encoder_layers=2", "model.decoder_layers=2"),
    *("model.feedforward_dim=32", "model.num_queries=6", "model.backbone.name=resnet18"),
    *("model.backbone.weights=none", "device=cpu"),
]
DEFORMABLE = ["model.name=deformable_detr", "model.backbone.strides=[16,32]", "loss.classification=focal"]
TWO_STAGE = [*DEFORMABLE, "model.deformable.box_refine=true", "model.deformable.two_stage=true"]
MULTI_SCALE = ["model.name=smca_multi_scale", "model.backbone.strides=[8,16,32]", "loss.classification=focal"]


run_tool: Callable[[Sequence[str]], int] = tool("convert_checkpoint").main


def convert(*arguments: object) -> int:
    return run_tool([str(argument) for argument in arguments])


def checkpoint(*changes: str, average: bool = True) -> Checkpoint:
    """Save a checkpoint in the middle of training whose averaged weights differ from the current ones."""
    torch.manual_seed(0)
    config = load_config(None, [*SETTINGS, *changes])
    states = []
    for _ in range(2):
        model = build_model(config, CLASSES.num_classes)
        for name, parameter in model.named_parameters():
            if not name.startswith("backbone."):
                torch.nn.init.normal_(parameter, std=0.2)
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return Checkpoint(
        model=states[0],
        class_map=CLASSES.to_dict(),
        config=config_to_dict(config),
        ema=states[1] if average else None,
        training=training(),
    )


def saved(folder: Path, *changes: str) -> Path:
    path = folder / "ours.pt"
    checkpoint(*changes).save(path)
    return path


@pytest.mark.default_tier(
    "changes0-detr-.pth",
    "changes2-hf_detr-.safetensors",
    "changes6-hf_deformable_detr-.safetensors",
    "changes7-detectron2-.pt",
)
@pytest.mark.parametrize(
    ("changes", "name", "suffix"),
    [
        (["batch_former.layers=[0,1]", "batch_former.shared=false"], "detr", ".pth"),
        (["batch_former.layers=[0,1]", "batch_former.shared=false"], "detr", ".safetensors"),
        (["batch_former.enabled=false"], "hf_detr", ".safetensors"),
        (["batch_former.enabled=false"], "hf_detr", ".bin"),
        (["batch_former.enabled=false"], "hf_detr_no_timm", ".bin"),
        (["batch_former.enabled=false", *TWO_STAGE], "deformable_detr", ".pth"),
        (["batch_former.enabled=false", *DEFORMABLE], "hf_deformable_detr", ".safetensors"),
        (["plugins.context_broadcasting.enabled=true", *TWO_STAGE], "detectron2", ".pt"),
        (["batch_former.layers=[0,1]"], "detectron2_resnet", ".bin"),
        (["batch_former.layers=[1]"], "detr_detectron2", ".pt"),
    ],
)
def test_there_and_back(tmp_path: Path, changes: list[str], name: str, suffix: str) -> None:
    source, foreign, back = saved(tmp_path, *changes), tmp_path / f"foreign{suffix}", tmp_path / f"back{suffix}"
    assert convert(source, foreign, "--to", name) == 0
    content = load_file(foreign) if suffix == ".safetensors" else torch.load(foreign, weights_only=True)
    if suffix != ".safetensors" and not name.startswith("hf_"):
        assert set(content) == {"model"}
        content = content["model"]
    expected = load_checkpoint(source).weights
    assert_same(content, to_foreign(expected, name))
    assert convert(foreign, back) == 0
    assert_same(read_initial_weights(back), expected)


def test_an_official_checkpoint_becomes_initial_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint("batch_former.layers=[1]")
    state = {f"module.{name}": x for name, x in to_foreign(source.model, "detr").items()}
    whole = {"model": state, "optimizer": {"state": {}}, "epoch": 3, "args": argparse.Namespace(lr=1e-4, bf=3)}
    torch.save(whole, tmp_path / "official.pth")
    assert convert(tmp_path / "official.pth", tmp_path / "new" / "ours.pth") == 0
    said = f"{len(source.model)} tensors of {tmp_path / 'official.pth'} written under our names: "
    assert capsys.readouterr().out == f"{said}{tmp_path / 'new' / 'ours.pth'}\n"
    for path in (tmp_path / "official.pth", tmp_path / "new" / "ours.pth"):
        weights = read_initial_weights(path)
        assert_same(weights, source.model)
        model = build_model(load_config(None, [*SETTINGS, "batch_former.layers=[1]"]), CLASSES.num_classes)
        assert "not in the file" not in load_fitting(model, weights, str(path))


def test_a_run_folder_stands_for_its_best_checkpoint(tmp_path: Path) -> None:
    last, best = checkpoint("batch_former.enabled=false"), checkpoint("batch_former.enabled=false", average=False)
    last.save(tmp_path / "last.pt")
    best.save(tmp_path / "best.pt")
    assert convert(tmp_path, tmp_path / "out.safetensors") == 0
    assert_same(load_file(tmp_path / "out.safetensors"), best.model)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint of ours, and files that cannot be converted."""
    root = tmp_path_factory.mktemp("prepared")
    saved(root)
    (root / "folder").mkdir()
    weights = build_model(load_config(None, [*SETTINGS, "batch_former.enabled=false"]), 91).state_dict()
    foreign = to_foreign(weights, "detr")
    foreign["input_proj.weight"].view(-1)[-1] = torch.nan
    torch.save({"model": foreign}, root / "nan.pth")
    torch.save({"query_embed.weight": torch.zeros(2), "a.b": torch.zeros(2)}, root / "unknown.pth")
    torch.save([1, 2], root / "numbers.pth")
    for name in ("garbage.pth", "garbage.safetensors"):
        (root / name).write_bytes(b"anything")
    return root


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.pt", "out.pth"], "file not found: .*nowhere.pt"),
        (["ours.pt", "ours.pt"], "ours.pt is the checkpoint that is read"),
        (["ours.pt", "link.pt"], "link.pt is the checkpoint that is read"),
        (["ours.pt", "folder"], "folder is a folder: name the file to write"),
        (["ours.pt", "out.onnx"], r"must end in one of \.pth, \.pt, \.bin, \.safetensors"),
        (["ours.pt", "ours.pt/out.pth"], "cannot be written"),
        (["ours.pt", "a\0b.pth"], r"target a\\x00b.pth cannot be written \(embedded null byte"),
        (["ours.pt", "n" * 300 + ".pth"], "cannot be written .File name too long"),
        (["ours.pt", "pipe.pth"], "pipe.pth is a FIFO and would be replaced"),
        (["ours.pt", "out.pth", "--to", "yolo"], "no checkpoint format 'yolo'; there are: detr, .*hf_detr"),
        (["ours.pt", "out.pth", "--to", "smca"], "official SMCA"),
        (["ours.pt", "out.pth", "--to", "hf_detr"], r"has no names for these tensors: .*batch_former.*--strip-batch"),
        (["ours.pt", "out.pth", "--to", "huggingface"], "no checkpoint format 'huggingface'; there are: .*hf_detr"),
        (["ours.pt", "out.pth", "--to", "a\nb"], r"no checkpoint format 'a\\nb'; there are"),
        (["https://example.org/a.pth", "out.pth"], "files are not fetched from a URL; download it"),
        (["n" * 300, "out.pth"], "file not found: nnn"),
        (["pipe.pth", "out.pth"], "pipe.pth is a FIFO, expected a file"),
        (["nan.pth", "out.pth"], "nan.pth holds NaN or infinite weights.* in tokens.projections.0.weight"),
        (["nan.pth", "out.pth", "--classes", "contiguous"], "nan.pth holds NaN or infinite weights"),
        (["unknown.pth", "out.pth"], "no known format .*tried: detr, .*closest is detr"),
        (["numbers.pth", "out.pth"], "numbers.pth holds no weights"),
        (["garbage.pth", "out.pth"], "garbage.pth"),
        (["garbage.safetensors", "out.pth"], "garbage.safetensors: not a readable"),
        (["unknown.pth", "out.pth", "--strip-batchformer"], "is not a detr_bf checkpoint"),
    ],
)
def test_bad_input_is_one_message_and_leaves_everything_as_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prepared: Path,
    arguments: list[str],
    said: str,
) -> None:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    Path("link.pt").symlink_to("ours.pt")
    os.mkfifo("pipe.pth")
    before = {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    assert convert(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(said, error), error
    assert {path: path.read_bytes() for path in Path().iterdir() if path.is_file()} == before


IN_BACKBONE = [
    "model.backbone.name=timm:vit_tiny_patch16_224",
    "model.backbone.strides=[16]",
    "model.backbone.vit.options={patch_size: 16, embed_dim: 16, depth: 3, num_heads: 2, img_size: 32}",
    "batch_former.at=backbone",
    "batch_former.layers=[1]",
]


@pytest.mark.default_tier("changes0", "changes3", "changes4", "changes5")
@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["batch_former.layers=[0,1]", "batch_former.shared=false", "batch_former.num_layers=2"],
        ["batch_former.mode=single_stream", "model.name=conditional_detr", "loss.classification=focal"],
        ["batch_former.mode=duplicate"],
        ["batch_former.at=queries", "batch_former.layers=[1]", "model.decoder_layers=2"],
        IN_BACKBONE,
        TWO_STAGE,
        MULTI_SCALE,
    ],
)
def test_without_batch_attention_evaluation_is_the_same(
    tmp_path: Path, changes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = saved(tmp_path, *changes), tmp_path / "stripped.pt"
    assert convert(source, target, "--strip-batchformer") == 0
    whole, stripped = load_checkpoint(source), load_checkpoint(target)
    assert stripped.config["batch_former"]["enabled"] is False
    assert (stripped.class_map, stripped.ema, stripped.training) == (whole.class_map, None, None)
    assert not any("batch_former" in name for name in stripped.model)
    assert_same(stripped.model, {name: x for name, x in whole.weights.items() if "batch_former" not in name})
    assert f"{len(whole.weights) - len(stripped.model)} tensors" in capsys.readouterr().out
    mask = torch.zeros(3, 96, 128, dtype=torch.bool)
    mask[0, :, 70:] = True
    batch = Batch(torch.randint(256, (3, 3, 96, 128), dtype=torch.uint8), mask)
    with torch.no_grad():
        before, after = (detr_bf.load(path, "cpu").model(batch) for path in (source, target))
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.boxes, after.boxes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("batch_former.mode=mini_batch_inference", "its evaluation uses batch attention"),
        ("batch_former.enabled=false", "nothing to strip"),
    ],
)
def test_what_cannot_be_stripped(tmp_path: Path, change: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(saved(tmp_path, change), tmp_path / "out.pt", "--strip-batchformer") == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()


def test_stripping_proves_that_evaluation_stays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path)
    monkeypatch.setattr(
        BatchFormerV2, "train", lambda self, mode=True: nn.Module.train(self, True)
    )  # in evaluation, too
    assert convert(source, tmp_path / "out.pt", "--strip-batchformer") == 2
    assert "evaluation changes without batch attention" in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()


def test_stripping_refuses_a_checkpoint_that_is_not_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = checkpoint(average=False)
    broken = replace(whole, model={name: x for name, x in whole.model.items() if "decoder.norm" not in name})
    broken.save(tmp_path / "broken.pt")
    assert convert(tmp_path / "broken.pt", tmp_path / "out.pt", "--strip-batchformer") == 2
    assert "missing in the file (2): decoder.norm.weight" in capsys.readouterr().err


def test_foreign_names_and_stripping_are_two_steps() -> None:
    with pytest.raises(SystemExit) as caught:
        convert("a", "b", "--to", "detr", "--strip-batchformer")
    assert caught.value.code == 2


def test_classes_of_official_files_become_contiguous_and_ids_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = build_model(load_config(None, SETTINGS), 91).state_dict()
    write_weights(tmp_path / "official.pth", weights, "detr")
    assert convert(tmp_path / "official.pth", tmp_path / "ours.pth", "--classes", "contiguous") == 0
    assert "written under our names, class heads of 81 rows: " in capsys.readouterr().out
    contiguous = renumbered(weights, "contiguous")
    assert_same(read_weights(tmp_path / "ours.pth"), contiguous)
    assert convert(tmp_path / "ours.pth", tmp_path / "ids.pth", "--classes", "ids", "--to", "detectron2_resnet") == 0
    assert_same(read_weights(tmp_path / "ids.pth"), renumbered(contiguous, "ids"))


def test_a_run_on_coco_is_written_with_category_ids(tmp_path: Path) -> None:
    classes = ClassMap(COCO_IDS[0], tuple(map(str, COCO_IDS[0])))
    weights = build_model(load_config(None, SETTINGS), 80).state_dict()
    run = replace(checkpoint(average=False), model=weights, class_map=classes.to_dict())
    run.save(tmp_path / "ours.pt")
    assert convert(tmp_path / "ours.pt", tmp_path / "official.pth", "--to", "detr", "--classes", "ids") == 0
    written = torch.load(tmp_path / "official.pth")["model"]
    assert_same(written, to_foreign(renumbered(weights, "ids"), "detr"))
    assert written["class_embed.bias"].shape == (92,)


@pytest.mark.parametrize(
    ("numbering", "said"),
    [("ids", "has 3 classes, which are not those of COCO"), ("contiguous", "whose classes are contiguous: leave")],
)
def test_classes_of_other_data_are_not_renumbered(
    tmp_path: Path, numbering: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(saved(tmp_path), tmp_path / "out.pth", "--classes", numbering) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out.pth").exists()


def test_classes_go_with_conversion_alone() -> None:
    with pytest.raises(SystemExit) as caught:
        convert("a", "b", "--classes", "ids", "--encoder")
    assert caught.value.code == 2


@pytest.mark.full
def test_a_stripped_checkpoint_is_not_written_where_it_could_not_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint().save(tmp_path / "a.pt")
    assert convert(tmp_path / "a.pt", tmp_path / "b.safetensors", "--strip-batchformer") == 2
    assert "must end in .pt, .pth, .bin" in capsys.readouterr().err
    assert not (tmp_path / "b.safetensors").exists()


def test_what_only_training_reads_is_left_out_of_other_formats(tmp_path: Path) -> None:
    local = [f"plugins.relative_localization.{setting}" for setting in ("enabled=true", "weight=0.1")]
    source = saved(tmp_path, "batch_former.enabled=false", *local)
    assert any("plugins" in name for name in load_checkpoint(source).weights)
    assert convert(source, tmp_path / "theirs.pth", "--to", "detr") == 0
    assert convert(saved(tmp_path, "batch_former.enabled=false"), tmp_path / "plain.pth", "--to", "detr") == 0
    theirs, plain = (torch.load(tmp_path / name)["model"] for name in ("theirs.pth", "plain.pth"))
    assert set(theirs) == set(plain)


@pytest.mark.parametrize("bare", [False, True])
def test_context_broadcasting_has_no_place_in_other_formats(
    bare: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Conversion to another format fails for a checkpoint and for its bare weights."""
    source = saved(tmp_path, "batch_former.enabled=false", "plugins.context_broadcasting.enabled=true")
    if bare:
        weights, source = load_checkpoint(source).weights, tmp_path / "bare.pth"
        torch.save(weights, source)
    assert convert(source, tmp_path / "theirs.pth", "--to", "detr") == 2
    assert "no other format knows" in capsys.readouterr().err
    assert not (tmp_path / "theirs.pth").exists()
