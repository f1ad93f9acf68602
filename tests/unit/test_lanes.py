"""Lanes, inline and as workers, without an engine above them."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distckpt.arena import Arena, Range
from distckpt.errors import WorkerDied, WriteError
from distckpt.lanes import InlineLane, Lanes, WorkerLanes, _Queues, _start_code, _Worker, open_lanes
from distckpt.storage import open_storage
from distckpt.worker import (
    PART_NUMBER,
    ZEROS,
    Board,
    Channel,
    Job,
    LaneWriter,
    Part,
    Plan,
    _Server,
    checksum,
    encode,
)
from unit.interrupts import is_interrupted

MIB = 1 << 20
KIB = 1 << 10


class Bench:
    """Lanes over an arena, and saves for them."""

    def __init__(self, workers: int, folder: Path, timeout_s: float = 5.0) -> None:
        self.arena = Arena(16 * MIB)
        self.lanes: Lanes = open_lanes(workers, self.arena.slabs, timeout_s)
        self.storage = open_storage(folder)
        self.folder = folder
        self.tag = 0
        self.plan_id = 0
        self.source = self.take(4 * MIB)
        self.data = random.Random(1).randbytes(self.source.nbytes)
        self.arena.slabs[self.source.slab].mapping[: len(self.data)] = self.data
        self.boards: dict[int, Board] = {}

    def take(self, nbytes: int) -> Range:
        taken = self.arena.try_reserve(nbytes)
        assert taken is not None
        return taken

    def plan(self, *parts: Part) -> Plan:
        """Make a plan, and a board for it."""
        self.plan_id += 1
        num_spans = [len(part.spans) // 2 for part in parts]
        at = self.take(Board.nbytes(num_spans))
        sizes = [0] * (1 + max((part.file for part in parts), default=-1))
        for part in parts:
            sizes[part.file] = max(sizes[part.file], part.offset + part.nbytes)
        plan = Plan(self.plan_id, tuple(sizes), parts, (at.slab, at.offset))
        with memoryview(self.arena.slabs[at.slab].mapping) as whole, whole[at.offset :] as memory:
            self.boards[plan.plan_id] = Board(memory, num_spans)
        self.lanes.add_plan(plan)
        return plan

    def part(self, file: int, offset: int, start: int, nbytes: int) -> Part:
        return Part(file, offset, ((self.source.slab, start, nbytes),), (0, nbytes))

    def begin(self, save_id: str, plan: Plan, *, is_traced: bool = False) -> Board:
        """Begin a save to files that are named by its id and their numbers; nothing is ready."""
        self.tag += 1
        names = tuple(f"{save_id}-{number}" for number in range(len(plan.files)))
        for name in names:
            self.storage.create_image(name, 0)
        board = self.boards[plan.plan_id]
        board.clear()
        tokens = ("",) * len(names)
        self.lanes.begin(Job(save_id, plan.plan_id, self.storage.spec, names, tokens, self.tag, is_traced))
        return board

    def until_done(self, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.lanes.poll(0.1):
            assert time.monotonic() < deadline

    def save(self, save_id: str, plan: Plan, *, is_traced: bool = False) -> Board:
        """Write all of a plan, which is ready from the start."""
        self.lanes.start()
        board = self.begin(save_id, plan, is_traced=is_traced)
        board.set_all_ready(self.tag)
        self.lanes.push(range(len(plan.parts)))
        self.lanes.finish()
        self.until_done()
        self.check(save_id, plan)
        return board

    def check(self, save_id: str, plan: Plan) -> None:
        """Compare the files of a save, and its checksums, with what the plan says."""
        board = self.boards[plan.plan_id]
        assert board.num_done() == len(plan.parts)
        for number, size in enumerate(plan.files):
            self.storage.complete_image(f"{save_id}-{number}", "", size, [])
        for index, part in enumerate(plan.parts):
            with open(self.folder / f"{save_id}-{part.file}", "rb") as file:
                file.seek(part.offset)
                written = file.read(part.nbytes)
            expected = b"".join(
                bytes(nbytes) if slab == ZEROS else self.data[start : start + nbytes]
                for slab, start, nbytes in part.pieces
            )
            assert written == expected
            if part.spans:
                assert board.checksums(index, index + 1) == struct.pack("<I", checksum(expected))

    @property
    def workers(self) -> WorkerLanes:
        assert isinstance(self.lanes, WorkerLanes)
        return self.lanes

    @property
    def pids(self) -> list[int]:
        return self.workers.pids

    def close(self) -> None:
        self.lanes.close()
        for board in self.boards.values():
            board.release()
        self.arena.close()


@pytest.fixture(params=[1, 2, 3])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    opened = Bench(request.param, tmp_path)
    opened.lanes.start()
    yield opened
    opened.close()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Bench]:
    opened = Bench(2, tmp_path)
    opened.lanes.start()
    yield opened
    opened.close()


def wait_until(condition: Any, text: str, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, text
        time.sleep(0.005)


def has_ended(pid: int) -> bool:
    return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def waiting_in(reader: int) -> int:
    """Return how many numbers are in a pipe."""
    return int.from_bytes(fcntl.ioctl(reader, termios.FIONREAD, bytes(4)), "little") // PART_NUMBER.size


def cpu_s(pids: Sequence[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def test_one_worker_is_inline_and_several_are_processes(tmp_path: Path) -> None:
    assert isinstance(open_lanes(1, {}, 1.0), InlineLane)
    assert open_lanes(3, {}, 1.0).count == 3


def test_files_are_written_whole(bench: Bench) -> None:
    plan = bench.plan(
        bench.part(0, 0, 0, 5),
        bench.part(2, 100, 7, MIB),
        Part(1, 0, ()),
        bench.part(2, 0, MIB, 100),
        Part(0, 5, ((bench.source.slab, 9, 3), (ZEROS, 0, 5000)), (0, 5003)),
    )
    assert bench.save("0a", plan).num_done() == 5
    assert (bench.folder / "0a-1").read_bytes() == b""
    assert bench.lanes.unfinished == ()


def test_saves_follow_each_other_with_plans_old_and_new(bench: Bench) -> None:
    plans = [
        bench.plan(*(bench.part(file, 0, file * KIB, 100 * number) for file in range(number)))
        for number in range(1, 4)
    ]
    for number in range(9):
        bench.save(f"0{number}", plans[number % 3])
    bench.lanes.drop_plan(plans[0].plan_id)
    bench.lanes.drop_plan(plans[0].plan_id)
    bench.save("0x", plans[1])
    bench.save("0y", bench.plan(bench.part(0, 0, 0, 9)))


def test_lanes_tell_what_they_did_in_a_traced_save_alone(bench: Bench) -> None:
    plan = bench.plan(*(bench.part(number % 2, 1000 * number, 0, 1000) for number in range(8)))
    bench.save("0a", plan)
    assert bench.lanes.records == {}
    began = time.monotonic()
    bench.save("0b", plan, is_traced=True)
    records = bench.lanes.records
    assert set(records) == set(range(bench.lanes.count))
    times = sorted(times for record in records.values() for times in record.parts)
    assert [index for index, *_ in times] == list(range(8)), "each part once"
    for _, *four in times:
        assert began <= four[0]
        assert four == sorted(four)
        assert four[-1] <= time.monotonic(), "one clock for all processes"
    for record in records.values():
        written = {plan.parts[index].file for index, *_ in record.parts}
        assert sorted(file for file, *_ in record.syncs) == sorted(written)
    bench.save("0c", plan)
    assert bench.lanes.records == {}


def test_nothing_is_written_before_it_is_ready(bench: Bench) -> None:
    plan = bench.plan(*(bench.part(0, number * KIB, number * KIB, KIB) for number in range(4)))
    bench.save("0a", plan)
    # The words of the save before are no reason to write.
    board = bench.begin("0b", plan)
    board.set_all_ready(bench.tag - 1)
    bench.lanes.push([0, 1])
    for _ in range(3):
        assert not bench.lanes.poll(0.02)
    assert board.num_done() == 0
    assert (bench.folder / "0b-0").stat().st_size == 0
    # In the order in which the GPU gets on with them, one after the other.
    for part in range(4):
        if part == 2:
            bench.lanes.push([2, 3])
            bench.lanes.finish()
        board.set_ready(part, bench.tag)
        while not board.is_done(part):
            assert not bench.lanes.poll(0.01) or part == 3
        assert board.num_done() == part + 1
    if bench.lanes.unfinished:
        bench.until_done()
    bench.check("0b", plan)


def test_a_part_may_wait_for_an_earlier_one_to_be_done(bench: Bench) -> None:
    # As when memory is used again: each part becomes ready with the one before, all were pushed at once.
    num_parts = 60
    plan = bench.plan(*(bench.part(number * 7 % 5, number * KIB, 0, KIB) for number in range(num_parts)))
    board = bench.begin("0a", plan)
    bench.lanes.push(range(num_parts))
    bench.lanes.finish()
    for part in range(num_parts):
        board.set_ready(part, bench.tag)
        deadline = time.monotonic() + 5
        while not board.is_done(part):
            assert time.monotonic() < deadline, f"every lane waits, and none for part {part}"
            bench.lanes.poll(0.001)
    if bench.lanes.unfinished:
        bench.until_done()


def test_an_error_is_raised_by_poll(bench: Bench) -> None:
    plan = bench.plan(bench.part(0, 0, 0, 5), bench.part(1, 0, 0, 5))
    board = bench.begin("0a", plan)
    os.unlink(bench.folder / "0a-1")
    board.set_all_ready(bench.tag)
    bench.lanes.push([0, 1])
    bench.lanes.finish()
    with pytest.raises(WriteError) as caught:
        bench.until_done()
    assert not isinstance(caught.value, WorkerDied)
    assert (caught.value.errno, caught.value.path) == (errno.ENOENT, str(bench.folder / "0a-1"))
    assert caught.value.lane in range(bench.lanes.count)
    assert bench.lanes.abort("0a", 5.0) == set()
    bench.save("0b", plan)


def test_a_save_that_was_given_up_leaves_nothing_to_the_next(bench: Bench) -> None:
    plan = bench.plan(*(bench.part(number % 3, number * KIB, 0, KIB) for number in range(30)))
    for number in range(5):
        board = bench.begin(f"0{number}", plan)
        for part in range(0, 30, 2):
            board.set_ready(part, bench.tag)
        bench.lanes.push(range(30))
        if number % 2:
            bench.lanes.finish()
        bench.lanes.poll(0.01)
        started = time.monotonic()
        assert bench.lanes.abort(f"0{number}", 5.0) == set()
        assert time.monotonic() - started < 4
        assert bench.lanes.unfinished == ()
        done = board.num_done()
        # What is left in the pipes is not written any more.
        board.set_all_ready(bench.tag)
        assert not bench.lanes.poll(0.02)
        assert board.num_done() == done
        # A shorter one, for which most of the numbers in the pipes are wrong.
        bench.save(f"1{number}", bench.plan(bench.part(0, 0, 5, 5)))
    bench.save("0x", plan)


def test_aborting_twice_or_without_a_save_is_no_error(bench: Bench) -> None:
    assert bench.lanes.abort("0a", 5.0) == set()
    plan = bench.plan(bench.part(0, 0, 0, 5))
    bench.begin("0b", plan)
    assert bench.lanes.abort("0b", 5.0) == set()
    assert bench.lanes.abort("0b", 5.0) == set()
    bench.save("0c", plan)


def test_aborting_another_save_does_not_end_this_one(bench: Bench) -> None:
    plan = bench.plan(bench.part(0, 0, 0, 5))
    bench.save("0a", plan)
    board = bench.begin("0b", plan)
    assert bench.lanes.abort("0a", 5.0) == set()
    board.set_all_ready(bench.tag)
    bench.lanes.push([0])
    bench.lanes.finish()
    bench.until_done()
    bench.check("0b", plan)


def test_close_is_idempotent(bench: Bench) -> None:
    bench.lanes.close()
    bench.lanes.close()


def test_close_ends_a_save(bench: Bench) -> None:
    bench.begin("0a", bench.plan(bench.part(0, 0, 0, 5)))
    bench.lanes.push([0])


def test_lanes_do_not_start_again_after_close(bench: Bench) -> None:
    bench.lanes.close()
    with pytest.raises(WriteError, match="closed"):
        bench.lanes.start()
    if isinstance(bench.lanes, WorkerLanes):
        assert bench.pids == []


@pytest.mark.parametrize(
    ("owner", "method", "at"),
    [
        (_Worker, "stop", 0),
        (_Worker, "stop", 1),
        (subprocess.Popen, "wait", 0),
        (subprocess.Popen, "wait", 1),
        (_Queues, "close", 0),
    ],
)
def test_an_interrupted_close_is_ended_by_the_next(
    workers: Bench, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, at: int
) -> None:
    lanes, pids = workers.workers, workers.pids
    queues = lanes._queues[0]
    fds = [*queues.readers, *queues.writers, *(worker.pidfd for worker in lanes._workers)]
    real, num_calls = getattr(owner, method), itertools.count()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(num_calls) == at:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        lanes.close()
    with pytest.raises(WriteError, match="closed"):
        lanes.start()
    lanes.close()
    assert lanes.pids == []
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not any(os.path.exists(f"/proc/self/fd/{fd}") for fd in fds)
    lanes.close()


def test_a_close_that_is_interrupted_while_a_killed_worker_ends_looks_again(
    workers: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = workers.workers
    lost = lanes._workers.pop()
    lost.stop(kill=True)
    lanes._lost.append(lost)
    waits: list[BaseException | None] = [KeyboardInterrupt(), None]

    def wait(timeout: float) -> None:
        error = waits.pop(0)
        if error is not None:
            raise error

    monkeypatch.setattr(lost.process, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        lanes.close()
    lanes.close()
    assert waits == []
    assert lanes._lost == []


def test_queues_are_closed_once_each_wherever_an_interrupt_comes() -> None:
    for at in itertools.count():
        queues = _Queues(2)
        fds = [*queues.readers, *queues.writers]
        came = is_interrupted(queues.close, at, _Queues.close)
        closed = [fd for fd in fds if not os.path.exists(f"/proc/self/fd/{fd}")]
        # Somebody else has their numbers now.
        others = [os.open(os.devnull, os.O_RDONLY) for _ in closed]
        queues.close()
        assert all(os.path.exists(f"/proc/self/fd/{fd}") for fd in others)
        assert not any(os.path.exists(f"/proc/self/fd/{fd}") for fd in set(fds) - set(others))
        for fd in others:
            os.close(fd)
        if not came:
            break
    assert at > 3


def test_polling_ends_in_time(bench: Bench) -> None:
    started = time.monotonic()
    assert not bench.lanes.poll(0.05)
    assert time.monotonic() - started > 0.04
    bench.begin("0a", bench.plan(bench.part(0, 0, 0, 5)))
    bench.lanes.push([0])
    started = time.monotonic()
    assert not bench.lanes.poll(0.05)
    assert time.monotonic() - started > 0.04


def test_the_inline_lane_takes_one_part_for_each_poll(tmp_path: Path) -> None:
    bench = Bench(1, tmp_path)
    plan = bench.plan(*(bench.part(0, number, number, 1) for number in range(3)))
    board = bench.begin("0a", plan)
    board.set_all_ready(bench.tag)
    bench.lanes.push(range(3))
    for number in range(3):
        assert board.num_done() <= number
        assert not bench.lanes.poll(1.0)
    bench.lanes.finish()
    assert bench.lanes.poll(1.0)
    assert board.num_done() == 3
    bench.close()


def test_the_inline_lane_goes_on_when_a_part_arrives(tmp_path: Path) -> None:
    bench = Bench(1, tmp_path)
    board = bench.begin("0a", bench.plan(bench.part(0, 0, 0, 5)))
    bench.lanes.push([0])
    threading.Timer(0.05, board.set_ready, (0, bench.tag)).start()
    started = time.monotonic()
    assert not bench.lanes.poll(10.0)
    assert time.monotonic() - started < 5
    wait_until(lambda: board.is_done(0), "the part is written")
    bench.close()


@given(st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_part_is_written_exactly_once(workers: Bench, data: st.DataObject) -> None:
    bench = workers
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    num_parts = data.draw(st.integers(1, 300))
    num_files = data.draw(st.integers(1, 5))
    parts, sizes = [], [0] * num_files
    for number in range(num_parts):
        file = rng.randrange(num_files)
        parts.append(Part(file, sizes[file], ((bench.source.slab, number, 64),), (0, 64)))
        sizes[file] += 64
    plan = bench.plan(*parts)
    save_id = f"{bench.plan_id:02}"
    before = written_by(bench.pids)
    board = bench.begin(save_id, plan)
    order = list(range(num_parts))
    while order:
        size = rng.randint(1, len(order))
        bench.lanes.push(order[:size])
        for part in order[:size]:
            board.set_ready(part, bench.tag)
        del order[:size]
        if rng.random() < 0.5:
            assert not bench.lanes.poll(0)
    bench.lanes.finish()
    bench.until_done()
    bench.check(save_id, plan)
    assert written_by(bench.pids) - before == num_parts
    bench.lanes.drop_plan(plan.plan_id)
    bench.boards.pop(plan.plan_id).release()
    bench.arena.release(Range(*plan.board, Board.nbytes(plan.num_spans)))


def written_by(pids: Sequence[int]) -> int:
    """Return how many calls that write to files the processes have made; messages are none of them."""
    rows = (Path(f"/proc/{pid}/io").read_text().split() for pid in pids)
    return sum(int(row[row.index("syscw:") + 1]) for row in rows)


@pytest.mark.parametrize("count", [2, 4])
def test_all_lanes_take_part_in_one_file(tmp_path: Path, count: int) -> None:
    bench = Bench(count, tmp_path)
    bench.lanes.start()
    plan = bench.plan(*(bench.part(0, number * 64 * KIB, 0, 64 * KIB) for number in range(64)))
    # Their first save would show who started first.
    bench.save("0a", plan)
    before = [written_by([pid]) for pid in bench.pids]
    board = bench.begin("0b", plan)
    bench.lanes.push(range(64))
    bench.lanes.finish()
    time.sleep(0.1)
    # All of them hold one by now, and wait for it.
    for part in range(64):
        board.set_ready(part, bench.tag)
    bench.until_done()
    bench.check("0b", plan)
    shares = [written_by([pid]) - first for pid, first in zip(bench.pids, before, strict=True)]
    assert sum(shares) == 64
    assert min(shares) >= 1, shares
    bench.close()


def test_a_lane_that_is_held_up_leaves_its_files_to_others(workers: Bench) -> None:
    bench = workers
    plan = bench.plan(*(bench.part(number % 2, number * KIB, 0, KIB) for number in range(40)))
    board = bench.begin("0a", plan)
    os.kill(bench.pids[0], signal.SIGSTOP)
    board.set_all_ready(bench.tag)
    bench.lanes.push(range(40))
    bench.lanes.finish()
    deadline = time.monotonic() + 10
    while board.num_done() < 40:
        assert not bench.lanes.poll(0.01)
        assert time.monotonic() < deadline
    while bench.lanes.unfinished != (0,):
        assert not bench.lanes.poll(0.01)
        assert time.monotonic() < deadline
    os.kill(bench.pids[0], signal.SIGCONT)
    bench.until_done()
    bench.check("0a", plan)


def test_lanes_without_work_do_not_turn(workers: Bench) -> None:
    bench = workers
    plan = bench.plan(*(bench.part(0, number, number, 1) for number in range(3)))
    bench.save("0a", plan)
    idle = cpu_s(bench.pids)
    time.sleep(0.3)
    board = bench.begin("0b", plan)
    time.sleep(0.3)
    assert cpu_s(bench.pids) - idle <= 0.04, "they wait for a message"
    # Two hold a part, the third number stays in the pipe.
    bench.lanes.push(range(3))
    time.sleep(0.3)
    assert cpu_s(bench.pids) - idle <= 0.2, "they look at a word now and then"
    board.set_all_ready(bench.tag)
    bench.lanes.finish()
    bench.until_done()


def test_a_lane_of_streams_does_not_turn_while_others_have_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    pipes = [os.pipe2(os.O_NONBLOCK) for _ in range(2)]
    pidfd = os.pidfd_open(os.getpid())
    parent, server = Channel(ours, pidfd), _Server(Channel(theirs, pidfd), pidfd)
    parent.send(encode("queues", {"lane": 1, "num_fds": 2}), [reader for reader, _ in pipes])
    assert server._obey(None)
    server._save_id = "0a"
    monkeypatch.setattr(LaneWriter, "is_stream", True)
    os.write(pipes[0][1], PART_NUMBER.pack(0))
    waiting = threading.Thread(target=server._obey, args=(None,))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "it was woken by a part that it does not take"
    os.write(pipes[1][1], PART_NUMBER.pack(1))
    waiting.join(5)
    assert not waiting.is_alive()
    for fd in (*itertools.chain(*pipes), *server._queues, pidfd):
        os.close(fd)
    ours.close()
    theirs.close()


def test_more_parts_than_pipes_hold(tmp_path: Path) -> None:
    bench = Bench(2, tmp_path)
    bench.lanes.start()
    num_parts = 40_000
    part = Part(0, 0, ())
    plan = bench.plan(*[part] * num_parts)
    board = bench.begin("0a", plan)
    started = time.monotonic()
    bench.lanes.push(range(num_parts))
    bench.lanes.finish()
    assert time.monotonic() - started < 10
    for number in range(3):
        assert not bench.lanes.poll(0.01), number
    board.set_all_ready(bench.tag)
    bench.until_done(30)
    assert board.num_done() == num_parts
    bench.begin("0b", plan)
    bench.lanes.push(range(num_parts))
    assert bench.lanes.abort("0b", 5.0) == set()
    bench.save("0c", bench.plan(bench.part(0, 0, 0, 1)))
    bench.close()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3000)), max_size=10))
@settings(max_examples=20)
def test_numbers_leave_the_queues_as_they_entered(pushes: list[tuple[int, int]]) -> None:
    queues = _Queues(3)
    expected: list[list[int]] = [[], [], []]
    found: list[list[int]] = [[], [], []]
    number = 0

    def take(most: int) -> None:
        for reader, taken in zip(queues.readers, found, strict=True):
            for _ in range(most):
                try:
                    taken.append(PART_NUMBER.unpack(os.read(reader, 4))[0])
                except BlockingIOError:
                    break

    for lane, count in pushes:
        for _ in range(count):
            queues.add(lane, number)
            expected[lane].append(number)
            number += 1
        queues.flush()
        take(count // 2)
    full = True
    while full:
        full = bool(queues.flush())
        take(100_000)
    queues.drain()
    queues.close()
    assert found == expected


def test_a_worker_that_ended_with_a_save_of_its_own_learns_everything_anew(workers: Bench) -> None:
    bench = workers
    plan = bench.plan(*(bench.part(number % 2, number * KIB, 0, KIB) for number in range(10)))
    bench.save("0a", plan)
    before = bench.pids
    os.kill(before[1], signal.SIGKILL)
    wait_until(lambda: has_ended(before[1]), "the worker has ended")
    bench.save("0b", plan)
    assert bench.pids[0] == before[0]
    assert bench.pids[1] != before[1]
    # All of it by the new one.
    bench.lanes.start()
    os.kill(before[0], signal.SIGSTOP)
    board = bench.begin("0c", plan)
    board.set_all_ready(bench.tag)
    bench.lanes.push(range(10))
    wait_until(lambda: board.num_done() == 10, "the new worker has written all")
    os.kill(before[0], signal.SIGCONT)
    bench.lanes.finish()
    bench.until_done()
    bench.check("0c", plan)


def test_start_starts_what_is_missing(workers: Bench) -> None:
    before = workers.pids
    workers.lanes.start()
    assert workers.pids == before
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: has_ended(before[0]), "the worker has ended")
    workers.lanes.start()
    assert workers.pids[0] != before[0]
    assert workers.pids[1] == before[1]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -9), (signal.SIGRTMIN + 1, -signal.SIGRTMIN - 1)]
)
def test_a_worker_that_ends_is_named(workers: Bench, number: int, status: int) -> None:
    plan = workers.plan(workers.part(0, 0, 0, 5), workers.part(1, 0, 0, 5))
    workers.begin("0a", plan)
    workers.lanes.push([0, 1])
    assert not workers.lanes.poll(0.05)
    pid = workers.pids[1]
    os.kill(pid, number)
    started = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        workers.until_done()
    assert time.monotonic() - started < 5
    assert (caught.value.pid, caught.value.exit_status, caught.value.lane) == (pid, status, 1)
    assert f"worker process {pid} of lane 1 ended by signal {-status}" in str(caught.value)
    assert workers.lanes.abort("0a", 5.0) == set()
    workers.save("0b", plan)


def test_the_part_of_a_worker_that_died_is_not_done(workers: Bench) -> None:
    bench = workers
    plan = bench.plan(*(bench.part(number % 2, number * KIB, 0, KIB) for number in range(4)))
    board = bench.begin("0a", plan)
    bench.lanes.push(range(4))
    reader = bench.workers._queues[0].readers[0]
    wait_until(lambda: waiting_in(reader) == 1, "the worker has taken the first of its two parts")
    os.kill(bench.pids[0], signal.SIGKILL)
    board.set_all_ready(bench.tag)
    bench.lanes.finish()
    with pytest.raises(WorkerDied):
        bench.until_done()
    wait_until(lambda: board.num_done() == 3, "the other has written the rest")
    assert not board.is_done(0), "it was taken by the dead one"
    assert bench.lanes.abort("0a", 5.0) == set()
    bench.save("0b", plan)


def test_what_arrived_with_a_death_is_not_lost_to_abort(workers: Bench) -> None:
    # The answer of the one and the death of the other are there at the same time.
    bench = workers
    plan = bench.plan(bench.part(1, 0, 0, 5))
    board = bench.begin("0a", plan)
    board.set_all_ready(bench.tag)
    bench.lanes.push([0])
    os.kill(bench.pids[0], signal.SIGKILL)
    time.sleep(0.2)
    started = time.monotonic()
    assert bench.lanes.abort("0a", 5.0) == set()
    assert time.monotonic() - started < 4
    assert len(bench.pids) == 1
    bench.save("0b", plan)


def test_sending_to_a_worker_that_has_ended_is_its_death(workers: Bench) -> None:
    plan = workers.plan(workers.part(0, 0, 0, 5))
    pid = workers.pids[0]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: has_ended(pid), "the worker has ended")
    with pytest.raises(WorkerDied) as caught:
        workers.begin("0a", plan)
    assert (caught.value.pid, caught.value.exit_status) == (pid, -9)
    assert workers.lanes.abort("0a", 5.0) == set()
    workers.save("0b", plan)


def test_a_worker_that_stopped_reading_is_given_up_in_time(tmp_path: Path) -> None:
    bench = Bench(2, tmp_path, 0.1)
    bench.lanes.start()
    pids = bench.pids
    os.kill(pids[0], signal.SIGSTOP)
    large = bench.plan(Part(0, 0, ((ZEROS, 0, 1),), (0, 1) * 100_000))
    with pytest.raises(WriteError, match="has stopped reading") as caught:
        bench.begin("0a", large)
    assert (caught.value.errno, caught.value.lane) == (errno.ETIMEDOUT, 0)
    assert bench.lanes.abort("0a", 0.1) == set(), "it was killed and reaped"
    assert bench.pids == pids[1:]
    bench.save("0b", bench.plan(bench.part(0, 0, 0, 5)))
    bench.close()


def test_a_late_answer_says_nothing_about_the_next_save(workers: Bench) -> None:
    bench = workers
    plan = bench.plan(bench.part(0, 0, 0, 5), bench.part(1, 0, 0, 5))
    bench.save("0a", plan)
    board = bench.begin("0b", plan)
    for worker in bench.workers._workers:
        # As they would have arrived while the engine gave the save up.
        for kind in ("done", "error"):
            worker.channel.messages.append({"kind": kind, "save_id": "0a", "body": {"message": "late"}})
    assert not bench.lanes.poll(0.05)
    assert bench.lanes.unfinished == (0, 1)
    # And what a worker is told late does not end the save that it has.
    for worker in bench.workers._workers:
        worker.send(encode("finish", None, "0a"))
    assert not bench.lanes.poll(0.05)
    board.set_all_ready(bench.tag)
    bench.lanes.push([0, 1])
    bench.lanes.finish()
    bench.until_done()
    bench.check("0b", plan)


def test_an_error_of_one_lane_is_no_reason_to_end_it(workers: Bench) -> None:
    bench = workers
    plan = bench.plan(bench.part(0, 0, 0, 2 * MIB), bench.part(1, 0, 0, 2 * MIB))
    pids = bench.pids
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
    board = bench.begin("0a", plan)
    board.set_all_ready(bench.tag)
    bench.lanes.push([0, 1])
    bench.lanes.finish()
    with pytest.raises(WriteError) as caught:
        bench.until_done()
    assert (caught.value.errno, caught.value.offset) == (errno.EFBIG, MIB)
    assert bench.lanes.abort("0a", 5.0) == set()
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    bench.save("0b", plan)
    assert bench.pids == pids


@pytest.mark.parametrize("begins_at_once", [False, True])
def test_cores_that_a_worker_may_not_run_on_are_an_error(tmp_path: Path, begins_at_once: bool) -> None:
    bench = Bench(2, tmp_path)
    bench.lanes = WorkerLanes(2, bench.arena.slabs, 5.0, cores=(4095,))
    plan = bench.plan(bench.part(0, 0, 0, 5))

    def use() -> None:
        bench.lanes.start()
        if not begins_at_once:
            wait_until(lambda: all(has_ended(pid) for pid in bench.pids), "the workers have ended")
        bench.begin("0a", plan)
        bench.until_done()

    with pytest.raises(WriteError, match=r"cores \[4095\] \(--ckpt-worker-cores\)") as caught:
        use()
    assert not isinstance(caught.value, WorkerDied)
    assert caught.value.errno == errno.EINVAL
    bench.lanes.abort("0a", 5.0)
    bench.close()


def test_workers_run_on_their_cores(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    bench = Bench(2, tmp_path)
    bench.lanes = WorkerLanes(2, bench.arena.slabs, 5.0, cores=(core,))
    bench.save("0a", bench.plan(bench.part(0, 0, 0, 5)))
    assert [os.sched_getaffinity(pid) for pid in bench.pids] == [{core}, {core}]
    bench.close()


def test_a_slab_that_the_arena_gave_back_is_unmapped_by_workers(workers: Bench) -> None:
    bench = workers
    taken = bench.take(4 * MIB)
    inode = os.fstat(bench.arena.slabs[taken.slab].fd).st_ino

    def mapping() -> list[bool]:
        rows = (Path(f"/proc/{pid}/maps").read_text() for pid in bench.pids)
        return [f" {inode} " in row for row in rows]

    plan = bench.plan(Part(0, 0, ((taken.slab, taken.offset, 5),)))
    assert plan.board[0] != taken.slab
    board = bench.begin("0a", plan)
    board.set_all_ready(bench.tag)
    bench.lanes.push([0])
    bench.lanes.finish()
    bench.until_done()
    assert mapping() == [True, True]
    bench.lanes.drop_plan(plan.plan_id)
    del bench.arena.slabs[taken.slab]
    bench.save("0b", bench.plan(bench.part(0, 0, 0, 5)))
    assert mapping() == [False, False]


def test_descriptors_do_not_grow(workers: Bench) -> None:
    def descriptors(pid: int) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    bench = workers
    plan = bench.plan(bench.part(0, 0, 0, 5), bench.part(1, 0, 0, 5))
    bench.save("0a", plan)
    before = [descriptors(pid) for pid in [os.getpid(), *bench.pids]]
    for number in range(10):
        bench.save(f"1{number}", plan)
        bench.begin(f"2{number}", plan)
        bench.lanes.push([0, 1])
        bench.lanes.abort(f"2{number}", 5.0)
    assert [descriptors(pid) for pid in [os.getpid(), *bench.pids]] == before


def test_no_descriptor_is_left_when_workers_cannot_have_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    pipe2 = os.pipe2

    def refuse(flags: int) -> tuple[int, int]:
        if len(made) == 4:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.extend(pipe2(flags))
        return made[-2], made[-1]

    lanes = WorkerLanes(3, {}, 1.0)
    with monkeypatch.context() as failing:
        failing.setattr(os, "pipe2", refuse)
        with pytest.raises(WriteError, match="Lower --dist-ckpt-workers") as caught:
            lanes.start()
    assert caught.value.errno == errno.EMFILE
    assert not any(os.path.exists(f"/proc/self/fd/{fd}") for fd in made)
    lanes.start()
    lanes.close()


@pytest.mark.slow
def test_many_workers_with_few_descriptors(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        bench = Bench(24, tmp_path)
        bench.save("0a", bench.plan(*(bench.part(number % 48, number, 0, 1) for number in range(480))))
        bench.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_pipe_takes_what_is_written_to_it_whole_or_not_at_all() -> None:
    assert select.PIPE_BUF % PART_NUMBER.size == 0


def test_the_path_of_a_worker_has_the_installation_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", "/home/me/project", *sys.path])
    namespace: dict[str, Any] = {"sys": sys}
    with monkeypatch.context() as worker:
        worker.setattr(sys, "path", list(sys.path))
        exec(_start_code(7).split("; from ")[0], namespace)
        path = list(sys.path)
    library = os.path.dirname(os.__file__)
    assert path.index(library) < path.index("/home/me/project")
    assert path.index(library) < path.index(os.getcwd())
    assert "" not in path
