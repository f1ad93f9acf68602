"""A training loop that is killed, told to end or left: what `latest` names is complete, and a run goes on."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from distckpt import Checkpointer, CheckpointError, ConfigError, WriteError, archive, commit, observe
from distckpt import checkpointer as checkpointer_module
from distckpt.retention import Saved
from faults.checkpoints import say, wait_until
from faults.programs import Child, Programs

pytestmark = pytest.mark.slow

CALLS = ("fsync", "pwritev", "write", "ftruncate", "close", "link", "unlink", "rmdir", "rename", "replace")
AUDITED = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.link"}


def state_of(step: int) -> dict[str, Any]:
    return {"t": torch.full((2000,), float(step)), "step": step}


def save_with_retention(
    root: str, first: int, steps: int, happens: Callable[[str], None], keep_last: int = 1
) -> None:
    """Save, and do all that follows from it, while `happens` is told of each thing that is done."""

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        if is_on and name in AUDITED and str(arguments[0]).startswith(root):
            happens(f"{name} {arguments[0]}")

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            # Not what is printed here, nor what goes to workers.
            if is_on and arguments[0] not in (0, 1, 2):
                happens(f"{name} {arguments[0]}")
            return call(*arguments, **keywords)

        return wrapper

    is_on = False
    checkpointer = Checkpointer(root, async_save=True, keep_last=keep_last, log_level="error")
    originals = {name: getattr(os, name) for name in CALLS}
    for name, call in originals.items():
        setattr(os, name, counted(name, call))
    sys.addaudithook(audit)
    end = observe.subscribe(lambda event: happens(event.name) if is_on else None)
    is_on = True
    try:
        for step in range(first, first + steps):
            checkpointer.save(step, state_of(step)).result(20)
        checkpointer.close()
    finally:
        is_on = False
        end()
        for name, call in originals.items():
            setattr(os, name, call)


def check_what_is_left(root: Path, least: int | None) -> int | None:
    """Check that `latest` names what is complete, that nothing good was lost, and that a run can go on.

    Args:
        root: Directory of all steps.
        least: The step that was the last good one before.

    Returns:
        The step that is restored.
    """
    with Checkpointer(root, keep_last=1, log_level="error") as checkpointer:
        steps = checkpointer.steps()
        if (root / "latest").exists():
            named = (root / "latest").read_text()
            assert named in {f"step-{step:08}\n" for step in steps}, (named, steps)
        for step in steps:
            target: dict[str, Any] = {"t": torch.zeros(2000), "step": None}
            assert checkpointer.restore(target, step) == step
            assert target["step"] == step
            assert target["t"].eq(step).all()
        restored = checkpointer.restore({"t": torch.zeros(2000), "step": None})
        assert restored == max(steps, default=None)
        if least is not None:
            assert restored is not None, "the last good one was removed"
            assert restored >= least
        checkpointer.save(99, state_of(99))
    left = {path.name for path in root.iterdir()} - {"latest", "step-00000099"}
    left = {name for name in left if any((root / name).rglob("owner"))}
    assert not left, "all else is gone, but for a directory that nobody had claimed yet"
    assert (root / "latest").read_text() == "step-00000099\n"
    return restored


def save_and_look(root: str, copies: str) -> None:
    """Save, and copy what is there whenever that has changed; says before what."""
    lock = threading.Lock()
    taken: set[tuple[Any, ...]] = set()
    busy = threading.local()

    def what_is_there() -> tuple[Any, ...]:
        found: list[tuple[Any, ...]] = []
        for folder, _, names in os.walk(root):
            for name in names:
                status = os.stat(os.path.join(folder, name))
                found.append((folder, name, status.st_size, status.st_ino, status.st_mtime_ns))
            found.append((folder,))
        return tuple(sorted(found, key=str))

    def happens(what: str) -> None:
        if getattr(busy, "is_copying", False):
            return
        with lock:
            busy.is_copying = True
            try:
                there = what_is_there()
                if there not in taken:
                    shutil.copytree(root, Path(copies, f"{len(taken)}"))
                    taken.add(there)
                    say(what)
            finally:
                busy.is_copying = False

    save_with_retention(root, 2, 2, happens)


def test_latest_names_a_complete_checkpoint_at_every_moment(programs: Programs, tmp_path: Path) -> None:
    """What a process that is killed leaves is what is there at that moment: each of them is looked at."""
    root, copies = tmp_path / "root", tmp_path / "copies"
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state_of(1))
    done = programs.run(save_and_look, str(root), str(copies))
    assert done.status == 0, done
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-00000003"]
    seen = done.out.splitlines()
    assert len(seen) > 30
    restored = []
    for number, what in enumerate(seen):
        try:
            restored.append(check_what_is_left(copies / f"{number}", least=1))
        except Exception as error:
            raise AssertionError(f"before {what!r}, number {number} of {len(seen)}") from error
    assert restored == sorted(restored, key=lambda step: step or 0), "it never goes back"
    assert set(restored) == {1, 2, 3}


def save_and_die(root: str, point: int) -> None:
    """Save two steps, and be killed at the `point`-th thing that happens."""
    seen = 0
    lock = threading.Lock()

    def happens(what: str) -> None:
        nonlocal seen
        with lock:
            seen += 1
            if seen == point:
                os.kill(os.getpid(), signal.SIGKILL)

    save_with_retention(root, 1, 2, happens)
    say(seen)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.thorough)])
def test_killed_while_it_saves_and_removes(
    programs: Programs, tmp_path: Path, rng: random.Random, count: int
) -> None:
    done = programs.run(save_and_die, str(tmp_path / "whole"), -1)
    assert done.status == 0, done
    points = sorted(rng.sample(range(1, int(done.out)), count))
    previous = 0
    for point in points:
        root = tmp_path / f"killed at {point}"
        done = programs.run(save_and_die, str(root), point)
        if done.status == 0:
            # How much happens differs a little from run to run.
            continue
        assert done.status == -signal.SIGKILL, done
        restored = check_what_is_left(root, least=None) or 0
        assert restored >= previous - 1
        previous = max(previous, restored)


def train_until_told(root: str, handler: bool, slow_s: float) -> None:
    """A loop that saves once more when it is told to end."""
    if handler:
        signal.signal(signal.SIGTERM, lambda number, _: say("handler", number))
    if slow_s:
        observe.subscribe(
            lambda event: threading.Event().wait(slow_s) if event.name == "files.written" else None
        )
    with Checkpointer(root, async_save=True, log_level="error") as checkpointer:
        state: dict[str, Any] = {"t": torch.zeros(2000), "step": 0}
        start = checkpointer.restore(state) or 0
        checkpointer.watch_preemption()
        say("started", start)
        for step in range(start + 1, start + 4000):
            time.sleep(0.01)
            state["t"].fill_(step)
            state["step"] = step
            if checkpointer.preempted(step):
                say("saving", step)
                checkpointer.save(step, state).result(20)
                say("saved", step)
                break
    say("ended")


def wait_until_said(child: Child, word: str) -> None:
    wait_until(lambda: word in child.out.read_text(), 20, f"it says {word}")


@pytest.mark.parametrize("handler", [False, True], ids=["alone", "with-a-handler"])
def test_a_loop_that_is_told_to_end_saves_once_more(
    programs: Programs, tmp_path: Path, handler: bool
) -> None:
    start = 0
    for _ in range(2):
        child = programs.start(train_until_told, str(tmp_path), handler, 0.0)
        wait_until_said(child, "started")
        child.kill(signal.SIGTERM)
        done = child.wait()
        assert done.status == 0, done
        words = [line.split() for line in done.out.splitlines()]
        assert words[0] == ["started", str(start)]
        assert (["handler", "15"] in words) == handler
        assert words[-1] == ["ended"]
        [saved] = [int(step) for what, step, *_ in words[:-1] if what == "saved"]
        assert saved > start
        assert (tmp_path / "latest").read_text() == f"step-{saved:08}\n"
        start = saved


def test_a_second_signal_ends_it_at_once(programs: Programs, tmp_path: Path) -> None:
    child = programs.start(train_until_told, str(tmp_path), False, 15.0)
    wait_until_said(child, "started")
    child.kill(signal.SIGTERM)
    wait_until_said(child, "saving")
    started = time.monotonic()
    child.kill(signal.SIGTERM)
    done = child.wait()
    assert done.status == -signal.SIGTERM, done
    assert time.monotonic() - started < 12
    assert "saved" not in done.out
    with Checkpointer(tmp_path, log_level="error") as checkpointer:
        assert checkpointer.latest() is None
        assert checkpointer.save(1, state_of(1)).committed


LOOP = """
import sys, time, torch
from torch import distributed
from distckpt import Checkpointer

