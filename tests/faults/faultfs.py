"""A FUSE file system that passes everything on to a folder, but for what its rules say.

usage: faultfs.py FOLDER MOUNT RULES

RULES is a JSON file, read again whenever it has changed: a list of rules, of which the first that matches is
followed:

    op      the request: getattr, readdir, open, direct (an open with O_DIRECT), create, read, write, flush
            (one for each close), fsync, fsyncdir, mkdir, rmdir, unlink, rename
    path    pattern of the path below the mount, as of fnmatch; default: any
    skip    how many matching requests it lets pass first
    count   how many it is followed for, after that; default: all
    every   it is followed for each `every`-th of these only
    errno   refuse the request with this error number
    delay   answer after so many seconds
    freeze  do not answer before the rules have changed
    short   of a write: accept so many bytes
    torn    of a write: accept all, keep only so large a part of it, from its beginning
    lie     of an fsync: do nothing
"""

from __future__ import annotations

import ctypes
import fnmatch
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_STATUS = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino")
_SPACE = (
    "f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_flag", "f_frsize",
    "f_namemax",
)  # fmt: skip
# Otherwise the library that was there first is taken, which writes single pages.
os.environ.setdefault("FUSE_LIBRARY_PATH", "libfuse3.so.3")


class _Rules:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._rules: list[dict[str, Any]] = []
        self._read_at = -1
        self._lock = threading.Lock()

    def match(self, op: str, path: str) -> dict[str, Any]:
        """Return the rule that is to be followed, or {}."""
        with self._lock:
            changed_at = self._path.stat().st_mtime_ns
            if changed_at != self._read_at:
                self._read_at = changed_at
                self._rules = json.loads(self._path.read_text())
            for rule in self._rules:
                if rule["op"] != op or not fnmatch.fnmatch(path, rule.get("path", "*")):
                    continue
                seen = rule["seen"] = rule.get("seen", 0) + 1
                number = seen - rule.get("skip", 0)
                if 0 < number <= rule.get("count", number) and number % rule.get("every", 1) == 0:
                    return rule
        return {}


def serve(folder: str, mount: str, rules_path: str) -> None:
    """Serve requests until it is unmounted."""
    import mfusepy

    rules = _Rules(Path(rules_path))

    def follow(op: str, path: str) -> dict[str, Any]:
        rule = rules.match(op, path)
        while "freeze" in rule:
            time.sleep(0.01)
            rule = rules.match(op, path)
        time.sleep(rule.get("delay", 0))
        if "errno" in rule:
            raise mfusepy.FuseOSError(rule["errno"])
        return rule

    class FaultFS(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            follow("getattr", path)
            status = os.fstat(fh) if fh else os.lstat(folder + path)
            times = {name: getattr(status, f"{name}_ns") for name in ("st_atime", "st_mtime", "st_ctime")}
            return {name: getattr(status, name) for name in _STATUS} | times

        def readdir(self, path: str, _: int) -> list[str]:
            follow("readdir", path)
            return [".", "..", *os.listdir(folder + path)]

        def open(self, path: str, flags: int) -> int:
            follow("direct" if flags & os.O_DIRECT else "open", path)
            return os.open(folder + path, flags & ~os.O_DIRECT)

        def create(self, path: str, mode: int, _: Any = None) -> int:
            follow("create", path)
            return os.open(folder + path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            follow("read", path)
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            rule = follow("write", path)
            if "short" in rule:
                return os.pwrite(fh, data[: rule["short"]], offset)
            kept = int(len(data) * rule.get("torn", 1))
            os.pwrite(fh, data[:kept], offset)
            if kept < len(data) and os.fstat(fh).st_size < offset + len(data):
                os.ftruncate(fh, offset + len(data))
            return len(data)

        def flush(self, path: str, _: int) -> int:
            follow("flush", path)
            return 0

        def release(self, _: str, fh: int) -> int:
            os.close(fh)
            return 0

        def fsync(self, path: str, _: int, fh: int) -> int:
            if "lie" not in follow("fsync", path):
                os.fsync(fh)
            return 0

        def fsyncdir(self, path: str, *_: Any) -> int:
            follow("fsyncdir", path)
            return 0

        def truncate(self, path: str, length: int, _: int | None = None) -> None:
            os.truncate(folder + path, length)

        def mkdir(self, path: str, mode: int) -> None:
            follow("mkdir", path)
            os.mkdir(folder + path, mode)

        def rmdir(self, path: str) -> None:
            follow("rmdir", path)
            os.rmdir(folder + path)

        def unlink(self, path: str) -> None:
            follow("unlink", path)
            os.unlink(folder + path)

        def rename(self, source: str, target: str, *_: Any) -> None:
            follow("rename", source)
            os.rename(folder + source, folder + target)

        def statfs(self, path: str) -> dict[str, int]:
            status = os.statvfs(folder + path)
            return {name: getattr(status, name) for name in _SPACE}

    mfusepy.FUSE(FaultFS(), mount, foreground=True, nothreads=False, fsname="faultfs", attr_timeout=0,
                 entry_timeout=0)  # fmt: skip


if __name__ == "__main__":
    # Its end unmounts it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    serve(*sys.argv[1:4])
