"""One write lane: takes ranges of the arena to storage, in the caller's process or in one of its own.

`LaneWriter` is what a lane does; `main` runs one in a process that was started by exec. Messages between the
two processes are length-prefixed JSON on a socket of their own (a stray print of some client library goes to
stderr); slabs arrive beside them as file descriptors.

Invariants:
    * Every message carries the id of the save that it belongs to.
    * A file is acknowledged as done only after its bytes are durable and its size was checked.
    * The process ends after its parent's death, with the tasks that it has already taken, whatever thread or
      fork still holds the socket.

Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import select
import signal
import socket
import struct
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import crc32c

from distckpt.errors import WriteError
from distckpt.storage import ImageFile, Storage, reopen_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CHECKSUM_BLOCK_BYTES = 4 << 20
"""Checksums end at every multiple of this in a file, and where an item does."""
ZEROS = -1
_ZERO_BYTES = bytes(4096)
_LENGTH = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 16
_MAX_FDS = 8


@dataclass(frozen=True)
class Task:
    """Bytes of one file for one lane to write.

    Attributes:
        save_id: The save that this belongs to.
        sequence: Number of the task within its engine, given back in the acknowledgement.
        storage: Description of the storage, as `Storage.spec`.
        names: Names for the file, in order of preference; the first that is free is taken.
        offset: Bytes from the start of the file.
        pieces: Where the bytes are, one after the other: (slab, offset in the slab, bytes); slab `ZEROS`
            stands for bytes that are 0.
        spans: Flat list of (start, bytes) within this task, sorted, one for each checksum to take.
        file_nbytes: Size of the whole file with its last task, which makes it durable; None before.
    """

    save_id: str
    sequence: int
    storage: dict[str, str]
    names: tuple[str, ...]
    offset: int
    pieces: tuple[tuple[int, int, int], ...]
    spans: tuple[int, ...] = ()
    file_nbytes: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that this task writes."""
        return sum(piece[2] for piece in self.pieces)


@dataclass(frozen=True)
class Ack:
    """What became of a task, or of the order to abort a save (`sequence` is then -1).

    Attributes:
        save_id: The save of the task.
        sequence: The task's number.
        name: Name under which the file was created.
        checksums: CRC32C of each span.
        error: None, or what `WriteError` needs: message, errno, path, offset.
    """

    save_id: str
    sequence: int
    name: str = ""
    checksums: tuple[int, ...] = ()
    error: dict[str, Any] | None = field(default=None)


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
    """Writes the tasks of one lane, in order.

    Args:
        memory: Returns the memory of a slab.
        open_storage: Opens the storage that a task names.
    """

    def __init__(
        self,
        memory: Callable[[int], mmap.mmap],
        open_storage: Callable[[dict[str, str]], Storage] = reopen_storage,
    ) -> None:
        self._memory = memory
        self._open_storage = open_storage
        self._images: dict[tuple[str, str], ImageFile] = {}
        self._aborted = ""

    def write(self, task: Task) -> Ack:
        """Write `task`; a failure is in the acknowledgement, and the save's files are given up."""
        if task.save_id == self._aborted:
            # What was queued behind a failure must not begin the file anew.
            late = WriteError("the save was given up", errno=errno.ECANCELED)
            return Ack(task.save_id, task.sequence, task.names[0], (), _describe(late))
        key = (task.save_id, task.names[-1])
        try:
            # Those of earlier saves that are finished are kept until here, for `abort`.
            self._images = {k: image for k, image in self._images.items() if k[0] == task.save_id}
            image = self._images.get(key)
            if image is None:
                image = self._open_storage(task.storage).create_image(task.names)
                self._images[key] = image
            checksums = self._write_pieces(image, task)
            if task.file_nbytes is not None:
                image.finish(task.file_nbytes)
        except WriteError as error:
            self.abort(task.save_id)
            return Ack(task.save_id, task.sequence, task.names[0], (), _describe(error))
        return Ack(task.save_id, task.sequence, image.name, checksums)

    def abort(self, save_id: str) -> Ack:
        """Give up every file of `save_id`, finished or not; nothing more is written for it."""
        self._aborted = save_id
        for key in [key for key in self._images if key[0] == save_id]:
            self._images.pop(key).abort()
        return Ack(save_id, -1)

    def _write_pieces(self, image: ImageFile, task: Task) -> tuple[int, ...]:
        checksums: list[int] = []
        spans, at, start = task.spans, 0, 0
        buffers: list[memoryview] = []
        offset, waiting = task.offset, 0
        with contextlib.ExitStack() as views:
            for slab, slab_offset, nbytes in task.pieces:
                whole = memoryview(_ZERO_BYTES if slab == ZEROS else self._memory(slab))
                view = views.enter_context(views.enter_context(whole)[slab_offset : slab_offset + nbytes])
                # A span never crosses a piece: items are contiguous in the arena, and so are ranges.
                while at < len(spans) and spans[at] < start + nbytes:
                    low = spans[at] - start
                    checksums.append(checksum(view[low : low + spans[at + 1]]))
                    at += 2
                buffers.append(view)
                start += nbytes
                waiting += nbytes
                # Written while the checksum has left the bytes in the processor's cache, as far as it can.
                if waiting >= CHECKSUM_BLOCK_BYTES:
                    image.write(offset, buffers)
                    offset, waiting = offset + waiting, 0
                    buffers = []
            if buffers:
                image.write(offset, buffers)
            buffers.clear()
        return tuple(checksums)


