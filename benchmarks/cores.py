"""Keeps a trainer's thread and everything else on cores of their own, as a launcher does that pins."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MIN_CORES = 4
_CPUS = Path("/sys/devices/system/cpu")
_INTERRUPTS = Path("/proc/interrupts")


class Cores:
    """A core for the calling thread, which trains, and the others.

    With fewer than four cores there are none to give away: then nothing is pinned.
    """

    def __init__(self) -> None:
        self._all = os.sched_getaffinity(0)
        self.trainer: int | None = None
        self.siblings: set[int] = set()
        if len(self._all) >= _MIN_CORES:
            # One that serves the disk, as any may, takes microseconds from the training for each request.
            served = _interrupts()
            self.trainer = min(self._all, key=lambda core: (served.get(core, 0), -core))
            self.siblings = _siblings_of(self.trainer) | {self.trainer}
        self._pinned = False

    @property
    def settings(self) -> dict[str, Any]:
        """What a Checkpointer is given, so that its workers keep off the trainer's core."""
        workers = sorted(self._all - self.siblings)
        if self.trainer is None or not workers:
            return {}
        return {"ckpt_worker_cores": ",".join(map(str, workers))}

    def as_record(self) -> dict[str, Any]:
        return {
            "trainer": self.trainer,
            "workers": self.settings.get("ckpt_worker_cores"),
            "interrupts": _interrupts(),
            "siblings": {str(core): sorted(_siblings_of(core)) for core in sorted(self._all)},
        }

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keep the calling thread on its core and all others off it, in a `with` block."""
        if self.trainer is None:
            yield
            return
        before = {task: os.sched_getaffinity(task) for task in _tasks()}
        self._pinned = True
        try:
            self._pin()
            yield
        finally:
            self._pinned = False
            for task in _tasks():
                _move(task, before.get(task, self._all))

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Let threads start that are not to be on the trainer's core, where they would inherit it."""
        if not self._pinned:
            yield
            return
        before = set(_tasks())
        os.sched_setaffinity(0, self._all)
        try:
            yield
        finally:
            self._pin(before)

    def _pin(self, known: set[int] | None = None) -> None:
        assert self.trainer is not None
        own = threading.get_native_id()
        for task in _tasks():
            if task != own and task not in (known or ()):
                _move(task, self._all - {self.trainer})
        os.sched_setaffinity(0, {self.trainer})


def interrupts_of(text: str) -> dict[int, int]:
    """Return how many interrupts of devices each core has served.

    Args:
        text: Of /proc/interrupts: a column for each core that is online, a row for each interrupt; those of
            devices have numbers. Source: proc_interrupts(5).
    """
    header, *rows = text.splitlines()
    cores = [int(name.removeprefix("CPU")) for name in header.split()]
    found = dict.fromkeys(cores, 0)
    for row in rows:
        name, *counts = row.split()
        if name.rstrip(":").isdecimal():
            for core, count in zip(cores, counts, strict=False):
                found[core] += int(count)
    return found


def _interrupts() -> dict[int, int]:
    # Some sandboxes do not tell.
    try:
        return interrupts_of(_INTERRUPTS.read_text())
    except OSError:
        return {}


def _tasks() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def _move(task: int, cores: set[int]) -> None:
    # It may have ended meanwhile.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(task, cores)


def _siblings_of(core: int) -> set[int]:
    """Return the hyper-threads of a core, itself included."""
    try:
        text = (_CPUS / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return {core}
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
