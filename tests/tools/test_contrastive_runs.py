"""Contrastive pre-training on the command line: training, resuming, linear probe, conversion, several processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torchvision.transforms.functional import to_pil_image

from detr_bf.engine import load_checkpoint
from tests.processes import run_together
from tests.tools.image_runs import classifier_config, contrastive_config
from tests.tools.test_classifier_processes import trained
from tests.tools.test_train_net import assert_same
from tools.convert_checkpoint import main as convert
from tools.train_net import main as train_net

FORMER = ["batch_former.enabled=true", "batch_former.heads=2"]
FORMS = {"none": [], "trained": FORMER, "frozen": [*FORMER, "batch_former.frozen=true"]}


@pytest.mark.default_tier("frozen-lars")
@pytest.mark.parametrize("optimizer", ["lars", "adamw"])
@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_is_the_uninterrupted_one_and_ends_in_a_probe(form: str, optimizer: str, tmp_path: Path) -> None:
    config = contrastive_config(tmp_path)
    command = ["--config", str(config), f"optimizer.name={optimizer}", *FORMS[form], "report=true"]
    assert train_net([*command, "train.max_steps=3"]) == 0
    stopped = load_checkpoint(tmp_path / "moco" / "last.pt").model
    assert train_net([*command, "train.max_steps=6", "--resume"]) == 0
    straight = tmp_path / "straight"
    assert train_net([*command, "train.max_steps=6", f"output_dir={straight}"]) == 0
    resumed, whole = load_checkpoint(tmp_path / "moco" / "last.pt").model, load_checkpoint(straight / "last.pt").model
    assert_same(resumed, whole)
    moved = {name for name, value in whole.items() if not torch.equal(value, stopped[name]) and "running" not in name}
    assert any(name.startswith("momentum_encoder.") for name in moved)
    assert any(name.startswith("batch_former.") for name in moved) == (form == "trained")
    found = json.loads((straight / "evaluation.json").read_text())
    assert 0 <= found["instance_accuracy"] <= 1
    assert found == json.loads((tmp_path / "moco" / "evaluation.json").read_text())
    assert "MoCo v3" in (straight / "report.html").read_text()
    assert train_net([*command, "--eval-only", f"output_dir={tmp_path / 'again'}", f"init_from={straight}"]) == 0
    probe = ["--config", str(classifier_config(tmp_path)), "model.frozen=true", f"init_from={straight / 'last.pt'}"]
    assert train_net([*probe, "train.max_steps=2"]) == 0
    encoder, probed = load_checkpoint(straight / "last.pt").weights, load_checkpoint(tmp_path / "run" / "last.pt").model
    frozen = [name for name in probed if not name.startswith("head.")]
    assert len(frozen) > 20
    for name in frozen:
        assert torch.equal(probed[name], encoder[f"encoder.{name}"]), name


def test_the_encoder_is_written_for_timm_and_starts_another_pre_training(tmp_path: Path) -> None:
    config, target = contrastive_config(tmp_path), tmp_path / "encoder.safetensors"
    assert train_net(["--config", str(config), "train.max_steps=2"]) == 0
    assert convert([str(tmp_path / "moco"), str(target), "--encoder"]) == 0
    weights = load_checkpoint(tmp_path / "moco" / "best.pt").weights
    written = load_file(target)
    assert written
    for name, value in written.items():
        assert torch.equal(value, weights[f"encoder.{name}"]), name
    still = ["optimizer.lr=0", "train.max_steps=1", "train.ema.enabled=false", f"output_dir={tmp_path / 'more'}"]
    assert train_net(["--config", str(config), f"init_from={target}", *still]) == 0
    started = load_checkpoint(tmp_path / "more" / "last.pt").model
    for side in ("encoder", "momentum_encoder"):
        assert torch.equal(started[f"{side}.blocks.1.mlp.fc1.weight"], written["blocks.1.mlp.fc1.weight"])


@pytest.mark.full
def test_two_processes_stay_the_same(tmp_path: Path) -> None:
    settings = [*FORMER, "batch_former.gather=true", "train.max_steps=3", "train.batch_size=12"]
    one, other = run_together(2, trained, str(contrastive_config(tmp_path)), settings, str(tmp_path / "two"))
    assert_same(dict(one), dict(other))
    assert all(value.isfinite().all() for value in one.values())


def test_a_batch_of_one_image_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_net(["--config", str(contrastive_config(tmp_path)), "train.batch_size=1"]) == 2
    assert "give train.batch_size=2 or more" in capsys.readouterr().err


def test_images_need_no_folders_of_classes(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 6), ("val", 3)):
        (tmp_path / "images" / split).mkdir(parents=True)
        for at in range(count):
            pixels = torch.randint(256, (3, 20, 24), dtype=torch.uint8, generator=generator)
            to_pil_image(pixels).save(tmp_path / "images" / split / f"{at}.png")
    data = ["data.name=image_folder", f"data.root={tmp_path / 'images'}", "data.per_class=null"]
    command = ["--config", str(contrastive_config(tmp_path)), *data, "train.batch_size=3", "train.epochs=1"]
    assert train_net(command) == 0
    steps = [json.loads(line) for line in (tmp_path / "moco" / "metrics.jsonl").read_text().splitlines()]
    logged = [step["instance_accuracy"] for step in steps if "loss_contrastive" in step]
    assert len(logged) == 2
    assert all(round(6 * accuracy, 6) % 1 == 0 for accuracy in logged), "shares of the two views of three images"
    assert json.loads((tmp_path / "moco" / "evaluation.json").read_text())["num_images"] == 3
