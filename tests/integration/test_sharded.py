"""Optimizers whose states are no DTensors, saved by real ranks and loaded by other numbers of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.tensor import DTensor

from distckpt import Checkpointer, SavePlanner, Sharded, StorageWriter
from distckpt.geometry import TensorParallel
from distckpt.sharded import flat, fused, optimizer_state, sharded_like
from integration.ranks import collectives, states
from integration.ranks.world import Ranks

pytestmark = pytest.mark.slow

SWIGLU = {"gate": (5, 4), "up": (5, 4), "fc2": (3, 5), "norm": (1,)}
"""Rows that neither 2 nor 3 ranks share evenly; of `norm` the last ranks have nothing."""
FUSED = {"fc1": [4, 4], "in_proj": [4, 4, 8, 8, 2, 2], "conv1d": [4, 4, 8]}
"""Rows of the global tensors that are fused in one parameter: of SwiGLU and of a gated delta net."""
ROW = {"fc1": (5,), "in_proj": (3,), "conv1d": (1, 4)}
WAYS = ("dcp", "async", "checkpointer")


class Offloaded:
    """Parameters sharded as FSDP2 does, and an AdamW on the CPU that knows of nothing but local tensors."""

    def __init__(self, seed: int) -> None:
        mesh = states.line_mesh()
        torch.manual_seed(seed)
        self.parameters = {
            fqn: states.shard(torch.randn(shape), mesh, [states.ROWS]) for fqn, shape in SWIGLU.items()
        }
        self.masters = {
            fqn: torch.nn.Parameter(parameter.to_local().clone())
            for fqn, parameter in self.parameters.items()
        }
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=0.1 * seed)
        for _ in range(seed):
            for master in self.masters.values():
                master.grad = torch.randn_like(master)
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return the masters and all of the optimizer."""
        return {
            "master": {fqn: sharded_like(self.parameters[fqn], one) for fqn, one in self.masters.items()},
            "optimizer": optimizer_state(self.optimizer, self.masters.items(), like=self.parameters),
        }

    def bits(self) -> dict[str, list[int]]:
        """Return what the optimizer has, by name."""
        found = {fqn: master.detach() for fqn, master in self.masters.items()}
        for fqn, master in self.masters.items():
            found |= {f"{fqn}.{key}": value for key, value in self.optimizer.state[master].items()}
        return {name: value.view(torch.int32).flatten().tolist() for name, value in found.items()}


def save_offloaded(path: str) -> dict[str, list[int]]:
    """Rank function: train and save."""
    trained = Offloaded(3)
    state = trained.state()
    assert type(state["optimizer"]["state"]["gate"]["exp_avg"]) is DTensor
    with StorageWriter(path) as writer:
        state_dict_saver.save(state, storage_writer=writer)
    return trained.bits()


def load_offloaded(path: str, reader: str) -> dict[str, list[int]]:
    """Rank function: load into what was trained otherwise."""
    trained = Offloaded(1)
    state = trained.state()
    state_dict_loader.load(state, storage_reader=states.open_reader(reader, path))
    assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.3)
    return trained.bits()


def whole(parts: list[dict[str, list[int]]]) -> dict[str, list[int]]:
    """Join what ranks hold, which is rows."""
    return {
        name: parts[0][name] if name.endswith("step") else [bits for part in parts for bits in part[name]]
        for name in parts[0]
    }


