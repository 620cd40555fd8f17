"""Pascal VOC: one XML file for each image, beside it or in ``Annotations``, and lists of splits in ``ImageSets/Main``.

Format: development kit of the VOC challenge 2012 (http://host.robots.ox.ac.uk/pascal/VOC/voc2012). Its
coordinates count pixels from 1 and include the last one: the box covers ``xmin - 1`` to ``xmax`` pixels of the image,
as in detectron2 and hotcoco. ``difficult`` objects, which the challenge leaves out of its evaluation, become
``iscrowd`` 1, as in hotcoco and MMDetection: not trained on, and not counted when missed or found.

A PNG file ``SegmentationObject/a.png`` has the masks of the objects of ``a.xml``: its pixels are the number of the
object in the XML file, from 1, 0 for background and 255 for void, which belongs to no object.

The reader is written here because hotcoco's (1.3) is optional, accepts NaN, trusts the names in the XML files, refuses
a whole folder for one box with exchanged corners, and knows neither splits nor images in ``JPEGImages``.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

import numpy as np
from pycocotools import mask as coco_mask

from detr_bf.common.errors import InputError
from detr_bf.common.files import is_number, read_regular
from detr_bf.common.text import counted, listed, printable
from detr_bf.data.annotation_values import LARGEST
from detr_bf.data.formats.folder import (
    MASK_SPLITS,
    MAX_TEXT_BYTES,
    AnnotatedImage,
    DataFolder,
    NamedSplit,
    canonical,
    coco_content,
    images_by_stem,
    is_image,
    read_lines,
    stem_of,
)
from detr_bf.data.images import image_bytes, open_image
from detr_bf.data.masks import has_mask

logger = logging.getLogger(__name__)

_LISTS = {"imagesets/main": "", "imagesets/segmentation": MASK_SPLITS}  # by folder; prefix of their splits
_MAPS = frozenset(("segmentationobject", "segmentationclass"))  # folders of PNG files
_VOID = 255
_FOLDERS = ("Annotations", "JPEGImages")
_SPLIT = re.compile("train|val|test")  # in the names of folders
_SIDES = ("xmin", "ymin", "xmax", "ymax")


def read_voc(root: Path, names: Sequence[str]) -> DataFolder:
    """Read a Pascal VOC folder.

    The image of ``a.xml`` is ``a`` with the suffix of an image in any case, beside it or in ``JPEGImages`` or
    ``images`` instead of ``Annotations``; the name in the XML file is not used. XML files of a folder without any of
    their images belong to the images of the same names in another folder, if it is the only one. An image without XML
    file is left out. The lists in ``ImageSets/Segmentation`` are the splits ``Segmentation/train`` and so on.

    Args:
        root: of the data set.
        names: its files, relative to the root.

    Raises:
        InputError: an XML file is not readable or not in VOC's form; the message names it.
    """
    files: dict[str, str] = {}
    maps = {
        _stem_of_map(name): name
        for name in names
        if "segmentationobject" in name.lower().split("/") and name.lower().endswith(".png")
    }
    names = [name for name in names if _MAPS.isdisjoint(name.lower().split("/"))]
    for name in names:
        if name.lower().endswith(".xml") and (other := files.setdefault(stem_of(name), name)) != name:
            raise InputError(f"{printable(root)}: {printable(other)} and {printable(name)} are for the same image")
    images = images_by_stem(root, (name for name in names if stem_of(name) in files))
    images |= _images_elsewhere(root, names, files, images)
    labelled = [_read_image(root, name, images.get(stem)) for stem, name in files.items()]
    _add_masks(root, {maps[stem]: image for stem, image in zip(files, labelled, strict=True) if stem in maps})
    if alone := maps.keys() - files.keys():
        logger.warning("%s: %d PNG files in SegmentationObject belong to no XML file", printable(root), len(alone))
    if unlabelled := sum(map(is_image, names)) - len(images):
        logger.info("%s: %d images have no XML file and are left out", printable(root), unlabelled)
    if difficult := sum(one["iscrowd"] for image in labelled for one in image.objects):
        logger.info(
            "%s: %d difficult objects are not trained on, and ignored in evaluation", printable(root), difficult
        )
    by_name: dict[str, list[str]] = {}
    for name, image in zip(files.values(), labelled, strict=True):
        by_name.setdefault(PurePosixPath(canonical(name)).stem, []).append(image.file_name)
    splits = {
        f"{_LISTS[folder]}{path.stem}": NamedSplit(root / path, partial(_listed_images, root / path, by_name))
        for path in map(PurePosixPath, names)
        if path.suffix == ".txt" and (folder := str(path.parent).lower()) in _LISTS
    }
    return DataFolder(root, coco_content(root, labelled), splits)


def _images_elsewhere(
    root: Path, names: Sequence[str], files: Mapping[str, str], images: Mapping[str, str]
) -> dict[str, str]:
    """Return images by the stem of their XML file, for the folders of XML files that no image belongs to.

    Args:
        root: of the data set.
        names: its files.
        files: XML files by stem.
        images: those found so far, by stem.

    Raises:
        InputError: images of these names are in several folders, or no XML file at all has an image.
    """
    folders: dict[PurePosixPath, dict[str, str]] = {}
    for stem, name in files.items():
        folders.setdefault(PurePosixPath(name).parent, {})[PurePosixPath(name).stem] = stem
    free = [path for path in map(PurePosixPath, names) if is_image(str(path)) and stem_of(str(path)) not in files]
    advice = f"put them beside the images, or rename the folders to {_FOLDERS[0]} and {_FOLDERS[1]}"
    found: dict[str, str] = {}
    for folder, stems in folders.items():
        if not images.keys().isdisjoint(stems.values()):
            continue
        same = [path for path in free if path.stem in stems and _are_neighbours(folder, path.parent)]
        places = sorted({str(path.parent) for path in same})
        if len(places) > 1:
            raise InputError(
                f"{printable(root)}: the XML files of {printable(folder)} may belong to the images of each of "
                f"{listed(places)}: {advice}"
            )
        if places:
            logger.info("%s: XML files of %s, images of %s", printable(root), printable(folder), printable(places[0]))
        elsewhere = images_by_stem(root, map(str, same))
        found |= {stems[PurePosixPath(stem).name]: name for stem, name in elsewhere.items()}
    if files and not (images or found):
        raise InputError(f"{printable(root)}: none of its {len(files)} XML files has an image of its name: {advice}")
    return found


def _are_neighbours(one: PurePosixPath, other: PurePosixPath) -> bool:
    """Return True for paths that differ in one folder, but not in the name of a split (``train`` and ``test``)."""
    first, second = list(one.parts), list(other.parts)
    for end in (0, -1):
        while first and second and first[end] == second[end]:
            del first[end], second[end]
    words = [set(_SPLIT.findall("/".join(parts).lower())) for parts in (first, second)]
    return max(len(first), len(second)) <= 1 and (words[0] == words[1] or not all(words))


def _listed_images(path: Path, by_name: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the images of a list, which has one name without folder and suffix in each line."""
    found = set()
    for number, name in read_lines(path):
        files = by_name.get(canonical(name), ())
        if len(files) != 1:
            problem = f"of several images: {', '.join(map(printable, files))}" if files else "of no XML file"
            raise InputError(f"{printable(path)}:{number}: {printable(name)} is the name {problem}")
        found.add(files[0])
    return found


