"""Overwriting a checkpoint: whenever the process is killed, either the old one or the new one loads."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from distckpt import StorageWriter
from distckpt.commit import claim
from distckpt.observe import subscribe
from distckpt.storage import open_storage
from faults.checkpoints import (
    KIB,
    MIB,
    assert_is_clean,
    error_of,
    files_in,
    load,
    on_event,
    pids_of,
    same,
    save,
    save_in,
    say,
    state_of,
    wait_until,
)
from faults.conftest import OpenWriter
from faults.programs import Programs

SMALL = 64 * KIB
OLD, NEW, NEXT = (state_of(seed, SMALL) for seed in (1, 2, 3))
# Beside the operations on the directory that are audited: those of one open file.
CALLS = ("fsync", "pwritev", "write", "ftruncate", "close")
AUDITED = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"}


def overwrite_and_die(path: str, mode: str, workers: int, point: int) -> None:
    """Overwrite the checkpoint in `path`, and be killed at the `point`-th thing that happens.

    Says what that is, and whether it comes before or after the publication. While the thread that publishes
    does that one step, what another thread does is neither.
    """
    seen = 0
    publishing: int | None = None
    lock = threading.Lock()

    def happens(what: str) -> None:
        nonlocal seen
        with lock:
            seen += 1
            if seen == point:
                here = threading.get_ident()
                say("before" if publishing is None else "after" if publishing == here else "during", what)
                os.kill(os.getpid(), signal.SIGKILL)

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal publishing
        if name in AUDITED and str(arguments[0]).startswith(path):
            happens(f"{name} {arguments[0]}")
            if name == "os.rename" and arguments[1] == f"{path}/.metadata":
                publishing = threading.get_ident()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(fd: int, *arguments: Any) -> Any:
            # Not what is printed here, nor what goes to workers.
            if fd > 2:
                happens(f"{name} {os.readlink(f'/proc/self/fd/{fd}')}")
            return call(fd, *arguments)

        return wrapper

    with StorageWriter(dist_ckpt_workers=workers) as writer:
        save_in(mode, writer, path + "-other", NEXT)
        for name in CALLS:
            setattr(os, name, counted(name, getattr(os, name)))
        sys.addaudithook(audit)
        subscribe(lambda event: happens(event.name))
        save_in(mode, writer, path, NEW)
        point = -1
    say("after", "completed")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("mode", "workers"), [("sync", 1), ("async", 2)])
def test_killed_at_any_point_of_an_overwrite(
    programs: Programs, open_writer: OpenWriter, tmp_path: Path, mode: str, workers: int
) -> None:
    original, path = tmp_path / "original", tmp_path / "checkpoint"
    writer = open_writer()
    save(writer, original, OLD)
    points: list[tuple[str, str]] = []
    completed = 0
    # How much happens differs a little from run to run: once nothing was left to be killed at, go on a bit.
    while completed < 3:
        shutil.copytree(original, path)
        done = programs.run(overwrite_and_die, str(path), mode, workers, len(points) + 1)
        when, _, what = done.out.strip().partition(" ")
        points.append((when, what))
        found = load(path, OLD)
        if when == "before" or (when == "during" and not same(found, NEW)):
            assert same(found, OLD), f"not the old one after a kill before the publication, at {what!r}"
        else:
            assert same(found, NEW), f"not the new one after a kill after the publication, at {what!r}"
        if done.status == 0:
            assert_is_clean(path)
            completed += 1
        else:
            assert done.status == -signal.SIGKILL, done
        save(writer, path, NEXT)
        assert same(load(path, NEXT), NEXT)
        assert_is_clean(path)
        shutil.rmtree(path)
    names = {what.split()[0] for _, what in points}
    assert {"os.rename", "os.remove", "fsync"} <= names, points
    if mode == "sync":
        # Beside other threads the count shifts from run to run, and what happens once may be passed over.
        assert {"parts.pushed", "files.written", "committed"} <= names, points
    assert "open" in names
    assert sum(when == "before" for when, _ in points) > 30
    assert sum(when == "after" for when, _ in points) > 8, "the sweep has steps too"


@pytest.mark.parametrize("event", ["parts.pushed", "rank.written"])
def test_what_torch_wrote_stays_until_it_is_replaced(
    open_writer: OpenWriter, tmp_path: Path, event: str
) -> None:
    state_dict_saver.save(OLD, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    before = files_in(tmp_path)
    writer = open_writer(dist_ckpt_workers=2)

    def fail(_: object) -> None:
        # The owner record says now that somebody else saves here.
        claim(open_storage(tmp_path), "0a")

    with on_event(event, fail):
        error = error_of(lambda: save(writer, tmp_path, NEW))
    assert type(error).__name__ == "CommitError"
    assert before <= files_in(tmp_path)
    assert same(load(tmp_path, OLD), OLD)
    save(writer, tmp_path, NEXT)
    assert same(load(tmp_path, NEXT), NEXT)
    assert_is_clean(tmp_path)


def test_files_of_an_earlier_save_with_more_workers_are_swept_and_others_are_not(
    open_writer: OpenWriter, tmp_path: Path
) -> None:
    large = state_of(1, 24 * MIB, tensors=6)
    save(open_writer(dist_ckpt_workers=4), tmp_path, large)
    assert len(list(tmp_path.glob("__0_*.distcp.*"))) == 4
    theirs = {
        "notes.txt",
        "model.safetensors",
        "__0_0.distcp.bak",
        "__0_0.distcp.tmp",
        "__a_0.distcp",
        "optimizer/__0_0.distcp",
        ".metadata.json",
        ".hidden",
    }
    for name in theirs:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("not ours")
    (tmp_path / "__0_9.distcp").mkdir()
    # Whatever an earlier save may have left: other ranks, other lanes, unfinished records.
    for name in ("__7_3.distcp", f"__0_1.distcp.{'0a' * 16}", ".distckpt/owner.123.tmp", ".metadata.123.tmp"):
        (tmp_path / name).write_text("left behind")
    save(open_writer(), tmp_path, NEW)
    assert same(load(tmp_path, NEW), NEW)
    left = files_in(tmp_path)
    assert theirs <= left
    assert (tmp_path / "__0_9.distcp").is_dir()
    for name in theirs:
        assert (tmp_path / name).read_text() == "not ours"
        (tmp_path / name).unlink()
    (tmp_path / "optimizer").rmdir()
    assert_is_clean(tmp_path)
    assert len(list(tmp_path.glob("__*.distcp*"))) == 2, "one image, and the directory of that name"


class Order:
    """Checks the order of what was done to a checkpoint's directory: (call, path) pairs."""

    def __init__(self, root: Path, calls: list[tuple[str, str]]) -> None:
        self.root = str(root)
        self.calls = [(call, path) for call, path in calls if path.startswith(self.root)]

    def last(self, call: str, pattern: str) -> int:
        """Return when that was done last."""
        return max(self.all(call, pattern))

    def first(self, call: str, pattern: str) -> int:
        """Return when that was done first."""
        return min(self.all(call, pattern))

    def all(self, call: str, pattern: str) -> list[int]:
        """Return every time at which that was done; it must have been."""
        pattern = re.escape(self.root) + pattern
        found = [at for at, (c, path) in enumerate(self.calls) if c == call and re.fullmatch(pattern, path)]
        assert found, f"no {call} of {pattern} in {self.calls}"
        return found

    def check(self, lanes: int) -> None:
        """Assert what makes an overwrite durable in the right order."""
        images = [rf"/__0_{lane}\.distcp(\.\w+)?" for lane in range(lanes)]
        manifest, record, metadata = (
            r"/\.distckpt/\w+/rank-00000\.json",
            r"/\.distckpt/commit-\w+\.json",
            r"/\.metadata",
        )
        for image in images:
            assert self.last("write", image) < self.first("fsync", image)
            assert self.last("fsync", image) < self.first("rename", manifest)
        for name in (manifest, record, metadata):
            partial = name + r"\.\w+\.tmp"
            assert self.last("write", partial) < self.first("fsync", partial)
            assert self.last("fsync", partial) < self.first("rename", name)
        published = self.first("rename", metadata)
        for name, folder in ((manifest, r"/\.distckpt/\w+"), (record, r"/\.distckpt")):
            renamed = self.last("rename", name)
            # The name itself, and that of each folder above it up to the images' own.
            for above in (folder, r"/\.distckpt", ""):
                assert any(renamed < at < published for at in self.all("fsync", above)), (name, above)
        assert self.last("rename", manifest) < self.first("rename", record) < published
        durable = min(at for at in self.all("fsync", "") if at > published)
        assert durable < self.first("unlink", r"/__0_\d\.distcp(\.\w+)?")
        assert durable < self.first("unlink", r"/\.distckpt/commit-\w+\.json")


