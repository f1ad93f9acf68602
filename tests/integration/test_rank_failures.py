"""One rank fails: all ranks learn of it at once, nothing is published, and the next save works."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from distckpt import StorageWriter, errors, observe
from integration.ranks import states
from integration.ranks.world import Ranks
from integration.test_ranks import MODES, READERS, files_of, named_by, save

if TYPE_CHECKING:
    import io

    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

pytestmark = pytest.mark.slow

AT_ONCE_S = 15.0
"""Far above what an error takes to reach all ranks on a busy machine, far below any deadline."""
BUDGET_BYTES = 12 << 20
LARGE_BYTES = 18 << 20


class UnpicklableError(Exception):
    """An error that holds a lock, and so does not pickle."""

    def __init__(self, message: str) -> None:
        super().__init__(message, threading.Lock())


class Unsaveable:
    """Can be neither pickled nor copied, and says so with an error that does not pickle."""

    def __reduce__(self) -> str:
        raise UnpicklableError("cannot be taken out of this process")


class FailingPlanner(DefaultSavePlanner):
    """Fails when it is asked for the data of the entry `fqn`."""

    def __init__(self, fqn: str, error: BaseException) -> None:
        super().__init__()
        self.fqn = fqn
        self.error = error

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.index.fqn.startswith(self.fqn):
            raise self.error
        return super().resolve_data(write_item)


# Each fault is a context on the rank that fails, around one save; it may change the arguments of the save.

Fault = Callable[[dict[str, Any], str], Any]


@contextmanager
def unsaveable_object(arguments: dict[str, Any], root: str) -> Iterator[None]:
    arguments["state"][f"object of {distributed.get_rank()}"] = Unsaveable()
    yield


@contextmanager
def over_budget(arguments: dict[str, Any], root: str) -> Iterator[None]:
    arguments["state"][f"large of {distributed.get_rank()}"] = torch.ones(BUDGET_BYTES + 1, dtype=torch.uint8)
    yield


@contextmanager
def planner_error(arguments: dict[str, Any], root: str) -> Iterator[None]:
    arguments["planner"] = FailingPlanner("sharded", UnpicklableError("no data"))
    yield


@contextmanager
def path_below_a_file(arguments: dict[str, Any], root: str) -> Iterator[None]:
    Path(root, "file").touch()
    arguments["checkpoint_id"] = f"{root}/file/checkpoint"
    yield


@contextmanager
def file_too_large(arguments: dict[str, Any], root: str) -> Iterator[None]:
    # In the middle of a file, with other parts in flight.
    pids = [os.getpid(), *(child.pid for child in psutil.Process().children())]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (LARGE_BYTES // 4, before[1]))
    yield
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@contextmanager
def worker_killed(arguments: dict[str, Any], root: str) -> Iterator[None]:
    pids = [child.pid for child in psutil.Process().children()]

    def kill(event: observe.Event) -> None:
        if event.name == "parts.pushed":
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    end = observe.subscribe(kill)
    yield
    end()


@contextmanager
def not_publishable(arguments: dict[str, Any], root: str) -> Iterator[None]:
    # A directory that is not empty stands where the metadata shall be.
    Path(root, "taken", ".metadata", "x").mkdir(parents=True, exist_ok=True)
    yield


FAULTS: dict[str, Fault] = {
    function.__name__: function
    for function in (
        unsaveable_object, over_budget, planner_error, path_below_a_file, file_too_large, worker_killed,
        not_publishable,
    )
}  # fmt: skip


def _make(seed: int) -> dict[str, Any]:
    """A state of several parts on every rank."""
    return states.make(seed, LARGE_BYTES)


def _differences(path: str, seed: int) -> list[str]:
    return states.load("distckpt", {path: seed}, LARGE_BYTES)


def _expect_failure(mode: str, **arguments: Any) -> dict[str, Any]:
    """Save, and describe how this rank was told that it failed."""
    started = time.monotonic()
    failures = {}
    try:
        save(mode=mode, **arguments)
    except CheckpointException as error:
        for rank, (failure, _) in error.failures.items():
            failures[rank] = f"{type(failure).__name__}: {failure}"
    seconds = time.monotonic() - started
    # The group is usable.
    one = torch.ones(1)
    distributed.all_reduce(one)
    assert one.item() == distributed.get_world_size()
    return {"failures": failures, "seconds": seconds}


def fail_and_recover(root: str, fault: str, mode: str, workers: int, culprit: int) -> dict[str, Any]:
    """Rank function: a save that works, one in which the rank `culprit` fails, and one that works again."""
    path = f"{root}/checkpoint"
    target = f"{root}/taken" if fault == "not_publishable" else path
    with StorageWriter(path, dist_ckpt_workers=workers, ckpt_host_memory=BUDGET_BYTES) as writer:
        save(_make(1), mode, checkpoint_id=path, storage_writer=writer)
        arguments: dict[str, Any] = {"state": _make(2), "checkpoint_id": target, "storage_writer": writer}
        if distributed.get_rank() == culprit:
            with FAULTS[fault](arguments, root):
                told = _expect_failure(mode, **arguments)
        else:
            told = _expect_failure(mode, **arguments)
        told["old"] = _differences(path, 1)
        distributed.barrier()
        save(_make(3), mode, checkpoint_id=path, storage_writer=writer)
        told["new"] = _differences(path, 3)
    return told


@pytest.mark.parametrize(
    ("fault", "mode", "workers", "culprit", "kind"),
    [
        ("unsaveable_object", "save", 1, 1, "CheckpointError: UnpicklableError"),
        pytest.param(
            "unsaveable_object", "save", 2, 0, "CheckpointError: UnpicklableError", marks=pytest.mark.thorough
        ),
        pytest.param("unsaveable_object", "async_save", 1, 1, "StagingError", marks=pytest.mark.thorough),
        ("unsaveable_object", "async_save", 2, 0, "StagingError"),
        pytest.param("over_budget", "async_save", 1, 1, "StagingError", marks=pytest.mark.thorough),
        ("over_budget", "async_save", 2, 0, "StagingError"),
        ("planner_error", "save", 1, 1, "CheckpointError: UnpicklableError"),
        ("planner_error", "async_save", 2, 0, "CheckpointError: UnpicklableError"),
        ("path_below_a_file", "save", 1, 1, "WriteError"),
        pytest.param("path_below_a_file", "save", 2, 0, "WriteError", marks=pytest.mark.thorough),
        pytest.param("path_below_a_file", "async_save", 1, 0, "WriteError", marks=pytest.mark.thorough),
        ("path_below_a_file", "async_save", 2, 1, "WriteError"),
        pytest.param("file_too_large", "save", 1, 1, "WriteError", marks=pytest.mark.thorough),
        ("file_too_large", "save", 2, 0, "WriteError"),
        ("file_too_large", "async_save", 1, 0, "WriteError"),
        pytest.param("file_too_large", "async_save", 2, 1, "WriteError", marks=pytest.mark.thorough),
        ("worker_killed", "save", 2, 1, "WorkerDied"),
        ("worker_killed", "async_save", 4, 0, "WorkerDied"),
        ("not_publishable", "save", 1, 0, "WriteError"),
        ("not_publishable", "async_save", 2, 0, "WriteError"),
    ],
)
def test_failure_of_one_rank(
    ranks: Ranks, tmp_path: Path, fault: str, mode: str, workers: int, culprit: int, kind: str
) -> None:
    told = ranks.run(
        2, fail_and_recover, root=str(tmp_path), fault=fault, mode=mode, workers=workers, culprit=culprit
    )
    for rank in told:
        assert list(rank["failures"]) == [str(culprit)]
        assert rank["failures"][str(culprit)].startswith(f"{kind}: ")
        assert rank["seconds"] < AT_ONCE_S
        assert rank["old"] == []
        assert rank["new"] == []
    path = tmp_path / "checkpoint"
    assert files_of(path) == named_by(path, ".metadata")


def raise_every_error(path: str) -> list[list[Any]]:
    """Rank function: rank 1 raises one error of each class; what this rank is told of each."""
    told = []
    rank = distributed.get_rank()
    with StorageWriter(path) as writer:
        for name in errors.__all__:
            kind = getattr(errors, name)
            error = kind(f"text of {name}")
            for number, attribute in enumerate(sorted(vars(error))):
                setattr(error, attribute, number)
            planner = FailingPlanner("x", error) if rank == 1 else None
            with pytest.raises(CheckpointException) as caught:
                state_dict_saver.save(
                    {f"x{distributed.get_rank()}": torch.ones(2)}, storage_writer=writer, planner=planner
                )
            told += [
                [failed, type(failure).__name__, str(failure), vars(failure)]
                for failed, (failure, _) in caught.value.failures.items()
            ]
        state_dict_saver.save({"x": torch.ones(2)}, storage_writer=writer)
    return told


def test_every_error_reaches_every_rank_with_its_attributes(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks.run(2, raise_every_error, path=str(tmp_path / "checkpoint"))
    expected = []
    for name in errors.__all__:
        attributes = sorted(vars(getattr(errors, name)("")))
        values = {attribute: number for number, attribute in enumerate(attributes)}
        expected.append([1, name, f"text of {name}", values])
    assert told == [expected, expected]


NONSENSE: list[Any] = [
    17,
    1.5,
    b"\xff",
    "",
    ["x"],
    "s3://bucket/x",
    "no-such-scheme://x",
    "a\0b",
    "/proc/none",
]


def save_nonsense(path: str, culprit: int, mode: str) -> list[list[Any]]:
    """Rank function: rank `culprit` names every sort of impossible directory, the others a good one."""
    told = []
    with StorageWriter() as writer:
        for nonsense in NONSENSE:
            writer.reset(nonsense)
            checkpoint_id = nonsense if distributed.get_rank() == culprit else path
            state = {"x": torch.ones(3), "y": torch.ones(4)}
            failure = _expect_failure(mode, state=state, checkpoint_id=checkpoint_id, storage_writer=writer)
            told.append([list(failure["failures"]), failure["seconds"] < AT_ONCE_S])
            assert not Path(path, ".metadata").exists()
        save({"x": torch.ones(3), "y": torch.ones(4)}, mode, checkpoint_id=path, storage_writer=writer)
    assert Path(path, ".metadata").exists()
    return told


@pytest.mark.parametrize(("culprit", "mode"), [(0, "save"), (1, "save"), (1, "async_save")])
def test_nonsense_on_one_rank_reaches_all(ranks: Ranks, tmp_path: Path, culprit: int, mode: str) -> None:
    told = ranks.run(2, save_nonsense, path=str(tmp_path / "checkpoint"), culprit=culprit, mode=mode)
    assert told == [[[[culprit], True]] * len(NONSENSE)] * 2


def save_with_a_tiny_budget(path: str, mode: str) -> list[Any]:
    """Rank function: rank 1 may not even hold a page."""
    good, tiny = StorageWriter(path), StorageWriter(path, ckpt_host_memory=4096)
    with good, tiny:
        writer = tiny if distributed.get_rank() == 1 else good
        told = _expect_failure(mode, state=_make(1), storage_writer=writer)
        assert not Path(path, ".metadata").exists()
        save(_make(2), mode, storage_writer=good)
    return [told["failures"], told["seconds"] < AT_ONCE_S, _differences(path, 2)]


@pytest.mark.parametrize("mode", MODES)
def test_budget_too_small_on_one_rank(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    for failures, at_once, found in ranks.run(
        2, save_with_a_tiny_budget, path=str(tmp_path / "checkpoint"), mode=mode
    ):
        assert list(failures) == ["1"]
        assert failures["1"].startswith("StagingError: ")
        assert "--ckpt-host-memory" in failures["1"]
        assert at_once
        assert found == []


class GatedPlanner(DefaultSavePlanner):
    """Fails once the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def create_local_plan(self) -> SavePlan:
        self.gate.wait()
        raise ValueError("no plan")


