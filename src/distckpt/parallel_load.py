"""Fully parallel load: ranks that hold the same thing read disjoint parts of it, and exchange them.

    every rank   lists the tensors that it shares with others      -> agree: all have the same list
                 cuts each of them where the saved chunks are cut, and reads its own pieces
                                                                   -> agree: all have read
                 broadcasts what it has read to those that hold the same

A piece consists of whole saved chunks, as far as they lie in the tensor: readers read a chunk as a whole, so
nothing is read by two ranks that exchange it. It is rows of contiguous memory: what arrives needs no memory
beside the tensor.

Invariants:
    * No collective is issued before all participants have said that they will issue the same ones and that
      they have read; what is cut follows from the list and the mesh alone.
    * On all ranks collectives are in one order, that of names and rows, whatever the group.
    * Nobody is involved but the participants.

Threads: the caller's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.tensor import DTensor

from distckpt.errors import CheckpointError
from distckpt.geometry import shard_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.distributed import ProcessGroup, Work
    from torch.distributed.checkpoint.storage import StorageReader
    from torch.distributed.device_mesh import DeviceMesh

    from distckpt.stateful import Gathered

    Agree = Callable[[str], bool]

_LOG = logging.getLogger(__name__)
_LEAST_BYTES = 1 << 20
"""Smaller tensors, and smaller pieces, are not worth an exchange."""
_MOST_IN_FLIGHT = 8
"""Broadcasts at once: more are not faster, and each holds memory of its backend."""
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
"""By type of device, the backend that moves its bytes as they are."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Of other classes it is not known what their memory means."""
_NUM_AGREEMENTS = 2
_GIB = 1 << 30


def load(
    state: dict[str, Any],
    reader: StorageReader,
    *,
    group: ProcessGroup | None,
    agree: Agree,
    gather: Callable[[dict[str, Any]], Gathered],
    weights_only: bool,
) -> None:
    """Load a checkpoint into `state`, as `torch.distributed.checkpoint.load` does.

    Tensors of 1 MiB or more that several ranks hold are read once and exchanged: plain ones among all of
    `group`, DTensors along the dimension of their mesh that is replicated. So they are as long as all ranks
    list the same ones; otherwise, and without a group, each rank reads all that it holds, and there is no
    collective. When a rank fails, all others do, as far as they are in the group.

    Args:
        state: Nested containers; tensors are filled in place, objects are replaced. After an error some are
            filled, in part or as a whole, and others are not.
        reader: Opened on the checkpoint.
        group: Exactly the ranks that load, on all of which this is called; None: no rank knows of another.
        agree: Says whether all ranks of `group` have passed the same text, without a collective and within a
            deadline; called twice on each of them, also when it fails. It is not called without a group.
        gather: Makes plain containers of `state`.
        weights_only: As for `torch.load`, of what each rank has for itself.

    Raises:
        CheckpointError: Another rank failed, or the exchange did.
        CheckpointException: This rank failed; torch's, which has the cause. What a `Stateful` of `state`
            raises is raised as it is.
    """
    exchange = None
    if group is not None and distributed.get_world_size(group) > 1:
        exchange = _Exchange(group, agree)
    try:
        gathered = gather(state)
        values = dict(sorted(gathered.values.items()))
        planner = DefaultLoadPlanner() if exchange is None else _DividingPlanner(exchange)
        # As the public function, but for its warning that there is a single process.
        _load_state_dict(values, reader, no_dist=True, planner=planner)
    except (Exception, CheckpointException) as error:
        if exchange is not None:
            exchange.give_up(error)
        raise
    if exchange is not None:
        exchange.complete()
    gathered.values.update(values)
    gathered.hand_back(weights_only=weights_only)


@dataclass(frozen=True)
class _Copy:
    """A tensor that several ranks hold.

    Attributes:
        fqn: Its name.
        local: What this rank holds of it.
        group: Those that hold the same.
        text: What all participants must have alike for the exchange.
    """

    fqn: str
    local: torch.Tensor
    group: ProcessGroup
    text: tuple[Any, ...]


