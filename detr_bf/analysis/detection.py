"""Analyses of detectors: feature maps of both streams, queries, panoptic maps, and mini-batch inference.

Shape legend: R rows (streams x images), S tokens, C channels, Q queries, H heads, L levels, P points, h x w cells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from detr_bf.analysis.images import FeatureMaps, StreamMaps
from detr_bf.analysis.inspected import InspectedDetector, ShownBatch, level_list, level_numbered
from detr_bf.assembly.data import build_loader, data_source
from detr_bf.assembly.model import build_classification, build_panoptic_postprocess, build_postprocess
from detr_bf.assembly.training import precision_of
from detr_bf.batchformer import BatchFormerV2
from detr_bf.batchformer.inspection import attending, attention_between_images
from detr_bf.common.errors import InputError
from detr_bf.common.progress import progress_bar
from detr_bf.common.structures import Batch, Outputs, PanopticMap, Queries, TokenBatch
from detr_bf.data.batches import IndexBatches
from detr_bf.engine import EvaluationLoop
from detr_bf.evaluation import CocoEvaluator, PanopticFile, Result
from detr_bf.report.figures import BLUE, COLOURS, GREEN, INK, VERMILION, picture_grid
from detr_bf.report.fonts import plain
from detr_bf.transformer import Encoder
from detr_bf.transformer.attention import AttentionRecord, recorded_weights

_SQUARE, _SMALL = 1.5, 32**2  # of figure 7 of DETR: wide and tall boxes, and small ones in pixels of the image
_LETTERS = 26  # of a caption
_QUERIES_SHOWN, _BOXES_SHOWN = 6, 20  # queries with their attention, and queries with their boxes in all images


# Feature maps.


@torch.no_grad()
def feature_maps_of(
    run: InspectedDetector, indices: Sequence[int], *, layer: int | None = None, level: int = 0
) -> FeatureMaps:
    """Return the mean over channels of the tokens after an encoder layer, as in figure 8 of BatchFormerV2.

    All images are one batch; dropout is off. A run without batch attention has the clean stream alone.

    Args:
        layer: encoder layer; None: the first one with both streams, or the first.
        level: feature map, 0 is the finest.

    Raises:
        InputError: there is no such layer or level.
    """
    encoder = next(module for module in run.model.modules() if isinstance(module, Encoder))
    batch_former = encoder.batch_former
    first = 0 if batch_former is None else batch_former.insertions[0] + (batch_former.position == "after")
    number = min(first, len(encoder.layers) - 1) if layer is None else layer
    if not encoder.layers:
        raise InputError("feature maps are those of the encoder, and this detector has no encoder layers")
    if not 0 <= number < len(encoder.layers):
        raise InputError(f"--layer {number}: the encoder has the layers 0 to {len(encoder.layers) - 1}")
    kept: list[tuple[Tensor, TokenBatch]] = []
    batch = run.load(indices)
    with (
        encoder.layers[number].register_forward_hook(lambda module, args, output: kept.append((output, args[0]))),
        attending(run.model) if has_two_streams(run.model) else nullcontext(),
    ):
        run.model(batch.inputs)
    tokens, source = kept[0]
    chosen = level_numbered(run.levels(source, batch), level)
    cells = tokens[:, chosen.start : chosen.start + chosen.height * chosen.width].mean(-1)
    maps = cells.unflatten(1, (chosen.height, chosen.width)).float().cpu().numpy()
    count, found = len(indices), []
    for row, (index, image) in enumerate(zip(indices, batch.images, strict=True)):
        height = math.ceil(image.picture.shape[0] / batch.size[0] * chosen.height)
        width = math.ceil(image.picture.shape[1] / batch.size[1] * chosen.width)
        second = maps[count + row, :height, :width] if len(maps) == 2 * count else None
        found.append(StreamMaps(index, Path(image.name).name, image.picture, maps[row, :height, :width], second))
    return FeatureMaps(tuple(found))


def has_two_streams(model: nn.Module) -> bool:
    """Return True if training forks the batch in a way that images attend to each other."""
    found = next((module for module in model.modules() if isinstance(module, BatchFormerV2)), None)
    if found is None or found.neighbours is not None or found.references:
        return False
    return found.mode in ("two_stream", "mini_batch_inference")


# Queries.


@dataclass(frozen=True)
class QueryLook:
    """A query in one image: its prediction, and what it attends to in the last decoder layer."""

    query: int
    label: str
    score: float
    box: tuple[float, float, float, float]  # x0, y0, x1, y1 in pixels of the picture
    reference: tuple[float, float] | None  # x and y in pixels of the picture; None: without reference point
    heat: np.ndarray | None  # (h, w), mean over heads, over the padded batch image; None for deformable attention
    points: np.ndarray | None  # (L, H x P, 3): x, y in pixels and the weight; deformable attention


@dataclass(frozen=True)
class QueryAnalysis:
    """Queries of one run: in one image, and their boxes in all images."""

    name: str  # of the image
    picture: np.ndarray
    size: tuple[int, int]  # height and width of the padded image in pixels
    looks: tuple[QueryLook, ...]
    boxes: np.ndarray  # (images, Q, 4) centre x, centre y, width, height in fractions of the image
    sizes: np.ndarray  # (images, 2) height and width in pixels

    def rows(self) -> list[dict[str, object]]:
        """Return a table: for each query the mean and the standard deviation of its boxes over the images."""
        names = ("x", "y", "width", "height")
        means, stds = self.boxes.mean(0), self.boxes.std(0)
        return [
            {
                "query": query,
                **{f"{name}_mean": float(value) for name, value in zip(names, means[query], strict=True)},
                **{f"{name}_std": float(value) for name, value in zip(names, stds[query], strict=True)},
            }
            for query in range(self.boxes.shape[1])
        ]


@torch.no_grad()
def look_of_queries(run: InspectedDetector, index: int, others: Sequence[int]) -> QueryAnalysis:
    """Return where the best queries of an image look, and the boxes of every query in other images (DETR, figure 7).

    Args:
        index: of the image.
        others: images whose boxes are collected.
    """
    batch = run.load([index])
    with _last_cross_attention(run.model) as found:
        outputs: Outputs = run.model(batch.inputs)
    looks = _looks(run, batch, outputs, found)
    boxes, sizes = [], []
    for other in progress_bar(list(others), desc=f"queries of {run.name}", unit="image", leave=False):
        loaded = run.load([other])
        boxes.append(run.model(loaded.inputs).boxes[-1, 0].cpu().numpy())
        sizes.append(loaded.images[0].picture.shape[:2])
    image = batch.images[0]
    return QueryAnalysis(image.name, image.picture, batch.size, tuple(looks), np.stack(boxes), np.array(sizes))


@dataclass
class _CrossAttention:
    """Attention of the last decoder layer to the memory."""

    records: list[AttentionRecord]
    reference: Tensor | None = None  # (R, Q, 2 or 4) in fractions of the image
    shapes: Sequence[tuple[int, int]] = ()


@contextmanager
def _last_cross_attention(model: Any) -> Iterator[_CrossAttention]:
    """Record the attention of the last decoder layer to the memory."""
    found = _CrossAttention([])
    with recorded_weights() as records:

        def enter(module: nn.Module, args: tuple[Tensor, Queries, TokenBatch]) -> None:
            records.clear()
            found.reference, found.shapes = args[1].reference, args[2].static["spatial_shapes"]

        def leave(module: nn.Module, args: Any, output: Tensor) -> None:
            found.records = list(records)

        attention = model.decoder.layers[-1].cross_attention
        with attention.register_forward_pre_hook(enter), attention.register_forward_hook(leave):
            yield found


def _looks(run: InspectedDetector, batch: ShownBatch, outputs: Outputs, found: _CrossAttention) -> list[QueryLook]:
    """Return the best queries of the first row, best first."""
    probabilities = build_classification(run.settings).scores(outputs.logits[-1, 0])
    scores, labels = probabilities.max(-1)
    height, width = batch.images[0].picture.shape[:2]
    looks = []
    for query in scores.argsort(descending=True).tolist()[:_QUERIES_SHOWN]:
        x, y, w, h = (outputs.boxes[-1, 0, query].cpu() * torch.tensor([width, height, width, height])).tolist()
        reference = None
        if found.reference is not None:
            point = found.reference[0, query, :2].cpu() * torch.tensor([width, height])
            reference = (float(point[0]), float(point[1]))
        heat, points = _attended(found, query, batch.size)
        box = (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
        name = run.data.class_map.names[int(labels[query])]
        looks.append(QueryLook(query, name, float(scores[query]), box, reference, heat, points))
    return looks


def _attended(found: _CrossAttention, query: int, size: tuple[int, int]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return heat (h, w) of the finest level, or points (L, H x P, 3) of deformable attention."""
    record = found.records[0]
    if record.points is not None:
        points = record.points[0, query].movedim(0, 1).flatten(1, 2).cpu()  # (L, H x P, 2)
        pixels = points * torch.tensor([size[1], size[0]])
        weights = record.weights[0, query].movedim(0, 1).flatten(1, 2).cpu()
        return None, torch.cat([pixels, weights[..., None]], dim=-1).numpy()
    first = level_list(found.shapes)[0]
    weights = record.weights[0, :, query, : first.height * first.width].mean(0)
    return weights.unflatten(0, (first.height, first.width)).cpu().numpy(), None


