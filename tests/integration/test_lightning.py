"""Lightning's own Trainer, Fabric and ModelCheckpoint with checkpoints of distckpt."""

from __future__ import annotations

import importlib
import os
import sys
from collections import OrderedDict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from distckpt import CheckpointConfig, CheckpointError, ConfigError, StorageReader
from distckpt.storage import open_storage
from integration.ranks.world import Ranks
from servers import S3Server

pytest.importorskip("lightning", reason="lightning is not installed", exc_type=ImportError)

from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from distckpt.integrations.lightning import CheckpointIO, ModelParallelStrategy
from distckpt.integrations.packing import pack, unpack

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::Warning")]

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


class Regression(LightningModule):
    def __init__(self, *, shards: bool = False) -> None:
        super().__init__()
        self.shards = shards
        self.network = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def configure_model(self) -> None:
        if self.shards:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.network(batch[0]) - batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("tested", self.network(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(16, 4, generator=generator)), batch_size=4)


def fit(
    folder: Path | str, epochs: int, plugin: CheckpointIO, ckpt_path: str | None = None, **callback: Any
) -> tuple[Trainer, Regression]:
    seed_everything(epochs if ckpt_path is None else 0, verbose=False)
    torch.manual_seed(3)
    model = Regression()
    callback = {"filename": "{epoch}", "save_top_k": -1, **callback}
    trainer = Trainer(
        max_epochs=epochs, plugins=[plugin], callbacks=[ModelCheckpoint(folder, **callback)], **QUIET
    )
    trainer.fit(model, data(), ckpt_path=ckpt_path)
    return trainer, model


def states(trainer: Trainer) -> dict[str, Any]:
    found: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return found


def assert_same(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert type(one) is type(other), where
        assert len(one) == len(other), where
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}.{number}")
    else:
        assert type(one) is type(other), where
        assert one == other, where


def test_every_container_comes_back() -> None:
    weight = torch.randn(3)
    value = {
        "empty": {}, "nothing": [], 7: {"a": (weight, [None, {"b": torch.tensor(1)}])}, "tied": weight,
        "ordered": OrderedDict(a=torch.zeros(0), b=2.5), "a.b": torch.ones(1), "a": {"b": torch.zeros(1)},
        "structure": torch.full((1,), 5.0), "sparse": [True, "text", b"bytes", 1 + 2j],
    }  # fmt: skip
    packed = pack(value)
    assert {"7.a.0", "7.a.1.1.b", "tied", "a.b", "a.b~1", "structure~1"} < set(packed)
    assert_same(unpack(packed, weights_only=True), value)


@pytest.mark.parametrize("is_async", [False, True])
def test_resumed_as_if_never_interrupted(tmp_path: Path, is_async: bool) -> None:
    def plugin() -> CheckpointIO:
        return CheckpointIO(async_save=is_async)

    whole, _ = fit(tmp_path / "whole", 4, plugin())
    fit(tmp_path / "parts", 2, plugin(), save_last=True)
    assert os.listdir(tmp_path / "parts") != []
    resumed, _ = fit(tmp_path / "parts", 4, plugin(), ckpt_path="last", save_last=True)
    left, right = states(whole), states(resumed)
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert_same(left[name], right[name], name)
    names = {path.name for path in (tmp_path / "parts").iterdir()}
    assert names == {"epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"}
    reader = StorageReader(tmp_path / "parts" / "last.ckpt")
    assert "state_dict.network.0.weight" in reader.read_metadata().state_dict_metadata


def test_top_k_link_and_best(tmp_path: Path) -> None:
    plugin = CheckpointIO(async_save=True)
    trainer, model = fit(tmp_path, 4, plugin, monitor="loss", save_top_k=1, save_last="link")
    [best] = [path for path in tmp_path.iterdir() if not path.is_symlink()]
    assert (tmp_path / "last.ckpt").is_symlink()
    callback = trainer.checkpoint_callback
    assert isinstance(callback, ModelCheckpoint)
    assert Path(callback.best_model_path) == best
    with torch.no_grad():
        model.network.get_parameter("0.weight").zero_()
    trainer.test(model, data(), ckpt_path="best", verbose=False)
    assert model.network.get_parameter("0.weight").abs().sum() > 0


