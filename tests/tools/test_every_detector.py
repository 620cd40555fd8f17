"""Every detector on the command line: training, evaluation, prediction, and resuming to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from detr_bf.assembly import build_model
from detr_bf.common.structures import ClassMap
from detr_bf.config import config_to_dict, load_config
from detr_bf.engine import Checkpoint, load_checkpoint
from detr_bf.interop.formats import to_foreign
from tests.detectors import tiny as tiny_detectors
from tests.tools.test_train_net import assert_same, predict, train_net

FOCAL = ("loss.classification=focal", "loss.class_weight=2", "loss.matcher.class_cost=2")
MORE = {
    "detr": (),
    "dab_deformable_detr": (*FOCAL, "model.hidden_dim=64"),  # as for deformable_detr
    "deformable_detr": (
        *FOCAL,
        "model.backbone.strides=[8,16,32]",
        "model.hidden_dim=64",  # group norm needs more than one number per group, and the last map has one cell
    ),
}
DETECTORS = {
    name: (*tiny_detectors.settings_of(name, stride=8), *MORE.get(name, FOCAL)) for name in tiny_detectors.DETECTORS
}
VARIANTS = (
    "dab_detr_patterns",
    "dab_deformable_detr",
    "deformable_detr_refine",
    "dino_shared_heads",
    "group_detr",
    "h_deformable_detr",
    "rtdetrv2",
)  # of detectors that are trained in every run of the tests


def losses(folder: Path) -> dict[str, float]:
    """Return the losses of the evaluation in a folder."""
    found: dict[str, float] = json.loads((folder / "evaluation.json").read_text())["losses"]
    assert found
    return found


KINDS = [
    pytest.param(name, with_batch_former, marks=() if with_batch_former and name not in VARIANTS else pytest.mark.slow)
    for with_batch_former in (True, False)
    for name in DETECTORS
]


@pytest.mark.default_tier("detr")
@pytest.mark.parametrize(("name", "with_batch_former"), KINDS)
def test_trains_evaluates_predicts_resumes(name: str, with_batch_former: bool, tiny: Path, tmp_path: Path) -> None:
    trains_evaluates_predicts_resumes(name, f"batch_former.enabled={str(with_batch_former).lower()}", tiny, tmp_path)


def trains_evaluates_predicts_resumes(name: str, batch_former: str, tiny: Path, tmp_path: Path) -> None:
    settings = [*DETECTORS[name], batch_former, "eval.pictures=0"]
    command = ["--config", str(tiny), *settings, "data.transforms.size_divisor=1"]  # sides of the picture differ
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert train_net([*command, f"output_dir={whole}", "train.max_steps=8"]) == 0
    assert train_net([*command, f"output_dir={parted}", "train.max_steps=3"]) == 0
    assert train_net([*command, f"output_dir={parted}", "train.max_steps=8", "--resume"]) == 0
    straight, resumed = load_checkpoint(whole / "last.pt"), load_checkpoint(parted / "last.pt")
    assert_same(resumed.model, straight.model)
    assert_same(resumed.weights, straight.weights)
    trained = (whole / "results.json").read_text()
    again = tmp_path / "again"
    assert train_net([*command, f"output_dir={again}", f"init_from={whole / 'last.pt'}", "--eval-only"]) == 0
    assert (again / "results.json").read_text() == trained
    assert losses(again) == losses(whole)
    image = sorted((tmp_path / "val" / "images").iterdir())[0]
    assert predict([str(whole), "--output", str(tmp_path / "found"), "--threshold", "0", str(image)]) == 0
    (entry,) = json.loads((tmp_path / "found" / "predictions.json").read_text())
    assert {found["category_id"] for found in entry["objects"]} <= {3, 7, 90}
    assert len(entry["objects"]) > 0


@pytest.mark.full
@pytest.mark.parametrize("name", ["dino", "detr"])
def test_batch_attention_between_queries_resumes_to_the_same_bits(name: str, tiny: Path, tmp_path: Path) -> None:
    settings = "batch_former={enabled: true, at: queries, layers: [1], group_size: 2}"
    trains_evaluates_predicts_resumes(name, settings, tiny, tmp_path)


DEIM = (
    "train.epochs=4", "data.plain_first_epochs=1", "data.plain_last_epochs=1", "data.augment.until_epoch=2",
    "optimizer.flat_epochs=2", "optimizer.final_epochs=1", "optimizer.warmup_steps=2", "data.batch_sides=[32,64]",
    "data.transforms.square=64",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name if name in ("detr", "smca") else pytest.param(name, marks=pytest.mark.slow) for name in DETECTORS]
)
def test_deim_trains_every_detector_and_resumes_to_the_same_bits(name: str, tiny: Path, tmp_path: Path) -> None:
    """The runs stop and resume in an epoch with mosaic and mixup; the later epochs go through all other stages."""
    deim = Path(__file__).parents[2] / "configs" / "deim.yaml"
    model = [setting for setting in DETECTORS[name] if not setting.startswith("loss.")]
    command = ["--config", str(tiny), str(deim), *model, *DEIM, "eval.pictures=0", "eval.loss=false"]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert train_net([*command, f"output_dir={whole}"]) == 0
    straight = load_checkpoint(whole / "last.pt")
    assert straight.training is not None
    steps = straight.training["progress"]["step"] // 4
    assert steps > 1
    assert train_net([*command, f"output_dir={parted}", f"train.max_steps={steps + steps // 2}"]) == 0
    assert train_net([*command, f"output_dir={parted}", "--resume"]) == 0
    resumed = load_checkpoint(parted / "last.pt")
    assert_same(resumed.model, straight.model)
    assert_same(resumed.weights, straight.weights)


@pytest.mark.default_tier("deformable_detr_two_stage")
@pytest.mark.parametrize("name", ["detr", "smca", "deformable_detr_two_stage"])
def test_weights_of_the_authors_are_evaluated_with_category_ids_as_classes(
    name: str, tiny: Path, tmp_path: Path
) -> None:
    """The authors number classes by category id: 91 classes for COCO, 0 to 90."""
    config = load_config(tiny, [*DETECTORS[name], "batch_former.enabled=false", "model.input_norm=false"])
    torch.manual_seed(0)
    model = build_model(config, 91)
    names = {3: "class3", 7: "class7", 90: "class90"}
    classes = ClassMap(tuple(range(91)), tuple(names.get(i, f"id {i}") for i in range(91)))
    Checkpoint(model.state_dict(), classes.to_dict(), config_to_dict(config)).save(tmp_path / "ours.pt")
    form = name.removesuffix("_two_stage")
    torch.save({"model": to_foreign(model.state_dict(), form)}, tmp_path / "theirs.pth")
    evaluations = []
    for file in ("ours.pt", "theirs.pth"):
        folder = tmp_path / file.partition(".")[0]
        overrides = [*DETECTORS[name], "batch_former.enabled=false", "eval.pictures=0", f"output_dir={folder}"]
        assert train_net(["--config", str(tiny), "--eval-only", *overrides, f"init_from={tmp_path / file}"]) == 0
        evaluations.append((folder / "results.json").read_text())
    assert evaluations[0] == evaluations[1]
    assert max(result["category_id"] for result in json.loads(evaluations[0])) > 3


def test_bare_weights_with_as_many_classes_as_the_annotations(tiny: Path, tmp_path: Path) -> None:
    """Evaluate the file that ``convert_checkpoint.py`` writes without ``--to``: classes in the order of their ids."""
    command = ["--config", str(tiny), "eval.pictures=0"]
    assert train_net([*command, "train.max_steps=2"]) == 0
    torch.save(load_checkpoint(tmp_path / "run" / "last.pt").weights, tmp_path / "bare.pth")
    results = []
    for file, folder in ((tmp_path / "run" / "last.pt", "a"), (tmp_path / "bare.pth", "b")):
        overrides = [f"init_from={file}", f"output_dir={tmp_path / folder}"]
        assert train_net([*command, "--eval-only", *overrides]) == 0
        results.append((tmp_path / folder / "results.json").read_text())
    assert results[0] == results[1]
    assert "taken to be the 3 of the annotations" in (tmp_path / "b" / "log.txt").read_text()


def test_bare_weights_of_other_classes_are_refused(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_model(load_config(tiny), 5)
    torch.save(model.state_dict(), tmp_path / "bare.pth")
    assert train_net(["--config", str(tiny), "--eval-only", f"init_from={tmp_path / 'bare.pth'}"]) == 2
    assert (
        "holds 5 classes and does not say which; the annotations have 3, with ids up to 90" in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


def test_evaluation_does_without_batch_attention(tiny: Path, tmp_path: Path) -> None:
    """Weights trained with batch attention, shared or not, are evaluated by any config of the same detector."""
    command = ["--config", str(tiny), "eval.pictures=0"]
    assert train_net([*command, "train.max_steps=2", "batch_former.shared=false"]) == 0
    trained = (tmp_path / "run" / "results.json").read_text()
    for number, setting in enumerate(("batch_former.shared=true", "batch_former.enabled=false")):
        overrides = [setting, f"init_from={tmp_path / 'run' / 'last.pt'}", f"output_dir={tmp_path / str(number)}"]
        assert train_net([*command, "--eval-only", *overrides]) == 0
        assert (tmp_path / str(number) / "results.json").read_text() == trained
        assert losses(tmp_path / str(number)) == losses(tmp_path / "run")
