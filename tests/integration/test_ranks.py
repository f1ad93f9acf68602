"""Saves of several ranks, loaded at other world sizes, by torch's reader and ours, bit for bit."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from distckpt import CommitError, StorageReader, StorageWriter
from distckpt.commit import claim, publish
from distckpt.manifest import ManifestRef
from distckpt.storage import open_storage
from integration.ranks import states, training
from integration.ranks.world import Ranks

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

pytestmark = pytest.mark.slow

WORKERS = (1, 2, 4)
MODES = ("save", "async_save")
READERS = ("torch", "distckpt")


def save(state: dict[str, Any], mode: str, **arguments: Any) -> None:
    """Write `state` with `dcp.save` or `dcp.async_save`; the latter while `state` is changed in place."""
    if mode == "save":
        state_dict_saver.save(state, **arguments)
        return
    response: Any = state_dict_saver.async_save(state, **arguments)
    response.staging_completion.result()
    states.scramble(state)
    response.upload_completion.result()


def files_of(path: Path) -> set[str]:
    """Names of all files of a checkpoint, except distckpt's own records."""
    return {
        str(file.relative_to(path))
        for file in path.rglob("*")
        if file.is_file() and not file.is_relative_to(path / ".distckpt")
    }


def records_of(path: Path) -> list[str]:
    """Names of distckpt's own records, with save ids and digests left out."""
    return sorted(
        file.name.partition("-")[0] if file.name.startswith("commit-") else file.name
        for file in (path / ".distckpt").rglob("*")
        if file.is_file()
    )


def named_by(path: Path, *names: str) -> set[str]:
    """Names of all files that the metadata files `names`, which are among them, refer to."""
    named = set(names)
    for name in names:
        metadata = pickle.loads((path / name).read_bytes())
        named |= {info.relative_path for info in metadata.storage_data.values()}
    return named


