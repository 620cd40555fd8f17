"""Checks of references: each test breaks one thing of two sets of textured pictures with marks and their references."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from detr_bf.common.errors import InputError
from detr_bf.data.checks import report as checks_report
from detr_bf.data.checks.alignment import LONGEST_SIDE, _grey, alignment
from detr_bf.data.checks.annotations import Report, examine
from detr_bf.data.coco import Source
from detr_bf.data.references import translated

Factory = Callable[..., SimpleNamespace]
SIZE = (80, 64)  # width, height


def texture(seed: int, width: int, height: int) -> torch.Tensor:
    """Return a random picture (3, H, W) uint8 of patches of 2 pixels."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randint(256, (3, -(-height // 2), -(-width // 2)), generator=generator, dtype=torch.uint8)
    return cells.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, :height, :width]


def save(pixels: torch.Tensor, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)


class Pairs:
    """A training and a validation set with the reference ``templates/NAME`` of each image."""

    def __init__(self, make: Factory, cache: Path) -> None:
        self.cache = cache
        self.sets = {"train": make(size=SIZE), "val": make(num_images=3, name="val", first_image_id=101, size=SIZE)}
        for data in self.sets.values():
            for image in data.content["images"]:
                plain = texture(image["id"], *SIZE)
                marked = plain.clone()
                for each in data.content["annotations"]:
                    if each["image_id"] == image["id"]:
                        x, y, width, height = each["bbox"]
                        marked[:, y : y + height, x : x + width] //= 2
                save(marked, data.images / image["file_name"])
                save(plain, data.images / "templates" / image["file_name"])
                image["template"] = f"templates/{image['file_name']}"

    def path(self, split: str, number: int = 0, *, template: bool = True) -> Path:
        image = self.sets[split].content["images"][number]
        return Path(self.sets[split].images, image["template" if template else "file_name"])

    def examine(self, folders: dict[str, Path | None] | None = None) -> Report:
        for data in self.sets.values():
            data.save()
        sources = [Source(data.images, data.annotations) for data in self.sets.values()]
        folders = {"train": None, "val": None} if folders is None else folders
        return examine(*sources, num_queries=10, cache_dir=self.cache, workers=2, references=folders)

    def findings(self) -> list[tuple[str, str, str, int]]:
        return [(each.severity, each.split, each.code, each.count) for each in self.examine().findings]


@pytest.fixture
def pairs(coco_folder: Factory, tmp_path: Path) -> Pairs:
    return Pairs(coco_folder, tmp_path / "cache")


def test_aligned_references_are_counted_and_compared(pairs: Pairs) -> None:
    report = pairs.examine()
    assert report.findings == ()
    assert report.statistics is not None
    found = report.statistics["splits"]["train"]["references"]
    assert (found["images"], found["compared"]) == (4, 4)
    assert 0 < found["differing"][1] < 0.3
    text = str(report)
    assert "images with a reference" in text
    assert "pixels unlike the reference, %, median (5 % to 95 %)" in text


def test_references_that_are_not_read_are_not_checked(pairs: Pairs) -> None:
    pairs.path("val").unlink()
    report = pairs.examine({"train": None})
    assert report.findings == ()
    assert report.statistics is not None
    assert "references" not in report.statistics["splits"]["val"]
    rows = [
        line for line in str(report).splitlines() if line.startswith(("images with a ref", "pixels unlike the ref"))
    ]
    assert [row.split("  ")[-1].strip() for row in rows] == ["not read", "not read"]
    pairs.path("train").unlink()
    assert pairs.examine({}).findings == ()


def test_a_missing_file(pairs: Pairs) -> None:
    pairs.path("train").unlink()
    assert pairs.findings() == [("error", "train", "reference-missing", 1)]
    assert pairs.examine().errors[0].example == f"image 1, 0001.png: {pairs.path('train')}"


def test_a_file_that_cannot_be_decoded(pairs: Pairs) -> None:
    pairs.path("val").write_bytes(pairs.path("val").read_bytes()[:60])
    assert pairs.findings() == [("error", "val", "reference-unreadable", 1)]


def test_another_size(pairs: Pairs) -> None:
    save(texture(1, 64, 64), pairs.path("train"))
    assert pairs.findings() == [("error", "train", "reference-size-differs", 1)]
    assert "has 64 x 64 pixels (width x height), the image 80 x 64" in pairs.examine().errors[0].example


def test_images_without_a_reference(pairs: Pairs) -> None:
    del pairs.sets["train"].content["images"][1]["template"]
    assert pairs.findings() == [("warning", "train", "reference-none", 1)]
    for image in pairs.sets["val"].content["images"]:
        image.pop("template")
    with pytest.raises(InputError, match="each image needs its own reference, and none is given"):
        pairs.findings()


@pytest.mark.parametrize("value", [7, "", [], "/etc/hosts", {"a": 1}, True])
def test_a_value_that_is_no_path_below_the_folder(pairs: Pairs, value: Any) -> None:
    pairs.sets["train"].content["images"][0]["template"] = value
    with pytest.raises(
        InputError, match=r"image 1: template is .*, expected the path of a file relative to the folder"
    ):
        pairs.findings()


@pytest.mark.parametrize("value", ["templates", "../annotations.json", "x" * 10_000, "a\0b", "nowhere/0001.png"])
def test_a_path_to_no_image_is_an_error(pairs: Pairs, value: str) -> None:
    pairs.sets["train"].content["images"][0]["template"] = value
    (finding,) = pairs.examine().findings
    assert (finding.severity, finding.count) == ("error", 1)
    assert finding.code in ("reference-missing", "reference-unreadable")
    assert len(finding.example) < 2100


