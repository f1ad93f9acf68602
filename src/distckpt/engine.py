"""One save as a state machine over the rooms below: lay out, stage, write, account.

    items  ->  image  ->  parts: staged -> pushed -> written  ->  what the manifest says

Two ways through host memory. A `Residence` holds the whole image: it is staged in one go, again and again,
and written while training goes on. Otherwise parts pass through slots, each used again as soon as its part
was written (waves), so that any state goes through any budget.

Invariants:
    * Memory of a save is used again only after its lanes have written it, or can no longer touch it.
    * In a save from a residence nothing here is done for each item, and little for each part.
    * After a failure nothing of the save is left to lanes or on storage, and the next save starts clean.

Threads: `write` and `write_staged` run one save at a time, on whatever thread calls them; `stage` and
`Residence.stage` may run meanwhile on another.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
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
from distckpt.arena import EXTENT_BYTES, PAGE_BYTES, Arena, Range, align, available_memory
from distckpt.config import local_ranks
from distckpt.coordination import ProgressDeadline
from distckpt.device import DIGEST_WORDS, Transfer, refuse_capture
from distckpt.errors import StagingError, WorkerDied, WriteError
from distckpt.formats import Documents, FileFormat, Format, open_format
from distckpt.image import Image, ImagePart, lay_out_image
from distckpt.lanes import Lanes, open_lanes
from distckpt.manifest import IMAGE_NAME, names_name, write_names
from distckpt.staging import CopyTicket, HostCopy, Item, StagedUse, Stager
from distckpt.threads import Threads
from distckpt.watchdog import Standing, Watchdog
from distckpt.worker import CHECKSUM_BLOCK_BYTES, Board, Job, Part, Plan

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
_DIGEST_BYTES = 8 * DIGEST_WORDS
_ABORT_S = 5.0
_GROUP_BYTES = 128 << 20
"""Parts of about this size together are staged in waves before lanes are told."""
_RESIDENT_GROUP_BYTES = 1 << 30
"""The same in a residence: a word costs the copy engine about 70 microseconds."""
_SLOTS_PER_LANE = 4
_FRAME_BYTES = 2048
"""About what surrounds a tensor in a file, alignment included."""
_SPARE_PARTS = 4
"""What may not fit to the ends of slabs."""
_CHANGED_SLOTS = 3
"""For what has changed of a residence, when only that is written; and what describes them."""
_LARGE_PART_BYTES = 32 << 20
_PREPARED_BYTES = 128 << 20
"""Less than this is not worth threads that build it."""


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


class Residence:
    """The image of one rank, whole, in host memory; made by `Engine.reside`.

    Args:
        arena: Where it gets its memory.
        stager: Fills it.
        image: What it holds; none of its items is staged yet.
        plan_id: For the lanes.
        late: Numbers of the items that `stage` may copy after it returned.
        digested: Numbers of those of them that have to be the same before and after their copies.
        timeout_s: Seconds that the wait for memory may take.
    """

    def __init__(
        self,
        arena: Arena,
        stager: Stager,
        image: Image,
        *,
        plan_id: int,
        late: Collection[int],
        digested: Sequence[int],
        timeout_s: float,
    ) -> None:
        self.image = image
        self.plan_id = plan_id
        self.plan: Plan | None = None
        self.is_known_to_lanes = False
        self.is_lost = False
        """Whether a lane that could not be stopped may still touch it: it is not used again."""
        self._arena = arena
        self._stager = stager
        self.late = frozenset(late)
        self.digested = digested
        self._timeout_s = timeout_s
        self._ranges: list[Range] = []
        self._host: list[HostCopy] = []
        self._early = Transfer(stager.devices)
        self._main = Transfer(stager.devices)
        self._keep: Sequence[torch.Tensor | None] = ()
        self.arrived_s: float | None = None
        """When everything was first seen to have been copied, by `time.monotonic()`."""
        self._tag = 0
        self._board: Board | None = None
        self._digests: list[ctypes.Array[ctypes.c_char]] = []

    @property
    def board(self) -> Board:
        """What lanes and devices tell of it."""
        assert self._board is not None
        return self._board

    @property
    def tag(self) -> int:
        """Value of the ready words once all has arrived."""
        return self._tag

    @property
    def can_restage(self) -> bool:
        """Whether what lies on devices is copied by captured graphs, if there is any."""
        return self.plan is not None and all(
            transfer.is_captured or transfer.is_empty for transfer in (self._early, self._main)
        )

    @property
    def copying_since_s(self) -> float | None:
        """When the copies off devices began, by `time.monotonic()`; None if there are none."""
        used = (transfer for transfer in (self._early, self._main) if not transfer.is_empty)
        return min((transfer.began_s for transfer in used), default=None)

    def stage(self, items: Sequence[Item]) -> None:
        """Copy `items`.

        What the caller gives its current CUDA streams from now on runs after the copies, but for the late
        ones: those may be changed only after `order_after`.

        Args:
            items: Those that the image was laid out for: sizes, dtypes, strides and addresses are the same.

        Raises:
            StagingError: A copy or a reservation failed.
        """
        sources = [item.tensor if item.tensor is not None and item.tensor.is_cuda else None for item in items]
        if self.plan is not None:
            self._stage_again(dict(enumerate(items)), sources, sources)
            return
        self._keep, self.arrived_s = sources, None
        try:
            with collector_paused():
                self._build(items, sources)
        except BaseException:
            self._settle()
            self.release()
            # The next attempt lays everything out anew.
            self._host.clear()
            self._early, self._main = (Transfer(self._stager.devices) for _ in range(2))
            raise

    def restage(self, host_items: Mapping[int, Item], keep: Sequence[torch.Tensor | None]) -> None:
        """Copy everything anew by the captured graph; see `stage`.

        Args:
            host_items: By number, the items that are on no device.
            keep: Tensors to hold until the copies have ended.

        Raises:
            StagingError: As for `stage`.
        """
        assert self.can_restage
        self._stage_again(host_items, (), keep)

    def has_arrived(self) -> bool:
        """Say whether everything was copied; if so, the tensors are let go."""
        if self._keep and not self.board.is_ready(len(self.image.parts) - 1, self._tag):
            return False
        self._keep = ()
        if self.arrived_s is None:
            self.arrived_s = time.monotonic()
        return True

    def renew(self) -> None:
        """Have what was staged written once more: all has arrived, and no lane is busy with it any more."""
        self.board.clear()
        self.board.set_all_ready(self._tag)

    def order_after(self) -> None:
        """Make what the caller gives its current streams from now on wait for the late copies."""
        self._main.order_after()

    def changed(self) -> list[int]:
        """Return which of the digested items were changed before they had been copied; all has arrived."""
        if not self.digested:
            return []
        before, after = (digests.raw for digests in self._digests)
        if before == after:
            return []
        firsts = range(0, len(before), _DIGEST_BYTES)
        return [
            number
            for number, first in zip(self.digested, firsts, strict=True)
            if before[first : first + _DIGEST_BYTES] != after[first : first + _DIGEST_BYTES]
        ]

    def check(self) -> None:
        """Raise the CUDA error that a copy ran into, if it did.

        Raises:
            StagingError: CUDA reports an error.
        """
        self._early.check()
        self._main.check()

    def release(self) -> None:
        """Give the memory back; nobody writes it any more."""
        if not self.has_arrived():
            self._settle()
        self._early.forget()
        self._main.forget()
        self._keep = ()
        self._digests = []
        if self._board is not None:
            self._board.release()
            self._board = None
        ranges, self._ranges = self._ranges, []
        if not self.is_lost:
            for taken in ranges:
                self._arena.release(taken)

    def _stage_again(
        self,
        items: Mapping[int, Item],
        sources: Sequence[torch.Tensor | None],
        keep: Sequence[torch.Tensor | None],
    ) -> None:
        if not (self._early.is_empty and self._main.is_empty):
            # Before anything is touched: what clears up after a failure asks CUDA.
            refuse_capture()
        self._keep, self.arrived_s = keep, None
        try:
            self.board.clear()
            self._stager.refill(items, self._host)
            if not self._early.is_empty:
                self._early.launch(sources, caller_waits=True)
            if self._main.is_empty:
                self._tag += 1
                self.board.set_all_ready(self._tag)
            else:
                self._main.launch(sources, caller_waits=not self.late)
                self._tag = self._main.tag
        except BaseException:
            self._settle()
            raise

    def _settle(self) -> None:
        """After a failure: let go of the tensors, and of the memory if a copy may still write to it."""
        if not (self._early.settle(_ABORT_S) and self._main.settle(_ABORT_S)):
            self.is_lost = True
            self._stager.quarantine(self._ranges)
        self._keep = ()

    def _build(self, items: Sequence[Item], sources: Sequence[torch.Tensor | None]) -> None:
        """Reserve, lay out and copy: part by part, as the memory is there."""
        devices = {source.device for source in sources if source is not None}
        self._stager.use_devices(devices)
        parts = self.image.parts
        total = sum(align(part.nbytes, PAGE_BYTES) for part in parts)
        num_spans = [len(part.spans) // 2 for part in parts]
        board_bytes = align(Board.nbytes(num_spans), 8)
        digest_bytes = _DIGEST_BYTES * len(self.digested)
        words_bytes = board_bytes + 2 * digest_bytes
        prepared = self._arena.prepare(
            self._arena.reserved_bytes - self._arena.unused_bytes + total + align(words_bytes, PAGE_BYTES)
        )
        if devices:
            # Registering memory and launching copies wait for each other in the driver: doing both slab by
            # slab takes half as long again as one after the other.
            prepared.result(self._timeout_s)
        board_range = self._reserve(words_bytes, words_bytes)
        board_address = self._arena.address(board_range)
        memory = (ctypes.c_char * board_bytes).from_address(board_address)
        self._board = Board(memoryview(memory).cast("B"), num_spans)
        self._board.clear()
        words = board_address + self._board.ready_offset
        transfers = (self._early, self._main) if self.late else (self._main, self._main)
        digests = board_address + board_bytes
        if self.digested:
            array = ctypes.c_char * digest_bytes
            self._digests = [array.from_address(digests + at) for at in (0, digest_bytes)]
            self._add_digests(self._early, sources, digests)
        self._main.begin()
        first = number = filled_bytes = 0
        while number < len(parts):
            filled = self._fill_extent(items, number, transfers)
            number += len(filled)
            filled_bytes += sum(part.nbytes for part in filled)
            if filled_bytes >= _RESIDENT_GROUP_BYTES or number == len(parts):
                if self.digested and number == len(parts):
                    self._add_digests(self._main, sources, digests + digest_bytes)
                self._main.add_words(words + 8 * first, number - first)
                if not self.late:
                    self._run_group(sources, range(first, number))
                first, filled_bytes = number, 0
        if self.late:
            self._early.launch(sources, caller_waits=True)
            self._main.run(sources)
        self._main.end(caller_waits=not self.late)
        self._tag = self._main.tag
        self.plan = Plan(
            self.plan_id,
            tuple(file.nbytes for file in self.image.files),
            tuple(
                Part(part.file, part.low, tuple(part.pieces), tuple(part.spans), part.sealed)
                for part in parts
            ),
            (board_range.slab, board_range.offset),
        )

    def _add_digests(self, transfer: Transfer, sources: Sequence[torch.Tensor | None], address: int) -> None:
        first = sources[self.digested[0]]
        assert first is not None
        transfer.add_digests(first.device, self.digested, address)

    def _run_group(self, sources: Sequence[torch.Tensor | None], parts: range) -> None:
        self._main.run(sources)
        if self._main.is_empty:
            for part in parts:
                self.board.set_ready(part, self._main.tag)

    def _fill_extent(
        self, items: Sequence[Item], first: int, transfers: Sequence[Transfer]
    ) -> list[ImagePart]:
        """Lay parts of one file, from number `first` on, where they follow each other in memory too.

        A tensor that lies in several of them is then one copy.
        """
        parts = self.image.parts
        run, nbytes = [parts[first]], parts[first].nbytes
        for part in parts[first + 1 :]:
            if part.file != run[0].file or part.low != run[-1].high or nbytes + part.nbytes > EXTENT_BYTES:
                break
            run.append(part)
            nbytes += part.nbytes
        if nbytes == 0:
            return run
        taken = self._reserve(nbytes, run[0].nbytes)
        while nbytes > taken.nbytes:
            nbytes -= run.pop().nbytes
        used = align(nbytes, PAGE_BYTES)
        if used < taken.nbytes:
            self._ranges[-1] = Range(taken.slab, taken.offset, used)
            self._arena.release(Range(taken.slab, taken.offset + used, taken.nbytes - used))
        file, low = self.image.files[run[0].file], run[0].low
        address = self._arena.address(taken)
        self._host += self._stager.fill(items, file, low, run[-1].high, address, transfers, self.late)
        for part in run:
            part.pieces = [(taken.slab, taken.offset + part.low - low, part.nbytes)]
        return run

    def _reserve(self, most: int, least: int) -> Range:
        taken = self._arena.reserve_some(most, least, timeout_s=self._timeout_s, on_wait=self._stager.collect)
        self._ranges.append(taken)
        return taken


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
            need = _SLOTS_PER_LANE * self.lanes.count * self.part_bytes
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
        late = _late_copies(items, late)
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
        digests_bytes = 2 * _DIGEST_BYTES * len(digested)
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
            waves = _Waves(self, image, items, storage)
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


def _late_copies(items: Sequence[Item], late: Collection[int]) -> frozenset[int]:
    devices = {item.tensor.device for item in items if item.tensor is not None and item.tensor.is_cuda}
    # The words that come last tell of one device; on several, none is copied late.
    if len(devices) != 1:
        return frozenset()
    on_device = ((index, items[index].tensor, items[index].nbytes) for index in late)
    return frozenset(
        index for index, tensor, nbytes in on_device if nbytes and tensor is not None and tensor.is_cuda
    )


def _call(method: Callable[[], Callable[..., Any] | None], *args: Any) -> Any:
    alive = method()
    return None if alive is None else alive(*args)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield first and count of each run of consecutive numbers; `numbers` are sorted."""
    for _, run in itertools.groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        members = [number for _, number in run]
        yield members[0], len(members)


