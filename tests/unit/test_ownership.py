"""Each rank works out what it writes: together they write everything, and nothing twice."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import Replicate, Shard

from distckpt.assembly import entry_of
from distckpt.errors import StagingError
from distckpt.manifest import ManifestRef, PartialManifest
from distckpt.ownership import (
    Common,
    Piece,
    Rules,
    Shares,
    _as_text,
    _holders,
    common_from_json,
    common_to_json,
    divide,
    find_common,
    members_in,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem

MIB = 1 << 20
RANKS = (10, 12, 13, 17)
NOTHING: dict[str, Any] = {}


class Entry(NamedTuple):
    """A plain entry of a state: a tensor of so many rows of 1 KiB, or an object if that is None."""

    name: str
    rows: int | None


ENTRIES = [Entry("a", 3), Entry("b", 5000), Entry("c", None), Entry("d", 1), Entry("e", 4096), Entry("f", 0)]


def items_of(entries: list[Entry]) -> list[WriteItem]:
    state = {
        name: "object" if rows is None else torch.empty(rows, 256, device="meta") for name, rows in entries
    }
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    return planner.create_local_plan().items


def manifest_of(rank: int, pieces: list[Piece], shares: Shares) -> PartialManifest:
    items = [piece.item for piece in pieces]
    table = {
        "fqns": [item.index.fqn for item in items],
        "chunks": [item.index.offset for item in items],
        "entries": [entry_of(piece.item, None, plain_rows=piece.plain_rows) for piece in pieces],
    }
    head = {"rank": rank, "shares": shares._asdict()}
    return PartialManifest(ManifestRef("", "", {}), head, json.dumps(table).encode())


def save(
    states: list[list[Entry]], common: Common | None, *, is_parallel: bool = True
) -> tuple[list[list[Piece]], list[PartialManifest]]:
    pieces, manifests = [], []
    for rank, state in zip(RANKS, states, strict=False):
        own, shares = divide(
            items_of(state),
            NOTHING.__getitem__,
            Rules(RANKS[: len(states)], rank, is_parallel=is_parallel, common=common),
        )
        pieces.append(own)
        manifests.append(manifest_of(rank, own, shares))
    return pieces, manifests


def written(pieces: list[list[Piece]]) -> dict[str, list[tuple[int, int] | None]]:
    found = defaultdict(list)
    for own in pieces:
        for piece in own:
            found[piece.item.index.fqn].append(piece.rows)
    return found


states = st.lists(
    st.permutations(ENTRIES).flatmap(lambda order: st.integers(0, 6).map(lambda count: order[:count])),
    min_size=2,
    max_size=4,
)


@hypothesis.given(states, st.booleans())
def test_plain_items_are_written_once_when_they_are_known(
    states: list[list[Entry]], is_parallel: bool
) -> None:
    first, manifests = save(states, None, is_parallel=is_parallel)
    assert [[(piece.item.index.fqn, piece.rows) for piece in own] for own in first] == [
        [(entry.name, None) for entry in state] for state in states
    ], "each writes all of its own"
    assert not any(manifest.head["shares"]["relies"] for manifest in manifests)
    common = find_common(manifests)
    assert common_from_json(json.loads(json.dumps(common_to_json(common)))) == common
    second, manifests = save(states, common, is_parallel=is_parallel)
    expected = {entry.name: entry.rows for state in states for entry in state}
    found = written(second)
    assert found.keys() == expected.keys()
    for name, pieces in found.items():
        if pieces != [None]:
            at = 0
            for piece in sorted(filter(None, pieces)):
                assert piece[0] == at
                at = piece[1]
            assert None not in pieces
            assert at == expected[name]
            assert is_parallel
    for place, state in enumerate(states):
        names = {entry.name for entry in state}
        shares = any(
            names & {entry.name for entry in other} for at, other in enumerate(states) if at != place
        )
        relies = manifests[place].head["shares"]["relies"]
        assert relies == (common.digest if shares else "")


def test_equal_states_are_shared_equally() -> None:
    states = [ENTRIES] * 4
    common = find_common(save(states, None)[1])
    assert common.classes == (("0-3", None),), "no names where all have the same"
    pieces, _ = save(states, common)
    total = sum(entry.rows or 0 for entry in ENTRIES) * 1024
    for own in pieces:
        nbytes = sum(
            (piece.item.tensor_data.chunk.sizes.numel() if piece.item.tensor_data else 0) * 4 for piece in own
        )
        assert nbytes == pytest.approx(total / 4, abs=MIB)
    assert [piece.item.index.fqn for piece in pieces[0]].count("c") == 1, "an object is the first rank's"


def test_a_state_that_has_changed_is_not_shared() -> None:
    common = find_common(save([ENTRIES] * 2, None)[1])
    changed = [*ENTRIES, Entry("new", 1)]
    pieces, shares = divide(items_of(changed), NOTHING.__getitem__, Rules(RANKS[:2], RANKS[1], common=common))
    assert [piece.item.index.fqn for piece in pieces] == [entry.name for entry in changed]
    assert shares.relies == ""


def test_one_rank_alone_writes_all() -> None:
    pieces, shares = divide(items_of(ENTRIES), NOTHING.__getitem__, Rules((3,), 3))
    assert len(pieces) == len(ENTRIES)
    assert shares == Shares()


@hypothesis.given(st.sets(st.integers(0, 40), min_size=1).map(sorted))
def test_members_as_text(members: list[int]) -> None:
    assert members_in(_as_text(members)) == members


def test_many_members_are_a_short_text() -> None:
    assert _as_text(range(1000)) == "0-999"
    assert _as_text([0, 2, 3, 4, 9]) == "0,2-4,9"


@hypothesis.given(st.data())
def test_holders_of_chunks_of_a_mesh(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    placements = [data.draw(st.sampled_from([Shard(0), Shard(1), Replicate()])) for _ in shape]
    world = torch.Size(shape).numel()
    ranks = data.draw(st.permutations(range(100, 100 + world)))
    mesh = torch.tensor(ranks).reshape(shape)
    participants = data.draw(st.sets(st.sampled_from(ranks), min_size=1))
    chunks: dict[tuple[int, ...], list[int]] = defaultdict(list)
    coordinates: dict[int, tuple[int, ...]] = {}
    for coordinate in product(*map(range, shape)):
        rank = int(mesh[coordinate])
        coordinates[rank] = coordinate
        key = tuple(at for at, placement in zip(coordinate, placements, strict=True) if placement.is_shard())
        if rank in participants:
            chunks[key].append(rank)
        else:
            chunks[key] += []
    for rank in participants:
        stand_in: Any = SimpleNamespace(mesh=mesh, get_coordinate=lambda rank=rank: coordinates[rank])
        rules = Rules(tuple(sorted(participants)), rank)
        if not all(chunks.values()):
            with pytest.raises(StagingError, match="'x' has a chunk that no participant holds"):
                _holders(stand_in, placements, "x", rules)
            continue
        holders = _holders(stand_in, placements, "x", rules)
        assert rank in holders
        assert sorted(holders) in [sorted(found) for found in chunks.values()]
