"""What is written is the value that everything had when the save was called (I1)."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from distckpt import CommitError, StorageWriter, observe
from integration.checkpoints import (
    WAIT_S,
    GatedPlanner,
    assert_same,
    failure_of,
    finish,
    read_with_distckpt,
    read_with_torch,
    save,
    start,
    stopped_workers,
    waiting_for,
)

pytestmark = pytest.mark.slow


class Counter:
    """An object of the user's, with state that changes."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.history = [value]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counter) and self.__dict__ == other.__dict__


class Trainer:
    """A state of all kinds, and one step that changes all of it."""

    def __init__(self, folder: Path) -> None:
        base = torch.arange(64.0).reshape(8, 8)
        mapped = torch.from_file(str(folder / "mapped"), shared=True, size=16, dtype=torch.float32)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
        self.tensors: dict[str, torch.Tensor] = {
            "dense": torch.arange(40.0),
            "shared": torch.arange(30.0).share_memory_(),  # type: ignore[no-untyped-call]
            "mapped": mapped,
            "large": torch.zeros(3 << 20, dtype=torch.uint8),
            "large and shared": torch.zeros(1 << 20).share_memory_(),  # type: ignore[no-untyped-call]
            "columns": base[:, ::2],
            "transposed": base.t(),
            "expanded": base[0].expand(3, 8),
            "row of the same storage": base[1],
            "parameter": torch.nn.Parameter(torch.ones(4)),
            "int": torch.arange(5),
            "scalar": torch.tensor(1.0),
            "from numpy": torch.from_numpy(torch.arange(6.0).numpy()),
        }
        self.objects: dict[str, Any] = {
            "list": [1, [2, 3]],
            "dict": {"a": {"b": [1]}},
            "counter": Counter(1),
            "set": {1},
            "bytearray": bytearray(b"old"),
            "array": torch.arange(5).numpy(),
            "tuple": (torch.ones(3), [torch.ones(2), Counter(1)]),
            "list of tensors": [torch.ones(3), {"x": torch.ones(2)}],
        }
        self.state: dict[str, Any] = {**self.tensors, **self.objects, "model": self.model.state_dict()}

    def values(self) -> dict[str, Any]:
        """What a checkpoint of now must hold."""
        return copy.deepcopy({
            **{name: tensor.detach() for name, tensor in self.tensors.items()},
            **self.objects,
            "array": self.objects["array"].tolist(),
            "model": dict(self.state["model"]),
        })  # fmt: skip

    def step(self) -> None:
        with torch.no_grad():
            for tensor in self.tensors.values():
                if tensor.data_ptr() != 0 and 0 not in tensor.stride():
                    tensor.add_(1)
            for parameter in self.model.parameters():
                parameter.mul_(2)
        self.model(torch.randn(3, 6))  # BatchNorm's buffers
        objects = self.objects
        objects["list"][1].append(4)
        objects["dict"]["a"]["b"].append(2)
        objects["dict"]["new"] = 1
        objects["counter"].value += 1
        objects["counter"].history.append(2)
        objects["set"].add(2)
        objects["bytearray"][:] = b"new"
        objects["array"] += 1
        objects["tuple"][0].add_(1)
        objects["tuple"][1][0].add_(1)
        objects["tuple"][1][1].value += 1
        objects["list of tensors"][0].add_(1)
        objects["list of tensors"][1]["x"].add_(1)

    def rearrange(self) -> None:
        """Change what the state consists of, rather than the values of its parts."""
        self.state["new"] = torch.ones(1)
        del self.state["int"]
        self.state["dense"] = torch.zeros(40)
        self.state["model"].clear()
        self.objects["list of tensors"].append(torch.ones(1))


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


@pytest.fixture
def writer() -> Iterator[StorageWriter]:
    with StorageWriter(dist_ckpt_workers=2) as opened:
        yield opened


def assert_holds(path: Path, expected: dict[str, Any]) -> None:
    for read in (read_with_torch, read_with_distckpt):
        found = read(path)
        found["array"] = found["array"].tolist()
        assert_same(found, expected, read.__name__)


@pytest.mark.parametrize("workers", [1, 2])
def test_changes_before_the_plan_is_made(tmp_path: Path, trainer: Trainer, workers: int) -> None:
    planner = GatedPlanner()
    with StorageWriter(dist_ckpt_workers=workers) as writer:
        expected = trainer.values()
        response = start(trainer.state, tmp_path / "a", writer, planner)
        response.staging_completion.result(WAIT_S)
        trainer.step()
        trainer.rearrange()
        planner.gate.set()
        finish(response)
    assert_holds(tmp_path / "a", expected)


def test_changes_while_workers_write(tmp_path: Path, trainer: Trainer, writer: StorageWriter) -> None:
    save(trainer.state, tmp_path / "warm", writer, is_async=True)
    trainer.step()
    expected = trainer.values()
    with stopped_workers(writer), waiting_for("parts.pushed") as wait_until_pushed:
        response = start(trainer.state, tmp_path / "a", writer)
        response.staging_completion.result(WAIT_S)
        wait_until_pushed()
        trainer.step()
        trainer.rearrange()
        assert not response.upload_completion.done()
    finish(response)
    assert_holds(tmp_path / "a", expected)


