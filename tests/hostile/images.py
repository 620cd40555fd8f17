"""Wrong, damaged, malicious or huge image files: data checks, training and prediction."""

from __future__ import annotations

import functools
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.hostile import fixtures
from tests.hostile.annotations import agree, check, detection, fifo, sparse, train
from tests.hostile.battery import SECRET, Build, Case, CaseFiles
from tests.hostile.panoptic import bomb, chunk, png

EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 32 24
(EXECUTED) (w) file closefile
%%EOF
"""
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'


def encoded(format_name: str, **options: Any) -> bytes:
    data = io.BytesIO()
    fixtures.picture().save(data, format=format_name, **options)
    return data.getvalue()


def archive() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as parts:
        parts.writestr("../../evil.txt", "x")
    return data.getvalue()


def flipped(data: bytes, offset: int) -> bytes:
    return data[:offset] + bytes([data[offset] ^ 0xFF]) + data[offset + 1 :]


@functools.cache
def text_bomb() -> bytes:
    """A PNG whose comment unpacks to 80 MB."""
    whole = encoded("PNG")
    comment = b"Comment\0\0" + zlib.compress(bytes(80 * 2**20), 9)
    return whole[:33] + chunk(b"zTXt", comment) + whole[33:]


def tiff_of(tag_values: bytes) -> bytes:
    return b"II*\0" + struct.pack("<I", 8) + tag_values


def floating() -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.full((24, 32), np.nan, np.float32)).save(data, format="TIFF")
    return data.getvalue()


def sixteen() -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.arange(768, dtype=np.uint16).reshape(24, 32)).save(data, format="PNG")
    return data.getvalue()


def thirty_two() -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.full((24, 32), 2**20, np.int32)).save(data, format="TIFF")
    return data.getvalue()


def bytes_of(data: bytes | Callable[[], bytes]) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(data if isinstance(data, bytes) else data())


BROKEN: dict[str, Callable[[Path], Any]] = {  # not images
    "empty": bytes_of(b""),
    "a text": bytes_of(b"this is no picture\n"),
    "HTML": bytes_of(b"<!doctype html><html>404 not found</html>"),
    "PDF": bytes_of(b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>"),
    "EPS": bytes_of(EPS),
    "EPS with a DOS header": bytes_of(
        b"\xc5\xd0\xd3\xc6" + struct.pack("<IIIIII", 30, len(EPS), 0, 0, 0, 0) + b"\xff\xff" + EPS
    ),
    "SVG": bytes_of(SVG),
    "a zip": bytes_of(archive),
    "a pickle": bytes_of(b"cos\nsystem\n(S'touch EXECUTED'\ntR."),
    "PNG cut off": bytes_of(lambda: encoded("PNG")[:60]),
    "JPEG cut off": bytes_of(lambda: encoded("JPEG")[:200]),
    "PNG with a wrong checksum": bytes_of(lambda: flipped(encoded("PNG"), 45)),
    "PNG without data": bytes_of(lambda: png(32, 24)),
    "PNG of no pixels": bytes_of(lambda: png(0, 0)),
    "PNG of 2**31 - 1 a side": bytes_of(lambda: png(2**31 - 1, 2**31 - 1)),
    "PNG bomb": lambda path: path.write_bytes(bomb()),
    "GIF bomb": bytes_of(
        b"GIF89a"
        + struct.pack("<HH", 65535, 65535)
        + b"\x80\0\0"
        + bytes(6)
        + b",\0\0\0\0"
        + struct.pack("<HH", 65535, 65535)
        + b"\0\x08\0;"
    ),
    "BMP of 2**30 rows": bytes_of(
        b"BM" + bytes(8) + struct.pack("<IIiiHHIIiiII", 54, 40, 2**15, 2**30, 1, 24, 0, 0, 0, 0, 0, 0)
    ),
    "TIFF that points at itself": bytes_of(tiff_of(struct.pack("<H", 0) + struct.pack("<I", 8))),
    "TIFF of garbage": bytes_of(tiff_of(bytes(range(200)))),
    "JPEG header alone": bytes_of(b"\xff\xd8\xff\xe0\x00\x10JFIF\x00" + bytes(20)),
    "WebP header alone": bytes_of(b"RIFF\x10\0\0\0WEBPVP8 " + bytes(20)),
    "floating-point TIFF": bytes_of(floating),
    "32-bit TIFF": bytes_of(thirty_two),
    "a folder": lambda path: path.mkdir(),
    "a pipe": fifo,
    "30 GB of nothing": sparse,
    "a link to itself": lambda path: path.symlink_to(path),
    "a broken link": lambda path: path.symlink_to("nowhere"),
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
}
FORMATS: dict[str, Callable[[Path], Any]] = {  # unusual, may be accepted or refused
    "PPM": bytes_of(lambda: encoded("PPM")),
    "ICO": bytes_of(lambda: encoded("ICO")),
    "TGA": bytes_of(lambda: encoded("TGA")),
    "PCX": bytes_of(lambda: encoded("PCX")),
    "ICNS": bytes_of(b"icns" + struct.pack(">I", 16) + b"ic07" + struct.pack(">I", 8)),
    "16 bits": bytes_of(sixteen),
    "WebP": bytes_of(lambda: encoded("WEBP")),
    "GIF": bytes_of(lambda: encoded("GIF")),
    "PNG with a comment of 80 MB": bytes_of(text_bomb),
    "JPEG with garbage behind": bytes_of(lambda: encoded("JPEG") + b"\0" * 1000),
}


def listed_name() -> str:
    return "0001.png"


def in_training(make: Callable[[Path], Any], call: Callable[[Path], int], *, settings: tuple[str, ...] = ()) -> Build:
    """Use this file as the first training image."""

    def build(files: CaseFiles) -> Callable[[], int]:
        folder = files.copy("train/images", "images")
        (folder / listed_name()).unlink()
        make(folder / listed_name())
        config = detection(files, images=(folder, None))
        return lambda: call(config, *settings)  # type: ignore[call-arg]

    return build


def predict(*arguments: object) -> int:
    """Predict with the detector of the fixtures."""
    from tools.predict import main

    return main(["--device", "cpu", *map(str, arguments)])


def among_good_ones(make: Callable[[Path], Any], name: str = "bad.jpg", model: str = "detector") -> Build:
    """Predict for a folder with this file between two valid ones."""

    def build(files: CaseFiles) -> Callable[[], int]:
        for good in ("a.png", "z.png"):
            files.write(f"photos/{good}", encoded("PNG"))
        make(files.folder / "photos" / name)
        photos = sorted((files.folder / "photos").iterdir())
        return lambda: predict(files.fixtures / model, "--output", "found", *photos)

    return build


def folder_of_one(make: Callable[[Path], Any]) -> Build:
    """Predict for a folder with one bad file among valid ones."""

    def build(files: CaseFiles) -> Callable[[], int]:
        for good in ("a.png", "z.png"):
            files.write(f"photos/{good}", encoded("PNG"))
        make(files.folder / "photos" / "bad.jpg")
        return lambda: predict(files.fixtures / "detector", "--output", "found", "photos")

    return build


STRANGE_NAMES = {
    "with a newline": b"a\nFORGED\n.png",
    "with an escape": b"\x1b]0;owned\x07.png",
    "that is not UTF-8": b"caf\xe9\xff.png",
    "of 255 bytes": b"n" * 251 + b".png",
    "with a dollar": b"$\\frac{$.png",
    "with a bidi override": "gpj\u202e.png".encode(),
    "that begins with a dash": b"-rf.png",
    "with a quote": b"a'\"`;touch EXECUTED;.png",
    "of Chinese letters": "照片.png".encode(),
    "that is a formula": b"=cmd.png",
    "that is an interpolation": b"${oc.env:HOSTILE_SECRET}.png",
}


def strangely_named(name: bytes, model: str) -> Build:
    """Predict for a folder whose only image has that name."""

    def build(files: CaseFiles) -> Callable[[], int]:
        (files.folder / "photos").mkdir()
        path = os.fsencode(files.folder / "photos") + b"/" + name
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(encoded("PNG"))
        return lambda: predict(files.fixtures / model, "--output", "found", "--threshold", 0, "photos")

    return build


def strangely_named_data(name: str) -> Build:
    """A data set whose first images have that name, in both splits."""

    def build(files: CaseFiles) -> Callable[[], int]:
        contents = []
        for split, first in (("train", 1), ("val", 101)):
            content = fixtures.coco(first=first)
            folder = files.copy(f"{split}/images", f"{split}_images")
            (folder / content["images"][0]["file_name"]).rename(folder / name)
            content["images"][0]["file_name"] = name
            contents.append(content)
        folders = (files.folder / "train_images", files.folder / "val_images")
        config = detection(files, *contents, images=folders)
        return lambda: agree(config)

    return build


def alone(make: Callable[[Path], Any]) -> Build:
    """Predict for this file."""

    def build(files: CaseFiles) -> Callable[[], int]:
        make(files.folder / "bad.jpg")
        return lambda: predict(files.fixtures / "detector", "--output", "found", "bad.jpg")

    return build


def cases() -> Iterator[Case]:
    """Yield all cases of this module."""
    group = "images"
    unchecked = ("data.check=false", "data.max_unreadable=0")
    for name, make in BROKEN.items():
        never = ("EXECUTED\n", SECRET)
        yield Case(group, f"doctor: {name}", in_training(make, check), says=("0001.png",), never=never)
        # a named pipe or folder in a list of files is refused before any work; other files are skipped one by one
        yield Case(group, f"predict: {name}", among_good_ones(make), codes=(1, 2), says=("bad.jpg",), writes=("found",))
    for name in ("empty", "a pipe", "PNG bomb", "EPS", "30 GB of nothing", "JPEG cut off", "a folder"):
        settings = in_training(BROKEN[name], train, settings=unchecked)
        yield Case(
            group, f"training without the doctor: {name}", settings, codes=(1, 2), says=("0001.png",), writes=("run",)
        )
    for name in ("a text", "JPEG cut off", "PNG bomb", "EPS", "a broken link"):
        yield Case(
            group,
            f"predict a folder: {name}",
            folder_of_one(BROKEN[name]),
            codes=(1,),
            says=("bad.jpg",),
            writes=("found",),
            leaves=("found/predictions.json",),
        )
    for name in ("a text", "PNG bomb", "EPS", "a pipe"):
        made = among_good_ones(BROKEN[name], model="classifier")
        yield Case(group, f"classify: {name}", made, codes=(1, 2), says=("bad.jpg",), writes=("found",))
        yield Case(
            group,
            f"panoptic maps: {name}",
            panoptic_maps(BROKEN[name]),
            codes=(1, 2),
            says=("bad.jpg",),
            writes=("found",),
        )
        yield Case(
            group, f"predict alone: {name}", alone(BROKEN[name]), codes=(1, 2), says=("bad.jpg",), writes=("found",)
        )
    for name, make in FORMATS.items():
        yield Case(group, f"format {name}", in_training(make, agree), codes=(0, 2), writes=("run",), says=("0001.png",))
        yield Case(
            group, f"predict format {name}", among_good_ones(make), codes=(0, 1), writes=("found",), says=("bad.jpg",)
        )
    for name, raw in STRANGE_NAMES.items():
        yield Case(
            "names",
            f"predict a file {name}",
            strangely_named(raw, "detector"),
            codes=(0,),
            writes=("found",),
            leaves=("found/predictions.json",),
        )
        yield Case(
            "names",
            f"classify a file {name}",
            strangely_named(raw, "classifier"),
            codes=(0,),
            writes=("found",),
            leaves=("found/predictions.json",),
        )
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            continue
        yield Case(
            "names",
            f"train on a file {name}",
            strangely_named_data(text),
            codes=(0,),
            writes=("run",),
            leaves=("run/report.html",),
        )


def panoptic_maps(make: Callable[[Path], Any]) -> Build:
    def build(files: CaseFiles) -> Callable[[], int]:
        files.write("photos/a.png", encoded("PNG"))
        make(files.folder / "photos" / "bad.jpg")
        photos = sorted((files.folder / "photos").iterdir())
        return lambda: predict(files.fixtures / "masks", "--output", "found", "--panoptic", *photos)

    return build
