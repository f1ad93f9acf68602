"""Who takes part in a save, how they leave word for each other, and how long a wait may last.

With `dcp.save` the gathers are torch's. The engine's own saves have a `Coordinator`: a place where every
participant leaves word and looks for that of the others, in its own time.

Invariants:
    * No call here waits for another rank, and none is a collective.
    * A rank that is no participant is never asked for anything.

Torch-free: a key-value store of torch is used as it is given.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import weakref
from collections import Counter
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from distckpt.errors import CommitError, ConfigError
from distckpt.manifest import FOLDER
from distckpt.storage import open_storage
from distckpt.threads import Threads

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distckpt.storage import Storage

JOB_PREFIX = "job-"
"""Of folders in which participants leave word, beside those of saves: no id of a save begins like that."""
_FOLDER = FOLDER + JOB_PREFIX
_JOB = re.compile(r"[A-Za-z0-9_-]+")
_STORE_TIMEOUT_S = 10.0
"""Of one call, which never waits for a key."""
_num_coordinators: Counter[tuple[str, int, tuple[int, ...]]] = Counter()
"""How many were made in this process; the same number on each participant, each in its own process."""
_IDLE_TIMEOUTS = 10


@dataclass(frozen=True)
class Participant:
    """This process's place in one save, as DCP states it.

    Attributes:
        rank: Position among the participants; not the rank in the default group.
        is_coordinator: Whether this rank publishes.
        use_collectives: False if every rank publishes its own part and nobody publishes the whole.
    """

    rank: int = 0
    is_coordinator: bool = True
    use_collectives: bool = True

    @property
    def publishes(self) -> bool:
        """Whether this rank calls `finish`."""
        return self.is_coordinator or not self.use_collectives


class ProgressDeadline:
    """A deadline that moves on whenever something was done.

    Args:
        timeout_s: Seconds without progress after which a wait has failed.
        clock: Monotonic seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._last = clock()

    def progress(self) -> None:
        """Note that something was done."""
        self._last = self._clock()

    @property
    def idle_s(self) -> float:
        """Seconds since something was done."""
        return self._clock() - self._last

    @property
    def passed(self) -> bool:
        """Whether nothing was done for too long."""
        return self.idle_s > self.timeout_s


