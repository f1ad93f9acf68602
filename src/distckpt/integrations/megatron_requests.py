"""Requests of saves that are under way, and a queue of Megatron-Core that knows when they have ended.

Invariants:
    * No process is started for a request, so that none is forked.
    * To finalize a request is to wait for the commit of its save, which has deadlines of its own.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from distckpt.errors import CheckpointError

try:
    from megatron.core.dist_checkpointing.strategies import async_utils
except ImportError:
    # Later versions leave it to that package.
    from nvidia_resiliency_ext.checkpointing.async_ckpt import core as async_utils

if TYPE_CHECKING:
    from collections.abc import Callable

    from distckpt import SaveHandle


class AsyncRequest(async_utils.AsyncRequest):
    """A save that is under way: nothing has to be run for it, and to finalize it is to wait for its commit.

    A queue of Megatron-Core or of nvidia-resiliency-ext starts no process for it.
    """

    __slots__ = ()

    def execute_sync(self) -> None:
        """Wait until the save is committed, on this rank and so on all, and finalize it."""
        self.execute_finalize_fns()

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Finalize it.

        Args:
            validate_matching_call_idx: Ignored: a save commits on all ranks or on none.

        Returns:
            The number that the queue has given it.
        """
        del validate_matching_call_idx
        for finalize in self.finalize_fns:
            finalize()
        return int(self.call_idx)

    def add_finalize_fn(self, fn: Callable[[], None]) -> None:
        """Have `fn` called after what is called already.

        Args:
            fn: Takes and returns nothing.

        Raises:
            RuntimeError: The request is scheduled.
        """
        if self.is_frozen:
            raise RuntimeError("the request is scheduled: nothing can be added to it")
        self.finalize_fns.append(fn)


class Commit:
    """The first of a request's finalizations."""

    def __init__(self, handle: SaveHandle) -> None:
        self.handle = handle

    def __call__(self) -> None:
        """Wait for the commit."""
        self.handle.result()

    def wait(self) -> None:
        """Wait until the save has ended; how, whoever finalizes it sees."""
        with contextlib.suppress(CheckpointError):
            self.handle.result()

    @property
    def is_done(self) -> bool:
        """Whether the save has ended on this rank, well or not."""
        try:
            self.handle.result(0)
        except TimeoutError:
            return False
        except CheckpointError:
            pass
        return True


class _Caller(async_utils.AsyncCaller):
    """What a queue asks whether one save has ended; it has no process."""

    def __init__(self, commit: Commit) -> None:
        self._commit = commit

    def schedule_async_call(self, async_req: Any) -> None:
        """Do nothing: it is under way."""

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Say whether the save has ended on all ranks, or, with `no_dist`, on this one."""
        if blocking:
            self._commit.wait()
        is_alive = not self._commit.is_done
        if no_dist:
            return not is_alive
        return bool(self.sync_all_async_calls(int(is_alive))) or blocking

    def close(self, abort: bool = False) -> None:
        """Do nothing: the engine ends with the strategy, or with the process."""

    def __del__(self) -> None:
        """Do nothing."""


class AsyncCallsQueue(async_utils.AsyncCallsQueue):
    """Megatron-Core's queue of saves, which asks those of distckpt whether they have ended.

    In Megatron-Core's own queue a save of distckpt counts as done at once, as no process was started for it:
    the next call of `maybe_finalize_async_calls` waits for its commit. Here that call returns while it is
    under way. Requests of others are treated as there. The ranks ask each other by a collective in each call,
    as there.
    """

    def schedule_async_request(self, async_request: Any) -> int:
        """Add a request.

        Args:
            async_request: Of a save of distckpt, or of another strategy.

        Returns:
            The number of the request.
        """
        commits = [fn for fn in async_request.finalize_fns if isinstance(fn, Commit)]
        if not commits:
            return int(super().schedule_async_request(async_request))
        self.call_idx += 1
        self.async_calls.append(
            async_utils._ActiveAsyncRequest(  # noqa: SLF001
                self.call_idx, _Caller(commits[0]), async_request.freeze()
            )
        )
        return int(self.call_idx)
