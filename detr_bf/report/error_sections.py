"""Pictures and sections of ``report.html`` about the errors of a detector, from ``errors.json``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from detr_bf.common.files import ERRORS_FILE, SUSPECTS_FILE, WORST_FILE, WORST_MAPS_FILE, read_json
from detr_bf.common.structures import PanopticMap
from detr_bf.common.text import counted
from detr_bf.evaluation.error_types import LabelSuspect
from detr_bf.evaluation.matching import HIT, IGNORED, ImageErrors
from detr_bf.evaluation.panoptic_errors import MATCHES, PANOPTIC_CAUSES, SegmentError, SegmentMatches
from detr_bf.report.charts import CHART_COLOURS, Chart, Line, chart_group
from detr_bf.report.drawing import Colour, Mark, Rectangle, make_marks, paint_marks
from detr_bf.report.figures import draw_confusion, save_figure
from detr_bf.report.fonts import legible
from detr_bf.report.page import (
    missing,
    number,
    percent,
    picture,
    reading,
    row,
    section,
    table,
    value_table,
)
from detr_bf.report.panoptic import check_map_size, paint_segments
from detr_bf.report.sheet import GROUND_TRUTH, LABEL_SIZE, Strip, fit, lay_out

_CONFUSION_FILE = "pictures/confusion.png"
_SEGMENTS_FILE = "pictures/confusion_panoptic.png"
_CELL = 260  # pixels, side of a cut-out
_RIGHT: Colour = (0, 158, 115)
_WRONG: Colour = (213, 94, 0)
_MISSED: Colour = (240, 228, 66)
_IGNORED: Colour = (150, 150, 150)
_MEANINGS = {
    "class": "right place, wrong class",
    "localisation": "right class, IoU with the object from 0.1 to 0.5",
    "both": "wrong class and IoU from 0.1 to 0.5",
    "duplicate": "another detection has found the object already",
    "background": "no object there: IoU below 0.1 with all",
    "missed": "no match, and no class or localisation error is about the object",
    "false positives": "all wrong detections together",
    "false negatives": "all objects without a right detection",
}
_CAUSES = {
    MATCHES: "right segments, whose IoU is below 1",
    "class": "IoU above 0.5 with a segment of another class",
    "thing or stuff": "the same, where one is a thing and the other is stuff",
    "merged": "one predicted segment covers several of its class",
    "split": "several predicted segments lie on one of their class",
    "outline": "right class, IoU from 0.1 to 0.5",
    "both": "IoU of 0.1 or more with a segment of another class alone",
    "background": "nothing is annotated there, or nothing is found there",
}


class ErrorSheetRow(NamedTuple):
    """One image with its ground truth and its errors."""

    image: Tensor  # (3, H, W) uint8
    errors: ImageErrors  # of the detections to draw
    caption: str


class SuspectCell(NamedTuple):
    """One image with a place where its annotation may be wrong."""

    image: Tensor  # (3, H, W) uint8
    suspect: LabelSuspect
    caption: str


def error_sheet(rows: Iterable[ErrorSheetRow], class_names: Sequence[str], threshold: float) -> Image.Image:
    """Draw ground truth on the left; on the right hits in green, errors in red, missed objects in yellow.

    Raises:
        InputError: ``rows`` is empty.
    """
    strips = []
    for image, errors, caption in rows:
        truth, scale = fit(image)
        found = truth.copy()
        boxes, labels = torch.from_numpy(errors.object_boxes * scale), torch.from_numpy(errors.object_labels)
        paint_marks(truth, make_marks(boxes, labels, class_names), LABEL_SIZE)
        marks = list(_error_marks(errors, class_names, scale))
        paint_marks(found, marks, LABEL_SIZE)
        wrong = sum(kind not in (HIT, IGNORED) for kind in errors.types)
        strips.append(Strip((truth, found), (caption, f"{counted(wrong, 'error')}, {int(errors.missed.sum())} missed")))
    return lay_out(strips, (GROUND_TRUTH, f"Errors, score ≥ {threshold:.3g}"))


def _error_marks(errors: ImageErrors, class_names: Sequence[str], scale: float) -> Iterator[Mark]:
    """Yield errors, then missed objects, then hits, with boxes in pixels of the picture."""
    hits = []
    for box, label, kind in zip(errors.boxes, errors.labels, errors.types, strict=True):
        place = _place(box, scale)
        if kind == HIT:
            hits.append(Mark(place, "", _RIGHT))
        elif kind != IGNORED:
            yield Mark(place, f"{legible(class_names[label])}: {kind}", _WRONG)
    for box, label in zip(errors.object_boxes[errors.missed], errors.object_labels[errors.missed], strict=True):
        yield Mark(_place(box, scale), f"missed: {legible(class_names[label])}", _MISSED)
    yield from hits


def _place(box: Sequence[float], scale: float, left: int = 0, top: int = 0) -> Rectangle:
    """Return a box in pixels of a picture that begins at ``left`` and ``top`` of the image, with ordered corners."""
    x0, y0, x1, y1 = (scale * (float(value) - start) for value, start in zip(box, (left, top) * 2, strict=True))
    return Rectangle(min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1))


def suspect_sheet(cells: Iterable[SuspectCell], class_names: Sequence[str]) -> Image.Image:
    """Draw the surroundings of each place where the annotation may be wrong.

    Raises:
        InputError: ``cells`` is empty.
    """
    strips = []
    for image, suspect, caption in cells:
        x0, y0, x1, y1 = suspect.box
        side = 3 * max(x1 - x0, y1 - y0, 16.0)
        left, top = (max(0, round(low + high - side) // 2) for low, high in ((x0, x1), (y0, y1)))
        cut = image[:, top : top + round(side), left : left + round(side)]
        if not cut.numel():  # the box lies outside the image
            left, top, cut = 0, 0, image
        shown, scale = fit(cut, _CELL)
        place = _place(suspect.box, scale, left, top)
        detected, annotated = (
            None if label is None else legible(class_names[label]) for label in (suspect.label, suspect.annotated)
        )
        text = f"{annotated}: not found" if detected is None else f"{detected} {suspect.score:.2f}"
        if detected is not None and annotated is not None:
            text += f", not {annotated}"
        paint_marks(shown, [Mark(place, text, _MISSED if detected is None else _WRONG)], LABEL_SIZE)
        strips.append(Strip((shown,), (caption,)))
    return lay_out(strips, ("",), 4, _CELL)


class PanopticErrorRow(NamedTuple):
    """One image with its true and its predicted panoptic map and their errors."""

    image: Tensor  # (3, H, W) uint8
    truth: PanopticMap
    found: PanopticMap
    errors: SegmentMatches
    caption: str


def panoptic_error_sheet(rows: Iterable[PanopticErrorRow], class_names: Sequence[str]) -> Image.Image:
    """Draw true maps with missed segments in yellow on the left, predicted maps with wrong ones in red on the right.

    The others are green, and those that count nowhere are grey.

    Raises:
        InputError: ``rows`` is empty, or an image and its maps have different sizes.
    """
    strips = []
    for image, truth, found, errors, caption in rows:
        picture, _ = fit(image)
        crowds = [segment.id for segment in truth.segments if segment.is_crowd]
        pictures = []
        for panoptic, wrong, colour, ignored in (
            (truth, errors.missed, _MISSED, crowds),
            (found, errors.wrong, _WRONG, errors.ignored),
        ):
            check_map_size(image, panoptic)
            texts = {error.segment: _cause_text(error, class_names, colour) for error in wrong}
            colours = {each.id: _IGNORED if each.id in ignored else _RIGHT for each in panoptic.segments}
            colours |= dict.fromkeys(texts, colour)
            names = [texts.get(segment.id, "") for segment in panoptic.segments]
            pictures.append(paint_segments(picture, panoptic, names, list(colours.values()), LABEL_SIZE))
        counts = f"{counted(len(errors.wrong), 'wrong segment')}, {len(errors.missed)} missed"
        strips.append(Strip(tuple(pictures), (caption, counts)))
    return lay_out(strips, (GROUND_TRUTH, "Predictions"))


def _cause_text(error: SegmentError, class_names: Sequence[str], colour: Colour) -> str:
    name = legible(class_names[error.label])
    if error.other is not None:
        return f"{name} {'taken for' if colour == _MISSED else 'instead of'} {legible(class_names[error.other])}"
    return f"{name}: {'not found' if (error.cause, colour) == ('background', _MISSED) else error.cause}"


def error_sections(
    run_dir: Path, sections: Callable[[Path, Mapping[str, Any]], Iterator[str]] | None = None
) -> Iterator[str]:
    """Yield the sections about errors; one sentence if the run has no ``errors.json``.

    Args:
        run_dir: of the run.
        sections: makes them from the folder and the content of the file; those of a detector if not given.

    Raises:
        InputError: the file is damaged.
    """
    path = run_dir / ERRORS_FILE
    if not path.is_file():
        yield section("Errors", missing(ERRORS_FILE, "analysis of errors"))
        return
    with reading(path):
        yield from (sections or _sections)(run_dir, read_json(path))


def _sections(run_dir: Path, content: Mapping[str, Any]) -> Iterator[str]:
    if content["panoptic"] is not None:
        yield from _panoptic_sections(run_dir, content["panoptic"])
    yield section("Errors", _types_table(content))
    yield section(
        "Precision, recall and scores",
        chart_group(_charts(content)) + f'<p class="faint">{_calibration_note(content)}</p>',
    )
    if content["confusion"] is not None:
        yield section(
            "Confused classes",
            picture(
                run_dir / _CONFUSION_FILE,
                "Confusion matrix with background",
                lambda file: _save_confusion(file, content, "objects"),
            )
            + f'<p class="faint">Detections with a score of at least {content["threshold"]:.3g}, matched with objects '
            "of any class at IoU 0.5. Background as true class: nothing is annotated there, in percent of all "
            "detections. Background as predicted class: the object was not found.</p>",
        )
    yield section("Objects by size, shape and position", _group_table(content))
    sheets = (
        (
            "Images with the most errors",
            WORST_FILE,
            "Green: right detections. Red: errors with their type. Yellow: missed objects, which no error is about.",
        ),
        (
            "Annotations to check",
            SUSPECTS_FILE,
            "Red: the most confident detections where no object is annotated, then those where another class is. "
            "Yellow: the largest objects that no detection of any class and score has overlapped with an IoU of 0.5.",
        ),
    )
    for heading, name, note in sheets:
        if (run_dir / name).is_file():
            yield section(heading, picture(run_dir / name, heading) + f'<p class="faint">{note}</p>')


def costs_of_runs(runs: Mapping[str, Path]) -> str:
    """Return a table of the AP50 that each type of error costs each run; empty if no run has ``errors.json``.

    Raises:
        InputError: a file is damaged.
    """
    costs: dict[str, Mapping[str, Any]] = {}
    for name, folder in runs.items():
        if (path := folder / ERRORS_FILE).is_file():
            with reading(path):
                costs[name] = {kind: cost["cost"] for kind, cost in read_json(path)["costs"].items()}
    kinds = dict.fromkeys(kind for found in costs.values() for kind in found)
    return value_table(
        "Error, cost in AP50", runs, {kind: [percent(costs.get(run, {}).get(kind)) for run in runs] for kind in kinds}
    )


def _panoptic_sections(run_dir: Path, content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sections about panoptic maps."""
    yield section("Lost panoptic quality", _causes_table(content))
    yield section("Lost panoptic quality by class", _class_causes_table(content))
    if content["confusion"] is not None:
        yield section(
            "Confused segments",
            picture(
                run_dir / _SEGMENTS_FILE,
                "Confusion matrix of segments with background",
                lambda file: _save_confusion(file, content, "segments"),
            )
            + '<p class="faint">Segments of any class with an IoU above 0.5. Background as true class: a wrong segment '
            "without such a partner, in percent of all predicted segments. Background as predicted class: a missed "
            "segment without one.</p>",
        )
    if (run_dir / WORST_MAPS_FILE).is_file():
        note = (
            "Left, yellow: missed segments. Right, red: wrong segments. Both with their cause. Green: matched "
            "segments. Grey: crowds, and segments on void or crowds, which count nowhere."
        )
        heading = "Panoptic maps with the largest errors"
        yield section(heading, picture(run_dir / WORST_MAPS_FILE, heading) + f'<p class="faint">{note}</p>')


