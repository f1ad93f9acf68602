"""torchtitan's checkpoint manager through distckpt: train under FSDP2, save while training, resume.

    python docs/examples/torchtitan_manager.py
    torchrun --standalone --nproc-per-node 2 docs/examples/torchtitan_manager.py

What torchtitan's trainer does with its manager is done here by hand, on CPUs and with a tiny model. In a job
of torchtitan only `checkpoint=CheckpointManager.Config(...)` of its configuration changes.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from distckpt.integrations.torchtitan import CheckpointManager

STEPS = 6


class Progress:
    """How far the training is; torchtitan's trainer is this itself."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        self.step = state["step"]


class Job:
    """A model of torchtitan's kind, and a checkpoint manager."""

    def __init__(self, folder: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = default_adamw(lr=1e-2)
        optimizer.implementation = "for-loop"
        self.optimizers = optimizer.build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        self.progress = Progress()
        self.manager = CheckpointManager.Config(
            enable=True, folder=folder, interval=2, keep_latest_k=2, last_save_model_only=False
        ).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.progress},
            sd_adapter=None,
        )

    def train(self, last: int) -> None:
        """Train up to step `last`."""
        while self.progress.step < last:
            self.progress.step += 1
            generator = torch.Generator().manual_seed(self.progress.step)
            batch = torch.randn(8, 16, generator=generator)
            self.optimizers.zero_grad()
            (self.model(batch) - batch).square().mean().backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.manager.save(self.progress.step, last_step=self.progress.step == STEPS)

    def weights(self) -> list[torch.Tensor]:
        """Return all weights, whole."""
        return [weight.full_tensor() for weight in self.model.state_dict().values()]


def main() -> None:
    """Train to the end; resume another job from the middle, and compare."""
    with tempfile.TemporaryDirectory() as own:
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", init_method=f"file://{own}/store", rank=0, world_size=1)
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        folder = f"{folders[0]}/checkpoints"

        whole = Job(folder)
        whole.train(STEPS)
        whole.manager.close()

        resumed = Job(folder)
        resumed.manager.load(4)
        assert resumed.progress.step == 4
        resumed.train(STEPS)
        resumed.manager.close()
        for one, other in zip(whole.weights(), resumed.weights(), strict=True):
            assert torch.equal(one, other)
        if dist.get_rank() == 0:
            names = ", ".join(sorted(os.listdir(folder)))
            print(f"{names}: the job that resumed at step 4 ends with the same weights")
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