def draw_queries(runs: Mapping[str, QueryAnalysis]) -> Figure:
    """Draw for each run the attention of its best queries in one image, and below the boxes of its first queries.

    A box is a point at its centre: green if it is small, red if it is tall, blue if it is wide, grey if it is square.
    """
    columns = max(len(analysis.looks) for analysis in runs.values())
    lines = [math.ceil(min(_BOXES_SHOWN, analysis.boxes.shape[1]) / columns) for analysis in runs.values()]
    total = sum(1 + own for own in lines)
    heading = "Attention of the best queries in an image, and centres of the boxes of each query in all images"
    figure, grid = picture_grid(heading, total, columns, columns * 2.2, total * 2.1 + 0.6)
    top = 0
    for (name, analysis), own in zip(runs.items(), lines, strict=True):
        for column, look in enumerate(analysis.looks):
            _draw_look(grid[top, column], analysis, look, f"{name}, " if column == 0 else "")
        for query in range(min(_BOXES_SHOWN, analysis.boxes.shape[1])):
            _draw_boxes(grid[top + 1 + query // columns, query % columns], analysis, query)
        top += 1 + own
    return figure


def _draw_look(axes: Axes, analysis: QueryAnalysis, look: QueryLook, name: str) -> None:
    height, width = analysis.picture.shape[:2]
    axes.imshow(analysis.picture)
    if look.heat is not None:
        extent = (0, analysis.size[1], analysis.size[0], 0)
        axes.imshow(look.heat, extent=extent, cmap="inferno", alpha=0.6, interpolation="nearest")
    if look.points is not None:
        for level, points in enumerate(look.points):
            colour = COLOURS[level % len(COLOURS)]
            axes.scatter(points[:, 0], points[:, 1], s=2 + 25 * points[:, 2], c=colour, alpha=0.8, linewidths=0)
    x0, y0, x1, y1 = look.box
    for colour, line in (("white", 2.6), (VERMILION, 1.2)):
        axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor=colour, linewidth=line))
    if look.reference is not None:
        axes.plot(*look.reference, "+", color=VERMILION, markersize=9, markeredgewidth=1.6)
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    text = f"{plain(name, limit=_LETTERS)}query {look.query}\n{plain(look.label, limit=_LETTERS)} {look.score:.2f}"
    axes.set_title(text, fontsize=7, color=INK)


