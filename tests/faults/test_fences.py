"""Saves that were overtaken: whenever they go on, the one is refused, and what the other committed stays."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from distckpt import (
    Checkpointer,
    CheckpointError,
    CommitError,
    StorageReader,
    StorageWriter,
    WorkerDied,
    WriteError,
    engine,
    lanes,
)
from distckpt.commit import committed_by
from distckpt.storage import open_storage
from faults.checkpoints import (
    KIB,
    MIB,
    assert_is_clean,
    error_of,
    is_running,
    load,
    outcome_of,
    same,
    save,
    say,
    start_save,
    state_of,
    wait_until,
)
from faults.programs import Child, Programs

pytestmark = pytest.mark.slow

SMALL = 64 * KIB
OLD, STALE, NEW, NEXT = (state_of(seed, SMALL) for seed in (1, 2, 3, 4))
STATES = {"OLD": OLD, "STALE": STALE, "NEW": NEW, "NEXT": NEXT}
DEADLINE_S = 1.5
WAIT_S = 30.0
CLAIM, PUBLICATION = "rename .distckpt/owner", "rename .metadata"
_PATH_CALLS = ("open", "mkdir", "rename", "unlink", "rmdir", "scandir", "link")
_FD_CALLS = ("preadv", "pwritev", "write", "fsync")


def step_path(root: Path | str, step: int) -> Path:
    return Path(root) / f"step-{step:08}"


class Job(Protocol):
    """Whatever saves steps below a folder."""

    def save(self, step: int, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class WriterJob:
    """Saves with `dcp.save`, or `dcp.async_save`."""

    def __init__(self, root: Path | str, *, is_async: bool, **settings: Any) -> None:
        self.root = root
        self.writer = StorageWriter(**settings)
        self._is_async = is_async

    def save(self, step: int, state: dict[str, Any]) -> None:
        if self._is_async:
            start_save(self.writer, step_path(self.root, step), state).result(timeout=WAIT_S)
        else:
            save(self.writer, step_path(self.root, step), state)

    def close(self) -> None:
        self.writer.close()


class CheckpointerJob:
    """Saves with a `Checkpointer`."""

    def __init__(self, root: Path | str, **settings: Any) -> None:
        self.checkpointer = Checkpointer(root, async_save=True, **settings)

    def save(self, step: int, state: dict[str, Any]) -> None:
        self.checkpointer.save(step, state).result(WAIT_S)

    def close(self) -> None:
        self.checkpointer.close()


def start_job(kind: str, root: Path | str, **settings: Any) -> Job:
    settings = {"distributed_timeout_minutes": 0.5, "ckpt_host_memory": "64MiB", **settings}
    if kind == "checkpointer":
        return CheckpointerJob(root, **settings)
    return WriterJob(root, is_async=kind == "async", **settings)


OpenJob = Callable[..., Job]


@pytest.fixture
def open_job() -> Iterator[OpenJob]:
    """Opens jobs that are closed after the test."""
    with contextlib.ExitStack() as jobs:

        def open_one(kind: str, root: Path | str, **settings: Any) -> Job:
            job = start_job(kind, root, **settings)
            jobs.callback(job.close)
            return job

        yield open_one


class Steps:
    """What is done to a directory, step by step; one of the steps does not come before its time.

    Args:
        path: The directory.
        at: Number of the step, from 1, or what the step does.
        stop: Called before that step, on the thread that is about to do it.
    """

    def __init__(self, path: Path, at: int | str, stop: Callable[[], None]) -> None:
        self.seen: list[str] = []
        self.is_over = False
        self._path = str(path)
        self._at = at
        self._stop = stop
        self._lock = threading.Lock()

    def happens(self, call: str, path: str) -> None:
        if not (path == self._path or path.startswith(self._path + "/")):
            return
        with self._lock:
            if self.is_over:
                return
            what = f"{call} {os.path.relpath(path, self._path)}"
            if self._at not in (what, len(self.seen) + 1):
                self.seen.append(what)
                return
            self.is_over = True
        self._stop()


Watch = Callable[[str, str], None]


def watch_calls(patch: Callable[[str, Callable[..., Any]], None], happens: Watch) -> None:
    """Have `happens(call, path)` called before each call of the operating system that concerns files."""

    def on_path(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            where = arguments[1 if name == "rename" else 0] if arguments else "."
            if not isinstance(where, int):
                happens(name, os.fsdecode(where))
            return call(*arguments, **options)

        return wrapper

    def on_fd(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(fd: int, *arguments: Any) -> Any:
            # Not what is printed.
            if fd > 2:
                happens(name, os.readlink(f"/proc/self/fd/{fd}"))
            return call(fd, *arguments)

        return wrapper

    for name in _PATH_CALLS:
        patch(name, on_path(name, getattr(os, name)))
    for name in _FD_CALLS:
        patch(name, on_fd(name, getattr(os, name)))


class Watcher:
    """Tells whoever listens of the calls of this process."""

    def __init__(self) -> None:
        self.listeners: list[Watch] = []

    def happens(self, call: str, path: str) -> None:
        for listener in self.listeners:
            listener(call, path)


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> Watcher:
    opened = Watcher()
    watch_calls(lambda name, call: monkeypatch.setattr(os, name, call), opened.happens)
    return opened


class Overtaken:
    """A save on a thread of its own that stops before one of its steps, until it is told to go on."""

    def __init__(self, watcher: Watcher, path: Path, at: int | str, call: Callable[[], object]) -> None:
        self.steps = Steps(path, at, self._stop)
        self._watcher = watcher
        self._error: list[BaseException | None] = []
        self._has_news = threading.Event()
        self._goes_on = threading.Event()
        watcher.listeners.append(self.steps.happens)
        self._thread = threading.Thread(target=self._run, args=(call,))
        self._thread.start()
        assert self._has_news.wait(WAIT_S), "neither stopped nor ended"

    def _run(self, call: Callable[[], object]) -> None:
        try:
            self._error.append(outcome_of(call))
        except BaseException as error:  # noqa: BLE001 - raised by `end`
            self._error.append(error)
        self.steps.is_over = True
        self._has_news.set()

    def _stop(self) -> None:
        self._has_news.set()
        assert self._goes_on.wait(WAIT_S)

    @property
    def has_ended(self) -> bool:
        return bool(self._error)

    def end(self) -> CheckpointError | None:
        """Let it go on, and return what it fails with."""
        self._goes_on.set()
        self._thread.join(WAIT_S)
        self._watcher.listeners.remove(self.steps.happens)
        [error] = self._error
        if error is not None and not isinstance(error, CheckpointError):
            raise error
        return error


def prepare(before: str, original: Path, path: Path) -> None:
    if before == "overwrite":
        shutil.copytree(original, path)


def held(path: Path) -> str:
    """Return which state the directory holds, or why none can be loaded."""
    try:
        found = load(path, NEW)
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - a fault that the test reports
        return f"nothing that loads ({error})" if (path / ".metadata").exists() else "nothing"
    return next((name for name, state in STATES.items() if same(found, state)), "a mixture")


def fault_of(steps: list[str], error: CheckpointError | None, path: Path, *, removed: bool = False) -> str:
    """Judge how a save of STALE ended that stopped after `steps`, while NEW was saved there and committed.

    Returns:
        What is wrong with the error, or with what the directory holds in the end; empty if nothing is.
    """
    holds = held(path)
    end = f"ended with {error!r}, and the directory holds {holds}"
    if PUBLICATION in steps:
        # It was first; what it has removed since is older than what came after it.
        return "" if (error is None or removed) and holds == "NEW" else end
    if CLAIM in steps:
        return "" if isinstance(error, CommitError) and holds == "NEW" else end
    # It came to claim the directory only after the other was done, or found its files swept.
    return "" if holds == ("STALE" if error is None else "NEW") else end


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "workers", "before"),
    [
        pytest.param("writer", 1, "fresh", marks=pytest.mark.thorough),
        ("writer", 1, "overwrite"),
        pytest.param("writer", 1, "removed", marks=pytest.mark.thorough),
        ("async", 2, "overwrite"),
        pytest.param("checkpointer", 1, "fresh", marks=pytest.mark.thorough),
        ("checkpointer", 2, "overwrite"),
        ("checkpointer", 2, "removed"),
    ],
)
def test_a_save_that_goes_on_after_another_has_committed(
    open_job: OpenJob, watcher: Watcher, tmp_path: Path, kind: str, workers: int, before: str
) -> None:
    original, root = tmp_path / "original", tmp_path / "root"
    save_original(open_job, original)
    stale, successor = open_job(kind, root, dist_ckpt_workers=workers), open_job(kind, root)
    faults, num_refused = [], 0
    for point in range(1, 500):
        path = step_path(root, point)
        prepare(before, original, path)
        overtaken = Overtaken(watcher, path, point, lambda step=point: stale.save(step, STALE))  # type: ignore[misc]
        steps = list(overtaken.steps.seen)
        where = f"stopped before step {point}, after {steps[-1:]}"
        if overtaken.has_ended:
            assert overtaken.end() is None
            break
        if before == "removed":
            shutil.rmtree(path, ignore_errors=True)
        successor.save(point, NEW)
        assert same(load(path, NEW), NEW), where
        error = overtaken.end()
        fault = fault_of(steps, error, path, removed=before == "removed")
        faults += [f"{where}: {fault}"] if fault else []
        num_refused += isinstance(error, CommitError)
        # Whoever comes next cleans up.
        stale.save(point, NEXT)
        assert same(load(path, NEXT), NEXT), where
        assert_is_clean(path)
    else:
        pytest.fail("it has never come to an end")
    assert not faults, "\n".join(faults)
    assert {CLAIM, PUBLICATION} <= set(steps)
    assert num_refused > 15


def save_original(open_job: OpenJob, original: Path) -> None:
    open_job("writer", original.parent / "first").save(0, OLD)
    step_path(original.parent / "first", 0).rename(original)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("before", ["fresh", "overwrite"])
@pytest.mark.parametrize("kind", ["writer", "checkpointer"])
def test_the_later_claim_wins_however_the_earlier_goes_on(
    open_job: OpenJob, watcher: Watcher, tmp_path: Path, kind: str, before: str
) -> None:
    """The one stops at any point, the other when only its publication is left; then the first goes on."""
    original, root = tmp_path / "original", tmp_path / "root"
    save_original(open_job, original)
    first, second = open_job(kind, root), open_job(kind, root)
    faults = []
    for point in range(1, 500):
        path = step_path(root, point)
        prepare(before, original, path)
        early = Overtaken(watcher, path, point, lambda step=point: first.save(step, STALE))  # type: ignore[misc]
        steps = list(early.steps.seen)
        if early.has_ended:
            assert early.end() is None
            break
        late = Overtaken(watcher, path, PUBLICATION, lambda step=point: second.save(step, NEW))  # type: ignore[misc]
        early_error, late_error = early.end(), late.end()
        if CLAIM not in steps and early_error is None:
            fault = "" if isinstance(late_error, CommitError) and held(path) == "STALE" else "the later claim"
        else:
            fault = fault_of(steps, early_error, path) or ("" if late_error is None else "the later claim")
        if fault:
            faults.append(
                f"the first stopped before step {point}, after {steps[-1:]}: {fault}; {early_error!r}, then "
                f"{late_error!r}; the directory holds {held(path)}"
            )
    else:
        pytest.fail("it has never come to an end")
    assert not faults, "\n".join(faults)
    assert {CLAIM, PUBLICATION} <= set(steps)


# A worker takes this in as it starts. It counts what it does to images, and before one of its steps stops
# itself, or all that belongs to its job; only the first worker that comes there does.
_SHIM = """
import os, signal
call, number, scope, note = os.environ["DISTCKPT_TEST_STOP"].split(" ", 3)
seen = 0

