"""What replicas write of what they share, planned without ranks."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as TorchSavePlanner

from distckpt import SavePlanner
from distckpt import planner as planner_module
from distckpt.planner import WholeItem, local_rows, narrow_item, share_plans
from unit.tensors import memory_of, tensors

MIB = 1 << 20
LARGE = torch.arange(2 * MIB, dtype=torch.float32).reshape(4096, 512)


@pytest.fixture(autouse=True)
def empty_caches() -> Iterator[None]:
    """torch keeps them on the class, for the whole process."""
    caches: list[dict[str, Any]] = [
        value for name, value in vars(TorchSavePlanner).items() if name.startswith("_cached")
    ]
    for cache in caches:
        cache.clear()
    yield
    for cache in caches:
        cache.clear()


def plan_alone(
    states: list[dict[str, Any]], **settings: Any
) -> tuple[list[SavePlanner], list[SavePlan], Metadata]:
    """Plan what torch's driver would on as many ranks."""
    planners = [SavePlanner(**settings) for _ in states]
    plans = []
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, is_coordinator=rank == 0)
        plans.append(planner.create_local_plan())
    shared, metadata = planners[0].create_global_plan(plans)
    finished = [planner.finish_plan(plan) for planner, plan in zip(planners, shared, strict=True)]
    return planners, finished, metadata


def written(planners: list[SavePlanner], plans: list[SavePlan], metadata: Metadata) -> dict[str, Any]:
    """Put what the ranks write together."""
    found: dict[str, Any] = {}
    for planner, plan in zip(planners, plans, strict=True):
        for item in plan.items:
            data = planner.resolve_data(item)
            if isinstance(data, io.BytesIO):
                data.seek(0)
                assert item.index.fqn not in found
                found[item.index.fqn] = torch.load(data)
                continue
            entry = metadata.state_dict_metadata[item.index.fqn]
            assert isinstance(entry, TensorStorageMetadata)
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            assert data.shape == chunk.sizes
            whole = found.setdefault(item.index.fqn, torch.zeros(entry.size, dtype=entry.properties.dtype))
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                whole = whole.narrow(dim, offset, size)
            whole.copy_(data)
    return found


def names(plan: SavePlan) -> list[str]:
    return [item.index.fqn for item in plan.items]


