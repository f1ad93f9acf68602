"""Whatever fsspec opens: object stores, memory, SFTP and the like. A file is one stream.

Invariants:
    * On an object store nothing that an image has written becomes visible before `finish`. Elsewhere it does,
      and is removed again if the image is closed without it.
    * No client holds memory behind the buffers once `write` has returned.
    * Every look is a new one: what a file system keeps of earlier listings is thrown away first.
    * Foreign errors leave as `WriteError`, and no message holds a password.

What fsspec does not have, this storage has not: conditional writes, hence no fence (`FsspecStorage.revoke`),
and deadlines for what is sent.

Torch-free.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import weakref
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from distckpt.errors import CheckpointError, ConfigError, WriteError
from distckpt.storage import SHARED_NAME, check_name, refuse_local_options, refuse_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distckpt.storage import Receipt, Storage, StorageSpec

_MIB = 1 << 20
_PART_BYTES = 16 * _MIB
_MOST_PARTS = 9_000
"""Source: S3 takes 10,000 parts; s3fs sends a part as soon as there are `block_size` bytes, no fewer."""
_S3_SCHEMES = {"s3", "s3a"}
_S3_CLIENTS = ("obstore", "s3fs")
_OBJECT_STORES = {
    "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "azure", "adl", "oss", "oci", "obs", "tos", "hf",
}  # fmt: skip
"""Protocols without directories: there is nothing to make, and what would be made is a bucket."""
_SFTP = {"sftp", "ssh"}
"""Protocols whose `mv` replaces a file in one step. Source: SFTPFileSystem.mv, posix-rename@openssh.com."""
_MKDIR_ATTEMPTS = 5
_UNLISTED = {"s3", "s3a", "gs", "gcs"}
"""Protocols whose file systems take `use_listings_cache`."""
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
_REQUEST_TIMEOUT = "120s"
"""obstore's own is 30 s for a request, body and all: little for 16 MiB on a line that many lanes share."""
_PARTIAL = ".tmp"
_OBSTORE_OPTIONS = {
    "endpoint_url": "endpoint",
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "anon": "skip_signature",
}
_OBSTORE_CLIENT_OPTIONS = {
    "region_name": "region",
    "endpoint_url": "endpoint",
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
_ERRNO_BY_CLASS = {
    # Of Python, raised without a number.
    "FileNotFoundError": errno.ENOENT,
    "FileExistsError": errno.EEXIST,
    "PermissionError": errno.EACCES,
    "NotADirectoryError": errno.ENOTDIR,
    "IsADirectoryError": errno.EISDIR,
    "TimeoutError": errno.ETIMEDOUT,
    "ConnectionRefusedError": errno.ECONNREFUSED,
    "ConnectionError": errno.ECONNRESET,
    "MemoryError": errno.ENOMEM,
    "NotImplementedError": errno.ENOTSUP,
    "UnsupportedOperation": errno.ENOTSUP,
    # Of botocore.
    "NoCredentialsError": errno.EACCES,
    "PartialCredentialsError": errno.EACCES,
    "TokenRetrievalError": errno.EACCES,
    "EndpointConnectionError": errno.ECONNREFUSED,
    "ConnectTimeoutError": errno.ETIMEDOUT,
    "ReadTimeoutError": errno.ETIMEDOUT,
    "ConnectionClosedError": errno.ECONNRESET,
    "ParamValidationError": errno.EINVAL,
    # Of obstore.
    "NotFoundError": errno.ENOENT,
    "AlreadyExistsError": errno.EEXIST,
    "PreconditionError": errno.EEXIST,
    "PermissionDeniedError": errno.EACCES,
    "UnauthenticatedError": errno.EACCES,
    "InvalidPathError": errno.EINVAL,
    "NotSupportedError": errno.ENOTSUP,
    # Of azure-core and paramiko.
    "ResourceNotFoundError": errno.ENOENT,
    "ResourceExistsError": errno.EEXIST,
    "ClientAuthenticationError": errno.EACCES,
    "AuthenticationException": errno.EACCES,
    "ServiceRequestError": errno.ECONNREFUSED,
}
"""Numbers for errors that bear none, by the name of their class or of one above it; all others are EIO."""
_MOST_TEXT = 300


def _errno_of(error: BaseException) -> int:
    if isinstance(error, OSError) and isinstance(error.errno, int):
        return error.errno
    if isinstance(error, asyncio.TimeoutError):
        # fsspec's FSTimeoutError; no TimeoutError before Python 3.11.
        return errno.ETIMEDOUT
    names = (one.__name__ for one in type(error).__mro__)
    return next((_ERRNO_BY_CLASS[name] for name in names if name in _ERRNO_BY_CLASS), errno.EIO)


def _fail(error: BaseException, path: str, doing: str, offset: int | None = None) -> NoReturn:
    number = _errno_of(error)
    code = errno.errorcode.get(number, "?")
    text = " ".join(str(error).split())[:_MOST_TEXT] or os.strerror(number)
    where = "" if offset is None else f" at byte {offset}"
    raise WriteError(
        f"{doing} {path}{where}: {text} ({type(error).__name__}) [{code}]",
        errno=number,
        path=path,
        offset=offset,
    ) from error


@contextlib.contextmanager
def _mapped(path: str, doing: str, offset: int | None = None) -> Iterator[None]:
    """Have errors of any client leave as `WriteError`: there is no class that all of theirs derive from.

    Raises:
        CheckpointError: It was one of ours.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - the edge at which foreign errors are mapped
        _fail(error, path, doing, offset)


class FsspecImage:
    """A file that one lane writes as a stream.

    Args:
        file_system: Of fsspec.
        path: The file, in its terms.
        url: The file, for messages.
        nbytes: How many bytes it will have.
        is_kept: Whether bytes stay, under the file's name, that were written and not finished.
    """

    def __init__(self, file_system: Any, path: str, url: str, nbytes: int, *, is_kept: bool) -> None:
        self._file_system = file_system
        self._path = path
        self._url = url
        self._is_kept = is_kept
        self._position = 0
        self._is_cancelled = False
        # Whole MiB: Google takes multiples of 256 KiB only.
        part_bytes = max(_PART_BYTES, -(-nbytes // (_MOST_PARTS * _MIB)) * _MIB)
        # obstore's files take no block size, but this; and they keep what is written, not a copy, until it
        # is sent.
        self._copies = _is_obstore(file_system)
        sizes = {"buffer_size": part_bytes} if self._copies else {}
        with _mapped(url, "cannot open"):
            self._file: Any = file_system.open(path, "wb", block_size=part_bytes, **sizes)
        # If nobody closes this one, and at the end of the process.
        self._forget = weakref.finalize(self, _forget, self._file)

    def write(self, offset: int, buffers: Sequence[memoryview], crc32c: int | None = None) -> None:
        """See `ImageFile.write`; the bytes are copied, and sent when there is enough for a part.

        Raises:
            WriteError: The storage refused, or these are not the next bytes of the file.
        """
        if self._file is None or self._is_cancelled:
            self._refuse(offset, errno.ECANCELED, "the file was given up")
        if offset != self._position:
            self._refuse(offset, errno.EINVAL, f"a stream, whose next byte is number {self._position}")
        for buffer in buffers:
            if self._is_cancelled:
                self._refuse(self._position, errno.ECANCELED, "the file was given up")
            with _mapped(self._url, "cannot write", self._position):
                data = bytes(buffer) if self._copies else buffer
                written = self._file.write(data) if buffer.nbytes else 0
            # Some return nothing.
            if isinstance(written, int) and written != buffer.nbytes:
                self._refuse(self._position + written, errno.EIO, "no more bytes accepted")
            self._position += buffer.nbytes

    def _refuse(self, offset: int, number: int, why: str) -> None:
        raise WriteError(
            f"cannot write {self._url} at byte {offset}: {why} [{errno.errorcode[number]}]",
            errno=number,
            path=self._url,
            offset=offset,
        )

    def finish(self) -> list[Receipt]:
        """See `ImageFile.finish`: what is written becomes the file; its size tells the rest.

        Raises:
            WriteError: It is not there; see `ImageFile.finish`.
        """
        self._forget.detach()
        try:
            with _mapped(self._url, "cannot complete", self._position):
                self._file.close()
        except WriteError:
            self.close()
            raise
        self._file = None
        return []

    def cancel(self) -> None:
        """See `ImageFile.cancel`: what is being sent is sent to its end, and no more."""
        self._is_cancelled = True

    def close(self) -> None:
        """See `ImageFile.close`."""
        file, self._file = self._file, None
        if file is None:
            return
        self._forget.detach()
        if _completes_when_closed(file):
            with contextlib.suppress(Exception):
                file.discard()
            # What follows then does nothing.
            _forget(file)
        with contextlib.suppress(Exception):
            file.close()
        if self._is_kept:
            with contextlib.suppress(Exception):
                self._file_system.rm_file(self._path)


def _completes_when_closed(file: Any) -> bool:
    from fsspec.spec import AbstractBufferedFile

    return isinstance(file, AbstractBufferedFile)


def _forget(file: Any) -> None:
    """Have a file not be completed when it is closed, as the garbage collector closes it."""
    if _completes_when_closed(file):
        file.buffer = None
        file.closed = True


class FsspecStorage:
    """A checkpoint directory on a file system of fsspec.

    Args:
        file_system: Of fsspec.
        root: The directory, in its terms.
        spec: See `reopen_fsspec`; `url` is taken from it.
    """

    in_flight = 1
    is_stream = True

    def __init__(self, file_system: Any, root: str, spec: StorageSpec) -> None:
        self.url = spec["url"]
        self.spec: StorageSpec = spec
        self._fs = file_system
        self._root = root
        protocols = _protocols(file_system)
        self._has_directories = not _OBJECT_STORES & protocols
        self._renames = bool(_SFTP & protocols)
        self._lists_uploads = type(file_system).__module__.partition(".")[0] == "s3fs"

    def part_bytes(self, file_bytes: int) -> int:
        """See `Storage.part_bytes`."""
        return 0

    def prepare(self) -> None:
        """See `Storage.prepare`; object stores have no directories, and nobody has asked for a bucket."""
        if self._has_directories:
            self._make_directory(self._root, self.url)

    def create_image(self, name: str, nbytes: int) -> str:
        """See `Storage.create_image`: it becomes a file when its lane has finished it.

        Raises:
            WriteError: There is one of this name.
        """
        self._path(name)
        folder, _, _ = name.rpartition("/")
        if folder and self._has_directories:
            self._make_directory(self._path(folder), self._url(folder))
        if not SHARED_NAME.fullmatch(name) and self._size(name) is not None:
            _fail(FileExistsError(), self._url(name), "cannot create")
        return str(nbytes)

    def open_image(self, name: str, token: str) -> FsspecImage:
        """See `Storage.open_image`."""
        return FsspecImage(
            self._fs, self._path(name), self._url(name), int(token or 0), is_kept=self._has_directories
        )

    def complete_image(self, name: str, token: str, nbytes: int, receipts: Sequence[Receipt]) -> None:
        """See `Storage.complete_image`: it is a file already.

        Raises:
            WriteError: The file holds another number of bytes, or there is none.
        """
        url = self._url(name)
        size = self._size(name)
        if size is None:
            _fail(FileNotFoundError(), url, "cannot check")
        if size != nbytes:
            raise WriteError(
                f"{url} holds {size} bytes after writing {nbytes}", errno=errno.EIO, path=url, offset=size
            )

    def discard_image(self, name: str, token: str) -> None:
        """See `Storage.discard_image`."""
        self.delete(name)
        if self._lists_uploads:
            # Of a lane whose process has ended.
            for other, upload in self._uploads(self._path(name)):
                if other == name:
                    self.abort(name, upload)

    def unfinished(self) -> list[tuple[str, str]]:
        """See `Storage.unfinished`; of all clients only s3fs can tell."""
        return self._uploads(f"{self._root}/") if self._lists_uploads else []

    def _uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Return name and id of the S3 uploads to keys below the checkpoint that begin with `prefix`.

        Raises:
            WriteError: The storage refuses.
        """
        bucket, _, key = prefix.partition("/")
        found: list[tuple[str, str]] = []
        markers: dict[str, str] = {}
        try:
            with _mapped(self.url, "cannot list the uploads to"):
                while True:
                    page = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key, **markers)
                    for upload in page.get("Uploads") or []:
                        name = f"{bucket}/{upload['Key']}"[len(self._root) + 1 :]
                        found.append((name, upload["UploadId"]))
                    if not page.get("IsTruncated"):
                        return found
                    markers = {
                        "KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"],
                    }  # fmt: skip
        except WriteError as error:
            # To look for them is a right of its own, and not every server can.
            if error.errno in {errno.EACCES, errno.EPERM, errno.ENOSYS}:
                return found
            raise

    def abort(self, name: str, handle: str) -> None:
        """See `Storage.abort`."""
        if not self._lists_uploads:
            return
        bucket, _, key = self._path(name).partition("/")
        with _mapped(self._url(name), "cannot give up the upload to"), contextlib.suppress(FileNotFoundError):
            self._fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=handle)

    def put(self, name: str, data: bytes, last_check: Callable[[], None] | None = None) -> None:
        """See `Storage.put`: one step on object stores, and where there is a rename that replaces (SFTP).

        Elsewhere it is whatever `pipe_file` of the file system does, which may be seen half done.
        """
        path, url = self._path(name), self._url(name)
        if self._has_directories and "/" in name:
            self._make_directory(path.rpartition("/")[0], url)
        if not self._renames:
            if last_check is not None:
                last_check()
            with _mapped(url, "cannot write"):
                self._fs.pipe_file(path, data)
            return
        partial = f"{path}.{os.urandom(8).hex()}{_PARTIAL}"
        try:
            with _mapped(url, "cannot write"):
                self._fs.pipe_file(partial, data)
            if last_check is not None:
                last_check()
            with _mapped(url, "cannot write"):
                self._fs.mv(partial, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(partial)
            raise

    def revoke(self, name: str) -> None:
        """See `Storage.revoke`: only where `put` renames; without its file, that fails.

        Elsewhere nothing can be done: a save that was overtaken between its last look and its PUT publishes
        over its successor.
        """
        if not self._renames:
            return
        folder, _, base = name.rpartition("/")
        for entry in self.list(folder):
            if entry.startswith(f"{base}.") and entry.endswith(_PARTIAL):
                self.delete(f"{folder}/{entry}" if folder else entry)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
        """See `Storage.read`.

        Raises:
            WriteError: The file cannot be read.
        """
        data = self._read(name, offset, nbytes)
        return None if data is None else bytearray(data)

    def fill(self, name: str, offset: int, target: memoryview) -> int | None:
        """See `Filling.fill`.

        Raises:
            WriteError: As for `read`.
        """
        data = self._read(name, offset, len(target))
        if data is None:
            return None
        target[: len(data)] = data
        return len(data)

    def _read(self, name: str, offset: int, nbytes: int | None) -> bytes | None:
        path, url = self._path(name), self._url(name)
        size: int | None = None
        if nbytes == 0 or (offset and nbytes is None):
            size = self._size(name)
            if size is None:
                return None
            if nbytes == 0 or offset >= size:
                return b""
            nbytes = size - offset
        # Both ends or none: obstore takes no other.
        ends = {} if nbytes is None else {"start": offset, "end": offset + nbytes}
        try:
            with _mapped(url, "cannot read", offset):
                data: bytes = self._fs.cat_file(path, **ends)
        except WriteError as error:
            if _is_absence(error):
                return None
            # Past the end is an error to some, and each has its own.
            if size is None and ends:
                size = self._size(name)
                if size is None:
                    return None
                if offset >= size:
                    return b""
            raise
        if nbytes is not None and len(data) > nbytes:
            # As HTTP servers do that do not know of ranges.
            refuse_range(url, offset)
        return data

    def list(self, prefix: str = "") -> dict[str, int]:
        """See `Storage.list`.

        Raises:
            WriteError: The storage refuses.
        """
        folder = self._path(prefix).rstrip("/") if prefix else self._root
        found: dict[str, int] = {}
        try:
            with _mapped(self._url(prefix), "cannot list"):
                self._fs.invalidate_cache(folder)
                for entry in self._fs.ls(folder, detail=True):
                    path = str(entry["name"]).rstrip("/")
                    # The folder itself: a marker of it on an object store, or a file.
                    if path.strip("/") == folder.strip("/"):
                        continue
                    name = path.rpartition("/")[2]
                    if entry["type"] == "directory":
                        # Some object stores go on to show for a while what there was.
                        if not self._has_directories and self._is_empty(
                            f"{prefix.rstrip('/')}/{name}".lstrip("/")
                        ):
                            continue
                        found[f"{name}/"] = 0
                    elif entry["type"] == "file":
                        found[name] = int(entry["size"] or 0)
        except WriteError as error:
            if _is_absence(error):
                return {}
            raise
        return found

    def delete(self, name: str) -> None:
        """See `Storage.delete`.

        Raises:
            WriteError: The directory is not empty, or the storage refuses.
        """
        url = self._url(name)
        if not name.endswith("/"):
            with _mapped(url, "cannot remove"), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))
        # Some do not look whether it is empty, and some have no such call.
        elif not self._is_empty(name):
            _fail(OSError(errno.ENOTEMPTY, "not empty"), url, "cannot remove")
        else:
            self._remove_directory(self._path(name).rstrip("/"), url)

    def last_change(self) -> float | None:
        """See `Storage.last_change`: of the files, as directories tell no times; through s3fs, of parts, too.

        Raises:
            WriteError: The storage refuses.
        """
        try:
            with _mapped(self.url, "cannot list"):
                self._fs.invalidate_cache(self._root)
                entries = self._fs.find(self._root, detail=True)
                times = [self._time(path, entry) for path, entry in entries.items()]
            uploads = self._uploads(f"{self._root}/") if self._lists_uploads else ()
            times += [time for upload in uploads for time in self._times_of_parts(*upload)]
        except WriteError as error:
            if _is_absence(error):
                return None
            raise
        # One that is not known may be the last.
        known = [time for time in times if time is not None]
        return max(known, default=None) if len(known) == len(times) else None

    def _times_of_parts(self, name: str, upload: str) -> Iterator[float]:
        bucket, _, key = self._path(name).partition("/")
        more: dict[str, Any] | None = {}
        while more is not None:
            try:
                with _mapped(self._url(name), "cannot look at the parts of"):
                    page = self._fs.call_s3("list_parts", Bucket=bucket, Key=key, UploadId=upload, **more)
            except WriteError as error:
                # It is complete by now, or given up.
                if _is_absence(error):
                    return
                raise
            for part in page.get("Parts") or ():
                yield part["LastModified"].timestamp()
            marker = page.get("NextPartNumberMarker")
            more = {"PartNumberMarker": marker} if page.get("IsTruncated") else None

    def _time(self, path: str, entry: Mapping[str, Any]) -> float | None:
        value = next((entry[key] for key in _TIMES if entry.get(key) is not None), None)
        if value is None:
            try:
                value = self._fs.modified(path)
            except (NotImplementedError, FileNotFoundError):
                return None
        if isinstance(value, str):
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        return value.timestamp() if isinstance(value, datetime) else float(value)

    def remove_directory(self) -> bool:
        """See `Storage.remove_directory`; where there are no directories, an empty one is gone."""
        if not self._is_empty():
            return False
        self._remove_directory(self._root, self.url)
        return True

    def _make_directory(self, folder: str, url: str) -> None:
        with _mapped(url, "cannot make directory"):
            for attempt in range(_MKDIR_ATTEMPTS):
                try:
                    self._fs.makedirs(folder, exist_ok=True)
                    return
                except OSError:
                    # Others make the same directories: some lose that race between the look and the step.
                    if attempt + 1 == _MKDIR_ATTEMPTS:
                        raise

    def _remove_directory(self, folder: str, url: str) -> None:
        if self._has_directories:
            with _mapped(url, "cannot remove"), contextlib.suppress(FileNotFoundError, NotImplementedError):
                self._fs.rmdir(folder)

    def _is_empty(self, prefix: str = "") -> bool:
        entries = self.list(prefix)
        if self._has_directories or any(not entry.endswith("/") for entry in entries):
            return not entries
        # Some object stores go on to show folders for a while in which there is nothing.
        return all(self._is_empty(f"{prefix.rstrip('/')}/{entry}".lstrip("/")) for entry in entries)

    def _size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if there is none.

        Raises:
            WriteError: The storage refuses.
        """
        path = self._path(name)
        try:
            with _mapped(self._url(name), "cannot look at"):
                self._fs.invalidate_cache(path)
                info = self._fs.info(path)
        except WriteError as error:
            if _is_absence(error):
                return None
            raise
        return None if info["type"] == "directory" and not self._has_directories else int(info["size"] or 0)

    def _path(self, name: str) -> str:
        check_name(self.url, name)
        return f"{self._root}/{name}"

    def _url(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url


def _is_absence(error: WriteError) -> bool:
    # FileExistsError: memory, of a path that leads through a file.
    return error.errno in {errno.ENOENT, errno.ENOTDIR, errno.EEXIST}


def _protocols(file_system: Any) -> set[str]:
    protocol = file_system.protocol
    return {protocol} if isinstance(protocol, str) else set(protocol)


def _is_obstore(file_system: Any) -> bool:
    return bool(type(file_system).__module__ == "obstore.fsspec")


def open_fsspec(url: str, options: dict[str, Any]) -> Storage:
    """Open a checkpoint directory on whatever fsspec knows.

    Args:
        url: A path or a URL; chained ones are taken where the first file system can be written to at once.
        options: For the file system. `s3_client` (only for S3) is "s3fs" or "obstore".

    Returns:
        A `PosixStorage` for local paths.

    Raises:
        ConfigError: fsspec does not know the URL or an option, or an option cannot be handed to a worker.
        WriteError: The server that is connected to at once, as with SFTP, refuses.
    """
    from distckpt.storage.posix import PosixStorage

    file_system, path = _resolve(url, dict(options))
    from fsspec.implementations.local import LocalFileSystem

    if type(file_system) is LocalFileSystem:
        refuse_local_options(url, options)
        return PosixStorage(path)
    shown = _without_password(url).rstrip("/")
    spec = {
        "kind": "fsspec",
        "fs": _to_json(file_system, shown, options),
        "root": path.rstrip("/"),
        "url": shown,
    }
    if _is_in_memory(file_system, url):
        spec["pid"] = str(os.getpid())
    return FsspecStorage(file_system, spec["root"], spec)


def reopen_fsspec(spec: StorageSpec) -> Storage:
    """Open the storage that `spec` describes.

    Raises:
        ConfigError: It lives in the memory of another process.
    """
    if spec.get("pid", str(os.getpid())) != str(os.getpid()):
        raise ConfigError(
            f"{spec['url']!r} lies in the memory of process {spec['pid']}, where no other process sees it: "
            f"use --dist-ckpt-workers 1"
        )
    with _mapped(spec["url"], "cannot open"):
        file_system = _from_json(spec["fs"])
    return FsspecStorage(file_system, spec["root"], spec)


def _from_json(text: str) -> Any:
    """Return the file system that `_to_json` has described."""
    from fsspec.spec import AbstractFileSystem

    described = json.loads(text)
    if described.get("protocol") in _SFTP:
        # One for each storage, not for all of the process: it serves one thread at a time.
        # Source: paramiko, SFTPClient._read_response: the answer to another thread's request is lost.
        text = json.dumps({**described, "skip_instance_cache": True})
    return AbstractFileSystem.from_json(text)


def _resolve(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """Return the file system and the path within it.

    Raises:
        ConfigError: See `open_fsspec`.
        WriteError: See `open_fsspec`.
    """
    import fsspec

    shown = _without_password(url)
    scheme = url.partition("://")[0] if "://" in url else ""
    client = options.pop("s3_client", None)
    if client is not None and scheme not in _S3_SCHEMES:
        raise ConfigError(f"{shown!r}: the storage option s3_client is for s3:// URLs only")
    if client not in {None, *_S3_CLIENTS}:
        raise ConfigError(f"{shown!r}: s3_client is one of {', '.join(_S3_CLIENTS)}, not {client!r}")
    _refuse_links(shown, url)
    if client == "obstore":
        return _obstore_s3(shown, options), url.partition("://")[2]
    if scheme in _UNLISTED:
        options.setdefault("use_listings_cache", False)
    if scheme in _SFTP:
        # See `_from_json`.
        options["skip_instance_cache"] = True
    try:
        with _mapped(shown, "cannot open"):
            try:
                file_system, path = fsspec.url_to_fs(url, **options)
            except (ValueError, TypeError, ImportError) as error:
                raise ConfigError(f"fsspec cannot open {shown!r}: {error}") from error
    except WriteError:
        # Its frames hold the options.
        options.clear()
        raise
    return file_system, str(path)


def _refuse_links(shown: str, url: str) -> None:
    """Refuse chained URLs whose first file system does not show what is there, or not where it is said to be.

    Raises:
        ConfigError: It is such a URL.
    """
    first = url.partition("::")[0] if "::" in url else ""
    if first in {"simplecache", "filecache", "blockcache", "cached"}:
        raise ConfigError(
            f"{shown!r}: a checkpoint cannot lie behind a cache, which goes on to show what was replaced: "
            f"leave {first}:: out"
        )
    if first == "dir":
        raise ConfigError(f"{shown!r}: leave dir:: out, for which fsspec appends the path twice")


def _obstore_s3(shown: str, options: dict[str, Any]) -> Any:
    """Return obstore's file system for S3, configured by options in the terms of s3fs.

    Raises:
        ConfigError: obstore is missing, or does not know an option.
    """
    try:
        from obstore.fsspec import FsspecStore
    except ImportError as error:
        raise ConfigError(f"{shown!r}: s3_client obstore needs pip install 'distckpt[obstore]'") from error
    given = {_OBSTORE_OPTIONS.get(name, ""): value for name, value in options.items()}
    unknown = sorted(options.keys() - _OBSTORE_OPTIONS.keys() - {"client_kwargs"})
    client_options = dict(options.get("client_kwargs") or {})
    unknown += [f"client_kwargs.{name}" for name in client_options if name not in _OBSTORE_CLIENT_OPTIONS]
    if unknown:
        raise ConfigError(f"{shown!r}: storage options that obstore has not: {', '.join(unknown)}")
    within = {_OBSTORE_CLIENT_OPTIONS[name]: value for name, value in client_options.items()}
    # What stands outside takes precedence, as in s3fs.
    merged = {**within, **given}
    config = {name: value for name, value in merged.items() if name and value not in (None, False)}
    # The parts bear no checksum of ours, and over https the line has one.
    config["unsigned_payload"] = True
    connection: Any = {"timeout": _REQUEST_TIMEOUT}
    if str(config.get("endpoint", "")).startswith("http://"):
        connection["allow_http"] = True
    try:
        make: Any = FsspecStore
        return make("s3", config=config, client_options=connection)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{shown!r}: obstore does not take its options: {error}") from error


def _to_json(file_system: Any, shown: str, options: Mapping[str, Any]) -> str:
    """Return what opens `file_system` in any process.

    Raises:
        ConfigError: An option cannot be handed to it.
    """
    from fsspec.json import FilesystemJSONEncoder

    kind = type(file_system)
    # As its `to_json`, but that refuses None, which is many an option's default, and takes bytes for a list.
    described = {
        "cls": f"{kind.__module__}:{kind.__name__}",
        "protocol": min(_protocols(file_system)),
        "args": list(file_system.storage_args),
        **file_system.storage_options,
    }
    try:
        return json.dumps(described, cls=FilesystemJSONEncoder)
    except (TypeError, ValueError) as error:
        names = [name for name, value in options.items() if not _is_json(value)]
        what = f"the storage option {', '.join(names)}" if names else "a storage option"
        raise ConfigError(f"{shown!r}: {what} cannot be handed to worker processes: {error}") from error


def _is_json(value: object) -> bool:
    from fsspec.json import FilesystemJSONEncoder

    try:
        json.dumps(value, cls=FilesystemJSONEncoder)
    except (TypeError, ValueError):
        return False
    return True


def _is_in_memory(file_system: Any, url: str) -> bool:
    """Say whether files lie in this process: MemoryFileSystem, also below another one."""
    from fsspec.implementations.memory import MemoryFileSystem

    return any(isinstance(one, MemoryFileSystem) for one in _chain(file_system)) or any(
        link.partition(":")[0] == "memory" for link in url.split("::")
    )


def _chain(file_system: Any) -> Iterable[Any]:
    from fsspec.spec import AbstractFileSystem

    while isinstance(file_system, AbstractFileSystem):
        yield file_system
        file_system = getattr(file_system, "fs", None)


def _without_password(url: str) -> str:
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", url)