class _Piece(NamedTuple):
    """Rows of a tensor that one rank reads for all that hold them.

    Attributes:
        copy: The tensor.
        first: First row.
        stop: Row after the last.
        items: What is read for it.
    """

    copy: _Copy
    first: int
    stop: int
    items: list[ReadItem]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return (self.stop - self.first) * (self.copy.local.nbytes // self.copy.local.shape[0])


class _DividingPlanner(DefaultLoadPlanner):
    """Leaves out what other ranks read."""

    def __init__(self, exchange: _Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads; asks the other ranks."""
        plan = super().create_local_plan()
        assert self.metadata is not None
        return replace(plan, items=self._exchange.divide(plan.items, self.state_dict, self.metadata))


class _Exchange:
    """What one load exchanges with the other ranks.

    Args:
        group: The participants.
        agree: See `load`.
    """

    def __init__(self, group: ProcessGroup, agree: Agree) -> None:
        self._group = group
        self._agree = agree
        self._num_asked = 0
        self._failure: CheckpointError | None = None
        self._pieces: list[tuple[_Piece, int]] = []
        """With the rank that reads it, in the order in which they are exchanged."""
        self._read_bytes = 0

    def divide(self, items: list[ReadItem], state: Mapping[str, Any], metadata: Metadata) -> list[ReadItem]:
        """Return those of `items` that this rank reads, and remember what it gets from others.

        Args:
            items: What it would read by itself.
            state: The state, flat.
            metadata: Of the checkpoint.
        """
        copies = _Finder(self._group, metadata).find(state)
        text = json.dumps([copy.text for copy in copies], separators=(",", ":"))
        if self._ask(f"exchange {hashlib.sha256(text.encode()).hexdigest()}"):
            self._pieces = _assign(_cut_all(copies, items), self._group)
        else:
            _LOG.info("the ranks do not hold the same tensors, or one failed: each reads all of its own")
        rank = distributed.get_rank()
        left_out = {id(item) for piece, owner in self._pieces if owner != rank for item in piece.items}
        kept = [item for item in items if id(item) not in left_out]
        self._read_bytes = sum(_item_bytes(item, metadata) for item in kept)
        return kept

    def complete(self) -> None:
        """Wait until all ranks have read, and exchange.

        Raises:
            CheckpointError: Another rank failed, or the exchange did.
        """
        rank = distributed.get_rank()
        if not self._ask("read"):
            raise CheckpointError(
                "another rank failed to read its part of the checkpoint, see its error; the state of this "
                "rank is loaded in part",
                rank=distributed.get_rank(),
            )
        received_bytes = 0
        try:
            in_flight: deque[Work] = deque()
            for piece, owner in self._pieces:
                if len(in_flight) == _MOST_IN_FLIGHT:
                    in_flight.popleft().wait()
                in_flight.append(_broadcast(piece, owner))
                received_bytes += 0 if owner == rank else piece.nbytes
            while in_flight:
                in_flight.popleft().wait()
        except RuntimeError as error:
            raise CheckpointError(
                f"the exchange of what was read failed, the state of this rank is loaded in part: {error}",
                rank=distributed.get_rank(),
            ) from error
        num_pieces, self._pieces = len(self._pieces), []
        _LOG.info(
            "read %.3f GiB of tensors and got %.3f GiB from other ranks, in %d pieces",
            self._read_bytes / _GIB,
            received_bytes / _GIB,
            num_pieces,
        )

    def give_up(self, error: BaseException) -> None:
        """Let the other ranks know that this one has failed.

        Args:
            error: Why.

        Raises:
            CheckpointError: It comes from the other ranks, and is raised as it was.
        """
        self._pieces = []
        if self._failure is not None:
            raise self._failure from None
        while self._num_asked < _NUM_AGREEMENTS:
            # What is raised is what this rank failed of, not that others did not wait for it.
            with contextlib.suppress(CheckpointError):
                self._ask(f"rank {distributed.get_rank()} failed: {type(error).__name__}")

    def _ask(self, text: str) -> bool:
        self._num_asked += 1
        try:
            return self._agree(text)
        except CheckpointError as error:
            # The others find that out by their own deadlines.
            self._num_asked = _NUM_AGREEMENTS
            self._failure = error
            raise


class _Finder:
    """Finds the tensors that can be exchanged.

    Args:
        group: The participants.
        metadata: Of the checkpoint.
    """

    def __init__(self, group: ProcessGroup, metadata: Metadata) -> None:
        self._group = group
        self._metadata = metadata
        self._ranks = sorted(distributed.get_process_group_ranks(group))
        self._meshes: dict[DeviceMesh, str | None] = {}

    def find(self, state: Mapping[str, Any]) -> list[_Copy]:
        """Return those of `state`, by name."""
        found = (self._copy_of(fqn, state[fqn]) for fqn in sorted(state))
        return [copy for copy in found if copy is not None]

    def _copy_of(self, fqn: str, value: Any) -> _Copy | None:
        entry = self._metadata.state_dict_metadata.get(fqn)
        if type(value) not in (*_PLAIN, DTensor) or not isinstance(entry, TensorStorageMetadata):
            return None
        if value.numel() * value.element_size() < _LEAST_BYTES:
            return None
        group, local, layout = self._group, value, ""
        if isinstance(value, DTensor):
            shared_by = self._group_of(value)
            if shared_by is None:
                return None
            with torch.no_grad():
                group, local = shared_by, value.to_local()
            layout = f"{value.placements} {self._meshes[value.device_mesh]}"
        if not (_can_move(group, local.device) and _is_bytes(local)):
            return None
        digest = hashlib.sha256()
        for chunk in entry.chunks:
            info = (self._metadata.storage_data or {}).get(MetadataIndex(fqn, chunk.offsets))
            # Of the same checkpoint, too: not of one that has replaced it.
            place = [getattr(info, name, None) for name in ("relative_path", "offset", "length")]
            digest.update(f"{tuple(chunk.offsets)} {tuple(chunk.sizes)} {place};".encode())
        text = (
            fqn, tuple(value.shape), str(value.dtype), local.device.type, layout, digest.hexdigest(),
        )  # fmt: skip
        return _Copy(fqn, local.detach(), group, text)

    def _group_of(self, tensor: DTensor) -> ProcessGroup | None:
        """Return the ranks that hold the same of `tensor`; None if there are none, or no group of them."""
        mesh, placements = tensor.device_mesh, tensor.placements
        if mesh not in self._meshes:
            ranks = mesh.mesh
            covers = sorted(ranks.flatten().tolist()) == self._ranks
            self._meshes[mesh] = (
                hashlib.sha256(json.dumps(ranks.tolist()).encode()).hexdigest() if covers else None
            )
        if self._meshes[mesh] is None or any(placement.is_partial() for placement in placements):
            return None
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        local_shape, _ = shard_chunks(tensor.shape, mesh.shape, coordinate, placements)
        with torch.no_grad():
            # A rank may have built it from anything.
            if tuple(tensor.to_local().shape) != local_shape:
                return None
        split = [dim for dim, placement in enumerate(placements) if hasattr(placement, "dim")]
        copied = [dim for dim in range(mesh.ndim) if dim not in split and mesh.size(dim) > 1]
        if all(mesh.size(dim) == 1 for dim in split):
            return self._group
        if len(copied) != 1:
            return None
        try:
            return mesh.get_group(copied[0])
        except RuntimeError:
            # The mesh was made without groups.
            return None


def _is_bytes(local: torch.Tensor) -> bool:
    """Say whether the values of `local` are its memory, as it lies, and other ranks' lie alike."""
    device = local.device
    return (
        type(local) in _PLAIN
        and local.layout is torch.strided
        and local.is_contiguous()
        and not (local.is_conj() or local.is_neg() or local.is_quantized or local.is_inference())
        and (device.type == "cpu" or device.index == torch.get_device_module(device).current_device())
    )


def _can_move(group: ProcessGroup, device: torch.device) -> bool:
    """Say whether `group` can broadcast what lies on `device`."""
    pairs = (pair.partition(":") for pair in distributed.get_backend_config(group).split(","))
    backends = {kind: backend for kind, _, backend in pairs}
    return device.type in _BACKENDS and backends.get(device.type) == _BACKENDS[device.type]


def _item_bytes(item: ReadItem, metadata: Metadata) -> int:
    entry = metadata.state_dict_metadata[item.storage_index.fqn]
    if item.type is LoadItemType.BYTE_IO or not isinstance(entry, TensorStorageMetadata):
        return 0
    return math.prod(item.lengths) * entry.properties.dtype.itemsize


def _cut_all(copies: Sequence[_Copy], items: Iterable[ReadItem]) -> list[_Piece]:
    """Return the pieces of all tensors, by name and rows."""
    by_fqn: dict[str, list[ReadItem]] = defaultdict(list)
    for item in items:
        by_fqn[item.dest_index.fqn].append(item)
    return [
        piece
        for copy in copies
        if copy.local.nbytes >= _LEAST_BYTES
        for piece in _cut(copy, by_fqn[copy.fqn])
    ]


def _cut(copy: _Copy, items: list[ReadItem]) -> list[_Piece]:
    """Return pieces of a tensor, in order; an item is read for one of them only.

    None for what the checkpoint does not fill, or fills in another way than by one chunk.
    """
    local = copy.local
    if len({item.dest_index.offset for item in items}) != 1:
        return []
    if sum(math.prod(item.lengths) for item in items) != local.numel():
        return []
    least = max(_LEAST_BYTES, local.nbytes // (2 * distributed.get_world_size(copy.group)))
    pieces: list[_Piece] = []
    for item in sorted(items, key=lambda item: (item.dest_offsets[0], -item.lengths[0])):
        first = item.dest_offsets[0]
        stop = first + item.lengths[0]
        # Where an item lies beside another, or little is gained by a cut.
        if pieces and (first < pieces[-1].stop or pieces[-1].nbytes < least):
            last = pieces.pop()
            pieces.append(_Piece(copy, last.first, max(last.stop, stop), [*last.items, item]))
        else:
            pieces.append(_Piece(copy, first, stop, [item]))
    return pieces


def _assign(pieces: Sequence[_Piece], everyone: ProcessGroup) -> list[tuple[_Piece, int]]:
    """Return who reads each of `pieces`: the largest first, by whoever has the least to read.

    Members of a group know the pieces of that group, and those that all ranks have, alike, and no others.
    """
    by_ranks: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, piece in enumerate(pieces):
        by_ranks[tuple(sorted(distributed.get_process_group_ranks(piece.copy.group)))].append(number)
    all_ranks = tuple(sorted(distributed.get_process_group_ranks(everyone)))
    common = dict.fromkeys(all_ranks, 0)
    owners: dict[int, int] = {}
    for ranks in sorted(by_ranks, key=lambda ranks: ranks != all_ranks):
        loads = common if ranks == all_ranks else {rank: common[rank] for rank in ranks}
        for number in sorted(by_ranks[ranks], key=lambda number: (-pieces[number].nbytes, number)):
            owner = min(loads, key=lambda rank: (loads[rank], rank))
            loads[owner] += pieces[number].nbytes
            owners[number] = owner
    return [(piece, owners[number]) for number, piece in enumerate(pieces)]


def _broadcast(piece: _Piece, owner: int) -> Work:
    local = piece.copy.local
    rows = local.narrow(0, piece.first, piece.stop - piece.first).view(-1).view(torch.uint8)
    if owner != distributed.get_rank():
        # c10d writes into it and tells autograd nothing.
        torch.autograd.graph.increment_version(rows)
    work: Work = distributed.broadcast(rows, src=owner, group=piece.copy.group, async_op=True)
    return work
