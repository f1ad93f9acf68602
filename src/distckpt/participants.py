"""Which ranks save together, as a trainer says it, and where they leave word for each other."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distckpt.coordination import Coordinator, SingleCoordinator, StoreCoordinator
from distckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    Participants = Iterable[int] | ProcessGroup | DeviceMesh | Coordinator | None


def meet(participants: Participants) -> tuple[Coordinator, ProcessGroup | None]:
    """Return where `participants` leave word, and the process group that consists of them if there is one.

    Nothing here waits for another rank; the store of the default process group is used, but for a coordinator
    that is given.

    Args:
        participants: Ranks of the job; or a process group; or a device mesh; or a coordinator, for jobs
            without `torch.distributed`; None: all ranks of the job.

    Raises:
        ConfigError: They cannot be had, or this rank is not among them.
    """
    if isinstance(participants, Coordinator):
        return participants, None
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        if participants is None:
            return SingleCoordinator(), None
        raise ConfigError(
            "participants: torch.distributed is not initialised: give a StoreCoordinator or a "
            "StorageCoordinator of distckpt.coordination, which say who takes part and where they meet"
        )
    distributed = torch.distributed
    rank = distributed.get_rank()
    group: ProcessGroup | None = None
    everyone = list(range(distributed.get_world_size()))
    if participants is None:
        ranks = everyone
    elif isinstance(participants, DeviceMesh):
        ranks = sorted(participants.mesh.flatten().tolist())
        group = participants.get_group() if participants.ndim == 1 and rank in ranks else None
    elif isinstance(participants, ProcessGroup):
        if distributed.get_rank(participants) < 0:
            raise ConfigError(f"participants: rank {rank} is not in the process group")
        ranks, group = distributed.get_process_group_ranks(participants), participants
    elif _is_no_member(participants):
        raise ConfigError(f"participants: rank {rank} is not in the process group")
    else:
        ranks = _ranks_from(participants, len(everyone))
    if sorted(ranks) == everyone and group is None:
        group = distributed.group.WORLD
    if ranks == [rank]:
        return SingleCoordinator(rank), None
    name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    # Private, but the only store that all ranks of a job have in common.
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001
    return StoreCoordinator(store, rank, ranks, name), group


def _ranks_from(participants: Any, world: int) -> list[int]:
    try:
        ranks = list(participants)
    except TypeError:
        ranks = []
    if not ranks or not all(type(one) is int and 0 <= one < world for one in ranks):
        raise ConfigError(
            f"participants: expected ranks from 0 to {world - 1}, a process group, a device mesh or a "
            f"coordinator, got {participants!r}"
        )
    return ranks


def _is_no_member(participants: Any) -> bool:
    """Say whether this is what `torch.distributed.new_group` returns to ranks outside of it."""
    return participants is torch.distributed.GroupMember.NON_GROUP_MEMBER
