"""A file system in memory that follows a log of operations and says what a crash may leave of them.

Two kinds of crash, both at any point of the log:

* The processes die: everything that was done is there.
* The power fails: what was not made durable may be there or not. The rules are those of POSIX, with no order
  between operations that are not yet durable:

  - `fsync` of a file makes its bytes and its size durable, whichever process wrote them, but not its name.
  - `fsync` of a directory makes the entries in it durable, but neither its own name nor what its files hold.
  - A write that is not durable is there, not there, or torn: its first half is there. What was never there
    reads as zeros where the file is long enough, and a file may be as long as it ever was meant to be (its
    size was durable, its bytes were not).
  - An entry that was made, replaced or removed is what it is now or anything that it was since it was
    durable. Of a rename, which is one step, the old name may stay beside the new one; that both are gone is
    not possible.
  - A directory whose entry is lost takes with it everything below, durable or not.

What is enumerated. While at most `EXHAUSTIVE` operations are pending (writes and changes of entries, of what
can still be reached): every subset of them, and besides, with every subset of the entries, each single write
torn and all lost bytes replaced by zeros. While there are more: the product of

    entries:  none kept, all kept, each single one kept, each single one lost
    bytes:    all lost, all lost but of full length, all kept; each single write kept, the others lost; each
              single write lost, and each torn, the others kept

That suffices, because what a reader, the next save or a sweep can see of a crash is made of names and of what
is behind them: before the publication nothing pending is named by the committed `.metadata`, so any mixture
there is as good as the extremes (one stale thing among whole ones, one whole among stale ones); and what the
publication needs was made durable one by one, so that if something is missing it is missing in one of the
states in which it is the only one. Equal states count once. Bytes of files that a state does not name make
no difference to it.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from faults.lab.shim.sitecustomize import Entry

EXHAUSTIVE = 8
Tree = dict[str, bytes | None]
"""Paths relative to the root, with the bytes of files; None for directories."""
State = frozenset[tuple[str, bytes | None]]
"""The items of a tree."""


class File:
    """An inode: what is durable of it, and the writes since."""

    def __init__(self, durable: bytes = b"") -> None:
        self.durable = durable
        self.pending: list[tuple[int, bytes]] = []
        self.now = durable
        self._singles: list[tuple[bytes, bytes, bytes]] = []

    def write(self, offset: int, data: bytes) -> None:
        self.pending.append((offset, data))
        self.now = _written(self.now, offset, data)
        self._singles = []

    def sync(self) -> None:
        self.durable, self.pending, self._singles = self.now, [], []

    def after(self, writes: Iterable[tuple[int, bytes]], nbytes: int = 0) -> bytes:
        """Return the bytes with these of the pending writes only, and a length of at least `nbytes`."""
        data = self.durable
        for offset, piece in writes:
            data = _written(data, offset, piece)
        return data.ljust(nbytes, b"\0")

    def singles(self) -> list[tuple[bytes, bytes, bytes]]:
        """Return the bytes with each single one of the pending writes kept, lost and torn."""
        if not self._singles:
            for number, (offset, data) in enumerate(self.pending):
                before, after = self.pending[:number], self.pending[number + 1 :]
                half = (offset, data[: len(data) // 2])
                torn = self.after([*before, half, *after], len(self.now))
                self._singles.append((self.after([(offset, data)]), self.after([*before, *after]), torn))
        return self._singles

    def zeros(self) -> bytes:
        """Return the bytes without the pending writes, and the length with them."""
        return self.after([], len(self.now))


def _written(data: bytes, offset: int, piece: bytes) -> bytes:
    return data[:offset].ljust(offset, b"\0") + piece + data[offset + len(piece) :]


@dataclass(eq=False)
class Change:
    """An entry of a directory that was set, or removed (`node` is None)."""

    name: str
    node: File | Folder | None
    made_by: Change | None = None
    """Of the old name of a rename: the new one, without which it cannot go."""


@dataclass(eq=False)
class Folder:
    """A directory: its durable entries, and the changes since."""

    durable: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)
    now: dict[str, File | Folder] = field(default_factory=dict)

    def change(self, change: Change) -> None:
        self.pending.append(change)
        _apply(self.now, change)

    def sync(self) -> None:
        self.durable, self.pending = dict(self.now), []

    def after(self, kept: Callable[[Change], bool]) -> dict[str, File | Folder]:
        entries = dict(self.durable)
        for change in self.pending:
            if kept(change):
                _apply(entries, change)
        return entries


def _apply(entries: dict[str, File | Folder], change: Change) -> None:
    if change.node is None:
        entries.pop(change.name, None)
    else:
        entries[change.name] = change.node


class Disk:
    """What lies below one directory, which is durable itself; at first `tree`, all of it durable."""

    def __init__(self, tree: Mapping[str, bytes | None]) -> None:
        self.root = Folder()
        self._handles: dict[str, File | Folder] = {}
        for path in sorted(tree):
            data = tree[path]
            parent, name = self._parent(path)
            parent.now[name] = Folder() if data is None else File(data)
            parent.durable[name] = parent.now[name]

    def apply(self, entry: Entry) -> None:
        """Follow one entry of a log."""
        if "errno" in entry or entry["op"] == "omitted":
            return
        op, path = entry["op"], entry["path"]
        if op == "create":
            self._set(path, File())
        if op in {"create", "open"}:
            self._handles[entry["handle"]] = self._node(path)
        elif op == "write":
            self._file(entry).write(entry["offset"], base64.b64decode(entry["data"]))
        elif op == "fsync":
            self._handles[entry["handle"]].sync()
        elif op == "rename":
            folder, name = self._parent(path)
            assert self._parent(entry["to"])[0] is folder, "a rename from one directory to another"
            made = self._set(entry["to"], self._node(path))
            folder.change(Change(name, None, made))
        elif op == "mkdir":
            self._set(path, Folder())
        elif op in {"unlink", "rmdir"}:
            folder, name = self._parent(path)
            folder.change(Change(name, None))
        else:
            raise AssertionError(f"not known to the disk: {entry}")

    def tree(self) -> Tree:
        """Return what is there now: also what is left when only the processes die."""
        return {
            path: node.now if isinstance(node, File) else None
            for path, node in _walk(self.root, lambda folder: folder.now)
        }

    def losses(self) -> Iterator[State]:
        """Yield what may be there after a power failure, each state once; see the module."""
        reachable = list(_walk_all(self.root))
        changes = [change for node in reachable if isinstance(node, Folder) for change in node.pending]
        files = [node for node in reachable if isinstance(node, File) and node.pending]
        num_writes = sum(len(file.pending) for file in files)
        if len(changes) + num_writes <= EXHAUSTIVE:
            selections: Iterable[Sequence[Change]] = itertools.chain.from_iterable(
                itertools.combinations(changes, count) for count in range(len(changes) + 1)
            )
            variants = _all_variants
        else:
            selections = [(), changes]
            selections += [(change,) for change in changes]
            selections += [[other for other in changes if other is not change] for change in changes]
            variants = _chosen_variants
        seen: set[State] = set()
        shapes: set[frozenset[tuple[str, int]]] = set()
        for selection in selections:
            shape = self._shape({id(change) for change in selection})
            key = frozenset((path, id(node)) for path, node in shape)
            if key in shapes:
                continue
            shapes.add(key)
            visible = [file for file in files if any(node is file for _, node in shape)]
            base: Tree = {path: node.durable if isinstance(node, File) else None for path, node in shape}
            places = [(path, node) for path, node in shape if isinstance(node, File) and node.pending]
            for contents in variants(visible):
                tree = base | {path: contents[id(node)] for path, node in places}
                state = frozenset(tree.items())
                if state not in seen:
                    seen.add(state)
                    yield state

    def _shape(self, kept: set[int]) -> list[tuple[str, File | Folder]]:
        def is_kept(change: Change) -> bool:
            return id(change) in kept and (change.made_by is None or id(change.made_by) in kept)

        return list(_walk(self.root, lambda folder: folder.after(is_kept)))

    def _parent(self, path: str) -> tuple[Folder, str]:
        above, _, name = path.rpartition("/")
        folder = self._node(above)
        assert isinstance(folder, Folder)
        return folder, name

    def _node(self, path: str) -> File | Folder:
        node: File | Folder = self.root
        for part in path.split("/") if path else ():
            assert isinstance(node, Folder)
            node = node.now[part]
        return node

    def _set(self, path: str, node: File | Folder) -> Change:
        folder, name = self._parent(path)
        change = Change(name, node)
        folder.change(change)
        return change

    def _file(self, entry: Entry) -> File:
        node = self._handles[entry["handle"]]
        assert isinstance(node, File)
        return node


def _walk(
    folder: Folder, entries: Callable[[Folder], dict[str, File | Folder]], prefix: str = ""
) -> Iterator[tuple[str, File | Folder]]:
    for name, node in entries(folder).items():
        yield prefix + name, node
        if isinstance(node, Folder):
            yield from _walk(node, entries, f"{prefix}{name}/")


def _walk_all(folder: Folder) -> Iterator[File | Folder]:
    """Yield, once each, all that can be there after a power failure."""
    found: dict[int, File | Folder] = {id(folder): folder}
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        for node in [*here.durable.values(), *(change.node for change in here.pending)]:
            if node is not None and id(node) not in found:
                found[id(node)] = node
                if isinstance(node, Folder):
                    waiting.append(node)
    yield from found.values()


def _all_variants(files: Sequence[File]) -> Iterator[dict[int, bytes]]:
    subsets = [
        [
            file.after(writes)
            for count in range(len(file.pending) + 1)
            for writes in itertools.combinations(file.pending, count)
        ]
        for file in files
    ]
    for contents in itertools.product(*subsets):
        yield {id(file): data for file, data in zip(files, contents, strict=True)}
    yield from _chosen_variants(files)


def _chosen_variants(files: Sequence[File]) -> Iterator[dict[int, bytes]]:
    lost = {id(file): file.durable for file in files}
    kept = {id(file): file.now for file in files}
    yield lost
    yield kept
    yield {id(file): file.zeros() for file in files}
    for file in files:
        for only, without, torn in file.singles():
            yield lost | {id(file): only}
            yield kept | {id(file): without}
            yield kept | {id(file): torn}
