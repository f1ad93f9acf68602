"""The write lanes of one engine: sequential in this process, or a pool of exec'd workers.

Both kinds run `worker.LaneWriter`, so that one worker and several cannot drift apart.

Invariants:
    * The calling process does a few steps of Python for each worker and save, and a list lookup for each
      part; nothing that grows with items or bytes.
    * Every part that was pushed is written by exactly one lane, whichever is free; nothing of one save is
      left to the next, neither in the pipes nor in a worker.
    * A worker's death is noticed by its process descriptor, within one poll.
    * No wait is without an end: sending, polling and stopping have deadlines.

Threads: one at a time (the engine's lock). Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import io
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
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from distckpt.errors import WorkerDied, WriteError
from distckpt.worker import (
    LONGEST_PAUSE_S,
    MAX_FDS,
    PART_NUMBER,
    SHORTEST_PAUSE_S,
    STOP,
    Channel,
    Job,
    LaneWriter,
    Plan,
    Record,
    encode,
    job_message,
    plan_message,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distckpt.arena import Slab
    from distckpt.storage import Receipt

_LOG = logging.getLogger(__name__)
_STOP_S = 2.0
_REAP_S = 5.0
_LAST_LOOK_S = 1.0
"""What was killed and did not end may have ended since."""
_DRAIN_BYTES = 1 << 16
_CLOSED = "the writer is closed"
_INSTALLED = (".zip", "lib-dynload", "site-packages", "dist-packages")


class Lanes(Protocol):
    """What the engine needs of its lanes.

    A save is `start`, `begin`, any number of `push`, `finish`, and `poll` until that returns True; or, at any
    point, `abort`. A part may wait, to become ready, for one that was pushed before it to be done, but never
    for a later one: every lane might then hold a part that is not ready.
    """

    count: int
    receipts: dict[int, list[Receipt]]
    """Once `poll` has returned True: by index of the file, what the lanes were told of it."""
    records: dict[int, Record]
    """The same, by lane, if the job was traced: what it noted."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers, by lane; none where this process writes itself."""

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Lanes that have not yet made durable what they took of the current save."""

    def start(self) -> None:
        """Have every lane ready; raises `WriteError` if a worker cannot start."""

    def add_plan(self, plan: Plan) -> None:
        """Have every lane learn of `plan` before the first job that names it."""

    def drop_plan(self, plan_id: int) -> None:
        """Forget a plan that no later job will name; one that is not known is no error."""

    def begin(self, job: Job) -> None:
        """Begin a save, whose board was cleared; raises `WriteError` if a lane cannot take part."""

    def push(self, parts: Sequence[int]) -> None:
        """Have some lane write each of `parts`, in about this order, as soon as it is ready."""

    def finish(self) -> None:
        """Say that nothing more will be pushed in this save."""

    def poll(self, timeout_s: float) -> bool:
        """Wait for the save to get on.

        Args:
            timeout_s: Seconds to wait at most.

        Returns:
            True once every lane has made durable what it took, and everything was taken; False when anything
            else has happened, or nothing.

        Raises:
            WriteError: A lane has failed; `lane` is filled.
            WorkerDied: A worker has ended.
        """

    def abort(self, save_id: str, timeout_s: float) -> set[int]:
        """Give `save_id` up on all lanes; returns the lanes that may still touch its memory and files."""

    def close(self) -> None:
        """End every lane; idempotent, also after an interrupt, and needs no process group."""


class InlineLane:
    """The sequential mode: one lane in this process, whose threads write while the caller stages and polls.

    Args:
        slabs: The arena's slabs, by index; looked up at each write.
    """

    count = 1

    def __init__(self, slabs: Mapping[int, Slab]) -> None:
        self.receipts: dict[int, list[Receipt]] = {}
        self.records: dict[int, Record] = {}
        self._writer = LaneWriter(lambda slab: slabs[slab].mapping)
        self._parts: deque[int] = deque()
        self._save_id: str | None = None
        self._is_last = False
        self._closed = False
        self._pause = threading.Event()

    @property
    def pids(self) -> list[int]:
        """See `Lanes.pids`."""
        return []

    @property
    def unfinished(self) -> tuple[int, ...]:
        """See `Lanes.unfinished`."""
        return () if self._save_id is None else (0,)

    def start(self) -> None:
        """See `Lanes.start`.

        Raises:
            WriteError: The lane is closed.
        """
        if self._closed:
            raise WriteError(_CLOSED)

    def add_plan(self, plan: Plan) -> None:
        """See `Lanes.add_plan`."""
        self._writer.add_plan(plan)

    def drop_plan(self, plan_id: int) -> None:
        """See `Lanes.drop_plan`."""
        self._writer.drop_plan(plan_id)

    def begin(self, job: Job) -> None:
        """See `Lanes.begin`."""
        self._writer.begin(job)
        self._save_id, self._is_last = job.save_id, False

    def push(self, parts: Sequence[int]) -> None:
        """See `Lanes.push`."""
        self._parts.extend(parts)

    def finish(self) -> None:
        """See `Lanes.finish`."""
        self._is_last = True

    def poll(self, timeout_s: float) -> bool:
        """See `Lanes.poll`: hands one part at most to its threads, so that the caller can stage the next.

        Raises:
            WriteError: The storage refused.
        """
        try:
            return self._advance(timeout_s)
        except WriteError as error:
            error.lane = 0
            raise

    def _advance(self, timeout_s: float) -> bool:
        if self._parts:
            if self._wait_for(self._parts[0], timeout_s) and self._writer.has_room(timeout_s):
                self._writer.write(self._parts.popleft())
        elif self._save_id is not None and self._is_last:
            receipts = self._writer.finish(timeout_s)
            if receipts is not None:
                self.receipts = receipts
                record = self._writer.record
                self.records = {} if record is None else {0: record}
                self._save_id = None
                return True
        elif self._save_id is not None and self._writer.is_writing:
            self._writer.wait(timeout_s)
        else:
            self._pause.wait(max(0.0, timeout_s))
        return False

    def _wait_for(self, part: int, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        pause_s = SHORTEST_PAUSE_S
        while not self._writer.is_ready(part):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._pause.wait(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return True

    def abort(self, save_id: str, timeout_s: float) -> set[int]:
        """See `Lanes.abort`."""
        return self._give_up(timeout_s) if save_id == self._save_id else set()

    def close(self) -> None:
        """See `Lanes.close`."""
        self._closed = True
        self._give_up(_STOP_S)

    def _give_up(self, timeout_s: float) -> set[int]:
        self._parts.clear()
        self._save_id = None
        return set() if self._writer.abort(timeout_s) else {0}


class _Worker:
    """The parent's side of one worker process."""

    def __init__(self, lane: int, timeout_s: float, cores: Sequence[int]) -> None:
        self.lane = lane
        self.slabs: set[int] = set()
        self.plans: set[int] = set()
        self._timeout_s = timeout_s
        with contextlib.ExitStack() as undo:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                undo.callback(ours.close)
                with theirs:
                    self.process = subprocess.Popen(
                        [sys.executable, "-c", _start_code(theirs.fileno(), cores)],
                        pass_fds=(theirs.fileno(),),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                    )
                undo.callback(self.process.wait, _REAP_S)
                undo.callback(self.process.kill)
                self.pid = self.process.pid
                self._pidfile = io.FileIO(os.pidfd_open(self.pid))
            except OSError as error:
                code = errno.errorcode.get(error.errno or 0, "?")
                raise WriteError(
                    f"cannot start worker process {lane}: {error.strerror} [{code}]; nothing was written. "
                    f"Lower --dist-ckpt-workers or raise the limit on processes or descriptors",
                    errno=error.errno,
                    lane=lane,
                ) from error
            undo.pop_all()
        self.pidfd = self._pidfile.fileno()
        self.channel = Channel(ours, self.pidfd)

    def send(self, message: bytes, fds: Sequence[int] = (), timeout_s: float | None = None) -> None:
        try:
            self.channel.send(message, fds, self._timeout_s if timeout_s is None else timeout_s)
        except TimeoutError as error:
            raise WriteError(
                f"worker process {self.pid} of lane {self.lane} has stopped reading",
                errno=errno.ETIMEDOUT,
                lane=self.lane,
            ) from error
        except OSError as error:
            raise self.failure() from error

    def learn(self, slabs: Mapping[int, Slab], plans: Mapping[int, _Known], plan_id: int) -> None:
        """Have the process know plan `plan_id` and the slabs behind it, and nothing that is gone."""
        # Slabs that the arena gave back meanwhile: a mapping would keep their memory.
        for index in self.slabs - slabs.keys():
            self.send(encode("drop_slab", index))
            self.slabs.discard(index)
        for known in self.plans - plans.keys():
            self.send(encode("drop_plan", known))
            self.plans.discard(known)
        for index in plans[plan_id].plan.slabs - self.slabs:
            # No slab in this frame: an error that somebody keeps would keep its memory.
            self.send(encode("slab", {"index": index, "nbytes": slabs[index].nbytes}), (slabs[index].fd,))
            self.slabs.add(index)
        if plan_id not in self.plans:
            self.send(plans[plan_id].message)
            self.plans.add(plan_id)

    def failure(self) -> WriteError:
        """Reap the process, which has ended or is ending, and describe why or how."""
        with contextlib.suppress(OSError):
            for message in self.channel.receive()[0]:
                if message["kind"] == "refused":
                    return self.refusal(message["body"])
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

    def refusal(self, body: dict[str, Any]) -> WriteError:
        """Describe what the process gave as its reason not to serve."""
        message = f"worker process {self.pid} of lane {self.lane} {body['message']}; nothing was written"
        return WriteError(message, errno=body["errno"], lane=self.lane)

    def stop(self, *, kill: bool) -> bool:
        """End the process; returns whether it was reaped. May be called again after an interrupt."""
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
            self._pidfile.close()
        return True


