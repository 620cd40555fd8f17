"""Bad folders of Pascal VOC, YOLO and Roboflow data sets; data checks and training must agree."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hostile import fixtures
from tests.hostile.annotations import agree
from tests.hostile.battery import Build, Case, CaseFiles
from tests.hostile.images import fifo, sparse

Change = Callable[[Path], Any]
BOX = "<object><name>cat</name><bndbox><xmin>3</xmin><ymin>3</ymin><xmax>12</xmax><ymax>12</ymax></bndbox></object>"
XML = f"<annotation><size><width>32</width><height>24</height></size>{BOX}</annotation>"
LAUGHS = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10 if i else "ha" * 50}">' for i in range(12))
OUTSIDE = "/etc/passwd"


def voc(root: Path) -> None:
    """Write six images in two lists."""
    for number in range(6):
        put(root / "Annotations" / f"{number}.xml", XML)
        path = root / "JPEGImages" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        fixtures.picture(number).save(path)
    put(root / "ImageSets/Main/train.txt", "0\n1\n2\n3\n")
    put(root / "ImageSets/Main/val.txt", "4\n5\n")


def yolo(root: Path) -> None:
    """Write six images in two folders."""
    for number in range(6):
        split = "train" if number < 4 else "val"
        put(root / split / "labels" / f"{number}.txt", "0 0.25 0.3 0.3 0.4\n")
        path = root / split / "images" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        fixtures.picture(number).save(path)
    put(root / "data.yaml", "train: train/images\nval: val/images\nnames: [cat]\n")


def roboflow(root: Path) -> None:
    """Write two COCO files with their images."""
    for split, first in (("train", 1), ("val", 101)):
        content = fixtures.coco(first=first)
        put(root / split / "_annotations.coco.json", json.dumps(content))
        for entry in content["images"]:
            fixtures.picture(entry["id"]).save(root / split / entry["file_name"])


def put(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)


def text(name: str, content: str | bytes) -> Change:
    """Replace a file."""
    return lambda root: put(root / name, content)


def special(name: str, make: Callable[[Path], Any]) -> Change:
    """Replace a file by something that is no regular file."""

    def change(root: Path) -> None:
        (root / name).unlink(missing_ok=True)
        make(root / name)

    return change


def changed(write: Callable[[Path], None], change: Change, *settings: str, command: str = "train") -> Build:
    """Write a folder, change it, and check and train, or convert it."""

    def build(files: CaseFiles) -> Callable[[], int]:
        root = files.folder / "set"
        write(root)
        change(root)
        head = fixtures.MODEL + f"data:\n  root: {root}\n  train: {{split: train}}\n  val: {{split: val}}\n"
        config = files.write("config.yaml", head + fixtures.REST.lstrip("\n") + f"output_dir: {files.folder / 'run'}\n")
        if command == "convert":
            from tools.convert_data import main

            return lambda: main([str(root), "--output", "made", *settings])
        return lambda: agree(config, *settings)

    return build


def loop(root: Path) -> None:
    (root / "a").symlink_to(root)
    (root / "A").symlink_to(root / "Annotations")


FIRST = "Annotations/0.xml"
BAD_VOC: dict[str, tuple[Change, str]] = {
    "cut": (text(FIRST, XML[:-9]), "0.xml"),
    "empty": (text(FIRST, ""), "0.xml"),
    "of zeros": (text(FIRST, b"\0" * 4000), "0.xml"),
    "a billion laughs": (
        text(FIRST, f"<!DOCTYPE annotation [{LAUGHS}]>" + XML.replace("cat", "&l11;")),
        "document type",
    ),
    "an external entity": (
        text(FIRST, f'<!DOCTYPE annotation [<!ENTITY x SYSTEM "{OUTSIDE}">]>' + XML.replace("cat", "&x;")),
        "document type",
    ),
    "HTML": (text(FIRST, "<html><body>x</body></html>"), "expected <annotation>"),
    "CVAT's XML": (text(FIRST, "<annotations><version>1.1</version></annotations>"), "CVAT"),
    "no images": (lambda root: [path.unlink() for path in (root / "JPEGImages").iterdir()], "none of its 6 XML files"),
    "nested 500,000 deep": (text(FIRST, "<annotation>" + "<a>" * 500_000 + "</a>" * 500_000), "0.xml"),
    "not UTF-8": (text(FIRST, XML.replace("cat", "caf\xe9").encode("latin-1")), "0.xml"),
    "of an unknown encoding": (text(FIRST, '<?xml version="1.0" encoding="x\x07y"?>' + XML), "0.xml"),
    "a pipe": (special(FIRST, fifo), "0.xml"),
    "30 GB of nothing": (special(FIRST, sparse), "0.xml"),
    "/dev/zero": (special(FIRST, lambda path: path.symlink_to("/dev/zero")), "0.xml"),
    "a link to itself": (special(FIRST, lambda path: path.symlink_to(path)), "0.xml"),
    "a folder": (special(FIRST, lambda path: path.mkdir()), "of no XML file"),
    "NaN": (text(FIRST, XML.replace(">3<", ">nan<")), "xmin is 'nan'"),
    "an infinite box": (text(FIRST, XML.replace(">12<", ">1e400<")), "xmax is '1e400'"),
    "a number of 100,000 digits": (text(FIRST, XML.replace(">12<", f">{'9' * 100_000}<")), "xmax"),
    "a box of text": (text(FIRST, XML.replace(">12<", ">\x1b[2J\nFORGED\n<".replace("\x1b", "e") + "<")), "0.xml"),
    "a negative size": (text(FIRST, XML.replace(">32<", ">-32<")), "size is -32"),
    "a size of another image": (text(FIRST, XML.replace(">32<", ">33<")), "size-differs"),
    "a name of blanks": (text(FIRST, XML.replace("cat", "\n ")), "has no name"),
    "a missing image": (lambda root: (root / "JPEGImages/0.png").unlink(), "file-missing"),
    "two images of one name": (text("JPEGImages/0.jpg", "x"), "0.jpg"),
    "an unlisted split": (lambda root: (root / "ImageSets/Main/val.txt").unlink(), "has no split val"),
    "a list of another folder": (text("ImageSets/Main/train.txt", f"../../../{OUTSIDE}\n"), "train.txt:1"),
    "a list with a line feed in a name": (text("ImageSets/Main/train.txt", "a\rFORGED\n"), "train.txt:1"),
    "a list that is not UTF-8": (text("ImageSets/Main/train.txt", b"0\n\xff\n"), "train.txt"),
    "an empty list": (text("ImageSets/Main/train.txt", ""), "no images"),
    "a list that is a pipe": (special("ImageSets/Main/train.txt", fifo), "train.txt"),
    "an unreadable folder": (lambda root: (root / "Annotations").chmod(0), "Annotations"),
}
BAD_YOLO: dict[str, tuple[Change, str]] = {
    "a label that is no number": (text("train/labels/0.txt", "cat 0 0 1 1\n"), "0.txt:1"),
    "labels of KITTI": (text("train/labels/0.txt", f"cat 0 0 -1.5 3 3 12 12{' 1.5' * 7}\n"), "KITTI"),
    "labels of DOTA": (text("train/labels/0.txt", "3 3 12 3 12 12 3 12 cat 0\n"), "DOTA"),
    "NaN": (text("train/labels/0.txt", "0 0.5 0.5 nan 1\n"), "0.txt:1"),
    "pixels": (text("train/labels/0.txt", "\n0 16 12 3 4\n"), "0.txt:2"),
    "an unknown class": (text("train/labels/0.txt", "1e30 0.5 0.5 0.1 0.1\n"), "0.txt:1"),
    "100,000 numbers in a line": (text("train/labels/0.txt", "0 " + "0.5 " * 99_999), "0.txt:1"),
    "labels that are zeros": (text("train/labels/0.txt", b"\0" * 4000), "0.txt:1"),
    "labels that are a pipe": (special("train/labels/0.txt", fifo), "0.txt"),
    "labels that are /dev/zero": (special("train/labels/0.txt", lambda p: p.symlink_to("/dev/zero")), "0.txt"),
    "labels of no image": (text("train/labels/9.txt", ""), "9.txt has no image"),
    "an image that is a pipe": (special("train/images/0.png", fifo), "0.png"),
    "an image that is /dev/zero": (special("train/images/0.png", lambda p: p.symlink_to("/dev/zero")), "0.png"),
    "no names": (text("data.yaml", "train: train/images\n"), "names is None"),
    "aliases that expand": (
        text(
            "data.yaml",
            "a: &a [x]\n"
            + "".join(f"{c}: &{c} [{f'*{b}, ' * 9}]\n" for b, c in zip("abcdefgh", "bcdefghi", strict=True))
            + "names: *i",
        ),
        "expected text",
    ),
    "an object": (text("data.yaml", "names: !!python/object/apply:os.system ['touch FORGED']\n"), "data.yaml"),
    "nested 100,000 deep": (text("data.yaml", "names: " + "[" * 100_000), "data.yaml"),
    "a split outside": (text("data.yaml", "train: /etc\nval: val/images\nnames: [cat]\n"), "leads out"),
    "a split above": (text("data.yaml", "train: train/../../..\nval: val/images\nnames: [cat]\n"), "leads out"),
    "a split of nothing": (text("data.yaml", "train: nowhere\nval: val/images\nnames: [cat]\n"), "no images"),
    "keypoints without a number": (text("data.yaml", "names: [cat]\nkpt_shape: [.inf, 2]\n"), "kpt_shape is"),
    "keypoints that the labels lack": (
        text("data.yaml", "train: train/images\nval: val/images\nnames: [cat]\nkpt_shape: [99999999999, 3]\n"),
        "6 label lines in 6 files",
    ),
    "a list of files outside": (
        lambda root: (
            put(root / "list.txt", f"{OUTSIDE}\n../../{OUTSIDE}\nC:\\{OUTSIDE}\n"),
            put(root / "data.yaml", "train: list.txt\nval: val/images\nnames: [cat]\n"),
        ),
        "3 of 3 lines",
    ),
}
BAD_ROBOFLOW: dict[str, tuple[Change, str]] = {
    "cut": (text("train/_annotations.coco.json", '{"images": ['), "_annotations.coco.json"),
    "an image outside": (
        text(
            "train/_annotations.coco.json", json.dumps({**fixtures.coco(), "images": [{"id": 1, "file_name": OUTSIDE}]})
        ),
        "_annotations.coco.json",
    ),
    "a pipe": (special("val/_annotations.coco.json", fifo), "_annotations.coco.json"),
}


def cases() -> Iterator[Case]:
    """Yield all cases of this module."""
    group = "formats"
    for name, write, table in (("VOC", voc, BAD_VOC), ("YOLO", yolo, BAD_YOLO), ("Roboflow", roboflow, BAD_ROBOFLOW)):
        for title, (change, word) in table.items():
            if title != "an unreadable folder" or os.geteuid():
                yield Case(group, f"{name}: {title}", changed(write, change), says=(word,))
    for name, write in (("VOC", voc), ("YOLO", yolo), ("Roboflow", roboflow)):
        yield Case(group, f"{name}: nothing wrong", changed(write, lambda _: None), codes=(0,), writes=("run",))
    yield Case(group, "VOC: a loop of links", changed(voc, loop), codes=(0,), writes=("run",))
    yield Case(group, "VOC: another form", changed(voc, lambda _: None, "data.format=yolo"), says=("class names",))
    yield Case(
        group,
        "VOC: more folds than images",
        changed(voc, lambda _: None, "data.val.split=null", "data.folds=9"),
        says=("parts",),
    )
    converted = changed(voc, text(FIRST, XML[:-9]), command="convert")
    yield Case(group, "converting a cut file", converted, says=("0.xml",))
    converted = changed(voc, lambda root: (root / "JPEGImages/0.png").unlink(), command="convert")
    yield Case(group, "converting data with errors", converted, codes=(1,), says=("file-missing", "nothing is written"))
    converted = changed(voc, lambda _: None, "--folds", "99", "--fold", "-1", command="convert")
    yield Case(group, "converting a fold below 0", converted, says=("--fold",))
