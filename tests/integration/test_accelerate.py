"""Hugging Face Accelerate's Accelerator and Transformers' Trainer with checkpoints of distckpt."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from distckpt import CheckpointConfig, CheckpointError, ConfigError
from integration.checkpoints import read_with_torch
from integration.ranks.world import Ranks

pytest.importorskip("accelerate", reason="accelerate is not installed", exc_type=ImportError)

from accelerate import Accelerator

from distckpt.integrations.accelerate import AcceleratorCheckpointer, Own, Parts

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::Warning")]


class Average:
    """A registered object with tensors, and with a state that grows."""

    def __init__(self) -> None:
        self.mean = torch.zeros(1 << 18)
        self.seen: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean.copy_(state["mean"])
        self.seen = state["seen"]


class Loop:
    def __init__(self, seed: int = 0, *, num_models: int = 1) -> None:
        self.accelerator = Accelerator(cpu=True)
        torch.manual_seed(seed)
        models = [nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 4)) for _ in range(num_models)]
        optimizer = torch.optim.AdamW([one for model in models for one in model.parameters()], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=2, shuffle=True)
        *self.models, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            *models, optimizer, scheduler, loader
        )
        self.average = Average()
        self.accelerator.register_for_checkpointing(self.average)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            batch = torch.randn(2, 4)
            for model in self.models:
                batch = model(batch)
            self.accelerator.backward(batch.square().mean())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.average.mean += 1
            self.average.seen[str(len(self.average.seen))] = random.random()

    def found(self) -> dict[str, Any]:
        moments = self.optimizer.state_dict()["state"]
        return {
            "weights": [weight.tolist() for model in self.models for weight in model.state_dict().values()],
            "moments": [moments[number]["exp_avg"].tolist() for number in sorted(moments)],
            "steps": [moments[number]["step"].item() for number in sorted(moments)],
            "lr": [self.scheduler.get_last_lr(), self.optimizer.param_groups[0]["lr"]],
            "average": [self.average.mean[:3].tolist(), dict(self.average.seen)],
        }

    @staticmethod
    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), float(np.random.rand())]


@pytest.mark.parametrize(("is_async", "num_models"), [(False, 1), (True, 2)])
def test_all_that_is_prepared(tmp_path: Path, is_async: bool, num_models: int) -> None:
    loop = Loop(num_models=num_models)
    with AcceleratorCheckpointer(loop.accelerator, tmp_path, async_save=is_async) as checkpointer:
        assert checkpointer.restore() is None
        loop.train(2)
        first = loop.found()
        checkpointer.save(2)
        loop.train(2)
        checkpointer.save(4)
        last, drawn = loop.found(), loop.draw()
        checkpointer.wait()
        assert checkpointer.steps() == [2, 4]
    other = Loop(1, num_models=num_models)
    with AcceleratorCheckpointer(other.accelerator, tmp_path, restore="latest") as checkpointer:
        assert checkpointer.restored == 4
        assert other.draw() == drawn
        assert other.found() == last
        assert checkpointer.restore(2) == 2
        assert other.found() == first
        other.train(2)
        assert other.found() == last
        with pytest.raises(CheckpointError, match="step-00000003"):
            AcceleratorCheckpointer(other.accelerator, tmp_path, restore=3)
    name = "0.weight" if num_models == 1 else "0.0.weight"
    assert name in read_with_torch(tmp_path / "step-00000004")["model"]


def test_a_save_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    plain, saved, restored = Loop(), Loop(), Loop()
    with AcceleratorCheckpointer(saved.accelerator, tmp_path / "some") as checkpointer:
        checkpointer.save(0)
    with AcceleratorCheckpointer(restored.accelerator, tmp_path / "none") as checkpointer:
        assert checkpointer.restore() is None
        assert not restored.optimizer.state
    for loop in (plain, saved, restored):
        torch.manual_seed(1)
        random.seed(1)
        loop.train(3)
    assert plain.found() == saved.found() == restored.found()
    other = Loop(4)
    other.train(1)
    other.accelerator.backward(other.models[0](torch.ones(2, 4)).sum())
    with AcceleratorCheckpointer(other.accelerator, tmp_path / "some") as checkpointer:
        assert checkpointer.restore() == 0
    torch.manual_seed(1)
    random.seed(1)
    other.train(3)
    assert plain.found() == other.found()


def test_order_of_the_data(tmp_path: Path) -> None:
    from accelerate.utils import DataLoaderConfiguration

    def make() -> tuple[Accelerator, Any]:
        settings = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, dataloader_config=settings)
        return accelerator, accelerator.prepare(
            DataLoader(TensorDataset(torch.arange(12)), batch_size=2, shuffle=True)
        )

    torch.manual_seed(5)
    accelerator, loader = make()
    list(loader)
    batches = iter(loader)
    next(batches), next(batches)
    with AcceleratorCheckpointer(accelerator, tmp_path) as checkpointer:
        checkpointer.save(2)
    rest = [batch.tolist() for [batch] in batches]
    following = [batch.tolist() for [batch] in loader]
    torch.manual_seed(6)
    accelerator, loader = make()
    with AcceleratorCheckpointer(accelerator, tmp_path) as checkpointer:
        checkpointer.restore()
    assert [batch.tolist() for [batch] in loader] == rest
    assert [batch.tolist() for [batch] in loader] == following


def test_a_step_of_what_was_prepared_waits_for_the_copies(tmp_path: Path) -> None:
    loop = Loop()
    found: list[dict[str, Any]] = []

    class Copies:
        is_over = False

        def guard(self) -> None:
            found.append(loop.found())
            self.is_over = True

    with AcceleratorCheckpointer(loop.accelerator, tmp_path) as checkpointer:
        checkpointer.guard()
        loop.train(1)
        before = loop.found()
        for is_a_step in (True, False):
            checkpointer._checkpointer._late = [Copies()]  # type: ignore[list-item]
            if is_a_step:
                loop.train(1)
            else:
                with checkpointer.guard():
                    assert checkpointer._checkpointer._late == []
            assert found == [before]
            found.clear()
            before = loop.found()


def test_engines_of_their_own_are_refused(tmp_path: Path) -> None:
    from accelerate.utils import DistributedType

    class Other:
        distributed_type = DistributedType.DEEPSPEED

    with pytest.raises(ConfigError, match="DEEPSPEED"):
        AcceleratorCheckpointer(Other(), tmp_path)


def save_and_restore(folder: str, *, is_first: bool) -> Any:
    """Rank function: save, or restore what another number of ranks has saved."""
    rank = distributed.get_rank()
    loop = Loop(0 if is_first else 7)
    with AcceleratorCheckpointer(loop.accelerator, folder, async_save=True) as checkpointer:
        if is_first:
            torch.manual_seed(rank)
            loop.train(3)
            checkpointer.save(3)
        else:
            assert checkpointer.restore() == 3
    found = loop.found()
    found["average"] = found["average"][0]
    return [found, loop.draw()]


@pytest.mark.thorough
def test_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(2, save_and_restore, folder=str(tmp_path), is_first=True)
    for world in (2, 3, 1):
        restored = ranks.run(world, save_and_restore, folder=str(tmp_path), is_first=False)
        for rank, (found, drawn) in enumerate(restored):
            assert found == saved[0][0]
            if rank < 2:
                assert drawn == saved[rank][1]


def save_shards(folder: str, *, is_first: bool) -> Any:
    """Rank function: the parts of a training under FSDP2, sharded over however many ranks there are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from distckpt import Checkpointer, PerRank

    torch.manual_seed(0 if is_first else 7)
    rank = distributed.get_rank()
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    own = Own()
    parts = Parts([model], [optimizer], PerRank(own))
    with Checkpointer(folder, async_save=True) as checkpointer:
        if is_first:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            own.value = {"rank": rank}
            checkpointer.save(0, parts.state({"epoch": 1}, is_main=rank == 0))
        else:
            state = parts.room({"epoch": 0})
            checkpointer.restore(state)
            assert parts.take(state, weights_only=True) == {"epoch": 1}
            assert own.value == (None if rank > 1 else {"rank": rank})
    tensors = [*model.parameters(), *(entry["exp_avg"] for entry in optimizer.state.values())]
    return [tensor.full_tensor().tolist() for tensor in tensors]


