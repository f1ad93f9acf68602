"""The errors and the warning that distckpt raises.

    CheckpointError          rank
      ConfigError            also ValueError; unknown, ineffective or impossible setting
      StagingError           copy or reservation failed
      WriteError             errno, path, rank, lane, offset
        WorkerDied           pid, exit_status
      CommitError            manifests do not cover the plan, or publish failed
        MissingRanks         ranks, waited_s
      IntegrityError         file, item, expected, found

    DistckptWarning          also UserWarning; a setting works, at a price that is easy to overlook

Invariants:
    * No class derives from `OSError` or `TimeoutError`: their `errno` is a C slot, which is lost when an
      instance that was built from a message is pickled.
    * Every attribute is keyword-only and defaults to None, so that an error can be rebuilt from its message
      alone; pickle restores the attributes afterwards.

Torch-free.
"""

from __future__ import annotations

import traceback

__all__ = [
    "CheckpointError",
    "CommitError",
    "ConfigError",
    "DistckptWarning",
    "IntegrityError",
    "MissingRanks",
    "StagingError",
    "WorkerDied",
    "WriteError",
]


class CheckpointError(Exception):
    """Base of every error that distckpt raises.

    Args:
        message: What failed, where, how much was done, who is concerned and what to do; one line.
        rank: Rank among the participants of the checkpoint on which it failed, if known.
    """

    def __init__(self, message: str = "", *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class ConfigError(CheckpointError, ValueError):
    """A setting is unknown, has no effect here, or cannot be honoured."""


class StagingError(CheckpointError):
    """Copying the state to host memory failed, or the memory for it could not be reserved."""


class WriteError(CheckpointError):
    """Bytes could not be brought to storage.

    Args:
        message: See `CheckpointError`.
        errno: Error number of the operating system, if there was one.
        path: File or object that was being written.
        rank: See `CheckpointError`.
        lane: Index of the write lane on that rank.
        offset: Bytes from the start of the file at which it failed.
    """

    def __init__(
        self,
        message: str = "",
        *,
        errno: int | None = None,
        path: str | None = None,
        rank: int | None = None,
        lane: int | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message, rank=rank)
        self.errno = errno
        self.path = path
        self.lane = lane
        self.offset = offset


class WorkerDied(WriteError):
    """A worker process ended before it had acknowledged what it was asked to write.

    Args:
        message: See `CheckpointError`.
        errno: See `WriteError`.
        path: See `WriteError`.
        rank: See `CheckpointError`.
        lane: See `WriteError`.
        offset: See `WriteError`.
        pid: Process id of the worker.
        exit_status: Its exit code, or the negated number of the signal that ended it.
    """

    def __init__(
        self,
        message: str = "",
        *,
        errno: int | None = None,
        path: str | None = None,
        rank: int | None = None,
        lane: int | None = None,
        offset: int | None = None,
        pid: int | None = None,
        exit_status: int | None = None,
    ) -> None:
        super().__init__(message, errno=errno, path=path, rank=rank, lane=lane, offset=offset)
        self.pid = pid
        self.exit_status = exit_status


class CommitError(CheckpointError):
    """The manifests do not cover the plan, or the checkpoint could not be published."""


class MissingRanks(CommitError):
    """A wait between ranks passed its deadline.

    Args:
        message: See `CheckpointError`.
        rank: See `CheckpointError`.
        ranks: The participants that did not answer.
        waited_s: Seconds that were spent waiting for them without progress.
    """

    def __init__(
        self,
        message: str = "",
        *,
        rank: int | None = None,
        ranks: tuple[int, ...] | None = None,
        waited_s: float | None = None,
    ) -> None:
        super().__init__(message, rank=rank)
        self.ranks = ranks
        self.waited_s = waited_s


class IntegrityError(CheckpointError):
    """What was read is not what was written.

    Args:
        message: See `CheckpointError`.
        rank: See `CheckpointError`.
        file: File or object that is damaged.
        item: Name of the item within it, if the damage could be narrowed down.
        expected: Size or checksum that the manifest gives.
        found: Size or checksum that was read.
    """

    def __init__(
        self,
        message: str = "",
        *,
        rank: int | None = None,
        file: str | None = None,
        item: str | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        super().__init__(message, rank=rank)
        self.file = file
        self.item = item
        self.expected = expected
        self.found = found


class DistckptWarning(UserWarning):
    """A setting works, but costs something that is easy to overlook."""


def clear_frames(error: BaseException) -> None:
    """Drop what the frames hold that `error`, and what it comes from, went through: states among it."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__]
