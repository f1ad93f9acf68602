"""Where chunks lie, against what torch makes of real tensors, and whether they fill their tensor."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from distckpt.errors import ConfigError
from distckpt.geometry import (
    FlatTensor,
    TensorParallel,
    flat_chunks,
    fused_chunks,
    misfit,
    replica_of,
    shard_chunks,
    stray,
)

Box = tuple[Sequence[int], Sequence[int]]


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[int], list[Box]]:
    """Draw a shape and the boxes of a grid over it."""
    cuts = [
        draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        for _ in range(draw(st.integers(1, 3)))
    ]  # fmt: skip
    boxes: list[tuple[list[int], list[int]]] = [([], [])]
    for steps in cuts:
        starts = [sum(steps[:at]) for at in range(len(steps))]
        boxes = [
            ([*offsets, start], [*sizes, step])
            for offsets, sizes in boxes
            for start, step in zip(starts, steps, strict=True)
        ]
    return [sum(steps) for steps in cuts], list(boxes)


@given(grids())
def test_a_grid_fits(grid: tuple[list[int], list[Box]]) -> None:
    shape, boxes = grid
    assert misfit(shape, boxes) is None


@given(grids(), st.data())
def test_a_grid_without_a_chunk_or_with_one_that_is_shifted_does_not_fit(
    grid: tuple[list[int], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = grid
    at = data.draw(st.integers(0, len(boxes) - 1))
    assert "elements" in str(misfit(shape, boxes[:at] + boxes[at + 1 :]))
    offsets, sizes = boxes[at]
    shifted = ([shape[0] - sizes[0] + 1, *offsets[1:]], sizes)
    shifted_boxes = [*boxes[:at], shifted, *boxes[at + 1 :]]
    assert "outside" in str(misfit(shape, shifted_boxes))
    assert "outside" in str(stray(shape, shifted_boxes))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_boxes_fit_if_and_only_if_every_element_is_in_one(shape: list[int], data: st.DataObject) -> None:
    box = st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)) for n in shape)).map(
        lambda ends: (tuple(map(min, ends)), tuple(abs(a - b) for a, b in ends))
    )
    boxes = data.draw(st.lists(box, max_size=6))
    counts = Counter(
        element
        for offsets, sizes in boxes
        for element in itertools.product(*(range(o, o + s) for o, s in zip(offsets, sizes, strict=True)))
    )
    is_filled = all(counts[element] == 1 for element in itertools.product(*map(range, shape)))
    assert (misfit(shape, boxes) is None) == is_filled
    assert (stray(shape, boxes) is None) == (max(counts.values(), default=0) < 2)


@given(grids(), st.data())
def test_chunks_that_overlap_and_leave_a_gap_of_the_same_size_do_not_fit(
    grid: tuple[list[int], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = grid
    pairs = [(a, b) for a, b in itertools.permutations(range(len(boxes)), 2) if boxes[a][1] == boxes[b][1]]
    if pairs:
        lost, twice = data.draw(st.sampled_from(pairs))
        boxes[lost] = boxes[twice]
        assert "overlap" in str(misfit(shape, boxes))


def test_many_chunks_take_no_time() -> None:
    rows = [((n, 0), (1, 8)) for n in range(100_000)]
    assert misfit((100_000, 8), rows) is None
    grid = [((32 * row, 32 * column), (32, 32)) for row in range(64) for column in range(64)]
    assert misfit((2048, 2048), grid) is None
    assert "overlap" in str(misfit((2048, 2048), [*grid[1:], grid[-1]]))


@pytest.mark.parametrize(
    ("size", "chunks", "fits"),
    [
        ((), [((), ())], True),
        ((), [], False),
        ((0,), [], True),
        ((0,), [((0,), (0,))], True),
        ((4, 0), [((0, 0), (4, 0)), ((4, 0), (0, 0))], True),
        ((4,), [((0,), (4,)), ((4,), (0,))], True),
        ((4,), [((-1,), (4,))], False),
        ((4,), [((0,), (-4,))], False),
        ((4,), [((0,), (4,)), ((0,), (4,))], False),
    ],
)
def test_edges(size: tuple[int, ...], chunks: list[Box], fits: bool) -> None:
    assert (misfit(size, chunks) is None) == fits


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[int], list[int], list[Placement]]:
    """Draw a shape, a mesh of 1 to 3 dimensions and at most 64 ranks, and placements of any kind."""
    shape = draw(st.lists(st.integers(0, 13), min_size=1, max_size=3))
    mesh: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        mesh.append(draw(st.integers(1, min(8, 64 // math.prod(mesh)))))
    dims = st.integers(0, len(shape) - 1)
    placement = st.one_of(
        st.just(Replicate()),
        st.builds(Shard, dims),
        st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(1, 5)),
    )
    return shape, mesh, [draw(placement) for _ in mesh]


def split_by_torch(
    tensor: torch.Tensor, mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> torch.Tensor:
    """Return the local tensor, cut by torch's own placements from left to right."""
    for parts, at, placement in zip(mesh, coordinate, placements, strict=True):
        if not isinstance(placement, Replicate):
            shards, _ = placement._split_tensor(tensor, parts, with_padding=False, contiguous=False)  # type: ignore[attr-defined]
            tensor = shards[at]
    return tensor


def box_of(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    return tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]


