"""Local disk and NFS through system calls.

Invariants:
    * A file counts as written only after every byte was accepted, fsync succeeded and its size was checked.
    * `put` makes durable: the new file, its name, and the names of all images finished before it. A crash at
      any instant leaves the old file or the new one.

Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, NoReturn

from distckpt.errors import WriteError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distckpt.storage import StorageSpec

_MAX_BUFFERS = 1024
"""Source: IOV_MAX, limits.h(0p); Linux accepts 1024 buffers in one call."""
_MKDIR_ATTEMPTS = 5
_PAGE_BYTES = 4096
_DIRECT_BYTES = 1 << 20
"""Below this a write through the page cache is no slower, and the pages are few."""
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


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
    """A file that was created exclusively and is written by one lane.

    Whole pages go past the page cache (O_DIRECT) where the file system and the buffers allow it, the rest
    through it; fsync covers both.
    """

    def __init__(self, fd: int, root: str, name: str) -> None:
        self.name = name
        self._path = os.path.join(root, name)
        self._fd = fd
        self._direct_fd = -1
        # Some file systems refuse it here, some at the first write: both are written through the cache.
        with contextlib.suppress(OSError):
            self._direct_fd = os.open(self._path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """See `ImageFile.write`.

        Raises:
            WriteError: The file system refused.
        """
        pending = [buffer for buffer in buffers if buffer.nbytes]
        if len(pending) == 1:
            written = self._write_direct(offset, pending[0])
            offset += written
            pending = [pending[0][written:]] if written < pending[0].nbytes else []
        try:
            while pending:
                written = os.pwritev(self._fd, pending[:_MAX_BUFFERS], offset)
                if written == 0:
                    _fail(OSError(errno.EIO, "no bytes accepted"), self._path, "cannot write", offset)
                offset += written
                while pending and written >= pending[0].nbytes:
                    written -= pending.pop(0).nbytes
                if written:
                    pending[0] = pending[0][written:]
        except OSError as error:
            _fail(error, self._path, "cannot write", offset)

    def _write_direct(self, offset: int, buffer: memoryview) -> int:
        """Write the whole pages of `buffer` past the page cache; returns how many bytes that were."""
        whole = buffer.nbytes // _PAGE_BYTES * _PAGE_BYTES
        done = 0
        while self._direct_fd >= 0 and whole - done >= _DIRECT_BYTES and (offset + done) % _PAGE_BYTES == 0:
            try:
                written = os.pwritev(self._direct_fd, [buffer[done:whole]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    break
                _fail(error, self._path, "cannot write", offset + done)
            if written <= 0:
                break
            done += written
        return done

    def finish(self, nbytes: int) -> None:
        """See `ImageFile.finish`.

        Raises:
            WriteError: The bytes are not durable, or their number is not `nbytes`.
        """
        try:
            os.fsync(self._fd)
            size = os.fstat(self._fd).st_size
        except OSError as error:
            _fail(error, self._path, "cannot make durable")
        if size != nbytes:
            raise WriteError(
                f"{self._path} holds {size} bytes after writing {nbytes}", path=self._path, offset=size
            )
        try:
            self._close()
        except OSError as error:
            _fail(error, self._path, "cannot close")

    def abort(self) -> None:
        """See `ImageFile.abort`."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _close(self) -> None:
        fds = [fd for fd in (self._direct_fd, self._fd) if fd >= 0]
        self._direct_fd = self._fd = -1
        for fd in fds:
            os.close(fd)


class PosixStorage:
    """A checkpoint directory on a file system of this machine.

    Args:
        root: Absolute path of the directory.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.url = root
        self.spec: StorageSpec = {"kind": "posix", "root": root}

    def prepare(self) -> None:
        """See `Storage.prepare`."""
        self._make_directory(self.root)

    def create_image(self, names: Sequence[str]) -> PosixImage:
        """See `Storage.create_image`.

        Raises:
            WriteError: Every name is taken, or the file system refused.
        """
        for name in names:
            path = os.path.join(self.root, name)
            try:
                return PosixImage(os.open(path, _NEW_FILE, 0o644), self.root, name)
            except FileExistsError:
                continue
            except OSError as error:
                _fail(error, path, "cannot create")
        path = os.path.join(self.root, names[-1])
        raise WriteError(f"cannot create {path}: it exists already [EEXIST]", errno=errno.EEXIST, path=path)

    def put(self, name: str, data: bytes) -> None:
        """See `Storage.put`."""
        path = os.path.join(self.root, name)
        folder = os.path.dirname(path)
        self._make_directory(folder)
        partial = f"{path}.{os.urandom(8).hex()}.tmp"
        try:
            fd = os.open(partial, _NEW_FILE, 0o644)
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(fd, left) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(partial, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            _fail(error, path, "cannot write")
        while True:
            self._sync_directory(folder)
            if folder == self.root:
                break
            folder = os.path.dirname(folder)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytearray | None:
        """See `Storage.read`."""
        path = os.path.join(self.root, name)
        try:
            with open(path, "rb", buffering=0) as file:
                if nbytes is None:
                    nbytes = max(0, os.fstat(file.fileno()).st_size - offset)
                data = bytearray(nbytes)
                view, done = memoryview(data), 0
                while done < nbytes:
                    got = os.preadv(file.fileno(), [view[done:]], offset + done)
                    if got == 0:
                        break
                    done += got
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            _fail(error, path, "cannot read", offset)
        view.release()
        del data[done:]
        return data

    def list(self, prefix: str = "") -> dict[str, int]:
        """See `Storage.list`."""
        folder = os.path.join(self.root, prefix) if prefix else self.root
        found: dict[str, int] = {}
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            found[entry.name] = status.st_size
                        elif stat.S_ISDIR(status.st_mode):
                            found[entry.name + "/"] = 0
        except FileNotFoundError:
            return {}
        except OSError as error:
            _fail(error, folder, "cannot list")
        return found

    def delete(self, name: str) -> None:
        """See `Storage.delete`."""
        path = os.path.join(self.root, name)
        remove: Callable[[str], None] = os.rmdir if name.endswith("/") else os.unlink
        try:
            remove(path)
        except FileNotFoundError:
            return
        except OSError as error:
            _fail(error, path, "cannot remove")

    def _make_directory(self, folder: str) -> None:
        created: list[str] = []
        for attempt in range(_MKDIR_ATTEMPTS):
            try:
                missing = folder
                while not os.path.isdir(missing):
                    created.append(missing)
                    missing = os.path.dirname(missing)
                os.makedirs(folder, exist_ok=True)
                break
            except (FileExistsError, FileNotFoundError) as error:
                # Others make the same directories: on Lustre and NFS mkdir loses that race in several ways.
                if attempt + 1 == _MKDIR_ATTEMPTS:
                    _fail(error, folder, "cannot make directory")
            except OSError as error:
                _fail(error, folder, "cannot make directory")
        for path in created:
            self._sync_directory(os.path.dirname(path))

    def _sync_directory(self, folder: str) -> None:
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            _fail(error, folder, "cannot make durable the directory")
