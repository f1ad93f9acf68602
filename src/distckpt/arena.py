"""Host memory of a save: a few large memfd slabs, cut into ranges.

Invariants:
    * A slab's pages are reserved before anyone writes to them: no SIGBUS later. What does not fit the
      budget, the machine or the control group fails at reservation.
    * A range is handed out again only after `release`; a quarantined range never is.
    * Host memory held by all slabs never exceeds the budget.

Threads: `reserve` and `close` may be called from any thread. `release` may also be called from a finalizer
that interrupts `reserve`, and therefore takes no lock.

Torch-free, and knows no CUDA: whoever pins a slab leaves the undoing with `Slab.on_release`.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from distckpt.errors import StagingError

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE_BYTES = 4096
SLAB_BYTES = 1 << 30
_WINDOW_STEP_BYTES = 4 << 20
_RETRY_S = 0.01
_CALL_S = 10.0
_GIB = 1 << 30


class Range(NamedTuple):
    """A piece of the arena: `nbytes` bytes at `offset` of slab number `slab`."""

    slab: int
    offset: int
    nbytes: int


def align(value: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


def available_memory() -> int:
    """Return the bytes that this process may still take without being killed.

    Source: the smaller of psutil's `available` and of what the memory control groups (version 1 or 2) of this
    process leave, whose reclaimable page cache counts as free (kernel, admin-guide/cgroup-v2, memory.stat).
    """
    return min([psutil.virtual_memory().available, *_control_group_headroom()])


def _control_group_headroom() -> list[int]:
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    headroom = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = (
                Path("/sys/fs/cgroup/memory"),
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        group = root / path.lstrip("/")
        # In a container the path may lie outside what is mounted; the mounted root is then our own group.
        for folder in [group, *group.parents] if group.is_dir() else [root]:
            left = _headroom_of(folder, limit, usage)
            if left is not None:
                headroom.append(left)
            if folder == root:
                break
    return headroom


def _headroom_of(folder: Path, limit: str, usage: str) -> int | None:
    try:
        allowed = (folder / limit).read_text(encoding="ascii").strip()
        used = int((folder / usage).read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    if allowed == "max":
        return None
    cache = next((int(row.split()[1]) for row in stat.splitlines() if row.startswith("inactive_file ")), 0)
    return max(0, int(allowed) - used + cache)


class Slab:
    """One memfd, mapped shared and reserved in full.

    Args:
        index: Number that names this slab in a `Range`; never used again by the same arena.
        nbytes: Size, a multiple of the page size.

    Raises:
        StagingError: The memory cannot be had.
    """

    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.nbytes = nbytes
        try:
            self.fd = os.memfd_create("distckpt", os.MFD_CLOEXEC)
        except OSError as error:
            raise StagingError(f"cannot create a host memory slab of {nbytes} bytes: {error}") from error
        try:
            os.ftruncate(self.fd, nbytes)
            os.posix_fallocate(self.fd, 0, nbytes)
            self.mapping = mmap.mmap(self.fd, nbytes)
        except OSError as error:
            os.close(self.fd)
            raise StagingError(f"cannot reserve a host memory slab of {nbytes} bytes: {error}") from error
        self._anchor = ctypes.c_char.from_buffer(self.mapping)
        self.address = ctypes.addressof(self._anchor)
        self.on_release: list[Callable[[], None]] = []
        # The operating system takes all of this back at exit; CUDA may be gone by then.
        weakref.finalize(self, _release_slab, os.getpid(), self.fd, self.on_release).atexit = False


def _release_slab(owner_pid: int, fd: int, on_release: list[Callable[[], None]]) -> None:
    # A forked child inherits the object but neither the CUDA registration nor the right to undo it.
    if os.getpid() == owner_pid:
        for undo in on_release:
            undo()
    # Not mapping.close(): the anchor still exports its buffer. Both go with the slab's attributes, next.
    os.close(fd)


class Arena:
    """Ranges of host memory under a hard budget.

    Args:
        budget_bytes: The most that all slabs together may hold.
        on_slab: Called with every new slab, before a range of it is handed out.
    """

    def __init__(self, budget_bytes: int, on_slab: Callable[[Slab], None] | None = None) -> None:
        self.budget_bytes = budget_bytes // PAGE_BYTES * PAGE_BYTES
        self.slabs: dict[int, Slab] = {}
        self.on_slab = on_slab
        self._free: dict[int, list[tuple[int, int]]] = {}
        self._returned: deque[Range] = deque()
        self._lock = threading.Lock()
        self._next_index = 0
        self._closed = False

    @property
    def window_bytes(self) -> int:
        """The largest range that a planned save takes at once: a sixteenth of the budget, 4 to 32 MiB."""
        return max(
            _WINDOW_STEP_BYTES, min(8, self.budget_bytes // 16 // _WINDOW_STEP_BYTES) * _WINDOW_STEP_BYTES
        )

    @property
    def reserved_bytes(self) -> int:
        """Bytes of host memory that the slabs hold now."""
        return sum(slab.nbytes for slab in self.slabs.values())

    def check(self, nbytes: int) -> None:
        """Refuse what the machine cannot give, before any of it is taken.

        Args:
            nbytes: Bytes that the arena shall hold in all.

        Raises:
            StagingError: The machine or the control group leaves less than the slabs lack.
        """
        with self._lock:
            reserved_bytes = self.reserved_bytes
        self._check_available(nbytes - reserved_bytes)

    def try_reserve(self, nbytes: int, want_bytes: int = 0, spare_bytes: int = 0) -> Range | None:
        """Return a page-aligned range of `nbytes`, or None while others hold the memory that it needs.

        Args:
            nbytes: Bytes, at least 1, contiguous.
            want_bytes: What the whole save will need; slabs are made large enough for it where they can.
            spare_bytes: Bytes of the budget that must be left for others.

        Raises:
            StagingError: The budget, the machine or the control group can never give that much.
        """
        size = align(nbytes, PAGE_BYTES)
        if size > self.budget_bytes:
            raise StagingError(
                f"{nbytes} contiguous bytes of host memory exceed the budget of {self.budget_bytes} bytes "
                f"(--ckpt-host-memory)"
            )
        with self._lock:
            if self._closed:
                raise StagingError("the writer is closed")
            self._take_back()
            if spare_bytes and self._left() - size < spare_bytes:
                return None
            return self._fit(size) or self._grow(size, want_bytes)

    def reserve(
        self,
        nbytes: int,
        *,
        timeout_s: float,
        want_bytes: int = 0,
        spare_bytes: int = 0,
        on_wait: Callable[[], object] = lambda: None,
    ) -> Range:
        """Return a page-aligned range of `nbytes`, waiting for others to release theirs.

        Args:
            nbytes: As for `try_reserve`.
            timeout_s: Seconds to wait at most.
            want_bytes: As for `try_reserve`.
            spare_bytes: As for `try_reserve`.
            on_wait: Called at once and then again and again, less and less often, while the wait lasts.

        Raises:
            StagingError: As for `try_reserve`, or the wait passed its deadline.
        """
        started = time.monotonic()
        next_call_s, pause = 0.0, threading.Event()
        while True:
            found = self.try_reserve(nbytes, want_bytes, spare_bytes)
            if found is not None:
                return found
            waited_s = time.monotonic() - started
            if waited_s >= next_call_s:
                on_wait()
                next_call_s = waited_s + min(max(waited_s, _RETRY_S), _CALL_S)
            elif waited_s > timeout_s:
                raise StagingError(
                    f"waited {timeout_s:.0f} s for {nbytes} bytes of host memory: saves in flight hold what "
                    f"the budget of {self.budget_bytes} bytes allows (--ckpt-host-memory)"
                )
            pause.wait(_RETRY_S)

    def release(self, taken: Range) -> None:
        """Give `taken` back; safe to call from a finalizer."""
        self._returned.append(taken)

    def address(self, taken: Range) -> int:
        """Return where `taken` begins in this process's memory."""
        return self.slabs[taken.slab].address + taken.offset

    def close(self) -> None:
        """Give every slab back; memory that staged tensors still view goes with the last of them."""
        with self._lock:
            self._closed = True
            self._take_back()
            for index in list(self.slabs):
                self._drop(index)

    def _take_back(self) -> None:
        while self._returned:
            index, offset, nbytes = self._returned.popleft()
            free = self._free.get(index)
            if free is None:
                continue
            nbytes = align(nbytes, PAGE_BYTES)
            at = bisect.bisect(free, (offset, 0))
            if at < len(free) and free[at][0] == offset + nbytes:
                nbytes += free.pop(at)[1]
            if at > 0 and sum(free[at - 1]) == offset:
                at -= 1
                before = free.pop(at)
                offset, nbytes = before[0], before[1] + nbytes
            free.insert(at, (offset, nbytes))

    def _fit(self, size: int) -> Range | None:
        for index, free in self._free.items():
            for at, (offset, nbytes) in enumerate(free):
                if nbytes >= size:
                    if nbytes == size:
                        del free[at]
                    else:
                        free[at] = (offset + size, nbytes - size)
                    return Range(index, offset, size)
        return None

    def _grow(self, size: int, want_bytes: int) -> Range | None:
        if size > self.budget_bytes - self.reserved_bytes:
            # Memory that is free, but in slabs too small for this range, can be given back and taken anew.
            for index in [i for i, free in self._free.items() if free == [(0, self.slabs[i].nbytes)]]:
                self._drop(index)
        left = self.budget_bytes - self.reserved_bytes
        if size > left:
            return None
        want = min(left, SLAB_BYTES, align(max(0, want_bytes - self.reserved_bytes), PAGE_BYTES))
        slab_bytes = max(size, want)
        if slab_bytes > available_memory():
            slab_bytes = size
            self._check_available(size)
        slab = Slab(self._next_index, slab_bytes)
        if self.on_slab is not None:
            self.on_slab(slab)
        self._next_index += 1
        self.slabs[slab.index] = slab
        self._free[slab.index] = [(size, slab_bytes - size)] if slab_bytes > size else []
        return Range(slab.index, 0, size)

    def _left(self) -> int:
        return (
            self.budget_bytes - self.reserved_bytes + sum(n for free in self._free.values() for _, n in free)
        )

    @staticmethod
    def _check_available(nbytes: int) -> None:
        available = available_memory() if nbytes > 0 else 0
        if nbytes > available:
            raise StagingError(
                f"cannot reserve {nbytes / _GIB:.2f} GiB of host memory: machine and control group leave "
                f"this process {available / _GIB:.2f} GiB; lower --ckpt-host-memory"
            )

    def _drop(self, index: int) -> None:
        del self._free[index]
        del self.slabs[index]
