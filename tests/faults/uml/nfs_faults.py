"""Runs in a virtual machine: saves to NFS mounts while the server is away, full, or loses a file.

A line of the output for each case is a JSON object: its name, and what was seen; `failure` if it did not get
to its end. In each, the checkpoint of before must load, and the same writer must be able to save again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

from distckpt import CheckpointError, StorageWriter
from distckpt.observe import Event
from faults.checkpoints import (
    MIB,
    assert_is_clean,
    files_in,
    load,
    on_event,
    outcome_of,
    same,
    save,
    save_in,
    say,
    state_of,
    wait_until,
)
from faults.uml.nfs import EXPORT, MOUNT, Server

Seen = dict[str, Any]

PATH = f"{MOUNT}/checkpoint"
NBYTES = 8 * MIB
SERVER_BYTES = 256 * MIB
AWAY_S = 2.0
DEADLINE_S = 6.0
FAST_SOFT = "timeo=5,retrans=1"


class Case:
    """One case: a mount, a writer with a committed checkpoint there, and what comes next.

    Args:
        server: The server.
        options: Of the mount.
        workers: Of the writer.
        mode: How it saves.
        deadline_s: Of the writer.
    """

    def __init__(
        self, server: Server, options: str, workers: int, mode: str, deadline_s: float = 60.0
    ) -> None:
        self.server = server
        self.mode = mode
        self.seed = 100 * len(options) + workers
        server.mount(options)
        self.writer = StorageWriter(dist_ckpt_workers=workers, distributed_timeout_minutes=deadline_s / 60)
        self.old, self.new, self.third = (state_of(self.seed + i, NBYTES) for i in range(3))
        save(self.writer, PATH, self.old)

    def save_new(self, meanwhile: contextlib.AbstractContextManager[list[str]]) -> Seen:
        """Save the new state while `meanwhile` makes something happen; returns what was seen."""
        started = time.monotonic()
        with meanwhile as called:
            error = outcome_of(lambda: save_in(self.mode, self.writer, PATH, self.new))
        assert called, "nothing has happened"
        return {"seconds": time.monotonic() - started, **described(error)}

    def found(self) -> str:
        """Say which state the checkpoint holds."""
        loaded = load(PATH, self.old)
        return "old" if same(loaded, self.old) else "new" if same(loaded, self.new) else "mixed"

    def end_of(self, seen: Seen) -> Seen:
        """Return what was seen, with what the checkpoint holds, once the next save has worked as ever."""
        seen["found"] = self.found()
        save_in(self.mode, self.writer, PATH, self.third)
        assert same(load(PATH, self.third), self.third)
        # What is removed while it is open goes when it is closed.
        wait_until(lambda: not list(Path(EXPORT, "checkpoint").glob(".nfs*")), 5, "no file is open any more")
        assert_is_clean(PATH)
        return seen

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.close()


def is_running() -> bool:
    """Say whether the server answers."""
    return int(Path("/proc/fs/nfsd/threads").read_text()) > 0


def described(error: CheckpointError | None) -> Seen:
    if error is None:
        return {"error": None}
    names = ("errno", "path", "rank", "lane")
    return {
        "error": type(error).__name__,
        "message": str(error),
        **{name: getattr(error, name, None) for name in names},
    }


@contextlib.contextmanager
def in_mid_write(workers: int, happens: Callable[[], object]) -> Iterator[list[str]]:
    """Call `happens` once while images are written; yields a list that is not empty once it was called.

    In this process that is before the second write of an image; with workers, when they have been told of
    parts.
    """
    called: list[str] = []
    pwritev = os.pwritev
    written = 0

    def call() -> None:
        if not called:
            called.append("called")
            happens()

    def counting(fd: int, *arguments: Any) -> int:
        nonlocal written
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{PATH}/__"):
            written += 1
            if written == 2:
                call()
        return pwritev(fd, *arguments)

    if workers > 1:
        with on_event("parts.pushed", lambda _: call()):
            yield called
        return
    os.pwritev = counting
    try:
        yield called
    finally:
        os.pwritev = pwritev


def outage(server: Server, options: str, workers: int, mode: str, *, packets: bool = False) -> Seen:
    """The server is away for a while in mid-write, and comes back."""
    case = Case(server, options, workers, mode)
    go, come = (server.lose_packets, server.deliver) if packets else (server.stop, server.start)
    timer = threading.Timer(AWAY_S, come)

    def leave() -> None:
        go()
        timer.start()

    with case:
        seen = case.save_new(in_mid_write(workers, leave))
        timer.join()
        return case.end_of(seen)


def refusal(server: Server, options: str, workers: int, mode: str) -> Seen:
    """The server is away from mid-write until the save has failed."""
    with Case(server, options, workers, mode) as case:
        seen = case.save_new(in_mid_write(workers, server.stop))
        server.start()
        return case.end_of(seen)


def gone(server: Server, options: str, workers: int, mode: str) -> Seen:
    """The server goes in mid-write, and no system call returns before the save has failed."""
    with Case(server, options, workers, mode, DEADLINE_S) as case:
        seen = case.save_new(in_mid_write(workers, server.stop))
        server.start()
        return case.end_of(seen)


def gone_before_commit(server: Server, options: str, workers: int, mode: str) -> Seen:
    """As `gone`, once everything but the commit is done."""

    @contextlib.contextmanager
    def meanwhile() -> Iterator[list[str]]:
        called: list[str] = []

        def call(_: Event) -> None:
            called.append("called")
            server.stop()

        with on_event("rank.written", call):
            yield called

    with Case(server, options, workers, mode, DEADLINE_S) as case:
        seen = case.save_new(meanwhile())
        server.start()
        return case.end_of(seen)


def full(server: Server, options: str, workers: int, mode: str) -> Seen:
    """The server's disk runs full."""
    with Case(server, options, workers, mode) as case:
        before = files_in(PATH)
        server.resize(server.used_bytes() + NBYTES // 2)
        seen = case.save_new(contextlib.nullcontext(["full"]))
        seen["left"] = sorted(files_in(PATH) - before)
        server.resize(SERVER_BYTES)
        return case.end_of(seen)


def removed(server: Server, options: str, workers: int, mode: str) -> Seen:
    """Somebody removes, on the server, the files that are being written."""
    with Case(server, options, workers, mode) as case:
        images = Path(EXPORT, "checkpoint")
        before = set(images.glob("*.distcp*"))

        def remove() -> None:
            for path in set(images.glob("*.distcp*")) - before:
                path.unlink()

        return case.end_of(case.save_new(in_mid_write(workers, remove)))


CASES: dict[str, Callable[[Server], Seen]] = {
    "outage hard 4.2 inline": lambda server: outage(server, "vers=4.2,hard", 1, "sync"),
    "outage hard 3 workers": lambda server: outage(server, "vers=3,hard", 2, "async"),
    "packets hard 4.2 inline": lambda server: outage(server, "vers=4.2,hard", 1, "async", packets=True),
    "refusal soft inline": lambda server: refusal(server, f"vers=3,soft,{FAST_SOFT}", 1, "async"),
    "refusal softerr workers": lambda server: refusal(server, f"vers=4.2,softerr,{FAST_SOFT}", 2, "sync"),
    "full 4.2 inline": lambda server: full(server, "vers=4.2,hard", 1, "sync"),
    "full 3 workers": lambda server: full(server, "vers=3,hard", 2, "async"),
    "removed 3 inline": lambda server: removed(server, "vers=3,hard", 1, "sync"),
    "removed 4.2 workers": lambda server: removed(server, "vers=4.2,hard", 2, "sync"),
    "gone hard inline": lambda server: gone(server, "vers=4.2,hard", 1, "sync"),
    "gone hard workers": lambda server: gone(server, "vers=4.2,hard", 2, "async"),
    "gone hard commit": lambda server: gone_before_commit(server, "vers=4.2,hard", 1, "sync"),
}


def unmount(server: Server) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            server.unmount()
        except OSError:
            # What was stuck has just been let go.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


@contextlib.contextmanager
def clean_slate(server: Server) -> Iterator[None]:
    """Undo what a case has left, whether or not it got to its end."""
    try:
        yield
    finally:
        if not is_running():
            server.start()
        server.resize(SERVER_BYTES)
        try:
            unmount(server)
        finally:
            subprocess.run(["umount", "--lazy", MOUNT], stderr=subprocess.DEVNULL, check=False)
            shutil.rmtree(f"{EXPORT}/checkpoint", ignore_errors=True)


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    server = Server(SERVER_BYTES)
    for name in names or list(CASES):
        started = time.monotonic()
        seen: Seen = {"name": name}
        try:
            with clean_slate(server):
                seen |= CASES[name](server)
        except BaseException:  # noqa: BLE001 - whatever it is, the host's test shows it
            seen["failure"] = traceback.format_exc()
        seen["all_seconds"] = time.monotonic() - started
        say(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1:])
