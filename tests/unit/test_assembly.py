"""The metadata of a checkpoint is put together from what its ranks say that they wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, permutations
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from distckpt.assembly import ReplicasDiffer, StateChanged, assemble, entry_of
from distckpt.errors import CommitError
from distckpt.manifest import ItemTable, Manifest, PartialManifest, read_partial, write_manifest
from distckpt.metadata import DCP_VERSION, pickle_metadata
from distckpt.ownership import Common, Shares
from distckpt.storage import Storage, open_storage
from unit.tensors import tensors

_NO_SHARES = Shares()


class Piece(NamedTuple):
    """One item of a rank: a chunk of a tensor, or an object, which has no size."""

    fqn: str
    offset: Sequence[int] | None = None
    chunk_size: Sequence[int] | None = None
    size: Sequence[int] | None = None
    dtype: str | None = "float32"
    requires_grad: bool = False
    path: Sequence[Any] | None = None

    @property
    def entry(self) -> list[Any]:
        path = None if self.path is None else list(self.path)
        if self.size is None:
            return [None, None, None, None, path, True]
        return [list(self.size), list(self.chunk_size or ()), self.dtype, self.requires_grad, path, False]


def rows(fqn: str, low: int, high: int, of: int, **others: Any) -> Piece:
    return Piece(fqn, (low, 0), (high - low, 3), (of, 3), **others)


def whole(fqn: str, *size: int, **others: Any) -> Piece:
    return Piece(fqn, (0,) * len(size), size, size, **others)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Storage:
    return open_storage(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def put_together(storage: Storage) -> Callable[..., Metadata]:
    """Let ranks write their manifests, and the coordinator read them and put them together."""

    def run(
        *ranks: Sequence[Piece],
        shares: Mapping[int, Shares] = MappingProxyType({}),
        common: Common | None = None,
    ) -> Metadata:
        manifests = [
            manifest(storage, rank, pieces, shares.get(rank, Shares())) for rank, pieces in enumerate(ranks)
        ]
        return assemble(manifests, "where/it/is", "0a", common)

    return run


def manifest(
    storage: Storage, rank: int, pieces: Sequence[Piece], shares: Shares = _NO_SHARES
) -> PartialManifest:
    """Write the manifest of a rank with two files, which have its items in turn; read it back."""
    count = len(pieces)
    table = ItemTable(
        [piece.fqn for piece in pieces],
        [piece.offset for piece in pieces],
        [number % 2 for number in range(count)],
        [64 * number for number in range(count)],
        [number + 1 for number in range(count)],
        [piece.entry for piece in pieces],
    )
    files = {name_of(rank, 0): 1, name_of(rank, 1): 1}
    plan = f"plan of {rank}"
    write_manifest(
        storage,
        Manifest("0a", rank, "torch_dist", plan, files, [b"", b""], table, shares._asdict()),
    )
    found = read_partial(storage, "0a", rank)
    assert found is not None
    return found


def name_of(rank: int, number: int) -> str:
    return f"__{rank}_{number % 2}.distcp"


def info_of(rank: int, number: int) -> _StorageInfo:
    return _StorageInfo(name_of(rank, number), 64 * number, number + 1)


def chunk(offset: Sequence[int], size: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(size))


Assemble = Callable[..., Metadata]


@st.composite
def spread_grids(draw: st.DrawFn) -> tuple[list[int], list[list[Piece]]]:
    """Draw a shape, and ranks that have the boxes of a grid over it, some of them more than one rank."""
    cuts = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=3))
    boxes: list[tuple[list[int], list[int]]] = [([], [])]
    for steps in cuts:
        starts = [sum(steps[:at]) for at in range(len(steps))]
        boxes = [
            ([*offset, start], [*size, step])
            for offset, size in boxes
            for start, step in zip(starts, steps, strict=True)
        ]
    shape = [sum(steps) for steps in cuts]
    world = draw(st.integers(1, 4))
    ranks: list[list[Piece]] = [[] for _ in range(world)]
    for offset, size in draw(st.permutations(boxes)):
        for rank in draw(st.sets(st.integers(0, world - 1), min_size=1)):
            ranks[rank].append(Piece("t", offset, size, shape))
    return shape, ranks


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(spread_grids())
def test_chunks_of_all_ranks(put_together: Assemble, grid: tuple[list[int], list[list[Piece]]]) -> None:
    shape, ranks = grid
    metadata = put_together(*ranks)
    entry = metadata.state_dict_metadata["t"]
    assert isinstance(entry, TensorStorageMetadata)
    assert list(entry.size) == shape
    expected: dict[tuple[int, ...], tuple[tuple[int, ...], _StorageInfo]] = {}
    for rank, pieces in enumerate(ranks):
        for number, piece in enumerate(pieces):
            assert piece.offset is not None
            expected.setdefault(tuple(piece.offset), (tuple(piece.chunk_size or ()), info_of(rank, number)))
    assert {tuple(one.offsets): tuple(one.sizes) for one in entry.chunks} == {
        offset: size for offset, (size, _) in expected.items()
    }
    assert len(entry.chunks) == len(expected)
    assert metadata.storage_data == {
        MetadataIndex("t", torch.Size(offset)): info for offset, (_, info) in expected.items()
    }
    for index in metadata.storage_data:
        assert index.index is not None
        assert entry.chunks[index.index].offsets == index.offset


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(spread_grids(), st.data())
def test_a_chunk_that_nobody_has(
    put_together: Assemble, grid: tuple[list[int], list[list[Piece]]], data: st.DataObject
) -> None:
    _, ranks = grid
    lost = data.draw(st.sampled_from([piece.offset for pieces in ranks for piece in pieces]))
    kept = [[piece for piece in pieces if piece.offset != lost] for pieces in ranks]
    hypothesis.assume(any(kept))
    with pytest.raises(CommitError, match="not published: nobody wrote 't' completely"):
        put_together(*kept)


def test_what_several_ranks_have_is_read_from_the_first(put_together: Assemble) -> None:
    ranks = [
        [Piece("x"), rows("t", 0, 2, 4)],
        [whole("p", 3), rows("t", 2, 4, 4), Piece("x")],
        [whole("p", 3)],
    ]
    metadata = put_together(*ranks)
    assert metadata.storage_data == {
        MetadataIndex("x"): info_of(0, 0),
        MetadataIndex("t", torch.Size((0, 0))): info_of(0, 1),
        MetadataIndex("p", torch.Size((0,))): info_of(1, 0),
        MetadataIndex("t", torch.Size((2, 0))): info_of(1, 1),
    }
    assert metadata.state_dict_metadata == {
        "x": BytesStorageMetadata(),
        "t": TensorStorageMetadata(
            TensorProperties(torch.float32),
 torch.Size((4, 3)), [chunk((0, 0), (2, 3)), chunk((2, 0), (2, 3))],
        ),
        "p": TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size((3,)), [chunk((0,), (3,))]
        ),
    }  # fmt: skip


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize(
    ("one", "other"),
    list(
        combinations(
            [
                Piece("t"),
                rows("t", 0, 2, 4),
                rows("t", 0, 2, 5),
                rows("t", 0, 2, 4, dtype="bfloat16"),
                whole("t", 4),
                whole("t"),
            ],
            2,
        )
    ),
)
def test_ranks_that_contradict_each_other(
    put_together: Assemble, one: Piece, other: Piece, order: int
) -> None:
    both = [one, other][:: 1 - 2 * order]
    with pytest.raises(
        CommitError, match="'t' is another thing on rank 2 than on the ranks before it"
    ) as caught:
        put_together([whole("a", 2)], [both[0], Piece("x")], [Piece("x"), both[1]])
    assert caught.value.rank == 2


@pytest.mark.parametrize(
    "pieces",
    [
        [rows("t", 0, 2, 4)],
        [rows("t", 0, 2, 4), rows("t", 3, 4, 4)],
        [rows("t", 0, 3, 4), rows("t", 2, 4, 4)],
        [rows("t", 0, 2, 4), rows("t", 0, 3, 4)],
        [rows("t", 0, 2, 4), rows("t", 2, 5, 4)],
        [rows("t", 0, 0, 4)],
    ],
    ids=["half", "gap", "overlap", "one within the other", "outside", "nothing of it"],
)
def test_chunks_that_do_not_fill_their_tensor(put_together: Assemble, pieces: list[Piece]) -> None:
    with pytest.raises(CommitError, match="not published: nobody wrote 't' completely"):
        put_together([whole("a", 2)], *[[piece] for piece in pieces])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1), (3, 1, 2, 0)], ids=str)
def test_empty_shards_at_the_offsets_of_real_ones(put_together: Assemble, order: tuple[int, ...]) -> None:
    shards = [rows("t", 0, 4, 6), rows("t", 4, 6, 6), rows("t", 0, 0, 6), rows("t", 4, 4, 6)]
    metadata = put_together(*[[shards[at]] for at in order])
    entry = metadata.state_dict_metadata["t"]
    assert isinstance(entry, TensorStorageMetadata)
    assert {tuple(one.sizes) for one in entry.chunks} == {(4, 3), (2, 3)}
    assert metadata.storage_data == {
        MetadataIndex("t", torch.Size((0, 0))): info_of(order.index(0), 0),
        MetadataIndex("t", torch.Size((4, 0))): info_of(order.index(1), 0),
    }


@pytest.mark.parametrize("pieces", [[whole("t", 0)], [whole("t", 0)] * 2, [whole("t", 4, 0)], [whole("t")]])
def test_tensors_without_a_dim_or_an_element(put_together: Assemble, pieces: list[Piece]) -> None:
    metadata = put_together(*[[piece] for piece in pieces])
    entry = metadata.state_dict_metadata["t"]
    assert isinstance(entry, TensorStorageMetadata)
    assert list(entry.size) == list(pieces[0].size or ())
    assert len(entry.chunks) == len(metadata.storage_data) == 1


def test_ranks_without_an_item(put_together: Assemble) -> None:
    assert put_together([], [whole("t", 1)], []).storage_data == {
        MetadataIndex("t", torch.Size((0,))): info_of(1, 0)
    }
    assert put_together([], []).state_dict_metadata == {}


def test_what_one_wrote_whole_and_others_in_parts(put_together: Assemble) -> None:
    """Only some of the ranks knew that they had the same."""
    for order in permutations([[rows("t", 0, 4, 6)], [rows("t", 0, 6, 6)], [rows("t", 2, 6, 6)]]):
        metadata = put_together(*order)
        entry = metadata.state_dict_metadata["t"]
        assert isinstance(entry, TensorStorageMetadata)
        assert entry.chunks == [chunk((0, 0), (6, 3))]
        assert metadata.storage_data == {
            MetadataIndex("t", torch.Size((0, 0)), 0): info_of(order.index([rows("t", 0, 6, 6)]), 0)
        }


def test_plain_items_that_were_left_to_others(put_together: Assemble) -> None:
    ranks = [[whole("t", 1)], [], []]
    common = Common(("a", "b", "a"), (("0,2", None),))
    shares = {0: Shares("a"), 1: Shares("b"), 2: Shares("a", common.digest)}
    found = put_together(*ranks, shares=shares, common=common)
    assert found.state_dict_metadata.keys() == {"t"}
    with pytest.raises(StateChanged, match="what rank 0 saves has changed, and rank 2 had left") as caught:
        put_together(*ranks, shares={**shares, 0: Shares("changed")}, common=common)
    assert caught.value.rank == 0
    other = common._replace(classes=(("0,2", frozenset({("t", (0,))})),))
    for told in (other, None):
        with pytest.raises(StateChanged, match="and rank 2 had left to others"):
            put_together(*ranks, shares=shares, common=told)


def test_replicas_that_were_left_to_others(put_together: Assemble) -> None:
    ranks = [[whole("t", 1)], [], [], []]
    pair, all_of_them = ("0,2", "digest"), ("0-3", "of all")
    shares = {0: Shares("", "", (pair, all_of_them)), 2: Shares("", "", (all_of_them, pair))}
    shares |= {rank: Shares("", "", (all_of_them,)) for rank in (1, 3)}
    assert put_together(*ranks, shares=shares).state_dict_metadata.keys() == {"t"}
    shares[2] = Shares("", "", (all_of_them, ("0,2", "another digest")))
    with pytest.raises(ReplicasDiffer, match="rank 2 has not the same chunks as rank 0") as caught:
        put_together(*ranks, shares=shares)
    assert caught.value.rank == 2
    shares[2] = Shares("", "", (pair,))
    with pytest.raises(ReplicasDiffer, match="rank 2 has not the same chunks as rank 0"):
        put_together(*ranks, shares=shares)


def test_paths_are_those_of_the_first_that_has_one(put_together: Assemble) -> None:
    metadata = put_together(
        [Piece("a.0", path=("a", 0)), Piece("x")], [Piece("a.0", path=("a.0",)), Piece("x", path=["x"])]
    )
    assert metadata.planner_data == {"a.0": ("a", 0), "x": ("x",)}


def test_what_else_the_metadata_says(put_together: Assemble) -> None:
    metadata = put_together([whole("t", 1, requires_grad=True)])
    assert metadata.version == DCP_VERSION
    assert metadata.storage_meta is not None
    assert (metadata.storage_meta.checkpoint_id, metadata.storage_meta.save_id) == ("where/it/is", "0a")
    entry = metadata.state_dict_metadata["t"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.properties.requires_grad
    pickle_metadata(metadata, {})


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    st.dictionaries(
        st.text(max_size=3), tensors() | st.lists(tensors(), max_size=2) | st.text(max_size=2), max_size=4
    )
)
def test_one_rank_says_what_its_planner_says(storage: Storage, state: dict[str, Any]) -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    [plan], expected = planner.create_global_plan([planner.create_local_plan()])
    pieces = []
    for item in plan.items:
        size, chunk_size, dtype, requires_grad, path, _ = entry_of(item, planner.mappings[item.index.fqn])
        pieces.append(
            Piece(item.index.fqn, item.index.offset, chunk_size, size, dtype, bool(requires_grad), path)
        )
    found = assemble([manifest(storage, 0, pieces)], "", "")
    assert found.state_dict_metadata.keys() == expected.state_dict_metadata.keys()
    for fqn, entry in expected.state_dict_metadata.items():
        other = found.state_dict_metadata[fqn]
        if isinstance(entry, TensorStorageMetadata) and isinstance(other, TensorStorageMetadata):
            assert (other.size, other.chunks) == (entry.size, entry.chunks)
            assert other.properties.dtype == entry.properties.dtype
            assert other.properties.requires_grad == entry.properties.requires_grad
        else:
            assert type(entry) is type(other)
    assert found.planner_data == expected.planner_data
    assert found.storage_data is not None
    assert found.storage_data.keys() == {item.index for item in plan.items}


def test_every_dtype_has_a_name(put_together: Assemble, tmp_path: Path) -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    pieces = [whole(str(dtype), 1, dtype=str(dtype).removeprefix("torch.")) for dtype in dtypes]
    entries = put_together(pieces).state_dict_metadata
    for dtype in dtypes:
        entry = entries[str(dtype)]
        assert isinstance(entry, TensorStorageMetadata)
        assert entry.properties.dtype == dtype
