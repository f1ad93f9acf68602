"""Checkpointer: the training loop's own way to save and restore.

    state -> signature -> planned once -> staged -> written and published in the background

What a save needs is planned when a state is seen for the first time, and used again while its signature
holds; a save then costs the trainer the comparison and one replay of the copies.

Invariants:
    * A plan is never used for a state that was not compared with it in full, values of objects included.
    * The background thread does nothing for each item, and makes no CUDA call.
    * A tensor that changed before the guard let it fails its save, and nothing of that is published.

Threads: one thread at a time saves, guards and restores; one thread of the checkpointer's own writes.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import threading
import time
import uuid
import weakref
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from distckpt import observe
from distckpt.assembly import assemble, entry_of
from distckpt.commit import Claim, claim, committed_by, failures, publish, reclaim, report_failure
from distckpt.config import CheckpointConfig, warn_async_workers
from distckpt.engine import Engine, Residence, Written, collector_paused
from distckpt.errors import (
    CheckpointError,
    CommitError,
    ConfigError,
    MissingRanks,
    StagingError,
    clear_frames,
)
from distckpt.exitstatus import note_failure, watch_exit
from distckpt.formats import Frame
from distckpt.image import lay_out_image
from distckpt.manifest import METADATA, ItemTable, Manifest, plan_digest, read_partial, write_manifest
from distckpt.metadata import DCP_VERSION, pickle_metadata, resolve_items
from distckpt.reader import StorageReader
from distckpt.signature import Signature, View, local_tensors, version_of
from distckpt.staging import is_raw
from distckpt.storage import open_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.optim import Optimizer
    from typing_extensions import Self

    from distckpt.image import Image
    from distckpt.manifest import PartialManifest
    from distckpt.storage import Storage

_LOG = logging.getLogger(__name__)
_PREFIX = "step-"
_STEP_DIGITS = 8
_GIB = 1 << 30
_POLL_S = 0.002
_ARRIVAL_S = 5.0
_FIRST_POLL_S = 0.01
_LAST_POLL_S = 1.0
_VERSIONS_AT_ONCE = 512
_IDLE_TIMEOUTS = 2.0
"""A save in whose directory nothing has changed for so many deadlines is over; ranks wait for 1.5 at most."""
_MOST_RESIDENCES = 4
"""Saves of one state in flight, as far as the budget goes: one is written, others are staged."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class SaveHandle:
    """One save of a `Checkpointer`.

    Attributes:
        step: Its step.
        path: Where the checkpoint will be.
        blocked_s: Seconds that `save` took.
        prepared_s: Seconds of these before the first copy: comparing or planning, waiting for memory.
    """

    def __init__(self, step: int, path: str) -> None:
        self.step = step
        self.path = path
        self.blocked_s = 0.0
        self.prepared_s = 0.0
        self._residence: Residence | None = None
        self._has_arrived = False
        self._is_asked = False
        self._future: Future[str] = Future()
        self._future.set_running_or_notify_cancel()

    @property
    def staged(self) -> bool:
        """Whether everything was copied: nothing that happens to the state shows in the checkpoint."""
        residence = self._residence
        if residence is not None and not self._has_arrived:
            self._has_arrived = residence.has_arrived()
        return self._has_arrived or self._future.done()

    @property
    def committed(self) -> bool:
        """Whether the checkpoint is complete and durable."""
        return self._future.done() and self._future.exception() is None

    def result(self, timeout: float | None = None) -> str:
        """Wait until the checkpoint is committed.

        Args:
            timeout: Seconds; None: as long as it takes, which has deadlines of its own.

        Returns:
            Where it is.

        Raises:
            CheckpointError: The save failed.
            TimeoutError: It is still under way.
        """
        self._is_asked = True
        return self._future.result(timeout)


