"""One write lane: takes parts of files from the arena to storage, in the caller's process or in its own.

`LaneWriter` is what a lane does; `main` runs one in a process that was started by exec. What stays the same
from save to save, a `Plan`, is sent once; a `Job` names one save of it. Which part may be written and which
is written stands on the `Board`, in memory that the engine, the GPU and all lanes share. Which part a lane
takes next it reads from pipes that all lanes share: its own first, then those of its neighbours. The few
messages between the two processes are length-prefixed JSON on a socket of their own (a stray print of some
client library goes to stderr); slabs and pipes arrive beside them as file descriptors.

Invariants:
    * Every message about a save carries its id, and a lane has one save at a time.
    * A part is written by the one lane that took its number out of a pipe, and not before its ready word
      holds the tag of the save.
    * A part is done once the storage has accepted all of its bytes and its checksums stand on the board. A
      lane answers "done" once everything that it wrote is durable.
    * A lane creates, resizes and removes no file.
    * The process ends after its parent's death, with the part that it is writing, whatever thread or fork
      still holds the socket or the pipes.

Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import mmap
import os
import select
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import crc32c

from distckpt.errors import ConfigError, WriteError
from distckpt.priority import lower
from distckpt.storage import ImageFile, Receipt, Storage, reopen_storage
from distckpt.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

CHECKSUM_BLOCK_BYTES = 4 << 20
"""Checksums end at every multiple of this in a file, and where an item does."""
SEAL_BYTES = 4
"""Of the checksum that ends a file, if it has one; they lie in one block of checksums."""
ZEROS = -1
STOP = (1).to_bytes(8, "little")
"""What the first bytes of a board are once its save is given up."""
PART_NUMBER = struct.Struct("<I")
"""How the number of a part stands in a pipe: reads of one are atomic, whoever else reads."""
_ZERO_PAGE = mmap.mmap(-1, mmap.PAGESIZE)
_WORD_BYTES = 8
_LENGTH = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 16
MAX_FDS = 8
"""Descriptors beside one message, at most; Linux allows 253 (unix(7), SCM_RIGHTS)."""
_MOST_OPEN = 32
"""Files that a lane keeps open: each has two descriptors, and `ulimit -n` may be 256."""
_CLOSERS = 8
"""Files that a lane makes durable at once: their file systems commit them together."""
_END_S = 4.0
"""A lane that has not ended what it was writing by then is given up."""
_LONGEST_WAIT_S = 0.1
_HUNGRY_WAIT_S = 0.02
"""With room for a part and none to take; so late it hears that a write has failed."""
SHORTEST_PAUSE_S = 0.0002
LONGEST_PAUSE_S = 0.001


class Part(NamedTuple):
    """A stretch of one file that one lane writes.

    Attributes:
        file: Index of the file within its plan.
        offset: Bytes from the start of the file.
        pieces: Where the bytes are, one after the other: (slab, offset in the slab, bytes); slab `ZEROS`
            stands for bytes that are 0.
        spans: Flat list of (start, bytes) within the part, sorted, one for each checksum to take.
        sealed: None, or the parts before it of a file whose last 4 bytes, the last of this part, are the
            CRC32C of all bytes before them, little-endian: the lane fills them in. All of these parts are
            whole blocks of checksums.
    """

    file: int
    offset: int
    pieces: tuple[tuple[int, int, int], ...]
    spans: tuple[int, ...] = ()
    sealed: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that this part writes."""
        return sum(piece[2] for piece in self.pieces)