distributed.init_process_group("gloo")
rank = distributed.get_rank()
with Checkpointer(sys.argv[1], async_save=True, log_level="error") as checkpointer:
    state = {"all": torch.zeros(5), f"of {rank}": torch.zeros(3), "step": 0}
    start = checkpointer.restore(state) or 0
    assert start == state["step"]
    checkpointer.watch_preemption()
    for step in range(start + 1, start + 2000):
        time.sleep(0.01)
        one = torch.ones(1)
        distributed.all_reduce(one)
        state["all"] += 1
        state[f"of {rank}"] += one
        state["step"] = step
        if step == start + 3:
            open(f"{sys.argv[1]}.{rank}", "w").close()
        if checkpointer.preempted(step):
            checkpointer.save(step, state).result(20)
            break
distributed.destroy_process_group()
"""


def end_under_torchrun(script: Path, root: Path) -> str:
    """Start the loop on two ranks, and have the agent end once both train; returns what they print."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = [Path(f"{root}.{rank}") for rank in range(2)]
    agent = subprocess.Popen(
        [*run, str(script), str(root)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: all(map(Path.exists, flags)) or agent.poll() is not None, 45, "both train")
        assert agent.poll() is None, agent.communicate()[0]
        os.kill(agent.pid, signal.SIGTERM)
        output, _ = agent.communicate(timeout=40)
    finally:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
            agent.communicate()
    for flag in flags:
        flag.unlink()
    return output


@pytest.mark.timeout(200)
@pytest.mark.parametrize("starts", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_torchrun_is_told_to_end(tmp_path: Path, starts: int) -> None:
    """It passes the signal on to its ranks, and waits for them: they save one step, and the same."""
    script, root = tmp_path / "loop.py", tmp_path / "root"
    script.write_text(LOOP)
    found: list[int] = []
    names = ("all", "of 0", "of 1")
    for start in range(starts):
        output = end_under_torchrun(script, root)
        with Checkpointer(root, log_level="error") as checkpointer:
            steps = checkpointer.steps()
            assert len(steps) == start + 1, output
            found.append(steps[-1])
            target: dict[str, Any] = {name: torch.zeros(5 if name == "all" else 3) for name in names}
            target["step"] = None
            assert checkpointer.restore(target) == steps[-1] == target["step"]
        for name, value in (("all", 1.0), ("of 0", 2.0), ("of 1", 2.0)):
            assert target[name].eq(value * steps[-1]).all()
    assert found == sorted(set(found))
    assert found[0] >= 3


def leave_with_a_save_that_fails(root: str, settings: dict[str, Any], bad_from: int) -> None:
    """Leave the program while its last saves are under way, the last of which cannot be written."""
    checkpointer = Checkpointer(root, async_save=True, ckpt_max_in_flight=4, keep_last=1, **settings)
    left = threading.Event()
    checkpointer._thread.submit(left.wait, 20)
    for step in range(1, 4):
        if step >= bad_from:
            Path(root, f"step-{step:08}").touch()
        checkpointer.save(step, state_of(step))
    # Called before the interpreter waits for threads.
    threading._register_atexit(left.set)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "bad_from", "status"),
    [
        ({}, 4, 0),
        ({}, 3, 1),
        ({"ckpt_on_failure": "retry", "ckpt_max_failures": 2}, 3, 1),
        ({"ckpt_on_failure": "warn", "ckpt_max_failures": 2}, 2, 1),
    ],
    ids=["well", "raise", "retry", "warn-too-often"],
)
def test_the_last_save_of_a_loop_is_not_lost_in_silence(
    programs: Programs, tmp_path: Path, settings: dict[str, Any], bad_from: int, status: int
) -> None:
    done = programs.run(leave_with_a_save_that_fails, str(tmp_path), settings, bad_from)
    assert done.status == status, done
    assert ("the last checkpoint was lost" in done.err) == (status == 1)
    assert "Traceback" not in done.err
    last = bad_from - 1
    assert (tmp_path / "latest").read_text() == f"step-{last:08}\n"
    with Checkpointer(tmp_path, log_level="error") as checkpointer:
        assert checkpointer.steps() == [last], "what retention removes is removed, and no more"
        target: dict[str, Any] = {"t": torch.zeros(2000), "step": None}
        assert checkpointer.restore(target) == last
        assert target["t"].eq(last).all()


