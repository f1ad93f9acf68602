"""A checkpoint in a dictionary: damaged and looked at in microseconds. It is read, never written."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from pathlib import Path

from distckpt.storage import ImageFile, Receipt, StorageSpec, check_name


class MemoryStorage:
    """Storage whose files are the entries of `files`, by name."""

    in_flight = 1
    is_stream = False

    def __init__(self, files: dict[str, bytes], url: str = "memory") -> None:
        self.files = files
        self.url = url
        # Nothing that could be opened again.
        self.spec: StorageSpec = {}

    @classmethod
    def of(cls, folder: Path) -> MemoryStorage:
        """Return the files of a directory."""
        return cls(
            {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        )

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
        check_name(self.url, name)
        data = self.files.get(name)
        if data is None:
            return None
        return bytearray(data[offset:] if nbytes is None else data[offset : offset + nbytes])

    def list(self, prefix: str = "") -> dict[str, int]:
        found = {}
        folder = f"{prefix.rstrip('/')}/" if prefix else ""
        for name, data in self.files.items():
            if name.startswith(folder):
                entry, slash, _ = name[len(folder) :].partition("/")
                found[entry + slash] = 0 if slash else len(data)
        return found

    def prepare(self) -> None:
        raise NotImplementedError

    def part_bytes(self, file_bytes: int) -> int:
        raise NotImplementedError

    def create_image(self, name: str, nbytes: int) -> str:
        raise NotImplementedError

    def open_image(self, name: str, token: str) -> ImageFile:
        raise NotImplementedError

    def complete_image(self, name: str, token: str, nbytes: int, receipts: Sequence[Receipt]) -> None:
        raise NotImplementedError

    def discard_image(self, name: str, token: str) -> None:
        raise NotImplementedError

    def unfinished(self) -> builtins.list[tuple[str, str]]:
        raise NotImplementedError

    def abort(self, name: str, handle: str) -> None:
        raise NotImplementedError

    def put(self, name: str, data: bytes, last_check: Callable[[], None] | None = None) -> None:
        raise NotImplementedError

    def revoke(self, name: str) -> None:
        raise NotImplementedError

    def delete(self, name: str) -> None:
        raise NotImplementedError

    def last_change(self) -> float | None:
        return None

    def remove_directory(self) -> bool:
        raise NotImplementedError
