"""Host memory of a save: a few large memfd slabs, cut into ranges.

Invariants:
    * A slab's pages are reserved before anyone writes to them: no SIGBUS later. What does not fit the
      budget, the machine or the control group fails at reservation.
    * A range is handed out again only after `release`; a quarantined range never is.
    * Host memory held by all slabs, those under construction included, never exceeds the budget.

Threads: `reserve`, `prepare` and `close` may be called from any thread. `release` may also be called from a
finalizer that interrupts `reserve`, and therefore takes no lock. Threads of the arena's own build what is
prepared, without the lock, and end when there is nothing left to build; none outlives `close`.

Torch-free, and knows no CUDA: whoever pins a slab leaves the undoing with `Slab.on_release`.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import mmap
import os
import threading
import time
import traceback
import weakref
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from distckpt.errors import StagingError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    _Made: TypeAlias = "tuple[int, Slab | StagingError]"
    _Due: TypeAlias = "tuple[Future[int], int | StagingError]"

PAGE_BYTES = 4096
SLAB_BYTES = 1 << 30
MIN_SLAB_BYTES = 128 << 20
EXTENT_BYTES = 128 << 20
"""Large slabs are multiples of this: whoever takes so much at a time leaves no remainder."""
# One inode is populated by one thread at a time at best: 12 GiB take 16 threads 2.9 s in one memfd and 0.9 s
# in 16 of them.
_MOST_BUILDERS = 16
_WINDOW_STEP_BYTES = 4 << 20
_RETRY_S = 0.01
_BUILD_RETRY_S = 0.001
_CALL_S = 10.0
_GIB = 1 << 30
_CLOSED = "the writer is closed"

# Source: include/uapi/asm-generic/mman-common.h; the mmap module has no name for the second one.
_MADV_REMOVE = 9
_MADV_POPULATE_WRITE = 23
# Unlike mmap.madvise, calls through it let other threads of the interpreter run.
_LIBC = ctypes.CDLL(None, use_errno=True)


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

    Raises:
        StagingError: The machine does not say, such as to a process that may open no more files.
    """
    try:
        available = psutil.virtual_memory().available
    except OSError as error:
        raise StagingError(f"cannot tell how much host memory is available: {error}") from error
    return min([available, *_control_group_headroom()])


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


def _madvise(address: int, nbytes: int, advice: int) -> None:
    if _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(advice)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _populate(fd: int, address: int, nbytes: int) -> None:
    try:
        _madvise(address, nbytes, _MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Linux before 5.14 does not know the advice.
        os.posix_fallocate(fd, 0, nbytes)


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
        with contextlib.ExitStack() as undo:
            try:
                self.fd = os.memfd_create("distckpt", os.MFD_CLOEXEC)
                undo.callback(os.close, self.fd)
                os.ftruncate(self.fd, nbytes)
                self.mapping = mmap.mmap(self.fd, nbytes)
                undo.callback(self.mapping.close)
                self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
                _populate(self.fd, self.address, nbytes)
            except OSError as error:
                raise StagingError(f"cannot reserve a host memory slab of {nbytes} bytes: {error}") from error
            undo.pop_all()
        self._anchor = ctypes.c_char.from_buffer(self.mapping)
        self._owner_pid = os.getpid()
        self.on_release: list[Callable[[], None]] = []
        # The operating system takes all of this back at exit; CUDA may be gone by then.
        weakref.finalize(self, _release_slab, self._owner_pid, self.fd, self.on_release).atexit = False

    def discard(self) -> None:
        """Give the pages back at once, whoever else maps them; what they held reads as zeros."""
        # A forked child must not take them from its parent, which may have filled them since.
        if os.getpid() == self._owner_pid:
            # Pages that the process has locked are refused, and go with their last mapping.
            with contextlib.suppress(OSError):
                _madvise(self.address, self.nbytes, _MADV_REMOVE)


def _release_slab(owner_pid: int, fd: int, on_release: list[Callable[[], None]]) -> None:
    # A forked child inherits the object but neither the CUDA registration nor the right to undo it.
    if os.getpid() == owner_pid:
        for undo in on_release:
            undo()
    # Not mapping.close(): the anchor still exports its buffer. Both go with the slab's attributes, next.
    os.close(fd)


def _run_builder(
    exchange: weakref.WeakMethod[Callable[[_Made | None], tuple[int, int] | None]],
    on_slab: Callable[[Slab], None] | None,
    cpus: set[int] | None,
) -> None:
    if cpus is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)
    made: _Made | None = None
    while True:
        # Only for a moment: an arena that is dropped is gone at once, and with it the reason to go on.
        step = exchange()
        slot = None if step is None else step(made)
        step = made = None
        if slot is None:
            return
        try:
            made = slot[0], _make(*slot, on_slab)
        except BaseException as error:  # noqa: BLE001 - the top frame of a thread: whoever waits must learn of it
            made = slot[0], _failure_of(error, slot[1])


