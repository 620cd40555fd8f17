"""COCO files with a wrong value in every field; data checks and training must agree."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hostile import fixtures
from tests.hostile.battery import DISAGREE, NEXT_COMMAND, Build, Case, CaseFiles

Content = dict[str, Any]
HERE = "/the/folder/of/the/case"  # placeholder in the content of an annotation file
HUGE = int("9" * 400)


def detection(
    files: CaseFiles,
    train: Any = None,
    val: Any = None,
    *,
    settings: str = "",
    images: tuple[Path | None, Path | None] = (None, None),
    panoptic: bool = False,
) -> Path:
    """Write a config whose annotations are given as content, text or bytes; None: the file among the fixtures."""
    kind = "panoptic_" if panoptic else ""
    lines = []
    for name, content, folder in (("train", train, images[0]), ("val", val, images[1])):
        source = files.fixtures / f"{kind}{name}"
        path = source / "annotations.json"
        if content is not None:
            text = content if isinstance(content, (str, bytes)) else dumps(content).replace(HERE, str(files.folder))
            path = files.write(f"{name}.json", text)
        maps = f", panoptic: {source}/panoptic" if panoptic else ""
        lines.append(
            f"  {name}: {{images: {json.dumps(str(folder or source / 'images'))}, annotations: {path}{maps}}}\n"
        )
    whole = fixtures.MODEL + settings + "data:\n" + "".join(lines) + fixtures.REST
    return files.write("config.yaml", whole + f"output_dir: {files.folder / 'run'}\n")


def dumps(content: Any) -> str:
    """Dump JSON with any value, including integers of 400 digits and lone surrogates."""
    import sys

    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(content)
    finally:
        sys.set_int_max_str_digits(before)


def check(config: Path, *settings: str) -> int:
    """Run the data checks."""
    from tools.check_data import main

    return main(["--config", str(config), *settings])


def train(config: Path, *settings: str) -> int:
    """Train a detector."""
    from tools.train_net import main

    return main(["--config", str(config), *settings])


def agree(config: Path, *settings: str) -> int:
    """Return the exit code of the data checks, or DISAGREE if training returns another."""
    first = check(config, *settings)
    print(NEXT_COMMAND, flush=True)
    second = train(config, *settings)
    if first != second:
        print(f"the doctor says {first}, training {second}")
        return DISAGREE
    return first


Change = Callable[[Content], Any]


def mutated(change: Change, split: str = "train", **options: Any) -> Build:
    """A case with an annotation file changed by a function, or replaced by the return value of the function."""

    def build(files: CaseFiles) -> Callable[[], int]:
        content: Content = fixtures.panoptic() if options.get("panoptic") else fixtures.coco()
        if split == "val":
            first = fixtures.panoptic if options.get("panoptic") else fixtures.coco
            content = first(first=101)
        replaced = change(content)
        config = detection(files, **{split: replaced if isinstance(replaced, dict) else content}, **options)
        return lambda: agree(config)

    return build


def referenced(template: Any) -> Build:
    """A case whose training images are read with references, of which the first is given."""

    def build(files: CaseFiles) -> Callable[[], int]:
        content: Content = fixtures.coco()
        for image in content["images"]:
            image["template"] = image["file_name"]
        content["images"][0]["template"] = template
        config = detection(files, train=content)
        return lambda: agree(config, "data.reference=own", "batch_former.references=true")

    return build


def put(part: str, key: str, value: Any, number: int = 0) -> Change:
    """Set one value of one entry."""

    def change(content: Content) -> None:
        content[part][number][key] = value

    return change


def drop(part: str, key: str) -> Change:
    """Leave out one key of one entry."""

    def change(content: Content) -> None:
        del content[part][0][key]

    return change


def entry(part: str, value: Any) -> Change:
    """Replace one entry."""

    def change(content: Content) -> None:
        content[part][0] = value

    return change


def whole(part: str, value: Any) -> Change:
    """Replace one of the lists."""

    def change(content: Content) -> None:
        content[part] = value

    return change


def twice(part: str, key: str) -> Change:
    """Give two entries the same value."""

    def change(content: Content) -> None:
        content[part][1][key] = content[part][0][key]

    return change


def added(annotation: Content) -> Change:
    """Add an annotation to the first image."""

    def change(content: Content) -> None:
        first = content["annotations"][0]
        content["annotations"].append({**first, "id": 999, **annotation})

    return change


def without(*keys: str, **values: Any) -> Change:
    """Add an annotation without some keys."""

    def change(content: Content) -> None:
        more = {**content["annotations"][0], "id": 999, **values}
        content["annotations"].append({key: value for key, value in more.items() if key not in keys})

    return change


def every_box(bbox: list[float]) -> Change:
    """Give all annotations one box."""

    def change(content: Content) -> None:
        for each in content["annotations"]:
            each["bbox"] = bbox

    return change


FILES: dict[str, Any] = {
    "empty file": "",
    "one brace": "{",
    "binary": bytes(range(256)) * 4,
    "utf-16": json.dumps(fixtures.coco()).encode("utf-16-le")[1:],
    "a number": "5",
    "null": "null",
    "a string": '"images"',
    "a list of results": '[{"image_id": 1, "category_id": 3, "bbox": [0, 0, 1, 1], "score": 0.5}]',
    "an empty object": "{}",
    "lists 100,000 deep": "[" * 100_000 + "]" * 100_000,
    "objects 100,000 deep": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "yolo": "0 0.5 0.5 0.1 0.1\n",
    "escape in a key": '{"\\u001b]0;owned\\u0007\\nFORGED\\n": 1}',
    "key of 100,000 letters": json.dumps({"k" * 100_000: 1}),
    "a number of 5,000 digits": '{"images": ' + "9" * 5000 + "}",
    "truncated": json.dumps(fixtures.coco())[:-40],
}

BAD: dict[str, tuple[Change, str]] = {  # exit code 2, and a word required in the message
    "images is null": (whole("images", None), "images"),
    "images is an object": (whole("images", {"1": {}}), "images"),
    "no images": (whole("images", []), "images"),
    "annotations is a string": (whole("annotations", "none"), "annotations"),
    "categories is empty": (whole("categories", []), "categories"),
    "image is null": (entry("images", None), "images[0]"),
    "image is a list": (entry("images", [1]), "images[0]"),
    "annotation is a number": (entry("annotations", 7), "annotations[0]"),
    "category is a string": (entry("categories", "cat"), "categories[0]"),
    "image without id": (drop("images", "id"), "id"),
    "image without file name": (drop("images", "file_name"), "file_name"),
    "annotation without image": (drop("annotations", "image_id"), "image_id"),
    "annotation without category": (drop("annotations", "category_id"), "category_id"),
    "category without id": (drop("categories", "id"), "id"),
    "image id is a string": (put("images", "id", "1"), "id"),
    "image id is a fraction": (put("images", "id", 1.5), "id"),
    "image id is true": (put("images", "id", True), "id"),
    "image id is null": (put("images", "id", None), "id"),
    "image id of 70 bits": (put("images", "id", 2**70), "id"),
    "image id of 400 digits": (put("images", "id", HUGE), "id|digits"),
    "image id twice": (twice("images", "id"), "id"),
    "category id of 70 bits": (put("categories", "id", 2**70), "id"),
    "category id is a fraction": (put("categories", "id", 3.5), "id"),
    "category id twice": (twice("categories", "id"), "id"),
    "file name is a number": (put("images", "file_name", 1), "file_name"),
    "file name is empty": (put("images", "file_name", ""), "image"),
    "file name is a folder": (put("images", "file_name", "."), "image"),
    "file name is missing on disk": (put("images", "file_name", "nope.png"), "nope.png"),
    "file name of 300 letters": (put("images", "file_name", "n" * 300 + ".png"), "nnnn"),
    "file name of 100,000 letters": (put("images", "file_name", "n" * 100_000), "nnnn"),
    "file name with NUL": (put("images", "file_name", "a\0b.png"), "\\x00"),
    "file name is a surrogate": (put("images", "file_name", "\ud800.png"), "\\ud800"),
    "file name with an escape": (put("images", "file_name", "\x1b]0;owned\x07\nFORGED\n.png"), "\\x1b"),
    "width is a string": (put("images", "width", "32"), "width"),
    "width is a list": (put("images", "width", [32]), "width"),
    "width is NaN": (put("images", "width", float("nan")), "width"),
    "width is negative": (put("images", "width", -32), "32"),
    "width is 0": (put("images", "width", 0), "0"),
    "width is another": (put("images", "width", 33), "33"),
    "width is infinite": (put("images", "width", float("inf")), "width"),
    "width of 400 digits": (put("images", "width", HUGE), "width|digits"),
    "annotation of no image": (put("annotations", "image_id", 12345), "12345"),
    "annotation of a string image": (put("annotations", "image_id", "1"), "image_id"),
    "annotation of no category": (put("annotations", "category_id", 555), "555"),
    "annotation of a list category": (put("annotations", "category_id", [3]), "category_id"),
    "bbox is null": (put("annotations", "bbox", None), "box"),
    "bbox is missing": (drop("annotations", "bbox"), "box"),
    "bbox of three": (put("annotations", "bbox", [1, 2, 3]), "box"),
    "bbox of five": (put("annotations", "bbox", [1, 2, 3, 4, 5]), "box"),
    "bbox of strings": (put("annotations", "bbox", ["1", "2", "3", "4"]), "box"),
    "bbox with NaN": (put("annotations", "bbox", [1, float("nan"), 3, 4]), "box"),
    "bbox with infinity": (put("annotations", "bbox", [1, 2, float("inf"), 4]), "box"),
    "bbox of booleans": (put("annotations", "bbox", [True, True, True, True]), "box"),
    "bbox nested": (put("annotations", "bbox", [[1, 2], [3, 4]]), "box"),
    "bbox is an object": (put("annotations", "bbox", {"x": 1}), "box"),
    "bbox is a string": (put("annotations", "bbox", "1234"), "box"),
    "bbox of 400 digits": (put("annotations", "bbox", [1, 2, HUGE, 4]), "box|digits"),
    "boxes are fractions": (every_box([0.1, 0.1, 0.4, 0.5]), "fractions"),
    "boxes are corners": (every_box([12, 8, 30, 20]), "corners"),
    "iscrowd is '0'": (put("annotations", "iscrowd", "0"), "iscrowd"),
    "iscrowd is 'yes'": (put("annotations", "iscrowd", "yes"), "iscrowd"),
    "iscrowd is a list": (put("annotations", "iscrowd", [0]), "iscrowd"),
    "iscrowd is 2": (put("annotations", "iscrowd", 2), "iscrowd"),
    "iscrowd is NaN": (put("annotations", "iscrowd", float("nan")), "iscrowd"),
    "area is a string": (put("annotations", "area", "100"), "area"),
    "area is a list": (put("annotations", "area", [100]), "area"),
    "area is NaN": (put("annotations", "area", float("nan")), "area"),
    "area is negative": (put("annotations", "area", -5), "area"),
    "area is infinite": (put("annotations", "area", float("inf")), "area"),
    "crowd without bbox": (without("bbox", iscrowd=1), "box"),
}

ODD: dict[str, Change] = {  # accepted or refused, but data checks and training must agree
    "annotation id is a list": put("annotations", "id", [1]),
    "annotation id is a string": put("annotations", "id", "one"),
    "annotation id of 70 bits": put("annotations", "id", 2**70),
    "image id is negative": put("images", "id", -4),
    "annotation id is negative": put("annotations", "id", -4),
    "annotation id twice": twice("annotations", "id"),
    "annotation without id": drop("annotations", "id"),
    "file name twice": twice("images", "file_name"),
    "width is 1e308": put("images", "width", 1e308),
    "width is a fraction": put("images", "width", 32.0),
    "width is true": put("images", "width", True),
    "no width": drop("images", "width"),
    "file name is absolute": put("images", "file_name", f"{HERE}/notes.md"),
    "file name leaves the folder": put("images", "file_name", "../../val/images/0101.png"),
    "bbox with negative width": put("annotations", "bbox", [5, 5, -3, 4]),
    "bbox without area": put("annotations", "bbox", [5, 5, 0, 0]),
    "bbox outside": put("annotations", "bbox", [500, 500, 5, 5]),
    "bbox of 1e308": put("annotations", "bbox", [0, 0, 1e308, 1e308]),
    "bbox of 1e-300": put("annotations", "bbox", [1, 1, 1e-300, 1e-300]),
    "area is null": put("annotations", "area", None),
    "area is missing": drop("annotations", "area"),
    "iscrowd is missing": drop("annotations", "iscrowd"),
    "iscrowd is true": put("annotations", "iscrowd", True),
    "iscrowd is null": put("annotations", "iscrowd", None),
    "only crowds": lambda content: [a.update(iscrowd=1) for a in content["annotations"]],
    "no annotations": whole("annotations", []),
    "category name is null": put("categories", "name", None),
    "category name is a number": put("categories", "name", 5),
    "category name is a list": put("categories", "name", ["cat"]),
    "category name is empty": put("categories", "name", ""),
    "category id is negative": lambda content: (
        [
            content["categories"][0].update(id=-3),
            [a.update(category_id=-3) for a in content["annotations"] if a["category_id"] == 3],
        ]
    ),
    "2,000 categories": lambda content: content["categories"].extend(
        {"id": i, "name": f"c{i}"} for i in range(100, 2_100)
    ),
    "annotation listed twice": lambda content: content["annotations"].append({**content["annotations"][0], "id": 99}),
    "categories of one name": lambda content: content["categories"].extend(
        {"id": i, "name": name} for i in (60, 61) for name in [content["categories"][0]["name"] + " " * (i - 60)]
    ),
    "supercategory is a category": lambda content: (
        [
            content["categories"].insert(0, {"id": 0, "name": "pets", "supercategory": "none"}),
            [c.update(supercategory="pets") for c in content["categories"][1:]],
        ]
    ),
}

NAMES = {  # class names that must be printed, drawn and written safely
    "ends in a newline": "cat\n",
    "forges a line": "cat\nFORGED\n",
    "holds a tab": "a\tb",
    "holds a carriage return": "harmless\rFORGED",
    "holds an escape": "\x1b]0;owned\x07cat\x1b[2J",
    "holds a C1 control": "cat\x9b31m",
    "holds a bidi override": "cat\u202egpj",
    "is broken mathtext": r"$\frac{$",
    "is one dollar": "$",
    "is a lone surrogate": "cat\ud83d",
    "is Chinese": "猫と犬",
    "is Arabic": "قطة",
    "is an emoji": "🐈",
    "holds NUL": "cat\0dog",
    "is HTML": "<script>alert(1)</script>",
    "is a formula": "=cmd|'/c calc'!A1",
    "has 100,000 letters": "m" * 100_000,
    "has 5,000 combining marks": "e" + "\u0301" * 5000,
    "is a path": "../../../etc/passwd",
    "is an interpolation": "${oc.env:HOSTILE_SECRET}",
}


def renamed(name: str) -> Build:
    """Train with report; both splits have a class of that name."""

    def build(files: CaseFiles) -> Callable[[], int]:
        contents = [fixtures.coco(first=first) for first in (1, 101)]
        for content in contents:
            content["categories"][0]["name"] = name
        config = detection(files, *contents)
        return lambda: agree(config) or predict(files)

    return build


def predict(files: CaseFiles) -> int:
    """Draw all detections in one image."""
    from tools.predict import main

    command = ["run", "--output", "found", "--threshold", "0", "--device", "cpu"]
    return main([*command, str(files.fixtures / "val" / "images" / "0101.png")])


def as_file(text: Any) -> Build:
    def build(files: CaseFiles) -> Callable[[], int]:
        config = detection(files, train=text)
        return lambda: agree(config)

    return build


def special(make: Callable[[Path], Any]) -> Build:
    """The annotation path is not a regular file, or an unusual one."""

    def build(files: CaseFiles) -> Callable[[], int]:
        config = detection(files, train="")
        (files.folder / "train.json").unlink()
        make(files.folder / "train.json")
        return lambda: agree(config)

    return build


def sparse(path: Path) -> None:
    """A sparse file of 30 GB."""
    with path.open("wb") as file:
        file.truncate(30 * 2**30)


def fifo(path: Path) -> None:
    import os

    os.mkfifo(path)


def cases() -> Iterator[Case]:
    """Yield all cases of this module."""
    group, written = "annotations", ("run",)
    for name, text in FILES.items():
        yield Case(group, name, as_file(text), says=("train.json",))
    for name, make in {
        "a folder": lambda path: path.mkdir(),
        "a pipe": fifo,
        "30 GB of nothing": sparse,
        "a link to itself": lambda path: path.symlink_to(path),
        "a broken link": lambda path: path.symlink_to("nowhere"),
        "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "missing": lambda path: None,
    }.items():
        yield Case(group, f"file is {name}", special(make), says=("train.json",))
    for name, (change, word) in BAD.items():
        yield Case(group, name, mutated(change), says=(word,))
    for name in (
        "iscrowd is '0'",
        "area is a string",
        "area is NaN",
        "image id of 70 bits",
    ):
        yield Case(group, f"validation: {name}", mutated(BAD[name][0], "val"), says=(BAD[name][1],))
    yield Case(group, "validation: crowd without bbox", mutated(BAD["crowd without bbox"][0], "val"), says=("box",))
    for name, template, word in (
        ("a number", 7, "template"),
        ("a list", ["a.png"], "template"),
        ("an object", {}, "template"),
        ("empty", "", "template"),
        ("absolute", "/etc/hostname", "template"),
        ("a folder", ".", "reference-unreadable"),
        ("no image", "../annotations.json", "reference-unreadable"),
        ("missing", "nowhere.png", "reference-missing"),
        ("10,000 letters", "t" * 10_000, "reference-unreadable"),
        ("with NUL", "a\0b", "reference-unreadable"),
        ("with a lone surrogate", "a\ud800", "reference-"),
    ):
        yield Case(group, f"template is {name}", referenced(template), says=(word,))
    for name, change in ODD.items():
        split = "val" if "area" in name or "annotation" in name else "train"
        yield Case(group, f"odd: {name}", mutated(change, split), codes=(0, 2), writes=written)
    for name, text in NAMES.items():
        yield Case(
            "names",
            f"class name {name}",
            renamed(text),
            codes=(0,),
            writes=("run", "found"),
            leaves=("run/report.html",),
        )
