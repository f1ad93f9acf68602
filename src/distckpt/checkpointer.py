"""Checkpointer: the training loop's own way to save and restore.

    state -> signature -> planned once -> staged -> written and published in the background

What a save needs is planned when a state is seen for the first time, and used again while its signature
holds; a save then costs the trainer the comparison and one replay of the copies.

Several ranks agree through words that each leaves and looks for (`meeting`); what they restore is settled in
`restoring`.

Invariants:
    * Saving involves no collective, and no rank that is no participant; `save` waits for no other rank,
      unless `ckpt_when_busy` has it ask the first whether it is skipped.
    * The background thread does nothing for each item, unless saves are incremental, and makes no CUDA call.
    * A tensor that changed before the guard let it fails its save, and nothing of that is published, as far
      as torch counts changes, or a digest sees them (docs/adr/0014).

Threads: one thread at a time saves and restores; any guards, such as those of a backward pass in which
optimizers step; one thread of the checkpointer's own writes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import os
import signal
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from distckpt import observe
from distckpt.archive import Archive
from distckpt.assembly import ReplicasDiffer, StateChanged
from distckpt.commit import Claim, claim, committed_by, exclusive_of, publish
from distckpt.config import CheckpointConfig, warn_async_workers
from distckpt.device import is_capturing
from distckpt.engine import Engine, Written
from distckpt.errors import (
    CheckpointError,
    ConfigError,
    MissingRanks,
    StagingError,
    clear_frames,
)
from distckpt.exitstatus import note_failure, watch_exit
from distckpt.handle import Late, SaveHandle
from distckpt.image import lay_out_image
from distckpt.incremental import Increment, Increments, is_possible
from distckpt.manifest import read_partials, write_manifest
from distckpt.meeting import Meeting, hear, tell
from distckpt.metadata import write_documents
from distckpt.ownership import Common, Rules, common_from_json, common_to_json, find_common, members_in
from distckpt.participants import meet
from distckpt.planned import PlannedState
from distckpt.preemption import Preemption
from distckpt.residence import Residence
from distckpt.restoring import Restorer
from distckpt.rng import RngState
from distckpt.signature import View, local_tensors
from distckpt.stateful import Gathered, PerRank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from torch.optim import Optimizer
    from typing_extensions import Self

    from distckpt.coordination import Coordinator
    from distckpt.manifest import PartialManifest
    from distckpt.participants import Participants
    from distckpt.reader import StorageReader
    from distckpt.storage import Storage

__all__ = ["Checkpointer", "SaveHandle"]

_LOG = logging.getLogger(__name__)
_GIB = 1 << 30
_POLL_S = 0.002
_ARRIVAL_S = 5.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 30.0
"""Before the second attempt at a save, and before any."""
_RNG = "rng_state"
"""The entry of a state that holds the random number generators."""
_MOST_DOUBLINGS = 10
_SKEW, _SKEW_BYTES = 1.2, 64 << 20
"""A rank that writes more than the mean, by so many times and bytes, is worth a word."""


class Checkpointer:
    """Saves and restores the state of a training loop in numbered steps under one directory.

    Args:
        root: Directory of all steps, or a URL (docs/storages.md).
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
        self._num_handles = 0
        self._common: Common | None = None
        """What the participants have in common, once it is known, as far as this rank has a part in it."""
        self._found: Common | None = None
        """The same, for all of them; on the first rank."""
        self._trusts_meshes = True
        self._meeting: Meeting | None = None
        """That of the last save that has begun."""
        self._meet_lock = threading.Lock()
        self._over: list[Meeting] = []
        """Those that have ended and not been forgotten; on the first rank."""
        self._num_changes = self._wait_saves = 0
        """How often it has turned out too late that ranks no longer had the same, and how many saves until
        they are asked again: some never have."""
        self._storage_options = dict(storage_options or {})
        self._archive = Archive(root, self._storage_options, self._config, self._steps_under_way)
        self._storage = self._archive.root
        self._restorer = Restorer(
            self._archive, self._config, self._coordinator, self._group, self._name, self._gather
        )
        self._increments: Increments | None = None
        if self._config.ckpt_incremental:
            if not is_possible(self._storage):
                raise ConfigError(
                    f"ckpt_incremental: files cannot be shared by checkpoints on the storage of "
                    f"{self._storage.url!r}; local file systems and s3:// (with botocore or s3fs) can"
                )
            self._increments = Increments(self._archive.open)
        self._wrappers: dict[int, PerRank] = {}
        self._rng = PerRank(RngState()) if self._config.load_rng else None
        self._turns: list[tuple[SaveHandle, str]] = []
        """Words about turns that are not forgotten yet; on the first rank."""
        self._num_failures = self._num_watches = 0
        """The last saves that failed, in a row; watches for signals."""
        self._unheard: SaveHandle | None = None
        """A failure that is more than a line in the log, and that nobody may have asked for."""
        self._preemption: Preemption | None = None
        logging.getLogger("distckpt").setLevel(self._config.log_level.upper())
        self._engine = Engine.open(self._config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="distckpt-write")
        self._planned: PlannedState | None = None
        self._plan_lock = threading.Lock()
        self._retired: list[PlannedState] = []
        """Plans whose last saves may still be under way."""
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._captured: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those that have stepped in a CUDA graph: versions do not tell when it is replayed."""
        self._planned_for = 0, 0
        """How many of both there were when the state was planned: one that is gone guards nothing."""
        self._owner_pid = os.getpid()
        self._late: list[Late] = []
        """Those whose copies may not have ended."""
        self._late_lock = threading.Lock()
        self._failed: set[str] = set()
        """Ids of this rank's saves that have failed."""
        self._handles: list[SaveHandle] = []
        self._closed = self._ended = False
        self._warned_over_budget = self._warned_of_metric = self._warned_of_object = False
        if self._is_first:
            # What a process before this one has committed, and could not upload any more.
            self._archive.resume()

    def __enter__(self) -> Self:
        """Return the checkpointer; it is closed on leaving."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Close the checkpointer; see `close`.

        Raises:
            CheckpointError: As `close`, unless something else is raised already, but for `sys.exit(0)`.
        """
        has_failed = error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))
        if has_failed:
            self._archive.stop()
        try:
            self.close()
        except CheckpointError:
            if not has_failed:
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
        _check_mapping(state)
        with torch.inference_mode(mode=False), torch.no_grad():
            values = self._gather(state).values
            planned = self._plan(values, View(values))
            planned.release_tensors()
            planned.foresee_metadata(self._path(0))
            tensors = local_tensors(values)
            devices = {tensor.device for tensor in tensors if tensor.is_cuda}
            return self._engine.prewarm([tensor.nbytes for tensor in tensors], devices)

    def save(self, step: int, state: Mapping[str, Any], *, metric: float | None = None) -> SaveHandle:
        """Save `state` as step `step`.

        With `async_save` this returns when the state may change again: CUDA tensors by work on the caller's
        current streams, those of guarded optimizers before these step. The rest happens in the background. A
        state that the budget for host memory does not hold is written before this returns.

        Args:
            step: Number of the step, from 0; a step that was saved before is replaced.
            state: Nested containers of tensors, Python objects and what has a state of its own: modules,
                optimizers, schedulers, whatever has `state_dict` and `load_state_dict`. What each rank has
                for itself is wrapped in `PerRank`.
            metric: By which `keep_best` chooses; that of the first rank counts.

        Returns:
            A handle of the save.

        Raises:
            CheckpointError: The checkpointer is closed, the state cannot be staged, or, without `async_save`,
                the save failed; with it, a save before failed, and nobody has asked its handle: this one is
                not begun then. With `ckpt_on_failure="warn"` only after `ckpt_max_failures` in a row. Or as
                many saves as may be are under way, and `ckpt_when_busy` is "fail".
            ConfigError: `step` is negative, or `metric` no number, or an entry could not be restored.
        """
        started = time.monotonic()
        self._check_open()
        step = _step_number(step)
        # Before anything that one rank may find wrong, and another not.
        self._num_saves[step] += 1
        _check_mapping(state)
        if metric is not None:
            try:
                metric = float(metric)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"metric: expected a number, got {metric!r}") from error
        if self._config.async_save:
            warn_async_workers(self._config.dist_ckpt_workers, stacklevel=2)
            watch_exit()
        if self._config.keep_best and metric is None and not self._warned_of_metric:
            self._warned_of_metric = True
            _LOG.warning("keep_best: step %d is saved without a metric, and is none of the best", step)
        self._num_handles += 1
        handle = SaveHandle(step, self._path(step), metric, number=self._num_handles)
        name = f"{self._name}.{step}.{self._num_saves[step]}"
        if not self._await_turn(handle, name):
            return handle
        meetings = [self._meet(handle, name)]
        try:
            self._handles = [*(one for one in self._handles if not self._is_forgotten(one)), handle]
            self._archive.expect(step)
            self._raise_unheard()
            # Not inference tensors, whoever calls: what is kept for the next save could not be used by it.
            with torch.inference_mode(mode=False), torch.no_grad():
                self._begin(handle, self._gather(state).values, meetings, started)
        except BaseException as error:
            self._handles = [one for one in self._handles if one is not handle]
            self._tell_others(meetings[-1], error)
            if self._report(handle, error):
                handle.blocked_s = time.monotonic() - started
                return handle
            handle._told.append(True)  # noqa: SLF001 - one room
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
            failure = handle._future.exception()  # noqa: SLF001 - one room
            handle.blocked_s = time.monotonic() - started
            if failure is not None and not self._bears(failure):
                handle.result()
        return handle

    def _gather(self, state: Mapping[str, Any], reader: StorageReader | None = None) -> Gathered:
        """Return `state` as plain containers, to save it or to load it with `reader`.

        Raises:
            ConfigError: It has an entry of the name that the generators have.
        """
        if self._rng is not None and state.get(_RNG) is not self._rng:
            self._check_names(state)
            state = {**state, _RNG: self._rng}
        return Gathered(state, self._rank, self._wrappers, None if reader is None else reader.read_metadata)

    def _check_names(self, state: Mapping[str, Any]) -> None:
        """Refuse an entry of the name that the generators have.

        Raises:
            ConfigError: There is one.
        """
        if _RNG in state:
            raise ConfigError(f"the state has an entry {_RNG!r}, which is where load_rng keeps its own")

    def _is_forgotten(self, handle: SaveHandle) -> bool:
        """Say whether nothing of a save is of interest any more."""
        if self._config.ckpt_on_failure == "warn":
            return handle._future.done()  # noqa: SLF001 - one room
        return bool(handle.committed)

    def _raise_unheard(self) -> None:
        """Raise what failed in the background, if nobody has asked for it.

        Raises:
            CheckpointError: It.
        """
        unheard, self._unheard = self._unheard, None
        if unheard is not None and not unheard._is_asked:  # noqa: SLF001 - one room
            unheard.result()

    def _steps_under_way(self) -> set[int]:
        return {handle.step for handle in self._handles if not handle._future.done()}  # noqa: SLF001

    def _await_turn(self, handle: SaveHandle, name: str) -> bool:
        """Wait until no more saves are under way than may be; False if this one is not to be.

        All ranks go by what the first finds: a save that some leave out would never be complete.

        Raises:
            CheckpointError: There are, and that is a failure; or the first rank cannot be heard of.
        """
        most = self._config.ckpt_max_in_flight
        under_way = [each._future for each in self._handles if not each._future.done()]  # noqa: SLF001
        is_busy = len(under_way) >= most
        if self._config.ckpt_when_busy != "wait":
            if not self._is_alone:
                name = f"{name}.turn"
                if self._is_first:
                    tell(self._coordinator, name, f"{is_busy:d}")
                    with self._meet_lock:
                        self._turns.append((handle, f"{name}.0"))
                else:
                    heard = hear(
                        self._coordinator,
                        name,
                        [0],
                        timeout_s=self._timeout_s,
                        doing=f"save step {handle.step}",
                    )
                    is_busy = heard[0] == "1"
            if is_busy:
                text = (
                    f"step {handle.step} is not saved: {most} saves are under way (--ckpt-max-in-flight), "
                    f"for storage is slower than the training"
                )
                if self._config.ckpt_when_busy == "fail":
                    raise CheckpointError(text, rank=self._rank)
                _LOG.warning("%s", text)
                handle.is_skipped = True
                handle._future.set_exception(CheckpointError(text, rank=self._rank))  # noqa: SLF001
                return False
        while len(under_way) >= most:
            under_way.pop(0).exception()
        return True

    def _meet(self, handle: SaveHandle, name: str, attempt: int = 1) -> Meeting:
        """Return where the ranks hear of each other in one attempt at a save.

        Args:
            handle: The save.
            name: Its step, and how often that was saved: the same on all ranks that save it, whatever else
                one of them has left out, and whoever begins to save it again while it is tried again.
            attempt: Number of the attempt.
        """
        with self._meet_lock:
            meeting = self._meeting = Meeting(
                self._coordinator,
                name,
                attempt,
                timeout_s=self._timeout_s,
                where=handle.path,
                before=self._meeting,
                number=handle.number,
            )
        return meeting

    def _begin(
        self, handle: SaveHandle, state: Mapping[str, Any], meetings: list[Meeting], started: float
    ) -> None:
        """Stage `state`, and have it written; or write it, if the budget does not hold it.

        `meetings` has that of the first attempt, and is given those of others.
        """
        with observe.span("state.planned", rank=self._rank, path=handle.path):
            view = View(state)
            versions: list[int] = []
            planned = self._plan(state, view, versions)
        if planned.items and not planned.fits:
            self._write_through(handle, planned, view, meetings)
            return
        residence = late = None
        turn = [handle]
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
                    late = Late(planned, view, versions, residence)
            self._thread.submit(self._write, turn, handle, planned, residence, late, meetings[-1])
        except BaseException:
            # An executor that cannot start its thread has queued the call all the same, for the next one.
            is_ours = _take(turn)
            if is_ours:
                handle._residence = None  # noqa: SLF001 - one room
            if residence is not None and is_ours:
                _await_arrival(residence)
                planned.give_back(residence)
            raise
        if late is not None:
            with self._late_lock:
                self._late = [*(one for one in self._late if not one.is_over), late]

    def guard(self, *optimizers: Optimizer) -> AbstractContextManager[None]:
        """Have parameters and states of `optimizers` copied after `save` has returned, from now on.

        Before one of these optimizers steps, the current streams wait on the device for what is still being
        copied. Whatever else changes their parameters and states, does so in a `with` block of this, before
        which they wait as well; the replay of a CUDA graph in which one steps, too. Of DTensors, and of
        optimizers that step in CUDA graphs, what is smaller than 1 MiB on this rank is not copied late.

        Args:
            *optimizers: Optimizers of torch whose `step` is called, and not what holds or wraps them; before
                a CUDA graph captures one, and again when one is made anew.

        Raises:
            ConfigError: One does not tell before it steps.
        """
        for optimizer in optimizers:
            # Not of one that it wraps, to which it hands on what it is asked for.
            if "_optimizer_step_pre_hooks" not in getattr(optimizer, "__dict__", {}):
                raise ConfigError(
                    f"guard: a {type(optimizer).__name__} does not tell before it steps, as optimizers of "
                    f"torch.optim do: give guard the optimizer that it wraps"
                )
            if optimizer not in self._optimizers:
                self._optimizers.add(optimizer)
                optimizer.register_step_pre_hook(_before_step(weakref.WeakMethod(self._await_copies)))
                self._forget_plan()
        return self._change()

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        self._let_change()
        yield

    def _await_copies(self, optimizer: Optimizer) -> None:
        """Before a step: see `_let_change`."""
        if is_capturing():
            self._captured.add(optimizer)
        self._let_change()

    def _let_change(self) -> None:
        """Let tensors change that are copied late: check them, and order further work after the copies."""
        if is_capturing():
            # Nothing changes now, but whenever the graph is replayed, of which nobody tells.
            return
        # Whoever comes while another one is compared may not go on before that either.
        with self._late_lock:
            for late in self._late:
                late.guard()
            self._late = [late for late in self._late if not late.is_over]

    def restore(self, state: dict[str, Any], step: int | str | None = "latest") -> int | None:
        """Load a checkpoint into `state`.

        If the latest is damaged, the one before it is loaded, and so on; the log says so. Of a step that is
        complete in two tiers, the other one is loaded then.

        Args:
            state: Nested containers, as for `save`; tensors are filled in place, objects are replaced, and
                what has a state of its own is given it. An optimizer has then a state of each parameter of
                which the checkpoint has one.
            step: Number of the step, or "latest".

        Returns:
            The step that was loaded; None if "latest" was asked for and there is none.

        Raises:
            IntegrityError: The checkpoint is damaged, and so are all before it if "latest" was asked for.
            CheckpointError: There is no such step, or it cannot be read, or does not fit the state.
            ConfigError: `state` is no mapping, `step` no step, or an entry has no memory to load into.
        """
        _check_mapping(state)
        self._let_change()
        if self._increments is not None:
            # What it finds damaged, the next save would share.
            self._increments.doubt()
        if self._rng is None:
            return self._restorer.restore(state, step)
        self._check_names(state)
        # Last: what is restored before it may draw.
        state[_RNG] = self._rng
        try:
            return self._restorer.restore(state, step)
        finally:
            del state[_RNG]

    def steps(self) -> list[int]:
        """Return the steps that are complete, here or uploaded, ascending."""
        return self._archive.steps()

    def latest(self) -> int | None:
        """Return the last step that is complete, or None."""
        return max(self.steps(), default=None)

    def watch_preemption(self, *signals: signal.Signals) -> None:
        """Watch for signals that say that the job will end soon; see `preempted`.

        A handler that is there is called as before. A second signal is handled as if this one did not exist.

        Args:
            *signals: Default: SIGTERM, which torchrun, Kubernetes and Slurm send.

        Raises:
            ConfigError: This is not the main thread, or a signal cannot be handled.
        """
        self._check_open()
        if self._preemption is not None:
            self._preemption.close()
        self._num_watches += 1
        name = f"{self._name}.preemption.{self._num_watches}"
        self._preemption = Preemption(self._coordinator, name, signals or (signal.SIGTERM,))

    def preempted(self, step: int) -> bool:
        """Say whether to save `step`, and to end then; to be asked by all ranks after every step.

        It waits for nobody. When one rank has got the signal, all of them are told the same step, a few steps
        later. A save for which there is no time any more leaves the checkpoint before it as it is.

        Args:
            step: The step that is complete.

        Raises:
            ConfigError: `watch_preemption` was not called.
        """
        if self._preemption is None:
            raise ConfigError("preempted: call watch_preemption first")
        return self._preemption.is_due(step)

    def wait(self) -> None:
        """Wait for all saves that are under way.

        Raises:
            CheckpointError: One failed; the first of them is raised.
        """
        self._refuse_fork()
        errors = [handle._future.exception() for handle in self._handles]  # noqa: SLF001 - one room
        for handle in self._handles:
            handle._told.append(True)  # noqa: SLF001 - one room
        self._handles, self._unheard = [], None
        for error in errors:
            if error is not None and not self._bears(error):
                raise error

    def close(self) -> None:
        """Wait for saves and uploads that are under way, end workers and give memory back; idempotent.

        Raises:
            CheckpointError: A save failed whose result nobody has asked for, or the newest checkpoint could
                not be uploaded; all is closed nevertheless.
        """
        if self._ended or os.getpid() != self._owner_pid:
            return
        self._closed = True
        self._thread.shutdown(wait=True)
        self._late.clear()
        self._forget_plan()
        self._engine.close()
        upload_error = None
        try:
            self._archive.close()
        except CheckpointError as error:
            upload_error = error
        finally:
            if self._preemption is not None:
                # Not before: the first signal may come during the last save, of which another rank has told.
                self._preemption.close()
        # What was interrupted before this is ended by the next call.
        self._ended = True
        unheard = [handle for handle in self._handles if not handle._is_asked and handle._future.done()]  # noqa: SLF001
        for handle in unheard:
            handle._told.append(True)  # noqa: SLF001 - one room
        for handle in unheard:
            failure = handle._future.exception()  # noqa: SLF001 - one room
            if failure is not None and not self._bears(failure):
                raise failure
        if upload_error is not None:
            raise upload_error

    def _bears(self, error: BaseException) -> bool:
        """Say whether a failed save is no more than a line in the log."""
        return (
            isinstance(error, CheckpointError)
            and not isinstance(error, ConfigError)
            and self._config.ckpt_on_failure == "warn"
            and self._num_failures < self._config.ckpt_max_failures
        )

    @property
    def _timeout_s(self) -> float:
        return self._config.distributed_timeout_minutes * 60

    def _refuse_fork(self) -> None:
        if os.getpid() != self._owner_pid:
            raise CheckpointError("this Checkpointer belongs to another process: make one after the fork")

    def _check_open(self) -> None:
        self._refuse_fork()
        if self._closed:
            raise CheckpointError("the Checkpointer is closed")

    def _path(self, step: int) -> str:
        return self._archive.path(step)

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
            and self._planned_for == (len(self._optimizers), len(self._captured))
            and planned.signature is not None
            and view.is_simple
            and planned.rules == self._rules()
            and planned.signature.matches(view, versions if planned.late else None)
            and planned.refresh(state)
        ):
            return planned
        self._forget_plan()
        self._planned_for = len(self._optimizers), len(self._captured)
        if versions:
            versions.clear()
        addresses: dict[int, bool] = {}
        for optimizer in self._optimizers:
            for address, is_uncounted in _addresses_of(optimizer, is_captured=optimizer in self._captured):
                addresses[address] = is_uncounted or addresses.get(address, False)
        self._planned = PlannedState(
            self._engine,
            self._storage,
            state,
            View(state, with_paths=True),
            addresses,
            self._config.ckpt_format,
            self._rules(),
            is_incremental=self._increments is not None,
        )
        self._warn_of_refused(self._planned)
        return self._planned

    def _warn_of_refused(self, planned: PlannedState) -> None:
        """Say once if there is an object that `restore` will refuse: then it would be too late."""
        if self._warned_of_object or not self._config.ckpt_weights_only:
            return
        refused = planned.find_refused()
        if refused is not None:
            self._warned_of_object = True
            _LOG.warning(
                "%r %s, and restore will refuse it: save plain values instead, or admit it there with "
                "torch.serialization.add_safe_globals, or everything with ckpt_weights_only=False",
                *refused,
            )

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
        turn: list[SaveHandle],
        handle: SaveHandle,
        planned: PlannedState,
        residence: Residence | None,
        late: Late | None,
        meeting: Meeting,
    ) -> None:
        """Write and publish what was staged, as often as may be; in the background."""
        if not _take(turn):
            return
        attempt = 1
        while True:
            attempted = _Attempt(handle, planned, residence, meeting, keeps=self._may_retry)
            error = self._attempt(attempted, late)
            residence = attempted.residence
            if error is None:
                return
            if residence is not None:
                _await_arrival(residence)
            is_lost = residence is not None and (residence.is_lost or not residence.has_arrived())
            self._tell_others(meeting, error, is_final=is_lost)
            if is_lost or not self._is_tried_again(error, meeting, attempt):
                break
            self._pause(handle, error, attempt)
            if residence is not None:
                residence.renew()
            attempt += 1
            meeting = self._meet(handle, meeting.name, attempt)
        handle._residence = None  # noqa: SLF001 - one room
        if residence is not None:
            _await_arrival(residence)
        if late is not None:
            # Before another save has its memory.
            late.end()
        if residence is not None:
            planned.give_back(residence)
        if not self._report(handle, error):
            # The next save raises it, in a loop that waits for none.
            self._unheard = handle

    @property
    def _may_retry(self) -> bool:
        return self._config.ckpt_on_failure == "retry" and self._config.ckpt_max_failures > 1

    def _is_tried_again(self, error: BaseException, meeting: Meeting, attempt: int) -> bool:
        """Say whether a save that failed is; all ranks come to the same answer."""
        return (
            self._may_retry
            and attempt < self._config.ckpt_max_failures
            and not _is_final(error)
            and not meeting.is_final
        )

    def _pause(self, handle: SaveHandle, error: BaseException, attempt: int) -> None:
        most = self._config.ckpt_max_failures
        _LOG.warning(
            "attempt %d of %d at step %d failed, and it is tried again: %s: %s",
            attempt,
            most,
            handle.step,
            type(error).__name__,
            error,
        )
        if self._is_first:
            # The others wait for its claim.
            threading.Event().wait(
                min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _LAST_PAUSE_S, self._timeout_s / 4)
            )

    def _attempt(self, attempt: _Attempt, late: Late | None) -> BaseException | None:
        """Write and publish once; returns what it failed for."""
        handle, planned, meeting = attempt.handle, attempt.planned, attempt.meeting
        storage: Storage | None = None
        claimed: Claim | None = None
        try:
            storage = self._open(handle)
            claimed = self._claim(storage, meeting)
            written: Written | Increment
            if attempt.residence is None:
                # Other ranks save all that this one has.
                written = Written(lay_out_image([], 1, 1), (), [])
            elif self._increments is not None:
                plan = planned.increment_plan()
                written = self._increments.write(
                    self._engine,
                    storage,
                    claimed.save_id,
                    self._rank,
                    attempt.residence,
                    plan,
                    meeting.progress,
                )
            else:
                written = self._engine.write_staged(
                    storage,
                    claimed.save_id,
                    self._rank,
                    attempt.residence,
                    meeting.progress,
                    self._check_of(claimed, storage),
                )
            # Before the residence is let go: there is no instant at which it is not staged.
            handle._has_arrived = True  # noqa: SLF001 - one room
            if late is not None:
                late.check()
            if not attempt.keeps:
                # The next save has the memory, whatever the others do.
                self._let_go(attempt)
            self._publish(handle, planned, storage, written, claimed, meeting)
        except BaseException as failure:  # noqa: BLE001 - the top frame of a thread: the handle raises it
            if claimed is not None:
                self._failed.add(claimed.save_id)
            if storage is None or claimed is None:
                return failure
            return claimed.explain(storage, failure)
        self._let_go(attempt)
        if self._increments is not None:
            increment = written if isinstance(written, Increment) else None
            self._increments.commit(handle.step, increment)
            if increment is not None:
                handle.written_bytes = increment.written_bytes
        self._complete(handle, claimed.save_id)
        return None

    def _let_go(self, attempt: _Attempt) -> None:
        attempt.handle._residence = None  # noqa: SLF001 - one room
        residence, attempt.residence = attempt.residence, None
        if residence is not None:
            attempt.planned.give_back(residence)

    def _open(self, handle: SaveHandle) -> Storage:
        return self._archive.open(handle.step)

    def _write_through(
        self, handle: SaveHandle, planned: PlannedState, view: View, meetings: list[Meeting]
    ) -> None:
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
        attempt = 1
        while True:
            try:
                self._complete(handle, self._write_once(handle, planned, view, meetings[-1]))
            except CheckpointError as error:
                if not self._is_tried_again(error, meetings[-1], attempt):
                    raise
                self._tell_others(meetings[-1], error)
                self._pause(handle, error, attempt)
                attempt += 1
                meetings.append(self._meet(handle, meetings[-1].name, attempt))
            else:
                return

    def _write_once(self, handle: SaveHandle, planned: PlannedState, view: View, meeting: Meeting) -> str:
        """Write a state and publish it, and return the id of the save.

        Raises:
            CheckpointError: It failed.
        """
        storage = self._open(handle)
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
        if self._increments is not None:
            # Nothing was held of which digests could be taken.
            self._increments.commit(handle.step, None)
        return claimed.save_id

    def _claim(self, storage: Storage, meeting: Meeting) -> Claim:
        """Claim the directory, or wait until the first rank has: before that, no rank writes there."""
        increments = self._increments
        with observe.span("directory.claimed", rank=self._rank, path=storage.url):
            if self._is_first:
                storage.prepare()
                claimed = claim(storage, uuid.uuid4().hex, exclusive=exclusive_of(self._engine.format))
                if increments is not None and self._archive.take_news_of_damage():
                    increments.doubt()
            else:
                # Nobody asks for it; it tells how far this rank has got.
                meeting.say("writing")
                claimed = Claim(meeting.await_claim(), None, ())
                if increments is not None and meeting.outcome.facts.get("all"):
                    increments.doubt()
        writes_all = increments is not None and increments.begin()
        if self._is_first and not self._is_alone:
            meeting.say("writing", save_id=claimed.save_id, facts={"all": True} if writes_all else {})
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
        written: Written | Increment,
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
            details = self._details(handle, manifests)
            publish(storage, data, claimed, refs, details)
        if not self._is_alone:
            facts = self._common_facts(manifests)
            try:
                meeting.say("committed", facts=facts)
            except CheckpointError as error:
                # It is, and the others will see that.
                _LOG.warning("the other ranks could not be told that %s is committed: %s", handle.path, error)
            self._learn(planned, facts)
            with self._meet_lock:
                # All have heard how these ended: they have written since. One that was begun after this save
                # may have failed already, which nobody has heard.
                heard = [over for over in self._over if over.number <= meeting.number]
                self._over = [meeting, *(over for over in self._over if over.number > meeting.number)]
            for over in heard:
                over.forget()
            self._forget_turns(handle)
        self._archive.take(handle.step, save_id, self._failed, handle.metric, details["time"])

    def _forget_turns(self, handle: SaveHandle) -> None:
        """Forget what was said of turns until this save: all ranks have entered it, and so heard that."""
        with self._meet_lock:
            known = [turn for turn, _ in self._turns]
            at = known.index(handle) + 1 if handle in known else 0
            told, self._turns = [key for _, key in self._turns[:at]], self._turns[at:]
        if told:
            with contextlib.suppress(CheckpointError):
                self._coordinator.forget(told)

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

    def _tell_others(self, meeting: Meeting, error: BaseException, *, is_final: bool = False) -> None:
        """Leave word that this rank gave up the save: the others need not wait for it."""
        if self._is_alone:
            return
        # What the others save may be what has changed.
        self._common = None
        if isinstance(error, StateChanged) or meeting.outcome.facts.get("changed"):
            self._num_changes += 1
            self._wait_saves = 2 ** min(self._num_changes, _MOST_DOUBLINGS) - 2
        if self._is_first:
            with self._meet_lock:
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
                    "final": is_final or _is_final(error) or meeting.is_final,
                },
            )

    def _details(self, handle: SaveHandle, manifests: Sequence[PartialManifest]) -> dict[str, Any]:
        nbytes = [sum(manifest.ref.files.values()) for manifest in manifests]
        if nbytes and max(nbytes) > _SKEW * sum(nbytes) / len(nbytes) + _SKEW_BYTES:
            _LOG.warning(
                "rank %d writes %.2f GiB, %.1f times the mean: the save takes as long as it does",
                self._coordinator.ranks[nbytes.index(max(nbytes))],
                max(nbytes) / _GIB,
                max(nbytes) * len(nbytes) / sum(nbytes),
            )
        world = len(self._coordinator.ranks)
        details = {"world": world, "format": self._config.ckpt_format}
        details["time"] = self._archive.time_of_commit(handle.step)
        return details if handle.metric is None else {**details, "metric": handle.metric}

    def _complete(self, handle: SaveHandle, save_id: str) -> None:
        observe.emit("committed", save_id=save_id, path=handle.path)
        _LOG.info("committed %s", handle.path)
        self._num_failures = 0
        if self._config.ckpt_on_failure == "warn":
            self._unheard = None
        handle._future.set_result(handle.path)  # noqa: SLF001 - one room

    def _report(self, handle: SaveHandle, error: BaseException) -> bool:
        """Log a failure at once: nobody may ever ask for the result; says whether that is all."""
        # As text: a handler that keeps records would keep the traceback, and so the state.
        if isinstance(error, CheckpointError) and error.rank is None:
            error.rank = self._rank
        self._num_failures += 1
        is_borne = self._bears(error)
        _LOG.log(
            logging.WARNING if is_borne else logging.ERROR,
            "the save of step %d failed: %s",
            handle.step,
            f"{type(error).__name__}: {error}",
        )
        if not is_borne:
            # Not the handle, whose error holds what it came through.
            heard = handle._told  # noqa: SLF001 - one room
            note_failure(lambda: bool(heard))
        clear_frames(error)
        if not isinstance(error, CheckpointError):
            told = CheckpointError(f"{type(error).__name__}: {error}")
            told.__cause__ = error
            error = told
        handle._future.set_exception(error)  # noqa: SLF001 - one room
        return is_borne


