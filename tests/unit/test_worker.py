"""One lane: messages between processes, and what it does with its tasks."""

from __future__ import annotations

import errno
import itertools
import json
import mmap
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distckpt.errors import WriteError
from distckpt.storage import Receipt, open_storage
from distckpt.worker import (
    CHECKSUM_BLOCK_BYTES,
    MAX_FDS,
    STOP,
    ZEROS,
    Board,
    Channel,
    Checksums,
    Job,
    LaneWriter,
    Part,
    Plan,
    block_spans,
    checksum,
    encode,
    job_from,
    job_message,
    plan_from,
    plan_message,
)


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    """Both ends, in this process."""
    pidfd = os.pidfd_open(os.getpid())
    ours, theirs = socket.socketpair()
    yield Channel(ours, pidfd), Channel(theirs, pidfd)
    ours.close()
    theirs.close()
    os.close(pidfd)


def receive(channel: Channel, count: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    deadline = time.monotonic() + 10
    while len(messages) < count:
        assert time.monotonic() < deadline
        found, closed = channel.receive()
        messages += found
        assert not closed
    return messages


def test_checksum_is_crc32c() -> None:
    # The check value of the algorithm's definition, RFC 3720 B.4 and the catalogue of CRC algorithms.
    assert checksum(b"123456789") == 0xE3069283
    assert checksum(memoryview(bytes(32))) == 0x8A9136AA


@example(0, [(0, 10 << 20)], random.Random(1))
@example(99, [(7, 3), (0, 3 * CHECKSUM_BLOCK_BYTES)], random.Random(2))
@settings(max_examples=20)
@given(
    st.integers(0, 2 * CHECKSUM_BLOCK_BYTES),
    st.lists(
        st.tuples(st.integers(0, 99), st.one_of(st.integers(0, 99), st.integers(0, 10 << 20))),
        min_size=1,
        max_size=4,
    ),
    st.randoms(),
)
def test_the_checksum_of_a_part_is_that_of_all_its_bytes(
    offset: int, items: list[tuple[int, int]], chance: random.Random
) -> None:
    spans: list[int] = []
    position = offset
    for padding, nbytes in items:
        for start, size in block_spans(position + padding, nbytes):
            spans += [start - offset, size]
        position += padding + nbytes
    data = memoryview(chance.randbytes(1 << 10) * ((position - offset >> 10) + 1))[: position - offset]
    checksums = Checksums(tuple(spans), of_all=True)
    done = 0
    while done < data.nbytes:
        size = min(data.nbytes - done, CHECKSUM_BLOCK_BYTES - (offset + done) % CHECKSUM_BLOCK_BYTES)
        checksums.update(data[done : done + size])
        done += size
    assert checksums.of_all == checksum(data)
    each = [checksum(data[start : start + size]) for start, size in zip(spans[::2], spans[1::2], strict=True)]
    assert list(struct.unpack(f"<{len(each)}I", checksums.packed())) == each


@given(st.integers(0, 3 * CHECKSUM_BLOCK_BYTES), st.integers(0, 3 * CHECKSUM_BLOCK_BYTES))
def test_blocks_cover_an_item_and_cross_no_boundary(offset: int, nbytes: int) -> None:
    position = offset
    for start, size in block_spans(offset, nbytes):
        assert start == position
        assert size > 0
        assert start // CHECKSUM_BLOCK_BYTES == (start + size - 1) // CHECKSUM_BLOCK_BYTES
        position += size
    assert position == offset + nbytes


texts = st.text(max_size=20)
numbers = st.integers(0, 2**63)
parts = st.builds(
    Part,
    numbers,
    numbers,
    st.lists(st.tuples(st.integers(-1, 9), numbers, numbers), max_size=5).map(tuple),
    st.lists(st.tuples(numbers, numbers), max_size=3).map(lambda pairs: tuple(sum(pairs, ()))),
)
plans = st.builds(
    Plan,
    numbers,
    st.lists(numbers, max_size=3).map(tuple),
    st.lists(parts, max_size=5).map(tuple),
    st.tuples(numbers, numbers),
)
jobs = st.builds(
    Job,
    texts,
    numbers,
    st.dictionaries(texts, texts, max_size=3),
    st.lists(texts, max_size=3).map(tuple),
    st.lists(texts, max_size=3).map(tuple),
    numbers,
)


def body_of(message: bytes) -> dict[str, Any]:
    length = int.from_bytes(message[:4], "little")
    assert len(message) == 4 + length
    found = json.loads(message[4:])
    assert isinstance(found, dict)
    return found


@given(plans)
def test_a_plan_survives_its_message(plan: Plan) -> None:
    message = body_of(plan_message(plan))
    assert message["kind"] == "plan"
    again = plan_from(message["body"])
    assert again == plan
    assert hash(again) == hash(plan)
    for part in plan.parts:
        assert part.nbytes == sum(nbytes for _, _, nbytes in part.pieces)


@given(jobs)
def test_a_job_survives_its_message(job: Job) -> None:
    message = body_of(job_message(job))
    assert (message["kind"], message["save_id"]) == ("begin", job.save_id)
    assert job_from(message["body"]) == job


def test_a_plan_names_the_slabs_behind_it() -> None:
    pieces = ((3, 0, 5), (ZEROS, 0, 5), (4, 0, 1))
    plan = Plan(1, (11, 0), (Part(0, 0, pieces, (0, 5, 10, 1)), Part(1, 0, ())), (9, 4096))
    assert plan.slabs == {3, 4, 9}
    assert plan.num_spans == (2, 0)


TAG = 2**64 - 1


@given(st.lists(st.integers(0, 3), max_size=20), st.data())
def test_a_board_keeps_what_each_part_says(num_spans: list[int], data: st.DataObject) -> None:
    nbytes = Board.nbytes(num_spans)
    memory = bytearray(b"\xff" * (nbytes + 100))
    board = Board(memoryview(memory), num_spans)
    board.clear()
    stopped = [board.is_stopped]
    ready, done = set(), set()
    values = [data.draw(st.binary(min_size=4 * n, max_size=4 * n)) for n in num_spans]
    for part in data.draw(st.permutations(range(len(num_spans)))):
        if data.draw(st.booleans()):
            board.set_ready(part, TAG)
            ready.add(part)
        board.set_checksums(part, values[part])
        if data.draw(st.booleans()):
            board.set_done(part)
            done.add(part)
    assert {part for part in range(len(num_spans)) if board.is_ready(part, TAG)} == ready
    assert {part for part in range(len(num_spans)) if board.is_done(part)} == done
    assert not any(board.is_ready(part, 5) for part in range(len(num_spans)))
    assert board.num_done() == len(done)
    for first in range(len(num_spans) + 1):
        for end in range(first, len(num_spans) + 1):
            assert board.checksums(first, end) == b"".join(values[first:end])
    board.set_all_ready(5)
    assert all(board.is_ready(part, 5) for part in range(len(num_spans)))
    assert board.num_done() == len(done)
    board.stop()
    stopped.append(board.is_stopped)
    board.clear()
    stopped.append(board.is_stopped)
    assert stopped == [False, True, False]
    assert board.num_done() == 0
    assert not any(board.is_ready(part, 5) for part in range(len(num_spans)))
    board.release()
    board.release()
    assert memory[nbytes:] == b"\xff" * 100
    memory.clear()


def test_a_board_is_laid_out_as_the_gpu_writes_it() -> None:
    memory = bytearray(Board.nbytes((2, 0, 1)))
    assert len(memory) == 8 + 3 * 8 + 8 + 3 * 4
    board = Board(memoryview(memory), (2, 0, 1))
    memory[Board.ready_offset + 8 : Board.ready_offset + 16] = (7).to_bytes(8, "little")
    assert [board.is_ready(part, 7) for part in range(3)] == [False, True, False]
    memory[: len(STOP)] = STOP
    assert board.is_stopped
    board.set_done(2)
    assert memory[32:40] == bytes([0, 0, 1, 0, 0, 0, 0, 0])
    board.set_checksums(2, b"abcd")
    assert memory[40:] == bytes(8) + b"abcd"


def test_messages_and_descriptors_arrive_in_order(channels: tuple[Channel, Channel]) -> None:
    ours, theirs = channels
    for number in range(20):
        reader, writer = os.pipe()
        os.write(writer, bytes([number]))
        ours.send(encode("text", "x" * number * 1000), (reader,))
        os.close(reader)
        os.close(writer)
    for number, message in enumerate(receive(theirs, 20)):
        assert message == {"kind": "text", "save_id": "", "body": "x" * number * 1000}
        fd = theirs.take_fd()
        assert os.read(fd, 9) == bytes([number])
        os.close(fd)


def test_as_many_descriptors_as_a_message_takes_arrive(channels: tuple[Channel, Channel]) -> None:
    ours, theirs = channels
    fds = [fd for _ in range(MAX_FDS // 2) for fd in os.pipe()]
    for number in range(2):
        ours.send(encode("queues", number), fds)
    assert [message["body"] for message in receive(theirs, 2)] == [0, 1]
    received = [theirs.take_fd() for _ in range(2 * len(fds))]
    assert [os.fstat(fd).st_ino for fd in received] == [os.fstat(fd).st_ino for fd in fds] * 2
    for fd in [*fds, *received]:
        os.close(fd)


def test_both_ends_may_send_more_than_the_sockets_hold(channels: tuple[Channel, Channel]) -> None:
    large = {"kind": "numbers", "save_id": "0a", "body": list(range(200_000))}
    message = encode("numbers", large["body"], "0a")
    received: list[dict[str, Any]] = []

    def talk(channel: Channel) -> None:
        for _ in range(2):
            channel.send(message, timeout_s=10)
        received.extend(receive(channel, 2))

    threads = [threading.Thread(target=talk, args=(channel,)) for channel in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert received == [large] * 4


def test_nothing_to_receive_is_no_wait(channels: tuple[Channel, Channel]) -> None:
    assert channels[0].receive() == ([], False)


def test_the_other_end_closes(channels: tuple[Channel, Channel]) -> None:
    ours, theirs = channels
    theirs.send(encode("last", "words"))
    theirs.socket.close()
    assert ours.receive() == ([{"kind": "last", "save_id": "", "body": "words"}], False)
    assert ours.receive() == ([], True)
    with pytest.raises(BrokenPipeError):
        ours.send(encode("more"))


def test_nobody_reads(channels: tuple[Channel, Channel]) -> None:
    with pytest.raises(TimeoutError):
        channels[0].send(encode("text", "x" * (4 << 20)), timeout_s=0.05)


def test_the_process_at_the_other_end_ends_while_others_hold_its_socket() -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "60"])
    pidfd = os.pidfd_open(process.pid)
    threading.Timer(0.05, process.kill).start()
    with ours, theirs, pytest.raises(BrokenPipeError):
        Channel(ours, pidfd).send(encode("text", "x" * (4 << 20)), timeout_s=10)
    process.wait(10)
    os.close(pidfd)


DATA = bytes(range(251)) * ((10 << 20) // 251)


class Lane:
    """A lane writer over one slab of `DATA`, and another one for the board."""

    def __init__(self, folder: Path) -> None:
        self.data = DATA
        self.slabs = {0: mmap.mmap(-1, len(self.data)), 1: mmap.mmap(-1, 1 << 20)}
        self.slabs[0].write(self.data)
        self.folder = folder
        self.storage = open_storage(folder)
        self.writer = LaneWriter(self.slabs.__getitem__)
        self.plan_id = 0
        self.board: Board | None = None

    def begin(self, *parts: Part, save_id: str = "0a", create: bool = True, is_traced: bool = False) -> Board:
        """Begin a save of `parts`, whose files are named by their numbers."""
        num_files = 1 + max((part.file for part in parts), default=0)
        self.plan_id += 1
        plan = Plan(self.plan_id, (0,) * num_files, parts, (1, 4096))
        names = tuple(f"file{number}" for number in range(num_files))
        if create:
            for name in names:
                self.storage.create_image(name, 0)
        with memoryview(self.slabs[1]) as whole, whole[4096:] as memory:
            board = self.board = Board(memory, plan.num_spans)
        board.clear()
        board.set_all_ready(7)
        self.writer.add_plan(plan)
        tokens = ("",) * num_files
        self.writer.begin(Job(save_id, self.plan_id, self.storage.spec, names, tokens, 7, is_traced))
        return board

    def write(self, part_index: int) -> None:
        """Write a part, to the end."""
        assert self.writer.has_room(5)
        self.writer.write(part_index)
        while self.writer.is_writing:
            self.writer.wait(5)

    def finish(self) -> dict[int, list[Receipt]]:
        receipts = self.writer.finish(5)
        assert receipts is not None
        return receipts

    def read(self, file: int = 0) -> bytes:
        return (self.folder / f"file{file}").read_bytes()

    def close(self) -> None:
        assert self.writer.abort(5)
        if self.board is not None:
            self.board.release()
        # It refuses while anybody has a view of it.
        for slab in self.slabs.values():
            slab.close()


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    opened = Lane(tmp_path)
    yield opened
    opened.close()


def packed(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def test_pieces_and_padding_are_written_where_they_belong(lane: Lane) -> None:
    board = lane.begin(
        Part(0, 0, ((0, 100, 50), (ZEROS, 0, 14), (0, 7, 3)), (0, 50, 64, 3)), Part(0, 67, ((0, 0, 20),))
    )
    lane.write(1)
    assert [board.is_done(0), board.is_done(1)] == [False, True]
    lane.write(0)
    assert board.num_done() == 2
    assert board.checksums(0, 2) == packed(checksum(lane.data[100:150]), checksum(lane.data[7:10]))
    lane.finish()
    assert lane.read() == lane.data[100:150] + bytes(14) + lane.data[7:10] + lane.data[:20]


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 0, 0, ZEROS]), st.integers(0, 5 << 20), st.integers(0, 5 << 20)),
        max_size=6,
    ),
    st.sampled_from([0, 1, 4096, CHECKSUM_BLOCK_BYTES - 1, CHECKSUM_BLOCK_BYTES]),
    st.data(),
)
@settings(max_examples=20)
def test_checksums_are_right_across_pieces_and_blocks(
    pieces: list[tuple[int, int, int]], offset: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lane = Lane(Path(folder))
        expected = b"".join(
            bytes(nbytes) if slab == ZEROS else lane.data[start : start + nbytes]
            for slab, start, nbytes in pieces
        )
        cuts = sorted(data.draw(st.sets(st.integers(0, len(expected)), max_size=7)))
        pairs = [(low, high - low) for low, high in itertools.pairwise(cuts) if data.draw(st.booleans())]
        spans = tuple(itertools.chain.from_iterable(pairs))
        board = lane.begin(Part(0, offset, tuple(pieces), spans))
        lane.write(0)
        lane.finish()
        assert lane.read()[offset:] == expected
        assert board.checksums(0, 1) == packed(*(checksum(expected[at : at + size]) for at, size in pairs))
        lane.close()


def test_a_part_is_ready_once_its_word_holds_the_tag_of_the_save(lane: Lane) -> None:
    board = lane.begin(Part(0, 0, ((0, 0, 1),)), Part(0, 1, ((0, 0, 1),)))
    board.clear()
    board.set_ready(0, 6)
    board.set_ready(1, 7)
    assert [lane.writer.is_ready(0), lane.writer.is_ready(1)] == [False, True]
    assert not lane.writer.is_stopped
    board.stop()
    assert lane.writer.is_stopped


def test_a_lane_notes_what_it_did_when_if_it_is_told_to(lane: Lane) -> None:
    parts = [Part(0, 0, ((0, 0, 100),)), Part(0, 100, ((0, 100, 50),)), Part(1, 0, ((0, 0, 10),))]
    began = time.monotonic()
    board = lane.begin(*parts, is_traced=True)
    board.set_ready(1, 0)
    assert not lane.writer.is_ready(1)
    asked = time.monotonic()
    board.set_ready(1, 7)
    for _ in range(2):
        # As a lane does that has no room yet.
        assert lane.writer.is_ready(1)
    was_ready = time.monotonic()
    lane.write(1)
    lane.write(0)
    assert lane.writer.is_ready(2)
    lane.write(2)
    lane.finish()
    ended = time.monotonic()
    record = lane.writer.record
    assert record is not None
    assert [times[0] for times in record.parts] == [1, 0, 2]
    for _, *times in record.parts:
        assert times == sorted(times)
        assert began <= times[0]
        assert times[-1] <= ended
    _, asked_s, ready_s, start_s, _ = record.parts[0]
    assert asked_s <= asked <= ready_s <= was_ready <= start_s
    assert sorted(file for file, *_ in record.syncs) == [0, 1]
    assert all(record.parts[-1][-1] <= start <= end <= ended for _, start, end in record.syncs)
    lane.begin(Part(0, 0, ((0, 0, 100),)), create=False)
    lane.write(0)
    lane.finish()
    assert lane.writer.record is None


def test_a_lane_creates_no_file(lane: Lane) -> None:
    board = lane.begin(Part(0, 0, ((0, 0, 1),)), create=False)
    with pytest.raises(WriteError) as caught:
        lane.write(0)
    assert (caught.value.errno, caught.value.path) == (errno.ENOENT, str(lane.folder / "file0"))
    assert not board.is_done(0)
    assert not list(lane.folder.iterdir())


def test_a_part_that_fails_is_not_done(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    board = lane.begin(Part(0, 4096, ((0, 0, 10),), (0, 10)))
    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(WriteError) as caught:
        lane.write(0)
    assert (caught.value.errno, caught.value.offset) == (errno.ENOSPC, 4096)
    assert caught.value.path == str(lane.folder / "file0")
    assert not board.is_done(0)


def test_a_save_that_was_given_up_leaves_nothing_to_the_next(lane: Lane) -> None:
    lane.begin(Part(0, 0, ((0, 0, 10),)))
    lane.write(0)
    assert lane.writer.abort(5)
    assert lane.writer.abort(5)
    assert lane.read() == lane.data[:10], "who made the file removes it"
    os.unlink(lane.folder / "file0")
    assert not open_files(lane.folder)
    board = lane.begin(Part(0, 0, ((0, 5, 10),)), save_id="0b")
    assert board.num_done() == 0
    lane.write(0)
    lane.finish()
    assert lane.read() == lane.data[5:15]


def test_finish_makes_every_file_durable_that_was_written(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def spy(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", spy)
    lane.begin(*(Part(file, 0, ((0, 0, 10),)) for file in range(4)))
    for part in (0, 3, 1):
        lane.write(part)
    assert synced == []
    lane.finish()
    assert sorted(synced) == ["file0", "file1", "file3"], "file2 is another lane's"
    assert not open_files(lane.folder)


def test_many_files_do_not_stay_open(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    synced = set()
    fsync = os.fsync

    def spy(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", spy)
    lane.begin(*(Part(number % 50, number // 50, ((0, number, 1),)) for number in range(150)))
    for number in range(150):
        lane.write(number)
        most = max(most, len(open_files(lane.folder)))
    lane.finish()
    assert most <= 64
    assert len(synced) == 50
    for number in range(50):
        assert lane.read(number) == lane.data[number : number + 101 : 50]


def test_a_file_that_is_not_durable_is_an_error(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    lane.begin(Part(0, 0, ((0, 0, 10),)), Part(1, 0, ((0, 0, 10),)))
    lane.write(0)
    lane.write(1)
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(WriteError, match="cannot make durable"):
        lane.finish()
    assert lane.writer.abort(5)
    assert not open_files(lane.folder)


def test_an_empty_file_is_made_durable_too(lane: Lane) -> None:
    board = lane.begin(Part(0, 0, ()))
    lane.write(0)
    assert len(open_files(lane.folder)) >= 1
    lane.finish()
    assert board.is_done(0)
    assert lane.read() == b""


def open_files(folder: Path) -> list[str]:
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return [os.readlink(link) for link in links if os.path.lexists(link) and str(folder) in os.readlink(link)]


def start(parent_pid: int, theirs: socket.socket, cores: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    code = f"from distckpt.worker import main; main({theirs.fileno()}, {parent_pid}, {cores})"
    return subprocess.Popen([sys.executable, "-c", code], pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE)


def test_the_process_ends_when_its_socket_is_closed() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = start(os.getpid(), theirs)
    ours.close()
    _, printed = process.communicate(timeout=10)
    assert (process.returncode, printed) == (0, b"")


def test_the_process_ends_at_once_if_its_parent_is_another() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = start(1, theirs)
        process.communicate(timeout=10)
    assert process.returncode == 1


def test_a_broken_message_ends_the_process_with_a_traceback() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = start(os.getpid(), theirs)
        ours.sendall(b"\x04\x00\x00\x00not{")
        _, printed = process.communicate(timeout=10)
    assert process.returncode == 1
    assert b"JSONDecodeError" in printed


def test_a_process_that_may_not_run_on_its_cores_says_so() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = start(os.getpid(), theirs, (4095,))
        _, printed = process.communicate(timeout=10)
        assert (process.returncode, printed) == (0, b"")
        pidfd = os.pidfd_open(os.getpid())
        ((message,), _) = Channel(ours, pidfd).receive()
        os.close(pidfd)
    assert message["kind"] == "refused"
    assert message["body"]["errno"] == errno.EINVAL
    assert "cores [4095] (--ckpt-worker-cores)" in message["body"]["message"]


def test_the_process_stands_back_for_others() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = start(os.getpid(), theirs)
        deadline = time.monotonic() + 10
        wanted = min(os.nice(0) + 10, 19)
        while psutil.Process(process.pid).nice() != wanted:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    process.communicate(timeout=10)
