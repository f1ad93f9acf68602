"""SavePlanner: torch's planner, but the ranks that hold the same share the writing of it.

Invariants:
    * Each row of what several ranks have is written by exactly one of them.
    * What is written of a tensor is a view of it: nothing is copied here.
    * Where an item lies in a local tensor is looked up in today's state: a plan may be replayed by torch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from distckpt.collector import collector_paused
from distckpt.errors import ConfigError, StagingError
from distckpt.plan import WHOLE_BYTES, share
from distckpt.staging import is_raw, is_verbatim

if TYPE_CHECKING:
    import io
    from collections.abc import Sequence

    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.planner import SavePlan

    Held = list[tuple[int, int, WriteItem]]

_LOG = logging.getLogger(__name__)
_OBJECT_BYTES = 4 << 10
"""What an object counts for in the sharing: its size is not known before it is pickled."""
_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_TWICE = "duplicated flatten key "
_SKEW = 1.2
_SKEW_BYTES = 64 << 20
_GIB = 1 << 30


@dataclass(frozen=True)
class WholeItem(WriteItem):
    """An item that is never split: the rows of its tensor are not plain memory, one after the other."""


class SavePlanner(DefaultSavePlanner):
    """Plans saves in which replicas share the writing; for `dcp.save` and `dcp.async_save`.

    What several ranks have under one name, with the same place in the global tensor, is divided among these
    ranks, each about an equal part of the bytes; large tensors are split by rows. If the values differ from
    rank to rank, as of a local tensor under a name that all ranks use, the checkpoint holds for each row, or
    for the whole of an object or a small tensor, what one of the ranks had; torch's planner takes all of it
    from one.

    Works with any storage writer, and every reader reads what it has planned.

    Args:
        flatten_state_dict: As torch's.
        flatten_sharded_tensors: As torch's.
        fully_parallel_save: Whether to share; without it the lowest rank that has something writes all of it.
        enable_plan_caching: As torch's.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        *,
        fully_parallel_save: bool = True,
        enable_plan_caching: bool = False,
    ) -> None:
        super().__init__(
            flatten_state_dict,
            flatten_sharded_tensors,
            dedup_save_to_lowest_rank=not fully_parallel_save,
            enable_plan_caching=enable_plan_caching,
        )
        self._is_parallel = fully_parallel_save
        # A plan made by the other rule must not be replayed.
        self._cached_plans_key += "" if fully_parallel_save else " lowest rank"
        self._local: dict[str, list[WriteItem]] = {}

    @property
    def splits(self) -> bool:
        """Whether what several ranks have may be split by rows."""
        return self._is_parallel

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state that is to be planned.

        Args:
            state_dict: The state.
            storage_meta: As torch's.
            is_coordinator: Whether this rank makes the global plan.

        Raises:
            ConfigError: Two entries have one name.
            ValueError: As torch's.
        """
        try:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
        except ValueError as error:
            if not str(error).startswith(_TWICE):
                raise
            name = str(error).removeprefix(_TWICE)
            raise ConfigError(f"state: two entries have the name {name!r}, by different keys") from None

    def create_local_plan(self) -> SavePlan:
        """Return all that this rank has; what is not to be split is marked."""
        plan = super().create_local_plan()
        self._local = {}
        # Not those of `plan`, which has none if torch has it cached.
        for item in self.plan.items:
            self._local.setdefault(item.index.fqn, []).append(item)
        return replace(plan, items=[self._marked(item) for item in plan.items])

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return what is to be written: bytes, a tensor of the state, or some rows of one."""
        held = self._holder_of(write_item)
        if held is None:
            return super().resolve_data(write_item)
        data = super().resolve_data(held)
        assert isinstance(data, torch.Tensor)
        assert write_item.tensor_data is not None
        assert held.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        return data.detach().narrow(0, chunk.offsets[0] - held.tensor_data.chunk.offsets[0], chunk.sizes[0])

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - torch's name
        """Return what is written of a value: bytes of an object.

        Args:
            write_item: Its item.
            object: The value.

        Raises:
            StagingError: It cannot be pickled.
        """
        try:
            return super().transform_object(write_item, object)
        except Exception as error:
            raise StagingError(
                f"{write_item.index.fqn!r}: a {type(object).__name__} cannot be pickled: {error}"
            ) from error

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        with collector_paused():
            plans, nbytes = share_plans(all_plans, is_parallel=self._is_parallel)
        if self._is_parallel:
            _report_skew(nbytes)
        return plans

    def _holder_of(self, item: WriteItem) -> WriteItem | None:
        """Return the item of this rank's own of which `item` is some rows; None if it is none such."""
        if item.type is not WriteItemType.SHARD or item.tensor_data is None:
            return None
        chunk = item.tensor_data.chunk
        found = None
        for held in self._local.get(item.index.fqn, ()):
            if held.tensor_data is None:
                continue
            around = held.tensor_data.chunk
            if (around.offsets, around.sizes) == (chunk.offsets, chunk.sizes):
                return None
            if (
                len(chunk.sizes) > 0
                and (around.offsets[1:], around.sizes[1:]) == (chunk.offsets[1:], chunk.sizes[1:])
                and around.offsets[0] <= chunk.offsets[0]
                and chunk.offsets[0] + chunk.sizes[0] <= around.offsets[0] + around.sizes[0]
            ):
                found = held
        return found

    def _marked(self, item: WriteItem) -> WriteItem:
        nbytes, rows = local_rows(item)
        if rows < 2 or nbytes < WHOLE_BYTES:
            return item
        with torch.no_grad():
            data = self.lookup_object(item.index)
        if _has_rows(data):
            return item
        return WholeItem(item.index, item.type, item.bytes_io_data, item.tensor_data)


