"""Which item goes into which bucket, and which rank writes what of replicas. Pure: sizes in, indices out.

Invariants:
    * Every item is in exactly one bucket.
    * Within a bucket items keep the order of the plan, so that small ones staged side by side stay so.
    * Every row of a replicated item is written by exactly one of the ranks that have it.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Part = tuple[int, int, int]

_RUN_BYTES = 4 << 20
"""Small neighbours travel together up to this size: one write, and one stretch of memory."""
WHOLE_BYTES = 1 << 20
"""Replicated items below this are not split."""
_CELL_BYTES = WHOLE_BYTES // 2
"""Parts of larger ones have about this at the least, at their ends half of it."""


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


def share(items: Sequence[tuple[int, int]], members: int) -> list[list[Part]]:
    """Divide items, which several ranks have, among these ranks: about equal bytes, and few cuts.

    The items are laid end to end, and the line of bytes is cut into equal segments. A cut through an item
    that can be split is moved to a row, and away from other cuts and the item's ends; any other item goes
    whole to the member in whose segment its middle lies. So there are at most `members - 1` more parts than
    items, and a member's bytes differ from the mean by no more than the largest of one row, `WHOLE_BYTES` and
    one item that cannot be split.

    Args:
        items: For each item its bytes, and its rows if it can be split: the size of dimension 0; else 0 or 1.
            In an order that all members agree upon.
        members: Number of ranks that have them, at least 1.

    Returns:
        For each member what it writes, in the order of the items: (item, first row, row after the last).
    """
    parts: list[list[Part]] = [[] for _ in range(members)]
    total = sum(nbytes for nbytes, _ in items)
    position = 0
    for number, (nbytes, rows) in enumerate(items):
        for member, first, stop in _parts(position, nbytes, rows, total, members):
            parts[member].append((number, first, stop))
        position += nbytes
    return parts


def share_of(items: Sequence[tuple[int, int]], members: int, member: int) -> list[Part]:
    """Return what `share` gives to one member, without working out the others.

    Args:
        items: As `share`.
        members: As `share`.
        member: Which, from 0.
    """
    parts: list[Part] = []
    total = sum(nbytes for nbytes, _ in items)
    low, high = member * total, (member + 1) * total
    end = 0
    for number, (nbytes, rows) in enumerate(items):
        position, end = end, end + nbytes
        # An item goes only to members whose segments it lies in or touches.
        if end * members < low or position * members > high:
            continue
        for owner, first, stop in _parts(position, nbytes, rows, total, members):
            if owner == member:
                parts.append((number, first, stop))
    return parts


def _parts(position: int, nbytes: int, rows: int, total: int, members: int) -> Iterator[Part]:
    """Yield (member, first row, row after the last) of an item that begins at byte `position` of `total`."""
    end = position + nbytes
    if nbytes < WHOLE_BYTES or rows < 2:
        # Nothing has its middle behind the last segment but items of no bytes at the end.
        yield min((position + end) * members // (2 * total), members - 1) if total else 0, 0, rows
        return
    # Any row will do, unless cuts would be too close to each other.
    cells = rows if total >= members * _CELL_BYTES else min(rows, -(-nbytes // _CELL_BYTES))
    member, first = position * members // total, 0
    for cut in range(member + 1, min(end * members // total, members - 1) + 1):
        # Rounded twice: to the nearest border of a cell, and that to the nearest row.
        cell = (2 * (cut * total - position * members) * cells + nbytes * members) // (2 * nbytes * members)
        row = (2 * cell * rows + cells) // (2 * cells)
        if 2 * min(row, rows - row) * nbytes < _CELL_BYTES * rows:
            row = 0 if 2 * row < rows else rows
        if row > first:
            yield member, first, row
        member, first = cut, row
    if rows > first:
        yield member, first, rows
