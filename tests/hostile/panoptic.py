"""Panoptic data and instance masks: wrong JSON values, unusual PNG files, malicious run lengths and polygons."""

from __future__ import annotations

import functools
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.hostile import fixtures
from tests.hostile.annotations import (
    HERE,
    HUGE,
    Change,
    Content,
    agree,
    detection,
    drop,
    entry,
    fifo,
    put,
    sparse,
    twice,
)
from tests.hostile.battery import Build, Case, CaseFiles

MASKS = "  masks: true\n"


def segment(key: str, value: Any) -> Change:
    """Set one value of the first segment of the first image."""

    def change(content: Content) -> None:
        content["annotations"][0]["segments_info"][0][key] = value

    return change


def no_segment_key(key: str) -> Change:
    def change(content: Content) -> None:
        del content["annotations"][0]["segments_info"][0][key]

    return change


def same_stem(content: Content) -> None:
    """Two images that differ only in the extension: their maps would have the same name."""
    content["images"][1]["file_name"] = content["images"][0]["file_name"].replace(".png", ".jpg")


def panoptic(change: Change, split: str = "train") -> Build:
    """A run with a mask head, on changed panoptic data."""

    def build(files: CaseFiles) -> Callable[[], int]:
        first = {"train": 1, "val": 101}
        content = fixtures.panoptic(first=first[split])
        replaced = change(content)
        config = detection(files, **{split: replaced if isinstance(replaced, dict) else content}, panoptic=True)
        _with_masks(config)
        return lambda: agree(config)

    return build


def _with_masks(config: Path) -> None:
    config.write_text(config.read_text().replace("model:\n", f"model:\n{MASKS}", 1))


def map_file(make: Callable[[Path], Any], split: str = "train") -> Build:
    """Replace the first PNG of a split."""

    def build(files: CaseFiles) -> Callable[[], int]:
        config = detection(files, panoptic=True)
        _with_masks(config)
        folder = files.copy(f"panoptic_{split}/panoptic", "maps")
        source = files.fixtures / f"panoptic_{split}"
        config.write_text(config.read_text().replace(f"panoptic: {source}/panoptic", f"panoptic: {folder}"))
        path = folder / ("0001_map.png" if split == "train" else "0101_map.png")
        path.unlink()
        make(path)
        return lambda: agree(config)

    return build


def image(mode: str, size: tuple[int, int] = (fixtures.WIDTH, fixtures.HEIGHT)) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        Image.new(mode, size).save(path, format="PNG")

    return make


def sixteen_bit(path: Path) -> None:
    Image.fromarray(np.full((fixtures.HEIGHT, fixtures.WIDTH), 300, np.uint16)).save(path)


def palette(path: Path) -> None:
    Image.new("RGB", (fixtures.WIDTH, fixtures.HEIGHT), (11, 0, 0)).quantize(4).save(path)


def jpeg(path: Path) -> None:
    Image.new("RGB", (fixtures.WIDTH, fixtures.HEIGHT), (11, 0, 0)).save(path, format="JPEG")


def content(data: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(data)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, rows: bytes = b"", bits: int = 8, colours: int = 2) -> bytes:
    """A PNG file whose header claims that size."""
    header = struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@functools.cache
