"""Configs of tiny classifiers and of their pre-training on scikit-learn's digits, for tests of every tool."""

from __future__ import annotations

from pathlib import Path

from tests.tools.test_train_classifier import TINY, TRANSFORMS


def classifier_config(folder: Path) -> Path:
    """Write the config of a tiny ViT, four steps an epoch; its run is ``folder / "run"``."""
    path = folder / "classifier.yaml"
    path.write_text(f"{TINY}output_dir: {folder / 'run'}\n")
    return path


def masked_config(folder: Path) -> Path:
    """Write the config of a tiny masked autoencoder; its run is ``folder / "mae"``."""
    decoder = "  decoder_dim: 16\n  decoder_depth: 2\n  decoder_heads: 2\n"
    path = folder / "masked.yaml"
    text = TINY.replace("  name: vit", f"{decoder}  name: vit").replace(
        "task: classification", "task: masked_autoencoding"
    )
    path.write_text(f"{text}output_dir: {folder / 'mae'}\n")
    return path


def contrastive_config(folder: Path) -> Path:
    """Write the config of contrastive pre-training of a tiny ViT; its run is ``folder / "moco"``."""
    text = TINY.replace(TRANSFORMS, "{size: 16}").replace("pictures: 4", "").replace(", }", "}")
    text = text.replace("  name: vit", "  hidden: 32\n  dim: 8\n  name: vit").replace("lr: 0.001", "lr: 0.3")
    path = folder / "contrastive.yaml"
    path.write_text(
        text.replace("task: classification", "task: contrastive_learning") + f"output_dir: {folder / 'moco'}\n"
    )
    return path