def stage_while_a_save_fails(path: str) -> float:
    """Rank function: wait for the memory of a save in flight, which fails meanwhile on another rank."""
    with StorageWriter(path, ckpt_host_memory=BUDGET_BYTES) as writer:
        planner = GatedPlanner() if distributed.get_rank() == 1 else None
        first: Any = state_dict_saver.async_save(_make(1), storage_writer=writer, planner=planner)
        if planner is not None:
            threading.Timer(1.0, planner.gate.set).start()
        started = time.monotonic()
        second: Any = state_dict_saver.async_save(_make(2), storage_writer=writer)
        seconds = time.monotonic() - started
        with pytest.raises(CheckpointException):
            first.upload_completion.result()
        second.upload_completion.result()
        assert _differences(path, 2) == []
    return seconds


def test_memory_of_a_save_that_fails_on_another_rank_is_freed(ranks: Ranks, tmp_path: Path) -> None:
    waited = ranks.run(2, stage_while_a_save_fails, path=str(tmp_path / "checkpoint"))
    assert max(waited) < AT_ONCE_S


def close_after_failure(path: str) -> float:
    """Rank function: close the writer while the failed save of another rank is remembered."""
    writer = StorageWriter(path)
    state = _make(1)
    if distributed.get_rank() == 1:
        state["bad"] = Unsaveable()
    response: Any = state_dict_saver.async_save(state, storage_writer=writer)
    with pytest.raises(CheckpointException):
        response.upload_completion.result()
    started = time.monotonic()
    writer.close()
    seconds = time.monotonic() - started
    assert response.upload_completion.done()
    return seconds


