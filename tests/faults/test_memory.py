"""Host memory: what cannot be had fails at reservation, what is in use is left alone, all is given back."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from distckpt import StagingError, StorageWriter
from distckpt.convert import convert
from faults.checkpoints import (
    MIB,
    NO_MOUNT,
    engine_of,
    error_of,
    files_in,
    load,
    mount_tmpfs,
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
)
from faults.conftest import OpenWriter
from faults.programs import Programs

STATE, NEXT = state_of(1), state_of(2)


def huge(nbytes: int) -> dict[str, Any]:
    """Return a state that takes `nbytes` to stage and next to nothing to hold."""
    weight = torch.full((1,), 7, dtype=torch.uint8).expand(nbytes // 64)
    return {
        "model": {f"weight{number}": weight for number in range(64)},
        "step": torch.tensor(1),
        "note": "huge",
    }


def save_without_shared_memory(path: str) -> None:
    mount_tmpfs("/dev/shm", 16 << 10)
    Path("/dev/shm/full").write_bytes(bytes(8 << 10))
    with StorageWriter(dist_ckpt_workers=2) as writer:
        save_in("sync", writer, path, STATE)
        assert same(load(path, STATE), STATE)
        save_in("async", writer, path, NEXT)
        assert same(load(path, NEXT), NEXT)


def test_a_full_dev_shm_does_not_matter(programs: Programs, tmp_path: Path) -> None:
    done = programs.run(save_without_shared_memory, str(tmp_path))
    if done.status == NO_MOUNT:
        pytest.skip(done.out)
    assert done.status == 0, done


def test_a_budget_beyond_the_memory_fails_at_reservation(open_writer: OpenWriter, tmp_path: Path) -> None:
    writer = open_writer(ckpt_host_memory="1000TiB")
    state = huge(psutil.virtual_memory().total * 4)
    error = error_of(lambda: start_save(writer, tmp_path / "new", state).result(timeout=30))
    assert isinstance(error, StagingError)
    assert "--ckpt-host-memory" in str(error)
    assert engine_of(writer).arena.reserved_bytes == 0
    assert not (tmp_path / "new" / ".metadata").exists()
    assert state["model"]["weight0"][-1] == 7
    save_in("async", writer, tmp_path / "new", STATE)
    assert same(load(tmp_path / "new", STATE), STATE)


def test_a_state_beyond_the_budget_is_refused_by_async_save_and_streamed_by_save(
    open_writer: OpenWriter, tmp_path: Path
) -> None:
    writer = open_writer(ckpt_host_memory="8MiB")
    state = state_of(1, 40 * MIB)
    error = error_of(lambda: start_save(writer, tmp_path / "new", state).result(timeout=30))
    assert isinstance(error, StagingError)
    assert "dcp.save" in str(error)
    assert not (tmp_path / "new" / ".metadata").exists()
    save(writer, tmp_path / "new", state)
    assert engine_of(writer).arena.reserved_bytes <= 8 * MIB
    assert same(load(tmp_path / "new", state), state)


def save_with_little_address_space(path: str) -> None:
    with StorageWriter(ckpt_host_memory="1GiB") as writer:
        save(writer, path, STATE)
        size = psutil.Process().memory_info().vms
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (size + 64 * MIB, hard))
        error = error_of(lambda: start_save(writer, path + "-huge", huge(512 * MIB)).result(timeout=30))
        assert isinstance(error, StagingError)
        assert "cannot reserve a host memory slab" in str(error)
        save(writer, path, NEXT)
    assert same(load(path, NEXT), NEXT)


def test_too_little_address_space_fails_at_reservation(programs: Programs, tmp_path: Path) -> None:
    done = programs.run(save_with_little_address_space, str(tmp_path / "checkpoint"))
    assert done.status == 0, done


@contextlib.contextmanager
def control_group(nbytes: int) -> Iterator[Path]:
    """Make a control group that may take `nbytes` of memory, of whichever version this machine has."""
    name = f"distckpt-test-{os.getpid()}"
    first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, limit = (first, "memory.limit_in_bytes") if first.is_dir() else (second, "memory.max")
    group = root / name
    try:
        group.mkdir()
        (group / limit).write_text(str(nbytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text().split(), 5, "the group is empty")
        group.rmdir()


def save_in_a_control_group(path: str, group: str) -> None:
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    state = huge(300 * MIB)
    with StorageWriter(ckpt_host_memory="10GiB") as writer:
        error = error_of(lambda: start_save(writer, path, state).result(timeout=30))
        assert isinstance(error, StagingError)
        assert "control group" in str(error)
        assert files_in(path) == set()
    # What fits is streamed: a state larger than the group's limit, on the budget that follows from it.
    with StorageWriter(dist_ckpt_workers=2) as writer:
        save(writer, path, state)
        assert 0 < engine_of(writer).arena.budget_bytes < 160 * MIB
    say(sum(file.stat().st_size for file in Path(path).iterdir()) // MIB)
    # An orderly exit would copy what is still shared with the zygote, and count it for the group.
    os._exit(0)


@pytest.mark.slow
def test_the_limit_of_the_control_group_is_kept(programs: Programs, tmp_path: Path) -> None:
    with control_group(160 * MIB) as group:
        done = programs.run(save_in_a_control_group, str(tmp_path), str(group))
        assert done.status == 0, done
        assert done.out == "300\n"


def convert_in_a_control_group(source: str, target: str, group: str) -> None:
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    for to in ("safetensors", "zarr", "torch_dist", "torch"):
        objects = "sidecar" if to == "safetensors" else "auto"
        done = convert(source, f"{target}/{to}", to=to, objects=objects, host_memory="64MiB")
        say(done.nbytes // MIB)
    os._exit(0)


@pytest.mark.slow
def test_a_conversion_keeps_the_limit_of_the_control_group(programs: Programs, tmp_path: Path) -> None:
    state = huge(400 * MIB)
    with StorageWriter() as writer:
        save(writer, tmp_path / "source", state)
    with control_group(200 * MIB) as group:
        done = programs.run(convert_in_a_control_group, str(tmp_path / "source"), str(tmp_path), str(group))
        assert done.status == 0, done
        assert done.out == "400\n" * 4


def ranges_of(writer: StorageWriter) -> list[set[tuple[int, int]]]:
    """Return, for each staged state that is alive, the pages of the arena that it holds."""
    return [
        {
            (taken.slab, page)
            for taken in lease._ranges
            for page in range(taken.offset, taken.offset + taken.nbytes, 4096)
        }
        for lease in engine_of(writer).stager._leases
    ]


def test_two_saves_in_flight_share_no_memory(open_writer: OpenWriter, tmp_path: Path) -> None:
    writer = open_writer(dist_ckpt_workers=2)
    save(writer, tmp_path / "old", STATE)
    with stopping(writer, 0) as stopped:
        first = start_save(writer, tmp_path / "first", NEXT)
        assert stopped.wait(20)
        changed = state_of(3)
        second = start_save(writer, tmp_path / "second", changed)
        held = ranges_of(writer)
        assert [len(pages) > 1000 for pages in held] == [True, True]
        assert not held[0] & held[1]
        # What the trainer does now is no business of either.
        for weight in changed["model"].values():
            weight.zero_()
        assert not first.done()
    first.result(timeout=20)
    second.result(timeout=20)
    assert same(load(tmp_path / "first", NEXT), NEXT)
    assert same(load(tmp_path / "second", state_of(3)), state_of(3))


def test_a_failed_save_gives_its_memory_to_the_next(open_writer: OpenWriter, tmp_path: Path) -> None:
    # Room for one state: torch's exception and its frames hold what the failed save had staged.
    writer = open_writer(ckpt_host_memory="9MiB", distributed_timeout_minutes=0.1)
    state = state_of(1, 8 * MIB)
    (tmp_path / "blocked").touch()
    for mode in ("async", "sync", "async"):
        for _ in range(2):
            with contextlib.suppress(BaseException):
                start_save(writer, tmp_path / "blocked", state).result(timeout=20)
        save_in(mode, writer, tmp_path / mode, state)
        assert same(load(tmp_path / mode, state), state)


def test_a_budget_that_is_filled_by_the_state_leaves_room_for_its_objects(
    open_writer: OpenWriter, tmp_path: Path
) -> None:
    state = state_of(1, 8 * MIB)
    writer = open_writer()
    save(writer, tmp_path / "first", state)
    staged = engine_of(writer).stage(state)
    budget = 4096 * sum(len(pages) for pages in ranges_of(writer))
    del staged
    tight = open_writer(ckpt_host_memory=budget, distributed_timeout_minutes=0.05)
    outcome = outcome_of(lambda: save_in("async", tight, tmp_path / "second", state))
    # Refused at once with the reason, or saved: nothing in between.
    if outcome is None:
        assert same(load(tmp_path / "second", state), state)
    else:
        assert isinstance(outcome, StagingError)
        assert "--ckpt-host-memory" in str(outcome)


class _WaitingPlanner(DefaultSavePlanner):
    """Makes its plan when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()

    def create_local_plan(self) -> Any:
        assert self.told.wait(20)
        return super().create_local_plan()


