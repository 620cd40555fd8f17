from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from scipy import ndimage
from torch import Tensor

from detr_bf.data.masks import Segmentations, joined, outlines, parts_of, polygon_area

SIZE = (30, 40)
SQUARE = [4, 6, 14, 6, 14, 20, 4, 20]  # x, y of the corners


def drawn(*segmentations: object, size: tuple[int, int] = SIZE) -> Tensor:
    """The masks as bool."""
    kept = Segmentations(parts_of(segmentation, size) for segmentation in segmentations)
    return kept.read(0, slice(0, len(segmentations)), size).bool()


def rectangle(x0: int, y0: int, x1: int, y1: int) -> Tensor:
    mask = torch.zeros(SIZE, dtype=torch.bool)
    mask[y0:y1, x0:x1] = True
    return mask


def random_mask(seed: int, share: float) -> np.ndarray:
    return (np.random.default_rng(seed).random(SIZE) < share).astype(np.uint8)


def compressed(mask: np.ndarray) -> dict[str, object]:
    encoded = coco_mask.encode(np.asfortranarray(mask))
    return {"size": encoded["size"], "counts": encoded["counts"].decode()}


def lengths(mask: np.ndarray) -> list[int]:
    """Independent run-length encoding, column by column, the first run of zeros, as the oracle of the tests."""
    counts, value = [0], 0
    for pixel in mask.T.flatten().tolist():
        if pixel != value:
            counts.append(0)
            value = pixel
        counts[-1] += 1
    return counts


def test_a_polygon_on_whole_pixels_is_exact() -> None:
    assert torch.equal(drawn([SQUARE])[0], rectangle(4, 6, 14, 20))


def test_polygons_of_one_object_are_united() -> None:
    both = drawn([SQUARE, [10, 10, 30, 10, 30, 12, 10, 12]])[0]
    assert torch.equal(both, rectangle(4, 6, 14, 20) | rectangle(10, 10, 30, 12))


def test_lines_and_points_are_left_out_and_do_not_become_boxes() -> None:
    assert torch.equal(drawn([[1, 2, 20, 20], SQUARE, [3, 3], []])[0], rectangle(4, 6, 14, 20))


def test_a_polygon_outside_leaves_no_pixel() -> None:
    assert not drawn([[100, 100, 120, 100, 120, 120]]).any()


@pytest.mark.parametrize("seed", range(20))
def test_polygons_are_drawn_as_pycocotools_draws_them(seed: int) -> None:
    random = np.random.default_rng(seed)
    segmentation = [
        (random.random(2 * corners) * 60 - 10).round(2).tolist() for corners in random.integers(3, 30, size=3)
    ]
    oracle = COCO()
    oracle.imgs = {1: {"height": SIZE[0], "width": SIZE[1]}}
    expected = oracle.annToMask({"image_id": 1, "segmentation": segmentation})
    assert torch.equal(drawn(segmentation)[0], torch.from_numpy(expected).bool())


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.98, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_run_lengths_compressed_or_not_give_the_mask(seed: int, share: float) -> None:
    mask = random_mask(seed, share)
    expected = torch.from_numpy(mask).bool()
    found = drawn(compressed(mask), {"size": list(SIZE), "counts": lengths(mask)})
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)


def test_long_runs_are_understood() -> None:
    size = (3000, 2000)
    mask = np.zeros(size, dtype=np.uint8)
    mask[:, 700:1500] = 1
    mask[5, 1900] = 1
    assert torch.equal(drawn(compressed(mask), size=size)[0], torch.from_numpy(mask).bool())


def test_rows_choose_among_many_objects() -> None:
    masks = [random_mask(seed, 0.3) for seed in range(4)]
    kept = Segmentations([parts_of([SQUARE]), *(parts_of(compressed(mask)) for mask in masks), parts_of([SQUARE])])
    for first, last in ((0, 6), (1, 5), (2, 3), (3, 3)):
        found = kept.read(0, slice(first, last), SIZE)
        assert found.dtype == torch.uint8
        assert found.shape == (last - first, *SIZE)
        for number, mask in enumerate(found, start=first):
            expected = masks[number - 1] if 1 <= number <= 4 else rectangle(4, 6, 14, 20).numpy()
            assert np.array_equal(mask.numpy(), expected)


def test_no_objects_at_all() -> None:
    assert drawn().shape == (0, *SIZE)


