"""Frozen dataclasses passed between packages."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
import torch

from detr_bf.common.errors import InputError
from detr_bf.common.structures import Batch, ClassMap, TokenBatch, padding_mask
from tests.references.examples import random_targets

CATEGORIES = [{"id": 90, "name": "bird"}, {"id": 3, "name": "cat"}, {"id": 7}]


def test_class_map_is_contiguous_in_order_of_id() -> None:
    class_map = ClassMap.from_categories(CATEGORIES)
    assert class_map.category_ids == (3, 7, 90)
    assert class_map.names == ("cat", "7", "bird"), "a class without a name is named by its id"
    assert class_map.num_classes == 3
    assert [class_map.index[i] for i in class_map.category_ids] == [0, 1, 2]
    with pytest.raises(KeyError):
        class_map.index[4]


def test_class_map_survives_json_and_keeps_any_order() -> None:
    for class_map in (ClassMap.from_categories(CATEGORIES), ClassMap((7, 90, 3), ("a", "b", "c"))):
        assert ClassMap.from_dict(json.loads(json.dumps(class_map.to_dict()))) == class_map
        assert [class_map.category_ids[class_map.index[i]] for i in (3, 7, 90)] == [3, 7, 90]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("cat\n", "cat"),
        ("a\tb", r"a\tb"),
        ("x\n0 errors, 0 warnings", r"x\n0 errors, 0 warnings"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\ud800cat", r"\ud800cat"),
        (os.fsdecode(b"caf\xe9"), r"caf\udce9"),
        ("a" * 100_000, "a" * 99 + "…" + "a" * 100),
        (None, "7"),
        (" \n ", "7"),
        (12, "12"),
        ("猫", "猫"),
    ],
)
def test_class_names_are_cleaned_wherever_they_come_from(given: object, shown: str) -> None:
    read = ClassMap.from_categories([{"id": 7, "name": given}])
    assert read.names == (shown,)
    assert ClassMap.from_dict(read.to_dict()) == read, "unchanged"
    if isinstance(given, str):
        assert ClassMap.from_dict({"category_ids": [7], "names": [given]}) == ClassMap((7,), (given,)) == read
    shown.encode()  # writable tensors


def test_distinct_names_differ_from_each_other() -> None:
    assert ClassMap((3, 7, 90), ("cat", "cat", "dog")).distinct_names == ("cat (3)", "cat (7)", "dog")
    long = "x" * 300
    names = ClassMap((3, 7, 90, 91, 92), ("cat", "cat", "cat (3)", f"{long}a", f"{long}b")).distinct_names
    assert len(set(names)) == 5


def test_collate_pads_right_and_bottom() -> None:
    sizes, targets = [(4, 6), (5, 2), (1, 1)], random_targets((1, 0, 2), classes=3)
    pictures = [torch.randint(1, 256, (3, h, w), dtype=torch.uint8) for h, w in sizes]
    batch = Batch.collate(list(zip(pictures, targets, strict=True)))
    assert len(batch) == 3
    assert batch.targets == tuple(targets)
    assert batch.images.shape == (3, 3, 5, 6)
    assert batch.images.dtype == torch.uint8
    assert batch.padding_mask.dtype == torch.bool
    for row, ((h, w), picture) in enumerate(zip(sizes, pictures, strict=True)):
        assert torch.equal(batch.images[row, :, :h, :w], picture)
        assert not batch.padding_mask[row, :h, :w].any()
        assert batch.padding_mask[row].sum() == 5 * 6 - h * w
        assert not batch.images[row][:, batch.padding_mask[row]].any()


def test_empty_batch_is_refused() -> None:
    with pytest.raises(InputError, match="at least one image"):
        Batch.collate([])


def test_batch_moves_with_its_targets() -> None:
    picture = torch.zeros(3, 2, 2, dtype=torch.uint8)
    moved = Batch.collate([(picture, target) for target in random_targets((2, 1), classes=3)]).to("meta")
    of_targets = [tensor for target in moved.targets for tensor in (target.boxes, target.labels)]
    assert {tensor.device.type for tensor in (moved.images, moved.padding_mask, *of_targets)} == {"meta"}
    assert [target.image_id for target in moved.targets] == [0, 1]


def token_batch() -> TokenBatch:
    return TokenBatch(torch.randn(3, 5, 2), {"padding_mask": torch.rand(3, 5) > 0.5}, {"spatial_shapes": ((1, 5),)})


def test_fork_appends_a_stream_and_repeats_its_companions() -> None:
    batch, second = token_batch(), torch.randn(3, 5, 2)
    forked = batch.fork(second)
    assert (batch.num_streams, forked.num_streams) == (1, 2)
    assert torch.equal(forked.tokens[:3], batch.tokens)
    assert torch.equal(forked.tokens[3:], second)
    for half in forked.per_sample["padding_mask"].chunk(2):
        assert torch.equal(half, batch.per_sample["padding_mask"])
    assert forked.static == batch.static
    with pytest.raises(AssertionError, match="forks once"):
        forked.fork(second)


def test_with_tokens_changes_the_tokens_alone() -> None:
    forked = token_batch().fork(torch.randn(3, 5, 2))
    other = forked.with_tokens(forked.tokens + 1)
    assert torch.equal(other.tokens, forked.tokens + 1)
    assert (other.per_sample, other.static, other.num_streams) == (forked.per_sample, forked.static, 2)


def test_values_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        token_batch().num_streams = 2


def test_padding_lies_right_and_below() -> None:
    mask = padding_mask([(2, 3), (4, 1)], (4, 3))
    for image, (height, width) in enumerate([(2, 3), (4, 1)]):
        for row in range(4):
            for column in range(3):
                assert mask[image, row, column] == (row >= height or column >= width)