def test_what_changes_after_the_save_is_not_in_it(tmp_path: Path) -> None:
    plugin = CheckpointIO(async_save=True, ckpt_host_memory="64MiB")
    state: dict[str, Any] = {"state_dict": {"weight": torch.zeros(2 << 20)}, "loops": {"epoch": [0]}}
    for step in range(6):
        state["state_dict"]["weight"].fill_(step)
        state["loops"]["epoch"][0] = step
        plugin.save_checkpoint(state, tmp_path / f"{step}.ckpt")
    plugin.save_checkpoint(state, tmp_path / "0.ckpt")
    for step in (5, 1):
        loaded = plugin.load_checkpoint(tmp_path / f"{step}.ckpt")
        assert loaded["state_dict"]["weight"].unique().tolist() == [step]
        assert loaded["loops"] == {"epoch": [step]}
    assert plugin.load_checkpoint(tmp_path / "0.ckpt")["loops"] == {"epoch": [5]}
    plugin.teardown()
    plugin.teardown()


def test_an_old_checkpoint_outlives_a_failed_save(tmp_path: Path) -> None:
    plugin = CheckpointIO(async_save=True)
    state = {"weight": torch.ones(8)}
    plugin.save_checkpoint(state, tmp_path / "old")
    (tmp_path / "new").write_text("in the way")
    plugin.save_checkpoint(state, tmp_path / "new")
    plugin.remove_checkpoint(tmp_path / "old")
    with pytest.raises(CheckpointError, match="new"):
        plugin.teardown()
    assert_same(plugin.load_checkpoint(tmp_path / "old"), state)
    plugin.save_checkpoint(state, tmp_path / "newer")
    plugin.remove_checkpoint(tmp_path / "old")
    plugin.teardown()
    assert not (tmp_path / "old").exists()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        plugin.load_checkpoint(tmp_path / "old")


def test_links_are_not_followed(tmp_path: Path) -> None:
    plugin = CheckpointIO(async_save=True)
    plugin.save_checkpoint({"step": 1}, tmp_path / "1.ckpt")
    for name in ("one", "last"):
        (tmp_path / name).symlink_to("1.ckpt")
    plugin.remove_checkpoint(tmp_path / "one")
    plugin.save_checkpoint({"step": 2}, tmp_path / "last")
    assert plugin.load_checkpoint(tmp_path / "last") == {"step": 2}
    assert plugin.load_checkpoint(tmp_path / "1.ckpt") == {"step": 1}
    plugin.teardown()
    assert sorted(os.listdir(tmp_path)) == ["1.ckpt", "last"]


def test_files_of_lightning_itself(tmp_path: Path) -> None:
    state = {"weight": torch.ones(8)}
    torch.save(state, tmp_path / "old.ckpt")
    plugin = CheckpointIO()
    assert_same(plugin.load_checkpoint(str(tmp_path / "old.ckpt")), state)
    plugin.remove_checkpoint(str(tmp_path / "old.ckpt"))
    assert os.listdir(tmp_path) == []


def test_what_can_run_code_is_refused(tmp_path: Path) -> None:
    plugin = CheckpointIO()
    # Frameworks have torch admit paths and namespaces; nobody admits this.
    state = {"hyper_parameters": {"rate": Decimal("0.1")}}
    plugin.save_checkpoint(state, tmp_path / "one")
    with pytest.raises(CheckpointError, match="weights_only"):
        plugin.load_checkpoint(tmp_path / "one")
    assert plugin.load_checkpoint(tmp_path / "one", weights_only=False) == state
    with pytest.raises(ConfigError, match="storage_options"):
        plugin.save_checkpoint({}, tmp_path / "two", storage_options={})
    plugin.teardown()


@pytest.mark.gpu
def test_snapshots_of_a_gpu(tmp_path: Path) -> None:
    plugin = CheckpointIO(async_save=True)
    weight = torch.zeros(32 << 20, device="cuda")
    for step in range(8):
        weight.fill_(step)
        plugin.save_checkpoint({"weight": weight, "step": step}, tmp_path / str(step))
    weight.fill_(-1)
    for step in range(8):
        loaded = plugin.load_checkpoint(tmp_path / str(step))
        assert loaded["weight"].unique().tolist() == [loaded["step"]] == [step]
    assert plugin.load_checkpoint(tmp_path / "7", map_location="cuda")["weight"].is_cuda
    plugin.teardown()


