"""Checkpointer on several ranks: they save together, and agree through storage alone."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

from distckpt import Checkpointer, ConfigError, MissingRanks, observe
from distckpt.lanes import WorkerLanes
from integration.checkpoints import read_with_torch
from integration.ranks import states
from integration.ranks.world import Ranks
from integration.test_ranks import READERS, files_of, named_by

pytestmark = pytest.mark.slow

WAIT_S = 20.0
DEADLINE_S = 1.0
Outcome = tuple[str, str]
"""Name of the error and its text; empty for a save that was committed."""


def step_path(root: str | Path, step: int) -> Path:
    return Path(root) / f"step-{step:08}"


def outcome_of(checkpointer: Checkpointer, step: int, state: dict[str, Any]) -> Outcome:
    """Save and wait for the end."""
    try:
        handle = checkpointer.save(step, state)
        states.scramble(state)
        handle.result(WAIT_S)
    except Exception as error:  # noqa: BLE001 - told to the test
        return type(error).__name__, str(error)
    return "", ""


def written_by(path: Path) -> list[list[tuple[str, Any]]]:
    """Return the name and the offset of what each rank wrote, as the manifests of the commit say.

    Left out are empty shards, which may have the offset of another.
    """
    [record] = [json.loads(file.read_text()) for file in (path / ".distckpt").glob("commit-*.json")]
    tables = [json.loads((path / one["name"]).read_text())["items"] for one in record["manifests"]]
    if len(tables) == 1:
        # There is a plan of all that there is, which says of what kind it is.
        return [[(fqn, None) for fqn in tables[0]["fqns"]]]
    return [
        [
            (fqn, None if offset is None else tuple(offset))
            for fqn, offset, (_, sizes, *_) in zip(
                table["fqns"], table["chunks"], table["entries"], strict=True
            )
            if sizes is None or 0 not in sizes
        ]
        for table in tables
    ]


def assert_written_once(path: Path) -> None:
    counts = Counter(item for items in written_by(path) for item in items)
    assert {item for item, count in counts.items() if count > 1} == set()
    assert files_of(path) == named_by(path, ".metadata")


def save_steps(root: str, workers: int, steps: int) -> list[Outcome]:
    """Rank function: save a state of all layouts again and again, each step with other values."""
    with Checkpointer(root, async_save=True, dist_ckpt_workers=workers) as checkpointer:
        return [outcome_of(checkpointer, step, states.make(step)) for step in range(steps)]


def restore_steps(root: str, steps: int) -> list[str]:
    """Rank function: restore each of the steps, and the last."""
    found = []
    with Checkpointer(root) as checkpointer:
        if checkpointer.steps() != list(range(steps)):
            found.append(f"steps: {checkpointer.steps()}")
        for step in (*range(steps), "latest"):
            state = states.make(None)
            loaded = checkpointer.restore(state, step)
            expected = steps - 1 if step == "latest" else step
            found += [] if loaded == expected else [f"{step}: {loaded}"]
            found += states.differences(state, states.make(loaded), str(step))
    return found


@pytest.mark.parametrize(("world", "workers"), [(2, 1), (3, 2)])
def test_every_layout(ranks: Ranks, tmp_path: Path, world: int, workers: int) -> None:
    steps = 3
    found = ranks.run(world, save_steps, root=str(tmp_path), workers=workers, steps=steps)
    assert found == [[["", ""]] * steps] * world
    checkpoints = {str(step_path(tmp_path, step)): step for step in range(steps)}
    for loaded_by in (1, 2, 3):
        for reader in READERS if loaded_by == 2 else READERS[:1]:
            differences = ranks.run(
                loaded_by,
                states.load,
                without_distckpt=reader == "torch",
                reader=reader,
                checkpoints=checkpoints,
            )
            assert differences == [[]] * loaded_by
    assert ranks.run(world, restore_steps, root=str(tmp_path), steps=steps) == [[]] * world
    for step in range(1, steps):
        assert_written_once(step_path(tmp_path, step))
    # What all have alike is written by all as long as they do not know, and by one of them from then on.
    first, *others = written_by(step_path(tmp_path, 0))
    plain = {item for item in first if item[0].startswith(("plain", "objects"))}
    assert plain
    assert all(plain <= set(items) for items in others)
    assert plain <= {item for items in written_by(step_path(tmp_path, steps - 1)) for item in items}


def save_models(root: str, steps: int) -> list[Any]:
    """Rank function: train a sharded model, save without waiting; digests of what is saved and restored."""
    torch.manual_seed(3)
    mesh = states.line_mesh()
    weight, moment = (states.shard(torch.randn(9, 4), mesh, [states.ROWS]) for _ in range(2))
    count = torch.tensor(0.0)
    groups: list[dict[str, Any]] = [{"lr": 0}]
    state: dict[str, Any] = {
        "model": {"weight": weight},
        "optimizer": {"state": {0: {"step": count, "exp_avg": moment}}, "groups": groups},
    }

    def digests() -> list[Any]:
        return [states.digest(weight), states.digest(moment), float(count), groups[0]["lr"]]

    found = []
    with Checkpointer(root, async_save=True) as checkpointer:
        for step in range(steps):
            with torch.no_grad():
                weight.mul_(1.5)
                moment.add_(step)
                count.add_(1)
            groups[0]["lr"] = step
            found.append([digests()])
            checkpointer.save(step, state)
        checkpointer.wait()
        groups[0]["lr"] = None
        for step in range(steps):
            assert checkpointer.restore(state, step) == step
            groups = state["optimizer"]["groups"]
            found[step].append(digests())
    return found


def test_saves_that_nobody_waits_for(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(3, save_models, root=str(tmp_path), steps=6)
    assert found == [found[0]] * 3
    assert [saved for saved, _ in found[0]] == [restored for _, restored in found[0]]
    assert_written_once(step_path(tmp_path, 5))


def _own_state(step: int, *, whole: bool = False) -> dict[str, Any]:
    """Return entries of all ranks, of one, and of some."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    state: dict[str, Any] = {"all": torch.full((3,), float(step)), "step": step}
    for one in range(world) if whole else (rank,):
        state[f"of {one}"] = {"t": torch.full((2 + one,), float(step + one)), "object": ["rank", one, step]}
    if whole or rank > 0:
        state["not of 0"] = torch.full((4,), step + 0.5)
        state["object not of 0"] = f"step {step}"
    return state


