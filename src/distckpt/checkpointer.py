"""Checkpointer: the training loop's own way to save and restore.

    state -> signature -> planned once -> staged -> written and published in the background

What a save needs is planned when a state is seen for the first time, and used again while its signature
holds; a save then costs the trainer the comparison and one replay of the copies.

Several ranks agree through words that each leaves and looks for (`meeting`); what they restore, they read
for themselves or exchange.

Invariants:
    * Saving involves no collective, and no rank that is no participant; `save` waits for no other rank.
    * The background thread does nothing for each item, and makes no CUDA call.
    * A tensor that changed before the guard let it fails its save, and nothing of that is published.

Threads: one thread at a time saves, guards and restores; one thread of the checkpointer's own writes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import uuid
import weakref
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from distckpt import observe
from distckpt.assembly import ReplicasDiffer, StateChanged
from distckpt.commit import Claim, claim, committed_by, exclusive_of, publish, reclaim
from distckpt.config import CheckpointConfig, warn_async_workers
from distckpt.engine import Engine, Residence, Written
from distckpt.errors import CheckpointError, ConfigError, MissingRanks, StagingError, clear_frames
from distckpt.exitstatus import note_failure, watch_exit
from distckpt.image import lay_out_image
from distckpt.manifest import METADATA, read_partials, write_manifest
from distckpt.meeting import Meeting, exchange, hear, tell
from distckpt.metadata import write_documents
from distckpt.ownership import Common, Rules, common_from_json, common_to_json, find_common, members_in
from distckpt.parallel_load import load
from distckpt.participants import meet
from distckpt.planned import PlannedState
from distckpt.reader import StorageReader
from distckpt.signature import View, local_tensors, version_of
from distckpt.storage import open_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.optim import Optimizer
    from typing_extensions import Self

    from distckpt.coordination import Coordinator
    from distckpt.manifest import PartialManifest
    from distckpt.participants import Participants
    from distckpt.storage import Storage

_LOG = logging.getLogger(__name__)
_PREFIX = "step-"
_STEP_DIGITS = 8
_GIB = 1 << 30
_POLL_S = 0.002
_ARRIVAL_S = 5.0
_VERSIONS_AT_ONCE = 512
_IDLE_TIMEOUTS = 2.0
"""A save in whose directory nothing has changed for so many deadlines is over."""
_MOST_DOUBLINGS = 10
_SKEW, _SKEW_BYTES = 1.2, 64 << 20
"""A rank that writes more than the mean, by so many times and bytes, is worth a word."""


class SaveHandle:
    """One save of a `Checkpointer`.

    Attributes:
        step: Its step.
        path: Where the checkpoint will be.
        blocked_s: Seconds that `save` took.
        prepared_s: Seconds of these before the first copy: comparing or planning, waiting for memory.
    """

    def __init__(self, step: int, path: str) -> None:
        self.step = step
        self.path = path
        self.blocked_s = 0.0
        self.prepared_s = 0.0
        self._residence: Residence | None = None
        self._has_arrived = False
        self._is_asked = False
        self._future: Future[str] = Future()
        self._future.set_running_or_notify_cancel()

    @property
    def staged(self) -> bool:
        """Whether everything was copied: nothing that happens to the state shows in the checkpoint."""
        residence = self._residence
        if residence is not None and not self._has_arrived:
            self._has_arrived = residence.has_arrived()
        return self._has_arrived or self._future.done()

    @property
    def committed(self) -> bool:
        """Whether the checkpoint is complete and durable."""
        return self._future.done() and self._future.exception() is None

    def result(self, timeout: float | None = None) -> str:
        """Wait until the checkpoint is committed.

        Args:
            timeout: Seconds; None: as long as it takes, which has deadlines of its own.

        Returns:
            Where it is.

        Raises:
            CheckpointError: The save failed.
            TimeoutError: It is still under way.
        """
        self._is_asked = True
        return self._future.result(timeout)


class _Late:
    """Tensors of a save that may still be copied, and must not change until then."""

    def __init__(self, planned: PlannedState, view: View, versions: list[int], residence: Residence) -> None:
        self._tensors = view.locals
        # Of all tensors of the state: choosing among them takes as long as reading all.
        self._versions = versions or list(map(version_of, self._tensors))
        self._planned = planned
        self._residence = residence
        self._lock = threading.Lock()
        self.error: StagingError | None = None
        self.is_over = False

    def guard(self) -> None:
        """Check the tensors, and let the caller's streams wait for the copies; they may change after that."""
        with self._lock:
            if self.is_over:
                return
            self._compare(0, len(self._tensors))
            if not self._residence.has_arrived():
                self._residence.order_after()
            self._end()

    def check(self) -> None:
        """Before the save is published: check the tensors, if no guard has, a few at a time."""
        pause = threading.Event()
        for first in range(0, len(self._versions), _VERSIONS_AT_ONCE):
            with self._lock:
                if self.is_over:
                    break
                self._compare(first, first + _VERSIONS_AT_ONCE)
            pause.wait(_POLL_S)
        with self._lock:
            self._end()
        if self.error is not None:
            raise self.error

    def fail(self, what: str) -> None:
        """Note that the tensors change before they may."""
        with self._lock:
            if not self.is_over:
                self.error = StagingError(
                    f"{what} after save() and outside guard(optimizer), while parameters or optimizer states "
                    f"may still be copied: wrap optimizer.step() in guard(optimizer)"
                )
                self._end()

    def end(self) -> None:
        """Let the tensors go."""
        with self._lock:
            self._end()

    def _compare(self, first: int, end: int) -> None:
        versions = list(map(version_of, self._tensors[first:end]))
        if versions == self._versions[first:end]:
            return
        late = self._planned.late_leaves
        for leaf, found in enumerate(versions, first):
            if found != self._versions[leaf] and leaf in late:
                self.error = StagingError(
                    f"{self._planned.fqn(late[leaf])!r} was changed after save() and before guard() let it: "
                    f"wrap whatever changes parameters or optimizer states in guard(optimizer)"
                )
                return

    def _end(self) -> None:
        self.is_over = True
        self._tensors = []


