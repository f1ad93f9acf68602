"""Replicas share the writing: saves of real ranks with `SavePlanner`, which torch's reader loads."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from distckpt import SavePlanner, StorageWriter, plan, planner
from distckpt.geometry import misfit
from integration.checkpoints import read_with_distckpt, read_with_torch
from integration.ranks import states
from integration.ranks.world import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

pytestmark = pytest.mark.slow

WORLD = 4
MIB = 1 << 20
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "odd": ((1009, 771), torch.float32),
    "flat": ((1_500_001,), torch.bfloat16),
    "few rows": ((3, 200_000), torch.float32),
    "small": ((10, 3), torch.complex64),
    "scalar": ((), torch.float32),
    "none": ((0, 4), torch.float32),
}
UNEVEN = (4099, 1024)


def tensors(seed: int, *, has_big: bool = False) -> dict[str, torch.Tensor]:
    """Make the tensors of `seed`, alike on every rank; the big one has 64 MiB."""
    made = {name: states.values(name, shape, dtype, seed) for name, (shape, dtype) in SHAPES.items()}
    if has_big:
        made["big"] = torch.arange(seed, seed + (1 << 24), dtype=torch.int32).reshape(4096, 4096)
    return made


def on_mesh(
    full: dict[str, torch.Tensor], mesh: DeviceMesh, placements: list[Placement]
) -> dict[str, torch.Tensor]:
    """Make DTensors."""
    return {name: states.shard(tensor, mesh, placements) for name, tensor in full.items()}


def uneven(seed: int) -> dict[str, torch.Tensor]:
    """Make one tensor that no two ranks share evenly."""
    count = UNEVEN[0] * UNEVEN[1]
    return {"x": torch.arange(seed, seed + count, dtype=torch.int32).reshape(UNEVEN)}


def unlike(rank: int) -> dict[str, Any]:
    """Make what differs from rank to rank under the same names."""
    return {"x": torch.full((4096, 512), float(rank)), "small": torch.full((3,), rank), "o": rank}


def share_each(items: Sequence[tuple[int, int]], members: int) -> list[list[tuple[int, int, int]]]:
    """Divide every item as if it were the only one."""
    parts: list[list[tuple[int, int, int]]] = [[] for _ in range(members)]
    for number, item in enumerate(items):
        for part, own in zip(parts, plan.share([item], members), strict=True):
            part += [(number, first, stop) for _, first, stop in own]
    return parts


class HandMadePlanner(SavePlanner):
    """Plans one chunk for each rank, whatever the chunks of the others are."""

    def __init__(self, offsets: tuple[int, ...], tensor: torch.Tensor) -> None:
        super().__init__(flatten_state_dict=False)
        self.offsets = torch.Size(offsets)
        self.tensor = tensor

    def create_local_plan(self) -> SavePlan:
        data = TensorWriteData(
            ChunkStorageMetadata(self.offsets, self.tensor.shape),
            TensorProperties.create_from_tensor(self.tensor),
            torch.Size((6, 3)),
        )
        self.plan = SavePlan(
            [WriteItem(MetadataIndex("x", self.offsets), WriteItemType.SHARD, tensor_data=data)]
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self.tensor


def save_in_every_way(root: str) -> None:
    """Rank function: write one checkpoint for each test."""
    rank, line = distributed.get_rank(), states.line_mesh()
    with StorageWriter() as writer:

        def save(state: dict[str, Any], name: str, by: SavePlanner, to: Any = writer) -> None:
            state_dict_saver.save(state, checkpoint_id=f"{root}/{name}", storage_writer=to, planner=by)

        full = tensors(0, has_big=True)
        replicated = on_mesh(full, line, [states.WHOLE])
        save(replicated, "replicated", SavePlanner())
        save({**full, "o": [1]}, "plain", SavePlanner())
        save({**full, "o": [1]}, "lowest", SavePlanner(fully_parallel_save=False))
        save({**tensors(1), "o": [1]}, "stock", SavePlanner(), FileSystemWriter(f"{root}/stock"))
        hsdp = on_mesh(uneven(2), states.grid_mesh(), [states.WHOLE, states.ROWS])
        save(hsdp, "hsdp", SavePlanner())
        state: dict[str, Any] = {"p": tensors(3), "d": on_mesh(tensors(4), line, [states.WHOLE]), "o": [1]}
        response: Any = state_dict_saver.async_save(
            state, checkpoint_id=f"{root}/async", storage_writer=writer, planner=SavePlanner()
        )
        response.staging_completion.result()
        states.scramble(state)
        response.upload_completion.result()
        for step in range(4):
            # One tensor more from step 2 on.
            more = {"more": torch.full((2 * MIB,), step, dtype=torch.uint8)} if step > 1 else {}
            cached = {**tensors(step), **more, "step": step}
            save(cached, f"cached-{step}", SavePlanner(enable_plan_caching=True))
        save(unlike(rank), "unlike", SavePlanner())
        whole = torch.arange(18.0).reshape(6, 3)
        chunks = [((0, 0), whole[:0]), ((0, 0), whole[:4]), ((4, 0), whole[4:]), ((4, 0), whole[:0])]
        save({}, "empty", HandMadePlanner(*chunks[rank]))
        plan.WHOLE_BYTES = plan._CELL_BYTES = 1
        vars(planner).update(WHOLE_BYTES=1, share=share_each)
        save(states.make(5), "rows", SavePlanner())


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints written by four ranks."""
    root = tmp_path_factory.mktemp("saved")
    ranks.run(WORLD, save_in_every_way, root=str(root))
    return root