def _causes_table(content: Mapping[str, Any]) -> str:
    causes = content["causes"]
    top = max(0.01, *(causes[cause]["lost"] for cause in _CAUSES))
    rows = (
        row(
            cause,
            causes[cause]["lost"] / top,
            (
                *(("", "") if cause == MATCHES else (f"{causes[cause][kind]:,}" for kind in ("wrong", "missed"))),
                percent(causes[cause]["lost"]),
            ),
            meaning,
        )
        for cause, meaning in _CAUSES.items()
    )
    note = (
        f"PQ is {percent(content['pq'])}; with the losses it adds up to 100, in every class and on average. A match "
        "loses 1 - IoU, a wrong and a missed segment 0.5 each. Each has the first cause that fits."
    )
    return table(("Cause", "Wrong", "Missed", "PQ lost"), rows) + f'<p class="faint">{note}</p>'


def _class_causes_table(content: Mapping[str, Any]) -> str:
    """Return a table of classes, the worst first, with the quality that each cause has lost."""
    found = [(name, entry) for name, entry in content["per_class"].items() if entry["pq"] is not None]
    rows = (
        row(
            name,
            entry["pq"],
            (percent(entry["pq"]), *(percent(entry["causes"][cause]["lost"]) for cause in (MATCHES, *PANOPTIC_CAUSES))),
            "" if entry["is_thing"] else "stuff",
        )
        for name, entry in sorted(found, key=lambda each: each[1]["pq"])
    )
    return table(("Class", "PQ", *(cause.capitalize() for cause in _CAUSES)), rows)


