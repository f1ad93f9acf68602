"""StorageReader: loads what distckpt, or stock PyTorch, wrote; verified where there are checksums.

Threads: one load at a time per object.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import re
import uuid
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from distckpt.config import CheckpointConfig
from distckpt.errors import CheckpointError, ConfigError, IntegrityError, WriteError
from distckpt.formats import format_of
from distckpt.integrity import Integrity, load_integrity
from distckpt.manifest import metadata_name
from distckpt.metadata import unpickle_metadata
from distckpt.staging import is_raw
from distckpt.storage import Storage, can_fill, fill, open_storage, reopen_storage

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping
    from concurrent.futures import Future as ThreadFuture

    from torch.distributed.checkpoint.filesystem import _StorageInfo

_LOG = logging.getLogger(__name__)
_SETTLE_ATTEMPTS = 3
_MOST_READERS = 4
_MOST_REQUESTS = 8
"""Where what takes time is not this machine, but a server and the way to it."""
_RANGE_BYTES = 16 << 20
"""There, a larger item is read in ranges of this size, at the same time."""
_RUN_BYTES = 8 << 20
"""Small items that lie side by side are read at once, up to so many bytes."""
_GAP_BYTES = 4096
_AHEAD_BYTES = 256 << 20
"""Read, or being read, beside the item that is being loaded."""
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_Path = str | os.PathLike[str]


def _handing_over(items: list[memoryview]) -> Iterator[memoryview]:
    """Yield `items` in order, and keep none that was yielded."""
    items.reverse()
    while items:
        yield items.pop()


def _runs(infos: list[_StorageInfo]) -> Iterator[list[_StorageInfo]]:
    """Yield `infos`, which are in order, in groups that one read can get."""
    run: list[_StorageInfo] = []
    for info in infos:
        if run:
            end = run[-1].offset + run[-1].length
            fits = info.offset + info.length - run[0].offset <= _RUN_BYTES
            if (
                info.relative_path != run[0].relative_path
                or not 0 <= info.offset - end <= _GAP_BYTES
                or not fits
            ):
                yield run
                run = []
        run.append(info)
    if run:
        yield run


def _is_remote(storage: Storage) -> bool:
    return storage.is_stream or storage.part_bytes(0) > 0


def _read_range(storage: Storage, file: str, start: int, nbytes: int, timeout_s: float) -> memoryview | None:
    """Return bytes of a file, as `Storage.read`; many of a remote one by several requests at once."""
    is_one = nbytes <= _RANGE_BYTES or not _is_remote(storage)
    whole = None if is_one and not can_fill(storage) else _new_memory(nbytes)
    if whole is None:
        data = storage.read(file, start, nbytes)
        return None if data is None else memoryview(data)
    if is_one:
        found = fill(storage, file, start, whole)
        return None if found is None else whole[:found]

    def read(offset: int) -> bool:
        # One thread at a time for each object; opening one asks nothing of the storage.
        own = reopen_storage(storage.spec, timeout_s=timeout_s)
        part = whole[offset : offset + _RANGE_BYTES]
        return fill(own, file, start + offset, part) == len(part)

    offsets = range(0, nbytes, _RANGE_BYTES)
    with ThreadPoolExecutor(min(_MOST_REQUESTS, len(offsets)), "distckpt-range") as pool:
        if all(list(pool.map(read, offsets))):
            return whole
    # Where it ends, or that it is not there, one request tells.
    found = fill(storage, file, start, whole)
    return None if found is None else whole[:found]


def _new_memory(nbytes: int) -> memoryview | None:
    """Return memory; None where there cannot be so much: the storage knows how much there is to read."""
    try:
        # Not zeroed, and in huge pages: a bytearray costs as much processor time as reading into it.
        return np.empty(nbytes, np.uint8).data
    except (MemoryError, OverflowError, ValueError):
        return None


def _copy_more(target: torch.Tensor, part: torch.Tensor) -> None:
    """Copy `part` into what is more than its memory, such as a sparse or a quantized tensor.

    Not by way of `detach`: the tensor that is asked to copy gets other indices, or another scale, and no
    alias of it does.
    """
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        # Else torch copies only from one that has as many sparse dimensions, and in these layouts as many
        # elements, in blocks of the same size.
        if target.is_sparse and part.is_sparse:
            target.sparse_resize_and_clear_(part.size(), part.sparse_dim(), part.dense_dim())
        elif target.layout is part.layout and target.layout in _COMPRESSED:
            target.resize_as_sparse_(part)
        target.copy_(part)


def _shares_all(other: torch.Tensor, target: torch.Tensor) -> bool:
    """Say whether a tensor is what `target` was copied to be, or only has its memory."""
    if other is target:
        return True
    if target.is_quantized:
        return _quantizer(other) == _quantizer(target)
    # Of other layouts, members are shared.
    return not target.is_sparse


def _quantizer(tensor: torch.Tensor) -> tuple[Any, ...]:
    scheme = tensor.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return scheme, tensor.q_scale(), tensor.q_zero_point()
    scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return scheme, scales.tolist(), zero_points.tolist(), tensor.q_per_channel_axis()


class _DamagedMetadata(Metadata):
    """Raises an error wherever it is used."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__({})
        self.error = error

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict_metadata", "planner_data", "storage_data"):
            raise self.error
        return super().__getattribute__(name)