def test_nothing_is_kept_that_workers_would_copy() -> None:
    kept = Segmentations([parts_of([SQUARE])] * 3)
    assert {type(value) for value in vars(kept).values()} == {bytes, Tensor}
    sent = pickle.loads(pickle.dumps(kept))
    assert torch.equal(sent.read(0, slice(1, 2), SIZE), kept.read(0, slice(1, 2), SIZE))


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        (None, "segmentation is none, expected a list of polygons or run lengths"),
        ("text", "segmentation is str"),
        ([], "no polygon of three or more corners"),
        ([[1, 2, 3, 4]], "no polygon of three or more corners"),
        (SQUARE, "polygon 4, expected numbers x, y"),
        ([[1, 2, 3, 4, 5, 6, 7]], r"polygon \[1, 2, 3, 4, 5, 6, 7\], expected numbers x, y"),
        ([[1, 2, 3, 4, 5, float("nan")]], "expected numbers"),
        ([[1, 2, 3, 4, 5, float("inf")]], "expected numbers"),
        ([[1, 2, 3, 4, 5, 1e9]], "in pixels"),
        ([[1, 2, 3, 4, 5, 10**30]], "expected numbers"),
        ([[1, 2, 3, 4, 5, "6"]], "expected numbers"),
        ([[1, 2, 3, 4, 5, None]], "expected numbers"),
        ([[[1, 2], [3, 4], [5, 6]]], "expected numbers"),
        ([[[1, 2], [3]]], "expected numbers"),
        ([[True, False] * 4], "expected numbers"),
        ({"counts": [1200]}, r"size None, expected \[height, width\]"),
        ({"size": [30], "counts": [1200]}, r"size \[30\]"),
        ({"size": [30, 0], "counts": []}, r"size \[30, 0\]"),
        ({"size": [30, 40.0], "counts": [1200]}, r"size \[30, 40.0\]"),
        ({"size": [40, 30], "counts": [1200]}, r"30 x 40 pixels \(width x height\), the image has 40 x 30"),
        ({"size": [30, 40]}, "counts are None, expected whole numbers"),
        ({"size": [30, 40], "counts": [1200.0]}, r"counts are \[1200.0\]"),
        ({"size": [30, 40], "counts": [1199]}, "cover 1199 pixels, expected lengths of 0 or more that cover 1200"),
        ({"size": [30, 40], "counts": [1300, -100]}, "expected lengths of 0 or more"),
        ({"size": [30, 40], "counts": []}, "cover 0 pixels"),
        ({"size": [30, 40], "counts": ""}, "not compressed run lengths"),
        ({"size": [30, 40], "counts": "5"}, "cover 5 pixels"),
        ({"size": [30, 40], "counts": "é"}, "cover 15 pixels"),  # decoded as a question mark
        ({"size": [30, 40], "counts": "!5"}, "not compressed run lengths"),
        ({"size": [30, 40], "counts": "z5"}, "not compressed run lengths"),
        ({"size": [30, 40], "counts": "`"}, "not compressed run lengths"),
        ({"size": [30, 40], "counts": "`" * 12 + "1"}, "a number of more than 35 bits"),
    ],
)
def test_what_is_no_segmentation_is_explained(segmentation: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parts_of(segmentation, SIZE)


def test_damaged_run_lengths_are_refused_or_still_cover_the_image() -> None:
    good = compressed(random_mask(0, 0.1))
    text = str(good["counts"])
    for length in range(len(text)):
        with pytest.raises(ValueError, match="run lengths"):
            parts_of({**good, "counts": text[:length]}, SIZE)
    random = np.random.default_rng(0)
    read = 0
    for _ in range(2000):
        index = int(random.integers(len(text)))
        damaged = {**good, "counts": text[:index] + chr(int(random.integers(48, 112))) + text[index + 1 :]}
        try:
            parts = parts_of(damaged, SIZE)
        except ValueError:
            continue
        read += 1
        mask = Segmentations([parts]).read(0, slice(0, 1), SIZE)
        assert compressed(mask[0].numpy())["size"] == list(SIZE)
        assert mask.max() <= 1
    assert 0 < read < 1000


def test_a_size_that_is_only_known_from_the_file_is_checked_when_it_is_drawn() -> None:
    kept = Segmentations([parts_of(compressed(random_mask(0, 0.5)))])
    with pytest.raises(ValueError, match=r"40 x 30 pixels \(width x height\), the image has 40 x 31"):
        kept.read(0, slice(0, 1), (31, 40))


@pytest.mark.parametrize("smooth", [False, True])
def test_outlines_give_the_mask_again_without_its_holes(smooth: bool) -> None:
    rng = np.random.default_rng(3)
    for _ in range(60):
        size = tuple(rng.integers(1, 30, 2).tolist())
        noise = rng.random(size)
        mask = ndimage.gaussian_filter(noise, 2) > 0.5 if smooth else noise < rng.random()
        polygons = outlines(mask)
        filled = ndimage.binary_fill_holes(mask)
        assert sum(map(polygon_area, polygons)) == filled.sum()
        for each in (polygons, [joined(polygons)]) if polygons else ():
            read = Segmentations([parts_of(each)]).read(0, slice(0, 1), size)
            assert (read[0].numpy() == filled).all()
    assert outlines(np.zeros((4, 3), dtype=bool)) == []