def _start_code(socket_fd: int, cores: Sequence[int] = ()) -> str:
    # The working directory comes first in the path of `python -c`, and the script's folder in the parent's: a
    # json.py there must not become the worker's. Hence the installation first, then the rest of the parent's.
    installed = set(sysconfig.get_paths().values())
    folders = dict.fromkeys(found for folder in sys.path if (found := _absolute(folder)) is not None)
    ordered = sorted(folders, key=lambda folder: not (folder in installed or folder.endswith(_INSTALLED)))
    serve = f"from distckpt.worker import main; main({socket_fd}, {os.getpid()}, {tuple(cores)})"
    return f"import sys; sys.path[:] = {ordered!r}; {serve}"


def _absolute(folder: str) -> str | None:
    try:
        return os.path.abspath(folder)
    except FileNotFoundError:
        # The working directory was removed: nothing can be imported from it.
        return None


class _Queues:
    """One pipe for each lane, out of which every lane takes the numbers of parts."""

    def __init__(self, count: int) -> None:
        self.readers: list[int] = []
        self.writers: list[int] = []
        # As files, which may be closed again after an interrupt: a number may be another's by then.
        self._files: list[io.FileIO] = []
        # What a full pipe has refused, by lane.
        self._backlog = [bytearray() for _ in range(count)]
        try:
            for _ in range(count):
                reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                self._files += [io.FileIO(reader, "r"), io.FileIO(writer, "w")]
                self.readers.append(reader)
                self.writers.append(writer)
        except OSError as error:
            self.close()
            code = errno.errorcode.get(error.errno or 0, "?")
            raise WriteError(
                f"cannot make a pipe for each of {count} workers: {error.strerror} [{code}]; nothing was "
                f"written. Lower --dist-ckpt-workers or raise the limit on descriptors",
                errno=error.errno,
            ) from error

    def add(self, lane: int, part: int) -> None:
        self._backlog[lane] += PART_NUMBER.pack(part)

    def flush(self) -> list[int]:
        """Write what the pipes take; returns the descriptors of those that are full before the end."""
        full = []
        for writer, backlog in zip(self.writers, self._backlog, strict=True):
            try:
                while backlog:
                    # Source: pipe(7): up to PIPE_BUF bytes are written in one piece or not at all.
                    del backlog[: os.write(writer, backlog[: select.PIPE_BUF])]
            except BlockingIOError:
                full.append(writer)
        return full

    def drain(self) -> None:
        """Forget everything that nobody took; only while no lane has a save."""
        for reader, backlog in zip(self.readers, self._backlog, strict=True):
            backlog.clear()
            with contextlib.suppress(BlockingIOError):
                while os.read(reader, _DRAIN_BYTES):
                    pass

    def close(self) -> None:
        for file in self._files:
            file.close()
        self.readers.clear()
        self.writers.clear()