def counted(name, original):
    def wrapper(what, *arguments, **options):
        global seen
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fsdecode(what)
        if ".distcp" in path and call in (name, "any"):
            seen += 1
            if seen == int(number):
                try:
                    fd = real_open(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                except FileExistsError:
                    pass
                else:
                    real_write(fd, f"{os.getpid()} {name}\\n".encode())
                    os.close(fd)
                    if scope == "group":
                        os.killpg(os.getpgrp(), signal.SIGSTOP)
                    else:
                        os.kill(os.getpid(), signal.SIGSTOP)
        return original(what, *arguments, **options)
    return wrapper

real_open, real_write = os.open, os.write
for name in ("open", "pwritev", "fsync"):
    setattr(os, name, counted(name, getattr(os, name)))
"""


def shim_environment(folder: Path, call: str, number: int, scope: str) -> dict[str, str]:
    """Return the environment of a job whose first worker to come there stops before its `number`-th `call`.

    A file `stopped` in `folder` then holds its process id.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SHIM)
    return {"PYTHONPATH": str(folder), "DISTCKPT_TEST_STOP": f"{call} {number} {scope} {folder / 'stopped'}"}


LARGE_OLD, LARGE_NEW, LARGE_NEXT = (state_of(seed, 32 * MIB, tensors=8) for seed in (1, 2, 3))


