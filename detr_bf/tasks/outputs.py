"""Pictures and ``errors.json`` of the last evaluation of a detector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torchvision.ops import box_convert

from detr_bf.assembly.data import build_val_data, data_source
from detr_bf.common.files import SUSPECTS_FILE, WORST_FILE, WORST_MAPS_FILE, write_json
from detr_bf.common.structures import ClassMap, Target
from detr_bf.config import DetectionConfig
from detr_bf.data.batches import SampleKey
from detr_bf.data.images import displayed
from detr_bf.engine import DetectionEvaluator, RunFolder
from detr_bf.evaluation import DEFAULT_THRESHOLD, PanopticFile
from detr_bf.report import (
    PanopticSheetRow,
    SheetRow,
    class_labels,
    comparison_sheet,
    panoptic_sheet,
    save_picture,
    tolerating,
)
from detr_bf.tasks.task import MOST_ERROR_PICTURES


def write_errors_and_pictures(folder: RunFolder, config: DetectionConfig, evaluation: DetectionEvaluator) -> None:
    """Write ``errors.json``, and the pictures if ``eval.pictures`` is not 0.

    A file that cannot be made is a warning; that of an earlier evaluation is removed first.
    """
    best = evaluation.result and evaluation.result.thresholds
    best_threshold = best.overall if best else DEFAULT_THRESHOLD
    _write_errors(folder, config, best_threshold, evaluation)
    if not config.eval.pictures:
        return
    names = class_labels(evaluation.class_map)
    with tolerating(str(folder.sheet)):
        folder.sheet.unlink(missing_ok=True)
        rows = list(_sheet_rows(config, evaluation))
        chosen = config.eval.picture_threshold
        save_picture(folder.sheet, comparison_sheet(rows, names, best_threshold if chosen is None else chosen))
    if evaluation.panoptic:
        with tolerating(str(folder.panoptic_sheet)):
            folder.panoptic_sheet.unlink(missing_ok=True)
            panoptic_rows = list(_panoptic_rows(folder, config, evaluation))
            save_picture(folder.panoptic_sheet, panoptic_sheet(panoptic_rows, names))


def _write_errors(folder: RunFolder, config: DetectionConfig, threshold: float, evaluation: DetectionEvaluator) -> None:
    """Write ``errors.json`` and the pictures of the worst images and of annotations to check."""
    from detr_bf.evaluation.error_types import error_document, label_suspects, worst_images
    from detr_bf.evaluation.panoptic_errors import panoptic_document, worst_maps
    from detr_bf.report import error_sections as pictures

    files = [folder.path / name for name in (WORST_FILE, SUSPECTS_FILE, WORST_MAPS_FILE)]
    for path in (folder.errors, *files):
        path.unlink(missing_ok=True)
    boxes, classes, names = evaluation.boxes, evaluation.class_map, class_labels(evaluation.class_map)
    result, quality = evaluation.result, evaluation.quality
    assert boxes.precision is not None, "the boxes are summarized"
    assert result is not None, "and everything else"
    images, missing = boxes.errors, evaluation.missing
    data = build_val_data(config, classes, transform=lambda sample: sample, references=False)
    index = {image_id: number for number, image_id in enumerate(data.image_ids)}
    most = min(config.eval.pictures, MOST_ERROR_PICTURES)
    with tolerating(str(folder.errors)):
        sizes = dict(zip(data.image_ids, data.sizes, strict=True))
        masks = boxes.mask_errors if result.masks else None
        maps = panoptic_document(quality.counts, result.panoptic, most) if quality and result.panoptic else None
        parts = images, sizes, boxes.precision, classes.distinct_names, threshold, most, missing
        document = error_document(*parts, masks=masks, panoptic=maps)
        for entry in (*document["worst"], *document["suspects"], *(maps["worst"] if maps else ())):
            entry["file"] = data.file_names[index[entry["image_id"]]]
        write_json(folder.errors, document)

    def read(image_id: int) -> tuple[Tensor, str]:
        image, target, *_ = data[SampleKey(0, index[image_id])]
        return displayed(image), target.file_name

    if worst := worst_images(images, threshold, most):
        with tolerating(str(files[0])):
            rows = ((each, *read(each.image_id)) for each in worst)  # one image in memory at a time
            shown = (pictures.ErrorSheetRow(image, each, name) for each, image, name in rows)
            save_picture(files[0], pictures.error_sheet(shown, names, threshold))
    if suspects := label_suspects(images, most, missing):
        with tolerating(str(files[1])):
            places = ((each, *read(each.image_id)) for each in suspects)
            cells = (pictures.SuspectCell(image, each, name) for each, image, name in places)
            save_picture(files[1], pictures.suspect_sheet(cells, names))
    if quality and (worst_ids := worst_maps(quality.counts, most)):
        with tolerating(str(files[2])):
            truth, found = _panoptic_files(folder, config, classes)
            pairs = ((image_id, *read(image_id)) for image_id in worst_ids)
            maps_shown = (
                pictures.PanopticErrorRow(image, truth[image_id], found[image_id], quality.counts[image_id], name)
                for image_id, image, name in pairs
            )
            save_picture(files[2], pictures.panoptic_error_sheet(maps_shown, names))


def _sheet_rows(config: DetectionConfig, evaluation: DetectionEvaluator) -> Iterator[SheetRow]:
    """Yield images spread evenly over the validation split, with ground truth and detections."""
    found = {detections.image_id: detections for detections in evaluation.detections}
    for image, target in _shown_images(config, evaluation.class_map):
        height, width = target.size
        boxes = box_convert(target.boxes, "cxcywh", "xyxy") * torch.tensor([width, height, width, height])
        yield SheetRow(image, boxes, target.labels, found[target.image_id], target.file_name)


def _panoptic_files(
    folder: RunFolder, config: DetectionConfig, class_map: ClassMap
) -> tuple[PanopticFile, PanopticFile]:
    """Return the true and the predicted panoptic maps."""
    val = data_source(config, "val")
    assert isinstance(val.annotations, Path), "panoptic data are files"
    assert val.panoptic is not None, "there are maps to compare with"
    truth = PanopticFile(val.annotations, val.panoptic, class_map, config.data.max_pixels)
    return truth, PanopticFile(folder.panoptic_results, folder.panoptic, class_map, config.data.max_pixels)


def _panoptic_rows(
    folder: RunFolder, config: DetectionConfig, evaluation: DetectionEvaluator
) -> Iterator[PanopticSheetRow]:
    """Yield the same images with both panoptic maps."""
    truth, found = _panoptic_files(folder, config, evaluation.class_map)
    for image, target in _shown_images(config, evaluation.class_map):
        yield PanopticSheetRow(image, truth[target.image_id], found[target.image_id], target.file_name)


def _shown_images(config: DetectionConfig, class_map: ClassMap) -> Iterator[tuple[Tensor, Target]]:
    """Yield images spread evenly over the validation split, not resized."""
    data = build_val_data(config, class_map, transform=lambda sample: sample, references=False)
    for index in torch.linspace(0, len(data) - 1, min(config.eval.pictures, len(data))).tolist():
        image, target, *_ = data[SampleKey(0, round(index))]
        yield displayed(image), target
