from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
import pytest
import torch

from detr_bf.common.errors import InputError
from detr_bf.data.batches import EpochBatches, SameSizeBatches, SampleKey, aspect_buckets, derive_seed, object_features


def batches(num_samples: int, batch_size: int, **changes: object) -> list[list[SampleKey]]:
    settings = {"seed": 0, "epoch": 3, **changes}
    return list(EpochBatches(num_samples, batch_size, **settings))


def indices(chosen: list[list[SampleKey]]) -> list[int]:
    return [key.index for batch in chosen for key in batch]


def together(num_samples: int, batch_size: int, world_size: int, **changes: object) -> list[list[SampleKey]]:
    """Return the keys of all ranks, batch by batch."""
    shares = [batches(num_samples, batch_size, rank=r, world_size=world_size, **changes) for r in range(world_size)]
    return [list(chain(*batch)) for batch in zip(*shares, strict=True)]


def test_an_epoch_is_a_seeded_permutation() -> None:
    order = indices(batches(50, 5))
    assert sorted(order) == list(range(50))
    assert order == indices(batches(50, 5))
    assert order != indices(batches(50, 5, epoch=4))
    assert order != indices(batches(50, 5, seed=1))
    assert {key.epoch for batch in batches(50, 5) for key in batch} == {3}


def test_one_process_sees_the_permutation_as_it_is() -> None:
    """The order of earlier versions is kept, so that their runs can be resumed."""
    order = torch.randperm(50, generator=torch.Generator().manual_seed(derive_seed(0, 3))).tolist()
    assert indices(batches(50, 4)) == order[:48]


def test_repeated_augmentation_shows_fewer_images_several_times_each() -> None:
    chosen = together(50, 2, 3, repeated_augment=3)
    assert len(chosen) == len(batches(50, 6)) == 8, "as long as an epoch without repeats"
    for batch in chosen:
        assert Counter(key.index for key in batch) == dict.fromkeys({key.index for key in batch}, 3)
        assert [key.copy for key in batch] == [0, 0, 1, 1, 2, 2]
    assert len(set(indices(chosen))) == 16, "no image in two batches"
    assert indices(chosen)[:2] == indices(batches(50, 6))[:2], "of the same permutation"
    assert together(50, 2, 3, repeated_augment=3, start_batch=5) == chosen[5:]
    assert together(50, 1, 6, repeated_augment=3) == chosen, (
        "whatever the number of ranks, from the number of copies on"
    )