def _failure_of(error: BaseException, nbytes: int) -> StagingError:
    # Its frames would hold the slab's memory for as long as anybody holds the error.
    traceback.clear_frames(error.__traceback__)
    if isinstance(error, StagingError):
        return error
    failure = StagingError(
        f"cannot prepare a host memory slab of {nbytes} bytes: {type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    return failure


def _make(index: int, nbytes: int, on_slab: Callable[[Slab], None] | None) -> Slab:
    _check_available(nbytes)
    slab = Slab(index, nbytes)
    if on_slab is not None:
        on_slab(slab)
    return slab


def _available_or_zero() -> int:
    # Without a descriptor to read it by, for one; who must know the figure, and asks again, is told.
    try:
        return available_memory()
    except StagingError:
        return 0


def _check_available(nbytes: int) -> None:
    available = available_memory() if nbytes > 0 else 0
    if nbytes > available:
        raise StagingError(
            f"cannot reserve {nbytes / _GIB:.2f} GiB of host memory: machine and control group leave "
            f"this process {available / _GIB:.2f} GiB; lower --ckpt-host-memory"
        )


def _resolve(due: list[_Due]) -> None:
    for future, outcome in due:
        if isinstance(outcome, StagingError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _abandon(waiting: list[tuple[int, Future[int]]]) -> None:
    _resolve([(future, StagingError(_CLOSED)) for _, future in waiting])
    waiting.clear()


def _slab_bytes(nbytes: int) -> int:
    # Neither tiny nor too large to be given back one by one.
    # Two for each thread:
    # the first half is registered, which is done for one slab at a time, while the second is populated.
    return min(max(nbytes // (2 * _MOST_BUILDERS) // EXTENT_BYTES * EXTENT_BYTES, MIN_SLAB_BYTES), SLAB_BYTES)


class Arena:
    """Ranges of host memory under a hard budget.

    Args:
        budget_bytes: The most that all slabs together may hold.
        on_slab: Called with every new slab, before a range of it is handed out; by the thread that built it,
            so that several calls may run at once.
        cpus: Called, under the arena's lock, when threads are to build slabs; they run on the processors that
            it returns, or, if that is None, wherever the caller may run. A page is placed on the NUMA node of
            the thread that touches it first.
        window_bytes: What `window_bytes` shall be; 0: as the budget has it.
    """

    def __init__(
        self,
        budget_bytes: int,
        on_slab: Callable[[Slab], None] | None = None,
        cpus: Callable[[], set[int] | None] = lambda: None,
        *,
        window_bytes: int = 0,
    ) -> None:
        self.budget_bytes = budget_bytes // PAGE_BYTES * PAGE_BYTES
        self.slabs: dict[int, Slab] = {}
        self.on_slab = on_slab
        self.cpus = cpus
        self._window_bytes = window_bytes
        self._free: dict[int, list[tuple[int, int]]] = {}
        self._returned: deque[Range] = deque()
        self._lock = threading.Lock()
        self._next_index = 0
        self._closed = False
        # Under construction: bytes of slabs that no thread has begun, and by index of those in the making.
        self._planned: deque[int] = deque()
        self._building: dict[int, int] = {}
        self._builders: list[threading.Thread] = []
        self._num_active = 0
        self._waiting: list[tuple[int, Future[int]]] = []
        self._failure: StagingError | None = None
        weakref.finalize(self, _abandon, self._waiting).atexit = False

    @property
    def window_bytes(self) -> int:
        """The largest range that a planned save takes at once: a sixteenth of the budget, 4 to 32 MiB."""
        return self._window_bytes or max(
            _WINDOW_STEP_BYTES, min(8, self.budget_bytes // 16 // _WINDOW_STEP_BYTES) * _WINDOW_STEP_BYTES
        )

    @property
    def spare_bytes(self) -> int:
        """What a state that is staged before its save is planned leaves to the save: a window.

        Of a budget of a few windows not a whole one, unless somebody asked for such windows.
        """
        return self._window_bytes or min(self.window_bytes, self.budget_bytes // 16)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of host memory that the slabs hold, those under construction in full."""
        return self._held_bytes + sum(list(self._building.values())) + sum(list(self._planned))

    @property
    def _held_bytes(self) -> int:
        return sum(slab.nbytes for slab in list(self.slabs.values()))

    @property
    def unused_bytes(self) -> int:
        """Bytes of the slabs that nobody has reserved."""
        with self._lock:
            self._take_back()
            return sum(nbytes for free in self._free.values() for _, nbytes in free)

    @property
    def is_building(self) -> bool:
        """Whether slabs are under construction."""
        return bool(self._building or self._planned)

    @staticmethod
    def remainder_bytes(nbytes: int, piece_bytes: int) -> int:
        """Return what may be left over at the ends of the slabs for `nbytes` in pieces of `piece_bytes`."""
        slab_bytes = _slab_bytes(nbytes)
        return -(-nbytes // slab_bytes) * min(piece_bytes, slab_bytes // 2)

    def check(self, nbytes: int) -> None:
        """Refuse what the machine cannot give, before any of it is taken.

        Args:
            nbytes: Bytes that the arena shall hold in all.

        Raises:
            StagingError: The machine or the control group leaves less than the slabs lack.
        """
        with self._lock:
            taken_bytes = self.reserved_bytes - sum(self._planned)
        _check_available(nbytes - taken_bytes)

    def prepare(self, nbytes: int) -> Future[int]:
        """Begin to build slabs in the background, until the arena holds `nbytes` or its budget; do not wait.

        Each slab can be used as soon as it is ready. A later call adds what is missing.

        Args:
            nbytes: Bytes that the arena shall hold in all.

        Returns:
            The bytes that the arena holds in the end, or the `StagingError` that kept it from holding them.
            They are fewer than asked for if the process can start no thread, exits, or exchanged slabs for
            a larger one meanwhile.
        """
        future: Future[int] = Future()
        # Nobody may cancel it: it says what happens anyway.
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._closed:
                due: list[_Due] = [(future, StagingError(_CLOSED))]
            else:
                self._failure = None
                target = min(align(nbytes, PAGE_BYTES), self.budget_bytes)
                self._plan(target - self.reserved_bytes, _slab_bytes(target))
                self._waiting.append((target, future))
                due = self._take_due()
        _resolve(due)
        return future

    def try_reserve(self, nbytes: int, want_bytes: int = 0, spare_bytes: int = 0) -> Range | None:
        """Return a page-aligned range of `nbytes`, or None while others hold the memory that it needs.

        Also None while slabs are under construction that may serve it.

        Args:
            nbytes: Bytes, at least 1, contiguous.
            want_bytes: What the whole save will need; slabs are made large enough for it where they can.
            spare_bytes: Bytes of the budget that must be left for others.

        Raises:
            StagingError: The budget, the machine or the control group can never give that much, or building
                the slabs that would have served it failed; the next call tries anew.
        """
        size = align(nbytes, PAGE_BYTES)
        with self._lock:
            self._check_possible(size)
            self._take_back()
            if spare_bytes and self._left() - size < spare_bytes:
                return None
            found = self._fit(size, size)
            if found is not None or self._is_coming(size):
                return found
            return self._grow(size, size, want_bytes)

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
        return self._wait(
            lambda: self.try_reserve(nbytes, want_bytes, spare_bytes), nbytes, timeout_s, on_wait
        )

    def reserve_some(
        self,
        most: int,
        least: int,
        *,
        timeout_s: float,
        spare_bytes: int = 0,
        on_wait: Callable[[], object] = lambda: None,
    ) -> Range:
        """Return the largest free page-aligned range of at least `least` bytes, waiting until there is one.

        For what may lie in several ranges, the fewer the better. Where nothing fits and nothing is under
        construction, slabs are built for `most` bytes.

        Args:
            most: Bytes, contiguous, beyond which a range is cut (at the next page).
            least: Bytes, 1 to `most`.
            timeout_s: As for `reserve`.
            spare_bytes: As for `reserve`.
            on_wait: As for `reserve`.

        Raises:
            StagingError: As for `reserve`, of `least` bytes.
        """
        assert 1 <= least <= most
        most, least = align(most, PAGE_BYTES), align(least, PAGE_BYTES)
        return self._wait(lambda: self._try_some(most, least, spare_bytes), least, timeout_s, on_wait)

    def release(self, taken: Range) -> None:
        """Give `taken` back; safe to call from a finalizer."""
        self._returned.append(taken)

    def address(self, taken: Range) -> int:
        """Return where `taken` begins in this process's memory."""
        return self.slabs[taken.slab].address + taken.offset

    def close(self) -> None:
        """Give every slab back; memory that staged tensors still view goes with the last of them.

        No further slab is begun; those in the making are waited for and given back too.
        """
        with self._lock:
            self._closed = True
            self._planned.clear()
            self._take_back()
            for index in list(self.slabs):
                self._drop(index)
            waiting, self._waiting[:] = self._waiting.copy(), []
        _abandon(waiting)
        for builder in self._builders.copy():
            # A callback of a future may be what closes the arena.
            if builder is not threading.current_thread():
                builder.join()

    def _check_possible(self, size: int) -> None:
        if self._closed:
            raise StagingError(_CLOSED)
        if size > self.budget_bytes:
            raise StagingError(
                f"{size} contiguous bytes of host memory exceed the budget of {self.budget_bytes} bytes "
                f"(--ckpt-host-memory)"
            )

    def _try_some(self, most: int, least: int, spare_bytes: int) -> Range | None:
        with self._lock:
            self._check_possible(least)
            self._take_back()
            left = self._left() - spare_bytes
            if spare_bytes and left < least:
                return None
            most = min(most, max(least, left // PAGE_BYTES * PAGE_BYTES))
            found = self._fit(most, least)
            if found is not None or self._is_coming(least):
                return found
            if self._make_room(least) < least or self._plan(most, max(least, _slab_bytes(most))):
                return None
            return self._grow(most, least, self.reserved_bytes + most)

    def _wait(
        self,
        attempt: Callable[[], Range | None],
        nbytes: int,
        timeout_s: float,
        on_wait: Callable[[], object],
    ) -> Range:
        started = time.monotonic()
        next_call_s, pause = 0.0, threading.Event()
        while True:
            found = attempt()
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
            pause.wait(_BUILD_RETRY_S if self._building else _RETRY_S)

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

    def _fit(self, most: int, least: int) -> Range | None:
        # The first that has room for `most`, or else the largest.
        pieces = [
            (min(nbytes, most), index, at)
            for index, free in self._free.items()
            for at, (_, nbytes) in enumerate(free)
        ]
        size, index, at = max(pieces, key=lambda piece: piece[0], default=(0, 0, 0))
        if size < least:
            return None
        offset, nbytes = self._free[index].pop(at)
        if nbytes > size:
            self._free[index].insert(at, (offset + size, nbytes - size))
        return Range(index, offset, size)

    def _is_coming(self, size: int) -> bool:
        """Say whether to wait for slabs under construction rather than to grow.

        Raises:
            StagingError: There would be some, had building them not failed.
        """
        coming = [*self._planned, *self._building.values()]
        if coming:
            return size <= max(coming) or size > self.budget_bytes - self.reserved_bytes
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise StagingError(str(failure)) from failure
        return False

    def _make_room(self, size: int) -> int:
        """Return the bytes of the budget that are left for new slabs."""
        left = self.budget_bytes - self.reserved_bytes
        # Memory that is free, but in slabs too small for this range, can be given back and taken anew.
        unused = [index for index in self.slabs if self._is_unused(index)]
        if left < size <= left + sum(self.slabs[index].nbytes for index in unused):
            for index in unused:
                self._drop(index)
        return self.budget_bytes - self.reserved_bytes

    def _grow(self, most: int, least: int, want_bytes: int) -> Range | None:
        left = self._make_room(least)
        if least > left:
            return None
        want = min(left, SLAB_BYTES, align(max(0, want_bytes - self.reserved_bytes), PAGE_BYTES))
        nbytes = max(least, want)
        busy_bytes = sum(self._building.values())
        available = available_memory() - busy_bytes
        if nbytes > available:
            nbytes = least
            # What is being built may be counted twice: it can be had, or not, when that is over.
            if busy_bytes and nbytes > available:
                return None
        self._add(_make(self._take_index(), nbytes, self.on_slab))
        return self._fit(most, least)

    def _take_index(self) -> int:
        self._next_index += 1
        return self._next_index - 1

    def _add(self, slab: Slab) -> None:
        self.slabs[slab.index] = slab
        self._free[slab.index] = [(0, slab.nbytes)]

    def _plan(self, nbytes: int, slab_bytes: int) -> bool:
        """Have `nbytes` more built, as far as the budget goes; return False if no thread can do that."""
        nbytes = min(nbytes, self.budget_bytes - self.reserved_bytes)
        if nbytes > 0 and threading.main_thread().is_alive():
            cpus = self.cpus()
            self._planned.extend(min(slab_bytes, nbytes - begin) for begin in range(0, nbytes, slab_bytes))
            self._builders = [builder for builder in self._builders if builder.is_alive()]
            num_slabs = len(self._planned) + len(self._building)
            num_wanted = min(_MOST_BUILDERS, len(cpus or os.sched_getaffinity(0)), num_slabs)
            arguments = (weakref.WeakMethod(self._exchange), self.on_slab, cpus)
            # A process that may start no more threads does with those that it has.
            with contextlib.suppress(RuntimeError):
                while self._num_active < num_wanted:
                    # No daemon, even if the caller is one: the interpreter waits for it.
                    builder = threading.Thread(
                        target=_run_builder, args=arguments, name="distckpt-arena", daemon=False
                    )
                    builder.start()
                    self._num_active += 1
                    self._builders.append(builder)
            if self._num_active == 0:
                self._planned.clear()
        return self._num_active > 0

    def _exchange(self, made: _Made | None) -> tuple[int, int] | None:
        """Take what a building thread has made; return index and bytes of its next slab, or None: it ends."""
        failure = None
        with self._lock:
            if made is not None:
                index, result = made
                del self._building[index]
                if isinstance(result, StagingError):
                    self._failure = failure = result
                    self._planned.clear()
                elif self._closed:
                    result.discard()
                else:
                    self._add(result)
            slot = self._next_slot()
            due = self._take_due(failure)
        _resolve(due)
        return slot

    def _next_slot(self) -> tuple[int, int] | None:
        if not threading.main_thread().is_alive():
            # The interpreter only waits for threads to end.
            self._planned.clear()
        busy_bytes = sum(self._building.values())
        # What others build is partly taken already. Where that much more may not be there, the rest is left
        # to the last of them: what it finds available is really so.
        if not self._planned or (busy_bytes and self._planned[0] + busy_bytes > _available_or_zero()):
            self._num_active -= 1
            return None
        slot = self._take_index(), self._planned.popleft()
        self._building[slot[0]] = slot[1]
        return slot

    def _take_due(self, failure: StagingError | None = None) -> list[_Due]:
        """Remove and return the futures whose outcome is known; to be resolved without the lock."""
        held_bytes, coming_bytes = self._held_bytes, self.reserved_bytes
        due: list[_Due] = []
        waiting, self._waiting[:] = self._waiting.copy(), []
        for target, future in waiting:
            if failure is not None and target > coming_bytes:
                due.append((future, failure))
            elif held_bytes >= target or held_bytes == coming_bytes:
                due.append((future, held_bytes))
            else:
                self._waiting.append((target, future))
        return due

    def _left(self) -> int:
        unused_bytes = sum(nbytes for free in self._free.values() for _, nbytes in free)
        return self.budget_bytes - self._held_bytes + unused_bytes

    def _is_unused(self, index: int) -> bool:
        return self._free[index] == [(0, self.slabs[index].nbytes)]

    def _drop(self, index: int) -> None:
        # A worker or a forked child that maps the slab would keep its memory. Staged tensors keep theirs.
        if self._is_unused(index):
            self.slabs[index].discard()
        del self._free[index]
        del self.slabs[index]
