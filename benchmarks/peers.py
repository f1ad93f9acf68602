"""What is compared: torch's own writers, distckpt's, one that writes nothing, and the peers.

Peers that may not be installed are imported when they are made.
"""

from __future__ import annotations

import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from measurement import Figures, Stopwatch
from torch import distributed
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from distckpt import StorageWriter

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

State = dict[str, torch.Tensor]
_THREADS = 8
_LIMIT_S = 60.0


class TimedStock(FileSystemWriter):
    """torch's writer, with the time it spends writing and publishing."""

    def __init__(self, path: str, **settings: Any) -> None:
        super().__init__(path, **settings)
        self.watch = Stopwatch()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        with self.watch.running():
            future = super().write_data(plan, planner)
            future.wait()
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self.watch.running():
            super().finish(metadata, results)


class TimedWriter(StorageWriter):
    """distckpt's writer, with the time it spends writing and publishing."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.watch = Stopwatch()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        with self.watch.running():
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self.watch.running():
            super().finish(metadata, results)


class NullWriter(TorchStorageWriter):
    """Writes nothing: what is left of a save is torch's planning."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        future: TorchFuture[list[WriteResult]] = TorchFuture()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def save(state: State, path: Path, writer: TorchStorageWriter) -> float:
    """Return the seconds of a whole `dcp.save` to `path`, which must not exist."""
    started = time.perf_counter()
    state_dict_saver.save(state, checkpoint_id=path, storage_writer=writer, no_dist=True)
    return time.perf_counter() - started


def async_save(state: State, path: Path, writer: TorchStorageWriter | None) -> dict[str, float]:
    """Return the seconds until `dcp.async_save` to `path` returned, had staged, and was durable.

    Args:
        state: The state.
        path: Must not exist.
        writer: None for what torch takes by default.
    """
    started = time.perf_counter()
    response = state_dict_saver.async_save(state, checkpoint_id=path, storage_writer=writer, no_dist=True)
    stall_s = time.perf_counter() - started
    staged_s = stall_s
    upload: Future[Any]
    if isinstance(response, state_dict_saver.AsyncSaveResponse):
        response.staging_completion.result()
        staged_s = time.perf_counter() - started
        upload = response.upload_completion
    else:
        upload = response
    upload.result()
    return {"stall_s": stall_s, "staged_s": staged_s, "total_s": time.perf_counter() - started}


def sizes(path: Path) -> tuple[int, int]:
    """Return the bytes of a checkpoint's data files, and of all that it consists of."""
    files = {file: file.stat().st_size for file in path.rglob("*") if file.is_file()}
    return sum(n for file, n in files.items() if ".distcp" in file.name), sum(files.values())


def remove(path: Path) -> None:
    """Remove a checkpoint; its files at the same time, for in memory that takes as long as writing them."""
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda file: file.unlink(missing_ok=True), [f for f in path.rglob("*") if f.is_file()]))
    shutil.rmtree(path, ignore_errors=True)


class Candidate(ABC):
    """A checkpointer that is compared. One object serves a whole process, its saves one after the other."""

    needs: ClassVar[str] = ""
    """The module without which it cannot be tried."""

    @abstractmethod
    def save(self, state: State, path: Path) -> tuple[Figures, Path]:
        """Save to `path`, which must not exist, or to a path of its own beside it; wait until it is durable.

        Returns:
            Seconds from the call (`returned_s` until it returned, `staged_s` until the state may be changed,
            for which a trainer has to wait, `total_s` until the checkpoint is durable), and where it is.
        """

    def prewarm(self, state: State, folder: Path) -> None:
        """Get ready for a state like this one, to be saved below `folder`, and wait for it."""
        raise NotImplementedError

    def holds(self, path: Path, expected: State) -> bool:
        """Say whether these tensors are in the checkpoint."""
        loaded = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in expected.items()}
        state_dict_loader.load(loaded, checkpoint_id=path, no_dist=True)
        return all(torch.equal(loaded[name], tensor.cpu()) for name, tensor in expected.items())

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what it holds."""


class StockSave(Candidate):
    """`dcp.save` with torch's writer and 8 threads: it keeps the trainer until the end."""

    def save(self, state: State, path: Path) -> tuple[Figures, Path]:
        writer = FileSystemWriter(str(path), thread_count=_THREADS)
        seconds = save(state, path, writer)
        return {"returned_s": seconds, "staged_s": seconds, "total_s": seconds}, path