class RecordingWriter(StorageWriter):
    """Remembers the names of the entries that this rank wrote."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future = super().write_data(plan, planner)
        self.written = [result.index.fqn for result in future.value()]
        return future


def _seed(workers: int, mode: str) -> int:
    return 10 * workers + MODES.index(mode)


def save_in_every_way(root: str) -> None:
    """Rank function: write one checkpoint for each number of workers and way to save."""
    for workers in WORKERS:
        with StorageWriter(dist_ckpt_workers=workers) as writer:
            for mode in MODES:
                state = states.make(_seed(workers, mode))
                save(state, mode, checkpoint_id=f"{root}/{workers}-{mode}", storage_writer=writer)


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, int]]:
    """Checkpoints written by a world of the given size, with the seeds of their states."""
    written: dict[int, dict[str, int]] = {}

    def get(world: int) -> dict[str, int]:
        if world not in written:
            root = tmp_path_factory.mktemp(f"world-{world}")
            ranks.run(world, save_in_every_way, root=str(root))
            written[world] = {
                f"{root}/{workers}-{mode}": _seed(workers, mode) for workers in WORKERS for mode in MODES
            }
        return written[world]

    return get


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"), [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)]
)
def test_every_layout_loads_at_every_world_size(
    ranks: Ranks, saved: Callable[[int], dict[str, int]], saved_by: int, loaded_by: int, reader: str
) -> None:
    found = ranks.run(
        loaded_by,
        states.load,
        without_distckpt=reader == "torch",
        reader=reader,
        checkpoints=saved(saved_by),
    )
    assert found == [[]] * loaded_by


def test_a_difference_is_seen(ranks: Ranks, saved: Callable[[int], dict[str, int]]) -> None:
    checkpoints = {path: seed + 1 for path, seed in saved(2).items()}
    found = ranks.run(2, states.load, reader="distckpt", checkpoints=checkpoints)
    empty = {"no rows", "no columns"}
    names = (states.SHARDED.keys() | states.ON_A_GRID.keys() | {"strided rows"}) - empty
    seen = {line.split(": ")[0].split("/")[-1] for lines in found for line in lines}
    assert seen >= names
    assert not seen & empty


@pytest.mark.parametrize(
    ("saved_by", "workers", "mode", "tensor_parallel"),
    [(2, 1, "save", 1), (2, 2, "async_save", 1), (4, 2, "save", 2)],
    ids=["2-save", "2-async_save", "2x2-save"],
)
def test_fsdp_model_and_optimizer_load_at_another_world_size(
    ranks: Ranks, tmp_path: Path, saved_by: int, workers: int, mode: str, tensor_parallel: int
) -> None:
    path = str(tmp_path / "checkpoint")
    expected = ranks.run(
        saved_by,
        training.train_and_save,
        path=path,
        workers=workers,
        mode=mode,
        tensor_parallel=tensor_parallel,
    )
    assert expected == [expected[0]] * saved_by
    loaded_by = 6 - saved_by
    for reader in READERS:
        found = ranks.run(loaded_by, training.load_and_describe, path=path, reader=reader, tensor_parallel=1)
        assert found == [expected[0]] * loaded_by


def _group_state(group: distributed.ProcessGroup, seed: int | None) -> dict[str, Any]:
    mesh = states.line_mesh(group)

    def fill(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if seed is None:
            return states.zeros(shape, torch.float32)
        return states.values(name, shape, torch.float32, seed)

    return {
        "sharded": {"rows": states.shard(fill("rows", (5, 3)), mesh, [states.ROWS])},
        "plain": {"one": fill("one", (4,)), "other": fill("other", (2, 2))},
        "epoch": seed,
    }


def save_from_members(root: str, members: list[int], workers: int) -> list[str] | None:
    """Rank function: `members` save, nobody else calls anything."""
    group = distributed.new_group(members)
    if distributed.get_rank() not in members:
        return None
    written = []
    with RecordingWriter(dist_ckpt_workers=workers) as writer:
        for seed, mode in enumerate(MODES):
            state = _group_state(group, seed)
            save(state, mode, checkpoint_id=f"{root}/{mode}", storage_writer=writer, process_group=group)
            written += writer.written
    return written


def load_on_members(root: str, members: list[int], reader: str) -> list[str]:
    """Rank function: `members` load what `save_from_members` wrote."""
    group = distributed.new_group(members)
    if distributed.get_rank() not in members:
        return []
    found = []
    for seed, mode in enumerate(MODES):
        state = _group_state(group, None)
        state_dict_loader.load(
            state, storage_reader=states.open_reader(reader, f"{root}/{mode}"), process_group=group
        )
        found += states.differences(state, _group_state(group, seed), mode)
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_group_of_some_ranks(ranks: Ranks, tmp_path: Path, workers: int) -> None:
    written = ranks.run(4, save_from_members, root=str(tmp_path), members=[1, 3], workers=workers)
    assert written[0] is None
    assert written[2] is None
    assert "sharded.rows" in written[1]
    assert "sharded.rows" in written[3]
    for mode in MODES:
        names = files_of(tmp_path / mode)
        assert names == named_by(tmp_path / mode, ".metadata")
        # Named by the rank in the group, not in the world.
        assert {name.split("_")[2] for name in names - {".metadata"}} == {"0", "1"}
        assert {"rank-00000.json", "rank-00001.json"} <= set(records_of(tmp_path / mode))
    for reader in READERS:
        for world, members in ((4, [1, 3]), (4, [2, 0, 3]), (1, [0])):
            found = ranks.run(world, load_on_members, root=str(tmp_path), members=members, reader=reader)
            assert found == [[]] * world


def save_alone(root: str) -> list[str]:
    """Rank function: every rank saves and loads by itself, at the same time, and rank 1 once more alone."""
    rank = distributed.get_rank()
    found = []
    rounds = ["all", "one"] if rank == 1 else ["all"]
    with StorageWriter() as writer:
        for mode in MODES:
            for name in rounds:
                path = f"{root}/{mode}-{name}-{rank}"
                expected = {"plain": {"x": torch.full((3,), float(rank))}, "rank": rank}
                save(expected, mode, checkpoint_id=path, storage_writer=writer, no_dist=True)
                expected["plain"] = {"x": torch.full((3,), float(rank))}
                for reader in READERS:
                    state = {"plain": {"x": torch.zeros(3)}, "rank": None}
                    state_dict_loader.load(
                        state, storage_reader=states.open_reader(reader, path), no_dist=True
                    )
                    found += states.differences(state, expected, f"{path} {reader}")
    return found


def test_no_dist(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, save_alone, root=str(tmp_path)) == [[], []]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{mode}-{name}" for mode in MODES for name in ("all-0", "all-1", "one-1")
    }
    for path in tmp_path.iterdir():
        assert files_of(path) == named_by(path, ".metadata")
        assert len(files_of(path)) == 2


def save_without_collectives(path: str, overwrites: list[tuple[int, str]]) -> None:
    """Rank function: write over `path` again and again, each time in another way."""
    for seed, (workers, mode) in enumerate(overwrites):
        with StorageWriter(path, dist_ckpt_workers=workers) as writer:
            save(states.make(seed), mode, storage_writer=writer, use_collectives=False)


def test_without_collectives_every_rank_has_its_own_metadata(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    overwrites = [(4, "save"), (1, "async_save"), (2, "save"), (2, "async_save"), (1, "save"), (1, "save")]
    ranks.run(4, save_without_collectives, path=str(path), overwrites=overwrites)
    metadata = [f"__{rank}.metadata" for rank in range(4)]
    assert files_of(path) == named_by(path, *metadata)
    for name in metadata:
        # A rank refers to its own files only.
        assert {file.split("_")[2].split(".")[0] for file in named_by(path, name)} == {name[2]}
    assert records_of(path) == ["commit"] * 4 + [f"rank-{rank:05}.json" for rank in range(4)]
    for reader in READERS:
        found = ranks.run(4, states.load, reader=reader, checkpoints={str(path): len(overwrites) - 1})
        assert found == [[]] * 4


def test_a_rank_without_collectives_leaves_the_folder_of_another_alone(tmp_path: Path) -> None:
    # Made by another rank that is about to write its manifest there.
    folder = tmp_path / ".distckpt" / "abc"
    folder.mkdir(parents=True)
    manifest = ManifestRef(".distckpt/def/rank-00000.json", "", {})
    storage = open_storage(tmp_path)
    publish(storage, b"metadata", claim(storage, "def", rank=0), [manifest])
    assert folder.is_dir()


def _step_state(step: int, *, zero: bool = False) -> dict[str, Any]:
    """Rank 1 has an entry more from step 2 on, and from step 3 on the sharded tensor is of another dtype."""
    dtype = torch.float32 if step < 3 else torch.float64
    rank, mesh = distributed.get_rank(), states.line_mesh()

    def fill(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return states.zeros(shape, dtype) if zero else states.values(name, shape, dtype, step)

    plain = {name: fill(name, (4,), torch.float32) for name in ("one", "other", f"of {rank}")}
    if step >= 2 and rank == 1:
        plain["late"] = fill("late", (3, 3), torch.bfloat16)
    return {
        "sharded": {"rows": states.shard(fill("rows", (7, 2), dtype), mesh, [states.ROWS])},
        "plain": plain,
        "step": None if zero else step,
    }


def save_with_cached_plans(root: str, mode: str, workers: int) -> list[list[str]]:
    """Rank function: 5 saves, the plans of which torch caches."""
    written = []
    with RecordingWriter(dist_ckpt_workers=workers) as writer:
        for step in range(5):
            save(
                _step_state(step),
                mode,
                checkpoint_id=f"{root}/{step}",
                storage_writer=writer,
                planner=DefaultSavePlanner(enable_plan_caching=True),
            )
            written.append(writer.written)
    assert SavePlanner._cached_save_plan
    return written


def load_steps(root: str, reader: str) -> list[str]:
    """Rank function: load what `save_with_cached_plans` wrote."""
    found = []
    for step in range(5):
        state = _step_state(step, zero=True)
        state_dict_loader.load(state, storage_reader=states.open_reader(reader, f"{root}/{step}"))
        found += states.differences(state, _step_state(step), str(step))
    return found


@pytest.mark.parametrize(("mode", "workers"), [("save", 1), ("async_save", 2)])
def test_cached_plans_when_the_plan_of_one_rank_changes(
    ranks: Ranks, tmp_path: Path, mode: str, workers: int
) -> None:
    written = ranks.run(2, save_with_cached_plans, root=str(tmp_path), mode=mode, workers=workers)
    assert [[step, "plain.late" in names] for step, names in enumerate(written[1])] == [
        [step, step >= 2] for step in range(5)
    ]
    for reader in READERS:
        assert ranks.run(2, load_steps, root=str(tmp_path), reader=reader) == [[], []]


def save_with_an_idle_rank(root: str) -> list[list[str]]:
    """Rank function: rank 0 has everything, then nobody anything."""
    written = []
    for workers in (1, 2):
        with RecordingWriter(dist_ckpt_workers=workers) as writer:
            for mode in MODES:
                state = {"x": torch.arange(5)} if distributed.get_rank() == 0 else {}
                save(state, mode, checkpoint_id=f"{root}/{workers}-{mode}", storage_writer=writer)
                written.append(writer.written)
            state_dict_saver.save({}, checkpoint_id=f"{root}/nothing", storage_writer=writer)
            written.append(writer.written)
    return written


def load_after_an_idle_rank(path: str, reader: str) -> list[int]:
    """Rank function: load what only rank 0 had."""
    state = {"x": torch.zeros(5, dtype=torch.int64)}
    state_dict_loader.load(state, storage_reader=states.open_reader(reader, path))
    state_dict_loader.load(
        {}, storage_reader=states.open_reader(reader, str(Path(path).with_name("nothing")))
    )
    found: list[int] = state["x"].tolist()
    return found


def test_rank_with_no_items(ranks: Ranks, tmp_path: Path) -> None:
    written = ranks.run(2, save_with_an_idle_rank, root=str(tmp_path))
    assert written == [[["x"], ["x"], []] * 2, [[]] * 6]
    assert files_of(tmp_path / "nothing") == {".metadata"}
    for reader in READERS:
        for checkpoint in ("1-save", "1-async_save", "2-save", "2-async_save"):
            found = ranks.run(2, load_after_an_idle_rank, path=str(tmp_path / checkpoint), reader=reader)
            assert found == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("workers", [1, 2])
def test_empty_plan_gives_no_results(tmp_path: Path, workers: int) -> None:
    with StorageWriter(tmp_path / "checkpoint", dist_ckpt_workers=workers) as writer:
        writer.reset()
        writer.set_up_storage_writer(True, rank=0)
        writer.prepare_local_plan(SavePlan([]))
        assert writer.write_data(SavePlan([]), DefaultSavePlanner()).value() == []
        writer.finish(Metadata({}), [[], []])
    assert StorageReader(tmp_path / "checkpoint").read_metadata().state_dict_metadata == {}


class HandMadePlanner(DefaultSavePlanner):
    """Plans one chunk for each rank, whatever the chunks of the others are."""

    def __init__(self, size: tuple[int, ...], chunk: tuple[tuple[int, ...], torch.Tensor]) -> None:
        super().__init__()
        self.size = torch.Size(size)
        self.offsets = torch.Size(chunk[0])
        self.tensor = chunk[1]

    def create_local_plan(self) -> SavePlan:
        data = TensorWriteData(
            ChunkStorageMetadata(self.offsets, self.tensor.shape),
            TensorProperties.create_from_tensor(self.tensor),
            self.size,
        )
        self.plan = SavePlan(
            [WriteItem(MetadataIndex("x", self.offsets), WriteItemType.SHARD, tensor_data=data)]
        )
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self.tensor


def save_colliding_chunks(path: str, workers: int, mode: str, order: list[int]) -> None:
    """Rank function: `order` says which rank has the rows 0:4, which 4:6, and which nothing, at offset 0."""
    whole = torch.arange(18.0).reshape(6, 3)
    chunks = [((0, 0), whole[:4]), ((4, 0), whole[4:]), ((0, 0), whole[:0]), ((4, 0), whole[:0])]
    planner = HandMadePlanner((6, 3), chunks[order[distributed.get_rank()]])
    with StorageWriter(path, dist_ckpt_workers=workers) as writer:
        save({}, mode, storage_writer=writer, planner=planner)


def load_whole(path: str, reader: str) -> list[list[float]]:
    """Rank function: load what `save_colliding_chunks` wrote."""
    state = {"x": torch.zeros(6, 3)}
    state_dict_loader.load(state, storage_reader=states.open_reader(reader, path))
    found: list[list[float]] = state["x"].tolist()
    return found


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 3, 0, 1], [3, 0, 1, 2]], ids=str)
@pytest.mark.parametrize(("workers", "mode"), [(1, "save"), (2, "async_save")])
def test_empty_chunks_at_the_offsets_of_real_ones(
    ranks: Ranks, tmp_path: Path, order: list[int], workers: int, mode: str
) -> None:
    path = str(tmp_path / "checkpoint")
    ranks.run(4, save_colliding_chunks, path=path, workers=workers, mode=mode, order=order)
    for reader in READERS:
        found = ranks.run(1, load_whole, path=path, reader=reader)
        assert found == [torch.arange(18.0).reshape(6, 3).tolist()]


class PerRankPlanner(DefaultSavePlanner):
    """Keeps what every rank has under a name of its own."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        rank = distributed.get_rank()
        self.state_dict = {f"{fqn} of {rank}": value for fqn, value in self.state_dict.items()}


