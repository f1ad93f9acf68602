"""What `make bench` compares: every checkpointer behind one small interface, with the settings it likes best.

Peers that may not be installed are imported when they are made; `missing` says why one cannot run here.

Invariants:
    * A save counts as durable when all of its files are synced, and the directory that names them: who does
      not do that has it done here, and it counts.
    * Where a checkpointer lets go of the state before it has copied it, `staged_s` is when the copy is there.

Threads: one thread of each rank makes a candidate, saves, loads and closes it; all ranks do the same.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import distributed
from torch.distributed.checkpoint import _async_process_executor, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor, Shard

from distckpt import Checkpointer, SavePlanner, StorageReader, StorageWriter

State = dict[str, torch.Tensor]
Figures = dict[str, float]
_LIMIT_S = 300.0
_LIMIT = timedelta(seconds=_LIMIT_S)
_POLL_S = 0.0001
_QUEUE_POLL_S = 0.001
_SYNC_THREADS = 8
_FLAGS_ON_GPU = "each save ends in a collective on the GPU"


@dataclass(frozen=True)
class Context:
    """Where a candidate runs.

    Attributes:
        device: "cuda" or "cpu": where the tensors are.
        rank: Of this process.
        world: Number of ranks, all of this machine.
        workers: Threads or processes that it may use in each rank.
        host_memory: Bytes of host memory that a rank may use for staging.
    """

    device: str
    rank: int
    world: int
    workers: int
    host_memory: int


class Candidate(ABC):
    """A checkpointer that is compared. One object serves a whole process, its saves one after the other.

    A default process group exists. The ranks make their candidates together, and call everything together.
    """

    name: ClassVar[str]
    needs: ClassVar[str] = ""
    """The module without which it cannot be tried."""
    needs_cuda: ClassVar[str] = ""
    """Why it runs with GPUs alone."""
    note: ClassVar[str]
    """How it is driven, and what must be known of it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        # Of its own, as torch advises for saves in the background: collectives of a trainer do not mix with
        # them, and what ranks say to each other waits for no GPU.
        self.group = distributed.new_group(backend="gloo", timeout=_LIMIT)

    @abstractmethod
    def save(self, state: State, path: Path) -> Figures:
        """Save and wait until it is durable.

        Args:
            state: DTensors and replicated 0-dim tensors with several ranks, else plain tensors.
            path: The same on all ranks; must not exist.

        Returns:
            Seconds from the call: `returned_s` until it returned, `staged_s` until the state may be changed,
            for which a trainer has to wait, `total_s` until this rank's part of the checkpoint is durable.
        """

    @abstractmethod
    def load(self, state: State, path: Path) -> None:
        """Fill the tensors of `state` from a checkpoint of this candidate."""

    def close(self) -> None:
        """Give back what it holds."""
        distributed.destroy_process_group(self.group)

    @classmethod
    def unfit(cls, context: Context) -> str:
        """Return why it cannot run here although it is installed, or nothing."""
        return ""


class Distckpt(Candidate):
    name = "distckpt"
    note = "Checkpointer, async_save; no guard: the whole state is copied before save() returns"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._root: Path | None = None
        self._checkpointer: Checkpointer | None = None
        self._step = 0

    def _at(self, root: Path) -> Checkpointer:
        if self._checkpointer is None or self._root != root:
            if self._checkpointer is not None:
                self._checkpointer.close()
            self._root = root
            self._checkpointer = Checkpointer(
                root,
                async_save=True,
                dist_ckpt_workers=self.context.workers,
                ckpt_host_memory=self.context.host_memory,
                log_level="error",
            )
        return self._checkpointer

    def save(self, state: State, path: Path) -> Figures:
        checkpointer = self._at(path.parent)
        self._step += 1
        started = time.perf_counter()
        handle = checkpointer.save(self._step, state)
        returned_s = time.perf_counter() - started
        while not handle.staged:
            time.sleep(_POLL_S)
        staged_s = time.perf_counter() - started
        found = handle.result(timeout=_LIMIT_S)
        figures = _figures(started, returned_s, staged_s)
        # It names its steps itself.
        if self.context.rank == 0:
            path.symlink_to(Path(found).name)
        distributed.barrier(self.group)
        return figures

    def load(self, state: State, path: Path) -> None:
        step = int(path.resolve().name.removeprefix("step-"))
        self._at(path.parent).restore(dict(state), step)

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
        super().close()


