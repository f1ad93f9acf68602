"""A shim between a process and the file system: records, fails, kills or stops at chosen operations.

It replaces functions of `os` for everything below one directory, its root. There are two ways to get it:

* `install(config)` in the process itself, which returns a function that takes it out again;
* every Python process that is started by exec with the environment `environment(config)` returns: the
  interpreter imports this file at start, as `sitecustomize`. So it gets into exec'd workers.

The configuration is plain JSON (see `Config`): root, a folder of the shim's own outside the root, the role of
the process ("rank0"; workers that inherit the configuration are "rank0.worker0", "rank0.worker1", ... in the
order in which they start), whether to keep what is written in the log, and rules.

Each operation below the root is done, and one line appended to `{folder}/log`, under one lock for all
processes: the log is the one true order. See `Entry` for what it holds. An operation that changes files and
does not pass through here (another function of `os`, a plain `open(path, "w")`) becomes an entry "unseen".

Rules, each a dict, the first that matches acts:

    do      "fail": raise OSError(errno); "kill": SIGKILL to `target`; "stop": SIGSTOP to the process itself,
            with the lock released, so that others go on
    n       at the n-th operation that matches, from 1, counted over all processes together; 0: at every one
    since   if true: at the n-th and all after it
    when    "before" (default): the operation is not done; a "stop" does it later. "after": it has been done.
            An "after" counts only operations that succeeded.
    op      regular expression for the whole name of the operation (see `Entry.op`); default: `CHANGES`
    path    regular expression for the whole path, relative to the root; default: any
    role    regular expression for the whole role; default: any
    errno   for "fail": the number
    target  for "kill": "self" (default), "all" (every process that has the shim), or a role
            (the process itself if that is not there). The folder then has a file "killed".

Example, every write to an image fails from the third on:

    rule = {"do": "fail", "errno": errno.ENOSPC, "op": "write", "path": r".*distcp.*", "n": 3, "since": True}
    remove = install({"root": str(path), "folder": str(elsewhere), "role": "rank0", "rules": [rule]})
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypedDict

VARIABLE = "DISTCKPT_TEST_SHIM"
CHANGES = "create|write|truncate|fsync|rename|unlink|rmdir|mkdir|link|symlink"
"""Operations that change something, or make it durable; `open` alone does not."""
_AUDITED = {
    "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.setxattr",
    "os.symlink", "os.truncate", "os.utime",
}  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_ACTIVE: list[_Shim] = []


class Config(TypedDict, total=False):
    """What the shim shall do; see above. `root` and `folder` are absolute; `folder` exists."""

    root: str
    folder: str
    role: str
    keep_data: bool
    rules: list[dict[str, Any]]


class Entry(TypedDict, total=False):
    """One line of the log.

    op: create (an `open` that made the file), open, write, truncate, fsync, rename, unlink, rmdir, mkdir,
        link, symlink, unseen.
    path, to: relative to the root; "" is the root itself.
    handle: of create and open: a name for the descriptor, by which later entries tell which file they mean.
    offset, nbytes, data: of a write; data is base64.
    errno: it failed, and changed nothing.
    """

    op: str
    role: str
    path: str
    to: str
    handle: str
    offset: int
    nbytes: int
    data: str
    errno: int


class _Shim:
    def __init__(self, config: Config) -> None:
        self.root = os.path.abspath(config["root"])
        self.role = config["role"]
        self._folder = config["folder"]
        self._keep_data = config.get("keep_data", True)
        self._rules = config.get("rules", [])
        self._thread_lock = threading.Lock()
        self._inside = threading.local()
        # By descriptor: its handle, its path, and which file it is, for descriptors are used again.
        self._fds: dict[int, tuple[str, str, tuple[int, int]]] = {}
        self._real = {name[3:]: getattr(os, name[3:]) for name in dir(self) if name.startswith("os_")}
        self._log_fd = os.open(
            f"{self._folder}/log", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        self._state_fd = os.open(f"{self._folder}/state", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with self._lock():
            state = self._load()
            state["pids"][self.role] = (os.getpid(), _start_of(os.getpid()))
            self._store(state)
        self.is_active = True
        for name in self._real:
            setattr(os, name, getattr(self, f"os_{name}"))
        if not _ACTIVE:
            # It cannot be taken out again.
            sys.addaudithook(lambda event, arguments: _ACTIVE[-1].audit(event, arguments))
        _ACTIVE.append(self)

    def remove(self) -> None:
        """Take the shim out again."""
        self.is_active = False
        for name, real in self._real.items():
            setattr(os, name, real)
        os.close(self._log_fd)
        os.close(self._state_fd)

    def os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        relative = self._below(path, dir_fd)
        if relative is None:
            return int(self._real["open"](path, flags, mode, dir_fd=dir_fd))

        def do(entry: Entry) -> int:
            assert entry["op"] == "create" or not flags & os.O_TRUNC, "not recorded"
            fd = int(self._real["open"](path, flags, mode))
            status = os.fstat(fd)
            entry["handle"] = f"{os.getpid()}.{self._load()['count']}"
            self._fds[fd] = (entry["handle"], relative, (status.st_dev, status.st_ino))
            return fd

        def op() -> str:
            return "create" if flags & os.O_CREAT and not os.path.lexists(path) else "open"

        return int(self._perform(op, relative, do))

    def os_close(self, fd: int) -> None:
        self._fds.pop(fd, None)
        self._real["close"](fd)

    def os_write(self, fd: int, data: Any) -> int:
        return self._write(fd, [data], None, lambda: self._real["write"](fd, data))

    def os_writev(self, fd: int, buffers: Any) -> int:
        return self._write(fd, buffers, None, lambda: self._real["writev"](fd, buffers))

    def os_pwrite(self, fd: int, data: Any, offset: int) -> int:
        return self._write(fd, [data], offset, lambda: self._real["pwrite"](fd, data, offset))

    def os_pwritev(self, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        return self._write(fd, buffers, offset, lambda: self._real["pwritev"](fd, buffers, offset, flags))

    def os_fsync(self, fd: Any) -> None:
        self._on_fd("fsync", fd, lambda: self._real["fsync"](fd))

    def os_fdatasync(self, fd: Any) -> None:
        self._on_fd("fsync", fd, lambda: self._real["fdatasync"](fd))

    def os_ftruncate(self, fd: int, length: int) -> None:
        self._on_fd("truncate", fd, lambda: self._real["ftruncate"](fd, length), length)

    def os_posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        assert self._known(fd) is None, "not recorded"
        self._real["posix_fallocate"](fd, offset, length)

    def os_rename(self, source: Any, target: Any, **options: Any) -> None:
        self._two_paths("rename", source, target, lambda: self._real["rename"](source, target, **options))

    def os_replace(self, source: Any, target: Any, **options: Any) -> None:
        self._two_paths("rename", source, target, lambda: self._real["replace"](source, target, **options))

    def os_link(self, source: Any, target: Any, **options: Any) -> None:
        self._two_paths("link", source, target, lambda: self._real["link"](source, target, **options))

    def os_symlink(self, source: Any, target: Any, *arguments: Any, **options: Any) -> None:
        self._on_path("symlink", target, lambda: self._real["symlink"](source, target, *arguments, **options))

    def os_unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._on_path("unlink", path, lambda: self._real["unlink"](path, dir_fd=dir_fd), dir_fd)

    def os_remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        self.os_unlink(path, dir_fd=dir_fd)

    def os_rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._on_path("rmdir", path, lambda: self._real["rmdir"](path, dir_fd=dir_fd), dir_fd)

    def os_mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._on_path("mkdir", path, lambda: self._real["mkdir"](path, mode, dir_fd=dir_fd), dir_fd)

    def _below(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return `path` relative to the root, or None if it is not below; dir_fd is left to the audit."""
        if isinstance(path, int) or dir_fd is not None:
            return None
        text = os.path.abspath(os.fsdecode(path))
        if text == self.root:
            return ""
        return text[len(self.root) + 1 :] if text.startswith(self.root + "/") else None

    def _known(self, fd: int) -> tuple[str, str] | None:
        """Return the handle and the path of a descriptor that was opened below the root."""
        known = self._fds.get(fd)
        if known is None:
            return None
        handle, path, identity = known
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != identity:
            # Closed by a file object, and given to another file since.
            del self._fds[fd]
            return None
        return handle, path

    def _on_fd(self, op: str, file: Any, call: Callable[[], Any], length: int | None = None) -> None:
        known = self._known(file if isinstance(file, int) else file.fileno())
        if known is None:
            call()
            return

        def do(entry: Entry) -> None:
            entry["handle"] = known[0]
            if length is not None:
                entry["offset"] = length
            call()

        self._perform(op, known[1], do)

    def _write(self, fd: int, buffers: Any, offset: int | None, call: Callable[[], int]) -> int:
        known = self._known(fd)
        if known is None:
            return int(call())

        def do(entry: Entry) -> int:
            start = os.lseek(fd, 0, os.SEEK_CUR) if offset is None else offset
            written = int(call())
            entry["handle"], entry["offset"], entry["nbytes"] = known[0], start, written
            if self._keep_data:
                data = b"".join(bytes(buffer) for buffer in buffers)[:written]
                entry["data"] = base64.b64encode(data).decode()
            return written

        return int(self._perform("write", known[1], do))

    def _two_paths(self, op: str, source: Any, target: Any, call: Callable[[], None]) -> None:
        path, to = self._below(source), self._below(target)
        if path is None and to is None:
            call()
            return
        assert path is not None
        assert to is not None, "across the root: not recorded"
        self._perform(op, path, lambda _: call(), to)

    def _on_path(self, op: str, path: Any, call: Callable[[], Any], dir_fd: int | None = None) -> None:
        relative = self._below(path, dir_fd)
        if relative is None:
            call()
        else:
            self._perform(op, relative, lambda _: call())

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with self._thread_lock:
            fcntl.flock(self._log_fd, fcntl.LOCK_EX)
            self._inside.value = True
            try:
                yield
            finally:
                self._inside.value = False
                fcntl.flock(self._log_fd, fcntl.LOCK_UN)

    def _load(self) -> dict[str, Any]:
        data = os.pread(self._state_fd, 1 << 16, 0)
        state: dict[str, Any] = json.loads(data) if data else {"count": 0, "matched": {}, "pids": {}}
        return state

    def _store(self, state: dict[str, Any]) -> None:
        data = json.dumps(state).encode()
        # Not through os.pwrite and os.ftruncate, which are this object's. Padded, so that it never shrinks.
        self._real["pwrite"](self._state_fd, data.ljust(os.fstat(self._state_fd).st_size), 0)

    def _append(self, entry: Entry) -> None:
        self._real["write"](self._log_fd, json.dumps(entry).encode() + b"\n")

    def _perform(
        self, op: str | Callable[[], str], path: str, do: Callable[[Entry], Any], to: str | None = None
    ) -> Any:
        with self._lock():
            entry: Entry = {"op": op if isinstance(op, str) else op(), "role": self.role, "path": path}
            if to is not None:
                entry["to"] = to
            rule = self._match("before", entry)
            if rule is not None:
                self._act(rule, entry)
            try:
                result = do(entry)
            except OSError as error:
                entry["errno"] = error.errno or 0
                self._append(entry)
                raise
            self._append(entry)
            state = self._load()
            state["count"] += 1
            self._store(state)
            rule = self._match("after", entry)
            if rule is not None:
                self._act(rule, entry, is_done=True)
            return result

    def _match(self, when: str, entry: Entry) -> dict[str, Any] | None:
        found = None
        paths = [entry["path"], entry.get("to", entry["path"])]
        for number, rule in enumerate(self._rules):
            if (
                rule.get("when", "before") != when
                or not re.fullmatch(rule.get("op", CHANGES), entry["op"])
                or not any(re.fullmatch(rule.get("path", ".*"), path) for path in paths)
                or not re.fullmatch(rule.get("role", ".*"), self.role)
            ):
                continue
            state = self._load()
            count = state["matched"].get(str(number), 0) + 1
            state["matched"][str(number)] = count
            self._store(state)
            n = rule.get("n", 0)
            if found is None and (n in {0, count} or (rule.get("since") and count > n)):
                found = rule
        return found

    def _act(self, rule: dict[str, Any], entry: Entry, *, is_done: bool = False) -> None:
        if rule["do"] == "fail":
            if not is_done:
                self._append({**entry, "errno": rule["errno"]})
            raise OSError(rule["errno"], os.strerror(rule["errno"]), f"{self.root}/{entry['path']}")
        if rule["do"] == "stop":
            fcntl.flock(self._log_fd, fcntl.LOCK_UN)
            os.kill(os.getpid(), signal.SIGSTOP)
            fcntl.flock(self._log_fd, fcntl.LOCK_EX)
            return
        assert rule["do"] == "kill", rule
        target = rule.get("target", "self")
        chosen = [
            pid
            for role, (pid, started) in self._load()["pids"].items()
            if target in {"all", role} and _start_of(pid) == started
        ]
        if not chosen:
            # It, or one that is not there yet, or no more.
            chosen = [os.getpid()]
        (Path(self._folder) / "killed").touch()
        for pid in sorted(chosen, key=lambda pid: pid == os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if os.getpid() in chosen:
            # Until the signal has arrived.
            threading.Event().wait()

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note what does not pass through here."""
        if not self.is_active or getattr(self._inside, "value", False):
            return
        if event == "open":
            path, _, flags = arguments
            if not flags & _WRITING:
                return
        elif event in _AUDITED:
            path = arguments[0]
        else:
            return
        relative = self._below(path) if isinstance(path, (str, bytes, os.PathLike)) else None
        if relative is not None:
            with self._lock():
                self._append({"op": "unseen", "role": self.role, "path": f"{relative} ({event})"})


def _start_of(pid: int) -> str:
    """Return when a process started, which tells it from a later one of that id; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def install(config: Config) -> Callable[[], None]:
    """Put the shim into this process; returns what takes it out."""
    return _Shim(config).remove


def environment(config: Config) -> dict[str, str]:
    """Return the variables that put the shim into every Python process that is started with them."""
    here = str(Path(__file__).parent)
    before = os.environ.get("PYTHONPATH")
    return {VARIABLE: json.dumps(config), "PYTHONPATH": here if not before else f"{here}:{before}"}


def read_log(folder: str | os.PathLike[str]) -> list[Entry]:
    """Return the log of a shim's folder."""
    return [json.loads(line) for line in Path(folder, "log").read_text().splitlines()]


def _install_in_worker(config: Config) -> None:
    for number in range(1 << 10):
        role = f"{config['role']}.worker{number}"
        with contextlib.suppress(FileExistsError):
            os.close(os.open(f"{config['folder']}/{role}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            install({**config, "role": role})
            return


if __name__ == "sitecustomize" and VARIABLE in os.environ:
    _install_in_worker(json.loads(os.environ[VARIABLE]))