def test_the_last_save_of_a_loop_that_bears_failures_is_named(programs: Programs, tmp_path: Path) -> None:
    done = programs.run(leave_with_a_save_that_fails, str(tmp_path), {"ckpt_on_failure": "warn"}, 3)
    assert "the save of step 3 failed" in done.err
    assert (tmp_path / "latest").read_text() == "step-00000002\n"


def test_retention_that_storage_refuses_costs_space_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from distckpt.storage.posix import PosixStorage

    delete = PosixStorage.delete
    refused: list[str] = []
    is_refusing = False

    def refusing(self: PosixStorage, name: str) -> None:
        if self.url.endswith("step-00000001") and is_refusing and len(refused) < 3:
            refused.append(name)
            from distckpt.errors import WriteError

            raise WriteError("not now", path=f"{self.url}/{name}", errno=5)
        delete(self, name)

    monkeypatch.setattr(PosixStorage, "delete", refusing)
    with Checkpointer(tmp_path, async_save=True, keep_last=1) as checkpointer:
        for step in range(1, 7):
            checkpointer.save(step, state_of(step)).result(20)
            is_refusing = True
            cleaner = checkpointer._archive._cleaner
            assert cleaner is not None
            cleaner.submit(lambda: None).result(20)
            found = checkpointer.restore({"t": torch.zeros(2000), "step": None})
            assert found == step
        assert checkpointer.steps() == [6]
    assert len(refused) == 3
    assert "stays" in caplog.text


