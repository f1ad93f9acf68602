"""Some ranks save together: nobody else is asked for anything, and nobody waits without an end."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import FileStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from distckpt import Checkpointer, CheckpointError, ConfigError, MissingRanks, Sharded, observe
from distckpt.coordination import StorageCoordinator, StoreCoordinator
from integration.checkpoints import read_with_torch
from integration.ranks import collectives, offloaded, states
from integration.ranks.world import Ranks
from integration.test_checkpointer_ranks import (
    Outcome,
    assert_written_once,
    outcome_of,
    outcome_of_intact,
    step_path,
)

pytestmark = pytest.mark.slow

DEADLINE_S = 5.0
"""More than workers take to start on a busy machine: the first save is within it, too."""
WAIT_S = 20.0


def test_ranks_that_never_hear_of_it(tmp_path: Path) -> None:
    script = Path(__file__).parent / "ranks" / "bystanders.py"
    launch = ["torch.distributed.run", "--nproc-per-node", "4", "--master-port", "0", "--standalone"]
    done = subprocess.run(
        [sys.executable, "-m", *launch, str(script), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in ("dcp", "dcp-async"):
        assert read_with_torch(tmp_path / name)["plain"].tolist() == [0.0, 1.0, 2.0, 3.0]
    for mode in ("False", "True"):
        path = step_path(tmp_path / f"async-{mode}", 2)
        assert read_with_torch(path)["sharded"].tolist() == (torch.arange(10.0).reshape(5, 2) + 2).tolist()
        assert_written_once(path)


def crash(moment: str) -> None:
    """Have this process killed before, during or after its writes of the next save."""

    def kill(event: observe.Event) -> None:
        if event.name == {"during": "parts.pushed", "after": "files.written"}.get(moment):
            os.kill(os.getpid(), signal.SIGKILL)

    observe.subscribe(kill)
    if moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)


def save_with_a_crash(root: str, moment: str, crashing: int, async_save: bool) -> Any:
    """Rank function: ranks 1, 2 and 3 save; one of them dies; the others go on without it."""
    rank, members = distributed.get_rank(), [1, 2, 3]
    if rank not in members:
        return None
    found: dict[str, Any] = {}
    settings: dict[str, Any] = {
        "async_save": async_save, "distributed_timeout_minutes": DEADLINE_S / 60, "dist_ckpt_workers": 2,
    }  # fmt: skip
    with Checkpointer(root, participants=members, **settings) as checkpointer:
        found["first"] = outcome_of(checkpointer, 0, _state(0, members))
        if rank == crashing:
            crash(moment)
        started = time.monotonic()
        try:
            checkpointer.save(1, _state(1, members)).result(WAIT_S)
        except MissingRanks as error:
            found["missing"] = list(error.ranks or ())
            found["text"] = str(error)
        except CheckpointError as error:
            found["text"] = str(error)
        found["seconds"] = time.monotonic() - started
    left = [one for one in members if one != crashing]
    with Checkpointer(root, participants=left, **settings) as checkpointer:
        state = _state(None, left)
        found["restored"] = checkpointer.restore(state)
        found["differences"] = states.differences(state, _state(0, left))
        found["next"] = outcome_of(checkpointer, 1, _state(1, left))
        found["latest"] = checkpointer.latest()
    return found


def _state(step: int | None, members: list[int]) -> dict[str, Any]:
    """Return a state of tensors that `members` share out, in rows; zeros without a step."""
    index = members.index(distributed.get_rank())
    full = torch.zeros(6, 2) if step is None else torch.arange(12.0).reshape(6, 2) + step
    rows = 6 // len(members)
    part = full[index * rows : (index + 1) * rows].clone()
    return {"part": Sharded(full.shape, [((index * rows, 0), part)]), "plain": full.clone(), "step": step}


@pytest.mark.parametrize(
    ("moment", "crashing", "async_save"),
    [
        ("before", 1, True),
        pytest.param("before", 3, False, marks=pytest.mark.thorough),
        ("during", 2, True),
        ("during", 2, False),
        pytest.param("after", 1, False, marks=pytest.mark.thorough),
        ("after", 3, True),
        pytest.param("before", 1, False, marks=pytest.mark.thorough),
        pytest.param("before", 3, True, marks=pytest.mark.thorough),
        pytest.param("after", 1, True, marks=pytest.mark.thorough),
        pytest.param("after", 3, False, marks=pytest.mark.thorough),
    ],
)
def test_a_rank_that_crashes(
    ranks: Ranks, tmp_path: Path, moment: str, crashing: int, async_save: bool
) -> None:
    replies = ranks.run(
        4, save_with_a_crash, root=str(tmp_path), moment=moment, crashing=crashing, async_save=async_save,
        may_die=[crashing],
    )  # fmt: skip
    assert replies[0] is None
    assert replies[crashing] is None
    for rank in {1, 2, 3} - {crashing}:
        found = replies[rank]
        assert found["first"] == ["", ""]
        # All but the coordinator are told by it, which knows who is missing.
        assert f"rank {crashing} " in found["text"], found["text"]
        if crashing == 1 or rank == 1:
            assert found["missing"] == [crashing]
        assert found["seconds"] < DEADLINE_S + 5
        assert found["restored"] == 0
        assert found["differences"] == []
        assert found["next"] == ["", ""]
        assert found["latest"] == 1
    assert read_with_torch(step_path(tmp_path, 1))["plain"].flatten().tolist() == list(range(1, 13))


def save_without_collectives(root: str, async_save: bool) -> list[Any]:
    """Rank function: all layouts, once no operation of torch.distributed works any more."""
    with Checkpointer(root, async_save=async_save, ckpt_fully_parallel_load=False) as checkpointer:
        made = [states.make(step) for step in range(3)]
        target, expected = states.make(None), states.make(2)
        collectives.forbid()
        found: list[Any] = [outcome_of(checkpointer, step, state) for step, state in enumerate(made)]
        found.append(checkpointer.restore(target))
        found.append(states.differences(target, expected))
    return found


@pytest.mark.parametrize("async_save", [True, False])
def test_nothing_is_a_collective(ranks: Ranks, tmp_path: Path, async_save: bool) -> None:
    replies = ranks.run(4, save_without_collectives, root=str(tmp_path), async_save=async_save)
    assert replies == [[["", ""], ["", ""], ["", ""], 2, []]] * 4


def save_as(root: str, kind: str) -> Any:
    """Rank function: ranks 1 and 2 of three save; said in one of several ways."""
    rank, members = distributed.get_rank(), [1, 2]
    participants: Any = members
    if kind == "group":
        participants = distributed.new_group(members)
    elif kind == "mesh":
        participants = DeviceMesh("cpu", members)
    elif kind == "store":
        store = FileStore(f"{root}-store", -1)
        participants = StoreCoordinator(store, rank, members) if rank in members else members
    elif kind == "storage":
        participants = StorageCoordinator(root, rank, members, job="7") if rank in members else members
    if rank not in members:
        try:
            Checkpointer(root, participants=participants)
        except ConfigError as error:
            return str(error)
        return "made"
    found: list[Any] = []
    with Checkpointer(root, participants=participants, async_save=True) as checkpointer:
        for step in range(3):
            found.append(outcome_of(checkpointer, step, _state(step, members)))
        state = _state(None, members)
        found.append(checkpointer.restore(state))
        found.append(states.differences(state, _state(2, members)))
    return found


@pytest.mark.parametrize("kind", ["ranks", "group", "mesh", "store", "storage"])
def test_ways_to_say_who_takes_part(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    outsider, *members = ranks.run(3, save_as, root=str(tmp_path), kind=kind)
    assert "rank 0" in outsider
    assert members == [[["", ""], ["", ""], ["", ""], 2, []]] * 2
    path = step_path(tmp_path, 2)
    assert_written_once(path)
    [record] = [json.loads(file.read_text()) for file in (path / ".distckpt").glob("commit-*.json")]
    names = [one["name"].rpartition("/")[2] for one in record["manifests"]]
    assert names == ["rank-00001.json", "rank-00002.json"], "ranks are those of the job"


@pytest.mark.parametrize("participants", [[], [0, 4], "01", 3, [True], [0, 0]], ids=str)
def test_participants_that_cannot_be(ranks: Ranks, tmp_path: Path, participants: Any) -> None:
    [text, _] = ranks.run(2, refuse, root=str(tmp_path), participants=participants)
    assert text.startswith("participants: ")


def refuse(root: str, participants: Any) -> str:
    """Rank function: return what a Checkpointer has against `participants`."""
    # A rank that ends while another one is still connecting fails that one.
    distributed.barrier()
    try:
        Checkpointer(root, participants=participants)
    except ConfigError as error:
        return str(error)
    return "made"


def save_replicas(root: str, parallel: bool, odd: bool) -> list[Any]:
    """Rank function: a state that all ranks have; with `odd`, one of them has less of it at first."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    mesh = states.line_mesh()
    found: list[Any] = []
    with Checkpointer(root, async_save=True, ckpt_fully_parallel_save=parallel) as checkpointer:
        for step in range(4):
            state: dict[str, Any] = {}
            for name, rows in (("big", 4096), ("odd", 1023), ("small", 3)):
                full = torch.arange(rows * 1024.0).reshape(rows, 1024) + step
                state[f"mesh {name}"] = states.shard(full, mesh, [Replicate()])
                state[f"plain {name}"] = full
            state["rows"] = states.shard(torch.arange(7.0) + step, mesh, [Shard(0)])
            if odd and rank == world - 1:
                del state["mesh odd"]
            found.append(outcome_of_intact(checkpointer, step, state))
    return found