def save_different_values(root: str, mode: str, workers: int) -> dict[str, list[str]]:
    """Rank function: the same keys with other values on every rank, under three planners."""
    rank = distributed.get_rank()
    planners = {
        "default": DefaultSavePlanner(),
        "lowest": DefaultSavePlanner(dedup_save_to_lowest_rank=True),
        "per rank": PerRankPlanner(),
    }
    written = {}
    with RecordingWriter(dist_ckpt_workers=workers) as writer:
        for name, planner in planners.items():
            state = {
                "plain": {f"x{i}": torch.full((2 + i,), float(rank)) for i in range(6)},
                "rank": rank,
            }
            save(state, mode, checkpoint_id=f"{root}/{name}", storage_writer=writer, planner=planner)
            written[name] = writer.written
    return written


def load_different_values(root: str, reader: str) -> dict[str, Any]:
    """Rank function: the value that stands under each name."""
    loaded = {}
    for name in ("default", "lowest", "per rank"):
        metadata = StorageReader(f"{root}/{name}").read_metadata().state_dict_metadata
        state = {
            fqn: torch.zeros(entry.size) if hasattr(entry, "size") else None
            for fqn, entry in metadata.items()
        }
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        state_dict_loader.load(
            state, storage_reader=states.open_reader(reader, f"{root}/{name}"), planner=planner
        )
        loaded[name] = {
            fqn: sorted(set(value.tolist())) if isinstance(value, torch.Tensor) else [value]
            for fqn, value in state.items()
        }
    return loaded