def save_own_entries(root: str) -> list[Outcome]:
    """Rank function: every rank has entries of its own."""
    with Checkpointer(root, async_save=True) as checkpointer:
        return [outcome_of(checkpointer, step, _own_state(step)) for step in range(3)]


def read_own_entries(root: str) -> list[str]:
    """Rank function: load all entries of all ranks."""
    found = []
    with Checkpointer(root) as checkpointer:
        for step in range(3):
            expected = _own_state(step, whole=True)
            state = _own_state(9, whole=True)
            checkpointer.restore(state, step)
            found += states.differences(state, expected, str(step))
    return found


def test_entries_of_some_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(3, save_own_entries, root=str(tmp_path)) == [[["", ""]] * 3] * 3
    assert ranks.run(3, read_own_entries, root=str(tmp_path)) == [[]] * 3
    for step in range(3):
        found = read_with_torch(step_path(tmp_path, step))
        assert found.keys() == {"all", "step", "of 0", "of 1", "of 2", "not of 0", "object not of 0"}
        assert found["of 2"]["object"] == ["rank", 2, step]
    assert_written_once(step_path(tmp_path, 2))


def save_nothing_at_some(root: str) -> list[Outcome]:
    """Rank function: first only rank 1 has anything, then nobody, then all."""
    rank = distributed.get_rank()
    found = []
    with Checkpointer(root, async_save=True) as checkpointer:
        for step in range(6):
            has = (rank == 1, False, True)[step // 2]
            found.append(outcome_of(checkpointer, step, {"t": torch.full((3,), float(step))} if has else {}))
    return found


def test_ranks_without_anything(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, save_nothing_at_some, root=str(tmp_path)) == [[["", ""]] * 6] * 2
    for step in range(6):
        expected = [] if step in (2, 3) else [float(step)] * 3
        assert read_with_torch(step_path(tmp_path, step)).get("t", torch.empty(0)).tolist() == expected


def save_sharded_tensors(root: str) -> list[Outcome]:
    """Rank function: a tensor of the older kind, of uneven shards."""
    rank = distributed.get_rank()
    found = []
    with Checkpointer(root, async_save=True) as checkpointer:
        for step in range(3):
            rows = 4 - rank
            local = torch.full((rows, 2), float(10 * step + rank))
            metadata = ShardMetadata([4 * rank, 0], [rows, 2], f"rank:{rank}/cpu")
            tensor = sharded_tensor.init_from_local_shards([LocalShard(local, metadata)], 7, 2)
            found.append(outcome_of_intact(checkpointer, step, {"sharded": tensor, "plain": torch.ones(2)}))
    return found


def test_sharded_tensors(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, save_sharded_tensors, root=str(tmp_path)) == [[["", ""]] * 3] * 2
    for step in range(3):
        found = read_with_torch(step_path(tmp_path, step))["sharded"]
        assert found[:, 0].tolist() == [10.0 * step] * 4 + [10.0 * step + 1] * 3


class Unsaveable:
    """Cannot be pickled."""

    def __reduce__(self) -> str:
        raise TypeError("cannot be taken out of this process")


@contextmanager
def unsaveable_object(checkpointer: Checkpointer, path: Path, state: dict[str, Any]) -> Iterator[None]:
    state["object of one"] = Unsaveable()
    yield


@contextmanager
def freed_storage(checkpointer: Checkpointer, path: Path, state: dict[str, Any]) -> Iterator[None]:
    state["sharded"]["even"].to_local().untyped_storage().resize_(0)
    yield


@contextmanager
def worker_killed(checkpointer: Checkpointer, path: Path, state: dict[str, Any]) -> Iterator[None]:
    lanes = checkpointer._engine.lanes
    assert isinstance(lanes, WorkerLanes)

    def kill(event: observe.Event) -> None:
        if event.name == "parts.pushed":
            for pid in lanes.pids:
                os.kill(pid, signal.SIGKILL)

    for pid in lanes.pids:
        os.kill(pid, signal.SIGSTOP)
    end = observe.subscribe(kill)
    yield
    end()


@contextmanager
def file_removed(checkpointer: Checkpointer, path: Path, state: dict[str, Any]) -> Iterator[None]:
    """What this rank wrote is gone before it is published."""

    def remove(event: observe.Event) -> None:
        if event.name == "files.written":
            names = event.fields["names"]
            assert isinstance(names, tuple)
            for name in names:
                (path / name).unlink()

    end = observe.subscribe(remove)
    yield
    end()


Fault = Callable[[Checkpointer, Path, dict[str, Any]], Any]
FAULTS: dict[str, Fault] = {
    function.__name__: function
    for function in (unsaveable_object, freed_storage, worker_killed, file_removed)
}


def save_with_a_fault(root: str, fault: str, failing: int, before: int) -> list[Any]:
    """Rank function: `before` saves, one in which one rank fails, and two more."""
    found: list[Any] = []
    with Checkpointer(root, async_save=True, dist_ckpt_workers=2) as checkpointer:
        for step in range(before):
            found.append(outcome_of(checkpointer, step, states.make(step)))
        state = states.make(before)
        started = time.monotonic()
        if distributed.get_rank() == failing:
            with FAULTS[fault](checkpointer, step_path(root, before), state):
                found.append(outcome_of_intact(checkpointer, before, state))
        else:
            found.append(outcome_of_intact(checkpointer, before, state))
        found.append(time.monotonic() - started)
        found += [outcome_of(checkpointer, step, states.make(step)) for step in (before + 1, before + 2)]
        # What failed is done again.
        found.append(outcome_of(checkpointer, before, states.make(before)))
        found.append(checkpointer.steps())
    return found


def outcome_of_intact(checkpointer: Checkpointer, step: int, state: dict[str, Any]) -> Outcome:
    """Save and wait, without a change of the state, which may have no memory."""
    try:
        checkpointer.save(step, state).result(WAIT_S)
    except Exception as error:  # noqa: BLE001 - told to the test
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("fault", "failing"),
    [
        ("unsaveable_object", 0), ("unsaveable_object", 1), ("freed_storage", 1), ("worker_killed", 1),
        ("file_removed", 0), ("file_removed", 1),
    ],
)  # fmt: skip
def test_one_rank_fails(ranks: Ranks, tmp_path: Path, fault: str, failing: int) -> None:
    before = 2
    replies = ranks.run(3, save_with_a_fault, root=str(tmp_path), fault=fault, failing=failing, before=before)
    for rank, (*good, failure, seconds, next_, second, again, steps) in enumerate(replies):
        assert good == [["", ""]] * before
        assert seconds < 10, "at once, not at a deadline"
        name, text = failure
        assert name, rank
        if fault == "file_removed":
            # Seen by the coordinator, whoever's file it was.
            assert f"__{failing}_" in text
        elif rank != failing:
            assert name == "CommitError"
            assert f"rank {failing}" in text
        assert [next_, second, again] == [["", ""]] * 3, rank
        assert steps == [0, 1, 2, 3, 4]
    checkpoints = {str(step_path(tmp_path, step)): step for step in range(5)}
    assert ranks.run(2, states.load, reader="torch", checkpoints=checkpoints) == [[], []]


