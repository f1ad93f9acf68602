"""Whether chunks fill their tensor."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distckpt.geometry import misfit

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
    assert "outside" in str(misfit(shape, [*boxes[:at], shifted, *boxes[at + 1 :]]))


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
