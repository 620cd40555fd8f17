"""Repeatable splits of images into parts of like classes, and sources without the images that cannot be read."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache

from detr_bf.common.errors import InputError
from detr_bf.common.files import cache_folder
from detr_bf.common.text import counted, listed, printable
from detr_bf.data.checks.files import ImageRecord, check_files
from detr_bf.data.coco import CocoAnnotations, Source, read_annotations
from detr_bf.data.duplicates import near_groups
from detr_bf.data.formats.folder import images_of
from detr_bf.data.images import RGB, PixelFormat, check_folder

logger = logging.getLogger(__name__)

_MOST_NAMED = 20  # images in a warning
_NO_OBJECT = -1  # label of images without objects, which are spread over the parts as a class is


@lru_cache(maxsize=2)  # a run asks for both sides several times
def divided(
    source: Source, shares: tuple[float, ...], seed: int, workers: int, max_pixels: int, pixel_format: PixelFormat = RGB
) -> tuple[CocoAnnotations, list[set[str]]]:
    """Return the content of the annotations, and the file names of each part; copies are in one part.

    The images are read for their perceptual hashes, once: the records are those of the data checks.

    Args:
        source: of the images to divide.
        shares: see :func:`split_images`.
        seed: see :func:`split_images`.
        workers: threads that read image files.
        max_pixels: limit of an image.
        pixel_format: of the images.
    """
    content = read_annotations(source.annotations)
    check_folder(source.images)
    names = [image["file_name"] for image in content.images]
    records = check_files(ImageRecord, source.images, names, cache_folder("doctor"), workers, max_pixels, pixel_format)
    return content, split_images(content, shares, seed, near_groups(records))


@lru_cache(maxsize=4)  # a run asks for each split several times
def readable(source: Source, most: float, workers: int, max_pixels: int, pixel_format: PixelFormat = RGB) -> Source:
    """Return the source without the images that cannot be decoded, with a warning that names them.

    If they are more than the share ``most``, all images stay, for the data checks to report. Images that are too large,
    or cannot be read at all, always stay.
    """
    content = read_annotations(source.annotations)
    check_folder(source.images)
    names = {image["file_name"] for image in content.images}
    records = check_files(ImageRecord, source.images, names, cache_folder("doctor"), workers, max_pixels, pixel_format)
    # without a hash the content was not read: a fault of the disk, which may pass, or an image above the limit
    skipped = {name: record.problem for name, record in records.items() if record.problem and record.sha256}
    if not skipped or len(skipped) > most * len(names):
        return source
    kept = images_of(content, names - skipped.keys(), content.path)
    reasons = tuple(printable(f"{name}: {problem}") for name, problem in sorted(skipped.items()))
    logger.warning(
        "%s: %d of %s cannot be decoded and are left out: %s",
        printable(content.path),
        len(skipped),
        counted(len(names), "image"),
        listed(reasons, _MOST_NAMED),
    )
    return source._replace(annotations=kept, skipped=reasons)


def split_images(
    content: CocoAnnotations, shares: Sequence[float], seed: int, groups: Iterable[Sequence[str]] = ()
) -> list[set[str]]:
    """Assign every image to one part, so that each part has its share of the images of every class.

    Iterative stratification (Sechidis et al. 2011, "On the stratification of multi-label data", algorithm 1): the
    images of the class with the fewest images left are assigned first, each to the part that still wants most images of
    this class, on a tie most images, on a tie by a hash. The result is a function of the file names, the classes in
    each image, the groups and the seed; the order of the images does not matter.

    Args:
        content: images and objects; crowds count as objects.
        shares: fractions of the images, with the sum 1.
        seed: of the order of the images and of ties.
        groups: file names that must be in one part, such as copies. Each name is in at most one group.

    Returns:
        the file names of each part.

    Raises:
        InputError: a part would have no images.
    """
    labels = _labels_by_group(content, groups)
    order = sorted(labels, key=lambda group: (-len(group), _digest(seed, *group)))
    left = Counter(label for group in order for label in labels[group].elements())
    total = sum(len(group) for group in order)
    wanted = [{None: share * total, **{label: share * count for label, count in left.items()}} for share in shares]
    parts: list[set[str]] = [set() for _ in shares]
    members = defaultdict(list)  # groups by label
    for group in order:
        for label in labels[group]:
            members[label].append(group)
    while left:
        rarest = min(left, key=lambda label: (left[label], label))
        for group in members[rarest]:
            if group not in labels:
                continue
            best = max(
                range(len(shares)),
                key=lambda part: (wanted[part][rarest], wanted[part][None], _digest(seed, str(part), *group)),
            )
            parts[best].update(group)
            wanted[best][None] -= len(group)
            for label, count in labels.pop(group).items():
                wanted[best][label] -= count
                left[label] -= count
        del left[rarest]
    if not all(parts):
        raise InputError(
            f"{total} images in {len(order)} groups of copies cannot be divided into {len(shares)} parts: use "
            "fewer folds, another data.val_fraction, or more images"
        )
    return parts


def _labels_by_group(content: CocoAnnotations, groups: Iterable[Sequence[str]]) -> dict[tuple[str, ...], Counter[int]]:
    """Return the number of images of each class in each group, by the sorted names of the group."""
    names = {image["id"]: image["file_name"] for image in content.images}
    classes: dict[str, set[int]] = {name: set() for name in names.values()}
    for annotation in content.annotations:
        if annotation["image_id"] in names:
            classes[names[annotation["image_id"]]].add(annotation["category_id"])
    grouped = [tuple(sorted(group)) for group in groups]
    grouped += [(name,) for name in classes.keys() - {name for group in grouped for name in group}]
    return {group: Counter(label for name in group for label in classes[name] or (_NO_OBJECT,)) for group in grouped}


def _digest(seed: int, *names: str) -> bytes:
    text = "\n".join((str(seed), *names))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
