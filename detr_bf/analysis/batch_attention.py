"""Batch attention of single positions, as in figures 5 and 10 of BatchFormerV2 (Hou et al. 2022, arXiv 2204.01254).

Shape legend: B images of a batch, H heads, P positions, h x w cells of a feature map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from detr_bf.analysis.inspected import InspectedRun, Level, ShownBatch, level_numbered
from detr_bf.batchformer.inspection import attending, batch_former_of, recorded
from detr_bf.common.errors import InputError
from detr_bf.common.text import listed, printable
from detr_bf.report.figures import INK, ORANGE, VERMILION, picture_grid
from detr_bf.report.fonts import plain

_CELL = 2.0  # inches, width of an image
_LETTERS = 24  # of a caption
_HEADS_SHOWN = 4


@dataclass(frozen=True)
class Place:
    """A point in an image, and the batch in which it is looked at."""

    indices: tuple[int, ...]  # of the images of the batch; the first has the point
    point: tuple[float, float] | None  # x and y in pixels of the file; None: the centre of its largest object


@dataclass(frozen=True)
class PlaceAttention:
    """Attention of one place in one model."""

    batch: ShownBatch
    point: tuple[float, float]  # x and y in pixels of the batch
    weights: Mapping[tuple[int, int, int], np.ndarray]  # (encoder layer, layer of the mixer, level) -> (H, B)
    received: np.ndarray  # (B, h, w), of the chosen layer and level: see :func:`received_attention`
    found: np.ndarray | None = None  # (N, 4) detected boxes of an image with a reference, in pixels of the picture

    def rows(self) -> list[dict[str, object]]:
        """Return a table: the weight that the place gives to each image, by layer, level and head."""
        asking = self.batch.images[0]
        height, width = asking.picture.shape[:2]
        point = [c * o / n for c, o, n in zip(self.point, asking.original_size[::-1], (width, height), strict=True)]
        return [
            {
                "image": asking.name,
                "x": round(point[0], 1),
                "y": round(point[1], 1),
                "layer": layer,
                "mixer_layer": depth,
                "level": level,
                "head": head,
                "attended": image.name,
                "weight": float(weights[head, index]),
            }
            for (layer, depth, level), weights in self.weights.items()
            for head in range(len(weights))
            for index, image in enumerate(self.batch.images)
        ]


def choose_places(subject: InspectedRun, count: int, batch_size: int, seed: int = 0) -> list[Place]:
    """Return places in random validation images, each in a batch with other random ones, or with its reference alone.

    Raises:
        InputError: there are fewer images than a batch needs.
    """
    images = len(subject.names)
    if subject.attends_to_references:
        batch_size = 1
    elif batch_size < 2:
        raise InputError(f"batch attention is between images: --images must be 2 or more, got {batch_size}")
    if images < batch_size:
        raise InputError(f"{subject.name} has {images} validation images, fewer than the {batch_size} of --images")
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed)).tolist()
    turned = (order[start % images :] + order[: start % images] for start in range(0, count * batch_size, batch_size))
    return [Place(tuple(own[:batch_size]), None) for own in turned]


def place_in(
    subject: InspectedRun, name: str, point: tuple[float, float] | None, batch_size: int, seed: int = 0
) -> Place:
    """Return the place of a named image, in a batch with random others.

    Raises:
        InputError: as :meth:`InspectedRun.find` and :func:`choose_places`.
    """
    index = subject.find(name)
    if subject.attends_to_references:
        return Place((index,), point)
    [place] = choose_places(subject, 1, batch_size, seed)
    others = [other for other in place.indices if other != index]
    return Place((index, *others[: batch_size - 1]), point)


@torch.no_grad()
def attention_at(
    subject: InspectedRun, place: Place, *, model: nn.Module | None = None, layer: int | None = None, level: int = 0
) -> PlaceAttention:
    """Return how much a position of an image attends to the same position of all images of its batch.

    Dropout is off; the images are those of evaluation.

    Args:
        model: instead of that of the subject.
        layer: encoder layer whose attention is mapped; None: the first insertion.
        level: feature map that is mapped, 0 is the finest.

    Raises:
        InputError: the model has no attention between images, or no such layer or level; the point is outside of the
            image.
    """
    network, batch = model or subject.model, subject.load(place.indices)
    if subject.attends_to_references:
        batch = subject.with_reference(batch)
    former = batch_former_of(network)
    if former.place == "backbone":
        raise InputError(
            f"{subject.name}: with batch_former.at=backbone the tokens are those of a vision transformer, which may "
            "lie in windows, and are not shown; in detectors with encoder layers detr-bf analyze feature-maps shows "
            "both streams"
        )
    with attending(network), recorded(former) as recording:
        outputs = network(batch.inputs)
    if not recording.attention:
        raise InputError(
            f"{subject.name}: its mixer is not the library's attention (batch_former.mixer=attention), and has no "
            "weights of attention between images to draw; detr-bf analyze feature-maps shows both streams of any mixer"
        )
    levels = subject.levels(recording.insertions[0].before, batch)
    # of a mixer's layers the first
    first_of_mixers = {each.insertion: each for each in reversed(recording.attention)}
    insertion = recording.attention[0].insertion if layer is None else layer
    if insertion not in first_of_mixers:
        places = listed(sorted(first_of_mixers))
        raise InputError(f"--layer {layer}: batch attention is at the layers {places}, counted from 0")
    mapped = first_of_mixers[insertion]
    start, height, width = level_numbered(levels, level)
    point = _point_in_batch(place, batch)
    weights = {
        (each.insertion, each.depth, number): each.weights[position_of(point, batch.size, own)][:, 0].cpu().numpy()
        for each in recording.attention
        for number, own in enumerate(levels)
    }
    received = received_attention(mapped.weights[start : start + height * width]).unflatten(1, (height, width))
    found = subject.detected(outputs, batch) if subject.attends_to_references else None
    return PlaceAttention(batch, point, weights, received.cpu().numpy(), found)


def received_attention(weights: Tensor) -> Tensor:
    """Return the attention that each image gets from the others, relative to equal weights: (P, H, B, B) -> (B, P).

    It is the mean over heads and over the other images, times B: 1 if all images get the same.
    """
    images = weights.shape[-1]
    from_others = weights.sum(2) - weights.diagonal(dim1=-2, dim2=-1)
    return from_others.mean(1).T * images / (images - 1)


def position_of(point: tuple[float, float], size: tuple[int, int], level: Level) -> int:
    """Return the token of a level that covers a point, x and y in pixels of a batch of ``size`` (height, width)."""
    column = min(level.width - 1, int(point[0] / size[1] * level.width))
    row = min(level.height - 1, int(point[1] / size[0] * level.height))
    return level.start + row * level.width + column


def _point_in_batch(place: Place, batch: ShownBatch) -> tuple[float, float]:
    """Return x and y of the place in pixels of the batch."""
    image = batch.images[0]
    height, width = image.picture.shape[:2]
    if place.point is None:
        if not len(image.boxes):
            return width / 2, height / 2
        sides = image.boxes[:, 2:] - image.boxes[:, :2]
        x0, y0, x1, y1 = image.boxes[sides.prod(1).argmax()].tolist()
        return (x0 + x1) / 2, (y0 + y1) / 2
    (x, y), (original_height, original_width) = place.point, image.original_size
    if not (0 <= x < original_width and 0 <= y < original_height):
        raise InputError(
            f"--point {x:g},{y:g} is outside of {printable(image.name)}, an image of {original_width} x "
            f"{original_height} pixels: give x from 0 on to the right, and y downwards"
        )
    return x * width / original_width, y * height / original_height


def draw_reference_attention(runs: Mapping[str, Sequence[PlaceAttention]]) -> Figure:
    """Draw for each place a row: image with its objects, reference, difference, and attention to it in each run.

    A column of a run has the weight that each position of the image gives to its reference, the mean over the heads,
    with as many of the best detections as the image has objects.
    """
    places = list(zip(*runs.values(), strict=True))
    pictures = [place[0].batch.images[0].picture for place in places]
    line = _CELL * max(picture.shape[0] / picture.shape[1] for picture in pictures) + 0.4
    columns = 3 + len(runs)
    heading = "White: objects. Orange: as many of the best detections. Colours: weight of the reference"
    figure, grid = picture_grid(heading, len(places), columns, columns * _CELL, len(places) * line + 1.0)
    for row, place in zip(grid, places, strict=True):
        image, reference = place[0].batch.images
        difference = np.abs(image.picture - reference.picture).max(-1)
        captions = (plain(Path(image.name).name, limit=_LETTERS), "reference", "difference")
        for axes, picture, caption in zip(row, (image.picture, reference.picture, difference), captions, strict=False):
            axes.imshow(picture, cmap="gray", vmin=0, vmax=max(difference.max(), 1e-6) if picture.ndim == 2 else 1)
            axes.set_title(caption, fontsize=7, color=INK)
        _draw_boxes(row[0], image.boxes, "white")
        for axes, name, attention in zip(row[3:], runs, place, strict=True):
            drawn = _draw_map(axes, attention, attention.received[1] / 2, image.picture, 1.0)
            mean = attention.received[1].mean() / 2
            axes.set_title(f"{plain(name, limit=_LETTERS)}\n{mean:.2f} on average", fontsize=7, color=INK)
            _draw_boxes(axes, attention.found[: len(image.boxes)], ORANGE)
    _add_colour_bar(figure, drawn, grid)
    return figure


def _draw_boxes(axes: Axes, boxes: np.ndarray, colour: str) -> None:
    for x0, y0, x1, y1 in boxes:
        axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor=colour, linewidth=1.2))


def _add_colour_bar(figure: Figure, drawn: AxesImage, grid: np.ndarray) -> None:
    bar = figure.colorbar(drawn, ax=list(grid.flat), orientation="horizontal", fraction=0.01, aspect=60, pad=0.01)
    bar.ax.tick_params(labelsize=7, colors=INK)


def draw_batch_attention(runs: Mapping[str, Sequence[PlaceAttention]]) -> Figure:
    """Draw for each place the images of its batch with the marked position, and below a row for each run.

    A row has the attention that each image gets from the others as a map, and as numbers the weights that the marked
    position of the first image gives to this position of each image: the mean over the heads, and the first heads.
    """
    places = list(zip(*runs.values(), strict=True))
    columns, lines = len(places[0][0].batch.images), len(places) * (1 + len(runs))
    pictures = [image.picture for place in places for image in place[0].batch.images]
    line = _CELL * max(picture.shape[0] / picture.shape[1] for picture in pictures) + 0.4
    heading = (
        "Weights that the marked position of the first image gives to each image: mean of the heads (each head)\n"
        "Maps: attention from the other images, relative to equal weights"
    )
    figure, grid = picture_grid(heading, lines, columns, columns * _CELL, lines * line + 1.0)
    top = float(np.quantile([x for place in places for attention in place for x in attention.received.flat], 0.99))
    for number, place in enumerate(places):
        first = number * (1 + len(runs))
        for column in range(columns):
            _draw_image(grid[first, column], place[0], column)
            for row, (name, attention) in enumerate(zip(runs, place, strict=True), start=first + 1):
                picture = attention.batch.images[column].picture
                drawn = _draw_map(grid[row, column], attention, attention.received[column], picture, top)
                weights = next(iter(attention.weights.values()))[:, column]
                heads = " ".join(f"{weight:.2f}" for weight in weights[:_HEADS_SHOWN])
                caption = f"{plain(name if column == 0 else '', limit=_LETTERS)}\n{weights.mean():.2f} ({heads})"
                grid[row, column].set_title(caption, fontsize=7, color=INK)
    _add_colour_bar(figure, drawn, grid)
    return figure


def _draw_image(axes: Axes, attention: PlaceAttention, column: int) -> None:
    image = attention.batch.images[column]
    height, width = image.picture.shape[:2]
    axes.imshow(image.picture)
    inside = attention.point[0] < width and attention.point[1] < height
    if inside:
        for colour, line in (("white", 3.5), (VERMILION, 1.8)):
            axes.plot(*attention.point, "o", markersize=9, fillstyle="none", color=colour, markeredgewidth=line)
    caption = plain(Path(image.name).name, limit=_LETTERS) + ("" if inside else "\nposition in the padding")
    axes.set_title(caption, fontsize=7, color=INK, fontweight="bold" if column == 0 else "normal")


def _draw_map(axes: Axes, attention: PlaceAttention, values: np.ndarray, picture: np.ndarray, top: float) -> AxesImage:
    height, width = attention.batch.size
    axes.imshow(picture.mean(-1), cmap="gray", vmin=0, vmax=1)
    drawn = axes.imshow(
        values,
        extent=(0, width, height, 0),
        cmap="inferno",
        alpha=0.65,
        vmin=0,
        vmax=top,
        interpolation="nearest",
    )
    axes.set_xlim(0, picture.shape[1])
    axes.set_ylim(picture.shape[0], 0)
    return drawn