class _Order:
    """Which part of a save is staged next, and in which slot.

    Parts take turns in the slots. Where a slot stays in use for long, the others go on: one write that takes
    its time must not hold up all lanes. Not in streams, which are written from start to end; and what is
    sealed comes after everything before it.

    Args:
        parts: Of the image; those that are staged already need no slot.
        num_slots: At least 1, unless all are staged.
        is_stream: Whether files are written from start to end.
    """

    def __init__(self, parts: Sequence[ImagePart], num_slots: int, *, is_stream: bool) -> None:
        unstaged = [number for number, part in enumerate(parts) if not part.is_staged]
        self.slots = {number: at % num_slots for at, number in enumerate(unstaged)}
        """Index of the slot that each part passes through."""
        self._parts = parts
        self._is_stream = is_stream
        self._queues = [deque(unstaged[slot::num_slots]) for slot in range(num_slots)]
        # The part that each slot holds.
        self._users: list[int | None] = [None] * num_slots
        # The first part that was not taken, and those after it that were.
        self._next = 0
        self._ahead: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """Whether every part was taken."""
        return self._next == len(self._parts)

    def take(self, is_done: Callable[[int], bool]) -> int | None:
        """Return the part to stage next; None if all were, or as long as no slot is free that could be used.

        Args:
            is_done: Says whether a part that was taken is written.
        """
        if self.is_complete:
            return None
        number = self._next
        if not self._is_free(number, is_done):
            heads = (queue[0] for queue in self._queues if queue)
            others = [] if self._is_stream else [each for each in heads if self._parts[each].sealed is None]
            found = min((each for each in others if self._is_free(each, is_done)), default=None)
            if found is None:
                return None
            number = found
        slot = self.slots.get(number)
        if slot is not None:
            self._users[slot] = self._queues[slot].popleft()
        self._ahead.add(number)
        while self._next in self._ahead:
            self._ahead.remove(self._next)
            self._next += 1
        return number

    def _is_free(self, number: int, is_done: Callable[[int], bool]) -> bool:
        slot = self.slots.get(number)
        user = None if slot is None else self._users[slot]
        return user is None or is_done(user)