def stop_a_worker(
    open_job: OpenJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, call: str
) -> tuple[Job, int]:
    """Have a save fail because one worker of its job was stopped past the deadline; return job and worker."""
    # In mid-file: it has written a part of it.
    environment = shim_environment(tmp_path / "shim", call, 2 if call == "pwritev" else 1, "self")
    job = open_job(
        kind,
        tmp_path / "root",
        dist_ckpt_workers=2,
        distributed_timeout_minutes=DEADLINE_S / 60,
        ckpt_host_memory="128MiB",
    )
    # A stopped worker does not answer, however long it is given.
    monkeypatch.setattr(engine, "_ABORT_S", 0.5)
    with monkeypatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        started = time.monotonic()
        error = error_of(lambda: job.save(0, LARGE_OLD))
        assert DEADLINE_S < time.monotonic() - started < 20
    assert isinstance(error, WriteError)
    assert not isinstance(error, WorkerDied)
    assert error.errno == errno.ETIMEDOUT
    assert "--distributed-timeout-minutes" in str(error)
    assert "lanes that have not finished" in str(error)
    pid, what = (tmp_path / "shim" / "stopped").read_text().split()
    assert what == call
    assert not (step_path(tmp_path / "root", 0) / ".metadata").exists()
    return job, int(pid)


