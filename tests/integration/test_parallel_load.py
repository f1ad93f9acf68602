"""Ranks that hold the same thing read disjoint parts of it and exchange them; bit for bit, or all fail."""

from __future__ import annotations

import datetime
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distckpt import (
    CheckpointError,
    IntegrityError,
    MissingRanks,
    StorageReader,
    StorageWriter,
    parallel_load,
)
from distckpt.stateful import Gathered
from integration.ranks import states
from integration.ranks.states import COLUMNS, ROWS, WHOLE
from integration.ranks.world import Ranks

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
    from torch.futures import Future

pytestmark = pytest.mark.slow

MIB = 1 << 20
DEADLINE_S = 10.0
SEED = 7
BIG: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "float32": ((512, 1024), torch.float32),
    "bfloat16": ((1001, 1024), torch.bfloat16),
    "float8": ((2048, 1024), torch.float8_e4m3fn),
    "bool": ((3, 700, 1000), torch.bool),
    "int64": ((262144,), torch.int64),
    "complex64": ((256, 1024), torch.complex64),
    "one row": ((1, 500000), torch.float32),
    "float64": ((257, 1024), torch.float64),
}
SMALL: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "matrix": ((3, 4), torch.float32),
    "scalar": ((), torch.bfloat16),
    "empty": ((0, 5), torch.float32),
    "mask": ((9,), torch.bool),
}
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "recv", "isend",
    "irecv", "new_group",
)  # fmt: skip


def load_into(state: dict[str, Any], reader: StorageReader, **settings: Any) -> None:
    """Load into a state that has nothing of a single rank."""
    parallel_load.load(
        state, reader, gather=lambda loaded: Gathered(loaded, 0, {}), weights_only=True, **settings
    )


def fill(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int | None) -> torch.Tensor:
    return states.zeros(shape, dtype) if seed is None else states.values(name, shape, dtype, seed)


def plain(seed: int | None) -> dict[str, Any]:
    """State of a model that all ranks have alike."""
    return {
        "big": {name: fill(name, *layout, seed) for name, layout in BIG.items()},
        "small": {name: fill(name, *layout, seed) for name, layout in SMALL.items()},
        "epoch": seed,
        "schedule": {"warm-up": (seed, "ü")},
    }


def on_mesh(seed: int | None, mesh: DeviceMesh, layouts: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """State of DTensors, each about 2 MiB."""
    return {
        name: states.shard(fill(name, (1037, 512), torch.float32, seed), mesh, placements)
        for name, placements in layouts
    }


class CountingReader(StorageReader):
    """Remembers how many bytes of storage were read for each tensor."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._metadata is not None
        read = {item.storage_index: item.dest_index.fqn for item in plan.items}
        self.nbytes: dict[str, int] = {}
        for index, fqn in read.items():
            length = self._metadata.storage_data[index].length
            self.nbytes[fqn] = self.nbytes.get(fqn, 0) + length
        return super().read_data(plan, planner)

    def big(self) -> dict[str, int]:
        return {fqn: nbytes for fqn, nbytes in self.nbytes.items() if nbytes > MIB // 8}


class FailingReader(StorageReader):
    """Fails where a test says."""

    def __init__(self, path: str, stage: str) -> None:
        super().__init__(path)
        self._stage = stage

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if self._stage == "metadata":
            raise OSError("planted")
        return super().read_metadata(*args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._stage == "data":
            raise OSError("planted")
        return super().read_data(plan, planner)


def agree_in(group: distributed.ProcessGroup, name: str, deadline_s: float = DEADLINE_S) -> Any:
    """Return what `load` asks, through the store of the job; it counts in `asked`."""
    store = distributed.distributed_c10d._get_default_store()
    ranks = distributed.get_process_group_ranks(group)

    def agree(text: str) -> bool:
        agree.asked.append(text)  # type: ignore[attr-defined]
        number = len(agree.asked)  # type: ignore[attr-defined]
        keys = [f"{name}.{number}.{rank}" for rank in ranks]
        store.set(f"{name}.{number}.{distributed.get_rank()}", text)
        try:
            store.wait(keys, datetime.timedelta(seconds=deadline_s))
        except RuntimeError:
            raise MissingRanks("planted deadline", waited_s=deadline_s) from None
        return len({store.get(key) for key in keys}) == 1

    agree.asked = []  # type: ignore[attr-defined]
    return agree


def count(name: str) -> list[str]:
    """Replace a collective by one that counts, and return what it has been called with."""
    called: list[str] = []
    original = getattr(distributed, name)

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        called.append(f"{kwargs.get('src')} {tensor.nbytes}")
        return original(tensor, *args, **kwargs)

    setattr(distributed, name, counting)
    return called


def forbid() -> None:
    """Make every collective raise."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a collective")

    for name in COLLECTIVES:
        for module in (distributed, distributed.distributed_c10d):
            setattr(module, name, refuse)


