"""Where the chunks of global tensors lie. Pure: no tensors, no communication.

Chunks are DCP's `(offsets, sizes)` boxes, in elements. docs/geometry.md derives the formulae.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from distckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Box = tuple[Sequence[int], Sequence[int]]
    Run = tuple[int, int]


class Chunk(NamedTuple):
    """A box of a global tensor, and the box of the local tensor that holds it.

    Attributes:
        offsets: Of the box in the global tensor, in elements of each dimension.
        sizes: Of the box, in elements of each dimension.
        local_offsets: Of the box in the local tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]


class FlatChunk(NamedTuple):
    """A box of a global tensor, and where its elements lie, one after the other, in a flat slice.

    Attributes:
        offsets: Of the box in the global tensor, in elements of each dimension.
        sizes: Of the box, in elements of each dimension.
        start: Of its first element in the slice.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


class FlatTensor(NamedTuple):
    """What a rank holds of one global tensor, out of a flat buffer.

    Attributes:
        shape: Global shape, in elements.
        chunks: What the rank holds; none if its slice holds nothing of this tensor.
    """

    shape: tuple[int, ...]
    chunks: tuple[FlatChunk, ...]


@dataclass(frozen=True)
class TensorParallel:
    """How a parameter is split among tensor-parallel ranks, evenly, along one dimension.

    Args:
        rank: Of this process, from 0.
        size: Number of ranks.
        dim: Dimension that is split.

    Raises:
        ConfigError: There is no such rank, or the dimension is negative.
    """

    rank: int
    size: int
    dim: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"tensor-parallel rank {self.rank} is none of {self.size} ranks")
        if self.dim < 0:
            raise ConfigError(f"the dimension that is split is {self.dim}: count it from 0")


def shard_chunks(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[object]
) -> tuple[tuple[int, ...], list[Chunk]]:
    """Return what one coordinate of a device mesh holds of a DTensor, by torch's rules, in closed form.

    Dimensions are split from left to right along the mesh, each part as `torch.chunk` does: the last ones may
    be shorter or empty. A placement with a `split_factor` (`_StridedShard`) first cuts the dimension into so
    many parts and takes its share of each; what it holds then may be several boxes.

    Args:
        shape: Global shape.
        mesh: Shape of the mesh.
        coordinate: Of the rank in the mesh.
        placements: torch's, one for each dimension of the mesh: with a `dim` those that split, without the
            others.

    Returns:
        The shape of the local tensor, and the boxes in it; none if it is empty.

    Raises:
        ConfigError: The arguments do not fit each other.
    """
    if not len(mesh) == len(coordinate) == len(placements):
        raise ConfigError(
            f"a mesh of {len(mesh)} dimensions, {len(coordinate)} coordinates, {len(placements)} placements"
        )
    runs: list[list[Run]] = [[(0, n)] if n else [] for n in shape]
    for parts, at, placement in zip(mesh, coordinate, placements, strict=True):
        if not 0 <= at < parts:
            raise ConfigError(f"coordinate {tuple(coordinate)} lies outside a mesh of {tuple(mesh)}")
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        if not -len(shape) <= dim < len(shape):
            raise ConfigError(f"{placement} splits a dimension that a tensor of {tuple(shape)} does not have")
        runs[dim] = _share(runs[dim], parts, at, int(getattr(placement, "split_factor", 1)))
    local_shape = tuple(sum(length for _, length in each) for each in runs)
    chunks = []
    for boxes in itertools.product(*map(list, map(_with_position, runs))):
        offsets, sizes, local_offsets = ([box[field] for box in boxes] for field in range(3))
        chunks.append(Chunk(tuple(offsets), tuple(sizes), tuple(local_offsets)))
    return local_shape, chunks


def replica_of(
    mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[object]
) -> tuple[int, int]:
    """Return which of how many replicas of its chunks a coordinate of a mesh holds.

    Args:
        mesh: Shape of the mesh.
        coordinate: Of the rank in the mesh.
        placements: As `shard_chunks` takes them.

    Returns:
        The number of the replica, from 0, counted in the order of the mesh, and how many there are.
    """
    index, count = 0, 1
    for parts, at, placement in zip(mesh, coordinate, placements, strict=True):
        if getattr(placement, "dim", None) is None:
            index, count = index * parts + at, count * parts
    return index, count


def flat_chunks(
    shape: Sequence[int], start: int, stop: int, *, tensor_parallel: TensorParallel | None
) -> FlatTensor:
    """Return what elements [start, stop) of a flattened parameter are of the global tensor.

    So distributed optimizers shard flat buffers across data-parallel ranks: a slice may begin and end within
    a row. At most three boxes for a matrix, two more for each further dimension.

    Args:
        shape: Of the parameter on this tensor-parallel rank.
        start: First element of the slice, in the flattened parameter.
        stop: Element after the last.
        tensor_parallel: How `shape` is part of the global one; None if it is all of it. There is no default:
            a checkpoint would be wrong without an error.

    Raises:
        ConfigError: The arguments do not fit each other.
    """
    return fused_chunks(shape, None, start, stop, tensor_parallel=tensor_parallel)[0]


def fused_chunks(
    shape: Sequence[int],
    sections: Sequence[int] | None,
    start: int,
    stop: int,
    *,
    tensor_parallel: TensorParallel | None,
) -> list[FlatTensor]:
    """Return what a slice of a flattened fused projection is of each of the tensors that are fused in it.

    For example SwiGLU's first projection (two sections), or a gated delta net's (six, and three in its
    convolution). The sections lie one after the other along dimension 0 of the parameter of each
    tensor-parallel rank; each is a global tensor of its own.

    Args:
        shape: Of the parameter on this tensor-parallel rank.
        sections: Rows of each section on this rank; None for one with all.
        start: First element of the slice, in the flattened parameter.
        stop: Element after the last.
        tensor_parallel: As `flat_chunks`.

    Raises:
        ConfigError: The arguments do not fit each other.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ConfigError(
            f"[{start}, {stop}) is no slice of the {math.prod(shape)} elements of {tuple(shape)}"
        )
    if tensor_parallel is not None and tensor_parallel.dim >= len(shape):
        raise ConfigError(f"a tensor of {tuple(shape)} cannot be split along dimension {tensor_parallel.dim}")
    if sections is None:
        return [_flat_tensor(tuple(shape), 0, start, stop, tensor_parallel)]
    if not shape or sum(sections) != shape[0] or min(sections, default=0) < 0:
        raise ConfigError(f"sections of {tuple(sections)} rows do not make up a tensor of {tuple(shape)}")
    row = math.prod(shape[1:])
    begins = itertools.accumulate(sections, initial=0)
    return [
        _flat_tensor((rows, *shape[1:]), first * row, start, stop, tensor_parallel)
        for first, rows in zip(begins, sections, strict=False)
    ]


