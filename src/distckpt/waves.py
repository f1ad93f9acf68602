"""Slots of host memory that the parts of one save pass through, where its whole image has no room.

    part -> a slot that is free -> staged -> with a lane -> written: the slot is free

Invariants:
    * A slot is filled again only after its part was written.
    * Any state passes through any budget that holds one part.

Threads: the one that runs the save.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from distckpt.collector import collector_paused
from distckpt.device import Transfer
from distckpt.worker import Board, Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from distckpt.arena import Arena, Range
    from distckpt.image import Image, ImagePart
    from distckpt.staging import Item, Stager
    from distckpt.storage import Storage

SLOTS_PER_LANE = 4
_GROUP_BYTES = 128 << 20
"""Parts of about this size together are staged before lanes are told."""
_PREPARED_BYTES = 128 << 20
"""Less than this is not worth threads that build it."""
_POLL_S = 0.001


class Waves:
    """Slots of host memory that the parts of one save pass through.

    Args:
        arena: Where they get their memory.
        stager: Fills them.
        image: What passes through.
        items: Its items.
        storage: Where the parts go.
        plan_id: For the lanes.
        num_lanes: How many take parts at the same time.
        timeout_s: Seconds that the wait for memory may take.
    """

    def __init__(
        self,
        arena: Arena,
        stager: Stager,
        image: Image,
        items: Sequence[Item],
        storage: Storage,
        *,
        plan_id: int,
        num_lanes: int,
        timeout_s: float,
    ) -> None:
        self.image = image
        self.plan_id = plan_id
        self.is_known_to_lanes = False
        self.is_lost = False
        self.tag = 1
        self.arrived_s = None
        """See `Residence.arrived_s`; not known here."""
        self.plan: Plan
        self.board: Board
        self._arena = arena
        self._stager = stager
        self._timeout_s = timeout_s
        # While some are written, as many others are filled.
        self._most_slots = max(SLOTS_PER_LANE, 2 * storage.in_flight) * num_lanes
        self._is_stream = storage.is_stream
        self._items = items
        self._sources = [
            item.tensor if item.home is None and item.tensor is not None and item.tensor.is_cuda else None
            for item in items
        ]
        self._transfer = Transfer(stager.devices)
        self._ranges: list[Range] = []
        self._slots: list[Range] = []
        self._order: Order
        self._words = 0

    def open(self) -> None:
        """Reserve the slots, and say which part passes through which."""
        devices = {source.device for source in self._sources if source is not None}
        self._stager.use_devices(devices)
        parts = self.image.parts
        board_bytes = Board.nbytes(self.image.num_spans)
        board_range = self._reserve(board_bytes)
        address = self._arena.address(board_range)
        memory = (ctypes.c_char * board_bytes).from_address(address)
        self.board = Board(memoryview(memory).cast("B"), self.image.num_spans)
        self.board.clear()
        self._words = address + self.board.ready_offset
        unstaged = [number for number, part in enumerate(parts) if not part.is_staged]
        largest = max((parts[number].nbytes for number in unstaged), default=0)
        self._slots = self._reserve_slots(largest, len(unstaged))
        self._order = Order(parts, len(self._slots), is_stream=self._is_stream)
        for number, slot in self._order.slots.items():
            taken, part = self._slots[slot], parts[number]
            part.pieces = [(taken.slab, taken.offset, part.nbytes)]
        self.plan = self.image.plan(self.plan_id, (board_range.slab, board_range.offset))
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
        if not self._transfer.settle():
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
                pause.wait(_POLL_S)
            else:
                break
        return slots


class Order:
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


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield first and count of each run of consecutive numbers; `numbers` are sorted."""
    for _, run in itertools.groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        members = [number for _, number in run]
        yield members[0], len(members)
