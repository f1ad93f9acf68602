"""A state that was planned: its items, files and metadata, and the memory that holds it, for many saves.

Invariants:
    * Nothing here is used for a state that was not compared with it in full, values of objects included.
    * Between saves no tensor of the state is held.

Threads: one thread plans and stages; another may write, give memory back and describe what was written.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.tensor import DTensor

from distckpt.assembly import assemble, entry_of
from distckpt.collector import collector_paused
from distckpt.device import has_digest
from distckpt.engine import Engine, Written
from distckpt.errors import CommitError, StagingError
from distckpt.formats import Frame
from distckpt.image import lay_out_image
from distckpt.incremental import Increment
from distckpt.incremental import Plan as IncrementPlan
from distckpt.items import arrays_of, cut, resolve_items
from distckpt.manifest import ItemTable, Manifest, plan_digest
from distckpt.metadata import DCP_VERSION, merge_arrays, pickle_metadata
from distckpt.ownership import Common, Rules, divide
from distckpt.planner import SavePlanner
from distckpt.residence import Residence
from distckpt.signature import Signature, View
from distckpt.staging import is_raw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from distckpt.image import Image
    from distckpt.manifest import PartialManifest
    from distckpt.storage import Storage

_MOST_RESIDENCES = 4
"""Saves of one state in flight, as far as the budget goes: one is written, others are staged."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_EXACT = frozenset({bool, int, str, bytes, type(None)})
"""Of which equal values are the same: a float may be a negative zero, or not equal to itself."""
_SURE = frozenset({bool, float, complex, str, type(None)})
_MOST_BITS = 2039
"""Of whole numbers: torch.load(weights_only=True) takes no larger ones."""