def test_one_process_has_the_copies_in_consecutive_batches() -> None:
    chosen = batches(50, 6, repeated_augment=3)
    assert [len(batch) for batch in chosen] == [6] * 8
    assert indices(chosen[::3]) == indices(batches(50, 6))[:18]
    for number, batch in enumerate(chosen):
        assert [key.index for key in batch] == [key.index for key in chosen[number // 3 * 3]]
        assert {key.copy for key in batch} == {number % 3}
    for start in range(9):
        assert batches(50, 6, repeated_augment=3, start_batch=start) == chosen[start:]


@pytest.mark.parametrize("num_samples", [200, 97, 41, 7])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("copies", [2, 3, 4, 7])
def test_no_process_has_two_copies_of_an_image_in_a_batch(num_samples: int, world_size: int, copies: int) -> None:
    chosen = together(num_samples, 4, world_size, repeated_augment=copies)
    assert [len(batch) for batch in chosen] == [len(batch) for batch in together(num_samples, 4, world_size)]
    for rank in range(world_size):
        for batch in batches(num_samples, 4, rank=rank, world_size=world_size, repeated_augment=copies):
            assert len({key.index for key in batch}) == len(batch)
    keys = Counter(chain(*chosen))
    assert set(keys.values()) == {1}, "keys differ"
    found = Counter(key.index for key in keys)
    assert all(sorted(key.copy for key in keys if key.index == index) == [*range(found[index])] for index in found)
    assert max(found.values()) <= copies
    if num_samples == 200:
        assert sum(number >= copies - 1 for number in found.values()) > len(found) / 2


@pytest.mark.parametrize(("num_samples", "size"), [(50, 4), (3, 3), (1, 1)])
def test_copies_fill_a_batch_that_is_no_multiple(num_samples: int, size: int) -> None:
    for batch in together(num_samples, 4 // min(num_samples, 4), min(num_samples, 4), repeated_augment=3):
        assert len(batch) == size
        assert len(set(batch)) == size, "keys differ"
        assert max(Counter(key.index for key in batch).values()) <= 3


def test_random_numbers_of_a_single_copy_are_those_of_earlier_versions() -> None:
    assert SampleKey(3, 7).sample_seed(5) == derive_seed(5, 3, 7)
    assert SampleKey(3, 7).sample_seed(5, 2) == derive_seed(5, 3, 7, 2)
    seeds = [SampleKey(3, 7, copy).sample_seed(5, attempt) for copy in range(3) for attempt in range(3)]
    assert len(set(seeds)) == 9


BUCKETS = [index * 7 % 3 for index in range(50)]


@pytest.mark.parametrize("buckets", [None, BUCKETS])
@pytest.mark.parametrize("start", [0, 1, 7, 12, 13])
def test_an_epoch_resumes_at_any_batch(start: int, buckets: list[int] | None) -> None:
    assert batches(50, 4, start_batch=start, buckets=buckets) == batches(50, 4, buckets=buckets)[start:]
    rest = EpochBatches(50, 4, seed=0, epoch=3, start_batch=start, buckets=buckets)
    assert len(rest) == len(list(rest)) == max(0, 12 - start)


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "sizes"), [(10, 4, [4, 4]), (3, 4, [3]), (8, 4, [4, 4]), (1, 1, [1])]
)
def test_incomplete_batches(num_samples: int, batch_size: int, sizes: list[int]) -> None:
    assert [len(batch) for batch in batches(num_samples, batch_size)] == sizes


@pytest.mark.parametrize("buckets", [None, BUCKETS])
@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_see_together_what_one_sees_with_as_many_images(world_size: int, buckets: list[int] | None) -> None:
    alone = batches(50, 4 * world_size, buckets=buckets)
    assert together(50, 4, world_size, buckets=buckets) == alone
    assert together(50, 4, world_size, buckets=buckets, start_batch=2) == alone[2:]
    for rank in range(world_size):
        mine = batches(50, 4, rank=rank, world_size=world_size, buckets=buckets)
        assert mine == [batch[4 * rank : 4 * rank + 4] for batch in alone]


@pytest.mark.parametrize(("num_samples", "shares"), [(7, [3, 2, 2]), (11, [4, 4, 3]), (3, [1, 1, 1]), (12, [4, 4, 4])])
def test_a_single_incomplete_batch_is_dealt_out_evenly(num_samples: int, shares: list[int]) -> None:
    dealt = [batches(num_samples, 4, rank=rank, world_size=3) for rank in range(3)]
    assert [[len(batch) for batch in process] for process in dealt] == [[share] for share in shares]
    assert [indices(process) for process in dealt] == [
        part.tolist() for part in np.array_split(indices(batches(num_samples, 12)), 3)
    ]


def test_fewer_images_than_processes_are_refused() -> None:
    with pytest.raises(InputError, match="2 training images cannot be shared by 3 processes"):
        batches(2, 1, rank=0, world_size=3)


def groups_of(chosen: list[list[SampleKey]], buckets: Sequence[int]) -> list[set[int]]:
    return [{buckets[key.index] for key in batch} for batch in chosen]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 7, 60])
def test_buckets_change_neither_the_number_of_batches_nor_that_an_image_comes_once(batch_size: int) -> None:
    chosen = batches(50, batch_size, buckets=BUCKETS)
    assert [len(batch) for batch in chosen] == [len(batch) for batch in batches(50, batch_size)]
    assert max(Counter(indices(chosen)).values()) == 1