class _Waves:
    """Slots of host memory that the parts of one save pass through.

    Args:
        engine: Whose arena and stager.
        image: What passes through.
        items: Its items.
        storage: Where the parts go.
    """

    def __init__(self, engine: Engine, image: Image, items: Sequence[Item], storage: Storage) -> None:
        self.image = image
        self.plan_id = engine._new_plan_id()  # noqa: SLF001 - one room
        self.is_known_to_lanes = False
        self.is_lost = False
        self.tag = 1
        self.arrived_s = None
        """See `Residence.arrived_s`; not known here."""
        self.plan: Plan
        self.board: Board
        self._arena = engine.arena
        self._stager = engine.stager
        self._timeout_s = engine.timeout_s
        # While some are written, as many others are filled.
        self._most_slots = max(_SLOTS_PER_LANE, 2 * storage.in_flight) * engine.lanes.count
        self._is_stream = storage.is_stream
        self._items = items
        self._sources = [
            item.tensor if item.home is None and item.tensor is not None and item.tensor.is_cuda else None
            for item in items
        ]
        self._transfer = Transfer(engine.stager.devices)
        self._ranges: list[Range] = []
        self._slots: list[Range] = []
        self._order: _Order
        self._words = 0

    def open(self) -> None:
        """Reserve the slots, and say which part passes through which."""
        devices = {source.device for source in self._sources if source is not None}
        self._stager.use_devices(devices)
        parts = self.image.parts
        num_spans = [len(part.spans) // 2 for part in parts]
        board_bytes = Board.nbytes(num_spans)
        board_range = self._reserve(board_bytes)
        address = self._arena.address(board_range)
        memory = (ctypes.c_char * board_bytes).from_address(address)
        self.board = Board(memoryview(memory).cast("B"), num_spans)
        self.board.clear()
        self._words = address + self.board.ready_offset
        unstaged = [number for number, part in enumerate(parts) if not part.is_staged]
        largest = max((parts[number].nbytes for number in unstaged), default=0)
        self._slots = self._reserve_slots(largest, len(unstaged))
        self._order = _Order(parts, len(self._slots), is_stream=self._is_stream)
        for number, slot in self._order.slots.items():
            taken, part = self._slots[slot], parts[number]
            part.pieces = [(taken.slab, taken.offset, part.nbytes)]
        self.plan = Plan(
            self.plan_id,
            tuple(file.nbytes for file in self.image.files),
            tuple(
                Part(part.file, part.low, tuple(part.pieces), tuple(part.spans), part.sealed)
                for part in parts
            ),
            (board_range.slab, board_range.offset),
        )
        self._transfer.begin()

    @property
    def num_slots(self) -> int:
        """How many parts it holds at once."""
        return len(self._slots)

    @property
    def copying_since_s(self) -> float | None:
        """See `Residence.copying_since_s`."""
        return None if self._transfer.is_empty else self._transfer.began_s

    @property
    def is_complete(self) -> bool:
        """Whether every part was handed on."""
        return self._order.is_complete

    def stage(self) -> list[int]:
        """Stage parts whose slots are free, about a group of them; returns which, sorted."""
        numbers: list[int] = []
        nbytes = 0
        parts = self.image.parts
        with collector_paused():
            while nbytes < _GROUP_BYTES and (number := self._order.take(self.board.is_done)) is not None:
                numbers.append(number)
                slot = self._order.slots.get(number)
                if slot is None:
                    continue
                part = parts[number]
                self._stager.fill(
                    self._items,
                    self.image.files[part.file],
                    part.low,
                    part.high,
                    self._arena.address(self._slots[slot]),
                    (self._transfer, self._transfer),
                    # The lanes need the processor.
                    spread=False,
                )
                nbytes += part.nbytes
            self._stager.await_reads()
            numbers.sort()
            if not numbers:
                return numbers
            if self._transfer.is_empty:
                for number in numbers:
                    self.board.set_ready(number, self.tag)
            else:
                for first, count in _runs(numbers):
                    self._transfer.add_words(self._words + 8 * first, count)
                self._transfer.run(self._sources)
        if self.is_complete:
            self._transfer.end(caller_waits=True)
        return numbers

    def has_arrived(self) -> bool:
        """See `Residence.has_arrived`; here the tensors are held until the end."""
        return self.is_complete

    def check(self) -> None:
        """See `Residence.check`."""
        self._transfer.check()

    def release(self) -> None:
        """Give the memory back; nobody touches it any more."""
        if self._words:
            self.board.release()
            self._words = 0
        self._transfer.forget()
        self._sources.clear()
        ranges, self._ranges = self._ranges, []
        for taken in ranges:
            self._arena.release(taken)

    def abandon(self) -> None:
        """After a failure: give back what neither a copy nor a lane can touch, and let the items go."""
        with contextlib.suppress(Exception):
            self._stager.await_reads()
        if not self._transfer.settle(_ABORT_S):
            self._stager.quarantine(self._ranges)
        elif not self.is_lost:
            self.release()
        for item in self._items:
            # The caller's list of them may live in a traceback.
            item.tensor = None
        self._sources.clear()

    def _reserve(self, nbytes: int) -> Range:
        taken = self._arena.reserve(nbytes, timeout_s=self._timeout_s, on_wait=self._stager.collect)
        self._ranges.append(taken)
        return taken

    def _reserve_slots(self, nbytes: int, num_parts: int) -> list[Range]:
        """Reserve as many slots as keep all lanes busy, or as there is memory for; at least one."""
        if num_parts == 0:
            return []
        wanted = min(num_parts, self._most_slots)
        if wanted * nbytes > _PREPARED_BYTES:
            # Waits below: for slabs that several threads build at once.
            self._arena.prepare(self._arena.reserved_bytes - self._arena.unused_bytes + wanted * nbytes)
        slots = [self._reserve(nbytes)]
        pause, end = threading.Event(), time.monotonic() + self._timeout_s
        while len(slots) < wanted:
            taken = self._arena.try_reserve(nbytes, (wanted - len(slots)) * nbytes)
            if taken is not None:
                self._ranges.append(taken)
                slots.append(taken)
            elif self._arena.is_building and time.monotonic() < end:
                # Not by reserving, which waits until there is room: what is being built may be too small for
                # a slot, and the rest is this save's own.
                pause.wait(_SHORTEST_WAIT_FOR_SLOT_S)
            else:
                break
        return slots


class _Run:
    """The loop of one save: stage, push, wait for the lanes, account."""

    def __init__(
        self,
        engine: Engine,
        storage: Storage,
        save_id: str,
        rank: int,
        image: Image,
        memory: Residence | _Waves,
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
        if isinstance(memory, _Waves):
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
