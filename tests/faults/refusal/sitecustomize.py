"""Refuses the n-th file-system call below one directory, in this process and in workers alike.

`Refusals` arms and disarms it, as often as wanted, while the processes go on. It gets into this process by
`Refusals.install`, and into every Python process that is started by exec with `Refusals.environment`: the
interpreter imports this file at start, as `sitecustomize`.

Calls are those of `os` that distckpt makes; each has a name: create, open (of a file), opendir (of a
directory), direct (open with O_DIRECT), write, pwritev, preadv, fsync, close, rename, unlink, rmdir, mkdir,
scandir, stat (lstat too). A close that is refused has closed, as on Linux.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "DISTCKPT_TEST_REFUSAL"
_ON_PATH = ("rename", "unlink", "rmdir", "mkdir", "scandir", "stat", "lstat")
_ON_FD = ("write", "pwritev", "preadv", "fsync", "close")


class Hit(NamedTuple):
    """A call that was refused."""

    op: str
    path: str
    by_worker: bool


class _Interceptor:
    def __init__(self, root: str, control: str) -> None:
        self._root = root
        self._real = {name: getattr(os, name) for name in ("open", *_ON_PATH, *_ON_FD)}
        self._fd = os.open(control, os.O_RDWR | os.O_CLOEXEC)
        os.open = self._open
        for name in _ON_PATH:
            setattr(os, name, self._on_path(name))
        for name in _ON_FD:
            setattr(os, name, self._on_fd(name))

    def remove(self) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        os.close(self._fd)

    def load(self) -> dict[str, Any]:
        control: dict[str, Any] = json.loads(os.pread(self._fd, 1 << 16, 0))
        return control

    @contextlib.contextmanager
    def changing(self) -> Iterator[dict[str, Any]]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            control = self.load()
            yield control
            data = json.dumps(control).encode()
            os.pwrite(self._fd, data.ljust(os.fstat(self._fd).st_size), 0)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _is_below(self, path: str) -> bool:
        return path == self._root or path.startswith(self._root + "/")

    def _is_there(self, path: str | os.PathLike[str]) -> bool:
        try:
            self._real["lstat"](path)
        except OSError:
            return False
        return True

    def _refuse(self, op: str, path: str) -> None:
        """Raise if this call is to be refused."""
        if not self.load()["is_armed"]:
            return
        with self.changing() as control:
            if not control["is_armed"]:
                return
            has_begun = control["hit"] is not None
            control["count"] += op == control["op"]
            is_hit = (
                op in control["since"]
                if has_begun
                else op == control["op"] and control["count"] == control["n"]
            )
            if not is_hit:
                return
            if control["hit"] is None:
                control["hit"] = [op, path, os.getpid() != control["pid"]]
            number = control["errno"]
        raise OSError(number, os.strerror(number), path)

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if isinstance(path, (str, os.PathLike)) and self._is_below(os.fspath(path)):
            kinds = ((os.O_CREAT, "create"), (os.O_DIRECTORY, "opendir"), (os.O_DIRECT, "direct"))
            op = next((name for flag, name in kinds if flags & flag == flag), "open")
            self._refuse(op, os.fspath(path))
        return int(self._real["open"](path, flags, mode, dir_fd=dir_fd))

    def _on_path(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            # The kernel says first that a directory exists, and only then what else is wrong.
            is_made = name == "mkdir" and self._is_there(path)
            if isinstance(path, (str, os.PathLike)) and self._is_below(os.fspath(path)) and not is_made:
                self._refuse("stat" if name == "lstat" else name, os.fspath(path))
            return real(path, *arguments, **options)

        return call

    def _on_fd(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(fd: int, *arguments: Any) -> Any:
            try:
                path = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                path = ""
            if self._is_below(path):
                try:
                    self._refuse(name, path)
                except OSError:
                    if name == "close":
                        real(fd)
                    raise
            return real(fd, *arguments)

        return call


class Refusals:
    """Arms and disarms the refusal of calls below one directory.

    Args:
        root: The directory, an absolute path.
        control: A file that does not exist, outside of `root`.
    """

    def __init__(self, root: str | os.PathLike[str], control: str | os.PathLike[str]) -> None:
        self._root, self._control = os.fspath(root), os.fspath(control)
        Path(control).write_text(json.dumps({"is_armed": False}).ljust(4096))
        self._interceptor: _Interceptor | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables that get it into Python processes that are started with them."""
        here, before = str(Path(__file__).parent), os.environ.get("PYTHONPATH")
        return {
            VARIABLE: json.dumps([self._root, self._control]),
            "PYTHONPATH": f"{here}:{before}" if before else here,
        }

    def install(self) -> None:
        """Get it into this process."""
        self._interceptor = _Interceptor(self._root, self._control)

    def remove(self) -> None:
        """Get it out of this process."""
        assert self._interceptor is not None
        self._interceptor.remove()

    def arm(self, op: str, n: int, number: int, since: Collection[str] = ()) -> None:
        """Refuse a call, and then all calls of some kinds.

        Args:
            op: Kind of the call.
            n: How many of that kind there are from now on to that one, itself included.
            number: The errno.
            since: What is refused from then on.
        """
        assert self._interceptor is not None
        with self._interceptor.changing() as control:
            control.update(
                is_armed=True, op=op, n=n, errno=number, since=list(since), count=0, hit=None, pid=os.getpid()
            )

    def disarm(self) -> Hit | None:
        """Refuse nothing any more; returns the first call that was refused, or None."""
        assert self._interceptor is not None
        with self._interceptor.changing() as control:
            control["is_armed"] = False
            return None if control["hit"] is None else Hit(*control["hit"])


if __name__ == "sitecustomize" and VARIABLE in os.environ:
    _Interceptor(*json.loads(os.environ[VARIABLE]))
