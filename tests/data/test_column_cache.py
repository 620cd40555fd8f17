"""The cache of large COCO files."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from detr_bf.common.errors import InputError
from detr_bf.data import coco, column_cache
from detr_bf.data.batches import SampleKey
from detr_bf.data.coco import CocoDetection, read_annotations
from detr_bf.data.column_cache import read_columns
from detr_bf.data.columns import ColumnStore, Entries
from detr_bf.data.transforms import eval_transform

Factory = Callable[..., SimpleNamespace]
PLAIN = eval_transform(short_side=48, max_size=1000)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DETR_BF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(coco, "LARGE_FILE", 1)
    return tmp_path / "home" / "annotations"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the files that are decoded, as they are."""
    found: list[Path] = []
    decode = column_cache.decode_columns

    def recorded(path: Path) -> ColumnStore:
        found.append(path)
        return decode(path)

    monkeypatch.setattr(column_cache, "decode_columns", recorded)
    return found


def cached(home: Path) -> Path:
    (found,) = home.glob("*.columns")
    return found


def content_of(path: Path) -> dict[str, Any]:
    store = read_columns(path)
    assert store is not None
    return {part: list(Entries(store, part)) for part in ("images", "annotations")}


def expected(data: SimpleNamespace) -> dict[str, Any]:
    return {part: data.content[part] for part in ("images", "annotations")}


def test_the_second_reading_maps_the_cache(coco_folder: Factory, home: Path, reads: list[Path]) -> None:
    data = coco_folder()
    for _ in range(2):
        store = read_columns(data.annotations)
        assert store is not None
        assert store.reopen
        numbers = Entries(store, "annotations").numbers("bbox")
        assert not numbers.flags.writeable
        assert not numbers.flags.owndata
    assert content_of(data.annotations) == expected(data)
    assert reads == [data.annotations]


def test_a_changed_file_is_read_again(coco_folder: Factory, home: Path, reads: list[Path]) -> None:
    data = coco_folder()
    content_of(data.annotations)
    status = data.annotations.stat()
    text = data.annotations.read_text()
    data.annotations.write_text(text.replace("0001.png", "0009.png"))  # the same size
    os.utime(data.annotations, ns=(status.st_atime_ns, status.st_mtime_ns))  # and time: the samples tell
    assert content_of(data.annotations)["images"][0]["file_name"] == "0009.png"
    data.annotations.write_text(text + " ")
    assert content_of(data.annotations) == expected(data)
    os.utime(data.annotations, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert content_of(data.annotations) == expected(data)
    assert len(reads) == 4
    assert cached(home)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:20],
        lambda content: content[:100],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: b"foreign" * 1000,
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: content.replace(b"version", b"Version"),
        lambda content: content.replace(b"lengths", b"Lengths"),
        lambda content: content.replace(b"0001.png", b"0007.png"),
        lambda content: with_metadata(None),
        lambda content: with_metadata({}),
        lambda content: with_metadata({"detr_bf": "[]"}),
        lambda content: with_metadata({"detr_bf": "{"}),
        lambda content: with_metadata({"detr_bf": "{}"}),
    ],
)
def test_a_damaged_or_foreign_file_is_replaced(
    coco_folder: Factory, home: Path, reads: list[Path], damage: Callable[[bytes], bytes]
) -> None:
    data = coco_folder()
    content_of(data.annotations)
    path = cached(home)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert content_of(data.annotations) == expected(data)
    assert len(reads) == 2
    assert cached(home).read_bytes() == whole
    content_of(data.annotations)
    assert len(reads) == 2


def with_metadata(metadata: dict[str, str] | None) -> bytes:
    return save({"000000": np.zeros(3)}, metadata)


def test_a_byte_that_changes_anywhere_is_harmless(coco_folder: Factory, home: Path) -> None:
    data = coco_folder()
    content_of(data.annotations)
    path = cached(home)
    whole = path.read_bytes()
    for position in np.random.default_rng(0).integers(len(whole), size=40).tolist():
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        assert content_of(data.annotations) == expected(data)