def _read_image(root: Path, name: str, image: str | None) -> AnnotatedImage:
    """Read one XML file; without an image the data checks report the file that is missing."""
    where = printable(root / name)
    tree = _parsed(root / name)
    objects = [_object(f"{where}: object {number}", one) for number, one in enumerate(tree.iterfind("object"), 1)]
    size = tree.find("size")
    sides = None if size is None else tuple(_number(where, size, side) for side in ("height", "width"))
    if sides is not None and not all(side >= 0 and side == int(side) for side in sides):
        raise InputError(f"{where}: size is {sides[1]:g} x {sides[0]:g}, expected whole numbers of pixels")
    known = (int(sides[0]), int(sides[1])) if sides is not None and all(sides) else None  # some tools write 0 x 0
    return AnnotatedImage(image or str(PurePosixPath(name).with_suffix(".jpg")), known, objects)


def _stem_of_map(name: str) -> str:
    """Return the stem of the XML file of a PNG file."""
    return stem_of("/".join(part for part in name.split("/") if part.lower() not in _MAPS))


def _add_masks(root: Path, images: Mapping[str, AnnotatedImage]) -> None:
    """Add the masks of PNG files to the objects, and the areas of the masks; log their number, and files left out.

    ``images`` are those that have a PNG file, by its name. A file that does not fit its XML file is left out.
    """
    problems = []
    for name, image in images.items():
        try:
            masks = _object_masks(root / name, len(image.objects), image.size)
        except (OSError, ValueError) as error:
            problems.append(f"{printable(name)}: {error}")
            continue
        for number, mask in masks.items():
            segmentation = {"size": mask["size"], "counts": mask["counts"].decode("ascii")}
            image.objects[number - 1].update(segmentation=segmentation, area=int(coco_mask.area(mask)))
    if images:
        objects = [one for image in images.values() for one in image.objects]
        logger.info(
            "%s: %d of the %d objects of %d images with a PNG file in SegmentationObject have masks",
            printable(root),
            sum(map(has_mask, objects)),
            len(objects),
            len(images),
        )
    if problems:
        logger.warning(
            "%s: the masks of %s are left out: %s",
            printable(root),
            counted(len(problems), "image"),
            listed(problems, separator="; "),
        )


