"""A save that failed in the background, and of which nobody has heard, changes the exit status.

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
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

_LOG = logging.getLogger(__name__)


class _ExitState:
    """Whether the interpreter is on its way out, whether a save failed meanwhile, and which did before."""

    exiting = False
    failed = False
    registered = False
    unheard: ClassVar[list[Callable[[], bool]]] = []


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


def note_failure(is_heard: Callable[[], bool] | None = None) -> None:
    """Note that a save has failed.

    Args:
        is_heard: Says whether somebody has been told of it; without it, only a failure at exit counts.
    """
    if _ExitState.exiting:
        _ExitState.failed = True
    elif is_heard is not None:
        # What was heard since is of no interest any more.
        _ExitState.unheard[:] = [one for one in _ExitState.unheard if not one()] + [is_heard]


def _end_exit(owner_pid: int) -> None:
    unheard = [one for one in _ExitState.unheard if not one()]
    if not (_ExitState.failed or unheard) or os.getpid() != owner_pid:
        return
    # It calls itself below.
    _ExitState.failed = False
    _ExitState.unheard.clear()
    when = "before the process exited, and nobody asked" if unheard else "while the process was exiting"
    _LOG.error("the last checkpoint was lost: a save failed %s", when)
    # Only leaving the interpreter here changes its status; what others registered runs first.
    atexit._run_exitfuncs()  # noqa: SLF001 - has no public name
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
