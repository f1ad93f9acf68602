"""Looks at a save from outside: tells how far it has got, and says in the log where one stands that does not.

Invariants:
    * It holds up nothing: it reads, and what it finds it tells from a thread of its own.

Torch-free.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_LOG = logging.getLogger(__name__)
_TICKS = 4
"""How often it looks within the time after which a save is slow."""
_LONGEST_TICK_S = 5.0
_LONGEST_PATIENCE_S = 60.0
_GIB = 1 << 30


class Standing(NamedTuple):
    """Where a save stands.

    Attributes:
        nbytes: Bytes that are written.
        total: Bytes that are to be written.
        text: What it waits for, for people.
        workers: Process id of each worker that has not finished, by its lane.
    """

    nbytes: int
    total: int
    text: str
    workers: Mapping[int, int]


class Watchdog:
    """Watches the saves of one engine.

    Args:
        timeout_s: Seconds without progress after which a save fails; it is called slow well before.
        look: Returns where the save stands that is under way; None if there is none. Must not wait.
    """

    def __init__(self, timeout_s: float, look: Callable[[], Standing | None]) -> None:
        self._patience_s = min(_LONGEST_PATIENCE_S, timeout_s / 2)
        self._tick_s = min(_LONGEST_TICK_S, self._patience_s / _TICKS)
        self._look = look

    @contextlib.contextmanager
    def watching(self, what: str, tell: Callable[[int, int], None] | None = None) -> Iterator[None]:
        """Watch what this thread does in here.

        Args:
            what: Whose save it is, for the log.
            tell: Is told of progress, as bytes written and to be written.
        """
        over = threading.Event()
        watched = threading.get_ident()
        thread = threading.Thread(
            target=self._watch, args=(over, watched, what, tell), name="distckpt-watchdog", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            # No thread can be started, as when the interpreter ends: it goes on unwatched.
            yield
            return
        try:
            yield
        finally:
            over.set()
            thread.join(self._tick_s)

    def _watch(
        self, over: threading.Event, watched: int, what: str, tell: Callable[[int, int], None] | None
    ) -> None:
        last, since, said = -1, time.monotonic(), 0.0
        while not over.wait(self._tick_s):
            standing = self._look()
            if standing is None:
                continue
            if standing.nbytes != last:
                last, since, said = standing.nbytes, time.monotonic(), 0.0
                if tell is not None:
                    try:
                        tell(standing.nbytes, standing.total)
                    except Exception as error:  # noqa: BLE001 - what it tells is worth no failure
                        _LOG.debug("progress could not be told: %s", error)
                continue
            idle_s = time.monotonic() - since
            # Once more each time that it has lasted twice as long.
            if idle_s > max(self._patience_s, 2 * said):
                said = idle_s
                _LOG.warning("%s", _describe(what, standing, idle_s, watched))


def _describe(what: str, standing: Standing, idle_s: float, watched: int) -> str:
    written = f"{standing.nbytes / _GIB:.3f} of {standing.total / _GIB:.3f} GiB are written"
    lines = [f"{what} is slow: nothing new for {idle_s:.1f} s, {written}, {standing.text}"]
    for lane, pid in standing.workers.items():
        if pid != os.getpid():
            lines.append(f"  lane {lane}: {_process(pid)}")
    frame = sys._current_frames().get(watched)  # noqa: SLF001 - there is no other way to another thread's stack
    if frame is not None:
        lines += [line.rstrip() for line in traceback.format_stack(frame, limit=8)]
    return "\n".join(lines)


def _process(pid: int) -> str:
    """Return what a worker is doing, as the kernel sees it."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error as error:
        return f"worker {pid}: {error}"
    waits = ""
    with contextlib.suppress(OSError):
        waits = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace").strip("0\n")
    return f"worker {pid} is {status}" + (f" in {waits}" if waits else "")
