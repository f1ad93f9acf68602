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
    """Say why `chunks` do not lie inside a tensor of `size` and fill it, or return None.

    Overlaps are not looked for: chunks that overlap and still add up to the volume leave a gap that a
    quadratic check would find, and that torch's own planner has refused.

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
    return None
