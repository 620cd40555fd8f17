"""One picture that shows what a classifier is surest of: its worst mistakes, and what it knows best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw
from torch import Tensor

from detr_bf.errors import InputError
from detr_bf.report.drawing import save_picture
from detr_bf.report.fonts import legible, load_font, shorten
from detr_bf.report.sheet import FAINT, HEADING, INK, MARGIN, PAPER, fit

_CELL = 184  # pixels, width and largest height of an image
_COLUMNS, _GAP = 6, 20
_TEXT, _LINE = 15, 20  # font size and distance of lines in pixels
_RIGHT, _WRONG = (0, 122, 89), (190, 62, 0)  # green and vermilion, dark enough to be read on white


@dataclass(frozen=True)
class ClassifiedImage:
    """One validation image with what it is and what the model takes it for."""

    image: Tensor  # (3, H, W) uint8
    label: int
    predicted: int
    score: float  # probability of the predicted class

    @property
    def is_right(self) -> bool:
        return self.label == self.predicted


def classification_sheet(rows: Sequence[ClassifiedImage], class_names: Sequence[str]) -> Image.Image:
    """The mistakes, then the right answers, each in the order given; below an image what it was taken for.

    Raises:
        InputError: there is no image to show.
    """
    if not rows:
        raise InputError("a sheet needs at least one image, got none")
    wrong, right = ([row for row in rows if row.is_right == is_right] for is_right in (False, True))
    blocks = [
        _paint_block(title, members, class_names)
        for title, members in (("Surest mistakes", wrong), ("Surest right answers", right))
        if members
    ]
    width = max(block.width for block in blocks) + 2 * MARGIN
    sheet = Image.new("RGB", (width, sum(block.height + MARGIN for block in blocks) + MARGIN), PAPER)
    top = MARGIN
    for block in blocks:
        sheet.paste(block, (MARGIN, top))
        top += block.height + MARGIN
    return sheet


def save_classification_sheet(path: str | Path, rows: Sequence[ClassifiedImage], class_names: Sequence[str]) -> None:
    """Atomically write :func:`classification_sheet` as PNG."""
    save_picture(path, classification_sheet(rows, class_names))


def _paint_block(title: str, rows: Sequence[ClassifiedImage], class_names: Sequence[str]) -> Image.Image:
    pictures = [fit(row.image, _CELL)[0] for row in rows]
    text = (2 if all(row.is_right for row in rows) else 3) * _LINE  # of mistakes the true class is told, too
    line = max(picture.height for picture in pictures) + text + 2 * _GAP
    heading = load_font(HEADING, bold=True)
    columns = min(_COLUMNS, len(rows))
    width = max(columns * (_CELL + _GAP) - _GAP, round(heading.getlength(title)))
    lines = -(-len(rows) // _COLUMNS)
    block = Image.new("RGB", (width, 2 * HEADING + lines * line - _GAP), PAPER)
    draw = ImageDraw.Draw(block)
    draw.text((0, 0), title, fill=INK, font=heading)
    for place, (row, picture) in enumerate(zip(rows, pictures, strict=True)):
        left = place % _COLUMNS * (_CELL + _GAP)
        top = 2 * HEADING + place // _COLUMNS * line
        block.paste(picture, (left + (_CELL - picture.width) // 2, top))
        _write_below(draw, row, class_names, left, top + picture.height + _TEXT // 2)
    return block


def _write_below(
    draw: ImageDraw.ImageDraw, row: ClassifiedImage, class_names: Sequence[str], left: int, top: int
) -> None:
    """The predicted class; where they differ, the true one; the probability of the predicted class."""
    predicted = legible(class_names[row.predicted])
    font = load_font(_TEXT, bold=True, text=predicted)
    draw.text((left, top), shorten(predicted, font, _CELL), _RIGHT if row.is_right else _WRONG, font)
    if not row.is_right:
        top += _LINE
        true = f"is {legible(class_names[row.label])}"
        font = load_font(_TEXT, text=true)
        draw.text((left, top), shorten(true, font, _CELL), INK, font)
    draw.text((left, top + _LINE), f"{100 * row.score:.0f} %", FAINT, load_font(_TEXT))
