"""Which item goes into which bucket. Pure: sizes in, indices out.

Invariants:
    * Every item is in exactly one bucket.
    * Within a bucket items keep the order of the plan, so that small ones staged side by side stay so.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_RUN_BYTES = 4 << 20
"""Small neighbours travel together up to this size: one write, and one stretch of memory."""


def pack(sizes: Sequence[int], num_buckets: int) -> list[list[int]]:
    """Spread items over buckets so that the buckets' bytes are about equal.

    The largest run goes first, always into the emptiest bucket: no bucket exceeds the mean by more than one
    run (Graham, Bounds on Multiprocessing Timing Anomalies, 1969: at most 4/3 of the best).

    Args:
        sizes: Bytes of each item as it will stand in the file, framing included.
        num_buckets: Number of buckets, at least 1.

    Returns:
        For each bucket that has items, their indices in ascending order.
    """
    runs: list[tuple[int, int, int]] = []
    start, run_bytes = 0, 0
    for index, size in enumerate(sizes):
        if index > start and run_bytes + size > _RUN_BYTES:
            runs.append((run_bytes, start, index))
            start, run_bytes = index, 0
        run_bytes += size
    if sizes:
        runs.append((run_bytes, start, len(sizes)))
    if num_buckets == 1:
        return [list(range(len(sizes)))] if sizes else []
    emptiest = [(0, bucket) for bucket in range(num_buckets)]
    buckets: list[list[tuple[int, int]]] = [[] for _ in range(num_buckets)]
    for run_bytes, first, end in sorted(runs, key=lambda run: (-run[0], run[1])):
        filled, bucket = heapq.heappop(emptiest)
        buckets[bucket].append((first, end))
        heapq.heappush(emptiest, (filled + run_bytes, bucket))
    return [
        [i for first, end in sorted(runs_of) for i in range(first, end)] for runs_of in buckets if runs_of
    ]
