"""Pictures and sections of ``report.html`` about the errors of a detector, from ``errors.json``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from detr_bf.errors import InputError
from detr_bf.evaluation.errors import HIT, IGNORED, ImageErrors, LabelSuspect
from detr_bf.files import ERRORS_FILE, SUSPECTS_FILE, WORST_FILE, read_json
from detr_bf.report.charts import CHART_COLOURS, Chart, Line, chart_group
from detr_bf.report.drawing import Colour, Mark, Rectangle, make_marks, paint_marks
from detr_bf.report.figures import draw_confusion, save_figure
from detr_bf.report.fonts import legible
from detr_bf.report.page import count, missing, number, percent, picture, row, section, table, value_table
from detr_bf.report.sheet import GROUND_TRUTH, LABEL_SIZE, Strip, fit, lay_out
from detr_bf.text import printable

_CONFUSION_FILE = "pictures/confusion.png"
_CELL = 260  # pixels, side of a cut-out
_RIGHT: Colour = (0, 158, 115)
_WRONG: Colour = (213, 94, 0)
_MISSED: Colour = (240, 228, 66)
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
        strips.append(Strip((truth, found), (caption, f"{count(wrong, 'error')}, {int(errors.missed.sum())} missed")))
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


def error_sections(run_dir: Path) -> Iterator[str]:
    """Yield the sections about errors; one sentence if the run has no ``errors.json``."""
    path = run_dir / ERRORS_FILE
    if not path.is_file():
        yield section("Errors", missing(ERRORS_FILE, "analysis of errors"))
        return
    with _reading(path):
        yield from _sections(run_dir, read_json(path))


def _sections(run_dir: Path, content: Mapping[str, Any]) -> Iterator[str]:
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
                lambda file: _save_confusion(file, content),
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
            with _reading(path):
                costs[name] = {kind: cost["cost"] for kind, cost in read_json(path)["costs"].items()}
    kinds = dict.fromkeys(kind for found in costs.values() for kind in found)
    return value_table(
        "Error, cost in AP50", runs, {kind: [percent(costs.get(run, {}).get(kind)) for run in runs] for kind in kinds}
    )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn errors about the content of a file into an :class:`InputError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{printable(path)} is damaged ({printable(error)}): evaluate the run again") from error


def _types_table(content: Mapping[str, Any]) -> str:
    costs = content["costs"]
    if not costs:
        return '<p class="faint">The validation split has no objects.</p>'
    top = max(0.01, *(cost["cost"] for cost in costs.values()))
    rows = (
        row(kind, max(0.0, cost["cost"]) / top, (f"{cost['number']:,}", percent(cost["cost"])), _MEANINGS[kind])
        for kind, cost in costs.items()
    )
    note = (
        f"AP50 is {percent(content['ap50'])}. The cost is how much higher it would be without the errors of one type "
        "alone (TIDE, 2020); costs do not add up. Numbers are those of all detections, whatever their score."
    )
    return table(("Error", "Number", "Cost in AP50"), rows) + f'<p class="faint">{note}</p>'


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
    return (
        "A detection is right if it is matched with an object of its class at IoU 0.5. Scores of well calibrated "
        "detections equal the share that is right. Mean distance of both over all detections (D-ECE): "
        f"{number(content['calibration']['error'])}."
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
    settings: dict[str, Any] = {"x_range": (0.0, 1.0), "high": 1.0, "show_last": False}
    charts = [
        _precision_chart("Precision, mean over classes", ious),
        _precision_chart("Precision, IoU 0.50", _shown_classes(content["precision_by_class"])),
        Chart(
            "All classes, IoU 0.50",
            [
                Line(label, scores, [point[name] for point in points], colour)
                for name, colour, label in (
                    ("precision", "blue", "precision"),
                    ("recall", "orange", "recall"),
                    ("f1", "black", "F1"),
                )
            ],
            x_label="least score",
            mark=(threshold, f"{threshold:.2f}"),
            **settings,
        ),
        _reliability_chart(content["calibration"]),
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


def _reliability_chart(found: Mapping[str, Any]) -> Chart:
    counts, width = found["counts"], 1 / len(found["counts"])
    used = [at for at, value in enumerate(counts) if value]
    right = [found["precision"][at] for at in used]
    return Chart(
        "Right detections by score, with their number",
        [
            Line("share that is right", [found["scores"][at] for at in used], right, "green"),
            Line("well calibrated", (0.0, 1.0), (0.0, 1.0), "black", dashed=True),
        ],
        x_label="score",
        x_range=(0.0, 1.0),
        high=1.0,
        bars=[
            ((at + 0.5) * width, found["precision"][at] or 0.0, f"{value:,}" * bool(value))
            for at, value in enumerate(counts)
        ],
        show_last=False,
    )


def _save_confusion(path: Path, content: Mapping[str, Any]) -> None:
    counts = np.array(content["confusion"], dtype=np.float64)
    totals = counts.sum(1)
    totals[-1] = counts[:, :-1].sum()  # detections; of the classes it is objects
    shares = counts / np.maximum(totals, 1)[:, None]
    names = [*content["classes"], "background"]
    save_figure(path, draw_confusion(shares, names, "Confusion (% of the objects of a class)"))
