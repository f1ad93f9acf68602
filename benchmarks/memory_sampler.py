"""Measures the host memory of a process and all its children, from a process of its own.

What counts is PSS (`Pss` in /proc/PID/smaps_rollup, bytes): memory that several of them map counts once. Next
to it stand the pages of memfds, whether mapped or not, found through the descriptors of these processes.

Run as a script it samples until its standard input ends; each line it reads is answered with the latest and
the largest sample as one JSON line, and begins the search for the largest anew.

Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Sample = dict[str, int]
_PROC = Path("/proc")


def tree(root: int, without: int = 0) -> list[int]:
    """Return the ids of a process and all that descend from it, `without` and its descendants left out."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir(_PROC):
        if entry.isdigit():
            # It may have ended meanwhile.
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = (_PROC / entry / "stat").read_text(encoding="utf-8", errors="replace")
                # The name, in parentheses, may hold anything.
                parent = int(stat.rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found, left = [], [root]
    while left:
        pid = left.pop()
        if pid != without:
            found.append(pid)
            left += children.get(pid, [])
    return found


def pss_bytes(pid: int) -> int:
    """Return the PSS of one process in bytes; 0 if it has ended."""
    try:
        with open(_PROC / str(pid) / "smaps_rollup", encoding="ascii") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def memfd_bytes(pids: list[int]) -> int:
    """Return the bytes that the memfds open in these processes hold, each memfd once."""
    found: dict[int, int] = {}
    for pid in pids:
        folder = _PROC / str(pid) / "fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    if os.readlink(folder / name).startswith("/memfd:"):
                        status = os.stat(folder / name)
                        found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def sample(root: int, without: int = 0) -> Sample:
    """Return `pss_bytes` and `memfd_bytes` of the process and its descendants, and how many they are."""
    pids = tree(root, without)
    return {
        "pss_bytes": sum(pss_bytes(pid) for pid in pids),
        "memfd_bytes": memfd_bytes(pids),
        "processes": len(pids),
    }


class Sampler:
    """The far end of the script: asks it for its samples."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def now(self) -> Sample:
        """Return a new sample, and begin the search for the largest anew."""
        return self._read()["now"]

    def peak(self) -> tuple[Sample, int]:
        """Return the largest value of each figure since the last call, and of how many samples."""
        found = self._read()
        return found["peak"], found["peak"].pop("count")

    def _read(self) -> dict[str, Sample]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer: dict[str, Sample] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def sampling(interval_s: float) -> Iterator[Sampler]:
    """Sample this process and its children during a `with` block, at least `interval_s` apart."""
    command = [sys.executable, __file__, str(os.getpid()), str(interval_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        sampler = Sampler(process)
        sampler.now()
        try:
            yield sampler
        finally:
            process.communicate()


def main() -> None:
    root, interval_s = int(sys.argv[1]), float(sys.argv[2])
    peak: Sample = {}
    count = 0
    while True:
        started = time.monotonic()
        now = sample(root, without=os.getpid())
        count += 1
        peak = {name: max(value, peak.get(name, 0)) for name, value in now.items()}
        left_s = max(0.0, interval_s - (time.monotonic() - started))
        if select.select([sys.stdin], [], [], left_s)[0]:
            if not sys.stdin.readline():
                return
            # What happened up to the question counts.
            now = sample(root, without=os.getpid())
            peak = {name: max(value, peak.get(name, 0)) for name, value in now.items()}
            print(json.dumps({"now": now, "peak": {**peak, "count": count}}), flush=True)
            peak, count = {}, 0


if __name__ == "__main__":
    main()