class Place(NamedTuple):
    """This process among the ranks of a `Checkpointer`."""

    rank: int
    world: int
    run_id: str

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank publishes."""
        return self.rank == 0


class _Coordinator(NamedTuple):
    """What the coordinator has saved: digest of its plan, and (fqn, offsets) of its items."""

    plan: str
    items: frozenset[tuple[str, tuple[int, ...] | None]]


class _Planned:
    """What is known of a state that was planned: items, files, metadata, and memory that holds it.

    Args:
        engine: Plans and holds it.
        storage: Of the kind that it will be saved to.
        state: The state.
        view: The state, walked with paths.
        late_addresses: Where the tensors lie that a guard protects.
        file_format: For the manifest.
        place: This process among the ranks.
        coordinator: What the coordinator is known to save; this rank leaves to it what both have.
    """

    def __init__(
        self,
        engine: Engine,
        storage: Storage,
        state: Mapping[str, Any],
        view: View,
        late_addresses: set[int],
        file_format: str,
        place: Place,
        coordinator: _Coordinator | None,
    ) -> None:
        self.is_reusable = view.is_simple and all(map(is_raw, view.locals))
        self.signature = Signature(view) if self.is_reusable else None
        self._engine = engine
        self._storage = storage
        self._format = file_format
        self._place = place
        self.relies_on = coordinator
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(state), StorageMeta(), is_coordinator=place.is_coordinator)
        plan = planner.create_local_plan()
        self._metadata: Metadata | None = None
        if place.world == 1:
            [plan], self._metadata = planner.create_global_plan([plan])
            plan = planner.finish_plan(plan)
        else:
            kept = [item for item in plan.items if _is_own(item, planner, coordinator)]
            plan = replace(plan, items=kept)
        self.items, _ = resolve_items(engine, planner, plan.items, place.rank)
        self._write_items = plan.items
        self._link(planner, state, view)
        self._mappings = planner.mappings
        self._plain = {
            fqn
            for fqn, value in planner.state_dict.items()
            if not isinstance(value, (DTensor, ShardedTensor))
        }
        del planner
        addresses = [] if self.signature is None else self.signature.addresses
        # Nothing counts up the version of what lies in a DTensor, and inference tensors have none: what can
        # not be checked is not copied late.
        if addresses and any(map(torch.Tensor.is_inference, view.locals)):
            addresses = []
        self.late = [
            number
            for number, leaf in enumerate(self._leaf_of)
            if addresses
            and leaf >= 0
            and addresses[leaf] in late_addresses
            and view.locals[leaf].is_cuda
            and view.leaves[leaf] is view.locals[leaf]
        ]
        self.late_leaves = {self._leaf_of[number]: number for number in self.late}
        """For each tensor of the state that may be copied late, the number of its item."""
        self._on_host = [
            number
            for number, (item, leaf) in enumerate(zip(self.items, self._leaf_of, strict=True))
            if leaf < 0 or (item.tensor is not None and not item.tensor.is_cuda)
        ]
        self._image: Image | None = None
        self._table: ItemTable | None = None
        self._template: tuple[object, bytes, str, str] | None = None
        self._digest = ""
        self._residences: list[Residence] = []
        self._free: deque[Residence] = deque()
        self._dropped: deque[Residence] = deque()
        self._changed = threading.Condition()
        self._is_stale = False
        first = self._new_residence() if self.items else None
        self.fits = first is not None
        """Whether the budget for host memory holds the state."""
        if first is not None or not self.items:
            self._describe(lay_out_image([], 1, 1) if first is None else first.image)

    def _link(self, planner: DefaultSavePlanner, state: Mapping[str, Any], view: View) -> None:
        """Find out which tensor of the state each item is, and where each object comes from."""
        leaf_at = {path: leaf for leaf, path in enumerate(view.paths)}
        self._leaf_of: list[int] = []
        self._objects: dict[int, tuple[tuple[Any, ...], Any]] = {}
        for number, write_item in enumerate(self._write_items):
            path = planner.mappings.get(write_item.index.fqn)
            item = self.items[number]
            leaf = -1
            if path is None:
                self.is_reusable = False
            elif write_item.type is WriteItemType.BYTE_IO:
                value = planner.state_dict[write_item.index.fqn]
                keys = _keys_along(path, state)
                self._objects[number] = (keys, value if type(value) in _PLAIN else None)
            else:
                leaf = leaf_at.get(tuple(path), -1) if self.is_reusable else -1
                tensor = None if leaf < 0 else view.locals[leaf]
                if tensor is None or item.tensor is None or item.tensor.data_ptr() != tensor.data_ptr():
                    # Saved otherwise than as plain memory, or made for this save.
                    self.is_reusable = False
            self._leaf_of.append(leaf)

    def refresh(self, state: Mapping[str, Any]) -> bool:
        """Take today's values of the objects; False if they take more room, so that all is planned anew."""
        for number, (path, known) in self._objects.items():
            value: Any = state
            for key in path:
                value = value[key]
            if type(value) is type(known) and type(value) in _PLAIN and repr(value) == repr(known):
                continue
            data = io.BytesIO()
            torch.save(value, data)
            item = self.items[number]
            if data.getbuffer().nbytes != item.size:
                return False
            item.frame = Frame(data.getvalue(), b"")
            self._objects[number] = (path, value if type(value) in _PLAIN else None)
        return True

    def stage(self, residence: Residence, view: View) -> None:
        """Copy the state that `view` has walked to `residence`."""
        numbers: Sequence[int] = self._on_host if residence.can_restage else range(len(self.items))
        try:
            self._take_tensors(view, numbers)
            if residence.can_restage:
                residence.restage({number: self.items[number] for number in numbers}, view.locals)
            else:
                residence.stage(self.items)
        finally:
            self._release(numbers)

    def _take_tensors(self, view: View, numbers: Sequence[int]) -> None:
        for number in numbers:
            leaf = self._leaf_of[number]
            if leaf >= 0:
                tensor = view.locals[leaf]
                self.items[number].tensor = tensor.detach() if tensor.requires_grad else tensor

    def release_tensors(self) -> None:
        """Hold no tensor of the state; one that is not reusable is of no use afterwards."""
        self._release(range(len(self.items)))

    def _release(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.items[number].tensor = None

    def acquire(self, timeout_s: float) -> Residence:
        """Return memory for the state that no save uses; waits for one that is under way.

        Raises:
            StagingError: None came free in time, or none is left.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._free:
                if not self._residences:
                    raise StagingError("the memory of the saves before was lost: the next save plans anew")
                if self._new_residence() is not None:
                    continue
                if not self._changed.wait(min(1.0, max(0.0, deadline - time.monotonic()))) and (
                    time.monotonic() > deadline
                ):
                    raise StagingError(
                        f"waited {timeout_s:.0f} s for the save before to free its memory "
                        f"(--ckpt-host-memory holds one state)"
                    )
            return self._free.popleft()

    def give_back(self, residence: Residence) -> None:
        """Have `residence` used by the next save."""
        with self._changed:
            if self._is_stale or residence.is_lost:
                self._residences.remove(residence)
                if residence.has_arrived():
                    self._engine.drop(residence)
                else:
                    # Not here: it would ask CUDA, which a thread of ours must not while the trainer captures.
                    self._dropped.append(residence)
            else:
                self._free.append(residence)
            self._changed.notify_all()

    def retire(self) -> None:
        """Give the memory back, that of saves that are under way when they have ended."""
        with self._changed:
            self._is_stale = True
            while self._free:
                residence = self._free.popleft()
                self._residences.remove(residence)
                self._dropped.append(residence)
        self.drop_idle()

    @property
    def is_in_use(self) -> bool:
        """Whether a save has its memory."""
        return bool(self._residences or self._dropped)

    @property
    def is_spent(self) -> bool:
        """Whether all its memory was lost to copies or lanes that could not be stopped."""
        return self.fits and bool(self.items) and not self._residences

    def drop_idle(self) -> None:
        """Give back what was let go meanwhile; called by the trainer's thread."""
        while self._dropped:
            self._engine.drop(self._dropped.popleft())

    def _new_residence(self) -> Residence | None:
        """Take memory for one more save, with the same image: the metadata describes that one."""
        if not self._residences:
            residence = self._engine.reside(self._storage, self.items, self.late)
        elif len(self._residences) < _MOST_RESIDENCES:
            residence = self._engine.reside_beside(self._residences[0])
        else:
            return None
        if residence is not None:
            self._residences.append(residence)
            self._free.append(residence)
        return residence

    def _describe(self, image: Image) -> None:
        """Make what every save's manifest and metadata say; both take long for many items."""
        self._image = image
        item_files, offsets = image.places()
        fqns = [item.index.fqn for item in self._write_items]
        with collector_paused():
            self._digest = plan_digest(
                fqns,
                [
                    (item.index.offset, data and (data.chunk.sizes, data.properties.dtype))
                    for item in self._write_items
                    for data in [item.tensor_data]
                ],
            )
            chunks: list[Sequence[int] | None] = [item.index.offset for item in self._write_items]
            entries = None
            if self._place.world > 1:
                entries = [entry_of(item, self._mappings.get(item.index.fqn)) for item in self._write_items]
            self._table = ItemTable(fqns, chunks, item_files, offsets, image.sizes, entries)
            _ = self._table.json

    def shares(self, coordinator: _Coordinator) -> bool:
        """Say whether the coordinator has saved, too, what this rank could leave to it."""
        return any(
            (item.index.fqn, None if item.index.offset is None else tuple(item.index.offset))
            in coordinator.items
            for item in self._write_items
            if item.index.fqn in self._plain
        )

    def fqn(self, number: int) -> str:
        """Return the name of an item."""
        return str(self._write_items[number].index.fqn)

    def write_through(self, storage: Storage, save_id: str, view: View) -> Written:
        """Stage and write in waves the state that `view` has walked."""
        self._take_tensors(view, range(len(self.items)))
        try:
            written = self._engine.write(storage, save_id, self._place.rank, self.items)
        finally:
            self.release_tensors()
        assert written is not None
        return written

    def manifest(self, save_id: str, written: Written) -> Manifest:
        """Return the manifest of one save.

        Raises:
            CommitError: `written` is laid out otherwise than what the metadata describes.
        """
        if self._image is None:
            self._describe(written.image)
        assert self._table is not None
        assert self._image is not None
        if written.image is not self._image and written.image.files != self._image.files:
            raise CommitError("not published: the files are laid out otherwise than the metadata says")
        return Manifest(
            save_id=save_id,
            rank=self._place.rank,
            format=self._format,
            plan=self._digest,
            files=written.files,
            checksums=written.checksums,
            items=self._table,
            relies="" if self.relies_on is None else self.relies_on.plan,
        )

    def metadata(
        self, manifests: list[PartialManifest], names: tuple[str, ...], path: str, save_id: str
    ) -> bytes:
        """Return the pickled metadata of one save.

        It is that of the last save but for the path and the id, nearly always of equal lengths: then these
        are put in their places, and nothing is pickled.

        Args:
            manifests: Of all ranks, if there is more than one.
            names: Of this rank's files.
            path: Of the checkpoint.
            save_id: Of the save.
        """
        # As pickle encodes it.
        data_path = path.encode("utf-8", "surrogatepass")
        length = len(data_path)
        files = [[name.replace(save_id, "") for name in m.ref.files] for m in manifests]
        key = (length, files, [(m.items, m.head.get("relies")) for m in manifests])
        if self._template is None or self._template[0] != key:
            # A placeholder that nothing else in the metadata holds, as the id is another.
            mark = (uuid.uuid4().hex * (1 + length // 32))[:length]
            with collector_paused():
                if manifests:
                    metadata = assemble(manifests, mark, save_id)
                else:
                    metadata = self._own_metadata(names, mark, save_id)
                self._template = (key, pickle_metadata(metadata, {}), mark, save_id)
        _, data, mark, earlier_id = self._template
        return data.replace(earlier_id.encode(), save_id.encode()).replace(mark.encode(), data_path)

    def foresee_metadata(self, path: str, save_id: str) -> None:
        """Make on the caller's thread what takes long for many items and is the same for every save."""
        if self._template is None and self._place.world == 1 and self._residences:
            names = self._engine.names(save_id, self._place.rank, self._residences[0].image)
            self.metadata([], names, path, save_id)

    def _own_metadata(self, names: tuple[str, ...], path: str, save_id: str) -> Metadata:
        table, planned = self._table, self._metadata
        assert table is not None
        assert planned is not None
        metadata = replace(planned, storage_meta=StorageMeta(checkpoint_id=path, save_id=save_id))
        metadata.version = DCP_VERSION
        metadata.storage_data = {
            item.index: _StorageInfo(names[file], offset, size)
            for item, file, offset, size in zip(
                self._write_items, table.item_files, table.offsets, table.sizes, strict=True
            )
        }
        return metadata


def _keys_along(path: Sequence[Any], state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the keys of the containers along `path`, in which torch spells every key of a mapping."""
    keys: list[Any] = []
    value: Any = state
    for name in path:
        key = name
        if isinstance(value, Mapping) and name not in value:
            key = next(own for own in value if str(own) == name)
        keys.append(key)
        value = value[key]
    return tuple(keys)


def _is_own(item: WriteItem, planner: DefaultSavePlanner, coordinator: _Coordinator | None) -> bool:
    """Say whether this rank writes `item`, or leaves it to others.

    Of what a mesh replicates its first ranks write all; of what else two ranks have, the coordinator, once
    the others know.
    """
    value = planner.state_dict[item.index.fqn]
    if isinstance(value, DTensor):
        coordinate = value.device_mesh.get_coordinate()
        return coordinate is not None and all(
            place == 0 or not placement.is_replicate()
            for place, placement in zip(coordinate, value.placements, strict=True)
        )
    if coordinator is None or isinstance(value, ShardedTensor):
        return True
    offset = item.index.offset
    return (item.index.fqn, None if offset is None else tuple(offset)) not in coordinator.items


class _Late:
    """Tensors of a save that may still be copied, and must not change until then."""

    def __init__(self, planned: _Planned, view: View, versions: list[int], residence: Residence) -> None:
        self._tensors = view.locals
        # Of all tensors of the state: choosing among them takes as long as reading all.
        self._versions = versions or list(map(version_of, self._tensors))
        self._planned = planned
        self._residence = residence
        self._lock = threading.Lock()
        self.error: StagingError | None = None
        self.is_over = False

    def guard(self) -> None:
        """Check the tensors, and let the caller's streams wait for the copies; they may change after that."""
        with self._lock:
            if self.is_over:
                return
            self._compare(0, len(self._tensors))
            if not self._residence.has_arrived():
                self._residence.order_after()
            self._end()

    def check(self) -> None:
        """Before the save is published: check the tensors, if no guard has, a few at a time."""
        pause = threading.Event()
        for first in range(0, len(self._versions), _VERSIONS_AT_ONCE):
            with self._lock:
                if self.is_over:
                    break
                self._compare(first, first + _VERSIONS_AT_ONCE)
            pause.wait(_POLL_S)
        with self._lock:
            self._end()
        if self.error is not None:
            raise self.error

    def fail(self, what: str) -> None:
        """Note that the tensors change before they may."""
        with self._lock:
            if not self.is_over:
                self.error = StagingError(
                    f"{what} after save() and outside guard(optimizer), while parameters or optimizer states "
                    f"may still be copied: wrap optimizer.step() in guard(optimizer)"
                )
                self._end()

    def end(self) -> None:
        """Let the tensors go."""
        with self._lock:
            self._end()

    def _compare(self, first: int, end: int) -> None:
        versions = list(map(version_of, self._tensors[first:end]))
        if versions == self._versions[first:end]:
            return
        late = self._planned.late_leaves
        for leaf, found in enumerate(versions, first):
            if found != self._versions[leaf] and leaf in late:
                self.error = StagingError(
                    f"{self._planned.fqn(late[leaf])!r} was changed after save() and before guard() let it: "
                    f"wrap whatever changes parameters or optimizer states in guard(optimizer)"
                )
                return

    def _end(self) -> None:
        self.is_over = True
        self._tensors = []


class Checkpointer:
    """Saves and restores the state of a training loop in numbered steps under one directory.

    Args:
        root: Directory of all steps, or a URL that fsspec resolves to a local one.
        config: Settings; default: `CheckpointConfig()`.
        process_group: Whose ranks save together; default: all, if `torch.distributed` is initialised. They
            all make one, and call `save` for the same steps; nothing in a save waits for another rank's call.
        storage_options: Passed to fsspec as they are.
        **settings: Fields of `CheckpointConfig`, which override `config`.

    Raises:
        ConfigError: A setting, the URL or a storage option cannot be honoured, or this rank is not in
            `process_group`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        *,
        process_group: ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._config = CheckpointConfig.build(config, settings)
        self._group = process_group
        self._place = _find_place(process_group)
        self._num_saves: Counter[int] = Counter()
        self._coordinator: _Coordinator | None = None
        self._seen_plan = ""
        self._storage_options = dict(storage_options or {})
        self._storage = self._open(root)
        # Absolute, wherever the process goes meanwhile.
        self._root = self._storage.url
        logging.getLogger("distckpt").setLevel(self._config.log_level.upper())
        self._engine = Engine.open(self._config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="distckpt-write")
        self._planned: _Planned | None = None
        self._plan_lock = threading.Lock()
        self._retired: list[_Planned] = []
        """Plans whose last saves may still be under way."""
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._guards = 0
        """How many `guard`s are entered."""
        self._owner_pid = os.getpid()
        self._late: list[_Late] = []
        self._failed: set[str] = set()
        """Ids of this rank's saves that have failed."""
        self._settled: set[int] = set()
        """Steps in whose directories nothing is to be cleared away."""
        self._handles: list[SaveHandle] = []
        self._closed = self._ended = False
        self._warned_over_budget = False

    def __enter__(self) -> Self:
        """Return the checkpointer; it is closed on leaving."""
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        """Close the checkpointer; see `close`.

        Raises:
            CheckpointError: As `close`, unless something else is raised already.
        """
        try:
            self.close()
        except CheckpointError:
            if exc_type is None:
                raise

    def prewarm(self, state: Mapping[str, Any]) -> Future[int]:
        """Plan `state`, and begin to reserve and pin host memory for it.

        Args:
            state: What will be saved, or a state with the same tensors.

        Returns:
            A future of the bytes that are reserved; it ends with a `StagingError` if they cannot be had.

        Raises:
            CheckpointError: The checkpointer is closed, or the state cannot be saved.
        """
        self._check_open()
        with torch.inference_mode(mode=False), torch.no_grad():
            planned = self._plan(state, View(state))
            planned.release_tensors()
            planned.foresee_metadata(self._path(0), uuid.uuid4().hex)
            tensors = local_tensors(state)
            devices = {tensor.device for tensor in tensors if tensor.is_cuda}
            return self._engine.prewarm([tensor.nbytes for tensor in tensors], devices)

    def save(self, step: int, state: Mapping[str, Any]) -> SaveHandle:
        """Save `state` as step `step`.

        With `async_save` this returns when the state may change again: CUDA tensors by work on the caller's
        current streams, those of guarded optimizers within `guard`. The rest happens in the background. A
        state that the budget for host memory does not hold is written before this returns.

        Args:
            step: Number of the step, from 0; a step that was saved before is replaced.
            state: Nested containers of tensors and Python objects.

        Returns:
            A handle of the save.

        Raises:
            CheckpointError: The checkpointer is closed, the state cannot be staged, or, without `async_save`,
                the save failed.
            ConfigError: `step` is negative.
        """
        started = time.perf_counter()
        self._check_open()
        if step < 0:
            raise ConfigError(f"step: expected a number from 0, got {step}")
        if self._config.async_save:
            warn_async_workers(self._config.dist_ckpt_workers, stacklevel=2)
            watch_exit()
        handle = SaveHandle(step, self._path(step))
        self._handles = [*(one for one in self._handles if not one.committed), handle]
        # The same on all ranks that save this step, whatever steps one of them has left out.
        self._num_saves[step] += 1
        save_id = uuid.uuid5(uuid.UUID(self._place.run_id), f"{step}.{self._num_saves[step]}").hex
        try:
            # Not inference tensors, whoever calls: what is kept for the next save could not be used by it.
            with torch.inference_mode(mode=False), torch.no_grad():
                self._begin(handle, state, save_id, started)
        except BaseException as error:
            self._handles.remove(handle)
            self._tell_others(handle, save_id, error)
            self._report(handle, error)
            raise
        handle.blocked_s = time.perf_counter() - started
        observe.emit("state.staged", seconds=handle.blocked_s)
        if not self._config.async_save:
            handle.result()
            handle.blocked_s = time.perf_counter() - started
        return handle

    def _begin(self, handle: SaveHandle, state: Mapping[str, Any], save_id: str, started: float) -> None:
        """Stage `state`, and have it written; or write it, if the budget does not hold it."""
        view = View(state)
        versions: list[int] = []
        planned = self._plan(state, view, versions)
        if planned.items and not planned.fits:
            self._write_through(handle, planned, view, save_id)
            return
        residence = late = None
        if planned.items:
            residence = planned.acquire(self._timeout_s)
            handle.prepared_s = time.perf_counter() - started
        try:
            if residence is not None:
                planned.stage(residence, view)
                handle._residence = residence  # noqa: SLF001 - one room
                planned.foresee_metadata(handle.path, save_id)
                if planned.late:
                    late = _Late(planned, view, versions, residence)
            self._thread.submit(self._write, handle, planned, residence, late, save_id)
        except BaseException:
            handle._residence = None  # noqa: SLF001 - one room
            if residence is not None:
                _await_arrival(residence)
                planned.give_back(residence)
            raise
        if late is not None:
            self._late = [*(one for one in self._late if not one.is_over), late]

    @contextlib.contextmanager
    def guard(self, *optimizers: Optimizer) -> Iterator[None]:
        """Surround `optimizer.step()`: parameters and states of `optimizers` change in here alone.

        While saves are under way, the current streams wait on the device for what is still being copied.
        Tensors that belong to an optimizer that was guarded before are copied after `save` returned.

        Args:
            *optimizers: The optimizers that step in here.
        """
        for optimizer in optimizers:
            if optimizer not in self._optimizers:
                self._optimizers.add(optimizer)
                # Fused steps do not count up the versions of what they change.
                optimizer.register_step_pre_hook(_refusing(weakref.ref(self)))
                self._forget_plan()
        self._let_change()
        self._guards += 1
        try:
            yield
        finally:
            self._guards -= 1

    def refuse_step(self) -> None:
        """An optimizer steps outside `guard`: fail the saves whose tensors may still be copied."""
        if not self._guards:
            for late in self._late:
                late.fail("an optimizer stepped")

    def _let_change(self) -> None:
        """Let tensors change that are copied late: check them, and order further work after the copies."""
        late, self._late = self._late, []
        for each in late:
            each.guard()

    def restore(self, state: dict[str, Any], step: int | str | None = "latest") -> int | None:
        """Load a checkpoint into `state`.

        Args:
            state: Nested containers; tensors are filled in place, objects are replaced.
            step: Number of the step, or "latest".

        Returns:
            The step that was loaded; None if "latest" was asked for and there is none.

        Raises:
            CheckpointError: There is no such step, or it cannot be read.
        """
        self._let_change()
        found, is_there, failure = self._find_for_all(step)
        if failure is not None:
            raise failure
        if found is None:
            return None
        path = self._path(found)
        if not is_there:
            raise CheckpointError(f"{path} holds no complete checkpoint")
        reader = StorageReader(path, self._config, storage_options=self._storage_options)
        try:
            load(state, storage_reader=reader, process_group=self._group, no_dist=self._place.world == 1)
        except CheckpointException as error:
            cause = _cause_of(error, path)
            raise cause from error
        return found

    def _find_for_all(self, step: int | str | None) -> tuple[int | None, bool, CheckpointError | None]:
        """Return what the coordinator finds: one rank may see a checkpoint that another does not see yet."""
        outcome: tuple[int | None, bool, CheckpointError | None] = (None, False, None)
        if self._place.is_coordinator:
            try:
                outcome = (*self._find(step), None)
            except CheckpointError as error:
                outcome = (None, False, error)
        return _broadcast(outcome, self._group) if self._place.world > 1 else outcome

    def _find(self, step: int | str | None) -> tuple[int | None, bool]:
        if step is None or step == "latest":
            found = self.latest()
            return found, found is not None
        if isinstance(step, bool) or not str(step).isdecimal():
            raise ConfigError(f"step: expected a number from 0, or 'latest', got {step!r}")
        return int(step), self._is_complete(int(step))

    def _is_complete(self, step: int) -> bool:
        return self._open(self._path(step)).read(METADATA, nbytes=0) is not None

    def steps(self) -> list[int]:
        """Return the steps that are complete, ascending."""
        return [step for step in self._directories() if self._is_complete(step)]

    def _directories(self) -> list[int]:
        found = []
        for name in self._storage.list():
            text = name.removeprefix(_PREFIX).removesuffix("/")
            if text.isdecimal() and name == f"{_PREFIX}{int(text):0{_STEP_DIGITS}}/":
                found.append(int(text))
        return sorted(found)

    def latest(self) -> int | None:
        """Return the last step that is complete, or None."""
        return max(self.steps(), default=None)

    def wait(self) -> None:
        """Wait for all saves that are under way.

        Raises:
            CheckpointError: One failed; the first of them is raised.
        """
        errors = [handle._future.exception() for handle in self._handles]  # noqa: SLF001 - one room
        self._handles = []
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """Wait for saves that are under way, end workers and give memory back; idempotent.

        Raises:
            CheckpointError: A save failed whose result nobody has asked for; all is closed nevertheless.
        """
        if self._ended or os.getpid() != self._owner_pid:
            return
        self._closed = True
        self._thread.shutdown(wait=True)
        self._late.clear()
        self._forget_plan()
        self._engine.close()
        self._ended = True
        for handle in self._handles:
            error = None if handle._is_asked else handle._future.exception(0)  # noqa: SLF001 - one room
            if error is not None:
                raise error

    def _open(self, path: str | os.PathLike[str]) -> Storage:
        return open_storage(path, self._storage_options, timeout_s=self._timeout_s)

    @property
    def _timeout_s(self) -> float:
        return self._config.distributed_timeout_minutes * 60

    def _check_open(self) -> None:
        if os.getpid() != self._owner_pid:
            raise CheckpointError("this Checkpointer belongs to another process: make one after the fork")
        if self._closed:
            raise CheckpointError("the Checkpointer is closed")

    def _path(self, step: int) -> str:
        return f"{self._root.rstrip('/')}/{_PREFIX}{step:0{_STEP_DIGITS}}"

    def _plan(self, state: Mapping[str, Any], view: View, versions: list[int] | None = None) -> _Planned:
        """Return the plan of `state`: the last one if it is still true, or a new one.

        Args:
            state: The state.
            view: The same, walked.
            versions: Takes those of the tensors, if the last plan is true and they are of interest.
        """
        for retired in self._retired:
            retired.drop_idle()
        self._retired = [retired for retired in self._retired if retired.is_in_use]
        planned = self._planned
        if planned is not None:
            planned.drop_idle()
        if (
            planned is not None
            and planned.is_reusable
            and not planned.is_spent
            and planned.signature is not None
            and view.is_simple
            and planned.relies_on == self._coordinator
            and planned.signature.matches(view, versions if planned.late else None)
            and planned.refresh(state)
        ):
            return planned
        if planned is not None and not (planned.signature and planned.signature.is_like(view)):
            # What the coordinator saves will have changed, too.
            self._coordinator = None
            self._seen_plan = ""
        self._forget_plan()
        if versions:
            versions.clear()
        addresses = {address for optimizer in self._optimizers for address in _addresses_of(optimizer)}
        self._planned = _Planned(
            self._engine,
            self._storage,
            state,
            View(state, with_paths=True),
            addresses,
            self._config.ckpt_format,
            self._place,
            self._coordinator,
        )
        return self._planned

    def _forget_plan(self) -> None:
        with self._plan_lock:
            planned, self._planned = self._planned, None
        if planned is not None:
            planned.retire()
            self._retired.append(planned)

    def _write(
        self,
        handle: SaveHandle,
        planned: _Planned,
        residence: Residence | None,
        late: _Late | None,
        save_id: str,
    ) -> None:
        """Write and publish what was staged; in the background."""
        storage: Storage | None = None
        claimed: Claim | None = None
        try:
            storage = self._open(handle.path)
            claimed = self._claim(storage, save_id)
            if residence is None:
                # Other ranks save all that this one has.
                written = Written(lay_out_image([], 1, 1), (), [])
            else:
                written = self._engine.write_staged(storage, save_id, self._place.rank, residence)
            # Before the residence is let go: there is no instant at which it is not staged.
            handle._has_arrived = True  # noqa: SLF001 - one room
            if late is not None:
                late.check()
            self._publish(handle, planned, storage, written, claimed)
        except BaseException as failure:  # noqa: BLE001 - the top frame of a thread: the handle raises it
            error = failure
            if storage is not None and claimed is not None:
                error = claimed.explain(storage, failure)
            handle._residence = None  # noqa: SLF001 - one room
            if residence is not None:
                _await_arrival(residence)
                planned.give_back(residence)
            if late is not None:
                late.end()
            self._tell_others(handle, save_id, error)
            self._report(handle, error)
            return
        handle._residence = None  # noqa: SLF001 - one room
        if residence is not None:
            planned.give_back(residence)
        self._complete(handle, save_id)

    def _write_through(self, handle: SaveHandle, planned: _Planned, view: View, save_id: str) -> None:
        """Write and publish a state that the budget does not hold, on the caller's thread.

        Raises:
            CheckpointError: It failed.
        """
        if not self._warned_over_budget:
            self._warned_over_budget = True
            _LOG.warning(
                "the state does not fit the host memory budget of %.2f GiB (--ckpt-host-memory): "
                "save() takes as long as writing it",
                self._engine.arena.budget_bytes / _GIB,
            )
        # Saves before it are written first: they hold the memory.
        for earlier in self._handles:
            if earlier is not handle:
                earlier._future.exception()  # noqa: SLF001 - one room
        storage = self._open(handle.path)
        claimed = self._claim(storage, save_id)
        try:
            written = planned.write_through(storage, save_id, view)
            self._publish(handle, planned, storage, written, claimed)
        except CheckpointError as failure:
            error = claimed.explain(storage, failure)
            if error is failure:
                raise
            raise error from failure
        self._complete(handle, save_id)

    def _claim(self, storage: Storage, save_id: str) -> Claim:
        """Claim the directory, or wait until the coordinator has: before that, no rank writes there."""
        storage.prepare()
        if self._place.is_coordinator:
            return claim(storage, save_id)
        claimed = Claim(save_id, None, ())
        for _ in self._polls(storage, save_id, lambda: [0]):
            if claimed.was_made(storage):
                break
        return claimed

    def _publish(
        self,
        handle: SaveHandle,
        planned: _Planned,
        storage: Storage,
        written: Written,
        claimed: Claim,
    ) -> None:
        save_id = claimed.save_id
        ref = write_manifest(storage, planned.manifest(save_id, written))
        if not self._place.is_coordinator:
            self._await_commit(storage, claimed)
            self._learn(planned, storage, save_id)
            return
        manifests = self._await_manifests(storage, save_id, claimed) if self._place.world > 1 else []
        data = planned.metadata(manifests, written.names, handle.path, save_id)
        refs = [manifest.ref for manifest in manifests] or [ref]
        publish(storage, data, claimed, refs, self._details())
        self._reclaim(handle.step, save_id)

    def _reclaim(self, committed: int, save_id: str) -> None:
        """Remove what is left of earlier steps that were never completed, be it by a process before this."""
        unfinished = [handle for handle in self._handles if not handle._future.done()]  # noqa: SLF001
        under_way = {handle.step for handle in unfinished}
        self._settled.add(committed)
        idle_s = _IDLE_TIMEOUTS * self._timeout_s
        try:
            steps = self._directories()
        except CheckpointError as error:
            # What was committed is, whatever becomes of this.
            _LOG.warning("what is left of earlier steps stays: %s", error)
            return
        for step in steps:
            if step >= committed or step in under_way or step in self._settled:
                continue
            try:
                if self._is_complete(step):
                    self._settled.add(step)
                else:
                    storage = self._open(self._path(step))
                    reclaim(storage, save_id, failed=self._failed, idle_s=idle_s)
            except CheckpointError as error:
                _LOG.warning("what is left of step %d stays: %s", step, error)

    def _await_manifests(self, storage: Storage, save_id: str, claimed: Claim) -> list[PartialManifest]:
        """Return the manifests of all ranks, once they are there.

        Raises:
            MissingRanks: Some have not come within the deadline.
            CommitError: A rank gave the save up, or another save has claimed the directory.
        """
        found: dict[int, PartialManifest] = {}
        for _ in self._polls(storage, save_id, lambda: sorted(set(range(self._place.world)) - found.keys())):
            for rank in range(self._place.world):
                manifest = None if rank in found else read_partial(storage, save_id, rank)
                if manifest is not None:
                    found[rank] = manifest
            if len(found) == self._place.world:
                break
            claimed.check(storage)
        return [found[rank] for rank in range(self._place.world)]

    def _await_commit(self, storage: Storage, claimed: Claim) -> None:
        """Wait until the coordinator has published the save; raises as `_await_manifests`."""
        for _ in self._polls(storage, claimed.save_id, lambda: [0]):
            if committed_by(storage) == claimed.save_id:
                break
            # Overtaken, or replaced as soon as it was committed.
            claimed.check(storage)

    def _polls(self, storage: Storage, save_id: str, missing: Callable[[], list[int]]) -> Iterator[None]:
        """Yield less and less often, until the deadline or until another rank says that it has failed.

        Raises:
            CommitError: Another rank has failed.
            MissingRanks: The deadline has passed.
        """
        started = time.monotonic()
        pause, pause_s = threading.Event(), _FIRST_POLL_S
        # The coordinator sees who is missing: the others wait for its word a little longer.
        timeout_s = self._timeout_s if self._place.is_coordinator else 1.5 * self._timeout_s
        while True:
            yield
            waited_s = time.monotonic() - started
            for rank, message in failures(storage, save_id).items():
                raise CommitError(f"rank {rank} gave the save up: {message}", rank=rank)
            if waited_s > timeout_s:
                ranks = missing()
                raise MissingRanks(
                    f"waited {waited_s:.0f} s (--distributed-timeout-minutes) for rank"
                    f"{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} in save {save_id} of "
                    f"{storage.url}",
                    ranks=tuple(ranks),
                    waited_s=waited_s,
                )
            pause.wait(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)

    def _learn(self, planned: _Planned, storage: Storage, save_id: str) -> None:
        """See what the coordinator has saved that this rank has too, and leave it to it from now on."""
        try:
            manifest = read_partial(storage, save_id, 0)
        except CheckpointError:
            # The checkpoint is committed; this rank goes on writing what others have too.
            return
        if manifest is None or manifest.head["plan"] == self._seen_plan:
            return
        table = json.loads(manifest.items)
        offsets = (None if offset is None else tuple(offset) for offset in table["chunks"])
        coordinator = _Coordinator(manifest.head["plan"], frozenset(zip(table["fqns"], offsets, strict=True)))
        shared = planned.shares(coordinator)
        with self._plan_lock:
            # A save of a state that has changed since is already planned without it.
            if planned is self._planned:
                self._seen_plan = coordinator.plan
                self._coordinator = coordinator if shared else self._coordinator

    def _tell_others(self, handle: SaveHandle, save_id: str, error: BaseException) -> None:
        """Leave word that this rank gave up the save: the others need not wait for it."""
        self._failed.add(save_id)
        if self._place.world > 1:
            # What the coordinator saves may be what has changed.
            self._coordinator, self._seen_plan = None, ""
            with contextlib.suppress(CheckpointError):
                storage = self._open(handle.path)
                storage.prepare()
                report_failure(storage, save_id, self._place.rank, f"{type(error).__name__}: {error}")

    def _details(self) -> dict[str, Any]:
        return {"world": self._place.world, "format": self._config.ckpt_format, "time": time.time()}

    def _complete(self, handle: SaveHandle, save_id: str) -> None:
        observe.emit("committed", save_id=save_id, path=handle.path)
        _LOG.info("committed %s", handle.path)
        handle._future.set_result(handle.path)  # noqa: SLF001 - one room

    def _report(self, handle: SaveHandle, error: BaseException) -> None:
        """Log a failure at once: nobody may ever ask for the result."""
        # As text: a handler that keeps records would keep the traceback, and so the state.
        if isinstance(error, CheckpointError) and error.rank is None:
            error.rank = self._place.rank
        _LOG.error("the save of step %d failed: %s", handle.step, f"{type(error).__name__}: {error}")
        note_failure()
        clear_frames(error)
        if not isinstance(error, CheckpointError):
            told = CheckpointError(f"{type(error).__name__}: {error}")
            told.__cause__ = error
            error = told
        handle._future.set_exception(error)  # noqa: SLF001 - one room


def _cause_of(error: CheckpointException, path: str) -> CheckpointError:
    """Return our own error among those that torch has gathered, or one that says what it gathered."""
    failures_by_rank = {rank: failure[0] for rank, failure in error.failures.items()}
    for failure in failures_by_rank.values():
        if isinstance(failure, CheckpointError):
            return failure
    rank, failure = next(iter(failures_by_rank.items()))
    return CheckpointError(f"{path} cannot be loaded into the state: {failure} (rank {rank})", rank=rank)


def _await_arrival(residence: Residence) -> None:
    """Wait, not for long, until nothing is copied to `residence` any more, and its tensors are let go."""
    deadline, pause = time.monotonic() + _ARRIVAL_S, threading.Event()
    while not residence.has_arrived() and time.monotonic() < deadline:
        pause.wait(_POLL_S)


def _refusing(reference: weakref.ref[Checkpointer]) -> Callable[..., None]:
    """Return a hook for steps of an optimizer that a guard has seen."""

    def before_step(*_: Any) -> None:
        checkpointer = reference()
        if checkpointer is not None:
            checkpointer.refuse_step()

    return before_step


def _find_place(group: ProcessGroup | None) -> Place:
    """Return this process's place among the ranks of `group`, and an id that they agree upon.

    Raises:
        ConfigError: It is not among them.
    """
    run_id = uuid.uuid4().hex
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return Place(0, 1, run_id)
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    if rank < 0:
        raise ConfigError("this rank is not in the process group of the Checkpointer")
    return Place(rank, world, _broadcast(run_id, group) if world > 1 else run_id)


def _broadcast(value: Any, group: ProcessGroup | None) -> Any:
    """Return rank 0's value; on the caller's thread, where all ranks of `group` come by."""
    values = [value]
    torch.distributed.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def _addresses_of(optimizer: Optimizer) -> Iterator[int]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield from _address(parameter)
    for entry in optimizer.state.values():
        for value in entry.values():
            if isinstance(value, torch.Tensor):
                yield from _address(value)


def _address(tensor: torch.Tensor) -> Iterator[int]:
    local = getattr(tensor, "_local_tensor", tensor)
    address = local.data_ptr()
    if address:
        yield address
