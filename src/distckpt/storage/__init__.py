"""Where checkpoints live: the storage interface, and the functions that pick an implementation.

A storage is opened on one checkpoint directory; names are relative to it and use `/`. Rooms above never ask
which storage they have: how its images are to be written it says itself.

    posix     file systems of this machine, NFS among them: any bytes of a file, by any lane, in any order
    s3        multipart uploads: a file is cut into parts of one size, each sent by whichever lane is free
    streams   whatever else fsspec opens: a file is one stream, from its start to its end

Threads: one at a time per object, but for `ImageFile.write` where `Storage.in_flight` says so; a worker opens
its own storage from `Storage.spec`, which asks nothing of the storage.

Torch-free. Client libraries are imported inside the functions that need them.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

from distckpt.errors import ConfigError, IntegrityError, WriteError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "SHARED_NAME",
    "ImageFile",
    "Linking",
    "Receipt",
    "Storage",
    "StorageSpec",
    "can_link",
    "check_name",
    "open_storage",
    "register_storage",
    "reopen_storage",
]

StorageSpec = dict[str, str]
"""What a worker needs to open the same storage; plain values only."""

SHARED_NAME = re.compile(r".*/.*|.*\.json|model-.*")
"""Names of images that a format dictates; all others are of one save alone."""

Receipt = list[Any]
"""What a lane tells of a stretch that it wrote to an image, in JSON values; its storage alone reads it."""


class ImageFile(Protocol):
    """A file image that was created, open for one of the lanes that write it."""

    def write(self, offset: int, buffers: Sequence[memoryview], crc32c: int | None = None) -> None:
        """Write all of `buffers`, one after the other, at `offset` bytes of the file.

        The storage has accepted them when this returns: the memory is used for other bytes then.

        Args:
            offset: Where to, in bytes.
            buffers: What to write.
            crc32c: Of all of it, if the storage writes parts (`Storage.part_bytes`) and checksums are taken.

        Raises:
            WriteError: The storage refused; `errno`, `path` and `offset` are filled.
        """

    def finish(self) -> list[Receipt]:
        """Make what was written through this object durable by the rules of this storage, and close it.

        Returns:
            What `Storage.complete_image` needs to know of it.

        Raises:
            WriteError: The bytes are not durable; the object is closed all the same.
        """

    def cancel(self) -> None:
        """Have writes that are under way on other threads end soon, where that can be done; never raises."""

    def close(self) -> None:
        """Close it, finished or not, durable or not; idempotent, never raises.

        No write is under way, and nothing becomes visible that was not finished.
        """


@runtime_checkable
class Storage(Protocol):
    """One checkpoint directory on some storage. Every method raises `WriteError` when the storage refuses.

    Attributes:
        url: The directory, as `open_storage` takes it; also with the name of a directory below appended.
        spec: See `reopen_storage`; empty if no other process can open it.
        in_flight: How many calls of `ImageFile.write` of one lane may run at once, each on its own thread.
        is_stream: Whether a file is written by one lane alone, from its start to its end.
    """

    url: str
    spec: StorageSpec
    in_flight: int
    is_stream: bool

    def part_bytes(self, file_bytes: int) -> int:
        """Return how many bytes every part of a file has, but the last; 0: each as many as one likes.

        Each part is then written by one call of `ImageFile.write`.

        Args:
            file_bytes: No file of the save is larger.

        Returns:
            A multiple of 4 MiB.
        """

    def prepare(self) -> None:
        """Make the directory; a directory that others make at the same time is no error."""

    def create_image(self, name: str, nbytes: int) -> str:
        """Begin a new file of `nbytes` bytes; one that exists is refused where the storage can tell.

        A name that is a `SHARED_NAME` may be used by another save, too, or by another rank with the same
        bytes: nothing is seen under it before `complete_image`, if the storage can do that. Directories on
        the way to it are made.

        Returns:
            What `open_image`, `complete_image` and `discard_image` need to know of it, in any process.
        """

    def open_image(self, name: str, token: str) -> ImageFile:
        """Open a file that was begun for writing; several lanes may write to it, each its own bytes."""

    def complete_image(self, name: str, token: str, nbytes: int, receipts: Sequence[Receipt]) -> None:
        """Make a file of what its lanes wrote, all of which have finished.

        Args:
            name: The file.
            token: What `create_image` returned.
            nbytes: What it must hold; a file that does not is refused.
            receipts: What `ImageFile.finish` returned on all lanes.
        """

    def discard_image(self, name: str, token: str) -> None:
        """Give up a file that was begun, completed or not; none of it is left once no lane writes to it."""

    def unfinished(self) -> list[tuple[str, str]]:
        """Return files that saves began and neither completed nor discarded, if `list` does not show them.

        Name and handle of each, also of those in directories below, which may be other checkpoints.
        """

    def abort(self, name: str, handle: str) -> None:
        """Give up what `unfinished` returned; if it is gone, that is no error."""

    def put(self, name: str, data: bytes, last_check: Callable[[], None] | None = None) -> None:
        """Replace `name` by `data` in one atomic step that is durable, with all files completed before it.

        Args:
            name: What to replace.
            data: Its new bytes.
            last_check: Called when all is ready for that step; if it raises, nothing is replaced, and if
                `revoke` was called meanwhile, the step fails with `errno.ENOENT` if the storage can do that.
        """

    def revoke(self, name: str) -> None:
        """Make every `put` of `name` fail that has been through its last check, unless it is done already."""

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
        """Return `nbytes` bytes (default: all) from `offset`, fewer where the file ends; None if absent."""

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return the files directly in directory `prefix` of the checkpoint, with their sizes in bytes.

        Directories there end in `/`, and have 0 bytes.
        """

    def delete(self, name: str) -> None:
        """Remove a file, or a directory that is empty; one that is absent is no error."""

    def last_change(self) -> float | None:
        """Return when anything in the directory was made, written or removed, in seconds since the epoch.

        To a few minutes; None if that cannot be told, or there is no directory.
        """

    def remove_directory(self) -> bool:
        """Remove the checkpoint's directory if it is empty; returns whether it is gone."""


