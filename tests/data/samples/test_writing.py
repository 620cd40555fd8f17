from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from detr_bf.common.errors import InputError
from detr_bf.common.text import printable
from detr_bf.data.samples import build_digits, build_scenes
from detr_bf.data.samples.composite import SampleSplit, Scene
from detr_bf.data.samples.writing import MANIFEST, Recipe, already_built, annotation, panoptic_segments, write_dataset

RECIPE = Recipe("toy", 1, num_train=3, num_val=2, image_size=32, seed=0, object_size=(0.2, 0.5))
LICENCE = {"name": "none", "url": ""}


def draw(split: SampleSplit, rng: np.random.Generator) -> Scene:
    owner = np.full((32, 32), -1, dtype=np.int64)
    owner[4:9, rng.integers(20) :] = 0
    return Scene(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8), (2,), owner)


def draw_with_stuff(split: SampleSplit, rng: np.random.Generator) -> Scene:
    stuff = np.full((32, 32), 3, dtype=np.int64)
    stuff[20:] = 4
    return replace(draw(split, rng), stuff=stuff)


def build(output: Path, recipe: Recipe = RECIPE) -> Path:
    return write_dataset(output, recipe, ("a", "b"), LICENCE, draw)


def build_panoptic(output: Path) -> Path:
    return write_dataset(output, RECIPE, ("a", "b"), LICENCE, draw_with_stuff, stuff_names=("c", "d"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_annotation_is_exact() -> None:
    mask = np.zeros((20, 30), dtype=bool)
    mask[5:9, 7:18] = True
    mask[6, 10] = False
    mask[15, 3] = True
    found = annotation(mask)
    assert found["bbox"] == [3, 5, 15, 11]
    assert found["area"] == 4 * 11 - 1 + 1
    assert found["iscrowd"] == 0
    assert (coco_mask.decode(json.loads(json.dumps(found["segmentation"]))) == mask).all()


def test_layout_and_category_ids(tmp_path: Path) -> None:
    folder = build(tmp_path / "deep" / "toy")
    assert sorted(contents(folder)) == [
        "dataset.json",
        "train.json",
        *(f"train/train_00000{i}.jpg" for i in range(3)),
        "val.json",
        *(f"val/val_00000{i}.jpg" for i in range(2)),
    ]
    coco = json.loads((folder / "val.json").read_text())
    assert coco["categories"] == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]
    assert [a["image_id"] for a in coco["annotations"]] == [1, 2]
    assert sorted(tmp_path.joinpath("deep").iterdir()) == [folder]


def test_a_set_with_stuff_has_panoptic_files_too(tmp_path: Path) -> None:
    folder = build_panoptic(tmp_path / "toy")
    plain = contents(build(tmp_path / "plain"))
    added = {name: data for name, data in contents(folder).items() if plain.get(name) != data}
    assert sorted(added) == [
        "train_panoptic.json",
        *(f"train_panoptic/train_00000{i}.png" for i in range(3)),
        "val_panoptic.json",
        *(f"val_panoptic/val_00000{i}.png" for i in range(2)),
    ]
    panoptic = json.loads(added["val_panoptic.json"])
    assert panoptic["images"] == json.loads(plain["val.json"])["images"]
    assert panoptic["categories"] == [
        {"id": 1, "name": "a", "isthing": 1, "supercategory": "thing"},
        {"id": 2, "name": "b", "isthing": 1, "supercategory": "thing"},
        {"id": 3, "name": "c", "isthing": 0, "supercategory": "stuff"},
        {"id": 4, "name": "d", "isthing": 0, "supercategory": "stuff"},
    ]
    assert [(a["image_id"], a["file_name"]) for a in panoptic["annotations"]] == [
        (1, "val_000000.png"),
        (2, "val_000001.png"),
    ]


def test_segments_are_layers_then_visible_stuff() -> None:
    stuff = np.full((6, 8), 5, dtype=np.int64)
    stuff[:, 4:] = 4
    stuff[0, 0] = 6
    owner = np.full((6, 8), -1, dtype=np.int64)
    owner[:3, :3] = 0  # covers all of category 6
    owner[2:4, 2:5] = 1
    scene = Scene(np.zeros((6, 8, 3), dtype=np.uint8), (2, 2), owner, stuff)
    ids, segments = panoptic_segments(scene, np.random.default_rng(0))
    assert [segment["category_id"] for segment in segments] == [2, 2, 4, 5]
    assert [segment["area"] for segment in segments] == [8, 6, 22, 12]
    assert [segment["bbox"] for segment in segments] == [[0, 0, 3, 3], [2, 2, 3, 2], [4, 0, 4, 6], [0, 0, 4, 6]]
    assert [(ids == segment["id"]).sum() for segment in segments] == [8, 6, 22, 12]
    assert "segmentation" not in segments[0]


def test_segment_ids_use_all_bytes_of_a_png() -> None:
    scene = draw_with_stuff("train", np.random.default_rng(0))
    ids = np.array([np.unique(panoptic_segments(scene, np.random.default_rng(i))[0]) for i in range(50)])
    assert ids.min() > 0
    assert ids.max() < 256**3
    for shift in (0, 8, 16):
        assert len(np.unique(ids >> shift & 255)) > 50


@pytest.mark.parametrize("lost", ["train_panoptic/train_000001.png", "val_panoptic.json"])
def test_a_set_with_lost_panoptic_files_is_not_complete(tmp_path: Path, lost: str) -> None:
    folder = build_panoptic(tmp_path / "toy")
    assert already_built(folder, RECIPE, panoptic=True)
    (folder / lost).unlink()
    with pytest.raises(InputError, match="lost files"):
        already_built(folder, RECIPE, panoptic=True)


def test_a_set_without_panoptic_files_is_not_one_with_them(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lost files"):
        already_built(build(tmp_path / "toy"), RECIPE, panoptic=True)


def test_a_complete_set_is_recognised_and_another_recipe_is_refused(tmp_path: Path) -> None:
    folder = build(tmp_path / "toy")
    (folder / "train" / "notes.md").write_text("theirs")
    before = contents(folder)
    assert already_built(folder, RECIPE)
    for other in (replace(RECIPE, seed=1), replace(RECIPE, version=2), replace(RECIPE, num_train=1)):
        with pytest.raises(InputError, match=r"another recipe, .*: give a new folder, or delete this one first"):
            already_built(folder, other)
    assert not already_built(tmp_path / "elsewhere", RECIPE)
    assert contents(folder) == before


@pytest.mark.parametrize("lost", ["train/train_000001.jpg", "val.json"])
def test_a_set_with_lost_files_is_not_complete(tmp_path: Path, lost: str) -> None:
    folder = build(tmp_path / "toy")
    (folder / lost).unlink()
    before = contents(folder)
    with pytest.raises(InputError, match="lost files"):
        already_built(folder, RECIPE)
    assert contents(folder) == before


@pytest.mark.parametrize("manifest", [b"", b"[]", b"[" * 100_000, b"\xff"])
def test_a_damaged_manifest_is_that_of_no_set(tmp_path: Path, manifest: bytes) -> None:
    folder = build(tmp_path / "toy")
    (folder / MANIFEST).write_bytes(manifest)
    with pytest.raises(InputError, match="something else"):
        already_built(folder, RECIPE)


def test_an_interrupted_build_leaves_no_set_and_is_made_up_for(tmp_path: Path) -> None:
    calls = 0

    def interrupted(split: SampleSplit, rng: np.random.Generator) -> Scene:
        nonlocal calls
        calls += 1
        if calls == 5:  # the last image
            raise KeyboardInterrupt
        return draw(split, rng)

    folder = tmp_path / "toy"
    with pytest.raises(KeyboardInterrupt):
        write_dataset(folder, RECIPE, ("a", "b"), LICENCE, interrupted)
    assert not folder.exists()
    assert not already_built(folder, RECIPE)
    assert not list(tmp_path.iterdir()), "no partly written file"
    build(folder)
    assert contents(folder) == contents(build(tmp_path / "fresh"))


@pytest.mark.parametrize("at", ["train_000002.jpg", "train.json", "val_panoptic.json", "val_000001.png", MANIFEST])
def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    for name in (".toy.partial", ".toy.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.md").write_text("somebody's")
    there = {path.name for path in tmp_path.iterdir()}
    for method in ("write_bytes", "write_text"):
        write = getattr(Path, method)

        def full(path: Path, *arguments: object, write: Any = write, **options: object) -> Any:
            if Path(at).stem in path.name:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            return write(path, *arguments, **options)

        monkeypatch.setattr(Path, method, full)
    with pytest.raises(OSError, match="No space left"):
        build_panoptic(tmp_path / "toy")
    assert {path.name for path in tmp_path.iterdir()} == there
    assert all((tmp_path / name / "notes.md").exists() for name in (".toy.partial", ".toy.old"))


def test_a_folder_that_is_filled_meanwhile_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "toy"

    def filling(split: SampleSplit, rng: np.random.Generator) -> Scene:
        folder.mkdir(exist_ok=True)
        (folder / "notes.md").write_text("theirs")
        return draw(split, rng)

    with pytest.raises(InputError, match="was filled by another process"):
        write_dataset(folder, RECIPE, ("a", "b"), LICENCE, filling)
    assert contents(folder).keys() == {"notes.md"}
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    assert contents(build(tmp_path / "toy")) == contents(build(tmp_path / "other"))


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "train").mkdir(parents=True)
    with pytest.raises(InputError, match="something else"):
        already_built(mine, RECIPE)
    other = build(tmp_path / "toy")
    with pytest.raises(InputError, match="something else"):
        already_built(other, Recipe("digits", 1, 3, 2, 32, 0, (0.2, 0.5)))
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InputError, match="is a file"):
        already_built(file, RECIPE)
    (tmp_path / "empty").mkdir()
    assert not already_built(tmp_path / "empty", RECIPE)