def test_a_moved_reference(pairs: Pairs) -> None:
    for path, shift in ((pairs.path("train", 0), 1), (pairs.path("train", 1), 2), (pairs.path("train", 2), 6)):
        moved = translated(torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1), shift, -shift)
        save(moved, path)
    assert pairs.findings() == [("warning", "train", "reference-not-aligned", 2)]
    example = pairs.examine().warnings[0].example
    assert example.endswith("if the reference is moved by 2 pixels to the right and 2 pixels up")
    save(
        translated(torch.from_numpy(np.array(Image.open(pairs.path("val")))).permute(2, 0, 1), -3, 0), pairs.path("val")
    )
    assert pairs.examine().warnings[1].example.endswith("if the reference is moved by 3 pixels down")


def test_one_reference_of_another_image(pairs: Pairs) -> None:
    images = pairs.sets["train"].content["images"]
    images[2]["template"] = images[1]["template"]
    assert pairs.findings() == [("warning", "train", "reference-unlike", 1)]
    example = pairs.examine().warnings[0].example
    match = re.fullmatch(
        r"image 3, 0003\.png: (\S+) % of the pixels differ from (\S+), and its boxes cover (\S+) %; in .*", example
    )
    assert match
    assert float(match[1]) > 40
    assert match[2] == str(pairs.path("train", 1))
    assert float(match[3]) < 30


def test_all_references_are_those_of_other_images(pairs: Pairs) -> None:
    images = pairs.sets["val"].content["images"]
    names = [image["template"] for image in images]
    for image, name in zip(images, (*names[1:], names[0]), strict=True):
        image["template"] = name
    assert pairs.findings() == [("warning", "val", "reference-unlike", 3)]


def test_the_pairs_that_are_compared_are_spaced_evenly(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_report, "COMPARED", 3)
    statistics = pairs.examine().statistics
    assert statistics is not None
    assert [each["references"]["compared"] for each in statistics["splits"].values()] == [3, 3]


def test_an_image_as_its_own_reference(pairs: Pairs) -> None:
    image = pairs.sets["train"].content["images"][2]
    image["template"] = image["file_name"]
    assert pairs.findings() == [("warning", "train", "reference-is-image", 1)]
    number = image["id"]
    annotations = pairs.sets["train"].content["annotations"]
    annotations[:] = [each for each in annotations if each["image_id"] != number]
    codes = [code for _, _, code, _ in pairs.findings()]
    assert codes == ["image-without-objects"], "an image without objects is a good reference"


def test_another_image_with_objects_as_reference(pairs: Pairs) -> None:
    pairs.sets["train"].content["images"][2]["template"] = pairs.sets["train"].content["images"][0]["file_name"]
    unlike, found = pairs.findings()
    assert unlike == ("warning", "train", "reference-unlike", 1)
    assert found == ("warning", "train", "reference-has-objects", 1)
    assert pairs.examine().warnings[1].example.endswith("0001.png is image 1, 0001.png")


def test_a_copy_of_a_validation_image_as_reference_of_a_training_image(pairs: Pairs) -> None:
    pairs.path("train").write_bytes(pairs.path("val", template=False).read_bytes())
    unlike, found = pairs.findings()
    assert unlike == ("warning", "train", "reference-unlike", 1)
    assert found == ("warning", "train, val", "reference-in-val", 1)
    assert str(pairs.path("val", template=False)) in pairs.examine().warnings[1].example


def test_a_folder_of_references_by_name(pairs: Pairs, tmp_path: Path) -> None:
    for image in pairs.sets["train"].content["images"]:
        save(texture(image["id"], *SIZE), tmp_path / "plain" / image["file_name"])
        del image["template"]
    folders: dict[str, Path | None] = {"train": tmp_path / "plain"}
    assert pairs.examine(folders).findings == ()
    (tmp_path / "plain" / "0003.png").unlink()
    (finding,) = pairs.examine(folders).findings
    assert (finding.code, finding.example) == ("reference-none", "image 3, 0003.png")


@pytest.mark.parametrize("size", [(80, 64), (701, 1300)])
@pytest.mark.parametrize("shift", [(0, 0), (4, -8), (-12, 4)])
def test_the_shift_that_fits_is_found(size: tuple[int, int], shift: tuple[int, int]) -> None:
    image = texture(0, *size).repeat_interleave(4, 1).repeat_interleave(4, 2)[:, : size[1], : size[0]]
    lighter = (image // 2 + 60).to(torch.uint8)
    step = -(-max(size) // LONGEST_SIDE)
    found = alignment(lighter, translated((image // 2).to(torch.uint8), *shift))
    assert found.moved == (shift != (0, 0))
    assert found.shift == pytest.approx(tuple(-by for by in shift), abs=step - 1), "brightness does not matter"
    assert found.shifted <= max(found.differing / 3, 0.01)


def test_pictures_that_have_nothing_in_common_are_not_moved() -> None:
    found = alignment(texture(0, *SIZE), texture(1, *SIZE))
    assert found.differing > 0.4
    assert not found.moved
    assert alignment(torch.full((3, 8, 9), 7, dtype=torch.uint8), torch.full((3, 8, 9), 9, dtype=torch.uint8))[0] == 0


def test_a_large_image_is_reduced_without_a_copy_in_float32() -> None:
    pixels, step = texture(0, 1702, 1301), 3
    tracemalloc.start()
    found = _grey(pixels, step)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    expected = pixels[:, :1299, :1701].double().reshape(3, 433, 3, 567, 3).mean((0, 2, 4))
    np.testing.assert_allclose(found, (expected - expected.mean()).numpy(), atol=1e-3)
    assert peak < 2 * pixels.numel()


def test_statistics_are_json(pairs: Pairs) -> None:
    statistics = pairs.examine().statistics
    assert json.loads(json.dumps(statistics)) == statistics
