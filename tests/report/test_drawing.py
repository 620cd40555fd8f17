"""Boxes, labels and the comparison sheet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.structures import Detections
from detr_bf.report import drawing
from detr_bf.report.drawing import Rectangle, class_colour, draw_boxes, save_picture, text_colour
from detr_bf.report.sheet import SheetRow, comparison_sheet

NAMES = ["cat", "a rather long class name that cannot fit into a narrow picture", "dog"]


def grey(height: int, width: int) -> Tensor:
    return torch.full((3, height, width), 128, dtype=torch.uint8)


def has_colour(picture: Tensor, label: int) -> Tensor:
    """Return a mask (H, W) of the pixels in the colour of a class."""
    return (picture == torch.tensor(class_colour(label), dtype=torch.uint8)[:, None, None]).all(0)


def relative_luminance(colour: tuple[int, int, int]) -> float:
    linear = [v / 255 / 12.92 if v / 255 <= 0.04045 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_box_is_outlined_where_it_is_and_the_input_is_untouched() -> None:
    image = grey(700, 700)
    picture = draw_boxes(image, torch.tensor([[100.0, 200.0, 500.0, 600.0]]), torch.tensor([2]), NAMES)
    assert picture.dtype == torch.uint8
    assert picture.shape == image.shape
    painted = has_colour(picture, 2)
    for y, x in ((200, 300), (600, 300), (400, 100), (400, 500)):
        assert painted[y, x]
    assert (picture[:, 300:500, 200:400] == 128).all(), "the inside of the box stays visible"
    assert (image == 128).all()


@pytest.mark.parametrize(
    ("size", "drawn"), [((96, 128), (480, 640)), ((300, 100), (640, 213)), ((800, 900), (800, 900))]
)
def test_small_images_are_enlarged_in_proportion(size: tuple[int, int], drawn: tuple[int, int]) -> None:
    box = torch.tensor([[0.5, 0.5, 0.75, 0.75]]) * torch.tensor([size[1], size[0], size[1], size[0]])
    picture = draw_boxes(grey(*size), box, torch.tensor([0]), NAMES)
    assert tuple(picture.shape[1:]) == drawn
    middle = drawn[1] // 2
    assert has_colour(picture, 0)[int(0.6 * drawn[0]), middle : middle + 3].any()


def test_no_box_and_boxes_beyond_the_image() -> None:
    image = grey(700, 700)
    none = draw_boxes(image, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), NAMES)
    assert torch.equal(none, image)
    beyond = torch.tensor([[-50.0, -50.0, 900.0, 900.0], [650.0, 690.0, 640.0, 699.0]])  # the second image is flipped
    picture = draw_boxes(image, beyond, torch.tensor([0, 2]), NAMES, torch.tensor([0.5, 0.9]))
    assert has_colour(picture, 0)[350, 0]
    assert has_colour(picture, 0)[350, 699]
    assert has_colour(picture, 2).any()


def test_labels_stay_inside_and_apart() -> None:
    taken: list[Rectangle] = []
    for box in (
        Rectangle(0, 0, 60, 60),
        Rectangle(2, 2, 64, 64),
        Rectangle(150, 150, 199, 199),
        Rectangle(9, 0, 9, 90),
    ):
        spot = drawing._label_position(box, (80, 20), (200, 200), taken)
        assert spot.x0 >= 0
        assert spot.y0 >= 0
        assert spot.x1 < 200
        assert spot.y1 < 200
        assert not any(spot.overlap(other) for other in taken)
        taken.append(spot)


def test_the_score_is_written_behind_the_name_and_the_best_comes_first() -> None:
    marks = drawing.make_marks(torch.zeros(2, 4), torch.tensor([0, 2]), NAMES, torch.tensor([0.25, 0.9]))
    assert [mark.text for mark in marks] == ["dog 0.90", "cat 0.25"]
    assert [mark.text for mark in drawing.make_marks(torch.zeros(1, 4), torch.tensor([0]), NAMES)] == ["cat"]


def test_long_names_are_shortened_to_the_picture() -> None:
    font = drawing.load_font(20)
    text = drawing.shorten(NAMES[1], font, 150)
    assert text.endswith("…")
    assert 100 < font.getlength(text) <= 150
    assert drawing.shorten("cat", font, 150) == "cat"


def test_colours_differ_and_text_is_readable_on_them() -> None:
    colours = [class_colour(label) for label in range(21)]
    assert len(set(colours)) == 21
    assert class_colour(21) == colours[0]
    for colour in colours:
        bright, dark = sorted((relative_luminance(colour), relative_luminance(text_colour(colour))), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, f"{colour}: WCAG AA asks for a contrast of 4.5"


def test_pictures_are_written_as_png(tmp_path: Path) -> None:
    save_picture(tmp_path / "new" / "a.png", grey(4, 6))
    with Image.open(tmp_path / "new" / "a.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (6, 4))


def sheet_row(height: int, width: int, scores: list[float]) -> SheetRow:
    box = torch.tensor([[0.25, 0.25, 0.75, 0.75]]) * torch.tensor([width, height, width, height])
    found = Detections(1, box.repeat(len(scores), 1), torch.tensor(scores), torch.full((len(scores),), 2))
    return SheetRow(grey(height, width), box, torch.tensor([0]), found, "0001.png")


def test_sheet_shows_truth_at_the_left_and_confident_predictions_at_the_right() -> None:
    def painted(threshold: float) -> tuple[Tensor, Tensor]:
        sheet = drawing.transforms.pil_to_tensor(comparison_sheet([sheet_row(90, 120, [0.6])], NAMES, threshold))
        return has_colour(sheet, 0), has_colour(sheet, 2)

    truth, found = painted(0.5)
    half = truth.shape[1] // 2
    assert truth[:, :half].any()
    assert not truth[:, half:].any()
    assert found[:, half:].any()
    assert not found[:, :half].any()
    assert not painted(0.7)[1].any(), "the only prediction is below the threshold"


def test_sheet_grows_by_lines_of_pairs(tmp_path: Path) -> None:
    row = sheet_row(90, 120, [])
    one, two, three = (comparison_sheet([row] * count, NAMES).size for count in (1, 2, 3))
    assert two[0] > 1.8 * one[0]
    assert two[1] == one[1]
    assert three[0] == two[0]
    assert three[1] > 1.6 * two[1]
    save_picture(tmp_path / "sheet.png", comparison_sheet([row, sheet_row(300, 40, [0.9])], NAMES))
    with Image.open(tmp_path / "sheet.png") as picture:
        assert picture.size[0] == two[0]
    with pytest.raises(InputError, match="at least one image"):
        comparison_sheet([], NAMES)