class DistckptWriter(Candidate):
    name = "distckpt, dcp.async_save"
    note = "StorageWriter and SavePlanner in torch's dcp.async_save, with cached plans"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._writer = StorageWriter(
            dist_ckpt_workers=context.workers, ckpt_host_memory=context.host_memory, log_level="error"
        )

    def save(self, state: State, path: Path) -> Figures:
        return _async_save(
            state, path, self.group, syncs_folder=False,
            storage_writer=self._writer, planner=SavePlanner(enable_plan_caching=True),
        )  # fmt: skip

    def load(self, state: State, path: Path) -> None:
        reader = StorageReader(path, log_level="error")
        state_dict_loader.load(dict(state), storage_reader=reader, process_group=self.group)

    def close(self) -> None:
        self._writer.close()
        super().close()


class _Stock(Candidate):
    """Something of torch's own, which its reader reads."""

    def _writing(self, path: Path) -> dict[str, Any]:
        return {
            "storage_writer": FileSystemWriter(path, thread_count=self.context.workers),
            "planner": DefaultSavePlanner(enable_plan_caching=True),
        }

    def load(self, state: State, path: Path) -> None:
        load_dcp(state, path, self.group)


class DcpSave(_Stock):
    name = "dcp.save"
    note = "torch's FileSystemWriter, a thread for each worker, cached plans; keeps the trainer until the end"

    def save(self, state: State, path: Path) -> Figures:
        started = time.perf_counter()
        state_dict_saver.save(state, checkpoint_id=path, process_group=self.group, **self._writing(path))
        sync_folder(path)
        seconds = time.perf_counter() - started
        return _figures(started, seconds, seconds)


class DcpAsync(_Stock):
    name = "dcp.async_save"
    note = "as it comes: copies to memory that is not pinned, anew for each save; one thread writes"

    def save(self, state: State, path: Path) -> Figures:
        return _async_save(state, path, self.group)


class DcpPinned(_Stock):
    name = "dcp.async_save, pinned"
    note = (
        "a DefaultStager with pinned memory (on CPUs: memory), which torch 2.11 does not keep, and a thread; "
        "FileSystemWriter with a thread for each worker, cached plans"
    )
    kind = AsyncCheckpointerType.THREAD

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._stager: DefaultStager | None = None
        is_cuda = context.device == "cuda"
        # Pinned; shared, which only PROCESS has use for; staged in a thread; copied without blocking. Not by
        # name: the names have changed between versions of torch.
        is_shared = self.kind is AsyncCheckpointerType.PROCESS
        self._options = StagingOptions(is_cuda, is_shared, True, is_cuda)

    def save(self, state: State, path: Path) -> Figures:
        # torch 2.11 empties the stager that it was given when its save has ended: it is made anew.
        inner = getattr(self._stager, "_state_dict_stager", None)
        if not getattr(inner, "_deepcopy_dispatch", None):
            if self._stager is not None:
                self._stager.close()
            self._stager = DefaultStager(self._options)
        return _async_save(
            state, path, self.group,
            async_stager=self._stager, async_checkpointer_type=self.kind, **self._writing(path),
        )  # fmt: skip

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
        super().close()


class DcpProcess(DcpPinned):
    name = "dcp.async_save, process"
    note = (
        "AsyncCheckpointerType.PROCESS: a DefaultStager with pinned shared memory, and a process that plans "
        "and writes; FileSystemWriter with a thread for each worker, cached plans"
    )
    kind = AsyncCheckpointerType.PROCESS

    def close(self) -> None:
        # It ends with the object, which torch keeps until the interpreter ends.
        _async_process_executor._CHECKPOINT_PROCESS = None  # noqa: SLF001
        super().close()


