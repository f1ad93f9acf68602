"""StorageWriter: the engine behind torch.distributed.checkpoint's interface.

Invariants:
    * `reset` and `stage` never raise: what went wrong there is raised where torch carries it to all ranks.
    * No name and no id of a save travels in a plan, which torch may cache and replay.
    * The `rank` that DCP passes is used, never that of the default group.

Threads: DCP runs each save on one thread (`async_save`: one of its own), so a save's state is kept per thread
and saves in flight do not mix.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import time
import uuid
import warnings
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from distckpt import observe
from distckpt.collector import collector_paused
from distckpt.commit import Claim, claim, exclusive_of, publish, refuse_part, seen_claim
from distckpt.config import CheckpointConfig, warn_async_workers
from distckpt.coordination import Participant
from distckpt.engine import Engine, budget_bytes
from distckpt.errors import (
    CheckpointError,
    CommitError,
    ConfigError,
    DistckptWarning,
    StagingError,
    clear_frames,
)
from distckpt.exitstatus import note_failure, watch_exit
from distckpt.items import arrays_of, cut, resolve_items
from distckpt.manifest import ManifestRef, write_manifest
from distckpt.metadata import (
    DCP_VERSION,
    cut_metadata,
    manifest_of,
    merge_arrays,
    merge_results,
    pickle_metadata,
    write_documents,
)
from distckpt.ownership import Piece
from distckpt.planner import SavePlanner
from distckpt.signature import local_tensors
from distckpt.staging import StagedUse, StagingFailure
from distckpt.storage import Storage, open_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.planner import SavePlanner as TorchSavePlanner
    from typing_extensions import Self

    from distckpt.formats import Arrays
    from distckpt.staging import CopyTicket

_LOG = logging.getLogger(__name__)
_GIB = 1 << 30
_DRAIN_POLL_S = 0.02
_Path = str | os.PathLike[str]


@dataclass(frozen=True)
class ManifestedResult(WriteResult):
    """The first result of a rank, which also tells the coordinator of its manifest.

    Attributes:
        manifest: The rank's manifest.
        dtypes: What was written where the plan, replayed from a cache, says another dtype.
        arrays: What the tensors with a grid are.
    """

    manifest: ManifestRef | None = None
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)


@dataclass
class _Save:
    """One save of one rank."""

    save_id: str
    path: _Path | None
    participant: Participant = field(default_factory=Participant)
    is_set_up: bool = False
    started: float = 0.0
    written: float | None = None
    """When this rank had written its own."""
    claimed: Claim | None = None
    num_ranks: int = 1
    """How many take part; only the coordinator knows."""
    storage: Storage | None = None
    """Opened once: a relative path means the same until the end, wherever the process goes meanwhile."""


class _StagedState(Future[dict[str, Any]]):
    """The future of a staged state, which knows who works on it."""

    def __init__(self) -> None:
        super().__init__()
        self.use = StagedUse()

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Return the staged state; see `Future.result`."""
        self.use.ask()
        return super().result(timeout)