def _types_table(content: Mapping[str, Any]) -> str:
    costs, masks = content["costs"], content["masks"]
    if not costs:
        return '<p class="faint">The validation split has no objects.</p>'
    parts = [costs, *([masks["costs"]] if masks and masks["costs"] else [])]
    top = max(0.01, *(cost["cost"] for part in parts for cost in part.values()))
    rows = (
        row(
            kind,
            max(0.0, costs[kind]["cost"]) / top,
            [value for part in parts for value in (f"{part[kind]['number']:,}", percent(part[kind]["cost"]))],
            _MEANINGS[kind],
        )
        for kind in costs
    )
    note = (
        f"AP50 is {percent(content['ap50'])}. The cost is how much higher it would be without the errors of one type "
        "alone (TIDE, 2020); costs do not add up. Numbers are those of all detections, whatever their score."
    )
    titles = ["Error", "Number", "Cost in AP50"]
    if len(parts) > 1:
        titles += ["Number, masks", "Cost in mask AP50"]
        note += f" Masks: the same with the IoU of masks, things only; their AP50 is {percent(masks['ap50'])}."
        if best := masks["best"]:
            note += f" Their F1 is highest, {percent(best['f1'])}, from the score {best['threshold']:.2f} on."
    return table(titles, rows) + f'<p class="faint">{note}</p>'