def test_a_restore_while_retention_removes_older_ones(tmp_path: Path) -> None:
    """What is asked for may be gone a moment later; that is said, and the newest can always be had."""
    failures: list[BaseException] = []
    is_over = threading.Event()

    def restore() -> None:
        with Checkpointer(tmp_path, log_level="error") as reader:
            while not is_over.is_set():
                target: dict[str, Any] = {"t": torch.zeros(2000), "step": None}
                try:
                    found = reader.restore(target)
                    if found is None or target["step"] != found or not target["t"].eq(found).all():
                        failures.append(AssertionError(f"{found} {target['step']}"))
                except CheckpointError as error:
                    failures.append(error)

    with Checkpointer(tmp_path, async_save=True, keep_last=2, log_level="error") as checkpointer:
        checkpointer.save(0, state_of(0)).result(20)
        thread = threading.Thread(target=restore)
        thread.start()
        try:
            for step in range(1, 40):
                checkpointer.save(step, state_of(step)).result(20)
        finally:
            is_over.set()
            thread.join(20)
    assert not failures, failures[0]


@pytest.mark.parametrize("is_incremental", [False, True])
def test_a_worker_that_dies_costs_an_attempt(tmp_path: Path, is_incremental: bool) -> None:
    """In the midst of writing: what was staged is written once more, by new workers."""
    killed: list[int] = []
    state: dict[str, Any] = {"t": torch.arange(6_000_000, dtype=torch.float32), "step": 0}
    with Checkpointer(
        tmp_path,
        async_save=True,
        dist_ckpt_workers=2,
        ckpt_on_failure="retry",
        ckpt_incremental=is_incremental,
        ckpt_host_memory="128MiB",
        log_level="error",
    ) as checkpointer:
        checkpointer.save(0, state).result(30)

        def kill(event: observe.Event) -> None:
            if event.name == "lanes.awaited" and len(killed) < 2:
                killed.append(checkpointer._engine.lanes.pids[0])
                os.kill(killed[-1], signal.SIGKILL)

        end = observe.subscribe(kill)
        try:
            state["t"] += 1
            handle = checkpointer.save(1, state)
            state["t"] += 1
            handle.result(30)
        finally:
            end()
    assert len(killed) == 2
    found: dict[str, Any] = {"t": torch.zeros_like(state["t"]), "step": None}
    with Checkpointer(tmp_path, log_level="error") as checkpointer:
        assert checkpointer.restore(found) == 1
    assert torch.equal(found["t"], state["t"] - 1)


