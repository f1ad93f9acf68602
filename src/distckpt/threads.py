"""Threads that can be given up on: a call that never returns holds up neither its caller nor the process.

The executors of the standard library join their threads when the interpreter ends.

Torch-free.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_Call = tuple["Future[Any]", "Callable[..., Any]", tuple[Any, ...]]


class Threads:
    """Runs calls on at most `count` daemon threads, which are started when they are needed.

    Args:
        count: Number of threads.
        name: Of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run `call(*args)` on a thread; where none can be had, as when the interpreter ends, on this one.

        One caller at a time.
        """
        future: Future[Any] = Future()
        if len(self._threads) < self._count:
            thread = threading.Thread(
                target=_serve, args=(self._calls,), name=f"{self._name}-{len(self._threads)}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    _run((future, call, args))
                    return future
            else:
                self._threads.append(thread)
        self._calls.put((future, call, args))
        return future

    def close(self, timeout_s: float) -> bool:
        """End the threads, once their calls have returned.

        Args:
            timeout_s: Seconds to wait for that.

        Returns:
            Whether they have ended; one that has not ends with its call.
        """
        for _ in self._threads:
            self._calls.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return not self._threads


def _serve(calls: SimpleQueue[_Call | None]) -> None:
    while True:
        call = calls.get()
        if call is None:
            return
        _run(call)
        # What it was given must not outlive it.
        del call


def _run(call: _Call) -> None:
    future, function, args = call
    try:
        result = function(*args)
    except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it
        future.set_exception(error)
        # The frame that the error remembers holds the future.
        del future
    else:
        future.set_result(result)