def save_again_and_resume(job: Job, root: Path, pid: int) -> None:
    """Have the job save again to the same directory, then let the stopped worker go on to its end."""
    path = step_path(root, 0)
    job.save(0, LARGE_NEW)
    assert same(load(path, LARGE_NEW), LARGE_NEW)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not is_running(pid), 5, "the stopped worker has ended")
    assert same(load(path, LARGE_NEW), LARGE_NEW)
    for step in (1, 0):
        job.save(step, LARGE_NEXT)
        assert same(load(step_path(root, step), LARGE_NEXT), LARGE_NEXT)
        assert_is_clean(step_path(root, step))


MOMENTS = ["open", "pwritev", "fsync"]
TYPICAL = {("async", "open"), ("async", "fsync"), ("checkpointer", "pwritev")}


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        pytest.param(kind, call, marks=[pytest.mark.thorough] * ((kind, call) not in TYPICAL))
        for kind in ("writer", "async", "checkpointer")
        for call in MOMENTS
    ],
)
def test_a_worker_stopped_past_the_deadline(
    open_job: OpenJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, call: str
) -> None:
    job, pid = stop_a_worker(open_job, monkeypatch, tmp_path, kind, call)
    save_again_and_resume(job, tmp_path / "root", pid)


@pytest.mark.parametrize("call", MOMENTS)
@pytest.mark.parametrize("kind", [pytest.param("writer", marks=pytest.mark.thorough), "checkpointer"])
def test_a_worker_that_cannot_be_killed_and_goes_on_later(
    open_job: OpenJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, call: str
) -> None:
    """As one that waits for a device that hangs: signals are of no use until the device answers."""
    note, kill = tmp_path / "shim" / "stopped", subprocess.Popen.kill

    def kill_unless_stopped(process: subprocess.Popen[Any]) -> None:
        if not note.exists() or int(note.read_text().split()[0]) != process.pid:
            kill(process)

    monkeypatch.setattr(subprocess.Popen, "kill", kill_unless_stopped)
    monkeypatch.setattr(lanes, "_STOP_S", 0.2)
    monkeypatch.setattr(lanes, "_REAP_S", 0.2)
    job, pid = stop_a_worker(open_job, monkeypatch, tmp_path, kind, call)
    assert is_running(pid), "it was to be one that cannot be killed"
    save_again_and_resume(job, tmp_path / "root", pid)