def save_without_one(root: str, missing: int) -> list[Any]:
    """Rank function: rank `missing` leaves out one save of three."""
    found: list[Any] = []
    with Checkpointer(root, async_save=True, distributed_timeout_minutes=DEADLINE_S / 60) as checkpointer:
        for step in range(2):
            if step == 1 and distributed.get_rank() == missing:
                found.append(["absent", ""])
                continue
            state = states.make(step)
            try:
                checkpointer.save(step, state).result(WAIT_S)
                found.append(["", ""])
            except MissingRanks as error:
                found.append(["MissingRanks", [list(error.ranks or ()), error.waited_s, str(error)]])
            except Exception as error:  # noqa: BLE001 - told to the test
                found.append([type(error).__name__, str(error)])
        distributed.barrier()
        found.append(checkpointer.steps())
        found += [outcome_of_intact(checkpointer, step, states.make(step)) for step in (2, 3)]
    return found


@pytest.mark.parametrize("missing", [0, 2])
def test_one_rank_does_not_save(ranks: Ranks, tmp_path: Path, missing: int) -> None:
    replies = ranks.run(3, save_without_one, root=str(tmp_path), missing=missing)
    for rank, (first, failure, steps, *_) in enumerate(replies):
        assert first == ["", ""]
        assert steps == [0]
        if rank == missing:
            assert failure[0] == "absent"
        else:
            assert failure[0] == "MissingRanks", failure
            absent, waited_s, text = failure[1]
            assert absent == [missing], rank
            assert f"rank {missing} never entered the save" in text
            assert str(step_path(tmp_path, 1)) in text
            if waited_s is not None:
                assert DEADLINE_S <= waited_s < DEADLINE_S + 10
    for rank, (*_, next_, second) in enumerate(replies):
        assert [next_, second] == [["", ""]] * 2, f"rank {rank}: a save that one left out is over"


