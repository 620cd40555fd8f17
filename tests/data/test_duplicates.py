from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from detr_bf.assembly import data_source
from detr_bf.config import load_config
from detr_bf.data import duplicates
from detr_bf.data.checks.annotations import examine
from detr_bf.data.checks.files import ImageRecord, check_files
from detr_bf.data.coco import Source, read_annotations
from detr_bf.data.duplicates import MAX_DISTANCE, near_groups, nearest, perceptual_hash

SHARED = Path(__file__).parents[3] / "shared" / "data"
Factory = Callable[..., SimpleNamespace]


def scene(seed: int, size: tuple[int, int] = (96, 72)) -> Image.Image:
    """Return a picture of shapes of all sizes, as a photograph has them; other seeds give other pictures."""
    generator = np.random.default_rng(seed)
    picture = Image.new("RGB", size)
    for cells in (4, 8, 16, 32):
        drawn = generator.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        picture = Image.blend(picture, Image.fromarray(drawn).resize(size, Image.Resampling.BICUBIC), 0.4)
    return picture


def distance(one: str, other: str) -> int:
    """Return the smallest distance over the eight symmetries; a flip changes the signs of odd frequencies."""
    first, second = (
        np.unpackbits(np.frombuffer(bytes.fromhex(each), np.uint8)).reshape(16, 16).astype(int) * 2 - 1
        for each in (one, other)
    )
    odd = (-1) ** np.arange(16)
    flips = [
        side * down[:, None] * across
        for side in (second, second.T)
        for down in (1 + 0 * odd, odd)
        for across in (1 + 0 * odd, odd)
    ]
    return min(int((first != flip).sum()) for flip in flips)


def compressed(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=30)
    return Image.open(file).convert("RGB")


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "compressed": compressed,
    "smaller": lambda image: image.resize((image.width * 2 // 3, image.height * 2 // 3)),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.15),
    "darker": lambda image: ImageEnhance.Brightness(image).enhance(0.75),
    "cropped": lambda image: image.crop((3, 2, image.width - 3, image.height - 2)),
    **{turn.name.lower(): lambda image, turn=turn: image.transpose(turn) for turn in Image.Transpose},
    "turned, smaller, darker": lambda image: ImageEnhance.Brightness(
        image.transpose(Image.Transpose.TRANSVERSE).resize((208, 208))
    ).enhance(0.85),
}


@pytest.mark.parametrize("change", CHANGES)
def test_copies_are_near_and_other_pictures_are_not(change: str) -> None:
    pictures = [scene(seed, (640, 480)) for seed in range(20)]
    hashes = [perceptual_hash(picture) for picture in pictures]
    copies = [perceptual_hash(CHANGES[change](picture)) for picture in pictures]
    assert nearest(hashes, copies) == [(number, number) for number in range(20)]
    assert nearest(hashes[:10], copies[10:]) == []


def test_pairs_and_groups_are_those_of_the_distances_in_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "_ROWS", 9)
    monkeypatch.setattr(duplicates, "_BLOCK", 4 * 40)
    generator = np.random.default_rng(0)
    bits = generator.random((40, 256)) < 0.5
    bits[:, 0] = False
    bits[20:] = bits[:20] ^ (generator.random((20, 256)) < 0.15)
    bits[:, 0] = False
    hashes = [np.packbits(row).tobytes().hex() for row in bits]
    best = [min((distance(one, other), j) for j, other in enumerate(hashes[20:])) for one in hashes[:20]]
    expected = [(i, j) for i, (bits_apart, j) in enumerate(best) if bits_apart <= MAX_DISTANCE]
    assert nearest(hashes[:20], hashes[20:]) == expected
    assert 5 < len(expected) < 20  # some on both sides of the threshold
    assert nearest([], hashes) == nearest(hashes, []) == []
    groups = near_groups({f"{number:02d}": record(each, str(number)) for number, each in enumerate(hashes)})
    assert groups == [[f"{i:02d}", f"{20 + j:02d}"] for i, j in expected]


def test_images_of_one_colour_are_near_to_none() -> None:
    black, grey = (perceptual_hash(Image.new("RGB", (64, 64), colour)) for colour in ("black", (90, 90, 92)))
    assert black == grey == ""
    assert near_groups({"a": record(black, "1"), "b": record(grey, "2")}) == []


def record(phash: str, sha256: str) -> ImageRecord:
    return ImageRecord(1, 1, sha256, phash=phash)


def test_groups_link_near_and_equal_files() -> None:
    first, last = "0" * 64, "7" + "f" * 63
    middle = "0" * 55 + "1" * 9
    records = {
        "a": record(first, "1"),
        "b": record(middle, "2"),
        "c": record("0" * 45 + "1" * 19, "3"),  # near to b and to a; a chain is one group
        "d": record(last, "4"),
        "e": record("", "5"),
        "f": record("", "5"),
        "g": record("", "6"),
    }
    assert sorted(near_groups(records)) == [["a", "b", "c"], ["e", "f"]]
    assert near_groups({}) == []


def test_long_chains_across_blocks_are_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "_ROWS", 5)
    monkeypatch.setattr(duplicates, "_BLOCK", 3 * 8)
    bits = np.zeros((8, 256), dtype=bool)
    for number in range(8):
        bits[number, 1 : 1 + 30 * number] = True  # 30 bits from the next
    order = [5, 0, 3, 7, 1, 6, 2, 4]
    records = {str(place): record(np.packbits(bits[one]).tobytes().hex(), str(one)) for place, one in enumerate(order)}
    assert near_groups(records) == [[str(number) for number in range(8)]]


