"""How a process ends: the last save is finished or its loss shows, and nothing of the writer stays."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from distckpt import Checkpointer, CheckpointError, StorageWriter
from faults.checkpoints import (
    MIB,
    assert_is_clean,
    is_running,
    load,
    pids_of,
    same,
    save,
    say,
    start_save,
    state_of,
    wait_until,
)
from faults.programs import Done, Programs

STATE = state_of(1, 24 * MIB)
"""In parts of several blocks."""


class _LatePlanner(DefaultSavePlanner):
    """Holds a background save up until the main thread has left the main program and waits for threads."""

    left = threading.Event()

    def create_local_plan(self) -> Any:
        assert self.left.wait(20)
        return super().create_local_plan()


def leave_with_a_save_in_flight(path: str, workers: int, way: str, fault: str) -> None:
    writer = StorageWriter(
        dist_ckpt_workers=workers, ckpt_host_memory=("1MiB" if fault == "memory" else "1GiB")
    )
    atexit.register(say, "registered first")
    if fault == "path":
        Path(path).touch()
    state_dict_saver.async_save(STATE, storage_writer=writer, checkpoint_id=path, planner=_LatePlanner())
    atexit.register(say, "registered last")
    if fault == "size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
    # Called before the interpreter waits for threads.
    threading._register_atexit(_LatePlanner.left.set)  # type: ignore[attr-defined]
    if way == "sys.exit(0)":
        sys.exit(0)


def leave_with_saves_in_flight(path: str, workers: int) -> None:
    checkpointer = Checkpointer(path, async_save=True, dist_ckpt_workers=workers)
    for step in range(3):
        checkpointer.save(step, state_of(step, 24 * MIB))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_saves_that_wait_for_their_turn_are_finished_at_exit(
    programs: Programs, tmp_path: Path, workers: int
) -> None:
    done = programs.run(leave_with_saves_in_flight, str(tmp_path), workers)
    assert done.status == 0, done
    for step in range(3):
        state = state_of(step, 24 * MIB)
        assert same(load(tmp_path / f"step-{step:08}", state), state)


def check_exit_functions(done: Done) -> None:
    assert done.out == "registered last\nregistered first\n", done
    assert "Traceback" not in done.err


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("way", ["end", "sys.exit(0)"])
def test_the_last_save_is_finished_at_exit(
    programs: Programs, tmp_path: Path, workers: int, way: str
) -> None:
    path = tmp_path / "checkpoint"
    done = programs.run(leave_with_a_save_in_flight, str(path), workers, way, "none")
    assert done.status == 0, done
    check_exit_functions(done)
    assert same(load(path, STATE), STATE)
    assert_is_clean(path)


@pytest.mark.parametrize(
    ("fault", "workers", "way", "complaint"),
    [
        ("path", 1, "end", "cannot make directory"),
        ("path", 2, "sys.exit(0)", "cannot make directory"),
        ("size", 1, "sys.exit(0)", "EFBIG"),
        ("size", 2, "end", "EFBIG"),
        ("memory", 1, "end", "--ckpt-host-memory"),
    ],
)
def test_the_loss_of_the_last_save_is_logged_and_changes_the_exit_status(
    programs: Programs, tmp_path: Path, fault: str, workers: int, way: str, complaint: str
) -> None:
    path = tmp_path / "checkpoint"
    done = programs.run(leave_with_a_save_in_flight, str(path), workers, way, fault)
    assert done.status == 1, done
    check_exit_functions(done)
    assert complaint in done.err
    assert "the last checkpoint was lost" in done.err
    assert not (path / ".metadata").exists()


def leave_without_close(path: str) -> None:
    writer = StorageWriter(dist_ckpt_workers=2)
    save(writer, path, STATE)
    start_save(writer, path, STATE).result(timeout=20)
    say(*pids_of(writer))


def test_leaving_without_close_ends_the_workers(programs: Programs, tmp_path: Path) -> None:
    done = programs.run(leave_without_close, str(tmp_path / "checkpoint"))
    assert done.status == 0, done
    assert "Traceback" not in done.err
    assert not [pid for pid in done.out.split() if is_running(int(pid))]


def close_after_the_process_group(path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}.group", rank=0, world_size=1)
    writer = StorageWriter(dist_ckpt_workers=2)
    save(writer, path, STATE)
    say(*pids_of(writer))
    dist.destroy_process_group()
    writer.close()
    writer.close()


def test_close_needs_no_process_group(programs: Programs, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    done = programs.run(close_after_the_process_group, str(path))
    assert done.status == 0, done
    assert "Traceback" not in done.err
    assert not [pid for pid in done.out.split() if is_running(int(pid))]
    assert same(load(path, STATE), STATE)


def test_close_is_idempotent_from_many_threads(tmp_path: Path) -> None:
    writer = StorageWriter(dist_ckpt_workers=2)
    save(writer, tmp_path, STATE)
    pids = pids_of(writer)
    threads = [threading.Thread(target=writer.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    writer.close()
    assert not [pid for pid in pids if is_running(pid)]


def _mapped() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:distckpt" in line]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_writer_that_is_dropped_without_close_leaves_nothing(tmp_path: Path, workers: int) -> None:
    writer = StorageWriter(dist_ckpt_workers=workers)
    save(writer, tmp_path, STATE)
    start_save(writer, tmp_path, STATE).result(timeout=20)
    pids = pids_of(writer) if workers > 1 else []
    assert _mapped()
    gc.disable()
    try:
        del writer
        wait_until(lambda: not any(is_running(pid) for pid in pids), 3, "the workers have ended")
        wait_until(lambda: not _mapped(), 1, "the arena is unmapped without the garbage collector")
    finally:
        gc.enable()


def close_while_a_forked_child_lives(path: str) -> None:
    writer = StorageWriter(dist_ckpt_workers=2)
    save(writer, path, STATE)
    child = os.fork()
    if child == 0:
        threading.Event().wait(20)
        os._exit(0)
    pids = pids_of(writer)
    closing = threading.Thread(target=writer.close)
    closing.start()
    closing.join(1.5)
    say("slow" if closing.is_alive() else "closed", *[pid for pid in pids if is_running(pid)])
    os.kill(child, 9)
    os.waitpid(child, 0)


def test_close_does_not_wait_for_forked_children_that_hold_the_sockets(
    programs: Programs, tmp_path: Path
) -> None:
    done = programs.run(close_while_a_forked_child_lives, str(tmp_path / "checkpoint"))
    assert (done.status, done.out) == (0, "closed\n"), done


class _BrokenPlanner(DefaultSavePlanner):
    def create_global_plan(self, all_plans: Any) -> Any:
        raise RuntimeError("this planner is broken")


def close_after_a_failure_before_the_write(path: str) -> None:
    writer = StorageWriter()
    saving: Any = state_dict_saver.async_save(
        STATE, storage_writer=writer, checkpoint_id=path, planner=_BrokenPlanner()
    )
    error = saving.upload_completion.exception(timeout=20)
    assert "this planner is broken" in str(error)
    del saving, error
    closing = threading.Thread(target=writer.close, daemon=True)
    closing.start()
    closing.join(5)
    say("slow" if closing.is_alive() else "closed")


def test_close_does_not_wait_for_a_save_that_failed_while_it_was_planned(
    programs: Programs, tmp_path: Path
) -> None:
    done = programs.run(close_after_a_failure_before_the_write, str(tmp_path / "checkpoint"))
    assert (done.status, done.out) == (0, "closed\n"), done


def close_with_a_save_in_flight(path: str, workers: int) -> None:
    with StorageWriter(dist_ckpt_workers=workers) as writer:
        saving = start_save(writer, path, STATE)
    saving.result(timeout=20)


@pytest.mark.parametrize("workers", [1, 2])
def test_close_lets_a_save_in_flight_end(programs: Programs, tmp_path: Path, workers: int) -> None:
    path = tmp_path / "checkpoint"
    done = programs.run(close_with_a_save_in_flight, str(path), workers)
    assert done.status == 0, done
    assert same(load(path, STATE), STATE)


def leave_after_a_failure(path: str, asks: bool) -> None:
    checkpointer = Checkpointer(path, async_save=True, log_level="error")
    handle = checkpointer.save(1, STATE)
    with contextlib.suppress(CheckpointError):
        if asks:
            handle.result(20.0)
        else:
            # It has failed long before the process ends.
            wait_until(handle._future.done, 20.0, "the save has failed")


@pytest.mark.parametrize("asks", [False, True])
def test_a_failure_that_nobody_asked_for_changes_the_exit_status(
    programs: Programs, tmp_path: Path, asks: bool
) -> None:
    (tmp_path / "step-00000001").touch()
    done = programs.run(leave_after_a_failure, str(tmp_path), asks)
    assert done.status == (not asks), done
    assert ("nobody asked" in done.err) is not asks
