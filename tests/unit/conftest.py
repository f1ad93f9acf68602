"""What several unit tests need beside pure values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    store = torch._C._distributed_c10d.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert distributed.group.WORLD is not None
    yield DeviceMesh.from_group(distributed.group.WORLD, "cpu")
    distributed.destroy_process_group()