def bytes_by_rank(path: Path) -> list[int]:
    [record] = [json.loads(file.read_text()) for file in (path / ".distckpt").glob("commit-*.json")]
    manifests = [json.loads((path / one["name"]).read_text()) for one in record["manifests"]]
    return [sum(manifest["files"].values()) for manifest in manifests]


@pytest.mark.parametrize("parallel", [True, False])
def test_replicas_share_the_writing(ranks: Ranks, tmp_path: Path, parallel: bool) -> None:
    """What a mesh replicates from the first save on; plain tensors once they are known to be the same."""
    world = 4
    replies = ranks.run(world, save_replicas, root=str(tmp_path), parallel=parallel, odd=False)
    assert replies == [[["", ""]] * 4] * world
    one_state = sum(rows * 1024 * 4 for rows in (4096, 1023, 3))
    first, later = (bytes_by_rank(step_path(tmp_path, step)) for step in (0, 3))
    if parallel:
        for nbytes in first:
            assert nbytes - one_state == pytest.approx(one_state / world, rel=0.05)
        for nbytes in later:
            assert nbytes == pytest.approx(2 * one_state / world, rel=0.05)
    else:
        assert later[0] == pytest.approx(2 * one_state, rel=0.01)
        assert max(later[1:]) < 1 << 16
    assert sum(later) == pytest.approx(2 * one_state, rel=0.01)
    assert_written_once(step_path(tmp_path, 3))
    for step in (0, 3):
        found = read_with_torch(step_path(tmp_path, step))
        for kind in ("mesh", "plain"):
            for name, rows in (("big", 4096), ("odd", 1023), ("small", 3)):
                full = torch.arange(rows * 1024.0).reshape(rows, 1024) + step
                assert torch.equal(found[f"{kind} {name}"], full), (step, kind, name)
    big = json.loads((step_path(tmp_path, 3) / ".distckpt").glob("*/rank-00002.json").__next__().read_text())
    if parallel:
        assert "mesh big" in big["items"]["fqns"]


