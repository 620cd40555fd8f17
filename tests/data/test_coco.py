from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from detr_bf.common.errors import InputError
from detr_bf.common.structures import ClassMap
from detr_bf.data.batches import SampleKey, derive_seed
from detr_bf.data.coco import CocoDetection, read_annotations
from detr_bf.data.images import read_image
from detr_bf.data.transforms import eval_transform, train_transform

Factory = Callable[..., SimpleNamespace]
PLAIN = eval_transform(short_side=48, max_size=1000)  # leaves the fixture's 64 x 48 images unchanged


def dataset(data: SimpleNamespace, **changes: object) -> CocoDetection:
    return CocoDetection(data.images, data.annotations, **{"transform": PLAIN, **changes})


def test_the_exif_rotation_is_that_of_the_other_images(coco_folder: Factory) -> None:
    folder = coco_folder(num_images=3)
    exif = {name: Image.Exif() for name in ("0001.png", "0002.png")}
    exif["0001.png"][0x0112], exif["0002.png"][0x0112] = 3, 6
    before = read_image(folder.images / "0001.png")
    for name, each in exif.items():
        with Image.open(folder.images / name) as image:
            image.load()
        image.save(folder.images / name, exif=each)  # the sizes of the file are those before the rotation
    data = CocoDetection(folder.images, folder.annotations, lambda sample: sample)
    assert torch.equal(data[SampleKey(0, 0)][0], before)
    (folder.images / "0002.png").unlink()
    undecided = CocoDetection(folder.images, folder.annotations, lambda sample: sample)
    assert torch.equal(undecided[SampleKey(0, 0)][0], before.flip(1, 2))


def test_samples_have_normalised_boxes_and_contiguous_labels(coco_folder: Factory) -> None:
    data = coco_folder()
    samples = dataset(data)
    assert samples.class_map == ClassMap((3, 7, 90), ("class3", "class7", "class90"))
    assert len(samples) == 4
    image, target = samples[SampleKey(0, 1)]
    assert image.shape == (3, 48, 64)
    assert type(image) is torch.Tensor
    assert type(target.boxes) is torch.Tensor
    assert target.boxes.dtype == torch.float32
    assert (target.image_id, target.file_name) == (2, "0002.png")
    assert target.size == target.original_size == (48, 64)
    expected = []
    for annotation in data.content["annotations"][2:4]:
        x, y, w, h = annotation["bbox"]
        expected.append([(x + w / 2) / 64, (y + h / 2) / 48, w / 64, h / 48])
    torch.testing.assert_close(target.boxes, torch.tensor(expected))
    assert target.labels.tolist() == [2, 0]  # categories 90, 3


def test_boxes_are_fractions_of_the_resized_image_as_of_the_original(coco_folder: Factory) -> None:
    data = coco_folder()
    _, plain = dataset(data)[SampleKey(0, 0)]
    image, resized = dataset(data, transform=eval_transform(short_side=100, max_size=1000))[SampleKey(0, 0)]
    assert image.shape == (3, 100, 133)
    assert resized.size == (100, 133)
    assert resized.original_size == (48, 64)
    torch.testing.assert_close(resized.boxes, plain.boxes)


def test_annotations_may_come_in_any_order(coco_folder: Factory) -> None:
    data = coco_folder()
    before = [target.boxes for _, target in (dataset(data)[SampleKey(0, i)] for i in range(4))]
    data.content["annotations"] = data.content["annotations"][::2] + data.content["annotations"][1::2]
    data.save()
    after = [target.boxes for _, target in (dataset(data)[SampleKey(0, i)] for i in range(4))]
    torch.testing.assert_close(after, before)


def test_crowds_are_left_out(coco_folder: Factory) -> None:
    data = coco_folder()
    data.content["annotations"][0]["iscrowd"] = 1
    data.save()
    assert dataset(data)[SampleKey(0, 0)][1].labels.tolist() == [1]


def test_images_without_objects_are_kept(coco_folder: Factory) -> None:
    data = coco_folder()
    data.content["annotations"] = [a for a in data.content["annotations"] if a["image_id"] != 2]
    data.save()
    _, target = dataset(data)[SampleKey(0, 1)]
    assert target.boxes.shape == (0, 4)
    assert target.labels.shape == (0,)
    assert target.labels.dtype == torch.int64


def test_no_objects_at_all(coco_folder: Factory) -> None:
    assert dataset(coco_folder(objects=0))[SampleKey(0, 3)][1].boxes.shape == (0, 4)


