"""The image of one rank, whole, in host memory: staged in one go, again and again, and written meanwhile.

    items -> built once, extent by extent -> staged again by captured copies

What a guard protects may be copied after `stage` has returned. What of that nobody counts the changes of is
digested on its device before and after the copies.

Invariants:
    * What a copy may still write to is never given back: a residence whose copies do not end is lost.
    * Between two stagings no tensor is held, once everything has arrived.

Threads: one stages; another, which lets it be written, asks whether all has arrived and what has changed.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from distckpt.arena import EXTENT_BYTES, PAGE_BYTES, Arena, Range, align
from distckpt.collector import collector_paused
from distckpt.device import DIGEST_WORDS, Transfer, host_view, refuse_capture
from distckpt.staging import HostCopy, Item, Stager
from distckpt.worker import Board, Plan

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from distckpt.image import Image, ImagePart

DIGEST_BYTES = 8 * DIGEST_WORDS
_GROUP_BYTES = 1 << 30
"""Parts of about this size together have one word: it costs the copy engine about 70 microseconds."""


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
        self._digests: torch.Tensor | None = None
        """Those before and those after the copies, in shared memory: a row of words for each."""

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
        # Megabytes, in every save: not in Python, whose lock the trainer wants.
        if self._digests is None or torch.equal(self._digests[0], self._digests[1]):
            return []
        differ = (self._digests[0] != self._digests[1]).any(dim=1)
        return [self.digested[at] for at in differ.nonzero().flatten().tolist()]

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
        self._digests = None
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
        if not (self._early.settle() and self._main.settle()):
            self.is_lost = True
            self._stager.quarantine(self._ranges)
        self._keep = ()

    def _build(self, items: Sequence[Item], sources: Sequence[torch.Tensor | None]) -> None:
        """Reserve, lay out and copy: part by part, as the memory is there."""
        devices = {source.device for source in sources if source is not None}
        self._stager.use_devices(devices)
        parts = self.image.parts
        total = sum(align(part.nbytes, PAGE_BYTES) for part in parts)
        board_bytes = align(Board.nbytes(self.image.num_spans), 8)
        digest_bytes = DIGEST_BYTES * len(self.digested)
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
        self._board = Board(memoryview(memory).cast("B"), self.image.num_spans)
        self._board.clear()
        words = board_address + self._board.ready_offset
        transfers = (self._early, self._main) if self.late else (self._main, self._main)
        digests = board_address + board_bytes
        if self.digested:
            both = host_view(digests, 2 * digest_bytes).view(torch.int64)
            self._digests = both.view(2, -1, DIGEST_WORDS)
            self._add_digests(self._early, sources, digests)
        self._main.begin()
        first = number = filled_bytes = 0
        while number < len(parts):
            filled = self._fill_extent(items, number, transfers)
            number += len(filled)
            filled_bytes += sum(part.nbytes for part in filled)
            if filled_bytes >= _GROUP_BYTES or number == len(parts):
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
        self.plan = self.image.plan(self.plan_id, (board_range.slab, board_range.offset))

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


def late_copies(items: Sequence[Item], late: Collection[int]) -> frozenset[int]:
    """Return which of the items that may be copied late are."""
    devices = {item.tensor.device for item in items if item.tensor is not None and item.tensor.is_cuda}
    # The words that come last tell of one device; on several, none is copied late.
    if len(devices) != 1:
        return frozenset()
    on_device = ((index, items[index].tensor, items[index].nbytes) for index in late)
    return frozenset(
        index for index, tensor, nbytes in on_device if nbytes and tensor is not None and tensor.is_cuda
    )