def _has_rows(tensor: torch.Tensor) -> bool:
    """Say whether the rows of `tensor` are plain memory, one after the other."""
    return (
        is_raw(tensor)
        and is_verbatim(tensor)
        and tensor.dim() > 0
        and tensor.stride(0) * tensor.size(0) == tensor.numel()
    )


def local_rows(item: WriteItem) -> tuple[int, int]:
    """Return what `plan.share` needs to know of an item.

    Args:
        item: Of a rank's own plan.

    Returns:
        Its bytes on this rank, and its rows, by which it can be split; 0 if it cannot be.
    """
    data = item.tensor_data
    if data is None:
        return (_OBJECT_BYTES if item.bytes_io_data is None else item.bytes_io_data.nbytes), 0
    sizes, properties = data.chunk.sizes, data.properties
    nbytes = sizes.numel() * properties.dtype.itemsize
    can_split = (
        nbytes > 0
        and len(sizes) > 0
        and properties.layout is torch.strided
        and properties.dtype not in _QUANTIZED
        and not isinstance(item, WholeItem)
    )
    return nbytes, sizes[0] if can_split else 0


def narrow_item(item: WriteItem, first: int, stop: int) -> WriteItem:
    """Return the item that is some rows of another.

    Args:
        item: One for which `local_rows` finds rows, or any, whose rows are 0 or 1, for all of it.
        first: First row, from 0.
        stop: Row after the last.

    Returns:
        The same item, if these are all of its rows.
    """
    rows = local_rows(item)[1]
    if rows < 2 or (first, stop) == (0, rows):
        return item
    assert 0 <= first < stop <= rows, "the rows are some of the item's"
    data = item.tensor_data
    assert data is not None, "what has rows is a tensor"
    offsets = torch.Size((data.chunk.offsets[0] + first, *data.chunk.offsets[1:]))
    chunk = ChunkStorageMetadata(offsets, torch.Size((stop - first, *data.chunk.sizes[1:])))
    # Also of a plain tensor: torch takes only shards of one name more than once.
    return WriteItem(
        replace(item.index, offset=offsets, index=None),
        WriteItemType.SHARD,
        tensor_data=replace(data, chunk=chunk),
    )


def share_plans(plans: Sequence[SavePlan], *, is_parallel: bool) -> tuple[list[SavePlan], list[int]]:
    """Share among ranks what several of them have.

    Of chunks with the same offsets that are not the same, such as an empty one and a real one, the real one
    is kept, of several the one of the lowest rank.

    Args:
        plans: All that each rank has.
        is_parallel: Whether each of them writes a part; else the lowest of them all.

    Returns:
        What each rank writes, in the order of its plan, and how many bytes that is.
    """
    holders: dict[tuple[Any, ...], Held] = {}
    for rank, plan in enumerate(plans):
        for number, item in enumerate(plan.items):
            kind: object = None
            data = item.tensor_data
            if data is not None:
                kind = data.chunk.sizes, data.size, data.properties.dtype, data.properties.layout
            held = holders.setdefault((item.index.fqn, item.index.offset, kind), [])
            if not held or held[-1][0] != rank:
                held.append((rank, number, item))
    classes: dict[tuple[int, ...], list[Held]] = {}
    for held in _without_collisions(holders):
        classes.setdefault(tuple([rank for rank, _, _ in held]), []).append(held)
    shared: list[dict[int, WriteItem]] = [{} for _ in plans]
    nbytes = [0] * len(plans)
    for ranks, items in classes.items():
        if len(ranks) == 1 or not is_parallel:
            for held in items:
                rank, number, item = held[0]
                shared[rank][number] = item
                nbytes[rank] += local_rows(item)[0]
            continue
        items.sort(key=lambda held: (held[0][2].index.fqn, held[0][2].index.offset or ()))
        # One that is not plain memory on one of the ranks is not split on any.
        sizes = [
            (size, 0 if any(isinstance(item, WholeItem) for _, _, item in held) else rows)
            for held in items
            for size, rows in [local_rows(held[0][2])]
        ]
        for member, parts in enumerate(share(sizes, len(ranks))):
            for place, first, stop in parts:
                rank, number, item = items[place][member]
                size, rows = sizes[place]
                shared[rank][number] = item if rows < 2 else narrow_item(item, first, stop)
                nbytes[rank] += size if rows < 2 else size // rows * (stop - first)
    divided = [
        replace(plan, items=[item for _, item in sorted(own.items(), key=lambda entry: entry[0])])
        for plan, own in zip(plans, shared, strict=True)
    ]
    return divided, nbytes


def _without_collisions(holders: dict[tuple[Any, ...], Held]) -> list[Held]:
    """Return of each place of a global tensor one kind of chunk; `holders` are in the order of ranks."""
    at_place: dict[tuple[Any, ...], Held] = {}
    for (fqn, offset, _), held in holders.items():
        other = at_place.setdefault((fqn, offset), held)
        if other is not held and not local_rows(other[0][2])[0] and local_rows(held[0][2])[0]:
            at_place[fqn, offset] = held
    return list(at_place.values())


def _report_skew(nbytes: Sequence[int]) -> None:
    """Warn if one rank writes much more than the others: the save takes as long as that rank."""
    most, mean = max(nbytes, default=0), sum(nbytes) / max(1, len(nbytes))
    if most > _SKEW * mean and most > mean + _SKEW_BYTES:
        _LOG.warning(
            "rank %d writes %.2f GiB, %.1f times the mean of %d ranks: it has what few others have",
            nbytes.index(most), most / _GIB, most / mean, len(nbytes),
        )  # fmt: skip
