"""One save of a `Checkpointer`: what its caller holds of it, and tensors that may still be copied for it."""

from __future__ import annotations

import os
import threading
import time
from concurrent import futures
from concurrent.futures import Future
from typing import TYPE_CHECKING

from distckpt.errors import CheckpointError, StagingError
from distckpt.signature import version_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from distckpt.planned import PlannedState
    from distckpt.residence import Residence
    from distckpt.signature import View

__all__ = ["Late", "Milestone", "SaveHandle"]

_POLL_S = 0.002
_VERSIONS_AT_ONCE = 512


class Milestone:
    """A point that a save has reached or not: true in the first case, and to be waited for as a future is."""

    def __init__(self, is_reached: Callable[[], bool], wait: Callable[[float | None], None]) -> None:
        self._is_reached = is_reached
        self._wait = wait

    def __bool__(self) -> bool:
        """Say whether it is reached."""
        return self._is_reached()

    def done(self) -> bool:
        """Say whether it is reached."""
        return self._is_reached()

    def result(self, timeout: float | None = None) -> None:
        """Wait until it is reached.

        Args:
            timeout: Seconds; None: as long as it takes.

        Raises:
            CheckpointError: The save failed before, or belongs to another process.
            TimeoutError: It is not.
        """
        self._wait(timeout)


class SaveHandle:
    """One save of a `Checkpointer`.

    Attributes:
        step: Its step.
        path: Where the checkpoint will be.
        metric: What `save` was given to choose the best by.
        is_skipped: Whether nothing was saved, for other saves were under way (`ckpt_when_busy`).
        blocked_s: Seconds that `save` took.
        prepared_s: Seconds of these before the first copy: comparing or planning, waiting for memory.
        written_bytes: With `ckpt_incremental`, bytes of the files that this rank has written, once committed.
    """

    def __init__(self, step: int, path: str, metric: float | None = None, *, number: int = 0) -> None:
        self.step = step
        self.number = number
        self.path = path
        self.metric = metric
        self.is_skipped = False
        self.blocked_s = 0.0
        self.prepared_s = 0.0
        self.written_bytes: int | None = None
        self._residence: Residence | None = None
        self._has_arrived = False
        self._owner_pid = os.getpid()
        self._told: list[bool] = []
        """Not empty once somebody was told that it failed; to have waited in vain is not that."""
        self._future: Future[str] = Future()
        self._future.set_running_or_notify_cancel()

    @property
    def staged(self) -> Milestone:
        """When everything is copied: nothing that happens to the state after it shows in the checkpoint."""
        return Milestone(self._is_staged, self._await_staged)

    @property
    def committed(self) -> Milestone:
        """When the checkpoint is complete and durable."""
        return Milestone(self._is_committed, self._await_committed)

    @property
    def _is_asked(self) -> bool:
        return bool(self._told)

    def _is_staged(self) -> bool:
        residence = self._residence
        if residence is not None and not self._has_arrived:
            self._has_arrived = residence.has_arrived()
        return self._has_arrived or self._future.done()

    def _await_staged(self, timeout: float | None) -> None:
        self._check_process()
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = threading.Event()
        while not self._is_staged():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"step {self.step} is not staged after {timeout:.3f} s")
            pause.wait(_POLL_S)
        if self._future.done():
            self.result(0)

    def _await_committed(self, timeout: float | None) -> None:
        self.result(timeout)

    def _is_committed(self) -> bool:
        return self._future.done() and self._future.exception() is None

    def result(self, timeout: float | None = None) -> str:
        """Wait until the checkpoint is committed.

        Args:
            timeout: Seconds; None: as long as it takes, which has deadlines of its own.

        Returns:
            Where it is.

        Raises:
            CheckpointError: The save failed, was skipped, or belongs to another process.
            TimeoutError: It is still under way.
        """
        self._check_process()
        try:
            return self._future.result(timeout)
        except futures.TimeoutError:
            # Before Python 3.11 it is not the one of that name.
            raise TimeoutError(f"step {self.step} is not committed after {timeout:.3f} s") from None
        except CheckpointError:
            self._told.append(True)
            raise

    def _check_process(self) -> None:
        """Refuse to wait in a process that was forked: the threads that save are not there.

        Raises:
            CheckpointError: It was.
        """
        if os.getpid() != self._owner_pid:
            raise CheckpointError(
                f"the save of step {self.step} belongs to process {self._owner_pid}: only there can it be "
                f"waited for"
            )


class Late:
    """Tensors of a save that may still be copied, and must not change until then.

    Attributes:
        is_over: Whether the copies have ended.
    """

    def __init__(self, planned: PlannedState, view: View, versions: list[int], residence: Residence) -> None:
        # What changes a DTensor counts up its version, or that of some view of its part here, or none: then
        # the digests tell, if the change is there when the copies have ended.
        wrapped = [view.leaves[leaf] for leaf in view.wrapped]
        self._tensors = [*view.locals, *wrapped]
        self._num_leaves, self._wrapped = len(view.locals), view.wrapped
        # Of all tensors of the state: choosing among them takes as long as reading all.
        self._versions = (versions or list(map(version_of, view.locals))) + list(map(version_of, wrapped))
        self._planned = planned
        self._residence = residence
        self._lock = threading.Lock()
        self._error: StagingError | None = None
        self.is_over = False

    def guard(self) -> None:
        """Check the tensors, if nobody has, and let the caller's streams wait for the copies.

        They may change after that, on these streams: who changes some on another one comes here as well.
        """
        with self._lock:
            if self.is_over:
                return
            self._compare(0, len(self._tensors))
            self._tensors = []
            if self._residence.has_arrived():
                self.is_over = True
            else:
                self._residence.order_after()

    def check(self) -> None:
        """Before the save is published: check the tensors, those that no guard has, a few at a time."""
        pause = threading.Event()
        for first in range(0, len(self._versions), _VERSIONS_AT_ONCE):
            with self._lock:
                if not self._tensors:
                    break
                self._compare(first, first + _VERSIONS_AT_ONCE)
            pause.wait(_POLL_S)
        self.end()
        changed = self._residence.changed()
        if self._error is None and changed:
            self._error = _changed(self._planned.fqn(changed[0]))
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Let the tensors go: the copies have ended, or are no longer of use."""
        with self._lock:
            self.is_over = True
            self._tensors = []

    def _compare(self, first: int, end: int) -> None:
        versions = list(map(version_of, self._tensors[first:end]))
        if versions == self._versions[first : first + len(versions)]:
            return
        late = self._planned.late_leaves
        for place, found in enumerate(versions, first):
            leaf = place if place < self._num_leaves else self._wrapped[place - self._num_leaves]
            if found != self._versions[place] and leaf in late:
                self._error = _changed(self._planned.fqn(late[leaf]))
                return


def _changed(fqn: str) -> StagingError:
    return StagingError(
        f"{fqn!r} was changed after save() and before guard() let it: whatever changes parameters or "
        f"optimizer states, but a step of a guarded optimizer, goes into a 'with' block of guard(optimizer)"
    )
