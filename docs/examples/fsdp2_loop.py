"""A plain loop of PyTorch under FSDP2: train, save while training goes on, keep two checkpoints, resume.

python docs/examples/fsdp2_loop.py
torchrun --standalone --nproc-per-node 4 docs/examples/fsdp2_loop.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from distckpt import Checkpointer

STEPS = 12


def train(root: str, last: int) -> list[torch.Tensor]:
    """Train to step `last`, from the latest checkpoint on if there is one; return this rank's weights."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 32))
    loader = StatefulDataLoader(data, batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 32))
    fully_shard(model, mesh=distributed.init_device_mesh("cpu", (distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}

    with Checkpointer(root, async_save=True, load_rng=True, keep_last=2) as checkpointer:
        step = checkpointer.restore(state) or 0
        while step < last:
            for (batch,) in loader:
                step += 1
                (model(batch) - batch).square().mean().backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if step % 2 == 0:
                    checkpointer.save(step, state)
                if step == last:
                    break
    return [weight.to_local().detach().clone() for weight in model.parameters()]


def main() -> None:
    """Train in one go, and with a break in the middle; compare."""
    if not distributed.is_torchelastic_launched():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    else:
        distributed.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as own:
        roots = [own]
        distributed.broadcast_object_list(roots)
        whole = train(f"{roots[0]}/whole", STEPS)
        train(f"{roots[0]}/broken", 6)
        resumed = train(f"{roots[0]}/broken", STEPS)
        assert all(map(torch.equal, whole, resumed))
        if distributed.get_rank() == 0:
            names = ", ".join(sorted(path.name for path in Path(roots[0], "broken").glob("step-*")))
            print(f"{names}: the loop that resumed at step 6 ends with the same weights")
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
