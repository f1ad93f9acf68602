"""Every operation of torch.distributed that involves another rank, made to raise."""

from __future__ import annotations

from typing import Any

from torch import distributed
from torch.distributed import ProcessGroup, distributed_c10d

_OPERATIONS = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "new_group",
    "new_subgroups", "recv", "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "scatter", "scatter_object_list", "send", "send_object_list",
)  # fmt: skip
_METHODS = (
    "_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base",
    "barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce",
    "reduce_scatter", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip


class Collective(Exception):
    """A rank asked another one."""


def forbid() -> None:
    """Make every operation of the process's groups raise from now on; a killed process needs no undoing."""
    for name in _OPERATIONS:
        raising = _raising(name)
        assert hasattr(distributed_c10d, name), name
        setattr(distributed_c10d, name, raising)
        setattr(distributed, name, raising)
    for name in _METHODS:
        assert hasattr(ProcessGroup, name), name
        setattr(ProcessGroup, name, _raising(f"ProcessGroup.{name}"))


def _raising(name: str) -> Any:
    def raise_it(*_: Any, **__: Any) -> None:
        raise Collective(name)

    return raise_it
