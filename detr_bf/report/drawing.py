"""Boxes with legible labels on pictures of any size.

Lines and letters scale with the picture and small pictures are enlarged first, so that labels are legible on images of
96 and of 4000 pixels. Labels are drawn near their box, inside the picture, and avoid each other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from detr_bf.common.errors import InputError
from detr_bf.common.files import atomic_write
from detr_bf.report.fonts import legible, load_font, shorten

logger = logging.getLogger(__name__)

Colour = tuple[int, int, int]

# Okabe and Ito, "Color Universal Design" (2008), without black: distinct for colour-blind readers.
_PALETTE: tuple[Colour, ...] = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
)
_TINTS = ((0, 0.0), (255, 0.5), (0, 0.4))  # grey level and its share, for each repetition of the palette
_LEAST_SIDE = 640  # pixels of the longer side of a picture with boxes or segments
DARK: Colour = (20, 22, 26)
_LIGHT: Colour = (255, 255, 255)


class Rectangle(NamedTuple):
    """Corners in pixels."""

    x0: float
    y0: float
    x1: float
    y1: float

    def moved_to(self, x: float, y: float) -> Rectangle:
        """Return a rectangle of the same size with its top left corner at (x, y)."""
        return Rectangle(x, y, x + self.x1 - self.x0, y + self.y1 - self.y0)

    def overlap(self, other: Rectangle) -> float:
        """Return the common area in square pixels."""
        width = min(self.x1, other.x1) - max(self.x0, other.x0)
        height = min(self.y1, other.y1) - max(self.y0, other.y0)
        return max(width, 0.0) * max(height, 0.0)


@dataclass(frozen=True)
class Mark:
    """One box to draw, in pixels of the picture it is drawn on."""

    box: Rectangle
    text: str  # "": no label
    colour: Colour


def class_colour(label: int) -> Colour:
    """Return the colour of a class index, the same in every picture; the colours repeat after 21 classes."""
    red, green, blue = _PALETTE[label % len(_PALETTE)]
    grey, share = _TINTS[label // len(_PALETTE) % len(_TINTS)]
    return tuple(round(value * (1 - share) + grey * share) for value in (red, green, blue))  # type: ignore[return-value]


def text_colour(background: Colour) -> Colour:
    """Return dark or light, the one with the higher contrast (WCAG 2.2, relative luminance)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in background)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return DARK if luminance > 0.179 else _LIGHT


def draw_boxes(
    image: Tensor,
    boxes: Tensor,
    labels: Tensor,
    class_names: Sequence[str],
    scores: Tensor | None = None,
) -> Tensor:
    """Draw labelled boxes on a copy of an image.

    Args:
        image: (3, H, W) uint8.
        boxes: (N, 4) float, x0, y0, x1, y1 in pixels of ``image``.
        labels: (N,) int64, indices into ``class_names``.
        class_names: drawn as :func:`~detr_bf.report.fonts.legible` returns them.
        scores: (N,) float in [0, 1]; written after the names. Labels of high scores are positioned first.

    Returns:
        (3, H', W') uint8 with the aspect ratio of H and W, and a longer side of at least 640 pixels.
    """
    picture, scale = enlarged(image)
    paint_marks(picture, make_marks(boxes * scale, labels, class_names, scores), font_size_for(picture))
    return transforms.pil_to_tensor(picture)


def enlarged(image: Tensor) -> tuple[Image.Image, float]:
    """Enlarge (3, H, W) uint8 to a longer side of at least 640 pixels; return picture and scale factor."""
    picture = transforms.to_pil_image(image)
    scale = max(1.0, _LEAST_SIDE / max(picture.size))
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    return picture.resize(size, Image.Resampling.BICUBIC), scale


def font_size_for(picture: Image.Image) -> int:
    """Return a font size in pixels that is legible when the whole picture is displayed."""
    return max(14, round(max(picture.size) / 50))