def test_a_save_that_stages_leaves_the_one_in_flight_what_it_needs_to_end(
    open_writer: OpenWriter, tmp_path: Path
) -> None:
    state = state_of(1, 8 * MIB)
    writer = open_writer()
    save(writer, tmp_path / "first", state)
    staged = engine_of(writer).stage(state)
    budget = 2 * 4096 * sum(len(pages) for pages in ranges_of(writer))
    del staged
    # Room for two states and not for a page more, which the objects of the first need.
    tight = open_writer(ckpt_host_memory=budget, distributed_timeout_minutes=0.25)
    planner, other = _WaitingPlanner(), state_of(2, 8 * MIB)
    first: Any = state_dict_saver.async_save(
        state, storage_writer=tight, checkpoint_id=str(tmp_path / "first"), planner=planner
    )
    second: list[Any] = []
    staging = threading.Thread(target=lambda: second.append(start_save(tight, tmp_path / "second", other)))
    staging.start()
    staging.join(0.5)
    planner.told.set()
    first.upload_completion.result(timeout=20)
    staging.join(20)
    second[0].result(timeout=20)
    assert same(load(tmp_path / "first", state), state)
    assert same(load(tmp_path / "second", other), other)


SAVES = 50


def private_bytes(pid: int) -> int:
    """Return the memory that a process shares with none: the arena is bounded, and counted by itself."""
    memory = psutil.Process(pid).memory_info()
    return int(memory.rss - memory.shared)


