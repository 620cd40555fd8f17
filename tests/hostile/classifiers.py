"""Wrong, unusual or malicious class folders and lists of labelled images."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hostile import fixtures
from tests.hostile.annotations import fifo, sparse
from tests.hostile.battery import DISAGREE, NEXT_COMMAND, Build, Case, CaseFiles
from tests.hostile.images import BROKEN


def classify(config: Path, *settings: str) -> int:
    """Train a classifier."""
    from tools.train_net import main

    return main(["--config", str(config), *settings])


def agree(config: Path, *settings: str) -> int:
    """Return the exit code of the data checks, or DISAGREE if training returns another."""
    from tools.check_data import main as check

    first = check(["--config", str(config), *settings])
    print(NEXT_COMMAND, flush=True)
    second = classify(config, *settings)
    if first != second:
        print(f"the doctor says {first}, training {second}")
        return DISAGREE
    return first


def folder(change: Callable[[Path], Any], call: Callable[..., int] = agree, settings: tuple[str, ...] = ()) -> Build:
    """Train a classifier on a changed copy of the class folders of the fixtures."""

    def build(files: CaseFiles) -> Callable[[], int]:
        root = files.copy("classes")
        change(root)
        lines = f"  name: image_folder\n  root: {root}\n"
        config = files.write("config.yaml", fixtures.classifier_config(lines, files.folder / "run"))
        return lambda: call(config, *settings)

    return build


def lists(train: str | bytes, val: str | bytes | None = None) -> Build:
    """Train a classifier on lists of files."""

    def build(files: CaseFiles) -> Callable[[], int]:
        root = files.copy("classes")
        files.write("train.txt", train)
        files.write("val.txt", train if val is None else val)
        lines = f"  name: list\n  root: {root}\n  train: {files.folder}/train.txt\n  val: {files.folder}/val.txt\n"
        config = files.write("config.yaml", fixtures.classifier_config(lines, files.folder / "run"))
        return lambda: agree(config)

    return build


def both(name: bytes) -> Callable[[Path], None]:
    """Rename the first class of train and val."""
    import os

    def change(root: Path) -> None:
        for split in ("train", "val"):
            os.rename(os.fsencode(root / split / "cats"), os.fsencode(root / split) + b"/" + name)  # noqa: PTH104

    return change


def emptied(root: Path) -> None:
    for split in ("train", "val"):
        for path in (root / split).rglob("*.png"):
            path.unlink()


def one_class(root: Path) -> None:
    for split in ("train", "val"):
        shutil.rmtree(root / split / "cats")


def replaced(make: Callable[[Path], Any], split: str = "train") -> Callable[[Path], None]:
    """Replace one image by another kind of file."""

    def change(root: Path) -> None:
        (root / split / "cats" / "0.png").unlink()
        make(root / split / "cats" / "0.png")

    return change


GOOD = "train/cats/0.png 0\ntrain/cats/1.png 0\ntrain/dogs/0.png 1\ntrain/dogs/1.png 1\n"
BAD_LISTS: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "train.txt"),
    "blank lines": ("\n\n \n", "train.txt"),
    "no labels": ("train/cats/0.png\n", "line 1"),
    "negative label": (GOOD + "train/cats/2.png -1\n", "line 5"),
    "fractional label": (GOOD + "train/cats/2.png 1.5\n", "line 5|-"),
    "label of 400 digits": (GOOD + f"train/cats/2.png {'9' * 400}\n", "line 5"),
    "label of 17 digits": (GOOD + "train/cats/2.png 99999999999999999\n", "labels|gaps"),
    "label in words": (GOOD + "train/cats/2.png two\n", "line 5"),
    "gap in the labels": (GOOD + "train/cats/2.png 7\n", "gaps"),
    "no such file": (GOOD + "train/cats/none.png 0\n", "none.png"),
    "binary": (bytes(range(256)), "UTF-8|text"),
    "NUL in a path": ("train/cats/\0.png 0\n" + GOOD, "\\x00"),
    "name of 300 letters": (f"{'n' * 300}.png 0\n" + GOOD, "nnnn"),
    "escape in a path": ("train/\x1b]0;owned\x07.png 0\n" + GOOD, "\\x1b"),
    "a line of a megabyte": ("m" * 2**20 + "\n" + GOOD, "line 1"),
    "a line of spaces and digits": ("1 " * 50_000 + "x\n" + GOOD, "line 1"),
    "a folder in the list": ("train/cats 0\n" + GOOD, "cats"),
}
ODD_LISTS: dict[str, str] = {
    "path leaves the root": GOOD + "../notes.md 0\n",
    "absolute path": GOOD + "/proc/self/status 1\n",
    "file twice": GOOD + "train/cats/0.png 1\n",
    "byte order mark": "\ufeff" + GOOD,
    "carriage returns": GOOD.replace("\n", "\r\n"),
    "commas": GOOD.replace(" ", ","),
}
CLASS_NAMES = {
    "with a newline": b"cat\nFORGED\n",
    "with an escape": b"\x1b]0;owned\x07",
    "of broken mathtext": b"$\\frac{$",
    "that is not UTF-8": b"caf\xe9",
    "of 250 letters": b"c" * 250,
    "that is a formula": b"=1+1",
    "of Chinese letters": "猫".encode(),
    "of HTML": b"<script>alert(1)<",
}
FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no val": (lambda root: shutil.rmtree(root / "val"), "val"),
    "no train": (lambda root: shutil.rmtree(root / "train"), "train"),
    "no classes": (lambda root: [shutil.rmtree(p) for p in (root / "train").iterdir()], "train"),
    "no images": (emptied, "images"),
    "val has another class": (lambda root: (root / "val" / "cats").rename(root / "val" / "lions"), "lions"),
    "root is a file": (lambda root: (shutil.rmtree(root), root.write_text("x")), "classes"),
    "train is a file": (lambda root: (shutil.rmtree(root / "train"), (root / "train").write_text("x")), "train"),
    "train is a link to itself": (
        lambda root: (shutil.rmtree(root / "train"), (root / "train").symlink_to("train")),
        "train",
    ),
    "only other files": (lambda root: [p.rename(p.with_suffix(".txt")) for p in root.rglob("*.png")], "images"),
}


def cases() -> Iterator[Case]:
    """Yield all cases of this module."""
    group = "classifiers"
    for name, (change, word) in FOLDERS.items():
        yield Case(group, f"folder: {name}", folder(change), says=(word,))
    yield Case(group, "folder: one class alone", folder(one_class), codes=(0, 2), writes=("run",))
    for name in ("empty", "a text", "EPS", "PNG bomb", "a pipe", "30 GB of nothing", "a link to itself", "/dev/zero"):
        yield Case(group, f"image is {name}", folder(replaced(BROKEN[name])), codes=(2,), says=("0.png",))
        yield Case(
            group, f"validation image is {name}", folder(replaced(BROKEN[name], "val")), codes=(2,), says=("0.png",)
        )
    for name in ("a text", "PNG bomb", "a pipe"):
        build = folder(replaced(BROKEN[name]), classify, ("data.check=false", "data.max_unreadable=0"))
        yield Case(group, f"unchecked image is {name}", build, codes=(1, 2), says=("0.png",), writes=("run",))
    for name, raw in CLASS_NAMES.items():
        yield Case(
            "names", f"class folder {name}", folder(both(raw)), codes=(0,), writes=("run",), leaves=("run/report.html",)
        )
    for name, (text, word) in BAD_LISTS.items():
        yield Case(group, f"list: {name}", lists(text), says=(word,))
    yield Case(group, "list: validation has more classes", lists(GOOD, GOOD + "train/cats/2.png 2\n"), says=("2",))
    for name, text in ODD_LISTS.items():
        yield Case(group, f"odd list: {name}", lists(text), codes=(0, 2), writes=("run",))
    for name, make in {"a folder": lambda p: p.mkdir(), "a pipe": fifo, "30 GB of nothing": sparse}.items():
        yield Case(group, f"list is {name}", special_list(make), says=("train.txt",))


def special_list(make: Callable[[Path], Any]) -> Build:
    def build(files: CaseFiles) -> Callable[[], int]:
        call = lists(GOOD)(files)
        (files.folder / "train.txt").unlink()
        make(files.folder / "train.txt")
        return call

    return build