def save_from_members(root: str, members: list[int]) -> Any:
    """Rank function: `members` save; the others have nothing to do with it, and may be gone."""
    group = distributed.new_group(members)
    if distributed.get_rank() not in members:
        try:
            Checkpointer(root, participants=group)
        except ConfigError as error:
            return str(error)
        return "made"
    with Checkpointer(root, participants=group, async_save=True) as checkpointer:
        mesh = states.line_mesh(group)
        found: list[Any] = []
        for step in range(3):
            full = states.values("t", (5, 3), torch.float32, step)
            state = {"t": states.shard(full, mesh, [states.ROWS]), "plain": torch.full((2,), float(step))}
            found.append(outcome_of(checkpointer, step, state))
        target = {"t": states.shard(torch.zeros(5, 3), mesh, [states.ROWS]), "plain": torch.zeros(2)}
        found.append(checkpointer.restore(target))
        full = states.values("t", (5, 3), torch.float32, 2)
        expected = {"t": states.shard(full, mesh, [states.ROWS]), "plain": torch.full((2,), 2.0)}
        found.append(states.differences(target, expected))
    return found


@pytest.mark.parametrize("members", [[0, 2], [1, 2], [1]], ids=str)
def test_a_group_of_some_ranks(ranks: Ranks, tmp_path: Path, members: list[int]) -> None:
    replies = ranks.run(3, save_from_members, root=str(tmp_path), members=members)
    for rank, reply in enumerate(replies):
        if rank in members:
            assert reply == [["", ""], ["", ""], ["", ""], 2, []]
        else:
            assert "not in the process group" in reply
    assert_written_once(step_path(tmp_path, 2))
    assert {name.split("_")[2] for name in files_of(step_path(tmp_path, 2)) - {".metadata"}} == set(
        map(str, members)
    )
    expected = states.values("t", (5, 3), torch.float32, 2)
    found = read_with_torch(step_path(tmp_path, 2))["t"]
    assert torch.equal(states.local_bytes(found), states.local_bytes(expected))