@runtime_checkable
class Filling(Protocol):
    """A storage that can read straight into memory of the caller's; see `can_fill`."""

    def fill(self, name: str, offset: int, target: memoryview) -> int | None:
        """Read the bytes of a file from `offset` into `target`; None if the file is absent.

        Returns:
            How many: as many as fit, fewer where the file ends. What follows them in `target` is undefined.
        """


def can_fill(storage: Storage) -> bool:
    """Say whether `storage` is `Filling`, and what it fills with is what its `read` returns."""
    from distckpt.storage.bounded import Bounded

    if isinstance(storage, Bounded):
        return storage.can_fill
    # A class that inherits `fill` and has a `read` of its own would be passed by.
    names = {"read", "fill"}
    kinds = type(storage).__mro__
    nearest: Mapping[str, Any] = next((vars(kind) for kind in kinds if names & vars(kind).keys()), {})
    return "fill" in nearest


def fill(storage: Storage, name: str, offset: int, target: memoryview) -> int | None:
    """Do what `Filling.fill` does, with whatever storage: one that cannot has its bytes copied.

    Raises:
        WriteError: The storage refuses, or returns more than it was asked for.
    """
    if can_fill(storage):
        assert isinstance(storage, Filling)
        return storage.fill(name, offset, target)
    data = storage.read(name, offset, len(target))
    if data is None:
        return None
    if len(data) > len(target):
        refuse_range(f"{storage.url}/{name}", offset)
    target[: len(data)] = data
    return len(data)


def linked_directories(storage: Storage) -> Sequence[str]:
    """Return the names of links to directories in a checkpoint's directory, each with a slash after it.

    `Storage.list` leaves them out: what lies there is not removed. It can be read.

    Raises:
        WriteError: The storage refuses.
    """
    find: Callable[[], Sequence[str]] | None = getattr(storage, "linked_directories", None)
    return () if find is None else find()