def test_no_cache_without_a_folder(
    coco_folder: Factory, home: Path, reads: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = coco_folder()
    (tmp_path / "home").write_text("a file")  # as little writable as a read-only folder, for root too
    assert content_of(data.annotations) == expected(data)

    def none() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("DETR_BF_HOME")
    monkeypatch.setattr(Path, "home", none)
    assert content_of(data.annotations) == expected(data)
    assert len(reads) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_no_cache_in_a_read_only_folder(coco_folder: Factory, home: Path) -> None:
    data = coco_folder()
    home.mkdir(parents=True)
    home.chmod(0o500)
    assert content_of(data.annotations) == expected(data)
    assert not list(home.iterdir())


def test_a_full_disk_leaves_nothing(
    coco_folder: Factory, home: Path, monkeypatch: pytest.MonkeyPatch, reads: list[Path]
) -> None:
    def full(arrays: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    data = coco_folder()
    monkeypatch.setattr(column_cache, "save_file", full)
    assert content_of(data.annotations) == expected(data)
    assert [path.suffix for path in home.iterdir()] == [".lock"]


def test_the_oldest_files_of_the_cache_are_removed_and_no_others(
    coco_folder: Factory, home: Path, monkeypatch: pytest.MonkeyPatch, reads: list[Path]
) -> None:
    folders = [coco_folder(name=f"data{number}") for number in range(3)]
    names = []
    for age, data in enumerate(folders):
        before = set(home.glob("*")) if home.exists() else set()
        content_of(data.annotations)
        (path,) = set(home.glob("*.columns")) - before
        os.utime(path, (1000 + age, 1000 + age))
        names.append(path)
    others = [home / "mine.columns", home / "notes.txt", home / f"{'g' * 32}.columns"]
    for path in others:
        path.write_bytes(b"0" * 10_000)
        os.utime(path, (1, 1))
    content_of(folders[0].annotations)  # used now: no longer the oldest
    monkeypatch.setattr(column_cache, "MOST_CACHE_BYTES", 3 * names[0].stat().st_size + 100)
    content_of(coco_folder(name="data3").annotations)
    assert [path.exists() for path in names] == [True, False, True]
    assert all(path.exists() for path in others)
    monkeypatch.setattr(column_cache, "MOST_CACHE_BYTES", 100)
    assert content_of(coco_folder(name="data4").annotations)


PROCESS = """
import sys
from pathlib import Path
from detr_bf.data import coco
coco.LARGE_FILE = 1
content = coco.read_annotations(Path(sys.argv[1]))
print(type(content.annotations).__name__, len(content.annotations), sum(a["area"] for a in content.annotations))
"""


@pytest.mark.full
def test_processes_that_read_at_once(coco_folder: Factory, home: Path) -> None:
    data = coco_folder(num_images=40)
    command = [sys.executable, "-c", PROCESS, str(data.annotations)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate(timeout=120)[0] for process in running}
    area = sum(annotation["area"] for annotation in data.content["annotations"])
    assert said == {f"Entries 80 {area}\n"}
    assert content_of(data.annotations) == expected(data)
    assert not list(home.glob(".detr_bf-unfinished-*"))


def test_a_pickle_is_the_name_of_the_cache_file(coco_folder: Factory, home: Path, reads: list[Path]) -> None:
    data = coco_folder(num_images=50)
    content = read_annotations(data.annotations)
    raw = pickle.dumps(content)
    assert len(raw) < 1500
    again = pickle.loads(raw)
    assert again.annotations == data.content["annotations"]
    cached(home).unlink()
    assert pickle.loads(raw).images == data.content["images"]
    assert len(reads) == 2
    data.annotations.write_text(data.annotations.read_text().replace("0001.png", "0009.png"))
    cached(home).unlink()
    with pytest.raises(InputError, match="has changed since"):
        pickle.loads(raw)


def _sample(data: CocoDetection, results: Any) -> None:
    image, target = data[SampleKey(0, 2)]
    results.put((image.numpy(), target.boxes.numpy(), target.file_name, data.sizes[2], data.image_ids[2]))


@pytest.mark.full
def test_a_spawned_worker_gets_the_data_set(coco_folder: Factory, home: Path) -> None:
    data = coco_folder()
    samples = CocoDetection(data.images, data.annotations, PLAIN)
    image, target = samples[SampleKey(0, 2)]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_sample, args=(samples, results))
    process.start()
    found = results.get(timeout=120)
    process.join(60)
    assert torch.equal(torch.from_numpy(found[0]), image)
    assert torch.equal(torch.from_numpy(found[1]), target.boxes)
    assert found[2:] == (target.file_name, (48, 64), 3)


def test_the_metadata_are_json(coco_folder: Factory, home: Path) -> None:
    data = coco_folder()
    content_of(data.annotations)
    with safe_open(cached(home), "np") as file:
        metadata = json.loads(file.metadata()["detr_bf"])
    source = json.loads(metadata["source"])
    assert source["version"] == column_cache.CACHE_VERSION
    assert source["size"] == data.annotations.stat().st_size
    assert json.loads(metadata["content"])["lengths"] == {"images": 4, "annotations": 8}


def test_a_file_that_is_replaced_during_the_reading_is_not_cached_as_before(
    coco_folder: Factory, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = coco_folder()
    before, status = data.annotations.read_text(), data.annotations.stat()
    decode = column_cache.decode_columns

    def late(path: Path) -> ColumnStore:
        path.write_text(before.replace("0001.png", "0009.png"))
        return decode(path)

    with monkeypatch.context() as patch:
        patch.setattr(column_cache, "decode_columns", late)
        assert content_of(data.annotations)["images"][0]["file_name"] == "0009.png"
    data.annotations.write_text(before)
    os.utime(data.annotations, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert content_of(data.annotations) == expected(data)


def test_a_form_that_columns_do_not_hold_is_remembered(coco_folder: Factory, home: Path, reads: list[Path]) -> None:
    data = coco_folder()
    text = data.annotations.read_text()
    data.annotations.write_text(text.replace('"iscrowd": 0', '"iscrowd": NaN', 1))
    for _ in range(2):
        assert read_columns(data.annotations) is None
    assert reads == [data.annotations], "the second time the cache says so"
    data.annotations.write_text(text)
    assert content_of(data.annotations) == expected(data)


def test_another_time_of_the_same_content_does_not_end_a_run(coco_folder: Factory, home: Path) -> None:
    data = coco_folder()
    pickled = pickle.dumps(read_annotations(data.annotations).annotations)
    os.utime(data.annotations, ns=(1, 1))
    read_annotations(data.annotations)
    assert list(pickle.loads(pickled)) == data.content["annotations"]


def test_what_killed_processes_left_is_removed(coco_folder: Factory, home: Path) -> None:
    data = coco_folder()
    content_of(data.annotations)
    target = cached(home)
    own, others = (home / f".detr_bf-unfinished-{stem}.x.columns" for stem in (target.stem, "0" * 32))
    for path in (own, others):
        path.write_bytes(b"half")
    target.unlink()
    content_of(data.annotations)
    assert target.is_file()
    assert (own.exists(), others.exists()) == (False, True)
