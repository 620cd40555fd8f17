"""References of images: choice, files, alignment after transforms, and batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from detr_bf.common.errors import InputError
from detr_bf.common.files import UNFINISHED
from detr_bf.common.structures import Batch
from detr_bf.data.augment import Augmentation
from detr_bf.data.batches import SampleKey
from detr_bf.data.coco import CocoDetection, read_annotations
from detr_bf.data.references import (
    References,
    files_by_stem,
    groups_of,
    own_files,
    own_references,
    translated,
    warn_of_missing,
)
from detr_bf.data.transforms import eval_transform, train_transform

Factory = Callable[..., SimpleNamespace]
PLAIN = eval_transform(short_side=48, max_size=1000)  # leaves the fixture's 64 x 48 images unchanged
RANDOM = train_transform(
    short_sides=[40, 48, 56, 64],
    max_size=100,
    horizontal_flip=0.5,
    random_crop=0.5,
    crop_short_sides=[50, 60],
    crop_min=20,
    crop_max=50,
    extra=["photometric_distort", "vertical_flip"],
)
FLIPS_AND_CROPS = train_transform(
    short_sides=[48],
    max_size=100,
    horizontal_flip=0.5,
    random_crop=1.0,
    crop_short_sides=[48],
    crop_min=48,
    crop_max=48,
)


def with_templates(data: SimpleNamespace, change: Callable[[Image.Image], Image.Image], keys: bool = True) -> Path:
    """Write a changed copy of each image into the folder templates and return it."""
    folder: Path = data.images.parent / "templates"
    folder.mkdir(exist_ok=True)
    for entry in data.content["images"]:
        with Image.open(data.images / entry["file_name"]) as image:
            change(image.convert("RGB")).save(folder / entry["file_name"])
        if keys:
            entry["template"] = entry["file_name"]
    data.save()
    return folder


def dataset(data: SimpleNamespace, references: References | None = None, **changes: Any) -> CocoDetection:
    return CocoDetection(data.images, data.annotations, **{"transform": PLAIN, "references": references, **changes})


def own(data: SimpleNamespace, folder: Path, **changes: Any) -> References:
    files = own_files(read_annotations(data.annotations).images, data.images, folder)
    return replace(References("own", files), **changes)


AUGMENTATIONS = {
    "transforms": None,
    "mosaic": Augmentation(mosaic=1.0),
    "zoom_out": Augmentation(zoom_out=1.0),
    "iou_crop": Augmentation(iou_crop=1.0),
    "scale_jitter": Augmentation(scale_jitter=1.0, scale_jitter_range=(0.5, 1.5)),
    "colours": Augmentation(photometric_distort=0.5),
    "all": Augmentation(mosaic=0.5, scale_jitter=0.5, photometric_distort=0.5, zoom_out=0.5, iou_crop=0.5),
}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_a_reference_equal_to_its_image_stays_equal(coco_folder: Factory, name: str) -> None:
    data = coco_folder(num_images=6)
    folder = with_templates(data, lambda image: image)
    samples = dataset(data, own(data, folder), transform=RANDOM, augment=AUGMENTATIONS[name], seed=3)
    plain = dataset(data, transform=RANDOM, augment=AUGMENTATIONS[name], seed=3)
    sizes = set()
    for epoch in range(3):
        for index in range(6):
            image, target, reference = samples[SampleKey(epoch, index)]  # type: ignore[misc]
            assert torch.equal(image, reference)
            without = plain[SampleKey(epoch, index)]  # the image is that of a data set without references
            assert torch.equal(image, without[0])
            assert torch.equal(target.boxes, without[1].boxes)
            sizes.add(image.shape)
    assert len(sizes) > 1


def test_the_pixels_of_a_reference_are_those_at_the_same_place(coco_folder: Factory) -> None:
    data = coco_folder(num_images=6)
    folder = with_templates(data, ImageOps.invert)
    samples = dataset(data, own(data, folder), transform=FLIPS_AND_CROPS)
    seen = set()
    for epoch in range(4):
        image, _, reference = samples[SampleKey(epoch, 0)]  # type: ignore[misc]
        # the crop of 48 x 48 pixels keeps its size: no interpolation
        assert torch.equal(reference, 255 - image)
        seen.add(image.sum().item())
    assert len(seen) > 1


def test_the_state_of_torch_stays(coco_folder: Factory) -> None:
    data = coco_folder()
    samples = dataset(data, own(data, with_templates(data, ImageOps.invert)), transform=RANDOM)
    before = torch.get_rng_state()
    samples[SampleKey(0, 0)]
    assert torch.equal(torch.get_rng_state(), before)


def test_references_by_key_by_name_and_none(coco_folder: Factory) -> None:
    data = coco_folder(num_images=3)
    folder = with_templates(data, ImageOps.invert, keys=False)
    (folder / "0002.png").unlink()
    with Image.open(folder / "0003.png") as image:
        image.convert("RGB").save(folder / "0003.bmp")
    (folder / "0003.png").unlink()
    data.content["images"][0]["template"] = "0003.bmp"
    data.save()
    entries = read_annotations(data.annotations).images
    assert own_files(entries, data.images, folder) == [folder / "0003.bmp", None, folder / "0003.bmp"]
    data.content["images"][0]["template"] = "0002.png"
    assert own_files(data.content["images"], data.images, None) == [data.images / "0002.png", None, None]


def test_an_image_without_a_reference(coco_folder: Factory) -> None:
    data = coco_folder(num_images=2)
    folder = with_templates(data, ImageOps.invert, keys=False)
    (folder / "0002.png").unlink()
    samples = dataset(data, own(data, folder))
    batch = Batch.collate([samples[SampleKey(0, index)] for index in range(2)])
    assert batch.references is not None
    assert batch.has_reference is not None
    assert batch.has_reference.tolist() == [True, False]
    assert torch.equal(batch.references[0], 255 - batch.images[0])
    assert Batch.collate([samples[SampleKey(0, 1)]]).references is None
    whole = Batch.collate([samples[SampleKey(0, 0)]])
    assert whole.has_reference is None
    assert whole.fits(3)
    again = Batch.from_dict(batch.to_dict())
    assert again.references is not None
    assert torch.equal(again.references, batch.references)
    assert again.fits(3)
    assert not replace(batch, references=batch.references[:1]).fits(3)
    assert not replace(batch, has_reference=torch.tensor([1, 0])).fits(3)
    moved = batch.to("cpu").pin_memory() if torch.cuda.is_available() else batch.to("meta")
    assert moved.references is not None


def test_references_are_padded_as_their_images(coco_folder: Factory) -> None:
    small, large = coco_folder(num_images=1), coco_folder(num_images=1, size=(80, 40), name="large")
    samples = []
    for data in (small, large):
        found = dataset(data, own(data, with_templates(data, ImageOps.invert)), transform=lambda sample: sample)
        samples.append(found[SampleKey(0, 0)])
    batch = Batch.collate(samples)
    assert batch.references is not None
    inside = ~batch.padding_mask[:, None].expand_as(batch.images)
    assert torch.equal(batch.references[inside], 255 - batch.images[inside])
    assert batch.references[~inside].sum() == 0


@pytest.mark.parametrize("choice", ["random", "same_group"])
def test_a_random_reference_is_another_image_and_a_function_of_the_seed(coco_folder: Factory, choice: str) -> None:
    data = coco_folder(num_images=6)
    names = [data.images / entry["file_name"] for entry in data.content["images"]]
    references = References(choice, names, [0, 0, 0, 1, 1, 2])
    drawn = {index: {references.file_of(index, seed) for seed in range(60)} for index in range(6)}
    groups = {0: {0, 1, 2}, 3: {3, 4}, 5: {5}} if choice == "same_group" else {0: set(range(6))}
    for first, members in groups.items():
        expected = {names[other] for other in members if other != first}
        assert drawn[first] == (expected or {None})
    samples = dataset(data, replace(references, groups=[0] * 6))
    first, again = samples[SampleKey(0, 0)], samples[SampleKey(0, 0)]
    assert len(first) == len(again) == 3
    assert torch.equal(first[2], again[2])  # type: ignore[misc,arg-type]
    others = {int(samples[SampleKey(epoch, 0)][2].sum()) for epoch in range(20)}  # type: ignore[misc,union-attr]
    assert len(others) > 1


def test_a_random_reference_of_another_size_is_resized(coco_folder: Factory) -> None:
    data = coco_folder(num_images=2)
    with Image.open(data.images / "0002.png") as image:
        image.resize((30, 60)).save(data.images / "0002.png")
    data.content["images"][1] |= {"width": 30, "height": 60}
    data.save()
    names = [data.images / entry["file_name"] for entry in data.content["images"]]
    image, _, reference = dataset(data, References("random", names), transform=lambda s: s)[SampleKey(0, 0)]  # type: ignore[misc]
    assert reference.shape == image.shape


def test_an_own_reference_of_another_size_is_refused(coco_folder: Factory) -> None:
    data = coco_folder(num_images=1)
    folder = with_templates(data, lambda image: image.resize((60, 48)))
    with pytest.raises(
        InputError, match=r"reference of 0001.png, of the same size: .* 64 x 48 .* but the file has 60 x 48"
    ):
        dataset(data, own(data, folder))[SampleKey(0, 0)]


def test_an_unreadable_reference_is_as_an_unreadable_image(coco_folder: Factory) -> None:
    data = coco_folder()
    folder = with_templates(data, ImageOps.invert)
    (folder / "0001.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"0001.png"):
        dataset(data, own(data, folder))[SampleKey(0, 0)]
    samples = dataset(data, own(data, folder), replace_unreadable=True)
    image, target, reference = samples[SampleKey(0, 0)]  # type: ignore[misc]
    assert "0001.png" in target.replaced
    assert torch.equal(reference, 255 - image)


def test_a_shift_moves_by_whole_pixels_and_repeats_the_border() -> None:
    image = torch.arange(2 * 3 * 4, dtype=torch.uint8).view(2, 3, 4)
    moved = translated(image, 1, -2)
    assert torch.equal(moved[:, 1:, :2], image[:, :2, 2:])
    assert torch.equal(moved[:, 0], moved[:, 1])
    assert torch.equal(moved[:, :, 3], moved[:, :, 2])
    assert torch.equal(translated(image, 0, 0), image)


def test_a_shift_goes_in_all_four_directions(coco_folder: Factory) -> None:
    data = coco_folder(num_images=1)
    samples = dataset(data, own(data, with_templates(data, lambda image: image), shift=3))

    def direction(epoch: int) -> tuple[int, int]:
        image, _, reference = samples[SampleKey(epoch, 0)]  # type: ignore[misc]
        found = [
            (down, right) for down in (-3, 3) for right in (-3, 3) if _is_translated(image, reference, down, right)
        ]
        assert len(found) == 1
        return found[0]

    assert {direction(epoch) for epoch in range(30)} == {(-3, -3), (-3, 3), (3, -3), (3, 3)}


def _is_translated(image: Tensor, reference: Tensor, down: int, right: int) -> bool:
    return torch.equal(translated(image, down, right), reference)


def test_groups_by_key_and_by_folder() -> None:
    entries = [
        {"id": 1, "file_name": "a/1.png"},
        {"id": 2, "file_name": "b/1.png"},
        {"id": 3, "file_name": "a/2.png"},
        {"id": 4, "file_name": "a/3.png", "group": 7},
    ]
    assert groups_of(entries) == [0, 1, 0, 2]
    with pytest.raises(InputError, match="all images are in one"):
        groups_of(entries[:1])
    with pytest.raises(InputError, match=r"group is 1.5"):
        groups_of([{**entries[0], "group": 1.5}])


@pytest.mark.parametrize(
    ("entry", "folder", "message"),
    [
        ({"template": 3}, False, "template is 3, expected the path of a file relative to the folder"),
        ({"template": ""}, False, "template is '', expected the path of a file relative to the folder"),
        ({}, False, "and none is given"),
        ({}, True, "no file has the name of an image"),
    ],
)
def test_references_that_cannot_be_found(tmp_path: Path, entry: dict[str, Any], folder: bool, message: str) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "other.png")
    with pytest.raises(InputError, match=message):
        own_files([{"id": 1, "file_name": "1.png", **entry}], tmp_path, tmp_path if folder else None)
    with pytest.raises(InputError, match="does not exist or is not a folder"):
        own_files([{"id": 1, "file_name": "1.png"}], tmp_path, tmp_path / "missing")


def test_images_that_are_their_own_reference_are_told(
    coco_folder: Factory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = coco_folder(num_images=3)
    folder = with_templates(data, ImageOps.invert, keys=False)
    (folder / "0002.png").unlink()
    (folder / "0002.png").symlink_to(data.images / "0002.png")
    own_references(data.content["images"], data.images, folder, "data.train")
    assert "data.train: 1 of 3 images are their own reference" in caplog.text
    own_references(data.content["images"], data.images, data.images, "data.val")
    assert "data.val: 3 of 3 images are their own reference" in caplog.text


def test_files_of_references_are_those_of_images(tmp_path: Path) -> None:
    """Folders whose names end like those of images, and unfinished files, are none."""
    (tmp_path / "a.png").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png" / "b.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "a.bmp")
    Image.new("RGB", (4, 4)).save(tmp_path / f"{UNFINISHED}a.png")
    assert files_by_stem(tmp_path) == {"a": tmp_path / "a.bmp", "a.png/b": tmp_path / "a.png" / "b.png"}


def test_large_files_keep_the_key(coco_folder: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    data = coco_folder()
    folder = with_templates(data, ImageOps.invert)
    monkeypatch.setattr("detr_bf.data.coco.LARGE_FILE", 1)
    content = read_annotations(data.annotations)
    assert not isinstance(content.images, list)
    assert own_files(content.images, data.images, folder)[0] == folder / "0001.png"
    assert json.loads(data.annotations.read_text())["images"][0]["template"] == "0001.png"


@pytest.mark.parametrize("orientation", [3, 6])
@pytest.mark.parametrize("sized", [True, False])
def test_an_own_reference_is_rotated_as_its_image(coco_folder: Factory, orientation: int, sized: bool) -> None:
    data = coco_folder(num_images=2)
    exif = Image.Exif()
    exif[0x0112] = orientation
    for entry in data.content["images"]:
        path = data.images / entry["file_name"]
        with Image.open(path) as image:
            image.load()
        image.save(path, exif=exif)
        if not sized:
            del entry["width"], entry["height"]
    folder = with_templates(data, lambda image: image)
    for entry in data.content["images"]:
        (folder / entry["file_name"]).write_bytes((data.images / entry["file_name"]).read_bytes())
    samples = dataset(data, own(data, folder), transform=lambda sample: sample)
    image, _, reference = samples[SampleKey(0, 0)]  # type: ignore[misc]
    assert torch.equal(image, reference)


def test_the_fingerprint_covers_the_references(coco_folder: Factory) -> None:
    data = coco_folder()
    folder = with_templates(data, ImageOps.invert)
    references = own(data, folder)
    files = references.files
    fingerprints = [
        dataset(data, given).fingerprint(quick=quick)
        for given in (
            None,
            references,
            replace(references, shift=2),
            replace(references, files=[files[1], files[0], *files[2:]]),
            References("random", files),
        )
        for quick in (True, False)
    ]
    assert len({json.dumps(each) for each in fingerprints}) == len(fingerprints)
    assert len({each["sha256"] for each in fingerprints}) == 2, "the images are the same: such arms can be compared"
    (folder / "0001.png").write_bytes(b"another size")
    changed = dataset(data, references)
    assert changed.fingerprint(quick=True) == fingerprints[2]
    assert changed.fingerprint(quick=False) != fingerprints[3]


def test_images_alone_in_their_group_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    files = [Path(f"{number}.png") for number in range(4)]
    warn_of_missing(References("same_group", files, [0, 0, 1, 2]), "data.train")
    assert "data.train: 2 of 4 images have no reference" in caplog.text
    for references in (References("same_group", files, [0, 1, 2, 3]), References("random", files[:1])):
        with pytest.raises(InputError, match="finds no reference for any of"):
            warn_of_missing(references, "data.val")


def test_a_name_without_a_stem_has_no_reference(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "1.png")
    entries = [{"id": 1, "file_name": "1.png"}, {"id": 2, "file_name": ""}, {"id": 3, "file_name": "."}]
    assert own_files(entries, tmp_path, tmp_path) == [tmp_path / "1.png", None, None]
