"""What an examination is made of: the split, the checks, what they find, and how that names things."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from detr_bf.data.annotation_values import is_crowd, value_text
from detr_bf.data.checks.files import ImageRecord, MapRecord
from detr_bf.data.coco import CocoAnnotations, annotated_size
from detr_bf.data.masks import MapFile, SegmentExtent
from detr_bf.text import printable

_LONGEST_EXAMPLE = 2000  # characters

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One kind of problem in one split."""

    severity: Severity
    split: str
    code: str
    meaning: str  # what it is, and for a warning what happens to it
    count: int
    example: str


@dataclass(frozen=True)
class Split:
    """One annotation file with what is known about its image files."""

    name: str
    folder: Path
    content: CocoAnnotations
    files: Mapping[str, ImageRecord]
    num_queries: int
    masks: bool = False  # whether masks are wanted
    maps: Mapping[str, MapRecord] = field(default_factory=dict)  # of the PNGs, where those are the masks

    @cached_property
    def images(self) -> dict[int, Mapping[str, Any]]:
        return {image["id"]: image for image in self.content.images}

    @cached_property
    def objects(self) -> list[Mapping[str, Any]]:
        """Annotations that are not crowds."""
        return [annotation for annotation in self.content.annotations if not _is_valid_crowd(annotation)]

    @cached_property
    def objects_per_image(self) -> Counter[int]:
        return Counter(annotation["image_id"] for annotation in self.objects)

    @cached_property
    def names(self) -> dict[int, str]:
        """Class names by category id."""
        class_map = self.content.class_map
        return dict(zip(class_map.category_ids, class_map.names, strict=True))

    def file(self, image: Mapping[str, Any]) -> ImageRecord | None:
        return self.files.get(image["file_name"])

    def size(self, image: Mapping[str, Any]) -> tuple[int, int] | None:
        """(height, width) that the boxes refer to, as far as it is known."""
        record = self.file(image)
        return annotated_size(image) or (record.sizes.rotated if record and record.sizes else None)

    @property
    def map_files(self) -> tuple[MapFile, ...]:
        """The PNGs that masks are wanted from."""
        return self.content.maps or () if self.masks else ()

    @property
    def maps_wanted(self) -> bool:
        """True if panoptic maps are trained on and evaluated."""
        return self.masks and self.content.maps is not None

    @cached_property
    def extents(self) -> dict[str, dict[int, SegmentExtent]]:
        """What the readable PNGs hold, by file name and segment id."""
        return {
            name: {segment.id: segment for segment in record.segments}
            for name, record in self.maps.items()
            if record.size
        }


@dataclass(frozen=True)
class Check:
    """A kind of problem and how to find it: ``find`` gives the description of each case in a split, or in both."""

    severity: Severity
    code: str
    meaning: str
    find: Callable[..., Iterator[str]]

    def on(self, name: str, *splits: Any) -> Finding | None:
        """The finding, if there is one, with the first case as its example."""
        cases = list(self.find(*splits))
        if not cases:
            return None
        return Finding(self.severity, name, self.code, self.meaning, len(cases), printable(cases[0], _LONGEST_EXAMPLE))


def _is_valid_crowd(annotation: Mapping[str, Any]) -> bool:
    with suppress(ValueError):  # which has a check of its own
        return is_crowd(annotation)
    return False


def repeated(values: Iterable[Any]) -> Iterator[Any]:
    """Each value that occurs more than once, as often as it is too many."""
    return (value for value, count in Counter(values).items() for _ in range(count - 1))


def shared_images(train: Any, val: Any) -> Iterator[str]:
    """Files of both splits, each with a ``folder`` and its ``files``, whose content is the same."""
    by_content = {record.sha256: name for name, record in train.files.items() if record.sha256}
    for name, record in val.files.items():
        if record.sha256 in by_content:
            yield f"{printable(val.folder / name)} is {printable(train.folder / by_content[record.sha256])}"


def image_text(image: Mapping[str, Any]) -> str:
    """Its id and its file."""
    return f"image {image['id']}, {printable(image['file_name'])}"


def annotation_text(annotation: Mapping[str, Any]) -> str:
    """Its id and its image's."""
    return f"annotation {value_text(annotation.get('id'))} of image {annotation['image_id']}"


def box_text(annotation: Mapping[str, Any]) -> str:
    """The annotation and its box."""
    return f"{annotation_text(annotation)}: bbox {value_text(annotation.get('bbox'))}"