def _share(runs: list[Run], parts: int, at: int, factor: int) -> list[Run]:
    """Return part `at` of each of `factor` parts of the elements in `runs`, in the order they are held in."""
    found: list[Run] = []
    total = sum(length for _, length in runs)
    for outer in range(factor):
        low, high = _nth(total, factor, outer)
        first, last = _nth(high - low, parts, at)
        found += _between(runs, low + first, low + last)
    return found


def _nth(total: int, parts: int, at: int) -> Run:
    """Return the first element of part `at` of `torch.chunk`, and the one after its last."""
    size = -(-total // parts)
    return min(total, size * at), min(total, size * (at + 1))


def _between(runs: list[Run], low: int, high: int) -> Iterator[Run]:
    """Yield what lies between two positions of the elements in `runs`."""
    position = 0
    for start, length in runs:
        first, last = max(low, position), min(high, position + length)
        if first < last:
            yield start + first - position, last - first
        position += length


def _with_position(runs: list[Run]) -> Iterator[tuple[int, int, int]]:
    """Yield start, length and position in the local tensor of each run, neighbours as one."""
    begin = position = length = 0
    for start, more in runs:
        if length and start == begin + length:
            length += more
            continue
        if length:
            yield begin, length, position
        position += length
        begin, length = start, more
    if length:
        yield begin, length, position


def _flat_tensor(
    local: tuple[int, ...], first: int, start: int, stop: int, tensor_parallel: TensorParallel | None
) -> FlatTensor:
    """Return what [start, stop) holds of a tensor whose elements begin at `first`."""
    begin, end = max(start, first), min(stop, first + math.prod(local))
    shape, shift = list(local), [0] * len(local)
    if tensor_parallel is not None:
        dim = tensor_parallel.dim
        shape[dim] *= tensor_parallel.size
        shift[dim] = tensor_parallel.rank * local[dim]
    chunks = []
    position = begin - start
    if begin < end:
        for offsets, sizes in _boxes(local, begin - first, end - first):
            moved = tuple(offset + by for offset, by in zip(offsets, shift, strict=True))
            chunks.append(FlatChunk(moved, sizes, position))
            position += math.prod(sizes)
    return FlatTensor(tuple(shape), tuple(chunks))


def _boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield boxes that hold the elements [start, stop) of a flattened tensor, in their order, none empty."""
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        # Within one row.
        for offsets, sizes in _boxes(shape[1:], start - last * row, stop - last * row):
            yield (last, *offsets), (1, *sizes)
        return
    if start < first * row:
        for offsets, sizes in _boxes(shape[1:], start - (first - 1) * row, row):
            yield (first - 1, *offsets), (1, *sizes)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < stop:
        for offsets, sizes in _boxes(shape[1:], 0, stop - last * row):
            yield (last, *offsets), (1, *sizes)


def misfit(size: Sequence[int], chunks: Sequence[Box]) -> str | None:
    """Say why `chunks` do not fill a tensor of `size` once and nothing else, or return None.

    Args:
        size: Global shape, in elements.
        chunks: Offsets and sizes of each chunk, in elements.
    """
    outside = _outside(size, chunks)
    if outside is not None:
        return outside
    volume = sum(math.prod(sizes) for _, sizes in chunks)
    if volume != math.prod(size):
        return f"chunks hold {volume} of the {math.prod(size)} elements of {tuple(size)}"
    # As many elements as there are: there is a gap if and only if two chunks overlap.
    return _overlapping(chunks)


def stray(size: Sequence[int], chunks: Sequence[Box]) -> str | None:
    """Say why `chunks` cannot lie beside each other in a tensor of `size`, or return None.

    There may be gaps between them.

    Args:
        size: Global shape, in elements.
        chunks: Offsets and sizes of each chunk, in elements.
    """
    return _outside(size, chunks) or _overlapping(chunks)


def _outside(size: Sequence[int], chunks: Sequence[Box]) -> str | None:
    for offsets, sizes in chunks:
        if not all(o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(offsets, sizes, size, strict=True)):
            return f"chunk at {tuple(offsets)} of {tuple(sizes)} lies outside {tuple(size)}"
    return None


def _overlapping(chunks: Sequence[Box]) -> str | None:
    pair = _overlap([chunk for chunk in chunks if math.prod(chunk[1])])
    if pair is None:
        return None
    first, second = (f"{tuple(offsets)} of {tuple(sizes)}" for offsets, sizes in pair)
    return f"the chunks at {first} and at {second} overlap"


def outermost(chunks: Sequence[Box]) -> list[int]:
    """Return which of `chunks` do not lie within another one, in their order; of equal ones the first.

    Args:
        chunks: Offsets and sizes of each chunk, in elements.
    """
    kept: list[int] = []
    for number in sorted(range(len(chunks)), key=lambda number: -math.prod(chunks[number][1])):
        offsets, sizes = chunks[number]
        if not any(
            all(
                other_o <= o and o + s <= other_o + other_s
                for o, s, other_o, other_s in zip(offsets, sizes, *chunks[other], strict=True)
            )
            for other in kept
        ):
            kept.append(number)
    return sorted(kept)


def _overlap(chunks: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two chunks that share an element, if there are any; none is empty.

    Chunks are met in the order in which they begin along one axis, and each is compared with those that have
    not ended by then: in a tensor that is cut along one axis with none, in a grid with a row.
    """
    if len(chunks) < 2:
        return None
    axes = range(len(chunks[0][0]))
    axis = max(axes, key=lambda axis: len({offsets[axis] for offsets, _ in chunks}))
    active: list[Box] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk[0][axis]):
        offsets, sizes = chunk
        start = offsets[axis]
        active = [other for other in active if other[0][axis] + other[1][axis] > start]
        for other in active:
            if all(
                o < other_o + other_s and other_o < o + s
                for o, s, other_o, other_s in zip(offsets, sizes, *other, strict=True)
            ):
                return other, chunk
        active.append(chunk)
    return None