@dataclass(frozen=True)
class Plan:
    """What stays the same from save to save.

    Attributes:
        plan_id: Number that no other plan of the same engine has.
        files: Final size of each file in bytes.
        parts: What makes up the files; parts of one file need not be neighbours.
        board: Where the board is: (slab, offset in the slab), page-aligned.
    """

    plan_id: int
    files: tuple[int, ...]
    parts: tuple[Part, ...]
    board: tuple[int, int]

    @cached_property
    def num_spans(self) -> tuple[int, ...]:
        """Number of checksums of each part, as `Board` wants it."""
        return tuple(len(part.spans) // 2 for part in self.parts)

    @cached_property
    def num_parts(self) -> list[int]:
        """Number of parts of each file."""
        counts = [0] * len(self.files)
        for part in self.parts:
            counts[part.file] += 1
        return counts

    @cached_property
    def slabs(self) -> frozenset[int]:
        """The slabs that a lane must map."""
        pieces = itertools.chain.from_iterable(part.pieces for part in self.parts)
        return frozenset(piece[0] for piece in pieces) - {ZEROS} | {self.board[0]}


@dataclass(frozen=True)
class Job:
    """One save.

    Attributes:
        save_id: The save.
        plan_id: What it writes.
        storage: Description of the storage, as `Storage.spec`.
        names: Name of each file of the plan; the engine has created them, exclusively.
        tokens: What the storage told of each when it was created.
        tag: What the ready word of a part holds once the part has arrived; not 0, and of this save alone.
        is_traced: Whether lanes note what they do when (`Record`).
    """

    save_id: str
    plan_id: int
    storage: dict[str, str]
    names: tuple[str, ...]
    tokens: tuple[str, ...]
    tag: int
    is_traced: bool = False


class Record(NamedTuple):
    """What a lane has noted of a save; all times are by `time.monotonic()`, one clock for all processes.

    Attributes:
        parts: For each part that it wrote: index, when the lane first asked for it, when it was seen to be
            ready, when the lane began to write it, and when the storage had accepted it.
        syncs: For each time that a file was made durable: index of the file, begin, end.
    """

    parts: list[tuple[int, float, float, float, float]]
    syncs: list[tuple[int, float, float]]


class Board:
    """What engine, GPU and lanes tell each other of one save, in shared memory.

    Layout: a stop flag of 8 bytes, one ready word of 8 bytes for each part, one byte for each part that is
    done (padded to a multiple of 8 in all), 4 bytes for each checksum in the order of the parts. A ready word
    has one writer, the GPU or the engine; a done byte and the checksums of its part have one, the lane that
    took the part.

    Args:
        memory: Bytes of a slab, from the board's start, at least `nbytes(num_spans)`. The board keeps views
            of them until `release`.
        num_spans: Number of checksums of each part.
    """

    ready_offset = _WORD_BYTES
    """Bytes from the board's start to the first ready word."""

    def __init__(self, memory: memoryview, num_spans: Sequence[int]) -> None:
        self._num_parts = len(num_spans)
        self._first_span = [0, *itertools.accumulate(num_spans)]
        ready_end = self.ready_offset + _WORD_BYTES * self._num_parts
        done_end = ready_end + self._num_parts
        checksums = ready_end + _padded(self._num_parts)
        self._words = memory[:ready_end].cast("Q")
        self._done = memory[ready_end:done_end]
        self._flags = memory[:done_end]
        self._checksums = memory[checksums : checksums + PART_NUMBER.size * self._first_span[-1]]

    @staticmethod
    def nbytes(num_spans: Sequence[int]) -> int:
        """Return the bytes that a board for parts with so many checksums each takes."""
        num_parts = len(num_spans)
        ready_end = Board.ready_offset + _WORD_BYTES * num_parts
        return ready_end + _padded(num_parts) + PART_NUMBER.size * sum(num_spans)

    def clear(self) -> None:
        """Begin a save: it goes on, nothing is ready, nothing is done."""
        self._flags[:] = bytes(self._flags.nbytes)

    def set_ready(self, part: int, tag: int) -> None:
        """Say that the bytes of `part` have arrived, where no GPU says so."""
        self._words[1 + part] = tag

    def set_all_ready(self, tag: int) -> None:
        """Say so of every part."""
        self._flags[self.ready_offset : self._words.nbytes] = tag.to_bytes(8, "little") * self._num_parts

    def is_ready(self, part: int, tag: int) -> bool:
        """Say whether the bytes of `part` have arrived in the save whose tag is `tag`."""
        return self._words[1 + part] == tag

    def is_done(self, part: int) -> bool:
        """Say whether the storage has accepted all of `part`; it is not durable yet."""
        return self._done[part] != 0

    def set_done(self, part: int) -> None:
        """Say that the storage has accepted all of `part`, and that its checksums are set."""
        self._done[part] = 1

    def num_done(self) -> int:
        """Return the number of parts that are done."""
        return self._done.tobytes().count(1)

    def stop(self) -> None:
        """Give the save up: no lane takes or waits for another part."""
        self._words[0] = 1

    @property
    def is_stopped(self) -> bool:
        """Whether the save was given up."""
        return self._words[0] != 0

    def set_checksums(self, part: int, packed: bytes) -> None:
        """Set the checksums of `part`, 4 bytes each, little-endian."""
        self._checksums[self._checksum_range(part, part + 1)] = packed

    def checksums(self, first_part: int, end_part: int) -> bytes:
        """Return the checksums of the parts from `first_part` to before `end_part`, as they were set."""
        return self._checksums[self._checksum_range(first_part, end_part)].tobytes()

    def release(self) -> None:
        """Drop the views of the memory; idempotent."""
        for view in (self._words, self._done, self._flags, self._checksums):
            view.release()

    def _checksum_range(self, first_part: int, end_part: int) -> slice:
        first, end = self._first_span[first_part], self._first_span[end_part]
        return slice(PART_NUMBER.size * first, PART_NUMBER.size * end)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _WORD_BYTES) * _WORD_BYTES


