"""Where the chunks of global tensors lie. Pure: no tensors, no communication.

Chunks are DCP's `(offsets, sizes)` boxes, in elements.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    Box = tuple[Sequence[int], Sequence[int]]


def misfit(size: Sequence[int], chunks: Sequence[Box]) -> str | None:
    """Say why `chunks` do not fill a tensor of `size` once and nothing else, or return None.

    Args:
        size: Global shape, in elements.
        chunks: Offsets and sizes of each chunk, in elements.
    """
    volume = 0
    for offsets, sizes in chunks:
        inside = all(o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(offsets, sizes, size, strict=True))
        if not inside:
            return f"chunk at {tuple(offsets)} of {tuple(sizes)} lies outside {tuple(size)}"
        volume += math.prod(sizes)
    if volume != math.prod(size):
        return f"chunks hold {volume} of the {math.prod(size)} elements of {tuple(size)}"
    # As many elements as there are: there is a gap if and only if two chunks overlap.
    pair = _overlap([chunk for chunk in chunks if math.prod(chunk[1])])
    if pair is None:
        return None
    first, second = (f"{tuple(offsets)} of {tuple(sizes)}" for offsets, sizes in pair)
    return f"the chunks at {first} and at {second} overlap"


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