def test_shards(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(2, save_shards, folder=str(tmp_path), is_first=True)
    assert saved == [saved[0]] * 2
    for world in (2, 3):
        assert ranks.run(world, save_shards, folder=str(tmp_path), is_first=False) == [saved[0]] * world


class Counting(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), index / 40), "labels": torch.full((4,), index / 40)}


class Repeating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        predicted = self.network(x)
        return {"loss": (predicted - labels).square().mean(), "logits": predicted}


def trainer_of(folder: Path, steps: int, **settings: Any) -> Any:
    pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)
    from transformers import TrainingArguments, set_seed

    from distckpt.integrations.transformers import Trainer

    root = settings.pop("checkpoint_root", None)
    config = settings.pop("checkpoint_config", None)
    settings = {"save_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, **settings}
    arguments = TrainingArguments(
        str(folder), max_steps=steps, use_cpu=True, report_to=[], disable_tqdm=True,
        lr_scheduler_type="constant_with_warmup", warmup_steps=8, **settings,
    )  # fmt: skip
    set_seed(3)
    return Trainer(
        Repeating(), arguments, train_dataset=Counting(), eval_dataset=Counting(),
        checkpoint_root=root, checkpoint_config=config,
    )  # fmt: skip


def weights_of(trainer: Any) -> list[Any]:
    return [weight.tolist() for weight in trainer.model.state_dict().values()]


def test_trainer_resumes_as_if_never_interrupted(tmp_path: Path) -> None:
    # Ten steps an epoch: one resume is within an epoch, the other at its end.
    whole = trainer_of(tmp_path / "whole", 26)
    whole.train()
    part = trainer_of(tmp_path / "parts", 20, save_steps=10)
    part.train()
    for resume, steps in ((10, 13), (str(tmp_path / "parts" / "step-00000013"), 20), (True, 26)):
        part = trainer_of(tmp_path / "parts", steps)
        part.train(resume_from_checkpoint=resume)
    assert weights_of(part) == weights_of(whole)
    assert part.state.global_step == 26
    assert part.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()
    assert "step-00000026" in os.listdir(tmp_path / "parts")


def test_trainer_keeps_the_best(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path / "out", 12, eval_strategy="steps", eval_steps=3, save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=True, checkpoint_root=tmp_path / "steps",
        checkpoint_config=CheckpointConfig(async_save=True),
    )  # fmt: skip
    trainer.train()
    # The greatest loss is asked for: that of the first, and the last two stay beside it.
    names = sorted(path.name for path in (tmp_path / "steps").glob("step-*"))
    assert names == ["step-00000003", "step-00000009", "step-00000012"]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "steps" / "step-00000003")
    best = trainer.evaluate()["eval_loss"]
    assert best == pytest.approx(trainer.state.best_metric)


