"""The engine: saves in waves and from a residence, over real lanes and storage."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import random
import signal
import struct
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distckpt import engine as engine_module
from distckpt.config import CheckpointConfig
from distckpt.engine import Engine, Written
from distckpt.errors import ConfigError, StagingError, WorkerDied, WriteError
from distckpt.formats import Frame
from distckpt.image import ImagePart
from distckpt.lanes import WorkerLanes
from distckpt.observe import Event, subscribe
from distckpt.residence import Residence
from distckpt.staging import Item
from distckpt.storage import Storage, open_storage
from distckpt.waves import Order
from distckpt.worker import block_spans, checksum
from slow_writes import hold_first_write
from unit.tensors import memory_of, payload_of

KIB, MIB = 1 << 10, 1 << 20


def literal(data: bytes) -> Item:
    return Item(Frame(data, b""))


def bytes_of(item: Item) -> bytes:
    """Return what the file must hold of an item now, put together without the stager."""
    prefix, suffix = item.frame
    if item.tensor is None or not item.nbytes:
        return prefix + suffix
    return prefix + (memory_of if item.verbatim else payload_of)(item.tensor) + suffix


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(-(2**62), 2**62, (-(-nbytes // 8),), generator=generator)
    return memory_of(data)[:nbytes]


def opened(budget: str = "24MiB", workers: int = 1, **settings: Any) -> Engine:
    # A wait that should not be there ends with the test.
    config = CheckpointConfig(
        **{"distributed_timeout_minutes": 0.3} | settings, ckpt_host_memory=budget, dist_ckpt_workers=workers
    )
    return Engine.open(config)


@pytest.fixture(params=[1, 2])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    one = opened(workers=request.param)
    yield one
    one.close()


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "checkpoint")


def check(storage: Storage, written: Written | None, data: list[bytes], checksums: bool = True) -> None:
    """Assert that the files hold the items and zeros between them, and that the checksums are theirs."""
    assert written is not None
    image = written.image
    assert image.sizes == [len(part) for part in data]
    for number, (name, file) in enumerate(zip(written.names, image.files, strict=True)):
        whole = bytearray(file.nbytes)
        blocks = []
        for index, offset in zip(file.items, file.offsets, strict=True):
            whole[offset : offset + len(data[index])] = data[index]
            blocks += [
                checksum(data[index][at - offset : at - offset + n])
                for at, n in block_spans(offset, len(data[index]))
            ]
        # Not `==` alone, whose failure would print megabytes.
        is_same = storage.read(name) == whole
        assert is_same, name
        packed = struct.pack(f"<{len(blocks)}I", *blocks) if checksums else b""
        assert written.checksums[number] == packed, name
    assert written.files == {name: file.nbytes for name, file in zip(written.names, image.files, strict=True)}


def free_bytes(engine: Engine) -> int:
    engine.arena._take_back()
    return engine.arena._left()


def assert_is_whole(engine: Engine) -> None:
    """Assert that nobody holds anything of the arena, and that the lanes know of no plan."""
    assert free_bytes(engine) == engine.arena.budget_bytes
    lanes: Any = engine.lanes
    plans = lanes._plans if isinstance(lanes, WorkerLanes) else lanes._writer._plans
    assert not plans
    assert engine.lanes.unfinished == ()


class State:
    """A state of all kinds that changes in place, as a trainer's does."""

    def __init__(self, scale: int = 1) -> None:
        self.step = 0
        self.tensors = [
            torch.zeros(3),
            torch.zeros(0, 5),
            torch.zeros(()),
            torch.zeros(70 * KIB * scale, dtype=torch.uint8),
            torch.zeros(300 * KIB * scale, dtype=torch.int32),
            torch.zeros(400, 300 * scale).t(),
            torch.zeros(200, 700 * scale)[:, ::2],
            torch.zeros(900, 1300 * scale)[:, 7:],
            torch.zeros(3 * MIB * scale, dtype=torch.int16),
            torch.zeros(99, dtype=torch.complex64).conj(),
            torch.nn.Parameter(torch.zeros(17)),
        ]
        self.change()

    def change(self) -> None:
        self.step += 1
        generator = torch.Generator().manual_seed(self.step)
        for tensor in self.tensors:
            tensor.detach().copy_(torch.randint(0, 100, tensor.shape, generator=generator))

    def items(self, engine: Engine) -> list[Item]:
        items = [engine.item(tensor) for tensor in self.tensors]
        # Objects, whose pickles have the same size each time.
        items.insert(3, literal(b"step %012d " % self.step * 20))
        items.append(literal(b"large object %d" % (self.step % 10) * 20_000))
        return items

    def data(self, engine: Engine) -> list[bytes]:
        return [bytes_of(item) for item in self.items(engine)]