def chunk_item(
    offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> WriteItem:
    data = TensorWriteData(
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
        TensorProperties(dtype=dtype),
        torch.Size((4096, 512)),
    )
    return WriteItem(MetadataIndex("x", torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)


def test_a_large_tensor_is_split_and_views_are_written() -> None:
    planners, plans, metadata = plan_alone([{"w": LARGE, "step": 3}] * 4)
    parts = [item for plan in plans for item in plan.items if item.index.fqn == "w"]
    assert [names(plan).count("w") for plan in plans] == [1, 1, 1, 1]
    assert {item.type for item in parts} == {WriteItemType.SHARD}
    for planner, plan in zip(planners, plans, strict=True):
        for item in plan.items:
            data = planner.resolve_data(item)
            if isinstance(data, torch.Tensor):
                assert data.untyped_storage().data_ptr() == LARGE.untyped_storage().data_ptr()
    found = written(planners, plans, metadata)
    assert torch.equal(found["w"], LARGE)
    assert found["step"] == 3


def test_without_sharing_the_lowest_rank_writes_all() -> None:
    states = [{"w": LARGE}, {"w": LARGE, "late": LARGE}, {"late": LARGE}]
    _, plans, _ = plan_alone(states, fully_parallel_save=False)
    assert [names(plan) for plan in plans] == [["w"], ["late"], []]


def test_local_bytes_count_and_not_global_ones() -> None:
    # A tenth of a large tensor, and a whole one that is smaller: by global sizes rank 0 would write both.
    piece = chunk_item((0, 0), (1024, 512))
    assert local_rows(piece) == (2 * MIB, 1024)
    plans, nbytes = share_plans([SavePlan([piece])] * 2, is_parallel=True)
    assert nbytes == [MIB, MIB]
    assert [
        item.tensor_data.chunk.offsets[0] for plan in plans for item in plan.items if item.tensor_data
    ] == [
        0,
        512,
    ]


def test_items_keep_the_order_of_their_plan() -> None:
    state = {f"{name}": torch.zeros(3) for name in "dbca"}
    _, plans, _ = plan_alone([state] * 2)
    for plan in plans:
        assert names(plan) == [name for name in state if name in names(plan)]
    assert sorted(names(plans[0]) + names(plans[1])) == sorted(state)


@given(tensors())
def test_rows_are_split_of_plain_memory_only(tensor: torch.Tensor) -> None:
    planner = SavePlanner()
    planner.set_up_planner({"x": tensor})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner_module, "WHOLE_BYTES", 0)
        [item] = planner.create_local_plan().items
    nbytes, rows = local_rows(item)
    assert nbytes == tensor.nbytes
    if rows > 1:
        found = planner.resolve_data(narrow_item(item, 1, rows))
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, tensor[1:])
        assert found.data_ptr() == tensor.data_ptr() + tensor.nbytes // rows
        assert memory_of(found) == memory_of(tensor)[tensor.nbytes // rows :]


@pytest.mark.parametrize(
    "tensor",
    [
        LARGE.t(),
        LARGE[:, ::2],
        LARGE[:1].expand(4096, 512),
        torch.zeros(1024, 512, dtype=torch.complex64).conj(),
        torch.eye(1024).to_sparse(),
        LARGE[0, 0],
        LARGE[:1],
    ],
    ids=["transposed", "strided", "expanded", "conj", "sparse", "scalar", "one row"],
)
def test_what_is_never_split(tensor: torch.Tensor) -> None:
    planners, plans, _ = plan_alone([{"x": tensor}] * 3)
    [(planner, item)] = [
        (planner, item) for planner, plan in zip(planners, plans, strict=True) for item in plan.items
    ]
    assert item.type is WriteItemType.TENSOR
    assert planner.resolve_data(item) is tensor


def test_what_one_rank_cannot_split_is_split_on_none() -> None:
    _, plans, _ = plan_alone([{"x": LARGE}, {"x": LARGE.t().contiguous().t()}])
    assert sum(len(plan.items) for plan in plans) == 1


def test_an_empty_shard_does_not_hide_a_real_one() -> None:
    real, empty = chunk_item((0, 0), (4096, 512)), chunk_item((0, 0), (0, 512))
    for order in ([empty, real, real], [real, empty, real]):
        plans, nbytes = share_plans([SavePlan([item]) for item in order], is_parallel=True)
        assert [len(plan.items) for plan in plans] == [int(item is real) for item in order]
        assert nbytes == [4 * MIB * (item is real) for item in order]
    # An empty one that has its place for itself is kept: without it a tensor without elements would be lost.
    plans, _ = share_plans([SavePlan([empty]), SavePlan([empty])], is_parallel=True)
    assert sum(len(plan.items) for plan in plans) == 1


def test_tensors_of_other_shapes_under_one_name() -> None:
    planners, plans, metadata = plan_alone(
        [{"x": torch.ones(3)}, {"x": torch.zeros(5)}, {"x": torch.ones(3)}]
    )
    assert torch.equal(written(planners, plans, metadata)["x"], torch.ones(3))
    planners, plans, metadata = plan_alone([{"x": LARGE}, {"x": LARGE.double()}])
    assert torch.equal(written(planners, plans, metadata)["x"], LARGE)


def test_rows_of_an_item() -> None:
    item = chunk_item((100, 7), (10, 5))
    assert local_rows(item) == (200, 10)
    assert narrow_item(item, 0, 10) is item
    part = narrow_item(item, 2, 5)
    assert part == chunk_item((102, 7), (3, 5))
    assert narrow_item(part, 1, 3) == chunk_item((103, 7), (2, 5))
    whole = WholeItem(item.index, item.type, None, item.tensor_data)
    assert local_rows(whole) == (200, 0)
    assert narrow_item(whole, 0, 0) is whole
    assert local_rows(chunk_item((0, 0), (4, 5), torch.qint8)) == (20, 0)
    blob = WriteItem(MetadataIndex("o"), WriteItemType.BYTE_IO)
    nbytes, rows = local_rows(blob)
    assert nbytes > 0
    assert rows == 0
    assert narrow_item(blob, 0, 0) is blob


@given(st.integers(1, 5), st.integers(1, 5))
def test_a_cached_plan_takes_rows_of_today(before: int, after: int) -> None:
    """The rank keeps its rows [5, 7) in the plan, while what it holds around them changes."""
    planner = SavePlanner(enable_plan_caching=True)
    for first in (before, after):
        local = chunk_item((first, 0), (8, 512))
        planner._local = {"x": [local]}
        planner.state_dict = {"x": LARGE[first : first + 8]}
        planner.lookup_object = lambda index: planner.state_dict["x"]  # type: ignore[method-assign]
        found = planner.resolve_data(chunk_item((5, 0), (2, 512)))
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, LARGE[5:7])


def test_plans_are_cached_apart_for_either_way_of_sharing() -> None:
    for number in range(2):
        for is_parallel in (True, False):
            state = {"w": LARGE + number, "b": torch.full((3,), number)}
            # One object plans for one rank; a second rank in this process would share its cache.
            planner = SavePlanner(fully_parallel_save=is_parallel, enable_plan_caching=True)
            planner.set_up_planner(state, is_coordinator=True)
            local = planner.create_local_plan()
            assert local.usable == (number == 0)
            [final], metadata = planner.create_global_plan([local])
            found = written([planner], [planner.finish_plan(final)], metadata)
            assert torch.equal(found["w"], state["w"])
            assert torch.equal(found["b"], state["b"])


def test_a_rank_that_writes_much_more_is_named(caplog: pytest.LogCaptureFixture) -> None:
    common = SavePlan([chunk_item((0, 0), (4096, 512))])
    with caplog.at_level(logging.WARNING, "distckpt"):
        SavePlanner()._dedup_save_plans([common] * 3)
    assert not caplog.records
    own = WriteItem(
        MetadataIndex("own", torch.Size((0,))),
        WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(torch.Size((0,)), torch.Size((96 * MIB,))),
            TensorProperties(dtype=torch.uint8),
            torch.Size((96 * MIB,)),
        ),
    )
    with caplog.at_level(logging.WARNING, "distckpt"):
        SavePlanner()._dedup_save_plans([common, SavePlan([own]), common, common])
    [record] = caplog.records
    assert "rank 1 writes 0.09 GiB" in record.getMessage()


def test_torch_has_what_is_overridden() -> None:
    assert "_dedup_save_plans" in vars(DefaultSavePlanner)