CHANGES = ("add", "rename", "grow", "dtype", "object", "longer object")


def _changing_state(step: int, change: str, *, changed: bool, zero: bool = False) -> dict[str, Any]:
    """Return a state that is another one if `changed`."""
    value = 0.0 if zero else float(step)
    state: dict[str, Any] = {
        "sharded": states.shard(torch.full((6, 2), value), states.line_mesh(), [states.ROWS]),
        "a": torch.full((3,), value),
        "b": torch.full((4,), value),
        "object": None if zero else "x",
        "step": None if zero else step,
    }
    if not changed:
        return state
    if change == "add":
        state["new"] = torch.full((5,), value)
        state["new object"] = None if zero else step
    elif change == "remove":
        del state["a"]
    elif change == "grow":
        state["a"] = torch.full((4,), value)
    elif change == "dtype":
        state["a"] = torch.full((3,), value, dtype=torch.float64)
    elif change == "object":
        state["object"] = torch.full((2,), value)
    elif change == "longer object":
        state["object"] = None if zero else "x" * 1000
    else:
        state["c"] = state.pop("a")
    return state


def save_changing_states(root: str, change: str, who: list[int]) -> list[Outcome]:
    """Rank function: from step 3 on the state of the ranks `who` is another one."""
    with Checkpointer(root, async_save=True) as checkpointer:
        is_one = distributed.get_rank() in who
        return [
            outcome_of(checkpointer, step, _changing_state(step, change, changed=is_one and step >= 3))
            for step in range(6)
        ]


def load_changing_states(root: str, change: str, steps: list[int], changed: bool) -> list[str]:
    """Rank function: load what `save_changing_states` wrote."""
    found = []
    with Checkpointer(root) as checkpointer:
        for step in steps:
            is_other = changed and step >= 3
            state = _changing_state(step, change, changed=is_other, zero=True)
            checkpointer.restore(state, step)
            expected = _changing_state(step, change, changed=is_other)
            found += states.differences(state, expected, str(step))
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_the_state_changes_on_all_ranks_at_once(ranks: Ranks, tmp_path: Path, change: str) -> None:
    replies = ranks.run(2, save_changing_states, root=str(tmp_path), change=change, who=[0, 1])
    assert replies == [[["", ""]] * 6] * 2
    found = ranks.run(
        2, load_changing_states, root=str(tmp_path), change=change, steps=list(range(6)), changed=True
    )
    assert found == [[], []]
    assert_written_once(step_path(tmp_path, 5))


@pytest.mark.parametrize("change", ["add", "remove", "longer object"])
def test_what_one_rank_saves_changes(ranks: Ranks, tmp_path: Path, change: str) -> None:
    """What the others had left to rank 0 may be lost to one save, which says so, and to no other."""
    replies = ranks.run(3, save_changing_states, root=str(tmp_path), change=change, who=[0])
    failed = [step for step in range(6) if replies[0][step][0]]
    assert failed in ([], [3])
    for reply in replies:
        assert [step for step in range(6) if reply[step][0]] == failed
        for step in failed:
            assert reply[step][0] in ("StateChanged", "CommitError")
            assert "what rank 0 saves has changed" in reply[step][1]
    for step in set(range(6)) - set(failed):
        found = read_with_torch(step_path(tmp_path, step))
        # What is left out by rank 0 the others still have.
        for name in ("a", "b", *(["new"] if change == "add" and step >= 3 else [])):
            assert set(found[name].tolist()) == {float(step)}, (step, name)
        assert found["step"] == step
        assert len(found["object"]) == (1000 if change == "longer object" and step >= 3 else 1)
        assert set(found["sharded"].flatten().tolist()) == {float(step)}
    for step in failed:
        assert not (step_path(tmp_path, step) / ".metadata").exists()


