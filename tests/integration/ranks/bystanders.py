"""A job of four ranks under torchrun: 1 and 3 save; 0 sleeps, 2 has a group of its own with collectives.

Ranks that do not save import nothing of distckpt.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed

SAVERS = [1, 3]


def save(root: Path, rank: int) -> None:
    """Save and restore, in both modes."""
    from distckpt import Checkpointer

    for mode in (False, True):
        with Checkpointer(
            root / f"async-{mode}", async_save=mode, participants=SAVERS, distributed_timeout_minutes=0.5
        ) as checkpointer:
            states = [make(rank, step) for step in range(3)]
            for step, (state, _, _) in enumerate(states):
                started = time.monotonic()
                checkpointer.save(step, state).result(20)
                assert time.monotonic() - started < 10
            state, full, rows = states[-1]
            sharded, copied = state["sharded"].to_local(), state["copied"].to_local()
            for tensor in (sharded, copied, state["plain"]):
                tensor.zero_()
            assert checkpointer.restore(state) == 2
            assert torch.equal(sharded, rows)
            assert torch.equal(copied, full)
            assert torch.equal(state["plain"], full)
            assert state["step"] == 2


def make(rank: int, step: int) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Return a state of two ranks, all of its tensor, and the rows that this one has of it."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = DeviceMesh("cpu", SAVERS, _init_backend=False)
    full = torch.arange(10.0).reshape(5, 2) + step
    rows = full[:3] if rank == SAVERS[0] else full[3:]
    state = {
        "sharded": DTensor.from_local(
            rows.clone(), mesh, [Shard(0)], run_check=False, shape=full.shape, stride=(2, 1)
        ),
        "copied": DTensor.from_local(full.clone(), mesh, [Replicate()], run_check=False),
        "plain": full.clone(),
        "step": step,
    }
    return state, full, rows


def save_with_torch(root: Path) -> None:
    """Save through torch's own way in, in a group that only these ranks make."""
    from torch.distributed.checkpoint.state_dict_saver import async_save
    from torch.distributed.checkpoint.state_dict_saver import save as save_through_torch

    from distckpt import StorageWriter

    group = distributed.new_group(SAVERS, backend="gloo", use_local_synchronization=True)
    state = {"plain": torch.arange(4.0)}
    with StorageWriter(root / "dcp") as writer:
        save_through_torch(state, storage_writer=writer, process_group=group)
    with StorageWriter(root / "dcp-async") as writer:
        response: Any = async_save(state, storage_writer=writer, process_group=group)
        # By the version of torch.
        getattr(response, "upload_completion", response).result()


def main(root: Path) -> None:
    """Do what this rank does."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    if rank in SAVERS:
        save(root, rank)
        save_with_torch(root)
        (root / f"saved-{rank}").touch()
    else:
        until = time.monotonic() + 60
        pause = threading.Event()
        while time.monotonic() < until and not all((root / f"saved-{one}").exists() for one in SAVERS):
            if rank == 2:
                # Its own, of whatever number, while the others save.
                torch.ones(4).add_(1)
            pause.wait(0.02)
        assert "distckpt" not in sys.modules
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
