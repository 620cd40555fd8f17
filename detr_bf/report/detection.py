"""Parts of ``report.html`` for detectors, and sentences about plug-ins that classifiers share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from detr_bf.common.files import EVALUATION_FILE, PANOPTIC_SHEET_FILE, SHEET_FILE
from detr_bf.common.text import counted
from detr_bf.config import DetectionConfig, config_to_dict, flatten_settings
from detr_bf.config.common import ContextBroadcastingConfig, LocalizationConfig
from detr_bf.config.detection import DetectorPluginsConfig
from detr_bf.evaluation import CocoSummary, PanopticSummary, Result
from detr_bf.evaluation.results import SIZE_NAMES, OperatingPoint
from detr_bf.report.curves import DETECTION_CURVES
from detr_bf.report.page import headline, missing, percent, row, section, table, validation_sheet
from detr_bf.report.task_page import TaskPage

_SIDE_BY_SIDE = "Validation images with ground truth and predictions side by side"


def context_broadcasting(settings: ContextBroadcastingConfig) -> Iterator[str]:
    """Yield the name of Context Broadcasting with its blocks, if it is on."""
    if settings.enabled:
        position = "" if settings.position == "end" else f", position {settings.position}"
        yield f"Context Broadcasting in {blocks(settings.layers)}{position}{', scaled' if settings.scaled else ''}"


def relative_localization(settings: LocalizationConfig) -> Iterator[str]:
    """Yield the name of relative localization with its variant and weight, if it is on."""
    if settings.enabled:
        weight = "published weight" if settings.weight is None else f"weight {settings.weight:g}"
        yield f"relative localization ({settings.variant}, {weight})"


def blocks(layers: Any) -> str:
    """Return ``block 7``, ``blocks 0, 3`` or ``upper blocks`` from a plug-in's setting."""
    if isinstance(layers, str):
        return f"{layers} blocks"
    return f"block{'' if len(layers) == 1 else 's'} {', '.join(map(str, layers))}"


def _sentences(config: DetectionConfig) -> list[str]:
    backbone = config.model.backbone
    seen = {"none": "", "stack": " on the image and its reference", "difference": " on the image minus its reference"}
    body = f"{config.model.name.upper()} with {backbone.name}{seen[backbone.reference]}."
    return [body, batch_former_line(config), *encoder_plugins_line(config.plugins)]


def encoder_plugins_line(plugins: DetectorPluginsConfig) -> Iterator[str]:
    """Yield one sentence about the enabled plug-ins, if there are any."""
    local = relative_localization(plugins.relative_localization)
    if names := [*context_broadcasting(plugins.context_broadcasting), *local]:
        yield f"In the encoder: {'; '.join(names)}."


def batch_former_line(config: DetectionConfig) -> str:
    """Return one sentence with position, mode and settings of batch attention."""
    settings = config.batch_former
    if not settings.enabled or not settings.layers:
        return "BatchFormerV2 is off."
    layers = ", ".join(map(str, settings.layers))
    name, place = {
        "tokens": ("BatchFormerV2", "encoder layer"),
        "backbone": ("BatchFormerV2", "backbone block"),
        "queries": ("Batch attention of queries", "decoder layer"),
    }[settings.at]
    position = f"{settings.position} {place}{'' if len(settings.layers) == 1 else 's'} {layers}"
    ending = "" if settings.until_epoch is None else f", for the first {counted(settings.until_epoch, 'epoch')}"
    weights = " with shared weights" if settings.shared and len(settings.layers) > 1 else ""
    images = ", between each image and its reference" if settings.references else ""
    return (
        f"{name} {position}{weights}{images}, mode {settings.mode.replace('_', ' ')}, {settings.heads} heads, "
        f"dropout {settings.dropout:g}, batches of {config.train.batch_size}{ending}."
    )


def batch_former_source(config: DetectionConfig) -> str:
    """Return sentences that say if batch attention is on, what set it, and which settings have no effect without it."""
    on, source = config.batch_former.enabled, config.sources.get("batch_former.enabled")
    line = batch_former_line(config)
    if source is None and on:  # not read from files
        return line
    text = f"{line} batch_former.enabled={str(on).lower()} is {f'set by {source}' if source else 'the default'}."
    given, default = (flatten_settings(config_to_dict(each)) for each in (config, DetectionConfig()))
    unread = [key for key in config.sources if key.startswith("batch_former.") and given[key] != default[key]]
    if on or not unread:
        return text
    return f"{text} {', '.join(unread)} {'has' if len(unread) == 1 else 'have'} no effect without it."


def _results(result: Result | None) -> Iterator[str]:
    if result and result.panoptic:
        yield section("Panoptic segmentation", _panoptic_headline(result.panoptic))
    if result and result.masks:
        yield section("Masks", _headline(result.masks, "mask"))
    yield section(
        "Boxes" if result and result.masks else "Validation",
        _headline(result.boxes, "box", result.skipped_text if result.num_skipped else "")
        if result
        else missing(EVALUATION_FILE, "evaluation"),
    )


