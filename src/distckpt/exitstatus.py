"""A save that fails in the background while the interpreter exits changes the exit status.

The interpreter joins the threads that save at exit, so a save itself ends properly; only its result would be
lost, and a job script would take the missing checkpoint for a saved one.

Torch-free.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading

_LOG = logging.getLogger(__name__)


class _ExitState:
    """Whether the interpreter is on its way out, and whether a save failed meanwhile."""

    exiting = False
    failed = False
    registered = False
    unread = 0
    """Failures in the background whose result nobody has asked for."""


def watch_exit() -> None:
    """Let a background save that fails while the interpreter waits for it change the exit status.

    The interpreter joins torch's save threads at exit, so the save itself ends properly; only its result
    would be lost.
    """
    if _ExitState.registered:
        return
    _ExitState.registered = True
    # Called before the interpreter joins threads, unlike atexit. Source: threading._register_atexit, which
    # concurrent.futures uses for the same purpose (CPython 3.9 to 3.14).
    threading._register_atexit(_begin_exit)  # type: ignore[attr-defined]  # noqa: SLF001


def _begin_exit() -> None:
    _ExitState.exiting = True
    # Registered last, so that it is called first and can call each of the others once.
    atexit.register(_end_exit, os.getpid())


def note_failure() -> None:
    """Note that a save has failed."""
    if _ExitState.exiting:
        _ExitState.failed = True


def note_unread() -> None:
    """Note that a save has failed whose result may never be asked for."""
    _ExitState.unread += 1


def note_read() -> None:
    """Note that the result of such a save was asked for."""
    _ExitState.unread -= 1


def _end_exit(owner_pid: int) -> None:
    if not (_ExitState.failed or _ExitState.unread > 0) or os.getpid() != owner_pid:
        return
    # It calls itself below.
    _ExitState.failed, _ExitState.unread = False, 0
    _LOG.error("a checkpoint was lost: a save failed in the background, and nobody has asked for its result")
    # Only leaving the interpreter here changes its status; what others registered runs first.
    atexit._run_exitfuncs()  # noqa: SLF001 - has no public name
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