def _group_table(content: Mapping[str, Any]) -> str:
    rows = [
        row(
            group["name"],
            group["ap50"],
            (percent(group["ap50"]), percent(group["found"]), f"{group['objects']:,}"),
            name,
        )
        for name, groups in content["groups"].items()
        for group in groups
    ]
    note = f"Found: share of the objects that are found with a score of at least {content['threshold']:.3g}."
    return table(("Objects", "AP50", "Found", "Number"), rows) + f'<p class="faint">{note}</p>'


def _calibration_note(content: Mapping[str, Any]) -> str:
    masks = content["masks"]
    of_masks = f", masks {number(masks['calibration']['error'])}" if masks else ""
    return (
        "A detection is right if it is matched with an object of its class at IoU 0.5. Scores of well calibrated "
        "detections equal the share that is right. Mean distance of both over all detections (D-ECE): "
        f"{number(content['calibration']['error'])}{of_masks}."
    )


def _charts(content: Mapping[str, Any]) -> list[Chart]:
    """Return precision against recall by IoU and by class, F1 against the threshold, and a reliability diagram."""
    ious = {
        f"IoU {iou}": values
        for iou, values in content["precision_by_iou"].items()
        if iou in ("0.50", "0.60", "0.70", "0.75", "0.80", "0.90")
    }
    points = content["thresholds"]
    scores = [point["threshold"] for point in points]
    threshold = content["threshold"]
    by_score = [
        Line(label, scores, [point[name] for point in points], colour)
        for name, colour, label in (
            ("precision", "blue", "precision"),
            ("recall", "orange", "recall"),
            ("f1", "black", "F1"),
        )
    ]
    if content["masks"]:
        values = [point["f1"] for point in content["masks"]["thresholds"]]
        by_score.append(Line("F1 of masks", scores, values, "green", dashed=True))
    settings: dict[str, Any] = {"x_range": (0.0, 1.0), "high": 1.0, "show_last": False}
    charts = [
        _precision_chart("Precision, mean over classes", ious),
        _precision_chart("Precision, IoU 0.50", _shown_classes(content["precision_by_class"])),
        Chart("All classes, IoU 0.50", by_score, "least score", mark=(threshold, f"{threshold:.2f}"), **settings),
        reliability_chart("Right detections by score, with their number", content["calibration"]),
    ]
    return [chart for chart in charts if any(len(line.x) for line in chart.lines)]


