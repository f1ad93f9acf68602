"""The arena: no overlap, no byte over budget, nothing promised that cannot be had."""

from __future__ import annotations

import ctypes
import errno
import functools
import gc
import mmap
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distckpt import arena as room
from distckpt.arena import PAGE_BYTES, Arena, Range, Slab, align, available_memory
from distckpt.errors import StagingError

BUDGET_PAGES = 32
BUDGET = BUDGET_PAGES * PAGE_BYTES
SLAB = 4 * PAGE_BYTES
EHWPOISON = 133


@pytest.fixture
def arena() -> Iterator[Arena]:
    opened = Arena(BUDGET)
    yield opened
    opened.close()


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes an arena of BUDGET bytes prepare its memory in 8 slabs of SLAB bytes."""
    monkeypatch.setattr(room, "MIN_SLAB_BYTES", SLAB)
    monkeypatch.setattr(room, "EXTENT_BYTES", SLAB)


class Gate:
    """An `on_slab` that lets no slab pass before it is opened."""

    def __init__(self) -> None:
        self.arrived: list[int] = []
        self._turns = threading.Semaphore(0)

    def __call__(self, slab: Slab) -> None:
        self.arrived.append(slab.index)
        assert self._turns.acquire(timeout=20)

    def open(self, turns: int = 1000) -> None:
        self._turns.release(turns)

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self.arrived) >= count)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_at(barrier: threading.Barrier) -> None:
    barrier.wait()


def builders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "distckpt-arena"]


def memory_of(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def overlap(ranges: list[Range]) -> bool:
    ordered = sorted(ranges)
    return any(
        left.slab == right.slab and left.offset + left.nbytes > right.offset
        for left, right in pairwise(ordered)
    )


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("reserve"), st.integers(1, BUDGET), st.integers(0, 2 * BUDGET)),
            st.tuples(st.just("some"), st.integers(1, BUDGET), st.integers(1, BUDGET)),
            st.tuples(st.just("prepare"), st.integers(0, 2 * BUDGET), st.integers(0, 1)),
            st.tuples(st.just("release"), st.integers(0, 99), st.just(0)),
            st.tuples(st.just("quarantine"), st.integers(0, 99), st.just(0)),
        ),
        max_size=40,
    )
)
def test_ranges_never_overlap_and_never_exceed_the_budget(steps: list[tuple[str, int, int]]) -> None:
    arena = Arena(BUDGET)
    held: list[Range] = []
    lost: list[Range] = []
    prepared: list[Future[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "MIN_SLAB_BYTES", SLAB)
        patch.setattr(room, "EXTENT_BYTES", SLAB)
        try:
            for what, number, other in steps:
                if what in {"reserve", "some"}:
                    least = number if what == "reserve" else min(number, other)
                    is_building = arena.reserved_bytes > sum(
                        slab.nbytes for slab in list(arena.slabs.values())
                    )
                    found: Range | None = None
                    if what == "reserve":
                        found = arena.try_reserve(number, other)
                    elif not held and not lost:
                        found = arena.reserve_some(max(number, other), least, timeout_s=10)
                    if found is None:
                        # Only if that much is not free in one piece, whatever the arena would give back.
                        assert held or lost or is_building
                        assert is_building or what == "some" or number > BUDGET - arena.reserved_bytes
                        continue
                    assert align(least, PAGE_BYTES) <= found.nbytes
                    assert found.nbytes <= align(max(number, other if what == "some" else 0), PAGE_BYTES)
                    assert found.offset % PAGE_BYTES == 0
                    assert found.offset + found.nbytes <= arena.slabs[found.slab].nbytes
                    held.append(found)
                elif what == "prepare":
                    prepared.append(arena.prepare(number))
                    if other:
                        assert prepared[-1].result(10) >= min(number, BUDGET)
                elif held and what == "release":
                    arena.release(held.pop(number % len(held)))
                elif held:
                    lost.append(held.pop(number % len(held)))
                assert not overlap(held + lost)
                assert arena.reserved_bytes <= BUDGET
                assert sum(slab.nbytes for slab in list(arena.slabs.values())) <= BUDGET
                assert {taken.slab for taken in held + lost} <= arena.slabs.keys()
            for future in prepared:
                assert future.result(10) <= BUDGET
            for taken in held:
                arena.release(taken)
            if not lost:
                whole = arena.reserve(BUDGET, timeout_s=10)
                assert whole.nbytes == BUDGET, "what was released did not grow together"
        finally:
            arena.close()
    assert not builders()


@given(st.permutations(range(8)))
def test_released_neighbours_grow_together_in_any_order(order: list[int]) -> None:
    arena = Arena(BUDGET)
    try:
        ranges = [arena.try_reserve(4 * PAGE_BYTES, BUDGET) for _ in range(8)]
        assert arena.try_reserve(1) is None
        for index in order:
            taken = ranges[index]
            assert taken is not None
            arena.release(taken)
        assert arena.try_reserve(BUDGET) == Range(0, 0, BUDGET)
    finally:
        arena.close()


def test_a_range_is_shared_memory_that_another_mapping_sees(arena: Arena) -> None:
    taken = arena.try_reserve(100)
    assert taken is not None
    ctypes.memmove(arena.address(taken), b"hello", 5)
    slab = arena.slabs[taken.slab]
    with mmap.mmap(slab.fd, slab.nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
        assert mapping[taken.offset : taken.offset + 5] == b"hello"


def test_pages_are_reserved_at_once(arena: Arena) -> None:
    taken = arena.try_reserve(BUDGET)
    assert taken is not None
    assert memory_of(arena.slabs[0].fd) == BUDGET


def refuse_to_populate(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real = room._madvise

    def fake(address: int, nbytes: int, advice: int) -> None:
        if advice == room._MADV_POPULATE_WRITE:
            raise OSError(number, os.strerror(number))
        real(address, nbytes, advice)

    monkeypatch.setattr(room, "_madvise", fake)


def test_pages_are_reserved_where_the_kernel_cannot_populate_them(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_populate(monkeypatch, errno.EINVAL)
    assert arena.try_reserve(BUDGET) is not None
    assert memory_of(arena.slabs[0].fd) == BUDGET


@pytest.mark.parametrize("number", [errno.EFAULT, errno.ENOMEM, EHWPOISON])
def test_a_slab_that_cannot_be_populated_leaves_nothing(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refuse_to_populate(monkeypatch, number)
    with pytest.raises(StagingError, match="cannot reserve a host memory slab") as caught:
        arena.try_reserve(BUDGET)
    # While the error, and its frames with it, is kept.
    assert "memfd:distckpt" not in Path("/proc/self/maps").read_text()
    assert caught.tb is not None
    assert arena.reserved_bytes == 0
    monkeypatch.undo()
    assert arena.try_reserve(BUDGET) is not None


def test_the_errors_of_madvise_are_seen() -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOMEM)):
        room._madvise(PAGE_BYTES, PAGE_BYTES, room._MADV_POPULATE_WRITE)


def test_more_than_the_budget_is_an_error_and_what_others_hold_is_waited_for(arena: Arena) -> None:
    with pytest.raises(StagingError, match="--ckpt-host-memory"):
        arena.try_reserve(BUDGET + 1)
    taken = arena.try_reserve(BUDGET)
    assert taken is not None
    assert arena.try_reserve(1) is None
    started = time.monotonic()
    with pytest.raises(StagingError, match=r"waited 0 s for 1 bytes .*--ckpt-host-memory"):
        arena.reserve(1, timeout_s=0.05)
    assert time.monotonic() - started < 20
    threading.Timer(0.05, arena.release, (taken,)).start()
    assert arena.reserve(BUDGET, timeout_s=5).nbytes == BUDGET


def test_who_waits_is_called_while_it_waits(arena: Arena) -> None:
    taken = arena.reserve(BUDGET, timeout_s=1, on_wait=lambda: pytest.fail("there is nothing to wait for"))
    calls = []

    def give_back() -> None:
        calls.append(1)
        if len(calls) == 2:
            arena.release(taken)

    assert arena.reserve(1, timeout_s=5, on_wait=give_back).nbytes == PAGE_BYTES
    assert len(calls) == 2


def test_a_spare_part_of_the_budget_is_left(arena: Arena) -> None:
    spare = 4 * PAGE_BYTES
    assert arena.try_reserve(BUDGET, spare_bytes=spare) is None
    taken = arena.try_reserve(BUDGET - spare, spare_bytes=spare)
    assert taken is not None
    assert arena.try_reserve(1, spare_bytes=spare) is None
    assert arena.try_reserve(spare) is not None


def test_free_slabs_that_are_too_small_are_given_back_for_a_larger_one(arena: Arena) -> None:
    small = [arena.try_reserve(BUDGET // 4) for _ in range(4)]
    assert len(arena.slabs) == 4
    for taken in small:
        assert taken is not None
        arena.release(taken)
    large = arena.try_reserve(BUDGET)
    assert large is not None
    assert large.slab == 4, "the number of a slab is never used again"
    assert arena.slabs.keys() == {4}


def test_release_takes_no_lock(arena: Arena) -> None:
    taken = arena.try_reserve(1)
    assert taken is not None
    with arena._lock:
        # As a finalizer would that interrupts `try_reserve`.
        releasing = threading.Thread(target=arena.release, args=(taken,))
        releasing.start()
        releasing.join(5)
        assert not releasing.is_alive()
    assert arena.try_reserve(BUDGET) is not None


def test_many_threads_share_an_arena(arena: Arena) -> None:
    failures: list[str] = []

    def work(number: int) -> None:
        for _ in range(50):
            taken = arena.reserve(PAGE_BYTES, timeout_s=10)
            address = arena.address(taken)
            ctypes.memset(address, number, PAGE_BYTES)
            if ctypes.string_at(address, PAGE_BYTES) != bytes([number]) * PAGE_BYTES:
                failures.append(f"{taken} of {number} was written to")
            arena.release(taken)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not failures


def test_a_closed_arena_gives_its_memory_back_and_refuses() -> None:
    arena = Arena(BUDGET)
    assert arena.try_reserve(BUDGET) is not None
    slab = weakref.ref(arena.slabs[0])
    fd = arena.slabs[0].fd
    arena.close()
    arena.close()
    assert slab() is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(StagingError, match="closed"):
        arena.try_reserve(1)


def test_what_pinned_a_slab_is_undone_before_it_goes() -> None:
    slab = Slab(0, PAGE_BYTES)
    undone: list[bool] = []
    fd = slab.fd
    slab.on_release.append(lambda: undone.append(os.fstat(fd).st_size == PAGE_BYTES))
    del slab
    gc.collect()
    assert undone == [True]


def _write(fd: int, data: bytes) -> None:
    os.write(fd, data)


def test_a_forked_child_does_not_undo_what_its_parent_pinned() -> None:
    slab = Slab(0, PAGE_BYTES)
    reader, writer = os.pipe()
    slab.on_release.append(functools.partial(_write, writer, b"undone"))
    child = os.fork()
    if child == 0:
        del slab
        os._exit(0)
    os.waitpid(child, 0)
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 10)
    del slab
    assert os.read(reader, 10) == b"undone"
    os.close(reader)
    os.close(writer)


def test_the_memory_of_a_closed_arena_goes_though_others_map_it(arena: Arena) -> None:
    free = arena.reserve(BUDGET // 2, timeout_s=1)
    used = arena.reserve(BUDGET // 2, timeout_s=1)
    assert used.slab != free.slab
    arena.release(free)
    slab = arena.slabs[used.slab]
    ctypes.memset(arena.address(used), 7, used.nbytes)
    # As an idle worker or a forked child.
    fds = [os.dup(arena.slabs[taken.slab].fd) for taken in (free, used)]
    arena.close()
    assert memory_of(fds[0]) == 0
    assert ctypes.string_at(slab.address, slab.nbytes) == bytes([7]) * (BUDGET // 2), "still staged"
    for fd in fds:
        os.close(fd)


def test_slabs_that_are_exchanged_for_a_larger_one_go_though_others_map_them(arena: Arena) -> None:
    arena.release(arena.reserve(BUDGET // 2, timeout_s=1))
    fd = os.dup(arena.slabs[0].fd)
    assert arena.try_reserve(BUDGET) is not None
    assert memory_of(fd) == 0
    os.close(fd)


def test_a_forked_child_that_closes_the_arena_takes_no_memory_from_its_parent(arena: Arena) -> None:
    taken = arena.reserve(BUDGET, timeout_s=1)
    arena.release(taken)
    child = os.fork()
    if child == 0:
        arena.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert memory_of(arena.slabs[0].fd) == BUDGET


@pytest.mark.usefixtures("small_slabs")
def test_memory_is_prepared_in_the_background(arena: Arena) -> None:
    gate = Gate()
    arena.on_slab = gate
    future = arena.prepare(BUDGET - 1)
    assert arena.reserved_bytes == BUDGET, "what is under construction counts at once"
    assert not arena.slabs
    gate.open()
    assert future.result(10) == BUDGET
    assert [slab.nbytes for slab in arena.slabs.values()] == [SLAB] * 8
    assert sorted(gate.arrived) == sorted(arena.slabs)
    assert all(memory_of(slab.fd) == SLAB for slab in arena.slabs.values())
    wait_until(lambda: not builders())


@pytest.mark.parametrize(
    ("asked", "slabs"),
    [
        (1, {PAGE_BYTES}),
        (100 << 20, {100 << 20}),
        (130 << 20, {128 << 20, 2 << 20}),
        (32 * (200 << 20), {128 << 20}),
        (64 << 30, {1 << 30}),
    ],
)
def test_the_sizes_of_prepared_slabs(asked: int, slabs: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build(index: int, nbytes: int, on_slab: object) -> Slab:
        built.append(nbytes)
        slab = Slab(index, PAGE_BYTES)
        slab.nbytes = nbytes
        return slab

    monkeypatch.setattr(room, "_make", build)
    monkeypatch.setattr(room, "available_memory", lambda: 1 << 60)
    monkeypatch.setattr(room, "_madvise", lambda *_: None)
    arena = Arena(1 << 50)
    assert arena.prepare(asked).result(10) == align(asked, PAGE_BYTES)
    assert set(built) == slabs
    arena.close()


@pytest.mark.usefixtures("small_slabs")
def test_a_slab_is_used_as_soon_as_it_is_ready(arena: Arena) -> None:
    gate = Gate()
    arena.on_slab = gate
    future = arena.prepare(BUDGET)
    assert arena.try_reserve(SLAB) is None
    gate.open(1)
    assert arena.reserve(SLAB, timeout_s=10).nbytes == SLAB
    assert arena.try_reserve(1) is None
    assert not future.done()
    gate.open(1)
    assert arena.reserve_some(BUDGET, 1, timeout_s=10).nbytes == SLAB
    gate.open()
    assert future.result(10) == BUDGET


@pytest.mark.usefixtures("small_slabs")
def test_a_second_prepare_adds_what_is_missing(arena: Arena) -> None:
    gate = Gate()
    arena.on_slab = gate
    first = arena.prepare(SLAB)
    gate.wait_for(1)
    second, third = arena.prepare(3 * SLAB), arena.prepare(2 * SLAB)
    assert arena.reserved_bytes == 3 * SLAB
    gate.open(1)
    assert first.result(10) == SLAB
    assert not second.done()
    gate.open()
    assert third.result(10) >= 2 * SLAB
    assert second.result(10) == 3 * SLAB
    assert arena.prepare(0).result(0) == arena.prepare(3 * SLAB).result(0) == 3 * SLAB
    assert arena.prepare(100 * BUDGET).result(10) == BUDGET


@pytest.mark.usefixtures("small_slabs")
def test_what_no_slab_under_construction_can_serve_is_not_waited_for(arena: Arena) -> None:
    gate = Gate()
    arena.on_slab = gate
    future = arena.prepare(2 * SLAB)
    gate.wait_for(1)
    gate.open(1)
    wait_until(lambda: len(arena.slabs) == 1)
    first = arena.try_reserve(SLAB)
    # The second is under construction.
    assert first is not None
    assert arena.try_reserve(SLAB) is None
    arena.on_slab = None
    larger = arena.try_reserve(2 * SLAB)
    assert larger is not None
    assert arena.try_reserve(BUDGET - 2 * SLAB) is None, "the budget does not allow it now"
    gate.open()
    assert future.result(10) >= 2 * SLAB
    arena.release(larger)
    arena.release(first)
    assert arena.reserve(BUDGET, timeout_s=10).nbytes == BUDGET


@pytest.mark.usefixtures("small_slabs")
def test_slabs_are_built_by_several_threads_at_once() -> None:
    meeting = threading.Barrier(2, timeout=20)
    # The second processor need not exist.
    arena = Arena(2 * SLAB, lambda _: wait_at(meeting), lambda: {0, 1})
    assert arena.prepare(2 * SLAB).result(20) == 2 * SLAB
    arena.close()


@pytest.mark.usefixtures("small_slabs")
def test_building_threads_run_where_they_are_told() -> None:
    ours = os.sched_getaffinity(0)
    cpu = max(ours)
    seen: list[set[int]] = []
    arena = Arena(BUDGET, lambda _: seen.append(os.sched_getaffinity(0)), lambda: {cpu})
    arena.prepare(2 * SLAB).result(10)
    # A processor that this machine does not have.
    arena.cpus = lambda: {1000}
    arena.prepare(3 * SLAB).result(10)
    arena.cpus = lambda: None
    arena.prepare(4 * SLAB).result(10)
    assert seen == [{cpu}, {cpu}, ours, ours]
    assert os.sched_getaffinity(0) == ours
    arena.close()


@pytest.mark.usefixtures("small_slabs")
def test_no_daemon_builds_slabs(arena: Arena) -> None:
    gate = Gate()
    arena.on_slab = gate
    caller = threading.Thread(target=arena.prepare, args=(BUDGET,), daemon=True)
    caller.start()
    caller.join(10)
    assert builders()
    assert not any(builder.daemon for builder in builders())
    gate.open()


@pytest.mark.usefixtures("small_slabs")
def test_what_comes_of_the_memory_cannot_be_cancelled(arena: Arena) -> None:
    gate = Gate()
    arena.on_slab = gate
    future = arena.prepare(BUDGET)
    assert not future.cancel()
    gate.open()
    assert future.result(10) == BUDGET


@pytest.mark.usefixtures("small_slabs")
def test_what_is_being_built_is_not_taken_by_others(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    arena.on_slab = gate
    arena.cpus = lambda: {0}
    # As before the first page of the first slab is taken.
    monkeypatch.setattr(room, "available_memory", lambda: 4 * SLAB)
    future = arena.prepare(3 * SLAB)
    gate.wait_for(1)
    assert arena.try_reserve(4 * SLAB) is None, "it may be there when that is over"
    arena.check(5 * SLAB)
    with pytest.raises(StagingError, match="--ckpt-host-memory"):
        # No thread has begun the other two.
        arena.check(5 * SLAB + PAGE_BYTES)
    gate.open()
    assert future.result(10) == 3 * SLAB


@pytest.mark.usefixtures("small_slabs")
def test_closing_ends_the_building() -> None:
    gate = Gate()
    arena = Arena(BUDGET, gate, lambda: {0})
    future = arena.prepare(BUDGET)
    gate.wait_for(1)
    closing = threading.Thread(target=arena.close)
    closing.start()
    with pytest.raises(StagingError, match="closed"):
        future.result(10)
    assert closing.is_alive(), "what is in the making is waited for"
    gate.open()
    closing.join(10)
    assert not closing.is_alive()
    assert not builders()
    assert len(gate.arrived) == 1, "the others were not begun"
    assert arena.reserved_bytes == 0
    with pytest.raises(StagingError, match="closed"):
        arena.prepare(1).result(0)
    with pytest.raises(StagingError, match="closed"):
        arena.reserve_some(2, 1, timeout_s=1)


@pytest.mark.usefixtures("small_slabs")
def test_who_learns_of_the_memory_may_use_and_close_the_arena(arena: Arena) -> None:
    done = threading.Event()

    def use(_: object) -> None:
        arena.reserve(SLAB, timeout_s=1)
        arena.close()
        done.set()

    arena.prepare(2 * SLAB).add_done_callback(use)
    assert done.wait(10)
    wait_until(lambda: not builders())


@pytest.mark.usefixtures("small_slabs")
def test_an_arena_that_is_dropped_ends_the_building() -> None:
    gate = Gate()
    arena = Arena(BUDGET, gate, lambda: {0})
    future = arena.prepare(BUDGET)
    gate.open(1)
    gate.wait_for(2)
    slab = weakref.ref(arena.slabs[0])
    del arena
    assert slab() is None
    with pytest.raises(StagingError):
        future.result(0)
    gate.open()
    wait_until(lambda: not builders())
    assert len(gate.arrived) == 2


class Refusal:
    """An `on_slab` that fails until it is appeased, and remembers what it was given."""

    def __init__(self) -> None:
        self.slabs: list[weakref.ref[Slab]] = []
        self.error: Exception | None = ValueError("no")

    def __call__(self, slab: Slab) -> None:
        self.slabs.append(weakref.ref(slab))
        if self.error is not None:
            raise self.error


@pytest.mark.usefixtures("small_slabs")
def test_an_error_of_the_building_reaches_who_waits_for_it(arena: Arena) -> None:
    refusal = Refusal()
    arena.on_slab = refusal
    future = arena.prepare(BUDGET)
    with pytest.raises(StagingError, match="ValueError: no") as caught:
        future.result(10)
    wait_until(lambda: not builders())
    assert isinstance(caught.value.__cause__, ValueError)
    assert arena.reserved_bytes == 0
    # Though the error is kept.
    assert all(slab() is None for slab in refusal.slabs)
    with pytest.raises(StagingError, match="ValueError: no"):
        arena.reserve(1, timeout_s=5)
    # It does not stick.
    refusal.error = None
    assert arena.reserve(1, timeout_s=5).nbytes == PAGE_BYTES
    refusal.error = StagingError("not now")
    with pytest.raises(StagingError, match="not now"):
        arena.prepare(BUDGET).result(10)
    # Another builder may be about to fail for the same reason.
    wait_until(lambda: not builders())
    # A new preparation is a new try.
    refusal.error = None
    assert arena.prepare(2 * SLAB).result(10) == 2 * SLAB
    assert arena.reserve(BUDGET // 2, timeout_s=5).nbytes == BUDGET // 2


@pytest.mark.usefixtures("small_slabs")
def test_an_error_is_no_business_of_who_is_served_all_the_same(arena: Arena) -> None:
    refusal = Refusal()
    arena.on_slab = lambda slab: refusal(slab) if slab.index == 1 else None
    arena.cpus = lambda: {0}
    assert isinstance(arena.prepare(BUDGET).exception(10), StagingError)
    assert arena.try_reserve(SLAB) is not None
    with pytest.raises(StagingError, match="ValueError: no"):
        arena.try_reserve(SLAB)
    assert arena.try_reserve(SLAB) is not None


@pytest.mark.usefixtures("small_slabs")
def test_a_request_that_waits_gets_the_error(arena: Arena) -> None:
    gate, refusal = Gate(), Refusal()

    def refuse_later(slab: Slab) -> None:
        gate(slab)
        refusal(slab)

    arena.on_slab = refuse_later
    arena.prepare(BUDGET)
    threading.Timer(0.05, gate.open).start()
    with pytest.raises(StagingError, match="ValueError: no"):
        arena.reserve_some(BUDGET, SLAB, timeout_s=10)


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("num_cpus", [1, 2, 16])
def test_threads_do_not_promise_the_same_memory_twice(num_cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(BUDGET, cpus=lambda: set(range(num_cpus)))
    most = 3 * SLAB + PAGE_BYTES
    begun: list[int] = []
    real = room._make

    def make(index: int, nbytes: int, on_slab: Callable[[Slab], None] | None) -> Slab:
        slab = real(index, nbytes, on_slab)
        begun.append(nbytes)
        return slab

    monkeypatch.setattr(room, "_make", make)
    monkeypatch.setattr(room, "available_memory", lambda: most - sum(begun))
    with pytest.raises(StagingError, match="machine and control group leave"):
        arena.prepare(BUDGET).result(10)
    assert arena.reserved_bytes == sum(begun) == 3 * SLAB
    arena.close()


@pytest.mark.usefixtures("small_slabs")
def test_memory_that_cannot_be_measured_is_an_error_and_no_endless_wait(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> int:
        raise StagingError(os.strerror(errno.EMFILE))

    monkeypatch.setattr(room, "available_memory", fail)
    arena.cpus = lambda: {0, 1}
    with pytest.raises(StagingError, match=os.strerror(errno.EMFILE)):
        arena.prepare(BUDGET).result(10)
    assert arena.reserved_bytes == 0


@pytest.mark.usefixtures("small_slabs")
def test_without_a_thread_memory_is_taken_when_it_is_needed(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert arena.prepare(BUDGET).result(0) == 0
        assert arena.reserve(SLAB, timeout_s=0).nbytes == SLAB
        assert arena.reserve_some(2 * SLAB, SLAB, timeout_s=0).nbytes == 2 * SLAB
    assert arena.prepare(BUDGET).result(10) == BUDGET


@pytest.mark.usefixtures("small_slabs")
def test_the_largest_range_that_is_free_is_reserved(arena: Arena) -> None:
    assert arena.prepare(BUDGET).result(10) == BUDGET
    ranges = [arena.reserve(PAGE_BYTES, timeout_s=1)]
    for most, least, pages in [
        (BUDGET, 1, 4),
        (SLAB, PAGE_BYTES + 1, 4),
        # Cut at the next page, from the first slab that has room for it.
        (PAGE_BYTES + 1, 1, 2),
        *[(BUDGET, 1, 4)] * 5,
        (BUDGET, 1, 1),
    ]:
        ranges.append(arena.reserve_some(most, least, timeout_s=1))
        assert ranges[-1].nbytes == pages * PAGE_BYTES
    assert not overlap(ranges)
    assert sum(taken.nbytes for taken in ranges) == BUDGET


@pytest.mark.usefixtures("small_slabs")
def test_ranges_grow_the_arena_as_prepared_memory_does(arena: Arena) -> None:
    assert arena.reserve_some(2 * SLAB, 1, timeout_s=10).nbytes == SLAB
    assert arena.reserve_some(SLAB, SLAB, timeout_s=10).nbytes == SLAB
    assert arena.reserved_bytes == 2 * SLAB
    # No slab of the usual size would do.
    assert arena.reserve_some(3 * SLAB, 2 * SLAB, timeout_s=10).nbytes == 2 * SLAB
    assert arena.reserved_bytes == 5 * SLAB
    assert arena.reserve_some(BUDGET, SLAB + 1, timeout_s=10).nbytes >= SLAB + PAGE_BYTES
    assert arena.reserved_bytes == BUDGET


@pytest.mark.usefixtures("small_slabs")
def test_a_range_that_is_too_large_or_not_released_is_an_error(arena: Arena) -> None:
    with pytest.raises(StagingError, match="--ckpt-host-memory"):
        arena.reserve_some(2 * BUDGET, BUDGET + 1, timeout_s=10)
    assert arena.prepare(BUDGET).result(10) == BUDGET
    # Free slabs that are too small are exchanged.
    whole = arena.reserve_some(BUDGET, BUDGET, timeout_s=10)
    calls: list[bool] = []
    with pytest.raises(StagingError, match=r"waited 0 s .*--ckpt-host-memory"):
        arena.reserve_some(SLAB, 1, timeout_s=0.05, on_wait=lambda: calls.append(True))
    assert calls
    threading.Timer(0.05, arena.release, (whole,)).start()
    assert arena.reserve_some(2 * BUDGET, 1, timeout_s=10).nbytes == BUDGET


@pytest.mark.usefixtures("small_slabs")
def test_many_threads_share_an_arena_that_is_being_built() -> None:
    arena = Arena(BUDGET, cpus=lambda: set(range(16)))
    failures: list[str] = []

    def work(number: int) -> None:
        for turn in range(30):
            arena.prepare((number + turn) % 9 * SLAB)
            taken = arena.reserve_some(2 * SLAB, PAGE_BYTES, timeout_s=20)
            address = arena.address(taken)
            ctypes.memset(address, number, taken.nbytes)
            if ctypes.string_at(address, taken.nbytes) != bytes([number]) * taken.nbytes:
                failures.append(f"{taken} of {number} was written to")
            if arena.reserved_bytes > BUDGET:
                failures.append(f"{arena.reserved_bytes} bytes are over the budget")
            arena.release(taken)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    arena.close()
    assert not builders()


AT_EXIT = """
import threading, time
from distckpt import arena as room
room.MIN_SLAB_BYTES = 4096
room.EXTENT_BYTES = 4096
began = []
def on_slab(slab):
    began.append(slab.index)
    threading.Event().wait(0.05)
