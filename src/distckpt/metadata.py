"""What torch calls the metadata of a checkpoint, and the manifest that belongs to a plan.

Invariants:
    * Metadata that is pickled here is read by stock PyTorch, and equal parts of it are one object each.
    * A chunk that nobody wrote, or that two ranks wrote, is never published.
"""

from __future__ import annotations

import copyreg
import enum
import io
import pickle
from dataclasses import replace
from pathlib import PurePath
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from distckpt.errors import CheckpointError, CommitError, IntegrityError
from distckpt.formats import Entry, Frame
from distckpt.geometry import misfit
from distckpt.manifest import ItemTable, Manifest, plan_digest, write_manifest
from distckpt.staging import Item

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

    from distckpt.engine import Engine, Written
    from distckpt.formats import Arrays
    from distckpt.manifest import ManifestRef
    from distckpt.storage import Storage

_NOT_THERE = object()
_HIDDEN = ("__bases__", "__name__", "__qualname__")
"""Attributes of classes that `vars` does not show."""
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
_FREE_GLOBALS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    # Megatron-Core keeps the plans of all ranks there.
    *(
        ("torch.distributed.checkpoint.planner", name)
        for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    ),
    ("collections", "OrderedDict"),
    ("_codecs", "encode"),
    *(("builtins", name) for name in ("set", "frozenset", "complex", "bytearray", "slice", "range")),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in _PATHS),
}
"""What a pickled Metadata names beside torch's classes of metadata; none of it does anything when called."""
_NEW = copyreg.__newobj__  # type: ignore[attr-defined]
DCP_VERSION = "1.0.0"
"""Source: CURRENT_DCP_VERSION in torch/distributed/checkpoint/filesystem.py, 2.9 to 2.14."""


def merge_arrays(told: Sequence[Arrays]) -> Arrays:
    """Return what all ranks say of the tensors with a grid.

    Raises:
        CommitError: Two of them say different things of one.
    """
    merged: Arrays = {}
    for rank, arrays in enumerate(told):
        for fqn, array in arrays.items():
            if merged.setdefault(fqn, array) != array:
                raise CommitError(
                    f"not published: {fqn!r} is cut into chunks of {tuple(array[3])} on rank {rank}, of "
                    f"{tuple(merged[fqn][3])} on ranks before it: uneven boxes of what is no DTensor have no "
                    f"common grid; save as torch_dist, and convert"
                )
    return merged


def manifest_of(
    save_id: str,
    rank: int,
    file_format: str,
    write_items: list[WriteItem],
    written: Written,
    arrays: Arrays,
) -> Manifest:
    """Return the manifest of a rank that wrote `write_items`."""
    fqns = [item.index.fqn for item in write_items]
    item_files, offsets = written.image.places()
    return Manifest(
        save_id=save_id,
        rank=rank,
        format=file_format,
        plan=plan_digest(
            fqns,
            [
                (item.index.offset, data and (data.chunk.sizes, data.properties.dtype))
                for item in write_items
                for data in [item.tensor_data]
            ],
        ),
        files=written.files,
        checksums=written.checksums,
        headers=written.headers,
        arrays=arrays,
        items=ItemTable(
            fqns=fqns,
            chunks=[item.index.offset for item in write_items],
            item_files=item_files,
            offsets=offsets,
            sizes=written.image.sizes,
        ),
    )


def write_documents(
    engine: Engine,
    storage: Storage,
    save_id: str,
    rank: int,
    documents: Mapping[str, bytes],
    check: Callable[[], None] | None = None,
) -> list[ManifestRef]:
    """Write the small files by which readers of a format find their way.

    Args:
        engine: Writes them.
        storage: Where to.
        save_id: The save.
        rank: Who writes them.
        documents: Their bytes, by name; the last one is seen last.
        check: As for `Engine.write`.

    Returns:
        Their manifest, if there are any.

    Raises:
        WriteError: The storage refuses.
    """
    items = []
    for name, data in documents.items():
        items.append(Item(Frame(data, b"")))
        items[-1].entry = Entry(name, torch.uint8, (len(data),), (0,))
    written = engine.write(storage, save_id, rank, items, None, check, are_documents=True)
    if written is None:
        return []
    files, offsets = written.image.places()
    names = list(documents)
    table = ItemTable(names, [None] * len(names), files, offsets, written.image.sizes)
    manifest = Manifest(
        save_id=save_id,
        rank=rank,
        format="documents",
        plan=plan_digest(names, [None] * len(names)),
        files=written.files,
        checksums=written.checksums,
        items=table,
    )
    return [write_manifest(storage, manifest, of_documents=True)]


