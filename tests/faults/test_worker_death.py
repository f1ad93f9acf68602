"""Workers and parents that die or stop: noticed, named, survived; nothing of a failed save is published."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import resource
import signal
import time
from pathlib import Path

import psutil
import pytest

from distckpt import StorageWriter, WorkerDied, WriteError
from distckpt.config import CheckpointConfig
from distckpt.engine import Engine
from distckpt.formats import Frame
from distckpt.staging import Item
from distckpt.storage import open_storage
from faults.checkpoints import (
    MIB,
    assert_is_clean,
    engine_of,
    error_of,
    files_in,
    is_running,
    load,
    on_event,
    outcome_of,
    pids_of,
    same,
    save,
    save_in,
    say,
    start_save,
    state_of,
    stopping,
    wait_until,
    without_the_others,
)
from faults.conftest import OpenWriter
from faults.programs import Programs

OLD, NEW, NEXT = state_of(1), state_of(2), state_of(3)
NOTICED_S = 1.5
"""A second, and what a busy machine may add."""


@pytest.fixture
def writer(open_writer: OpenWriter, tmp_path: Path) -> StorageWriter:
    """Two workers, started by a save of OLD to `tmp_path / "old"`."""
    opened = open_writer(dist_ckpt_workers=2, ckpt_host_memory="64MiB")
    save(opened, tmp_path / "old", OLD)
    return opened


def fail_in_flight(writer: StorageWriter, path: Path, lane: int) -> WorkerDied:
    """Kill the worker of `lane` while it is given its write; returns the error, which must come at once."""
    with stopping(writer, lane) as stopped:
        saving = start_save(writer, path, NEW)
        assert stopped.wait(20)
        pid = pids_of(writer)[lane]
        time.sleep(0.1)
        assert not saving.done()
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        error = error_of(lambda: saving.result(timeout=20))
        assert time.monotonic() - killed < NOTICED_S
    assert isinstance(error, WorkerDied)
    assert error.pid == pid
    return error


@pytest.mark.parametrize("lane", [0, 1])
def test_a_worker_killed_during_a_write_fails_the_save_at_once_and_the_next_save_works(
    writer: StorageWriter, tmp_path: Path, lane: int
) -> None:
    path = tmp_path / "new"
    error = fail_in_flight(writer, path, lane)
    assert (error.exit_status, error.rank, error.lane) == (-signal.SIGKILL, 0, lane)
    assert error.path == str(path)
    assert f"worker process {error.pid}" in str(error)
    assert not (path / ".metadata").exists()
    assert same(load(tmp_path / "old", OLD), OLD)
    save(writer, path, NEXT)
    assert same(load(path, NEXT), NEXT)
    assert_is_clean(path)


def test_a_worker_killed_during_an_overwrite_leaves_the_old_checkpoint(
    writer: StorageWriter, tmp_path: Path
) -> None:
    path = tmp_path / "old"
    fail_in_flight(writer, path, 1)
    assert same(load(path, OLD), OLD)
    save(writer, path, NEXT)
    assert same(load(path, NEXT), NEXT)
    assert_is_clean(path)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_killed_between_saves_is_replaced(writer: StorageWriter, tmp_path: Path, mode: str) -> None:
    before = pids_of(writer)
    os.kill(before[1], signal.SIGKILL)
    wait_until(lambda: not is_running(before[1]), 5, "the worker has ended")
    save_in(mode, writer, tmp_path / "new", NEW)
    assert same(load(tmp_path / "new", NEW), NEW)
    after = pids_of(writer)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_worker_that_is_killed_as_a_save_begins_fails_it_or_is_replaced(
    writer: StorageWriter, tmp_path: Path
) -> None:
    os.kill(pids_of(writer)[0], signal.SIGKILL)
    error = outcome_of(lambda: save(writer, tmp_path / "new", NEW))
    if error is None:
        assert same(load(tmp_path / "new", NEW), NEW)
    else:
        assert isinstance(error, WorkerDied)
        assert not (tmp_path / "new" / ".metadata").exists()
    save(writer, tmp_path / "next", NEXT)
    assert same(load(tmp_path / "next", NEXT), NEXT)


def test_all_workers_killed_at_once(writer: StorageWriter, tmp_path: Path) -> None:
    pids = pids_of(writer)

    def kill_all(_: object) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    with on_event("parts.pushed", kill_all):
        error = error_of(lambda: save(writer, tmp_path / "new", NEW))
    assert isinstance(error, WorkerDied)
    assert error.pid in pids
    assert not (tmp_path / "new" / ".metadata").exists()
    save(writer, tmp_path / "new", NEXT)
    assert same(load(tmp_path / "new", NEXT), NEXT)


@pytest.mark.slow
def test_a_stopped_worker_fails_the_save_at_the_deadline_and_is_killed(
    open_writer: OpenWriter, tmp_path: Path
) -> None:
    path = tmp_path / "new"
    writer = open_writer(dist_ckpt_workers=2, distributed_timeout_minutes=0.03)
    save(writer, tmp_path / "old", OLD)
    with stopping(writer, 1) as stopped:
        started = time.monotonic()
        error = error_of(lambda: save(writer, path, NEW))
        assert stopped.is_set()
    pid = pids_of(writer)
    assert time.monotonic() - started < 20
    assert isinstance(error, WriteError)
    assert not isinstance(error, WorkerDied)
    assert (error.errno, error.rank, error.lane) == (errno.ETIMEDOUT, 0, 1)
    # It may have been stopped with a part in its hands, or after it had written one.
    assert error.path is not None
    assert re.fullmatch(rf"{path}(/__0_[01]\.distcp\.\w+)?", error.path)
    assert "lanes that have not finished: 1 (lane 1, rank 0" in str(error)
    assert " of 2 parts are written" in str(error)
    assert "--distributed-timeout-minutes" in str(error)
    assert len(pid) == 1, "the stopped worker was not ended"
    assert not (path / ".metadata").exists()
    save(writer, path, NEXT)
    assert same(load(path, NEXT), NEXT)
    assert_is_clean(path)


def test_an_error_of_one_lane_fails_the_save_and_removes_what_its_siblings_wrote(
    writer: StorageWriter, tmp_path: Path
) -> None:
    path = tmp_path / "new"
    assert engine_of(writer).part_bytes == 4 * MIB
    # The first part of its file fits, the second does not.
    resource.prlimit(pids_of(writer)[1], resource.RLIMIT_FSIZE, (5 * MIB, resource.RLIM_INFINITY))
    with without_the_others(writer, 1):
        error = error_of(lambda: save(writer, path, state_of(2, 16 * MIB)))
    assert isinstance(error, WriteError)
    assert (error.errno, error.rank, error.lane) == (errno.EFBIG, 0, 1)
    assert error.offset == 5 * MIB
    assert error.path is not None
    assert re.fullmatch(rf"{path}/__0_1\.distcp\.\w+", error.path)
    assert files_in(path) == {".distckpt/owner"}
    assert same(load(tmp_path / "old", OLD), OLD)
    assert len(pids_of(writer)) == 2, "an error of the storage is no reason to end a worker"
    resource.prlimit(pids_of(writer)[1], resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    save(writer, path, NEXT)
    assert same(load(path, NEXT), NEXT)
    assert_is_clean(path)


def test_what_was_queued_behind_a_failed_write_is_not_written(
    open_writer: OpenWriter, tmp_path: Path
) -> None:
    # Three parts for the lane: the first fails while the last, which would complete the file, is queued.
    writer = open_writer(dist_ckpt_workers=2, ckpt_host_memory="24MiB")
    save(writer, tmp_path / "old", OLD)
    assert engine_of(writer).part_bytes == 4 * MIB
    for pid in pids_of(writer):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
    error = error_of(lambda: save(writer, tmp_path / "new", state_of(2, 24 * MIB)))
    assert isinstance(error, WriteError)
    assert error.errno == errno.EFBIG
    assert files_in(tmp_path / "new") == {".distckpt/owner"}


def test_a_worker_that_goes_on_after_its_save_was_given_up_does_not_finish_the_next(
    open_writer: OpenWriter, tmp_path: Path
) -> None:
    path = tmp_path / "new"
    writer = open_writer(dist_ckpt_workers=2, distributed_timeout_minutes=0.01)
    save(writer, tmp_path / "old", OLD)
    pids = pids_of(writer)
    with stopping(writer, 0) as stopped:
        saving = start_save(writer, path, NEW)
        assert stopped.wait(20)
        # Past the deadline, and before the engine gives the worker up: its answers come late, and in order.
        time.sleep(2)
        os.kill(pids[0], signal.SIGCONT)
        error = error_of(lambda: saving.result(timeout=20))
    assert isinstance(error, WriteError)
    assert error.errno == errno.ETIMEDOUT
    assert pids_of(writer) == pids, "the worker answered in time and could stay"
    assert files_in(path) == {".distckpt/owner"}
    save(writer, path, NEXT)
    assert same(load(path, NEXT), NEXT)
    assert_is_clean(path)


def save_and_wait(path: str, forked_child: bool) -> None:
    """Start a save, stop its workers in it, say who they are, and never end."""
    writer = StorageWriter(dist_ckpt_workers=2)
    save(writer, Path(path, "old"), OLD)
    if forked_child:
        # Holds the parent's end of every socket open, as a forked data loader does.
        loader = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
        loader.start()
    pids = pids_of(writer)

    def stop(_: object) -> None:
        os.kill(pids[0], signal.SIGSTOP)
        say(*pids)

    with on_event("parts.pushed", stop):
        save(writer, Path(path, "old"), NEW)


@pytest.mark.parametrize("forked_child", [False, True])
def test_parent_killed_during_a_save_takes_its_workers_along(
    programs: Programs, tmp_path: Path, forked_child: bool
) -> None:
    child = programs.start(save_and_wait, str(tmp_path), forked_child)
    wait_until(lambda: child.out.read_text().endswith("\n"), 20, "the save is in flight")
    pids = [int(pid) for pid in child.out.read_text().split()]
    assert len(pids) == 2
    assert all(is_running(pid) for pid in pids)
    child.kill()
    os.kill(pids[0], signal.SIGCONT)
    wait_until(lambda: not any(is_running(pid) for pid in pids), 2, "the workers have ended")
    child.wait(5)
    # No memory of the arena either, unless a forked child maps it.
    if not forked_child:
        ended = {str(link) for pid in psutil.pids() for link in _memfds(pid)}
        assert not ended, ended
    path = tmp_path / "old"
    assert same(load(path, OLD), OLD)
    with StorageWriter(dist_ckpt_workers=2) as writer:
        save(writer, path, NEXT)
    assert same(load(path, NEXT), NEXT)
    assert_is_clean(path)


def _memfds(pid: int) -> list[str]:
    try:
        run = psutil.Process(pid).environ().get("DISTCKPT_TEST_RUN")
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (OSError, psutil.Error):
        return []
    if run != os.environ["DISTCKPT_TEST_RUN"]:
        return []
    return [f"{pid}: {line}" for line in lines if "memfd:distckpt" in line]


def test_lanes_do_not_wait_for_each_other_when_messages_exceed_the_sockets(tmp_path: Path) -> None:
    # The plan of so many items is larger than what a socket holds.
    engine = Engine.open(CheckpointConfig(dist_ckpt_workers=2, distributed_timeout_minutes=0.2))
    try:
        items = [Item(Frame(b"x" * 1100, b""), None, 0) for _ in range(130_000)]
        written = engine.write(open_storage(tmp_path), "0a", 0, items)
        assert written is not None
        assert len(written.image.sizes) == len(items)
        assert sum(map(len, written.checksums)) >= 4 * len(items)
    finally:
        engine.close()