def _draw_boxes(axes: Axes, analysis: QueryAnalysis, query: int) -> None:
    boxes = analysis.boxes[:, query]
    pixels = boxes[:, 2:] * analysis.sizes[:, ::-1]
    ratio = pixels[:, 0] / np.maximum(pixels[:, 1], 1e-6)
    colours = np.where(ratio > _SQUARE, BLUE, np.where(ratio < 1 / _SQUARE, VERMILION, "#8a9099")).astype(object)
    colours[pixels.prod(1) < _SMALL] = GREEN
    axes.scatter(boxes[:, 0], boxes[:, 1], s=3, c=list(colours), linewidths=0)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(1.02, -0.02)
    axes.set_aspect("equal")
    axes.add_patch(Rectangle((0, 0), 1, 1, fill=False, edgecolor=INK, linewidth=0.5))
    axes.set_title(f"query {query}", fontsize=7, color=INK)


# Panoptic maps.


def panoptic_rows(
    runs: Sequence[InspectedDetector], indices: Sequence[int]
) -> list[tuple[Tensor, str, list[PanopticMap]]]:
    """Return image (3, H, W) uint8, name, and the maps of ground truth and of every run, for each index.

    Raises:
        InputError: a run has no mask head, or its validation data no panoptic maps.
    """
    first = runs[0]
    source = data_source(first.settings, "val")
    if source.panoptic is None:
        raise InputError(f"{first.name} has no panoptic validation maps: this needs data.val.panoptic=DIR")
    assert isinstance(source.annotations, Path), "panoptic data are files"
    truth = PanopticFile(source.annotations, source.panoptic, first.data.class_map, first.settings.data.max_pixels)
    maps = {run.name: build_panoptic_postprocess(run.settings, run.data.class_map) for run in runs}
    rows = []
    for index in progress_bar(list(indices), desc="panoptic maps", unit="image", leave=False):
        pixels, target = first.original(index)
        found = [truth[target.image_id]]
        for run in runs:
            if run.model.mask_head is None:
                raise InputError(f"{run.name} has no mask head: this needs runs with model.masks=true")
            inputs = run.load([index]).inputs
            with torch.no_grad():
                found += maps[run.name](run.model(inputs), inputs.targets)
        rows.append((pixels, target.file_name, found))
    return rows


