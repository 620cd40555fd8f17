"""Pictures of panoptic maps: every segment tinted, outlined and named; void pixels unchanged.

Shape legend: H x W pixels of the image and its map, h x w pixels of the drawn picture. Segments are numbered from 1 in
the order of ``PanopticMap.segments``; 0 means no segment.
"""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from scipy import ndimage
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from detr_bf.common.errors import InputError
from detr_bf.common.structures import PanopticMap, Segment
from detr_bf.common.text import counted
from detr_bf.report.drawing import DARK, Colour, class_colour, enlarged, font_size_for, text_colour
from detr_bf.report.fonts import legible, load_font, shorten
from detr_bf.report.sheet import GROUND_TRUTH, LABEL_SIZE, Strip, fit, lay_out

_OPACITY = 0.55  # of a segment's colour over the grey image
_SHADES = (0.0, 0.12, -0.12, 0.06, -0.06)  # lightness added for the segments of one class


@dataclass(frozen=True)
class PanopticSheetRow:
    """One validation image with its true and its predicted panoptic map."""

    image: Tensor  # (3, H, W) uint8
    truth: PanopticMap
    found: PanopticMap
    file_name: str = ""


def draw_panoptic(image: Tensor, panoptic: PanopticMap, names: Sequence[str]) -> Tensor:
    """Tint, outline and name the segments on a copy of an image, which is grey inside segments.

    The first segment of a class has the class's colour (:func:`~detr_bf.report.drawing.class_colour`), others have
    shades of it to distinguish instances. Names lie inside their segments without overlap; a segment that is too small
    for its name has none.

    Args:
        image: (3, H, W) uint8.
        panoptic: map of the image's size.
        names: class names by contiguous index.

    Returns:
        (3, h, w) uint8 with the aspect ratio of H and W, and a longer side of at least 640 pixels.

    Raises:
        InputError: image and map have different sizes.
    """
    check_map_size(image, panoptic)
    picture, _ = enlarged(image)
    return transforms.pil_to_tensor(_paint_classes(picture, panoptic, names, font_size_for(picture)))


def panoptic_sheet(rows: Sequence[PanopticSheetRow], names: Sequence[str]) -> Image.Image:
    """Draw ground truth on the left and predictions on the right.

    Raises:
        InputError: ``rows`` is empty, or an image and its maps have different sizes.
    """
    strips = []
    for row in rows:
        _, *pictures = _painted(row.image, (row.truth, row.found), names)
        counts = (
            f"{counted(len(row.truth.segments), 'segment')} in the ground truth, {len(row.found.segments)} predicted"
        )
        strips.append(Strip(tuple(pictures), (row.file_name, counts)))
    return lay_out(strips, (GROUND_TRUTH, "Predictions"))


def panoptic_comparison(
    rows: Sequence[tuple[Tensor, str, Sequence[PanopticMap]]], titles: Sequence[str], names: Sequence[str]
) -> Image.Image:
    """Draw each image (3, H, W), with its caption, beside several maps of it, such as the truth and those of two runs.

    Args:
        rows: image, caption and maps of each image.
        titles: of the maps.
        names: class names by contiguous index.

    Raises:
        InputError: ``rows`` is empty, or an image and its maps have different sizes.
    """
    strips = []
    for image, caption, maps in rows:
        counts = (counted(len(panoptic.segments), "segment") for panoptic in maps)
        strips.append(Strip(_painted(image, maps, names), (caption, *counts)))
    return lay_out(strips, ("Image", *titles), strips_per_line=1)


def segment_colours(segments: Sequence[Segment]) -> list[Colour]:
    """Return one colour for each segment: the class colour for the first of a class, then shades of it.

    The shades repeat after five segments of a class.
    """
    seen: Counter[int] = Counter()
    colours = []
    for segment in segments:
        colours.append(_shade(class_colour(segment.label), seen[segment.label]))
        seen[segment.label] += 1
    return colours


def interior_points(numbers: NDArray[np.int32], sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int] | None]:
    """Return the centre (x, y) of each segment's name in a map (h, w), or None if there is no space for it.

    Small segments choose first. A centre is the pixel farthest from the segment's boundary (of several, the middle one)
    for which the name lies inside the picture and overlaps no other name.

    Args:
        numbers: (h, w) segment numbers.
        sizes: width and height of each name in pixels.
    """
    points: list[tuple[int, int] | None] = [None] * len(sizes)
    areas = np.bincount(numbers.ravel(), minlength=len(sizes) + 1)[1:]
    boxes = ndimage.find_objects(numbers, len(sizes))
    taken: list[tuple[int, int, int, int]] = []  # centre x, y, width, height
    for index in np.argsort(areas, kind="stable"):
        width, height = sizes[index]
        if areas[index] < width * height:
            continue
        rows, columns = boxes[index]
        depth = ndimage.distance_transform_edt(np.pad(numbers[rows, columns] == index + 1, 1))[1:-1, 1:-1]
        y, x = np.ogrid[rows, columns]
        inside_x = (x >= width / 2) & (x <= numbers.shape[1] - width / 2)
        inside_y = (y >= height / 2) & (y <= numbers.shape[0] - height / 2)
        depth *= inside_x & inside_y
        for other_x, other_y, other_width, other_height in taken:
            apart_x = abs(x - other_x) >= (width + other_width) / 2
            apart_y = abs(y - other_y) >= (height + other_height) / 2
            depth *= apart_x | apart_y
        deepest = np.argwhere(depth == depth.max())
        row, column = deepest[np.argmin(np.square(deepest - deepest.mean(axis=0)).sum(axis=1))]
        if depth[row, column] > 0:
            point = int(column) + columns.start, int(row) + rows.start
            points[index] = point
            taken.append((*point, width, height))
    return points


