"""Packing items into buckets, and dividing those of replicas among ranks."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distckpt.plan import WHOLE_BYTES, pack, share, share_of

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


@st.composite
def replicated(draw: st.DrawFn) -> tuple[int, int]:
    """Bytes and rows of an item: small or large, of few rows or many, or one that cannot be split."""
    rows = draw(st.integers(0, 3) | st.integers(0, 5000))
    if rows < 2:
        return draw(st.integers(0, 8 * MIB)), rows
    nbytes = draw(st.integers(0, 2 * MIB) | st.sampled_from([MIB - 1, MIB, 8 * MIB, 64 * MIB]))
    return nbytes // rows * rows, rows


replicated_items = st.lists(replicated(), max_size=60)
num_members = st.integers(1, 9) | st.just(1000)


@given(replicated_items, num_members)
def test_every_row_is_written_once(items: list[tuple[int, int]], members: int) -> None:
    parts = share(items, members)
    assert len(parts) == members
    assert all(part == sorted(part) for part in parts)
    written: list[list[tuple[int, int]]] = [[] for _ in items]
    for part in parts:
        for item, first, stop in part:
            written[item].append((first, stop))
    for (nbytes, rows), runs in zip(items, written, strict=True):
        if nbytes < WHOLE_BYTES or rows < 2:
            assert runs == [(0, rows)]
        else:
            assert all(first < stop for first, stop in runs)
            # In the order of the members, which is that of the rows.
            assert [runs[0][0], *(stop for _, stop in runs)] == [*(first for first, _ in runs), rows]
    split = sum(len(runs) > 1 for runs in written)
    assert split <= members - 1
    assert sum(map(len, parts)) <= len(items) + members - 1


@given(replicated_items, num_members)
def test_members_write_about_equal_bytes(items: list[tuple[int, int]], members: int) -> None:
    limit = max([WHOLE_BYTES, *(nbytes // max(1, rows) for nbytes, rows in items)])
    mean = sum(nbytes for nbytes, _ in items) / members
    for part in share(items, members):
        found = 0
        for item, first, stop in part:
            nbytes, rows = items[item]
            found += nbytes if rows < 2 else nbytes // rows * (stop - first)
        assert abs(found - mean) <= limit


@given(replicated_items, num_members, st.data())
def test_a_member_finds_its_own_part(items: list[tuple[int, int]], members: int, data: st.DataObject) -> None:
    member = data.draw(st.integers(0, members - 1))
    assert share_of(tuple(items), members, member) == share(items, members)[member]


@given(st.lists(st.integers(256, 20_000), max_size=20), num_members)
def test_no_part_of_a_large_item_is_tiny(rows: list[int], members: int) -> None:
    parts = share([(4096 * count, count) for count in rows], members)
    assert all(stop - first >= 63 for part in parts for _, first, stop in part)


def test_one_large_item_is_divided_evenly() -> None:
    assert share([(64 * MIB, 4096)], 4) == [[(0, 1024 * i, 1024 * (i + 1))] for i in range(4)]
    # Rows of 16 MiB: three members write two of them and one writes one.
    assert share([(112 * MIB, 7)], 4) == [[(0, 0, 2)], [(0, 2, 4)], [(0, 4, 5)], [(0, 5, 7)]]


def test_nothing_and_empty_items_are_shared() -> None:
    assert share([], 2) == [[], []]
    assert share([(0, 0), (0, 5)], 2) == [[(0, 0, 0), (1, 0, 5)], []]
    assert share([(2 * MIB, 0), (0, 3)], 2) == [[], [(0, 0, 0), (1, 0, 3)]]


def test_many_items_among_many_members_take_no_time() -> None:
    draw = random.Random(7)
    items = [(draw.choice([100, 10 << 10, 4 * MIB, 64 * MIB]), 4096) for _ in range(100_000)]
    started = time.process_time()
    parts = share(items, 1000)
    assert share_of(items, 1000, 500) == parts[500]
    assert time.process_time() - started < 10
    assert sum(map(len, parts)) < 101_000