def world() -> distributed.ProcessGroup:
    group = distributed.group.WORLD
    assert group is not None
    return group


def save_alone(path: Path, state: dict[str, Any]) -> str:
    """Save as a single process; every tensor is one chunk."""
    with StorageWriter(path) as writer:
        state_dict_saver.save(state, storage_writer=writer, no_dist=True)
    return str(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_alone(tmp_path_factory.mktemp("whole") / "checkpoint", plain(SEED))


def assert_read_once(found: list[dict[str, int]], most: float) -> None:
    """No tensor was read twice, and no rank has read more than `most` of all of them."""
    total = sum(sum(one.values()) for one in found)
    assert max(sum(one.values()) for one in found) <= most * total


def load_plain(path: str) -> Any:
    """Rank function: load what one process has saved."""
    messages: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    parallel_load._LOG.addHandler(handler)
    parallel_load._LOG.setLevel(logging.INFO)
    called, agree, reader = count("broadcast"), agree_in(world(), "plain"), CountingReader(path)
    state = plain(None)
    tensors = [*state["big"].values(), *state["small"].values()]
    versions = [tensor._version for tensor in tensors]
    load_into(state, reader, group=world(), agree=agree)
    after = [*state["big"].values(), *state["small"].values()]
    differences = states.differences(state, plain(SEED))
    differences += [
        f"{n} was replaced" for n, (a, b) in enumerate(zip(tensors, after, strict=True)) if a is not b
    ]
    changed = [tensor._version > version for tensor, version in zip(tensors, versions, strict=True)]
    differences += [] if sum(changed) == len(tensors) - 1 else [f"versions: {changed}"]
    return differences, called, agree.asked, reader.big(), messages


def test_plain_tensors(ranks: Ranks, whole: str) -> None:
    found = ranks.run(4, load_plain, path=whole)
    for differences, called, asked, _, messages in found:
        assert differences == []
        assert len(called) == len(BIG)
        assert called == found[0][1]
        assert asked == found[0][2]
        assert len(asked) == 2
        [message] = messages
        assert "got 0.0" in message
    read = [big for _, _, _, big, _ in found]
    names = [name for one in read for name in one]
    assert sorted(names) == sorted(f"big.{name}" for name in BIG)
    assert_read_once(read, 0.3)


def save_on_two(path: str) -> None:
    """Rank function: save what four ranks will load, by two, cut unevenly."""
    mesh = states.line_mesh()
    state: dict[str, Any] = on_mesh(
        SEED, mesh, [("replicated", [ROWS]), ("columns", [COLUMNS]), ("whole", [WHOLE]), ("rows", [ROWS])]
    )
    state |= {f"hsdp {n}": value for n, value in enumerate(_hsdp(SEED, mesh, [ROWS]))}
    state["plain"] = fill("plain", (999, 700), torch.float32, SEED)
    with StorageWriter(path) as writer:
        state_dict_saver.save(state, storage_writer=writer)


def _hsdp(seed: int | None, mesh: DeviceMesh, placements: list[Any]) -> list[Any]:
    return [
        states.shard(fill(f"hsdp {n}", (2049 + n, 512), torch.float32, seed), mesh, placements)
        for n in range(4)
    ]


def load_on_grid(path: str, resharded: bool) -> Any:
    """Rank function: load on a grid of 2 x 2."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    line = states.line_mesh()

    def make(seed: int | None) -> dict[str, Any]:
        state: dict[str, Any] = on_mesh(seed, line, [("replicated", [WHOLE]), ("rows", [ROWS])])
        state |= on_mesh(seed, grid, [("whole", [WHOLE, WHOLE]), ("columns", [WHOLE, WHOLE])])
        state |= {f"hsdp {n}": value for n, value in enumerate(_hsdp(seed, grid, [WHOLE, ROWS]))}
        state["plain"] = fill("plain", (999, 700), torch.float32, seed)
        return state

    called, agree, state = count("broadcast"), agree_in(world(), "grid"), make(None)
    if not resharded:
        with StorageWriter(path) as writer:
            state_dict_saver.save(make(SEED), storage_writer=writer)
    called.clear()
    reader = CountingReader(path)
    load_into(state, reader, group=world(), agree=agree)
    return states.differences(state, make(SEED)), called, reader.nbytes


@pytest.mark.parametrize("resharded", [True, False])
def test_replicas_on_a_mesh(ranks: Ranks, tmp_path: Path, resharded: bool) -> None:
    path = str(tmp_path / "checkpoint")
    if resharded:
        ranks.run(2, save_on_two, path=path)
    found = ranks.run(4, load_on_grid, path=path, resharded=resharded)
    for rank, (differences, called, _) in enumerate(found):
        assert differences == []
        # Members of one group do the same in the same order.
        assert called == found[(rank + 2) % 4][1]
    for name in ("replicated", "whole", "columns", "plain"):
        nbytes = [read.get(name, 0) for _, _, read in found]
        one = (999 * 700 if name == "plain" else 1037 * 512) * 4
        assert one <= sum(nbytes) < 1.1 * one
        if resharded and name == "replicated":
            assert sorted(nbytes)[1:] != [0, 0, one]
    for name in (f"hsdp {n}" for n in range(4)):
        nbytes = [read.get(name, 0) for _, _, read in found]
        # Each half by one of two.
        assert min(nbytes[0], nbytes[2]) == min(nbytes[1], nbytes[3]) == 0
    assert_read_once([read for _, _, read in found], 0.35)


def load_others(path: str) -> Any:
    """Rank function: rank 1 has a tensor more."""
    called, reader = count("broadcast"), CountingReader(path)

    def make(seed: int | None) -> dict[str, Any]:
        state = plain(seed)
        if distributed.get_rank() != 1:
            del state["big"]["float64"]
        return state

    state, agree = make(None), agree_in(world(), "others")
    load_into(state, reader, group=world(), agree=agree)
    differences = states.differences(state, make(SEED))
    # A rank may have other small things.
    state, agree = plain(None), agree_in(world(), "small")
    if distributed.get_rank() == 1:
        del state["small"], state["epoch"]
    none = list(called)
    load_into(state, StorageReader(path), group=world(), agree=agree)
    differences += states.differences(state["big"], plain(SEED)["big"])
    return differences, none, len(called), len(reader.big())


def test_ranks_that_hold_other_tensors_read_all(ranks: Ranks, whole: str) -> None:
    found = ranks.run(2, load_others, path=whole)
    assert found == [[[], [], len(BIG), len(BIG) - 1], [[], [], len(BIG), len(BIG)]]


def load_alone(path: str) -> list[str]:
    """Rank function: no rank knows of another."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))

    def make(seed: int | None) -> dict[str, Any]:
        return {
            "big": {
                name: states.shard(fill(name, *layout, seed), mesh, [WHOLE, ROWS])
                for name, layout in BIG.items()
            },
            "epoch": seed,
        }

    state, expected = make(None), make(SEED)
    forbid()

    def agree(_: str) -> bool:
        raise AssertionError("asked")

    load_into(state, StorageReader(path), group=None, agree=agree)
    return states.differences(state, expected)


def test_without_a_group_there_is_no_collective(ranks: Ranks, whole: str) -> None:
    assert ranks.run(2, load_alone, path=whole) == [[], []]


def outcome(load: Callable[[], None]) -> tuple[str, str, float]:
    """Return the kind of the error, its text, and how long it took."""
    began = time.monotonic()
    try:
        load()
    except CheckpointException as error:
        [(cause, _)] = error.failures.values()
        return f"torch: {type(cause).__name__}", str(cause), time.monotonic() - began
    except CheckpointError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def load_and_fail(path: str, damaged: str, deadline_s: float) -> Any:
    """Rank function: one rank fails in one way after the other."""
    rank, found = distributed.get_rank(), []
    called = count("broadcast")

    def attempt(
        name: str, state: dict[str, Any], reader: StorageReader, deadline: float = DEADLINE_S
    ) -> None:
        agree = agree_in(world(), name, deadline)
        found.append(outcome(lambda: load_into(state, reader, group=world(), agree=agree)))

    for stage in ("metadata", "data"):
        attempt(stage, plain(None), FailingReader(path, stage if rank == 1 else ""))
    for name in ("missing key", "size"):
        state = plain(None)
        if rank == 1:
            state["small"]["surplus" if name == "missing key" else "matrix"] = torch.zeros(5)
        attempt(name, state, StorageReader(path))
    attempt("damaged", plain(None), StorageReader(damaged))
    if rank == 1:
        threading.Event().wait(2 * deadline_s)
    else:
        attempt("absent", plain(None), StorageReader(path), deadline_s)
    return found, called


def test_every_rank_fails_when_one_does(ranks: Ranks, tmp_path: Path, whole: str) -> None:
    damaged = tmp_path / "damaged"
    with StorageWriter(damaged) as writer:
        state_dict_saver.save(plain(SEED), storage_writer=writer, no_dist=True)
    file = max(damaged.iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    # Within the one tensor that has such a value, which one rank reads.
    needle = states.local_bytes(plain(SEED)["big"]["one row"]).numpy().tobytes()
    data[data.index(needle) + len(needle) // 2] ^= 1
    file.write_bytes(data)
    found = ranks.run(3, load_and_fail, path=whole, damaged=str(damaged), deadline_s=0.3)
    assert [called for _, called in found] == [[], [], []]
    kinds = [[kind for kind, _, _ in outcomes] for outcomes, _ in found]
    assert max(seconds for outcomes, _ in found for _, _, seconds in outcomes) < DEADLINE_S / 2
    # As a load without others fails.
    assert kinds[1][0].startswith("torch: ")
    assert kinds[1][1:4] == ["torch: OSError", "torch: RuntimeError", "torch: ValueError"]
    for rank in (0, 2):
        assert kinds[rank][:4] == ["CheckpointError"] * 4
        assert "another rank failed" in found[rank][0][1][1]
        assert kinds[rank][5] == "MissingRanks"
    assert sorted(one[4] for one in kinds) == ["CheckpointError"] * 2 + [f"torch: {IntegrityError.__name__}"]


def load_and_die(path: str) -> Any:
    """Rank function: rank 1 dies when all have read."""
    agree = agree_in(world(), "death")
    # It would wait for broadcasts that nobody answers; the process ends, as a job's does.
    vars(distributed)["destroy_process_group"] = lambda: None

    def agree_and_die(text: str) -> bool:
        agreed: bool = agree(text)
        if distributed.get_rank() == 1 and len(agree.asked) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return agreed

    return outcome(lambda: load_into(plain(None), StorageReader(path), group=world(), agree=agree_and_die))


def test_death_of_a_rank_during_the_exchange(ranks: Ranks, whole: str) -> None:
    found = ranks.run(3, load_and_die, path=whole, may_die=[1])
    for rank in (0, 2):
        kind, text, seconds = found[rank]
        assert (kind, seconds < DEADLINE_S) == ("CheckpointError", True)
        assert "the exchange of what was read failed" in text


class Counter:
    """A part of a state that is no tensor: it takes what is loaded when it is whole."""

    def __init__(self, seed: int | None) -> None:
        self.weight = fill("stateful", (700, 700), torch.float32, seed)
        self.taken: torch.Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "epoch": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["weight"].clone()


def load_stateful(path: str, members: list[int]) -> Any:
    """Rank function: some ranks load parts that have a state, the others nothing."""
    group = distributed.new_group(members)
    if distributed.get_rank() not in members:
        return None
    called, counter = count("broadcast"), Counter(None)
    load_into({"counter": counter}, StorageReader(path), group=group, agree=agree_in(group, "stateful"))
    assert counter.taken is not None
    return states.differences(counter.taken, Counter(SEED).weight), called


# torch 2.9's writer, of itself.
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_some_ranks_with_stateful_parts_and_another_tools_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    state_dict_saver.save({"counter": Counter(SEED)}, storage_writer=FileSystemWriter(path), no_dist=True)
    found = ranks.run(4, load_stateful, path=str(path), members=[3, 1])
    assert found[0] is None
    assert found[2] is None
    assert found[1] == found[3] == [[], ["1 1960000"]]