@settings(max_examples=2000)
@given(meshes())
def test_chunks_of_a_mesh_are_what_torch_cuts(drawn: tuple[list[int], list[int], list[Placement]]) -> None:
    shape, mesh, placements = drawn
    whole = torch.arange(math.prod(shape)).view(shape)
    held: dict[int, list[Box]] = {}
    count = 0
    for coordinate in itertools.product(*map(range, mesh)):
        local_shape, chunks = shard_chunks(shape, mesh, coordinate, placements)
        local = split_by_torch(whole, mesh, coordinate, placements)
        assert local_shape == tuple(local.shape)
        for offsets, sizes, local_offsets in chunks:
            assert torch.equal(box_of(whole, offsets, sizes), box_of(local, local_offsets, sizes))
        assert sum(math.prod(sizes) for _, sizes, _ in chunks) == local.numel()
        replica, count = replica_of(mesh, coordinate, placements)
        assert replica < count
        held.setdefault(replica, []).extend((offsets, sizes) for offsets, sizes, _ in chunks)
    assert len(held) == count
    assert all(misfit(shape, boxes) is None for boxes in held.values())


def test_fsdp_of_a_tensor_parallel_parameter_is_one_chunk() -> None:
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    found = [shard_chunks([8, 3], [2, 2], at, placements)[1] for at in itertools.product(range(2), range(2))]
    assert [[(chunk.offsets, chunk.sizes) for chunk in chunks] for chunks in found] == [
        [((row, 0), (2, 3))] for row in (0, 4, 2, 6)
    ]


def hold(tensors: dict[int, torch.Tensor], number: int, flat: FlatTensor, values: torch.Tensor) -> None:
    """Put what a slice holds of a tensor where its chunks say, each element once."""
    whole = tensors.setdefault(number, torch.full(flat.shape, -1))
    for offsets, sizes, start in flat.chunks:
        assert math.prod(sizes)
        place = box_of(whole, offsets, sizes)
        assert bool((place == -1).all())
        place.copy_(values[start : start + math.prod(sizes)].view(sizes))


@settings(max_examples=500)
@given(st.data())
def test_slices_of_fused_parameters_make_up_the_whole(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([1, 2, 4]))
    rest = data.draw(st.lists(st.integers(1, 5), max_size=3))
    dim = data.draw(st.integers(0, len(rest)))
    rows = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    # Global tensors; each rank holds its part of each, one after the other.
    shapes = [[count * ranks if dim == 0 else count, *rest] for count in rows]
    if dim:
        for shape in shapes:
            shape[dim] *= ranks
    wholes = [torch.arange(math.prod(shape)).view(shape) for shape in shapes]
    found: dict[int, torch.Tensor] = {}
    for rank in range(ranks):
        parts = [whole.tensor_split(ranks, dim)[rank] for whole in wholes]
        parameter = torch.cat(parts)
        flat = parameter.reshape(-1)
        cuts = sorted(data.draw(st.lists(st.integers(0, flat.numel()), max_size=5)))
        for start, stop in itertools.pairwise([0, *cuts, flat.numel()]):
            held = fused_chunks(
                parameter.shape, rows, start, stop, tensor_parallel=TensorParallel(rank, ranks, dim)
            )
            for number, tensor in enumerate(held):
                assert tensor.shape == tuple(shapes[number])
                assert len(tensor.chunks) <= 2 * len(rest) + 1
                hold(found, number, tensor, flat[start:stop])
    assert all(torch.equal(found[number], whole) for number, whole in enumerate(wholes))


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_slices_of_a_parameter_make_up_the_whole(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, whole.numel()), max_size=5)))
    found: dict[int, torch.Tensor] = {}
    for start, stop in itertools.pairwise([0, *cuts, whole.numel()]):
        hold(found, 0, flat_chunks(shape, start, stop, tensor_parallel=None), whole.reshape(-1)[start:stop])
    assert torch.equal(found[0], whole)


def test_a_slice_that_cuts_two_rows() -> None:
    found = flat_chunks([6, 4], 3, 18, tensor_parallel=TensorParallel(1, 2, 0))
    assert found.shape == (12, 4)
    assert [tuple(chunk) for chunk in found.chunks] == [
        ((6, 3), (1, 1), 0), ((7, 0), (3, 4), 1), ((10, 0), (1, 2), 13),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: TensorParallel(2, 2, 0), "rank 2 is none of 2"),
        (lambda: TensorParallel(0, 2, -1), "count it from 0"),
        (lambda: flat_chunks([4, 3], 0, 13, tensor_parallel=None), r"\[0, 13\) is no slice of the 12"),
        (lambda: flat_chunks([4, 3], 5, 4, tensor_parallel=None), "no slice"),
        (lambda: flat_chunks([4], 0, 4, tensor_parallel=TensorParallel(0, 2, 1)), "along dimension 1"),
        (lambda: fused_chunks([4, 3], [2, 3], 0, 1, tensor_parallel=None), r"\(2, 3\) rows do not make up"),
        (lambda: shard_chunks([4], [2], [2], [Shard(0)]), "outside a mesh"),
        (lambda: shard_chunks([4], [2], [0, 0], [Shard(0)]), "1 dimensions, 2 coordinates, 1 placements"),
        (lambda: shard_chunks([4], [2], [0], [Shard(1)]), "does not have"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        call()


def test_how_a_parameter_is_split_must_be_said() -> None:
    with pytest.raises(TypeError, match="tensor_parallel"):
        flat_chunks([4, 3], 0, 12)  # type: ignore[call-arg]