def refuse_range(path: str, offset: int) -> NoReturn:
    """Refuse bytes that are more than were asked for: they may be others.

    Raises:
        WriteError: Always.
    """
    raise WriteError(
        f"cannot read {path} at byte {offset}: the server sends another range [EIO]",
        errno=errno.EIO,
        path=path,
        offset=offset,
    )


@runtime_checkable
class Linking(Protocol):
    """A storage that can have one file in two checkpoints; see `can_link`."""

    def link(self, name: str, source: Storage, other: str, nbytes: int) -> None:
        """Have the bytes of a file in another checkpoint as a file here, without moving them through here.

        It is durable as an image that was completed.

        Args:
            name: Here, where there is no such file.
            source: The other checkpoint, of a storage of the same kind.
            other: The file there.
            nbytes: What the file must hold.

        Raises:
            WriteError: There is no such file, it holds something else, or the storage cannot do it.
        """


def can_link(storage: Storage) -> bool:
    """Say whether `storage` is `Linking`, as far as that can be told without asking it."""
    return storage.spec.get("kind") in ("posix", "s3") and isinstance(storage, Linking)


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


_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_FACTORIES: dict[str, str] = {}
_MISSPELT = re.compile(r"(s3|s3a|gs|gcs|abfs|abfss|az|file|sftp|hdfs):/(?!/)|file://(?!/)", re.IGNORECASE)
"""What fsspec takes for a local path: a slash was lost, as in `Path("s3://bucket")`, or a host is named."""


def register_storage(scheme: str, factory: str) -> None:
    """Have URLs of `scheme` opened by a storage of your own.

    Args:
        scheme: What stands before `://`; it may be one that fsspec knows, too.
        factory: `package.module:name` of a function `(url: str, options: dict[str, Any]) -> Storage`, which
            must be importable in the worker processes. It opens nothing: it is called in each of them, with
            the same arguments. Whatever it sets as `spec` is replaced.

    Raises:
        ConfigError: This is not a scheme, or not the name of a function.
    """
    if not _SCHEME.fullmatch(scheme):
        raise ConfigError(
            f"{scheme!r} is not the scheme of a URL: lower-case letters, digits, + . and - only"
        )
    module, _, name = factory.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise ConfigError(f"{factory!r} is not the name of a factory: package.module:function is expected")
    _FACTORIES[scheme] = factory


def _call_factory(factory: str, scheme: str, url: str, options: dict[str, Any]) -> Storage:
    module, _, name = factory.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{url!r}: the storage registered for {scheme}:// cannot be had: {error}"
        ) from error
    storage = make(url, options)
    if not isinstance(storage, Storage):
        raise ConfigError(f"{url!r}: {factory} returned {type(storage).__name__}, which is no Storage")
    try:
        dumped = json.dumps(options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{url!r}: a storage option cannot be handed to worker processes: {error}"
        ) from error
    storage.spec = {
        "kind": "registered", "factory": factory, "scheme": scheme, "url": url, "options": dumped,
    }  # fmt: skip
    return storage


def open_storage(
    url: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    *,
    timeout_s: float | None = None,
    direct_io: bool = True,
    bucket_bytes: int = 0,
) -> Storage:
    """Open the storage of one checkpoint directory.

    Args:
        url: A path, or a URL that `register_storage` was told of or fsspec resolves. A `pathlib` path is
            always local, and so is what begins with a slash.
        options: Storage options, passed to fsspec as they are; but for `s3_client`, which is ours.
        timeout_s: Seconds after which any call is given up, whatever it waits for; None: never.
        direct_io: Whether images are written past the page cache where that can be done.
        bucket_bytes: Bytes of a part, if the storage writes parts (`Storage.part_bytes`); 0: as it does by
            itself.

    Returns:
        The storage that suits the URL's scheme; nothing was asked of it yet.

    Raises:
        ConfigError: It is no path or URL, fsspec does not know it or an option, or the storage cannot honour
            a setting.
    """
    storage = _open(url, options)
    return _bounded(_set(storage, direct_io=direct_io, bucket_bytes=bucket_bytes), timeout_s)


