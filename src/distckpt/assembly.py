"""The metadata of a checkpoint, put together from the manifests of its ranks.

What the ranks of a `Checkpointer` have is learnt from storage: no rank waits for another to enter a save.

Invariants:
    * An entry of which a chunk is missing, or that two ranks describe differently, is never published.
    * What two ranks wrote alike is read from the first of them, and what one wrote whole from there.
    * What ranks have left to each other is checked before anything is published.
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
from distckpt.geometry import misfit, outermost
from distckpt.metadata import DCP_VERSION
from distckpt.ownership import Common, members_in, shares_from

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from torch.distributed.checkpoint.planner import WriteItem

    from distckpt.manifest import PartialManifest


class ReplicasDiffer(CommitError):
    """Ranks have not the same chunks, although their mesh says so."""


class StateChanged(CommitError):
    """Ranks have left to others what these no longer have."""


def entry_of(
    write_item: WriteItem, path: Sequence[Any] | None, *, plain_rows: int | None = None
) -> list[Any]:
    """Return what a coordinator needs to know of an item (see `ItemTable.entries`)."""
    data = write_item.tensor_data
    if data is None:
        return [None, None, None, None, path, plain_rows]
    return [
        list(data.size),
        list(data.chunk.sizes),
        str(data.properties.dtype).removeprefix("torch."),
        data.properties.requires_grad,
        path,
        plain_rows,
    ]


def assemble(
    manifests: Sequence[PartialManifest], checkpoint_id: str, save_id: str, common: Common | None = None
) -> Metadata:
    """Return the metadata of the checkpoint that `manifests`, one for each participant, describe.

    Args:
        manifests: In the order of the participants.
        checkpoint_id: For the metadata.
        save_id: For the metadata.
        common: What the ranks were told that they have in common.

    Raises:
        CommitError: They contradict each other, or do not cover what they describe.
        ReplicasDiffer: Ranks have not the chunks that their mesh says.
    """
    check_shares(manifests, common)
    check_files(manifests)
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    chunks: dict[str, dict[Any, tuple[ChunkStorageMetadata, _StorageInfo]]] = {}
    blobs: dict[str, _StorageInfo] = {}
    known: dict[str, tuple[Any, ...]] = {}
    paths: dict[str, list[Any]] = {}
    for manifest in manifests:
        rank = manifest.head["rank"]
        names = list(manifest.ref.files)
        table = json.loads(manifest.items)
        for fqn, offset, file, start, nbytes, (size, chunk_size, dtype, requires_grad, path, _) in zip(
            table["fqns"], table["chunks"], table["item_files"], table["offsets"], table["sizes"],
            table["entries"], strict=True,
        ):  # fmt: skip
            if path is not None:
                paths.setdefault(fqn, path)
            kind = (size, dtype)
            earlier = known.setdefault(fqn, kind)
            if earlier is kind:
                if size is None:
                    entries[fqn] = BytesStorageMetadata()
                    blobs[fqn] = _StorageInfo(names[file], start, nbytes)
                    continue
                properties = TensorProperties(dtype=getattr(torch, dtype), requires_grad=requires_grad)
                entries[fqn] = TensorStorageMetadata(properties, torch.Size(size), [])
                chunks[fqn] = {}
            elif earlier != kind:
                _contradict(fqn, rank)
            elif size is None:
                continue
            if 0 in chunk_size and 0 not in size:
                # An empty shard may have the offsets of a real one, which is what a reader must find.
                continue
            # The sizes, too: one rank may have written all of what others share.
            chunks[fqn].setdefault(
                (*offset, *chunk_size),
                (
                    ChunkStorageMetadata(torch.Size(offset), torch.Size(chunk_size)),
                    _StorageInfo(names[file], start, nbytes),
                ),
            )
    storage_data = {MetadataIndex(fqn): info for fqn, info in blobs.items()}
    for fqn, found in chunks.items():
        entry = entries[fqn]
        assert isinstance(entry, TensorStorageMetadata)
        written = list(found.values())
        boxes = [(chunk.offsets, chunk.sizes) for chunk, _ in written]
        wrong = misfit(entry.size, boxes)
        if wrong is not None:
            kept = outermost(boxes)
            written = [written[number] for number in kept]
            wrong = misfit(entry.size, [boxes[number] for number in kept])
            if wrong is not None:
                raise CommitError(f"not published: nobody wrote {fqn!r} completely: {wrong}")
        for number, (chunk, info) in enumerate(written):
            entry.chunks.append(chunk)
            storage_data[MetadataIndex(fqn, chunk.offsets, number)] = info
    planner_data = {fqn: tuple(path) for fqn, path in paths.items()}
    metadata = Metadata(entries, planner_data=planner_data, storage_data=storage_data)
    metadata.storage_meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id)
    metadata.version = DCP_VERSION
    return metadata


def check_files(manifests: Sequence[PartialManifest]) -> None:
    """Check that ranks which have written files of one name have written the same bytes.

    Raises:
        CommitError: They have not.
    """
    known: dict[str, tuple[int, str]] = {}
    for manifest in manifests:
        rank = manifest.head["rank"]
        for name, packed in zip(manifest.ref.files, manifest.head["checksums"], strict=True):
            other, found = known.setdefault(name, (rank, packed))
            if found != packed:
                raise CommitError(
                    f"not published: ranks {other} and {rank} have different values for {name}: an array of "
                    f"one name is one"
                )


def check_shares(manifests: Sequence[PartialManifest], common: Common | None) -> None:
    """Check that ranks which left items to each other have the same ones.

    Args:
        manifests: In the order of the participants.
        common: What the ranks were told that they have in common.

    Raises:
        StateChanged: They have not.
        ReplicasDiffer: So it is with chunks of which their mesh says that they have the same.
    """
    told = [shares_from(manifest.head["shares"]) for manifest in manifests]
    digests = tuple(shares.plain for shares in told)
    known_digest = common.digest if common is not None and digests == common.digests else None
    classes: dict[tuple[str, str], set[int]] = {}
    for place, shares in enumerate(told):
        is_known = shares.relies == known_digest
        if shares.relies and not is_known:
            known = digests if common is None else common.digests
            changed = next((at for at, digest in enumerate(digests) if digest != known[at]), place)
            who, rank = manifests[changed].head["rank"], manifests[place].head["rank"]
            raise StateChanged(
                f"not published: what rank {who} saves has changed, and rank {rank} had left to others what "
                f"they had; the next save is complete again",
                rank=who,
            )
        for one in shares.classes:
            classes.setdefault(one, set()).add(place)
    for (members, _), places in classes.items():
        missing = sorted(set(members_in(members)) - places)
        if missing:
            rank, other = (manifests[place].head["rank"] for place in (missing[0], min(places)))
            raise ReplicasDiffer(
                f"not published: rank {rank} has not the same chunks as rank {other}, although by their mesh "
                f"they are replicas; the next save is complete again",
                rank=rank,
            )


def _contradict(fqn: str, rank: int) -> NoReturn:
    raise CommitError(
        f"not published: {fqn!r} is another thing on rank {rank} than on the ranks before it", rank=rank
    )
