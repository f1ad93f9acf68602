"""The write lanes of one engine: sequential in this process, or a pool of exec'd workers.

Both kinds run `worker.LaneWriter`, so that one worker and several cannot drift apart.

Invariants:
    * A lane is handed the next range only after its queue has room: no unbounded buffering in sockets.
    * A worker's death is noticed by its process descriptor, within one poll.
    * No wait is without an end: sending, polling and stopping have deadlines.

Threads: one at a time (the engine's lock). Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from typing import TYPE_CHECKING, Protocol

from distckpt.errors import WorkerDied, WriteError
from distckpt.worker import ZEROS, Ack, Channel, LaneWriter, Task, ack_from, to_message

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distckpt.arena import Slab

_LOG = logging.getLogger(__name__)
_STOP_S = 2.0
_REAP_S = 5.0
_INSTALLED = (".zip", "lib-dynload", "site-packages", "dist-packages")


class Lanes(Protocol):
    """What the engine needs of its lanes."""

    count: int
    depth: int
    """Tasks that one lane may hold unacknowledged."""

    def start(self) -> None:
        """Have every lane ready; raises `WriteError` if a worker cannot start."""

    def submit(self, lane: int, task: Task) -> None:
        """Hand `task` to `lane`; raises `WriteError` if the lane cannot take it."""

    def poll(self, timeout_s: float) -> list[tuple[int, Ack]]:
        """Return (lane, acknowledgement) of what was done; raises `WorkerDied` if a worker ended."""

    def abort(self, save_id: str, timeout_s: float) -> set[int]:
        """Give `save_id` up on all lanes; returns the lanes that may still touch its memory and files."""

    def close(self) -> None:
        """End every lane; idempotent, and needs no process group."""


class InlineLane:
    """The sequential mode: one lane that writes in the calling thread.

    Args:
        slabs: The arena's slabs, by index; looked up at each write.
    """

    count = 1
    depth = 1

    def __init__(self, slabs: Mapping[int, Slab]) -> None:
        self._writer = LaneWriter(lambda slab: slabs[slab].mapping)
        self._acks: list[tuple[int, Ack]] = []
        self._pause = threading.Event()

    def start(self) -> None:
        """See `Lanes.start`."""

    def submit(self, lane: int, task: Task) -> None:
        """See `Lanes.submit`."""
        self._acks.append((lane, self._writer.write(task)))

    def poll(self, timeout_s: float) -> list[tuple[int, Ack]]:
        """See `Lanes.poll`."""
        if not self._acks:
            self._pause.wait(timeout_s)
        acks, self._acks = self._acks, []
        return acks

    def abort(self, save_id: str, timeout_s: float) -> set[int]:
        """See `Lanes.abort`."""
        self._writer.abort(save_id)
        self._acks.clear()
        return set()

    def close(self) -> None:
        """See `Lanes.close`."""


class _Worker:
    """The parent's side of one worker process."""

    def __init__(self, lane: int, timeout_s: float) -> None:
        self.lane = lane
        self.slabs: set[int] = set()
        self._timeout_s = timeout_s
        with contextlib.ExitStack() as undo:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                undo.callback(ours.close)
                with theirs:
                    self.process = subprocess.Popen(
                        [sys.executable, "-c", _start_code(theirs.fileno())],
                        pass_fds=(theirs.fileno(),),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                    )
                undo.callback(self.process.wait, _REAP_S)
                undo.callback(self.process.kill)
                self.pid = self.process.pid
                self.pidfd = os.pidfd_open(self.pid)
            except OSError as error:
                code = errno.errorcode.get(error.errno or 0, "?")
                raise WriteError(
                    f"cannot start worker process {lane}: {error.strerror} [{code}]; nothing was written. "
                    f"Lower --dist-ckpt-workers or raise the limit on processes or descriptors",
                    errno=error.errno,
                    lane=lane,
                ) from error
            undo.pop_all()
        self.channel = Channel(ours, self.pidfd)

    def send(
        self,
        kind: str,
        body: Mapping[str, object],
        fds: tuple[int, ...] = (),
        timeout_s: float | None = None,
    ) -> None:
        try:
            self.channel.send(
                {"kind": kind, "body": body}, fds, self._timeout_s if timeout_s is None else timeout_s
            )
        except TimeoutError as error:
            raise WriteError(
                f"worker process {self.pid} of lane {self.lane} has stopped reading",
                errno=errno.ETIMEDOUT,
                lane=self.lane,
            ) from error
        except OSError as error:
            raise self.died() from error

    def died(self) -> WorkerDied:
        """Reap the process, which has ended or is ending, and describe how."""
        try:
            status = self.process.wait(timeout=_REAP_S)
        except subprocess.TimeoutExpired:
            status = None
        how = "without being reaped" if status is None else f"with status {status}"
        if status is not None and status < 0:
            how = f"by signal {-status} ({signal.strsignal(-status)})"
        return WorkerDied(
            f"worker process {self.pid} of lane {self.lane} ended {how} before it had written its part",
            lane=self.lane,
            pid=self.pid,
            exit_status=status,
        )

    def stop(self, *, kill: bool) -> bool:
        """End the process; returns whether it was reaped."""
        if kill:
            self.process.kill()
        # Not close alone: a forked data loader may hold a copy of the descriptor.
        with contextlib.suppress(OSError):
            self.channel.socket.shutdown(socket.SHUT_RDWR)
        self.channel.socket.close()
        try:
            self.process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            try:
                self.process.wait(timeout=_REAP_S)
            except subprocess.TimeoutExpired:
                _LOG.error("worker process %d of lane %d cannot be killed", self.pid, self.lane)
                return False
        finally:
            if self.pidfd >= 0:
                os.close(self.pidfd)
                self.pidfd = -1
        return True