class Checkpointer:
    """Saves and restores the state of a training loop in numbered steps under one directory.

    Args:
        root: Directory of all steps, or a URL that fsspec resolves to a local one.
        config: Settings; default: `CheckpointConfig()`.
        participants: Who saves together: ranks of the job, a process group, a device mesh, or a coordinator
            for jobs without `torch.distributed`; default: all ranks. They all make one, in the same order if
            they make several, and call `save` for the same steps. Other ranks need not know of it.
        storage_options: Passed to fsspec as they are.
        **settings: Fields of `CheckpointConfig`, which override `config`.

    Raises:
        ConfigError: A setting, the URL or a storage option cannot be honoured, or this rank is none of the
            `participants`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        *,
        participants: Participants = None,
        storage_options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._config = CheckpointConfig.build(config, settings)
        self._coordinator, self._group = meet(participants)
        self._rank = self._coordinator.ranks[self._coordinator.rank]
        self._is_first = self._coordinator.rank == 0
        """Whether this rank publishes."""
        self._is_alone = len(self._coordinator.ranks) == 1
        self._name = str(_count(self._coordinator))
        self._num_saves: Counter[int] = Counter()
        self._num_restores = 0
        self._common: Common | None = None
        """What the participants have in common, once it is known, as far as this rank has a part in it."""
        self._found: Common | None = None
        """The same, for all of them; on the first rank."""
        self._trusts_meshes = True
        self._meeting: Meeting | None = None
        """That of the last save that has begun."""
        self._over: list[Meeting] = []
        """Those that have ended and not been forgotten; on the first rank."""
        self._num_changes = self._wait_saves = 0
        """How often it has turned out too late that ranks no longer had the same, and how many saves until
        they are asked again: some never have."""
        self._storage_options = dict(storage_options or {})
        self._storage = self._open(root)
        # Absolute, wherever the process goes meanwhile.
        self._root = self._storage.url
        logging.getLogger("distckpt").setLevel(self._config.log_level.upper())
        self._engine = Engine.open(self._config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="distckpt-write")
        self._planned: PlannedState | None = None
        self._plan_lock = threading.Lock()
        self._retired: list[PlannedState] = []
        """Plans whose last saves may still be under way."""
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._guards = 0
        """How many `guard`s are entered."""
        self._owner_pid = os.getpid()
        self._late: list[_Late] = []
        self._failed: set[str] = set()
        """Ids of this rank's saves that have failed."""
        self._settled: set[int] = set()
        """Steps in whose directories nothing is to be cleared away."""
        self._handles: list[SaveHandle] = []
        self._closed = self._ended = False
        self._warned_over_budget = False

    def __enter__(self) -> Self:
        """Return the checkpointer; it is closed on leaving."""
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        """Close the checkpointer; see `close`.

        Raises:
            CheckpointError: As `close`, unless something else is raised already.
        """
        try:
            self.close()
        except CheckpointError:
            if exc_type is None:
                raise

    def prewarm(self, state: Mapping[str, Any]) -> Future[int]:
        """Plan `state`, and begin to reserve and pin host memory for it.

        Args:
            state: What will be saved, or a state with the same tensors.

        Returns:
            A future of the bytes that are reserved; it ends with a `StagingError` if they cannot be had.

        Raises:
            CheckpointError: The checkpointer is closed, or the state cannot be saved.
        """
        self._check_open()
        with torch.inference_mode(mode=False), torch.no_grad():
            planned = self._plan(state, View(state))
            planned.release_tensors()
            planned.foresee_metadata(self._path(0))
            tensors = local_tensors(state)
            devices = {tensor.device for tensor in tensors if tensor.is_cuda}
            return self._engine.prewarm([tensor.nbytes for tensor in tensors], devices)

    def save(self, step: int, state: Mapping[str, Any]) -> SaveHandle:
        """Save `state` as step `step`.

        With `async_save` this returns when the state may change again: CUDA tensors by work on the caller's
        current streams, those of guarded optimizers within `guard`. The rest happens in the background. A
        state that the budget for host memory does not hold is written before this returns.

        Args:
            step: Number of the step, from 0; a step that was saved before is replaced.
            state: Nested containers of tensors and Python objects.

        Returns:
            A handle of the save.

        Raises:
            CheckpointError: The checkpointer is closed, the state cannot be staged, or, without `async_save`,
                the save failed.
            ConfigError: `step` is negative.
        """
        started = time.monotonic()
        self._check_open()
        if step < 0:
            raise ConfigError(f"step: expected a number from 0, got {step}")
        if self._config.async_save:
            warn_async_workers(self._config.dist_ckpt_workers, stacklevel=2)
            watch_exit()
        handle = SaveHandle(step, self._path(step))
        self._handles = [*(one for one in self._handles if not one.committed), handle]
        # The same on all ranks that save this step, whatever steps one of them has left out.
        self._num_saves[step] += 1
        meeting = Meeting(
            self._coordinator,
            f"{self._name}.{step}.{self._num_saves[step]}",
            timeout_s=self._timeout_s,
            where=handle.path,
            before=self._meeting,
        )
        self._meeting = meeting
        try:
            # Not inference tensors, whoever calls: what is kept for the next save could not be used by it.
            with torch.inference_mode(mode=False), torch.no_grad():
                self._begin(handle, state, meeting, started)
        except BaseException as error:
            self._handles.remove(handle)
            self._tell_others(meeting, error)
            self._report(handle, error)
            raise
        ended = time.monotonic()
        handle.blocked_s = ended - started
        observe.emit(
            "state.staged",
            seconds=handle.blocked_s,
            rank=self._rank,
            path=handle.path,
            start_s=started,
            end_s=ended,
        )
        if not self._config.async_save:
            handle.result()
            handle.blocked_s = time.monotonic() - started
        return handle

    def _begin(self, handle: SaveHandle, state: Mapping[str, Any], meeting: Meeting, started: float) -> None:
        """Stage `state`, and have it written; or write it, if the budget does not hold it."""
        with observe.span("state.planned", rank=self._rank, path=handle.path):
            view = View(state)
            versions: list[int] = []
            planned = self._plan(state, view, versions)
        if planned.items and not planned.fits:
            self._write_through(handle, planned, view, meeting)
            return
        residence = late = None
        if planned.items:
            with observe.span("memory.awaited", rank=self._rank, path=handle.path):
                residence = planned.acquire(self._timeout_s)
            handle.prepared_s = time.monotonic() - started
        try:
            if residence is not None:
                with observe.span("items.staged", rank=self._rank, path=handle.path):
                    planned.stage(residence, view)
                handle._residence = residence  # noqa: SLF001 - one room
                planned.foresee_metadata(handle.path)
                if planned.late:
                    late = _Late(planned, view, versions, residence)
            self._thread.submit(self._write, handle, planned, residence, late, meeting)
        except BaseException:
            handle._residence = None  # noqa: SLF001 - one room
            if residence is not None:
                _await_arrival(residence)
                planned.give_back(residence)
            raise
        if late is not None:
            self._late = [*(one for one in self._late if not one.is_over), late]

    @contextlib.contextmanager
    def guard(self, *optimizers: Optimizer) -> Iterator[None]:
        """Surround `optimizer.step()`: parameters and states of `optimizers` change in here alone.

        While saves are under way, the current streams wait on the device for what is still being copied.
        Tensors that belong to an optimizer that was guarded before are copied after `save` returned.

        Args:
            *optimizers: The optimizers that step in here.
        """
        for optimizer in optimizers:
            if optimizer not in self._optimizers:
                self._optimizers.add(optimizer)
                # Fused steps do not count up the versions of what they change.
                optimizer.register_step_pre_hook(_refusing(weakref.ref(self)))
                self._forget_plan()
        self._let_change()
        self._guards += 1
        try:
            yield
        finally:
            self._guards -= 1

    def refuse_step(self) -> None:
        """An optimizer steps outside `guard`: fail the saves whose tensors may still be copied."""
        if not self._guards:
            for late in self._late:
                late.fail("an optimizer stepped")

    def _let_change(self) -> None:
        """Let tensors change that are copied late: check them, and order further work after the copies."""
        late, self._late = self._late, []
        for each in late:
            each.guard()

    def restore(self, state: dict[str, Any], step: int | str | None = "latest") -> int | None:
        """Load a checkpoint into `state`.

        Args:
            state: Nested containers; tensors are filled in place, objects are replaced.
            step: Number of the step, or "latest".

        Returns:
            The step that was loaded; None if "latest" was asked for and there is none.

        Raises:
            CheckpointError: There is no such step, or it cannot be read.
        """
        self._let_change()
        found, is_there, failure = self._find_for_all(step)
        if failure is not None:
            raise failure
        if found is None:
            return None
        path = self._path(found)
        if not is_there:
            raise CheckpointError(f"{path} holds no complete checkpoint")
        reader = StorageReader(path, self._config, storage_options=self._storage_options)
        try:
            self._load(state, reader)
        except CheckpointException as error:
            cause = _cause_of(error, path, self._rank)
            raise cause from error
        return found

    def _load(self, state: dict[str, Any], reader: StorageReader) -> None:
        group = self._group if self._config.ckpt_fully_parallel_load and not self._is_alone else None
        number = self._num_restores
        num_asked = 0

        def agree(text: str) -> bool:
            nonlocal num_asked
            num_asked += 1
            name = f"{self._name}.load.{number}.{num_asked}"
            heard = exchange(self._coordinator, name, text, timeout_s=self._timeout_s)
            return len(set(heard.values())) == 1

        load(state, reader, group=group, agree=agree)

    def _find_for_all(self, step: int | str | None) -> tuple[int | None, bool, CheckpointError | None]:
        """Return what the first rank finds: one rank may see a checkpoint that another does not see yet."""
        self._num_restores += 1
        name = f"{self._name}.restore.{self._num_restores}"
        found, is_there, failure = None, False, None
        if self._is_first:
            try:
                found, is_there = self._find(step)
            except CheckpointError as error:
                failure = error
            told = [str(step), found, is_there, failure and f"{type(failure).__name__}: {failure}"]
            if not self._is_alone:
                tell(self._coordinator, name, json.dumps(told))
        else:
            [word] = hear(self._coordinator, name, [0], timeout_s=self._timeout_s).values()
            asked, found, is_there, text = json.loads(word)
            if asked != str(step):
                text = f"restores step {asked}, and this one {step}"
            failure = CheckpointError(f"{text} (rank {self._coordinator.ranks[0]})") if text else None
        return found, is_there, failure

    def _find(self, step: int | str | None) -> tuple[int | None, bool]:
        if step is None or step == "latest":
            found = self.latest()
            return found, found is not None
        if isinstance(step, bool) or not str(step).isdecimal():
            raise ConfigError(f"step: expected a number from 0, or 'latest', got {step!r}")
        return int(step), self._is_complete(int(step))

    def _is_complete(self, step: int) -> bool:
        return self._open(self._path(step)).read(METADATA, nbytes=0) is not None

    def steps(self) -> list[int]:
        """Return the steps that are complete, ascending."""
        return [step for step in self._directories() if self._is_complete(step)]

    def _directories(self) -> list[int]:
        found = []
        for name in self._storage.list():
            text = name.removeprefix(_PREFIX).removesuffix("/")
            if text.isdecimal() and name == f"{_PREFIX}{int(text):0{_STEP_DIGITS}}/":
                found.append(int(text))
        return sorted(found)

    def latest(self) -> int | None:
        """Return the last step that is complete, or None."""
        return max(self.steps(), default=None)

    def wait(self) -> None:
        """Wait for all saves that are under way.

        Raises:
            CheckpointError: One failed; the first of them is raised.
        """
        errors = [handle._future.exception() for handle in self._handles]  # noqa: SLF001 - one room
        self._handles = []
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """Wait for saves that are under way, end workers and give memory back; idempotent.

        Raises:
            CheckpointError: A save failed whose result nobody has asked for; all is closed nevertheless.
        """
        if self._ended or os.getpid() != self._owner_pid:
            return
        self._closed = True
        self._thread.shutdown(wait=True)
        self._late.clear()
        self._forget_plan()
        self._engine.close()
        self._ended = True
        for handle in self._handles:
            error = None if handle._is_asked else handle._future.exception(0)  # noqa: SLF001 - one room
            if error is not None:
                raise error

    def _open(self, path: str | os.PathLike[str]) -> Storage:
        return open_storage(
            path,
            self._storage_options,
            timeout_s=self._timeout_s,
            direct_io=self._config.ckpt_direct_io,
            bucket_bytes=self._config.bucket_bytes(),
        )

    @property
    def _timeout_s(self) -> float:
        return self._config.distributed_timeout_minutes * 60

    def _check_open(self) -> None:
        if os.getpid() != self._owner_pid:
            raise CheckpointError("this Checkpointer belongs to another process: make one after the fork")
        if self._closed:
            raise CheckpointError("the Checkpointer is closed")

    def _path(self, step: int) -> str:
        return f"{self._root.rstrip('/')}/{_PREFIX}{step:0{_STEP_DIGITS}}"

    def _plan(self, state: Mapping[str, Any], view: View, versions: list[int] | None = None) -> PlannedState:
        """Return the plan of `state`: the last one if it is still true, or a new one.

        Args:
            state: The state.
            view: The same, walked.
            versions: Takes those of the tensors, if the last plan is true and they are of interest.
        """
        for retired in self._retired:
            retired.drop_idle()
        self._retired = [retired for retired in self._retired if retired.is_in_use]
        planned = self._planned
        if planned is not None:
            planned.drop_idle()
        if (
            planned is not None
            and planned.is_reusable
            and not planned.is_spent
            and planned.signature is not None
            and view.is_simple
            and planned.rules == self._rules()
            and planned.signature.matches(view, versions if planned.late else None)
            and planned.refresh(state)
        ):
            return planned
        self._forget_plan()
        if versions:
            versions.clear()
        addresses = {address for optimizer in self._optimizers for address in _addresses_of(optimizer)}
        self._planned = PlannedState(
            self._engine,
            self._storage,
            state,
            View(state, with_paths=True),
            addresses,
            self._config.ckpt_format,
            self._rules(),
        )
        return self._planned

    def _rules(self) -> Rules:
        return Rules(
            self._coordinator.ranks,
            self._rank,
            self._config.ckpt_fully_parallel_save,
            self._trusts_meshes,
            self._common,
            not self._engine.format.has_grid,
        )

    def _forget_plan(self) -> None:
        with self._plan_lock:
            planned, self._planned = self._planned, None
        if planned is not None:
            planned.retire()
            self._retired.append(planned)

    def _write(
        self,
        handle: SaveHandle,
        planned: PlannedState,
        residence: Residence | None,
        late: _Late | None,
        meeting: Meeting,
    ) -> None:
        """Write and publish what was staged; in the background."""
        storage: Storage | None = None
        claimed: Claim | None = None
        try:
            storage = self._open(handle.path)
            claimed = self._claim(storage, meeting)
            if residence is None:
                # Other ranks save all that this one has.
                written = Written(lay_out_image([], 1, 1), (), [])
            else:
                written = self._engine.write_staged(
                    storage,
                    claimed.save_id,
                    self._rank,
                    residence,
                    meeting.progress,
                    self._check_of(claimed, storage),
                )
            # Before the residence is let go: there is no instant at which it is not staged.
            handle._has_arrived = True  # noqa: SLF001 - one room
            if late is not None:
                late.check()
            # The next save has the memory, whatever the others do.
            handle._residence = None  # noqa: SLF001 - one room
            if residence is not None:
                given, residence = residence, None
                planned.give_back(given)
            self._publish(handle, planned, storage, written, claimed, meeting)
        except BaseException as failure:  # noqa: BLE001 - the top frame of a thread: the handle raises it
            error = failure
            if storage is not None and claimed is not None:
                error = claimed.explain(storage, failure)
            handle._residence = None  # noqa: SLF001 - one room
            if residence is not None:
                _await_arrival(residence)
                planned.give_back(residence)
            if late is not None:
                late.end()
            if claimed is not None:
                self._failed.add(claimed.save_id)
            self._tell_others(meeting, error)
            self._report(handle, error)
            return
        self._complete(handle, claimed.save_id)

    def _write_through(self, handle: SaveHandle, planned: PlannedState, view: View, meeting: Meeting) -> None:
        """Write and publish a state that the budget does not hold, on the caller's thread.

        Raises:
            CheckpointError: It failed.
        """
        if not self._warned_over_budget:
            self._warned_over_budget = True
            _LOG.warning(
                "the state does not fit the host memory budget of %.2f GiB (--ckpt-host-memory): "
                "save() takes as long as writing it",
                self._engine.arena.budget_bytes / _GIB,
            )
        # Saves before it are written first: they hold the memory.
        for earlier in self._handles:
            if earlier is not handle:
                earlier._future.exception()  # noqa: SLF001 - one room
        storage = self._open(handle.path)
        claimed = self._claim(storage, meeting)
        try:
            check = self._check_of(claimed, storage)
            written = planned.write_through(storage, claimed.save_id, view, meeting.progress, check)
            self._publish(handle, planned, storage, written, claimed, meeting)
        except CheckpointError as failure:
            self._failed.add(claimed.save_id)
            error = claimed.explain(storage, failure)
            if error is failure:
                raise
            raise error from failure
        self._complete(handle, claimed.save_id)

    def _claim(self, storage: Storage, meeting: Meeting) -> Claim:
        """Claim the directory, or wait until the first rank has: before that, no rank writes there."""
        with observe.span("directory.claimed", rank=self._rank, path=storage.url):
            if not self._is_first:
                # Nobody asks for it; it tells how far this rank has got.
                meeting.say("writing")
                return Claim(meeting.await_claim(), None, ())
            storage.prepare()
            claimed = claim(storage, uuid.uuid4().hex, exclusive=exclusive_of(self._engine.format))
        if not self._is_alone:
            meeting.say("writing", save_id=claimed.save_id)
        return claimed

    def _check_of(self, claimed: Claim, storage: Storage) -> Callable[[], None] | None:
        """Return what keeps files that readers find by their names from a save that was overtaken."""
        if self._engine.format.found_by is None:
            return None
        return lambda: claimed.check(storage)

    def _publish(
        self,
        handle: SaveHandle,
        planned: PlannedState,
        storage: Storage,
        written: Written,
        claimed: Claim,
        meeting: Meeting,
    ) -> None:
        save_id = claimed.save_id
        with observe.span("manifest.written", save_id=save_id, rank=self._rank):
            ref = write_manifest(storage, planned.manifest(save_id, written))
        if not self._is_first:
            meeting.say("written")
            try:
                with observe.span("ranks.awaited", save_id=save_id, rank=self._rank):
                    outcome = meeting.await_outcome()
                self._learn(planned, outcome.facts)
            except MissingRanks:
                # The first rank may have ended, and its store with it, as soon as it had published.
                if committed_by(storage) != save_id:
                    raise
            return
        manifests: list[PartialManifest] = []
        if not self._is_alone:
            with observe.span("ranks.awaited", save_id=save_id, rank=self._rank):
                meeting.await_written()
            meeting.say("waiting", text="it publishes")
        with observe.span("metadata.made", save_id=save_id, rank=self._rank):
            if planned.needs_manifests:
                ranks = self._coordinator.ranks
                manifests = read_partials(storage, save_id, ranks, lambda: claimed.check(storage))
            data = planned.metadata(manifests, written.names, handle.path, save_id, self._found)
        refs = [manifest.ref for manifest in manifests] or [ref]
        with observe.span("checkpoint.published", save_id=save_id, rank=self._rank):
            documents = planned.documents(manifests, written.names)
            refs += write_documents(
                self._engine, storage, save_id, self._rank, documents, lambda: claimed.check(storage)
            )
            publish(storage, data, claimed, refs, self._details(manifests))
        if not self._is_alone:
            facts = self._common_facts(manifests)
            try:
                meeting.say("committed", facts=facts)
            except CheckpointError as error:
                # It is, and the others will see that.
                _LOG.warning("the other ranks could not be told that %s is committed: %s", handle.path, error)
            self._learn(planned, facts)
            for over in self._over:
                # All have heard how it ended: they have written since.
                over.forget()
            self._over = [meeting]
        self._reclaim(handle.step, save_id)

    def _reclaim(self, committed: int, save_id: str) -> None:
        """Remove what is left of earlier steps that were never completed, be it by a process before this."""
        unfinished = [handle for handle in self._handles if not handle._future.done()]  # noqa: SLF001
        under_way = {handle.step for handle in unfinished}
        self._settled.add(committed)
        idle_s = _IDLE_TIMEOUTS * self._timeout_s
        try:
            steps = self._directories()
        except CheckpointError as error:
            # What was committed is, whatever becomes of this.
            _LOG.warning("what is left of earlier steps stays: %s", error)
            return
        for step in steps:
            if step >= committed or step in under_way or step in self._settled:
                continue
            try:
                if self._is_complete(step):
                    self._settled.add(step)
                else:
                    storage = self._open(self._path(step))
                    reclaim(storage, save_id, failed=self._failed, idle_s=idle_s)
            except CheckpointError as error:
                _LOG.warning("what is left of step %d stays: %s", step, error)

    def _common_facts(self, manifests: Sequence[PartialManifest]) -> dict[str, Any]:
        """Return what the ranks have in common, if there are any that do not know."""
        digests = tuple(str(manifest.head["shares"]["plain"]) for manifest in manifests)
        relies = [manifest.head["shares"]["relies"] for manifest in manifests]
        if not any(relies) and (self._found is None or self._found.digests != digests):
            # Each has written all of its own.
            self._found = find_common(manifests)
            return common_to_json(self._found)
        assert self._found is not None, "what ranks rely upon they were told"
        if all(relies[place] for text, _ in self._found.classes for place in members_in(text)):
            return {}
        return common_to_json(self._found)

    def _learn(self, planned: PlannedState, facts: Mapping[str, Any]) -> None:
        """See what the ranks have in common that no mesh tells of, and share it from now on."""
        if not facts:
            return
        if self._wait_saves:
            self._wait_saves -= 1
            return
        common = common_from_json(facts)
        place = self._coordinator.rank
        is_shared = any(place in members_in(text) for text, _ in common.classes)
        with self._plan_lock:
            # A save of a state that has changed since is already planned without it.
            if planned is self._planned:
                self._common = common if is_shared else None

    def _tell_others(self, meeting: Meeting, error: BaseException) -> None:
        """Leave word that this rank gave up the save: the others need not wait for it."""
        if self._is_alone:
            return
        # What the others save may be what has changed.
        self._common = None
        if isinstance(error, StateChanged) or meeting.outcome.facts.get("changed"):
            self._num_changes += 1
            self._wait_saves = 2 ** min(self._num_changes, _MOST_DOUBLINGS) - 2
        if self._is_first:
            self._over.append(meeting)
        differ = isinstance(error, ReplicasDiffer) or bool(meeting.outcome.facts.get("differ"))
        self._trusts_meshes &= not differ
        missing = list(error.ranks or ()) if isinstance(error, MissingRanks) else []
        with contextlib.suppress(CheckpointError):
            meeting.say(
                "failed",
                text=f"{type(error).__name__}: {error}",
                facts={
                    "differ": differ,
                    "missing": missing,
                    "changed": isinstance(error, StateChanged),
                },
            )

    def _details(self, manifests: Sequence[PartialManifest]) -> dict[str, Any]:
        nbytes = [sum(manifest.ref.files.values()) for manifest in manifests]
        if nbytes and max(nbytes) > _SKEW * sum(nbytes) / len(nbytes) + _SKEW_BYTES:
            _LOG.warning(
                "rank %d writes %.2f GiB, %.1f times the mean: the save takes as long as it does",
                self._coordinator.ranks[nbytes.index(max(nbytes))],
                max(nbytes) / _GIB,
                max(nbytes) * len(nbytes) / sum(nbytes),
            )
        world = len(self._coordinator.ranks)
        return {"world": world, "format": self._config.ckpt_format, "time": time.time()}

    def _complete(self, handle: SaveHandle, save_id: str) -> None:
        observe.emit("committed", save_id=save_id, path=handle.path)
        _LOG.info("committed %s", handle.path)
        handle._future.set_result(handle.path)  # noqa: SLF001 - one room

    def _report(self, handle: SaveHandle, error: BaseException) -> None:
        """Log a failure at once: nobody may ever ask for the result."""
        # As text: a handler that keeps records would keep the traceback, and so the state.
        if isinstance(error, CheckpointError) and error.rank is None:
            error.rank = self._rank
        _LOG.error("the save of step %d failed: %s", handle.step, f"{type(error).__name__}: {error}")
        note_failure()
        clear_frames(error)
        if not isinstance(error, CheckpointError):
            told = CheckpointError(f"{type(error).__name__}: {error}")
            told.__cause__ = error
            error = told
        handle._future.set_exception(error)  # noqa: SLF001 - one room