def small_state(value: int) -> dict[str, Any]:
    return {"t": torch.full((1000,), float(value)), "step": value}


@pytest.mark.parametrize("moment", ["before its turn", "after its claim"])
def test_a_step_that_is_saved_again_while_retention_is_about_to_remove_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """What was committed last stays, whatever was decided before."""
    reached, go_on = threading.Event(), threading.Event()
    remover = archive.Archive._remove
    finder = commit._find_records

    def is_here() -> bool:
        return threading.current_thread().name.startswith("distckpt-retention")

    def remove(self: archive.Archive, one: Any, tier: int) -> None:
        if moment == "before its turn" and one.step == 1:
            reached.set()
            go_on.wait(20)
        remover(self, one, tier)

    def find(storage: Any, rank: int | None) -> list[str]:
        found = finder(storage, rank)
        if moment == "after its claim" and storage.url.endswith("1") and is_here():
            reached.set()
            go_on.wait(20)
        return found

    monkeypatch.setattr(archive.Archive, "_remove", remove)
    monkeypatch.setattr(commit, "_find_records", find)
    with Checkpointer(tmp_path, keep_last=2, log_level="error") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, small_state(step))
        assert reached.wait(20)
        checkpointer.save(1, small_state(11))
        go_on.set()
    found = small_state(0)
    with Checkpointer(tmp_path, log_level="error") as checkpointer:
        assert checkpointer.restore(found, 1) == 1
    assert found["step"] == 11


def test_the_first_signal_during_the_last_save_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank has told of the end, and this one has had no signal before it closes."""
    publish = checkpointer_module.publish  # type: ignore[attr-defined]

    def signalled(*arguments: Any, **settings: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        publish(*arguments, **settings)

    with Checkpointer(tmp_path, async_save=True, log_level="error") as checkpointer:
        checkpointer.watch_preemption(signal.SIGUSR1)
        monkeypatch.setattr(checkpointer_module, "publish", signalled)
        checkpointer.save(7, small_state(7))
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert checkpointer.steps() == [7]


@pytest.mark.parametrize("step", [3.0, float("nan"), True, "3", -1, None])
def test_a_step_that_is_no_number_is_refused(tmp_path: Path, step: Any) -> None:
    with Checkpointer(tmp_path, log_level="error") as checkpointer:
        with pytest.raises(ConfigError, match="step: expected a number from 0"):
            checkpointer.save(step, small_state(0))
        with pytest.raises(ConfigError, match="state: expected a mapping, got Linear"):
            checkpointer.save(0, torch.nn.Linear(1, 1))  # type: ignore[arg-type]
        assert checkpointer.steps() == []


def refusing_publish(*_: Any, **__: Any) -> None:
    raise CheckpointError("the storage refuses")


def test_a_save_whose_thread_cannot_be_started_is_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor keeps the call that it could not start a thread for, and the next call starts one."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("distckpt-write"):
            raise RuntimeError("can't start new thread")
        start(thread)

    state = small_state(1)
    with Checkpointer(tmp_path, async_save=True, log_level="error") as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                checkpointer.save(1, state)
        for step in (2, 3, 4):
            state["step"] = step
            state["t"].fill_(step)
            checkpointer.save(step, state)
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3, 4]
        for step in (2, 3, 4):
            found = small_state(0)
            checkpointer.restore(found, step)
            assert (found["step"], found["t"].unique().tolist()) == (step, [step])


def test_retention_goes_by_the_last_commit_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run went back; what is read of a step, slowly, is that of the commit before."""
    with Checkpointer(tmp_path, log_level="error") as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, small_state(step))
    details = archive.Archive._details
    has_read, go_on = threading.Event(), threading.Event()

    def slow(self: archive.Archive, place: archive.Copy) -> Saved:
        found = details(self, place)
        if place.step == 20:
            has_read.set()
            assert go_on.wait(20)
        return found

    with Checkpointer(tmp_path, keep_last=1, async_save=True, log_level="error") as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(archive.Archive, "_details", slow)
            checkpointer.save(10, small_state(10)).result(20)
            assert has_read.wait(20)
        checkpointer.save(20, small_state(21)).result(20)
        go_on.set()
    found = small_state(0)
    with Checkpointer(tmp_path, log_level="error") as checkpointer:
        assert checkpointer.restore(found, 20) == 20
    assert found["step"] == 21


