"""A loop of Hugging Face Accelerate through distckpt: train, save while training goes on, resume.

python docs/examples/accelerate_loop.py
torchrun --standalone --nproc-per-node 2 docs/examples/accelerate_loop.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distckpt.integrations.accelerate import AcceleratorCheckpointer

STEPS = 8


def train(root: str, first: int, last: int) -> list[torch.Tensor]:
    """Train from step `first`, restored if it is not 0, to step `last`; return the weights."""
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    data = DataLoader(TensorDataset(torch.randn(256, 16)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    # Before the restore, from the seed, and taken by step below: within an epoch Accelerate's loaders would
    # begin another order (docs/frameworks.md).
    batches = list(data)

    with AcceleratorCheckpointer(accelerator, root, restore=first or None, async_save=True) as checkpointer:
        for step in range(first + 1, last + 1):
            [batch] = batches[step]
            accelerator.backward((model(batch) - batch).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step % 2 == 0:
                checkpointer.save(step)
    return [weight.detach().clone() for weight in model.parameters()]


def main() -> None:
    """Train in one go, and from the middle on; compare."""
    accelerator = Accelerator(cpu=True)
    with tempfile.TemporaryDirectory() as own:
        [root] = broadcast_object_list([own])
        whole = train(root, 0, STEPS)
        resumed = train(root, 4, STEPS)
        for one, other in zip(whole, resumed, strict=True):
            assert torch.equal(one, other)
        names = ", ".join(sorted(path.name for path in Path(root).glob("step-*")))
        accelerator.print(f"{names}: the loop that resumed at step 4 ends with the same weights")
        accelerator.wait_for_everyone()
        accelerator.end_training()


if __name__ == "__main__":
    main()