def test_every_step_is_durable_before_the_next(
    open_writer: OpenWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_writer()
    save(writer, tmp_path, OLD)
    calls: list[tuple[str, str]] = []

    def recorded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(what: Any, *arguments: Any, **options: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what)
            calls.append((name, os.fspath(arguments[0]) if name == "rename" else path))
            return call(what, *arguments, **options)

        return wrapper

    with monkeypatch.context() as patched:
        for name, call in (("pwritev", "write"), ("write", "write"), ("fsync", "fsync"), ("rename", "rename"),
                           ("unlink", "unlink")):  # fmt: skip
            patched.setattr(os, name, recorded(call, getattr(os, name)))
        save(writer, tmp_path, NEW)
    Order(tmp_path, calls).check(1)


def overwrite_when_told(path: str) -> None:
    with StorageWriter(dist_ckpt_workers=2) as writer:
        save(writer, path, state_of(1))
        say(*pids_of(writer))
        wait_until(Path(path, "go").exists, 20, "the tracer is attached")
        save(writer, path, state_of(2))


def test_every_step_of_workers_is_durable_before_the_next(programs: Programs, tmp_path: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    path, log = tmp_path / "checkpoint", tmp_path / "log"
    child = programs.start(overwrite_when_told, str(path))
    wait_until(lambda: child.out.read_text().endswith("\n"), 20, "the workers have started")
    pids = [child.pid, *map(int, child.out.read_text().split())]
    tracer = subprocess.Popen(
        [
            strace,
            "-f",
            "-y",
            "-o",
            str(log),
            "-e",
            "trace=fsync,rename,unlink,write,pwritev,pwritev2,pwrite64",
        ]
        + [argument for pid in pids for argument in ("-p", str(pid))],
        stderr=subprocess.PIPE,
    )
    try:
        wait_until(lambda: all(_is_traced(pid) for pid in pids) or tracer.poll() is not None, 10, "attached")
        if tracer.poll() is not None:
            pytest.skip("strace cannot attach")
        (path / "go").touch()
        done = child.wait()
    finally:
        tracer.terminate()
        tracer.communicate(timeout=10)
    assert done.status == 0, done
    calls = []
    for line in log.read_text().splitlines():
        # Of a call that another interrupts in the log, the line where it begins.
        match = re.match(r"\d+ +(\w+)\((?:\d+<([^>]*)>|\"([^\"]*)\")(?:, \"([^\"]*)\")?", line)
        if match is not None:
            name = "write" if "write" in match[1] else match[1]
            calls.append((name, match[2] or (match[4] if name == "rename" else match[3]) or ""))
    Order(path, calls).check(2)


def _is_traced(pid: int) -> bool:
    return "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text()