@pytest.mark.parametrize(("mode", "workers"), [("save", 2), ("async_save", 1)])
def test_same_key_with_other_values_on_every_rank(
    ranks: Ranks, tmp_path: Path, mode: str, workers: int
) -> None:
    written = ranks.run(3, save_different_values, root=str(tmp_path), mode=mode, workers=workers)
    for reader in READERS:
        [found] = ranks.run(1, load_different_values, root=str(tmp_path), reader=reader)
        for name, values in found.items():
            # What the rank had that the plan names, and nothing else.
            owners = {fqn: rank for rank, names in enumerate(written) for fqn in names[name]}
            assert values == {fqn: [rank] for fqn, rank in owners.items()}
        assert {value for values in found["default"].values() for value in values} > {0}
        assert {value for values in found["lowest"].values() for value in values} == {0}
        assert len(found["per rank"]) == 3 * 7


def make_deep_directories(root: str, rounds: int) -> None:
    """Rank function: all ranks make the same directories at the same time."""
    for number in range(rounds):
        storage = open_storage(f"{root}/{number}/a/b/c/d/e/f")
        distributed.barrier()
        storage.prepare()
        distributed.barrier()
        with StorageWriter(f"{root}/saved/{number}/a/b/c/d/e/f") as writer:
            state_dict_saver.save({"rank": number}, storage_writer=writer, use_collectives=number % 2 == 0)