def test_batches_are_of_one_bucket_but_for_what_is_left_over() -> None:
    """Buckets of 17, 17 and 16 images: four batches of four each; the two remaining images are dropped."""
    assert Counter(BUCKETS) == {0: 17, 1: 17, 2: 16}
    assert all(len(group) == 1 for group in groups_of(batches(50, 4, buckets=BUCKETS), BUCKETS))
    mixed = [group for group in groups_of(batches(50, 5, buckets=BUCKETS), BUCKETS) if len(group) > 1]
    assert mixed == [{0, 1, 2}]  # 2 + 2 + 1 images


def test_neighbouring_buckets_share_what_is_left_over() -> None:
    buckets = [0, 0, 1, 1, 2, 2, 3, 3]
    chosen = groups_of(batches(8, 4, buckets=buckets), buckets)
    assert sorted(chosen, key=min) == [{0, 1}, {2, 3}]


def test_chance_decides_which_images_are_left_out() -> None:
    buckets = [0] * 3 + [1] * 3
    seen = [indices(batches(6, 4, epoch=epoch, buckets=buckets)) for epoch in range(100)]
    missing = Counter(chain(*(set(range(6)).difference(four) for four in seen)))
    assert set(missing) == set(range(6)), "each image in some epoch"
    assert min(missing.values()) > 15, "33 times on average"