def _details(run_dir: Path, result: Result | None) -> Iterator[str]:
    panoptic = result and result.panoptic
    if panoptic:
        yield section("Panoptic maps", validation_sheet(run_dir / PANOPTIC_SHEET_FILE, _SIDE_BY_SIDE))
    yield section("Validation images", validation_sheet(run_dir / SHEET_FILE, _SIDE_BY_SIDE))
    if panoptic:
        yield section("Classes, panoptic", _panoptic_table(panoptic))
    yield section("Classes", _class_table(result.boxes) if result else missing(EVALUATION_FILE, "evaluation"))
    # both draw with matplotlib, which the first lines of a run do not need
    from detr_bf.report.data import data_section
    from detr_bf.report.error_sections import error_sections

    yield from data_section(run_dir)
    yield from error_sections(run_dir)


def _costs(runs: Mapping[str, Path]) -> str:
    from detr_bf.report.error_sections import costs_of_runs  # not needed for the first lines of a run

    return costs_of_runs(runs)


def _headline(summary: CocoSummary, kind: str, skipped: str = "") -> str:
    sizes = zip(SIZE_NAMES, (summary.APs, summary.APm, summary.APl), strict=True)
    small = [(f"AP {name}", percent(ap), counted(summary.num_objects_by_size[name], "object")) for name, ap in sizes]
    small.append((f"AR, {summary.max_detections} detections", percent(summary.AR), "recall"))
    if summary.best is not None:
        small.append(("F1", percent(summary.best.f1), f"threshold {summary.best.threshold:.2f}"))
    large = [
        ("AP", percent(summary.AP), "IoU 0.50 to 0.95"),
        ("AP50", percent(summary.AP50), "IoU 0.50"),
        ("AP75", percent(summary.AP75), "IoU 0.75"),
    ]
    note = (
        f"COCO {kind} metrics in percent on {counted(summary.num_images, 'image')}, "
        f"{counted(summary.num_detections, 'detection')}, computed with {summary.engine}."
        f"{f' Left out of the data: {skipped}.' if skipped else ''}"
    )
    return headline(large, small, note)


def _panoptic_headline(summary: PanopticSummary) -> str:
    large = [
        ("PQ", percent(summary.PQ), "panoptic quality"),
        ("SQ", percent(summary.SQ), "mean IoU of matches"),
        ("RQ", percent(summary.RQ), "F1 of matches"),
    ]
    small = [
        (f"{name} {group}", percent(summary.metrics[f"{name}_{suffix}"]), "")
        for group, suffix in (("things", "th"), ("stuff", "st"))
        for name in ("PQ", "SQ", "RQ")
    ]
    small.append(("mIoU", percent(summary.mIoU), "maps merged to classes"))
    return headline(large, small, f"Panoptic quality in percent on {counted(summary.num_images, 'image')}.")


def _panoptic_table(summary: PanopticSummary) -> str:
    ordered = sorted(summary.per_class.items(), key=lambda item: -1.0 if item[1].PQ is None else item[1].PQ)
    rows = []
    for name, result in reversed(ordered):
        values = [percent(value) for value in (result.PQ, result.SQ, result.RQ)]
        counts = [f"{number:,}" for number in (result.tp, result.fp, result.fn)]
        rows.append(row(name, result.PQ, values + counts, "" if result.is_thing else "stuff"))
    return table(("Class", "PQ", "SQ", "RQ", "Found", "Wrong", "Missed"), rows)


def _class_table(summary: CocoSummary) -> str:
    """Return the classes from the highest AP to the lowest, in two tables that fit a telephone."""
    ordered = sorted(summary.per_class.items(), key=lambda item: 1.0 if item[1].AP is None else -item[1].AP)
    results = [
        row(name, result.AP, (percent(result.AP), percent(result.AP50), f"{result.num_objects:,}"))
        for name, result in ordered
    ]
    points = [_class_point(name, result.best) for name, result in ordered]
    note = (
        "The best threshold is the score with the highest F1 at IoU 0.5; precision, recall and F1 are those of the "
        "detections from it on."
    )
    return (
        table(("Class", "AP", "AP50", "Objects"), results)
        + table(("Class", "Best threshold", "Precision", "Recall", "F1"), points)
        + f'<p class="faint">{note}</p>'
    )


def _class_point(name: str, best: OperatingPoint | None) -> str:
    if best is None:
        return row(name, None, [percent(None)] * 4)
    values = (f"{best.threshold:.2f}", percent(best.precision), percent(best.recall), percent(best.f1))
    return row(name, best.f1, values)


DETECTION_PAGE = TaskPage(
    task="detection",
    curves=DETECTION_CURVES,
    read_result=Result.from_dict,
    sentences=_sentences,
    results=_results,
    details=_details,
    costs=_costs,
    classes=lambda result: {name: own.AP for name, own in result.boxes.per_class.items()},
)
