"""Parts of ``report.html`` for semantic segmentation, and maps as pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from detr_bf.common.files import EVALUATION_FILE, SHEET_FILE
from detr_bf.common.structures import PanopticMap, Segment
from detr_bf.common.text import counted
from detr_bf.evaluation.semantic import SemanticResult
from detr_bf.report.curves import CurvePlan
from detr_bf.report.detection import context_broadcasting
from detr_bf.report.page import headline, missing, percent, row, section, table, validation_sheet
from detr_bf.report.task_page import TaskPage
from detr_bf.segmentation.batch import IGNORE
from detr_bf.segmentation.config import SegmentationConfig


def as_segments(labels: Tensor, image_id: int) -> PanopticMap:
    """Return a map of classes (H, W) uint8 as a panoptic map with one segment for each class, to be drawn."""
    values, counts = labels.unique(return_counts=True)
    segments = (
        Segment(value + 1, value, pixels)
        for value, pixels in zip(values.tolist(), counts.tolist(), strict=True)
        if value != IGNORE
    )
    ids = labels.to(torch.int32).add_(1).masked_fill_(labels == IGNORE, 0)
    return PanopticMap(image_id, ids, tuple(segments))


def _sentences(config: SegmentationConfig) -> list[str]:
    context = list(context_broadcasting(config.plugins.context_broadcasting))
    added = f"with {context[0]}" if context else "without plug-ins"
    return [
        f"UPerNet's head of {config.model.channels} channels on {config.model.backbone.name}, {added}.",
        f"Crops of {config.data.transforms.crop} x {config.data.transforms.crop} pixels.",
    ]


def _results(result: SemanticResult | None) -> Iterator[str]:
    content = missing(EVALUATION_FILE, "evaluation")
    if result is not None:
        large = [
            ("mIoU", percent(result.mIoU), "mean over classes"),
            ("Mean accuracy", percent(result.mean_accuracy), "mean over classes"),
            ("Pixel accuracy", percent(result.pixel_accuracy), "of all pixels"),
        ]
        note = f"In percent, on {counted(result.num_images, 'image')} at the size of their maps."
        content = headline(large, [], note)
    yield section("Validation", content)


def _details(run_dir: Path, result: SemanticResult | None) -> Iterator[str]:
    description = "Validation images with the true and the predicted classes side by side"
    yield section("Validation images", validation_sheet(run_dir / SHEET_FILE, description))
    yield section("Classes", _class_table(result) if result else missing(EVALUATION_FILE, "evaluation"))


def _class_table(result: SemanticResult) -> str:
    """Return the table of classes, best first; classes without a value last."""
    ordered = sorted(result.per_class.items(), key=lambda item: -1.0 if item[1].iou is None else item[1].iou)
    rows = (
        row(name, own.iou, (percent(own.iou), percent(own.accuracy), f"{own.pixels:,}"))
        for name, own in reversed(ordered)
    )
    return table(("Class", "IoU", "Accuracy", "Pixels"), rows)


SEGMENTATION_PAGE = TaskPage(
    task="segmentation",
    curves=CurvePlan(
        scores=(
            ("mIoU", "mIoU", "black"),
            ("mean_accuracy", "mean accuracy", "sky"),
            ("pixel_accuracy", "pixel accuracy", "blue"),
        ),
    ),
    read_result=SemanticResult.from_dict,
    sentences=_sentences,
    results=_results,
    details=_details,
    costs=lambda runs: "",
    classes=lambda result: {name: own.iou for name, own in result.per_class.items()},
)