# Mini-batch inference.


@dataclass(frozen=True)
class MiniBatchInference:
    """Metrics of one model without and with batch attention in evaluation, on the same batches."""

    images: int
    batch_size: int  # most images of a batch
    without: Mapping[str, float | None]  # by name; None without ground truth
    attended: Mapping[str, float | None]  # with batch attention

    def differences(self) -> dict[str, float | None]:
        """Return each metric with minus without mini-batch inference; None without ground truth."""
        pairs = ((name, value, self.attended[name]) for name, value in self.without.items())
        return {name: None if off is None or on is None else on - off for name, off, on in pairs}

    def rows(self) -> list[dict[str, object]]:
        """Return a table of the metrics."""
        return [
            {
                "images": self.images,
                "batch_size": self.batch_size,
                "metric": name,
                "without": self.without[name],
                "with": self.attended[name],
                "difference": difference,
            }
            for name, difference in self.differences().items()
        ]

    def __str__(self) -> str:
        lines = [
            f"{name:<12} {self.without[name]:7.4f} {self.attended[name]:7.4f}     {difference:+.4f}"
            for name, difference in self.differences().items()
            if difference is not None
        ]
        head = f"{self.images} images in batches of {self.batch_size}\n{'':<12} without    with  difference"
        return "\n".join([head, *lines])


class _BothInferences(nn.Module):
    """Outputs of a detector without and with batch attention in evaluation, whatever mode it was trained in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> list[Outputs]:
        former = attention_between_images(self.model)
        before = former.mode, former.group_size
        try:
            former.mode, former.group_size = "two_stream", None
            without = self.model(batch)
            former.mode = "mini_batch_inference"
            return [without, self.model(batch)]
        finally:
            former.mode, former.group_size = before


def compare_mini_batch_inference(
    run: InspectedDetector, *, batch_size: int | None = None, images: int | None = None, seed: int = 0
) -> MiniBatchInference:
    """Evaluate a detector without and with batch attention between the images of a batch (BatchFormerV2, table 12).

    Both see the same batches: images in random order, padded to one size. The sizes of the batches differ by one at
    most, so that no image is alone.

    Args:
        batch_size: most images of a batch; None: ``batch_former.group_size`` or else ``train.batch_size`` of the run.
        images: number of random validation images; None: all.
        seed: of the order.

    Raises:
        InputError: the model has no attention between images; there are fewer than two images; the batch size is 1.
    """
    config, former = run.settings, attention_between_images(run.model)
    if run.attends_to_references:
        raise InputError("with batch_former.references images attend to their references, not to each other")
    size = batch_size or former.group_size or config.train.batch_size
    order = torch.randperm(len(run.names), generator=torch.Generator().manual_seed(seed))[:images]
    if min(size, len(order)) < 2:
        raise InputError(
            f"mini-batch inference of {run.name} needs batches of 2 images or more, got {len(order)} images in batches "
            f"of {size}: give more with --batch-size and --images"
        )
    batches = [part.tolist() for part in order.tensor_split(math.ceil(len(order) / size))]
    loader, source = build_loader(config, run.device), data_source(config, "val")
    loop = EvaluationLoop(
        make_batches=lambda start: iter(loader(run.data, IndexBatches(batches, start))),
        num_batches=len(batches),
        device=run.device,
        precision=precision_of(config, run.device),
    )
    found = [
        CocoEvaluator(
            source.annotations,
            run.data.class_map,
            config.eval.engine,
            config.eval.max_detections,
            images=source.images,
            masks=config.model.masks,
            panoptic=source.panoptic,
            max_pixels=config.data.max_pixels,
        )
        for _ in range(2)
    ]
    postprocess = build_postprocess(config)
    for batch, outputs in loop(_BothInferences(run.model).eval(), lambda: False):
        for evaluator, own in zip(found, outputs, strict=True):
            evaluator.update(postprocess(own, batch.targets))
    without, attended = (
        Result(each.summarize(True), each.summarize_masks(True) if config.model.masks else None).metrics
        for each in found
    )
    return MiniBatchInference(len(order), max(map(len, batches)), without, attended)
