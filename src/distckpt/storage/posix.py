"""Local disk and NFS through system calls.

Invariants:
    * An image is created exclusively, once; lanes only open what exists. What a lane wrote of it counts as
      written after every byte was accepted and fsync succeeded.
    * `put` makes durable: the new file, its name, and the names of all images finished before it. A crash at
      any instant leaves the old file or the new one.
    * Nothing is created, written or removed outside the directory, whatever names and links lie in it.

Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import functools
import itertools
import os
import stat
import threading
import time
from collections import deque
from concurrent.futures import wait
from typing import TYPE_CHECKING, NoReturn, TypeVar

from distckpt.errors import WriteError
from distckpt.storage import SHARED_NAME, check_name
from distckpt.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from distckpt.storage import Receipt, Storage, StorageSpec

_T = TypeVar("_T")
_MAX_BUFFERS = 1024
"""Source: IOV_MAX, limits.h(0p); Linux accepts 1024 buffers in one call."""
_MKDIR_ATTEMPTS = 5
_MKDIR_PAUSE_S = 0.02
_PASSING = {errno.ESTALE, errno.EAGAIN, errno.EIO}
"""NFS: another host replaced what was open here, or a `soft` mount lost its server for a moment."""
_PASSING_S = 1.0
_PASSING_PAUSES_S = (0.01, 0.05)
_PAGE_BYTES = 4096
_DIRECT_BYTES = 1 << 20
"""Below this a write through the page cache is no slower, and the pages are few."""
_FEW_DIRECTORIES = 4
_SYNCS = 16
_PARTIAL = ".tmp"
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_EXISTING_FILE = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_READ_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Not to wait for the other end of a pipe that somebody has put in place of a file."""


def _fail(error: OSError, path: str, doing: str, offset: int | None = None) -> NoReturn:
    code = errno.errorcode.get(error.errno or 0, "?")
    where = "" if offset is None else f" at byte {offset}"
    raise WriteError(
        f"{doing} {path}{where}: {os.strerror(error.errno or 0)} [{code}]",
        errno=error.errno,
        path=path,
        offset=offset,
    ) from error


class PosixImage:
    """A file that exists, open in one lane.

    Whole pages go past the page cache (O_DIRECT) where the file system and the buffers allow it, the rest
    through it; fsync covers both. Several lanes may write to one file: where their stretches share a page,
    both write it through the cache, which is one for all of them.

    Args:
        path: Absolute path of the file.
        direct_io: Whether to go past the page cache at all.

    Raises:
        OSError: It cannot be opened for writing.
    """

    def __init__(self, path: str, *, direct_io: bool = True) -> None:
        self._path = path
        self._is_cancelled = False
        self._fd = self._direct_fd = -1
        self._fd = os.open(path, _EXISTING_FILE)
        self._may_be_direct = direct_io

    def __del__(self) -> None:
        # A thread that was given up has held it until its system call returned.
        self.close()

    def write(self, offset: int, buffers: Sequence[memoryview], crc32c: int | None = None) -> None:
        """See `ImageFile.write`; the file system checks no checksum.

        Raises:
            WriteError: The file system refused.
        """
        left = deque(buffer for buffer in buffers if buffer.nbytes)
        # A traceback that somebody holds must not hold the memory behind the buffers.
        with contextlib.ExitStack() as views:
            whole = _whole_pages(left)
            if whole >= _DIRECT_BYTES and offset % _PAGE_BYTES == 0 and self._is_direct():
                offset += self._write_direct(offset, left, whole, views)
            while left:
                self._refuse_cancelled(offset)
                try:
                    written = os.pwritev(self._fd, _first(left), offset)
                except OSError as error:
                    _fail(error, self._path, "cannot write", offset)
                if written == 0:
                    _fail(OSError(errno.EIO, "no bytes accepted"), self._path, "cannot write", offset)
                _advance(left, written, views)
                offset += written

    def _is_direct(self) -> bool:
        if self._may_be_direct:
            self._may_be_direct = False
            # Some file systems refuse it here, some at the first write: both are written through the cache.
            with contextlib.suppress(OSError):
                self._direct_fd = os.open(self._path, _EXISTING_FILE | os.O_DIRECT)
        return self._direct_fd >= 0

    def _write_direct(
        self, offset: int, left: deque[memoryview], whole: int, views: contextlib.ExitStack
    ) -> int:
        """Write the first `whole` bytes of `left` past the page cache, as far as it goes; returns how far."""
        done = 0
        while done < whole and done % _PAGE_BYTES == 0:
            self._refuse_cancelled(offset + done)
            try:
                written = os.pwritev(self._direct_fd, _first_bytes(left, whole - done, views), offset + done)
            except OSError as error:
                # The file system's answer to buffers that are not aligned in memory, or to O_DIRECT as such.
                if error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
                    break
                _fail(error, self._path, "cannot write", offset + done)
            if written <= 0:
                break
            _advance(left, written, views)
            done += written
        return done

    def finish(self) -> list[Receipt]:
        """See `ImageFile.finish`: the size of the file tells the rest.

        Raises:
            WriteError: The bytes are not durable.
        """
        try:
            try:
                os.fsync(self._fd)
            finally:
                fds = self._take_fds()
                with contextlib.ExitStack() as closing:
                    for fd in fds:
                        closing.callback(os.close, fd)
        except OSError as error:
            _fail(error, self._path, "cannot make durable")
        return []

    def cancel(self) -> None:
        """See `ImageFile.cancel`: a system call ends when it ends, and no other one follows."""
        self._is_cancelled = True

    def close(self) -> None:
        """See `ImageFile.close`."""
        for fd in self._take_fds():
            with contextlib.suppress(OSError):
                os.close(fd)

    def _refuse_cancelled(self, offset: int) -> None:
        if self._is_cancelled:
            _fail(OSError(errno.ECANCELED, "given up"), self._path, "cannot write", offset)

    def _take_fds(self) -> list[int]:
        fds = [fd for fd in (self._direct_fd, self._fd) if fd >= 0]
        self._direct_fd = self._fd = -1
        return fds


