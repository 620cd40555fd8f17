from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from detr_bf.data.samples.debian import unpacked
from detr_bf.data.samples.stamps import (
    CLASSES,
    EXCLUDED,
    PHOTO_FOLDER,
    STAMP_FOLDER,
    STAMPS,
    STUFF,
    build_stamps,
    find_stamps,
    load_photos,
    load_stamps,
    split_stamps,
    trim_black_bars,
)
from detr_bf.errors import InputError
from detr_bf.files import cache_folder


def save_stamp(path: Path, rng: np.random.Generator) -> None:
    pixels = np.zeros((12, 16, 4), dtype=np.uint8)
    pixels[2:10, 2:14] = (*rng.integers(0, 256, 3), 255)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three small stamps for every entry of the class table, and all photographs."""
    root = tmp_path_factory.mktemp("package")
    rng = np.random.default_rng(0)
    for places in CLASSES.values():
        for place in places:
            path = root / STAMP_FOLDER / place
            for file in [path] if path.suffix else [path / f"{number}.png" for number in range(3)]:
                save_stamp(file, rng)
    (root / PHOTO_FOLDER).mkdir(parents=True)
    for names in STUFF.values():
        for name in names:
            photo = Image.fromarray(rng.integers(40, 256, (60, 90, 3), dtype=np.uint8))
            photo.save(root / PHOTO_FOLDER / name)
    return root


def test_the_table_has_twelve_classes_and_six_stuff_classes() -> None:
    assert len(CLASSES) == 12
    assert len(STUFF) == 6
    places = [place for places in CLASSES.values() for place in places]
    assert len(places) == len(set(places))
    assert not EXCLUDED & set(places)


def test_a_file_named_by_one_class_is_in_no_other(source: Path) -> None:
    found = find_stamps(source / STAMP_FOLDER)
    otter = source / STAMP_FOLDER / "animals/mammals/aquatic/otter.png"
    assert otter in found["mammal"]
    assert otter not in found["sea animal"]
    files = [file for files in found.values() for file in files]
    assert len(files) == len(set(files))


def test_excluded_files_mirrors_and_cartoons_are_left_out(tmp_path: Path, source: Path) -> None:
    before = find_stamps(source / STAMP_FOLDER)["vehicle"]
    rng = np.random.default_rng(0)
    extras = [
        source / STAMP_FOLDER / place
        for place in ("vehicles/7spoke256.png", "vehicles/auto/x_mirror.png", "vehicles/flight/cartoon/y.png")
    ]
    for extra in extras:
        save_stamp(extra, rng)
    after = find_stamps(source / STAMP_FOLDER)["vehicle"]
    for extra in extras:
        extra.unlink()
    assert after == before


def test_stamps_are_disjoint_and_stratified(source: Path) -> None:
    found = find_stamps(source / STAMP_FOLDER)
    splits = split_stamps(found)
    for name, files in found.items():
        train, val = splits["train"][name], splits["val"][name]
        assert train
        assert val
        assert not set(train) & set(val)
        assert set(train) | set(val) == set(files)
        assert abs(len(val) / len(files) - 0.25) <= 0.5 / len(files) + 0.1


def test_build_is_valid_coco_and_deterministic(tmp_path: Path, source: Path) -> None:
    folder = build_stamps(tmp_path / "a", num_train=30, num_val=4, image_size=64, source=source)
    again = build_stamps(tmp_path / "b", num_train=30, num_val=4, image_size=64, source=source)
    for path in folder.rglob("*.*"):
        assert path.read_bytes() == (again / path.relative_to(folder)).read_bytes()
    coco = COCO(str(folder / "train.json"))
    assert [(c["id"], c["name"]) for c in coco.dataset["categories"]] == list(enumerate(CLASSES, start=1))
    for found in coco.anns.values():
        mask = coco.annToMask(found)
        rows, columns = np.nonzero(mask)
        left, top = columns.min(), rows.min()
        assert found["bbox"] == [left, top, columns.max() + 1 - left, rows.max() + 1 - top]
        assert found["area"] == mask.sum()


def test_category_ids_follow_the_table(source: Path) -> None:
    found = find_stamps(source / STAMP_FOLDER)
    stamps = load_stamps(found)
    counts = np.bincount([stamp.category_id for stamp in stamps], minlength=13)
    assert counts[1:].tolist() == [len(found[name]) for name in CLASSES]
    assert all(stamp.cut_out.mode == "RGBA" for stamp in stamps)


def test_a_folder_without_the_stamps_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="0 stamps of class 'bird'"):
        build_stamps(tmp_path / "out", source=tmp_path)
    with pytest.raises(InputError, match=r"lacks burnt_bark\.jpg"):
        load_photos(tmp_path)
    assert not (tmp_path / "out").exists()


def test_black_bars_are_trimmed() -> None:
    pixels = np.full((40, 50, 3), 3, dtype=np.uint8)
    pixels[8:30] = 120
    assert trim_black_bars(Image.fromarray(pixels)).size == (50, 22)


@pytest.mark.slow
def test_real_packages(tmp_path: Path) -> None:
    folder = build_stamps(tmp_path / "stamps", num_train=200, num_val=60)
    found = find_stamps(unpacked(STAMPS, cache_folder("stamps")) / STAMP_FOLDER)
    assert {name: len(files) for name, files in found.items()} == {
        "bird": 35,
        "mammal": 61,
        "sea animal": 17,
        "insect": 6,
        "fruit": 26,
        "vegetable": 18,
        "flower": 25,
        "coin": 26,
        "road sign": 16,
        "vehicle": 18,
        "tool": 15,
        "instrument": 11,
    }
    for stamp in load_stamps(found):
        alpha = np.asarray(stamp.cut_out.getchannel("A"))
        assert alpha.min() < 128 <= alpha.max()
    annotations = json.loads((folder / "train.json").read_text())["annotations"]
    assert {found["category_id"] for found in annotations} == set(range(1, 13))