def test_boxes_are_clipped_and_empty_ones_dropped(coco_folder: Factory) -> None:
    data = coco_folder(num_images=1)
    categories = (3, 7, 90, 3, 7)
    boxes = ([-10, -10, 42, 34], [5, 5, 0, 9], [50, 40, -4, 9], [100, 100, 9, 9], [32, 24, 1000, 1000])
    data.content["annotations"] = [
        {"id": i, "image_id": 1, "category_id": category, "bbox": box}
        for i, (category, box) in enumerate(zip(categories, boxes, strict=True))
    ]
    data.save()
    _, target = dataset(data)[SampleKey(0, 0)]
    torch.testing.assert_close(target.boxes, torch.tensor([[0.25, 0.25, 0.5, 0.5], [0.75, 0.75, 0.5, 0.5]]))
    assert target.labels.tolist() == [0, 1]


def test_a_given_class_map_is_applied(coco_folder: Factory) -> None:
    classes = ClassMap((90, 50, 3, 7), ("a", "b", "c", "d"))
    samples = dataset(coco_folder(), class_map=classes)
    assert samples.class_map is classes
    assert samples[SampleKey(0, 0)][1].labels.tolist() == [2, 3]


def test_categories_the_class_map_lacks_are_listed(coco_folder: Factory) -> None:
    with pytest.raises(InputError, match=r"category ids \[7, 90\] are used, but the known ones are \[1, 3\]"):
        dataset(coco_folder(), class_map=ClassMap((1, 3), ("a", "b")))


def test_rotated_images_follow_the_annotated_size(coco_folder: Factory) -> None:
    data = coco_folder(num_images=2)
    exif = Image.Exif()
    exif[0x0112] = 6
    for entry in data.content["images"]:
        path = data.images / entry["file_name"]
        Image.open(path).save(path, exif=exif)
    data.content["images"][1].update(width=48, height=64)
    data.save()
    upright, rotated = (dataset(data)[SampleKey(0, i)] for i in range(2))
    assert upright[1].original_size == (48, 64)
    assert rotated[1].original_size == (64, 48)
    assert rotated[0].shape == (3, 64, 48)


def test_width_and_height_may_be_absent(coco_folder: Factory) -> None:
    data = coco_folder()
    for entry in data.content["images"]:
        del entry["width"], entry["height"]
    data.save()
    assert dataset(data)[SampleKey(0, 0)][1].original_size == (48, 64)


TRAINING = train_transform(
    short_sides=list(range(40, 90)),
    max_size=200,
    horizontal_flip=0.5,
    random_crop=0.5,
    crop_short_sides=[40, 60],
    crop_min=20,
    crop_max=40,
)


def test_augmentation_is_a_function_of_seed_epoch_and_place(coco_folder: Factory) -> None:
    data = coco_folder()

    def sizes(seed: int, epoch: int) -> list[tuple[int, int]]:
        samples = dataset(data, transform=TRAINING, seed=seed)
        return [samples[SampleKey(epoch, index % 4)][1].size for index in range(4)]

    torch.manual_seed(1)
    first = sizes(0, 0)
    torch.manual_seed(2)
    assert sizes(0, 0) == first
    assert sizes(0, 1) != first
    assert sizes(1, 0) != first
    assert len(set(first)) > 1


def test_loading_a_sample_leaves_the_global_generator_alone(coco_folder: Factory) -> None:
    samples = dataset(coco_folder(), transform=TRAINING)
    state = torch.get_rng_state()
    samples[SampleKey(0, 0)]
    assert torch.equal(torch.get_rng_state(), state)