def test_all_ranks_make_the_same_deep_directory_at_once(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(4, make_deep_directories, root=str(tmp_path), rounds=20)
    for number in range(20):
        path = tmp_path / "saved" / str(number) / "a/b/c/d/e/f"
        metadata = [".metadata"] if number % 2 == 0 else [f"__{rank}.metadata" for rank in range(4)]
        assert files_of(path) == named_by(path, *metadata)


def save_once(path: str, seed: int, workers: int, mode: str) -> None:
    """Rank function: one save of the state of `seed`."""
    with StorageWriter(path, dist_ckpt_workers=workers) as writer:
        save(states.make(seed), mode, storage_writer=writer)


def test_overwriting_by_fewer_ranks_and_workers_leaves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    for world, workers, mode in ((4, 4, "save"), (2, 1, "save"), (4, 2, "async_save"), (1, 1, "save")):
        seed = 100 * world + workers
        ranks.run(world, save_once, path=str(path), seed=seed, workers=workers, mode=mode)
        assert files_of(path) == named_by(path, ".metadata")
        assert records_of(path) == ["commit", "owner"] + [f"rank-{rank:05}.json" for rank in range(world)]
        found = ranks.run(
            2, states.load, reader="torch", without_distckpt=True, checkpoints={str(path): seed}
        )
        assert found == [[], []]


def save_both_ways(path: str, seed: int) -> str:
    """Rank function: without collectives over a checkpoint that was saved with them."""
    with StorageWriter(path) as writer:
        state_dict_saver.save(states.make(seed), storage_writer=writer)
        try:
            state_dict_saver.save(states.make(seed + 1), storage_writer=writer, use_collectives=False)
        except CommitError as error:
            return str(error)
    return "saved"


def test_a_checkpoint_of_all_ranks_is_not_replaced_rank_by_rank(ranks: Ranks, tmp_path: Path) -> None:
    # Readers look for the metadata of all ranks first: what is saved without collectives would not be found.
    path = tmp_path / "checkpoint"
    [message, other] = ranks.run(2, save_both_ways, path=str(path), seed=1)
    assert str(path) in message
    assert message == other
    assert ranks.run(2, states.load, reader="torch", checkpoints={str(path): 1}) == [[], []]


def test_a_checkpoint_of_all_ranks_replaces_those_of_each(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    ranks.run(2, save_without_collectives, path=str(path), overwrites=[(1, "save")])
    ranks.run(2, save_once, path=str(path), seed=7, workers=1, mode="save")
    assert files_of(path) == named_by(path, ".metadata")
    assert records_of(path) == ["commit", "owner", "rank-00000.json", "rank-00001.json"]
    assert ranks.run(2, states.load, reader="torch", checkpoints={str(path): 7}) == [[], []]
