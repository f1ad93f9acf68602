"""The engine: how files are cut, and one save over real lanes and storage."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distckpt.config import CheckpointConfig
from distckpt.engine import _MAX_PIECES, Engine, Placement, _File, _Work, _works
from distckpt.errors import WriteError
from distckpt.formats import LARGE_ALIGNMENT, Frame, lay_out
from distckpt.observe import subscribe
from distckpt.staging import Item
from distckpt.storage import Storage, open_storage
from distckpt.worker import CHECKSUM_BLOCK_BYTES, ZEROS, block_spans, checksum

MIB = 1 << 20


def literal(data: bytes) -> Item:
    return Item(Frame(data, b""))


@st.composite
def files(draw: st.DrawFn) -> _File:
    """Draw a file whose first items are not staged and whose others lie about in the arena."""
    sizes = st.one_of(st.integers(0, 5000), st.integers(1 << 19, 3 * CHECKSUM_BLOCK_BYTES))
    unstaged = draw(st.lists(sizes, max_size=12))
    # Staged items have a payload, and so a size.
    staged = [max(1, size) for size in draw(st.lists(sizes, max_size=12))]
    items = []
    for size in unstaged:
        item = literal(b"")
        item.size = size
        items.append(item)
    slab, position = 0, 0
    for size in staged:
        if draw(st.booleans()):
            slab, position = draw(st.integers(0, 3)), draw(st.integers(0, 1000)) * 4096
        position = -(-position // 64) * 64
        item = literal(b"")
        item.size, item.home = size, (slab, position)
        items.append(item)
        position += size
    layout = lay_out([item.size for item in items])
    placements = [
        Placement("", offset, item.size) for item, offset in zip(items, layout.offsets, strict=True)
    ]
    return _File(0, ("file",), list(range(len(items))), items, layout.offsets, layout.nbytes, placements)


def spans_of(work: _Work) -> list[tuple[int, int]]:
    return [
        (work.low + start, nbytes) for start, nbytes in zip(work.spans[::2], work.spans[1::2], strict=True)
    ]


@given(files(), st.integers(1, 4), st.booleans())
def test_a_file_is_cut_into_parts_that_cover_it(file: _File, blocks: int, checksums: bool) -> None:
    range_bytes = blocks * CHECKSUM_BLOCK_BYTES
    works = list(_works(file, range_bytes, checksums))
    places = [(place.offset, place.nbytes) for place in file.placements if place.nbytes]
    end = 0
    for work in works:
        # Only padding may be left out, and so be a hole that reads as zeros.
        assert 0 <= work.low - end < LARGE_ALIGNMENT
        if work.low > end:
            assert not any(offset < work.low and offset + size > end for offset, size in places)
        end = work.high
        assert len(work.pieces) <= _MAX_PIECES + 1
        if work.pieces:
            assert sum(nbytes for _, _, nbytes in work.pieces) == work.high - work.low
        else:
            assert work.high - work.low <= range_bytes
    assert end == file.nbytes
    assert [work.is_last for work in works] == [False] * (len(works) - 1) + [True]


@given(files(), st.integers(1, 4))
def test_checksums_cover_each_item_and_cross_no_part_and_no_piece(file: _File, blocks: int) -> None:
    covered: dict[int, list[tuple[int, int]]] = {}
    for work in _works(file, blocks * CHECKSUM_BLOCK_BYTES, True):
        ends = [work.low]
        for _, _, nbytes in work.pieces or [(0, 0, work.high - work.low)]:
            ends.append(ends[-1] + nbytes)
        for owner, (start, nbytes) in zip(work.owners, spans_of(work), strict=True):
            covered.setdefault(owner, []).append((start, nbytes))
            assert work.low <= start < start + nbytes <= work.high
            assert any(low <= start and start + nbytes <= high for low, high in pairwise(ends))
        assert work.spans[::2] == sorted(work.spans[::2])
    for owner, (offset, item) in enumerate(zip(file.offsets, file.items, strict=True)):
        assert covered.get(owner, []) == list(block_spans(offset, item.size))


@given(files(), st.integers(1, 4))
def test_pieces_of_staged_items_are_where_they_were_staged(file: _File, blocks: int) -> None:
    homes = {
        offset: (item.home, item.size)
        for offset, item in zip(file.offsets, file.items, strict=True)
        if item.home is not None
    }
    for work in _works(file, blocks * CHECKSUM_BLOCK_BYTES, False):
        at = work.low
        for slab, slab_offset, nbytes in work.pieces:
            for offset, (home, size) in homes.items():
                low, high = max(offset, at), min(offset + size, at + nbytes)
                if low < high:
                    assert home == (slab, slab_offset + (low - at) - (low - offset))
            if slab == ZEROS:
                assert nbytes < 4096
            at += nbytes


@pytest.fixture(params=[1, 2])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    opened = Engine.open(CheckpointConfig(dist_ckpt_workers=request.param, ckpt_host_memory="24MiB"))
    yield opened
    opened.close()


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "checkpoint")


def check(storage: Storage, placements: list[Placement], data: list[bytes], checksums: bool = True) -> None:
    assert len(placements) == len(data)
    for place, expected in zip(placements, data, strict=True):
        assert storage.read(place.file, place.offset, place.nbytes) == bytearray(expected)
        blocks = [
            checksum(expected[at - place.offset : at - place.offset + n])
            for at, n in block_spans(place.offset, place.nbytes)
        ]
        assert place.checksums == (blocks if checksums else [])


def test_items_of_all_sizes_are_written(engine: Engine, storage: Storage) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [0, 1, 63, 64, 65, 4096, MIB - 1, MIB, MIB + 1, 5 * MIB, 0, 7]
    data = [bytes(torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator).numpy()) for n in sizes]
    check(storage, engine.write(storage, "0a", 3, [literal(part) for part in data]), data)
    assert set(storage.list()) <= {"__3_0.distcp", "__3_1.distcp"}
    # Once more, to the same place: nothing of the first save is written to.
    check(storage, engine.write(storage, "0b", 3, [literal(part) for part in data]), data)
    assert {name for name in storage.list() if name.endswith(".0b")}


@pytest.mark.slow
def test_more_than_the_budget_is_written_in_waves(engine: Engine, storage: Storage) -> None:
    tensor = torch.arange(6 * MIB, dtype=torch.int64)
    item = engine.item(tensor)
    prefix, suffix = item.frame
    in_flight, most = 0, 0
    lock = threading.Lock()

    def count(event: Any) -> None:
        nonlocal in_flight, most
        with lock:
            in_flight += {"range.submitted": 1, "range.written": -1}.get(event.name, 0)
            most = max(most, in_flight)

    end = subscribe(count)
    placements = engine.write(storage, "0a", 0, [item])
    end()
    check(storage, placements, [prefix + tensor.numpy().tobytes() + suffix])
    assert most <= engine.lanes.count * engine.lanes.depth
    assert engine.arena.reserved_bytes <= 24 * MIB
    assert item.tensor is None, "the tensor is let go"


def test_staged_and_unstaged_items_share_files(engine: Engine, storage: Storage) -> None:
    state = {f"weight{n}": torch.full((n * 1000,), n) for n in range(1, 20)}
    staged, ticket = engine.stage(state)
    ticket.wait(5)
    items, data = [], []
    for name, tensor in staged.items():
        item = engine.item(tensor)
        assert item.home is not None
        data.append(item.frame.prefix + state[name].numpy().tobytes() + item.frame.suffix)
        data.append(name.encode() * 100)
        items += [item, literal(data[-1])]
    check(storage, engine.write(storage, "0a", 0, items), data)


def test_without_checksums_there_are_none(storage: Storage) -> None:
    engine = Engine.open(CheckpointConfig(ckpt_checksum="none"))
    check(storage, engine.write(storage, "0a", 0, [literal(b"data")]), [b"data"], checksums=False)
    engine.close()


def test_no_items_start_nothing(storage: Storage) -> None:
    engine = Engine.open(CheckpointConfig(dist_ckpt_workers=2))
    assert engine.write(storage, "0a", 0, []) == []
    assert not Path(storage.url).exists()
    engine.close()


def test_a_failed_save_gives_everything_back(engine: Engine, storage: Storage) -> None:
    storage.prepare()
    for lane in range(2):
        # The image cannot be created under either name.
        Path(storage.url, f"__0_{lane}.distcp").mkdir()
        Path(storage.url, f"__0_{lane}.distcp.0a").mkdir()
    with pytest.raises(WriteError) as caught:
        engine.write(storage, "0a", 0, [literal(bytes(3 * MIB)) for _ in range(6)])
    assert (caught.value.errno, caught.value.rank) == (errno.EEXIST, 0)
    assert caught.value.lane in range(engine.lanes.count)
    whole = engine.arena.try_reserve(engine.arena.budget_bytes)
    assert whole is not None, "a range was lost"
    engine.arena.release(whole)
    data = [b"data"] * 3
    check(storage, engine.write(storage, "0b", 0, [literal(part) for part in data]), data)


@pytest.mark.slow
def test_one_save_waits_for_the_other_while_that_gets_on(storage: Storage, tmp_path: Path) -> None:
    engine = Engine.open(CheckpointConfig(distributed_timeout_minutes=0.3 / 60))
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


@pytest.mark.parametrize(
    ("budget", "workers", "range_bytes"),
    [("1GiB", 1, 32 * MIB), ("100MiB", 2, 4 * MIB), ("1MiB", 8, 4 * MIB)],
)
def test_ranges_suit_the_budget(budget: str, workers: int, range_bytes: int) -> None:
    engine = Engine.open(CheckpointConfig(ckpt_host_memory=budget, dist_ckpt_workers=workers))
    assert engine.range_bytes == range_bytes
    engine.close()