def test_exports_of_one_photograph_are_one_group() -> None:
    names = ("train/a_jpg.rf.0f3.jpg", "valid/a_jpg.rf.Xy9.jpg", "train/b_jpg.rf.0f3.jpg", "c.jpg", "c.png", "c.rf.jpg")
    records = {name: record("", str(number)) for number, name in enumerate(names)}
    assert near_groups(records) == [list(names[:2])]
    records["d.jpg"] = record("", "2")  # the content of b
    assert sorted(near_groups(records)) == [["d.jpg", names[2]], list(names[:2])]


def rewrite(data: SimpleNamespace, pictures: list[Image.Image]) -> None:
    for entry, picture in zip(data.content["images"], pictures, strict=True):
        picture.save(data.images / entry["file_name"])


def test_the_checks_report_pairs_across_the_splits(coco_folder: Factory, tmp_path: Path) -> None:
    train, val = coco_folder(), coco_folder(num_images=3, name="val", first_image_id=101)
    size = (64, 48)
    rewrite(train, [scene(seed, size) for seed in range(4)])
    rewrite(val, [scene(10, size), compressed(scene(2, size)), scene(3, size)])
    sources = [Source(data.images, data.annotations) for data in (train, val)]
    report = examine(*sources, num_queries=10, cache_dir=tmp_path / "cache")
    found = {finding.code: finding for finding in report.warnings}
    assert {code: finding.count for code, finding in found.items()} == {"train-val-overlap": 1, "near-duplicates": 1}
    assert found["near-duplicates"].example == f"{val.images}/0102.png is like {train.images}/0003.png"
    rewrite(train, [scene(seed, size) for seed in (20, 21, 22, 23)])
    rewrite(val, [compressed(scene(seed, size)) for seed in (20, 21, 22)])
    [finding] = examine(*sources, num_queries=10, cache_dir=tmp_path / "cache").warnings
    assert (finding.count, finding.example.count(" is like ")) == (3, 3)


def test_the_checks_report_copies_by_name(coco_folder: Factory, tmp_path: Path) -> None:
    """The augmented copies of an export look too different for a hash."""
    names = (["a.rf.1a.png", "b.rf.2b.png", "c.rf.3c.png"], ["d.rf.4d.png", "b.rf.5e.png"])
    sources = []
    for split, own in zip(("train", "val"), names, strict=True):
        data = coco_folder(num_images=len(own), name=split, first_image_id=100 * len(sources) + 1)
        for number, (entry, name) in enumerate(zip(data.content["images"], own, strict=True)):
            entry["file_name"] = name
            scene(10 * len(sources) + number, (64, 48)).save(data.images / name)
        data.annotations.write_text(json.dumps(data.content))
        sources.append(Source(data.images, data.annotations))
    [finding] = examine(*sources, num_queries=10, cache_dir=tmp_path / "cache").warnings
    assert (finding.code, finding.count) == ("near-duplicates", 1)
    assert finding.example == (
        f"{sources[1].images}/b.rf.5e.png and {sources[0].images}/b.rf.2b.png are copies by their names"
    )


@pytest.mark.parametrize("named", [False, True])
def test_folds_keep_near_duplicates_together(
    coco_folder: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Copies are mirrored, or other pictures with the names of an export of Roboflow."""
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    data = coco_folder(num_images=12)
    if named:
        for number, entry in enumerate(data.content["images"]):
            entry["file_name"] = f"{number % 4}_png.rf.{number}abc.png"
        data.annotations.write_text(json.dumps(data.content))
    scenes = [scene(number if named else number % 4, (64, 48)) for number in range(12)]
    mirrored = [picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for picture in scenes]
    rewrite(data, [mirrored[number] if number > 5 else picture for number, picture in enumerate(scenes)])
    settings = [f"data.train.images={data.images}", f"data.train.annotations={data.annotations}", "data.folds=4"]
    seen = []
    for fold in range(4):
        val = data_source(load_config(None, [*settings, f"data.fold={fold}"]), "val")
        seen.append({(image["id"] - 1) % 4 for image in read_annotations(val.annotations).images})
    assert sorted(map(len, seen)) == [1, 1, 1, 1]
    assert set().union(*seen) == {0, 1, 2, 3}


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the data sets of ../shared/data beside the checkout")
@pytest.mark.parametrize(
    ("folder", "pairs"),
    [
        ("bccd/JPEGImages", "37-38"),
        ("cards/images/train", "1-54 2464-2465 2466-2467 2468-2469 2471-2472 2473-2474"),
    ],
)
def test_near_duplicates_of_real_photographs(folder: str, pairs: str, tmp_path: Path) -> None:
    """The pairs were confirmed by eye, and a pretrained network finds the same ones."""
    root = SHARED / folder
    names = [path.name for path in root.iterdir() if path.suffix.lower() == ".jpg"]
    groups = near_groups(check_files(ImageRecord, root, names, tmp_path, workers=1))
    found = {"-".join(str(int("".join(filter(str.isdigit, name)))) for name in group) for group in groups}
    assert found == set(pairs.split())