@contextmanager
def tolerating(what: str) -> Iterator[None]:
    """Log a warning if the block fails: a missing picture or page must not end a finished run.

    Args:
        what: the file, named in the warning.
    """
    try:
        yield
    except Exception as error:
        expected = isinstance(error, (OSError, InputError))
        logger.warning("%s was not written: %s", what, error or type(error).__name__, exc_info=not expected)


def save_picture(path: str | Path, picture: Tensor | Image.Image) -> None:
    """Atomically write a PNG or JPEG file from (3, H, W) uint8 or a Pillow image."""
    image = transforms.to_pil_image(picture) if isinstance(picture, Tensor) else picture
    with atomic_write(path) as temporary:
        if Path(path).suffix == ".jpg":
            image.save(temporary, format="JPEG", quality=85, optimize=True)
        else:
            image.save(temporary, format="PNG", optimize=True)


def make_marks(boxes: Tensor, labels: Tensor, class_names: Sequence[str], scores: Tensor | None = None) -> list[Mark]:
    """Return marks of boxes (N, 4) with class names, scores and class colours, highest score first."""
    order = range(len(boxes)) if scores is None else torch.argsort(scores, descending=True, stable=True).tolist()
    marks = []
    for row in order:
        x0, y0, x1, y1 = boxes[row].tolist()
        label = int(labels[row])
        name = legible(class_names[label])
        text = name if scores is None else f"{name} {float(scores[row]):.2f}"
        marks.append(Mark(Rectangle(min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)), text, class_colour(label)))
    return marks


def paint_marks(picture: Image.Image, marks: Sequence[Mark], font_size: int) -> None:
    """Draw all boxes, then all labels, onto ``picture``; first marks on top, with labels positioned first."""
    draw = ImageDraw.Draw(picture)
    line = max(2, round(font_size / 6))
    for mark in reversed(marks):
        _paint_outline(draw, mark, picture.size, line)
    padding = max(2, font_size // 5)
    placed: list[Rectangle] = []
    for mark in marks:
        if not mark.text:
            continue
        font = load_font(font_size, text=mark.text)
        text = shorten(mark.text, font, picture.width - 2 * padding)
        ascent, descent = font.getmetrics()
        size = (font.getlength(text) + 2 * padding, ascent + descent + padding)
        spot = _label_position(mark.box, size, picture.size, placed)
        draw.rectangle(spot, fill=mark.colour)
        draw.text((spot.x0 + padding, spot.y0 + padding / 2), text, fill=text_colour(mark.colour), font=font)
        placed.append(spot)


def _paint_outline(draw: ImageDraw.ImageDraw, mark: Mark, picture_size: tuple[int, int], line: int) -> None:
    """Draw a coloured line between two thin dark ones, visible on every background."""
    width, height = picture_size
    x0, x1 = (min(max(round(x), 0), width - 1) for x in (mark.box.x0, mark.box.x1))
    y0, y1 = (min(max(round(y), 0), height - 1) for y in (mark.box.y0, mark.box.y1))
    draw.rectangle((x0 - 1, y0 - 1, x1 + 1, y1 + 1), outline=DARK, width=line + 2)
    draw.rectangle((x0, y0, x1, y1), outline=mark.colour, width=line)


def _label_position(
    box: Rectangle, size: tuple[float, float], picture_size: tuple[int, int], taken: Iterable[Rectangle]
) -> Rectangle:
    """Return the first position of a label near its box without overlap with other labels, else with the least."""
    width, height = size
    corners = (
        (box.x0, box.y0 - height),  # above the box
        (box.x0, box.y1),  # below it
        (box.x0, box.y0),  # inside, at the corners
        (box.x1 - width, box.y1 - height),
        (box.x1 - width, box.y0),
        (box.x0, box.y1 - height),
    )
    label = Rectangle(0, 0, width, height)
    inside = [
        label.moved_to(min(max(x, 0), picture_size[0] - 1 - width), min(max(y, 0), picture_size[1] - 1 - height))
        for x, y in corners
    ]
    taken = list(taken)
    return min(inside, key=lambda spot: sum(spot.overlap(other) for other in taken))
