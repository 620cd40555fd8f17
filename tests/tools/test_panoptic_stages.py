"""Both panoptic stages on the command line, boxes over things and stuff, then masks; errors between them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import detr_bf
from detr_bf.common.errors import InputError
from detr_bf.data.masks import read_ids
from detr_bf.engine import load_checkpoint
from detr_bf.evaluation import PanopticFile
from tests.tools.conftest import TINY
from tests.tools.test_train_net import predict, records, train_net

MASKS = ["model.masks=true", "eval.panoptic.threshold=0", "train.epochs=2"]
FROZEN = [*MASKS, "freeze.detector=true"]


@pytest.fixture
def stuff(
    tmp_path: Path, panoptic_folder: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> SimpleNamespace:
    """Write a config of the tiny detector on panoptic data: six training images, four validation images."""
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    train, val = panoptic_folder(6, name="train"), panoptic_folder(4, name="val", first_image_id=101)
    splits = {
        name: f"{{images: {x.images}, annotations: {x.annotations}, panoptic: {x.panoptic}}}"
        for name, x in (("train", train), ("val", val))
    }
    config = tmp_path / "panoptic.yaml"
    config.write_text(
        TINY.replace("data:\n", f"data:\n  train: {splits['train']}\n  val: {splits['val']}\n") + "seed: 3\n"
    )
    return SimpleNamespace(config=["--config", str(config)], train=train, val=val, folder=tmp_path)


def run(stuff: SimpleNamespace, name: str, *settings: str) -> int:
    return train_net([*stuff.config, f"output_dir={stuff.folder / name}", *settings])


def evaluation(folder: Path) -> dict[str, object]:
    return json.loads((folder / "evaluation.json").read_text())


@pytest.mark.default_tier("true")
@pytest.mark.parametrize("batch_former", ["true", "false"])
def test_both_stages(stuff: SimpleNamespace, batch_former: str, capsys: pytest.CaptureFixture[str]) -> None:
    boxes, masks = stuff.folder / "boxes", stuff.folder / "masks"
    assert run(stuff, "boxes", "train.epochs=1") == 0
    assert evaluation(boxes)["panoptic"] is None, "without masks there are no maps"
    former = f"batch_former.enabled={batch_former}"
    assert run(stuff, "masks", *FROZEN, former, f"init_from={boxes}", "report=true") == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("PQ 0.")
    before, after = load_checkpoint(boxes / "best.pt").weights, load_checkpoint(masks / "last.pt").model
    for name, tensor in after.items():
        assert name.startswith("mask_head.") or torch.equal(tensor, before[name]), f"{name} was frozen"
    assert evaluation(masks)["AP"] == evaluation(boxes)["AP"], "the boxes are the same"
    check_panoptic_results(stuff, masks)
    steps = records(masks / "metrics.jsonl", "train")
    assert {"loss_mask", "loss_dice"} <= steps[0].keys()
    assert evaluation(masks)["masks"]["num_detections"] > 0
    assert ("stream/batchformer/loss_mask" in steps[0]) == (batch_former == "true")
    assert len([record for record in records(masks / "metrics.jsonl", "val") if record["PQ"] is not None]) == 2


def test_the_mask_head_of_rfdetr_is_trained_with_the_boxes(stuff: SimpleNamespace) -> None:
    """On things and stuff, with two streams."""
    rfdetr = ["model.name=rfdetr", "model.encoder_layers=0", "model.groups.group_detr=2", "loss.classification=ia_bce"]
    given = [*MASKS, *rfdetr, "model.rfdetr.cross_heads=4", "batch_former.enabled=true"]
    assert run(stuff, "whole", *given, "report=true") == 0
    whole = stuff.folder / "whole"
    check_panoptic_results(stuff, whole)
    steps = records(whole / "metrics.jsonl", "train")
    ends = ("", "_0", "_enc", "_group", "_group_0", "_group_enc")
    assert {f"loss_{name}{end}" for name in ("mask", "dice") for end in ends} <= steps[0].keys()
    assert "stream/batchformer/loss_mask_group" in steps[0]
    assert run(stuff, "plain", *given, "eval.loss=false", "eval.panoptic.threshold=0.9") == 0
    weights = [load_checkpoint(stuff.folder / name / "last.pt").model for name in ("whole", "plain")]
    same = all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert same, "evaluation draws no random numbers of training"


def check_panoptic_results(stuff: SimpleNamespace, folder: Path) -> None:
    written = json.loads((folder / "panoptic.json").read_text())
    sizes = {image["id"]: (image["height"], image["width"]) for image in stuff.val.content["images"]}
    assert {entry["image_id"] for entry in written["annotations"]} == sizes.keys()
    for entry in written["annotations"]:
        ids = read_ids(folder / "panoptic" / entry["file_name"])
        assert tuple(ids.shape) == sizes[entry["image_id"]]
        listed = {segment["id"]: segment["area"] for segment in entry["segments_info"]}
        assert listed == {int(i): int((ids == i).sum()) for i in ids.unique() if i}
        assert {segment["category_id"] for segment in entry["segments_info"]} <= {3, 7, 100, 120}
    results = json.loads((folder / "results.json").read_text())
    assert all(set(result["segmentation"]) == {"size", "counts"} for result in results)
    page = (folder / "report.html").read_text()
    assert "Panoptic segmentation" in page
    assert page.count("<img") == 8, "boxes, maps, data, confusion, worst images, annotations, and of maps two"
    errors, numbers = (json.loads((folder / f"{name}.json").read_text()) for name in ("errors", "evaluation"))
    assert errors["masks"]["ap50"] == pytest.approx(numbers["masks"]["AP50"], abs=1e-12)
    assert errors["masks"]["best"] == numbers["masks"]["best"]
    lost = errors["panoptic"]["causes"].values()
    assert 1 - sum(cause["lost"] for cause in lost) == pytest.approx(numbers["panoptic"]["PQ"], abs=1e-12)
    counted = numbers["panoptic"]["per_class"].values()
    assert sum(cause["wrong"] for cause in lost) == sum(result["fp"] for result in counted)
    assert sum(cause["missed"] for cause in lost) == sum(result["fn"] for result in counted)
    assert {entry["file"] for entry in errors["panoptic"]["worst"]} <= {
        image["file_name"] for image in stuff.val.content["images"]
    }
    assert (folder / "pictures" / "worst_panoptic.jpg").stat().st_size > 1000
    assert (folder / "pictures" / "panoptic.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_evaluation_alone_gives_the_same_numbers(stuff: SimpleNamespace) -> None:
    assert run(stuff, "joint", *MASKS) == 0
    joint = stuff.folder / "joint"
    trained = evaluation(joint)
    checkpoint = load_checkpoint(joint / "last.pt")
    moved = [name for name, x in checkpoint.model.items() if not torch.equal(x, checkpoint.ema[name])]
    assert any(name.startswith("encoder.") for name in moved), "trained jointly"
    assert any(name.startswith("mask_head.") for name in moved)
    again = [f"init_from={joint / 'last.pt'}", "--eval-only"]
    assert run(stuff, "again", *MASKS, *again) == 0
    assert evaluation(stuff.folder / "again") == trained
    assert trained["panoptic"]["num_images"] == 4


@pytest.mark.full
def test_the_mask_stage_resumes_to_the_same_bits(stuff: SimpleNamespace) -> None:
    assert run(stuff, "boxes", "train.epochs=1") == 0
    stage = [*FROZEN, f"init_from={stuff.folder / 'boxes'}"]
    assert run(stuff, "whole", *stage) == 0
    assert run(stuff, "parts", *stage, "train.max_steps=3") == 0
    assert run(stuff, "parts", *stage, "--resume") == 0
    whole, parts = (load_checkpoint(stuff.folder / name / "last.pt").model for name in ("whole", "parts"))
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []
    assert evaluation(stuff.folder / "parts") == evaluation(stuff.folder / "whole")


def test_weights_whose_classes_are_category_ids(stuff: SimpleNamespace) -> None:
    """Panoptic files in the authors' format: the annotations list which categories are stuff."""
    assert run(stuff, "joint", *MASKS, "train.ema.enabled=false") == 0
    joint = stuff.folder / "joint"
    weights, ids = load_checkpoint(joint / "last.pt").model, [3, 7, 100, 120]
    head = "decoder.heads.classes.0"
    wide = {"weight": torch.zeros(122, 32), "bias": torch.full((122,), -30.0)}
    for kind, tensor in wide.items():
        tensor[[*ids, 121]] = weights[f"{head}.{kind}"]
        weights[f"{head}.{kind}"] = tensor
    torch.save(weights, stuff.folder / "theirs.pth")
    settings = [*MASKS, f"init_from={stuff.folder / 'theirs.pth'}", "--eval-only"]
    assert run(stuff, "theirs", *settings) == 0
    trained, theirs = evaluation(joint)["panoptic"], evaluation(stuff.folder / "theirs")["panoptic"]
    assert {name: theirs[name] for name in ("PQ_th", "PQ_st")} == {name: trained[name] for name in ("PQ_th", "PQ_st")}
    assert theirs["per_class"]["stuff100"] == trained["per_class"]["stuff100"]


