"""A SwiGLU layer whose parameters are sharded unevenly, and whose AdamW lives on the CPU, in plain tensors.

Run under torchrun: `offloaded.py save ROOT` and, with any number of ranks, `offloaded.py load ROOT`. Without
a GPU the parameters are on the CPU as well.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from distckpt import Checkpointer
from distckpt.geometry import shard_chunks
from distckpt.sharded import sharded_like

SHAPES = {"mlp.fc1": (2 * 1001, 96), "mlp.fc2": (3, 1001), "norm": (1,)}
"""No number of ranks that is used here divides the rows. The last ranks have nothing of `norm`."""
STEPS = 6


def layer(mesh: DeviceMesh) -> dict[str, DTensor]:
    """Return parameters of zeros, sharded as FSDP2 does."""
    parameters = {}
    for fqn, shape in SHAPES.items():
        local_shape, _ = shard_chunks(shape, mesh.shape, mesh.get_coordinate() or (), [Shard(0)])
        local = torch.zeros(local_shape, device=mesh.device_type)
        stride = torch.empty(shape, device="meta").stride()
        parameters[fqn] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )
    return parameters


class Offloaded:
    """Parameters on the device, and masters and moments on the CPU."""

    def __init__(self, mesh: DeviceMesh, seed: int) -> None:
        torch.manual_seed(seed)
        self.parameters = layer(mesh)
        self.masters = {
            fqn: torch.nn.Parameter(torch.randn(parameter.to_local().shape))
            for fqn, parameter in self.parameters.items()
        }
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=0.1)

    def step(self) -> None:
        """Train a little."""
        for master in self.masters.values():
            master.grad = torch.randn_like(master)
        self.optimizer.step()
        for fqn, parameter in self.parameters.items():
            parameter.to_local().copy_(self.masters[fqn].detach())

    def state(self) -> dict[str, Any]:
        """Return all that is to be saved; what is plain takes its parameter's place in the global tensor."""
        found: dict[str, Any] = {"model": dict(self.parameters), "optimizer": {}}
        for fqn, parameter in self.parameters.items():
            entries = {"master": self.masters[fqn].detach(), **self.optimizer.state[self.masters[fqn]]}
            found["optimizer"][fqn] = {
                name: sharded_like(parameter, value) for name, value in entries.items()
            }
        return found


def local_values(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Return copies of what this rank holds, by name, on the CPU."""
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found |= local_values(value, f"{prefix}{name}/")
        else:
            local = value.to_local() if isinstance(value, DTensor) else value
            found[prefix + name] = local.detach().cpu().clone()
    return found


def save(root: str) -> None:
    """Save, and go on training at once; what was saved is put beside it, by rank."""
    mesh = make_mesh()
    trainer = Offloaded(mesh, distributed.get_rank())
    with Checkpointer(root, async_save=True, dist_ckpt_workers=2) as checkpointer:
        for step in range(STEPS):
            trainer.step()
            state = trainer.state()
            torch.save(local_values(state), f"{root}-{step}-{distributed.get_rank()}.pt")
            before = allocations()
            handle = checkpointer.save(step, state)
            trainer.step()
            handle.result(60)
            if step == STEPS - 1:
                assert allocations() == before, "planning and commit need no memory of the device"


def load(root: str) -> None:
    """Load, and compare each rank's part with what all ranks had saved."""
    trainer = Offloaded(make_mesh(), 1000)
    # It makes the moments, which are loaded in place.
    trainer.step()
    state = trainer.state()
    with Checkpointer(root) as checkpointer:
        assert checkpointer.restore(state) == STEPS - 1
    files = sorted(Path(root).parent.glob(f"{Path(root).name}-{STEPS - 1}-*.pt"))
    saved = [torch.load(file) for file in files]
    rank, world = distributed.get_rank(), distributed.get_world_size()
    for name, found in local_values(state).items():
        pieces = [one[name] for one in saved]
        if found.dim() == 0:
            assert found.item() == pieces[0].item() == 2 * STEPS - 1, name
            continue
        whole = torch.cat(pieces)
        first = min(rank * -(-len(whole) // world), len(whole))
        expected = whole[first : first + len(found)]
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), name


def allocations() -> int:
    """Return how often memory of the device was allocated so far."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def make_mesh() -> DeviceMesh:
    """Return all ranks, in a line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, (distributed.get_world_size(),))


def main(what: str, root: str) -> None:
    """Do it as a rank of torchrun."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    distributed.init_process_group("cpu:gloo,cuda:gloo" if torch.cuda.is_available() else "gloo")
    {"save": save, "load": load}[what](root)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
