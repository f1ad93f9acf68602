"""FileSystemWriterAsync: the writer that Megatron-Core and nvidia-resiliency-ext plan with, over our engine.

    save_state_dict_async_plan      -> prepare_write_data: staged in host memory; a thread begins to write
    get_save_function_and_args      -> nothing: no process has to be started, and none is forked
    save_state_dict_async_finalize  -> retrieve_write_results: waits for the thread; finish: publishes

Invariants:
    * What is written has the values at the call of `prepare_write_data`; CPU tensors are copied by its end.
    * A plan that was cached is compared with today's state: what it leaves out fails the save on all ranks.
    * What goes wrong on one rank comes out of `retrieve_write_results`, where all ranks learn of it.

Threads: one of our own for each save.
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

from distckpt.config import CheckpointConfig
from distckpt.errors import CheckpointError, ConfigError
from distckpt.writer import StorageWriter

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future as TorchFuture

    _Path = str | os.PathLike[str]

_LOG = logging.getLogger(__name__)
_MOST_NAMED = 3
_THREAD_COUNT = 1
_lock = threading.Lock()


class _SharedWriter(StorageWriter):
    """Used by any number of saves, each of which brings its own state."""

    @property
    def save_state(self) -> Any:
        """What the current thread's save is."""
        return self._current()

    @contextlib.contextmanager
    def resumed(self, save: Any) -> Iterator[None]:
        """Go on with a save that another thread has begun, or that this one has left for another."""
        before = self._current()
        self._local.save = save
        try:
            yield
        finally:
            self._local.save = before


_writers: dict[tuple[CheckpointConfig, str], _SharedWriter] = {}
"""Kept between saves: host memory and workers are made once."""


