"""A storage of one's own: checkpoints in an SQLite database, for URLs such as `sqlite:///tmp/run.db!step-1`.

    python docs/examples/own_storage.py

All that distckpt asks of a storage is in the class `SqliteStorage`; docs/storages.md says what it must
keep. The program saves a state to such a URL, loads it again, and compares the two.
"""

# ruff: noqa: D102 - distckpt.storage.Storage says what each method does

from __future__ import annotations

import contextlib
import errno
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distckpt import WriteError
from distckpt.storage import SHARED_NAME, check_name, register_storage

TABLE = "create table if not exists files (name text primary key, data blob not null, time real not null)"
PUT = "insert or replace into files values (?, ?, ?)"


class SqliteImage:
    """A file that one lane writes from its start to its end; it is there once it is finished."""

    def __init__(self, storage: SqliteStorage, name: str) -> None:
        self.storage, self.name, self.data = storage, name, bytearray()

    def write(self, offset: int, buffers: Sequence[memoryview], crc32c: int | None = None) -> None:
        if offset != len(self.data):
            raise WriteError(f"{self.name}: byte {offset} is not the next", errno=errno.EINVAL, offset=offset)
        for buffer in buffers:
            self.data += buffer  # A copy: the memory is used for other bytes once this has returned.

    def finish(self) -> list[Any]:
        self.storage.put(self.name, bytes(self.data))
        return []

    def cancel(self) -> None: ...

    def close(self) -> None: ...


class SqliteStorage:
    """The rows of a database whose names begin with that of the checkpoint."""

    in_flight = 1
    is_stream = True

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url, self.options, self.spec = url, options, dict[str, str]()
        self.database, _, self.root = url.removeprefix("sqlite://").partition("!")

    @contextlib.contextmanager
    def transaction(self, name: str = "") -> Iterator[sqlite3.Connection]:
        check_name(self.url, name or "x")  # It may have been read from a file that anybody wrote.
        try:
            with contextlib.closing(sqlite3.connect(self.database, timeout=30)) as connection, connection:
                connection.execute("begin immediate")
                connection.execute(TABLE)
                yield connection
        except sqlite3.Error as error:
            message = f"{self.url}/{name}: {error} [EIO]"
            raise WriteError(message, errno=errno.EIO, path=f"{self.url}/{name}") from error

    def part_bytes(self, file_bytes: int) -> int:
        return 0

    def prepare(self) -> None: ...

    def create_image(self, name: str, nbytes: int) -> str:
        if self.read(name) is not None and not SHARED_NAME.fullmatch(name):
            path = f"{self.url}/{name}"
            raise WriteError(f"{path} exists [EEXIST]", errno=errno.EEXIST, path=path)
        return ""

    def open_image(self, name: str, token: str) -> SqliteImage:
        return SqliteImage(self, name)

    def complete_image(self, name: str, token: str, nbytes: int, receipts: Sequence[Any]) -> None:
        data = self.read(name)
        if data is None or len(data) != nbytes:
            path = f"{self.url}/{name}"
            raise WriteError(f"{path} should hold {nbytes} bytes [EIO]", errno=errno.EIO, path=path)

    def discard_image(self, name: str, token: str) -> None:
        self.delete(name)

    def unfinished(self) -> list[tuple[str, str]]:
        return []

    def abort(self, name: str, handle: str) -> None: ...

    def put(self, name: str, data: bytes, last_check: Callable[[], None] | None = None) -> None:
        if last_check is not None:
            last_check()
        with self.transaction(name) as connection:
            connection.execute(PUT, (f"{self.root}/{name}", data, time.time()))

    def revoke(self, name: str) -> None: ...  # Cannot be done: a late put replaces what its successor wrote.

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
        with self.transaction(name) as connection:
            query = "select data from files where name = ?"
            row = connection.execute(query, (f"{self.root}/{name}",)).fetchone()
        return bytearray(row[0][offset : None if nbytes is None else offset + nbytes]) if row else None

    def list(self, prefix: str = "") -> dict[str, int]:
        folder = f"{self.root}/{prefix.rstrip('/')}/" if prefix else f"{self.root}/"
        with self.transaction(prefix) as connection:
            rows = connection.execute("select name, length(data) from files").fetchall()
        found = {}
        for name, nbytes in rows:
            if name.startswith(folder):
                entry, slash, _ = name[len(folder) :].partition("/")
                found[entry + slash] = 0 if slash else nbytes
        return found

    def delete(self, name: str) -> None:
        if name.endswith("/") and self.list(name):
            path = f"{self.url}/{name}"
            raise WriteError(f"{path} is not empty [ENOTEMPTY]", errno=errno.ENOTEMPTY, path=path)
        with self.transaction(name) as connection:
            connection.execute("delete from files where name = ?", (f"{self.root}/{name}",))

    def last_change(self) -> float | None:
        with self.transaction() as connection:
            row = connection.execute(
                "select max(time) from files where substr(name, 1, ?) = ?",
                (len(self.root) + 1, f"{self.root}/"),
            ).fetchone()
        return row[0] if row else None

    def remove_directory(self) -> bool:
        return not self.list()


def main() -> None:
    """Save a state to a database, with two workers, and load it again.

    Raises:
        SystemExit: What was loaded is not what was saved.
    """
    # Here and not above: the workers import this module, and do well without torch.
    import torch
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    from distckpt import StorageReader, StorageWriter

    # The name by which a worker imports the factory: not __main__, which is another module there.
    register_storage("sqlite", "own_storage:SqliteStorage")
    state = {"weight": torch.randn(1000, 100), "step": 17}
    loaded = {"weight": torch.zeros(1000, 100), "step": 0}
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite://{Path(folder, 'run.db')}!step-17"
        with StorageWriter(url, dist_ckpt_workers=2) as writer:
            state_dict_saver.save(state, storage_writer=writer, no_dist=True)
        state_dict_loader.load(loaded, storage_reader=StorageReader(url), no_dist=True)
    if not torch.equal(state["weight"], loaded["weight"]) or loaded["step"] != 17:
        raise SystemExit("what was loaded is not what was saved")
    print("saved to a database and loaded again")


if __name__ == "__main__":
    main()
