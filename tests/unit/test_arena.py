"""The arena: no overlap, no byte over budget, nothing promised that cannot be had."""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
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


@pytest.fixture
def arena() -> Iterator[Arena]:
    opened = Arena(BUDGET)
    yield opened
    opened.close()


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
    try:
        for what, number, want in steps:
            if what == "reserve":
                found = arena.try_reserve(number, want)
                if found is None:
                    # Only if that much is not free in one piece, whatever the arena would give back.
                    assert held or lost
                    assert number > BUDGET - arena.reserved_bytes
                    continue
                assert found.nbytes == align(number, PAGE_BYTES)
                assert found.offset % PAGE_BYTES == 0
                assert found.offset + found.nbytes <= arena.slabs[found.slab].nbytes
                held.append(found)
            elif held and what == "release":
                arena.release(held.pop(number % len(held)))
            elif held:
                lost.append(held.pop(number % len(held)))
            assert not overlap(held + lost)
            assert arena.reserved_bytes <= BUDGET
            assert {taken.slab for taken in held + lost} <= arena.slabs.keys()
        for taken in held:
            arena.release(taken)
        if not lost:
            whole = arena.try_reserve(BUDGET)
            assert whole is not None, "what was released did not grow together"
    finally:
        arena.close()


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
    assert os.fstat(arena.slabs[0].fd).st_blocks * 512 == BUDGET


def test_more_than_the_budget_is_an_error_and_what_others_hold_is_waited_for(arena: Arena) -> None:
    with pytest.raises(StagingError, match="--ckpt-host-memory"):
        arena.try_reserve(BUDGET + 1)
    taken = arena.try_reserve(BUDGET)
    assert taken is not None
    assert arena.try_reserve(1) is None
    started = time.monotonic()
    with pytest.raises(StagingError, match=r"waited 0 s for 1 bytes .*--ckpt-host-memory"):
        arena.reserve(1, timeout_s=0.05)
    assert time.monotonic() - started < 2
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