class StockAsync(Candidate):
    """`dcp.async_save`: as it comes, or with the pinned stager and 8 threads.

    Args:
        device: "cuda" or "cpu".
        pinned: Take a `DefaultStager` that keeps pinned memory and stages in a thread.
    """

    def __init__(self, device: str, *, pinned: bool) -> None:
        self._stager: DefaultStager | None = None
        # Pinned memory; not shared, which is of use only for PROCESS mode; staged in a thread; copied without
        # blocking. Not by name: the names have changed between versions of torch.
        is_cuda = device == "cuda"
        self._options = StagingOptions(is_cuda, False, True, is_cuda) if pinned else None

    def start(self, state: State, path: Path) -> tuple[Future[Any] | None, Future[Any]]:
        """Begin a save; returns the future of staging, None if it is done, and that of the checkpoint."""
        settings: dict[str, Any] = {}
        if self._options is not None:
            # torch 2.11 empties the stager that it was given when its save has ended: it is made anew.
            inner = getattr(self._stager, "_state_dict_stager", None)
            if not getattr(inner, "_deepcopy_dispatch", None):
                self._stager = DefaultStager(self._options)
            settings["async_stager"] = self._stager
            settings["storage_writer"] = FileSystemWriter(str(path), thread_count=_THREADS)
        response = state_dict_saver.async_save(state, checkpoint_id=path, no_dist=True, **settings)
        if isinstance(response, state_dict_saver.AsyncSaveResponse):
            return response.staging_completion, response.upload_completion
        return None, response

    def save(self, state: State, path: Path) -> tuple[Figures, Path]:
        started = time.perf_counter()
        staging, upload = self.start(state, path)
        returned_s = time.perf_counter() - started
        if staging is not None:
            staging.result()
        staged_s = time.perf_counter() - started
        upload.result()
        return _figures(returned_s, staged_s, started), path

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class Ours(Candidate):
    """`distckpt.Checkpointer` with 8 workers; one for each directory that it is given.

    Args:
        nbytes: Budget of host memory.
        workers: Number of them.
    """

    def __init__(self, nbytes: int, workers: int) -> None:
        self._settings: dict[str, Any] = {"ckpt_host_memory": nbytes, "dist_ckpt_workers": workers}
        self._root: Path | None = None
        self._checkpointer: Any = None
        self._step = 0

    def _at(self, root: Path) -> Any:
        from distckpt import Checkpointer

        if self._root != root:
            self.close()
            self._root = root
            self._checkpointer = Checkpointer(root, async_save=True, log_level="warning", **self._settings)
        return self._checkpointer

    def prewarm(self, state: State, folder: Path) -> None:
        self._at(folder).prewarm(state).result(timeout=_LIMIT_S)

    def save(self, state: State, path: Path) -> tuple[Figures, Path]:
        checkpointer = self._at(path.parent)
        self._step += 1
        started = time.perf_counter()
        handle = checkpointer.save(self._step, state)
        returned_s = time.perf_counter() - started
        while not (handle.staged or handle.committed) and time.perf_counter() - started < _LIMIT_S:
            time.sleep(0.0001)
        staged_s = time.perf_counter() - started
        found = Path(handle.result(timeout=_LIMIT_S))
        return _figures(returned_s, staged_s, started), found

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()


class TorchCheckpointing(Candidate):
    """torch_checkpointing 0.1.1: a staging thread with pinned shared memory, one process that writes.

    Every tensor is an item of its own, hence a file of its own, written by 8 threads. It never calls fsync;
    that is done here and counts, for without it nothing is durable. Its O_DIRECT, on by default, hands ext4
    unaligned writes and fails there, so it is off.
    """

    needs = "torch_checkpointing"

    def __init__(self) -> None:
        from torch_checkpointing import (  # type: ignore[import-not-found]
            AsyncCheckpointSaverConfig,
            CheckpointManager,
            CheckpointWriterConfig,
        )
        from torch_checkpointing.storage.filesystem import (  # type: ignore[import-not-found]
            LocalFileSystemStorageConfig,
        )

        writer = CheckpointWriterConfig(file_write_max_threads=_THREADS)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(writer_config=writer),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def prewarm(self, state: State, folder: Path) -> None:
        self._manager.prewarm_staging(self._items(state))
        # There is no public way to wait for the memory, nor for the process that writes, which the first save
        # waits for: in training both would long be there.
        self._manager._prewarm_staging_future.result(timeout=_LIMIT_S)  # noqa: SLF001
        self._manager._saver._checkpoint_process._creation_future.result(timeout=_LIMIT_S)  # noqa: SLF001

    def save(self, state: State, path: Path) -> tuple[Figures, Path]:
        started = time.perf_counter()
        future = self._manager.save(str(path), self._items(state))
        returned_s = time.perf_counter() - started
        # What its documentation puts around `optimizer.step()`.
        with self._manager.lock():
            staged_s = time.perf_counter() - started
        future.result(timeout=_LIMIT_S)
        sync_all(path)
        return _figures(returned_s, staged_s, started), path

    def holds(self, path: Path, expected: State) -> bool:
        items = self._items(expected)
        loaded = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in items.items()}
        found = self._manager.load(str(path), into=loaded)
        return all(torch.equal(found[name].cpu(), tensor.cpu()) for name, tensor in items.items())

    @staticmethod
    def _items(state: State) -> State:
        # It refuses names with dots.
        return {name.replace(".", "_"): tensor for name, tensor in state.items()}

    def close(self) -> None:
        self._manager.close()