@pytest.mark.s3
def test_object_store(s3_server: S3Server, s3_url: str) -> None:
    plugin = CheckpointIO(async_save=True, storage_options=s3_server.options)
    state = {"weight": torch.ones(8), "count": 1}
    for name in ("old", "new"):
        plugin.save_checkpoint(state, f"{s3_url}/{name}.ckpt")
    plugin.remove_checkpoint(f"{s3_url}/old.ckpt")
    assert_same(plugin.load_checkpoint(f"{s3_url}/new.ckpt"), state)
    plugin.teardown()
    assert open_storage(f"{s3_url}/old.ckpt", s3_server.options).list() == {}


def test_fabric(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[CheckpointIO()])
    model = nn.Linear(4, 4)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    fabric.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    fabric.save(tmp_path / "one", {"model": model, "optimizer": optimizer, "step": 3})
    saved = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        model.weight.zero_()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(tmp_path / "one", state)
    assert state["step"] == 3
    assert_same(dict(model.state_dict()), saved)
    fabric.strategy.checkpoint_io.teardown()


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("torchtitan", "torchtitan.components.checkpointer"),
        ("lightning", "lightning.fabric.plugins"),
        ("accelerate", "accelerate.data_loader"),
        ("transformers", "transformers.trainer_callback"),
    ],
)
def test_a_framework_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, needed: str
) -> None:
    monkeypatch.delitem(sys.modules, f"distckpt.integrations.{name}", raising=False)
    monkeypatch.setitem(sys.modules, needed, None)
    with pytest.raises(ConfigError, match=f"needs {name}"):
        importlib.import_module(f"distckpt.integrations.{name}")


def _trainer(folder: str, epochs: int, strategy: Any, **settings: Any) -> Trainer:
    os.environ.update(TORCHELASTIC_RUN_ID="one", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", GROUP_RANK="0")
    callbacks = [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)]
    return Trainer(
        max_epochs=epochs, devices=distributed.get_world_size(), strategy=strategy, callbacks=callbacks,
        **settings, **QUIET,
    )  # fmt: skip


def train_replicas(folder: str) -> list[Any]:
    """Rank function: train under DDP in two parts, through the plugin."""
    sums: list[Any] = []
    for epochs, path in ((2, None), (1, None), (2, f"{folder}/parts/epoch=0.ckpt")):
        torch.manual_seed(3)
        model = Regression()
        part = "whole" if not sums else "parts"
        trainer = _trainer(f"{folder}/{part}", epochs, "ddp", plugins=[CheckpointIO(async_save=True)])
        trainer.fit(model, data(), ckpt_path=path)
        sums.append([weight.double().sum().item() for weight in model.parameters()])
    return [sums[0], sums[2], sorted(os.listdir(f"{folder}/whole"))]


def whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor()
    return found


def train_shards(folder: str) -> list[Any]:
    """Rank function: the same of a sharded model, through the strategy."""
    sums: list[Any] = []
    config = CheckpointConfig(async_save=True)
    for epochs, path in ((2, None), (1, None), (2, f"{folder}/parts/epoch=0.ckpt")):
        torch.manual_seed(3)
        model = Regression(shards=True)
        strategy = ModelParallelStrategy(
            data_parallel_size=distributed.get_world_size(), tensor_parallel_size=1, checkpoint_config=config
        )
        trainer = _trainer(f"{folder}/{'whole' if not sums else 'parts'}", epochs, strategy)
        trainer.fit(model, data(), ckpt_path=path)
        sums.append([whole(weight).double().sum().item() for weight in model.parameters()])
    return [sums[0], sums[2], sorted(os.listdir(f"{folder}/whole"))]


@pytest.mark.parametrize("train", [pytest.param(train_replicas, marks=pytest.mark.thorough), train_shards])
def test_two_ranks(ranks: Ranks, tmp_path: Path, train: Any) -> None:
    found = ranks.run(2, train, folder=str(tmp_path))
    assert found == [found[0]] * 2
    whole, resumed, names = found[0]
    assert whole == resumed
    assert names == ["epoch=0.ckpt", "epoch=1.ckpt"]
