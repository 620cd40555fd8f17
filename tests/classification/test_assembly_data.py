from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from detr_bf.classification.assembly_data import (
    PatchMixing,
    build_image_eval_transform,
    build_image_splits,
    build_mix,
    check_image_data,
    patch_size,
    read_image_splits,
    train_batches,
    val_loop,
)
from detr_bf.classification.augmentation import BatchMix
from detr_bf.classification.batch import ClassTargets, LabelledImages
from detr_bf.classification.config import ClassifierConfig, ImageTransformConfig
from detr_bf.classification.data import FileImages
from detr_bf.common import distributed
from detr_bf.common.errors import InputError
from detr_bf.config import load_config

CPU = torch.device("cpu")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Classes a and b of 6 training and 3 validation images each."""
    random = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 3)):
        for name in "ab":
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (12, 10, 3), np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{number}.png")
    return tmp_path


def config_for(root: Path, *overrides: str, task: str = "classification") -> ClassifierConfig:
    path = root / "config.yaml"
    if not path.exists():
        path.write_text(
            f"data: {{name: image_folder, root: '{root}', workers: 0, transforms: {{size: 8}}}}\n"
            "train: {batch_size: 4}\neval: {batch_size: 4}\n"
        )
    return load_config(path, overrides, task=task)


def test_16_bit_images_are_scaled_by_the_bits_of_the_training_images(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DETR_BF_HOME", str(root / "cache"))
    values = np.arange(120, dtype=np.uint16).reshape(12, 10)
    for path in root.glob("*/*/*.png"):
        Image.fromarray(values).save(path)
    Image.fromarray(values * 32).save(root / "train" / "b" / "3.png")  # 12 bits
    config = config_for(root)
    splits = read_image_splits(config)
    assert config.data.grey_bits == 12
    assert "from the 12 bits that the training images use" in caplog.text
    for split in (splits.train, splits.val):
        assert torch.equal(split.images.read(0)[0], torch.from_numpy((values >> 4).astype(np.uint8)))


def epoch(config: ClassifierConfig, number: int = 0, start: int = 0) -> list[LabelledImages]:
    make_batches, count = train_batches(config, build_image_splits(config), CPU)
    batches = list(make_batches(number, start))
    assert len(batches) == count - start
    return batches


def test_training_batches_are_mixed_and_smoothed(root: Path) -> None:
    batches = epoch(config_for(root))
    assert [batch.images.shape for batch in batches] == [(4, 3, 8, 8)] * 3
    for batch in batches:
        assert batch.targets.soft_labels is not None
        assert float(batch.targets.soft_labels.min()) >= 0.05 - 1e-6
    later = epoch(config_for(root), start=1)
    assert all(torch.equal(one.images, other.images) for one, other in zip(batches[1:], later, strict=True))
    assert {batch.targets.epoch for batch in epoch(config_for(root), 5)} == {5}


def test_two_processes_see_the_images_of_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off = ("data.mix.probability=0",)
    alone = epoch(config_for(root, *off))
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    shares = []
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        shares.append(epoch(config_for(root, *off, "train.batch_size=2")))
    for whole, *parts in zip(alone, *shares, strict=True):
        assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
        assert whole.targets.soft_labels is None


def test_the_long_tail_counts_what_is_left(root: Path) -> None:
    splits = build_image_splits(config_for(root, "data.long_tail.imbalance=3", "data.long_tail.order=[1,0]"))
    assert splits.class_counts == (2, 6)
    assert len(splits.train) == 8
    assert splits.val.class_counts == (3, 3), "validation stays balanced"
    same = build_image_splits(config_for(root, "data.long_tail.imbalance=3", "data.long_tail.order=[1,0]", "seed=7"))
    assert same.train.images == splits.train.images
    assert build_image_splits(config_for(root, "data.per_class=4")).class_counts == (4, 4)


def test_runs_of_one_seed_draw_the_same_subset_and_other_seeds_others(root: Path) -> None:
    def names(*settings: str) -> list[str]:
        images = read_image_splits(config_for(root, "data.per_class=3", *settings)).train.images
        assert isinstance(images, FileImages)
        return list(images.names)

    drawn = {seed: names("data.subset_seed=null", f"seed={seed}") for seed in range(5)}
    assert len({*map(tuple, drawn.values())}) > 2
    for seed, images in drawn.items():
        assert names("data.subset_seed=null", f"seed={seed}", "data.mix.cutmix=0.5") == images, "arms are paired"
        assert names(f"data.subset_seed={seed}", "seed=9") == images
        assert names(f"seed={seed}") == drawn[0], "the same for every seed, unless set"


def test_a_class_without_training_images_is_refused(root: Path) -> None:
    for path in (root / "train/b").iterdir():
        path.unlink()
    with pytest.raises(InputError, match="1 of 2 classes have no training images, such as b"):
        build_image_splits(config_for(root))


class Brightness(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((1, 2, 3))


def test_every_validation_image_comes_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(root)
    splits = build_image_splits(config)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    seen = {}
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        loop = val_loop(config, splits, CPU)
        batches = loop.make_batches(0)
        assert loop.num_batches == 1
        for batch in batches:
            assert batch.targets.soft_labels is None
            assert (rank, len(batch)) in ((0, 4), (1, 2))
            seen |= dict(zip(batch.indices.tolist(), batch.targets.labels.tolist(), strict=True))
    assert seen == dict(enumerate([0, 0, 0, 1, 1, 1]))


def test_the_loop_runs_a_model(root: Path) -> None:
    config = config_for(root)
    found = list(val_loop(config, build_image_splits(config), CPU)(Brightness(), lambda: False))
    assert sum(len(outputs) for _, outputs in found) == 6


def test_what_mixes(root: Path) -> None:
    assert isinstance(build_mix(config_for(root), 2), BatchMix)
    for off in (["data.mix.probability=0"], ["data.mix.mixup=0", "data.mix.cutmix=0"]):
        assert build_mix(config_for(root, *off), 2) is None
    diverse = ("plugins.diverse_patch.enabled=true", "model.name=vit_tiny_patch16_224", "model.options={patch_size: 4}")
    assert build_mix(config_for(root, *diverse), 2) == PatchMixing((4, 4), 2, 0.1)
    no_loss = (*diverse, "plugins.diverse_patch={cosine: 0, contrastive: 0, mixing: 0}")
    assert build_mix(config_for(root, *no_loss), 2) == PatchMixing((4, 4), 2, 0.1), "the control for its losses"
    assert isinstance(build_mix(config_for(root, *no_loss, "plugins.diverse_patch.patch_cutmix=false"), 2), BatchMix)
    assert build_mix(config_for(root, task="masked_autoencoding"), 2) is None


def test_pretraining_sees_images_alone(root: Path) -> None:
    assert all(batch.targets.soft_labels is None for batch in epoch(config_for(root, task="masked_autoencoding")))


@pytest.mark.parametrize(
    ("crop", "given", "share"), [("resized", None, 0.875), ("padded", None, 1), ("none", None, 1), ("padded", 0.5, 0.5)]
)
def test_evaluation_cuts_edges_off_where_training_takes_random_areas(
    crop: str, given: float | None, share: float
) -> None:
    transform = build_image_eval_transform(ImageTransformConfig(size=28, crop=crop, eval_crop=given))
    assert transform.full == (28 / share, 28 / share)


def test_patches_are_mixed_in_the_loader(root: Path) -> None:
    diverse = ("plugins.diverse_patch.enabled=true", "model.name=vit_tiny_patch16_224", "model.options={patch_size: 4}")
    batches = epoch(config_for(root, *diverse))
    for batch in batches:
        assert batch.targets.patch_labels is not None
        assert batch.targets.patch_labels.shape == (4, 4)
        assert batch.targets.soft_labels is not None


def test_patch_mixing_is_a_function_of_the_seed() -> None:
    mix = PatchMixing((2, 2), 3, 0.0)
    batch = LabelledImages(torch.rand(6, 3, 8, 8), ClassTargets(torch.arange(6) % 3, epoch=4), torch.arange(6))
    state = torch.get_rng_state()
    first, second, other = mix(batch, 1), mix(batch, 1), mix(batch, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.images, second.images)
    assert not torch.equal(first.images, other.images)
    assert first.targets.epoch == 4
    assert first.targets.patch_labels is not None
    assert first.targets.soft_labels is not None
    counted = torch.stack([(first.targets.patch_labels == label).float().mean(1) for label in range(3)], 1)
    torch.testing.assert_close(first.targets.soft_labels, counted)


def test_patches_of_a_network_without_any_are_refused(root: Path) -> None:
    assert patch_size(config_for(root, "model.name=deit_tiny_patch16_224", "data.transforms.size=32")) == (16, 16)
    with pytest.raises(InputError, match="got a ResNet, expected timm's VisionTransformer"):
        patch_size(config_for(root, "model.name=resnet18"))


def test_the_doctor_looks_at_the_whole_data(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETR_BF_HOME", str(root / "cache"))
    (root / "train/a/0.png").write_bytes(b"")
    report = check_image_data(config_for(root, "data.per_class=1"))
    assert [finding.code for finding in report.errors] == ["file-unreadable"]
    assert "train: 12 images, 2 classes" in str(report)


def test_balanced_softmax_is_never_smoothed(root: Path) -> None:
    """Balanced Softmax needs hard labels, with mixing or without."""
    settings = ("data.mix.mixup=1", "loss.label_smoothing=0.3")
    found = [
        build_mix(config_for(root, *settings, f"loss.name={name}"), 2) for name in ("cross_entropy", "balanced_softmax")
    ]
    assert [mix.smoothing for mix in found if isinstance(mix, BatchMix)] == [0.3, 0.0]
