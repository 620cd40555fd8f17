"""Sheets: one picture of several images, each shown in several versions side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from detr_bf.common.errors import InputError
from detr_bf.common.structures import Detections
from detr_bf.common.text import counted
from detr_bf.report.drawing import make_marks, paint_marks
from detr_bf.report.fonts import legible, load_font, shorten

CELL = 420  # pixels, width and largest height of one picture
_GAP = 10  # pixels between the pictures of one image
BORDER = 32  # pixels around the sheet and between images
HEADING, _CAPTION, LABEL_SIZE = 21, 17, 18  # font sizes in pixels
PAPER, INK, FAINT = (255, 255, 255), (28, 30, 34), (110, 116, 124)
GROUND_TRUTH = "Ground truth"
_MOST_NAMES = 8  # of objects on a version of a training image; more would hide it
_VERSION_CELL = 400  # pixels, width and largest height of a version of a training image
_CLASSES_CELL = 240  # pixels, width and largest height of an image beside its classes
_LINE, _TEXT, _BAR = 40, 16, 6  # pixels: distance of classes, font size, height of a bar
_BLUE = (0, 90, 160)


@dataclass(frozen=True)
class SheetRow:
    """One validation image with its ground truth and its detections."""

    image: Tensor  # (3, H, W) uint8
    target_boxes: Tensor  # (T, 4) float, x0, y0, x1, y1 in pixels of the image
    target_labels: Tensor  # (T,) int64
    detections: Detections  # boxes in pixels of the image, any score
    caption: str = ""  # for example the file name


@dataclass(frozen=True)
class ProbableClasses:
    """One image with its most probable classes, best first."""

    image: Tensor  # (3, H, W) uint8
    names: tuple[str, ...]
    scores: tuple[float, ...]  # probabilities
    caption: str = ""  # for example the file name


class Augmented(NamedTuple):
    """One training image after an augmentation."""

    image: Tensor  # (3, H, W) uint8
    boxes: Tensor  # (T, 4) float, x0, y0, x1, y1 in pixels of the image
    labels: Tensor  # (T,) int64


@dataclass(frozen=True)
class Strip:
    """One image in several versions, side by side: pictures that :func:`fit` has scaled, maybe painted on."""

    pictures: tuple[Image.Image, ...]
    captions: tuple[str, ...]  # a line of text below each picture; "": none

    @property
    def height(self) -> int:
        """Height in pixels, including captions if there are any."""
        return max(picture.height for picture in self.pictures) + (2 * _CAPTION if any(self.captions) else 0)

    def paste(self, sheet: Image.Image, left: int, top: int, cell: int) -> None:
        """Paste the pictures, horizontally centred in their cells, with their captions."""
        draw = ImageDraw.Draw(sheet)
        for number, (picture, text) in enumerate(zip(self.pictures, self.captions, strict=True)):
            x = left + number * (cell + _GAP)
            sheet.paste(picture, (x + (cell - picture.width) // 2, top))
            below = top + picture.height + _CAPTION // 2
            text = legible(text)
            font = load_font(_CAPTION, text=text)
            draw.text((x, below), shorten(text, font, cell), fill=FAINT, font=font)


def comparison_sheet(rows: Sequence[SheetRow], class_names: Sequence[str], threshold: float = 0.5) -> Image.Image:
    """Draw ground truth on the left and detections with a score of at least ``threshold`` on the right.

    Raises:
        InputError: ``rows`` is empty.
    """
    pairs = [_paint_pair(row, class_names, threshold) for row in rows]
    return lay_out(pairs, (GROUND_TRUTH, f"Predictions, score ≥ {threshold:.3g}"))


def augmented_sheet(
    rows: Iterable[Iterable[Augmented]], titles: Sequence[str], class_names: Sequence[str]
) -> Image.Image:
    """Draw each training image in several versions side by side; ``titles`` name the versions.

    Boxes have the colours of their classes, and names where there are few.

    Raises:
        InputError: ``rows`` is empty.
    """
    strips = []
    for row in rows:
        pictures, captions = [], []
        for image, boxes, labels in row:
            picture, scale = fit(image, _VERSION_CELL)
            marks = make_marks(boxes * scale, labels, class_names)
            if len(marks) > _MOST_NAMES:
                marks = [replace(mark, text="") for mark in marks]
            paint_marks(picture, marks, _CAPTION)
            pictures.append(picture)
            captions.append(f"{image.shape[2]} x {image.shape[1]}, {counted(len(boxes), 'object')}")
        strips.append(Strip(tuple(pictures), tuple(captions)))
    return lay_out(strips, titles, 1, _VERSION_CELL)


def prediction_sheet(rows: Sequence[ProbableClasses]) -> Image.Image:
    """Draw each image beside its most probable classes.

    Raises:
        InputError: ``rows`` is empty.
    """
    strips = [Strip((fit(row.image, _CLASSES_CELL)[0], _paint_classes(row)), (row.caption, "")) for row in rows]
    return lay_out(strips, ("Image", "Most probable"), strips_per_line=3, cell=_CLASSES_CELL)


def lay_out(strips: Sequence[Strip], titles: Sequence[str], strips_per_line: int = 2, cell: int = CELL) -> Image.Image:
    """Arrange strips in lines, with the ``titles`` of their pictures above the first line.

    Raises:
        InputError: ``strips`` is empty.
    """
    if not strips:
        raise InputError("a sheet needs at least one image, got none")
    columns = min(strips_per_line, len(strips))
    lines = [strips[start : start + columns] for start in range(0, len(strips), columns)]
    heights = [max(strip.height for strip in line) + BORDER for line in lines]
    top = BORDER + 2 * HEADING
    strip_width = len(titles) * (cell + _GAP) - _GAP
    width = columns * (strip_width + BORDER) + BORDER
    sheet = Image.new("RGB", (width, top + sum(heights)), PAPER)
    draw = ImageDraw.Draw(sheet)
    lefts = [BORDER + column * (strip_width + BORDER) for column in range(columns)]
    heading = load_font(HEADING, bold=True)
    for left in lefts:
        for number, text in enumerate(titles):
            draw.text((left + number * (cell + _GAP), BORDER), text, fill=INK, font=heading)
    for line, height in zip(lines, heights, strict=True):
        for left, strip in zip(lefts, line, strict=False):
            strip.paste(sheet, left, top, cell)
        top += height
    return sheet


def fit(image: Tensor, cell: int = CELL) -> tuple[Image.Image, float]:
    """Scale an image (3, H, W) uint8 to a longer side of ``cell`` pixels; return picture and scale factor."""
    picture = transforms.to_pil_image(image)
    scale = cell / max(picture.size)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    return picture.resize(size, Image.Resampling.LANCZOS), scale


def _paint_pair(row: SheetRow, class_names: Sequence[str], threshold: float) -> Strip:
    kept = row.detections.scores >= threshold
    boxes, scores = row.detections.boxes[kept], row.detections.scores[kept]
    truth, scale = fit(row.image)
    found = truth.copy()
    paint_marks(truth, make_marks(row.target_boxes * scale, row.target_labels, class_names), LABEL_SIZE)
    paint_marks(found, make_marks(boxes * scale, row.detections.labels[kept], class_names, scores), LABEL_SIZE)
    counts = f"{len(row.target_boxes)} in the ground truth, {len(boxes)} predicted"
    return Strip((truth, found), (row.caption, counts))


def _paint_classes(row: ProbableClasses) -> Image.Image:
    """Draw name, probability and a proportional bar for each class."""
    panel = Image.new("RGB", (_CLASSES_CELL, max(1, len(row.names)) * _LINE), PAPER)
    draw, plain = ImageDraw.Draw(panel), load_font(_TEXT)
    for index, (name, score) in enumerate(zip(row.names, row.scores, strict=True)):
        top, number = index * _LINE, f"{score:.1%}"
        width = plain.getlength(number)
        text = legible(name)
        font = load_font(_TEXT, text=text)
        draw.text((0, top), shorten(text, font, _CLASSES_CELL - width - _TEXT), INK, font)
        draw.text((_CLASSES_CELL - width, top), number, FAINT, plain)
        bar = top + _TEXT + _BAR
        draw.rectangle((0, bar, max(1, round(score * (_CLASSES_CELL - 1))), bar + _BAR - 1), _BLUE)
    return panel