class _StagedPlanner(DefaultSavePlanner):
    """Resolves the items of a plan to what was staged of them."""

    def __init__(self, staged: dict[str, Any], names: dict[int, str], blobs: dict[int, bytes]) -> None:
        super().__init__(flatten_state_dict=False)
        self.state_dict = staged
        self._names = names
        self._blobs = blobs

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return what was staged for `write_item`."""
        key = id(write_item)
        if key in self._blobs:
            return io.BytesIO(self._blobs[key])
        staged: torch.Tensor = self.state_dict[self._names[key]]
        return staged


class FileSystemWriterAsync:
    """Takes the place of `FileSystemWriterAsync`, of Megatron-Core or of nvidia-resiliency-ext.

    One object writes one checkpoint, as there; those of one process share host memory and workers.

    Args:
        path: Checkpoint directory.
        *args: Ignored, as are the settings of torch's `FileSystemWriter` that say how it opens files.
        separation_hint: Not supported.
        use_msc: Not supported: give a URL that fsspec resolves.
        thread_count: Number of workers, if the settings do not say it.
        config: Settings; default: `CheckpointConfig()`.
        storage_options: Passed to fsspec as they are.
        **settings: Fields of `CheckpointConfig`, which override `config`.

    Raises:
        ConfigError: A setting cannot be honoured.
    """

    can_run_decentralized_global_plan = False
    """The directory is claimed before any rank writes there: plans that go through the first ensure it."""

    def __init__(
        self,
        path: _Path,
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        thread_count: int = _THREAD_COUNT,
        config: CheckpointConfig | None = None,
        storage_options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        del args
        if separation_hint is not None:
            raise ConfigError("separation_hint: files are divided by bytes, not by names")
        if use_msc:
            raise ConfigError("use_msc: give the checkpoint a URL that fsspec resolves, such as s3://")
        for name in ("single_file_per_rank", "sync_files", "per_thread_copy_ahead", "overwrite"):
            settings.pop(name, None)
        if config is None:
            settings.setdefault("dist_ckpt_workers", thread_count)
        self.checkpoint_dir = path
        self.thread_count = thread_count
        self.separation_hint = separation_hint
        self._writer = _shared(CheckpointConfig.build(config, settings), storage_options or {})
        self._save: Any = None
        self._planned: SavePlan | None = None
        self._written: Future[list[WriteResult]] | None = None

    @property
    def checkpoint_id(self) -> _Path:
        """The checkpoint's directory."""
        return self.checkpoint_dir

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        """Say whether this writer can write there."""
        return StorageWriter.validate_checkpoint_id(checkpoint_id)

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        """Begin a save.

        Args:
            checkpoint_id: Its directory; default: that of the last one.
        """
        self.checkpoint_dir = self.checkpoint_dir if checkpoint_id is None else checkpoint_id
        self._save = self._planned = self._written = None

    def storage_meta(self) -> Any:
        """Return what torch records of the save."""
        with self._writer.resumed(self._save):
            return self._writer.storage_meta()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take this process's place in the save.

        Args:
            is_coordinator: Whether this rank publishes.
            *args: Ignored, as in torch.
            **kwargs: `rank`, if the caller knows one; else it is that of the job.
        """
        kwargs.setdefault("rank", distributed.get_rank() if distributed.is_initialized() else 0)
        with self._writer.resumed(None):
            self._writer.reset(self.checkpoint_dir)
            self._writer.set_up_storage_writer(is_coordinator, *args, **kwargs)
            self._save = self._writer.save_state

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Claim the directory, if this rank coordinates; the plan is not changed."""
        self._planned = plan
        with self._writer.resumed(self._save):
            return self._writer.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return `plans` unchanged."""
        with self._writer.resumed(self._save):
            return self._writer.prepare_global_plan(plans)

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Return `local_plan` unchanged: file names follow from the rank."""
        return local_plan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Stage what `plan` has, and begin to write it in the background.

        CPU tensors and objects are copied when this returns. Copies of CUDA tensors may still run: work that
        the current stream is given from now on waits for them on the device.

        Args:
            plan: What this rank writes.
            planner: Resolves items to tensors and bytes.
        """
        written: Future[list[WriteResult]] = Future()
        self._written = written
        try:
            assert self._save is not None, "set_up_storage_writer was called"
            self._check_cached(planner)
            write = self._stage(plan, planner)
            thread = threading.Thread(target=_run, args=(written, write), name="distckpt-write", daemon=False)
            thread.start()
        except Exception as error:  # noqa: BLE001 - raised where all ranks learn of it
            _LOG.error("the save of %s failed: %s", self.checkpoint_dir, error)
            written.set_exception(error)

    def get_save_function_and_args(self) -> tuple[None, None, list[Any]]:
        """Return that nothing is left for a process of the caller's to do."""
        return None, None, []

    @staticmethod
    def preload_tensors(write_buckets: Any, non_blocking: bool = True) -> Any:
        """Return `write_buckets` unchanged: what they stand for is staged."""
        del non_blocking
        return write_buckets

    @staticmethod
    def write_preloaded_data_multiproc(*args: Any, **kwargs: Any) -> None:
        """Do nothing: the writing is under way."""

    write_preloaded_data = write_preloaded_data_multiproc

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write all items of `plan` durably, before this returns; for `dcp.save`."""
        with self._writer.resumed(self._save):
            return self._writer.write_data(plan, planner)

    def retrieve_write_results(self) -> Any:
        """Wait until this rank has written.

        Returns:
            Its results; or the error, as torch wraps one for another rank.
        """
        if self._written is None:
            return _wrap_exception(CheckpointError("prepare_write_data was not called"))
        try:
            return self._written.result()
        except Exception as error:  # noqa: BLE001 - goes to all ranks
            return _wrap_exception(error)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint.

        Args:
            metadata: What the planner says of the whole.
            results: What each rank wrote.
        """
        with self._writer.resumed(self._save):
            self._writer.finish(metadata, results)

    def close(self) -> None:
        """Let the save end; memory and workers stay for the next one."""
        if self._written is not None:
            with contextlib.suppress(Exception):
                self._written.result()

    def _check_cached(self, planner: SavePlanner) -> None:
        """Compare the local plan, which the caller may have cached, with what the state is today.

        Raises:
            CheckpointError: The plan has not all of it, or has it otherwise.
        """
        if getattr(planner, "_enable_plan_caching", False):
            # The planner compares it.
            return
        planned = set() if self._planned is None else {_kind(item) for item in self._planned.items}
        today = {_kind(item) for item in planner.create_local_plan().items}
        if planned != today:
            names = sorted({kind[0] for kind in planned ^ today})
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            raise CheckpointError(
                f"{self.checkpoint_dir}: the cached structure of the checkpoint is not that of the state any "
                f"more: {', '.join(map(repr, names[:_MOST_NAMED]))}{more} would be lost or wrong; save "
                f"without cached_metadata"
            )

    def _stage(self, plan: SavePlan, planner: SavePlanner) -> Callable[[], list[WriteResult]]:
        """Stage what `plan` has, and return what writes it."""
        names: dict[int, str] = {}
        blobs: dict[int, bytes] = {}
        tensors: dict[str, Any] = {}
        for number, item in enumerate(plan.items):
            data = planner.resolve_data(item)
            if item.type is WriteItemType.BYTE_IO:
                assert isinstance(data, io.BytesIO)
                blobs[id(item)] = data.getvalue()
            else:
                names[id(item)] = str(number)
                tensors[str(number)] = data.detach() if isinstance(data, torch.Tensor) else data
        staging = self._writer.stage(tensors) if tensors else None
        save = self._save

        def write() -> list[WriteResult]:
            staged = {} if staging is None else staging.result()
            failure = staged.get("distckpt staging")
            if failure is not None:
                raise failure.error
            with self._writer.resumed(save):
                results: list[WriteResult] = self._writer.write_data(
                    plan, _StagedPlanner(staged, names, blobs)
                ).value()
            return results

        return write


def _kind(item: WriteItem) -> tuple[Any, ...]:
    data = item.tensor_data
    place = None if item.index.offset is None else tuple(item.index.offset)
    if data is None:
        return item.index.fqn, place
    return item.index.fqn, place, tuple(data.chunk.sizes), tuple(data.size), data.properties.dtype


def _run(written: Future[list[WriteResult]], write: Callable[[], list[WriteResult]]) -> None:
    try:
        written.set_result(write())
    except BaseException as error:  # noqa: BLE001 - the top frame of a thread: whoever waits raises it
        written.set_exception(error)


def _shared(config: CheckpointConfig, storage_options: dict[str, Any]) -> _SharedWriter:
    key = (config, repr(sorted(storage_options.items())))
    with _lock:
        if key not in _writers:
            _writers[key] = _SharedWriter(config=config, storage_options=storage_options)
        return _writers[key]


def close_writers() -> None:
    """End the workers that saves have left for the next ones, and give their memory back."""
    with _lock:
        writers = list(_writers.values())
        _writers.clear()
    for writer in writers:
        writer.close()
