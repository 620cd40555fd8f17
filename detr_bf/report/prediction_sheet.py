"""One picture that shows images beside the classes that a model finds most probable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw
from torch import Tensor

from detr_bf.report.drawing import save_picture
from detr_bf.report.fonts import legible, load_font, shorten
from detr_bf.report.sheet import FAINT, INK, PAPER, Strip, fit, lay_out

_CELL = 240  # pixels, width and largest height of an image
_LINE, _TEXT, _BAR = 40, 16, 6  # distance of classes, font size and height of a bar in pixels
_BLUE = (0, 90, 160)
_TITLES = ("Image", "Most probable")


@dataclass(frozen=True)
class ProbableClasses:
    """An image with its most probable classes, best first."""

    image: Tensor  # (3, H, W) uint8
    names: tuple[str, ...]
    scores: tuple[float, ...]  # their probabilities
    caption: str = ""  # the file name, for instance


def prediction_sheet(rows: Sequence[ProbableClasses], per_line: int = 3) -> Image.Image:
    """The images in the order given.

    Raises:
        InputError: there is no image to show.
    """
    strips = [Strip((fit(row.image, _CELL)[0], _paint_classes(row)), (row.caption, "")) for row in rows]
    return lay_out(strips, _TITLES, per_line, _CELL)


def save_prediction_sheet(path: str | Path, rows: Sequence[ProbableClasses]) -> None:
    """Atomically write :func:`prediction_sheet` as PNG."""
    save_picture(path, prediction_sheet(rows))


def _paint_classes(row: ProbableClasses) -> Image.Image:
    """A name, its probability and a bar as long as that for each class."""
    panel = Image.new("RGB", (_CELL, max(1, len(row.names)) * _LINE), PAPER)
    draw, plain = ImageDraw.Draw(panel), load_font(_TEXT)
    for place, (name, score) in enumerate(zip(row.names, row.scores, strict=True)):
        top, number = place * _LINE, f"{score:.1%}"
        width = plain.getlength(number)
        text = legible(name)
        font = load_font(_TEXT, text=text)
        draw.text((0, top), shorten(text, font, _CELL - width - _TEXT), INK, font)
        draw.text((_CELL - width, top), number, FAINT, plain)
        bar = top + _TEXT + _BAR
        draw.rectangle((0, bar, max(1, round(score * (_CELL - 1))), bar + _BAR - 1), _BLUE)
    return panel
