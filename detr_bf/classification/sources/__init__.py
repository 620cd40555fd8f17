"""Where labelled images come from: folders, lists of files, and data sets that are fetched or carried by packages."""

from __future__ import annotations

from detr_bf.classification.sources.fashion import fashion_mnist, garment_pairs
from detr_bf.classification.sources.files import image_folder, image_list
from detr_bf.classification.sources.small import cifar10, cifar100, digits, mnist
from detr_bf.classification.sources.splits import (
    ArrayImages,
    FileImages,
    Images,
    LabelledSplit,
    LabelledSplits,
    data_folder,
    require_no_flips,
    require_two_classes,
)
from detr_bf.data.images import MAX_PIXELS
from detr_bf.errors import InputError

FETCHED = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "fashion_mnist": fashion_mnist,
    "garment_pairs": garment_pairs,
    "digits": digits,
    "mnist": mnist,
}
ON_DISK = {"image_folder": image_folder, "list": image_list}

__all__ = [
    "ArrayImages",
    "FileImages",
    "Images",
    "LabelledSplit",
    "LabelledSplits",
    "data_folder",
    "read_splits",
    "require_no_flips",
    "require_two_classes",
]


def read_splits(name: str, root: str, train: str, val: str, max_pixels: int = MAX_PIXELS) -> LabelledSplits:
    """Both splits of a data set.

    Args:
        name: of the kind, one of ``FETCHED`` or ``ON_DISK``.
        root: folder of the images; of fetched data sets the cache, which has a default.
        train: folder (``image_folder``) or file (``list``) of the split; fetched data sets have their own.
        val: likewise.
        max_pixels: that an image file may have.

    Raises:
        InputError: an unknown name, or the data cannot be had.
    """
    if name in FETCHED:
        return FETCHED[name](data_folder(root))
    if name not in ON_DISK:
        raise InputError(f"data.name: got {name!r}, expected one of {', '.join((*FETCHED, *ON_DISK))}")
    if not root:
        raise InputError(f"data.root is not set: data.name={name} needs data.root=FOLDER, the folder of the images")
    return ON_DISK[name](root, train, val, max_pixels)