def _set(storage: Storage, *, direct_io: bool, bucket_bytes: int) -> Storage:
    """Return `storage` with settings that go with its spec, and so reach every lane.

    Raises:
        ConfigError: It cannot honour one.
    """
    kind, changes = storage.spec.get("kind"), {}
    if not direct_io:
        if kind != "posix":
            raise ConfigError(
                f"ckpt_direct_io: {storage.url!r} is not written through the page cache of this machine, "
                "so nothing goes past it either: leave the setting out"
            )
        changes["direct_io"] = "off"
    # What takes any number of bytes takes what a lane gives it.
    if bucket_bytes and storage.part_bytes(0):
        if kind != "s3":
            raise ConfigError(
                f"ckpt_bucket_bytes: the storage of {storage.url!r} chooses the size of its parts itself: "
                "leave the setting out"
            )
        changes["part_bytes"] = str(bucket_bytes)
    return _reopen({**storage.spec, **changes}) if changes else storage


def _bounded(storage: Storage, timeout_s: float | None) -> Storage:
    if timeout_s is None:
        return storage
    from distckpt.storage.bounded import Bounded

    return Bounded(storage, timeout_s)


def refuse_local_options(path: str, options: Mapping[str, Any]) -> None:
    """Refuse what has no effect on a local path.

    Raises:
        ConfigError: There is an option that has none.
    """
    ignored = [name for name, value in options.items() if (name, value) != ("auto_mkdir", True)]
    if ignored:
        raise ConfigError(f"{path!r}: storage options without effect on local paths: {', '.join(ignored)}")


def is_url(path: str) -> bool:
    """Say whether a text that a user gave is a URL, not a path of this machine."""
    return not os.path.isabs(path) and ("://" in path or "::" in path)


def _open(url: str | os.PathLike[str], options: Mapping[str, Any] | None) -> Storage:
    from distckpt.storage.posix import PosixStorage

    try:
        given: object = os.fspath(url)
    except TypeError:
        given = None
    if not isinstance(given, str):
        raise ConfigError(f"the checkpoint's path: expected a path or a URL, got {url!r}")
    text = given
    options = dict(options or {})
    if not text:
        raise ConfigError("the checkpoint's path is empty")
    if not isinstance(url, str):
        # Not `abspath`, for which a/link/.. is a.
        text = os.path.join(os.getcwd(), text)
    if os.path.isabs(text):
        # Whatever colons are in it. Nor is fsspec asked each time that a save opens its directory.
        refuse_local_options(text, options)
        return PosixStorage(text.rstrip("/") or "/")
    if _MISSPELT.match(text):
        raise ConfigError(f"{text!r}: after the scheme of a URL come :// and, for files, another slash")
    scheme = text.partition("://")[0] if "://" in text else ""
    if scheme in _FACTORIES:
        return _call_factory(_FACTORIES[scheme], scheme, text, options)
    if scheme in {"s3", "s3a"}:
        from distckpt.storage.s3 import open_s3

        return open_s3(text, options)
    from distckpt.storage.streams import open_fsspec

    return open_fsspec(text, options)


def reopen_storage(spec: StorageSpec, *, timeout_s: float | None = None) -> Storage:
    """Open, in whatever process, the storage that `spec` describes; nothing is asked of it yet.

    Args:
        spec: `Storage.spec` of another one.
        timeout_s: As for `open_storage`.
    """
    return _bounded(_reopen(spec), timeout_s)


def _reopen(spec: StorageSpec) -> Storage:
    kind = spec["kind"]
    if kind == "posix":
        from distckpt.storage.posix import PosixStorage

        return PosixStorage(spec["root"], direct_io=spec.get("direct_io") != "off")
    if kind == "s3":
        from distckpt.storage.s3 import reopen_s3

        return reopen_s3(spec)
    if kind == "registered":
        return _call_factory(spec["factory"], spec["scheme"], spec["url"], json.loads(spec["options"]))
    from distckpt.storage.streams import reopen_fsspec

    return reopen_fsspec(spec)