def test_replicas_that_are_none(ranks: Ranks, tmp_path: Path) -> None:
    """A rank has not what its mesh says: one save is refused and says so, the later ones are complete."""
    replies = ranks.run(4, save_replicas, root=str(tmp_path), parallel=True, odd=True)
    for reply in replies:
        assert reply[0][0] in ("CommitError", "ReplicasDiffer")
        assert "has not the same chunks as rank" in reply[0][1]
        assert reply[1:] == [["", ""]] * 3
    found = read_with_torch(step_path(tmp_path, 3))
    assert torch.equal(found["mesh odd"], torch.arange(1023 * 1024.0).reshape(1023, 1024) + 3)


def save_plain(root: str) -> str:
    """Rank function: a DTensor some of whose chunks no participant has; and one that is not reduced."""
    from torch.distributed.tensor import DTensor, Partial

    mesh = states.line_mesh()
    if distributed.get_rank() == 2:
        return "|"
    found = []
    with Checkpointer(root, participants=[0, 1], async_save=True) as checkpointer:
        for placement in (Shard(0), Partial()):
            tensor = DTensor.from_local(torch.ones(2, 2), mesh, [placement], run_check=False)
            found.append(outcome_of_intact(checkpointer, 0, {"x": tensor})[1])
    return "|".join(found)


def test_dtensors_that_cannot_be_saved(ranks: Ranks, tmp_path: Path) -> None:
    for reply in ranks.run(3, save_plain, root=str(tmp_path))[:2]:
        outside, partial = reply.split("|")
        assert "'x' has a chunk that no participant holds" in outside
        assert "not supported for DTensor with partial placements" in partial


def save_while_training(root: str) -> list[Any]:
    """Rank function: saves are in flight while the default group is busy all the time."""
    value = torch.ones(64, 1024)
    handles = []
    with Checkpointer(root, async_save=True) as checkpointer:
        for step in range(6):
            value += 1
            handles.append(checkpointer.save(step, {"value": value}))
            while True:
                for _ in range(5):
                    distributed.all_reduce(torch.ones(1))
                # The ranks leave together: this too is a collective.
                done = torch.tensor(float(bool(handles[-1].committed)))
                distributed.all_reduce(done, distributed.ReduceOp.MIN)
                distributed.barrier()
                if done:
                    break
    return [bool(handle.committed) for handle in handles]