class Resiliency(Candidate):
    """nvidia-resiliency-ext 0.7.0, as Megatron drives it, with a persistent worker and 8 threads.

    Args:
        shm: Copy to shared memory in the trainer; otherwise the worker copies, through CUDA IPC.
    """

    needs = "nvidia_resiliency_ext"

    def __init__(self, *, shm: bool) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt import (  # type: ignore[import-not-found]
            core,
            filesystem_async,
        )
        from nvidia_resiliency_ext.checkpointing.async_ckpt import state_dict_saver as saver

        join_group()
        self._core, self._saver = core, saver
        self._queue = core.AsyncCallsQueue(persistent=True, cpu_shm_mode=shm)
        self._writer = partial(
            filesystem_async.FileSystemWriterAsync,
            thread_count=_THREADS,
            use_cached_data_structure=True,
            use_cpu_shm_for_gpu_tensors=shm,
        )
        self._cache = saver.CheckpointMetadataCache()

    def save(self, state: State, path: Path) -> tuple[Figures, Path]:
        started = time.perf_counter()
        plan = self._saver.save_state_dict_async_plan(
            state, self._writer(str(path)), enable_cache=True, metadata_cache=self._cache
        )
        function, preload, arguments = plan[0].get_save_function_and_args()
        finalize = partial(self._saver.save_state_dict_async_finalize, *plan)
        self._queue.schedule_async_request(
            self._core.AsyncRequest(function, arguments, [finalize], {}, preload)
        )
        # The call returns when the copy has been made.
        staged_s = time.perf_counter() - started
        while not self._queue.maybe_finalize_async_calls(blocking=False, no_dist=True):
            time.sleep(0.001)
            if time.perf_counter() - started > _LIMIT_S:
                raise TimeoutError("nvidia-resiliency-ext did not finish")
        return _figures(staged_s, staged_s, started), path

    def close(self) -> None:
        self._queue.close()


def _figures(returned_s: float, staged_s: float, started: float) -> Figures:
    return {"returned_s": returned_s, "staged_s": staged_s, "total_s": time.perf_counter() - started}


def join_group() -> None:
    """Make a process group of one, which nvidia-resiliency-ext asks for."""
    if not distributed.is_initialized():
        is_cuda = torch.cuda.is_available()
        backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        if is_cuda:
            # The first collective sets NCCL up; that is not the checkpointer's doing.
            distributed.all_reduce(torch.zeros(1, device="cuda"))
            torch.cuda.synchronize()


def sync_all(path: Path) -> None:
    """Make every file below a directory durable, and the directories themselves."""
    entries = [path.parent, path, *path.rglob("*")]
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(_sync, entries))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def candidates(device: str, nbytes: int, workers: int) -> dict[str, tuple[str, Callable[[], Candidate]]]:
    """Return what is compared: the module it needs, if not torch or this project, and how to make it."""
    return {
        "distckpt": ("", lambda: Ours(nbytes, workers)),
        "distckpt, prewarmed": ("", lambda: Ours(nbytes, workers)),
        "stock save": ("", StockSave),
        "stock async_save": ("", lambda: StockAsync(device, pinned=False)),
        "stock async_save, pinned": ("", lambda: StockAsync(device, pinned=True)),
        "torch_checkpointing": (TorchCheckpointing.needs, TorchCheckpointing),
        "torch_checkpointing, prewarmed": (TorchCheckpointing.needs, TorchCheckpointing),
        "nvidia-resiliency-ext, CUDA IPC": (Resiliency.needs, lambda: Resiliency(shm=False)),
        "nvidia-resiliency-ext, shm": (Resiliency.needs, lambda: Resiliency(shm=True)),
    }
