"""Packing items into buckets."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distckpt.plan import pack

MIB = 1 << 20
RUN_BYTES = 4 * MIB

sizes_of = st.lists(
    st.one_of(st.integers(0, 4096), st.integers(0, 3 * RUN_BYTES), st.just(RUN_BYTES)), max_size=200
)


@given(sizes_of, st.integers(1, 9))
def test_every_item_is_in_one_bucket_in_the_order_of_the_plan(sizes: list[int], num_buckets: int) -> None:
    buckets = pack(sizes, num_buckets)
    assert len(buckets) <= num_buckets
    assert all(buckets)
    assert all(bucket == sorted(bucket) for bucket in buckets)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(sizes)))


@given(sizes_of, st.integers(1, 9))
def test_no_bucket_exceeds_the_mean_by_more_than_a_run(sizes: list[int], num_buckets: int) -> None:
    largest = max([RUN_BYTES, *sizes])
    for bucket in pack(sizes, num_buckets):
        assert sum(sizes[index] for index in bucket) <= sum(sizes) / num_buckets + largest


@given(sizes_of, st.integers(1, 9))
def test_the_same_sizes_are_packed_alike(sizes: list[int], num_buckets: int) -> None:
    assert pack(sizes, num_buckets) == pack(tuple(sizes), num_buckets)


def test_small_neighbours_stay_together() -> None:
    buckets = pack([1024] * 40_000, 4)
    breaks = sum(after - before != 1 for bucket in buckets for before, after in pairwise(bucket))
    assert breaks <= 10


@pytest.mark.parametrize("num_buckets", [1, 3])
def test_nothing_makes_no_bucket(num_buckets: int) -> None:
    assert pack([], num_buckets) == []


def test_empty_items_are_items() -> None:
    assert pack([0, 0, 0], 2) == [[0, 1, 2]]


def test_large_items_go_to_different_buckets() -> None:
    assert pack([100 * MIB, 1, 100 * MIB], 2) == [[0, 1], [2]]