def test_collectives_of_the_training_while_saving(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(3, save_while_training, root=str(tmp_path)) == [[True] * 6] * 3
    assert set(read_with_torch(step_path(tmp_path, 5))["value"].flatten().tolist()) == {7.0}


def save_unevenly(root: str) -> str:
    """Rank function: one of the ranks has nearly all; returns what the log says."""
    rank = distributed.get_rank()
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("distckpt").addHandler(handler)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(0, {f"of {rank}": torch.zeros((160 << 20) if rank == 1 else 10, dtype=torch.uint8)})
    logging.getLogger("distckpt").removeHandler(handler)
    return said.getvalue()


def test_a_rank_that_writes_much_more_is_said(ranks: Ranks, tmp_path: Path) -> None:
    first, _ = ranks.run(2, save_unevenly, root=str(tmp_path))
    assert "rank 1 writes 0.16 GiB, 2.0 times the mean" in first


def save_other_values(root: str) -> list[Outcome]:
    """Rank function: under one name each rank has its own."""
    rank = distributed.get_rank()
    with Checkpointer(root, async_save=True) as checkpointer:
        return [
            outcome_of_intact(checkpointer, step, {"t": torch.full((3,), 10.0 * step + rank), "object": rank})
            for step in range(3)
        ]


def test_one_name_with_another_value_on_each_rank(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(3, save_other_values, root=str(tmp_path)) == [[["", ""]] * 3] * 3
    for step in range(3):
        found = read_with_torch(step_path(tmp_path, step))
        assert found["t"].tolist() in [[10.0 * step + rank] * 3 for rank in range(3)]
        assert found["object"] == 0


@pytest.mark.parametrize("readers", [1, 3])
def test_an_optimizer_in_plain_tensors(ranks: Ranks, tmp_path: Path, readers: int) -> None:
    root = str(tmp_path / "root")
    ranks.run(2, offloaded.save, root=root)
    ranks.run(readers, offloaded.load, root=root)


def save_boxes(root: str) -> list[Outcome]:
    """Rank function: halves of a tensor, each held by two of four ranks, and no mesh says so."""
    half = distributed.get_rank() % 2
    found = []
    with Checkpointer(root, async_save=True) as checkpointer:
        for step in range(3):
            full = torch.arange(1024 * 1024.0).reshape(1024, 1024) + step
            box = full[512 * half : 512 * (half + 1)].clone()
            state = {"t": Sharded(full.shape, [((512 * half, 0), box)])}
            found.append(outcome_of(checkpointer, step, state))
    return found


def test_boxes_that_several_ranks_hold(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(4, save_boxes, root=str(tmp_path)) == [[["", ""]] * 3] * 4
    assert bytes_by_rank(step_path(tmp_path, 2)) == pytest.approx([1 << 20] * 4, rel=0.05)
    assert_written_once(step_path(tmp_path, 2))
    for step in range(3):
        full = torch.arange(1024 * 1024.0).reshape(1024, 1024) + step
        assert torch.equal(read_with_torch(step_path(tmp_path, step))["t"], full)


class Slow(StoreCoordinator):
    """Looks for word of others late, once it has told that it has written."""

    has_written = False

    def tell(self, key: str, value: bytes) -> None:
        super().tell(key, value)
        self.has_written |= b'"written"' in value

    def hear(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        if self.has_written:
            threading.Event().wait(1.5)
        return super().hear(keys)


def save_and_end(root: str, port_file: str, ends: str) -> Outcome | None:
    """Rank function: rank 0 keeps the store, and ends before or after it has published."""
    port = Path(port_file)
    if distributed.get_rank() == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.with_suffix(".tmp").write_text(str(store.port))
        port.with_suffix(".tmp").rename(port)
        with Checkpointer(root, participants=StoreCoordinator(store, 0, [0, 1])) as checkpointer:
            if ends == "before":
                crash("after")
            checkpointer.save(0, {"of 0": torch.ones(3)})
            os.kill(os.getpid(), signal.SIGKILL)
    while not port.exists():
        time.sleep(0.01)
    store = TCPStore("127.0.0.1", int(port.read_text()), is_master=False, wait_for_workers=False)
    with Checkpointer(root, participants=Slow(store, 1, [0, 1])) as checkpointer:
        return outcome_of_intact(checkpointer, 0, {"of 1": torch.ones(3)})


@pytest.mark.parametrize("ends", ["before", "after"])
def test_the_first_rank_ends_and_its_store_with_it(ranks: Ranks, tmp_path: Path, ends: str) -> None:
    started = time.monotonic()
    _, (name, text) = ranks.run(
        2, save_and_end, root=str(tmp_path / "root"), port_file=str(tmp_path / "port"), ends=ends, may_die=[0]
    )
    assert time.monotonic() - started < 20, "at once, not at a deadline of ten minutes"
    if ends == "before":
        assert name == "MissingRanks"
        assert "store of the participants cannot be reached" in text
    else:
        assert (name, text) == ("", "")
        assert read_with_torch(step_path(tmp_path / "root", 0))["of 1"].tolist() == [1.0] * 3
