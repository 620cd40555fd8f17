"""Pictures of panoptic maps and the sheet of them."""

from __future__ import annotations

import colorsys
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from detr_bf.common.errors import InputError
from detr_bf.common.structures import PanopticMap, Segment
from detr_bf.report.drawing import DARK, Colour, class_colour, save_picture
from detr_bf.report.panoptic import (
    PanopticSheetRow,
    draw_panoptic,
    interior_points,
    panoptic_sheet,
    segment_colours,
)

NAMES = ["cat", "dog", "grass"]


def noise(height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8)


def panoptic_map(ids: Tensor, labels: dict[int, int], crowds: frozenset[int] = frozenset()) -> PanopticMap:
    """Draw ``labels``: segment id -> class index."""
    segments = [Segment(i, label, int((ids == i).sum()), i in crowds) for i, label in labels.items()]
    return PanopticMap(1, ids.to(torch.int32), tuple(segments))


def two_squares() -> PanopticMap:
    """Segments of 700 x 700 pixels: id 70,000 at the upper left, id 9 at the upper right, void below."""
    ids = torch.zeros(700, 700, dtype=torch.int64)
    ids[:400, :300] = 70_000
    ids[:400, 300:] = 9
    return panoptic_map(ids, {70_000: 2, 9: 0})


def has_colour(picture: Tensor, colour: Colour) -> Tensor:
    """Return a mask (H, W) bool."""
    return (picture == torch.tensor(colour, dtype=torch.uint8)[:, None, None]).all(0)


def test_void_and_the_input_are_untouched() -> None:
    image, panoptic = noise(700, 700), two_squares()
    before = image.clone()
    picture = draw_panoptic(image, panoptic, NAMES)
    assert picture.dtype == torch.uint8
    assert picture.shape == image.shape
    assert torch.equal(picture[:, 400:], image[:, 400:])
    assert (picture[:, :400] != image[:, :400]).any(0).float().mean() > 0.9
    assert torch.equal(image, before)


def test_segments_have_the_colour_of_their_class_whatever_the_colour_of_the_image() -> None:
    panoptic = two_squares()
    for background in ((255, 0, 0), (0, 0, 255)):
        image = torch.tensor(background, dtype=torch.uint8)[:, None, None].expand(3, 700, 700)
        picture = draw_panoptic(image, panoptic, NAMES).float()
        for point, label in (((30, 30), 2), ((30, 600), 0)):
            tint = picture[:, point[0], point[1]] - picture[:, point[0], point[1]].mean()
            expected = torch.tensor(class_colour(label)).float()
            assert torch.cosine_similarity(tint, expected - expected.mean(), dim=0) > 0.99


def test_a_thin_dark_outline_runs_inside_the_segments_but_not_along_the_edge_of_the_picture() -> None:
    image = torch.full((3, 700, 700), 128, dtype=torch.uint8)
    dark = has_colour(draw_panoptic(image, two_squares(), NAMES), DARK)
    assert dark[50:350, 299].all()
    assert dark[50:350, 300].all()
    assert dark[399, 10:690].all()
    assert not dark[400].any()
    assert not dark[50:350, :280].all(1).any()
    assert not dark[:350, 0].any()
    assert not dark[0, :290].any()
    assert 2 <= dark[60, 250:350].sum() <= 6, "a line of few pixels"


def test_the_name_stands_inside_its_segment() -> None:
    panoptic = two_squares()
    picture = draw_panoptic(noise(700, 700), panoptic, NAMES)
    for segment in panoptic.segments:
        patch = has_colour(picture, class_colour(segment.label))
        assert patch.sum() > 100
        assert (panoptic.ids[patch] == segment.id).all()


