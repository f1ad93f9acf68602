"""Programs that are awkward to work in: no guard, no script, daemons, shadowed modules, few descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from distckpt import StorageWriter, WriteError
from distckpt.storage import open_storage
from faults.checkpoints import (
    MIB,
    error_of,
    files_in,
    load,
    outcome_of,
    pids_of,
    same,
    save,
    save_in,
    say,
    state_of,
)
from faults.conftest import OpenWriter
from faults.programs import Programs

STATE, NEXT = state_of(1), state_of(2)

# Whoever runs it a second time writes once more; a worker that imports what lies in its folder ends.
UNGUARDED = """
import os, sys
marker, path, folder = {marker!r}, {path!r}, {folder!r}
with open(marker, "a") as file:
    file.write("x")
own = [entry for entry in sys.path if entry in ("", folder)]
sys.path[:] = [entry for entry in sys.path if entry not in own]
import torch
from torch.distributed.checkpoint import state_dict_saver
from distckpt import StorageWriter
sys.path[:0] = own
with StorageWriter(dist_ckpt_workers=2) as writer:
    state_dict_saver.save({{"weight": torch.arange(100_000)}}, storage_writer=writer, checkpoint_id=path)
    state_dict_saver.async_save(
        {{"weight": torch.arange(100_000)}}, storage_writer=writer, checkpoint_id=path
    ).upload_completion.result(timeout=20)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        "script",
        pytest.param("stdin", marks=pytest.mark.thorough),
        pytest.param("-P", marks=pytest.mark.thorough),
        "-I",
    ],
)
def test_a_script_without_a_guard_is_not_run_again(tmp_path: Path, start: str) -> None:
    if start == "-P" and sys.version_info < (3, 11):
        pytest.skip("python has -P from 3.11 on")
    path = tmp_path / "checkpoint"
    text = UNGUARDED.format(marker=str(tmp_path / "marker"), path=str(path), folder=str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(text)
    for name in ("json", "socket", "struct", "crc32c"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported the wrong ' + __name__)\n")
    command = {
        "script": [sys.executable, str(script)],
        "stdin": [sys.executable],
        "-P": [sys.executable, "-P", str(script)],
        "-I": [sys.executable, "-I", str(script)],
    }[start]
    done = subprocess.run(
        command,
        input=text if start == "stdin" else None,
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "wrong" not in done.stderr
    assert (tmp_path / "marker").read_text() == "x"
    assert (path / ".metadata").exists()


def save_in_a_daemon(path: str, workers: int) -> None:
    def save_both_ways() -> None:
        with StorageWriter(dist_ckpt_workers=workers) as writer:
            save_in("sync", writer, path + "-sync", STATE)
            save_in("async", writer, path + "-async", STATE)

    daemon = multiprocessing.get_context("fork").Process(target=save_both_ways, daemon=True)
    daemon.start()
    daemon.join(30)
    sys.exit(daemon.exitcode)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_daemon_process_saves(programs: Programs, tmp_path: Path, workers: int) -> None:
    done = programs.run(save_in_a_daemon, str(tmp_path / "checkpoint"), workers)
    assert done.status == 0, done
    for mode in ("sync", "async"):
        assert same(load(tmp_path / f"checkpoint-{mode}", STATE), STATE)


def never_fork(path: str) -> None:
    os.register_at_fork(before=lambda: say("forked"))
    with StorageWriter(dist_ckpt_workers=2) as writer:
        save_in("sync", writer, path, STATE)
        save_in("async", writer, path, STATE)
        for pid in pids_of(writer):
            worker = psutil.Process(pid)
            assert worker.exe() == os.path.realpath(sys.executable)
            assert worker.cmdline()[:2] == [sys.executable, "-c"]
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "memfd:distckpt" in maps
            assert not [line for line in maps.splitlines() if "torch" in line or "cuda" in line]
            say(worker.memory_info().rss // MIB)


def test_workers_are_executed_and_nothing_is_forked(programs: Programs, tmp_path: Path) -> None:
    done = programs.run(never_fork, str(tmp_path))
    assert done.status == 0, done
    # What a worker maps of the arena counts as its memory as well.
    assert [int(line) < 60 for line in done.out.splitlines()] == [True, True], done


def save_beside_forked_loaders(path: str) -> None:
    numbers: Any = torch.arange(64)
    loader: Any = DataLoader(numbers, batch_size=2, num_workers=2, multiprocessing_context="fork")
    with StorageWriter(dist_ckpt_workers=2) as writer:
        save(writer, path, STATE)
        batches = iter(loader)
        next(batches)
        children = [child for child in psutil.Process().children() if child.pid not in pids_of(writer)]
        assert len(children) == 2
        save_in("sync", writer, path, NEXT)
        save_in("async", writer, path, STATE)
        assert sum(len(batch) for batch in batches) == 62
    assert all(not psutil.pid_exists(pid) for pid in [child.pid for child in children])


def test_forked_data_loaders_live_beside_saves(programs: Programs, tmp_path: Path) -> None:
    done = programs.run(save_beside_forked_loaders, str(tmp_path))
    assert done.status == 0, done
    assert same(load(tmp_path, STATE), STATE)


def save_with_few_descriptors(path: str, workers: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    state = {
        "model": {f"weight{number}": torch.full((8,), number) for number in range(10_000)},
        "step": torch.tensor(1),
        "note": "many",
    }
    with StorageWriter(dist_ckpt_workers=workers) as writer:
        for mode in ("sync", "async"):
            save_in(mode, writer, path, state)
            say(len(os.listdir("/proc/self/fd")))
    assert same(load(path, state), state)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 4])
def test_ten_thousand_tensors_need_a_handful_of_descriptors(
    programs: Programs, tmp_path: Path, workers: int
) -> None:
    done = programs.run(save_with_few_descriptors, str(tmp_path), workers)
    assert done.status == 0, done
    assert [int(line) < 50 for line in done.out.splitlines()] == [True, True], done


def _drop_capabilities() -> None:
    """Give up all that lifts the limit on processes, and nothing that the file system asks for."""
    libc = ctypes.CDLL(None, use_errno=True)
    admin, override = 1 << 21, 1 << 24
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    if libc.capget(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    sets[0] &= ~(admin | override)
    if libc.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def save_without_processes(path: str) -> None:
    # Root is exempt from the limit: count for another user, but keep the right to read root's files.
    os.setresuid(65534, 0, 0)
    _drop_capabilities()
    with StorageWriter(dist_ckpt_workers=2) as writer:
        soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
        error = error_of(lambda: save(writer, path, STATE))
        assert isinstance(error, WriteError)
        assert (error.errno, error.rank, error.lane) == (errno.EAGAIN, 0, 0), (error, error.errno)
        assert "--dist-ckpt-workers" in str(error)
        assert files_in(path) == {".distckpt/owner"}
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
        save(writer, path, NEXT)
        assert same(load(path, NEXT), NEXT)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user without processes")
def test_no_process_to_be_had_is_a_clear_error(programs: Programs) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        done = programs.run(save_without_processes, folder)
    assert done.status == 0, done


def test_an_interpreter_that_is_gone_is_a_clear_error(
    open_writer: OpenWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint"
    writer = open_writer(dist_ckpt_workers=2)
    with monkeypatch.context() as gone:
        gone.setattr(sys, "executable", str(tmp_path / "python"))
        error = error_of(lambda: save(writer, path, STATE))
    assert isinstance(error, WriteError)
    assert (error.errno, error.rank, error.lane) == (errno.ENOENT, 0, 0)
    assert files_in(path) == {".distckpt/owner"}
    save(writer, path, NEXT)
    assert same(load(path, NEXT), NEXT)


def test_a_worker_that_cannot_start_up_is_a_clear_error(
    open_writer: OpenWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint"
    writer = open_writer(dist_ckpt_workers=2)
    with monkeypatch.context() as lost:
        lost.setattr(sys, "path", [])
        error = error_of(lambda: save(writer, path, STATE))
    assert type(error).__name__ == "WorkerDied"
    assert files_in(path) == {".distckpt/owner"}
    save(writer, path, NEXT)
    assert same(load(path, NEXT), NEXT)


def test_too_few_descriptors_for_workers_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    # What is imported on first use needs descriptors too.
    open_storage(str(path))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    errors = []
    error = None
    with contextlib.ExitStack() as held:
        # The limit is on the number of a descriptor: leave no gap below it.
        used = max(int(name) for name in os.listdir("/proc/self/fd"))
        while held.enter_context(open(os.devnull, "rb")).fileno() < used:
            pass
        for room in range(40):
            with StorageWriter(dist_ckpt_workers=4) as writer:
                resource.setrlimit(resource.RLIMIT_NOFILE, (used + room, hard))
                try:
                    error = outcome_of(functools.partial(save, writer, path, STATE))
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            if error is None:
                break
            errors.append(error)
            assert not (path / ".metadata").exists()
    assert error is None, "forty descriptors were not enough"
    assert len(errors) > 5
    assert {getattr(found, "errno", None) for found in errors} <= {errno.EMFILE, None}, errors
    assert same(load(path, STATE), STATE)


def test_the_working_directory_may_be_gone(programs: Programs, tmp_path: Path) -> None:
    done = programs.run(save_from_nowhere, str(tmp_path))
    assert done.status == 0, done
    assert same(load(tmp_path / "checkpoint", STATE), STATE)


def save_from_nowhere(folder: str) -> None:
    gone = os.path.join(folder, "gone")
    os.mkdir(gone)
    os.chdir(gone)
    os.rmdir(gone)
    sys.path.insert(0, "")
    with StorageWriter(dist_ckpt_workers=2) as writer:
        save(writer, os.path.join(folder, "checkpoint"), STATE)


def test_workers_leave_the_signals_of_the_job_to_the_trainer(open_writer: OpenWriter, tmp_path: Path) -> None:
    writer = open_writer(dist_ckpt_workers=2)
    save(writer, tmp_path / "old", STATE)
    pids = pids_of(writer)
    for number in (2, 15):
        for pid in pids:
            os.kill(pid, number)
    save(writer, tmp_path / "new", NEXT)
    assert pids_of(writer) == pids
    assert same(load(tmp_path / "new", NEXT), NEXT)