def _cause_of(error: CheckpointException, path: str, rank: int) -> CheckpointError:
    """Return our own error among those that torch has gathered, or one that says what it gathered."""
    [failure, *_] = (failure for failure, _ in error.failures.values())
    if isinstance(failure, CheckpointError):
        return failure
    return CheckpointError(f"{path} cannot be loaded into the state: {failure} (rank {rank})", rank=rank)


def _count(coordinator: Coordinator) -> int:
    """Return how many have used `coordinator` before: what each says has names of its own.

    Raises:
        ConfigError: That cannot be remembered.
    """
    number = getattr(coordinator, "_num_users", 0)
    try:
        coordinator._num_users = number + 1  # type: ignore[attr-defined]  # noqa: SLF001
    except AttributeError:
        raise ConfigError(
            f"participants: a {type(coordinator).__name__} takes no attribute, by which a second "
            f"Checkpointer that uses it is told apart"
        ) from None
    return int(number)


def _await_arrival(residence: Residence) -> None:
    """Wait, not for long, until nothing is copied to `residence` any more, and its tensors are let go."""
    deadline, pause = time.monotonic() + _ARRIVAL_S, threading.Event()
    while not residence.has_arrived() and time.monotonic() < deadline:
        pause.wait(_POLL_S)


def _refusing(reference: weakref.ref[Checkpointer]) -> Callable[..., None]:
    """Return a hook for steps of an optimizer that a guard has seen."""

    def before_step(*_: Any) -> None:
        checkpointer = reference()
        if checkpointer is not None:
            checkpointer.refuse_step()

    return before_step


def _addresses_of(optimizer: Optimizer) -> Iterator[int]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield from _address(parameter)
    for entry in optimizer.state.values():
        for value in entry.values():
            if isinstance(value, torch.Tensor):
                yield from _address(value)


def _address(tensor: torch.Tensor) -> Iterator[int]:
    local = getattr(tensor, "_local_tensor", tensor)
    address = local.data_ptr()
    if address:
        yield address
