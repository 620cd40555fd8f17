"""Classifiers and masked autoencoders on the command line, with scikit-learn's digits."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from torchvision.utils import save_image

from detr_bf import load_classifier
from detr_bf.commands import main as detr_bf
from detr_bf.config import load_config
from detr_bf.engine import load_checkpoint
from detr_bf.plugins import without_plugins
from tests.tools.test_train_net import assert_same
from tools.train_net import main as train_net

TRANSFORMS = (
    "{size: 16, crop: padded, padding: 1, auto_augment: '', color_jitter: 0.0, erase: 0.0, horizontal_flip: 0.0}"
)
VIT = "name: vit_tiny_patch16_224\n  options: {patch_size: 4, embed_dim: 24, depth: 2, num_heads: 2}"
CNN = "name: cifar_resnet8\n  options: {width: 4}\n  drop_path: 0.0"
MIXER = "name: gmixer_12_224"
TINY = f"""task: classification
model:
  {VIT}
data:
  name: digits
  per_class: 12
  transforms: {TRANSFORMS}
  workers: 0
optimizer: {{lr: 0.001, warmup_epochs: 0, schedule: step}}
train: {{epochs: 2, batch_size: 30, log_every: 1, ema: {{enabled: true, decay: 0.9}}}}
checkpoint: {{every_steps: 4}}
eval: {{batch_size: 100, pictures: 4}}
report: false
"""
PLAIN = "data.mix.probability=0"
BALANCED = ("loss.name=balanced_softmax", "data.long_tail.imbalance=10", PLAIN)
VARIANTS = {
    "plain": (),
    "batchformer_v2": ("plugins.batchformer_v2.enabled=true", "plugins.batchformer_v2.layers=all"),
    "batchformer": ("plugins.batchformer.enabled=true", *BALANCED),
    "context_broadcasting": (
        "plugins.context_broadcasting.enabled=true",
        "plugins.context_broadcasting.layers=all",
        "plugins.context_broadcasting.scaled=true",
    ),
    "diverse_patch": ("plugins.diverse_patch.enabled=true",),
    "relative_localization": (
        "plugins.relative_localization.enabled=true",
        "plugins.relative_localization.ramp_epochs=1",
        PLAIN,
    ),
    "cnn": ("optimizer.name=sgd",),
    "bf16": ("train.precision=bf16", "plugins.batchformer_v2.enabled=true", "plugins.batchformer_v2.layers=all"),
    "augmented": ("data.transforms.auto_augment=rand-m9-mstd0.5-inc1", "data.transforms.erase=0.5", "data.repeats=3"),
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A config of a tiny ViT, four steps an epoch."""
    (tmp_path / "tiny.yaml").write_text(f"{TINY}output_dir: {tmp_path / 'run'}\n")
    return tmp_path / "tiny.yaml"


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    """Write the config of a tiny masked autoencoder."""
    decoder = "  decoder_dim: 16\n  decoder_depth: 2\n  decoder_heads: 2\n"
    text = (
        TINY.replace("  name: vit", f"{decoder}  name: vit")
        .replace("pictures: 4", "pictures: 3")
        .replace("task: classification", "task: masked_autoencoding")
    )
    (tmp_path / "masked.yaml").write_text(f"{text}output_dir: {tmp_path / 'mae'}\n")
    return tmp_path / "masked.yaml"


def evaluation(folder: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / "evaluation.json").read_text())
    return content


@pytest.mark.default_tier("plain", "batchformer_v2", "relative_localization")
@pytest.mark.parametrize("name", VARIANTS)
def test_it_trains_resumes_to_the_same_bits_and_evaluates(name: str, tiny: Path, tmp_path: Path) -> None:
    if name == "cnn":
        tiny.write_text(tiny.read_text().replace(VIT, CNN))
    command = ["--config", str(tiny), *VARIANTS[name]]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert train_net([*command, f"output_dir={whole}", "train.max_steps=6"]) == 0
    assert train_net([*command, f"output_dir={parted}", "train.max_steps=3"]) == 0
    assert train_net([*command, f"output_dir={parted}", "train.max_steps=6", "--resume"]) == 0
    straight, resumed = load_checkpoint(whole / "last.pt"), load_checkpoint(parted / "last.pt")
    assert_same(resumed.model, straight.model)
    assert_same(resumed.weights, straight.weights)
    again = tmp_path / "again"
    assert train_net([*command, f"output_dir={again}", f"init_from={whole / 'last.pt'}", "--eval-only"]) == 0
    assert evaluation(again) == evaluation(whole)


