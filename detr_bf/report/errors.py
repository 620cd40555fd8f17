"""Pictures and sections of ``report.html`` about the errors of a detector, from ``errors.json``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from detr_bf.errors import InputError
from detr_bf.evaluation.errors import HIT, IGNORED, ImageErrors, LabelSuspect
from detr_bf.evaluation.panoptic_errors import MATCHES, PANOPTIC_CAUSES, SegmentError, SegmentMatches
from detr_bf.files import ERRORS_FILE, read_json
from detr_bf.report.drawing import Colour, Mark, Rectangle, make_marks, paint_marks
from detr_bf.report.figures import (
    BLUE,
    COLOURS,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    VERMILION,
    add_legend,
    clear_lines,
    draw_confusion,
    save_figure,
    title,
)
from detr_bf.report.fonts import legible, plain
from detr_bf.report.page import count, missing, number, percent, picture, row, section, table
from detr_bf.report.panoptic import check_map_size, paint_segments
from detr_bf.report.sheet import GROUND_TRUTH, LABEL_SIZE, Strip, fit, lay_out
from detr_bf.structures import PanopticMap
from detr_bf.text import printable

WORST_FILE, SUSPECTS_FILE = "pictures/worst.jpg", "pictures/suspects.jpg"
WORST_MAPS_FILE = "pictures/worst_panoptic.jpg"
_CURVES_FILE, _CONFUSION_FILE = "pictures/errors.svg", "pictures/confusion.png"
_SEGMENTS_FILE = "pictures/confusion_panoptic.png"
_CELL = 260  # pixels, side of a cut-out
_MOST_CURVES = 7  # classes; of more, the best and the worst are drawn
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
    "both": "wrong class and IoU from 0.1 to 0.5",
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
        counts = f"{count(len(errors.wrong), 'wrong segment')}, {len(errors.missed)} missed"
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
    try:
        yield from (sections or _sections)(run_dir, read_json(path))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{printable(path)} is damaged ({printable(error)}): evaluate the run again") from error


def _sections(run_dir: Path, content: Mapping[str, Any]) -> Iterator[str]:
    if content["panoptic"] is not None:
        yield from _panoptic_sections(run_dir, content["panoptic"])
    yield section("Errors", _types_table(content))
    yield section(
        "Precision, recall and scores",
        picture(
            run_dir / _CURVES_FILE,
            "Precision against recall by IoU and by class, F1 against the threshold, and precision against the score",
            lambda file: save_figure(file, _curves(content)),
        )
        + f'<p class="faint">{_calibration_note(content)}</p>',
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


def _curves(content: Mapping[str, Any]) -> Figure:
    """Draw precision against recall by IoU and by class, F1 against the threshold, and a reliability diagram."""
    figure = Figure(figsize=(11, 8.4), layout="constrained", facecolor="white")
    by_iou, by_class, by_threshold, reliability = figure.subplots(2, 2).flat
    ious = content["precision_by_iou"]
    shades = {iou: (0.1 + 0.85 * at / max(1, len(ious) - 1)) for at, iou in enumerate(ious)}
    chosen = {
        f"IoU {iou}": values for iou, values in ious.items() if iou in ("0.50", "0.60", "0.70", "0.75", "0.80", "0.90")
    }
    colours = {f"IoU {iou}": (0.0, 0.45 * (1 - shade) + 0.2, 0.7 * (1 - shade) + 0.25) for iou, shade in shades.items()}
    _plot_precision(by_iou, "Mean over classes", chosen, colours)
    classes = _shown_classes(content["precision_by_class"])
    _plot_precision(by_class, "Classes, IoU 0.50", classes, dict(zip(classes, COLOURS, strict=False)))
    _plot_thresholds(by_threshold, content)
    plot_reliability(reliability, content["calibration"], "Right detections by score; number in each bar", "score")
    return figure


def _shown_classes(curves: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Return the curves of all classes, or of the three best and the four worst; names are drawable and short."""
    ranked = sorted(curves, key=lambda name: -float(np.mean(curves[name])))
    chosen = ranked if len(ranked) <= _MOST_CURVES else [*ranked[:3], *ranked[-4:]]
    return {plain(name, f"#{at}", limit=24): curves[name] for at, name in enumerate(chosen)}


def _plot_precision(
    axes: Axes, heading: str, curves: Mapping[str, Sequence[float]], colours: Mapping[str, Any]
) -> None:
    for name, values in curves.items():
        axes.plot(np.linspace(0, 1, len(values)), values, color=colours[name], label=name, linewidth=1.6)
    finish_shares(axes, heading, "recall", "precision")
    if curves:
        add_legend(axes)


def _plot_thresholds(axes: Axes, content: Mapping[str, Any]) -> None:
    points = content["thresholds"]
    scores = [point["threshold"] for point in points]
    for name, colour, label in (("precision", BLUE, "precision"), ("recall", ORANGE, "recall"), ("f1", INK, "F1")):
        axes.plot(scores, [point[name] for point in points], color=colour, label=label, linewidth=1.6)
    if content["masks"]:
        values = [point["f1"] for point in content["masks"]["thresholds"]]
        axes.plot(scores, values, ":", color=INK, label="F1 of masks", linewidth=1.6)
    axes.axvline(content["threshold"], color=VERMILION, linewidth=1, linestyle="--")
    finish_shares(axes, f"All classes, IoU 0.50; dashed: threshold {content['threshold']:.2f}", "least score", "")
    add_legend(axes)


def plot_reliability(axes: Axes, found: Mapping[str, Any], heading: str, score: str) -> None:
    """Draw the share that is right against the score, with the number in each bin.

    Args:
        axes: to draw on.
        found: of :meth:`detr_bf.evaluation.errors.Calibration.to_dict`.
        heading: title of the axes.
        score: name of the score.
    """
    counts, width = found["counts"], 1 / len(found["counts"])
    used = [at for at, value in enumerate(counts) if value]
    axes.plot((0, 1), (0, 1), color=FAINT, linewidth=1.2)
    axes.bar(
        [(at + 0.5) * width for at in used], [found["precision"][at] for at in used], 0.86 * width, color="#9fd8c4"
    )
    axes.plot(
        [found["scores"][at] for at in used], [found["precision"][at] for at in used], "o-", color=GREEN, markersize=4
    )
    for at in used:
        axes.text((at + 0.5) * width, 0.01, f"{counts[at]:,}", ha="center", va="bottom", fontsize=7, color=INK)
    finish_shares(axes, heading, score, "share that is right")


def finish_shares(axes: Axes, heading: str, below: str, beside: str) -> None:
    """Add title, labels and grid to axes with shares from 0 to 1 in both directions."""
    title(axes, heading)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(below, color=INK)
    axes.set_ylabel(beside, color=INK)
    axes.grid(color=FAINT, linewidth=0.5)
    clear_lines(axes)


def _save_confusion(path: Path, content: Mapping[str, Any], things: str) -> None:
    counts = np.array(content["confusion"], dtype=np.float64)
    totals = counts.sum(1)
    totals[-1] = counts[:, :-1].sum()  # detections; of the classes it is objects
    shares = counts / np.maximum(totals, 1)[:, None]
    names = [*content["classes"], "background"]
    save_figure(path, draw_confusion(shares, names, f"Confusion (% of the {things} of a class)"))
