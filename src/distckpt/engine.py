"""One save as a state machine over the rooms below: lay out, stage, write, account.

    items  ->  image  ->  parts: staged -> pushed -> written  ->  what the manifest says

Two ways through host memory. A `Residence` holds the whole image: it is staged in one go, again and again,
and written while training goes on. Otherwise parts pass through slots, each used again as soon as its part
was written (`Waves`), so that any state goes through any budget.

Invariants:
    * Memory of a save is used again only after its lanes have written it, or can no longer touch it.
    * In a save from a residence nothing here is done for each item, and little for each part.
    * After a failure nothing of the save is left to lanes or on storage, and the next save starts clean.

Threads: `write` and `write_staged` run one save at a time, on whatever thread calls them; `stage` and
`Residence.stage` may run meanwhile on another.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from distckpt import observe
from distckpt.arena import EXTENT_BYTES, PAGE_BYTES, Arena, align, available_memory
from distckpt.collector import collector_paused
from distckpt.config import local_ranks
from distckpt.coordination import ProgressDeadline
from distckpt.errors import StagingError, WorkerDied, WriteError
from distckpt.formats import Documents, FileFormat, Format, open_format
from distckpt.image import Image, ImagePart, lay_out_image
from distckpt.lanes import Lanes, open_lanes
from distckpt.manifest import IMAGE_NAME, names_name, write_names
from distckpt.residence import DIGEST_BYTES, Residence, late_copies
from distckpt.staging import CopyTicket, Item, StagedUse, Stager
from distckpt.threads import Threads
from distckpt.watchdog import Standing, Watchdog
from distckpt.waves import SLOTS_PER_LANE, Waves
from distckpt.worker import CHECKSUM_BLOCK_BYTES, Job

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from concurrent.futures import Future

    import torch

    from distckpt.config import CheckpointConfig
    from distckpt.storage import Storage

_LOG = logging.getLogger(__name__)
_TORCH_DIST = open_format("torch_dist")
_SHORTEST_WAIT_FOR_SLOT_S = 0.001
_LONGEST_WAIT_FOR_SLOT_S = 0.008
"""Half the slots are full meanwhile."""
_MOST_PATIENCE = 4
"""Where a lane writes several parts at once, and has others before it, it may be so many times as long."""
_WAIT_FOR_LANE_S = 0.2
_ABORT_S = 5.0
_FRAME_BYTES = 2048
"""About what surrounds a tensor in a file, alignment included."""
_SPARE_PARTS = 4
"""What may not fit to the ends of slabs."""
_CHANGED_SLOTS = 3
"""For what has changed of a residence, when only that is written; and what describes them."""
_LARGE_PART_BYTES = 32 << 20


def budget_bytes(config: CheckpointConfig) -> int:
    """Return the bytes of host memory that `config` gives one rank of this machine, as of now."""
    return config.host_memory_bytes(available_memory(), local_ranks())


@dataclass(frozen=True)
class Written:
    """What one rank wrote.

    Attributes:
        image: Which item lies where in which file.
        names: Name of each file.
        checksums: For each file, as `commit.Manifest` takes them; empty without checksums.
    """

    image: Image
    names: tuple[str, ...]
    checksums: list[bytes]

    @property
    def files(self) -> dict[str, int]:
        """Size in bytes of each file, by name."""
        return {name: file.nbytes for name, file in zip(self.names, self.image.files, strict=True)}

    @property
    def headers(self) -> list[int]:
        """For each file the bytes before its first item; nothing if there are none in any."""
        headers = [len(file.header) for file in self.image.files]
        return headers if any(headers) else []


class Engine:
    """Writes the items of one rank. Build it with `Engine.open`.

    Args:
        arena: Host memory.
        stager: Fills it.
        lanes: Take it to storage.
        file_format: Frames the items.
        puts_aside: Whether what the format does not hold is written all the same, in files of torch_dist.
        checksums: Whether to take checksums.
        timeout_s: Seconds without progress after which any wait fails.
        is_incremental: Whether some of what a residence holds may be written apart, by `write`.
    """

    def __init__(
        self,
        *,
        arena: Arena,
        stager: Stager,
        lanes: Lanes,
        file_format: Format,
        puts_aside: bool = True,
        checksums: bool,
        timeout_s: float,
        is_incremental: bool = False,
    ) -> None:
        self.is_incremental = is_incremental
        self.format = file_format
        self._puts_aside = puts_aside
        self.arena = arena
        self.stager = stager
        self.lanes = lanes
        self.timeout_s = timeout_s
        self.deadline = ProgressDeadline(timeout_s)
        self._checksums = checksums
        self._lock = threading.Lock()
        self._run: _Run | None = None
        # Weakly: an engine that is dropped frees its memory at once.
        stand = weakref.WeakMethod(self._stand)
        self._watchdog = Watchdog(timeout_s, lambda: _call(stand))
        self._next_plan = 0
        self._dropped: deque[int] = deque()
        per_slot = arena.budget_bytes // (2 * lanes.count + 2) // CHECKSUM_BLOCK_BYTES * CHECKSUM_BLOCK_BYTES
        self.part_bytes = max(CHECKSUM_BLOCK_BYTES, min(arena.window_bytes, per_slot))

    @classmethod
    def open(cls, config: CheckpointConfig, *, is_whole: bool = False) -> Engine:
        """Build the engine that `config` describes; nothing is reserved or started before it is needed.

        Args:
            config: The settings.
            is_whole: See `formats.open_format`.

        Raises:
            ConfigError: The budget does not hold buckets of the size that they name.
        """
        timeout_s = config.distributed_timeout_minutes * 60
        file_format = open_format(
            config.ckpt_format, checksums=config.ckpt_checksum != "none", is_whole=is_whole
        )
        budget = budget_bytes(config)
        arena = Arena(budget, window_bytes=config.bucket_bytes(budget))
        stager = Stager(arena, file_format, timeout_s)
        # Weakly, for the stager holds the arena: a writer that is dropped frees its memory at once.
        pin = weakref.WeakMethod(stager.devices.pin)
        arena.on_slab = lambda slab: _call(pin, slab)
        return cls(
            arena=arena,
            stager=stager,
            lanes=open_lanes(config.dist_ckpt_workers, arena.slabs, timeout_s, config.worker_cores()),
            file_format=file_format,
            puts_aside=config.puts_objects_aside,
            checksums=config.ckpt_checksum != "none",
            timeout_s=timeout_s,
            is_incremental=config.ckpt_incremental,
        )

    def item(self, data: Any) -> Item:
        """Frame a raw tensor of any device (see `staging.is_raw`)."""
        return self.stager.item(data)

    @property
    def aside(self) -> Format:
        """The format of what is put aside."""
        return _TORCH_DIST

    def check_aside(self, fqn: str, what: str) -> None:
        """Refuse an entry that the format does not hold, unless such ones are put aside.

        Args:
            fqn: The entry.
            what: What it is.

        Raises:
            StagingError: They are not.
        """
        if not self._puts_aside:
            raise StagingError(
                f"{fqn!r} is {what}, which {self.format.name} does not hold: leave it out, save as "
                f"torch_dist, or have it put aside into a file of torch_dist (--ckpt-objects sidecar)"
            )

    def prewarm(
        self, sizes: Sequence[int], devices: Collection[torch.device] = (), *, before_plan: bool = False
    ) -> Future[int]:
        """Begin to get ready for a state, so that its first save costs what later ones do.

        Args:
            sizes: Bytes of each of its tensors.
            devices: CUDA devices that they are on.
            before_plan: Whether it will be staged before there is a plan, and so each tensor in one piece.

        Returns:
            See `Arena.prepare`. Slabs are pinned when it is done.
        """
        self.stager.use_devices(set(devices))
        # A save that is under way has started them.
        if self._lock.acquire(blocking=False):
            try:
                self.lanes.start()
            finally:
                self._lock.release()
        need = sum(sizes) + _FRAME_BYTES * len(sizes) + self._spare_bytes(self.part_bytes)
        if before_plan:
            return self.arena.prepare(need + self.arena.remainder_bytes(need, max(sizes, default=0)))
        if need > self.arena.budget_bytes:
            need = SLOTS_PER_LANE * self.lanes.count * self.part_bytes
        return self.arena.prepare(need)

    def stage(
        self, state: Mapping[str, Any], use: StagedUse | None = None
    ) -> tuple[dict[str, Any], CopyTicket]:
        """Copy a whole state to the arena, before there is a plan; see `Stager.stage`."""
        started = time.monotonic()
        staged, ticket = self.stager.stage(state, use)
        ended = time.monotonic()
        observe.emit("state.staged", seconds=ended - started, start_s=started, end_s=ended)
        return staged, ticket

    def lay_out(
        self,
        storage: Storage,
        items: Sequence[Item],
        late: Collection[int] = (),
        extent_bytes: int = 0,
        *,
        are_documents: bool = False,
        num_files: int = 0,
    ) -> Image:
        """Lay out the files of one rank for what `storage` takes; see `image.lay_out_image`.

        Args:
            storage: Where they will lie.
            items: What they hold.
            late: Numbers of those that lie together.
            extent_bytes: About how many bytes of each file are staged in turn; at least a part.
            are_documents: Whether they are the small files of a format, and not its items.
            num_files: How many files there are to be; default: one for each lane.
        """
        late = frozenset(late)
        own_format: FileFormat | None = None if self.format.name == _TORCH_DIST.name else self.format
        if are_documents:
            own_format = Documents()
        homes = [item.home for item in items]
        if own_format is not None and storage.part_bytes(0):
            # A header and what follows it may have to be one part, and so lie in one place: copied once more.
            homes = []
        return lay_out_image(
            [item.size for item in items],
            num_files or self.lanes.count,
            self.part_bytes,
            file_format=own_format,
            entries=() if own_format is None else [item.entry for item in items],
            whole_parts=storage.part_bytes if storage.part_bytes(0) else None,
            order=[index in late for index in range(len(items))] if late else (),
            homes=homes if any(homes) else (),
            run=max(1, extent_bytes // self.part_bytes),
            checksums=self._checksums,
            are_documents=are_documents,
            with_companions=not storage.is_stream and not storage.part_bytes(0),
        )

    def reside(
        self,
        storage: Storage,
        items: Sequence[Item],
        late: Collection[int] = (),
        digested: Collection[int] = (),
    ) -> Residence | None:
        """Lay out `items` for a place in host memory, which the first `Residence.stage` reserves.

        Args:
            storage: Of the kind that it will be written to.
            items: What will be saved again and again, none of it staged.
            late: Numbers of CUDA tensors that may be copied after `Residence.stage` returned.
            digested: Numbers of those of them of which `Residence.changed` is to tell.

        Returns:
            The residence, or None if the budget does not hold it: then there is only `write`.
        """
        late = late_copies(items, late)
        with collector_paused():
            image = self.lay_out(storage, items, late, EXTENT_BYTES)
        digested = sorted(late & set(digested))
        if self._need(image, digested) > self.arena.budget_bytes:
            return None
        return Residence(
            self.arena,
            self.stager,
            image,
            plan_id=self._new_plan_id(),
            late=late,
            digested=digested,
            timeout_s=self.timeout_s,
        )

    def reside_beside(self, residence: Residence) -> Residence | None:
        """Return another residence of the same image, for a save while `residence` is being written.

        Returns:
            The residence; None if the budget has no room for it at this time.
        """
        free_bytes = self.arena.budget_bytes - self.arena.reserved_bytes + self.arena.unused_bytes
        if self._need(residence.image, residence.digested) > free_bytes:
            return None
        return Residence(
            self.arena,
            self.stager,
            residence.image,
            plan_id=self._new_plan_id(),
            late=residence.late,
            digested=residence.digested,
            timeout_s=self.timeout_s,
        )

    def _need(self, image: Image, digested: Sequence[int]) -> int:
        """Return the bytes of a residence of `image`, with what its slabs may not hold of it."""
        largest = max((part.nbytes for part in image.parts), default=0)
        parts_bytes = sum(align(part.nbytes, PAGE_BYTES) for part in image.parts)
        # What has changed of it passes through slots of its own.
        slots_bytes = _CHANGED_SLOTS * max(largest, self.part_bytes) if self.is_incremental else 0
        digests_bytes = 2 * DIGEST_BYTES * len(digested)
        return parts_bytes + digests_bytes + slots_bytes + self._spare_bytes(max(largest, self.part_bytes))

    def _spare_bytes(self, part_bytes: int) -> int:
        """Return what may be left over at the ends of slabs."""
        if part_bytes <= _LARGE_PART_BYTES:
            return _SPARE_PARTS * part_bytes
        # A slab holds few of them: the last part of each file, the board and the last slab may each keep one
        # from fitting.
        return max(_SPARE_PARTS, self.lanes.count + 2) * part_bytes

    def write(
        self,
        storage: Storage,
        save_id: str,
        rank: int,
        items: Sequence[Item],
        tell: Callable[[int, int], None] | None = None,
        check: Callable[[], None] | None = None,
        *,
        are_documents: bool = False,
        num_files: int = 0,
    ) -> Written | None:
        """Write `items` durably; the names of their files are durable with the next `Storage.put`.

        Args:
            storage: Where to.
            save_id: Hexadecimal id that no other save has.
            rank: For names and messages.
            items: What to write, staged or not.
            tell: Is told now and then, on another thread, of bytes written and to be written.
            check: Called when the files are there, empty, and again before they are completed; raises if they
                must not be.
            are_documents: As for `lay_out`.
            num_files: As for `lay_out`.

        Returns:
            What was written; None without items.

        Raises:
            StagingError: A copy or a reservation failed.
            WriteError: The storage refused, or a lane failed or made no progress in time; `WorkerDied` if its
                process ended. Nothing of this save is left in flight.
        """
        if not items:
            return None
        with self._turn(storage, rank, tell):
            with observe.span("image.laid_out", save_id=save_id, rank=rank), collector_paused():
                image = self.lay_out(storage, items, are_documents=are_documents, num_files=num_files)
            waves = Waves(
                self.arena,
                self.stager,
                image,
                items,
                storage,
                plan_id=self._new_plan_id(),
                num_lanes=self.lanes.count,
                timeout_s=self.timeout_s,
            )
            try:
                with observe.span("memory.awaited", save_id=save_id, rank=rank):
                    waves.open()
                written = self._finish(_Run(self, storage, save_id, rank, image, waves, check))
            except BaseException:
                waves.abandon()
                raise
            finally:
                self.lanes.drop_plan(waves.plan_id)
            waves.release()
            return written

    def write_staged(
        self,
        storage: Storage,
        save_id: str,
        rank: int,
        residence: Residence,
        tell: Callable[[int, int], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> Written:
        """Write what was staged in `residence`, once for each staging or `Residence.renew`; see `write`.

        Args:
            storage: As for `write`.
            save_id: As for `write`.
            rank: As for `write`.
            residence: Holds it.
            tell: As for `write`.
            check: As for `write`.

        Returns:
            What was written.
        """
        with self._turn(storage, rank, tell):
            return self._finish(_Run(self, storage, save_id, rank, residence.image, residence, check))

    def drop(self, residence: Residence) -> None:
        """Give up `residence`, which no save uses any more."""
        # A save that is under way holds the lanes: the next one tells them.
        if residence.is_known_to_lanes:
            self._dropped.append(residence.plan_id)
        residence.release()

    def close(self) -> None:
        """End the lanes and give the memory back, once no save holds them; idempotent, interrupted or not."""
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

    @contextlib.contextmanager
    def _turn(self, storage: Storage, rank: int, tell: Callable[[int, int], None] | None) -> Iterator[None]:
        """Hold the lanes: wait as long as the save that holds them gets on, and no longer.

        Raises:
            WriteError: It does not get on, or a lane cannot start.
        """
        start_s = time.monotonic()
        while not self._lock.acquire(timeout=_WAIT_FOR_LANE_S):
            if self.deadline.passed:
                raise WriteError(
                    f"{storage.url} waits for an earlier save, which has made no progress for "
                    f"{self.timeout_s:.0f} s (--distributed-timeout-minutes)",
                    errno=errno.ETIMEDOUT,
                    path=storage.url,
                    rank=rank,
                )
        try:
            self.deadline.progress()
            self._start_lanes(rank)
            observe.emit("lanes.awaited", rank=rank, start_s=start_s, end_s=time.monotonic())
            while self._dropped:
                self.lanes.drop_plan(self._dropped.popleft())
            with self._watchdog.watching(f"rank {rank}: the save of {storage.url}", tell):
                storage.prepare()
                yield
        finally:
            self._lock.release()

    def _finish(self, run: _Run) -> Written:
        self._run = run
        try:
            return run.run()
        finally:
            self._run = None

    def _stand(self) -> Standing | None:
        """Return where the save stands that is under way; for the watchdog, on its thread."""
        run = self._run
        # Its memory may be given back meanwhile.
        with contextlib.suppress(ValueError, IndexError):
            return None if run is None else run.stand()
        return None

    def _start_lanes(self, rank: int) -> None:
        try:
            self.lanes.start()
        except WriteError as error:
            error.rank = rank
            raise

    def names(self, save_id: str, rank: int, image: Image) -> tuple[str, ...]:
        """Return the names of the files of `image` in the save `save_id`, which no other save ever has."""
        num_aside = sum(file.is_aside for file in image.files)
        totals = {True: num_aside, False: len(image.files) - num_aside}
        names, numbers = [], {True: itertools.count(), False: itertools.count()}
        for file in image.files:
            kind = _TORCH_DIST if file.is_aside else self.format
            number = next(numbers[file.is_aside])
            names.append(file.name or kind.image_name(rank, number, totals[file.is_aside], save_id))
        return tuple(names)

    def create_files(
        self, storage: Storage, save_id: str, rank: int, image: Image
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Create the files of `image`, exclusively; returns their names, and what the storage told of each.

        Raises:
            WriteError: The storage refuses; none is left.
        """
        names = self.names(save_id, rank, image)
        tokens: dict[str, str] = {}
        chosen = [name for name in names if not IMAGE_NAME.fullmatch(name)]
        if chosen:
            write_names(storage, names_name(save_id, rank, are_documents=image.are_documents), chosen)

        def create(name: str, nbytes: int) -> None:
            tokens[name] = storage.create_image(name, nbytes)

        try:
            _each(
                storage, create, [(name, file.nbytes) for name, file in zip(names, image.files, strict=True)]
            )
        except BaseException:
            for name, token in tokens.items():
                with contextlib.suppress(WriteError):
                    storage.discard_image(name, token)
            raise
        return names, tuple(tokens[name] for name in names)

    def _new_plan_id(self) -> int:
        self._next_plan += 1
        return self._next_plan