class PlannedState:
    """What is known of a state that was planned: items, files, metadata, and memory that holds it.

    Args:
        engine: Plans and holds it.
        storage: Of the kind that it will be saved to.
        state: The state.
        view: The state, walked with paths.
        late_addresses: Where the tensors lie that a guard protects; for each, whether changes may count up no
            version there.
        file_format: For the manifest.
        rules: By what this rank works out what of it it writes.
        is_incremental: Whether what is written of it is not the same in every save.
    """

    def __init__(
        self,
        engine: Engine,
        storage: Storage,
        state: Mapping[str, Any],
        view: View,
        late_addresses: Mapping[int, bool],
        file_format: str,
        rules: Rules,
        *,
        is_incremental: bool = False,
    ) -> None:
        self._is_incremental = is_incremental
        self.is_reusable = view.is_simple and all(map(is_raw, view.locals))
        self.signature = Signature(view) if self.is_reusable else None
        self._engine = engine
        self._storage = storage
        self._format = file_format
        self.rules = rules
        planner = SavePlanner()
        planner.set_up_planner(dict(state), StorageMeta(), is_coordinator=rules.rank == rules.ranks[0])
        plan = planner.create_local_plan()
        self._metadata: Metadata | None = None
        if len(rules.ranks) == 1:
            [plan], self._metadata = planner.create_global_plan([plan])
            plan = planner.finish_plan(plan)
        pieces, self.shares = divide(plan.items, planner.state_dict.__getitem__, rules)
        pieces = cut(pieces, planner.state_dict.__getitem__, engine.format)
        self._pieces = pieces
        self._write_items = [piece.item for piece in pieces]
        self.items, _ = resolve_items(engine, planner, pieces, rules.rank)
        self._arrays = arrays_of(pieces, planner)
        self._link(planner, state, view)
        self._mappings = planner.mappings
        del planner
        asked = self._may_be_late(view, late_addresses)
        self._on_host = [
            number
            for number, (item, leaf) in enumerate(zip(self.items, self._leaf_of, strict=True))
            if leaf < 0 or (item.tensor is not None and not item.tensor.is_cuda)
        ]
        self._image: Image | None = None
        self._table: ItemTable | None = None
        self._increment_plan: IncrementPlan | None = None
        self._template: tuple[object, bytes, str, str] | None = None
        self._digest = ""
        self._residences: list[Residence] = []
        self._free: deque[Residence] = deque()
        self._dropped: deque[Residence] = deque()
        self._changed = threading.Condition()
        self._is_stale = False
        first = self._engine.reside(self._storage, self.items, *asked) if self.items else None
        self.fits = first is not None
        """Whether the budget for host memory holds the state."""
        self.late = frozenset() if first is None else first.late
        """Numbers of the items that are copied after `stage` has returned."""
        self.late_leaves = {self._leaf_of[number]: number for number in self.late}
        """For each tensor of the state that is copied late, the number of its item."""
        if first is not None:
            self._add(first)
        if first is not None or not self.items:
            self._describe(lay_out_image([], 1, 1) if first is None else first.image)

    def _may_be_late(self, view: View, addresses: Mapping[int, bool]) -> tuple[list[int], list[int]]:
        """Return which items a guard protects, and which of them have to be digested.

        Args:
            view: The state, walked.
            addresses: See `late_addresses` of the class.
        """
        # Inference tensors have no versions: what can not be checked is not copied late.
        if self.signature is None or any(map(torch.Tensor.is_inference, [*view.leaves, *view.locals])):
            return [], []
        late, digested = [], []
        at = self.signature.addresses
        for number, leaf in enumerate(self._leaf_of):
            if leaf < 0 or at[leaf] not in addresses or not view.locals[leaf].is_cuda:
                continue
            # A foreach step changes what lies in a DTensor, and counts up the version of neither.
            if type(view.leaves[leaf]) is DTensor or addresses[at[leaf]]:
                item = self.items[number]
                if not item.verbatim or item.tensor is None or not has_digest(item.tensor):
                    continue
                digested.append(number)
            late.append(number)
        return late, digested

    def _link(self, planner: SavePlanner, state: Mapping[str, Any], view: View) -> None:
        """Find out which tensor of the state each item is, and where each object comes from."""
        leaf_at = {path: leaf for leaf, path in enumerate(view.paths)}
        self._leaf_of: list[int] = []
        self._objects: dict[int, tuple[tuple[Any, ...], Any]] = {}
        self._doubtful: list[int] = []
        """Objects that are more than plain values in containers."""
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
                if not _is_plain(value):
                    self._doubtful.append(number)
            else:
                # The boxes of a `Sharded` are told apart by their offsets.
                at, offset = tuple(path), tuple(self._pieces[number].whole.index.offset or ())
                leaf = leaf_at.get(at, leaf_at.get((*at, offset), -1))
                if not self.is_reusable:
                    leaf = -1
                tensor = None if leaf < 0 else self._piece(view, leaf, number)
                if tensor is None or item.tensor is None or item.tensor.data_ptr() != tensor.data_ptr():
                    # Saved otherwise than as plain memory, or made for this save.
                    self.is_reusable = False
            self._leaf_of.append(leaf)

    def refresh(self, state: Mapping[str, Any]) -> bool:
        """Take today's values of the objects; False if they take more room, so that all is planned anew.

        Raises:
            StagingError: One cannot be pickled.
        """
        for number, (path, known) in self._objects.items():
            value: Any = state
            for key in path:
                value = value[key]
            if type(value) is type(known) and (
                value == known
                if type(value) in _EXACT
                else type(value) in _PLAIN and repr(value) == repr(known)
            ):
                continue
            data = io.BytesIO()
            try:
                torch.save(value, data)
            except Exception as error:
                raise StagingError(
                    f"{self.fqn(number)!r}: a {type(value).__name__} cannot be pickled: {error}"
                ) from error
            item = self.items[number]
            if data.getbuffer().nbytes != item.size:
                return False
            item.frame = Frame(data.getvalue(), b"")
            self._objects[number] = (path, value if type(value) in _PLAIN else None)
        return True

    def find_refused(self) -> tuple[str, str] | None:
        """Return the name of an object that torch.load(weights_only=True) refuses, and why; None if none is.

        It holds for the objects as they were planned.
        """
        for number in self._doubtful:
            try:
                torch.load(io.BytesIO(self.items[number].frame.prefix), weights_only=True)
            except Exception as error:  # noqa: BLE001 - that is what is asked
                names = re.search(r"GLOBAL (\S+)|(<class '[^']+'>)", str(error))
                why = f"names {names[1] or names[2]}" if names else "is more than tensors and plain values"
                return self.fqn(number), why
        return None

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
                tensor = self._piece(view, leaf, number)
                self.items[number].tensor = tensor.detach() if tensor.requires_grad else tensor

    def _piece(self, view: View, leaf: int, number: int) -> torch.Tensor:
        """Return what item `number` writes of a tensor of the state."""
        tensor, piece = view.locals[leaf], self._pieces[number]
        if piece.part is not None:
            return tensor[piece.part]
        rows = piece.rows
        return tensor if rows is None else tensor.narrow(0, rows[0], rows[1] - rows[0])

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
    def needs_manifests(self) -> bool:
        """Whether the metadata is made of what ranks have written: torch has not planned all of it."""
        return len(self.rules.ranks) > 1 or self._engine.format.has_grid or self._is_incremental

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
        if len(self._residences) >= _MOST_RESIDENCES:
            return None
        residence = self._engine.reside_beside(self._residences[0])
        if residence is not None:
            self._add(residence)
        return residence

    def _add(self, residence: Residence) -> None:
        self._residences.append(residence)
        self._free.append(residence)

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
            if self.needs_manifests:
                entries = [
                    entry_of(
                        piece.item, self._mappings.get(piece.item.index.fqn), plain_rows=piece.plain_rows
                    )
                    for piece in self._pieces
                ]
            self._table = ItemTable(fqns, chunks, item_files, offsets, image.sizes, entries)
            _ = self._table.json

    def fqn(self, number: int) -> str:
        """Return the name of an item."""
        return str(self._write_items[number].index.fqn)

    def write_through(
        self,
        storage: Storage,
        save_id: str,
        view: View,
        tell: Callable[[int, int], None],
        check: Callable[[], None] | None = None,
    ) -> Written:
        """Stage and write in waves the state that `view` has walked."""
        self._take_tensors(view, range(len(self.items)))
        try:
            written = self._engine.write(storage, save_id, self.rules.rank, self.items, tell, check)
        finally:
            self.release_tensors()
        assert written is not None
        return written

    def increment_plan(self) -> IncrementPlan:
        """Return what a save that writes only what has changed is to say of the items."""
        if self._increment_plan is None:
            assert self._table is not None, "what was staged is described"
            offsets = (None if at is None else tuple(at) for at in self._table.chunks)
            keys = list(zip(self._table.fqns, offsets, strict=True))
            self._increment_plan = IncrementPlan(keys, self._table.entries)
        return self._increment_plan

    def manifest(self, save_id: str, written: Written | Increment) -> Manifest:
        """Return the manifest of one save.

        Raises:
            CommitError: `written` is laid out otherwise than what the metadata describes.
        """
        if isinstance(written, Increment):
            return Manifest(
                save_id=save_id,
                rank=self.rules.rank,
                format=self._format,
                plan=self._digest,
                files=written.files,
                checksums=written.checksums,
                items=written.table,
                shares=self.shares._asdict(),
                unused=written.unused,
            )
        if self._image is None:
            self._describe(written.image)
        assert self._table is not None
        assert self._image is not None
        if written.image is not self._image and written.image.files != self._image.files:
            raise CommitError("not published: the files are laid out otherwise than the metadata says")
        return Manifest(
            save_id=save_id,
            rank=self.rules.rank,
            format=self._format,
            plan=self._digest,
            files=written.files,
            checksums=written.checksums,
            headers=written.headers,
            arrays=self._arrays,
            items=self._table,
            shares=self.shares._asdict(),
        )

    def metadata(
        self,
        manifests: list[PartialManifest],
        names: tuple[str, ...],
        path: str,
        save_id: str,
        common: Common | None = None,
    ) -> bytes:
        """Return the pickled metadata of one save.

        It is that of the last save but for the path and the id, nearly always of equal lengths: then these
        are put in their places, and nothing is pickled.

        Args:
            manifests: Of all ranks, if `needs_manifests`.
            names: Of this rank's files.
            path: Of the checkpoint.
            save_id: Of the save.
            common: What the ranks were told that they have in common.
        """
        # As pickle encodes it.
        data_path = path.encode("utf-8", "surrogatepass")
        length = len(data_path)
        files = [[name.replace(save_id, "") for name in m.ref.files] for m in manifests]
        key = (length, files, [(hashlib.sha256(m.items).digest(), m.head["shares"]) for m in manifests])
        if self._template is None or self._template[0] != key:
            # A placeholder that nothing else in the metadata holds, as the id is another.
            mark = (uuid.uuid4().hex * (1 + length // 32))[:length]
            with collector_paused():
                if manifests:
                    metadata = assemble(manifests, mark, save_id, common)
                else:
                    metadata = self._own_metadata(names, mark, save_id)
                self._template = (key, pickle_metadata(metadata, {}), mark, save_id)
        _, data, mark, earlier_id = self._template
        return data.replace(earlier_id.encode(), save_id.encode()).replace(mark.encode(), data_path)

    def documents(self, manifests: list[PartialManifest], names: tuple[str, ...]) -> dict[str, bytes]:
        """Return the small files that readers of the format want beside those of one save.

        Args:
            manifests: As for `metadata`.
            names: As for `metadata`.
        """
        if self._engine.format.found_by is None:
            return {}
        assert self._table is not None
        own = self._table
        tables = [(names, own.fqns, own.chunks, own.item_files, own.sizes)] if not manifests else []
        for manifest in manifests:
            table = json.loads(manifest.items)
            columns = (table[name] for name in ("fqns", "chunks", "item_files", "sizes"))
            tables.append((tuple(manifest.ref.files), *columns))
        arrays = [manifest.head.get("arrays", {}) for manifest in manifests]
        written_names = {name for manifest in manifests for name in manifest.ref.files}
        return self._engine.format.documents(places_of(tables), merge_arrays(arrays), written_names)

    def foresee_metadata(self, path: str) -> None:
        """Make on the caller's thread what takes long for many items and is the same for every save."""
        if (
            self._template is None
            and self._metadata is not None
            and self._residences
            and not self.needs_manifests
        ):
            save_id = uuid.uuid4().hex
            names = self._engine.names(save_id, self.rules.rank, self._residences[0].image)
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


def places_of(
    tables: Iterable[tuple[Sequence[str], list[str], list[Any], list[int], list[int]]],
) -> dict[str, list[tuple[str, int]]]:
    """Return where the chunks of each tensor lie, as `Format.documents` wants it.

    Args:
        tables: Of each rank: names of its files; name, offsets, file and bytes of each item.
    """
    places: dict[str, list[tuple[str, int]]] = {}
    for names, fqns, chunks, files, sizes in tables:
        for fqn, chunk, file, nbytes in zip(fqns, chunks, files, sizes, strict=True):
            if chunk is not None:
                places.setdefault(fqn, []).append((names[file], nbytes))
    return places


def _is_plain(value: Any) -> bool:
    """Say whether torch.load(weights_only=True) is known to take an object."""
    kind = type(value)
    if kind is int:
        return bool(value.bit_length() <= _MOST_BITS)
    if kind is bytes:
        # Without any, pickle has it made by a call.
        return len(value) > 0
    if kind is dict:
        return _is_plain([*value, *value.values()])
    if kind in (list, tuple):
        return set(map(type, value)) <= _SURE or all(map(_is_plain, value))
    return kind in _SURE


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
