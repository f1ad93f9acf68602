"""A real model, sharded by FSDP2 and tensor parallelism, with its optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distckpt import StorageWriter
from integration.ranks import states


class Block(nn.Module):
    """A transformer block whose parameters divide evenly over 2 ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(12, 2, 20, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 7)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return one row of 7 for each of the inputs."""
        result: torch.Tensor = self.head(self.norm(self.attention(inputs)))
        return result


def build(seed: int, *, tensor_parallel: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make the model, with weights that follow from `seed`, and its optimizer."""
    torch.manual_seed(seed)
    model = Block()
    world = distributed.get_world_size()
    mesh = init_device_mesh(
        "cpu", (world // tensor_parallel, tensor_parallel), mesh_dim_names=("data", "tensor")
    )
    if tensor_parallel > 1:
        plan = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
        parallelize_module(model.attention, mesh["tensor"], plan)
    fully_shard(model.attention, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    inputs = torch.randn(3, 4, 12, generator=torch.Generator().manual_seed(steps))
    for _ in range(steps):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _digests(state: dict[str, Any]) -> dict[str, Any]:
    flat, _ = flatten_state_dict(state)
    return {
        fqn: states.digest(value) if isinstance(value, torch.Tensor) else value for fqn, value in flat.items()
    }


def train_and_save(path: str, workers: int, mode: str, tensor_parallel: int) -> dict[str, Any]:
    """Rank function: train, save, train on meanwhile; what it returns describes the state as it was saved."""
    model, optimizer = build(1, tensor_parallel=tensor_parallel)
    train(model, optimizer, 2)
    state = _state(model, optimizer)
    expected = _digests(state)
    with StorageWriter(path, dist_ckpt_workers=workers) as writer:
        if mode == "save":
            state_dict_saver.save(state, storage_writer=writer)
        else:
            response: Any = state_dict_saver.async_save(state, storage_writer=writer)
            # Collectives of the same group: only staging may be left to the background.
            response.staging_completion.result()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            response.upload_completion.result()
    return expected


def load_and_describe(path: str, reader: str, tensor_parallel: int) -> dict[str, Any]:
    """Rank function: load into a model that was trained otherwise."""
    model, optimizer = build(2, tensor_parallel=tensor_parallel)
    train(model, optimizer, 1)
    state = _state(model, optimizer)
    state_dict_loader.load(state, storage_reader=states.open_reader(reader, path))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found = _digests(_state(model, optimizer))
    train(model, optimizer, 1)
    return found