def bomb(side: int = 30_000) -> bytes:
    """A small file with nearly a billion 1-bit pixels, all zero."""
    squeezer = zlib.compressobj(9)
    row = bytes(1 + side // 8)
    rows = b"".join(squeezer.compress(row * 1000) for _ in range(side // 1000)) + squeezer.flush()
    return png(side, side, rows, bits=1, colours=0)


BAD: dict[str, tuple[Change, str]] = {
    "segments_info is null": (put("annotations", "segments_info", None), "segments_info"),
    "segments_info is an object": (put("annotations", "segments_info", {}), "segments_info"),
    "segments_info is missing once": (drop("annotations", "segments_info"), "segments_info"),
    "segment is a number": (put("annotations", "segments_info", [3]), "segments_info[0]"),
    "segment id is a string": (segment("id", "11"), "id"),
    "segment id is 0": (segment("id", 0), "id"),
    "segment id is negative": (segment("id", -1), "id"),
    "segment id of 2**24": (segment("id", 2**24), "id"),
    "segment id of 400 digits": (segment("id", HUGE), "id|digits"),
    "segment without category": (no_segment_key("category_id"), "category_id"),
    "segment of no category": (segment("category_id", 55), "55"),
    "segment twice": (
        lambda c: c["annotations"][0]["segments_info"].append(dict(c["annotations"][0]["segments_info"][0])),
        "11",
    ),
    "area is a string": (segment("area", "100"), "area"),
    "area is a list": (segment("area", [100]), "area"),
    "area is NaN": (segment("area", float("nan")), "area"),
    "area is negative": (segment("area", -1), "area"),
    "iscrowd is '0'": (segment("iscrowd", "0"), "iscrowd"),
    "iscrowd is a list": (segment("iscrowd", []), "iscrowd"),
    "map name is missing": (drop("annotations", "file_name"), "file_name"),
    "map name is a number": (put("annotations", "file_name", 5), "file_name"),
    "map name is absolute": (put("annotations", "file_name", f"{HERE}/notes.md"), "notes.md"),
    "map name leaves the folder": (
        put("annotations", "file_name", "../../panoptic_val/panoptic/0101_map.png"),
        "file_name|..|0101_map",
    ),
    "map name is missing on disk": (put("annotations", "file_name", "nope.png"), "nope.png"),
    "map name with NUL": (put("annotations", "file_name", "a\0.png"), "\\x00"),
    "map name of 300 letters": (put("annotations", "file_name", "m" * 300), "mmmm"),
    "map of no image": (put("annotations", "image_id", 999), "999"),
    "two maps for an image": (twice("annotations", "image_id"), "image"),
    "annotation is null": (entry("annotations", None), "annotations[0]"),
    "isthing is missing": (drop("categories", "isthing"), "isthing"),
    "isthing is 2": (put("categories", "isthing", 2), "isthing"),
    "isthing is a string": (put("categories", "isthing", "1"), "isthing"),
    "two images of one stem": (same_stem, "0001"),
}
ODD: dict[str, Change] = {
    "area is missing": no_segment_key("area"),
    "area is null": segment("area", None),
    "iscrowd is missing": no_segment_key("iscrowd"),
    "iscrowd is null": segment("iscrowd", None),
    "bbox is missing": no_segment_key("bbox"),
    "bbox is a string": segment("bbox", "none"),
    "no segments": put("annotations", "segments_info", []),
    "all segments are crowds": lambda c: ([s.update(iscrowd=1) for a in c["annotations"] for s in a["segments_info"]]),
    "isthing is true": put("categories", "isthing", True),
    "only stuff": lambda c: [x.update(isthing=0) for x in c["categories"]],
    "stuff is named as a thing": put("categories", "name", "cat", 1),
    "image file name is absolute": put("images", "file_name", f"{HERE}/notes.md"),
}
MAPS: dict[str, tuple[Callable[[Path], Any], tuple[int, ...]]] = {
    "greyscale": (image("L"), (0, 2)),
    "a palette": (palette, (0, 2)),
    "16 bits": (sixteen_bit, (0, 2)),
    "one bit": (image("1"), (0, 2)),
    "with alpha": (image("RGBA"), (0, 2)),
    "a JPEG": (jpeg, (0, 2)),
    "of another size": (image("RGB", (5, 5)), (2,)),
    "empty": (content(b""), (2,)),
    "a text": (content(b"not a picture"), (2,)),
    "truncated": (content(png(32, 24, zlib.compress(bytes(97 * 24)))[:50]), (2,)),
    "of 2**31 - 1 pixels a side": (content(png(2**31 - 1, 2**31 - 1)), (2,)),
    "a bomb": (lambda path: path.write_bytes(bomb()), (2,)),
    "a folder": (lambda path: path.mkdir(), (2,)),
    "a pipe": (fifo, (2,)),
    "30 GB of nothing": (sparse, (2,)),
    "a link to itself": (lambda path: path.symlink_to(path), (2,)),
    "missing": (lambda path: None, (2,)),
}

SQUARE = [2, 2, 12, 2, 12, 12, 2, 12]
SEGMENTATIONS: dict[str, Any] = {
    "null": None,
    "a number": 5,
    "a string": "polygon",
    "an empty list": [],
    "an empty polygon": [[]],
    "a polygon of 5 numbers": [[1, 2, 3, 4, 5]],
    "a polygon of 4 numbers": [[1, 2, 3, 4]],
    "a flat polygon": SQUARE,
    "a polygon of strings": [["1", "2", "3", "4", "5", "6"]],
    "a polygon with null": [[1, 2, 3, None, 5, 6]],
    "a polygon with NaN": [[1, 2, 3, float("nan"), 5, 6]],
    "a polygon with infinity": [[1, 2, 3, float("inf"), 5, 6]],
    "a polygon with 1e308": [[1, 2, 3, 1e308, 5, 6]],
    "a polygon of 400 digits": [[1, 2, 3, HUGE, 5, 6]],
    "a polygon of booleans": [[True, False, True, True, False, True]],
    "polygons 50 deep": [[[[[[[[SQUARE]]]]]]]],
    "an empty object": {},
    "run lengths without size": {"counts": [768]},
    "run lengths without counts": {"size": [24, 32]},
    "counts are too short": {"size": [24, 32], "counts": [10, 10]},
    "counts are too long": {"size": [24, 32], "counts": [10, 10, 2000]},
    "counts are negative": {"size": [24, 32], "counts": [-10, 778]},
    "counts are fractions": {"size": [24, 32], "counts": [10.5, 757.5]},
    "counts are strings": {"size": [24, 32], "counts": ["10", "758"]},
    "counts of 2**40": {"size": [24, 32], "counts": [2**40, 5]},
    "counts are null": {"size": [24, 32], "counts": None},
    "compressed counts are garbage": {"size": [24, 32], "counts": "zzzzzzzz~~~~\x7f"},
    "compressed counts are empty": {"size": [24, 32], "counts": ""},
    "compressed counts end early": {"size": [24, 32], "counts": "ooooooooooooo"},
    "compressed counts are not ASCII": {"size": [24, 32], "counts": "猫犬"},
    "compressed counts hold NUL": {"size": [24, 32], "counts": "\0\0\0"},
    "size is another": {"size": [5, 5], "counts": [25]},
    "size is huge": {"size": [2**31 - 1, 2**31 - 1], "counts": [1, (2**31 - 1) ** 2 - 1]},
    "size is negative": {"size": [-24, -32], "counts": [768]},
    "size is a string": {"size": "24x32", "counts": [768]},
    "size is nested": {"size": [[24], [32]], "counts": [768]},
    "size of 3": {"size": [24, 32, 3], "counts": [768]},
    "size of 400 digits": {"size": [HUGE, 32], "counts": [768]},
}


def instance(value: Any, split: str = "train") -> Build:
    """A run with a mask head, on detection data with one changed segmentation."""

    def build(files: CaseFiles) -> Callable[[], int]:
        change = put("annotations", "segmentation", value)
        data = fixtures.coco(first=1 if split == "train" else 101)
        change(data)
        config = detection(files, **{split: data})
        _with_masks(config)
        return lambda: agree(config)

    return build


def cases() -> Iterator[Case]:
    """Yield all cases of this module."""
    group = "panoptic"
    for name, (change, word) in BAD.items():
        yield Case(group, name, panoptic(change), says=(word,))
    for name in ("area is a string", "area is NaN", "iscrowd is '0'", "map name is absolute", "two images of one stem"):
        change, word = BAD[name]
        if name == "two images of one stem":
            word = "0101"
        yield Case(group, f"validation: {name}", panoptic(change, "val"), says=(word,))
    for name, change in ODD.items():
        yield Case(group, f"odd: {name}", panoptic(change, "val"), codes=(0, 2), writes=("run",))
    for name, (make, codes) in MAPS.items():
        yield Case(
            group,
            f"map is {name}",
            map_file(make),
            codes=codes,
            says=("0001_map.png",),
            writes=("run",) if 0 in codes else (),
        )
    for name in ("a bomb", "a pipe", "missing", "of another size"):
        yield Case(group, f"validation: map is {name}", map_file(MAPS[name][0], "val"), says=("0101_map.png",))
    yield Case(group, "detection file with maps", maps_of_a_detection_file, says=("panoptic",))
    yield Case(group, "maps are a file", maps_are_a_file, says=("panoptic",))
    for name, value in SEGMENTATIONS.items():
        odd = name in (
            "a polygon of 4 numbers",
            "a polygon with 1e308",
            "a polygon of booleans",
            "compressed counts end early",
        )
        yield Case(
            "masks",
            name,
            instance(value),
            codes=(0, 2) if odd else (2,),
            says=("annotation|segmentation",),
            writes=("run",) if odd else (),
        )
    for name in ("a polygon of 5 numbers", "counts are too long", "compressed counts are garbage", "size is another"):
        yield Case(
            "masks", f"validation: {name}", instance(SEGMENTATIONS[name], "val"), says=("annotation|segmentation",)
        )


def maps_of_a_detection_file(files: CaseFiles) -> Callable[[], int]:
    config = detection(files, train=fixtures.coco(), panoptic=True)
    return lambda: agree(config)


def maps_are_a_file(files: CaseFiles) -> Callable[[], int]:
    config = detection(files, panoptic=True)
    _with_masks(config)
    source = f"{files.fixtures}/panoptic_train/panoptic"
    shutil.copy(files.fixtures / "detector.yaml", files.folder / "maps")
    config.write_text(config.read_text().replace(source, os.fspath(files.folder / "maps")))
    return lambda: agree(config)