def save_and_stop(
    root: str, kind: str, workers: int, step: int, at: int, environment: dict[str, str]
) -> None:
    """Save STALE as a step, and stop all processes of this job before the `at`-th thing that it does there.

    Says what it has done until then, and in the end what came out.
    """
    os.environ.update(environment)
    job = start_job(kind, root, dist_ckpt_workers=workers)

    def stop() -> None:
        say(json.dumps(steps.seen))
        os.killpg(os.getpgrp(), signal.SIGSTOP)
        # The signal takes hold of one thread after the other.
        time.sleep(0.02)

    steps = Steps(step_path(root, step), at, stop)
    watch_calls(lambda name, call: setattr(os, name, call), steps.happens)
    error = outcome_of(lambda: job.save(step, STALE))
    if not steps.is_over:
        # Stopped by a worker, or not at all.
        say(json.dumps(steps.seen))
    say(json.dumps([type(error).__name__, str(error)] if error else ["", ""]))
    job.close()
    # To end the interpreter takes a second.
    os._exit(0)


class Zombie:
    """A job that stops in its only save, and may be told to go on."""

    def __init__(self, child: Child, step: int, number: int) -> None:
        self.child = child
        self.step = step
        self.number = number

    def wait_until_stopped(self) -> bool:
        """Wait until all of it is stopped; False if it has ended instead."""
        stat = Path(f"/proc/{self.child.pid}/stat")

        def state() -> str:
            return stat.read_text().rpartition(") ")[2][0]

        wait_until(lambda: state() in "TZ", WAIT_S, f"zombie {self.number} has stopped or ended")
        return state() == "T"

    def resume(self) -> None:
        os.killpg(self.child.pid, signal.SIGCONT)

    def end(self) -> tuple[list[str], tuple[str, str]]:
        """Return what it had done when it stopped, and what its save failed with."""
        done = self.child.wait()
        assert done.status == 0, done
        steps, outcome = map(json.loads, done.out.splitlines())
        return steps, tuple(outcome)