class StorageWriter(TorchStorageWriter, AsyncStager):
    """Writes checkpoints that stock PyTorch reads; for `dcp.save` and `dcp.async_save`.

    One object serves any number of saves, one after the other or in flight together.

    Args:
        path: Checkpoint directory, or a URL (docs/storages.md); may be left to the `checkpoint_id` of each
            save.
        config: Settings; default: `CheckpointConfig()`.
        storage_options: Passed to fsspec as they are.
        **settings: Fields of `CheckpointConfig`, which override `config`.

    Raises:
        ConfigError: A setting, the URL or a storage option cannot be honoured.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        path: _Path | None = None,
        config: CheckpointConfig | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._config = CheckpointConfig.build(config, settings)
        # In a config it may be a default, as it is in one that was read from flags.
        self._asked_to_share = bool(settings.get("ckpt_fully_parallel_save"))
        self._config.warn_of_loop_settings(type(self).__name__, stacklevel=3)
        self._path = path
        self._storage_options = dict(storage_options or {})
        if path is not None:
            self._open_storage(path)
        if self._config.bucket_bytes():
            # Said now, and not by the first save.
            self._config.bucket_bytes(budget_bytes(self._config))
        logging.getLogger("distckpt").setLevel(self._config.log_level.upper())
        self._open()

    def _open(self) -> None:
        self._owner_pid = os.getpid()
        self._local = threading.local()
        self._engine: Engine | None = None
        self._engine_lock = threading.Lock()
        self._staged: weakref.WeakSet[_StagedState] = weakref.WeakSet()
        self._staged_lock = threading.Lock()
        self._closed = False
        self._was_unpickled = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave threads, processes and memory behind: torch's PROCESS mode pickles the writer."""
        _warn_once_of_process_mode()
        kept = ("_config", "_path", "_storage_options", "_asked_to_share")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start anew in another process."""
        self.__dict__.update(state)
        self._open()
        self._was_unpickled = True

    def __enter__(self) -> Self:
        """Return the writer; it is closed on leaving."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the writer."""
        self.close()

    @property
    def checkpoint_id(self) -> _Path | None:
        """The checkpoint's directory, as it was given."""
        save = self._current()
        return save.path if save is not None else self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        """Say whether this writer can write there."""
        try:
            open_storage(checkpoint_id)
        except ConfigError:
            return False
        return True

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        """Begin a save.

        Args:
            checkpoint_id: Its directory; default: that of the last save on this writer.
        """
        # Not read back from the writer: another thread may begin a save of its own in between.
        path = self._path if checkpoint_id is None else checkpoint_id
        self._path = path
        self._local.save = _Save(uuid.uuid4().hex, path)

    def storage_meta(self) -> StorageMeta:
        """Return what torch records of the save."""
        save = self._begin()
        return StorageMeta(checkpoint_id=save.path, save_id=save.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take this process's place in the save.

        Args:
            is_coordinator: Whether this rank publishes.
            *args: Ignored, as in torch.
            **kwargs: `rank` among the participants and `use_collectives`.

        Raises:
            CheckpointError: The writer is closed.
            ConfigError: The save has no directory, or not one on a storage that can be written to.
        """
        save = self._begin()
        save.is_set_up = True
        save.started = time.monotonic()
        save.participant = Participant(
            kwargs.get("rank") or 0, bool(is_coordinator), bool(kwargs.get("use_collectives", True))
        )
        with self._reporting(save):
            if save.path is None:
                raise ConfigError(
                    "no checkpoint directory: give StorageWriter a path or the save a checkpoint_id"
                )
            if self._closed:
                raise CheckpointError("the StorageWriter is closed", rank=save.participant.rank)
            save.storage = self._open_storage(save.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Claim the directory, if this rank coordinates; the plan is not changed.

        Args:
            plan: What this rank has.

        Raises:
            CommitError: The save is without collectives, and the directory holds a checkpoint of all ranks,
                or it holds what the format cannot be written beside.
            ConfigError: The save is without collectives, and the format has no such checkpoints.
        """
        save = self._require()
        with self._reporting(save):
            storage = self._storage(save)
            self._check_objects(plan)
            if not save.participant.use_collectives:
                if self._get_engine().format.found_by is not None:
                    raise ConfigError(
                        f"ckpt_format: {self._config.ckpt_format} has no checkpoints of single ranks: save "
                        f"with collectives, or as torch_dist"
                    )
                refuse_part(storage)
            if save.participant.publishes:
                rank = save.participant.rank
                with observe.span("directory.claimed", save_id=save.save_id, rank=rank, path=storage.url):
                    storage.prepare()
                    save.claimed = claim(
                        storage,
                        save.save_id,
                        None if save.participant.use_collectives else rank,
                        exclusive_of(self._get_engine().format),
                    )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return `plans` unchanged."""
        self._require().num_ranks = len(plans)
        return plans

    def write_data(self, plan: SavePlan, planner: TorchSavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write all items of `plan` durably.

        Args:
            plan: What this rank writes.
            planner: Resolves items to tensors and bytes.

        Returns:
            A future that is done.

        Raises:
            CheckpointError: Something could not be copied or written; see `Engine.write`.
        """
        save = self._require()
        if save.num_ranks > 1 and self._config.ckpt_fully_parallel_save:
            _warn_once_of_planner(planner, was_asked=self._asked_to_share)
        future: TorchFuture[list[WriteResult]] = TorchFuture()
        try:
            with self._reporting(save):
                future.set_result(self._write(save, plan, planner))
                save.written = time.monotonic()
        finally:
            # torch's save process unpickles a writer for each save, and keeps it until the next one.
            if self._was_unpickled:
                self._close_engine()
        if not save.participant.publishes:
            self._end_staged_save()
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint.

        Args:
            metadata: What torch's planner says of the whole.
            results: What each rank wrote.

        Raises:
            CommitError: The results do not cover the plan, or it could not be published.
        """
        save = self._require()
        with self._reporting(save):
            # None if nothing was written here, which _publish refuses.
            if save.written is not None:
                observe.emit(
                    "ranks.awaited",
                    save_id=save.save_id,
                    rank=save.participant.rank,
                    start_s=save.written,
                    end_s=time.monotonic(),
                )
            self._publish(save, metadata, results)
        self._end_staged_save()

    def prewarm(self, state_dict: Mapping[str, Any]) -> Future[int]:
        """Begin to reserve and pin host memory for a state: its first save then costs what later ones do.

        Args:
            state_dict: The state, or one like it.

        Returns:
            A future of the bytes that are reserved; it ends with a `StagingError` if they cannot be had.

        Raises:
            CheckpointError: The writer is closed.
        """
        engine = self._get_engine()
        tensors = local_tensors(state_dict)
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        return engine.prewarm([tensor.nbytes for tensor in tensors], devices, before_plan=True)

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        """Copy the state to host memory, for `dcp.async_save`.

        CPU tensors and Python objects are copied when this returns. Copies of CUDA tensors may still run:
        work that the caller's current streams are given from now on waits for them on the device.

        Args:
            state_dict: The state.

        Returns:
            A future of the staged state. If the state cannot be staged, what it holds raises the error while
            the local plan is made, where torch carries it to every rank.
        """
        future = _StagedState()
        try:
            warn_async_workers(self._config.dist_ckpt_workers, stacklevel=3)
            watch_exit()
            staged, ticket = self._get_engine().stage(state_dict, future.use)
            with self._staged_lock:
                self._staged.add(future)
            if ticket.done():
                future.set_result(staged)
            else:
                completer = threading.Thread(
                    target=_complete,
                    args=(future, staged, ticket, self._timeout_s),
                    name="distckpt-staging",
                    daemon=True,
                )
                try:
                    completer.start()
                except RuntimeError:
                    # No thread can be started; the copies run all the same.
                    _complete(future, staged, ticket, self._timeout_s)
        except Exception as error:  # noqa: BLE001 - forwarded through the staged state to every rank
            failure = (
                error if isinstance(error, StagingError) else StagingError(f"{type(error).__name__}: {error}")
            )
            _LOG.error("the state could not be staged: %s", error)
            future.set_result({"distckpt staging": StagingFailure(failure, note_failure)})
        return future

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` has ordered the copies before the caller's further work."""

    def close(self) -> None:
        """Let saves in flight end, then end workers and give memory back.

        Idempotent, and needs no process group. A save that makes no progress within the deadline is given up.
        """
        if os.getpid() != self._owner_pid:
            return
        engine = self._engine
        if engine is not None and not self._closed:
            engine.deadline.progress()
            pause = threading.Event()
            while (
                any(staged.use.awaits_save for staged in self._staged_states()) and not engine.deadline.passed
            ):
                pause.wait(_DRAIN_POLL_S)
        self._closed = True
        self._close_engine()

    def _close_engine(self) -> None:
        with self._engine_lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _end_staged_save(self) -> None:
        for staged in self._staged_states():
            staged.use.end()

    def _staged_states(self) -> list[_StagedState]:
        with self._staged_lock:
            return list(self._staged)

    def _open_storage(self, path: _Path) -> Storage:
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

    def _current(self) -> _Save | None:
        return getattr(self._local, "save", None)

    def _begin(self) -> _Save:
        save = self._current()
        if save is None or save.is_set_up:
            self.reset()
            save = self._current()
            assert save is not None
        return save

    def _require(self) -> _Save:
        save = self._current()
        if save is None or not save.is_set_up:
            raise CheckpointError("set_up_storage_writer was not called on this thread")
        return save

    def _storage(self, save: _Save) -> Storage:
        assert save.storage is not None
        return save.storage

    def _get_engine(self) -> Engine:
        if os.getpid() != self._owner_pid:
            # In a forked child: the arena, the workers and the locks are the parent's; this save is ours.
            save = self._local
            self._open()
            self._local = save
        with self._engine_lock:
            if self._closed:
                raise CheckpointError("the StorageWriter is closed")
            if self._engine is None:
                self._engine = Engine.open(self._config)
            return self._engine

    def _write(self, save: _Save, plan: SavePlan, planner: TorchSavePlanner) -> list[WriteResult]:
        rank = save.participant.rank
        engine = self._get_engine()
        storage = self._storage(save)
        with observe.span("items.resolved", save_id=save.save_id, rank=rank), collector_paused():
            pieces = self._cut(plan, planner, save.num_ranks)
            items, dtypes = resolve_items(engine, planner, pieces, rank)
            arrays = arrays_of(pieces, planner)
        if dtypes:
            _LOG.warning(
                "the plan, cached or made by the planner, states another dtype than %d tensors have; "
                "the metadata will state what was written: %s", len(dtypes), _first(dtypes)
            )  # fmt: skip
        # Not inference tensors, whoever calls: packing buffers are kept for the next save.
        with torch.inference_mode(mode=False), torch.no_grad():
            written = engine.write(storage, save.save_id, rank, items, check=self._check_of(save, storage))
        del items
        if written is None:
            return []
        with collector_paused():
            write_items = [piece.item for piece in pieces]
            manifest = manifest_of(save.save_id, rank, self._config.ckpt_format, write_items, written, arrays)
            table = manifest.items
            results = [
                WriteResult(item.index, size, _StorageInfo(written.names[file], offset, size))
                for item, file, offset, size in zip(
                    write_items, table.item_files, table.offsets, table.sizes, strict=True
                )
            ]
        with observe.span("manifest.written", save_id=save.save_id, rank=rank):
            ref = write_manifest(storage, manifest)
        first = results[0]
        results[0] = ManifestedResult(
            first.index, first.size_in_bytes, first.storage_data, ref, dtypes, arrays
        )
        end_s = time.monotonic()
        seconds = end_s - save.started
        nbytes = sum(manifest.files.values())
        observe.emit(
            "rank.written",
            save_id=save.save_id,
            rank=rank,
            nbytes=nbytes,
            seconds=seconds,
            start_s=save.started,
            end_s=end_s,
        )
        _LOG.info(
            "rank %d wrote %.3f GiB in %d items and %d files to %s in %.2f s",
            rank, nbytes / _GIB, len(results), len(manifest.files), storage.url, seconds,
        )  # fmt: skip
        return results

    def _check_objects(self, plan: SavePlan) -> None:
        """Refuse objects that the format does not hold, while no rank has written anything.

        Raises:
            StagingError: There is one.
        """
        engine = self._get_engine()
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                engine.check_aside(item.index.fqn, "a Python object")
            elif item.tensor_data is not None:
                dtype, layout = item.tensor_data.properties.dtype, item.tensor_data.properties.layout
                if not engine.format.holds(dtype) or layout is not torch.strided:
                    engine.check_aside(item.index.fqn, f"a tensor of {dtype}, {layout}")
                else:
                    engine.format.check_name(item.index.fqn)

    def _check_of(self, save: _Save, storage: Storage) -> Callable[[], None] | None:
        """Return what keeps files that readers find by their names from a save that was overtaken.

        Raises:
            CheckpointError: The directory is not claimed.
        """
        if self._get_engine().format.found_by is None:
            return None
        # A rank that does not coordinate knows the claim only from the storage: the coordinator has made it
        # before it sent out the plans.
        claimed = save.claimed or seen_claim(storage)
        return lambda: claimed.check(storage)

    def _cut(self, plan: SavePlan, planner: TorchSavePlanner, num_ranks: int) -> list[Piece]:
        """Return what this rank writes, cut as the format wants it.

        Raises:
            ConfigError: The planner splits what several ranks have along other lines.
        """
        pieces = [Piece(item, item) for item in plan.items]
        engine = self._get_engine()
        if engine.format.has_grid and isinstance(planner, SavePlanner) and planner.splits and num_ranks > 1:
            raise ConfigError(
                f"ckpt_format: {engine.format.name} has a grid, and SavePlanner splits what several ranks "
                f"have along other lines: use SavePlanner(fully_parallel_save=False), or DefaultSavePlanner"
            )
        return cut(pieces, getattr(planner, "state_dict", {}).get, engine.format)

    def _publish(self, save: _Save, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        participant = save.participant
        if not participant.publishes:
            return
        manifests = [
            r.manifest for rank in results for r in rank[:1] if isinstance(r, ManifestedResult) and r.manifest
        ]
        if len(manifests) != sum(1 for rank in results if rank):
            raise CommitError("a rank's results name no manifest: all ranks must write with distckpt")
        metadata.version = DCP_VERSION
        metadata.storage_meta = StorageMeta(checkpoint_id=save.path, save_id=save.save_id)
        dtypes = {
            fqn: dtype
            for rank in results
            for r in rank[:1]
            if isinstance(r, ManifestedResult)
            for fqn, dtype in r.dtypes.items()
        }
        arrays = merge_arrays(
            [r.arrays for rank in results for r in rank[:1] if isinstance(r, ManifestedResult)]
        )
        rank = participant.rank
        with observe.span("metadata.made", save_id=save.save_id, rank=rank), collector_paused():
            cut_metadata(metadata, results, arrays)
            metadata.storage_data = merge_results(metadata, results, whole=participant.use_collectives)
            pickled = pickle_metadata(metadata, dtypes)
        assert save.claimed is not None, "prepare_local_plan has claimed the directory"
        engine = self._get_engine()
        if engine.format.found_by is not None:
            places: dict[str, list[tuple[str, int]]] = {}
            for index, info in metadata.storage_data.items():
                if isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
                    places.setdefault(index.fqn, []).append((info.relative_path, info.length))
            documents = engine.format.documents(
                places, arrays, {name for ref in manifests for name in ref.files}
            )
            check = self._check_of(save, self._storage(save))
            manifests += write_documents(engine, self._storage(save), save.save_id, rank, documents, check)
        details = {
            "world": len(results),
            "format": self._config.ckpt_format,
            "seconds": round(time.monotonic() - save.started, 3),
            "time": time.time(),
        }
        with observe.span("checkpoint.published", save_id=save.save_id, rank=rank):
            publish(self._storage(save), pickled, save.claimed, manifests, details)
        observe.emit("committed", save_id=save.save_id, path=str(save.path))
        _LOG.info("committed %s (%d ranks)", save.path, len(results))

    @contextlib.contextmanager
    def _reporting(self, save: _Save) -> Iterator[None]:
        """Log a failure at once: with `async_save` nobody may ever ask for the result."""
        try:
            yield
        except BaseException as failure:
            error = failure
            if save.claimed is not None and save.storage is not None:
                error = save.claimed.explain(save.storage, failure)
                if error is not failure:
                    error.__cause__ = failure
            if isinstance(error, CheckpointError) and error.rank is None:
                error.rank = save.participant.rank
            # As text: a handler that keeps records would keep the traceback, and so the staged state.
            text = f"{type(error).__name__}: {error}"
            _LOG.error("save %s of %s failed: %s", save.save_id, save.path, text)
            note_failure()
            self._end_staged_save()
            # The names in frames that have ended would hold staged tensors for as long as the error is kept.
            clear_frames(error)
            if _travels(error):
                if error is failure:
                    raise
                raise error from failure
            rank = save.participant.rank
            told = CheckpointError(f"{text} (rank {rank})", rank=rank)
            raise told.with_traceback(error.__traceback__) from error


def _travels(error: BaseException) -> bool:
    """Say whether other ranks can be sent `error`; one that cannot be pickled would leave them waiting."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an object of the user's raises anything
        return False
    return True


def _first(names: Mapping[str, object]) -> str:
    return ", ".join(list(names)[:3]) + (", ..." if len(names) > 3 else "")


def _complete(future: _StagedState, staged: dict[str, Any], ticket: CopyTicket, timeout_s: float) -> None:
    future.use.completer = threading.current_thread()
    try:
        ticket.wait(timeout_s)
        observe.emit("state.copied", start_s=ticket.began_s, end_s=time.monotonic())
    except Exception as error:  # noqa: BLE001 - the top frame of a thread: whoever waits must learn of it
        _LOG.error("the state could not be staged: %s", error)
        failure = (
            error if isinstance(error, StagingError) else StagingError(f"{type(error).__name__}: {error}")
        )
        staged = {"distckpt staging": StagingFailure(failure, note_failure)}
    future.set_result(staged)


_planner_warned = False


def _warn_once_of_planner(planner: TorchSavePlanner, *, was_asked: bool) -> None:
    """Say that replicas are not shared: a warning to who has asked for it, else news."""
    global _planner_warned
    if not _planner_warned and not isinstance(planner, SavePlanner):
        _planner_warned = True
        _LOG.log(
            logging.WARNING if was_asked else logging.INFO,
            "ckpt_fully_parallel_save has no effect with %s, which does not split what several ranks have: "
            "pass planner=distckpt.SavePlanner(), or set ckpt_fully_parallel_save=False",
            type(planner).__name__,
        )


_process_mode_warned = False


def _warn_once_of_process_mode() -> None:
    global _process_mode_warned
    if not _process_mode_warned:
        _process_mode_warned = True
        warnings.warn(
            "AsyncCheckpointerType.PROCESS pickles the staged state into another process, one more copy in "
            "host memory; dist_ckpt_workers > 1 with AsyncCheckpointerType.THREAD does without it",
            DistckptWarning,
            stacklevel=2,
        )