@pytest.mark.parametrize(
    ("size", "drawn"), [((96, 128), (480, 640)), ((300, 100), (640, 213)), ((800, 900), (800, 900))]
)
def test_small_images_are_enlarged_in_proportion_with_their_map(size: tuple[int, int], drawn: tuple[int, int]) -> None:
    ids = torch.zeros(size, dtype=torch.int64)
    ids[: size[0] // 2] = 5
    image = torch.full((3, *size), 128, dtype=torch.uint8)
    picture = draw_panoptic(image, panoptic_map(ids, {5: 1}), NAMES)
    assert tuple(picture.shape[1:]) == drawn
    changed = (picture != 128).any(0)
    assert changed[: drawn[0] // 2 - 1].all()
    assert not changed[drawn[0] // 2 + 1 :].any()


def test_a_map_without_segments_leaves_the_image() -> None:
    image = noise(700, 650)
    assert torch.equal(draw_panoptic(image, panoptic_map(torch.zeros(700, 650), {}), NAMES), image)


def test_a_map_of_another_size_is_refused() -> None:
    row = PanopticSheetRow(noise(70, 80), two_squares(), two_squares())
    message = "image 1 has 700 x 700 pixels .*, its image 70 x 80; both must"
    with pytest.raises(InputError, match=message):
        draw_panoptic(row.image, row.truth, NAMES)
    with pytest.raises(InputError, match=message):
        panoptic_sheet([row], NAMES)


@pytest.mark.parametrize("label", range(21))
def test_instances_of_a_class_have_different_colours_of_its_hue(label: int) -> None:
    labels = [label, label + 1, label, label + 2, label, label, label]
    colours = segment_colours([Segment(i, index, 10) for i, index in enumerate(labels, start=1)])
    assert [colours[i] for i in (0, 1, 3)] == [class_colour(index) for index in (label, label + 1, label + 2)]
    instances = [colours[i] for i in (0, 2, 4, 5, 6)]
    for first, second in itertools.combinations(instances, 2):
        assert np.abs(np.subtract(first, second)).max() >= 8
    hues = [colorsys.rgb_to_hls(*(value / 255 for value in colour))[0] for colour in instances]
    assert max(hues) - min(hues) < 0.03


def test_a_crowd_is_called_one() -> None:
    ids = torch.full((700, 700), 3)
    width = [
        has_colour(draw_panoptic(noise(700, 700), panoptic_map(ids, {3: 0}, crowds), NAMES), class_colour(0)).any(0)
        for crowds in (frozenset[int](), frozenset({3}))
    ]
    assert width[1].sum() > 1.8 * width[0].sum()


def test_the_most_interior_point_of_a_bent_segment_is_not_its_middle() -> None:
    numbers = np.zeros((100, 100), dtype=np.int32)
    numbers[10:20, 10:90] = 1
    numbers[10:90, 60:90] = 1
    assert numbers[50, 50] == 0
    [point] = interior_points(numbers, [(8, 6)])
    assert point is not None
    assert 70 <= point[0] <= 80
    assert 20 <= point[1] <= 78


def test_names_stay_in_the_picture_and_off_each_other() -> None:
    numbers = np.full((60, 200), 1, dtype=np.int32)
    numbers[20:40, 80:120] = 2  # in the middle of the other segment
    sizes = [(90, 18), (38, 18)]
    points = interior_points(numbers, sizes)
    assert points[1] is not None
    assert points[0] is not None
    assert points[1][0] in (99, 100)
    assert points[1][1] in (29, 30)
    apart = [abs(a - b) for a, b in zip(*points, strict=True)]
    assert apart[0] >= (90 + 38) / 2 or apart[1] >= 18
    for (x, y), (width, height) in zip(points, sizes, strict=True):
        assert width / 2 <= x <= 200 - width / 2
        assert height / 2 <= y <= 60 - height / 2


def test_a_segment_too_small_for_its_name_has_none() -> None:
    numbers = np.full((40, 60), 1, dtype=np.int32)
    numbers[10:15, 10:15] = 2  # smaller than its name
    points = interior_points(numbers, [(20, 10), (20, 10), (20, 10)])  # the third segment has no pixels at this size
    assert points[0] is not None
    assert points[1:] == [None, None]
    crowded = np.repeat(np.array([[1, 2]], dtype=np.int32), 24, axis=1).repeat(13, axis=0)
    taken = interior_points(crowded, [(30, 10), (30, 10)])
    assert sum(point is not None for point in taken) == 1, "the names would overlap"


def test_sheet_shows_truth_at_the_left_and_predictions_at_the_right(tmp_path: Path) -> None:
    ids = torch.ones(90, 120, dtype=torch.int64)
    row = PanopticSheetRow(noise(90, 120), panoptic_map(ids, {1: 0}), panoptic_map(ids, {1: 1}), "0001.png")
    sheet = transforms.pil_to_tensor(panoptic_sheet([row], NAMES))
    half = sheet.shape[2] // 2
    for label, own, other in ((0, slice(0, half), slice(half, None)), (1, slice(half, None), slice(0, half))):
        patch = has_colour(sheet, class_colour(label))
        assert patch[:, own].sum() > 100
        assert not patch[:, other].any()
    save_picture(tmp_path / "sheet.png", panoptic_sheet([row, row, row], NAMES))
    with Image.open(tmp_path / "sheet.png") as written:
        assert written.format == "PNG"
        assert written.size[0] > 1.8 * sheet.shape[2]
        assert written.size[1] > 1.6 * sheet.shape[1]


def test_the_caption_is_the_file_name() -> None:
    ids = torch.ones(90, 120, dtype=torch.int64)
    truth = panoptic_map(ids, {1: 0})
    named, unnamed = (
        transforms.pil_to_tensor(panoptic_sheet([PanopticSheetRow(noise(90, 120), truth, truth, name)], NAMES))
        for name in ("0001.png", "")
    )
    changed = (named != unnamed).any(0)
    rows, columns = changed.nonzero(as_tuple=True)
    assert len(rows) > 0
    assert columns.max() < named.shape[2] // 2
    assert rows.min() > named.shape[1] * 0.75


def test_a_sheet_needs_an_image() -> None:
    with pytest.raises(InputError, match="at least one image"):
        panoptic_sheet([], NAMES)
