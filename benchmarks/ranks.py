"""The processes of one part of a run: one for each GPU, or as many as were asked for."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_LIMIT = timedelta(seconds=300)


class Ranks:
    """This rank among the others; made once in a process, from what torchrun would set in its environment.

    Args:
        device: "cuda" or "cpu".
    """

    def __init__(self, device: str) -> None:
        self.device = device
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        distributed.init_process_group(backend, timeout=_LIMIT)
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        # Of its own, so that what ranks say to each other waits for no GPU.
        self._group = distributed.new_group(backend="gloo", timeout=_LIMIT)
        self.mesh: DeviceMesh | None = None
        if self.world > 1:
            self.mesh = init_device_mesh(device, (self.world,))
        if device == "cuda":
            # The first collective sets NCCL up; that is not the checkpointer's doing.
            distributed.all_reduce(torch.zeros(1, device="cuda"))
            torch.cuda.synchronize()

    def barrier(self) -> None:
        distributed.barrier(self._group)

    def gather(self, value: Any) -> list[Any]:
        """Return the value of each rank, on each rank."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        distributed.all_gather_object(found, value, group=self._group)
        return found

    def slowest(self, value: float) -> float:
        return float(max(self.gather(value)))

    def total(self, value: float) -> float:
        return float(sum(self.gather(value)))

    def settle(self) -> None:
        """Wait until this rank's device has done what it was given, and for all ranks."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.barrier()

    def close(self) -> None:
        distributed.destroy_process_group()
