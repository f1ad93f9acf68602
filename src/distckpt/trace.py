"""The timeline of saves: who did what when, on every rank and lane, as a file for a trace viewer.

    with Trace(rank) as trace:
        checkpointer.save(step, state).result()
    trace.write("save.json")

https://ui.perfetto.dev and chrome://tracing open such files. For one picture of several ranks, bring their
spans to one of them, in whatever way the job has (they are plain JSON values), and write them together:

    gathered = [None] * world_size
    torch.distributed.all_gather_object(gathered, (trace.spans, trace.epoch_s))
    if rank == 0:
        spans, epochs_s = zip(*gathered)
        write_trace("save.json", dict(enumerate(spans)), dict(enumerate(epochs_s)))

Invariants:
    * Slices of one row of the picture nest or follow each other, as the format demands: what overlaps
      otherwise goes to a row of its own.

Threads: any thread may use a trace; events come from the threads that save.

Torch-free.

Source: Trace Event Format, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distckpt import observe

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

__all__ = ["Trace", "write_trace"]

Span = dict[str, Any]
_ON_DEVICE = "state.copied"
"""What no thread does."""


class Trace:
    """Collects spans of all saves of this process that are under way between entering and leaving.

    Lanes tell of their parts only in saves that begin to write meanwhile, and once all of them have ended:
    leave it after the save is committed. Of a save that fails there is what came before. Torch's PROCESS mode
    saves in another process, of which nothing is seen here.

    Args:
        rank: Of this process, for the picture.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.epoch_s = time.time() - time.monotonic()
        """What to add to the times of spans for seconds since 1970, which ranks of several hosts share."""
        self._taken: list[tuple[observe.Event, str]] = []
        self._ends: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        """Begin to collect; returns the trace."""
        self._ends.append(observe.subscribe(self._take))
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Stop to collect; what was collected stays."""
        self._ends.pop()()

    @property
    def spans(self) -> list[Span]:
        """What was collected, in the order in which it became known.

        Plain JSON values: `name`, `lane` (None: the rank itself), `start_s` and `end_s` by
        `time.monotonic()`, which is one clock for all processes of a host, `thread` (only without a lane),
        and what else the event says: docs/operations.md lists the names.
        """
        return [_span(event, thread) for event, thread in list(self._taken)]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the spans of this rank; see `write_trace`.

        Args:
            path: A local file, which is replaced.
        """
        write_trace(path, {self.rank: self.spans})

    def _take(self, event: observe.Event) -> None:
        if "start_s" in event.fields:
            self._taken.append((event, threading.current_thread().name))


def write_trace(
    path: str | os.PathLike[str],
    spans_by_rank: Mapping[int, Sequence[Mapping[str, Any]]],
    epochs_s: Mapping[int, float] | None = None,
) -> None:
    """Write a file in the Trace Event Format: a process for each rank, with a row for each thread and lane.

    Args:
        path: A local file, which is replaced.
        spans_by_rank: `Trace.spans` of each rank.
        epochs_s: `Trace.epoch_s` of each rank; needed only if they run on several hosts, and then the
            picture is as true as their clocks.
    """
    epochs_s = epochs_s or {}
    starts_s = [
        span.get("asked_s", span["start_s"]) + epochs_s.get(rank, 0.0)
        for rank, spans in spans_by_rank.items()
        for span in spans
    ]
    origin_s = min(starts_s, default=0.0)
    events = [
        event
        for rank, spans in sorted(spans_by_rank.items())
        for event in _events_of_rank(rank, spans, epochs_s.get(rank, 0.0), origin_s)
    ]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _span(event: observe.Event, thread: str) -> Span:
    lane = event.fields.get("lane")
    fields = {
        "name": event.name,
        "lane": lane,
        **({"thread": thread} if lane is None else {}),
        **event.fields,
    }
    plain: Span = json.loads(json.dumps(fields, default=str))
    return plain


def _events_of_rank(
    rank: int, spans: Iterable[Mapping[str, Any]], epoch_s: float, origin_s: float
) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
    tid = 0
    for name, slices in _rows(spans):
        for row in _nested(slices):
            yield {"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": name}}
            yield {
                "ph": "M",
                "pid": rank,
                "tid": tid,
                "name": "thread_sort_index",
                "args": {"sort_index": tid},
            }
            for span in row:
                # Whole nanoseconds: what touches must not overlap by a rounding error.
                start_ns, end_ns = (
                    round((span[key] + epoch_s - origin_s) * 1e9) for key in ("start_s", "end_s")
                )
                yield {
                    "ph": "X",
                    "pid": rank,
                    "tid": tid,
                    "name": span["name"],
                    "cat": name,
                    "ts": start_ns / 1000,
                    "dur": (end_ns - start_ns) / 1000,
                    "args": {
                        key: value for key, value in span.items() if key not in ("name", "start_s", "end_s")
                    },
                }
            tid += 1


def _rows(spans: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Return the slices of each row by its name: threads in the order of their first span, then lanes."""
    threads: dict[str, list[Mapping[str, Any]]] = {}
    lanes: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for span in sorted(spans, key=lambda span: span["start_s"]):
        lane = span["lane"]
        if lane is None:
            name = "copies off devices" if span["name"] == _ON_DEVICE else span["thread"]
            threads.setdefault(name, []).append(span)
            continue
        lanes.setdefault((lane, f"lane {lane}"), []).append(span)
        if span.get("asked_s", 0.0) < span.get("ready_s", 0.0):
            waited = {**span, "name": "part.awaited", "start_s": span["asked_s"], "end_s": span["ready_s"]}
            lanes.setdefault((lane, f"lane {lane} waits"), []).append(waited)
    return [*threads.items(), *((name, lanes[lane, name]) for lane, name in sorted(lanes))]


def _nested(spans: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Spread spans over as few rows as need be for those of each to nest or to follow each other."""
    rows: list[list[Mapping[str, Any]]] = []
    # Of each row, the ends of those that are open where the next one starts.
    ends: list[list[float]] = []
    for span in sorted(spans, key=lambda span: (span["start_s"], -span["end_s"])):
        for row, open_ends in zip(rows, ends, strict=True):
            while open_ends and open_ends[-1] <= span["start_s"]:
                open_ends.pop()
            if not open_ends or span["end_s"] <= open_ends[-1]:
                row.append(span)
                open_ends.append(span["end_s"])
                break
        else:
            rows.append([span])
            ends.append([span["end_s"]])
    return rows
