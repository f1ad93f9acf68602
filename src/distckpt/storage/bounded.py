"""A storage whose calls end in time: a file system that is gone may keep a system call for ever.

On an NFS mount that is `hard`, as most are, no call returns while the server is away, and no signal but
SIGKILL ends it. Whoever asks must be able to go on.

Invariants:
    * Every call returns or raises within its timeout, but those that only open (`open_image`: lanes have
      deadlines of their own) or only compute (`part_bytes`).
    * Of a call that was given up, no last check passes.
    * Threads that are stuck hold up neither the next call nor the end of the process, and they are few.

Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from distckpt.errors import WriteError
from distckpt.storage import can_fill, fill, linked_directories

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distckpt.storage import ImageFile, Receipt, Storage

_T = TypeVar("_T")
_MOST_STUCK = 4
"""Calls that never returned below one directory, after which the next one is not even tried."""
_IDLE_S = 1.0
"""A thread without work ends after this."""

_here = threading.local()
_idle: deque[_Runner] = deque()
"""Threads without work, for the next call to any storage."""
_stuck: dict[_Call, tuple[int, str]] = {}
"""Calls that were given up and have not returned: in which process, and below which directory."""


class Bounded:
    """Another storage, each call of which is given up after a while.

    A call that was given up goes on, on a thread that is left behind, and may still succeed. That does no
    harm:

    * The names of a save are its own, so a file that appears late is one that no checkpoint names; the next
      save sweeps it. The same holds for what a late removal removes.
    * The owner record of a save that gave up may appear late, and so does what `revoke` does: a save that has
      claimed the directory since is then refused by its last check, with an error. It is not overwritten.
    * A late `put` of the metadata whose last check has not passed by then is refused there. If it has, the
      rename may happen late: the save was reported as failed, and its checkpoint is complete and valid.

    Any number of threads may call, as far as the other storage permits.

    Args:
        storage: The other one.
        timeout_s: Seconds until a call of it is given up.
    """

    def __init__(self, storage: Storage, timeout_s: float) -> None:
        self.url = storage.url
        self.spec = storage.spec
        self.in_flight = storage.in_flight
        self.is_stream = storage.is_stream
        self.at_once = getattr(storage, "at_once", 1)
        self.can_fill = can_fill(storage)
        self._storage = storage
        self._timeout_s = timeout_s
        self._above = storage.url.rstrip("/").rpartition("/")[0]
        # A call to a server ends by itself, and by then the server may be back.
        self._may_stick = storage.spec.get("kind") == "posix"

    def part_bytes(self, file_bytes: int) -> int:
        """See `Storage.part_bytes`."""
        return self._storage.part_bytes(file_bytes)

    def prepare(self) -> None:
        """See `Storage.prepare`."""
        self._call("make directory", "", self._storage.prepare)

    def create_image(self, name: str, nbytes: int) -> str:
        """See `Storage.create_image`."""
        return self._call("create", name, self._storage.create_image, name, nbytes)

    def open_image(self, name: str, token: str) -> ImageFile:
        """See `Storage.open_image`; waits as long as it takes."""
        return self._storage.open_image(name, token)

    def complete_image(self, name: str, token: str, nbytes: int, receipts: Sequence[Receipt]) -> None:
        """See `Storage.complete_image`."""
        self._call("complete", name, self._storage.complete_image, name, token, nbytes, receipts)

    def link(self, name: str, source: Storage, other: str, nbytes: int) -> None:
        """See `Linking.link`."""
        self._call("link", name, self._storage.link, name, source, other, nbytes)  # type: ignore[attr-defined]

    def discard_image(self, name: str, token: str) -> None:
        """See `Storage.discard_image`."""
        self._call("discard", name, self._storage.discard_image, name, token)

    def unfinished(self) -> list[tuple[str, str]]:
        """See `Storage.unfinished`."""
        return self._call("list the unfinished files of", "", self._storage.unfinished)

    def abort(self, name: str, handle: str) -> None:
        """See `Storage.abort`."""
        self._call("give up the unfinished", name, self._storage.abort, name, handle)

    def put(self, name: str, data: bytes, last_check: Callable[[], None] | None = None) -> None:
        """See `Storage.put`."""
        self._call("write", name, self._storage.put, name, data, last_check=last_check)

    def revoke(self, name: str) -> None:
        """See `Storage.revoke`."""
        self._call("revoke", name, self._storage.revoke, name)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
        """See `Storage.read`."""
        return self._call("read", name, self._storage.read, name, offset, nbytes)

    def fill(self, name: str, offset: int, target: memoryview) -> int | None:
        """See `Filling.fill`; a call that was given up may go on to write to `target`."""
        return self._call("read", name, fill, self._storage, name, offset, target)

    def list(self, prefix: str = "") -> dict[str, int]:
        """See `Storage.list`."""
        return self._call("list", prefix, self._storage.list, prefix)

    def linked_directories(self) -> Sequence[str]:
        """See `distckpt.storage.linked_directories`."""
        return self._call("list", "", linked_directories, self._storage)

    def delete(self, name: str) -> None:
        """See `Storage.delete`."""
        self._call("remove", name, self._storage.delete, name)

    def last_change(self) -> float | None:
        """See `Storage.last_change`."""
        return self._call("look for the last change in", "", self._storage.last_change)

    def remove_directory(self) -> bool:
        """See `Storage.remove_directory`."""
        return self._call("remove", "", self._storage.remove_directory)

    def _call(
        self,
        doing: str,
        name: str,
        function: Callable[..., _T],
        *args: Any,
        last_check: Callable[[], None] | None = None,
    ) -> _T:
        """Return what `function(*args)` returns, unless that takes too long.

        Args:
            doing: What it does, and
            name: to which file: for the error.
            function: The call.
            *args: Its arguments.
            last_check: One more, if it is not None.

        Raises:
            WriteError: It took too long, with `errno.ETIMEDOUT`; or too many before it still do.
        """
        where = f"{self.url.rstrip('/')}/{name}" if name else self.url
        call = _Call(function, args)
        if last_check is not None:
            call.args += (lambda: call.check(last_check, where),)
        if getattr(_here, "is_runner", False):
            # A last check asks its own storage: that call is part of one that has a deadline.
            return call.run_here()  # type: ignore[no-any-return]
        if self._may_stick and _num_stuck((os.getpid(), self._above)) >= _MOST_STUCK:
            raise WriteError(
                f"cannot {doing} {where}: not tried, {_MOST_STUCK} calls before it have not "
                f"returned: the storage does not answer [ETIMEDOUT]",
                errno=errno.ETIMEDOUT,
                path=where,
            )
        try:
            runner = _hand_over(call)
            succeeded, result = call.reply.get(timeout=self._timeout_s)
        except BaseException as error:
            # Also an interrupt, wherever it comes. The order matters: see `_Call.run`.
            call.is_given_up = True
            _stuck[call] = (os.getpid(), self._above)
            if not call.is_running:
                _stuck.pop(call, None)
            if not isinstance(error, Empty):
                raise
            try:
                succeeded, result = call.reply.get_nowait()
            except Empty:
                raise WriteError(
                    f"cannot {doing} {where}: no answer within {self._timeout_s:g} s [ETIMEDOUT]",
                    errno=errno.ETIMEDOUT,
                    path=where,
                ) from None
        else:
            if runner is not None:
                _idle.append(runner)
        if succeeded:
            return result  # type: ignore[no-any-return]
        try:
            raise result
        finally:
            # The traceback holds this frame.
            del result


def _num_stuck(where: tuple[int, str]) -> int:
    """Return how many calls at `where` were given up and have not returned."""
    return sum(call.is_running for call, place in list(_stuck.items()) if place == where)


def _hand_over(call: _Call) -> _Runner | None:
    """Have a thread run `call`, and return it; where none can be had, as when the interpreter ends, this one.

    An interrupt loses no thread: one that was taken and given nothing to do ends.
    """
    while _idle:
        try:
            runner = _idle.pop()
        except IndexError:
            break
        # Threads are not there any more in a process that was forked.
        if runner.pid == os.getpid() and runner.accept(call):
            return runner
    runner = _Runner(call)
    try:
        threading.Thread(target=runner.run, name="distckpt-storage", daemon=True).start()
    except RuntimeError:
        call.run()
        return None
    return runner


class _Call:
    """One call, and what becomes of it."""

    __slots__ = ("args", "function", "is_given_up", "is_running", "reply")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args
        self.is_given_up = False
        self.is_running = False
        self.reply: SimpleQueue[tuple[bool, Any]] = SimpleQueue()

    def run(self) -> None:
        """Make the call and reply, unless it was given up before."""
        reply: tuple[bool, Any] | None = None
        try:
            # Who gives it up says so, puts it among the stuck ones, and then looks whether it is running:
            # either that is seen here, or this there.
            self.is_running = True
            if not self.is_given_up:
                reply = True, self.run_here()
        except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
            reply = False, error
        self.is_running = False
        if reply is not None:
            self.reply.put(reply)
        _stuck.pop(self, None)

    def run_here(self) -> Any:
        # The arguments are to be gone with the call, and its last check refers to it.
        args, self.args = self.args, ()
        return self.function(*args)

    def check(self, last_check: Callable[[], None], where: str) -> None:
        """Let `last_check` decide, unless nobody waits for the call any more.

        Raises:
            WriteError: Nobody does.
        """
        self._refuse_late(where)
        last_check()
        self._refuse_late(where)

    def _refuse_late(self, where: str) -> None:
        if self.is_given_up:
            raise WriteError(
                f"cannot write {where}: it was given up before [ETIMEDOUT]", errno=errno.ETIMEDOUT, path=where
            )


class _Runner:
    """A thread and what it is to do.

    Args:
        call: The first.
    """

    def __init__(self, call: _Call) -> None:
        self.pid = os.getpid()
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._calls.put(call)
        self._lock = threading.Lock()
        self._has_ended = False

    def accept(self, call: _Call) -> bool:
        """Have `call` run next; False if the thread has ended."""
        with self._lock:
            if not self._has_ended:
                self._calls.put(call)
            return not self._has_ended

    def run(self) -> None:
        _here.is_runner = True
        while not self._has_ended:
            try:
                call = self._calls.get(timeout=_IDLE_S)
            except Empty:
                self._end()
                continue
            call.run()
            # What it was given must not outlive it.
            del call

    def _end(self) -> None:
        # Whoever has taken it may be about to give it a call, or may have been interrupted: then nobody will.
        with self._lock:
            self._has_ended = self._calls.empty()
        if self._has_ended:
            with contextlib.suppress(ValueError):
                _idle.remove(self)