def _object_masks(path: Path, objects: int, size: tuple[int, int] | None) -> dict[int, dict[str, Any]]:
    """Return the run lengths of the objects of a PNG file that have pixels, by number.

    Raises:
        OSError: the file cannot be read.
        ValueError: its pixels are no numbers of these objects, or its (height, width) is not ``size``.
    """
    image = open_image(image_bytes(path))
    if image.mode not in ("P", "L"):
        raise ValueError(
            f"a {image.mode} image, expected a palette: pixels are the number of the object in the XML file"
        )
    pixels = np.asarray(image)
    if size not in (None, pixels.shape):
        raise ValueError(f"{image.width} x {image.height} pixels (width x height), the image has {size[1]} x {size[0]}")
    numbers = [number for number in np.unique(pixels).tolist() if number not in (0, _VOID)]
    if numbers and numbers[-1] > objects:
        raise ValueError(f"pixels of object {numbers[-1]}, the XML file has {counted(objects, 'object')}")
    by_column = np.asfortranarray(pixels)
    return {number: coco_mask.encode((by_column == number).view(np.uint8)) for number in numbers}


class _NoDoctype(ElementTree.TreeBuilder):
    """Builder that refuses a document type, the place of entity definitions that expand without limit."""

    def doctype(self, *_: str | None) -> None:
        raise ValueError("it has a document type (<!DOCTYPE>), which annotations do not need")


def _parsed(path: Path) -> ElementTree.Element:
    try:
        data = read_regular(path, MAX_TEXT_BYTES)
        tree = ElementTree.fromstring(data, ElementTree.XMLParser(target=_NoDoctype()))
    except (OSError, ValueError, LookupError, ElementTree.ParseError) as error:  # LookupError: unknown encoding
        reason = printable(error) or type(error).__name__
        raise InputError(f"{printable(path)} is not a Pascal VOC annotation: {reason}") from error
    if tree.tag != "annotation":
        raise InputError(
            f"{printable(path)} is not a Pascal VOC annotation: expected <annotation>, got <{printable(tree.tag)}>"
        )
    return tree


def _object(where: str, one: ElementTree.Element) -> dict[str, Any]:
    """Return an object with its box; a box whose corners are equal or exchanged has no area, as in the file."""
    name = (one.findtext("name") or "").strip()
    if not name:
        raise InputError(f"{where} has no name")
    box = one.find("bndbox")
    if box is None:
        raise InputError(f"{where} ({printable(name)}) has no bndbox")
    left, top, right, bottom = (_number(f"{where} ({printable(name)})", box, side) for side in _SIDES)
    difficult = (one.findtext("difficult") or "0").strip()
    if difficult not in ("0", "1"):
        raise InputError(f"{where} ({printable(name)}): difficult is {printable(difficult)}, expected 0 or 1")
    width, height = _extent(left, right), _extent(top, bottom)
    return {
        "name": name,
        "bbox": [left - 1, top - 1, width, height],
        "area": max(0.0, width) * max(0.0, height),
        "iscrowd": int(difficult),
    }


def _extent(first: float, last: float) -> float:
    """Return the number of pixels from the first to the last.

    Two equal numbers are a click without a drag in annotation tools, not an object of one pixel: the extent is 0.
    """
    return last - first + (last > first)


def _number(where: str, parent: ElementTree.Element, tag: str) -> float:
    text = (parent.findtext(tag) or "").strip()
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not is_number(value, -LARGEST, LARGEST):
        raise InputError(f"{where}: {tag} is {printable(repr(text))}, expected a number of pixels")
    return value
