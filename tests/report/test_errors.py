"""Pictures and sections about the errors of a detector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from detr_bf.errors import InputError
from detr_bf.evaluation.errors import ImageErrors, LabelSuspect, error_document, image_errors
from detr_bf.files import SUSPECTS_FILE, WORST_FILE
from detr_bf.report import save_picture
from detr_bf.report.errors import (
    ErrorSheetRow,
    SuspectCell,
    error_sections,
    error_sheet,
    suspect_sheet,
)
from detr_bf.structures import ClassMap, Detections
from tests.report.page import Page

CLASSES = ClassMap((1, 2), ("cat & <b>dog</b>", "bird $x$"))
GREEN, RED, YELLOW = (0, 158, 115), (213, 94, 0), (240, 228, 66)


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


def content(**changes: Any) -> dict[str, Any]:
    precision = np.zeros((10, 101, 2))
    precision[:, :40] = 0.75
    return error_document(errors(**changes), {1: (100, 100)}, precision, CLASSES.names, 0.5, 12, [(1, 1)])


def page(folder: Path, document: Any) -> Page:
    (folder / "pictures").mkdir()
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


def test_without_errors_or_objects_there_is_still_a_page(tmp_path: Path) -> None:
    assert "Errors" in page(tmp_path, content(with_detections=False)).texts


def test_a_run_without_the_file_says_so(tmp_path: Path) -> None:
    (found,) = error_sections(tmp_path)
    assert "errors.json is missing" in found


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"costs": 3}'])
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
