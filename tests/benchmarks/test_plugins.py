"""Cost of the plug-ins, with a tiny model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import plugins
from detr_bf.classification.assembly_data import build_image_splits, train_batches
from detr_bf.classification.batch import LabelledImages
from detr_bf.classification.config import ClassifierConfig
from detr_bf.classification.task import ClassificationTask
from detr_bf.engine import RunFolder
from detr_bf.plugins import num_streams

TINY = (
    "model.options.patch_size=8",
    "model.options.embed_dim=16",
    "model.options.depth=8",
    "model.options.num_heads=2",
)
SMALL = ("--model", "vit_tiny_patch16_224", "--image-size", "32", "--batch-size", "4", "--rounds", "2")
ARGUMENTS = (*SMALL, "--device", "cpu")
DIGITS = (
    "data.name=digits",
    "data.workers=0",
    "data.per_class=4",
    "data.transforms.auto_augment=''",
    "data.transforms.erase=0",
    "data.transforms.horizontal_flip=0",
    "optimizer.name=sgd",  # its first step depends on the size of the gradient, AdamW's does not
    "optimizer.lr=1",
    "optimizer.warmup_epochs=0",
    "train.max_steps=1",
    "eval.pictures=0",
    "model.drop_path=0",
)
DOUBLED = {"batchformer", "batchformer_v2", "batchformer_v2_all", "batchformer_v2_duplicate"}


def config_of(variant: str, *settings: str) -> ClassifierConfig:
    options = argparse.Namespace(
        device="cpu", model="vit_tiny_patch16_224", batch_size=4, image_size=32, overrides=(*TINY, *settings)
    )
    return plugins.make_config(options, plugins.VARIANTS[variant].settings)


def rows_of(path: Path) -> list[tuple[str, str]]:
    return [(row["timed"], row["variant"]) for row in json.loads(path.read_text())["rows"]]


@pytest.mark.full
def test_every_variant_is_timed_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rows.json"
    assert plugins.main([*ARGUMENTS, "--output", str(output), *TINY]) == 0
    evaluated = [name for name, variant in plugins.VARIANTS.items() if variant.evaluated]
    expected = [("training step", name) for name in plugins.VARIANTS] + [("evaluation", name) for name in evaluated]
    assert rows_of(output) == expected
    record = json.loads(output.read_text())
    for row in record["rows"]:
        seconds = record["seconds"][f"{row['timed']}, {row['variant']}"]
        assert {name: len(times) for name, times in seconds.items()} == {"plain": 2, row["variant"]: 2}
        first, second = (one / other for one, other in zip(seconds[row["variant"]], seconds["plain"], strict=True))
        assert row["ratio"]["median"] == pytest.approx((first + second) / 2)
    assert record["machine"]["torch"] == torch.__version__
    assert (record["model"], record["batch_size"], record["image_size"]) == ("vit_tiny_patch16_224", 4, 32)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 4 + len(expected)
    assert len({line.count("|") for line in shown[2:]}) == 1
    assert sum("1.0243 or less" in line for line in shown) == 1, "of the training step alone"
    assert sum("negligible" in line for line in shown) == 3


def test_only_what_is_asked_for_is_timed(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    arguments = [*ARGUMENTS, *TINY, "train.precision=bf16", "--output", str(output)]
    assert plugins.main([*arguments, "--only", "diverse_patch", "relative_localization_ce"]) == 0
    assert rows_of(output) == [("training step", "diverse_patch"), ("training step", "relative_localization_ce")]


@pytest.mark.parametrize("variant", plugins.VARIANTS)
def test_a_step_learns_with_the_plug_in_it_is_named_after(variant: str) -> None:
    config = config_of(variant)
    step, plain = plugins.Step(config), plugins.Step(config_of(plugins.AGAIN))
    before = {name: value.clone() for name, value in step.network.state_dict().items()}
    for name, value in plain.network.state_dict().items():
        assert torch.equal(before[name], value), f"{name}: the variants start from the same weights"
    step()
    now = step.network.state_dict()
    moved = {name for name in before if not torch.equal(now[name], before[name])}
    assert {"head.weight", "blocks.0.attn.qkv.weight"} <= moved
    assert num_streams(step.network) == (2 if variant in DOUBLED else 1)
    added = dict(step.network.named_parameters()).keys() - plain.network.state_dict().keys()
    assert {name.split(".")[1] for name in added} == expected_plugins(variant)
    assert added <= moved
    assert all(parameter.grad is None for parameter in step.network.parameters())


def expected_plugins(variant: str) -> set[str]:
    """Variants that have parameters of their own."""
    if variant in (plugins.AGAIN, "batchformer_v2_duplicate", "context_broadcasting_upper", "context_broadcasting_all"):
        return set()
    names = ("batchformer_v2", "batchformer", "context_broadcasting", "diverse_patch", "relative_localization")
    return {next(name for name in names if variant.startswith(name))}


def test_the_batch_is_mixed_in_each_step_as_the_recipe_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for variant, along_patches in ((plugins.AGAIN, False), ("diverse_patch", True)):
        step = plugins.Step(config_of(variant))
        seen: list[LabelledImages] = []
        step.step.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        step()
        step()
        first, second = seen
        assert first.targets.soft_labels is not None
        assert not torch.equal(first.images, second.images)
        assert first.targets.soft_labels.shape == (4, plugins.NUM_CLASSES)
        assert (first.targets.patch_labels is not None) == along_patches


@pytest.mark.parametrize(
    "settings",
    [
        ("plain_again", "optimizer.name=adamw", "optimizer.lr=5e-4"),
        ("plain_again", "optimizer.clip_norm=0.1", "train.precision=bf16"),
        ("batchformer_v2", "plugins.batchformer_v2.dropout=0"),
        ("batchformer", "plugins.batchformer.dropout=0"),
        ("context_broadcasting_scaled",),
        ("diverse_patch",),
    ],
)
def test_it_is_the_step_of_a_training_run(
    settings: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variants that draw no random numbers in a step."""
    monkeypatch.setattr(plugins, "NUM_CLASSES", 10)
    monkeypatch.setattr(plugins, "SEED", 42)
    config = config_of(*settings, *DIGITS)
    measured = plugins.Step(config)
    splits = build_image_splits(config)
    measured.mix = None  # the loader's workers have mixed it
    measured.batch = next(train_batches(config, splits, measured.device)[0](0, 0))
    measured()
    trainer = ClassificationTask(config).build_trainer(RunFolder(tmp_path))
    trainer.train()
    assert trainer.progress.step == 1
    weights = measured.network.state_dict()
    assert weights.keys() == trainer.model.state_dict().keys()
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(weights[name], value, msg=name)


def test_evaluation_has_the_plug_in_only_where_it_is_active() -> None:
    plain = plugins.Evaluation(config_of(plugins.AGAIN))()
    assert plain.shape == (4, plugins.NUM_CLASSES)
    assert not plain.requires_grad
    for name, same in (("batchformer_v2_all", True), ("context_broadcasting_upper", False)):
        assert torch.equal(plugins.Evaluation(config_of(name))(), plain) == same


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "1"], "--rounds must be 2 or more"),
        (["--model", "vit_none"], "has no such model"),
        (["--batch-size", "0"], "train.batch_size"),
        (["--model", "resnet18", "--only", "batchformer_v2"], "expected timm's VisionTransformer"),
        (["model.options.depth=2", "--only", "batchformer_v2"], "the model has 2 blocks"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plugins.main(["--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
