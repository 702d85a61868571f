"""The order of pictures and the randomness of training are functions of (seed, step, position) alone."""

from itertools import islice

import pytest
import torch

from unet_attn.sampler import (
    NOISE,
    TIME,
    GlobalBatchSampler,
    SampleKey,
    batch_noise,
    derived_seed,
    epoch_order,
    sample_generator,
    stratified_uniform,
)


def keys(sampler: GlobalBatchSampler, micro_batches: int) -> list[SampleKey]:
    return [key for batch in islice(sampler, micro_batches) for key in batch]


def test_derived_seeds_are_the_same_on_every_machine() -> None:
    assert derived_seed(0, NOISE, 1, 0) == 8835303392297807559
    assert derived_seed(-7) != derived_seed(7)


def test_neighbouring_keys_give_unlike_streams() -> None:
    draws = [
        torch.rand(1, generator=sample_generator(*key)).item() for key in [(0, 1, 2), (0, 2, 1), (1, 1, 2), (0, 1)]
    ]

    assert len(set(draws)) == 4


def test_every_epoch_is_a_permutation_and_another_one() -> None:
    first, second = epoch_order(5, 0, 11), epoch_order(5, 1, 11)

    assert sorted(first) == sorted(second) == list(range(11))
    assert first != second
    assert epoch_order(5, 0, 11) == first


def test_the_tail_of_an_epoch_is_filled_from_the_next() -> None:
    drawn = keys(GlobalBatchSampler(7, 4, seed=3), 7)

    assert [key.index for key in drawn] == [
        *epoch_order(3, 0, 7),
        *epoch_order(3, 1, 7),
        *epoch_order(3, 2, 7),
        *epoch_order(3, 3, 7),
    ]
    assert [key.step for key in drawn[:5]] == [1, 1, 1, 1, 2]
    assert [key.position for key in drawn[:5]] == [0, 1, 2, 3, 0]


def test_resuming_in_the_middle_of_an_epoch_goes_on_with_the_same_samples() -> None:
    # 20 pictures in batches of 2, stopped after 13 batches, in the second epoch
    straight = keys(GlobalBatchSampler(20, 2, seed=0), 20)
    resumed = keys(GlobalBatchSampler(20, 2, seed=0, start_step=14), 7)

    assert resumed == straight[26:]


@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 1), (1, 3), (2, 3)])
def test_processes_and_micro_batches_share_out_the_same_global_batch(world_size: int, accumulation: int) -> None:
    whole = keys(GlobalBatchSampler(17, 12, seed=1), 5)
    shared = [
        key
        for rank in range(world_size)
        for key in keys(
            GlobalBatchSampler(17, 12, seed=1, rank=rank, world_size=world_size, accumulation=accumulation),
            5 * accumulation,
        )
    ]

    assert sorted(shared, key=lambda key: (key.step, key.position)) == whole


def test_positions_are_those_of_the_keys() -> None:
    sampler = GlobalBatchSampler(17, 12, seed=1, rank=1, world_size=2, accumulation=3)

    for micro, batch in enumerate(islice(sampler, 3)):
        assert [key.position for key in batch] == list(sampler.positions(micro))


def test_a_data_set_smaller_than_the_batch_repeats_itself() -> None:
    drawn = keys(GlobalBatchSampler(3, 7, seed=0), 1)

    assert [key.index for key in drawn] == [*epoch_order(0, 0, 3), *epoch_order(0, 1, 3), epoch_order(0, 2, 3)[0]]


def test_a_batch_that_does_not_split_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"batch size 14 .* 2 process\(es\) x 3 accumulation .* a multiple of 6"):
        GlobalBatchSampler(17, 14, seed=0, world_size=2, accumulation=3)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        GlobalBatchSampler(0, 4, seed=0)


def test_noise_of_a_sample_does_not_depend_on_what_is_drawn_beside_it() -> None:
    whole = batch_noise(2, 5, range(7), (3, 5, 2))

    torch.testing.assert_close(batch_noise(2, 5, range(3, 7), (3, 5, 2)), whole[3:], rtol=0, atol=0)
    assert whole.shape == (7, 3, 5, 2)
    assert not torch.equal(batch_noise(2, 6, range(7), (3, 5, 2)), whole)
    assert abs(batch_noise(2, 5, range(7), (101,)).mean().item()) < 0.15


def test_stratified_times_put_one_sample_into_each_interval() -> None:
    drawn = stratified_uniform(0, 3, 13)

    assert sorted((drawn * 13).floor().int().tolist()) == list(range(13))
    assert not torch.equal(drawn, drawn.sort().values)
    assert not torch.equal(drawn, stratified_uniform(0, 4, 13))
    assert drawn.max() < 1
    assert TIME != NOISE


BUCKETS = [0] * 11 + [2] * 5 + [7]  # a large one, a small one, and one with a single picture


def test_with_buckets_a_global_batch_is_of_one_bucket_whoever_shares_it() -> None:
    whole = keys(GlobalBatchSampler(17, 4, seed=1, buckets=BUCKETS), 30)
    shared = [
        key
        for rank in range(2)
        for key in keys(GlobalBatchSampler(17, 4, seed=1, buckets=BUCKETS, rank=rank, world_size=2, accumulation=2), 60)
    ]

    for step in range(1, 31):
        assert len({BUCKETS[key.index] for key in whole if key.step == step}) == 1
    assert sorted(shared, key=lambda key: (key.step, key.position)) == whole


def test_with_buckets_resuming_goes_on_with_the_same_samples() -> None:
    straight = keys(GlobalBatchSampler(17, 4, seed=1, buckets=BUCKETS), 40)

    for start in (2, 6, 17, 33):
        resumed = keys(GlobalBatchSampler(17, 4, seed=1, buckets=BUCKETS, start_step=start), 40 - start + 1)
        assert resumed == straight[4 * (start - 1) :]


def test_with_buckets_pictures_of_all_shapes_are_seen_equally_often() -> None:
    drawn = [key.index for key in keys(GlobalBatchSampler(17, 4, seed=1, buckets=BUCKETS), 17 * 12)]
    counts = [drawn.count(index) for index in range(17)]

    # 48 epochs of 17 pictures; a bucket is ahead by less than a batch
    assert all(47 <= count <= 48 for count in counts[:16]) and 48 <= counts[16] <= 52


def test_with_buckets_every_picture_has_been_seen_after_the_first_epoch() -> None:
    steps = 3 + 2 + 1  # batches of 4 that hold 11, 5 and 1 pictures
    drawn = [key.index for key in keys(GlobalBatchSampler(17, 4, seed=1, buckets=BUCKETS), steps)]

    assert set(drawn) == set(range(17))


def test_one_bucket_is_the_same_as_none() -> None:
    plain, one = GlobalBatchSampler(17, 4, seed=1), GlobalBatchSampler(17, 4, seed=1, buckets=[3] * 17)

    assert keys(plain, 20) == keys(one, 20)


def bucket_of(sampler: GlobalBatchSampler, step: int) -> bool:
    return sampler.indices(step)[0] >= 8


def test_the_order_of_buckets_changes_from_epoch_to_epoch() -> None:
    sampler = GlobalBatchSampler(16, 4, seed=0, buckets=[0] * 8 + [1] * 8)
    plans = {tuple(bucket_of(sampler, step) for step in range(4 * n + 1, 4 * n + 5)) for n in range(12)}

    assert len(plans) > 3


def test_bucket_numbers_must_be_one_for_each_picture() -> None:
    with pytest.raises(ValueError, match="16 bucket numbers for 17 pictures"):
        GlobalBatchSampler(17, 4, seed=0, buckets=[0] * 16)