arena = room.Arena(1000 * 4096, on_slab, lambda: {0})
future = arena.prepare(1000 * 4096)
def save():
    threading.main_thread().join()
    held = future.result(10)
    taken = arena.reserve(8 * 4096, timeout_s=10)
    some = arena.reserve_some(8 * 4096, 4096, timeout_s=10)
    print(held // 4096 < 100, taken.nbytes, some.nbytes)
threading.Thread(target=save).start()
"""


@pytest.mark.slow
def test_the_interpreter_does_not_wait_for_memory_that_nobody_needs_any_more() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], timeout=20, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("True 32768 32768\n", "", 0)


def test_what_the_machine_cannot_give_fails_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(1 << 60)
    total = psutil.virtual_memory().total
    with pytest.raises(StagingError, match=r"machine and control group leave .*--ckpt-host-memory"):
        arena.try_reserve(total * 2)
    with pytest.raises(StagingError, match="--ckpt-host-memory"):
        arena.check(total * 2)
    assert arena.reserved_bytes == 0
    arena.check(PAGE_BYTES)
    # A wish that cannot be had is no reason to fail.
    monkeypatch.setattr(room, "SLAB_BYTES", 1 << 60)
    assert arena.try_reserve(PAGE_BYTES, want_bytes=total * 2) is not None
    arena.close()


GroupFiles = Callable[[str, dict[str, str]], None]


@pytest.fixture
def group_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GroupFiles:
    """Lays files out below a root that stands for / and says in which groups this process is."""
    monkeypatch.setattr(room, "Path", lambda path: tmp_path / str(path).lstrip("/"))

    def lay_out(groups: str, files: dict[str, str]) -> None:
        for name, text in {"proc/self/cgroup": groups, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return lay_out


LITTLE = 64 << 20


def test_the_limit_of_a_version_1_group(group_files: GroupFiles) -> None:
    group_files(
        "5:cpu,cpuacct:/job\n4:hugetlb,memory:/job/step\n1:name=systemd:/\n0::/\n",
        {
            "sys/fs/cgroup/memory/job/step/memory.limit_in_bytes": f"{3 * LITTLE}\n",
            "sys/fs/cgroup/memory/job/step/memory.usage_in_bytes": f"{2 * LITTLE}\n",
            "sys/fs/cgroup/memory/job/step/memory.stat": "cache 5\ninactive_file 4096\ntotal_cache 9\n",
        },
    )
    assert available_memory() == LITTLE + 4096


def test_the_limit_of_a_version_2_group(group_files: GroupFiles) -> None:
    group_files(
        "0::/job/step\n",
        {
            "sys/fs/cgroup/job/step/memory.max": f"{3 * LITTLE}\n",
            "sys/fs/cgroup/job/step/memory.current": f"{2 * LITTLE}\n",
            "sys/fs/cgroup/job/step/memory.stat": "anon 5\ninactive_file 8192\nactive_file 7\n",
        },
    )
    assert available_memory() == LITTLE + 8192


@pytest.mark.parametrize("tightest", ["job", "job/step"])
def test_the_limits_of_the_groups_above_count_too(group_files: GroupFiles, tightest: str) -> None:
    files: dict[str, str] = {}
    for group in ("job", "job/step"):
        limit = 2 * LITTLE if group == tightest else "max"
        files |= {
            f"sys/fs/cgroup/{group}/memory.max": f"{limit}\n",
            f"sys/fs/cgroup/{group}/memory.current": f"{LITTLE}\n",
            f"sys/fs/cgroup/{group}/memory.stat": "",
        }
    group_files("0::/job/step\n", files)
    assert available_memory() == LITTLE


def test_a_container_sees_its_own_group_as_the_root(group_files: GroupFiles) -> None:
    group_files(
        "0::/kubepods/pod7/container\n",
        {
            "sys/fs/cgroup/memory.max": f"{LITTLE}\n",
            "sys/fs/cgroup/memory.current": "0\n",
            "sys/fs/cgroup/memory.stat": "",
        },
    )
    assert available_memory() == LITTLE


def test_a_group_that_is_over_its_limit_leaves_nothing(group_files: GroupFiles) -> None:
    group_files(
        "0::/\n",
        {
            "sys/fs/cgroup/memory.max": f"{LITTLE}\n",
            "sys/fs/cgroup/memory.current": f"{2 * LITTLE}\n",
            "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
        },
    )
    assert available_memory() == 0


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("", {}),
        ("0::/\n", {}),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"}),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "nonsense\n", "sys/fs/cgroup/memory.current": "5\n"}),
        ("4:cpu:/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "1\n"}),
    ],
)
def test_without_a_limit_the_machine_counts(
    group_files: GroupFiles, groups: str, files: dict[str, str]
) -> None:
    group_files(groups, files)
    assert available_memory() > LITTLE


@pytest.mark.parametrize(("value", "aligned"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_align(value: int, aligned: int) -> None:
    assert align(value, PAGE_BYTES) == aligned