def cut_metadata(metadata: Metadata, results: Sequence[Sequence[WriteResult]], arrays: Arrays) -> None:
    """Have metadata say which chunks of tensors with a grid were written: torch has planned larger ones.

    Raises:
        CommitError: They do not fill a tensor.
    """
    corners: dict[str, set[tuple[int, ...]]] = {}
    for rank in results:
        for result in rank:
            if result.index.fqn in arrays:
                corners.setdefault(result.index.fqn, set()).add(tuple(result.index.offset or ()))
    for fqn, (_, shape, _, grid) in arrays.items():
        entry = metadata.state_dict_metadata[fqn]
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks = [
            ChunkStorageMetadata(
                torch.Size(corner),
                torch.Size(min(step, n - start) for start, n, step in zip(corner, shape, grid, strict=True)),
            )
            for corner in sorted(corners.get(fqn, ()))
        ]
        wrong = misfit(entry.size, [(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
        if wrong is not None:
            raise CommitError(f"not published: nobody wrote {fqn!r} completely: {wrong}")


def merge_results(
    metadata: Metadata, results: list[list[WriteResult]], *, whole: bool
) -> dict[MetadataIndex, _StorageInfo]:
    """Return where each item lies, after checking that every chunk of the metadata was written once.

    Raises:
        CommitError: One was not.
    """
    # Plain tuples: hashing and building a MetadataIndex costs several times as much.
    merged: dict[tuple[str, Any], WriteResult] = {}
    for rank, written in enumerate(results):
        for result in written:
            key = (result.index.fqn, result.index.offset)
            earlier = merged.setdefault(key, result)
            if earlier is not result:
                merged[key] = _fuller(metadata, earlier, result, rank)
    for fqn, entry in metadata.state_dict_metadata.items():
        missing = None
        if isinstance(entry, BytesStorageMetadata):
            missing = None if (fqn, None) in merged else "its bytes"
        else:
            for chunk in entry.chunks:
                if (fqn, chunk.offsets) not in merged:
                    missing = f"chunk {tuple(chunk.offsets)}"
            if whole and missing is None and len(entry.chunks) > 1:
                missing = misfit(entry.size, [(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
        if missing is not None:
            raise CommitError(f"not published: nobody wrote {fqn!r} completely: {missing}")
    return {result.index: result.storage_data for result in merged.values()}


def _fuller(metadata: Metadata, first: WriteResult, second: WriteResult, rank: int) -> WriteResult:
    # An empty shard may have the offsets of a real one: the real one is what a reader must find.
    entry = metadata.state_dict_metadata[first.index.fqn]
    if isinstance(entry, TensorStorageMetadata):
        counts = [
            entry.chunks[r.index.index].sizes.numel() if r.index.index is not None else r.size_in_bytes
            for r in (first, second)
        ]
        if 0 in counts:
            return first if counts[0] else second
    raise CommitError(
        f"not published: {first.index.fqn!r} was written by two ranks, the second is rank {rank}"
    )


def pickle_metadata(metadata: Metadata, dtypes: dict[str, torch.dtype]) -> bytes:
    """Return `metadata` pickled so that equal shapes, properties and chunks are one object each.

    Plain pickle spells them out for every tensor, and asks every object anew how it is to be reduced: three
    times the time and a third more bytes.

    Args:
        metadata: What torch's planner says of the whole; it is not changed.
        dtypes: Dtypes to state instead of the planner's.
    """
    shapes: dict[object, object] = {}
    properties: dict[object, object] = {}
    chunks: dict[object, object] = {}

    def reduce_index(index: MetadataIndex) -> tuple[Any, ...]:
        offset = shapes.setdefault(index.offset, index.offset)
        return _NEW, (MetadataIndex,), {"fqn": index.fqn, "index": index.index, "offset": offset}

    def reduce_tensor(entry: TensorStorageMetadata) -> tuple[Any, ...]:
        own = entry.properties
        state = {
            "properties": properties.setdefault(tuple(own.__dict__.values()), own),
            "size": shapes.setdefault(entry.size, entry.size),
            "chunks": [chunks.setdefault((chunk.offsets, chunk.sizes), chunk) for chunk in entry.chunks],
        }
        return _NEW, (TensorStorageMetadata,), state

    entries = {
        fqn: replace(entry, properties=replace(entry.properties, dtype=dtypes[fqn]))
        if fqn in dtypes and isinstance(entry, TensorStorageMetadata)
        else entry
        for fqn, entry in metadata.state_dict_metadata.items()
    }
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.dispatch_table = {
        **copyreg.dispatch_table,
        MetadataIndex: reduce_index,
        TensorStorageMetadata: reduce_tensor,
        _StorageInfo: _reduce_info,
    }
    pickler.dump(replace(metadata, state_dict_metadata=entries))
    return buffer.getvalue()


class _MetadataUnpickler(pickle.Unpickler):
    """Builds what a Metadata consists of, and nothing else."""

    def __init__(self, data: IO[bytes]) -> None:
        super().__init__(data)
        # By their ids: what a pickle could set attributes of, and what these are.
        self._given: dict[int, tuple[Any, dict[str, Any]]] = {}

    def restore(self) -> bool:
        """Undo what the pickle has set on classes, as its opcode BUILD can; returns whether it had."""
        has_changed = False
        for given, before in self._given.values():
            now = _attributes(given)
            for name in now.keys() | before.keys():
                one, other = now.get(name, _NOT_THERE), before.get(name, _NOT_THERE)
                # Those of a class written in C are made anew each time.
                if one is other or (name in _HIDDEN and one == other):
                    continue
                has_changed = True
                if name in before:
                    setattr(given, name, before[name])
                else:
                    delattr(given, name)
        return has_changed

    def find_class(self, module: str, name: str) -> Any:
        found = None
        if (module, name) in _FREE_GLOBALS:
            found = super().find_class(module, name)
        elif module == "torch":
            constant = getattr(torch, name, None)
            found = (
                constant if isinstance(constant, (torch.dtype, torch.layout, torch.memory_format)) else None
            )
        elif module == _METADATA_MODULE:
            kind = getattr(torch_metadata, name, None)
            is_own = isinstance(kind, type) and kind.__module__ == _METADATA_MODULE
            found = kind if is_own else None
        if found is None:
            raise _ForeignGlobal(f"{module}.{name}")
        if not isinstance(found, type):
            return _nameless(found) if callable(found) else found
        if issubclass(found, PurePath):
            return _nameless(found)
        members = list(found) if issubclass(found, enum.Enum) else []
        for one in (found, *members):
            self._given.setdefault(id(one), (one, _attributes(one)))
        return found


def _attributes(one: Any) -> dict[str, Any]:
    attributes = dict(vars(one)) if hasattr(one, "__dict__") else {}
    return attributes | {name: getattr(one, name) for name in _HIDDEN if isinstance(one, type)}


def _nameless(called: Callable[..., Any]) -> Callable[..., Any]:
    """Return what does the same, and may be changed without harm."""

    def call(*arguments: Any) -> Any:
        return called(*arguments)

    return call


class _ForeignGlobal(Exception):
    """A pickle wants something that is no part of a Metadata."""


def unpickle_metadata(data: bytes, where: str, *, weights_only: bool = True) -> Metadata:
    """Return the Metadata that `data` holds.

    Args:
        data: A pickle, and what may stand behind it.
        where: Its file, for messages.
        weights_only: Whether to refuse what is no part of a Metadata, instead of running it.

    Raises:
        CheckpointError: It names something else, and `weights_only` is set.
        IntegrityError: It cannot be read; `file` is filled.
    """
    unpickler = _MetadataUnpickler(io.BytesIO(data))
    try:
        if weights_only:
            try:
                metadata = unpickler.load()
            finally:
                if unpickler.restore():
                    raise IntegrityError(f"{where} tries to change classes of torch", file=where)
        else:
            metadata = pickle.loads(data)
    except IntegrityError:
        raise
    except _ForeignGlobal as error:
        raise CheckpointError(
            f"{where} names {error}, which is no part of torch's Metadata: unpickling it can run code; "
            f"ckpt_weights_only=False does so, for a checkpoint that you trust"
        ) from None
    except Exception as error:
        raise IntegrityError(
            f"{where} cannot be read: {type(error).__name__}: {error}", file=where
        ) from error
    if not isinstance(metadata, Metadata):
        raise IntegrityError(f"{where} holds {type(metadata).__name__}, not Metadata", file=where)
    return metadata


def _reduce_info(info: _StorageInfo) -> tuple[Any, ...]:
    # As its __getstate__ does: what is None is left out.
    state = {"relative_path": info.relative_path, "offset": info.offset, "length": info.length}
    return _NEW, (_StorageInfo,), state