def _take(turn: list[SaveHandle]) -> bool:
    """Say whether it is the caller who has a save's turn: one of those that ask, on whatever thread."""
    try:
        turn.pop()
    except IndexError:
        return False
    return True


@dataclass
class _Attempt:
    """One attempt at a save in the background.

    Attributes:
        handle: The save.
        planned: The plan of its state.
        residence: What holds the state, until it is let go.
        meeting: Where the ranks hear of each other.
        keeps: Whether the state is held until it is committed, for another attempt.
    """

    handle: SaveHandle
    planned: PlannedState
    residence: Residence | None
    meeting: Meeting
    keeps: bool


def _is_final(error: BaseException) -> bool:
    """Say whether a failure has reasons that another attempt would meet, too."""
    if getattr(error, "is_overtaken", False):
        return True
    return not isinstance(error, CheckpointError) or isinstance(
        error, (StagingError, StateChanged, ReplicasDiffer, ConfigError, MissingRanks)
    )


def _check_mapping(state: object) -> None:
    """Refuse what is no state.

    Raises:
        ConfigError: It is no mapping.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"state: expected a mapping, got {type(state).__name__}")


def _step_number(step: object) -> int:
    """Return a step as it was given.

    Raises:
        ConfigError: It is no number from 0.
    """
    with contextlib.suppress(TypeError):
        number = operator.index(step)  # type: ignore[arg-type]
        if number >= 0 and not isinstance(step, bool):
            return number
    raise ConfigError(f"step: expected a number from 0, got {step!r}")


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


def _before_step(method: Callable[[], Callable[[Optimizer], None] | None]) -> Callable[..., None]:
    """Return a hook for steps of an optimizer that a guard has seen; it calls what `method` refers to."""

    def before_step(optimizer: Optimizer, *_: Any) -> None:
        await_copies = method()
        if await_copies is not None:
            await_copies(optimizer)

    # A compiler might have it run after the step that it saw.
    disable: Callable[[Callable[..., None]], Callable[..., None]] = torch.compiler.disable
    return disable(before_step)


def _addresses_of(optimizer: Optimizer, *, is_captured: bool) -> Iterator[tuple[int, bool]]:
    """Yield where its parameters and states lie, and whether its steps may count up no version there."""
    # One that may be captured may have been, before a guard saw it.
    is_captured = is_captured or any(group.get("capturable") for group in optimizer.param_groups)
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    states = (value for entry in optimizer.state.values() for value in entry.values())
    for tensor in itertools.chain(parameters, states):
        if isinstance(tensor, torch.Tensor):
            local = getattr(tensor, "_local_tensor", tensor)
            if address := local.data_ptr():
                yield address, is_captured or local is not tensor
