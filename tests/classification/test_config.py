"""Defaults and checks of classifier and masked-autoencoder settings."""

from __future__ import annotations

import pytest

from detr_bf.classification.config import ClassifierConfig
from detr_bf.classification.masked_config import MaskedConfig
from detr_bf.common.errors import InputError
from detr_bf.config import known_keys, load_config


def test_masked_pre_training_starts_from_its_own_published_recipe() -> None:
    config = load_config(None, task="masked_autoencoding")
    transforms, optimizer = config.data.transforms, config.optimizer
    assert (transforms.crop, transforms.area, transforms.horizontal_flip) == ("resized", [0.2, 1.0], 0.5)
    assert (transforms.auto_augment, transforms.color_jitter, transforms.erase) == ("", 0, 0)
    assert (optimizer.name, optimizer.betas, optimizer.weight_decay) == ("adamw", [0.9, 0.95], 0.05)
    assert (optimizer.schedule, optimizer.warmup_epochs, optimizer.min_lr, optimizer.lr) == ("cosine", 40, 0, 1.5e-4)
    assert not any(key.startswith("data.mix") for key in known_keys(MaskedConfig))
    with pytest.raises(InputError, match=r"unknown key 'data.mix"):
        load_config(None, ["data.mix.mixup=0"], task="masked_autoencoding")


def test_classifiers_keep_the_recipe_of_deit_without_drop_path() -> None:
    config = load_config(None, task="classification")
    transforms, optimizer = config.data.transforms, config.optimizer
    assert (transforms.area, transforms.auto_augment, transforms.color_jitter, transforms.erase) == (
        [0.08, 1.0],
        "rand-m9-mstd0.5-inc1",
        0.3,
        0.25,
    )
    assert (optimizer.betas, optimizer.warmup_epochs, optimizer.min_lr) == ([0.9, 0.999], 5, 1e-5)
    assert (config.data.mix.mixup, config.data.mix.cutmix, config.model.drop_path) == (0.8, 1, 0)


def test_both_have_the_same_settings_of_data_and_optimizer_but_for_mixing_and_labels() -> None:
    def keys(schema: type) -> set[str]:
        return {key for key in known_keys(schema) if key.startswith(("data.", "optimizer.", "train."))}

    mixing = {f"data.mix.{name}" for name in ("mixup", "cutmix", "probability", "switch")}
    assert keys(ClassifierConfig) - keys(MaskedConfig) == mixing | {"data.val_subset", "data.val_labels"}
    assert keys(MaskedConfig) <= keys(ClassifierConfig)


def test_a_cosine_that_would_rise_is_refused() -> None:
    low = ["optimizer.lr=1e-6"]
    with pytest.raises(InputError, match=r"optimizer.min_lr=1e-05, the end of the cosine, .* optimizer.lr=1e-06"):
        load_config(None, low, task="classification")
    load_config(None, [*low, "optimizer.min_lr=1e-6"], task="classification")
    load_config(None, [*low, "optimizer.schedule=step"], task="classification")
    load_config(None, low, task="masked_autoencoding")
