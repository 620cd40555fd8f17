"""One picture that shows validation images twice: with the ground truth, and with what the model found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from detr_bf.errors import InputError
from detr_bf.report.drawing import make_marks, paint_marks, save_picture
from detr_bf.report.fonts import legible, load_font, shorten
from detr_bf.structures import Detections

CELL = 420  # pixels, width and largest height of one picture
_GAP = 10  # between the pictures of one image
MARGIN = 32  # around the sheet and between images
HEADING, _CAPTION, LABEL_SIZE = 21, 17, 18  # font sizes in pixels
PAPER, INK, FAINT = (255, 255, 255), (28, 30, 34), (110, 116, 124)
GROUND_TRUTH = "Ground truth"


@dataclass(frozen=True)
class SheetRow:
    """One validation image with its ground truth and its detections."""

    image: Tensor  # (3, H, W) uint8
    target_boxes: Tensor  # (T, 4) float, x0, y0, x1, y1 in pixels of the image
    target_labels: Tensor  # (T,) int64
    detections: Detections  # boxes in pixels of the image, any score
    caption: str = ""  # the file name, for instance


def comparison_sheet(
    rows: Sequence[SheetRow], class_names: Sequence[str], threshold: float = 0.5, pairs_per_line: int = 2
) -> Image.Image:
    """Ground truth at the left, detections with a score of at least ``threshold`` at the right, under titles.

    Raises:
        InputError: there is no image to show.
    """
    pairs = [_paint_pair(row, class_names, threshold) for row in rows]
    return lay_out(pairs, (GROUND_TRUTH, f"Predictions, score ≥ {threshold:g}"), pairs_per_line)


def save_sheet(path: str | Path, rows: Sequence[SheetRow], class_names: Sequence[str], threshold: float = 0.5) -> None:
    """Atomically write :func:`comparison_sheet` as PNG."""
    save_picture(path, comparison_sheet(rows, class_names, threshold))


@dataclass(frozen=True)
class Strip:
    """One image in several states, side by side; the pictures come from :func:`fit` and may be painted on since."""

    pictures: tuple[Image.Image, ...]
    captions: tuple[str, ...]  # a line of text below each; "": none

    @property
    def height(self) -> int:
        """In pixels, with the captions, if there are any."""
        return max(picture.height for picture in self.pictures) + (2 * _CAPTION if any(self.captions) else 0)

    def place(self, sheet: Image.Image, left: int, top: int, cell: int) -> None:
        """Paste the pictures, each centred between the sides of its cell, with their captions."""
        draw = ImageDraw.Draw(sheet)
        for number, (picture, text) in enumerate(zip(self.pictures, self.captions, strict=True)):
            x = left + number * (cell + _GAP)
            sheet.paste(picture, (x + (cell - picture.width) // 2, top))
            below = top + picture.height + _CAPTION // 2
            text = legible(text)
            font = load_font(_CAPTION, text=text)
            draw.text((x, below), shorten(text, font, cell), fill=FAINT, font=font)


def lay_out(strips: Sequence[Strip], titles: Sequence[str], strips_per_line: int = 2, cell: int = CELL) -> Image.Image:
    """Strips in lines, with the ``titles`` of their pictures above the first.

    Raises:
        InputError: there is no strip.
    """
    if not strips:
        raise InputError("a sheet needs at least one image, got none")
    columns = min(strips_per_line, len(strips))
    lines = [strips[start : start + columns] for start in range(0, len(strips), columns)]
    heights = [max(strip.height for strip in line) + MARGIN for line in lines]
    top = MARGIN + 2 * HEADING
    strip_width = len(titles) * (cell + _GAP) - _GAP
    width = columns * (strip_width + MARGIN) + MARGIN
    sheet = Image.new("RGB", (width, top + sum(heights)), PAPER)
    draw = ImageDraw.Draw(sheet)
    lefts = [MARGIN + column * (strip_width + MARGIN) for column in range(columns)]
    heading = load_font(HEADING, bold=True)
    for left in lefts:
        for number, text in enumerate(titles):
            draw.text((left + number * (cell + _GAP), MARGIN), text, fill=INK, font=heading)
    for line, height in zip(lines, heights, strict=True):
        for left, strip in zip(lefts, line, strict=False):
            strip.place(sheet, left, top, cell)
        top += height
    return sheet


def fit(image: Tensor, cell: int = CELL) -> tuple[Image.Image, float]:
    """The image (3, H, W) uint8 enlarged or reduced to a cell of so many pixels, and by which factor."""
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