def test_changes_while_the_one_lane_of_this_process_writes(tmp_path: Path, trainer: Trainer) -> None:
    pushed, changed = threading.Event(), threading.Event()

    def hold(event: observe.Event) -> None:
        if event.name == "parts.pushed":
            pushed.set()
            changed.wait(WAIT_S)

    expected = trainer.values()
    end = observe.subscribe(hold)
    try:
        with StorageWriter() as writer:
            response = start(trainer.state, tmp_path / "a", writer)
            assert pushed.wait(WAIT_S)
            trainer.step()
            trainer.rearrange()
            assert not response.upload_completion.done()
            changed.set()
            finish(response)
    finally:
        changed.set()
        end()
    assert_holds(tmp_path / "a", expected)


def test_every_save_is_fresh_after_values_and_storages_changed(tmp_path: Path, writer: StorageWriter) -> None:
    model = torch.nn.Linear(5, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    expected: list[dict[str, Any]] = []
    for number in range(5):
        model(torch.randn(3, 5)).sum().backward()
        optimizer.step()
        if number % 2:
            # Other storages under the same parameters, the old ones freed for whoever comes next.
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        state: dict[str, Any] = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "number": number,
        }
        expected.append(copy.deepcopy(state))
        save(state, tmp_path / str(number), writer, is_async=number != 2)
    for number, state in enumerate(expected):
        found = read_with_torch(tmp_path / str(number))
        assert_same(found["model"], dict(state["model"]))
        assert found["number"] == number
        for index, moments in state["optimizer"]["state"].items():
            assert_same(found["optimizer"]["state"][str(index)], moments)


def test_two_saves_in_flight_into_two_directories(
    tmp_path: Path, trainer: Trainer, writer: StorageWriter
) -> None:
    save(trainer.state, tmp_path / "warm", writer, is_async=True)
    expected, responses = [], []
    with stopped_workers(writer), waiting_for("parts.pushed") as wait_until_pushed:
        for name in ("a", "b"):
            trainer.step()
            expected.append(trainer.values())
            responses.append(start(trainer.state, tmp_path / name, writer))
        wait_until_pushed()
        trainer.step()
        trainer.rearrange()
        assert not any(response.upload_completion.done() for response in responses)
    metadata = [finish(response) for response in responses]
    for name, state, one in zip("ab", expected, metadata, strict=True):
        assert_holds(tmp_path / name, state)
        assert one.storage_meta is not None
        assert one.storage_meta.checkpoint_id == tmp_path / name
        save_ids = {path.name for path in (tmp_path / name / ".distckpt").iterdir() if path.is_dir()}
        assert save_ids == {one.storage_meta.save_id}


def test_two_saves_in_flight_into_one_directory(
    tmp_path: Path, trainer: Trainer, writer: StorageWriter
) -> None:
    """The later one takes the directory over; the earlier one says so and harms nothing."""
    save(trainer.state, tmp_path / "a", writer, is_async=True)
    with stopped_workers(writer), waiting_for("parts.pushed") as wait_until_pushed:
        trainer.step()
        first = start(trainer.state, tmp_path / "a", writer)
        wait_until_pushed()
        trainer.step()
        expected = trainer.values()
        owner = (tmp_path / "a" / ".distckpt" / "owner").read_bytes()
        claimed = threading.Event()
        planner = ClaimingPlanner(claimed)
        second = start(trainer.state, tmp_path / "a", writer, planner)
        assert claimed.wait(WAIT_S)
        trainer.step()
        assert (tmp_path / "a" / ".distckpt" / "owner").read_bytes() != owner
    with pytest.raises(CheckpointException) as caught:
        finish(first)
    assert isinstance(failure_of(caught.value), CommitError)
    finish(second)
    assert_holds(tmp_path / "a", expected)


class ClaimingPlanner(GatedPlanner):
    """Says when the directory has been claimed: the global plan is made right after."""

    def __init__(self, claimed: threading.Event) -> None:
        super().__init__()
        self.gate.set()
        self._claimed = claimed

    def create_global_plan(self, all_plans: list[Any]) -> Any:
        self._claimed.set()
        return super().create_global_plan(all_plans)


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
def test_saves_that_wait_for_each_others_memory(tmp_path: Path) -> None:
    """The budget holds one state: each save takes the memory of the one before, once that is written."""
    tensor = torch.zeros(6 << 20, dtype=torch.uint8)
    # A wait that memory does not end would last this long.
    with StorageWriter(ckpt_host_memory="10MiB", distributed_timeout_minutes=0.1) as writer:
        responses = []
        for number in range(4):
            tensor.fill_(number)
            responses.append(start({"t": tensor}, tmp_path / str(number), writer))
        tensor.fill_(77)
        for response in responses:
            finish(response)
        assert writer._engine is not None
        assert writer._engine.arena.reserved_bytes <= 10 << 20
    for number in range(4):
        found = read_with_distckpt(tmp_path / str(number))["t"]
        assert int(found.min()) == int(found.max()) == number