FEATURES = object_features(torch.randint(0, 5, (50, 3), generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_of_similar_images_are_an_epoch_like_others(world_size: int) -> None:
    whole = together(50, 4, world_size, features=FEATURES)
    plain = batches(50, 4 * world_size)
    assert [len(batch) for batch in whole] == [len(batch) for batch in plain]
    assert max(Counter(indices(whole)).values()) == 1
    assert set(indices(whole)) == set(indices(plain)), "the same images are left out"
    assert together(50, 4, world_size, features=FEATURES, start_batch=3) == whole[3:]
    assert together(50, 4, world_size, features=FEATURES, epoch=4) != whole


def test_images_of_a_batch_are_similar() -> None:
    def spread(chosen: list[list[SampleKey]]) -> float:
        return float(np.mean([FEATURES[[key.index for key in batch]].var(0).mean() for batch in chosen]))

    epochs = range(20)
    similar = np.mean([spread(batches(50, 5, epoch=epoch, features=FEATURES)) for epoch in epochs])
    random = np.mean([spread(batches(50, 5, epoch=epoch)) for epoch in epochs])
    assert similar < 0.75 * random
    one = FEATURES[:, :1]
    for batch in batches(50, 5, features=one):
        values = sorted(one[[key.index for key in batch], 0].tolist())
        between = ((one > values[0]) & (one < values[-1])).sum().item()
        assert between <= 3, "with one feature, batches are intervals"


def test_features_of_objects_have_one_scale() -> None:
    counts = torch.tensor([[0, 5, 100], [1, 5, 0], [2, 5, 7]])
    features = object_features(counts)
    torch.testing.assert_close(features.mean(0), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(features.std(0, correction=0), torch.tensor([1.0, 0.0, 1.0]))


def test_the_order_of_bucketed_batches_is_random() -> None:
    buckets = [0] * 40 + [1] * 40
    order = [min(group) for group in groups_of(batches(80, 4, buckets=buckets), buckets)]
    assert sorted(order) == [0] * 10 + [1] * 10
    changes = sum(one != other for one, other in pairwise(order))
    assert 4 <= changes <= 16, "9.5 on average, with a deviation of 2.2"
    assert order != [min(group) for group in groups_of(batches(80, 4, buckets=buckets, epoch=4), buckets)]
    mixed_last = [len(group) for group in groups_of(batches(50, 5, buckets=BUCKETS), BUCKETS)].index(3)
    assert mixed_last != 9, "the mixed batch is not always the last"


def test_evaluation_puts_images_of_one_size_together_and_each_comes_once() -> None:
    sizes = [(4, 6), (6, 4), (4, 6), None, (4, 6), None, (6, 4), (4, 6)]
    chosen = [[key.index for key in batch] for batch in SameSizeBatches(sizes, 2)]
    assert chosen == [[0, 2], [4, 7], [1, 6], [3], [5]]
    assert [[key.index for key in batch] for batch in SameSizeBatches(sizes, 1)] == [
        [i] for i in (0, 2, 4, 7, 1, 6, 3, 5)
    ]
    shares = [[[key.index for key in batch] for batch in SameSizeBatches(sizes, 2, rank, 2)] for rank in range(2)]
    assert shares == [[[0, 2], [1, 6], [5]], [[4, 7], [3]]]


def test_evaluation_resumes_at_any_batch_of_a_process() -> None:
    sizes = [(4, index // 3) for index in range(20)]
    whole = SameSizeBatches(sizes, 2, 1, 3)
    rest = SameSizeBatches(sizes, 2, 1, 3, start_batch=2)
    assert list(rest) == list(whole)[2:]
    assert len(rest) == len(whole) - 2 > 0


def test_more_processes_than_evaluation_batches() -> None:
    assert [len(SameSizeBatches([(4, 6)] * 3, 2, rank, 4)) for rank in range(4)] == [1, 1, 0, 0]


def test_an_empty_batch_size_is_refused() -> None:
    with pytest.raises(InputError, match="at least 1, got 0"):
        batches(3, 0)
    with pytest.raises(InputError, match="at least 1, got 0"):
        SameSizeBatches([], 0)


def test_buckets_are_quantiles_of_width_by_height() -> None:
    widths = np.random.default_rng(0).permutation(np.arange(100, 200))
    buckets = aspect_buckets([(100, int(width)) for width in widths], 4)
    assert buckets == [(int(width) - 100) // 25 for width in widths]


def test_images_of_one_ratio_share_a_bucket_and_the_scale_does_not_matter() -> None:
    sizes = [(480, 640)] * 6 + [(960, 1280)] * 3 + [(640, 480)] * 4 + [(1, 9), (500, 500)]
    assert aspect_buckets(sizes, 3) == [1] * 9 + [0] * 4 + [2, 0]


@pytest.mark.parametrize("count", [2, 3, 8])
def test_wider_images_are_in_later_buckets(count: int) -> None:
    random = np.random.default_rng(count)
    sizes = [(int(height), int(width)) for height, width in random.integers(1, 12, (200, 2))]
    buckets = aspect_buckets(sizes, count)
    assert set(buckets) <= set(range(count))
    assert max(Counter(buckets).values()) < 2 * 200 / count
    of_ratio = sorted({(width / height, bucket) for (height, width), bucket in zip(sizes, buckets, strict=True)})
    assert [bucket for _, bucket in of_ratio] == sorted(bucket for _, bucket in of_ratio)
    assert len({ratio for ratio, _ in of_ratio}) == len(of_ratio), "one bucket for each aspect ratio"


def test_one_bucket_is_no_grouping_and_needs_no_sizes() -> None:
    assert aspect_buckets([None, (4, 6)], 1) is None


@pytest.mark.parametrize("unknown", [None, (0, 6), (4, 0)])
def test_buckets_need_all_sizes(unknown: tuple[int, int] | None) -> None:
    with pytest.raises(InputError, match=r"lack it for 2 of 3: add width and height .* or set data.aspect_buckets=1"):
        aspect_buckets([unknown, (4, 6), unknown], 4)


def test_no_bucket_is_refused() -> None:
    with pytest.raises(InputError, match=r"data\.aspect_buckets must be 1 or more, got 0"):
        aspect_buckets([(4, 6)], 0)
