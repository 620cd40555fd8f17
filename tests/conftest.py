"""Fixtures that several folders use."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from detr_bf.ops import library
from tests.kernels import needs_kernels

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"


def _painted(width: int, height: int, image: int, boxes: Sequence[Sequence[int]]) -> Image.Image:
    """An RGB image: a dark background of its own, each box (x, y, w, h) one solid colour."""
    picture = Image.new("RGB", (width, height), (20, image % 100, image // 100 % 100))
    colours = ((255, 120, 0), (0, 255, 120), (120, 0, 255), (255, 255, 0))
    for colour, (x, y, w, h) in zip(colours, boxes, strict=False):
        picture.paste(colour, (x, y, x + w, y + h))
    return picture


@pytest.fixture
def coco_folder(tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """A factory of tiny valid COCO data sets on disk.

    ``coco_folder(num_images=4, category_ids=(3, 7, 90), objects=2, size=(64, 48), name="train", first_image_id=1)``
    gives ``.images`` (folder), ``.annotations`` (JSON path) and ``.content`` (the JSON's object; after changing it,
    ``.save()`` writes it again). Files are ``{image_id:04d}.png`` of ``size`` (width, height). Every image holds
    ``objects`` (0 to 4) non-overlapping solid rectangles; categories go round, so that all occur as soon as
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
    """One box (x, y, w, h) in each of the first ``objects`` quarters of the image, varying with the image."""
    half_width, half_height = width // 2, height // 2
    shift = image_id % 4
    return [
        (column * half_width + 1 + shift, row * half_height + 2, half_width - 8, half_height - 6 - shift)
        for row, column in ((0, 0), (1, 1), (0, 1), (1, 0))[:objects]
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", type=Path, default=GOLDEN, help="folder of recorded reference outputs")


@pytest.fixture(params=[pytest.param("compiled", marks=needs_kernels), "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels, then the plain PyTorch reference, in the same test."""
    if request.param == "reference":
        monkeypatch.setitem(library.PROBLEMS, "cpu", "the test wants the reference")
    return request.param
