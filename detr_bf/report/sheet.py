"""One picture that shows validation images twice: with the ground truth, and with what the model found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from detr_bf.errors import InputError
from detr_bf.report.drawing import load_font, make_marks, paint_marks, save_picture, shorten
from detr_bf.structures import Detections

_CELL = 420  # pixels, width and largest height of one picture
_GAP = 10  # between ground truth and predictions
_MARGIN = 32  # around the sheet and between pairs
_HEADING, _CAPTION, LABEL_SIZE = 21, 17, 18  # font sizes in pixels
_PAPER, _INK, _FAINT = (255, 255, 255), (28, 30, 34), (110, 116, 124)


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
    return lay_out(pairs, f"Predictions, score ≥ {threshold:g}", pairs_per_line)


def save_sheet(path: str | Path, rows: Sequence[SheetRow], class_names: Sequence[str], threshold: float = 0.5) -> None:
    """Atomically write :func:`comparison_sheet` as PNG."""
    save_picture(path, comparison_sheet(rows, class_names, threshold))


@dataclass(frozen=True)
class Pair:
    """One image twice, both pictures from :func:`fit` and painted on since."""

    truth: Image.Image
    found: Image.Image
    caption: str  # below the ground truth
    counts: str  # below what was found

    def place(self, sheet: Image.Image, left: int, top: int) -> None:
        """Paste both pictures, centred between the sides of their cells, with one line of text below each."""
        font = load_font(_CAPTION)
        draw = ImageDraw.Draw(sheet)
        cells = ((left, self.truth, self.caption), (left + _CELL + _GAP, self.found, self.counts))
        for x, picture, text in cells:
            sheet.paste(picture, (x + (_CELL - picture.width) // 2, top))
            below = top + picture.height + _CAPTION // 2
            draw.text((x, below), shorten(text, font, _CELL), fill=_FAINT, font=font)


def lay_out(pairs: Sequence[Pair], found_title: str, pairs_per_line: int = 2) -> Image.Image:
    """Pairs in lines under the titles "Ground truth" and ``found_title``.

    Raises:
        InputError: there is no pair.
    """
    if not pairs:
        raise InputError("a comparison sheet needs at least one image, got none")
    columns = min(pairs_per_line, len(pairs))
    lines = [pairs[start : start + columns] for start in range(0, len(pairs), columns)]
    heights = [max(pair.truth.height for pair in line) + 2 * _CAPTION + _MARGIN for line in lines]
    top = _MARGIN + 2 * _HEADING
    pair_width = 2 * _CELL + _GAP
    width = columns * (pair_width + _MARGIN) + _MARGIN
    sheet = Image.new("RGB", (width, top + sum(heights)), _PAPER)
    draw = ImageDraw.Draw(sheet)
    lefts = [_MARGIN + column * (pair_width + _MARGIN) for column in range(columns)]
    for left in lefts:
        heading = load_font(_HEADING, bold=True)
        draw.text((left, _MARGIN), "Ground truth", fill=_INK, font=heading)
        draw.text((left + _CELL + _GAP, _MARGIN), found_title, fill=_INK, font=heading)
    for line, height in zip(lines, heights, strict=True):
        for left, pair in zip(lefts, line, strict=False):
            pair.place(sheet, left, top)
        top += height
    return sheet


def fit(image: Tensor) -> tuple[Image.Image, float]:
    """The image (3, H, W) uint8 enlarged or reduced to a cell, and by which factor."""
    picture = transforms.to_pil_image(image)
    scale = _CELL / max(picture.size)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    return picture.resize(size, Image.Resampling.LANCZOS), scale


def _paint_pair(row: SheetRow, class_names: Sequence[str], threshold: float) -> Pair:
    kept = row.detections.scores >= threshold
    boxes, scores = row.detections.boxes[kept], row.detections.scores[kept]
    truth, scale = fit(row.image)
    found = truth.copy()
    paint_marks(truth, make_marks(row.target_boxes * scale, row.target_labels, class_names), LABEL_SIZE)
    paint_marks(found, make_marks(boxes * scale, row.detections.labels[kept], class_names, scores), LABEL_SIZE)
    counts = f"{len(row.target_boxes)} in the ground truth, {len(boxes)} predicted"
    return Pair(truth, found, row.caption, counts)