@runtime_checkable
class Coordinator(Protocol):
    """Where the participants of a `Checkpointer` leave word for each other. Its first one publishes.

    Every method may be called by several threads, and raises `CheckpointError` when it cannot be reached.

    Attributes:
        rank: Position of this process among the participants.
        ranks: All participants, as ranks of the job, in an order in which all give them.
    """

    rank: int
    ranks: tuple[int, ...]

    def tell(self, key: str, value: bytes) -> None:
        """Leave `value` under `key`, in place of what was there."""

    def hear(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        """Return what was left under `keys`, as far as it is there by now."""

    def forget(self, keys: Iterable[str]) -> None:
        """Remove what was left under `keys`; what is not there is no error."""


class SingleCoordinator:
    """One process, alone.

    Args:
        rank: Its rank in the job.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = 0
        self.ranks: tuple[int, ...] = (rank,)

    def tell(self, key: str, value: bytes) -> None:
        """Nobody listens."""

    def hear(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        """Nobody tells anything."""
        del keys
        return {}

    def forget(self, keys: Iterable[str]) -> None:
        """Nothing was told."""


class StoreCoordinator:
    """Participants that meet in a key-value store of torch: a TCPStore, a FileStore, that of a process group.

    Args:
        store: The store. What other things it is used for is not touched.
        rank: Rank of this process in the job.
        ranks: All participants, as ranks of the job, in the same order on each of them.
        name: What the participants have in common, and nobody else who uses the store. They make their
            coordinators of one name in the same order. In a store that outlives the run, each run has another
            name: what the one before has said is still there.

    Raises:
        ConfigError: `rank` is not among `ranks`, or one is named twice.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], name: str = "") -> None:
        self.rank, self.ranks = _place(rank, ranks)
        number = _num_coordinators[name, rank, self.ranks]
        _num_coordinators[name, rank, self.ranks] += 1
        self._prefix = f"distckpt/{name}/{number}/"
        # A connection of its own where there can be one: torch's own use of the store may wait in it.
        with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
            store = store.clone()
            store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        self._store = store
        self._lock = threading.Lock()
        self._is_lost = False
        # The client of a store that has stopped answering waits for ever, whatever its timeout says.
        self._thread = Threads(1, "distckpt-words")
        weakref.finalize(self, self._thread.close, 0.0)

    def tell(self, key: str, value: bytes) -> None:
        """See `Coordinator`."""
        self._call(self._store.set, self._prefix + key, value)

    def hear(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        """See `Coordinator`."""
        found = self._call(_read_there, self._store, [self._prefix + key for key in keys])
        return {name.removeprefix(self._prefix): bytes(value) for name, value in found.items()}

    def forget(self, keys: Iterable[str]) -> None:
        """See `Coordinator`."""
        for key in keys:
            self._call(self._store.delete_key, self._prefix + key)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        with self._lock:
            if self._is_lost:
                raise CommitError("the store of the participants has stopped answering")
            future = self._thread.submit(function, *args)
        try:
            return future.result(_STORE_TIMEOUT_S)
        except futures.TimeoutError:
            self._is_lost = True
            raise CommitError(
                f"the store of the participants has not answered for {_STORE_TIMEOUT_S:.0f} s"
            ) from None
        except RuntimeError as error:
            raise CommitError(f"the store of the participants cannot be reached: {error}") from error


def _read_there(store: Any, names: list[str]) -> dict[str, bytes]:
    """Return the values that are there; to ask for others would wait for them."""
    if names and not store.check(names):
        names = [name for name in names if store.check([name])] if len(names) > 1 else []
    return dict(zip(names, store.multi_get(names), strict=True)) if names else {}


class StorageCoordinator:
    """Participants that have nothing in common but storage: small objects, looked for again and again.

    Args:
        root: A directory that all participants see, such as that of the `Checkpointer`.
        rank: Rank of this process in the job.
        ranks: All participants, as ranks of the job, in the same order on each of them.
        job: A name that all participants give, and no run before this one had: the scheduler's number of the
            job, and how often it was restarted.
        storage_options: Passed to fsspec as they are.
        timeout_s: Seconds after which a call of the storage has failed; what runs before this have left goes
            when nothing has changed there for as long as ten of them.

    Raises:
        ConfigError: `rank` is not among `ranks`, or one is named twice; or `job` is no name or was used.
        WriteError: The storage refuses.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        rank: int,
        ranks: Sequence[int],
        *,
        job: str,
        storage_options: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.rank, self.ranks = _place(rank, ranks)
        if not _JOB.fullmatch(job):
            raise ConfigError(f"job: expected letters, digits, - and _, got {job!r}")
        self._options, self._timeout_s = dict(storage_options or {}), timeout_s
        above = open_storage(root, self._options, timeout_s=timeout_s)
        self._storage = self._open(above, job)
        self._storage.prepare()
        own = f"here.{rank}"
        if self._storage.read(own, nbytes=0) is not None:
            raise ConfigError(
                f"job: {job!r} was used before, by rank {rank} in {self._storage.url}: what it left there "
                f"would be taken for word of this run"
            )
        self._storage.put(own, b"")
        if self.rank == 0:
            self._sweep(above, job)

    def tell(self, key: str, value: bytes) -> None:
        """See `Coordinator`."""
        self._storage.put(key, value)

    def hear(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        """See `Coordinator`."""
        there = self._storage.list() if len(keys) > 1 else keys
        found = ((key, self._storage.read(key)) for key in keys if key in there)
        return {key: bytes(data) for key, data in found if data is not None}

    def forget(self, keys: Iterable[str]) -> None:
        """See `Coordinator`."""
        for key in keys:
            self._storage.delete(key)

    def _open(self, above: Storage, job: str) -> Storage:
        url = f"{above.url.rstrip('/')}/{_FOLDER}{job}"
        return open_storage(url, self._options, timeout_s=self._timeout_s)

    def _sweep(self, above: Storage, own: str) -> None:
        """Remove what runs before this have left; their last words may have been heard by nobody."""
        for entry in above.list(FOLDER):
            job = (FOLDER + entry).removeprefix(_FOLDER).removesuffix("/")
            if job == own or not _JOB.fullmatch(job):
                continue
            storage = self._open(above, job)
            changed = storage.last_change()
            if changed is None or time.time() - changed < _IDLE_TIMEOUTS * self._timeout_s:
                continue
            for name in storage.list():
                storage.delete(name)
            storage.remove_directory()


def _place(rank: int, ranks: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    found = tuple(ranks)
    if len(set(found)) < len(found):
        raise ConfigError(f"participants: a rank is named twice in {list(found)}")
    if rank not in found:
        raise ConfigError(f"participants: this process is rank {rank}, which is none of {list(found)}")
    return found.index(rank), found