def _look(call: Callable[[], _T]) -> _T:
    """Return what `call` returns, which only looks, and is tried again after an error that may pass.

    Never for what writes or syncs: after a failed fsync the pages are gone, and the next one succeeds.

    Raises:
        OSError: It did not pass, or took so long that there was no sense in waiting for it again.
    """
    started = time.monotonic()
    for pause_s in _PASSING_PAUSES_S:
        try:
            return call()
        except OSError as error:
            if error.errno not in _PASSING or time.monotonic() - started > _PASSING_S:
                raise
        threading.Event().wait(pause_s)
    return call()


def _forget(folder: str, *, and_list: bool = False) -> None:
    """Have an NFS client forget which files it knows a directory to hold, and so ask its server.

    It remembers for half a minute that a file was absent. Opening the directory makes it look at the time of
    the last change, which stays the same over changes within one tick of the server's clock.

    Args:
        folder: The directory.
        and_list: Whether to ask at once: only that tells it of files that it takes to be absent.

    Source: nfs(5), acdirmin and lookupcache.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if and_list:
            os.listdir(fd)
    finally:
        os.close(fd)


def _refresh(folder: str) -> None:
    # One that may be entered and not read can only be taken as it is.
    with contextlib.suppress(PermissionError):
        _forget(folder, and_list=True)


def _open_to_read(path: str, _: int) -> int:
    return os.open(path, _READ_FILE)


def _with_file(path: str, offset: int, call: Callable[[int, int], _T]) -> _T:
    """Return what `call` returns of the descriptor of a file and of how many bytes it has from `offset` on.

    Raises:
        OSError: It cannot be opened or read.
        WriteError: It is no file.
    """
    with open(path, "rb", buffering=0, opener=_open_to_read) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            _fail(OSError(errno.EINVAL, "not a regular file"), path, "cannot read what is no file:")
        return call(file.fileno(), max(0, status.st_size - offset))


def _read_into(fd: int, target: memoryview, offset: int) -> int:
    """Fill `target` from `offset` on; returns how many bytes there were."""
    done = 0
    while done < len(target):
        got = os.preadv(fd, [target[done:]], offset + done)
        if got == 0:
            break
        done += got
    return done


def _rename_new(source: str, target: str) -> bool:
    """Give a file its name, unless there is one of that name with the same bytes: another rank has the same.

    Returns:
        Whether it was given.

    Raises:
        FileExistsError: There is another one of that name.
        OSError: The file system refuses.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        if os.path.islink(target) or not filecmp.cmp(source, target, shallow=False):
            raise
        os.unlink(source)
        return False
    except OSError as error:
        # A file system without links.
        if error.errno not in {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}:
            raise
        if os.path.lexists(target):
            raise OSError(errno.EEXIST, "there is one") from error
        os.rename(source, target)
    else:
        os.unlink(source)
    return True