def test_items_of_all_sizes_are_written(engine: Engine, storage: Storage) -> None:
    sizes = [0, 1, 63, 64, 65, 4096, MIB - 1, MIB, MIB + 1, 5 * MIB, 0, 7]
    data = [random_bytes(size, size) for size in sizes]
    check(storage, engine.write(storage, "0a", 3, [literal(part) for part in data]), data)
    assert set(storage.list()) <= {"__3_0.distcp.0a", "__3_1.distcp.0a"}
    # Once more, to the same place: nothing of the first save is written to.
    check(storage, engine.write(storage, "0b", 3, [literal(part) for part in data]), data)
    assert {name for name in storage.list() if name.endswith(".0b")}
    assert_is_whole(engine)


def test_items_without_a_byte_are_written(engine: Engine, storage: Storage) -> None:
    check(storage, engine.write(storage, "0a", 0, [literal(b""), literal(b"")]), [b"", b""])
    assert_is_whole(engine)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_many_times_the_budget_is_written_in_waves(storage: Storage, workers: int) -> None:
    engine = opened("20MiB", workers)
    tensors = [torch.zeros(21 * MIB, dtype=torch.uint8), *(torch.zeros(2 * MIB) for _ in range(10))]
    tensors.append(torch.arange(9 * MIB // 4).reshape(3, -1).t())
    tensors += [torch.full((number,), number) for number in range(1, 400)]
    for number, tensor in enumerate(tensors[:11]):
        tensor.copy_(torch.randint(0, 100, tensor.shape, generator=torch.Generator().manual_seed(number)))
    items = [engine.item(tensor) for tensor in tensors]
    data = [bytes_of(item) for item in items]
    assert sum(map(len, data)) > 5 * engine.arena.budget_bytes
    reserved: list[int] = []
    pushed: list[list[int]] = []

    def note(event: Event) -> None:
        reserved.append(engine.arena.reserved_bytes)
        if event.name == "parts.pushed":
            pushed.append(event.fields["parts"])  # type: ignore[arg-type]

    end = subscribe(note)
    try:
        written = engine.write(storage, "0a", 0, items)
    finally:
        end()
    check(storage, written, data)
    assert written is not None
    assert len(pushed) > 3, "it took no wave"
    assert sorted(itertools.chain.from_iterable(pushed)) == list(range(len(written.image.parts))), (
        "every part once"
    )
    assert max(reserved) <= engine.arena.budget_bytes
    assert_is_whole(engine)
    engine.close()


def test_one_slow_write_holds_up_no_wave(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_first_write(monkeypatch, until_bytes=40 * MIB)
    data = [random_bytes(MIB, number) for number in range(60)]
    engine = opened("20MiB")
    check(storage, engine.write(storage, "0a", 0, [literal(part) for part in data]), data)
    assert_is_whole(engine)
    engine.close()


@st.composite
def parts_of_a_save(draw: st.DrawFn) -> list[ImagePart]:
    kinds = draw(st.lists(st.sampled_from(["plain", "staged", "sealed"]), max_size=30))
    parts = []
    for number, kind in enumerate(kinds):
        part = ImagePart(0, number, number + 1, [], [(0, number, 1)] if kind == "staged" else [])
        part.sealed = tuple(range(number)) if kind == "sealed" else None
        parts.append(part)
    return parts


@given(parts_of_a_save(), st.integers(1, 5), st.booleans(), st.randoms(use_true_random=False))
def test_slots_are_taken_again_when_they_are_free(
    parts: list[ImagePart], num_slots: int, is_stream: bool, chance: random.Random
) -> None:
    order = Order(parts, num_slots, is_stream=is_stream)
    done: set[int] = set()
    taken: list[int] = []
    holders: dict[int, int] = {}
    while not order.is_complete:
        number = order.take(done.__contains__)
        if number is None:
            # There is always one to wait for.
            done.add(chance.choice([each for each in taken if each not in done]))
            continue
        slot = order.slots.get(number)
        assert (slot is None) == parts[number].is_staged
        if slot is not None:
            assert holders.get(slot) is None or holders[slot] in done, "it was overwritten"
            holders[slot] = number
        if is_stream or parts[number].sealed is not None:
            assert set(range(number)) <= set(taken)
        taken.append(number)
    assert sorted(taken) == list(range(len(parts)))
    assert order.take(done.__contains__) is None


@pytest.mark.slow
def test_waves_use_what_a_residence_leaves(storage: Storage) -> None:
    engine = opened("36MiB", 2)
    state = State()
    residence = engine.reside(storage, state.items(engine))
    assert residence is not None
    residence.stage(state.items(engine))
    kept = state.data(engine)
    data = [random_bytes(3 * MIB, number) for number in range(20)]
    check(storage, engine.write(storage, "0a", 0, [literal(part) for part in data]), data)
    check(storage, engine.write_staged(storage, "0b", 0, residence), kept)
    engine.drop(residence)
    check(storage, engine.write(storage, "0c", 0, [literal(b"data")]), [b"data"])
    assert_is_whole(engine)
    engine.close()


def test_staged_and_unstaged_items_share_files(engine: Engine, storage: Storage) -> None:
    state = {f"weight{n}": torch.full((n * 1000,), n) for n in range(1, 20)}
    staged, ticket = engine.stage(state)
    ticket.wait(5)
    items, data = [], []
    for name, tensor in staged.items():
        item = engine.item(tensor)
        assert item.home is not None
        data.append(item.frame.prefix + memory_of(state[name]) + item.frame.suffix)
        data.append(name.encode() * 100)
        items += [item, literal(data[-1])]
    check(storage, engine.write(storage, "0a", 0, items), data)
    del staged, items, item, tensor, ticket  # type: ignore[possibly-undefined]
    assert_is_whole(engine)


def test_without_checksums_there_are_none(storage: Storage) -> None:
    engine = opened(ckpt_checksum="none")
    check(storage, engine.write(storage, "0a", 0, [literal(b"data")]), [b"data"], checksums=False)
    engine.close()


def test_no_items_start_nothing(storage: Storage) -> None:
    engine = opened(workers=2)
    assert engine.write(storage, "0a", 0, []) is None
    assert not Path(storage.url).exists()
    engine.close()


@pytest.mark.usefixtures("no_garbage_collection")
def test_tensors_are_let_go_with_the_items_of_their_save(engine: Engine, storage: Storage) -> None:
    tensors = [torch.ones(5 * MIB, dtype=torch.uint8), torch.ones(3)]
    gone = [weakref.ref(tensor) for tensor in tensors]
    items = [engine.item(tensor) for tensor in tensors]
    residence = engine.reside(storage, items)
    assert residence is not None
    del tensors
    residence.stage(items)
    engine.write_staged(storage, "0a", 0, residence)
    engine.write(storage, "0b", 0, items)
    del items
    assert [reference() for reference in gone] == [None, None]
    engine.drop(residence)


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("budget", ["64MiB", "200MiB"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_residence_holds_the_values_of_each_staging(storage: Storage, workers: int, budget: str) -> None:
    engine = opened(budget, workers)
    state = State()
    residence = engine.reside(storage, state.items(engine))
    assert residence is not None
    assert free_bytes(engine) == engine.arena.budget_bytes, "nothing is reserved before it is needed"
    free = None
    for number in range(4):
        residence.stage(state.items(engine))
        assert residence.has_arrived()
        expected = state.data(engine)
        # What the trainer does now is no business of the save.
        state.change()
        check(storage, engine.write_staged(storage, f"0{number}", 0, residence), expected)
        assert free in (None, free_bytes(engine)), "a later save takes more memory than the first"
        free = free_bytes(engine)
    engine.drop(residence)
    engine.write(storage, "0e", 0, [literal(b"data")])
    assert_is_whole(engine)
    engine.close()


def test_what_is_staged_is_staged_anew_without_the_tensors_of_devices(storage: Storage) -> None:
    engine = opened("64MiB")
    state = State()
    items = state.items(engine)
    residence = engine.reside(storage, items)
    assert residence is not None
    can_restage = [residence.can_restage]
    residence.stage(items)
    can_restage.append(residence.can_restage)
    assert can_restage == [False, True], "nothing lies on a device"
    state.change()
    residence.restage(dict(enumerate(state.items(engine))), state.tensors)
    check(storage, engine.write_staged(storage, "0a", 0, residence), state.data(engine))
    engine.drop(residence)
    engine.close()


def test_two_residences_take_turns(storage: Storage) -> None:
    engine = opened("128MiB", 2)
    state = State()
    first = engine.reside(storage, state.items(engine))
    assert first is not None
    second = engine.reside_beside(first)
    assert second is not None
    assert second.image is first.image, "the metadata describes the files of both"
    assert second.late == first.late
    residences = [first, second]
    expected: list[list[bytes]] = [[], []]
    for number in range(6):
        turn = number % 2
        residences[turn].stage(state.items(engine))
        expected[turn] = state.data(engine)
        state.change()
        if number:
            # Staged before the other was.
            written = engine.write_staged(storage, f"0{number}", 0, residences[1 - turn])
            check(storage, written, expected[1 - turn])
    for residence in residences:
        engine.drop(residence)
    engine.write(storage, "0e", 0, [literal(b"data")])
    assert_is_whole(engine)
    engine.close()


@pytest.mark.parametrize("late", [[0], [0, 1], [1]])
def test_nothing_of_the_host_is_copied_late(storage: Storage, late: list[int]) -> None:
    engine = opened("64MiB")
    tensors = [torch.ones(5), torch.ones(2 * MIB)]
    items = [engine.item(tensor) for tensor in tensors]
    residence = engine.reside(storage, items, late)
    assert residence is not None
    for number in range(2):
        residence.stage(items)
        data = [bytes_of(item) for item in items]
        for tensor in tensors:
            tensor.add_(1)
        residence.order_after()
        check(storage, engine.write_staged(storage, f"0{number}", 0, residence), data)
    engine.drop(residence)
    engine.close()


def test_what_the_budget_does_not_hold_has_no_residence(engine: Engine, storage: Storage) -> None:
    assert engine.reside(storage, [literal(bytes(24 * MIB))]) is None
    small = engine.reside(storage, [literal(b"data")])
    assert small is not None
    taken = engine.arena.try_reserve(engine.arena.budget_bytes)
    assert taken is not None
    assert engine.reside_beside(small) is None
    engine.arena.release(taken)
    assert free_bytes(engine) == engine.arena.budget_bytes


def test_a_residence_that_finds_no_memory_takes_none_and_may_try_again(storage: Storage) -> None:
    engine = opened("64MiB", distributed_timeout_minutes=0.1 / 60)
    state = State()
    residence = engine.reside(storage, state.items(engine))
    assert residence is not None
    taken = engine.arena.try_reserve(52 * MIB)
    assert taken is not None
    for _ in range(2):
        with pytest.raises(StagingError, match="--ckpt-host-memory"):
            residence.stage(state.items(engine))
        assert free_bytes(engine) == engine.arena.budget_bytes - 52 * MIB
    engine.arena.release(taken)
    for number in range(2):
        residence.stage(state.items(engine))
        check(storage, engine.write_staged(storage, f"0{number}", 0, residence), state.data(engine))
        state.change()
    engine.drop(residence)
    assert free_bytes(engine) == engine.arena.budget_bytes
    engine.close()


def block_names(storage: Storage, save_id: str, lanes: int) -> None:
    """Make it impossible to create the images of `save_id`."""
    storage.prepare()
    Path(storage.url, f"__0_{lanes - 1}.distcp.{save_id}").mkdir()


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_save_whose_files_cannot_be_created_gives_everything_back(
    engine: Engine, storage: Storage, at_once: int
) -> None:
    storage.at_once = at_once  # type: ignore[attr-defined]
    block_names(storage, "0a", engine.lanes.count)
    before = storage.list()
    with pytest.raises(WriteError) as caught:
        engine.write(storage, "0a", 0, [literal(bytes(3 * MIB)) for _ in range(6)])
    assert (caught.value.errno, caught.value.rank, caught.value.lane) == (errno.EEXIST, 0, None)
    assert caught.value.path == f"{storage.url}/__0_{engine.lanes.count - 1}.distcp.0a"
    assert storage.list() == before, "the file of the first lane is left"
    assert_is_whole(engine)
    data = [b"data"] * 3
    check(storage, engine.write(storage, "0b", 0, [literal(part) for part in data]), data)


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_save_whose_storage_refuses_gives_everything_back(
    engine: Engine, storage: Storage, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    storage.at_once = at_once  # type: ignore[attr-defined]

    def refuse(name: str, token: str, nbytes: int, receipts: object) -> None:
        raise WriteError(f"{name} holds 3 bytes after writing {nbytes}", path=f"{storage.url}/{name}")

    state = State()
    residence = engine.reside(storage, [literal(b"object"), engine.item(torch.ones(9))])
    assert residence is not None
    residence.stage([literal(b"object"), engine.item(torch.ones(9))])
    free = free_bytes(engine)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "complete_image", refuse)
        with pytest.raises(WriteError, match=r"holds 3 bytes .*\(rank 4, save 0a of ") as caught:
            engine.write(storage, "0a", 4, state.items(engine))
        assert caught.value.rank == 4
        assert storage.list() == {}
        assert free_bytes(engine) == free
        with pytest.raises(WriteError):
            engine.write_staged(storage, "0b", 4, residence)
        assert storage.list() == {}
    residence.stage([literal(b"OBJECT"), engine.item(torch.zeros(9))])
    expected = [b"OBJECT", bytes_of(engine.item(torch.zeros(9)))]
    check(storage, engine.write_staged(storage, "0d", 4, residence), expected)
    engine.drop(residence)
    check(storage, engine.write(storage, "0e", 0, state.items(engine)), state.data(engine))
    assert_is_whole(engine)


@pytest.mark.slow
@pytest.mark.parametrize("is_resident", [False, True])
def test_a_save_whose_worker_dies_gives_everything_back(storage: Storage, is_resident: bool) -> None:
    engine = opened("64MiB", 2)
    state = State()
    engine.write(storage, "00", 0, [literal(b"data")])
    residence = engine.reside(storage, state.items(engine))
    assert residence is not None
    residence.stage(state.items(engine))
    free = free_bytes(engine)

    def kill(event: Event) -> None:
        if event.name == "parts.pushed":
            assert isinstance(engine.lanes, WorkerLanes)
            os.kill(engine.lanes.pids[1], signal.SIGKILL)

    def write() -> object:
        if is_resident:
            return engine.write_staged(storage, "0a", 0, residence)
        return engine.write(storage, "0a", 0, state.items(engine))

    names = storage.list()
    end = subscribe(kill)
    try:
        with pytest.raises(WorkerDied) as caught:
            write()
    finally:
        end()
    assert (caught.value.lane, caught.value.rank, caught.value.path) == (1, 0, storage.url)
    assert caught.value.exit_status == -signal.SIGKILL
    assert storage.list() == names
    assert free_bytes(engine) == free
    assert not residence.is_lost
    state.change()
    residence.stage(state.items(engine))
    check(storage, engine.write_staged(storage, "0b", 0, residence), state.data(engine))
    engine.drop(residence)
    check(storage, engine.write(storage, "0c", 0, state.items(engine)), state.data(engine))
    assert_is_whole(engine)
    engine.close()


@pytest.mark.slow
def test_a_save_that_gets_nowhere_names_the_lane(storage: Storage) -> None:
    engine = opened("64MiB", 2, distributed_timeout_minutes=0.5 / 60)
    state = State()
    engine.write(storage, "00", 0, [literal(b"data")])
    assert isinstance(engine.lanes, WorkerLanes)
    names = storage.list()
    os.kill(engine.lanes.pids[1], signal.SIGSTOP)
    started = time.monotonic()
    resume = threading.Timer(1.0, os.kill, (engine.lanes.pids[1], signal.SIGCONT))
    resume.start()
    with pytest.raises(WriteError, match="lanes that have not finished: 1") as caught:
        engine.write(storage, "0a", 0, state.items(engine))
    assert time.monotonic() - started > 0.5
    assert (caught.value.errno, caught.value.lane, caught.value.rank) == (errno.ETIMEDOUT, 1, 0)
    assert "--distributed-timeout-minutes" in str(caught.value)
    resume.join()
    assert storage.list() == names
    assert_is_whole(engine)
    check(storage, engine.write(storage, "0b", 0, state.items(engine)), state.data(engine))
    engine.close()


@pytest.mark.slow
def test_a_state_is_staged_while_another_save_runs(storage: Storage) -> None:
    engine = opened("128MiB", 2)
    first, second = State(), State()
    residences = [engine.reside(storage, state.items(engine)) for state in (first, second)]
    assert residences[0] is not None
    assert residences[1] is not None
    stop = threading.Event()
    errors: list[str] = []
    staged = threading.Lock()

    def train() -> None:
        assert residences[1] is not None
        while not stop.is_set():
            second.change()
            with staged:
                residences[1].stage(second.items(engine))

    training = threading.Thread(target=train)
    training.start()
    for number in range(8):
        residences[0].stage(first.items(engine))
        try:
            check(storage, engine.write_staged(storage, f"{number:x}0", 0, residences[0]), first.data(engine))
        except AssertionError as error:
            errors.append(str(error))
        first.change()
    with staged:
        stop.set()
    training.join(10)
    assert not errors
    check(storage, engine.write_staged(storage, "0f", 0, residences[1]), second.data(engine))
    engine.close()


@pytest.mark.slow
def test_one_save_waits_for_the_other_while_that_gets_on(storage: Storage) -> None:
    engine = opened(distributed_timeout_minutes=0.3 / 60)
    held = threading.Event()

    def hold() -> None:
        with engine._lock:
            held.set()
            for _ in range(5):
                engine.deadline.progress()
                pause.wait(0.1)

    pause = threading.Event()
    holding = threading.Thread(target=hold)
    holding.start()
    assert held.wait(5)
    check(storage, engine.write(storage, "0a", 0, [literal(b"data")]), [b"data"])
    holding.join(5)
    with engine._lock:
        error: list[WriteError] = []

        def write() -> None:
            try:
                engine.write(storage, "0b", 4, [literal(b"data")])
            except WriteError as raised:
                error.append(raised)

        engine.deadline.progress()
        waiting = threading.Thread(target=write)
        waiting.start()
        waiting.join(5)
    assert [(found.errno, found.rank) for found in error] == [(errno.ETIMEDOUT, 4)]
    assert "earlier save" in str(error[0])
    engine.close()


def test_what_is_prepared_is_used(storage: Storage) -> None:
    engine = opened("64MiB", 2)
    data = [random_bytes(9 * MIB, number) for number in range(3)]
    held = engine.prewarm([len(part) for part in data]).result(20)
    assert held >= sum(map(len, data))
    assert isinstance(engine.lanes, WorkerLanes)
    pids = engine.lanes.pids
    assert len(pids) == 2
    items = [literal(part) for part in data]
    residence = engine.reside(storage, items)
    assert residence is not None
    residence.stage(items)
    assert engine.arena.reserved_bytes == held
    check(storage, engine.write_staged(storage, "0a", 0, residence), data)
    assert engine.lanes.pids == pids
    engine.drop(residence)
    # More than the budget holds: what waves need.
    assert engine.prewarm([1 << 40]).result(20) <= 64 * MIB
    engine.close()


def test_events_tell_what_was_pushed_and_written(engine: Engine, storage: Storage) -> None:
    events: list[Event] = []
    end = subscribe(events.append)
    try:
        written = engine.write(storage, "0a", 0, [literal(bytes(5 * MIB)), literal(b"data")])
    finally:
        end()
    assert written is not None
    assert {"parts.pushed", "part.written", "files.written"} <= {event.name for event in events}
    last = events[-1]
    told = {"save_id": "0a", "rank": 0, "names": written.names, "nbytes": written.image.nbytes}
    assert last.name == "files.written"
    assert told.items() <= dict(last.fields).items()
    pushed = [event for event in events if event.name == "parts.pushed"]
    assert [event.fields["parts"] for event in pushed] == [list(range(len(written.image.parts)))]


def test_events_tell_how_long_copies_took(
    engine: Engine, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [literal(bytes(5 * MIB))]
    residence = engine.reside(storage, items)
    assert residence is not None
    events: list[Event] = []
    end = subscribe(events.append)
    try:
        for save_id, since_s in (("0a", None), ("0b", time.monotonic())):
            monkeypatch.setattr(Residence, "copying_since_s", since_s)
            residence.stage(items)
            assert residence.arrived_s is None
            engine.write_staged(storage, save_id, 0, residence)
    finally:
        end()
    [copied] = [event for event in events if event.name == "state.copied"]
    seen_s: list[Any] = [
        event.fields["ready_s"]
        for event in events
        if event.name == "part.written" and event.fields["save_id"] == "0b"
    ]
    assert copied.fields["save_id"] == "0b", "nothing was copied off a device before"
    assert copied.fields["start_s"] == since_s
    assert copied.fields["end_s"] == min(max(seen_s), residence.arrived_s)
    engine.drop(residence)


@pytest.mark.parametrize(
    ("budget", "workers", "part_bytes"),
    [("1GiB", 1, 32 * MIB), ("100MiB", 2, 4 * MIB), ("1MiB", 8, 4 * MIB)],
)
def test_parts_suit_the_budget(budget: str, workers: int, part_bytes: int) -> None:
    engine = opened(budget, workers)
    assert engine.part_bytes == part_bytes
    engine.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_parts_are_as_large_as_was_asked_for(workers: int, storage: Storage) -> None:
    engine = opened("400MiB", workers, ckpt_bucket_bytes="64MiB")
    try:
        assert engine.part_bytes == engine.arena.window_bytes == engine.arena.spare_bytes == 64 * MIB
        assert (
            max(part.nbytes for part in engine.lay_out(storage, [literal(bytes(70 * MIB))]).parts) == 64 * MIB
        )
        image = engine.lay_out(
            open_storage("s3://bucket/x", {"key": "a", "secret": "b"}), [literal(bytes(40 * MIB))]
        )
        assert max(part.nbytes for part in image.parts) == 16 * MIB
    finally:
        engine.close()


def test_buckets_that_a_relative_budget_does_not_hold_are_refused_when_the_engine_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "available_memory", lambda: 512 * MIB)
    monkeypatch.setattr(engine_module, "local_ranks", lambda: 2)
    # 25 % of it and half of that: two buckets for the lane and two more.
    assert opened("25%", ckpt_bucket_bytes="16MiB").part_bytes == 16 * MIB
    with pytest.raises(ConfigError, match=r"budget of 67108864 bytes .* at most 16MiB, got '32MiB'"):
        opened("25%", ckpt_bucket_bytes="32MiB")


def test_files_whose_creation_is_interrupted_are_given_up(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several are created at once; those that are under way end, and are given up with the others."""
    engine = opened(workers=1)
    create = type(storage).create_image
    created: list[str] = []

    def slow(name: str, nbytes: int) -> str:
        time.sleep(0.5)
        token = create(storage, name, nbytes)
        created.append(name)
        return token

    def interrupt(calls: object) -> None:
        time.sleep(0.1)
        raise KeyboardInterrupt

    storage.at_once = 4  # type: ignore[attr-defined]
    monkeypatch.setattr(storage, "create_image", slow)
    with monkeypatch.context() as patched:
        patched.setattr(engine_module, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.write(storage, "0a", 0, [literal(bytes(3 * MIB)) for _ in range(6)], num_files=4)
    assert len(created) == 4
    assert storage.list() == {}
    engine.close()


@pytest.mark.slow
def test_an_interrupted_close_is_ended_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(workers=2)
    engine.lanes.start()
    assert engine.arena.try_reserve(KIB) is not None

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for owner, method in ((subprocess.Popen, "wait"), (engine.stager, "collect"), (engine.arena, "_drop")):
        with monkeypatch.context() as interrupted:
            interrupted.setattr(owner, method, interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.close()
    engine.close()
    assert engine.lanes.pids == []
    assert engine.arena.slabs == {}
    assert engine._lock.acquire(blocking=False)