def _start_code(socket_fd: int) -> str:
    # The working directory comes first in the path of `python -c`, and the script's folder in the parent's: a
    # json.py there must not become the worker's. Hence the installation first, then the rest of the parent's.
    installed = set(sysconfig.get_paths().values())
    folders = dict.fromkeys(found for folder in sys.path if (found := _absolute(folder)) is not None)
    ordered = sorted(folders, key=lambda folder: not (folder in installed or folder.endswith(_INSTALLED)))
    serve = f"from distckpt.worker import main; main({socket_fd}, {os.getpid()})"
    return f"import sys; sys.path[:] = {ordered!r}; {serve}"


def _absolute(folder: str) -> str | None:
    try:
        return os.path.abspath(folder)
    except FileNotFoundError:
        # The working directory was removed: nothing can be imported from it.
        return None


def _stop_all(owner_pid: int, workers: list[_Worker]) -> None:
    # A forked child inherits this object; the workers are its parent's.
    if os.getpid() == owner_pid:
        for worker in workers:
            worker.stop(kill=False)
    workers.clear()


class WorkerLanes:
    """A pool of worker processes, one for each lane, kept between saves.

    Args:
        count: Number of lanes.
        slabs: The arena's slabs, by index; a worker is sent each before the first task that needs it.
        timeout_s: Seconds that a worker may take to accept a message.
    """

    depth = 2

    def __init__(self, count: int, slabs: Mapping[int, Slab], timeout_s: float) -> None:
        self.count = count
        self._slabs = slabs
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []
        # Killed, and not gone: a process that waits for a device that hangs ends when the device answers.
        self._lost: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _stop_all, os.getpid(), self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers, by lane."""
        return [worker.pid for worker in self._workers]

    def start(self) -> None:
        """See `Lanes.start`.

        Raises:
            WriteError: A worker cannot start, or the lanes are closed.
        """
        if not self._finalizer.alive:
            raise WriteError("the writer is closed")
        self._lost = [worker for worker in self._lost if worker.process.poll() is None]
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            self._forget(worker)
        running = {worker.lane for worker in self._workers}
        for lane in range(self.count):
            if lane not in running:
                self._workers.insert(lane, _Worker(lane, self._timeout_s))

    def submit(self, lane: int, task: Task) -> None:
        """See `Lanes.submit`."""
        worker = self._workers[lane]
        # Slabs that the arena gave back meanwhile: a mapping would keep their memory.
        for index in worker.slabs - self._slabs.keys():
            worker.send("drop", {"index": index})
            worker.slabs.discard(index)
        for index in {piece[0] for piece in task.pieces} - worker.slabs - {ZEROS}:
            slab = self._slabs[index]
            worker.send("slab", {"index": slab.index, "nbytes": slab.nbytes}, (slab.fd,))
            worker.slabs.add(index)
        worker.send("write", to_message(task))

    def poll(self, timeout_s: float) -> list[tuple[int, Ack]]:
        """See `Lanes.poll`."""
        acks, ended = self._collect(timeout_s)
        if ended:
            raise ended[0].died()
        return acks

    def _collect(self, timeout_s: float) -> tuple[list[tuple[int, Ack]], list[_Worker]]:
        """Return what has arrived, and the workers that have ended or are ending."""
        poller = select.poll()
        by_fd: dict[int, _Worker] = {}
        for worker in self._workers:
            for fd in (worker.channel.socket.fileno(), worker.pidfd):
                poller.register(fd, select.POLLIN)
                by_fd[fd] = worker
        kept = {worker.channel.socket.fileno() for worker in self._workers if worker.channel.messages}
        acks: list[tuple[int, Ack]] = []
        ended: list[_Worker] = []
        ready = {fd for fd, _ in poller.poll(0 if kept else max(0.0, timeout_s) * 1000)}
        for fd in [*kept, *(ready - kept)]:
            worker = by_fd[fd]
            if fd == worker.pidfd:
                ended.append(worker)
                continue
            try:
                messages, closed = worker.channel.receive()
            except OSError:
                messages, closed = [], True
            acks += [(worker.lane, ack_from(message["body"])) for message in messages]
            if closed:
                ended.append(worker)
        return acks, ended

    def abort(self, save_id: str, timeout_s: float) -> set[int]:
        """See `Lanes.abort`.

        A worker that does not answer in time is killed; one that cannot be reaped stays dangerous.
        """
        unreaped: set[int] = set()
        waiting: dict[int, _Worker] = {}
        for worker in self._workers:
            try:
                worker.send("abort", {"save_id": save_id}, timeout_s=timeout_s)
            except WriteError:
                worker.process.kill()
            # Also one that cannot be told: it is seen to its end below.
            waiting[worker.lane] = worker
        deadline = time.monotonic() + timeout_s
        while waiting and time.monotonic() < deadline:
            acks, ended = self._collect(min(0.1, timeout_s))
            for lane, ack in acks:
                if ack.save_id == save_id and ack.sequence == -1:
                    waiting.pop(lane, None)
            for worker in dict.fromkeys(ended):
                waiting.pop(worker.lane, None)
                if not self._forget(worker, kill=True):
                    unreaped.add(worker.lane)
        for worker in [w for w in self._workers if w.lane in waiting or w.process.poll() is not None]:
            if not self._forget(worker, kill=True):
                unreaped.add(worker.lane)
        return unreaped

    def close(self) -> None:
        """See `Lanes.close`."""
        self._finalizer()

    def _forget(self, worker: _Worker, *, kill: bool = False) -> bool:
        self._workers.remove(worker)
        reaped = worker.stop(kill=kill)
        if not reaped:
            self._lost.append(worker)
        return reaped


def open_lanes(workers: int, slabs: Mapping[int, Slab], timeout_s: float) -> Lanes:
    """Return the lanes for `--dist-ckpt-workers workers`: for 1, one in this process and no child.

    Args:
        workers: Number of lanes, at least 1.
        slabs: The arena's slabs, by index.
        timeout_s: Seconds that a worker may take to accept a message.
    """
    return InlineLane(slabs) if workers == 1 else WorkerLanes(workers, slabs, timeout_s)
