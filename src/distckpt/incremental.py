"""Write of a state only what is not in the checkpoint before, and give the new one the other files of that.

    staged image -> a digest of each item -> the same as in the last committed checkpoint?
                    yes: its file is linked into the new directory, or copied there by the store
                    no:  it is written, into files of its own

The digests are of the bytes that were staged, all of them: 128 bits, XXH3. What PyTorch counts up when it
changes a tensor is not asked: fused optimizers and whatever writes through `data` change tensors and do not
count (docs/adr/0027).

Invariants:
    * A checkpoint holds all its files; that an earlier one is removed does not matter to it.
    * A file is never taken for another: names are unique for each save, and links have those of the new one.
    * A file of which less than half is still of use is not carried on: its items are written again.
    * After a doubt no file of before is carried on, whatever becomes of the saves after it.

Threads: the one that writes; any for `Increments.doubt`. For each item, it holds the interpreter for about a
microsecond.
"""

from __future__ import annotations

import bisect
import functools
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128

from distckpt import observe
from distckpt.errors import CheckpointError, StagingError
from distckpt.formats import Frame
from distckpt.manifest import ItemTable
from distckpt.staging import Item
from distckpt.storage import can_link

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distckpt.engine import Engine, Written
    from distckpt.residence import Residence
    from distckpt.storage import Storage

__all__ = ["Increment", "Increments", "is_possible"]

_LOG = logging.getLogger(__name__)
_LEAST_USE = 0.5
"""Of the bytes of a file, for it to be carried on."""
_FIRST_LINK = 100_000
"""Number of a rank's first file that it has not written itself: above those of any that it writes."""
_POLL_S = 0.002

Key = tuple[str, tuple[int, ...] | None]
"""Name of an item's entry and offsets of its chunk."""


@dataclass(frozen=True)
class _File:
    """A file of a committed checkpoint.

    Attributes:
        nbytes: Its size.
        checksums: Of all of `extents`, as a manifest has them.
        extents: Offset and bytes of all that was ever an item in it.
    """

    nbytes: int
    checksums: bytes
    extents: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class _Place:
    """Where an item of a committed checkpoint lies.

    Attributes:
        file: Name of the file.
        offset: From its start.
        nbytes: Bytes, framing included.
        digest: Of these.
    """

    file: str
    offset: int
    nbytes: int
    digest: bytes


