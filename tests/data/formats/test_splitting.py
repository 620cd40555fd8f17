from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from detr_bf.assembly import build_train_data, build_val_data, data_source
from detr_bf.common.errors import InputError
from detr_bf.config import load_config
from detr_bf.data.checks import files
from detr_bf.data.coco import CocoAnnotations, Source, read_annotations
from detr_bf.data.formats import readable, split_images


def images_with(labels: dict[str, set[int]]) -> CocoAnnotations:
    images = [{"id": number, "file_name": name} for number, name in enumerate(labels)]
    annotations = [
        {"image_id": number, "category_id": label}
        for number, classes in enumerate(labels.values())
        for label in sorted(classes)
    ]
    return CocoAnnotations(Path("made"), images, annotations, [])


def random_labels(count: int, seed: int = 0) -> dict[str, set[int]]:
    """Return images with classes of frequencies from 2 % to 70 %, some without objects."""
    generator = np.random.default_rng(seed)
    frequencies = np.array([0.7, 0.4, 0.1, 0.05, 0.02])
    drawn = generator.random((count, len(frequencies))) < frequencies
    return {f"image_{number}": set(np.flatnonzero(row).tolist()) for number, row in enumerate(drawn)}


@pytest.mark.parametrize("folds", [2, 5, 10])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_fold_has_its_share_of_each_class(folds: int, seed: int) -> None:
    labels = random_labels(400, seed)
    parts = split_images(images_with(labels), [1 / folds] * folds, seed)
    assert sorted(name for part in parts for name in part) == sorted(labels)  # each in exactly one
    for label in range(5):
        counts = [sum(label in labels[name] for name in part) for part in parts]
        assert max(counts) - min(counts) <= 2, (label, counts)
    empty = [sum(not labels[name] for name in part) for part in parts]
    assert max(empty) - min(empty) <= 2
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 0.05 * len(labels)


def test_a_share_of_validation_images() -> None:
    labels = random_labels(500)
    train, val = split_images(images_with(labels), [0.8, 0.2], 0)
    assert len(val) == pytest.approx(100, abs=5)
    for label in range(5):
        total = sum(label in classes for classes in labels.values())
        assert sum(label in labels[name] for name in val) == pytest.approx(0.2 * total, abs=1.5)
    assert not train & val


def test_the_order_of_images_does_not_matter_and_the_seed_does() -> None:
    labels = random_labels(100)
    one = split_images(images_with(labels), [0.25] * 4, 7)
    shuffled = dict(sorted(labels.items(), key=lambda item: hash(item[0])))
    assert split_images(images_with(shuffled), [0.25] * 4, 7) == one
    assert split_images(images_with(labels), [0.25] * 4, 8) != one


def test_the_split_is_the_same_on_every_machine() -> None:
    """A change of these names would change the folds of published numbers."""
    labels = {f"{number}.jpg": {number % 3} for number in range(12)}
    parts = split_images(images_with(labels), [1 / 3] * 3, 0)
    assert [sorted(int(name[:-4]) for name in part) for part in parts] == [[3, 4, 6, 11], [5, 7, 8, 9], [0, 1, 2, 10]]


def test_groups_stay_together() -> None:
    labels = random_labels(200)
    names = sorted(labels)
    groups = [names[start : start + 4] for start in range(0, 80, 4)]
    parts = split_images(images_with(labels), [0.2] * 5, 0, groups)
    assert sorted(name for part in parts for name in part) == names
    for group in groups:
        assert [len(part & set(group)) for part in parts].count(4) == 1
    counts = [sum(0 in labels[name] for name in part) for part in parts]
    assert max(counts) - min(counts) <= 5


def test_too_few_images_are_refused() -> None:
    labels = random_labels(6)
    with pytest.raises(InputError, match="6 images in 6 groups of copies cannot be divided into 7 parts"):
        split_images(images_with(labels), [1 / 7] * 7, 0)
    with pytest.raises(InputError, match="6 images in 1 groups"):
        split_images(images_with(labels), [0.5, 0.5], 0, [sorted(labels)])


def test_folds_of_a_coco_file(coco_folder: Any) -> None:
    data: SimpleNamespace = coco_folder(num_images=10)
    settings = [f"data.train.images={data.images}", f"data.train.annotations={data.annotations}", "data.folds=5"]
    seen: Counter[int] = Counter()
    for fold in range(5):
        config = load_config(None, [*settings, f"data.fold={fold}", f"seed={fold}"])
        train = build_train_data(config)
        val = build_val_data(config, train.class_map)
        assert (len(train), len(val)) == (8, 2)
        assert not {*train.image_ids} & {*val.image_ids}
        seen.update(val.image_ids)
        annotations = read_annotations(data_source(config, "val").annotations)
        assert {a["image_id"] for a in annotations.annotations} == {*val.image_ids}
    assert seen == Counter(range(1, 11))


@pytest.mark.parametrize("fault", ["disk", "limit", "content"])
def test_only_images_whose_content_cannot_be_decoded_are_left_out(
    fault: str, coco_folder: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A fault of the disk may pass, and each rank would choose other images."""
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "cache"))
    data: SimpleNamespace = coco_folder(num_images=10)
    broken, whole = data.images / "0003.png", files.image_bytes

    def image_bytes(path: Path, max_pixels: int) -> bytes:
        if path == broken and fault == "disk":
            raise OSError(5, "Input/output error")
        if path == broken and fault == "limit":
            raise files.TooLargeError("too large")
        return whole(path, max_pixels)

    if fault == "content":
        broken.write_bytes(broken.read_bytes()[:60])
    monkeypatch.setattr(files, "image_bytes", image_bytes)
    source = Source(data.images, data.annotations)
    found = readable(source, 0.1, 1, 10**6)
    assert [each.split(":")[0] for each in found.skipped] == (["0003.png"] if fault == "content" else [])
    assert (found is source) == (fault != "content")
