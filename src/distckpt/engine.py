"""One save as a state machine over the rooms below: frame, pack, fill or find, write, account.

    framed  ->  packed into files  ->  ranges: filled -> submitted -> acknowledged  ->  manifest

Invariants:
    * A range returns to the arena only after its lane acknowledged it, or can no longer touch it.
    * At most `depth + 1` ranges of a lane are filled and not acknowledged: one is copied while it writes.
    * After a failure nothing of the save is left to lanes, and the next save starts clean.

Threads: `write` runs one save at a time, on whatever thread calls it; `stage` may run meanwhile on another.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from distckpt import observe
from distckpt.arena import Arena, Range, available_memory
from distckpt.config import local_ranks
from distckpt.coordination import ProgressDeadline
from distckpt.errors import StagingError, WorkerDied, WriteError
from distckpt.formats import Format, lay_out, open_format
from distckpt.lanes import Lanes, open_lanes
from distckpt.plan import pack
from distckpt.staging import CopyTicket, Item, StagedUse, Stager
from distckpt.worker import CHECKSUM_BLOCK_BYTES, ZEROS, Ack, Task, block_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distckpt.arena import Slab
    from distckpt.config import CheckpointConfig
    from distckpt.storage import Storage

_LOG = logging.getLogger(__name__)
_MAX_PIECES = 4096
_WAIT_FOR_COPY_S = 0.0005
_WAIT_FOR_LANE_S = 0.2
_ABORT_S = 5.0
_COLLECT_S = 1.0


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the cyclic garbage collector from scanning the heap while many objects, no cycles, are made.

    Source: it takes a third of the processor time of a save of 20,000 tensors.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(slots=True)
class Placement:
    """Where an item came to lie.

    Attributes:
        file: Name of its file.
        offset: Bytes from the start of the file.
        nbytes: Bytes, framing included.
        checksums: CRC32C of each of its blocks; empty without checksums.
    """

    file: str
    offset: int
    nbytes: int
    checksums: list[int] = field(default_factory=list)


@dataclass
class _File:
    """A bucket on its way to storage."""

    lane: int
    names: tuple[str, ...]
    indices: list[int]
    items: list[Item]
    offsets: list[int]
    nbytes: int
    placements: list[Placement]


@dataclass
class _Work:
    """Part of a file: what a task will say, and which items its checksums belong to."""

    file: _File
    low: int
    high: int
    spans: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    is_last: bool = False
    range: Range | None = None
    ticket: CopyTicket | None = None


class Engine:
    """Writes the items of one rank. Build it with `Engine.open`.

    Args:
        arena: Host memory.
        stager: Fills it.
        lanes: Take it to storage.
        file_format: Frames the items.
        checksums: Whether to take checksums.
        timeout_s: Seconds without progress after which any wait fails.
    """

    def __init__(
        self,
        *,
        arena: Arena,
        stager: Stager,
        lanes: Lanes,
        file_format: Format,
        checksums: bool,
        timeout_s: float,
    ) -> None:
        self.format = file_format
        self.arena = arena
        self.stager = stager
        self.lanes = lanes
        self.checksums = checksums
        self.timeout_s = timeout_s
        self.deadline = ProgressDeadline(timeout_s)
        self._written: set[str] = set()
        self._lock = threading.Lock()
        self._sequence = 0
        per_lane = arena.budget_bytes // (lanes.count * (lanes.depth + 1))
        self.range_bytes = max(
            CHECKSUM_BLOCK_BYTES,
            min(arena.window_bytes, per_lane // CHECKSUM_BLOCK_BYTES * CHECKSUM_BLOCK_BYTES),
        )

    @classmethod
    def open(cls, config: CheckpointConfig) -> Engine:
        """Build the engine that `config` describes; nothing is reserved or started before it is needed.

        Args:
            config: The settings.
        """
        timeout_s = config.distributed_timeout_minutes * 60
        file_format = open_format(config.ckpt_format)
        arena = Arena(config.host_memory_bytes(available_memory(), local_ranks()))
        stager = Stager(arena, file_format, timeout_s)
        # Weakly, for the stager holds the arena: a writer that is dropped frees its memory at once.
        pin = weakref.WeakMethod(stager.pin)
        arena.on_slab = lambda slab: _call(pin, slab)
        return cls(
            arena=arena,
            stager=stager,
            lanes=open_lanes(config.dist_ckpt_workers, arena.slabs, timeout_s),
            file_format=file_format,
            checksums=config.ckpt_checksum != "none",
            timeout_s=timeout_s,
        )

    def item(self, data: Any) -> Item:
        """Frame a raw tensor of any device (see `staging.is_raw`)."""
        return self.stager.item(data)

    def stage(
        self, state: Mapping[str, Any], use: StagedUse | None = None
    ) -> tuple[dict[str, Any], CopyTicket]:
        """Copy a whole state to the arena, before there is a plan; see `Stager.stage`."""
        started = time.monotonic()
        staged, ticket = self.stager.stage(state, use)
        observe.emit("state.staged", seconds=time.monotonic() - started)
        return staged, ticket

    def write(self, storage: Storage, save_id: str, rank: int, items: Sequence[Item]) -> list[Placement]:
        """Write `items` durably; the names of their files are durable with the next `Storage.put`.

        Args:
            storage: Where to.
            save_id: Hexadecimal id that no other save has.
            rank: For names and messages.
            items: What to write; tensors are let go as soon as they are copied.

        Returns:
            Where each item lies, in the order of `items`.

        Raises:
            StagingError: A copy or a reservation failed.
            WriteError: The storage refused, or a lane failed or made no progress in time; `WorkerDied` if its
                process ended. Nothing of this save is left in flight.
        """
        if not items:
            return []
        self._wait_for_turn(storage, rank)
        try:
            with collector_paused():
                files = self._pack(storage, save_id, rank, items)
            self._start_lanes(rank)
            storage.prepare()
            run = _Run(self, storage, save_id, rank, files)
            try:
                run.run()
            except BaseException:
                run.abandon()
                raise
        finally:
            self._lock.release()
        placements: list[Placement | None] = [None] * len(items)
        for file in files:
            for index, placement in zip(file.indices, file.placements, strict=True):
                placements[index] = placement
        placed = [placement for placement in placements if placement is not None]
        assert len(placed) == len(items), "every item of the plan was written"
        return placed

    def close(self) -> None:
        """End the lanes and give the memory back, once no save holds them; idempotent."""
        held = self._lock.acquire(timeout=_WAIT_FOR_LANE_S)
        while not held and not self.deadline.passed:
            held = self._lock.acquire(timeout=_WAIT_FOR_LANE_S)
        try:
            self.lanes.close()
            self.stager.close()
            self.arena.close()
        finally:
            if held:
                self._lock.release()

    def _wait_for_turn(self, storage: Storage, rank: int) -> None:
        # As long as the save that holds the lanes gets on, and no longer.
        while not self._lock.acquire(timeout=_WAIT_FOR_LANE_S):
            if self.deadline.passed:
                raise WriteError(
                    f"{storage.url} waits for an earlier save, which has made no progress for "
                    f"{self.timeout_s:.0f} s (--distributed-timeout-minutes)",
                    errno=errno.ETIMEDOUT,
                    path=storage.url,
                    rank=rank,
                )
        self.deadline.progress()

    def _start_lanes(self, rank: int) -> None:
        try:
            self.lanes.start()
        except WriteError as error:
            error.rank = rank
            raise

    def _pack(self, storage: Storage, save_id: str, rank: int, items: Sequence[Item]) -> list[_File]:
        # Later saves to a directory always bear their id: a plain name that a sweep has freed is not new.
        is_first = storage.url not in self._written
        self._written.add(storage.url)
        sizes = [item.size for item in items]
        files = []
        for lane, indices in enumerate(pack(sizes, self.lanes.count)):
            # Literal bytes and unstaged tensors first: what was staged then lies in one stretch.
            indices.sort(key=lambda index: items[index].home is not None)
            layout = lay_out([sizes[index] for index in indices])
            name = f"__{rank}_{lane}{self.format.suffix}"
            files.append(
                _File(
                    lane=lane,
                    names=(name, f"{name}.{save_id}") if is_first else (f"{name}.{save_id}",),
                    indices=indices,
                    items=[items[index] for index in indices],
                    offsets=layout.offsets,
                    nbytes=layout.nbytes,
                    placements=[
                        Placement("", offset, sizes[index])
                        for index, offset in zip(indices, layout.offsets, strict=True)
                    ],
                )
            )
        return files

    def next_sequence(self) -> int:
        """Return a number that no earlier task of this engine had."""
        self._sequence += 1
        return self._sequence


def _call(method: Callable[[], Callable[[Slab], None] | None], slab: Slab) -> None:
    alive = method()
    if alive is not None:
        alive(slab)


class _Run:
    """The loop of one save: fill ranges, submit them, account for acknowledgements."""

    def __init__(self, engine: Engine, storage: Storage, save_id: str, rank: int, files: list[_File]) -> None:
        self._engine = engine
        self._arena = engine.arena
        self._stager = engine.stager
        self._lanes = engine.lanes
        self._storage = storage
        self._save_id = save_id
        self._rank = rank
        self._files = files
        self._deadline = engine.deadline
        self._pending = [_works(file, engine.range_bytes, engine.checksums) for file in files]
        self._next: list[_Work | None] = [next(works, None) for works in self._pending]
        self._filled: list[deque[_Work]] = [deque() for _ in files]
        self._in_flight: dict[int, _Work] = {}
        self._busy = [0] * len(files)
        self._collect_at = 0.0
        self._want_bytes = min(
            sum(file.nbytes for file in files),
            engine.range_bytes * (self._lanes.depth + 1) * max(1, len(files)),
        )

    def run(self) -> None:
        """Write everything."""
        devices = {item.tensor.device for file in self._files for item in file.items
                   if item.tensor is not None and item.home is None and item.tensor.is_cuda}  # fmt: skip
        self._stager.begin(devices)
        while self._in_flight or any(self._filled) or any(self._next):
            with collector_paused():
                acted = self._fill()
            acted |= self._submit()
            waits_for_copy = any(self._filled) and not self._in_flight
            patience = 0.0 if acted else _WAIT_FOR_COPY_S if waits_for_copy else _WAIT_FOR_LANE_S
            for lane, ack in self._poll(patience):
                self._account(lane, ack)
                acted = True
            if acted:
                self._deadline.progress()
            elif self._deadline.passed:
                self._fail_for_time()

    def abandon(self) -> None:
        """Take the save back from the lanes, and its ranges where nobody can touch them any more."""
        lanes_lost = self._lanes.abort(self._save_id, _ABORT_S)
        for work in [*self._in_flight.values(), *(work for filled in self._filled for work in filled)]:
            copies_ended = True
            if work.ticket is not None:
                try:
                    work.ticket.wait(_ABORT_S)
                except StagingError:
                    copies_ended = False
            if work.range is not None and copies_ended and work.file.lane not in lanes_lost:
                self._arena.release(work.range)
        for file in self._files:
            # The caller's list of them may live in a traceback.
            for item in file.items:
                item.tensor = None
            file.items.clear()

    def _fill(self) -> bool:
        acted = False
        for lane in range(len(self._files)):
            while (
                self._next[lane] is not None
                and len(self._filled[lane]) + self._busy[lane] <= self._lanes.depth
            ):
                work = self._next[lane]
                assert work is not None
                if not work.pieces and work.high > work.low:
                    work.range = self._arena.try_reserve(work.high - work.low, self._want_bytes)
                    if work.range is None:
                        if not self._in_flight and time.monotonic() > self._collect_at:
                            # Again and again: the save that holds the memory may end meanwhile.
                            self._collect_at = time.monotonic() + _COLLECT_S
                            self._stager.collect()
                        return acted
                    file = work.file
                    work.ticket = self._stager.fill(file.items, file.offsets, work.low, work.high, work.range)
                    work.pieces = [(work.range.slab, work.range.offset, work.high - work.low)]
                self._filled[lane].append(work)
                self._next[lane] = next(self._pending[lane], None)
                acted = True
        return acted

    def _submit(self) -> bool:
        acted = False
        for lane, filled in enumerate(self._filled):
            while filled and self._busy[lane] < self._lanes.depth:
                work = filled[0]
                if work.ticket is not None and not work.ticket.done():
                    break
                task = Task(
                    save_id=self._save_id,
                    sequence=self._engine.next_sequence(),
                    storage=self._storage.spec,
                    names=work.file.names,
                    offset=work.low,
                    pieces=tuple(work.pieces),
                    spans=tuple(work.spans),
                    file_nbytes=work.file.nbytes if work.is_last else None,
                )
                # Counted before it is sent: if sending fails half way, the lane may hold the range.
                self._in_flight[task.sequence] = filled.popleft()
                self._busy[lane] += 1
                observe.emit(
                    "range.submitted", save_id=self._save_id, lane=lane, offset=work.low, nbytes=task.nbytes
                )
                try:
                    self._lanes.submit(lane, task)
                except WriteError as error:
                    self._fail(error, lane, work.file)
                acted = True
        return acted

    def _poll(self, timeout_s: float) -> list[tuple[int, Ack]]:
        try:
            return self._lanes.poll(timeout_s)
        except WriteError as error:
            lane = error.lane if error.lane is not None and error.lane < len(self._files) else 0
            self._fail(error, error.lane or 0, self._files[lane] if self._files else None)

    def _account(self, lane: int, ack: Ack) -> None:
        work = self._in_flight.get(ack.sequence)
        if ack.save_id != self._save_id or work is None:
            # The late answer of a save that was given up says nothing about this one.
            return
        if ack.error is not None:
            self._fail(WriteError(**ack.error), lane, work.file)
        del self._in_flight[ack.sequence]
        self._busy[lane] -= 1
        if work.range is not None:
            self._arena.release(work.range)
        for owner, value in zip(work.owners, ack.checksums, strict=True):
            work.file.placements[owner].checksums.append(value)
        observe.emit(
            "range.written", save_id=self._save_id, lane=lane, offset=work.low, nbytes=work.high - work.low
        )
        if work.is_last:
            for placement in work.file.placements:
                placement.file = ack.name
            # Staged tensors keep their arena memory until here.
            work.file.items.clear()
            observe.emit(
                "file.written", save_id=self._save_id, lane=lane, name=ack.name, nbytes=work.file.nbytes
            )

    def _fail(self, error: WriteError, lane: int, file: _File | None) -> NoReturn:
        path = error.path or (f"{self._storage.url}/{file.names[0]}" if file else self._storage.url)
        message = f"{error} (rank {self._rank}, lane {lane}, save {self._save_id} of {self._storage.url})"
        failure = type(error)(
            message, errno=error.errno, path=path, rank=self._rank, lane=lane, offset=error.offset
        )  # fmt: skip
        if isinstance(error, WorkerDied) and isinstance(failure, WorkerDied):
            failure.pid, failure.exit_status = error.pid, error.exit_status
        raise failure from error

    def _fail_for_time(self) -> NoReturn:
        stuck = [
            f"lane {work.file.lane}: {work.file.names[0]} at byte {work.low} of {work.file.nbytes}"
            for work in self._in_flight.values()
        ] or ["waiting for host memory" if any(self._next) else "waiting for the copy off the device"]
        for filled in self._filled:
            for work in filled:
                if work.ticket is not None:
                    work.ticket.check()
        first = next(iter(self._in_flight.values()), None)
        raise WriteError(
            f"no progress for {self._deadline.timeout_s:.0f} s (--distributed-timeout-minutes): "
            f"{'; '.join(stuck)} (rank {self._rank}, save {self._save_id} of {self._storage.url})",
            errno=errno.ETIMEDOUT,
            path=f"{self._storage.url}/{first.file.names[0]}" if first else self._storage.url,
            rank=self._rank,
            lane=first.file.lane if first else None,
            offset=first.low if first else None,
        )


def _works(file: _File, range_bytes: int, checksums: bool) -> Iterator[_Work]:
    """Cut a file into parts: ranges to fill, then stretches of what was staged."""
    num_unstaged = next((i for i, item in enumerate(file.items) if item.home is not None), len(file.items))
    unstaged_end = file.nbytes if num_unstaged == len(file.items) else file.offsets[num_unstaged]
    works = _fill_works(file, num_unstaged, unstaged_end, range_bytes, checksums)
    if num_unstaged < len(file.items):
        works = itertools.chain(works, _staged_works(file, num_unstaged, range_bytes, checksums))
    previous = None
    for work in works:
        if previous is not None:
            yield previous
        previous = work
    # A file without a byte is a file all the same.
    last = previous or _Work(file, 0, 0)
    last.is_last = True
    yield last


def _fill_works(file: _File, count: int, end: int, range_bytes: int, checksums: bool) -> Iterator[_Work]:
    work = _Work(file, 0, min(range_bytes, end))
    for owner in range(count):
        for offset, nbytes in block_spans(file.offsets[owner], file.placements[owner].nbytes):
            while offset >= work.high:
                yield work
                work = _Work(file, work.high, min(work.high + range_bytes, end))
            if checksums:
                work.spans += (offset - work.low, nbytes)
                work.owners.append(owner)
    if work.high > work.low:
        yield work


def _staged_works(file: _File, first: int, range_bytes: int, checksums: bool) -> Iterator[_Work]:
    work = _Work(file, file.offsets[first], file.offsets[first])
    for owner in range(first, len(file.items)):
        home = file.items[owner].home
        assert home is not None
        slab, home_offset = home
        start = file.offsets[owner]
        for offset, nbytes in block_spans(start, file.placements[owner].nbytes):
            if work.high - work.low >= range_bytes or len(work.pieces) >= _MAX_PIECES:
                yield work
                work = _Work(file, offset, offset)
            gap = offset - work.high
            address = home_offset + offset - start
            last = work.pieces[-1] if work.pieces else None
            if last is not None and last[0] == slab and last[1] + last[2] + gap == address:
                # Neighbours in the arena as in the file, padding included.
                work.pieces[-1] = (slab, last[1], last[2] + gap + nbytes)
            else:
                if gap:
                    work.pieces.append((ZEROS, 0, gap))
                work.pieces.append((slab, address, nbytes))
            if checksums:
                work.spans += (offset - work.low, nbytes)
                work.owners.append(owner)
            work.high = offset + nbytes
    yield work