def _each(storage: Storage, call: Callable[..., object], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Call `call` with each of `arguments`, several at once where the storage permits.

    Raises:
        WriteError: One of the calls did; those that had begun have ended, and the others have not begun.
    """
    count = min(getattr(storage, "at_once", 1), len(arguments))
    if count <= 1:
        for each in arguments:
            call(*each)
        return
    has_failed = threading.Event()

    def one(*each: Any) -> None:
        if not has_failed.is_set():
            try:
                call(*each)
            except BaseException:
                has_failed.set()
                raise

    threads = Threads(count, "distckpt-files")
    try:
        calls = [threads.submit(one, *each) for each in arguments]
        wait(calls)
    finally:
        has_failed.set()
        threads.close(_ABORT_S)
    for each_call in calls:
        each_call.result()


def _call(method: Callable[[], Callable[..., Any] | None], *args: Any) -> Any:
    alive = method()
    return None if alive is None else alive(*args)


class _Run:
    """The loop of one save: stage, push, wait for the lanes, account."""

    def __init__(
        self,
        engine: Engine,
        storage: Storage,
        save_id: str,
        rank: int,
        image: Image,
        memory: Residence | Waves,
        check: Callable[[], None] | None,
    ) -> None:
        self._check = check or (lambda: None)
        self._engine = engine
        self._lanes = engine.lanes
        self._storage = storage
        self._save_id = save_id
        self._rank = rank
        self._image = image
        self._memory = memory
        self._deadline = engine.deadline
        self._names: tuple[str, ...] = ()
        self._tokens: tuple[str, ...] = ()
        self._is_traced = observe.has_subscribers()

    def run(self) -> Written:
        """Write everything."""
        memory = self._memory
        assert memory.plan is not None
        assert not memory.board.is_stopped, "staged anew, or renewed, after a failure"
        start_s = time.monotonic()
        with self._naming(), observe.span("files.created", save_id=self._save_id, rank=self._rank):
            self._names, self._tokens = self._engine.create_files(
                self._storage, self._save_id, self._rank, self._image
            )
        try:
            self._check()
            with self._naming():
                if not memory.is_known_to_lanes:
                    self._lanes.add_plan(memory.plan)
                    memory.is_known_to_lanes = True
                self._lanes.begin(
                    Job(
                        self._save_id,
                        memory.plan_id,
                        self._storage.spec,
                        self._names,
                        self._tokens,
                        memory.tag,
                        self._is_traced,
                    )
                )
                self._push_and_wait()
                self._check()
                with observe.span("files.completed", save_id=self._save_id, rank=self._rank):
                    receipts = self._lanes.receipts
                    _each(
                        self._storage,
                        self._storage.complete_image,
                        [
                            (self._names[number], self._tokens[number], file.nbytes, receipts.get(number, []))
                            for number, file in enumerate(self._image.files)
                        ],
                    )
        except BaseException:
            self._abandon()
            raise
        end_s = time.monotonic()
        if self._is_traced:
            self._tell_what_lanes_did()
        observe.emit(
            "files.written",
            save_id=self._save_id,
            rank=self._rank,
            names=self._names,
            nbytes=self._image.nbytes,
            start_s=start_s,
            end_s=end_s,
        )
        return Written(self._image, self._names, self._packed_checksums())

    def _tell_what_lanes_did(self) -> None:
        """Emit what the lanes noted, and what follows from it about the copies off devices."""
        save_id, rank, names = self._save_id, self._rank, self._names
        last_ready_s = 0.0
        for lane, record in self._lanes.records.items():
            for index, asked_s, ready_s, start_s, end_s in record.parts:
                part = self._image.parts[index]
                observe.emit(
                    "part.written",
                    save_id=save_id,
                    rank=rank,
                    lane=lane,
                    file=names[part.file],
                    offset=part.low,
                    nbytes=part.nbytes,
                    asked_s=asked_s,
                    ready_s=ready_s,
                    start_s=start_s,
                    end_s=end_s,
                )
                last_ready_s = max(last_ready_s, ready_s)
            for number, start_s, end_s in record.syncs:
                observe.emit(
                    "lane.synced",
                    save_id=save_id,
                    rank=rank,
                    lane=lane,
                    file=names[number],
                    start_s=start_s,
                    end_s=end_s,
                )
        since_s, arrived_s = self._memory.copying_since_s, self._memory.arrived_s
        if since_s is not None:
            # Neither looks all the time: who has seen it first is nearer to when it was.
            seen_s = last_ready_s if arrived_s is None else min(last_ready_s, arrived_s)
            observe.emit("state.copied", save_id=save_id, rank=rank, start_s=since_s, end_s=seen_s)

    def _push_and_wait(self) -> None:
        memory = self._memory
        pushed_all = False
        has_arrived = False
        num_done, pause_s = -1, _SHORTEST_WAIT_FOR_SLOT_S
        # Who traces wants to know when the last copy arrived, and not only at the next answer of a lane.
        longest_s = _LONGEST_WAIT_FOR_SLOT_S if self._is_traced else _WAIT_FOR_LANE_S
        longest_pause_s = _LONGEST_WAIT_FOR_SLOT_S
        if isinstance(memory, Waves):
            spare = memory.num_slots // (2 * self._lanes.count)
            longest_pause_s *= max(1, min(self._storage.in_flight, spare, _MOST_PATIENCE))
        while True:
            start_s = time.monotonic()
            if isinstance(memory, Residence):
                numbers = [] if pushed_all else list(range(len(self._image.parts)))
                is_complete = True
            else:
                numbers = memory.stage()
                is_complete = memory.is_complete
            if numbers:
                self._lanes.push(numbers)
                observe.emit(
                    "parts.pushed",
                    save_id=self._save_id,
                    rank=self._rank,
                    parts=numbers,
                    start_s=start_s,
                    end_s=time.monotonic(),
                )
            if is_complete and not pushed_all:
                pushed_all = True
                self._lanes.finish()
            wait_s = _WAIT_FOR_LANE_S if has_arrived else longest_s
            is_over = self._lanes.poll(0.0 if numbers else wait_s if pushed_all else pause_s)
            has_arrived = memory.has_arrived()
            if is_over:
                return
            done = memory.board.num_done()
            if numbers or done != num_done:
                num_done, pause_s = done, _SHORTEST_WAIT_FOR_SLOT_S
                self._deadline.progress()
            elif self._deadline.passed:
                self._fail_for_time(done)
            else:
                pause_s = min(2 * pause_s, longest_pause_s)

    def _packed_checksums(self) -> list[bytes]:
        board = self._memory.board
        return [
            b"".join(board.checksums(part, part + 1) for part in parts) for parts in self._image.parts_by_file
        ]

    def _abandon(self) -> None:
        """Take the save back from the lanes and from storage."""
        self._memory.board.stop()
        if self._lanes.abort(self._save_id, _ABORT_S):
            self._memory.is_lost = True
            # Removing a file that a lane has in its hands may wait as long as the lane does.
            return
        for name, token in zip(self._names, self._tokens, strict=True):
            with contextlib.suppress(WriteError):
                self._storage.discard_image(name, token)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Add to an error of a lane or of the storage whose save it is."""
        try:
            yield
        except WriteError as error:
            where = f"rank {self._rank}, save {self._save_id} of {self._storage.url}"
            lane = "" if error.lane is None else f"lane {error.lane}, "
            failure = type(error)(
                f"{error} ({lane}{where})",
                errno=error.errno,
                path=error.path or self._storage.url,
                rank=self._rank,
                lane=error.lane,
                offset=error.offset,
            )
            if isinstance(error, WorkerDied) and isinstance(failure, WorkerDied):
                failure.pid, failure.exit_status = error.pid, error.exit_status
            raise failure from error

    def stand(self) -> Standing:
        """Return how far it has got, and what it waits for; any thread may ask."""
        parts, board, lanes = self._image.parts, self._memory.board, self._lanes
        nbytes = sum(part.nbytes for number, part in enumerate(parts) if board.is_done(number))
        pids = lanes.pids
        workers = {lane: pids[lane] for lane in lanes.unfinished if lane < len(pids)}
        return Standing(nbytes, self._image.nbytes, self._where()[0], workers)

    def _where(self) -> tuple[str, ImagePart | None]:
        """Return what the save waits for, and the first part that is not written."""
        parts, board = self._image.parts, self._memory.board
        stuck = next((number for number in range(len(parts)) if not board.is_done(number)), None)
        if stuck is None:
            return "waiting for the lanes to make their files durable", None
        part = parts[stuck]
        doing = "is not staged yet"
        if board.is_ready(stuck, self._memory.tag):
            doing = "is with its lane"
        name = self._names[part.file] if self._names else f"file {part.file}"
        return f"{name} at byte {part.low} {doing}", part

    def _fail_for_time(self, num_done: int) -> NoReturn:
        self._memory.check()
        parts = self._image.parts
        where, part = self._where()
        lanes = self._lanes.unfinished
        raise WriteError(
            f"no progress for {self._deadline.timeout_s:.0f} s (--distributed-timeout-minutes): "
            f"{num_done} of {len(parts)} parts are written, {where}; "
            f"lanes that have not finished: {', '.join(map(str, lanes))}",
            errno=errno.ETIMEDOUT,
            path=f"{self._storage.url}/{self._names[part.file]}" if part else self._storage.url,
            lane=lanes[0] if len(lanes) == 1 else None,
            offset=part.low if part else None,
        )