def checksum(data: memoryview | bytes | bytearray) -> int:
    """Return the CRC32C (Castagnoli) of `data`."""
    return int(crc32c.crc32c(data))


def block_spans(offset: int, nbytes: int) -> Iterable[tuple[int, int]]:
    """Yield (offset, bytes) of the blocks whose checksums cover an item at `offset` of its file."""
    end = offset + nbytes
    while offset < end:
        stop = min(end, (offset // CHECKSUM_BLOCK_BYTES + 1) * CHECKSUM_BLOCK_BYTES)
        yield offset, stop - offset
        offset = stop


class LaneWriter:
    """Writes parts of one save after the other.

    Args:
        memory: Returns the memory of a slab.
        open_storage: Opens the storage that a job names.
    """

    def __init__(
        self,
        memory: Callable[[int], mmap.mmap],
        open_storage: Callable[[dict[str, str]], Storage] = reopen_storage,
    ) -> None:
        self._memory = memory
        self._open_storage = open_storage
        self.record: Record | None = None
        """Of the save that `finish` has ended last, if it was traced."""
        self._plans: dict[int, Plan] = {}
        self._current: _Current | None = None

    def add_plan(self, plan: Plan) -> None:
        """Learn what a later job may name."""
        self._plans[plan.plan_id] = plan

    def drop_plan(self, plan_id: int) -> None:
        """Forget a plan that no later job will name; one that is not known is no error."""
        self._plans.pop(plan_id, None)

    def begin(self, job: Job) -> None:
        """Write parts of `job` from now on.

        Raises:
            WriteError: The storage cannot be opened here.
        """
        assert self._current is None, "one save at a time"
        plan = self._plans[job.plan_id]
        slab, offset = plan.board
        try:
            storage = self._open_storage(job.storage)
        except ConfigError as error:
            raise WriteError(str(error), errno=errno.EINVAL) from error
        with memoryview(self._memory(slab)) as whole, whole[offset:] as memory:
            board = Board(memory, plan.num_spans)
        self._current = _Current(job, plan, board, storage, self._memory)

    @property
    def is_stopped(self) -> bool:
        """Whether the save was given up by its engine."""
        return self._get().board.is_stopped

    @property
    def is_stream(self) -> bool:
        """Whether a file is written by one lane alone, from its start to its end."""
        return self._get().storage.is_stream

    @property
    def is_writing(self) -> bool:
        """Whether parts that were handed in are not known to be written yet."""
        return bool(self._get().writing)

    def is_ready(self, part_index: int) -> bool:
        """Say whether the bytes of a part have arrived."""
        current = self._get()
        is_ready = current.board.is_ready(part_index, current.job.tag)
        if is_ready and not current.can_seal(part_index):
            # What it waits for may be under way on a thread of this lane, and fail.
            self.wait(0.0)
            is_ready = False
        if current.record is not None:
            current.note_asked(part_index, is_ready)
        return is_ready

    def has_room(self, timeout_s: float = 0.0) -> bool:
        """Say whether another part may be handed in, after a wait for that if need be.

        Args:
            timeout_s: Seconds to wait at most.

        Raises:
            WriteError: See `wait`.
        """
        current = self._get()
        if len(current.writing) == current.storage.in_flight:
            self.wait(timeout_s)
        return len(current.writing) < current.storage.in_flight

    def write(self, part_index: int) -> None:
        """Begin to write a part that is ready; there is room for it.

        Once it is written, its checksums are on the board, and it is done.

        Args:
            part_index: Index of the part within the plan.
        """
        current = self._get()
        current.writing.append(current.threads.submit(current.write, part_index))

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of any part that was handed in.

        Args:
            timeout_s: Seconds to wait at most.

        Raises:
            WriteError: The storage refused one; errno, path and offset are filled.
        """
        writing = self._get().writing
        ended, _ = wait(writing, timeout_s, FIRST_COMPLETED)
        for future in ended:
            writing.remove(future)
            future.result()

    def finish(self, timeout_s: float) -> dict[int, list[Receipt]] | None:
        """Make everything durable that was handed in, and end the save; to be called until it has.

        Args:
            timeout_s: Seconds to wait at most.

        Returns:
            By index of the file, what was told of it (`storage.ImageFile.finish`); None if it goes on.

        Raises:
            WriteError: Something is not durable; the save is then still to be aborted.
        """
        current = self._get()
        if current.finishing is None:
            deadline = time.monotonic() + timeout_s
            while current.writing:
                timeout_s = deadline - time.monotonic()
                if timeout_s <= 0:
                    return None
                self.wait(timeout_s)
            current.finishing = current.threads.submit(current.finish)
        wait([current.finishing], timeout_s)
        if not current.finishing.done():
            return None
        receipts: dict[int, list[Receipt]] = current.finishing.result()
        self.record = current.record
        self.abort(_END_S)
        return receipts

    def abort(self, timeout_s: float) -> bool:
        """End the save as it is; what it wrote stays where it is. Idempotent, never raises.

        Args:
            timeout_s: Seconds to wait for what is being written.

        Returns:
            Whether that has ended: if not, a thread goes on to use its memory and its file.
        """
        current, self._current = self._current, None
        return current is None or current.end(timeout_s)

    def _get(self) -> _Current:
        assert self._current is not None, "no save has begun"
        return self._current


class _Current:
    """One save of a lane; `write` and `finish` run on its threads."""

    def __init__(
        self, job: Job, plan: Plan, board: Board, storage: Storage, memory: Callable[[int], mmap.mmap]
    ) -> None:
        self.job = job
        self.board = board
        self.storage = storage
        self.threads = Threads(storage.in_flight, "distckpt-lane")
        self.writing: list[Future[None]] = []
        self.finishing: Future[dict[int, list[Receipt]]] | None = None
        self.record = Record([], []) if job.is_traced else None
        # By index of the part: when it was first asked for, and when it was first seen to be ready.
        self._asked: dict[int, float] = {}
        self._ready: dict[int, float] = {}
        self._plan = plan
        self._memory = memory
        self._takes_parts = storage.part_bytes(max(plan.files, default=0)) > 0
        self._behind = Threads(1, "distckpt-lane-behind")
        # What makes files durable while others are written; of storages that say nothing, the lane itself.
        self._closers = Threads(_CLOSERS, "distckpt-lane-close")
        self._closes_apart = bool(getattr(storage, "closes_apart", False))
        self._closes_early = self._closes_apart and len(plan.files) > _MOST_OPEN // 2
        self._closing: list[Future[None]] = []
        self._lock = threading.Lock()
        # By index of the file; the one that was written to last is the last.
        self._images: dict[int, ImageFile] = {}
        self._users: dict[int, int] = {}
        self._receipts: dict[int, list[Receipt]] = {}

    def note_asked(self, part_index: int, is_ready: bool) -> None:
        """Note for the record that a part was asked for."""
        now = time.monotonic()
        self._asked.setdefault(part_index, now)
        if is_ready:
            self._ready.setdefault(part_index, now)

    def can_seal(self, part_index: int) -> bool:
        """Say whether all that the seal of a part depends upon is known; of one that has none, True."""
        return all(map(self.board.is_done, self._plan.parts[part_index].sealed or ()))

    def write(self, part_index: int) -> None:
        """Write a part."""
        start_s = time.monotonic()
        part = self._plan.parts[part_index]
        image = self._take_image(part.file)
        try:
            packed = self._write_whole(image, part) if self._takes_parts else self._write_pieces(image, part)
        finally:
            with self._lock:
                self._users[part.file] -= 1
                if self._closes_early and self._plan.num_parts[part.file] == 1:
                    self._close_apart(part.file)
        if self.record is not None:
            asked_s, ready_s = (times.get(part_index, start_s) for times in (self._asked, self._ready))
            self.record.parts.append((part_index, asked_s, ready_s, start_s, time.monotonic()))
        self.board.set_checksums(part_index, packed)
        self.board.set_done(part_index)

    def finish(self) -> dict[int, list[Receipt]]:
        """Make everything durable; returns what was told of each file."""
        with self._lock:
            while self._images:
                file = next(iter(self._images))
                if self._closes_apart:
                    self._close_apart(file)
                else:
                    self._finish_image(file)
        for closing in self._closing:
            closing.result()
        return self._receipts

    def end(self, timeout_s: float) -> bool:
        """Let go of everything; returns whether the threads have ended."""
        for image in list(self._images.values()):
            image.cancel()
        has_ended = (
            self.threads.close(timeout_s) and self._behind.close(timeout_s) and self._closers.close(timeout_s)
        )
        # Errors remember frames, and those the memory behind the buffers.
        self.writing.clear()
        self._closing.clear()
        self.finishing = None
        if has_ended:
            for image in self._images.values():
                image.close()
            self._images.clear()
            self.board.release()
        return has_ended

    def _take_image(self, file: int) -> ImageFile:
        with self._lock:
            image = self._images.pop(file, None)
            if image is None:
                idle = [number for number in self._images if not self._users[number]]
                for number in idle[: max(0, 1 + len(self._images) - _MOST_OPEN)]:
                    self._finish_image(number)
                # Not more files open, being closed, than there may be.
                while len(self._closing) > _MOST_OPEN // 2:
                    self._closing.pop(0).result()
                image = self.storage.open_image(self.job.names[file], self.job.tokens[file])
            self._images[file] = image
            self._users[file] = self._users.get(file, 0) + 1
            return image

    def _close_apart(self, file: int) -> None:
        image = self._images.pop(file)
        self._closing.append(self._closers.submit(self._finish, file, image))

    def _finish_image(self, file: int) -> None:
        self._finish(file, self._images[file])
        del self._images[file]

    def _finish(self, file: int, image: ImageFile) -> None:
        start_s = time.monotonic()
        receipts = image.finish()
        if self.record is not None:
            self.record.syncs.append((file, start_s, time.monotonic()))
        self._receipts.setdefault(file, []).extend(receipts)

    def _write_whole(self, image: ImageFile, part: Part) -> bytes:
        """Write a part in one call, once all of its checksums are known."""
        checksums = Checksums(part.spans, of_all=bool(part.spans))
        seal = self._begin_seal(part)
        with contextlib.ExitStack() as views:
            buffers = []
            left = part.nbytes
            for slab, slab_offset, nbytes in itertools.chain.from_iterable(_blocks(part)):
                buffers.append(self._view(views, slab, slab_offset, nbytes))
                left -= nbytes
                if seal is not None:
                    seal.update(buffers[-1], is_last=left == 0)
                checksums.update(buffers[-1])
            image.write(part.offset, buffers, checksums.of_all)
        return checksums.packed()

    def _begin_seal(self, part: Part) -> _Seal | None:
        if part.sealed is None:
            return None
        before = 0
        for earlier in part.sealed:
            for (of_block,) in struct.iter_unpack("<I", self.board.checksums(earlier, earlier + 1)):
                before = _followed_by_block(before, of_block)
        return _Seal(before)

    def _write_pieces(self, image: ImageFile, part: Part) -> bytes:
        """Write a part block by block, each while the checksums of the next are taken."""
        checksums = Checksums(part.spans)
        seal = self._begin_seal(part)
        offset, end = part.offset, part.offset + part.nbytes
        # A traceback that somebody holds must not hold the memory behind the buffers.
        with contextlib.ExitStack() as waiting:
            writing: Future[None] | None = None
            for block in _blocks(part):
                views = contextlib.ExitStack()
                waiting.callback(views.close)
                buffers = []
                block_end = offset + sum(piece[2] for piece in block)
                for number, (slab, slab_offset, nbytes) in enumerate(block, 1):
                    buffers.append(self._view(views, slab, slab_offset, nbytes))
                    if seal is not None:
                        seal.update(buffers[-1], is_last=block_end == end and number == len(block))
                    checksums.update(buffers[-1])
                if writing is not None:
                    writing.result()
                    writing = None
                if part.spans and part.nbytes > CHECKSUM_BLOCK_BYTES:
                    writing = self._behind.submit(image.write, offset, buffers)
                    # Before the views are closed, whatever happens.
                    waiting.callback(wait, [writing])
                else:
                    image.write(offset, buffers)
                offset = block_end
            if writing is not None:
                writing.result()
        return checksums.packed()

    def _view(self, views: contextlib.ExitStack, slab: int, slab_offset: int, nbytes: int) -> memoryview:
        whole = views.enter_context(memoryview(_ZERO_PAGE if slab == ZEROS else self._memory(slab)))
        return views.enter_context(whole[slab_offset : slab_offset + nbytes])


def _blocks(part: Part) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the pieces of `part` cut at every multiple of a checksum block in the file, block by block."""
    position = part.offset
    block: list[tuple[int, int, int]] = []
    for slab, slab_offset, nbytes in part.pieces:
        done = 0
        while done < nbytes:
            size = min(nbytes - done, CHECKSUM_BLOCK_BYTES - position % CHECKSUM_BLOCK_BYTES)
            if slab == ZEROS:
                size = min(size, mmap.PAGESIZE)
                block.append((ZEROS, 0, size))
            else:
                block.append((slab, slab_offset + done, size))
            done += size
            position += size
            if position % CHECKSUM_BLOCK_BYTES == 0:
                yield block
                block = []
    # A file without a byte is opened all the same, and so becomes durable.
    if block:
        yield block


@cache
def _effect_of_block() -> tuple[int, ...]:
    """Return what each bit of a CRC32C becomes, by itself, once a whole block follows."""
    zeros = bytes(CHECKSUM_BLOCK_BYTES)
    of_none = crc32c.crc32c(zeros, 0)
    return tuple(int(crc32c.crc32c(zeros, 1 << bit) ^ of_none) for bit in range(32))


def _followed_by_block(crc: int, of_block: int) -> int:
    """Return the CRC32C of bytes of which the last are a whole block, from that of those before and its own.

    For bytes of one length, `crc32c(bytes, crc) ^ crc32c(bytes, 0)` is linear in `crc` and depends on nothing
    else: a CRC is a remainder of polynomials over GF(2).
    """
    for bit, effect in enumerate(_effect_of_block()):
        if crc >> bit & 1:
            of_block ^= effect
    return of_block


class Checksums:
    """Checksums of spans of a part, taken while its bytes pass by; a span may lie across several buffers.

    Args:
        spans: As `Part.spans`.
        of_all: Whether to take one of all bytes, too.
    """

    def __init__(self, spans: tuple[int, ...], *, of_all: bool = False) -> None:
        self.of_all = 0 if of_all else None
        """The checksum of all bytes so far."""
        self._spans = spans
        self._at = 0
        self._position = 0
        self._value = 0
        self._values: list[int] = []

    def update(self, view: memoryview) -> None:
        """Take the next bytes of the part."""
        start, end = self._position, self._position + view.nbytes
        first = len(self._values)
        whole_block = self._spans[self._at : self._at + 2] == (start, CHECKSUM_BLOCK_BYTES) and (
            view.nbytes == CHECKSUM_BLOCK_BYTES
        )
        while self._at < len(self._spans):
            low = self._spans[self._at]
            high = low + self._spans[self._at + 1]
            if low >= end:
                break
            with view[max(low, start) - start : min(high, end) - start] as seen:
                self._value = int(crc32c.crc32c(seen, self._value))
            if high > end:
                break
            self._values.append(self._value)
            self._value = 0
            self._at += 2
        self._position = end
        if self.of_all is not None:
            self.of_all = (
                _followed_by_block(self.of_all, self._values[first])
                if whole_block
                else int(crc32c.crc32c(view, self.of_all))
            )

    def packed(self) -> bytes:
        """Return all checksums, 4 bytes each, little-endian."""
        assert self._at == len(self._spans), "the part ends before its last span"
        return struct.pack(f"<{len(self._values)}I", *self._values)


class _Seal:
    """The checksum that ends a file, of all that is before it.

    Args:
        before: CRC32C of the parts before this one.
    """

    def __init__(self, before: int) -> None:
        self._value = before

    def update(self, view: memoryview, *, is_last: bool) -> None:
        """Take the next bytes of the part; the last 4 of the last ones are set."""
        if not is_last:
            self._value = int(crc32c.crc32c(view, self._value))
            return
        with view[:-SEAL_BYTES] as data:
            self._value = int(crc32c.crc32c(data, self._value))
        view[-SEAL_BYTES:] = self._value.to_bytes(SEAL_BYTES, "little")


def describe(error: WriteError) -> dict[str, Any]:
    """Return, as plain JSON values, what `WriteError` needs to be built anew."""
    return {"message": str(error), "errno": error.errno, "path": error.path, "offset": error.offset}


def encode(kind: str, body: object = None, save_id: str = "") -> bytes:
    """Return a message as `Channel.send` takes it, to be sent to any number of processes.

    Args:
        kind: What it is about.
        body: Plain JSON values.
        save_id: The save that it belongs to, if it does.
    """
    data = json.dumps({"kind": kind, "save_id": save_id, "body": body}, separators=(",", ":")).encode()
    return _LENGTH.pack(len(data)) + data


class Channel:
    """JSON messages, with file descriptors beside them, over a Unix stream socket.

    Args:
        sock: One end of a socket pair.
        peer_pidfd: Process descriptor of who holds the other end.
    """

    def __init__(self, sock: socket.socket, peer_pidfd: int) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.messages: list[dict[str, Any]] = []
        """What arrived while a message was being sent, for the next `receive`."""
        self._peer_pidfd = peer_pidfd
        self._buffer = bytearray()
        self._fds: list[int] = []
        self._closed = False

    def send(self, message: bytes, fds: Sequence[int] = (), timeout_s: float | None = None) -> None:
        """Send one message.

        What arrives meanwhile is read and kept: with both sockets full, each end would wait for the other.

        Args:
            message: What `encode` returned.
            fds: Descriptors, duplicated into the other process; at most `MAX_FDS`.
            timeout_s: Seconds that the other end may take to read any of it; None: as long as it lives.
        """
        data = memoryview(message)
        while data:
            try:
                sent = socket.send_fds(self.socket, [data], fds) if fds else self.socket.send(data)
            except BlockingIOError:
                self._wait_for_room(timeout_s)
                continue
            data, fds = data[sent:], ()

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the messages that have arrived, and whether the other end has closed; does not block."""
        self._read()
        messages, self.messages = self.messages, []
        return messages, self._closed

    def _wait_for_room(self, timeout_s: float | None) -> None:
        poller = select.poll()
        poller.register(self._peer_pidfd, select.POLLIN)
        poller.register(self.socket, select.POLLOUT if self._closed else select.POLLOUT | select.POLLIN)
        ready = dict(poller.poll(None if timeout_s is None else timeout_s * 1000))
        if not ready:
            raise TimeoutError(f"not read within {timeout_s} s")
        if self._peer_pidfd in ready:
            raise BrokenPipeError(errno.EPIPE, "the process at the other end has ended")
        if ready.get(self.socket.fileno(), 0) & select.POLLIN:
            self._read()

    def _read(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, _RECEIVE_BYTES, MAX_FDS)
        except BlockingIOError:
            return
        self._closed = not data
        self._fds.extend(fds)
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            self.messages.append(json.loads(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]

    def take_fd(self) -> int:
        """Return the next file descriptor that arrived beside a message."""
        return self._fds.pop(0)


def plan_message(plan: Plan) -> bytes:
    """Return the message that hands `plan` to a worker."""
    # Not dataclasses.asdict, which copies every number of a long list.
    return encode("plan", [plan.plan_id, plan.files, plan.parts, plan.board])


def plan_from(body: Sequence[Any]) -> Plan:
    """Rebuild a plan from the body of its message."""
    plan_id, files, rows, (slab, offset) = body
    parts = tuple(
        Part(
            file,
            start,
            tuple((index, at, nbytes) for index, at, nbytes in pieces),
            tuple(spans),
            None if sealed is None else tuple(sealed),
        )
        for file, start, pieces, spans, sealed in rows
    )
    return Plan(plan_id, tuple(files), parts, (slab, offset))


def job_message(job: Job) -> bytes:
    """Return the message that begins `job`."""
    return encode("begin", vars(job), job.save_id)


def job_from(body: dict[str, Any]) -> Job:
    """Rebuild a job from the body of its message."""
    return Job(**{**body, "names": tuple(body["names"]), "tokens": tuple(body["tokens"])})


class _Slabs:
    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}

    def add(self, index: int, fd: int, nbytes: int) -> None:
        try:
            # Writable for the board's sake.
            self._mappings[index] = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)

    def drop(self, index: int) -> None:
        mapping = self._mappings.pop(index, None)
        if mapping is not None:
            mapping.close()

    def memory(self, index: int) -> mmap.mmap:
        return self._mappings[index]


class _Server:
    """The loop of a worker process: obeys messages, and while a save is on takes parts out of the pipes."""

    def __init__(self, channel: Channel, parent_pidfd: int) -> None:
        self._channel = channel
        self._parent_pidfd = parent_pidfd
        self._slabs = _Slabs()
        self._writer = LaneWriter(self._slabs.memory)
        self._lane = 0
        self._queues: list[int] = []
        self._save_id: str | None = None
        self._is_last = False
        # Taken, and not ready yet. Besides a part of a neighbour one of its own is taken: whatever order of
        # staging a part waits for, the lane that owns the earliest one then always gets at it.
        self._own: int | None = None
        self._stolen: int | None = None
        self._is_hungry = False
        """Whether another part may come at any time, which it would take at once."""
        self._pause_s = SHORTEST_PAUSE_S
        self._pause = threading.Event()
        self._without_queues = select.poll()
        self._with_own_queue = select.poll()
        self._with_queues = select.poll()
        for poller in (self._without_queues, self._with_own_queue, self._with_queues):
            poller.register(channel.socket, select.POLLIN)
            poller.register(parent_pidfd, select.POLLIN)

    def run(self) -> None:
        """Serve until the parent closes the socket or dies."""
        while self._obey(self._advance()):
            pass

    def _advance(self) -> float | None:
        """Do one thing for the save; returns the seconds to wait before the next, None: for a message.

        When it is hungry, a part or a message ends the wait.
        """
        self._is_hungry = False
        if self._save_id is None:
            return None
        if self._writer.is_stopped:
            self._end()
            return None
        try:
            if not self._writer.has_room(_LONGEST_WAIT_S):
                return 0.0
            part = self._take_ready()
            if part is not None:
                self._writer.write(part)
                self._pause_s = SHORTEST_PAUSE_S
                return 0.0
            if self._own is not None or self._stolen is not None:
                pause_s = self._pause_s
                self._pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                return pause_s
            if self._is_last:
                receipts = self._writer.finish(_LONGEST_WAIT_S)
                if receipts is None:
                    return 0.0
                body = {"receipts": list(receipts.items()), "record": self._writer.record}
                self._channel.send(encode("done", body, self._save_id))
                self._end()
            elif self._writer.is_writing:
                self._writer.wait(0.0)
                self._is_hungry = True
                return _HUNGRY_WAIT_S
        except WriteError as error:
            self._fail(error)
        return None

    def _fail(self, error: WriteError) -> None:
        assert self._save_id is not None
        self._channel.send(encode("error", describe(error), self._save_id))
        self._end()

    def _take_ready(self) -> int | None:
        if self._own is None:
            self._own = self._take(0, 1)
        if self._own is None and self._stolen is None and not self._writer.is_stream:
            self._stolen = self._take(1, len(self._queues))
        part = self._own
        if part is not None and self._writer.is_ready(part):
            self._own = None
            return part
        part = self._stolen
        if part is not None and self._writer.is_ready(part):
            self._stolen = None
            return part
        return None

    def _take(self, first: int, end: int) -> int | None:
        for at in range(first, end):
            queue = self._queues[(self._lane + at) % len(self._queues)]
            # Empty, or closed by a parent that ends.
            with contextlib.suppress(BlockingIOError):
                data = os.read(queue, PART_NUMBER.size)
                if data:
                    return int(PART_NUMBER.unpack(data)[0])
        return None

    def _obey(self, wait_s: float | None) -> bool:
        """Wait, and do what messages say; returns whether to go on."""
        if wait_s and not self._is_hungry:
            # A poll takes whole milliseconds.
            self._pause.wait(wait_s)
        waits = (wait_s is None or self._is_hungry) and not self._channel.messages
        poller = self._without_queues
        if waits and self._save_id is not None:
            # Not for what it would leave where it is: the poll would return at once, again and again.
            poller = self._with_own_queue if self._writer.is_stream else self._with_queues
        limit_ms = 0 if not waits else None if wait_s is None else 1000 * wait_s
        if any(fd == self._parent_pidfd for fd, _ in poller.poll(limit_ms)):
            return False
        messages, closed = self._channel.receive()
        for message in messages:
            self._handle(message["kind"], message["save_id"], message["body"])
        return not closed

    def _handle(self, kind: str, save_id: str, body: Any) -> None:
        if kind == "slab":
            self._slabs.add(body["index"], self._channel.take_fd(), body["nbytes"])
        elif kind == "drop_slab":
            self._slabs.drop(body)
        elif kind == "plan":
            self._writer.add_plan(plan_from(body))
        elif kind == "drop_plan":
            self._writer.drop_plan(body)
        elif kind == "queues":
            self._add_queues(body["lane"], body["num_fds"])
        elif kind == "begin":
            self._save_id, self._is_last = save_id, False
            try:
                self._writer.begin(job_from(body))
            except WriteError as error:
                self._fail(error)
        elif kind == "finish" and save_id == self._save_id:
            self._is_last = True
        elif kind == "abort":
            if save_id == self._save_id:
                self._end()
            self._channel.send(encode("aborted", None, save_id))

    def _add_queues(self, lane: int, num_fds: int) -> None:
        self._lane = lane
        for _ in range(num_fds):
            queue = self._channel.take_fd()
            if len(self._queues) == lane:
                self._with_own_queue.register(queue, select.POLLIN)
            self._queues.append(queue)
            self._with_queues.register(queue, select.POLLIN)

    def _end(self) -> None:
        if not self._writer.abort(_END_S):
            # A call that does not return: only the end of the process takes the memory from it.
            os._exit(1)
        self._save_id = self._own = self._stolen = None


def _serve(sock: socket.socket, parent_pidfd: int, cores: Sequence[int]) -> None:
    channel = Channel(sock, parent_pidfd)
    try:
        lower(cores)
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "?")
        reason = WriteError(
            f"cannot run on cores {list(cores)} (--ckpt-worker-cores): {error.strerror} [{code}]",
            errno=error.errno,
        )
        channel.send(encode("refused", describe(reason)))
        return
    _Server(channel, parent_pidfd).run()


def main(socket_fd: int, parent_pid: int, cores: Sequence[int] = ()) -> NoReturn:
    """Serve one lane until the parent closes the socket or dies.

    Args:
        socket_fd: The worker's end of the socket pair, inherited.
        parent_pid: Process id of the engine.
        cores: Cores to run on; none: those that were inherited.
    """
    # Ctrl-C and a scheduler's SIGTERM reach the whole job: whether the save still finishes is the trainer's
    # decision, and this process ends with it in any case.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    status = 1
    try:
        parent_pidfd = os.pidfd_open(parent_pid)
        # The pid may have died and been given to another process before the descriptor was opened.
        if os.getppid() == parent_pid:
            with socket.socket(fileno=socket_fd) as sock:
                _serve(sock, parent_pidfd, cores)
            status = 0
    except (BrokenPipeError, ConnectionResetError):
        status = 0
    except Exception:  # noqa: BLE001 - the top frame of a process: forward it to where a person reads it
        traceback.print_exc()
    os._exit(status)