def _shown_classes(curves: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Return the curves of all classes, or of the three best and the four worst."""
    ranked = sorted(curves, key=lambda name: -float(np.mean(curves[name])))
    chosen = ranked if len(ranked) <= len(CHART_COLOURS) else [*ranked[:3], *ranked[3 - len(CHART_COLOURS) :]]
    return {name: curves[name] for name in chosen}


def _precision_chart(heading: str, curves: Mapping[str, Sequence[float]]) -> Chart:
    lines = [
        Line(name, np.linspace(0, 1, len(values)).tolist(), values, colour)
        for (name, values), colour in zip(curves.items(), CHART_COLOURS, strict=False)
    ]
    return Chart(heading, lines, "recall", "precision", x_range=(0.0, 1.0), high=1.0, show_last=False)


def reliability_chart(heading: str, found: Mapping[str, Any], score: str = "score") -> Chart:
    """Return a chart of the share that is right against the score, with the number in each bin.

    Args:
        heading: its title.
        found: of :meth:`detr_bf.evaluation.error_types.Calibration.to_dict`.
        score: name of the horizontal axis.
    """
    counts, width = found["counts"], 1 / len(found["counts"])
    used = [at for at, value in enumerate(counts) if value]
    right = [found["precision"][at] for at in used]
    return Chart(
        heading,
        [
            Line("share that is right", [found["scores"][at] for at in used], right, "green"),
            Line("well calibrated", (0.0, 1.0), (0.0, 1.0), "black", dashed=True),
        ],
        x_label=score,
        x_range=(0.0, 1.0),
        high=1.0,
        bars=[
            ((at + 0.5) * width, found["precision"][at] or 0.0, f"{value:,}" * bool(value))
            for at, value in enumerate(counts)
        ],
        show_last=False,
    )


def _save_confusion(path: Path, content: Mapping[str, Any], things: str) -> None:
    counts = np.array(content["confusion"], dtype=np.float64)
    totals = counts.sum(1)
    totals[-1] = counts[:, :-1].sum()  # detections; of the classes it is objects
    shares = counts / np.maximum(totals, 1)[:, None]
    names = [*content["classes"], "background"]
    save_figure(path, draw_confusion(shares, names, f"Confusion (% of the {things} of a class)"))