@dataclass(frozen=True)
class Increment:
    """What one rank has written and linked in one save.

    Attributes:
        names: Names of the files, those that were written first.
        files: Size of each.
        checksums: For each file, as a manifest has them.
        table: Where the items lie.
        unused: File, offset and bytes of what was an item of a file once.
        written_bytes: Bytes of the files that were written.
    """

    names: tuple[str, ...]
    files: dict[str, int]
    checksums: list[bytes]
    table: ItemTable
    unused: list[tuple[int, int, int]]
    written_bytes: int
    places: dict[Key, _Place] = field(repr=False, default_factory=dict)
    known: dict[str, _File] = field(repr=False, default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What is to be said of the items, in their order.

    Attributes:
        keys: Their names and offsets.
        entries: See `ItemTable.entries`.
    """

    keys: Sequence[Key]
    entries: list[Any] | None


def is_possible(storage: Storage) -> bool:
    """Say whether files of one checkpoint can be those of another on `storage`."""
    return can_link(storage)


class Increments:
    """What is known of the last committed checkpoint; one for each rank.

    Args:
        open_step: Opens the directory of a step.
    """

    def __init__(self, open_step: Callable[[int], Storage]) -> None:
        self._open_step = open_step
        self._step: int | None = None
        self._places: dict[Key, _Place] = {}
        self._files: dict[str, _File] = {}
        self._num_doubts = self._num_heard = self._num_settled = 0
        """Doubts: ever, until this save began, and until the last began that was committed."""

    def doubt(self) -> None:
        """Have saves that begin after this write everything, until one is committed; of any thread."""
        self._num_doubts += 1

    def begin(self) -> bool:
        """Note that a save begins; returns whether it writes everything because of a doubt."""
        self._num_heard = self._num_doubts
        has_doubts = self._num_heard != self._num_settled
        if has_doubts:
            self._forget()
        return has_doubts

    def commit(self, step: int, increment: Increment | None) -> None:
        """Have the next save build on one that was committed; or, where it was no increment, on nothing."""
        self._num_settled = self._num_heard
        if increment is None:
            self._forget()
        else:
            self._step, self._places, self._files = step, increment.places, increment.known

    def _forget(self) -> None:
        self._step, self._places, self._files = None, {}, {}

    def write(
        self,
        engine: Engine,
        storage: Storage,
        save_id: str,
        rank: int,
        residence: Residence,
        plan: Plan,
        tell: Callable[[int, int], None],
    ) -> Increment:
        """Write what has changed of what was staged, and link the rest; raises as `Engine.write`.

        Args:
            engine: Writes.
            storage: Where to.
            save_id: See `Engine.write`.
            rank: See `Engine.write`.
            residence: Holds all items.
            plan: Of them.
            tell: See `Engine.write`.
        """
        memory = _Memory(engine, residence)
        memory.await_arrival(engine.timeout_s)
        with observe.span("items.compared", save_id=save_id, rank=rank):
            digests = [memory.digest(item) for item in range(len(plan.keys))]
            same = self._same(plan.keys, memory.sizes, digests)
        linked: dict[str, str] = {}
        if same:
            image_name = functools.partial(_link_name, engine, save_id, rank)
            linked = self._link(storage, {place.file for place in same.values()}, image_name)
            same = same if linked else {}
        if not same:
            written: Written | None = engine.write_staged(storage, save_id, rank, residence, tell)
            changed = list(range(len(plan.keys)))
        else:
            changed = [item for item in range(len(plan.keys)) if item not in same]
            items = [memory.item(item) for item in changed]
            written = engine.write(storage, save_id, rank, items, tell)
        return self._describe(plan, memory.sizes, digests, same, linked, written, changed)

    def _same(self, keys: Sequence[Key], sizes: Sequence[int], digests: Sequence[bytes]) -> dict[int, _Place]:
        """Return, by number, where items lie that are as they were, in files that are worth keeping."""
        same: dict[int, _Place] = {}
        used: dict[str, int] = {}
        for item, (key, nbytes, digest) in enumerate(zip(keys, sizes, digests, strict=True)):
            place = self._places.get(key)
            if place is not None and (place.nbytes, place.digest) == (nbytes, digest):
                same[item] = place
                used[place.file] = used.get(place.file, 0) + nbytes
        kept = {name for name, nbytes in used.items() if nbytes >= _LEAST_USE * self._files[name].nbytes}
        return {item: place for item, place in same.items() if place.file in kept}

    def _link(self, storage: Storage, names: set[str], name_of: Callable[[int], str]) -> dict[str, str]:
        """Have `storage` share files of the last checkpoint, under names of this save.

        Returns:
            The new names by the old ones; none if that cannot be: all is written then.
        """
        assert self._step is not None, "nothing is as it was without a checkpoint"
        source = self._open_step(self._step)
        linked = {name: name_of(number) for number, name in enumerate(sorted(names))}
        try:
            storage.prepare()
            for name, own in linked.items():
                storage.link(own, source, name, self._files[name].nbytes)  # type: ignore[attr-defined]
        except CheckpointError as error:
            _LOG.warning(
                "%s shares nothing with %s, and all of it is written: %s", storage.url, source.url, error
            )
            return {}
        return linked

    def _describe(
        self,
        plan: Plan,
        sizes: Sequence[int],
        digests: Sequence[bytes],
        same: dict[int, _Place],
        linked: dict[str, str],
        written: Written | None,
        changed: Sequence[int],
    ) -> Increment:
        files: dict[str, _File] = {}
        item_files, offsets = [0] * len(sizes), [0] * len(sizes)
        if written is not None:
            own_files, own_offsets = written.image.places()
            extents: list[set[tuple[int, int]]] = [set() for _ in written.names]
            for item, file, offset in zip(changed, own_files, own_offsets, strict=True):
                item_files[item], offsets[item] = file, offset
                extents[file].add((offset, sizes[item]))
            packed = written.checksums or [b""] * len(written.names)
            for number, (name, nbytes) in enumerate(written.files.items()):
                files[name] = _File(nbytes, packed[number], frozenset(extents[number]))
        written_bytes = sum(file.nbytes for file in files.values())
        for name, own in linked.items():
            files[own] = self._files[name]
        numbers = {name: number for number, name in enumerate(files)}
        for item, place in same.items():
            item_files[item], offsets[item] = numbers[linked[place.file]], place.offset
        names = tuple(files)
        used = set(zip(item_files, offsets, strict=True))
        unused = [
            (number, offset, nbytes)
            for number, file in enumerate(files.values())
            for offset, nbytes in sorted(file.extents)
            if (number, offset) not in used
        ]
        table = ItemTable(
            [fqn for fqn, _ in plan.keys],
            [offset for _, offset in plan.keys],
            item_files,
            offsets,
            list(sizes),
            plan.entries,
        )
        places = {
            key: _Place(names[item_files[item]], offsets[item], sizes[item], digests[item])
            for item, key in enumerate(plan.keys)
        }
        return Increment(
            names,
            {name: file.nbytes for name, file in files.items()},
            [file.checksums for file in files.values()],
            table,
            unused,
            written_bytes,
            places,
            files,
        )


def _link_name(engine: Engine, save_id: str, rank: int, number: int) -> str:
    number += _FIRST_LINK
    return engine.format.image_name(rank, number, number + 1, save_id)


class _Memory:
    """Where the bytes of a residence's items lie.

    Args:
        engine: Has the memory.
        residence: Holds the items.
    """

    def __init__(self, engine: Engine, residence: Residence) -> None:
        self._slabs = engine.arena.slabs
        self._residence = residence
        self._files, self._offsets = residence.image.places()
        self.sizes = residence.image.sizes
        self._pieces: list[list[tuple[int, int, int, int]]] = [[] for _ in residence.image.files]
        assert residence.plan is not None, "it was staged"
        for part in residence.plan.parts:
            position = part.offset
            for slab, offset, nbytes in part.pieces:
                self._pieces[part.file].append((position, slab, offset, nbytes))
                position += nbytes
        for pieces in self._pieces:
            pieces.sort()

    def await_arrival(self, timeout_s: float) -> None:
        """Wait until all was copied.

        Raises:
            StagingError: A copy failed, or has not ended in time.
        """
        deadline, pause = time.monotonic() + timeout_s, threading.Event()
        while not self._residence.has_arrived():
            self._residence.check()
            if time.monotonic() > deadline:
                raise StagingError(f"the copy off the device has not ended after {timeout_s:.0f} s")
            pause.wait(_POLL_S)

    def views(self, file: int, low: int, high: int) -> Iterator[memoryview]:
        """Yield bytes [low, high) of a file."""
        pieces = self._pieces[file]
        at = bisect.bisect_right(pieces, (low, float("inf"))) - 1
        while low < high:
            position, slab, offset, nbytes = pieces[at]
            first, last = low - position, min(high - position, nbytes)
            yield memoryview(self._slabs[slab].mapping)[offset + first : offset + last]
            low, at = position + last, at + 1

    def digest(self, item: int) -> bytes:
        """Return the digest of all bytes of an item."""
        low = self._offsets[item]
        hashed = xxh3_128()
        for view in self.views(self._files[item], low, low + self.sizes[item]):
            hashed.update(view)
            view.release()
        return hashed.digest()

    def item(self, item: int) -> Item:
        """Return an item that is copied from here when there is room for it."""
        nbytes = self.sizes[item]
        source = _Staged(functools.partial(self.views, self._files[item]), self._offsets[item])
        return Item(Frame(b"", b""), nbytes=nbytes, source=source)


class _Staged:
    """An item that was staged, as `staging.Source`."""

    def __init__(self, views: Callable[[int, int], Iterator[memoryview]], start: int) -> None:
        self._views = views
        self._start = start

    def read_into(self, low: int, high: int, target: memoryview) -> None:
        """See `Source.read_into`."""
        at = 0
        for view in self._views(self._start + low, self._start + high):
            target[at : at + view.nbytes] = view
            at += view.nbytes
            view.release()