def bytes_of_ranks(path: Path) -> list[int]:
    """Return how many bytes each rank has written; 0 if it has no manifest."""
    found = [0] * WORLD
    for file in path.glob(".distckpt/*/rank-*.json"):
        manifest = json.loads(file.read_bytes())
        found[manifest["rank"]] = sum(manifest["files"].values())
        assert all((path / name).stat().st_size == size for name, size in manifest["files"].items())
    return found


def assert_even(nbytes: list[int]) -> None:
    mean = sum(nbytes) / len(nbytes)
    assert all(abs(one - mean) <= 0.05 * mean for one in nbytes), nbytes


def entries_of(path: Path) -> tuple[Metadata, dict[str, TensorStorageMetadata]]:
    metadata = FileSystemReader(path).read_metadata()
    entries = metadata.state_dict_metadata.items()
    return metadata, {fqn: entry for fqn, entry in entries if isinstance(entry, TensorStorageMetadata)}


def assert_written_once(path: Path) -> None:
    """Chunks tile their tensors, each has its place in a file, and the files hold little besides."""
    metadata, entries = entries_of(path)
    payload = 0
    for entry in entries.values():
        chunks = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
        assert misfit(entry.size, chunks) is None
        payload += entry.size.numel() * entry.properties.dtype.itemsize
    assert metadata.storage_data is not None
    assert len(metadata.storage_data) == sum(len(entry.chunks) for entry in entries.values()) + (
        len(metadata.state_dict_metadata) - len(entries)
    )
    written = sum(file.stat().st_size for file in path.glob("*.distcp*"))
    assert payload <= written <= payload + 8192 * len(metadata.storage_data)


def files_of(path: Path, fqn: str) -> set[str]:
    """Return the ranks that have written of an entry, by the names of their files."""
    metadata = FileSystemReader(path).read_metadata()
    assert metadata.storage_data is not None
    return {
        info.relative_path.split("_")[2] for index, info in metadata.storage_data.items() if index.fqn == fqn
    }


def assert_loads(path: Path, expected: dict[str, Any]) -> None:
    for read in (read_with_torch, read_with_distckpt):
        assert states.differences(read(path), expected) == []


@pytest.mark.parametrize("name", ["replicated", "plain"])
def test_replicas_write_about_equal_parts(saved: Path, name: str) -> None:
    assert_written_once(saved / name)
    assert_even(bytes_of_ranks(saved / name))
    assert files_of(saved / name, "big") == {"0", "1", "2", "3"}
    assert len(files_of(saved / name, "small")) == 1
    objects = {"o": [1]} if name == "plain" else {}
    assert_loads(saved / name, {**tensors(0, has_big=True), **objects})


def test_without_sharing_one_rank_writes(saved: Path) -> None:
    assert_written_once(saved / "lowest")
    assert [nbytes > 0 for nbytes in bytes_of_ranks(saved / "lowest")] == [True, False, False, False]
    assert_loads(saved / "lowest", {**tensors(0, has_big=True), "o": [1]})


def test_torch_writes_what_is_planned(saved: Path) -> None:
    path = saved / "stock"
    assert_written_once(path)
    assert len(files_of(path, "odd") | files_of(path, "flat") | files_of(path, "few rows")) == WORLD
    assert states.differences(read_with_torch(path), {**tensors(1), "o": [1]}) == []


def test_replicas_of_uneven_shards(saved: Path) -> None:
    assert_written_once(saved / "hsdp")
    assert_even(bytes_of_ranks(saved / "hsdp"))
    [entry] = entries_of(saved / "hsdp")[1].values()
    assert len(entry.chunks) == WORLD
    assert_loads(saved / "hsdp", uneven(2))


def test_async_save_holds_the_values_of_the_call(saved: Path) -> None:
    assert_written_once(saved / "async")
    nbytes = bytes_of_ranks(saved / "async")
    assert max(nbytes) - min(nbytes) <= MIB
    assert_loads(saved / "async", {"p": tensors(3), "d": tensors(4), "o": [1]})


@pytest.mark.parametrize("step", range(4))
def test_cached_plans_write_the_values_of_today(saved: Path, step: int) -> None:
    more = {"more": torch.full((2 * MIB,), step, dtype=torch.uint8)} if step > 1 else {}
    assert_written_once(saved / f"cached-{step}")
    assert_loads(saved / f"cached-{step}", {**tensors(step), **more, "step": step})


def test_other_values_on_every_rank(saved: Path) -> None:
    """Each row, and the whole of what is small, is what one of the ranks had."""
    found = read_with_torch(saved / "unlike")
    rows = [set(row.tolist()) for row in found["x"]]
    assert all(len(row) == 1 for row in rows)
    assert set().union(*rows) == {0.0, 1.0, 2.0, 3.0}
    assert found["small"].tolist() in [[rank] * 3 for rank in range(WORLD)]
    assert found["o"] in range(WORLD)


def test_empty_shards_do_not_hide_real_ones(saved: Path) -> None:
    _, entries = entries_of(saved / "empty")
    assert all(chunk.sizes.numel() for chunk in entries["x"].chunks)
    assert_loads(saved / "empty", {"x": torch.arange(18.0).reshape(6, 3)})


@pytest.mark.parametrize("world", [1, 4])
def test_every_layout_split_by_rows(ranks: Ranks, saved: Path, world: int) -> None:
    _, entries = entries_of(saved / "rows")
    assert len(entries["sharded.replicated"].chunks) == 4
    assert len(entries["sharded.replicated, uneven rows"].chunks) > 2
    assert len(entries["plain.matrix"].chunks) == 3
    found = ranks.run(
        world, states.load, without_distckpt=True, reader="torch", checkpoints={str(saved / "rows"): 5}
    )
    assert found == [[]] * world