def save_contradictions(root: str) -> list[Outcome]:
    """Rank function: the ranks mean other things by one name; then no longer."""
    rank = distributed.get_rank()
    found = []
    with Checkpointer(root, async_save=True) as checkpointer:
        for step, value in enumerate((torch.ones(3 + rank), torch.ones(3) if rank else 7, torch.ones(2))):
            found.append(outcome_of_intact(checkpointer, step, {"x": value}))
    return found


def test_one_name_for_two_things(ranks: Ranks, tmp_path: Path) -> None:
    for reply in ranks.run(2, save_contradictions, root=str(tmp_path)):
        for name, text in reply[:2]:
            assert name == "CommitError"
            assert "'x' is another thing on rank 1" in text
        assert reply[2] == ["", ""]
    assert not (step_path(tmp_path, 0) / ".metadata").exists()
    assert read_with_torch(step_path(tmp_path, 2))["x"].tolist() == [1.0, 1.0]


def save_a_step_again(root: str) -> list[Outcome]:
    """Rank function: one step again and again, by one Checkpointer and by the next."""
    found = []
    for turn in range(2):
        with Checkpointer(root, async_save=True) as checkpointer:
            for number in range(3):
                seed = 10 * turn + number
                found.append(outcome_of(checkpointer, 7, states.make(seed)))
    return found


def test_a_step_is_saved_again(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, save_a_step_again, root=str(tmp_path)) == [[["", ""]] * 6] * 2
    assert ranks.run(2, states.load, reader="torch", checkpoints={str(step_path(tmp_path, 7)): 12}) == [
        [],
        [],
    ]
    assert_written_once(step_path(tmp_path, 7))


def save_late(root: str, late_s: float) -> list[Any]:
    """Rank function: rank 1 comes late; rank 0 has its training go on meanwhile."""
    found: list[Any] = []
    with Checkpointer(root, async_save=True) as checkpointer:
        for step in range(1):
            if distributed.get_rank() == 1:
                threading.Event().wait(late_s)
            started = time.monotonic()
            handle = checkpointer.save(step, states.make(step))
            found.append(time.monotonic() - started)
            handle.result(WAIT_S)
    return found


def test_no_rank_waits_in_save_for_another(ranks: Ranks, tmp_path: Path) -> None:
    first, _ = ranks.run(2, save_late, root=str(tmp_path), late_s=4.0)
    assert max(first) < 3


def save_over_the_budget(root: str) -> list[Any]:
    """Rank function: the state does not fit, and the saves block."""
    found: list[Any] = []
    with Checkpointer(root, async_save=True, ckpt_host_memory=24 << 20) as checkpointer:
        for step in range(3):
            handle = checkpointer.save(step, states.make(step, 40 << 20))
            found.append([bool(handle.committed), checkpointer.latest() == step])
    return found


def test_over_the_budget(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, save_over_the_budget, root=str(tmp_path)) == [[[True, True]] * 3] * 2
    checkpoints = {str(step_path(tmp_path, step)): step for step in (0, 2)}
    assert ranks.run(2, states.load, reader="torch", checkpoints=checkpoints, large_bytes=40 << 20) == [
        [],
        [],
    ]


def restore_what_is_missing(root: str) -> list[Any]:
    """Rank function: there is nothing; then there is, but not that step."""
    with Checkpointer(root) as checkpointer:
        found: list[Any] = [checkpointer.restore(states.make(None)), checkpointer.steps()]
        checkpointer.save(3, states.make(3))
        try:
            checkpointer.restore(states.make(None), 4)
        except Exception as error:  # noqa: BLE001 - told to the test
            found.append([type(error).__name__, "step-00000004" in str(error)])
        found.append(checkpointer.restore(states.make(None)))
    return found


def test_what_is_not_there(ranks: Ranks, tmp_path: Path) -> None:
    expected = [None, [], ["CheckpointError", True], 3]
    assert ranks.run(2, restore_what_is_missing, root=str(tmp_path)) == [expected] * 2
