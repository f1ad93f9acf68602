"""The metadata of a checkpoint, put together from the manifests of its ranks.

What the ranks of a `Checkpointer` have is learnt from storage: no rank waits for another to enter a save.

Invariants:
    * An entry of which a chunk is missing, or that two ranks describe differently, is never published.
    * What two ranks wrote alike is read from the first of them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from distckpt.errors import CommitError
from distckpt.geometry import misfit
from distckpt.metadata import DCP_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from torch.distributed.checkpoint.planner import WriteItem

    from distckpt.manifest import PartialManifest


def entry_of(write_item: WriteItem, path: Sequence[Any] | None) -> list[Any]:
    """Return what a coordinator needs to know of an item (see `ItemTable.entries`)."""
    data = write_item.tensor_data
    if data is None:
        return [None, None, None, None, path]
    return [
        list(data.size),
        list(data.chunk.sizes),
        str(data.properties.dtype).removeprefix("torch."),
        data.properties.requires_grad,
        path,
    ]


def assemble(manifests: Sequence[PartialManifest], checkpoint_id: str, save_id: str) -> Metadata:
    """Return the metadata of the checkpoint that `manifests`, one for each rank, describe.

    Args:
        manifests: By rank.
        checkpoint_id: For the metadata.
        save_id: For the metadata.

    Raises:
        CommitError: They contradict each other, or do not cover what they describe.
    """
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    chunks: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    storage_data: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    coordinator_plan = manifests[0].head["plan"]
    for rank, manifest in enumerate(manifests):
        if manifest.head.get("relies") not in ("", coordinator_plan):
            raise CommitError(
                f"not published: what rank 0 saves has changed, and rank {rank} had left to it what both "
                f"have; the next save is complete again",
                rank=rank,
            )
        names = list(manifest.ref.files)
        table = json.loads(manifest.items)
        for fqn, offset, file, start, nbytes, entry in zip(
            table["fqns"], table["chunks"], table["item_files"], table["offsets"], table["sizes"],
            table["entries"], strict=True,
        ):  # fmt: skip
            size, chunk_size, dtype, requires_grad, path = entry
            if path is not None:
                paths.setdefault(fqn, tuple(path))
            info = _StorageInfo(names[file], start, nbytes)
            known = entries.get(fqn)
            if size is None:
                if known is None:
                    entries[fqn] = BytesStorageMetadata()
                    storage_data[MetadataIndex(fqn)] = info
                elif not isinstance(known, BytesStorageMetadata):
                    _contradict(fqn, rank)
                continue
            if known is None:
                properties = TensorProperties(dtype=getattr(torch, dtype), requires_grad=requires_grad)
                known = entries[fqn] = TensorStorageMetadata(properties, torch.Size(size), [])
            if (
                not isinstance(known, TensorStorageMetadata)
                or list(known.size) != size
                or known.properties.dtype != getattr(torch, dtype)
            ):
                _contradict(fqn, rank)
            if 0 in chunk_size and 0 not in size:
                # An empty shard may have the offsets of a real one, which is what a reader must find.
                continue
            key = (fqn, tuple(offset))
            if key in chunks:
                if chunks[key] != tuple(chunk_size):
                    _contradict(fqn, rank)
                continue
            chunks[key] = tuple(chunk_size)
            index = MetadataIndex(fqn, torch.Size(offset), len(known.chunks))
            known.chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(chunk_size)))
            storage_data[index] = info
    for fqn, known in entries.items():
        if isinstance(known, TensorStorageMetadata):
            wrong = misfit(known.size, [(chunk.offsets, chunk.sizes) for chunk in known.chunks])
            if wrong is not None:
                raise CommitError(f"not published: nobody wrote {fqn!r} completely: {wrong}")
    metadata = Metadata(entries, planner_data=paths, storage_data=storage_data)
    metadata.storage_meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id)
    metadata.version = DCP_VERSION
    return metadata


def _contradict(fqn: str, rank: int) -> NoReturn:
    raise CommitError(
        f"not published: {fqn!r} is another thing on rank {rank} than on the ranks before it", rank=rank
    )