def test_an_optimizer_on_the_cpu(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    expected = whole(ranks.run(2, save_offloaded, path=path))
    assert {name: len(bits) for name, bits in expected.items() if "." not in name} == {
        name: math.prod(shape) for name, shape in SWIGLU.items()
    }
    for world, reader in ((1, "torch"), (3, "torch"), (3, "distckpt")):
        assert whole(ranks.run(world, load_offloaded, path=path, reader=reader)) == expected


def _wholes(name: str) -> list[torch.Tensor]:
    return [
        states.values(f"{name} {number}", (rows, *ROW[name]), torch.float32, 7)
        for number, rows in enumerate(FUSED[name])
    ]


def _buffer() -> tuple[dict[str, Any], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return zeros in a flat buffer that all ranks share out, wherever that cuts, and what belongs there."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    sizes = {name: sum(rows) * math.prod(ROW[name]) for name, rows in FUSED.items()}
    share = -(-sum(sizes.values()) // world)
    memory = torch.zeros(share)
    state: dict[str, Any] = {"step": 1}
    expected = []
    begin = -rank * share
    for name, size in sizes.items():
        start, stop = (min(max(0, edge), size) for edge in (-begin, share - begin))
        held = memory[begin + start : begin + stop] if start < stop else memory[:0]
        shape = (sum(FUSED[name]), *ROW[name])
        state[name] = flat(held, shape, start, stop, sections=FUSED[name], tensor_parallel=None)
        expected.append((held, torch.cat(_wholes(name)).flatten()[start:stop]))
        begin += size
    return state, expected


def _tensor_parallel() -> tuple[dict[str, Any], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return zeros in parameters that all ranks split, and what belongs there."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    state: dict[str, Any] = {"step": 0}
    expected = []
    for name, rows in FUSED.items():
        full = torch.cat([one.chunk(world)[rank] for one in _wholes(name)])
        held = torch.zeros_like(full)
        sections = [count // world for count in rows]
        state[name] = fused(held, sections, tensor_parallel=TensorParallel(rank, world, 0))
        expected.append((held, full))
    return state, expected


def save_buffers(root: str) -> None:
    """Rank function: save slices of a flat buffer, in every way."""
    state, expected = _buffer()
    for held, value in expected:
        held.copy_(value)
    with StorageWriter() as writer:
        for way in WAYS[:2]:
            arguments: Any = {"checkpoint_id": f"{root}/{way}", "storage_writer": writer}
            if way == "dcp":
                state_dict_saver.save(state, planner=SavePlanner(), **arguments)
            else:
                response: Any = state_dict_saver.async_save(state, **arguments)
                response.upload_completion.result()
    with Checkpointer(f"{root}/checkpointer") as checkpointer:
        checkpointer.save(0, state).result(30)
        for held, _ in expected:
            held.neg_()
        # Planned once, saved again.
        checkpointer.save(1, state).result(30)


def load_buffers(root: str, reader: str) -> list[str]:
    """Rank function: load what `save_buffers` wrote, split otherwise; returns what differs."""
    found = []
    for way in WAYS:
        for make in (_buffer, _tensor_parallel):
            state, expected = make()
            path = f"{root}/{way}/step-00000000" if way == "checkpointer" else f"{root}/{way}"
            state_dict_loader.load(state, storage_reader=states.open_reader(reader, path))
            assert state["step"] == 1
            for number, (held, value) in enumerate(expected):
                found += states.differences(held, value, f"{way} {make.__name__} {number}")
    state, expected = _tensor_parallel()
    with Checkpointer(f"{root}/checkpointer") as checkpointer:
        assert checkpointer.restore(state) == 1
    for held, value in expected:
        found += states.differences(held, -value, "restored")
    return found


def test_flat_buffers_with_fused_projections(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(3, save_buffers, root=str(tmp_path))
    for reader in ("torch", "distckpt"):
        assert ranks.run(2, load_buffers, root=str(tmp_path), reader=reader) == [[], []]


def make_without_communication() -> None:
    """Rank function: every way in, while every collective raises."""
    trained = Offloaded(1)
    collectives.forbid()
    state: dict[str, Any] = {
        "offloaded": trained.state(),
        "buffer": _buffer()[0],
        "split": _tensor_parallel()[0],
    }
    box = torch.zeros(1, 2)
    state["box"] = Sharded((2, 2), [((distributed.get_rank(), 0), box)])
    planner = SavePlanner()
    planner.set_up_planner(state)
    for item in planner.create_local_plan().items:
        planner.resolve_data(item)


def test_geometry_makes_no_communication(ranks: Ranks) -> None:
    ranks.run(2, make_without_communication)