def test_close_after_a_save_that_failed_on_another_rank(ranks: Ranks, tmp_path: Path) -> None:
    assert max(ranks.run(2, close_after_failure, path=str(tmp_path / "checkpoint"))) < AT_ONCE_S


def save_with_one_planner(root: str) -> list[str]:
    """Rank function: the planner keeps the state of the save before, and the budget has no room for two."""
    planner = DefaultSavePlanner(enable_plan_caching=True)
    responses: list[Any] = []
    found = []
    with StorageWriter(ckpt_host_memory=BUDGET_BYTES) as writer:
        for seed in range(3):
            path = f"{root}/{seed}"
            response = state_dict_saver.async_save(
                _make(seed), checkpoint_id=path, storage_writer=writer, planner=planner
            )
            responses.append(response)
            responses[-1].upload_completion.result()
            found += _differences(path, seed)
    return found


def test_a_planner_that_is_kept_does_not_keep_the_memory(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, save_with_one_planner, root=str(tmp_path)) == [[], []]


def killed_while_overwriting(path: str, victim: int, event: str, mode: str, workers: int) -> list[Any]:
    """Rank function: rank `victim` is killed at the first `event` of its second save."""

    def kill(seen: observe.Event) -> None:
        if seen.name == event:
            os.kill(os.getpid(), signal.SIGKILL)

    writer = StorageWriter(path, dist_ckpt_workers=workers, ckpt_host_memory=BUDGET_BYTES)
    save(_make(1), mode, storage_writer=writer)
    distributed.barrier()
    if distributed.get_rank() == victim:
        observe.subscribe(kill)
    started = time.monotonic()
    with pytest.raises((RuntimeError, CheckpointException)):
        save(_make(2), mode, storage_writer=writer)
    seconds = time.monotonic() - started
    writer.close()
    return [seconds, time.monotonic() - started]


