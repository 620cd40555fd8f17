from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from pycocotools.coco import COCO

from detr_bf.common.errors import InputError
from detr_bf.data.samples import build_pairs, pairs
from detr_bf.data.samples.pairs import MARK_NAMES, PHOTOS, faint, random_mark
from tests.data.samples.conftest import contents


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pairs(tmp_path_factory.mktemp("sets") / "pairs", num_train=20, num_val=4, image_size=96)


def pixels(file: Path) -> NDArray[np.float64]:
    with Image.open(file) as picture:
        return np.asarray(picture.convert("RGB")).astype(float)


def test_two_builds_are_equal_byte_for_byte(built: Path, tmp_path: Path) -> None:
    again = build_pairs(tmp_path / "again", num_train=20, num_val=4, image_size=96)
    other_seed = build_pairs(tmp_path / "other", num_train=1, num_val=1, image_size=96, seed=1)
    assert contents(built) == contents(again)
    assert contents(built)["train/train_000000.jpg"] != contents(other_seed)["train/train_000000.jpg"]


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_image_differs_from_its_reference_at_its_marks_alone(built: Path, split: str) -> None:
    coco = COCO(str(built / f"{split}.json"))
    assert {category["name"] for category in coco.dataset["categories"]} == set(MARK_NAMES)
    for image in coco.imgs.values():
        assert (image["file_name"], image["template"]) == tuple(
            f"{folder}/{split}_{image['id'] - 1:06d}.jpg" for folder in (split, f"{split}_templates")
        )
        found = pixels(built / image["file_name"]) - pixels(built / image["template"])
        differs = np.abs(found.mean(axis=2))
        marked = np.zeros(differs.shape, dtype=bool)
        near = np.zeros(differs.shape, dtype=bool)
        for annotation in coco.imgToAnns[image["id"]]:
            mask = coco.annToMask(annotation).astype(bool)
            marked |= mask
            x, y, width, height = annotation["bbox"]
            near[max(0, y - 8) : y + height + 8, max(0, x - 8) : x + width + 8] = True  # blocks of JPEG
            assert 12 < np.median(differs[mask]) < 40, "32 levels"
        assert len(coco.imgToAnns[image["id"]]) >= 1
        assert differs[~near].max(initial=0) == 0
        assert 2 * np.median(differs[near & ~marked]) < np.median(differs[marked])


def test_the_splits_have_different_photographs() -> None:
    assert not set(PHOTOS["train"]) & set(PHOTOS["val"])


def test_marks_have_the_given_contrast_and_stay_within_the_levels() -> None:
    for level in (0, 10, 128, 250, 255):
        under = np.full((4, 5, 3), level, dtype=np.float32)
        changes = {
            float((faint(under, np.random.default_rng(seed), contrast=20) - under)[0, 0, 0]) for seed in range(9)
        }
        assert changes == ({-20.0, 20.0} if level == 128 else {20.0} if level < 20 else {-20.0})


def test_every_class_is_drawn_at_the_given_size() -> None:
    marks = [random_mark(40, np.random.default_rng(seed), contrast=24) for seed in range(100)]
    assert {mark.category_id for mark in marks} == set(range(1, len(MARK_NAMES) + 1))
    assert {max(mark.alpha.shape) for mark in marks} == {40}
    solid = {mark.category_id: mark.solid for mark in marks if mark.category_id <= 2}
    middle = {number: mask[mask.shape[0] // 2, mask.shape[1] // 2] for number, mask in solid.items()}
    assert middle == {1: True, 2: False}, "a spot is full, a ring is not"


def test_a_set_without_its_references_is_not_complete(tmp_path: Path) -> None:
    folder = build_pairs(tmp_path / "pairs", num_train=1, num_val=1, image_size=64)
    assert build_pairs(folder, num_train=1, num_val=1, image_size=64) == folder
    with pytest.raises(InputError, match="another recipe"):
        build_pairs(folder, num_train=1, num_val=1, image_size=64, contrast=16)
    assert json.loads((folder / "dataset.json").read_text())["contrast"] == 32
    (folder / "val_templates" / "val_000000.jpg").unlink()
    with pytest.raises(InputError, match="lost files"):
        build_pairs(folder, num_train=1, num_val=1, image_size=64)


@pytest.mark.parametrize("contrast", [0, -3, 129, 2**70])
def test_a_contrast_out_of_range(tmp_path: Path, contrast: int) -> None:
    with pytest.raises(
        InputError, match=f"contrast is {contrast} levels of 255; it must be at least 1 and at most 128"
    ):
        build_pairs(tmp_path / "pairs", contrast=contrast)


def test_a_missing_photograph_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pairs.PHOTOS, "val", ("marble.png",))
    with pytest.raises(InputError, match=r"lacks marble\.png.*pip install 'detr_bf\[demo\]'"):
        build_pairs(tmp_path / "pairs")
