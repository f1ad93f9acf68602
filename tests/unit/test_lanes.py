"""Lanes, inline and as workers, without an engine above them."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from distckpt.arena import Arena, Range
from distckpt.errors import WorkerDied, WriteError
from distckpt.lanes import InlineLane, Lanes, WorkerLanes, _start_code, open_lanes
from distckpt.storage import open_storage
from distckpt.worker import ZEROS, Ack, Task, checksum

MIB = 1 << 20


class Bench:
    """Lanes over an arena, and tasks for them."""

    def __init__(self, workers: int, folder: Path) -> None:
        self.arena = Arena(4 * MIB)
        self.lanes: Lanes = open_lanes(workers, self.arena.slabs, 5.0)
        self.folder = folder
        self.sequence = 0

    def take(self, nbytes: int) -> Range:
        taken = self.arena.try_reserve(nbytes)
        assert taken is not None
        return taken

    def task(self, save_id: str, name: str, *pieces: tuple[int, int, int], **settings: Any) -> Task:
        self.sequence += 1
        given: dict[str, Any] = {"offset": 0, "file_nbytes": sum(piece[2] for piece in pieces)}
        return Task(
            save_id,
            self.sequence,
            open_storage(self.folder).spec,
            (name,),
            pieces=pieces,
            **(given | settings),
        )

    def acks(self, count: int) -> list[tuple[int, Ack]]:
        found: list[tuple[int, Ack]] = []
        deadline = time.monotonic() + 10
        while len(found) < count:
            assert time.monotonic() < deadline
            found += self.lanes.poll(0.1)
        return found

    @property
    def pids(self) -> list[int]:
        assert isinstance(self.lanes, WorkerLanes)
        return self.lanes.pids

    def close(self) -> None:
        self.lanes.close()
        self.arena.close()


@pytest.fixture(params=[1, 2])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    opened = Bench(request.param, tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Bench]:
    opened = Bench(2, tmp_path)
    opened.lanes.start()
    yield opened
    opened.close()


def test_one_worker_is_inline_and_several_are_processes(tmp_path: Path) -> None:
    assert isinstance(open_lanes(1, {}, 1.0), InlineLane)
    assert open_lanes(3, {}, 1.0).count == 3


def test_every_lane_writes(bench: Bench) -> None:
    bench.lanes.start()
    taken = bench.take(MIB)
    slab = bench.arena.slabs[taken.slab]
    slab.mapping[:5] = b"hello"
    for lane in range(bench.lanes.count):
        bench.lanes.submit(lane, bench.task("0a", f"file{lane}", (taken.slab, 0, 5), spans=(0, 5)))
    acks = bench.acks(bench.lanes.count)
    assert sorted(lane for lane, _ in acks) == list(range(bench.lanes.count))
    for lane, ack in acks:
        assert ack == Ack("0a", ack.sequence, f"file{lane}", (checksum(b"hello"),))
        assert (bench.folder / f"file{lane}").read_bytes() == b"hello"


def test_an_error_is_in_the_acknowledgement(bench: Bench) -> None:
    bench.lanes.start()
    bench.lanes.submit(0, bench.task("0a", "missing/file", (ZEROS, 0, 5)))
    ((_, ack),) = bench.acks(1)
    assert ack.error is not None
    assert ack.error["errno"] == errno.ENOENT
    assert ack.error["path"] == str(bench.folder / "missing" / "file")


def test_abort_drops_files_and_acknowledgements(bench: Bench) -> None:
    bench.lanes.start()
    for lane in range(bench.lanes.count):
        bench.lanes.submit(lane, bench.task("0a", f"file{lane}", (ZEROS, 0, 5), file_nbytes=None))
    assert bench.lanes.abort("0a", 5.0) == set()
    assert bench.lanes.poll(0.01) == []
    assert not list(bench.folder.iterdir())
    bench.lanes.submit(0, bench.task("0b", "file0", (ZEROS, 0, 5)))
    assert [ack.error for _, ack in bench.acks(1)] == [None]


def test_close_is_idempotent(bench: Bench) -> None:
    bench.lanes.start()
    bench.lanes.close()
    bench.lanes.close()


def test_workers_do_not_start_again_after_close(workers: Bench) -> None:
    workers.lanes.close()
    with pytest.raises(WriteError, match="closed"):
        workers.lanes.start()
    assert workers.pids == []


def test_polling_ends_in_time(bench: Bench) -> None:
    bench.lanes.start()
    started = time.monotonic()
    assert bench.lanes.poll(0.05) == []
    assert 0.04 < time.monotonic() - started < 2


def test_start_starts_what_is_missing(workers: Bench) -> None:
    before = workers.pids
    workers.lanes.start()
    assert workers.pids == before
    os.kill(before[0], signal.SIGKILL)
    deadline = time.monotonic() + 5
    while psutil.Process(before[0]).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    workers.lanes.start()
    assert workers.pids[0] != before[0]
    assert workers.pids[1] == before[1]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -9), (signal.SIGRTMIN + 1, -signal.SIGRTMIN - 1)]
)
def test_a_worker_that_ends_is_named(workers: Bench, number: int, status: int) -> None:
    pid = workers.pids[1]
    os.kill(pid, number)
    with pytest.raises(WorkerDied) as caught:
        workers.acks(1)
    assert (caught.value.pid, caught.value.exit_status, caught.value.lane) == (pid, status, 1)
    assert f"worker process {pid} of lane 1 ended by signal {-status}" in str(caught.value)


def test_what_arrived_with_a_death_is_not_lost_to_abort(workers: Bench) -> None:
    # The answer of the one and the death of the other are there at the same time.
    workers.lanes.submit(1, workers.task("0a", "file1", (ZEROS, 0, 5)))
    os.kill(workers.pids[0], signal.SIGKILL)
    time.sleep(0.2)
    started = time.monotonic()
    assert workers.lanes.abort("0a", 5.0) == set()
    assert time.monotonic() - started < 2
    assert len(workers.pids) == 1
    assert not list(workers.folder.iterdir())


def test_sending_to_a_worker_that_has_ended_is_its_death(workers: Bench) -> None:
    pid = workers.pids[0]
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.1)
    task = workers.task("0a", "file", (ZEROS, 0, 1), file_nbytes=None)
    with pytest.raises(WorkerDied) as caught:
        workers.lanes.submit(0, task)
    assert (caught.value.pid, caught.value.exit_status) == (pid, -9)


def test_a_worker_that_stopped_reading_is_given_up_in_time(tmp_path: Path) -> None:
    bench = Bench(2, tmp_path)
    bench.lanes = WorkerLanes(2, bench.arena.slabs, 0.1)
    bench.lanes.start()
    pids = bench.pids
    os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(WriteError, match="has stopped reading") as caught:
        bench.lanes.submit(0, bench.task("0a", "file", (ZEROS, 0, 1), spans=(0, 1) * 100_000))
    assert (caught.value.errno, caught.value.lane) == (errno.ETIMEDOUT, 0)
    assert bench.lanes.abort("0a", 0.1) == set(), "it was killed and reaped"
    assert bench.pids == pids[1:]
    bench.close()


def test_a_slab_that_the_arena_gave_back_is_unmapped_by_workers(workers: Bench) -> None:
    def mapped(pid: int) -> int:
        return Path(f"/proc/{pid}/maps").read_text().count("memfd:distckpt")

    first = workers.take(MIB)
    workers.lanes.submit(0, workers.task("0a", "first", (first.slab, 0, 5)))
    workers.acks(1)
    assert [mapped(pid) for pid in workers.pids] == [1, 0]
    workers.arena.release(first)
    second = workers.take(4 * MIB)
    assert second.slab != first.slab
    workers.lanes.submit(0, workers.task("0a", "second", (second.slab, 0, 5)))
    workers.acks(1)
    assert mapped(workers.pids[0]) == 1


def test_the_path_of_a_worker_has_the_installation_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", "/home/me/project", *sys.path])
    namespace: dict[str, Any] = {"sys": sys}
    with monkeypatch.context() as worker:
        worker.setattr(sys, "path", list(sys.path))
        exec(_start_code(7).split("; from ")[0], namespace)
        path = list(sys.path)
    library = os.path.dirname(os.__file__)
    assert path.index(library) < path.index("/home/me/project")
    assert path.index(library) < path.index(os.getcwd())
    assert "" not in path