@pytest.mark.full
def test_predictions(stuff: SimpleNamespace) -> None:
    assert run(stuff, "joint", *MASKS) == 0
    output, image = stuff.folder / "found", stuff.val.images / "0101.png"
    common = [str(stuff.folder / "joint"), "--output", str(output)]
    assert predict([*common, "--panoptic", str(stuff.val.images)]) == 0
    assert (output / "0000_0101.png").read_bytes().startswith(b"\x89PNG")
    predictor = detr_bf.load(stuff.folder / "joint")
    written = PanopticFile(output / "panoptic.json", output / "panoptic", predictor.class_map)
    found = predictor.panoptic(image)
    assert len(written) == 4
    assert torch.equal(written[0].ids, found.ids)
    assert [(s.id, s.label, s.area) for s in written[0].segments] == [(s.id, s.label, s.area) for s in found.segments]
    assert predict([*common, "--threshold", "0", str(image)]) == 0
    (entry,) = json.loads((output / "predictions.json").read_text())
    detections = predictor(image, threshold=0)
    assert [thing["segmentation"] for thing in entry["objects"]] == list(detections.masks)


def test_boxes_have_no_panoptic_maps(stuff: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(stuff, "boxes", "train.max_steps=1") == 0
    boxes = stuff.folder / "boxes"
    with pytest.raises(InputError, match="no mask head"):
        detr_bf.load(boxes).panoptic(stuff.val.images / "0101.png")
    command = [str(boxes), "--output", str(stuff.folder / "found"), "--panoptic"]
    assert predict([*command, str(stuff.val.images)]) == 2
    assert "no mask head" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["freeze.detector=true"], "it needs model.masks=true"),
        (FROZEN, "needs init_from=RUN_OR_FILE"),
        ([*FROZEN, "init_from=BOXES", "model.hidden_dim=48"], "does not hold all weights that are frozen"),
        ([*MASKS, "data.train.panoptic=''"], "set data.train.panoptic"),
        ([*MASKS, "data.train.panoptic=/nowhere"], "panoptic folder /nowhere does not exist"),
    ],
)
def test_what_cannot_work_is_said_first(
    settings: list[str], message: str, stuff: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(stuff, "boxes", "train.max_steps=1") == 0
    given = [value.replace("BOXES", str(stuff.folder / "boxes")) for value in settings]
    assert run(stuff, "masks", *given) == 2
    assert message in capsys.readouterr().err
    assert not (stuff.folder / "masks").exists()


def test_a_map_that_is_missing_is_found_before_training(
    stuff: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(stuff.val.panoptic)
    stuff.val.panoptic.mkdir()
    assert run(stuff, "joint", *MASKS) == 2
    assert "0101_segments.png" in capsys.readouterr().err