class StorageReader(TorchStorageReader):
    """Reads checkpoints for `dcp.load`, and compares what it reads with the checksums of the commit.

    Args:
        path: Checkpoint directory, or a URL (docs/storages.md); may be left to the `checkpoint_id` of each
            load.
        config: Settings; default: `CheckpointConfig()`.
        storage_options: Passed to fsspec as they are.
        verify: Whether to compare checksums. A checkpoint of another tool has none: that is said in the log.
        **settings: Fields of `CheckpointConfig`, which override `config`.

    Raises:
        ConfigError: A setting, the URL or a storage option cannot be honoured.
    """

    def __init__(
        self,
        path: _Path | None = None,
        config: CheckpointConfig | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        verify: bool = True,
        **settings: Any,
    ) -> None:
        self._config = CheckpointConfig.build(config, settings)
        self._storage_options = dict(storage_options or {})
        self._path = path
        self._verify = verify
        if path is not None:
            open_storage(path, self._storage_options)
        self._forget()

    def _forget(self) -> None:
        self._metadata: Metadata | None = None
        self._integrity: Integrity | None = None
        self._load_id = uuid.uuid4().hex

    @property
    def checkpoint_id(self) -> _Path | None:
        """The checkpoint's directory, as it was given."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        """Say whether this reader can read there."""
        try:
            open_storage(checkpoint_id)
        except ConfigError:
            return False
        return True

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        """Begin a load.

        Args:
            checkpoint_id: Its directory; default: that of the last load.
        """
        if checkpoint_id is not None:
            self._path = checkpoint_id
        self._forget()

    @property
    def save_id(self) -> str | None:
        """Of the save whose metadata was read last; None if that is of another tool, or damaged."""
        try:
            return None if self._metadata is None else getattr(self._metadata.storage_meta, "save_id", None)
        except CheckpointError:
            return None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata.

        Args:
            *args: Ignored, as in torch.
            **kwargs: `rank`, for the metadata of one rank that was saved without collectives.

        Raises:
            CheckpointError: There is no complete checkpoint. Of one that is damaged, or cannot be read, the
                metadata raises an `IntegrityError` once it is used.
        """
        storage = self._storage()
        name = metadata_name(kwargs.get("rank"))
        # torch does not reset a reader between two loads from one path.
        self._integrity = None
        raw, damage = self._read_verified(storage, name)
        try:
            if damage is not None:
                raise damage
            metadata = unpickle_metadata(
                raw, f"{storage.url}/{name}", weights_only=self._config.ckpt_weights_only
            )
        except CheckpointError as error:
            # torch takes an error here for a missing `.metadata`, so it is raised by whoever looks into it.
            metadata = _DamagedMetadata(error)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self._load_id
        self._metadata = metadata
        return metadata

    def _read_verified(self, storage: Storage, name: str) -> tuple[bytes, CheckpointError | None]:
        """Return the bytes of the metadata, and what is found damaged when they are compared with the commit.

        Raises:
            CheckpointError: There are none.
        """
        try:
            data = storage.read(name)
        except WriteError as error:
            return b"", error
        for attempt in range(_SETTLE_ATTEMPTS):
            if data is None:
                raise CheckpointError(f"{storage.url} holds no complete checkpoint: {name} is missing")
            if not self._verify:
                break
            try:
                self._integrity = load_integrity(storage, bytes(data), name)
            except CheckpointError as error:
                # A save may have replaced it, and removed its record, since it was read.
                known, data = data, storage.read(name)
                if data == known or attempt + 1 == _SETTLE_ATTEMPTS:
                    return bytes(data or b""), error
            else:
                if self._integrity is None:
                    _LOG.warning(
                        "%s has no commit record of distckpt: it is loaded without verification", storage.url
                    )
                break
        return bytes(data or b""), None

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the metadata that the load will use.

        Args:
            metadata: The metadata.
            is_coordinator: Ignored: every rank reads for itself.
            *args: Ignored, as in torch.
            **kwargs: Ignored.

        Raises:
            CheckpointError: The metadata says nothing of files.
            IntegrityError: A record of the commit is damaged.
        """
        if metadata.storage_data is None:
            raise CheckpointError(f"the metadata of {self._path} does not say where its items lie")
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return `plan` unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return `plans` unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of `plan`, each once, in the order in which they lie on storage.

        Args:
            plan: What this rank reads.
            planner: Says where it goes.

        Returns:
            A future that is done.

        Raises:
            IntegrityError: An item is damaged or missing; nothing of it was loaded.
        """
        assert self._metadata is not None
        storage = self._storage()
        requests: dict[tuple[str, int], list[ReadItem]] = {}
        places: dict[tuple[str, int], _StorageInfo] = {}
        for request in plan.items:
            info = self._metadata.storage_data[request.storage_index]
            key = (info.relative_path, info.offset)
            requests.setdefault(key, []).append(request)
            places[key] = info
        infos = [places[key] for key in sorted(requests)]
        with contextlib.closing(self._read_ahead(storage, infos, requests)) as items:
            for key in sorted(requests):
                # Named by nobody here: the item before would stay in memory beside the next.
                self._deliver(places[key], next(items), requests[key], planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_ahead(
        self, storage: Storage, infos: list[_StorageInfo], requests: Mapping[tuple[str, int], list[ReadItem]]
    ) -> Generator[memoryview, None, None]:
        """Yield the bytes of items, in order, while threads read and compare those that come next."""

        def read(run: list[_StorageInfo]) -> list[memoryview]:
            # One thread at a time for each object; opening one asks nothing of the storage.
            own = reopen_storage(storage.spec, timeout_s=self._timeout_s)
            return self._read_run(own, run, requests)

        runs = deque(_runs(infos))
        num_threads = min(_MOST_READERS, len(os.sched_getaffinity(0)), len(runs))
        if _is_remote(storage):
            num_threads = min(_MOST_READERS, len(runs))
        if num_threads < 2:
            for run in runs:
                yield from _handing_over(read(run))
            return
        with ThreadPoolExecutor(num_threads, "distckpt-read") as pool:
            reading: deque[tuple[int, ThreadFuture[list[memoryview]]]] = deque()
            ahead_bytes = 0
            while runs or reading:
                while runs:
                    nbytes = sum(info.length for info in runs[0])
                    if reading and ahead_bytes + nbytes > _AHEAD_BYTES:
                        break
                    reading.append((nbytes, pool.submit(read, runs.popleft())))
                    ahead_bytes += nbytes
                nbytes, next_read = reading.popleft()
                try:
                    items = next_read.result()
                    del next_read
                    yield from _handing_over(items)
                except BaseException:
                    runs.clear()
                    pool.shutdown(cancel_futures=True)
                    raise
                ahead_bytes -= nbytes

    def _read_run(
        self,
        storage: Storage,
        run: list[_StorageInfo],
        requests: Mapping[tuple[str, int], list[ReadItem]],
    ) -> list[memoryview]:
        """Return the bytes of items that lie one after the other, compared with the commit.

        All of them are views of what was read at once, which is there until the last of them is dropped.

        Raises:
            CheckpointError: An item was written through an extension.
            IntegrityError: One is damaged or missing.
            WriteError: The storage refuses.
        """
        file, start, end = run[0].relative_path, run[0].offset, run[-1].offset + run[-1].length
        whole = _read_range(storage, file, start, end - start, self._timeout_s)
        items: list[memoryview] = []
        read = memoryview(b"") if whole is None else whole
        for info in run:
            fqn = requests[file, info.offset][0].storage_index.fqn
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError(
                    f"{storage.url}/{file}: {fqn!r} was written through the extensions "
                    f"{info.transform_descriptors}, which are not undone here: use torch's FileSystemReader"
                )
            data = read[info.offset - start : info.offset - start + info.length]
            if whole is None or len(data) != info.length:
                raise IntegrityError(
                    f"{storage.url}/{file}: {fqn!r} at byte {info.offset} has "
                    f"{len(data)} of {info.length} bytes",
                    file=file, item=fqn, expected=info.length, found=len(data),
                )  # fmt: skip
            if self._integrity is not None:
                self._integrity.check(file, info.offset, data, fqn)
            items.append(data)
        return items

    def _deliver(
        self, info: _StorageInfo, data: memoryview, requests: list[ReadItem], planner: LoadPlanner
    ) -> None:
        """Hand the bytes of an item to the planner.

        Raises:
            CheckpointError: It does not fit the state.
        """
        fqn = requests[0].storage_index.fqn
        for request in requests:
            if request.type is LoadItemType.BYTE_IO:
                if self._config.ckpt_weights_only:
                    # The planner lets torch.load run whatever it finds.
                    with self._loading(info, fqn):
                        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
                planner.load_bytes(request, io.BytesIO(data))
        tensors = [request for request in requests if request.type is not LoadItemType.BYTE_IO]
        if not tensors:
            return
        index = tensors[0].storage_index
        assert self._metadata is not None
        entry = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        chunk = next(chunk for chunk in entry.chunks if chunk.offsets == index.offset)
        with self._loading(info, fqn):
            source = format_of(info.relative_path).decode(
                data, entry.properties.dtype, chunk.sizes, weights_only=self._config.ckpt_weights_only
            )
        for request in tensors:
            planner.commit_tensor(request, self._copy(source, request, planner))

    def _copy(self, source: torch.Tensor, request: ReadItem, planner: LoadPlanner) -> torch.Tensor:
        """Copy what is requested of an item to where the planner wants it; returns that, detached.

        Raises:
            CheckpointError: It does not fit the state.
        """
        fqn = request.storage_index.fqn
        try:
            part = narrow_tensor_by_index(source, request.storage_offsets, request.lengths)
            with torch.no_grad():
                # Else a DTensor hands out a view of what it holds.
                target = planner.resolve_tensor(request)
            if target.size() != part.size():
                raise CheckpointError(
                    f"{fqn!r}: the state has {tuple(target.size())}, the checkpoint {tuple(part.size())}"
                )
            if is_raw(target):
                target = target.detach()
                target.copy_(part)
                return target
            _copy_more(target, part)
            with torch.no_grad():
                has_reached = _shares_all(planner.resolve_tensor(request), target)
        except RuntimeError as error:
            # torch goes on with a page about its dispatcher.
            text = str(error).partition("\n")[0].partition(". ")[0]
            raise CheckpointError(
                f"{fqn!r}: what the checkpoint has, of {source.dtype} and {source.layout}, cannot be copied "
                f"into the state: {text}"
            ) from error
        if not has_reached:
            raise CheckpointError(
                f"{fqn!r}: the state takes it in parts, or through a view, which cannot have indices, or a "
                f"scale and a zero point, of their own: load it into a whole tensor"
            )
        return target.detach()

    @contextlib.contextmanager
    def _loading(self, info: _StorageInfo, fqn: str) -> Iterator[None]:
        """Say what could not be loaded.

        Raises:
            CheckpointError: Loading it can run code, and `ckpt_weights_only` is set.
            IntegrityError: It is not what torch.save writes.
        """
        where = f"{self._path}/{info.relative_path}: {fqn!r} at byte {info.offset}"
        try:
            yield
        except pickle.UnpicklingError as error:
            # torch's own text is a page long; what it refuses is named in one of its lines.
            names = re.search(r"GLOBAL (\S+)|(<class '[^']+'>)", str(error))
            what = f"names {names[1] or names[2]}" if names else "is more than tensors and plain values"
            raise CheckpointError(
                f"{where} {what}, and loading it can run code: torch.serialization.add_safe_globals admits "
                f"it, and ckpt_weights_only=False everything, for a checkpoint that you trust"
            ) from None
        except Exception as error:
            raise IntegrityError(
                f"{where} cannot be loaded: {type(error).__name__}: {error}",
                file=info.relative_path,
                item=fqn,
            ) from error

    @property
    def _timeout_s(self) -> float:
        return self._config.distributed_timeout_minutes * 60

    def _storage(self) -> Storage:
        if self._path is None:
            raise ConfigError(
                "no checkpoint directory: give StorageReader a path or the load a checkpoint_id"
            )
        return open_storage(self._path, self._storage_options, timeout_s=self._timeout_s)
