"""Foreign names in pictures: drawn in a font that has their letters, or replaced by printable text."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib.font_manager import FontManager, fontManager
from PIL import Image
from torch import Tensor

from detr_bf.classification.figures import save_class_accuracies, save_confusion
from detr_bf.classification.metrics import ClassAccuracy, ClassificationResult
from detr_bf.classification.sheet import ClassifiedImage, classification_sheet
from detr_bf.common.errors import InputError, Interrupted
from detr_bf.common.structures import ClassMap, Detections, PanopticMap, Segment
from detr_bf.report import (
    PanopticSheetRow,
    ProbableClasses,
    SheetRow,
    class_labels,
    comparison_sheet,
    fonts,
    panoptic_sheet,
    prediction_sheet,
    save_picture,
    tolerating,
)
from detr_bf.report.drawing import draw_boxes
from detr_bf.report.figures import Cell, add_legend, draw_sheet, one_plot, save_figure
from detr_bf.report.fonts import legible, load_font, plain, shorten
from detr_bf.report.panoptic import draw_panoptic

HOSTILE = {
    "newline": "cat\n",
    "tab": "a\tb",
    "mathtext": r"$\frac{$",
    "dollars": r"\$1$ $2\$",
    "surrogate": "\ud800",
    "not UTF-8": "caf\udce9.jpg",
    "Chinese": "猫",
    "markup": "<script>alert(1)</script>",
    "long": "x" * 100_000,
    "hidden": "_cat",
    "empty": "",
    "blank": "  ",
    "escape": "\x1b]0;owned\x07",
    "reversed": "a\u202eb",
    "null": "a\0b",
    "private": "\U000f0000",
}


@functools.cache
def every_font() -> FontManager:
    return FontManager()


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use only the fonts that come with matplotlib, on every machine, whatever its cached list of fonts says."""
    own = [entry for entry in every_font().ttflist if entry.fname.startswith(matplotlib.get_data_path())]
    monkeypatch.setattr(fontManager, "ttflist", own)
    fonts._entry_with.cache_clear()
    yield
    fonts._entry_with.cache_clear()


