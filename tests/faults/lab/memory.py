"""A `Storage` over a tree in memory: the real commit protocol runs on it in each state after a crash."""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Callable, Sequence

from distckpt.errors import WriteError
from distckpt.storage import Receipt, StorageSpec, check_name
from faults.lab.disk import Tree


class MemoryImage:
    """A file of the tree that is being written."""

    def __init__(self, tree: Tree, path: str) -> None:
        self._tree = tree
        self._path = path

    def write(self, offset: int, buffers: Sequence[memoryview], crc32c: int | None = None) -> None:
        data, piece = self._tree[self._path] or b"", b"".join(buffers)
        self._tree[self._path] = data[:offset].ljust(offset, b"\0") + piece + data[offset + len(piece) :]

    def finish(self) -> list[Receipt]:
        return []

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        pass


class MemoryStorage:
    """One directory of `tree`, by its path; `tree` is changed."""

    in_flight = 1
    is_stream = False

    def __init__(self, tree: Tree, root: str) -> None:
        self.tree = tree
        self.root = root
        self.url = f"memory:{root}"
        self.spec: StorageSpec = {"kind": "memory", "root": root}

    def prepare(self) -> None:
        self._make_directory(self.root)

    def part_bytes(self, file_bytes: int) -> int:
        return 0

    def create_image(self, name: str, nbytes: int) -> str:
        if self._path(name) in self.tree:
            raise WriteError("it exists already", errno=errno.EEXIST, path=name)
        self._add(self._path(name), b"")
        return ""

    def open_image(self, name: str, token: str) -> MemoryImage:
        if self.tree.get(self._path(name)) is None:
            raise WriteError("no such file", errno=errno.ENOENT, path=name)
        return MemoryImage(self.tree, self._path(name))

    def complete_image(self, name: str, token: str, nbytes: int, receipts: Sequence[Receipt]) -> None:
        if self.list().get(name) != nbytes:
            raise WriteError("another size", path=name)

    def discard_image(self, name: str, token: str) -> None:
        self.delete(name)

    def unfinished(self) -> builtins.list[tuple[str, str]]:
        return []

    def abort(self, name: str, handle: str) -> None:
        pass

    def put(self, name: str, data: bytes, last_check: Callable[[], None] | None = None) -> None:
        path = self._path(name)
        self._make_directory(os.path.dirname(path))
        if last_check is not None:
            last_check()
        self._add(path, data)

    def revoke(self, name: str) -> None:
        folder, _, base = name.rpartition("/")
        for entry in self.list(folder):
            if entry.startswith(f"{base}.") and entry.endswith(".tmp"):
                self.delete(f"{folder}/{entry}" if folder else entry)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
        data = self.tree.get(self._path(name))
        if data is None:
            return None
        return bytearray(data[offset : None if nbytes is None else offset + nbytes])

    def list(self, prefix: str = "") -> dict[str, int]:
        start = f"{self._path(prefix) if prefix else self.root}/".replace("//", "/")
        found: dict[str, int] = {}
        for path, data in self.tree.items():
            if path.startswith(start) and "/" not in path[len(start) :]:
                found[path[len(start) :] + ("/" if data is None else "")] = 0 if data is None else len(data)
        return found

    def delete(self, name: str) -> None:
        path = self._path(name).removesuffix("/")
        if path not in self.tree:
            return
        is_folder = self.tree[path] is None
        if is_folder != name.endswith("/"):
            raise WriteError(
                "a directory, or none", errno=errno.EISDIR if is_folder else errno.ENOTDIR, path=name
            )
        if any(other.startswith(path + "/") for other in self.tree):
            raise WriteError("not empty", errno=errno.ENOTEMPTY, path=name)
        del self.tree[path]

    def last_change(self) -> float | None:
        return None

    def remove_directory(self) -> bool:
        if any(path.startswith(self.root + "/") for path in self.tree):
            return False
        self.tree.pop(self.root, None)
        return True

    def _path(self, name: str) -> str:
        check_name(self.url, name)
        return f"{self.root}/{name}"

    def _add(self, path: str, data: bytes) -> None:
        folder = os.path.dirname(path)
        if folder and self.tree.get(folder, b"") is not None:
            raise WriteError("no such directory", errno=errno.ENOENT, path=path)
        self.tree[path] = data

    def _make_directory(self, path: str) -> None:
        if not path:
            return
        self._make_directory(os.path.dirname(path))
        if self.tree.setdefault(path, None) is not None:
            raise WriteError("a file is in the way", errno=errno.EEXIST, path=path)