@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    ("kind", "workers", "before", "by_worker"),
    [
        pytest.param("writer", 1, "overwrite", False, marks=pytest.mark.thorough),
        pytest.param("checkpointer", 2, "fresh", False, marks=pytest.mark.thorough),
        ("async", 2, "removed", True),
        ("checkpointer", 2, "overwrite", True),
    ],
)
def test_a_preempted_job_goes_on_beside_its_successor(
    programs: Programs,
    open_job: OpenJob,
    tmp_path: Path,
    kind: str,
    workers: int,
    before: str,
    by_worker: bool,
) -> None:
    original, root = tmp_path / "original", tmp_path / "root"
    save_original(open_job, original)
    successor = open_job(kind, root)
    at_once, first, num_refused, num_stopped = 8, 1, 0, 0
    faults = []
    is_through = False
    while not is_through:
        zombies = []
        for number in range(first, first + at_once):
            prepare(before, original, step_path(root, number))
            environment = (
                shim_environment(tmp_path / f"shim{number}", "any", number, "group") if by_worker else {}
            )
            child = programs.start(
                save_and_stop, str(root), kind, workers, number, 0 if by_worker else number, environment
            )
            zombies.append(Zombie(child, number, number))
        first += at_once
        for zombie in zombies:
            path = step_path(root, zombie.step)
            if not zombie.wait_until_stopped():
                is_through = True
                continue
            num_stopped += 1
            if before == "removed":
                shutil.rmtree(path, ignore_errors=True)
            successor.save(zombie.step, NEW)
            assert same(load(path, NEW), NEW)
            zombie.resume()
            steps, (name, text) = zombie.end()
            where = f"stopped before step {zombie.number}, after {steps[-1:]}"
            error = CommitError(text) if name == "CommitError" else CheckpointError(text) if name else None
            # Where a worker has stopped it: it had made its files, and not published. A writer claims the
            # directory before that, a Checkpointer meanwhile.
            assumed = steps if not by_worker else [] if kind == "checkpointer" else [CLAIM]
            fault = fault_of(assumed, error, path, removed=before == "removed")
            faults += [f"{where}: {fault}"] if fault else []
            num_refused += name == "CommitError"
            successor.save(zombie.step, NEXT)
            assert same(load(path, NEXT), NEXT), where
            assert_is_clean(path)
        for zombie in zombies:
            zombie.child.wait()
        assert first < 500
    assert not faults, "\n".join(faults)
    assert num_stopped > (2 if by_worker else 30)
    assert num_refused > (15 if not by_worker else -1 if kind == "checkpointer" else 0)


NUM_RACES = 30
RIVALS = ("STALE", "NEW")


class Turns:
    """Lets the saves of several threads go on in turn, as drawn, at every step that one of them does."""

    def __init__(self, rng: random.Random, path: Path) -> None:
        self._rng = rng
        self._path = str(path)
        self._changed = threading.Condition()
        self._members: list[int] = []
        self._turn = 0

    def happens(self, call: str, path: str) -> None:
        if not path.startswith(self._path):
            return
        here = threading.get_ident()
        with self._changed:
            if here not in self._members:
                self._members.append(here)
            # Whose turn it is may have ended, or wait for a lock that this thread holds.
            self._changed.wait_for(lambda: self._turn == here, 0.004)
            self._turn = self._rng.choice(self._members)
            self._changed.notify_all()


