"""What a rank writes as items of the engine: resolved, framed, and cut where the format has a grid.

    what a rank writes  ->  the grid of each tensor, the same on all ranks  ->  one item for each chunk

A rank works the grid out by itself, without asking another: of a DTensor its mesh and placements say where
all boxes lie, of a plain tensor there is one box; of anything else only this rank's boxes are known, and that
the grids agree is seen when the checkpoint is published.

Invariants:
    * A chunk has elements of one item only, and an item is cut into whole chunks, but for the end of a
      dimension.
"""

from __future__ import annotations

import io
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from distckpt.errors import CheckpointError, StagingError
from distckpt.formats import Entry, Frame
from distckpt.geometry import shard_chunks
from distckpt.ownership import Piece
from distckpt.sharded import Sharded
from distckpt.staging import Item, StagingFailure, is_raw

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.checkpoint.planner import SavePlanner

    from distckpt.engine import Engine
    from distckpt.formats import Arrays, Format

    Box = tuple[tuple[int, ...], tuple[int, ...]]


def cut(pieces: Sequence[Piece], value_of: Callable[[str], Any], file_format: Format) -> list[Piece]:
    """Cut what a rank writes as the format wants it.

    Args:
        pieces: What it writes; none is some rows of an item, if the format has a grid.
        value_of: Returns the value of an entry by its fqn.
        file_format: The format.

    Returns:
        The pieces, in the same order; the same ones if the format has no grid, or does not hold them.

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
        if not _has_elements(value):
            found.append(piece)
            continue
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


def _has_elements(value: Any) -> bool:
    """Say whether what this rank holds of an entry is plain memory; all else is put aside in one piece."""
    if isinstance(value, Sharded):
        return all(map(is_raw, value.tensors))
    if isinstance(value, ShardedTensor):
        return all(is_raw(shard.tensor) for shard in value.local_shards())
    if isinstance(value, DTensor):
        with torch.no_grad():
            value = value.to_local()
    value = _arrived(value)
    return not isinstance(value, torch.Tensor) or is_raw(value)


def _arrived(value: Any) -> Any:
    """Return the plain tensor that a functional collective has promised; anything else as it is."""
    return value.wait() if isinstance(value, AsyncCollectiveTensor) else value


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


def resolve_items(
    engine: Engine, planner: SavePlanner, pieces: Sequence[Piece], rank: int
) -> tuple[list[Item], dict[str, torch.dtype]]:
    """Return the items of what this rank writes, and the dtypes of those whose plan says another.

    Raises:
        StagingError: The state could not be staged, or a tensor has not the shape that the plan says.
    """
    items: list[Item] = []
    dtypes: dict[str, torch.dtype] = {}
    for piece in pieces:
        write_item = piece.item
        data: Any = _arrived(planner.resolve_data(write_item if piece.part is None else piece.whole))
        if isinstance(data, StagingFailure):
            raise data.error
        fqn = write_item.index.fqn
        if write_item.type is WriteItemType.BYTE_IO:
            engine.check_aside(fqn, "a Python object")
            items.append(Item(Frame(bytes(data.getbuffer()), b"")))
            continue
        if piece.part is not None:
            data = data.detach()[piece.part]
        planned = write_item.tensor_data
        if planned is not None:
            if data.shape != planned.chunk.sizes:
                raise StagingError(
                    f"{write_item.index.fqn!r} has shape {tuple(data.shape)} where the plan says "
                    f"{tuple(planned.chunk.sizes)} (rank {rank})",
                    rank=rank,
                )
            if data.dtype != planned.properties.dtype:
                dtypes[write_item.index.fqn] = data.dtype
        try:
            items.append(_item(engine, piece, data, path_of(planner, fqn)))
        except StagingError as error:
            raise StagingError(f"{fqn!r}: {error} (rank {rank})", rank=rank) from error
    return items, dtypes


def path_of(planner: SavePlanner, fqn: str) -> tuple[str | int, ...]:
    """Return the keys that lead to an entry in the state that `planner` has flattened."""
    path = getattr(planner, "mappings", {}).get(fqn)
    return (fqn,) if path is None else tuple(path)


def _item(engine: Engine, piece: Piece, data: torch.Tensor, path: tuple[str | int, ...]) -> Item:
    fqn, planned = piece.item.index.fqn, piece.item.tensor_data
    if engine.format.has_grid and data.numel() == 0:
        # There is no chunk without elements.
        return _saved(data)
    if not (is_raw(data) and engine.format.holds(data.dtype)):
        if piece.grid is not None:
            # Readers of the format would take the chunk, which is not there, for zeros.
            raise StagingError(
                f"the planner has made a {type(data).__name__} of {data.dtype} of it, which no array holds"
            )
        engine.check_aside(fqn, f"a tensor of {data.dtype}, {data.layout}")
        return _saved(data)
    engine.format.check_name(fqn)
    item = engine.item(data)
    offsets = (0,) * data.dim() if planned is None else tuple(planned.chunk.offsets)
    size = data.shape if planned is None else planned.size
    item.entry = Entry(fqn, data.dtype, tuple(data.shape), offsets, path, tuple(size), piece.grid)
    if engine.format.has_grid:
        # Wherever it lies already: what stands around a chunk was not known then.
        framed = Item(engine.format.frame_chunk(item.entry), item.tensor, item.nbytes, item.verbatim)
        framed.entry = item.entry
        return framed
    return item


def _saved(data: torch.Tensor) -> Item:
    """Return what is no plain memory as torch.save writes it.

    Raises:
        StagingError: It cannot: a tensor has no values, or is of a kind that cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        torch.save(data.detach().cpu(), buffer)
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise StagingError(
            f"torch.save cannot save a {type(data).__name__} of {data.dtype}, {data.layout}: "
            f"{type(error).__name__}: {text}"
        ) from error
    return Item(Frame(bytes(buffer.getbuffer()), b""))


def arrays_of(pieces: Sequence[Piece], planner: SavePlanner) -> Arrays:
    """Return what the tensors with a grid are, as `Format.documents` wants it."""
    arrays: Arrays = {}
    for piece in pieces:
        fqn, data = piece.item.index.fqn, piece.item.tensor_data
        if piece.grid is not None and data is not None and fqn not in arrays:
            dtype = str(data.properties.dtype).removeprefix("torch.")
            arrays[fqn] = [list(path_of(planner, fqn)), list(data.size), dtype, list(piece.grid)]
    return arrays


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
