"""torchtitan's own CheckpointManager, and distckpt's in its place, on sharded models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from integration.ranks.world import Ranks

pytest.importorskip("torchtitan", reason="torchtitan is not installed", exc_type=ImportError)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::Warning")]

MODES = ("disabled", "async", "async_with_pinned_mem")


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Loader(Counter):
    """Has a key of its own on each rank, as torchtitan's."""

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{distributed.get_rank()}": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state[f"dp_rank_{distributed.get_rank()}"]


class Job:
    def __init__(self, manager: Any, folder: str, *, model: nn.Module | None = None, **settings: Any) -> None:
        from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

        torch.manual_seed(0)
        self.model = model or nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        if model is None:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
        optimizer = default_adamw(lr=1e-2)
        optimizer.implementation = "for-loop"
        self.optimizers = optimizer.build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=20
        )
        self.step, self.loader = Counter(), Loader()
        settings = {"interval": 1, "keep_latest_k": 0, "last_save_model_only": False, **settings}
        self.manager = manager.Config(enable=True, folder=folder, **settings).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.step},
            sd_adapter=None,
        )

    def train(self, last: int, *, is_last: bool = False) -> None:
        while self.step.value < last:
            self.step.value += 1
            self.loader.value = 100 * self.step.value + distributed.get_rank()
            generator = torch.Generator().manual_seed(self.step.value)
            self.optimizers.zero_grad()
            self.model(torch.randn(2, 4, generator=generator)).square().sum().backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.manager.save(self.step.value, last_step=is_last and self.step.value == last)

    def found(self) -> list[Any]:
        tensors = [*self.model.state_dict().values()]
        moments = [
            value for value in self.optimizers.state_dict().values() if isinstance(value, torch.Tensor)
        ]
        sums = [
            getattr(one, "full_tensor", lambda one=one: one)().double().sum().item()
            for one in [*tensors, *moments]
        ]
        return [sums, self.step.value, self.loader.value, self.schedulers.state_dict()["last_epoch"]]


def managers() -> tuple[Any, Any]:
    from torchtitan.components.checkpointer import CheckpointManager as Theirs

    from distckpt.integrations.torchtitan import CheckpointManager as Ours

    return Ours, Theirs


def save_and_load(folder: str) -> list[Any]:
    """Rank function: save in each mode, resume; also what the other manager has written."""
    ours, theirs = managers()
    differences = []
    for writes, reads, mode in [*((ours, ours, mode) for mode in MODES), (ours, theirs, "async"),
                                (theirs, ours, "disabled")]:  # fmt: skip
        place = f"{folder}/{writes.__module__}-{reads.__module__}-{mode}"
        job = Job(writes, place, async_mode=mode)
        job.train(3)
        expected = job.found()
        job.manager.close()
        again = Job(reads, place)
        assert again.manager.load()
        if again.found() != expected:
            differences.append([mode, expected, again.found()])
        again.manager.close()
        names = sorted(os.listdir(place))
        if names != ["step-1", "step-2", "step-3"]:
            differences.append([mode, names])
    return differences


def test_saves_and_resumes(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, save_and_load, folder=str(tmp_path)) == [[]] * 2


def keep_two(folder: str) -> list[Any]:
    """Rank function: keep two checkpoints, beside one that is never completed."""
    ours, _ = managers()
    rank = distributed.get_rank()
    found: list[Any] = []
    job = Job(ours, folder, async_mode="async", keep_latest_k=2)
    job.train(4)
    job.manager.maybe_wait_for_saving()
    if rank == 0:
        Path(folder, "step-9").mkdir()
    distributed.barrier()
    job.train(5)
    job.manager.maybe_wait_for_saving()
    job.manager.close()
    found.append(sorted(os.listdir(folder)) if rank == 0 else None)
    distributed.barrier()

    # The last one has the weights alone, in another dtype.
    last = Job(ours, folder, keep_latest_k=2, last_save_model_only=True, export_dtype="bfloat16")
    assert last.manager.load(5)
    last.train(6, is_last=True)
    last.manager.close()
    if rank == 0:
        entries: dict[str, Any] = dict(
            FileSystemReader(f"{folder}/step-6").read_metadata().state_dict_metadata
        )
        found.append({name: str(entry.properties.dtype) for name, entry in entries.items()})
    distributed.barrier()

    # What is in the way of a save is told by the next call that waits.
    if rank == 0:
        Path(folder, "step-7").write_text("in the way")
    distributed.barrier()
    failing = Job(ours, folder, async_mode="async")
    failing.step.value = 6
    failing.train(7)
    try:
        failing.manager.close()
    except Exception as error:  # noqa: BLE001 - told to the test
        found.append(type(error).__name__)
    return found


def test_what_stays(ranks: Ranks, tmp_path: Path) -> None:
    first, other = ranks.run(2, keep_two, folder=str(tmp_path))
    assert first[0] == ["step-4", "step-5", "step-9"]
    names = {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert first[1] == dict.fromkeys(sorted(names), "torch.bfloat16")
    assert first[2] == other[1] == "WriteError"


@pytest.mark.gpu
def test_snapshots_of_a_gpu(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(1, save_while_it_changes, folder=str(tmp_path), timeout_s=55.0) == [[0, 1, 2, 3]]


def save_while_it_changes(folder: str) -> list[Any]:
    """Rank function: change weights as soon as the trainer may, and return what was saved."""
    ours, _ = managers()
    model = nn.Linear(8 << 10, 4 << 10, bias=False, device="cuda")
    job = Job(ours, folder, async_mode="async_with_pinned_mem", model=model)
    for step in range(4):
        with torch.no_grad():
            job.manager.maybe_wait_for_staging()
            model.weight.fill_(step)
        job.step.value = step
        job.manager.save(step)
    with torch.no_grad():
        job.manager.maybe_wait_for_staging()
        model.weight.fill_(-1)
    job.manager.maybe_wait_for_saving()
    found = []
    for step in range(4):
        assert job.manager.load(step)
        [value] = set(model.weight.flatten().tolist())
        found.append(int(value))
    job.manager.close()
    return found


def test_settings_on_the_command_line() -> None:
    tyro = pytest.importorskip("tyro")
    ours, _ = managers()
    config = tyro.cli(
        ours.Config,
        args=["--enable", "--interval", "7", "--distckpt.dist-ckpt-workers", "2", "--async-mode", "disabled"],
    )
    assert (config.interval, config.distckpt.dist_ckpt_workers) == (7, 2)


def test_disabled(tmp_path: Path) -> None:
    ours, _ = managers()
    manager = ours.Config(folder=str(tmp_path)).build(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None
    )
    assert not manager.load()
    assert not manager.save(1)
    manager.close()