def test_what_a_second_failure_at_a_step_leaves_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path, log_level="error") as checkpointer:
        for _ in range(2):
            with monkeypatch.context() as patched:
                patched.setattr(checkpointer_module, "publish", refusing_publish)
                with pytest.raises(CheckpointError, match="the storage refuses"):
                    checkpointer.save(10, small_state(10))
            assert (tmp_path / "step-00000010").exists()
            checkpointer.save(20, small_state(20))
            assert not (tmp_path / "step-00000010").exists()


def test_a_failure_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(
        tmp_path, ckpt_on_failure="warn", ckpt_max_failures=2, log_level="error"
    ) as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(checkpointer_module, "publish", refusing_publish)
            checkpointer.save(1, small_state(1))
            with pytest.raises(CheckpointError, match="the storage refuses"):
                checkpointer.save(2, small_state(2))
        checkpointer.save(3, small_state(3))
        assert checkpointer.steps() == [3]


_LOOK = """
import sys
from distckpt import Checkpointer
with Checkpointer(sys.argv[1], ckpt_local_dir=sys.argv[2]) as checkpointer:
    print(checkpointer.steps())
"""


@pytest.mark.parametrize("has_ended", [False, True])
def test_who_only_looks_takes_nothing_from_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_ended: bool
) -> None:
    """Neither its uploads while it lives, nor what is local and was to stay."""
    root, local = tmp_path / "root", tmp_path / "local"
    uploaded = threading.Event()

    def nothing(*_: Any, **__: Any) -> None:
        assert uploaded.wait(50)
        raise CheckpointError("no upload in this test")

    monkeypatch.setattr(archive, "mirror", nothing)
    trainer = Checkpointer(root, ckpt_local_dir=str(local), ckpt_local_keep=5, log_level="error")
    for step in range(1, 6):
        trainer.save(step, small_state(step))
    steps = sorted(path.name for path in local.glob("*/step-*"))
    assert len(steps) == 5
    if has_ended:
        for owner in local.glob("*/step-*/.distckpt/owner"):
            owner.unlink()
    looked = subprocess.run(
        [sys.executable, "-c", _LOOK, str(root), str(local)],
        stdout=subprocess.PIPE, text=True, timeout=50, check=True,
    )  # fmt: skip
    assert looked.stdout == "[1, 2, 3, 4, 5]\n"
    assert sorted(path.name for path in local.glob("*/step-*")) == steps
    assert bool(list(root.glob("step-*"))) == has_ended
    uploaded.set()
    with pytest.raises(CheckpointError, match="no upload"):
        trainer.close()


class Words:
    """A coordinator of two ranks, the other of which says nothing."""

    rank: int = 0
    ranks: tuple[int, ...] = (0, 1)

    def __init__(self) -> None:
        self.left: dict[str, bytes] = {}

    def tell(self, key: str, value: bytes) -> None:
        self.left[key] = value

    def hear(self, keys: Sequence[str]) -> dict[str, bytes]:
        return {key: self.left[key] for key in keys if key in self.left}

    def forget(self, keys: Iterable[str]) -> None:
        pass


def test_of_every_attempt_the_others_hear_how_it_failed(tmp_path: Path) -> None:
    """Also of the last at a state that the budget does not hold: they would wait for their deadline."""
    words = Words()
    with Checkpointer(
        tmp_path, participants=words, ckpt_on_failure="retry", ckpt_max_failures=2, ckpt_host_memory="32MiB",
        ckpt_bucket_bytes="4MiB", ckpt_fully_parallel_load=False, log_level="error",
    ) as checkpointer:  # fmt: skip
        (tmp_path / "step-00000001").touch()
        with pytest.raises(WriteError):
            checkpointer.save(1, {"x": torch.zeros(64 << 20, dtype=torch.uint8)})
    said = {key: json.loads(value)["phase"] for key, value in words.left.items()}
    assert len(said) == 2
    assert set(said.values()) == {"failed"}