def _describe(error: WriteError) -> dict[str, Any]:
    return {"message": str(error), "errno": error.errno, "path": error.path, "offset": error.offset}


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

    def send(
        self, message: dict[str, Any], fds: tuple[int, ...] = (), timeout_s: float | None = None
    ) -> None:
        """Send one message.

        What arrives meanwhile is read and kept: with both sockets full, each end would wait for the other.

        Args:
            message: Plain JSON values.
            fds: Descriptors, duplicated into the other process.
            timeout_s: Seconds that the other end may take to read any of it; None: as long as it lives.
        """
        body = json.dumps(message).encode()
        data = memoryview(_LENGTH.pack(len(body)) + body)
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
            data, fds, _, _ = socket.recv_fds(self.socket, _RECEIVE_BYTES, _MAX_FDS)
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


def to_message(value: Task | Ack) -> dict[str, Any]:
    """Return `value` as plain JSON values."""
    # Not dataclasses.asdict, which copies every number of a long list.
    return vars(value).copy()


def task_from(message: dict[str, Any]) -> Task:
    """Rebuild a task from its message."""
    names, spans = tuple(message["names"]), tuple(message["spans"])
    pieces = tuple((slab, offset, nbytes) for slab, offset, nbytes in message["pieces"])
    return Task(**{**message, "names": names, "spans": spans, "pieces": pieces})


def ack_from(message: dict[str, Any]) -> Ack:
    """Rebuild an acknowledgement from its message."""
    return Ack(**{**message, "checksums": tuple(message["checksums"])})


class _Slabs:
    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}

    def add(self, index: int, fd: int, nbytes: int) -> None:
        try:
            self._mappings[index] = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)

    def drop(self, index: int) -> None:
        mapping = self._mappings.pop(index, None)
        if mapping is not None:
            mapping.close()

    def memory(self, index: int) -> mmap.mmap:
        return self._mappings[index]


def _serve(channel: Channel, parent_pidfd: int) -> None:
    slabs = _Slabs()
    writer = LaneWriter(slabs.memory)
    poller = select.poll()
    poller.register(channel.socket, select.POLLIN)
    poller.register(parent_pidfd, select.POLLIN)
    while True:
        if any(fd == parent_pidfd for fd, _ in poller.poll(0 if channel.messages else None)):
            return
        messages, closed = channel.receive()
        for message in messages:
            kind, body = message["kind"], message["body"]
            if kind == "slab":
                slabs.add(body["index"], channel.take_fd(), body["nbytes"])
            elif kind == "drop":
                slabs.drop(body["index"])
            elif kind == "write":
                channel.send({"kind": "ack", "body": to_message(writer.write(task_from(body)))})
            elif kind == "abort":
                channel.send({"kind": "ack", "body": to_message(writer.abort(body["save_id"]))})
        if closed:
            return


def main(socket_fd: int, parent_pid: int) -> NoReturn:
    """Serve one lane until the parent closes the socket or dies.

    Args:
        socket_fd: The worker's end of the socket pair, inherited.
        parent_pid: Process id of the engine.
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
                _serve(Channel(sock, parent_pidfd), parent_pidfd)
            status = 0
    except (BrokenPipeError, ConnectionResetError):
        status = 0
    except Exception:  # noqa: BLE001 - the top frame of a process: forward it to where a person reads it
        traceback.print_exc()
    os._exit(status)