def save_often(path: str, workers: int, mode: str) -> None:
    process = psutil.Process()
    step = torch.tensor(0)
    state = {
        "model": {f"weight{number}": torch.zeros(1 << 18) for number in range(20)},
        "step": step,
        "note": "often",
    }
    figures = []
    with StorageWriter(dist_ckpt_workers=workers) as writer:
        save_in(mode, writer, path, state)
        # What the thread of a background save that is just ending still holds has its place beside the next.
        both = [engine_of(writer).stage(state) for _ in range(2)]
        del both
        for number in range(SAVES):
            step.fill_(number)
            save_in(mode, writer, path, state)
            pids = [os.getpid(), *(pids_of(writer) if workers > 1 else [])]
            figures.append(
                (
                    sum(map(private_bytes, pids)),
                    process.num_fds(),
                    process.num_threads(),
                    engine_of(writer).arena.reserved_bytes,
                )
            )
    sys.stdout.write(json.dumps(figures))


@pytest.mark.slow
@pytest.mark.perf
@pytest.mark.parametrize(
    ("workers", "mode"),
    [
        pytest.param(1, "sync", marks=pytest.mark.thorough),
        pytest.param(1, "async", marks=pytest.mark.thorough),
        pytest.param(2, "sync", marks=pytest.mark.thorough),
        (2, "async"),
    ],
)
def test_memory_and_descriptors_are_flat_over_fifty_saves(
    programs: Programs, tmp_path: Path, workers: int, mode: str
) -> None:
    done = programs.run(save_often, str(tmp_path), workers, mode)
    assert done.status == 0, done
    figures = json.loads(done.out)
    later = range(SAVES // 2, SAVES)
    resident = [figures[number][0] for number in later]
    slope = statistics.linear_regression(list(later), resident).slope
    assert slope <= 64 << 10, f"{slope:.0f} bytes for each save: {resident}"
    assert len({figures[number][1] for number in later}) == 1, figures
    assert len({figures[number][3] for number in later}) == 1, figures
    # That of a background save may still be ending when its result is there, and one waits for the next call.
    assert max(figures[number][2] for number in later) <= 3, figures
