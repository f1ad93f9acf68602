"""Items cut along the chunks of a grid, for formats whose files are the chunks of arrays.

    what a rank writes  ->  the grid of each tensor, the same on all ranks  ->  one item for each chunk

A rank works the grid out by itself, without asking another: of a DTensor its mesh and placements say where
all boxes lie, of a plain tensor there is one box; of anything else only this rank's boxes are known, and that
the grids agree is seen when the checkpoint is published.

Invariants:
    * A chunk has elements of one item only, and an item is cut into whole chunks, but for the end of a
      dimension.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from distckpt.errors import CheckpointError, StagingError
from distckpt.geometry import shard_chunks
from distckpt.ownership import Piece
from distckpt.sharded import Sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distckpt.formats import Format

    Box = tuple[tuple[int, ...], tuple[int, ...]]


def cut(pieces: Sequence[Piece], value_of: Callable[[str], Any], file_format: Format) -> list[Piece]:
    """Cut what a rank writes as the format wants it.

    Args:
        pieces: What it writes; none is some rows of an item, if the format has a grid.
        value_of: Returns the value of an entry by its fqn.
        file_format: The format.

    Returns:
        The pieces, in the same order; the same ones if the format has no grid.

    Raises:
        StagingError: There is no grid for one of them.
    """
    if not file_format.has_grid:
        return list(pieces)
    grids: dict[Any, tuple[int, ...]] = {}
    found: list[Piece] = []
    for piece in pieces:
        item, data = piece.item, piece.item.tensor_data
        if data is None or not file_format.holds(data.properties.dtype):
            found.append(piece)
            continue
        value = value_of(item.index.fqn)
        shape, own = tuple(data.size), (tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        key: Any = (shape, data.properties.dtype, own)
        if isinstance(value, DTensor):
            key = (shape, data.properties.dtype, id(value.device_mesh), value.placements)
        elif isinstance(value, (Sharded, ShardedTensor)):
            key = item.index.fqn
        if key not in grids:
            try:
                grids[key] = file_format.grid(shape, boxes_of(value, own), data.properties.dtype.itemsize)
            except CheckpointError as error:
                raise StagingError(f"{item.index.fqn!r}: {error}") from error
        found += _cut_piece(piece, grids[key])
    return found


def boxes_of(value: Any, own: Box) -> list[Box]:
    """Return offsets and sizes of all boxes of a tensor that this rank knows of."""
    if isinstance(value, DTensor):
        mesh = tuple(value.device_mesh.shape)
        return [
            (chunk.offsets, chunk.sizes)
            for coordinate in itertools.product(*map(range, mesh))
            for chunk in shard_chunks(tuple(value.shape), mesh, coordinate, value.placements)[1]
        ]
    if isinstance(value, Sharded):
        return [(tuple(offsets), tuple(sizes)) for offsets, sizes in value.boxes]
    if isinstance(value, ShardedTensor):
        shards = value.metadata().shards_metadata
        return [(tuple(shard.shard_offsets), tuple(shard.shard_sizes)) for shard in shards]
    return [own]


def _cut_piece(piece: Piece, grid: tuple[int, ...]) -> list[Piece]:
    item, data = piece.item, piece.item.tensor_data
    assert data is not None
    offsets, sizes = data.chunk.offsets, data.chunk.sizes
    if 0 in sizes:
        return [piece._replace(grid=grid)]
    ranges = [
        range(offset, offset + size, step) for offset, size, step in zip(offsets, sizes, grid, strict=True)
    ]
    found = []
    for corner in itertools.product(*ranges):
        lengths = tuple(
            min(step, offset + size - start)
            for start, offset, size, step in zip(corner, offsets, sizes, grid, strict=True)
        )
        part = tuple(
            slice(start - offset, start - offset + length)
            for start, offset, length in zip(corner, offsets, lengths, strict=True)
        )
        chunk = ChunkStorageMetadata(torch.Size(corner), torch.Size(lengths))
        own = WriteItem(
            MetadataIndex(item.index.fqn, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=replace(data, chunk=chunk),
        )
        found.append(piece._replace(item=own, part=part, grid=grid))
    return found
