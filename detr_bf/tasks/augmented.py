"""Picture of training images with each augmentation, for ``detr-bf check --show-augmented``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from PIL.PngImagePlugin import PngInfo
from torch import Tensor
from torchvision.ops import box_convert

from detr_bf.assembly.data import augmented_epochs, build_train_data
from detr_bf.common.errors import InputError
from detr_bf.common.files import atomic_write, check_output_file, make_output_folder
from detr_bf.common.structures import Batch, Target
from detr_bf.common.text import printable
from detr_bf.config import DetectionConfig
from detr_bf.data.augment import Augmentation
from detr_bf.data.batches import SampleKey
from detr_bf.data.coco import CocoDetection
from detr_bf.data.images import displayed
from detr_bf.data.transforms import Sample, mixup
from detr_bf.report import Augmented, augmented_sheet, class_labels

_FILE = "augmented.png"  # in a folder
_MARK = "detr-bf check --show-augmented"  # in the sheet: a file without it is not replaced
_OPTION = "--show-augmented"
_HEAD = 2**12  # bytes of an existing picture that are read: they hold the mark


def sheet_path(given: Path) -> Path:
    """Return the file of the sheet: ``given`` with the suffix .png, or ``augmented.png`` in this folder.

    Raises:
        InputError: it cannot be written, or it exists and is not a sheet of this command.
    """
    path = given if given.suffix.lower() == ".png" else given / _FILE
    if given.suffix and path == given / _FILE and not given.is_dir():
        raise InputError(f"{_OPTION} {printable(given)}: expected a folder, or a file with the suffix .png")
    check_output_file(path, _OPTION)
    if path.exists() and not _is_ours(path):
        raise InputError(
            f"{_OPTION} {printable(path)} exists and was not written by this command; move it, or name another file"
        )
    return path


def _is_ours(path: Path) -> bool:
    """Return True for a file that begins with a sheet's head, False also if it cannot be read."""
    try:
        with path.open("rb") as file:
            return _MARK.encode() in file.read(_HEAD)
    except OSError:
        return False


def write_augmented(config: DetectionConfig, path: Path, count: int) -> str:
    """Write the sheet of ``count`` training images to ``path``, and return the line to print.

    Raises:
        InputError: the training data cannot be read, or the file cannot be written.
    """
    data = build_train_data(config)
    # spread evenly over the data
    indices = [round(x) for x in torch.linspace(0, len(data) - 1, min(count, len(data))).tolist()]
    rows, titles = _versions(config, data, indices)
    sheet = augmented_sheet(rows, titles, class_labels(data.class_map))
    info = PngInfo()
    info.add_text("Software", _MARK)
    make_output_folder(path.parent, _OPTION)
    with atomic_write(path) as temporary:
        sheet.save(temporary, format="PNG", optimize=True, pnginfo=info)
    return f"{len(indices)} training images, {', '.join(titles)}: {printable(path)}"


def _versions(
    config: DetectionConfig, data: CocoDetection, indices: Sequence[int]
) -> tuple[Iterator[Iterator[Augmented]], list[str]]:
    """Yield the versions of some training images, image after image; also return the names of the versions.

    They are the image as it is, with each augmentation alone, as in the first epoch with all of them, and with mixup:
    mixed with the image before it, the first with the last one of the training data.
    """
    before = dict(zip(indices, [len(data) - 1, *indices], strict=False))
    epoch, sides = augmented_epochs(config)[1].start, config.data.batch_sides
    side = sides[len(sides) // 2] if sides else None  # as for one batch

    def alone(changed: CocoDetection, index: int) -> Augmented:
        return _shown(*changed[SampleKey(0, index)])

    def trained(index: int) -> Augmented:
        return _shown(*data[SampleKey(epoch, index, side=side)])

    def mixed(index: int) -> Augmented:
        pair = dict.fromkeys((before[index], index))  # one image, if there are no others
        batch = mixup(Batch.collate([data[SampleKey(epoch, each, side=side)] for each in pair]), 0.5)
        return _shown(batch.images[-1], batch.targets[-1])

    columns: dict[str, Callable[[int], Augmented]] = {"original": partial(alone, _with(data, None))}
    if data.augment is not None:
        for name in data.augment.names:
            only = replace(data.augment.only(name), epochs=range(1), dense_epochs=range(1))
            columns[name] = partial(alone, _with(data, only))
    columns["as trained"] = trained
    if config.data.mixup.prob:
        columns["with mixup"] = mixed
    # made when they are drawn and not kept, because the sheet shrinks one picture after the other
    return ((make(index) for make in columns.values()) for index in indices), list(columns)


def _with(data: CocoDetection, augment: Augmentation | None) -> CocoDetection:
    """Return the data set with another augmentation and no other transform."""

    def unchanged(sample: Sample) -> Sample:
        return sample

    changed = copy.copy(data)
    changed.augment, changed.transform = augment, unchanged
    return changed


def _shown(image: Tensor, target: Target) -> Augmented:
    height, width = target.size
    boxes = box_convert(target.boxes, "cxcywh", "xyxy") * torch.tensor([width, height] * 2)
    return Augmented(displayed(image[:, :height, :width]), boxes, target.labels)
