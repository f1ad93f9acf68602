"""Small states, and saving, loading and comparing them; used by tests and by the programs that they start."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from distckpt import CheckpointError, StorageReader, StorageWriter
from distckpt.engine import Engine
from distckpt.lanes import WorkerLanes
from distckpt.observe import Event, subscribe

KIB, MIB = 1 << 10, 1 << 20
NO_MOUNT = 77
_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18


def state_of(seed: int, nbytes: int = 4 * MIB, tensors: int = 4) -> dict[str, Any]:
    """Return a state whose every value depends on `seed`."""
    generator = torch.Generator().manual_seed(seed)
    size = nbytes // tensors // 8
    return {
        "model": {
            f"weight{i}": torch.randint(-(2**62), 2**62, (size,), generator=generator) for i in range(tensors)
        },
        "step": torch.tensor(seed),
        "note": f"state {seed}",
    }


def empty_like(state: dict[str, Any]) -> dict[str, Any]:
    """Return the same state with other values."""
    return {
        "model": {name: torch.zeros_like(value) for name, value in state["model"].items()},
        "step": torch.tensor(-1),
        "note": "",
    }


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Say whether two states are equal bit for bit."""
    return (
        left["note"] == right["note"]
        and bool(torch.equal(left["step"], right["step"]))
        and left["model"].keys() == right["model"].keys()
        and all(torch.equal(value, right["model"][name]) for name, value in left["model"].items())
    )


def save(writer: StorageWriter, path: Path | str, state: dict[str, Any]) -> None:
    """Save `state` at once."""
    state_dict_saver.save(state, storage_writer=writer, checkpoint_id=os.fspath(path))


def start_save(writer: StorageWriter, path: Path | str, state: dict[str, Any]) -> Any:
    """Save `state` in the background; returns the future."""
    response: Any = state_dict_saver.async_save(state, storage_writer=writer, checkpoint_id=os.fspath(path))
    return response.upload_completion


def save_in(mode: str, writer: StorageWriter, path: Path | str, state: dict[str, Any]) -> None:
    """Save `state` the `sync` or the `async` way, and wait for it."""
    if mode == "sync":
        save(writer, path, state)
    else:
        start_save(writer, path, state).result(timeout=50)


def load(path: Path | str, like: dict[str, Any]) -> dict[str, Any]:
    """Return what the checkpoint holds, with every checksum compared."""
    state = empty_like(like)
    state_dict_loader.load(state, storage_reader=StorageReader(path))
    return state


def outcome_of(call: Callable[[], object]) -> CheckpointError | None:
    """Return what `call` fails with, taken out of the exception that torch wraps it in, or None."""
    error: BaseException
    try:
        call()
    except CheckpointException as wrapped:
        error = wrapped.failures[0][0]
    except CheckpointError as bare:
        error = bare
    else:
        return None
    if not isinstance(error, CheckpointError):
        raise AssertionError("it failed with a foreign error") from error
    return error


def error_of(call: Callable[[], object]) -> CheckpointError:
    """Return what `call`, which must fail, fails with."""
    error = outcome_of(call)
    assert error is not None, "it did not fail"
    return error


def say(*words: object) -> None:
    """Print a line at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def mount_tmpfs(target: str, nbytes: int) -> None:
    """Mount an empty file system of `nbytes` bytes, seen by this process and its children only.

    Exits with status `NO_MOUNT` where that is not permitted.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    steps = (
        (libc.unshare, (_CLONE_NEWNS,)),
        (libc.mount, (b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)),
        (libc.mount, (b"tmpfs", target.encode(), b"tmpfs", ctypes.c_ulong(0), b"size=%d" % nbytes)),
    )
    for function, arguments in steps:
        if function(*arguments) != 0:
            say(f"cannot mount: {os.strerror(ctypes.get_errno())}")
            sys.exit(NO_MOUNT)


def engine_of(writer: StorageWriter) -> Engine:
    """Return the engine of a writer that has saved before."""
    engine = writer._engine
    assert engine is not None
    return engine


def pids_of(writer: StorageWriter) -> list[int]:
    """Return the process ids of the writer's workers, by lane."""
    lanes = engine_of(writer).lanes
    assert isinstance(lanes, WorkerLanes)
    return lanes.pids


def is_running(pid: int) -> bool:
    """Say whether a process exists and has not ended; one that its parent has not reaped has ended."""
    try:
        return psutil.Process(pid).status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Wait until `condition` holds; returns the seconds that it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)
    return time.monotonic() - started


def files_in(folder: Path | str) -> set[str]:
    """Return the names of all files below `folder`."""
    root = Path(folder)
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def assert_is_clean(folder: Path | str) -> None:
    """Assert that `folder` holds the files of one committed checkpoint and the owner record, nothing else."""
    names = files_in(folder)
    manifests = [name for name in names if name.endswith(".json") and "/rank-" in name]
    records = [name for name in names if name.startswith(".distckpt/commit-")]
    images = [name for name in names if ".distcp" in name and "/" not in name]
    assert len(records) == 1, names
    assert len({Path(name).parent for name in manifests}) == 1, names
    assert names == {".metadata", ".distckpt/owner", *records, *manifests, *images}, names
    assert not [
        path for path in Path(folder, ".distckpt").iterdir() if path.is_dir() and not any(path.iterdir())
    ]


@contextlib.contextmanager
def on_event(name: str, callback: Callable[[Event], object]) -> Iterator[None]:
    """Call `callback` with each event of that name."""
    end = subscribe(lambda event: callback(event) if event.name == name else None)
    try:
        yield
    finally:
        end()


@contextlib.contextmanager
def stopping(writer: StorageWriter, lane: int) -> Iterator[threading.Event]:
    """Stop the worker of `lane` as soon as parts are handed out, so that its save stays in flight.

    Yields an event that is set once that has happened. The worker goes on when the context ends, if it still
    lives.
    """
    stopped = threading.Event()
    pids: list[int] = []

    def stop(_: Event) -> None:
        if not stopped.is_set():
            pids.append(pids_of(writer)[lane])
            os.kill(pids[0], signal.SIGSTOP)
            stopped.set()

    with on_event("parts.pushed", stop):
        try:
            yield stopped
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def without_the_others(writer: StorageWriter, lane: int) -> Iterator[None]:
    """Stop all workers but that of `lane` for a second: every part that it can take by then is its own."""
    others = [pid for number, pid in enumerate(pids_of(writer)) if number != lane]

    def resume() -> None:
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(1.0, resume)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        resume()