def save_again(path: str) -> list[str]:
    """Rank function: the job has been started anew."""
    with StorageWriter(path, ckpt_host_memory=BUDGET_BYTES) as writer:
        found = _differences(path, 1)
        save(_make(3), "save", storage_writer=writer)
    return found + _differences(path, 3)


@pytest.mark.parametrize(
    ("victim", "event", "mode", "workers"),
    [
        pytest.param(0, "parts.pushed", "save", 1, marks=pytest.mark.thorough),
        (0, "rank.written", "async_save", 2),
        (1, "parts.pushed", "async_save", 1),
        (2, "files.written", "save", 2),
        pytest.param(2, "rank.written", "save", 1, marks=pytest.mark.thorough),
    ],
)
def test_old_checkpoint_survives_the_death_of_a_rank(
    ranks: Ranks, tmp_path: Path, victim: int, event: str, mode: str, workers: int
) -> None:
    path = tmp_path / "checkpoint"
    seconds = ranks.run(
        3,
        killed_while_overwriting,
        may_die=[victim],
        path=str(path),
        victim=victim,
        event=event,
        mode=mode,
        workers=workers,
    )
    assert seconds[victim] is None
    assert max(max(times) for times in seconds if times is not None) < AT_ONCE_S
    for reader in READERS:
        found = ranks.run(
            2,
            states.load,
            without_distckpt=reader == "torch",
            reader=reader,
            checkpoints={str(path): 1},
            large_bytes=LARGE_BYTES,
        )
        assert found == [[], []]
    assert ranks.run(3, save_again, path=str(path)) == [[]] * 3
    assert files_of(path) == named_by(path, ".metadata")