@pytest.mark.full
def test_experts_train_resume_evaluate_and_predict(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """RIDE with BatchFormer; there is no network of timm to convert it to."""
    tiny.write_text(tiny.read_text().replace(VIT, CNN))
    command = ["--config", str(tiny), "model.experts=3", "loss.name=ride", "loss.ride.reweight_epoch=1", *BALANCED[1:]]
    command += ["plugins.batchformer={enabled: true, shared_classifier: false}", "optimizer.name=sgd"]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert train_net([*command, f"output_dir={whole}", "train.max_steps=6"]) == 0
    assert train_net([*command, f"output_dir={parted}", "train.max_steps=3"]) == 0
    assert train_net([*command, f"output_dir={parted}", "train.max_steps=6", "--resume"]) == 0
    assert_same(load_checkpoint(parted / "last.pt").weights, load_checkpoint(whole / "last.pt").weights)
    again = tmp_path / "again"
    assert train_net([*command, f"output_dir={again}", f"init_from={whole / 'last.pt'}", "--eval-only"]) == 0
    assert evaluation(again) == evaluation(whole)
    save_image(torch.rand(3, 16, 16), tmp_path / "image.png")
    assert detr_bf(["predict", str(whole), "--output", str(tmp_path / "out"), str(tmp_path)]) == 0
    assert detr_bf(["convert", str(whole), str(tmp_path / "plain.pth"), "--strip-plugins"]) == 2
    assert "has model.experts=3, which no network of timm has" in capsys.readouterr().err
    assert train_net([*command, "model.experts=1"]) == 2
    assert "needs two or more experts" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    "variant", ["talking_heads", "uniform_head", "squeeze_excitation", "extra_attention", "extra_mlp"]
)
def test_a_variant_trains_resumes_evaluates_and_predicts(
    variant: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no network of timm to convert it to, and another network does not take its weights."""
    command = ["--config", str(tiny), f"model.variant={variant}"]
    whole, parted, again = tmp_path / "whole", tmp_path / "parted", tmp_path / "again"
    assert train_net([*command, f"output_dir={whole}", "train.max_steps=6"]) == 0
    assert train_net([*command, f"output_dir={parted}", "train.max_steps=3"]) == 0
    assert train_net([*command, f"output_dir={parted}", "train.max_steps=6", "--resume"]) == 0
    assert_same(load_checkpoint(parted / "last.pt").weights, load_checkpoint(whole / "last.pt").weights)
    assert train_net([*command, f"output_dir={again}", f"init_from={whole / 'last.pt'}", "--eval-only"]) == 0
    assert evaluation(again) == evaluation(whole)
    save_image(torch.rand(3, 16, 16), tmp_path / "image.png")
    assert detr_bf(["predict", str(whole), "--output", str(tmp_path / "out"), str(tmp_path)]) == 0
    assert detr_bf(["convert", str(whole), str(tmp_path / "plain.pth"), "--strip-plugins"]) == 2
    assert f"has model.variant={variant}, which no network of timm has" in capsys.readouterr().err
    assert train_net(["--config", str(tiny), f"init_from={whole / 'last.pt'}", "--eval-only"]) == 2


def test_the_state_of_a_trained_vit_is_one_of_timm_but_for_the_plugins(tiny: Path, tmp_path: Path) -> None:
    assert train_net(["--config", str(tiny), *VARIANTS["batchformer_v2"], "train.max_steps=2"]) == 0
    weights = load_checkpoint(tmp_path / "run" / "last.pt").weights
    assert any(name.startswith("plugins.") for name in weights)
    config = load_config(tiny)
    model = timm.create_model(config.model.name, num_classes=10, img_size=16, **config.model.options)
    model.load_state_dict(without_plugins(weights))


def test_what_a_run_leaves(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_net(["--config", str(tiny), *VARIANTS["batchformer"], "train.max_steps=4", "report=true"]) == 0
    run = tmp_path / "run"
    result = evaluation(run)
    assert f"top-1 {result['top1']:.3f}" in capsys.readouterr().out
    with (run / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    right = sum(row["class"] == row["predicted"] for row in rows)
    assert len(rows) == result["num_images"]
    assert right / len(rows) == pytest.approx(result["top1"])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = next(record for record in records if record["kind"] == "train")
    assert {"stream/clean", "stream/batchformer", "loss_ce", "accuracy", "lr/batch_former"} <= set(train)
    assert train["lr/batch_former"] == pytest.approx(0.1 * train["lr"])
    counts = [value["train_images"] for value in result["per_class"].values()]  # type: ignore[attr-defined]
    assert (counts[0], counts[-1]) == (12, 1)
    assert counts == sorted(counts, reverse=True)
    page = (run / "report.html").read_text()
    assert "BatchFormer" in page
    assert (run / "pictures" / "validation.png").stat().st_size > 1000
    errors = json.loads((run / "errors.json").read_text())
    assert errors["coverage"][-1] == pytest.approx(result["top1"])
    assert errors["reliability"]["error"] == result["ece"]
    wrong = {int(row["index"]): row for row in rows if row["class"] != row["predicted"]}
    assert errors["wrong"] == len(wrong)
    assert len(errors["mistakes"]) == 4
    for entry in errors["mistakes"]:
        row = wrong[entry["index"]]
        names = [errors["classes"][entry[key]] for key in ("label", "predicted")]
        assert [row["class"], row["predicted"]] == names
        assert entry["file"] is None, "digits are no files"
    assert "Reliability" in page
    again = ["--config", str(tiny), *VARIANTS["batchformer"], f"init_from={run / 'last.pt'}", "--eval-only"]
    assert train_net([*again, "eval.pictures=0"]) == 0
    fewer = json.loads((run / "eval-last" / "errors.json").read_text())
    assert (fewer["mistakes"], fewer["suspects"], fewer["coverage"]) == ([], [], errors["coverage"])
    assert not (run / "eval-last" / "pictures" / "suspects.jpg").exists()


@pytest.mark.full
@pytest.mark.parametrize("average", ["train.ema.enabled=false", "train.ema.decay=0.98"])
def test_it_learns_the_digits(average: str, tiny: Path, tmp_path: Path) -> None:
    """Also with averaged weights, whose batch norms need their own statistics."""
    tiny.write_text(tiny.read_text().replace(VIT, CNN))
    settings = ["data.per_class=null", PLAIN, "train.epochs=6", average, "optimizer.lr=0.01"]
    settings += ["loss.label_smoothing=0", "eval.pictures=0"]
    assert train_net(["--config", str(tiny), *settings]) == 0
    assert evaluation(tmp_path / "run")["top1"] > 0.7  # type: ignore[operator]


def test_what_only_training_needs_is_not_asked_for_in_evaluation(tiny: Path, tmp_path: Path) -> None:
    command = ["--config", str(tiny), "train.max_steps=2"]
    assert train_net([*command, *VARIANTS["batchformer_v2"], *VARIANTS["diverse_patch"]]) == 0
    assert (
        train_net([*command, "--eval-only", f"output_dir={tmp_path / 'plain'}", f"init_from={tmp_path / 'run'}"]) == 0
    )
    assert evaluation(tmp_path / "plain") == evaluation(tmp_path / "run")


def test_a_run_is_evaluated_on_its_own_classes_alone(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_net(["--config", str(tiny), "train.max_steps=1"]) == 0
    path = tmp_path / "run" / "last.pt"
    checkpoint = load_checkpoint(path)
    others = replace(checkpoint.classes, names=("nought", *checkpoint.classes.names[1:]))
    replace(checkpoint, class_map=others.to_dict()).save(path)
    assert train_net(["--config", str(tiny), "--eval-only", f"init_from={path}"]) == 2
    assert "class 'nought' is" in capsys.readouterr().err


def test_it_is_evaluated_on_a_subset_of_the_classes_and_with_several_labels(tmp_path: Path) -> None:
    """The numbers of both evaluations are those of a loop over the logits of the network."""
    colours = {"black": 0, "grey": 128, "silver": 192, "white": 255}
    for part, counts in {"train": (6, 6, 6, 6), "val": (3, 3, 3, 3), "some": (0, 4, 0, 5)}.items():
        for (name, shade), count in zip(colours.items(), counts, strict=True):
            for number in range(count):
                image = tmp_path / part / name / f"{number}_{name}.png"
                image.parent.mkdir(parents=True, exist_ok=True)
                step = 40 if part == "some" else 1  # some greys look white
                Image.new("L", (16, 16), min(255, shade + step * number)).save(image)
    text = TINY.replace("name: digits", f"name: image_folder\n  root: {tmp_path}").replace(
        "per_class: 12", "repeats: 1"
    )
    (tmp_path / "tiny.yaml").write_text(f"{text}output_dir: {tmp_path / 'run'}\n")
    command = ["--config", str(tmp_path / "tiny.yaml")]
    assert train_net([*command, PLAIN, "train.batch_size=8", "train.epochs=6", "optimizer.lr=0.01"]) == 0
    names = sorted(path.name for path in (tmp_path / "val").glob("*/*"))
    sets = [[number % 4, 3] if number % 3 else [] for number in range(len(names))]
    (tmp_path / "real.json").write_text(json.dumps(sets))
    settings = {"subset": ["data.val=some", "data.val_subset=true"], "real": [f"data.val_labels={tmp_path}/real.json"]}
    for name, given in settings.items():
        init = f"init_from={tmp_path / 'run' / 'last.pt'}"
        assert train_net([*command, *given, init, f"output_dir={tmp_path / name}", "--eval-only"]) == 0
    classifier = load_classifier(tmp_path / "run" / "last.pt")
    right = []
    for path in sorted((tmp_path / "some").glob("*/*")):
        found = classifier(path).tolist()
        right.append((found[1] > found[3]) == (path.parent.name == "grey"))
    assert len(right) == 9
    assert len(set(right)) == 2
    assert evaluation(tmp_path / "subset")["top1"] == pytest.approx(sum(right) / 9)
    right = []
    for name, labels in zip(names, sets, strict=True):
        if labels:
            found = classifier(next((tmp_path / "val").glob(f"*/{name}"))).tolist()
            right.append(found.index(max(found)) in labels)
    assert len(right) == 8
    assert len(set(right)) == 2
    assert evaluation(tmp_path / "real")["top1"] == pytest.approx(sum(right) / 8)


def test_a_frozen_network_trains_its_classifier_and_plugin_alone(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write_text(tiny.read_text().replace(VIT, CNN))
    command = ["--config", str(tiny), "train.max_steps=2", "train.ema.enabled=false"]
    assert train_net([*command, f"output_dir={tmp_path / 'trunk'}"]) == 0
    frozen = [*command, "model.frozen=true", *VARIANTS["batchformer"]]
    assert train_net(frozen) == 2
    assert "model.frozen=true needs a trained network" in capsys.readouterr().err
    assert train_net([*frozen, f"init_from={tmp_path / 'trunk'}", "model.linear_probe=true"]) == 2
    assert "set model.frozen=false" in capsys.readouterr().err
    assert train_net([*frozen, f"init_from={tmp_path / 'trunk'}"]) == 0
    before, after = (load_checkpoint(tmp_path / run / "last.pt").weights for run in ("trunk", "run"))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"fc.weight", "fc.bias"}
    assert {name.split(".")[0] for name in after.keys() - before.keys()} == {"plugins"}


def test_a_linear_probe_needs_all_of_a_trained_network_and_no_plugin(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--config", str(tiny), "train.max_steps=1"]
    assert train_net([*command, f"output_dir={tmp_path / 'trunk'}"]) == 0
    probe = [*command, "model.linear_probe=true"]
    assert train_net(probe) == 2
    assert "needs a trained network" in capsys.readouterr().err
    assert train_net([*probe, f"init_from={tmp_path / 'trunk'}", "model.options.depth=3"]) == 2
    assert "does not hold all weights that are frozen" in capsys.readouterr().err
    assert train_net([*probe, f"init_from={tmp_path / 'trunk'}", *VARIANTS["batchformer_v2"]]) == 2
    assert "plugins.batchformer_v2 has nothing to do there" in capsys.readouterr().err
    assert train_net([*probe, f"init_from={tmp_path / 'trunk'}"]) == 0


@pytest.mark.default_tier("True")
@pytest.mark.parametrize("with_batch_former", [False, True])
def test_masked_pre_training_then_a_linear_probe(
    with_batch_former: bool, tiny: Path, masked: Path, tmp_path: Path
) -> None:
    command = ["--config", str(masked), f"batch_former.enabled={str(with_batch_former).lower()}"]
    assert train_net([*command, "train.max_steps=3"]) == 0
    assert train_net([*command, "train.max_steps=6", "--resume"]) == 0
    straight = tmp_path / "straight"
    assert train_net([*command, "train.max_steps=6", f"output_dir={straight}"]) == 0
    assert_same(load_checkpoint(tmp_path / "mae" / "last.pt").model, load_checkpoint(straight / "last.pt").model)
    assert evaluation(straight) == evaluation(tmp_path / "mae")
    assert train_net([*command, "--eval-only", f"output_dir={tmp_path / 'again'}", f"init_from={straight}"]) == 0
    assert (tmp_path / "mae" / "pictures" / "validation.png").stat().st_size > 1000
    probe = ["--config", str(tiny), "model.linear_probe=true", "model.drop_path=0", f"init_from={straight}"]
    assert train_net([*probe, "train.max_steps=4"]) == 0
    encoder = load_checkpoint(straight / "last.pt").weights
    probed = load_checkpoint(tmp_path / "run" / "last.pt").model
    frozen = [name for name in probed if not name.startswith("head.")]
    assert frozen
    for name in frozen:
        assert torch.equal(probed[name], encoder[f"encoder.{name}"]), name


def refusals() -> Iterator[tuple[list[str], str]]:
    yield ["model.name=no_such_model"], "timm .* has no such model"
    yield ["model.options={depth: 2, wings: 4}"], "does not take"
    yield ["model.name=cifar_resnetx"], "give a depth"
    yield ["plugins.batchformer_v2.enabled=true", "plugins.batchformer_v2.layers=[2]"], "has 2 blocks"
    yield ["plugins.batchformer_v2.enabled=true", "plugins.batchformer_v2.layers=[a]"], "list of block numbers"
    yield [*VARIANTS["batchformer_v2"], "plugins.batchformer.enabled=true"], "already has batchformer_v2"
    yield ["data.long_tail.imbalance=0.5"], "imbalance"
    yield ["data.long_tail.order=[1,2]"], "order"
    yield ["optimizer.betas=[0.9]"], "optimizer.betas must be two numbers"
    yield ["optimizer.warmup_epochs=1", "optimizer.warmup_steps=5"], "exclude each other"
    yield ["data.transforms.horizontal_flip=0.5"], "a mirrored .* is"
    yield ["data.transforms.area=[0.5,0.1]"], "data.transforms.area must be two shares"
    yield ["data.name=image_folder"], "data.root"
    yield ["plugins.relative_localization.enabled=true", "plugins.relative_localization.ramp_epochs=2"], "must be less"
    yield ["eval.few=200"], "eval.few=200 must not exceed eval.many=100"
    yield ["train.batch_size=0"], "train.batch_size must be greater than 0"


@pytest.mark.parametrize(("settings", "message"), list(refusals()))
def test_bad_input_is_told_before_the_first_step(
    settings: list[str], message: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_net(["--config", str(tiny), *settings]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) < 12, said
    assert re.search(message, said), said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("network", "setting", "message"),
    [
        (CNN, "plugins.diverse_patch.enabled=true", "VisionTransformer"),
        (CNN, "plugins.context_broadcasting.enabled=true", "VisionTransformer"),
        (CNN, "model.linear_probe=true", "linear layer called head"),
        (MIXER, "plugins.batchformer_v2.enabled=true", "VisionTransformer"),
        (MIXER, "plugins.relative_localization.enabled=true", "SwinTransformer"),
        ("name: resnet18", "plugins.relative_localization.enabled=true", "localization.weight: none was published"),
    ],
)
def test_a_network_that_does_not_fit_is_refused(
    network: str, setting: str, message: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write_text(tiny.read_text().replace(VIT, network))
    assert train_net(["--config", str(tiny), setting]) == 2
    assert message in capsys.readouterr().err


def test_a_run_of_another_task_is_not_resumed(
    tiny: Path, masked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_net(["--config", str(tiny), "train.max_steps=1"]) == 0
    assert train_net(["--config", str(masked), f"output_dir={tmp_path / 'run'}", "--resume"]) == 2
    assert "is of the task classification, not of masked_autoencoding" in capsys.readouterr().err