@pytest.mark.parametrize("has_metric", [False, True])
def test_trainer_is_not_told_of_settings_that_it_was_not_given(
    tmp_path: Path, has_metric: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # With a metric, but without load_best_model_at_end, the best is kept as well, as by Transformers.
    best = {"metric_for_best_model": "loss", "greater_is_better": True} if has_metric else {}
    trainer = trainer_of(tmp_path, 12, eval_strategy="steps", eval_steps=3, save_total_limit=1, **best)
    trainer.train()
    assert not [entry for entry in caplog.records if "keep_best" in entry.getMessage()]
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == ["step-00000003"] * has_metric + ["step-00000012"]


def test_trainer_says_where_a_checkpoint_of_transformers_is(tmp_path: Path) -> None:
    stock = tmp_path / "out" / "checkpoint-4"
    stock.mkdir(parents=True)
    said = f"{re.escape(str(stock))} is one of Transformers: pass its path"
    with pytest.raises(CheckpointError, match=said):
        trainer_of(tmp_path / "out", 3).train(resume_from_checkpoint=True)


def test_trainer_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save_only_model"):
        trainer_of(tmp_path, 3, save_only_model=True)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        trainer_of(tmp_path, 3).train(resume_from_checkpoint=True)
    (tmp_path / "step-00000003").write_text("in the way")
    with pytest.raises(CheckpointError, match="step-00000003"):
        trainer_of(tmp_path, 4).train()
