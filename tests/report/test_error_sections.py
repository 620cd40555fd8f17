"""Pictures and sections about the errors of a detector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from detr_bf.common.errors import InputError
from detr_bf.common.files import SUSPECTS_FILE, WORST_FILE, WORST_MAPS_FILE
from detr_bf.common.structures import ClassMap, Detections, PanopticMap, Segment
from detr_bf.evaluation import PanopticClassResult, PanopticSummary
from detr_bf.evaluation.error_types import LabelSuspect, error_document
from detr_bf.evaluation.matching import ImageErrors, image_errors
from detr_bf.evaluation.panoptic_errors import PANOPTIC_CAUSES, SegmentError, SegmentMatches, panoptic_document
from detr_bf.report import save_picture
from detr_bf.report.error_sections import (
    ErrorSheetRow,
    PanopticErrorRow,
    SuspectCell,
    error_sections,
    error_sheet,
    panoptic_error_sheet,
    suspect_sheet,
)
from tests.report.page import Page

CLASSES = ClassMap((1, 2), ("cat & <b>dog</b>", "bird $x$"))
GREEN, RED, YELLOW, GREY = (0, 158, 115), (213, 94, 0), (240, 228, 66), (150, 150, 150)
SEGMENTS = SegmentMatches(  # a match, a pair of confused classes, a split segment and one on void
    matches=((0, 0.75),),
    wrong=(SegmentError(2, 0, "class", 1), SegmentError(3, 0, "split")),
    missed=(SegmentError(2, 1, "class", 0), SegmentError(3, 1, "background")),
    ignored=(4,),
)


def errors(with_detections: bool = True) -> list[ImageErrors]:
    """Return one image with a hit, a background error and a missed object."""
    boxes = [[10, 10, 30, 30], [50, 50, 20, 20]]
    annotations = [
        {"id": i, "image_id": 1, "category_id": i, "bbox": box, "area": 400, "iscrowd": 0}
        for i, box in enumerate(boxes, 1)
    ]
    found = torch.tensor([[10.0, 10, 40, 40], [70, 5, 90, 25]])[: 2 * with_detections]
    scores, labels = torch.tensor([0.9, 0.8])[: 2 * with_detections], torch.tensor([0, 0])[: 2 * with_detections]
    truth = {"images": [{"id": 1}], "annotations": annotations, "categories": []}
    return image_errors(truth, [Detections(1, found, scores, labels)], CLASSES)


def content(*, with_detections: bool = True, **parts: Any) -> dict[str, Any]:
    precision = np.zeros((10, 101, 2))
    precision[:, :40] = 0.75
    images = errors(with_detections)
    return error_document(images, {1: (100, 100)}, precision, CLASSES.names, 0.5, 12, [(1, 1)], **parts)


def panoptic() -> dict[str, Any]:
    first = PanopticClassResult(0.75 / 2, 0.75, 0.5, 1, 2, 0, True)
    second = PanopticClassResult(0.0, 0.0, 0.0, 0, 0, 2, True)
    per_class = dict(zip(CLASSES.names, (first, second), strict=True))
    numbers = dict.fromkeys(("SQ", "RQ", "PQ_th", "SQ_th", "RQ_th", "PQ_st", "SQ_st", "RQ_st"))
    summary = PanopticSummary(PQ=0.75 / 4, **numbers, per_class=per_class, num_images=1)
    return panoptic_document({1: SEGMENTS}, summary, 12)


def page(folder: Path, document: Any) -> Page:
    (folder / "pictures").mkdir(exist_ok=True)
    (folder / "errors.json").write_text(json.dumps(document))
    return Page("<html>" + "".join(error_sections(folder)) + "</html>")


def test_the_sections_show_the_numbers(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "errors.json").write_text(json.dumps(content()))
    for name in (WORST_FILE, SUSPECTS_FILE):
        save_picture(tmp_path / name, torch.zeros(3, 4, 4, dtype=torch.uint8))
    shown = Page("<html>" + "".join(error_sections(tmp_path)) + "</html>")
    for heading in ("Errors", "Confused classes", "Images with the most errors", "Annotations to check"):
        assert heading in shown.texts
    start = shown.texts.index("background")
    assert shown.texts[start + 2 : start + 4] == ["1", "0.0"]
    start = shown.texts.index("missed")
    assert shown.texts[start + 2 : start + 4] == ["1", "50.0"]
    assert len(shown.addresses) == 3
    assert shown.tags.count("figure") == 3 + 4  # pictures, charts
    assert all(source.startswith("data:image/") for source in shown.addresses)
    everything = " ".join(shown.texts)
    assert "mask" not in everything
    assert "panoptic" not in everything


def test_masks_stand_beside_boxes(tmp_path: Path) -> None:
    shown = page(tmp_path, content(masks=errors(with_detections=False)))
    assert {"Number, masks", "Cost in mask AP50"} <= set(shown.texts)
    start = shown.texts.index("missed")
    assert shown.texts[start + 2 : start + 6] == ["1", "50.0", "2", "100.0"]
    assert any("their AP50 is 0.0." in text for text in shown.texts)
    assert "F1 of masks" in shown.texts
    assert any("masks —." in text for text in shown.texts), "no detections have no calibration"


def test_causes_of_lost_panoptic_quality(tmp_path: Path) -> None:
    save_picture(tmp_path / WORST_MAPS_FILE, torch.zeros(3, 4, 4, dtype=torch.uint8))
    shown = page(tmp_path, content(panoptic=panoptic()))
    start = shown.texts.index("PQ lost")
    rows = shown.texts[start + 1 : shown.texts.index("Lost panoptic quality by class")]
    # W is 2 segments for the first class and 1 for the second; the mean is that over both
    assert rows[:6] == ["matches", "right segments, whose IoU is below 1", "6.2", "class", rows[4], "1"]
    assert rows[5:8] == ["1", "1", "37.5"]
    for cause, numbers in {"split": ["1", "0", "12.5"], "background": ["0", "1", "25.0"]}.items():
        at = rows.index(cause)
        assert rows[at + 2 : at + 5] == numbers
    assert any(text.startswith("PQ is 18.8; with the losses it adds up to 100") for text in rows)
    start = shown.texts.index(CLASSES.names[1], shown.texts.index("Lost panoptic quality by class"))
    assert shown.texts[start + 1 : start + 10] == ["0.0", "0.0", "50.0", *["0.0"] * 5, "50.0"]
    assert {"Confused segments", "Panoptic maps with the largest errors"} <= set(shown.texts)
    assert (tmp_path / "pictures" / "confusion_panoptic.png").stat().st_size > 1000
    assert len(shown.addresses) == 3, "two matrices, worst maps"


def test_without_errors_or_objects_there_is_still_a_page(tmp_path: Path) -> None:
    assert "Errors" in page(tmp_path, content(with_detections=False)).texts


def test_a_run_without_the_file_says_so(tmp_path: Path) -> None:
    (found,) = error_sections(tmp_path)
    assert "errors.json is missing" in found


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"costs": 3}', '{"panoptic": {"causes": []}}'])
def test_a_damaged_file_is_told(tmp_path: Path, damage: str) -> None:
    (tmp_path / "errors.json").write_text(damage)
    with pytest.raises(InputError, match="is damaged"):
        list(error_sections(tmp_path))


def test_the_sheet_marks_hits_errors_and_missed_objects() -> None:
    (image,) = errors()
    picture = torch.full((3, 100, 100), 255, dtype=torch.uint8)
    sheet = error_sheet([ErrorSheetRow(picture, image, "a.png")], CLASSES.names, 0.5)
    pixels = np.asarray(sheet).reshape(-1, 3)
    for colour in (GREEN, RED, YELLOW):
        assert (pixels == colour).all(1).sum() > 100
    image.boxes[:] = image.boxes[:, [2, 3, 0, 1]]  # corners in the other order
    error_sheet([ErrorSheetRow(picture, image, "a.png")], CLASSES.names, 0.5)
    with pytest.raises(InputError, match="at least one image"):
        error_sheet([], CLASSES.names, 0.5)


@pytest.mark.parametrize(
    ("suspect", "colour"),
    [
        (LabelSuspect(1, (10.0, 10.0, 40.0, 40.0), 0, 0.9, None), RED),
        (LabelSuspect(1, (10.0, 10.0, 40.0, 40.0), 0, 0.9, 1), RED),
        (LabelSuspect(1, (80.0, 80.0, 99.0, 99.0), None, None, 1), YELLOW),
        (LabelSuspect(1, (-30.0, 95.0, 130.0, 130.0), 0, 0.5, None), RED),
        (LabelSuspect(1, (40.0, 40.0, 10.0, 10.0), 0, 0.5, None), RED),
        (LabelSuspect(1, (500.0, 500.0, 520.0, 520.0), None, None, 1), YELLOW),
    ],
)
def test_the_surroundings_of_a_suspect_are_cut_out(suspect: LabelSuspect, colour: tuple[int, int, int]) -> None:
    picture = torch.full((3, 100, 100), 255, dtype=torch.uint8)
    sheet = suspect_sheet([SuspectCell(picture, suspect, "a.png")], CLASSES.names)
    assert (np.asarray(sheet).reshape(-1, 3) == colour).all(1).any()


def test_the_sheet_of_maps_marks_wrong_missed_and_ignored_segments() -> None:
    image = torch.zeros(3, 100, 100, dtype=torch.uint8)
    ids = torch.zeros(100, 100, dtype=torch.int32)
    for number, (rows, columns) in enumerate(((0, 0), (0, 50), (50, 0), (50, 50)), start=1):
        ids[rows : rows + 50, columns : columns + 50] = number
    truth = PanopticMap(
        1, ids, (Segment(1, 0, 2500), *(Segment(i, 1, 2500) for i in (2, 3)), Segment(4, 1, 2500, True))
    )
    found = PanopticMap(1, ids, tuple(Segment(i, 0, 2500) for i in (1, 2, 3, 4)))
    sheet = np.asarray(panoptic_error_sheet([PanopticErrorRow(image, truth, found, SEGMENTS, "a.png")], CLASSES.names))
    middle = sheet.shape[1] // 2
    for side, others in ((sheet[:, :middle], YELLOW), (sheet[:, middle:], RED)):
        pixels = side.reshape(-1, 3)
        shares = {
            colour: int((pixels == np.rint(np.array(colour) * 0.55)).all(1).sum())
            for colour in (GREEN, GREY, RED, YELLOW)
        }
        assert shares[GREEN] > 30000
        assert shares[GREY] > 30000
        assert shares[others] > 60000, "two segments, with names on them"
        assert sum(shares[colour] > 0 for colour in shares) == 3
    small = PanopticErrorRow(image[:, :50], truth, found, SEGMENTS, "a.png")
    with pytest.raises(InputError, match="must have the size of the file"):
        panoptic_error_sheet([small], CLASSES.names)
    with pytest.raises(InputError, match="at least one image"):
        panoptic_error_sheet([], CLASSES.names)


def test_every_cause_is_described_and_named(tmp_path: Path) -> None:
    document = panoptic()
    document["causes"] = dict(reversed(document["causes"].items()))
    texts = page(tmp_path, content(panoptic=document)).texts
    start = texts.index("Lost panoptic quality")
    assert [text for text in texts[start : start + 40] if text in PANOPTIC_CAUSES] == list(PANOPTIC_CAUSES)
