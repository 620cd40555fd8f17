"""Fixtures shared by several test packages."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from detr_bf.data.masks import encoded_ids
from detr_bf.ops import library
from tests.kernels import needs_kernels


@pytest.fixture(autouse=True)
def _log_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the log reach ``caplog`` also after a command that has set it up in this process."""
    monkeypatch.setattr(logging.getLogger("detr_bf"), "propagate", True)


@pytest.fixture(autouse=True)
def _no_published_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test fetch published weights, from which fine-tuning starts by default: the address is none."""
    monkeypatch.setenv("DETR_BF_MIRROR", "no-address")


def _painted(width: int, height: int, image: int, boxes: Sequence[Sequence[int]]) -> Image.Image:
    """Draw an RGB image: a dark pattern that depends on the image, each box (x, y, w, h) in one colour.

    The patterns are so different that no two images are near-duplicates.
    """
    cells = np.random.default_rng(image).integers(0, 100, (-(-height // 3), -(-width // 3), 3), dtype=np.uint8)
    picture = Image.fromarray(cells).resize((width, height), Image.Resampling.NEAREST)
    colours = ((255, 120, 0), (0, 255, 120), (120, 0, 255), (255, 255, 0))
    for colour, (x, y, w, h) in zip(colours, boxes, strict=False):
        picture.paste(colour, (x, y, x + w, y + h))
    return picture


@pytest.fixture
def coco_folder(tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """Factory of tiny valid COCO data sets on disk.

    ``coco_folder(num_images=4, category_ids=(3, 7, 90), objects=2, size=(64, 48), name="train", first_image_id=1)``
    gives ``.images`` (folder), ``.annotations`` (JSON path) and ``.content`` (the JSON's object; after changing it,
    ``.save()`` writes it again). Files are ``{image_id:04d}.png`` of ``size`` (width, height). Every image holds
    ``objects`` (0 to 4) non-overlapping solid rectangles; categories alternate, so that all occur if
    ``num_images * objects >= len(category_ids)``. Two folders with different image ids share no content.
    """

    def make(
        num_images: int = 4,
        category_ids: Sequence[int] = (3, 7, 90),
        objects: int = 2,
        size: tuple[int, int] = (64, 48),
        name: str = "train",
        first_image_id: int = 1,
    ) -> SimpleNamespace:
        width, height = size
        folder = tmp_path / name
        (folder / "images").mkdir(parents=True)
        content: dict[str, Any] = {
            "images": [],
            "annotations": [],
            "categories": [{"id": i, "name": f"class{i}"} for i in category_ids],
        }
        for image_id in range(first_image_id, first_image_id + num_images):
            boxes = _boxes(width, height, image_id, objects)
            file_name = f"{image_id:04d}.png"
            _painted(width, height, image_id, boxes).save(folder / "images" / file_name)
            content["images"].append({"id": image_id, "file_name": file_name, "width": width, "height": height})
            for box in boxes:
                number = len(content["annotations"])
                content["annotations"].append(
                    {
                        "id": number + 1,
                        "image_id": image_id,
                        "category_id": category_ids[number % len(category_ids)],
                        "bbox": list(box),
                        "area": box[2] * box[3],
                        "iscrowd": 0,
                    }
                )
        annotations = folder / "annotations.json"

        def save() -> None:
            annotations.write_text(json.dumps(content))

        save()
        return SimpleNamespace(images=folder / "images", annotations=annotations, content=content, save=save)

    return make


def _boxes(width: int, height: int, image_id: int, objects: int) -> list[tuple[int, int, int, int]]:
    """Return one box (x, y, w, h) in each of the first ``objects`` quarters of the image; sizes vary by image."""
    half_width, half_height = width // 2, height // 2
    shift = image_id % 4
    return [
        (column * half_width + 1 + shift, row * half_height + 2, half_width - 8, half_height - 6 - shift)
        for row, column in ((0, 0), (1, 1), (0, 1), (1, 0))[:objects]
    ]


@pytest.fixture
def panoptic_folder(tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """Factory of tiny valid COCO panoptic data sets on disk.

    ``panoptic_folder(num_images=4, size=(64, 48), name="train", first_image_id=1)`` gives ``.images`` and ``.panoptic``
    (folders), ``.annotations`` (JSON path) and ``.content`` (the JSON's object; after changing it, ``.save()`` writes
    it again). Images are ``{image_id:04d}.png`` of ``size`` (width, height; at least 16 each), the maps
    ``{image_id:04d}_segments.png``. Every image is cut into the segments, in this order in its ``segments_info``:

    - categories 3 and 7, things: a random rectangle in the left and in the right upper quarter;
    - category 3 again, a crowd: a random rectangle in the left lower quarter;
    - categories 100 and 120, stuff: the rest, left and right of a slanted line;

    and void, id 0: a random rectangle in the right lower quarter. Areas and boxes are exact, ids use all three bytes,
    every category has its colour and every image its brightness. Two folders with different image ids share no content.
    """

    def make(
        num_images: int = 4, size: tuple[int, int] = (64, 48), name: str = "train", first_image_id: int = 1
    ) -> SimpleNamespace:
        folder = tmp_path / name
        (folder / "images").mkdir(parents=True)
        (folder / "panoptic").mkdir()
        content: dict[str, Any] = {
            "images": [],
            "annotations": [],
            "categories": [
                {"id": i, "name": f"{'thing' if i < 100 else 'stuff'}{i}", "isthing": int(i < 100)}
                for i in (3, 7, 100, 120)
            ],
        }
        for image_id in range(first_image_id, first_image_id + num_images):
            file_name = f"{image_id:04d}.png"
            ids, segments = _segments(*size, image_id)
            _coloured(ids, segments, image_id).save(folder / "images" / file_name)
            map_name = f"{image_id:04d}_segments.png"
            (folder / "panoptic" / map_name).write_bytes(encoded_ids(torch.from_numpy(ids)))
            content["images"].append({"id": image_id, "file_name": file_name, "width": size[0], "height": size[1]})
            content["annotations"].append({"image_id": image_id, "file_name": map_name, "segments_info": segments})
        annotations = folder / "panoptic.json"

        def save() -> None:
            annotations.write_text(json.dumps(content))

        save()
        return SimpleNamespace(
            images=folder / "images", annotations=annotations, panoptic=folder / "panoptic", content=content, save=save
        )

    return make


def _segments(width: int, height: int, image_id: int) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Generate segment ids (height, width) int32 and their ``segments_info`` from the image id."""
    random = np.random.default_rng(image_id)
    columns, rows = np.meshgrid(np.arange(width), np.arange(height))
    order = np.where(columns + rows // 2 < random.integers(width // 2, width), 4, 5)  # index of the segment, 0: void
    for number, (right, lower) in ((1, (0, 0)), (2, (1, 0)), (3, (0, 1)), (0, (1, 1))):
        x, y = (int(random.integers(1, side // 8)) for side in (width, height))
        w, h = (int(random.integers(side // 8, side // 4 + 1)) for side in (width, height))
        x, y = x + right * width // 2, y + lower * height // 2
        order[y : y + h, x : x + w] = number
    ids = np.where(order > 0, order * 0x010101 + image_id % 1000, 0).astype(np.int32)
    infos = []
    for number, category_id in enumerate((3, 7, 3, 100, 120), start=1):
        ys, xs = np.nonzero(order == number)
        box = [int(v) for v in (xs.min(), ys.min(), xs.max() - xs.min() + 1, ys.max() - ys.min() + 1)]
        infos.append(
            {
                "id": int(ids[ys[0], xs[0]]),
                "category_id": category_id,
                "area": len(xs),
                "bbox": box,
                "iscrowd": int(number == 3),
            }
        )
    return ids, infos


def _coloured(ids: np.ndarray, segments: Sequence[dict[str, Any]], image_id: int) -> Image.Image:
    """Draw an RGB image with one colour per category; void is nearly black and encodes the image id."""
    colours = {3: (250, 120, 20), 7: (20, 250, 120), 100: (60, 60, 200), 120: (150, 150, 150)}
    pixels = np.full((*ids.shape, 3), (0, 0, image_id % 100), dtype=np.uint8)
    for segment in segments:
        pixels[ids == segment["id"]] = colours[segment["category_id"]]
    return Image.fromarray(pixels - np.uint8(image_id // 100 % 20) * (pixels > 19).astype(np.uint8))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden",
        type=Path,
        action="append",
        metavar="DIR",
        help="folder of recorded reference outputs, of either set or of both; may be repeated",
    )


@pytest.fixture
def float64() -> Iterator[None]:
    """Use float64 and a fixed seed, so that tolerances do not hide errors."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=[pytest.param("compiled", marks=needs_kernels), "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the kernels and with the PyTorch reference."""
    if request.param == "reference":
        monkeypatch.setitem(library.PROBLEMS, "cpu", "the test uses the reference")
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases ``full`` that ``default_tier`` of their function does not name.

    A name is the id of a case, or one of the parts of the id, which "-" separates. When files or folders are collected
    as a whole, a name without a case is an error.
    """
    unused: dict[str, set[str]] = {}
    for item in items:
        if marker := item.get_closest_marker("default_tier"):
            case = item.name.partition("[")[2].removesuffix("]")
            named = {case, *case.split("-")} & set(marker.args)
            if not named:
                item.add_marker("full")
            unused.setdefault(item.nodeid.partition("[")[0], set(marker.args)).difference_update(named)
    if any(unused.values()) and not any("::" in argument for argument in config.args):
        wrong = "; ".join(f"{function}: {', '.join(sorted(names))}" for function, names in unused.items() if names)
        raise pytest.UsageError(f"default_tier names cases that do not exist: {wrong}")


# Of processor time, with child processes, of one test of `make test` and its fixtures, except those of several tests.
# Tests of 20 s or more belong to another tier; the same test needs up to 1.6 times as long on a slower machine, where
# `make test` must pass too.
MOST_SECONDS = 32.0
_STARTED = pytest.StashKey[float]()


def _processor_seconds() -> float:
    return sum(os.times()[:4])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_STARTED] = _processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Any:
    before = _processor_seconds()
    result = yield
    if fixturedef.scope != "function" and (item := getattr(request, "_pyfuncitem", None)) is not None:
        item.stash[_STARTED] = item.stash.get(_STARTED, before) + _processor_seconds() - before
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Fail a test of the default tier that takes too long."""
    report = yield
    needed = _processor_seconds() - item.stash.get(_STARTED, math.inf)
    tiers = {"slow", "full"} & {mark.name for mark in item.iter_markers()}
    if call.when == "call" and report.passed and needed > MOST_SECONDS and not tiers:
        report.outcome = "failed"
        report.longrepr = (
            f"{needed:.0f} s of processor time; at most {MOST_SECONDS:.0f} s, or mark the test full or slow"
        )
    return report