def test_mixed_seeds_differ() -> None:
    seeds = {derive_seed(seed, epoch, index) for seed in range(5) for epoch in range(5) for index in range(20)}
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == 500  # torch's CPU generator uses only the lower half
    assert derive_seed(1, 23) != derive_seed(12, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": None}, "images is NoneType, expected a list"),
        ({"annotations": {}}, "annotations is dict, expected a list"),
        ({"images": []}, "lists no images"),
        ({"categories": []}, "categories must be given"),
        ({"categories": [{"id": 1}, {"id": 1}]}, "each id once"),
        ({"images": ["a.jpg"]}, r"images\[0\] is str, expected an object"),
        ({"images": [{"id": 1}]}, r"images\[0\] has no file_name; it has id"),
        ({"images": [{"id": "1", "file_name": "a"}]}, r"images\[0\]: id is '1', expected a whole number"),
        ({"annotations": [{"image_id": 1}]}, r"annotations\[0\] has no category_id"),
    ],
)
def test_what_is_not_coco_is_explained(coco_folder: Factory, change: dict[str, object], message: str) -> None:
    data = coco_folder()
    data.content.update(change)
    data.save()
    with pytest.raises(InputError, match=message):
        read_annotations(data.annotations)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", json.dumps([{"image_id": 1, "score": 0.5}]), "looks like detection results"),
        ("a.json", "[]", "got a list"),
        ("a.json", '"text"', "got str"),
        ("a.json", '{"info": 1, "images": []}', "annotations, categories missing; found info, images"),
        ("a.json", "{", "is not JSON"),
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.json", "9" * 5000, "is not JSON"),
        ("a.txt", "0 0.5 0.5 0.1 0.1", "give the folder of a YOLO"),
    ],
)
def test_foreign_files_are_explained(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read_annotations(tmp_path / name)


def test_paths_that_cannot_be_files_are_bad_input(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for name, said in (("pipe.json", "a FIFO"), ("x" * 300, "too long"), ("a\0b", "NUL"), (".", "a folder")):
        with pytest.raises(InputError, match=said):
            read_annotations(tmp_path / name)


def test_sizes_of_400_digits_are_bad_input(coco_folder: Factory) -> None:
    data = coco_folder()
    data.content["images"][0]["width"] = 10**400
    data.save()
    with pytest.raises(InputError, match=r"image 1 has height 48 and width 1000.*expected numbers of pixels"):
        dataset(data)


def test_missing_paths_are_named(coco_folder: Factory, tmp_path: Path) -> None:
    data = coco_folder()
    with pytest.raises(InputError, match=r"no annotation file .*none\.json"):
        read_annotations(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"image folder .*nowhere"):
        CocoDetection(tmp_path / "nowhere", data.annotations, PLAIN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bbox": [1, 2, float("nan"), 4]}, "four finite numbers"),
        ({"bbox": [1, 2, 3]}, "four finite numbers"),
        ({"bbox": None}, "four finite numbers"),
        ({"image_id": 99}, "names image 99"),
        ({"category_id": 4}, r"category ids \[4\]"),
    ],
)
def test_impossible_objects_are_refused(coco_folder: Factory, change: dict[str, object], message: str) -> None:
    data = coco_folder()
    data.content["annotations"][3].update(change)
    data.save()
    with pytest.raises(InputError, match=message):
        dataset(data)


def test_repeated_image_ids_are_refused(coco_folder: Factory) -> None:
    data = coco_folder()
    data.content["images"][1]["id"] = 1
    data.save()
    with pytest.raises(InputError, match="1 image ids are listed more than once"):
        dataset(data)


def test_a_size_that_is_no_number_is_refused(coco_folder: Factory) -> None:
    data = coco_folder()
    data.content["images"][0]["width"] = "wide"
    data.save()
    with pytest.raises(InputError, match="image 1 has height 48 and width 'wide'"):
        dataset(data)


def segmented(data: SimpleNamespace) -> SimpleNamespace:
    """Add to every box the segmentation of its own pixels, as polygons and run lengths in turn."""
    for number, annotation in enumerate(data.content["annotations"]):
        x, y, w, h = annotation["bbox"]
        column = [48 * x + y, *([h, 48 - h] * w)]  # runs, column by column of 48 pixels
        runs = {"size": [48, 64], "counts": [*column[:-1], 48 * 64 - sum(column[:-1])]}
        polygon = [[x, y, x + w, y, x + w, y + h, x, y + h]]
        annotation["segmentation"] = runs if number % 2 else polygon
    data.save()
    return data


def filled(*boxes: Sequence[int]) -> torch.Tensor:
    """Return masks (T, 48, 64) of boxes x, y, width, height."""
    masks = torch.zeros(len(boxes), 48, 64, dtype=torch.bool)
    for mask, (x, y, w, h) in zip(masks, boxes, strict=True):
        mask[y : y + h, x : x + w] = True
    return masks


def test_segmentations_become_masks_at_the_size_of_the_image(coco_folder: Factory) -> None:
    data = segmented(coco_folder())
    for index in range(4):
        _, target = dataset(data, masks=True)[SampleKey(0, index)]
        _, plain = dataset(data)[SampleKey(0, index)]
        annotations = data.content["annotations"][2 * index : 2 * index + 2]
        assert target.masks.dtype == torch.bool
        assert torch.equal(target.masks, filled(*(annotation["bbox"] for annotation in annotations)))
        assert torch.equal(target.boxes, plain.boxes)
        assert plain.masks is None
    _, resized = dataset(data, masks=True, transform=eval_transform(short_side=96, max_size=1000))[SampleKey(0, 0)]
    assert resized.masks.shape == (2, 96, 128)


def test_boxes_of_detection_data_are_those_of_the_file_with_masks_too(coco_folder: Factory) -> None:
    data = segmented(coco_folder())
    data.content["annotations"][0]["bbox"] = [0, 0, 32, 24]
    data.save()
    _, target = dataset(data, masks=True)[SampleKey(0, 0)]
    torch.testing.assert_close(target.boxes[0], torch.tensor([0.25, 0.25, 0.5, 0.5]))


def test_masks_of_crowds_are_left_out(coco_folder: Factory) -> None:
    data = segmented(coco_folder())
    data.content["annotations"][0].update(iscrowd=1, segmentation=None)
    data.save()
    _, target = dataset(data, masks=True)[SampleKey(0, 0)]
    assert torch.equal(target.masks, filled(data.content["annotations"][1]["bbox"]))
    assert target.labels.tolist() == [1]


def test_objects_without_a_pixel_or_a_box_are_dropped_in_step(coco_folder: Factory) -> None:
    data = segmented(coco_folder(num_images=1, objects=4))
    data.content["annotations"][0]["segmentation"] = [[100, 100, 110, 100, 110, 110]]
    data.content["annotations"][1]["bbox"] = [5, 5, 0, 9]
    data.save()
    _, target = dataset(data, masks=True)[SampleKey(0, 0)]
    assert torch.equal(target.masks, filled(*(a["bbox"] for a in data.content["annotations"][2:])))
    assert target.labels.tolist() == [2, 0]
    assert len(target.boxes) == 2


def test_images_without_objects_have_no_masks(coco_folder: Factory) -> None:
    assert dataset(coco_folder(objects=0), masks=True)[SampleKey(0, 0)][1].masks.shape == (0, 48, 64)


def test_masks_follow_the_annotated_size_of_rotated_images(coco_folder: Factory) -> None:
    data = segmented(coco_folder(num_images=2))
    exif = Image.Exif()
    exif[0x0112] = 6
    for entry in data.content["images"]:
        path = data.images / entry["file_name"]
        Image.open(path).save(path, exif=exif)
    for annotation in data.content["annotations"][2:]:
        annotation["segmentation"] = [[1, 40, 20, 40, 20, 60, 1, 60]]
        annotation["bbox"] = [1, 40, 19, 20]
    data.content["images"][1].update(width=48, height=64)
    data.save()
    upright, rotated = (dataset(data, masks=True)[SampleKey(0, i)][1] for i in range(2))
    assert torch.equal(upright.masks, filled(*(a["bbox"] for a in data.content["annotations"][:2])))
    assert rotated.masks.shape == (2, 64, 48)
    assert rotated.masks[0, 40:60, 1:20].all()
    assert rotated.masks[0].sum() == 20 * 19


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        (None, "annotation 4 of image 2: segmentation is none"),
        ([[1, 2, 3]], r"annotation 4 of image 2: polygon \[1, 2, 3\]"),
        ({"size": [64, 48], "counts": [64 * 48]}, "annotation 4 of image 2: run lengths are for 48 x 64 pixels"),
    ],
)
def test_objects_without_a_usable_segmentation_are_refused_where_masks_are_wanted(
    coco_folder: Factory, segmentation: object, message: str
) -> None:
    data = segmented(coco_folder())
    data.content["annotations"][3]["segmentation"] = segmentation
    data.save()
    with pytest.raises(InputError, match=f"{message}.*detr-bf check"):
        dataset(data, masks=True)
    assert dataset(data)[SampleKey(0, 1)][1].boxes.shape == (2, 4)


def test_run_lengths_of_another_size_than_the_file_are_named_with_the_image(coco_folder: Factory) -> None:
    data = segmented(coco_folder())
    for entry in data.content["images"]:
        del entry["width"], entry["height"]
    data.content["annotations"][1]["segmentation"] = {"size": [64, 48], "counts": [64 * 48]}
    data.save()
    with pytest.raises(InputError, match=r"image 1, 0001.png has no usable masks: run lengths are for 48 x 64"):
        dataset(data, masks=True)[SampleKey(0, 0)]
    assert len(dataset(data, masks=True)[SampleKey(0, 1)][1].masks) == 2


def test_numbers_of_objects_by_image_and_class(coco_folder: Factory) -> None:
    data = coco_folder(num_images=4, category_ids=(3, 7, 90), objects=2)
    data.content["annotations"] = data.content["annotations"][:5]  # the last image has none
    data.save()
    found = dataset(data)
    counts = found.class_counts_of_images
    assert counts.tolist() == [[1, 1, 0], [1, 0, 1], [0, 1, 0], [0, 0, 0]]