class TorchCheckpointing(Candidate):
    name = "torch_checkpointing"
    needs = "torch_checkpointing"
    note = (
        "pinned shared memory, a staging thread, a process that writes; an item, hence a file and a thread, "
        "for each worker; calls no fsync: done for it, and counts; its O_DIRECT fails on ext4: off"
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        package = import_module("torch_checkpointing")
        storage = import_module("torch_checkpointing.storage.filesystem")
        writer = package.CheckpointWriterConfig(file_write_max_threads=context.workers)
        self._manager = package.CheckpointManager(
            package.CheckpointManager.Config(
                save=package.AsyncCheckpointSaverConfig(writer_config=writer),
                storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def save(self, state: State, path: Path) -> Figures:
        items = self._items(state)
        started = time.perf_counter()
        future = self._manager.save(str(path), items)
        returned_s = time.perf_counter() - started
        # What its documentation puts around `optimizer.step()`.
        with self._manager.lock():
            staged_s = time.perf_counter() - started
        future.result(timeout=_LIMIT_S)
        # The first rank gives the directory its name when all have written.
        distributed.barrier(self.group)
        sync_tree(path, self.context)
        return _figures(started, returned_s, staged_s)

    def load(self, state: State, path: Path) -> None:
        self._manager.load(str(path), into=self._items(state))

    def close(self) -> None:
        self._manager.close()
        super().close()

    def _items(self, state: State) -> dict[str, State]:
        """Return the tensors in groups of about equal bytes: one thread writes an item, to one file."""
        items: list[State] = [{} for _ in range(self.context.workers)]
        nbytes = [0] * len(items)
        for name, tensor in sorted(local_state(state).items(), key=lambda each: -each[1].nbytes):
            index = nbytes.index(min(nbytes))
            items[index][name] = tensor
            nbytes[index] += tensor.nbytes
        return {f"item{index}": item for index, item in enumerate(items) if item}


class _Resiliency(Candidate):
    """nvidia-resiliency-ext as its documentation and Megatron drive it."""

    needs = "nvidia_resiliency_ext"
    needs_cuda = _FLAGS_ON_GPU
    is_shared: ClassVar[bool]
    """Copy to shared memory in the trainer; otherwise the worker copies, through CUDA IPC."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        package = "nvidia_resiliency_ext.checkpointing.async_ckpt"
        self._core = import_module(f"{package}.core")
        self._saver = import_module(f"{package}.state_dict_saver")
        self._queue = self._core.AsyncCallsQueue(persistent=True, cpu_shm_mode=self.is_shared)
        self._writer = partial(
            import_module(f"{package}.filesystem_async").FileSystemWriterAsync,
            thread_count=context.workers,
            use_cached_data_structure=True,
            use_cpu_shm_for_gpu_tensors=self.is_shared,
        )
        self._cache = self._saver.CheckpointMetadataCache()

    def save(self, state: State, path: Path) -> Figures:
        started = time.perf_counter()
        plan = self._saver.save_state_dict_async_plan(
            state, self._writer(str(path)), enable_cache=True, metadata_cache=self._cache
        )
        function, preload, arguments = plan[0].get_save_function_and_args()
        finalize = partial(self._saver.save_state_dict_async_finalize, *plan)
        request = self._core.AsyncRequest(function, arguments, [finalize], {}, preload)
        staged_s = _await_queue(self._queue, request, started)
        sync_folder(path)
        return _figures(started, staged_s, staged_s)

    def load(self, state: State, path: Path) -> None:
        load_dcp(state, path, self.group)

    def close(self) -> None:
        self._queue.close()
        super().close()


class ResiliencyIpc(_Resiliency):
    name = "nvidia-resiliency-ext, CUDA IPC"
    note = "a persistent worker that copies from the GPU; a thread for each worker; plans and handles cached"
    is_shared = False


class ResiliencyShm(_Resiliency):
    name = "nvidia-resiliency-ext, shm"
    note = "the trainer copies to shared memory; a persistent worker, a thread for each worker; plans cached"
    is_shared = True


class MegatronCore(Candidate):
    name = "Megatron-Core"
    needs = "megatron.core"
    needs_cuda = _FLAGS_ON_GPU
    note = (
        "dist_checkpointing, torch_dist, async_strategy=nvrx; FullyParallelSaveStrategyWrapper; a thread for "
        "each worker; structure assumed constant: distribution and plans cached, integrity validated once"
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        package = "megatron.core.dist_checkpointing"
        self._package = import_module(package)
        torch_dist = import_module(f"{package}.strategies.torch")
        parallel = import_module(f"{package}.strategies.fully_parallel")
        self._strategy = parallel.FullyParallelSaveStrategyWrapper(
            torch_dist.TorchDistSaveShardedStrategy(
                "torch_dist", 1, thread_count=context.workers, cached_metadata=True
            ),
            do_cache_distribution=True,
        )
        _, queue = torch_dist.get_async_strategy("nvrx", "AsyncCallsQueue")
        self._queue = queue(persistent=True)
        self._is_validated = False

    @classmethod
    def unfit(cls, context: Context) -> str:
        if importlib.util.find_spec("nvidia_resiliency_ext") is None:
            return "saves in the background with nvidia_resiliency_ext, which is not installed"
        major, minor = importlib.metadata.version("megatron-core").split(".")[:2]
        return "" if (int(major), int(minor)) >= (0, 19) else "needs Megatron-Core 0.19 or newer"

    def save(self, state: State, path: Path) -> Figures:
        started = time.perf_counter()
        # It wants to be given one.
        path.mkdir(exist_ok=True)
        request = self._package.save(
            self._sharded(state),
            str(path),
            self._strategy,
            validate_access_integrity=not self._is_validated,
            async_sharded_save=True,
        )
        self._is_validated = True
        staged_s = _await_queue(self._queue, request, started)
        sync_tree(path, self.context)
        return _figures(started, staged_s, staged_s)

    def load(self, state: State, path: Path) -> None:
        found = self._package.load(self._sharded(state), str(path), validate_access_integrity=False)
        fill(state, found)

    def close(self) -> None:
        self._queue.close()
        super().close()

    def _sharded(self, state: State) -> dict[str, Any]:
        """Return its own sharded tensors; what has no dimension it keeps as it is, as Megatron does."""
        rank, world = self.context.rank, self.context.world
        sharded: dict[str, Any] = {}
        for name, tensor in state.items():
            own = local_tensor(tensor)
            dims = shard_dims(tensor)
            if own.ndim == 0:
                sharded[name] = own
            else:
                sharded[name] = self._package.ShardedTensor.from_rank_offsets(
                    name, own, *((dim, rank, world) for dim in dims), replica_id=0 if dims else rank
                )
        return sharded


class TorchSave(Candidate):
    name = "torch.save"
    note = (
        "one file for each rank, with its local tensors; pinned copies from the GPU; calls no fsync: done "
        "for it, and counts"
    )

    def save(self, state: State, path: Path) -> Figures:
        config: Any = import_module("torch.utils.serialization").config
        started = time.perf_counter()
        path.mkdir(exist_ok=True)
        with (
            config.patch("save.use_pinned_memory_for_d2h", self.context.device == "cuda"),
            (path / f"{self.context.rank}.pt").open("wb") as file,
        ):
            torch.save(local_state(state), file)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path)
        seconds = time.perf_counter() - started
        return _figures(started, seconds, seconds)

    def load(self, state: State, path: Path) -> None:
        fill(state, torch.load(path / f"{self.context.rank}.pt", map_location="cpu", weights_only=True))


class Safetensors(Candidate):
    name = "safetensors"
    needs = "safetensors"
    note = (
        "save_file, one file for each rank, with its local tensors; calls no fsync: done for it, and counts"
    )

    def save(self, state: State, path: Path) -> Figures:
        package = import_module("safetensors.torch")
        started = time.perf_counter()
        path.mkdir(exist_ok=True)
        file = path / f"{self.context.rank}.safetensors"
        package.save_file({name: own.contiguous() for name, own in local_state(state).items()}, file)
        _sync(file)
        sync_folder(path)
        seconds = time.perf_counter() - started
        return _figures(started, seconds, seconds)

    def load(self, state: State, path: Path) -> None:
        package = import_module("safetensors.torch")
        device = torch.cuda.current_device() if self.context.device == "cuda" else "cpu"
        fill(state, package.load_file(path / f"{self.context.rank}.safetensors", device=device))


class TorchSnapshot(Candidate):
    name = "TorchSnapshot"
    needs = "torchsnapshot"
    note = (
        "Snapshot.async_take of the local tensors of each rank, its memory budget that of the others; bf16 "
        "as int16, for it fails on odd numbers of bf16; calls no fsync: done for it, and counts"
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # It has no other way to be told.
        os.environ["TORCHSNAPSHOT_PER_RANK_MEMORY_BUDGET_BYTES"] = str(context.host_memory)
        self._package = import_module("torchsnapshot")

    def save(self, state: State, path: Path) -> Figures:
        started = time.perf_counter()
        pending = self._package.Snapshot.async_take(str(path), self._items(state), pg=self.group)
        # It returns when nothing of the state is to be read any more.
        staged_s = time.perf_counter() - started
        pending.wait()
        distributed.barrier(self.group)
        sync_tree(path, self.context)
        return _figures(started, staged_s, staged_s)

    def load(self, state: State, path: Path) -> None:
        self._package.Snapshot(str(path), pg=self.group).restore(self._items(state))

    def _items(self, state: State) -> dict[str, Any]:
        views = {
            name: own.view(torch.int16) if own.dtype is torch.bfloat16 else own
            for name, own in local_state(state).items()
        }
        return {"state": self._package.StateDict(**views)}


class DeepSpeed(Candidate):
    name = "DeepSpeed"
    needs = "deepspeed"
    needs_cuda = "FastFileWriter asks for an extension that does not exist for CPUs"
    note = (
        "torch.save through FastFileWriter, one file for each rank with its local tensors: libaio, O_DIRECT, "
        "its default double buffer of 64 MiB, a thread for each worker; syncs its files"
    )
    _BUFFER_BYTES = 64 << 20
    _BLOCK_BYTES = 1 << 20
    _QUEUE_DEPTH = 32

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # Its extensions are compiled by what stands beside the interpreter, be that on the path or not.
        os.environ["PATH"] = _path_with_interpreter()
        self._io = import_module("deepspeed.io")
        builder = import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
        self._handle = builder.load(verbose=False).aio_handle(
            block_size=self._BLOCK_BYTES,
            queue_depth=self._QUEUE_DEPTH,
            single_submit=False,
            overlap_events=True,
            intra_op_parallelism=context.workers,
        )
        self._buffer = self._handle.new_cpu_locked_tensor(
            self._BUFFER_BYTES, torch.empty(0, dtype=torch.uint8)
        )

    @classmethod
    def unfit(cls, context: Context) -> str:
        # It compiles when first used, with libaio-dev and ninja: minutes, which no part of a run has.
        extension = import_module("torch.utils.cpp_extension")
        root = os.environ.get("TORCH_EXTENSIONS_DIR") or extension.get_default_build_root()
        found = [*Path(root).glob("async_io/*.so"), *Path(root).glob("*/async_io/*.so")]
        return "" if found else "its extension for libaio is not compiled: see benchmarks/peers.txt"

    def save(self, state: State, path: Path) -> Figures:
        started = time.perf_counter()
        path.mkdir(exist_ok=True)
        config = self._io.FastFileWriterConfig(dnvme_handle=self._handle, pinned_tensor=self._buffer)
        writer = self._io.FastFileWriter(str(path / f"{self.context.rank}.pt"), config)
        torch.save(local_state(state), writer)
        writer.close()
        sync_folder(path)
        seconds = time.perf_counter() - started
        return _figures(started, seconds, seconds)

    def load(self, state: State, path: Path) -> None:
        fill(state, torch.load(path / f"{self.context.rank}.pt", map_location="cpu", weights_only=True))

    def close(self) -> None:
        self._handle.free_cpu_locked_tensor(self._buffer)
        super().close()


class S3TorchConnector(Candidate):
    name = "s3torchconnector"
    needs = "s3torchconnector"
    note = "an S3StorageWriter for torch's dcp.save: compared with uploads in benchmarks/object_store.py"

    @classmethod
    def unfit(cls, context: Context) -> str:
        return "writes to S3 only: see benchmarks/object_store.py"

    def save(self, state: State, path: Path) -> Figures:
        raise NotImplementedError(self.unfit(self.context))

    def load(self, state: State, path: Path) -> None:
        raise NotImplementedError(self.unfit(self.context))


class Orbax(Candidate):
    name = "Orbax"
    needs = "orbax.checkpoint"
    note = (
        "AsyncCheckpointer with OCDBT, uncompressed, on NumPy views of the same bytes; it saves JAX's "
        "arrays: here only on CPUs, with one rank; calls no fsync: done for it, and counts"
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # JAX would take the memory of a GPU that it has no part in here.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        self._package = import_module("orbax.checkpoint")
        self._checkpointer = self._package.AsyncCheckpointer(
            self._package.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)
        )

    @classmethod
    def unfit(cls, context: Context) -> str:
        is_fit = context.device == "cpu" and context.world == 1
        return "" if is_fit else "saves no torch tensors of GPUs or ranks"

    def save(self, state: State, path: Path) -> Figures:
        arrays = self._package.args.PyTreeSave({name: _array(own) for name, own in state.items()})
        started = time.perf_counter()
        self._checkpointer.save(path.absolute(), args=arrays)
        # It copies what is NumPy's before it returns.
        staged_s = time.perf_counter() - started
        self._checkpointer.wait_until_finished()
        sync_tree(path, self.context)
        return _figures(started, staged_s, staged_s)

    def load(self, state: State, path: Path) -> None:
        arrays = {name: _array(own) for name, own in state.items()}
        found = self._checkpointer.restore(path.absolute(), args=self._package.args.PyTreeRestore(arrays))
        for name, array in arrays.items():
            array[...] = found[name]

    def close(self) -> None:
        self._checkpointer.close()
        super().close()


def _array(tensor: torch.Tensor) -> Any:
    """Return a view of a tensor for NumPy, which does not know bf16."""
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _path_with_interpreter() -> str:
    return f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"


def _await_queue(queue: Any, request: Any, started: float) -> float:
    """Have an `AsyncCallsQueue` save, and wait until all ranks have.

    Returns:
        Seconds until the state was copied.
    """
    queue.schedule_async_request(request)
    # That returns when the copy has been made.
    staged_s = time.perf_counter() - started
    # What ranks tell each other when they are done waits for the last of them.
    while not queue.maybe_finalize_async_calls(blocking=False, no_dist=True):
        time.sleep(_QUEUE_POLL_S)
        if time.perf_counter() - started > _LIMIT_S:
            raise TimeoutError("a worker of nvidia-resiliency-ext did not finish")
    return staged_s


def load_dcp(state: State, path: Path, group: Any) -> None:
    """Load what torch's reader reads."""
    reader = FileSystemReader(path)
    state_dict_loader.load(dict(state), storage_reader=reader, process_group=group)


def _async_save(
    state: State, path: Path, group: Any, *, syncs_folder: bool = True, **settings: Any
) -> Figures:
    """Save with `dcp.async_save`, and sync the directory, whose files torch's writer has synced."""
    started = time.perf_counter()
    response = state_dict_saver.async_save(state, checkpoint_id=path, process_group=group, **settings)
    returned_s = staged_s = time.perf_counter() - started
    upload: Future[Any]
    if isinstance(response, state_dict_saver.AsyncSaveResponse):
        response.staging_completion.result(_LIMIT_S)
        staged_s = time.perf_counter() - started
        upload = response.upload_completion
    else:
        upload = response
    upload.result(_LIMIT_S)
    if syncs_folder:
        sync_folder(path)
    return _figures(started, returned_s, staged_s)


def _figures(started: float, returned_s: float, staged_s: float) -> Figures:
    return {"returned_s": returned_s, "staged_s": staged_s, "total_s": time.perf_counter() - started}


def local_state(state: State) -> State:
    """Return what this rank has of each tensor."""
    return {name: local_tensor(tensor) for name, tensor in state.items()}


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def shard_dims(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions that ranks cut."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return [placement.dim for placement in placements if isinstance(placement, Shard)]


def fill(state: State, found: State) -> None:
    """Copy what was loaded, this rank's part of each tensor, into `state`, unless it is there already."""
    for name, tensor in local_state(state).items():
        if tensor.data_ptr() != found[name].data_ptr():
            tensor.copy_(found[name])


def sync_tree(path: Path, context: Context) -> None:
    """Make files below a directory durable, and the directories themselves: each rank its share of them."""
    entries = sorted(path.rglob("*"))[context.rank :: context.world]
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        list(pool.map(_sync, entries))
    sync_folder(path)


def sync_folder(path: Path) -> None:
    """Make the names in a directory durable, and its own."""
    for folder in (path, path.parent):
        _sync(folder)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_tree(path: Path) -> None:
    """Remove a checkpoint, a link to one, or what is left of one; files at the same time.

    In memory, removing a file takes as long as writing it.
    """
    target = path.resolve()
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        list(pool.map(lambda file: file.unlink(missing_ok=True), _files_of(target)))
    if target.is_dir():
        shutil.rmtree(target, ignore_errors=True)
    if path.is_symlink():
        path.unlink()


def _files_of(path: Path) -> Iterable[Path]:
    return [file for file in path.rglob("*") if not file.is_dir()] if path.is_dir() else [path]


CANDIDATES: dict[str, type[Candidate]] = {
    candidate.name: candidate
    for candidate in (
        Distckpt,
        DistckptWriter,
        DcpSave,
        DcpAsync,
        DcpPinned,
        DcpProcess,
        TorchCheckpointing,
        ResiliencyIpc,
        ResiliencyShm,
        MegatronCore,
        TorchSave,
        Safetensors,
        TorchSnapshot,
        DeepSpeed,
        S3TorchConnector,
        Orbax,
    )
}


def missing(name: str, context: Context) -> str:
    """Return why a candidate cannot run here, or nothing."""
    candidate = CANDIDATES[name]
    if candidate.needs_cuda and context.device != "cuda":
        return f"CUDA only: {candidate.needs_cuda}"
    try:
        is_installed = not candidate.needs or importlib.util.find_spec(candidate.needs) is not None
    except ModuleNotFoundError:
        # Not even the package around it.
        is_installed = False
    return candidate.unfit(context) if is_installed else f"{candidate.needs} is not installed"