@pytest.fixture
def chinese(bundled: None, tmp_path: Path) -> Path:
    """Pretend to have installed a font with ASCII and 猫, all drawn as solid squares."""
    letters = sorted({*fonts._ALWAYS, "猫"})
    names = [".notdef", *(f"u{ord(letter):04X}" for letter in letters)]
    pen = TTGlyphPen(None)
    for number, point in enumerate([(100, 0), (100, 800), (900, 800), (900, 0)]):
        (pen.lineTo if number else pen.moveTo)(point)
    pen.closePath()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap(dict(zip(map(ord, letters), names[1:], strict=True)))
    builder.setupGlyf(dict.fromkeys(names, pen.glyph()))
    builder.setupHorizontalMetrics(dict.fromkeys(names, (1000, 100)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Test Sans Squares", "styleName": "Regular"})
    builder.setupOS2(sTypoAscender=800, usWinAscent=800, usWinDescent=200)
    builder.setupPost()
    builder.save(tmp_path / "squares.ttf")
    fontManager.addfont(tmp_path / "squares.ttf")
    return tmp_path / "squares.ttf"


@pytest.mark.parametrize(
    ("name", "drawn", "in_matplotlib"),
    [
        ("cat", "cat", "cat"),
        ("Größe, Ωμέγα, кот", "Größe, Ωμέγα, кот", "Größe, Ωμέγα, кот"),
        ("cat\n", r"cat\n", r"cat\n"),
        (r"$\frac{$", r"$\frac{$", r"\$\frac{\$"),
        ("caf\udce9", r"caf\udce9", r"caf\udce9"),
        ("猫", "#17", "#17"),
        ("a cat: 猫", "#17", "#17"),
        ("  ", "#17", "#17"),
        ("_cat", "_cat", " _cat"),
    ],
)
def test_a_name_becomes_what_can_be_drawn(bundled: None, name: str, drawn: str, in_matplotlib: str) -> None:
    assert legible(name, "#17") == drawn
    assert plain(name, "#17") == in_matplotlib


def test_without_an_id_missing_letters_are_escaped(bundled: None) -> None:
    assert legible("photo 猫.jpg") == r"photo \u732b.jpg"
    assert legible("") == ""


def test_classes_without_a_font_show_their_ids_and_a_warning(bundled: None, caplog: pytest.LogCaptureFixture) -> None:
    assert class_labels(ClassMap((3, 17), ("cat", "猫"))) == ("cat", "#17")
    assert "pictures show their ids: #17 (猫)" in caplog.text
    caplog.clear()
    assert class_labels(ClassMap((3, 17), ("cat", "dog"))) == ("cat", "dog")
    assert not caplog.text


def test_an_installed_font_draws_what_dejavu_lacks(chinese: Path) -> None:
    assert legible("猫 0.95", "#17") == "猫 0.95"
    assert class_labels(ClassMap((17,), ("猫",))) == ("猫",)
    assert load_font(20, text="猫 0.95").path == str(chinese)
    assert load_font(20, bold=True, text="猫").path == str(chinese)
    assert load_font(20, bold=True, text="cat").path.endswith("DejaVuSans-Bold.ttf")
    assert legible("犬", "#18") == "#18"
    image = torch.zeros(3, 640, 640, dtype=torch.uint8)
    box, label = torch.tensor([[100.0, 100.0, 500.0, 500.0]]), torch.tensor([0])
    square, number = (draw_boxes(image, box, label, [name]) for name in ("猫", "0"))
    assert not torch.equal(square, number)


def test_matplotlib_takes_the_installed_font_for_the_letter_that_needs_it(chinese: Path, tmp_path: Path) -> None:
    figure, axes = one_plot(plain("a 猫"), "x", "y")
    axes.set_xticks([0, 1], [plain("猫"), plain("cat")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns about a letter without glyph
        save_figure(tmp_path / "a.svg", figure)
    assert axes.get_title(loc="left") == "a 猫"
    families = {text.get_text(): text.get_fontfamily() for text in axes.get_xticklabels()}
    assert families["猫"] == ["DejaVu Sans", "Test Sans Squares"]
    assert families["cat"] != families["猫"]


def test_cutting_a_long_name_measures_few_letters() -> None:
    measured = []
    font: Any = SimpleNamespace(getlength=lambda text: measured.append(len(text)) or 7.0 * len(text))
    assert shorten("x" * 100_000, font, 150) == "x" * 20 + "…"
    assert sum(measured) < 3000
    assert shorten("cat", font, 150) == "cat"
    assert shorten("cat", font, 7) == "…"


IMAGE = torch.full((3, 40, 60), 200, dtype=torch.uint8)
BOX, LABEL, SCORE = torch.tensor([[5.0, 5.0, 50.0, 30.0]]), torch.tensor([0]), torch.tensor([0.9])
PANOPTIC = PanopticMap(1, torch.ones(40, 60, dtype=torch.int32), (Segment(1, 0, 2400, False),))
FOUND = Detections(1, BOX, SCORE, LABEL)


def save_comparison_sheet(path: Path, names: list[str]) -> None:
    rows = [SheetRow(IMAGE, BOX, LABEL + n, replace(FOUND, labels=LABEL + n), name) for n, name in enumerate(names)]
    save_picture(path, comparison_sheet(rows, names))


def save_panoptic_sheet(path: Path, names: list[str]) -> None:
    maps = [replace(PANOPTIC, segments=(Segment(1, n, 2400, n % 2 == 0),)) for n in range(len(names))]
    rows = [PanopticSheetRow(IMAGE, each, each, name) for each, name in zip(maps, names, strict=True)]
    save_picture(path, panoptic_sheet(rows, names))


def save_classification_sheet(path: Path, names: list[str]) -> None:
    rows = [ClassifiedImage(IMAGE, n, n and n - 1, 0.9) for n in range(len(names))]
    save_picture(path, classification_sheet(rows, names))


def save_prediction_sheet(path: Path, names: list[str]) -> None:
    rows = [ProbableClasses(IMAGE, (name,), (0.5,), name) for name in names]
    save_picture(path, prediction_sheet(rows))


def classified(names: list[str]) -> ClassificationResult:
    numbers: Any = dict.fromkeys(("top1", "top5", "many", "medium", "few", "balanced", "ece", "loss"), 0.5)
    classes = dict.fromkeys(names, ClassAccuracy(0.5, 10, 50, "medium"))
    confusion = tuple(map(tuple, np.ones((len(names), len(names)), dtype=int).tolist()))
    return ClassificationResult(**numbers, per_class=classes, num_images=20, num_not_finite=0, confusion=confusion)


def curves(path: Path, names: list[str]) -> None:
    figure, axes = one_plot(plain(r"$\frac{$"), "x", "y")
    for name in names:
        axes.plot([0, 1], [0, 1], label=plain(name))
    add_legend(axes)
    assert len(axes.get_legend().get_texts()) == len(list(filter(None, names))), "no name is hidden"
    save_figure(path, figure)


def analysis_sheet(path: Path, names: list[str]) -> None:
    save_figure(path, draw_sheet("heading", {name: [Cell(np.zeros((4, 4, 3)), name)] for name in names}))


@pytest.mark.parametrize(
    "draw",
    [
        save_comparison_sheet,
        save_panoptic_sheet,
        save_classification_sheet,
        save_prediction_sheet,
        lambda path, names: save_confusion(path, classified(names)),
        lambda path, names: save_class_accuracies(path, classified(names)),
        curves,
        analysis_sheet,
    ],
    ids=["boxes", "panoptic", "classes", "probable", "confusion", "accuracies", "curves", "analysis"],
)
def test_every_picture_takes_every_name(bundled: None, tmp_path: Path, draw: Callable[[Path, list[str]], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(tmp_path / "picture.png", list(HOSTILE.values()))
    with Image.open(tmp_path / "picture.png") as picture:
        picture.verify()


@pytest.mark.parametrize("name", ["猫", "\ud800"])
def test_a_drawn_image_takes_every_name(bundled: None, name: str) -> None:
    drawn: list[Tensor] = [draw_boxes(IMAGE, BOX, LABEL, [name], SCORE), draw_panoptic(IMAGE, PANOPTIC, [name])]
    assert all(picture.shape == (3, 427, 640) for picture in drawn)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), InputError("no image"), ValueError("ours")])
def test_a_failing_picture_is_a_warning(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with tolerating("pictures/validation.png"):
        raise error
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == f"pictures/validation.png was not written: {error}"
    assert bool(record.exc_info) == (type(error) is ValueError), "a fault in our code is logged with its traceback"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted(15, "stopped")])
def test_an_interruption_goes_through(error: BaseException) -> None:
    with pytest.raises(type(error)), tolerating("a picture"):
        raise error