class _Known:
    """A plan, what hands it to a worker, and which lane's pipe each of its parts goes into."""

    def __init__(self, plan: Plan, count: int) -> None:
        self.plan = plan
        self.message = plan_message(plan)
        self.lanes = [part.file % count for part in plan.parts]


def _stop_all(owner_pid: int, workers: list[_Worker], queues: list[_Queues]) -> None:
    # A forked child inherits this object; the workers are its parent's.
    if os.getpid() == owner_pid:
        for worker in workers.copy():
            worker.stop(kill=False)
            # Not before: one that is being stopped when an interrupt comes is left to the next call.
            with contextlib.suppress(ValueError):
                workers.remove(worker)
        for one in queues:
            one.close()
    workers.clear()
    queues.clear()


class WorkerLanes:
    """A pool of worker processes, one for each lane, kept between saves.

    Args:
        count: Number of lanes.
        slabs: The arena's slabs, by index; a worker is sent each before the first plan that needs it.
        timeout_s: Seconds that a worker may take to accept a message.
        cores: Cores that the workers run on; none: those of this process.
    """

    def __init__(
        self, count: int, slabs: Mapping[int, Slab], timeout_s: float, cores: Sequence[int] = ()
    ) -> None:
        self.count = count
        self._slabs = slabs
        self._timeout_s = timeout_s
        self._cores = tuple(cores)
        self._workers: list[_Worker] = []
        # Killed, and not gone: a process that waits for a device that hangs ends when the device answers.
        self._lost: list[_Worker] = []
        self._plans: dict[int, _Known] = {}
        self._job: Job | None = None
        self._unfinished: set[int] = set()
        self.receipts: dict[int, list[Receipt]] = {}
        self.records: dict[int, Record] = {}
        self._is_last = False
        self._last_is_sent = False
        # None before the first start, one after.
        self._queues: list[_Queues] = []
        self._is_closed = False
        self._stop_all = partial(_stop_all, os.getpid(), self._workers, self._queues)
        weakref.finalize(self, self._stop_all)

    @property
    def pids(self) -> list[int]:
        """See `Lanes.pids`."""
        return [worker.pid for worker in self._workers]

    @property
    def unfinished(self) -> tuple[int, ...]:
        """See `Lanes.unfinished`."""
        return tuple(sorted(self._unfinished))

    def start(self) -> None:
        """See `Lanes.start`.

        Raises:
            WriteError: A worker cannot start, or the lanes are closed.
        """
        if self._is_closed:
            raise WriteError(_CLOSED)
        self._lost = [worker for worker in self._lost if worker.process.poll() is None]
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            self._forget(worker)
        if not self._queues:
            self._queues.append(_Queues(self.count))
        running = {worker.lane for worker in self._workers}
        for lane in range(self.count):
            if lane not in running:
                self._workers.insert(lane, _Worker(lane, self._timeout_s, self._cores))
                self._send_queues(self._workers[lane])

    def _send_queues(self, worker: _Worker) -> None:
        readers = self._queues[0].readers
        try:
            for first in range(0, self.count, MAX_FDS):
                fds = readers[first : first + MAX_FDS]
                worker.send(encode("queues", {"lane": worker.lane, "num_fds": len(fds)}), fds)
        except WriteError:
            # One that lives on with fewer of them would leave parts of its own to others, or to nobody.
            self._forget(worker, kill=True)
            raise

    def add_plan(self, plan: Plan) -> None:
        """See `Lanes.add_plan`: workers learn of it with the first job that names it."""
        self._plans[plan.plan_id] = _Known(plan, self.count)

    def drop_plan(self, plan_id: int) -> None:
        """See `Lanes.drop_plan`: workers learn of it with the next job."""
        self._plans.pop(plan_id, None)

    def begin(self, job: Job) -> None:
        """See `Lanes.begin`.

        Raises:
            WorkerDied: A worker has ended.
        """
        assert self._job is None, "one save at a time"
        self._job, self._is_last, self._last_is_sent = job, False, False
        self._unfinished = set(range(self.count))
        self.receipts = {}
        self.records = {}
        # No worker has a save: what is in the pipes is of one that was given up.
        self._queues[0].drain()
        for worker in self._workers:
            worker.learn(self._slabs, self._plans, job.plan_id)
        message = job_message(job)
        for worker in self._workers:
            worker.send(message)

    def push(self, parts: Sequence[int]) -> None:
        """See `Lanes.push`."""
        assert self._job is not None
        assert not self._is_last
        queues, lanes = self._queues[0], self._plans[self._job.plan_id].lanes
        for part in parts:
            queues.add(lanes[part], part)
        queues.flush()

    def finish(self) -> None:
        """See `Lanes.finish`."""
        self._is_last = True
        self._flush()

    def poll(self, timeout_s: float) -> bool:
        """See `Lanes.poll`.

        Raises:
            WriteError: A lane has failed.
        """
        answers, ended = self._collect(timeout_s, self._flush())
        for worker, message in answers:
            if message["kind"] == "refused":
                raise worker.refusal(message["body"])
            # The late answer of a save that was given up says nothing about this one.
            if self._job is None or message["save_id"] != self._job.save_id:
                continue
            if message["kind"] == "error":
                raise WriteError(**message["body"], lane=worker.lane)
            if message["kind"] == "done":
                self._unfinished.discard(worker.lane)
                body = message["body"]
                for file, receipts in body["receipts"]:
                    self.receipts.setdefault(file, []).extend(receipts)
                if body["record"] is not None:
                    self.records[worker.lane] = Record(*body["record"])
        if self._job is not None and not self._unfinished:
            self._job = None
            return True
        if ended:
            raise ended[0].failure()
        return False

    def _flush(self) -> list[int]:
        """Hand over what waits to be; returns the pipes that have no room."""
        full = self._queues[0].flush() if self._queues else []
        # Not earlier: a lane that finds all pipes empty then, is done.
        if self._job is not None and self._is_last and not self._last_is_sent and not full:
            message = encode("finish", None, self._job.save_id)
            for worker in self._workers:
                worker.send(message)
            self._last_is_sent = True
        return full

    def _collect(
        self, timeout_s: float, full: Sequence[int] = ()
    ) -> tuple[list[tuple[_Worker, dict[str, Any]]], list[_Worker]]:
        """Return what has arrived, and the workers that have ended or are ending.

        Args:
            timeout_s: Seconds to wait at most.
            full: Pipes whose room is a reason to return, too.
        """
        poller = select.poll()
        by_fd: dict[int, _Worker] = {}
        for worker in self._workers:
            for fd in (worker.channel.socket.fileno(), worker.pidfd):
                poller.register(fd, select.POLLIN)
                by_fd[fd] = worker
        for fd in full:
            poller.register(fd, select.POLLOUT)
        kept = {worker.channel.socket.fileno() for worker in self._workers if worker.channel.messages}
        answers: list[tuple[_Worker, dict[str, Any]]] = []
        ended: list[_Worker] = []
        ready = {fd for fd, _ in poller.poll(0 if kept else max(0.0, timeout_s) * 1000)} - set(full)
        for fd in [*kept, *(ready - kept)]:
            worker = by_fd[fd]
            if fd == worker.pidfd:
                ended.append(worker)
                continue
            try:
                messages, closed = worker.channel.receive()
            except OSError:
                messages, closed = [], True
            answers += [(worker, message) for message in messages]
            if closed:
                ended.append(worker)
        return answers, ended

    def abort(self, save_id: str, timeout_s: float) -> set[int]:
        """See `Lanes.abort`.

        A worker that does not answer in time is killed; one that cannot be reaped stays dangerous.
        """
        self._stop(save_id)
        unreaped: set[int] = set()
        waiting: dict[int, _Worker] = {}
        message = encode("abort", None, save_id)
        for worker in self._workers:
            try:
                worker.send(message, timeout_s=timeout_s)
            except WriteError:
                worker.process.kill()
            # Also one that cannot be told: it is seen to its end below.
            waiting[worker.lane] = worker
        deadline = time.monotonic() + timeout_s
        while waiting and time.monotonic() < deadline:
            answers, ended = self._collect(min(0.1, timeout_s))
            for worker, answer in answers:
                if (answer["kind"], answer["save_id"]) == ("aborted", save_id):
                    waiting.pop(worker.lane, None)
            for worker in dict.fromkeys(ended):
                waiting.pop(worker.lane, None)
                if not self._forget(worker, kill=True):
                    unreaped.add(worker.lane)
        for worker in [w for w in self._workers if w.lane in waiting or w.process.poll() is not None]:
            if not self._forget(worker, kill=True):
                unreaped.add(worker.lane)
        return unreaped

    def _stop(self, save_id: str) -> None:
        """Have no lane take or wait for another part of the current save, if that is `save_id`."""
        if self._job is None or self._job.save_id != save_id:
            return
        known = self._plans.get(self._job.plan_id)
        if known is not None and known.plan.board[0] in self._slabs:
            slab, offset = known.plan.board
            self._slabs[slab].mapping[offset : offset + len(STOP)] = STOP
        self._job = None
        self._unfinished.clear()

    def close(self) -> None:
        """See `Lanes.close`."""
        self._is_closed = True
        # Not by the finalizer, which runs once: an interrupt would leave the rest to nobody.
        self._stop_all()
        for worker in self._lost:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=_LAST_LOOK_S)
        self._lost.clear()

    def _forget(self, worker: _Worker, *, kill: bool = False) -> bool:
        self._workers.remove(worker)
        reaped = worker.stop(kill=kill)
        if not reaped:
            self._lost.append(worker)
        return reaped


def open_lanes(workers: int, slabs: Mapping[int, Slab], timeout_s: float, cores: Sequence[int] = ()) -> Lanes:
    """Return the lanes for `--dist-ckpt-workers workers`: for 1, one in this process and no child.

    Args:
        workers: Number of lanes, at least 1.
        slabs: The arena's slabs, by index.
        timeout_s: Seconds that a worker may take to accept a message.
        cores: Cores that worker processes run on; none: those of this process.
    """
    return InlineLane(slabs) if workers == 1 else WorkerLanes(workers, slabs, timeout_s, cores)
