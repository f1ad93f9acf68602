"""Where checkpoints live: the storage interface, and the one function that picks an implementation.

A storage is opened on one checkpoint directory; names are relative to it and use `/`. Rooms above never ask
which storage they have.

Threads: one thread at a time per object; a worker opens its own from `Storage.spec`.

Torch-free. Client libraries are imported inside the functions that need them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from distckpt.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["ImageFile", "Storage", "StorageSpec", "check_name", "open_storage", "reopen_storage"]

StorageSpec = dict[str, str]
"""What a worker needs to open the same storage; plain values only."""


class ImageFile(Protocol):
    """A file image that exists already, open for one of the lanes that write it."""

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write all of `buffers`, one after the other, at `offset` bytes of the file.

        Raises:
            WriteError: The storage refused; `errno`, `path` and `offset` are filled.
        """

    def finish(self) -> None:
        """Make what was written through this object durable by the rules of this storage, and close it.

        Raises:
            WriteError: The bytes are not durable; the object is closed all the same.
        """

    def close(self) -> None:
        """Close it, finished or not, durable or not; idempotent, never raises."""


class Storage(Protocol):
    """One checkpoint directory on some storage. Every method raises `WriteError` when the storage refuses."""

    url: str
    spec: StorageSpec

    def prepare(self) -> None:
        """Make the directory; a directory that others make at the same time is no error."""

    def create_image(self, name: str) -> None:
        """Create an empty file exclusively; one that exists is refused."""

    def open_image(self, name: str) -> ImageFile:
        """Open a file that exists for writing; several processes may write to it, each its own bytes."""

    def check_image(self, name: str, nbytes: int) -> None:
        """Refuse a file that does not hold exactly `nbytes` bytes."""

    def put(self, name: str, data: bytes, last_check: Callable[[], None] | None = None) -> None:
        """Replace `name` by `data` in one atomic step that is durable, with all files finished before it.

        Args:
            name: What to replace.
            data: Its new bytes.
            last_check: Called when all is ready for that step; if it raises, nothing is replaced, and if
                `revoke` was called meanwhile, the step fails.
        """

    def revoke(self, name: str) -> None:
        """Make every `put` of `name` fail that has been through its last check, unless it is done already."""

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
        """Return `nbytes` bytes (default: all) from `offset`, fewer where the file ends; None if absent."""

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return the files directly in directory `prefix` of the checkpoint, with their sizes in bytes."""

    def delete(self, name: str) -> None:
        """Remove a file, or a directory that is empty; one that is absent is no error."""

    def last_change(self) -> float | None:
        """Return when anything in the directory was made, written or removed, in seconds since the epoch.

        To a few minutes; None if that cannot be told, or there is no directory.
        """

    def remove_directory(self) -> bool:
        """Remove the checkpoint's directory if it is empty; returns whether it is gone."""


def check_name(url: str, name: str) -> None:
    """Refuse a name that leads out of the checkpoint: it may have been read from a file that anybody wrote.

    Args:
        url: The checkpoint, for the message.
        name: The name, relative to it.

    Raises:
        IntegrityError: It does; `file` is filled.
    """
    if (
        name.startswith("/")
        or "\0" in name
        or not {"", ".", ".."}.isdisjoint(name.removesuffix("/").split("/"))
    ):
        raise IntegrityError(f"{url} names a file that does not lie within it: {name!r}", file=name)


def open_storage(url: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Storage:
    """Open the storage of one checkpoint directory.

    Args:
        url: A path, or a URL that fsspec resolves. A `pathlib` path is always local.
        options: Storage options, passed to fsspec as they are.

    Returns:
        The storage that suits the URL's scheme.

    Raises:
        ConfigError: fsspec does not know the URL or an option, or it leads to a storage that this version
            does not write to.
    """
    from distckpt.storage.posix import PosixStorage

    text = os.fspath(url)
    if not text:
        raise ConfigError("the checkpoint's path is empty")
    if not isinstance(url, str) and not options:
        return PosixStorage(os.path.abspath(text))

    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    try:
        file_system, path = fsspec.url_to_fs(text, **(options or {}))
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"fsspec cannot open {text!r}: {error}") from error
    if type(file_system) is not LocalFileSystem:
        raise ConfigError(
            f"{text!r}: this version of distckpt writes to local paths and file:// only, "
            f"not to {type(file_system).__name__}"
        )
    # fsspec's local file system takes any option, and has an effect for this one alone.
    ignored = [name for name, value in (options or {}).items() if (name, value) != ("auto_mkdir", True)]
    if ignored:
        raise ConfigError(f"{text!r}: storage options without effect on local paths: {', '.join(ignored)}")
    return PosixStorage(path)


def reopen_storage(spec: StorageSpec) -> Storage:
    """Open, in a worker, the storage that `spec` describes."""
    from distckpt.storage.posix import PosixStorage

    return PosixStorage(spec["root"])