def fault_of_race(path: Path, outcomes: dict[str, CheckpointError | None]) -> str:
    """Judge saves that ran at once: what each has failed with, by what it saved; returns what is wrong."""
    holds = held(path)
    owner = json.loads((path / ".distckpt" / "owner").read_bytes())["save_id"]
    is_last = committed_by(open_storage(path)) == owner
    is_refused = all(error is None or isinstance(error, CommitError) for error in outcomes.values())
    if is_last and is_refused and holds in outcomes and outcomes[holds] is None:
        return ""
    return f"{outcomes!r}; the last to claim has {'' if is_last else 'not '}committed; {holds} is there"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("how", "before"),
    [
        pytest.param("one writer, async", "fresh", marks=pytest.mark.thorough),
        pytest.param("one writer, async", "overwrite", marks=pytest.mark.thorough),
        pytest.param("two writers", "fresh", marks=pytest.mark.thorough),
        ("two writers", "overwrite"),
        ("two writers, async", "fresh"),
        pytest.param("two writers, async", "overwrite", marks=pytest.mark.thorough),
        pytest.param("two checkpointers", "fresh", marks=pytest.mark.thorough),
        ("two checkpointers", "overwrite"),
    ],
)
def test_two_saves_at_once_in_one_directory(
    open_job: OpenJob, watcher: Watcher, tmp_path: Path, rng: random.Random, how: str, before: str
) -> None:
    original, root = tmp_path / "original", tmp_path / "root"
    save_original(open_job, original)
    kind = "checkpointer" if "checkpointers" in how else "async" if "async" in how else "writer"
    first = open_job(kind, root)
    jobs = [first, first if how.startswith("one") else open_job(kind, root)]
    faults, both = [], 0
    for number in range(NUM_RACES):
        path = step_path(root, number)
        prepare(before, original, path)
        turns = Turns(rng, path)
        watcher.listeners[:] = [turns.happens]
        outcomes: dict[str, CheckpointError | None] = {}

        def run(
            job: Job,
            name: str,
            number: int = number,
            outcomes: dict[str, CheckpointError | None] = outcomes,
        ) -> None:
            outcomes[name] = outcome_of(lambda: job.save(number, STATES[name]))

        threads = [
            threading.Thread(target=run, args=(job, name)) for job, name in zip(jobs, RIVALS, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        watcher.listeners.clear()
        assert outcomes.keys() == set(RIVALS)
        fault = fault_of_race(path, outcomes)
        faults += [f"race {number}: {fault}"] if fault else []
        both += all(error is None for error in outcomes.values())
        jobs[0].save(number, NEXT)
        assert held(path) == "NEXT"
        assert_is_clean(path)
    assert not faults, "\n".join(faults)
    assert both < NUM_RACES, "they were never in each other's way"


def save_to_and_fro(root: str, kind: str, workers: int, first: int, count: int, seed: int) -> None:
    """Save the same few steps often, with pauses as drawn; says what it saved, and what came out."""
    rng = random.Random(seed)
    job = start_job(kind, root, dist_ckpt_workers=workers)

    def happens(_: str, path: str) -> None:
        if path.startswith(root) and rng.random() < 0.2:
            time.sleep(0.004 * rng.random())

    watch_calls(lambda name, call: setattr(os, name, call), happens)
    for number in range(count):
        step, value = rng.randrange(3), first + number
        error = outcome_of(lambda: job.save(step, state_of(value, SMALL)))  # noqa: B023 - called here
        say(json.dumps([step, value, type(error).__name__ if error else "", str(error)]))
    job.close()
    os._exit(0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kinds", "workers"),
    [(("writer", "async"), 1), (("checkpointer", "checkpointer"), 2), (("async", "checkpointer"), 2)],
)
def test_two_processes_that_save_the_same_steps(
    programs: Programs, tmp_path: Path, rng: random.Random, kinds: tuple[str, str], workers: int
) -> None:
    children = [
        programs.start(
            save_to_and_fro, str(tmp_path / "root"), kind, workers, 100 * number, 40, rng.randrange(1 << 30)
        )
        for number, kind in enumerate(kinds, 1)
    ]
    lines = [json.loads(line) for child in children for line in child.wait(60).out.splitlines()]
    assert all(child.wait().status == 0 for child in children), [child.done for child in children]
    assert len(lines) == 80
    faults = [line for line in lines if line[2] not in ("", "CommitError")]
    for step in range(3):
        path = step_path(tmp_path / "root", step)
        state = load(path, OLD)
        value = int(state["step"])
        assert same(state, state_of(value, SMALL)), "a mixture"
        assert [step, value, "", "None"] in lines, "what is there was not said to be committed"
        owner = json.loads((path / ".distckpt" / "owner").read_bytes())["save_id"]
        if committed_by(open_storage(path)) != owner:
            faults.append([step, "the last to claim has not committed"])
    assert not faults, "\n".join(map(str, faults))
    assert any(line[2] == "CommitError" for line in lines), "they were never in each other's way"


def save_as_rank(root: str, meeting: str, rank: int, seed: int, count: int, stop_at: int) -> None:
    """Save steps on two ranks; says what came out. Rank 0 stops before a step of its first save."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    checkpointer = Checkpointer(
        root, async_save=True, dist_ckpt_workers=2, distributed_timeout_minutes=0.15, ckpt_host_memory="64MiB"
    )

    def stop() -> None:
        say("stops")
        os.killpg(os.getpgrp(), signal.SIGSTOP)
        time.sleep(0.02)

    steps = Steps(step_path(root, 0), stop_at, stop)
    if stop_at:
        watch_calls(lambda name, call: setattr(os, name, call), steps.happens)
    for number in range(count):
        # Entries of this rank's own, and one that both have.
        state: dict[str, Any] = {f"rank{rank}": torch.full((3000,), seed + number), "both": seed + number}
        try:
            checkpointer.save(number % 3, state).result(WAIT_S)
        except CheckpointError as error:
            say(json.dumps([number, type(error).__name__, str(error)]))
        else:
            say(json.dumps([number, "", ""]))
    checkpointer.close()
    if stop_at:
        say(json.dumps(steps.seen))
    os._exit(0)


def start_ranks(
    programs: Programs, root: Path, name: str, seed: int, count: int, stop_at: int = 0
) -> list[Child]:
    meeting = str(root.parent / f"meeting-{name}")
    return [
        programs.start(save_as_rank, str(root), meeting, rank, seed, count, stop_at if rank == 0 else 0)
        for rank in (0, 1)
    ]


def seed_in(path: Path) -> int:
    """Return the seed of what two ranks have saved; all of it must be of one save."""
    state: dict[str, Any] = {f"rank{rank}": torch.zeros(3000, dtype=torch.int64) for rank in (0, 1)}
    state["both"] = -1
    state_dict_loader.load(state, storage_reader=StorageReader(path))
    [seed] = {*state["rank0"].tolist(), *state["rank1"].tolist(), state["both"]}
    return int(seed)


@pytest.mark.timeout(120)
def test_two_jobs_of_two_ranks_on_one_root(programs: Programs, tmp_path: Path) -> None:
    root, count = tmp_path / "root", 12
    jobs = {seed: start_ranks(programs, root, str(seed), seed, count) for seed in (1000, 2000)}
    outcomes = {seed: [read_outcomes(child) for child in children] for seed, children in jobs.items()}
    faults = []
    for seed, (of_0, of_1) in outcomes.items():
        assert len(of_0) == len(of_1) == count
        for (number, name, text), (_, other, other_text) in zip(of_0, of_1, strict=True):
            if {name, other} - {"", "CommitError"}:
                faults.append(f"save {number} of {seed}: {name} {text}; {other} {other_text}")
    for step in range(3):
        found = seed_in(step_path(root, step))
        seed, number = found // 1000 * 1000, found % 1000
        assert number % 3 == step
        assert outcomes[seed][0][number][1] == "", "what is there was not said to be committed"
    assert not faults, "\n".join(faults)


def read_outcomes(child: Child) -> list[list[Any]]:
    done = child.wait(60)
    assert done.status == 0, done
    return [
        json.loads(line) for line in done.out.splitlines() if line.startswith("[") and "CALLS" not in line
    ]


@pytest.mark.timeout(170)
def test_a_preempted_job_of_two_ranks(programs: Programs, tmp_path: Path) -> None:
    """Stopped at every seventh step of its coordinator, all ranks and workers with it."""
    faults, num_refused = [], 0
    for point in range(2, 200, 7):
        root = tmp_path / f"root{point}"
        stale = start_ranks(programs, root, f"stale{point}", 1000, 1, point)
        out = stale[0].out
        wait_until(lambda out=out: "\n" in out.read_text(), WAIT_S, "it has stopped or ended")  # type: ignore[misc]
        if not out.read_text().startswith("stops"):
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(stale[1].pid, signal.SIGSTOP)
        for child in start_ranks(programs, root, f"successor{point}", 2000, 1):
            assert read_outcomes(child) == [[0, "", ""]]
        assert seed_in(step_path(root, 0)) == 2000
        for child in stale:
            os.killpg(child.pid, signal.SIGCONT)
        lines = stale[0].wait().out.splitlines()
        _, name, text = json.loads(lines[1])
        steps = json.loads(lines[-1])
        [other] = read_outcomes(stale[1])
        where = f"stopped before step {point}, after {steps[-1:]}: {name} {text}; {other}"
        found = seed_in(step_path(root, 0))
        if CLAIM in steps and PUBLICATION not in steps:
            num_refused += 1
            if (found, name, other[1]) != (2000, "CommitError", "CommitError"):
                faults.append(f"{where}; {found}")
        elif found != (1000 if name == "" and CLAIM not in steps else 2000):
            faults.append(f"{where}; {found}")
    else:
        pytest.fail("it has never come to an end")
    assert not faults, "\n".join(faults)
    assert num_refused > 2