def test_an_output_that_cannot_be_written_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"output .*/file/toy: the folder .*/file cannot be written .* is a file"):
        build(tmp_path / "file" / "toy")


@pytest.mark.parametrize("name", ["a\0b", "a\ud800", "n" * 300])
@pytest.mark.parametrize("build_set", [build_digits, build_scenes])
def test_a_name_that_no_folder_can_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, build_set: Callable[[str], Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"output {re.escape(printable(name))} cannot be written"):
        build_set(name)
    assert not list(tmp_path.iterdir())


def test_a_failed_build_leaves_no_folder(tmp_path: Path) -> None:
    def broken(split: SampleSplit, rng: np.random.Generator) -> Scene:
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        write_dataset(tmp_path / "new" / "toy", RECIPE, ("a", "b"), LICENCE, broken)
    assert not list(tmp_path.iterdir())


def test_a_manifest_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "dataset.json")
    with pytest.raises(InputError, match="something else"):
        already_built(tmp_path, RECIPE)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 2, 32, 0, (0.2, 0.5)), "num_train is 0"),
        (
            (3, 2**70, 32, 0, (0.2, 0.5)),
            f"num_val is {2**70}; both must be at least 1 and at most 1000000",
        ),
        ((3, 2, 16, 0, (0.2, 0.5)), "image_size is 16"),
        ((3, 2, 2**40, 0, (0.2, 0.5)), "image_size is 1099511627776 pixels; it must be at least 32 and at most 4096"),
        ((3, 2, 32, -1, (0.2, 0.5)), "seed is -1"),
        ((3, 2, 32, 0, (0.5, 0.2)), "object_size is 0.5 to 0.2"),
        ((3, 2, 32, 0, (0.5, 1.2)), "object_size is 0.5 to 1.2"),
    ],
)
def test_values_out_of_range(numbers: tuple[int, int, int, int, tuple[float, float]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Recipe("toy", 1, *numbers)
