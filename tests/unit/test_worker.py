"""One lane: messages between processes, and what it does with its tasks."""

from __future__ import annotations

import errno
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distckpt.storage import open_storage
from distckpt.worker import (
    CHECKSUM_BLOCK_BYTES,
    ZEROS,
    Ack,
    Channel,
    LaneWriter,
    Task,
    ack_from,
    block_spans,
    checksum,
    task_from,
    to_message,
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
errors = st.one_of(st.none(), st.fixed_dictionaries({"message": texts, "errno": numbers, "path": st.none()}))
tasks = st.builds(
    Task,
    save_id=texts,
    sequence=numbers,
    storage=st.dictionaries(texts, texts, max_size=3),
    names=st.lists(texts, max_size=3).map(tuple),
    offset=numbers,
    pieces=st.lists(st.tuples(st.integers(-1, 9), numbers, numbers), max_size=5).map(tuple),
    spans=st.lists(numbers, max_size=6).map(tuple),
    file_nbytes=st.one_of(st.none(), numbers),
)


@given(tasks)
def test_a_task_survives_its_message(task: Task) -> None:
    assert task_from(json.loads(json.dumps(to_message(task)))) == task
    assert task.nbytes == sum(nbytes for _, _, nbytes in task.pieces)


@given(st.builds(Ack, texts, numbers, texts, st.lists(numbers, max_size=6).map(tuple), errors))
def test_an_acknowledgement_survives_its_message(ack: Ack) -> None:
    assert ack_from(json.loads(json.dumps(to_message(ack)))) == ack


def test_messages_and_descriptors_arrive_in_order(channels: tuple[Channel, Channel]) -> None:
    ours, theirs = channels
    for number in range(20):
        reader, writer = os.pipe()
        os.write(writer, bytes([number]))
        ours.send({"number": number, "text": "x" * number * 1000}, (reader,))
        os.close(reader)
        os.close(writer)
    for number, message in enumerate(receive(theirs, 20)):
        assert message["number"] == number
        fd = theirs.take_fd()
        assert os.read(fd, 9) == bytes([number])
        os.close(fd)


def test_both_ends_may_send_more_than_the_sockets_hold(channels: tuple[Channel, Channel]) -> None:
    large = {"numbers": list(range(200_000))}
    received: list[dict[str, Any]] = []

    def talk(channel: Channel) -> None:
        for _ in range(2):
            channel.send(large, timeout_s=10)
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
    theirs.send({"last": "words"})
    theirs.socket.close()
    assert ours.receive() == ([{"last": "words"}], False)
    assert ours.receive() == ([], True)
    with pytest.raises(BrokenPipeError):
        ours.send({})


def test_nobody_reads(channels: tuple[Channel, Channel]) -> None:
    with pytest.raises(TimeoutError):
        channels[0].send({"text": "x" * (4 << 20)}, timeout_s=0.05)


def test_the_process_at_the_other_end_ends_while_others_hold_its_socket() -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "60"])
    pidfd = os.pidfd_open(process.pid)
    threading.Timer(0.05, process.kill).start()
    with ours, theirs, pytest.raises(BrokenPipeError):
        Channel(ours, pidfd).send({"text": "x" * (4 << 20)}, timeout_s=10)
    process.wait(10)
    os.close(pidfd)


class Lane:
    """A lane writer over one slab of numbered bytes."""

    def __init__(self, folder: Path) -> None:
        self.data = bytes(number % 251 for number in range(64 << 10))
        self.slab = mmap.mmap(-1, len(self.data))
        self.slab.write(self.data)
        self.folder = folder
        self.writer = LaneWriter(lambda _: self.slab)
        self.spec = dict(open_storage(folder).spec)

    def task(self, *pieces: tuple[int, int, int], **settings: Any) -> Task:
        given: dict[str, Any] = {"save_id": "0a", "sequence": 7, "names": ("file", "file.0a"), "offset": 0}
        return Task(storage=self.spec, pieces=pieces, **(given | settings))


@pytest.fixture
def lane(tmp_path: Path) -> Lane:
    return Lane(tmp_path)


def test_pieces_and_padding_are_written_where_they_belong(lane: Lane) -> None:
    first = lane.writer.write(lane.task((0, 100, 50), (ZEROS, 0, 14), (0, 7, 3), spans=(0, 50, 64, 3)))
    assert (first.save_id, first.sequence, first.name, first.error) == ("0a", 7, "file", None)
    assert first.checksums == (checksum(lane.data[100:150]), checksum(lane.data[7:10]))
    last = lane.writer.write(lane.task((0, 0, 20), offset=67, sequence=8, file_nbytes=87))
    assert last.error is None
    expected = lane.data[100:150] + bytes(14) + lane.data[7:10] + lane.data[:20]
    assert (lane.folder / "file").read_bytes() == expected


def test_the_first_name_that_is_free_is_taken(lane: Lane) -> None:
    (lane.folder / "file").touch()
    assert lane.writer.write(lane.task((0, 0, 1), file_nbytes=1)).name == "file.0a"
    again = lane.writer.write(lane.task((0, 0, 1), save_id="0b", file_nbytes=1))
    assert again.error is not None
    assert again.error["errno"] == errno.EEXIST
    assert (lane.folder / "file.0a").stat().st_size == 1


def test_a_file_of_the_wrong_size_is_an_error_and_is_removed(lane: Lane) -> None:
    ack = lane.writer.write(lane.task((0, 0, 10), file_nbytes=11))
    assert ack.error is not None
    assert ack.error["path"] == str(lane.folder / "file")
    assert not list(lane.folder.iterdir())


def test_after_a_failure_nothing_more_is_written_for_the_save(lane: Lane) -> None:
    assert lane.writer.write(lane.task((0, 0, 10), names=("other",))).error is None
    assert lane.writer.write(lane.task((0, 0, 10), file_nbytes=11)).error is not None
    late = lane.writer.write(lane.task((0, 0, 10), offset=10, file_nbytes=20))
    assert late.error is not None
    assert late.error["errno"] == errno.ECANCELED
    assert not list(lane.folder.iterdir())
    assert lane.writer.write(lane.task((0, 0, 10), save_id="0b", file_nbytes=10)).error is None
    assert [path.name for path in lane.folder.iterdir()] == ["file"]


def test_abort_removes_what_the_save_wrote_finished_or_not(lane: Lane) -> None:
    lane.writer.write(lane.task((0, 0, 10), names=("unfinished",)))
    lane.writer.write(lane.task((0, 0, 10), names=("finished",), file_nbytes=10))
    ack = lane.writer.abort("0a")
    assert (ack.save_id, ack.sequence) == ("0a", -1)
    assert not list(lane.folder.iterdir())


def test_abort_leaves_other_saves_alone(lane: Lane) -> None:
    lane.writer.write(lane.task((0, 0, 10), file_nbytes=10))
    lane.writer.write(lane.task((0, 0, 10), save_id="0b", names=("next",), file_nbytes=10))
    lane.writer.abort("0b")
    assert [path.name for path in lane.folder.iterdir()] == ["file"]
    lane.writer.abort("0a")
    assert [path.name for path in lane.folder.iterdir()] == ["file"], "it may be committed by now"


def test_an_empty_file_is_a_file(lane: Lane) -> None:
    assert lane.writer.write(lane.task(file_nbytes=0)).error is None
    assert (lane.folder / "file").stat().st_size == 0


def start(parent_pid: int, theirs: socket.socket) -> subprocess.Popen[bytes]:
    code = f"from distckpt.worker import main; main({theirs.fileno()}, {parent_pid})"
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