def _painted(image: Tensor, maps: Sequence[PanopticMap], names: Sequence[str]) -> tuple[Image.Image, ...]:
    """Return the image at the size of a sheet, without and with each of the maps."""
    for panoptic in maps:
        check_map_size(image, panoptic)
    picture, _ = fit(image)
    return picture, *(_paint_classes(picture, panoptic, names, LABEL_SIZE) for panoptic in maps)


def check_map_size(image: Tensor, panoptic: PanopticMap) -> None:
    """Check that an image (3, H, W) and a map of it have one size.

    Raises:
        InputError: they have not.
    """
    if image.shape[1:] != panoptic.ids.shape:
        given, expected = (" x ".join(map(str, shape)) for shape in (panoptic.ids.shape, image.shape[1:]))
        raise InputError(
            f"the panoptic map of image {panoptic.image_id} has {given} pixels (height x width), its image {expected}; "
            "both must have the size of the file"
        )


def _paint_classes(picture: Image.Image, panoptic: PanopticMap, names: Sequence[str], font_size: int) -> Image.Image:
    """Return a copy of ``picture`` with the segments in the colours and with the names of their classes."""
    texts = [legible(names[segment.label]) + (" (crowd)" if segment.is_crowd else "") for segment in panoptic.segments]
    return paint_segments(picture, panoptic, texts, segment_colours(panoptic.segments), font_size)


def paint_segments(
    picture: Image.Image, panoptic: PanopticMap, texts: Sequence[str], colours: Sequence[Colour], font_size: int
) -> Image.Image:
    """Return a copy of ``picture``, which may be larger or smaller than the map, with the segments drawn on it.

    Args:
        texts: for each segment, already legible; "": none.
        colours: for each segment.
        font_size: pixels.
    """
    numbers = _numbered(panoptic, picture.size)
    pixels = np.asarray(picture).copy()
    inside = numbers > 0
    table = np.array([(0, 0, 0), *colours])
    grey = np.asarray(picture.convert("L"))[inside, None]
    pixels[inside] = np.rint(grey * (1 - _OPACITY) + table[numbers[inside]] * _OPACITY)
    pixels[inside & _near_boundary(numbers, max(1, font_size // 12))] = DARK
    painted = Image.fromarray(pixels)
    _paint_names(painted, numbers, texts, colours, font_size)
    return painted


def _paint_names(
    picture: Image.Image, numbers: NDArray[np.int32], texts: Sequence[str], colours: Sequence[Colour], font_size: int
) -> None:
    """Draw names on rectangles of their segments' colours."""
    padding = max(2, font_size // 5)
    fonts = [load_font(font_size, text=text) for text in texts]
    texts = [shorten(text, font, picture.width - 2 * padding) for text, font in zip(texts, fonts, strict=True)]
    sizes = [
        (round(font.getlength(text)) + 2 * padding, sum(font.getmetrics()) + padding)
        for text, font in zip(texts, fonts, strict=True)
    ]
    draw = ImageDraw.Draw(picture)
    points = interior_points(numbers, sizes)
    for text, font, (width, height), colour, point in zip(texts, fonts, sizes, colours, points, strict=True):
        if point is None or not text:
            continue
        x, y = point[0] - width // 2, point[1] - height // 2
        draw.rectangle((x, y, x + width - 1, y + height - 1), fill=colour)
        draw.text((x + padding, y + padding / 2), text, fill=text_colour(colour), font=font)


def _numbered(panoptic: PanopticMap, size: tuple[int, int]) -> NDArray[np.int32]:
    """Return the map scaled to a picture's size (width, height), with segments numbered from 1."""
    ids = panoptic.ids.cpu().numpy()
    numbers = np.zeros(ids.shape, dtype=np.int32)
    for number, segment in enumerate(panoptic.segments, start=1):
        numbers[ids == segment.id] = number
    return np.asarray(Image.fromarray(numbers).resize(size, Image.Resampling.NEAREST))


def _near_boundary(numbers: NDArray[np.int32], width: int) -> NDArray[np.bool_]:
    """Return (h, w) bool: pixels at most ``width`` away from another segment or void; picture edges do not count."""
    window = 2 * width + 1
    near: NDArray[np.bool_] = ndimage.maximum_filter(numbers, window) != ndimage.minimum_filter(numbers, window)
    return near


def _shade(colour: Colour, number: int) -> Colour:
    hue, lightness, saturation = colorsys.rgb_to_hls(*(value / 255 for value in colour))
    lightness = min(max(lightness + _SHADES[number % len(_SHADES)], 0.1), 0.9)
    shade = colorsys.hls_to_rgb(hue, lightness, saturation)
    return tuple(round(value * 255) for value in shade)  # type: ignore[return-value]