def _is_directory(path: str) -> bool:
    """As os.path.isdir, but what else is wrong is raised."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _whole_pages(buffers: Iterable[memoryview]) -> int:
    """Return the bytes at the start of `buffers` that are whole pages, in buffers of whole pages each."""
    whole = 0
    for buffer in buffers:
        whole += buffer.nbytes // _PAGE_BYTES * _PAGE_BYTES
        if buffer.nbytes % _PAGE_BYTES:
            break
    return whole


def _first(left: deque[memoryview]) -> list[memoryview]:
    return list(itertools.islice(left, _MAX_BUFFERS))


def _first_bytes(left: deque[memoryview], nbytes: int, views: contextlib.ExitStack) -> list[memoryview]:
    """Return what holds the first `nbytes` bytes of `left`, or as many of them as one call takes."""
    taken = []
    for buffer in itertools.islice(left, _MAX_BUFFERS):
        taken.append(buffer if buffer.nbytes <= nbytes else views.enter_context(buffer[:nbytes]))
        nbytes -= taken[-1].nbytes
        if nbytes == 0:
            break
    return taken


def _advance(left: deque[memoryview], written: int, views: contextlib.ExitStack) -> None:
    """Take the first `written` bytes off `left`."""
    while left and written >= left[0].nbytes:
        written -= left.popleft().nbytes
    if written:
        left[0] = views.enter_context(left[0][written:])


class PosixStorage:
    """A checkpoint directory on a file system of this machine.

    Args:
        root: Absolute path of the directory.
        direct_io: Whether images are written past the page cache where the file system can.
    """

    in_flight = 1
    is_stream = False
    closes_apart = True
    """Whether files may be finished on several threads at once."""

    def __init__(self, root: str, *, direct_io: bool = True) -> None:
        self.root = root
        self.url = root
        self.spec: StorageSpec = {"kind": "posix", "root": root}
        if not direct_io:
            self.spec["direct_io"] = "off"
        self._direct_io = direct_io
        self._changed: set[str] = set()
        """Directories below the root in which names were made that are not durable."""

    def prepare(self) -> None:
        """See `Storage.prepare`.

        One directory at a time, the name of each durable before there is anything in it: whoever made the
        last one that is there may have died before its name was.
        """
        missing: list[str] = []
        there = self.root
        try:
            while not _look(functools.partial(_is_directory, there)):
                missing.append(there)
                there = os.path.dirname(there)
        except OSError as error:
            _fail(error, there, "cannot look at")
        above = os.path.dirname(there)
        # A directory that may be entered and not read: then somebody else has made what is below.
        if os.access(above, os.R_OK):
            self._sync_directory(above)
        for folder in reversed(missing):
            self._make_directory(folder)
            self._sync_directory(os.path.dirname(folder))

    def part_bytes(self, file_bytes: int) -> int:
        """See `Storage.part_bytes`."""
        return 0

    def create_image(self, name: str, nbytes: int) -> str:
        """See `Storage.create_image`.

        Raises:
            WriteError: There is a file of this name, or the file system refuses.
        """
        path = self._path(name)
        token = ""
        try:
            if SHARED_NAME.fullmatch(name):
                token = f".{os.urandom(8).hex()}{_PARTIAL}"
                self._make_directory(os.path.dirname(path))
                self._note_changed(os.path.dirname(path))
            os.close(os.open(path + token, _NEW_FILE, 0o644))
        except OSError as error:
            _fail(error, path, "cannot create")
        return token

    def open_image(self, name: str, token: str = "") -> PosixImage:
        """See `Storage.open_image`."""
        path = self._path(name) + token
        try:
            return PosixImage(path, direct_io=self._direct_io)
        except OSError as error:
            _fail(error, path, "cannot open")

    def complete_image(self, name: str, token: str, nbytes: int, receipts: Sequence[Receipt]) -> None:
        """See `Storage.complete_image`: it is a file already, or gets its name now.

        Raises:
            WriteError: The file holds another number of bytes, or none can be told; or there is another one.
        """
        path = self._path(name)
        try:
            size = _look(lambda: os.lstat(path + token).st_size)
        except OSError as error:
            _fail(error, path, "cannot check")
        if size != nbytes:
            raise WriteError(f"{path} holds {size} bytes after writing {nbytes}", path=path, offset=size)
        if token:
            try:
                if _rename_new(path + token, path):
                    self._note_changed(os.path.dirname(path))
            except OSError as error:
                _fail(error, path, "cannot name")

    def link(self, name: str, source: Storage, other: str, nbytes: int) -> None:
        """See `Linking.link`: a hard link.

        Raises:
            WriteError: There is no such file, or the file system has no links between the two.
        """
        path, there = self._path(name), os.path.join(source.url, other)
        try:
            if os.lstat(there).st_size != nbytes:
                _fail(OSError(errno.EIO, "of another size"), there, "cannot link")
            os.link(there, path, follow_symlinks=False)
            self._note_changed(os.path.dirname(path))
        except OSError as error:
            _fail(error, path, "cannot link")

    def discard_image(self, name: str, token: str) -> None:
        """See `Storage.discard_image`.

        What has its name already stays, if the name may be another save's by now: the next save removes it.
        """
        self.delete(name + token)

    def unfinished(self) -> list[tuple[str, str]]:
        """See `Storage.unfinished`: `list` shows them."""
        return []

    def abort(self, name: str, handle: str) -> None:
        """See `Storage.abort`."""

    def put(self, name: str, data: bytes, last_check: Callable[[], None] | None = None) -> None:
        """See `Storage.put`."""
        path = self._path(name)
        folder = os.path.dirname(path)
        self._make_directory(folder)
        partial = f"{path}.{os.urandom(8).hex()}{_PARTIAL}"
        try:
            fd = os.open(partial, _NEW_FILE, 0o644)
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(fd, left) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            if last_check is not None:
                last_check()
            os.rename(partial, path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            if isinstance(error, OSError):
                _fail(error, path, "cannot write")
            raise
        self._note_changed(folder)
        changed, self._changed = self._changed, set()
        self._sync_directories(changed)

    def revoke(self, name: str) -> None:
        """See `Storage.revoke`: without the file that it is about to rename, the step fails."""
        folder, _, base = name.rpartition("/")
        prefix = f"{folder}/" if folder else ""
        if folder:
            self._make_directory(self._path(folder))
        # An NFS client may show a directory as it was half a minute ago, unless it has changed it itself.
        self.create_image(f"{prefix}{base}.{os.urandom(8).hex()}{_PARTIAL}", 0)
        for entry in self.list(folder):
            if entry.startswith(f"{base}.") and entry.endswith(_PARTIAL):
                self.delete(prefix + entry)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
        """See `Storage.read`.

        Raises:
            WriteError: The file cannot be read, or is no file.
        """

        def read(fd: int, left: int) -> bytearray:
            # No more than there is, whatever was asked for: what asks may have been read from a file.
            data = bytearray(left if nbytes is None else max(0, min(nbytes, left)))
            with memoryview(data) as view:
                done = _read_into(fd, view, offset)
            del data[done:]
            return data

        return self._reading(name, offset, read)

    def fill(self, name: str, offset: int, target: memoryview) -> int | None:
        """See `Filling.fill`.

        Raises:
            WriteError: As for `read`.
        """
        return self._reading(name, offset, lambda fd, left: _read_into(fd, target[:left], offset))

    def _reading(self, name: str, offset: int, call: Callable[[int, int], _T]) -> _T | None:
        """Return what `call` returns of a file, as `_with_file` tells; None if it is absent."""
        path = self._path(name)
        try:
            return self._look_twice(name, lambda: _with_file(path, offset, call))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except MemoryError:
            _fail(OSError(errno.ENOMEM, "too large"), path, "cannot read", offset)
        except OSError as error:
            _fail(error, path, "cannot read", offset)

    def _look_twice(self, name: str, call: Callable[[], _T]) -> _T:
        """Return what `call` returns, which looks at `name`: an NFS client may remember what is outdated.

        Raises:
            OSError: It is as the client said.
        """
        try:
            return _look(call)
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ESTALE}:
                raise
        self._look_anew(name)
        return _look(call)

    def _look_anew(self, name: str) -> None:
        """Have an NFS client ask its server which files there are on the way to `name`."""
        try:
            _refresh(self.root)
        except FileNotFoundError:
            _refresh(os.path.dirname(self.root))
            _refresh(self.root)
        folder = self.root
        for part in name.split("/")[:-1]:
            folder = os.path.join(folder, part)
            _refresh(folder)

    def list(self, prefix: str = "") -> dict[str, int]:
        """See `Storage.list`."""
        folder = self._path(prefix) if prefix else self.root
        try:
            return self._look_twice(prefix, lambda: self._list(folder))
        except FileNotFoundError:
            return {}
        except OSError as error:
            _fail(error, folder, "cannot list")

    def _list(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = {}
        _forget(folder)
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        found[entry.name] = status.st_size
                    elif stat.S_ISDIR(status.st_mode):
                        found[entry.name + "/"] = 0
        return found

    def linked_directories(self) -> Sequence[str]:
        """See `distckpt.storage.linked_directories`."""
        try:
            with os.scandir(self.root) as entries:
                return [f"{entry.name}/" for entry in entries if entry.is_symlink() and entry.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            _fail(error, self.root, "cannot list")

    def delete(self, name: str) -> None:
        """See `Storage.delete`."""
        path = self._path(name)
        remove: Callable[[str], None] = os.rmdir if name.endswith("/") else os.unlink
        try:
            remove(path)
        except FileNotFoundError:
            return
        except OSError as error:
            _fail(error, path, "cannot remove")

    def last_change(self) -> float | None:
        """See `Storage.last_change`."""
        try:
            return _look(self._last_change)
        except OSError as error:
            _fail(error, self.root, "cannot list")

    def _last_change(self) -> float | None:
        newest: float | None = None
        folders = [self.root]
        with contextlib.suppress(FileNotFoundError):
            while folders:
                folder = folders.pop()
                newest = max(newest or 0.0, os.lstat(folder).st_mtime)
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        else:
                            with contextlib.suppress(FileNotFoundError):
                                newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
        return newest

    def remove_directory(self) -> bool:
        """See `Storage.remove_directory`."""
        try:
            os.rmdir(self.root)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                return False
            _fail(error, self.root, "cannot remove")
        return True

    def _path(self, name: str) -> str:
        """Return the path of `name`, which does not lead out of the directory.

        Raises:
            IntegrityError: The name would.
            WriteError: A link on the way would.
        """
        check_name(self.url, name)
        folder = self.root
        for part in name.split("/")[:-1]:
            folder = os.path.join(folder, part)
            if os.path.islink(folder):
                _fail(OSError(errno.ELOOP, "a symbolic link"), folder, "will not follow the link")
        return os.path.join(self.root, name)

    def _note_changed(self, folder: str) -> None:
        """Note that the next `put` makes `folder` durable, and the way to it."""
        while folder not in self._changed:
            self._changed.add(folder)
            if folder == self.root:
                break
            folder = os.path.dirname(folder)

    def _make_directory(self, folder: str) -> None:
        for attempt in range(_MKDIR_ATTEMPTS):
            try:
                os.makedirs(folder, exist_ok=True)
                return
            except (FileExistsError, FileNotFoundError) as error:
                # Others make the same directories: on Lustre and NFS mkdir loses that race in several ways.
                if attempt + 1 == _MKDIR_ATTEMPTS:
                    _fail(error, folder, "cannot make directory")
            except OSError as error:
                _fail(error, folder, "cannot make directory")
            threading.Event().wait(_MKDIR_PAUSE_S * attempt)

    def _sync_directories(self, folders: set[str]) -> None:
        """Make the names in `folders` durable; many at once, which their file system commits together."""
        if len(folders) <= _FEW_DIRECTORIES:
            for folder in sorted(folders, key=len, reverse=True):
                self._sync_directory(folder)
            return
        threads = Threads(_SYNCS, "distckpt-sync")
        try:
            syncing = [threads.submit(self._sync_directory, folder) for folder in folders]
            wait(syncing)
            for each in syncing:
                each.result()
        finally:
            threads.close(0.0)

    def _sync_directory(self, folder: str) -> None:
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            _fail(error, folder, "cannot make durable the directory")
