"""Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747), and pairs of its garments side by side."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import FashionMNIST

from detr_bf.classification.sources.debian import Package, unpacked
from detr_bf.classification.sources.splits import LabelledSplits, array_split, class_map_of, fetching
from detr_bf.errors import InputError

PACKAGE = Package(
    "dataset-fashion-mnist",
    "0.0~git20200523.55506a9-1",
    "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
)
PACKAGE_FOLDER = Path("usr/share/datasets/fashion-mnist")
TORCHVISION_FOLDER = Path("FashionMNIST/raw")
SHA256 = {  # of the files without their compression
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
NAMES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
PARTS = {"train": (500, 2021), "t10k": (100, 2022)}  # pairs of each of 100 classes, as CIFAR-100 has; their seed
_HEADER = {"images": 16, "labels": 8}  # bytes of an idx file before its values


def fashion_mnist(folder: Path) -> LabelledSplits:
    """10 classes of 6,000 training and 1,000 validation images, grey, 28 x 28.

    Files that lie in ``folder`` are used; else Debian's package is fetched, else torchvision downloads them.

    Raises:
        InputError: the files cannot be had, or are not what they should be.
    """
    files = _files(folder)
    train, val = (array_split(*_garments(files, part), f"{files}, {part}") for part in PARTS)
    return LabelledSplits(train, val, class_map_of(NAMES))


def _garments(files: Path, part: str) -> tuple[Tensor, Tensor]:
    """Pixels (N, 28, 28) and labels (N,), both uint8."""
    return _values(files, part, "images").view(-1, 28, 28), _values(files, part, "labels")


def garment_pairs(folder: Path) -> LabelledSplits:
    """Two garments side by side, grey, 28 x 56: 100 classes, 10 a + b for garment a on the left and b on the right.

    Of each class 500 training and 100 validation pairs, always the same, of images drawn from the split's own.
    """
    files = _files(folder)
    train, val = (
        array_split(*pairs_of(*_garments(files, part), count, seed), f"pairs of {files}, {part}")
        for part, (count, seed) in PARTS.items()
    )
    names = class_map_of([f"{left} + {right}" for left in NAMES for right in NAMES])
    return LabelledSplits(train, val, names, mirrored="a mirrored pair is of another class")


def pairs_of(pixels: Tensor, labels: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """``count`` pairs of each two classes, in the order of their numbers: (M, h, 2 w) and labels (M,) 10 a + b.

    Args:
        pixels: (N, h, w).
        labels: (N,), 0 to 9.
    """
    random = np.random.RandomState(seed)  # of all generators the one whose numbers NumPy never changes
    of_class = [np.flatnonzero(labels.numpy() == number) for number in range(len(NAMES))]
    lefts, rights = [], []
    for left in of_class:
        for right in of_class:
            lefts.append(random.choice(left, count))
            rights.append(random.choice(right, count))
    sides = [pixels[torch.from_numpy(np.concatenate(places))] for places in (lefts, rights)]
    return torch.cat(sides, dim=-1), torch.arange(len(NAMES) ** 2).repeat_interleave(count)


def _files(folder: Path) -> Path:
    """The folder of the four files, which are fetched if need be."""
    places = (folder, folder / TORCHVISION_FOLDER, Path("/") / PACKAGE_FOLDER)
    with fetching(folder):
        for place in places:
            if all(_file(place, name) for name in SHA256):
                return place
        try:
            return unpacked(PACKAGE, folder) / PACKAGE_FOLDER
        except InputError as error:
            debian = error
        try:
            FashionMNIST(folder, download=True)
        except (OSError, RuntimeError) as error:
            raise InputError(
                f"Fashion-MNIST cannot be had. Debian's package {PACKAGE.name}: {debian}. torchvision's download: "
                f"{error}. With a network either works; without one, put the package {PACKAGE.file_name} or the files "
                f"{', '.join(SHA256)} (or their .gz) into {folder}"
            ) from error
        return folder / TORCHVISION_FOLDER


def _file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _values(folder: Path, part: str, kind: str) -> Tensor:
    """What stands behind the header of a file, (n,) uint8; :class:`InputError` if its hash is another."""
    name = f"{part}-{kind}-idx{3 if kind == 'images' else 1}-ubyte"
    path = _file(folder, name)
    if path is None:
        raise InputError(f"{folder} has no {name} and no {name}.gz: delete the folder and run again")
    data = path.read_bytes()
    try:
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError) as error:
        raise InputError(f"{path} is damaged ({error}): delete the file and run again") from error
    found = hashlib.sha256(data).hexdigest()
    if found != SHA256[name]:
        raise InputError(f"{path} has SHA-256 {found}, expected {SHA256[name]}: delete the file and run again")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=_HEADER[kind])
