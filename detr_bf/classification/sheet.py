"""Sheets of validation images: most confident answers of a classifier, reconstructions of a masked autoencoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.report.fonts import legible, load_font, shorten
from detr_bf.report.sheet import BORDER, FAINT, HEADING, INK, PAPER, Strip, fit, lay_out

_CELL = 184  # pixels, width and largest height of an image
_COLUMNS, _GAP = 6, 20
_TEXT, _LINE = 15, 20  # font size and distance of lines in pixels
_RECONSTRUCTION_CELL = 240  # pixels
_RIGHT, _WRONG = (0, 122, 89), (190, 62, 0)  # green and vermilion, dark enough for white paper


@dataclass(frozen=True)
class ClassifiedImage:
    """One validation image with its true and its predicted class."""

    image: Tensor  # (3, H, W) uint8
    label: int
    predicted: int
    score: float  # probability of the predicted class

    @property
    def is_right(self) -> bool:
        return self.label == self.predicted


def classification_sheet(
    rows: Sequence[ClassifiedImage], class_names: Sequence[str], mistakes: str = "Most confident mistakes"
) -> Image.Image:
    """Draw the mistakes, under that heading, above the right answers, each in the given order, with the classes below.

    Raises:
        InputError: ``rows`` is empty.
    """
    if not rows:
        raise InputError("a sheet needs at least one image, got none")
    wrong, right = ([row for row in rows if row.is_right == is_right] for is_right in (False, True))
    titled = ((mistakes, wrong), ("Most confident right answers", right))
    blocks = [_paint_block(title, members, class_names) for title, members in titled if members]
    width = max(block.width for block in blocks) + 2 * BORDER
    sheet = Image.new("RGB", (width, sum(block.height + BORDER for block in blocks) + BORDER), PAPER)
    top = BORDER
    for block in blocks:
        sheet.paste(block, (BORDER, top))
        top += block.height + BORDER
    return sheet


def reconstruction_sheet(originals: Tensor, masked: Tensor, reconstructed: Tensor) -> Image.Image:
    """Draw three pictures of every image side by side; each argument is (N, 3, H, W) uint8.

    Raises:
        InputError: N is 0, or the shapes differ.
    """
    shapes = [tuple(pictures.shape) for pictures in (originals, masked, reconstructed)]
    if len(set(shapes)) != 1:
        raise InputError(f"originals, masked and reconstructed pictures must be of one shape, got {shapes}")
    strips = [
        Strip(tuple(fit(picture, _RECONSTRUCTION_CELL)[0] for picture in triple), ("", "", ""))
        for triple in zip(originals, masked, reconstructed, strict=True)
    ]
    return lay_out(strips, ("Original", "Masked", "Reconstruction"), cell=_RECONSTRUCTION_CELL)


def _paint_block(title: str, rows: Sequence[ClassifiedImage], class_names: Sequence[str]) -> Image.Image:
    pictures = [fit(row.image, _CELL)[0] for row in rows]
    text = (2 if all(row.is_right for row in rows) else 3) * _LINE  # mistakes also show the true class
    line = max(picture.height for picture in pictures) + text + 2 * _GAP
    heading = load_font(HEADING, bold=True)
    columns = min(_COLUMNS, len(rows))
    width = max(columns * (_CELL + _GAP) - _GAP, round(heading.getlength(title)))
    lines = -(-len(rows) // _COLUMNS)
    block = Image.new("RGB", (width, 2 * HEADING + lines * line - _GAP), PAPER)
    draw = ImageDraw.Draw(block)
    draw.text((0, 0), title, fill=INK, font=heading)
    for index, (row, picture) in enumerate(zip(rows, pictures, strict=True)):
        left = index % _COLUMNS * (_CELL + _GAP)
        top = 2 * HEADING + index // _COLUMNS * line
        block.paste(picture, (left + (_CELL - picture.width) // 2, top))
        _write_below(draw, row, class_names, left, top + picture.height + _TEXT // 2)
    return block


def _write_below(
    draw: ImageDraw.ImageDraw, row: ClassifiedImage, class_names: Sequence[str], left: int, top: int
) -> None:
    """Write the predicted class, the true class of a mistake, and the probability of the predicted class."""
    predicted = legible(class_names[row.predicted])
    font = load_font(_TEXT, bold=True, text=predicted)
    draw.text((left, top), shorten(predicted, font, _CELL), _RIGHT if row.is_right else _WRONG, font)
    if not row.is_right:
        top += _LINE
        true = f"is {legible(class_names[row.label])}"
        font = load_font(_TEXT, text=true)
        draw.text((left, top), shorten(true, font, _CELL), INK, font)
    draw.text((left, top + _LINE), f"{100 * row.score:.0f} %", FAINT, load_font(_TEXT))
